"""The placement ``recompute``: a region's forward runs again in backward instead of keeping what it saved.

In: a region's forward. Out: the same function under ``torch.utils.checkpoint`` (non-reentrant), RNG state restored for
the second run, so that dropout repeats itself and the results are bitwise those of ``keep`` wherever the region is
deterministic.

Regions that know a cheaper way (experts, which can make their first grouped GEMM's output again from what they keep
anyway) offer it through their slot, and no checkpoint is involved: see `forebay.saved.slots.Slot.light_recompute`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(forward: Callable[..., Any], mode: str = "full") -> Callable[..., Any]:
    """`forward` under activation checkpointing; a plain call when no gradient is wanted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return run


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
