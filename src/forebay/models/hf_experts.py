"""Hugging Face's experts modules on `forebay.moe.experts`.

`register()` adds "forebay" to transformers' table of experts implementations; a model takes it by
`model.set_experts_implementation("forebay")` or `from_pretrained(experts_implementation=...)`.
Tokens, ids and weights come from the model's own router; parameters stay where they are in the
module and keep their names and layouts. transformers owns the table; nothing is kept here.

What a module says of itself is read at each call: `is_transposed`, `is_concatenated`, `has_bias`,
`has_gate`, `num_experts`, `act_fn`, `alpha` and `limit`. `forebay_save_h` (bool attribute, default
True) set to False makes h again in backward instead of saving it. `forebay_weight_gradients` (a
`forebay.moe.weight_gradients.WeightGradients`, default None) may leave the weight gradients for later. `forebay_pages` (a
`forebay.moe.stash.Pages`, default None) is where the rows wait for backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from forebay.moe.experts import experts
from forebay.saved.identify import local

NAME = "forebay"


def register() -> str:
    """Make "forebay" known to transformers and return that name. A second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


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
        save_h=getattr(self, "forebay_save_h", True),
        max_rows=max_rows,
        deferred=getattr(self, "forebay_weight_gradients", None),
        pages=getattr(self, "forebay_pages", None),
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
