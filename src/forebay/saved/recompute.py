"""The placement ``recompute``: a region's forward runs again in backward instead of keeping what it saved.

In: a region's forward. Out: the same function under ``torch.utils.checkpoint`` (non-reentrant), RNG state restored for
the second run, so that dropout repeats itself and the results are bitwise those of ``keep`` wherever the region is
deterministic.

Regions that know a cheaper way (experts, which can make their first grouped GEMM's output again from what they keep
anyway) offer it through their slot, and no checkpoint is involved: see `forebay.saved.slots.Slot.light_recompute`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forebay.saved.repeat import Repeatable

# Mode -> operations whose results are kept. A recomputation would repeat them on all ranks.
_KEPT: Mapping[str, frozenset[str]] = {
    "full": frozenset(),
    "save-dispatch": frozenset({"forebay::dispatch"}),
    "save-both": frozenset({"forebay::dispatch", "forebay::combine"}),
}


def recomputed(
    forward: Callable[..., Any], mode: str = "full", reads: Callable[[], Sequence[torch.nn.Module]] | None = None
) -> Callable[..., Any]:
    """`forward` under activation checkpointing; a plain call when no gradient is wanted.

    Args:
        reads: the modules whose weights and buffers `forward` reads; see `forebay.saved.repeat`.
        mode: "full" keeps nothing but the arguments: expert parallelism's dispatch runs again, and combine where something
            behind it in `forward` was saved. "save-dispatch" and "save-both" keep what dispatch, or dispatch and combine,
            brought, so that backward does not repeat it. With these two a graph can be walked once only: torch raises for a
            retained one.

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


def saved_by_others() -> str | None:
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
