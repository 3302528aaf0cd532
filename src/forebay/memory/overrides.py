"""Overrides the forward of a module by callables that can be removed.

Input: a module. Output: the same module, whose instance has ``module.forward``, a bound method that looks up at each call what is
installed, and ``module._forebay``, which holds it: callables, the last one outermost, and settings by name. Both are live state
and never copied: a deep copy or a pickle of the module runs the forward from before Forebay on its own weights, and needs no
Forebay to be loaded. Callables come off in any order and under wrappers: another library's forward on top stays. A region's
forward is wrapped at its `CallSite`.
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

STATE = "_forebay"
_BEFORE = "_forebay_before"  # the forward that an instance had before ours, if it had one; copied with the module

ForwardFn = Callable[..., Any]
"""Called in place of a module's forward: ``fn(module, *args, **kwargs)``."""


class _Entry:
    """One callable around a forward, and the entry below it. `run` is None once it is removed."""

    __slots__ = ("below", "run", "traceable")

    def __init__(self, below: "_Entry | None", traceable: bool):
        self.run: ForwardFn | None = None
        self.below = below
        self.traceable = traceable


class Installed:
    """Everything that Forebay has installed on one module. Copies and pickles of it are None."""

    def __init__(self) -> None:
        self.top: _Entry | None = None
        self.settings: dict[str, Any] = {}
        self.warned = False  # that it runs uncompiled
        self.replaced = False  # our forward is on the instance, maybe under a wrapper

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the pickle has no name of Forebay's


# Bound to the module: ``copy.deepcopy`` binds it to the copy, pickle writes it as ``getattr(module, "forward")``, and wrappers
# that take ``forward.__func__`` (Accelerate) hand in their own module.
def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Not from __dict__: torch.compile guards attributes, and not whether a name is in there.
    installed = getattr(self, STATE, None)
    return _run(self, None if installed is None else installed.top, args, kwargs)


def _run(module: Any, entry: _Entry | None, args: Any, kwargs: Any) -> Any:
    while entry is not None:
        if (run := entry.run) is not None:  # once: another thread may remove it
            if not entry.traceable and torch.compiler.is_compiling():
                return _run_eagerly(run, module, args, kwargs)
            return run(module, *args, **kwargs)
        entry = entry.below
    before = module.__dict__.get(_BEFORE)
    if before is not None:
        return before(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


@torch.compiler.disable(
    reason="what Forebay manages runs uncompiled inside torch.compile; use forebay.manage(compile=True)"
)
def _run_eagerly(run: ForwardFn, module: nn.Module, args: Any, kwargs: Any) -> Any:
    installed = module.__dict__[STATE]
    if not installed.warned:
        installed.warned = True
        warnings.warn(
            f"{type(module).__name__} is managed by Forebay and runs uncompiled inside torch.compile: remove torch.compile, "
            "and let forebay.manage(compile=True) compile the layers",
            stacklevel=2,
        )
    return run(module, *args, **kwargs)


class InnerForward:
    """The forward that an installed callable is around."""

    def __init__(self, module: nn.Module, entry: _Entry):
        self._module, self._entry = module, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self._module, self._entry.below, args, kwargs)


def install(
    module: nn.Module, make: Callable[[InnerForward], ForwardFn], traceable: bool = False
) -> Callable[[], None]:
    """Put ``make(inner)`` around the forward of `module`, outermost of Forebay's own callables.

    Args:
        make: takes the forward that it goes around, returns a callable of (module, *args, **kwargs).
        traceable: torch.compile may trace that callable. Otherwise it runs uncompiled there, with a warning.

    Returns:
        A function that removes it. A second call does nothing.
    """
    installed = hold_place(module)
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


def hold_place(module: nn.Module) -> Installed:
    """Put Forebay's forward on the instance, where it only calls the forward from before.

    What wraps the forward from then on (Accelerate's autocast) also wraps what `install` puts there later. A forward without a
    wrapper comes off with the last callable.
    """
    installed = _installed(module)
    forward = module.__dict__.get("forward")
    # Trap: a wrapper around ours may hide it (a lambda has no `__wrapped__`). Ours on top of it once more would call itself.
    if not (_reaches_ours(forward) or (installed.replaced and _is_foreign(module))):
        _replace_forward(module)
    installed.replaced = True
    return installed


def is_managed(module: nn.Module) -> bool:
    """Whether a callable of Forebay's is around the forward of `module` now."""
    installed = module.__dict__.get(STATE)
    entry = None if installed is None else installed.top
    while entry is not None and entry.run is None:  # another thread removes it now
        entry = entry.below
    return entry is not None


def is_patched(module: nn.Module) -> bool:
    """Whether another library's ``forward`` is on the instance, which Forebay's would go around.

    What an earlier management left on a copy, in a pickle or under a wrapper does not count.
    """
    installed = module.__dict__.get(STATE)
    if _reaches_ours(module.__dict__.get("forward")) or (installed is not None and installed.replaced):
        return module.__dict__.get(_BEFORE) is not None
    return _is_foreign(module)


def _is_foreign(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    if forward is None or _is_ours(forward):
        return False
    # A pickled override comes back as the class's own forward, bound to the module.
    return getattr(forward, "__func__", None) is not type(module).forward or forward.__self__ is not module


def is_outermost(module: nn.Module) -> bool:
    """Whether the instance's forward is Forebay's, without a wrapper on top."""
    return _is_ours(module.__dict__.get("forward"))


def installed_on(module: nn.Module) -> list[tuple[Any, str, Any]]:
    """What `install` and `put_setting` have made of the forward of `module`, and any other forward that is on the instance.

    Returns:
        (owner, attribute, value). The owner is an object, or the `vars` of the module; None for an attribute that these do not
        have. Put back, they run the same forward.
    """
    attributes = module.__dict__
    found: list[tuple[Any, str, Any]] = [(attributes, "forward", attributes.get("forward"))]
    installed = attributes.get(STATE)
    if installed is not None:
        found += [(attributes, STATE, installed), (attributes, _BEFORE, attributes.get(_BEFORE))]
        found += [(installed, "top", installed.top), (installed, "settings", installed.settings.copy())]
        entry = installed.top
        while entry is not None:
            found.append((entry, "run", entry.run))
            entry = entry.below
    return found


def setting(module: nn.Module, name: str, default: Any = None) -> Any:
    """A setting of `put_setting`, or the module's attribute of that name, or `default`."""
    installed = getattr(module, STATE, None)
    if installed is not None and name in installed.settings:
        return installed.settings[name]
    return getattr(module, name, default)


def put_setting(module: nn.Module, name: str, value: Any) -> None:
    """Give `module` a setting that no copy or pickle of it has."""
    _installed(module).settings[name] = value


def drop_setting(module: nn.Module, name: str) -> None:
    """Undo `put_setting`, if it was called."""
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
    # One function for each module, of one code object: compiled callers share a graph between layers.
    ours = FunctionType(_forward.__code__, _forward.__globals__, "forward")
    update_wrapper(ours, current)
    ours.__name__ = "forward"  # the name that a pickled bound method is looked up by
    # Trap: with `__wrapped__`, Accelerate would take ours off together with its own wrapper; and a module that the earlier
    # forward holds would stay alive.
    del ours.__wrapped__  # type: ignore[attr-defined]
    with suppress(TypeError, ValueError):  # a callable of C code has no signature
        ours.__signature__ = inspect.signature(current)  # type: ignore[attr-defined]
    if before is not None and not hasattr(before, "__func__") and hasattr(ours, "__signature__"):
        # The method below drops a first parameter, which a plain callable does not have.
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        rest = list(ours.__signature__.parameters.values())
        ours.__signature__ = inspect.Signature([own, *rest])
    module.__dict__["forward"] = MethodType(ours, module)


def _clean(module: nn.Module, installed: Installed) -> None:
    """Remove all of Forebay once nothing is installed. A forward of ours that a wrapper on top still calls stays, inactive."""
    if installed.top is not None:
        return
    forward = module.__dict__.get("forward")
    if installed.replaced and (forward is None or _is_ours(forward)):
        installed.replaced = False
        before = module.__dict__.pop(_BEFORE, None)
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before
    if not installed.settings and not installed.replaced:
        module.__dict__.pop(STATE, None)


def _is_ours(forward: Any) -> bool:
    # By the code object: `functools.wraps` copies names and attributes to wrappers.
    return getattr(getattr(forward, "__func__", None), "__code__", None) is _forward.__code__


def _reaches_ours(forward: Any) -> bool:
    """Whether `forward` calls ours, as far as ``__wrapped__`` shows."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if getattr(function, "__code__", None) is _forward.__code__:
            return True
        forward = getattr(function, "__wrapped__", None)
    return False


class LightRecompute(Protocol):
    """A region's own recomputation of one of the tensors that it saves, cheaper than that of the region."""

    def __call__(self, on: bool) -> None:
        """Recompute, or save."""

    def may_make(self, saved: torch.Tensor) -> bool:
        """Whether a saved tensor has the form of the one that is made again. The largest of those is."""


class CallSite(Protocol):
    """Where a model's forward calls a region, and where that call can be wrapped.

    `ModuleCallSite` is that of a whole module, `forebay.models.blocks.SublayerCallSite` that of a sublayer.
    """

    module: nn.Module
    """The module whose weights the region uses."""
    light_recompute: LightRecompute | None
    """None if the region has none."""
    dispatches: bool
    """Whether the region may send tokens to other ranks."""
    front: Callable[..., Any] | None
    """What an engine calls before the experts of a MoE sublayer; None if the region is one call."""
    back: Callable[..., Any] | None
    """What it calls after them, if anything."""
    calls: int
    """How often the region was called."""

    def called_modules(self) -> Sequence[nn.Module]:
        """The modules that the region calls now: `module`, or parts of it."""

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrapper(current)`` in the place of the current callable."""

    def restore(self) -> None:
        """Undo `wrap`. A second call does nothing."""


class ModuleCallSite:
    """The call site of a whole module: its ``forward``. Module hooks stay outside the region."""

    def __init__(self, module: nn.Module, light_recompute: LightRecompute | None = None):
        self.module = module
        self.light_recompute = light_recompute
        self.dispatches = True  # what a whole module does is not known
        self.front: Callable[..., Any] | None = None
        self.back: Callable[..., Any] | None = None
        self.calls = 0
        self._remove: list[Callable[[], None]] = []

    def called_modules(self) -> Sequence[nn.Module]:
        return (self.module,)

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        def make(inner: InnerForward) -> ForwardFn:
            current = wrapper(inner)

            def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return current(*args, **kwargs)

            return run

        self._remove.append(install(self.module, make))

    def restore(self) -> None:
        while self._remove:
            self._remove.pop()()
