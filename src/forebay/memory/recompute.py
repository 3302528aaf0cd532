"""The placement ``recompute``: a region's forward runs again in backward instead of keeping what it saved.

Input: a region's forward and the modules that it calls. Output: the same function under ``torch.utils.checkpoint``
(non-reentrant) with the RNG state restored, so the results are bitwise those of ``keep`` if the region is deterministic. A
checkpoint saves neither weights nor buffers and does not see that its rerun reads others; `_RegionForward` checks that. Regions
with a cheaper way offer it through `forebay.memory.overrides.CallSite.light_recompute`, and no checkpoint is involved.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Mode -> operations whose results are kept. A recomputation would repeat them on all ranks.
_KEPT_OPS: Mapping[str, frozenset[str]] = {
    "full": frozenset(),
    "save-dispatch": frozenset({"forebay::dispatch"}),
}
_CHECKPOINT = "activation checkpointing of the caller's"
_Key = tuple[int, str]  # of a module among the region's, and a buffer's name


def recomputed(
    forward: Callable[..., Any], mode: str = "full", modules: Callable[[], Sequence[nn.Module]] | None = None
) -> Callable[..., Any]:
    """`forward` under activation checkpointing; a plain call if gradients are off.

    Args:
        mode: "full" keeps only the arguments: expert parallelism's dispatch runs again, and combine if something after it in
            `forward` was saved. "save-dispatch" keeps what dispatch returned, so backward does not repeat it. Its graph can be
            walked once only: torch raises for a retained one.
        modules: returns the modules whose weights and buffers `forward` reads, which are then checked.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in _KEPT_OPS:
        raise ValueError(f"recompute mode {mode!r} is unknown; valid are {', '.join(_KEPT_OPS)}")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kept := _KEPT_OPS[mode]:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, kept))
    region = None if modules is None else _RegionForward(forward, modules)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if region is None:
            return checkpoint(forward, *args, **options, **kwargs)
        call = _RecomputedCall(region)
        out = checkpoint(call.run, *args, **options, **kwargs)
        call.forward_done()
        return out

    return run


def _keep(names: frozenset[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # By name: this module does not import expert parallelism.
    return CheckpointPolicy.MUST_SAVE if operation.name() in names else CheckpointPolicy.PREFER_RECOMPUTE


class _RegionForward:
    """A region's forward that may run again, and what is known of it.

    Attributes:
        written: the buffers that the forward writes; None before it has run once.
    """

    def __init__(self, forward: Callable[..., Any], modules: Callable[[], Sequence[nn.Module]]):
        self.forward, self.modules = forward, modules
        self.written: set[_Key] | None = None


class _RecomputedCall:
    """One forward of a region and its reruns. The graph owns it.

    A rerun raises if weights were written to or replaced since the forward, or buffers that the forward only reads (a router's
    bias). Buffers that the forward writes (running statistics) are put back for the rerun, and get their present values after it.
    """

    def __init__(self, region: _RegionForward):
        self._region = region
        called = region.modules()
        self._name = " and ".join(type(module).__name__ for module in called)
        modules = [m for module in called for m in module.modules()]
        self._weights = [(m, name, w) for m in modules for name, w in m._parameters.items() if w is not None]
        self._buffers = {(i, n): b for i, m in enumerate(modules) for n, b in m._buffers.items() if b is not None}
        # Before the first forward it is not known which ones are written: all are copied.
        known = region.written
        self._copies = {key: b.clone() for key, b in self._buffers.items() if known is None or key in known}
        self._before = [b._version for b in self._buffers.values()]
        self._ran = False
        self._versions = self._current_versions()  # a forward may run a backward within

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, and in backward its rerun.

        Raises:
            RuntimeError: in the rerun, if weights or buffers are not those of the forward.
        """
        if not self._ran:
            self._ran = True
            return self._region.forward(*args, **kwargs)
        self._check()
        present = {key: self._buffers[key].clone() for key in self._copies}
        self._set_buffers(self._copies)
        try:
            return self._region.forward(*args, **kwargs)
        finally:
            self._set_buffers(present)
            self._versions = self._current_versions()  # adapters may write to weights in a forward

    def forward_done(self) -> None:
        """Note which buffers the forward wrote, and drop the copies of the others."""
        pairs = zip(self._buffers.items(), self._before, strict=True)
        written = {key for (key, buffer), version in pairs if buffer._version != version}
        if self._region.written is None:
            # Trap: batch norm writes its statistics without a new version. Values are compared once, which waits for the device.
            written |= {key for key, copy in self._copies.items() if not torch.equal(copy, self._buffers[key])}
        self._region.written = written | (self._region.written or set())
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._region.written}
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
        written, count = self._region.written, len(self._weights)
        if written is None:
            return  # a backward within the first forward: it is not known yet what that writes
        for key, then, version in zip(self._buffers, self._versions[count:], now[count:], strict=True):
            if version != then and key not in written:
                self._raise_modified("buffer", key[1], version, then)

    def _raise_modified(self, owner: str, name: str, version: int, then: int) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} ({owner}), "
            f"which a recomputed {self._name} reads, is at version {version}; expected version {then} "
            "instead. Change weights and buffers (optimizer.step(), a router's bias) after backward"
        )


def foreign_saved_tensor_hooks() -> str | None:
    """What else takes the saved tensors here, in words for a message; None if nothing but Forebay's regions does.

    In an activation checkpoint's first forward, or its rerun in backward, nothing may be taken away: it matches the tensors of
    the two forwards by their order. Other hooks, such as ``save_on_cpu``, were asked for by the caller. The first forward of a
    reentrant checkpoint runs without gradients and is not seen here.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform, which allows no hooks on saved tensors"
    if torch._C._current_graph_task_id() != -1:
        return _CHECKPOINT
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    module = str(getattr(getattr(hooks[0], "func", hooks[0]), "__module__", None))
    if module.startswith("forebay."):
        return None  # a region within a region: the inner one's hooks are asked
    return _CHECKPOINT if module == checkpoint.__module__ else f"saved_tensors_hooks of {module}"


def refuse_nested_checkpointing(path: str, module: nn.Module) -> None:
    """Raise ValueError if `module` or a child is under transformers' gradient checkpointing already."""
    for name, child in module.named_modules():
        if getattr(child, "gradient_checkpointing", False):
            where = f"{path}.{name}" if name else path
            raise ValueError(
                f"{path!r} is to be recomputed, but {where!r} is already under gradient checkpointing; "
                "call model.gradient_checkpointing_disable() or choose another placement"
            )
