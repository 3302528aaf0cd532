"""Checks of a `Manager`: its claims, modules that the caller checkpoints, and other hooks on saved tensors."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.policy import RECOMPUTE_AND_OFFLOAD, Claim, PolicyError

_CHECKPOINT = "activation checkpointing of the caller's"


def check_claims(claims: list[Claim], budget: int | None, offload: str) -> None:
    """Raise PolicyError if no `Manager` can be made with these claims and options."""
    if offload not in ("fit", "all"):
        raise PolicyError(f"offload={offload!r} is unknown; valid are 'fit' (what the link carries) and 'all'")
    placements = {c.placement for c in claims}
    for claim in claims:
        if claim.placement == "stash":
            raise PolicyError(
                f"{claim.pattern!r} asks for 'stash', but {claim.path!r} is no paged region; "
                "valid here are keep, recompute, offload, recompute+offload"
            )
    if "auto" in placements and budget is None:
        raise PolicyError(
            "policy='auto' needs a budget, such as budget='6GiB': the peak over the memory allocated before a step"
        )
    if budget is not None and not placements & {"auto", "offload", RECOMPUTE_AND_OFFLOAD}:
        raise PolicyError(
            "a budget needs policy='auto' or regions placed 'offload'; with keep and recompute nothing is left to decide"
        )


def foreign_saved_tensor_hooks() -> str | None:
    """What else takes the saved tensors here, in words for a message; None if nothing but Forebay's regions does.

    In an activation checkpoint's first forward, or its rerun in backward, nothing may be taken away: it matches the tensors of
    the two forwards by their order. Other hooks, such as ``save_on_cpu``, were asked for by the caller. The first forward of a
    reentrant checkpoint runs without gradients and is not seen here.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform, which allows no hooks on saved tensors"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "a context that allows no hooks on saved tensors"
    if torch._C._current_graph_task_id() != -1:  # or a hook on a gradient calls the model
        return f"a backward ({_CHECKPOINT}, for one)"
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
                "call model.gradient_checkpointing_disable() (activation_checkpointing_disable() since transformers 5.23), or "
                "choose another placement"
            )
