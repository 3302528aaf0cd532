"""What a region is made of: its place in the forward pass, its live tickets, and its recomputation.

`Slot` is the place of a region in the forward pass: it owns the replaced attribute and restores it. `Ledger` counts
live bytes and tickets by region and microbatch through weak references, and owns nothing. `recomputed` runs a
region's forward again in backward under `torch.utils.checkpoint`.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize

# What Forebay puts on a module: callables around its forward, and settings. Both are live state and never copied.
#
# In: a module. Out: the same module, whose instance has
#
#     module.forward      a bound method, which looks up what is installed at each call
#     module._forebay     what is installed: callables, the last one outermost, and settings by name
#
# A deep copy or a pickle of the module has ``_forebay = None``: it runs what was there before Forebay, on its own weights, and
# needs no Forebay to be loaded. The bound method is what makes that so: ``copy.deepcopy`` binds it to the copy, pickle writes
# it as ``getattr(module, "forward")``, and wrappers that take ``forward.__func__`` (Accelerate) hand their own module on.
#
# Removing works in any order, and under wrappers: where someone put a forward of theirs on top, it stays, and reaches what was
# there before Forebay.
#
# A `Slot` is a place in a model's forward where a region sits: a whole module here, the halves of a decoder layer in
# `forebay.models.blocks`.

STATE = "_forebay"
_BEFORE = "_forebay_before"  # the forward that an instance had before ours, if it had one; copied with the module

ForwardFn = Callable[..., Any]
"""Called in the place of a module's forward: ``run(module, *args, **kwargs)``."""


class _Entry:
    """One callable around a forward, and the one that it is around. `run` is None once it is removed."""

    __slots__ = ("below", "run", "traceable")

    def __init__(self, below: "_Entry | None", traceable: bool):
        self.run: ForwardFn | None = None
        self.below = below
        self.traceable = traceable


class Installed:
    """What Forebay has on one module. Copies and pickles of it are None."""

    def __init__(self) -> None:
        self.top: _Entry | None = None
        self.settings: dict[str, Any] = {}
        self.told = False  # that it runs uncompiled
        self.put = False  # our forward is on the instance, maybe under someone's wrapper

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # no name of Forebay's is in the pickle


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Not asked of __dict__: torch.compile guards attributes, and not whether a name is in there.
    installed = getattr(self, STATE, None)
    return _run(self, None if installed is None else installed.top, args, kwargs)


def _run(module: Any, entry: _Entry | None, args: Any, kwargs: Any) -> Any:
    while entry is not None:
        if entry.run is not None:
            if not entry.traceable and torch.compiler.is_compiling():
                return _eagerly(entry.run, module, args, kwargs)
            return entry.run(module, *args, **kwargs)
        entry = entry.below
    before = module.__dict__.get(_BEFORE)
    if before is not None:
        return before(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


@torch.compiler.disable(
    reason="what Forebay manages runs uncompiled inside torch.compile; use forebay.manage(compile=True)"
)
def _eagerly(run: ForwardFn, module: nn.Module, args: Any, kwargs: Any) -> Any:
    installed = module.__dict__[STATE]
    if not installed.told:
        installed.told = True
        warnings.warn(
            f"{type(module).__name__} is managed by Forebay and runs uncompiled inside torch.compile: leave that away, and "
            "let forebay.manage(compile=True) compile the layers",
            stacklevel=2,
        )
    return run(module, *args, **kwargs)


class InnerForward:
    """What an installed callable is around: the forward that would run without it."""

    def __init__(self, module: nn.Module, entry: _Entry):
        self._module, self._entry = module, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self._module, self._entry.below, args, kwargs)


def install(
    module: nn.Module, make: Callable[[InnerForward], ForwardFn], traceable: bool = False
) -> Callable[[], None]:
    """Put ``make(below)`` around the forward of `module`, outermost of Forebay's own.

    Args:
        make: given what it goes around, returns a callable of (module, *args, **kwargs).
        traceable: whether torch.compile may look into that callable. Else it runs uncompiled there, with a warning.

    Returns:
        Takes it off again. A second call does nothing.
    """
    installed = _installed(module)
    forward = module.__dict__.get("forward")
    # A wrapper around ours may hide it (a lambda has no `__wrapped__`): ours on top of it once more would call itself.
    if not (_reaches_ours(forward) or (installed.put and _is_foreign(module))):
        _replace_forward(module)
    installed.put = True
    entry = _Entry(installed.top, traceable)
    entry.run = make(InnerForward(module, entry))
    installed.top = entry

    def remove() -> None:
        entry.run = None
        if module.__dict__.get(STATE) is installed:
            while installed.top is not None and installed.top.run is None:
                installed.top = installed.top.below
            _clean(module, installed)

    return remove


def is_managed(module: nn.Module) -> bool:
    """Whether a callable of Forebay's is around the forward of `module` now."""
    installed = module.__dict__.get(STATE)
    return installed is not None and installed.top is not None


def is_patched(module: nn.Module) -> bool:
    """Whether somebody else's ``forward`` is on the instance, where Forebay's would go around it and not below it.

    What an earlier management left on a copy, in a pickle or under a wrapper does not count.
    """
    installed = module.__dict__.get(STATE)
    if _reaches_ours(module.__dict__.get("forward")) or (installed is not None and installed.put):
        return module.__dict__.get(_BEFORE) is not None
    return _is_foreign(module)


def _is_foreign(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    if forward is None or _is_ours(forward):
        return False
    # A pickled override comes back as the class's own forward, bound to the module.
    return getattr(forward, "__func__", None) is not type(module).forward or forward.__self__ is not module


def is_outermost(module: nn.Module) -> bool:
    """Whether Forebay's forward is the instance's, with none of somebody else's on top."""
    return _is_ours(module.__dict__.get("forward"))


def setting(module: nn.Module, name: str, default: Any = None) -> Any:
    """A setting of `put_setting`, or else the module's attribute of that name, or else `default`."""
    installed = getattr(module, STATE, None)
    if installed is not None and name in installed.settings:
        return installed.settings[name]
    return getattr(module, name, default)


def put_setting(module: nn.Module, name: str, value: Any) -> None:
    """Tell `module` something that belongs to this object alone: no copy or pickle has it."""
    _installed(module).settings[name] = value


def drop_setting(module: nn.Module, name: str) -> None:
    """Undo `put_setting`; nothing happens if there is none."""
    installed = module.__dict__.get(STATE)
    if installed is not None:
        installed.settings.pop(name, None)
        _clean(module, installed)


def _installed(module: nn.Module) -> Installed:
    installed = module.__dict__.get(STATE)
    if installed is None:
        installed = module.__dict__[STATE] = Installed()
    return installed


def _replace_forward(module: nn.Module) -> None:
    before = module.__dict__.get("forward")
    if before is not None:
        module.__dict__[_BEFORE] = before
    current = getattr(before, "__func__", before) if before is not None else type(module).forward
    # A function of its own for each module, of one code object: compiled callers share a graph between layers.
    ours = FunctionType(_forward.__code__, _forward.__globals__, "forward")
    update_wrapper(ours, current)
    ours.__name__ = "forward"  # what a pickled bound method is looked up by
    # Not to be unwrapped: Accelerate goes down `__wrapped__` to take its own wrapper off, and would take ours off too. And it
    # would keep a module alive that an earlier forward holds.
    del ours.__wrapped__  # type: ignore[attr-defined]
    with suppress(TypeError, ValueError):  # a callable of C code has none
        ours.__signature__ = inspect.signature(current)  # type: ignore[attr-defined]
    if before is not None and not hasattr(before, "__func__") and hasattr(ours, "__signature__"):
        # Bound below, so that a first parameter is taken away.
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        rest = list(ours.__signature__.parameters.values())
        ours.__signature__ = inspect.Signature([own, *rest])
    module.__dict__["forward"] = MethodType(ours, module)


def _clean(module: nn.Module, installed: Installed) -> None:
    """Leave nothing behind once nothing is installed; but what a wrapper on top still calls stays, inactive."""
    if installed.top is not None:
        return
    forward = module.__dict__.get("forward")
    if installed.put and (forward is None or _is_ours(forward)):
        installed.put = False
        before = module.__dict__.pop(_BEFORE, None)
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before
    if not installed.settings and not installed.put:
        module.__dict__.pop(STATE, None)


def _is_ours(forward: Any) -> bool:
    # By the code object: `functools.wraps` copies names and attributes to wrappers.
    return getattr(getattr(forward, "__func__", None), "__code__", None) is _forward.__code__


def _reaches_ours(forward: Any) -> bool:
    """Whether calling `forward` comes to ours, as far as ``__wrapped__`` tells."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if getattr(function, "__code__", None) is _forward.__code__:
            return True
        forward = getattr(function, "__wrapped__", None)
    return False


class Slot(Protocol):
    """A place in a model's forward where a region sits."""

    module: torch.nn.Module
    """The module whose weights the region uses."""
    light_recompute: Callable[[bool], None] | None
    """Switches the region's own, cheaper recomputation of its largest saved tensor; None if it has none."""
    calls: int
    """How often the region was called."""

    def called_modules(self) -> Sequence[nn.Module]:
        """The modules that the region calls, as they are now: those of `module`, or some of them."""

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrapper(current)`` in the place of the current callable."""

    def restore(self) -> None:
        """Put everything back as it was before `wrap`. A second call does nothing."""


class ModuleSlot:
    """The slot of a whole module: its ``forward``. Module hooks stay outside the region."""

    def __init__(self, module: torch.nn.Module, light_recompute: Callable[[bool], None] | None = None):
        self.module = module
        self.light_recompute = light_recompute
        self.calls = 0
        self._remove: list[Callable[[], None]] = []

    def called_modules(self) -> Sequence[nn.Module]:
        """See `Slot.called_modules`."""
        return (self.module,)

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        def make(below: InnerForward) -> ForwardFn:
            current = wrapper(_SameParameters(self.module, below))

            def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return current(*args, **kwargs)

            return run

        self._remove.append(install(self.module, make))

    def restore(self) -> None:
        while self._remove:
            self._remove.pop()()


class _SameParameters:
    """A module's forward, which raises where a recomputation would run with other parameters than the forward it repeats.

    PEFT's ``target_parameters`` parametrise a module for the time of its forward only: run again in backward, the module
    would use its parameters without the adapters.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward
        self._parametrized = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = parametrize.is_parametrized(self._module)
        if torch._C._current_graph_task_id() == -1:
            self._parametrized = now
        elif self._parametrized and not now:
            raise RuntimeError(
                f"{type(self._module).__name__} is to be recomputed, but its parameters are parametrised for the time of its "
                "forward only (PEFT's target_parameters): place 'recompute' on the module around it, such as the decoder "
                "layer's mlp, or call forebay.manage after get_peft_model"
            )
        return self._forward(*args, **kwargs)
