"""What a recomputation has to find as its forward found it: weights and buffers.

In: a region's forward and the modules that it calls. Out: `Repeatable.begin`, whose `Repetition.run` is called once in forward
and again in backward. A checkpoint saves neither weights nor buffers, so autograd does not see that the rerun reads others.
Weights that were written to or replaced since are an error, and so are buffers that the forward only reads, such as a router's
bias. Buffers that the forward itself writes, such as running statistics, are put back for the rerun, and have their present
values after it.

A `Repeatable` belongs to a region; a `Repetition` to one call, and the graph owns it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Key = tuple[int, str]  # of a module among `nn.Module.modules`, and a buffer's name


class Repeatable:
    """A region's forward that runs again.

    Args:
        reads: the modules whose weights and buffers `forward` reads, as they are when it is called.
    """

    def __init__(self, forward: Callable[..., Any], reads: Callable[[], Sequence[nn.Module]]):
        self.forward, self.reads = forward, reads
        self.written: set[Key] | None = None  # buffers that the forward writes; None before it has run once

    def begin(self) -> "Repetition":
        """Before a forward."""
        return Repetition(self)


class Repetition:
    """One forward and its reruns."""

    def __init__(self, whole: Repeatable):
        self._whole = whole
        self._regions = whole.reads()
        modules = [m for region in self._regions for m in region.modules()]
        self._weights = [(m, name, w) for m in modules for name, w in m._parameters.items() if w is not None]
        self._buffers = {(i, n): b for i, m in enumerate(modules) for n, b in m._buffers.items() if b is not None}
        # The first forward shows which ones are written: until then all are copied.
        known = whole.written
        self._copies = {key: b.clone() for key, b in self._buffers.items() if known is None or key in known}
        self._before = [b._version for b in self._buffers.values()]
        self._ran = False
        self._versions = self._now()  # a forward may run a backward within

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, and in backward its rerun.

        Raises:
            RuntimeError: in the rerun, weights or buffers that are not those of the forward.
        """
        if not self._ran:
            self._ran = True
            return self._whole.forward(*args, **kwargs)
        self._check()
        present = {key: self._buffers[key].clone() for key in self._copies}
        self._put(self._copies)
        try:
            return self._whole.forward(*args, **kwargs)
        finally:
            self._put(present)
            self._versions = self._now()  # adapters may write to weights in a forward

    def forward_over(self) -> None:
        """After the forward."""
        pairs = zip(self._buffers.items(), self._before, strict=True)
        written = {key for (key, buffer), version in pairs if buffer._version != version}
        if self._whole.written is None:
            # Trap: batch norm writes its statistics and raises no version. Values are compared once, which waits for the device.
            written |= {key for key, copy in self._copies.items() if not torch.equal(copy, self._buffers[key])}
        self._whole.written = written | (self._whole.written or set())
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._whole.written}
        self._versions = self._now()

    @property
    def _name(self) -> str:
        return " and ".join(type(region).__name__ for region in self._regions)

    def _now(self) -> list[int]:
        tensors = [*(w for _, _, w in self._weights), *self._buffers.values()]
        return [t._version for t in tensors]

    @torch.no_grad()
    def _put(self, values: dict[Key, Tensor]) -> None:
        for key, value in values.items():
            with _unsafe_preserve_version_counter(self._buffers[key]):
                self._buffers[key].copy_(value)

    def _check(self) -> None:
        now = self._now()
        for (owner, name, weight), then, version in zip(self._weights, self._versions, now, strict=False):
            # Trap: PEFT's target_parameters write frozen weights' own values to them in each forward.
            if version != then and weight.requires_grad:
                self._raise_written(type(owner).__name__, name, version, then)
            # FSDP puts gathered weights in the place of sharded ones and back, with the same values.
            if owner._parameters.get(name) is not weight and not getattr(owner, "_is_fsdp_managed_module", False):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__}, which a recomputed {self._name} reads, was "
                    "another one in its forward (torch.func.functional_call puts weights in a model for the time of its forward "
                    "only): run backward while they are there, or choose another placement than 'recompute'"
                )
        written, count = self._whole.written, len(self._weights)
        if written is None:
            return  # a backward within the first forward: it is not known yet what that writes
        for key, then, version in zip(self._buffers, self._versions[count:], now[count:], strict=True):
            if version != then and key not in written:
                self._raise_written("buffer", key[1], version, then)

    def _raise_written(self, owner: str, name: str, version: int, then: int) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} ({owner}), "
            f"which a recomputed {self._name} reads, is at version {version}; expected version {then} "
            "instead. Change weights and buffers (optimizer.step(), a router's bias) after backward"
        )


# The placement ``recompute``: a region's forward runs again in backward instead of keeping what it saved.
#
# In: a region's forward. Out: the same function under ``torch.utils.checkpoint`` (non-reentrant), RNG state restored for
# the second run, so that dropout repeats itself and the results are bitwise those of ``keep`` wherever the region is
# deterministic.
#
# Regions that know a cheaper way (experts, which can make their first grouped GEMM's output again from what they keep
# anyway) offer it through their slot, and no checkpoint is involved: see `forebay.memory.regions.Slot.light_recompute`.

# Mode -> operations whose results are kept. A recomputation would repeat them on all ranks.
_KEPT: Mapping[str, frozenset[str]] = {
    "full": frozenset(),
    "save-dispatch": frozenset({"forebay::dispatch"}),
}


def recomputed(
    forward: Callable[..., Any], mode: str = "full", reads: Callable[[], Sequence[torch.nn.Module]] | None = None
) -> Callable[..., Any]:
    """`forward` under activation checkpointing; a plain call when no gradient is wanted.

    Args:
        reads: the modules whose weights and buffers `forward` reads.
        mode: "full" keeps nothing but the arguments: expert parallelism's dispatch runs again, and combine where something
            behind it in `forward` was saved. "save-dispatch" keeps what dispatch brought, so that backward does not
            repeat it. With it a graph can be walked once only: torch raises for a retained one.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in _KEPT:
        raise ValueError(f"recompute mode {mode!r} is unknown; valid are {', '.join(_KEPT)}")
    kept = _KEPT[mode]
    selective: dict[str, Any] = {}
    if kept:
        selective["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, kept))

    repeatable = None if reads is None else Repeatable(forward, reads)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if repeatable is None:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **selective, **kwargs)
        call = repeatable.begin()
        out = checkpoint(call.run, *args, use_reentrant=False, preserve_rng_state=True, **selective, **kwargs)
        call.forward_over()
        return out

    return run


def _keep(names: frozenset[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # By name: what is recomputed need not know expert parallelism, nor import it.
    return CheckpointPolicy.MUST_SAVE if operation.name() in names else CheckpointPolicy.PREFER_RECOMPUTE


def foreign_saved_tensor_hooks() -> str | None:
    """What takes the saved tensors here, if that is none of Forebay's regions: words for a message.

    In an activation checkpoint's first forward, or its rerun in backward, nothing may be taken away: its hooks match the tensors
    of the two forwards by their order. Other hooks, such as ``save_on_cpu``, were asked for the tensors by the caller. A
    reentrant checkpoint's first forward runs without gradients, and is not seen here.
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


_CHECKPOINT = "activation checkpointing of the caller's"


def refuse_nested_checkpointing(path: str, module: torch.nn.Module) -> None:
    """Raise if `module` or a child is already checkpointed by transformers.

    Raises:
        ValueError: names the module.
    """
    for name, child in module.named_modules():
        if getattr(child, "gradient_checkpointing", False):
            where = f"{path}.{name}" if name else path
            raise ValueError(
                f"{path!r} is to be recomputed, but {where!r} is already under gradient checkpointing; "
                "call model.gradient_checkpointing_disable() or choose another placement"
            )
