"""Overrides the forward of a module by callables that can be removed, and runs forwards again in backward.

Input: a module. Output: the same module, whose instance has ``module.forward``, a bound method that looks up at each call what is
installed, and ``module._forebay``, which holds it: callables, the last one outermost, and settings by name. Both are live state
and never copied: a deep copy or a pickle of the module runs the forward from before Forebay on its own weights, and needs no
Forebay to be loaded. Callables come off in any order and under wrappers: another library's forward on top stays. A region's
forward is wrapped at its `CallSite`; `recomputed` puts it under ``torch.utils.checkpoint``.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
        if entry.run is not None:
            if not entry.traceable and torch.compiler.is_compiling():
                return _run_eagerly(entry.run, module, args, kwargs)
            return entry.run(module, *args, **kwargs)
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
    return installed is not None and installed.top is not None


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


class CallSite(Protocol):
    """Where a model's forward calls a region, and where that call can be wrapped.

    `ModuleCallSite` is that of a whole module, `forebay.models.blocks.SublayerCallSite` that of a sublayer.
    """

    module: nn.Module
    """The module whose weights the region uses."""
    light_recompute: Callable[[bool], None] | None
    """Switches the region's own, cheaper recomputation of its largest saved tensor; None if it has none."""
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

    def __init__(self, module: nn.Module, light_recompute: Callable[[bool], None] | None = None):
        self.module = module
        self.light_recompute = light_recompute
        self.calls = 0
        self._remove: list[Callable[[], None]] = []

    def called_modules(self) -> Sequence[nn.Module]:
        return (self.module,)

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        def make(inner: InnerForward) -> ForwardFn:
            current = wrapper(_SameParameters(self.module, inner))

            def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return current(*args, **kwargs)

            return run

        self._remove.append(install(self.module, make))

    def restore(self) -> None:
        while self._remove:
            self._remove.pop()()


class _SameParameters:
    """A module's forward, which raises if a recomputation would run it without the parametrization of the first run.

    PEFT's ``target_parameters`` parametrize a module for the time of its forward only. A rerun in backward would use the
    parameters without the adapters.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward
        self._parametrized = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = parametrize.is_parametrized(self._module)
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            self._parametrized = now
        elif self._parametrized and not now:
            raise RuntimeError(
                f"{type(self._module).__name__} is to be recomputed, but its parameters are parametrized for the time of its "
                "forward only (PEFT's target_parameters): place 'recompute' on the module around it, such as the decoder "
                "layer's mlp, or call forebay.manage after get_peft_model"
            )
        return self._forward(*args, **kwargs)


# --- recomputation ----------------------------------------------------------------------------------------------------

# Mode -> operations whose results are kept. A recomputation would repeat them on all ranks.
_KEPT_OPS: Mapping[str, frozenset[str]] = {"full": frozenset(), "save-dispatch": frozenset({"forebay::dispatch"})}
_Key = tuple[int, str]  # of a module among the region's, and a buffer's name
_AFTER_BACKWARD = "Change weights and buffers (optimizer.step(), a router's bias) after backward"


def recomputed(
    forward: Callable[..., Any], mode: str, modules: Callable[[], Sequence[nn.Module]]
) -> Callable[..., Any]:
    """`forward` under non-reentrant checkpointing with the RNG state restored, so the results are bitwise those of ``keep`` if it
    is deterministic; a plain call if gradients are off.

    A checkpoint saves neither weights nor buffers and does not see that its rerun reads others: `_RecomputedCall` checks that.

    Args:
        mode: "full" keeps only the arguments: expert parallelism's dispatch runs again, and combine if something after it in
            `forward` was saved. "save-dispatch" keeps what dispatch returned, so backward does not repeat it. Its graph can be
            walked once only: torch raises for a retained one.
        modules: returns the modules whose weights and buffers `forward` reads.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kept := _KEPT_OPS[mode]:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, kept))
    region = _RegionForward(forward, modules)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _RecomputedCall(region, kwargs)
        out = checkpoint(call.run, *args, **options, **kwargs)
        call.forward_done()
        return out

    return run


def _keep(names: frozenset[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # By name: this module does not import expert parallelism.
    return CheckpointPolicy.MUST_SAVE if operation.name() in names else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(eq=False)
class _RegionForward:
    """A region's forward that may run again, and what is known of it."""

    forward: Callable[..., Any]
    modules: Callable[[], Sequence[nn.Module]]
    written: set[_Key | str] | None = None  # buffers and keyword arguments that it writes; None before it has run once


def _with_versions(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    """(argument's name, tensor, version) of the tensors in keyword arguments."""
    return [
        (name, t, t._version)
        for name, value in arguments.items()
        for t in tree_leaves(value)
        # Tensors made in inference mode have no version, and cannot be written to outside it.
        if isinstance(t, Tensor) and not t.is_inference()
    ]


class _RecomputedCall:
    """One forward of a region and its reruns. The graph owns it.

    A rerun raises if weights were written to or replaced since the forward, or keyword arguments (torch checks positional ones)
    or buffers written to that the forward only reads (a router's bias). Buffers that the forward writes (running statistics) are
    put back for the rerun, and get their present values after it. Keyword arguments that it writes are copies in the rerun.
    """

    def __init__(self, region: _RegionForward, arguments: Mapping[str, Any]):
        self._region = region
        self._arguments = _with_versions(arguments)
        called = region.modules()
        self._name = " and ".join(type(module).__name__ for module in called)
        modules = [m for module in called for m in module.modules()]
        self._weights = [(m, name, w) for m in modules for name, w in m._parameters.items() if w is not None]
        self._buffers = {(i, n): b for i, m in enumerate(modules) for n, b in m._buffers.items() if b is not None}
        # Before the first forward it is not known which ones are written: all are copied.
        known = region.written
        self._written_arguments = {
            id(t): t.detach().clone().requires_grad_(t.requires_grad)
            for name, t, _ in self._arguments
            if known is None or name in known
        }
        self._copies = {key: b.clone() for key, b in self._buffers.items() if known is None or key in known}
        self._before = [b._version for b in self._buffers.values()]
        self._ran = False
        self._versions = self._current_versions()  # a forward may run a backward within

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, and in backward its rerun, which raises RuntimeError if weights or buffers are others."""
        if not self._ran:
            self._ran = True
            return self._region.forward(*args, **kwargs)
        self._check()
        if self._written_arguments:
            kwargs = tree_map_only(Tensor, self._as_first_given, kwargs)
        present = {key: self._buffers[key].clone() for key in self._copies}
        self._set_buffers(self._copies)
        try:
            return self._region.forward(*args, **kwargs)
        finally:
            self._set_buffers(present)
            self._versions = self._current_versions()  # adapters may write to weights in a forward

    def _as_first_given(self, argument: Tensor) -> Tensor:
        copy = self._written_arguments.get(id(argument))
        return argument if copy is None else copy.clone()  # again: a retained graph may be run through several times

    def forward_done(self) -> None:
        """Note which buffers and arguments the forward wrote, and drop the copies of the others."""
        pairs = zip(self._buffers.items(), self._before, strict=True)
        written: set[_Key | str] = {key for (key, buffer), version in pairs if buffer._version != version}
        written |= {name for name, t, version in self._arguments if t._version != version}
        if self._region.written is None:
            # Trap: batch norm writes its statistics without a new version. Values are compared once, which waits for the device.
            written |= {key for key, copy in self._copies.items() if not torch.equal(copy, self._buffers[key])}
        self._region.written = written | (self._region.written or set())
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._region.written}
        kept = {id(t) for name, t, _ in self._arguments if name in self._region.written}
        self._written_arguments = {key: copy for key, copy in self._written_arguments.items() if key in kept}
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [t._version for t in (*(w for _, _, w in self._weights), *self._buffers.values())]

    @torch.no_grad()
    def _set_buffers(self, values: dict[_Key, Tensor]) -> None:
        for key, value in values.items():
            with _unsafe_preserve_version_counter(self._buffers[key]):
                self._buffers[key].copy_(value)

    def _check(self) -> None:
        now = self._current_versions()
        for (owner, name, weight), then, version in zip(self._weights, self._versions, now, strict=False):
            # Trap: PEFT's target_parameters write frozen weights' own values to them in each forward.
            if version != then and weight.requires_grad:
                self._raise_modified(type(owner).__name__, name, version, then)
            # FSDP puts unsharded weights in the place of sharded ones and back, with the same values.
            if owner._parameters.get(name) is not weight and not getattr(owner, "_is_fsdp_managed_module", False):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__}, which a recomputed {self._name} reads, was "
                    "another one in its forward (torch.func.functional_call puts weights in a model for the time of its forward "
                    "only): run backward while they are there, or choose another placement than 'recompute'"
                )
        for name, argument, then in self._arguments:
            if argument._version != then and id(argument) not in self._written_arguments:
                advice = f"Change a copy of {name!r}, or change it after backward"
                self._raise_modified("argument", name, argument._version, then, advice)
        written, count = self._region.written, len(self._weights)
        if written is None:
            return  # a backward within the first forward: it is not known yet what that writes
        for key, then, version in zip(self._buffers, self._versions[count:], now[count:], strict=True):
            if version != then and key not in written:
                self._raise_modified("buffer", key[1], version, then)

    def _raise_modified(self, owner: str, name: str, version: int, then: int, advice: str = _AFTER_BACKWARD) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} ({owner}), "
            f"which a recomputed {self._name} reads, is at version {version}; expected version {then} instead. {advice}"
        )
