"""Runs a region's forward again in backward, under ``torch.utils.checkpoint``, and checks that the second run is the same.

Input: a forward and the modules whose weights and buffers it reads. Output of `recomputed`: a callable with the same results,
which saves its arguments for backward instead of what autograd saves in the forward. The graph owns each call.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forebay.memory.kv_cache import is_given_a_cache
from forebay.memory.overrides import installed_on

# Mode -> operations whose results are kept. A recomputation would repeat them on all ranks.
_KEPT_OPS: Mapping[str, frozenset[str]] = {"full": frozenset(), "save-dispatch": frozenset({"forebay::dispatch"})}
_CONTAINERS = (list, dict, tuple, OrderedDict, defaultdict, deque)  # in which a caller may replace what it passed
_Key = tuple[int, str]  # of a module among the region's, and a weight's or a buffer's name
_Mode = tuple[tuple[bool, ...], tuple[_Key, ...]]  # training or evaluation, of each module; and the buffers they have
_AFTER_BACKWARD = "Change weights and buffers (optimizer.step(), a router's bias) after backward"


def recomputed(
    forward: Callable[..., Any], mode: str, modules: Callable[[], Sequence[nn.Module]], holder: nn.Module | None = None
) -> Callable[..., Any]:
    """`forward` under non-reentrant checkpointing with the RNG state restored, so the results are bitwise those of ``keep`` if it
    is deterministic; a plain call if gradients are off, of a transformers module that is given a cache, and of lazy modules
    that get their weights in it.

    A checkpoint saves neither weights nor buffers and does not see that its rerun reads others: `_RecomputedCall` checks that.

    Args:
        mode: "full" keeps only the arguments: expert parallelism's dispatch runs again, and combine if something after it in
            `forward` was saved. "save-dispatch" keeps what dispatch returned, so backward does not repeat it. Its graph can be
            walked once only: torch raises for a retained one.
        modules: returns the modules whose weights and buffers `forward` reads.
        holder: the module in which `forward` looks them up, if any.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kept := _KEPT_OPS[mode]:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, kept))
    region = _RegionForward(forward, modules, holder)

    def run(*args: Any, **kwargs: Any) -> Any:
        # A rerun would append its keys and values to a KV cache (prefix tuning) once more.
        if not torch.is_grad_enabled() or is_given_a_cache(kwargs) or region.makes_weights():
            return forward(*args, **kwargs)
        call = _RecomputedCall(region, args, kwargs)
        # Trap: as keywords of `checkpoint`, those that it has itself (debug, function) would not arrive.
        out = checkpoint(call.run, *args, *call.on_devices, **options)
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
    holder: nn.Module | None
    # Weights, buffers and keyword arguments that it writes, by the modules' modes; none before it has run in them once.
    written: dict[_Mode, set[_Key | str]] = field(default_factory=dict)

    def makes_weights(self) -> bool:
        """Whether lazy modules have no weights yet."""
        return not self.written and any(
            t is not None and is_lazy(t)
            for called in self.modules()
            for m in called.modules()
            for t in (*m._parameters.values(), *m._buffers.values())
        )


def _copied(arguments: Any) -> Any:
    """Copies of lists, dicts and their like; anything else in them is the same object."""
    return tree_map(lambda value: value, arguments, is_leaf=lambda value: type(value) not in _CONTAINERS)


def _version_of(tensor: Tensor) -> int:
    """0 for a tensor made in inference mode, which has no version, and cannot be written to outside it."""
    return 0 if tensor.is_inference() else tensor._version


def _with_versions(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    """(argument's name, tensor, version) of the tensors in arguments."""
    return [
        (name, t, t._version)
        for name, value in arguments.items()
        for t in tree_leaves(value)
        if isinstance(t, Tensor) and not t.is_inference()  # see `_version_of`
    ]


class _RecomputedCall:
    """One forward of a region and its reruns. The graph owns it.

    A rerun raises if weights were written to or replaced since the forward, or arguments or buffers written to that the forward
    only reads (a router's bias); torch checks tensors that are positional arguments themselves. Buffers (running statistics) and
    other arguments that the forward writes are copies in the rerun, and lists and dicts among arguments have what they had.
    Modules are as they were in the forward (`_state_of`), and so are the enabled kernels of attention.

    Attributes:
        on_devices: further arguments of `run`, which it does not pass on: empty tensors on the region's devices on which no
            positional tensor is. Trap: a checkpoint restores the generators of the devices of its own arguments alone.
    """

    def __init__(self, region: _RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._region = region
        # The first run gets the caller's own lists and dicts, as a plain call does. It takes these from here.
        self._first: dict[str, Any] | None = kwargs
        # For reruns, without positional tensors, which the checkpoint saves.
        self._given = _copied(([None if isinstance(a, Tensor) else a for a in args], kwargs))
        nested = {f"argument {n}": a for n, a in enumerate(args) if not isinstance(a, Tensor)}
        self._arguments = _with_versions({**nested, **kwargs})
        called = region.modules()
        self._name = " and ".join(type(module).__name__ for module in called)
        self._attention = _cur_sdpa_kernel_backends()
        self._modules = [m for module in called for m in module.modules()]
        modules = self._modules
        self._classes = [type(m) for m in modules]
        self._state, self._merged = _state_of(modules, region.holder), _merged_adapters(modules)
        self._weights = {(i, n): w for i, m in enumerate(modules) for n, w in m._parameters.items() if w is not None}
        self._kinds = [(w.dtype, w.device) for w in self._weights.values()]
        devices = {t.device for _, t, _ in self._arguments} | {device for _, device in self._kinds}
        devices -= {a.device for a in args if isinstance(a, Tensor)}
        self.on_devices = [torch.empty(0, device=d) for d in devices if d.type not in ("cpu", "meta")]
        self._buffers = {(i, n): b for i, m in enumerate(modules) for n, b in m._buffers.items() if b is not None}
        self._mode: _Mode = tuple(m.training for m in modules), tuple(self._buffers)
        # Before the first forward it is not known which ones are written: all are copied.
        known = region.written.get(self._mode)
        self._written_arguments = {
            id(t): t.detach().clone().requires_grad_(t.requires_grad)
            for name, t, _ in self._arguments
            if known is None or name in known
        }
        self._copies = {key: b.clone() for key, b in self._buffers.items() if known is None or key in known}
        self._before = self._versions = self._current_versions()  # a forward may run a backward within

    def run(self, *args: Any) -> Any:
        """The forward, and in backward its rerun, which raises RuntimeError if weights or buffers are others."""
        args = args[: len(self._given[0])]  # without `on_devices`
        if self._first is not None:
            kwargs, self._first = self._first, None
            return self._region.forward(*args, **kwargs)
        self._check()
        # Copies again: the rerun may write to them as well, and a retained graph runs again.
        given, kwargs = _copied(self._given)
        if self._written_arguments:
            given, kwargs = tree_map_only(Tensor, self._as_first_given, (given, kwargs))
        args = tuple(a if isinstance(a, Tensor) else g for a, g in zip(args, given, strict=True))
        try:
            with (
                nullcontext() if _cur_sdpa_kernel_backends() == self._attention else sdpa_kernel(self._attention),
                _as_in_forward(self._state),
                _as_in_forward(list(self._buffers_before())),
            ):
                return self._region.forward(*args, **kwargs)
        finally:
            self._versions = self._current_versions()  # adapters may write to weights in a forward

    def _buffers_before(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """A state with copies, which the rerun may write to, of the written buffers as they were before the forward."""
        copies = {id(self._buffers[key]): copy.clone() for key, copy in self._copies.items()}
        for module in {key[0]: self._modules[key[0]] for key in self._copies}.values():
            yield vars(module), "_buffers", {name: copies.get(id(b), b) for name, b in module._buffers.items()}

    def _as_first_given(self, argument: Tensor) -> Tensor:
        copy = self._written_arguments.get(id(argument))
        return argument if copy is None else copy.clone()  # again: a retained graph may be run through several times

    def forward_done(self) -> None:
        """Note which weights, buffers and arguments the forward wrote, and drop the copies of the others."""
        now = self._current_versions()
        written: set[_Key | str] = {key for key, version in now.items() if self._before[key] != version}
        written |= {name for name, t, version in self._arguments if t._version != version}
        before = self._region.written.get(self._mode)
        if before is None:
            # Trap: batch norm writes its statistics without a new version. Values are compared once, which waits for the device.
            # On the meta device there are none.
            written |= {
                k for k, copy in self._copies.items() if copy.is_meta or not torch.equal(copy, self._buffers[k])
            }
        self._region.written[self._mode] = written = written | (before or set())
        self._copies = {key: copy for key, copy in self._copies.items() if key in written}
        kept = {id(t) for name, t, _ in self._arguments if name in written}
        self._written_arguments = {key: copy for key, copy in self._written_arguments.items() if key in kept}
        self._versions = self._current_versions()
        _add_hooks(self._state)

    def _current_versions(self) -> dict[_Key, int]:
        return {key: _version_of(t) for tensors in (self._weights, self._buffers) for key, t in tensors.items()}

    def _check(self) -> None:
        if _merged_adapters(self._modules) != self._merged:
            raise RuntimeError(
                f"adapters were merged into weights that a recomputed {self._name} reads, or taken out of them, since its "
                "forward: merge and unmerge adapters after backward"
            )
        for module, kind in zip(self._modules, self._classes, strict=True):
            if type(module) is not kind:
                raise RuntimeError(
                    f"a {kind.__name__}, which a recomputed {self._name} calls, has become a {type(module).__name__} since its "
                    "forward: parametrize modules, and take parametrizations off, after backward. PEFT's target_parameters "
                    "parametrize a module for the time of its forward only: place 'recompute' on the module around it, such as "
                    "the decoder layer's mlp, or call forebay.manage after get_peft_model"
                )
        # None in a backward within the first forward: it is not known yet what that writes.
        written = self._region.written.get(self._mode)
        for (key, weight), (dtype, device) in zip(self._weights.items(), self._kinds, strict=True):
            owner, name = self._modules[key[0]], key[1]
            if weight.dtype != dtype or weight.device != device:
                raise RuntimeError(
                    f"{name} ({type(owner).__name__}), which a recomputed {self._name} reads, is {weight.dtype} on "
                    f"{weight.device}, and was {dtype} on {device} in its forward: move and convert the model (model.to(...)) "
                    "after backward"
                )
            # Trap: PEFT's target_parameters write frozen weights' own values to them in each forward.
            if _version_of(weight) != self._versions[key] and (
                weight.requires_grad or (written is not None and key not in written)
            ):
                self._raise_modified(type(owner).__name__, name, weight._version, self._versions[key])
            # FSDP puts unsharded weights in the place of sharded ones and back, with the same values.
            if getattr(owner, name, None) is not weight and not getattr(owner, "_is_fsdp_managed_module", False):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__}, which a recomputed {self._name} reads, was "
                    "another one in its forward (torch.func.functional_call puts weights in a model for the time of its forward "
                    "only): run backward while they are there, or choose another placement than 'recompute'"
                )
        for name, argument, then in self._arguments:
            if argument._version != then and id(argument) not in self._written_arguments:
                advice = f"Change a copy of {name!r}, or change it after backward"
                self._raise_modified("argument", name, argument._version, then, advice)
        for key, buffer in self._buffers.items():
            if written is not None and _version_of(buffer) != self._versions[key] and key not in written:
                self._raise_modified("buffer", key[1], buffer._version, self._versions[key])

    def _raise_modified(self, owner: str, name: str, version: int, then: int, advice: str = _AFTER_BACKWARD) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} ({owner}), "
            f"which a recomputed {self._name} reads, is at version {version}; expected version {then} instead. {advice}"
        )


# --- what a forward computes with, besides weights and inputs --------------------------------------------------------------

_ADAPTERS = ("_active_adapter", "_disable_adapters")  # of PEFT's layers
_PLAIN = ("_buffers", "_forward_pre_hooks", "_forward_hooks")
_HOOKED = (*_PLAIN, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

_State = list[tuple[Any, str, Any]]
"""(owner, attribute, value). The owner is an object, or the `vars` of a module; None for an attribute that these do not have."""


def _state_of(modules: Iterable[nn.Module], holder: nn.Module | None = None) -> _State:
    """Their children, buffers, hooks, modes, replaced forwards and frozen weights, and Forebay's own callables, as they are now.

    Args:
        modules: each is listed itself.
        holder: the module that has some of `modules` as children; these children are part of the state.
    """
    found = [] if holder is None else _children(holder)
    for module in modules:
        attributes = vars(module)
        found += _children(module)
        if isinstance(module._buffers, dict):
            hooked = module._forward_hooks or module._forward_pre_hooks
            found += [(attributes, name, attributes[name].copy()) for name in (_HOOKED if hooked else _PLAIN)]
        found.append((module, "training", module.training))
        if "gradient_checkpointing" in attributes or hasattr(type(module), "gradient_checkpointing"):
            # Trap: forebay.manage switches it off for the time of the model's forward only.
            found.append((module, "gradient_checkpointing", module.gradient_checkpointing))
        if "_active_adapter" in attributes or hasattr(type(module), "_active_adapter"):
            found += [(module, name, getattr(module, name)) for name in _ADAPTERS]
        if isinstance(scaling := attributes.get("scaling"), dict):  # of PEFT's adapters by name
            found.append((attributes, "scaling", scaling.copy()))
        found += installed_on(module)
        found += [(w, "requires_grad", w.requires_grad) for w in module._parameters.values() if w is not None]
    return found


def _children(module: nn.Module) -> _State:
    children = module._modules  # no dict in a scripted module
    return [(vars(module), "_modules", children.copy())] if isinstance(children, dict) else []


def _merged_adapters(modules: Iterable[nn.Module]) -> list[list[str]]:
    """Names of the adapters that PEFT has merged into the weights of each module that can have some. It writes to ``.data``, so
    the weights' versions do not tell."""
    return [list(merged) for m in modules if (merged := vars(m).get("merged_adapters")) is not None]


def _add_hooks(state: _State) -> None:
    """Add hooks that were registered since: transformers captures outputs by hooks that a model's first forward registers."""
    for owner, name, then in state:
        if name in _HOOKED and name != "_buffers":
            then.update({key: hook for key, hook in owner[name].items() if key not in then})


@contextmanager
def _as_in_forward(state: _State) -> Iterator[None]:
    """Context in which `state` holds."""
    changed = []
    for owner, name, then in state:
        now = owner.get(name) if type(owner) is dict else getattr(owner, name)
        if now is not then and (now or then) and not _same(now, then):  # most are empty
            changed.append((owner, name, then, now))
    for owner, name, then, _ in changed:
        # A copy: the rerun may write to it, as the forward may have, and a retained graph runs again.
        _put(owner, name, then.copy() if isinstance(then, dict) else then)
    try:
        yield
    finally:
        for owner, name, _, now in reversed(changed):
            _put(owner, name, now)


def _same(now: Any, then: Any) -> bool:
    if not isinstance(then, dict):
        return bool(now == then)
    # Not `==`, which compares the elements of buffers.
    return len(now) == len(then) and all(now.get(key) is value for key, value in then.items())


def _put(owner: Any, name: str, value: Any) -> None:
    if type(owner) is not dict:
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value
