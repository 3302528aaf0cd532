"""Hugging Face's experts modules on `forebay.moe.experts`.

Two ways in. `install_experts(model)` puts `experts_forward` around the forward of each experts module, until it is taken off
again; copies and pickles of the model have their own experts. `register()` adds "forebay" to transformers' table of experts
implementations; a model takes it for good by `model.set_experts_implementation("forebay")` or
`from_pretrained(experts_implementation=...)`. Tokens, ids and weights come from the model's own router; parameters stay where
they are in the module and keep their names and layouts.

What a module says of itself is read at each call: `is_transposed`, `is_concatenated`, `has_bias`,
`has_gate`, `num_experts`, `act_fn`, `alpha` and `limit`. Three settings (see `forebay.saved.slots.setting`; an attribute of that
name counts too) change how it saves: `forebay_save_h` (bool, default True): False makes h again in backward instead of saving
it. `forebay_weight_gradients` (a `forebay.moe.weight_gradients.WeightGradients`, default None) may leave the weight gradients for
later. `forebay_pages` (a `forebay.moe.stash.Pages`, default None) is where the rows wait for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from forebay.models.families import moe_blocks
from forebay.moe.experts import experts
from forebay.saved.identify import local
from forebay.saved.slots import drop_setting, install, is_patched, put_setting, setting

NAME = "forebay"
_INSTALLED = "forebay_experts"


def register() -> str:
    """Make "forebay" known to transformers and return that name. A second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def install_experts(model: nn.Module) -> Callable[[], None]:
    """Forebay's experts in every MoE block of `model`, until the returned call takes them off. A second call of it does nothing.

    Left alone: experts that run Forebay's by their configuration, those whose forward somebody replaced, and modules that are no
    experts of transformers.
    """
    undo: list[Callable[[], None]] = []
    for block in moe_blocks(model):
        experts = block.experts
        if hasattr(type(experts), "_apply_gate") and not uses_forebay(experts) and not is_patched(experts):
            put_setting(experts, _INSTALLED, True)
            undo.append(partial(drop_setting, experts, _INSTALLED))
            undo.append(install(experts, lambda _: _run_experts, traceable=True))

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def uses_forebay(experts: nn.Module) -> bool:
    """Whether this experts module computes with `experts_forward`."""
    if setting(experts, _INSTALLED, False):
        return True
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def _run_experts(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    # The operation has no rule for torch.func; the module's own experts do.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        own: Tensor = type(self).forward(self, *args, **kwargs)
        return own
    return experts_forward(self, *args, **kwargs)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, max_rows: int | None = None
) -> Tensor:
    """Forward of a transformers experts module: tokens [T, H] and routing [T, K] in, [T, H] out.

    Parameters that are DTensors (expert parallelism) stand for their local part: ids count this rank's experts from 0.

    Args:
        max_rows: see `forebay.moe.experts.experts`.

    Raises:
        ValueError: the module computes something else than silu or GPT-OSS's gated activation.
    """
    kind = activation_of(self)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        local(self.gate_up_proj),
        local(self.down_proj),
        gate_up_bias=local(self.gate_up_proj_bias) if self.has_bias else None,
        down_bias=local(self.down_proj_bias) if self.has_bias else None,
        activation=kind,
        interleaved=not self.is_concatenated,
        transposed=self.is_transposed,
        alpha=float(self.alpha) if kind == "clamped_swiglu" else 1.0,
        limit=float(self.limit) if kind == "clamped_swiglu" else 0.0,
        save_h=setting(self, "forebay_save_h", True),
        max_rows=max_rows,
        deferred=setting(self, "forebay_weight_gradients", None),
        pages=setting(self, "forebay_pages", None),
    )


def activation_of(module: Any) -> str:
    """ "swiglu" or "clamped_swiglu".

    Raises:
        ValueError: any other activation, with the module's class and what would be right for it.
    """
    name = type(module).__name__
    advice = 'leave this model on its own experts (experts=None, or experts_implementation="eager")'
    if not module.has_gate:
        raise ValueError(f"{name} has no gate projection: {advice}")
    # A module that gates in its own way overrides `_apply_gate`. Only GPT-OSS's is known here; the
    # attributes `alpha` and `limit` are no proof, other families use them with other formulas.
    if type(module)._apply_gate is not _default_apply_gate:
        # Whose way it is, is what counts: FSDP2 makes a subclass on the fly.
        owner = next(kind for kind in type(module).__mro__ if "_apply_gate" in vars(kind))
        if owner.__name__ == "GptOssExperts" and not module.is_concatenated:
            return "clamped_swiglu"
        raise ValueError(f"{name} has a gated activation of its own: {advice}")
    if not isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        raise ValueError(f"{name} uses {module.act_fn}, not silu: {advice}")
    return "swiglu"
