"""Forebay's log-probabilities in TRL's `SFTTrainer`, for models whose head is frozen, as under LoRA.

Input: a managed model whose forward TRL has replaced by one that returns log-probabilities (`fused_lm_head=True`). Output: a
forward on top that computes them by `forebay.models.linear_cross_entropy` and leaves every other call to TRL's, which makes
the logits of a chunk twice: in forward and in backward. The caller removes it.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forebay.memory.overrides import is_managed
from forebay.models.linear_cross_entropy import linear_log_probs

_FIELDS = ("log_probs", "entropy", "is_top1")  # what SFTTrainer asks for. Other trainers differentiate the entropy.
_SETTINGS: Mapping[str, object] = {
    "temperature": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "cast_lm_head_to_fp32": False,
}


def install_log_probs(model: Any) -> Callable[[], None] | None:
    """Put Forebay's forward on top of TRL's; None if TRL's is not there, asks for more, or the head is not Forebay's and frozen.

    Returns:
        Removes it. A second call does nothing.
    """
    theirs = model.__dict__.get("forward")
    head = getattr(model, "lm_head", None)
    if not _is_sft(theirs) or not isinstance(head, nn.Linear) or not is_managed(head) or not _frozen(head):
        return None

    @wraps(theirs.__func__)  # with the signature, which `generate` reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(theirs, head, self, *args, **kwargs)

    # Not by `forebay.memory.overrides`, whose place is under TRL's forward.
    model.__dict__["forward"] = ours = MethodType(forward, model)

    def remove() -> None:
        if model.__dict__.get("forward") is ours:
            model.__dict__["forward"] = theirs

    return remove


def _is_sft(forward: Any) -> bool:
    """Whether TRL's head was made for `SFTTrainer`, and for logits that nothing transforms: its settings are in its closure."""
    function = getattr(forward, "__func__", None)
    if not inspect.isfunction(function) or "fused_lm_head" not in function.__code__.co_varnames:
        return False
    found = inspect.getclosurevars(function).nonlocals
    return found.get("outputs") == _FIELDS and all(found.get(k, inspect) == v for k, v in _SETTINGS.items())


def _frozen(head: nn.Module) -> bool:
    return not any(p.requires_grad for p in head.parameters())


def _forward(theirs: Callable[..., Any], head: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    labels, others = kwargs.get("labels"), (kwargs.get("shift_labels"), kwargs.get("num_items_in_batch"))
    asked = kwargs.get("fused_lm_head") and labels is not None and others == (None, None)
    # Trap: the weight that DeepSpeed has partitioned has no elements and one dimension.
    usable = model.lm_head is head and _frozen(head) and head.weight.dim() == 2
    if labels is None or not (asked and usable and model.training and torch.is_grad_enabled()):
        return theirs(*args, **kwargs)
    own = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
    given = {name: value for name, value in kwargs.items() if name not in own}
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        given.setdefault("output_router_logits", True)
    outputs = model.base_model(*args, **{**given, "use_cache": False})
    hidden, targets = outputs.last_hidden_state[:, :-1], labels[:, 1:].to(outputs.last_hidden_state.device)
    mask = targets != -100
    # As in TRL's, the head is not called: hooks on it would not get logits. FSDP2 shards its weight.
    weight, bias = (p.full_tensor() if isinstance(p, DTensor) else p for p in (head.weight, head.bias))
    found = linear_log_probs(hidden[mask], weight, targets[mask], bias=bias)
    log_probs, entropy, is_top1 = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found)
    loss, aux_loss = -log_probs.sum() / mask.sum().clamp(min=1), None
    if given.get("output_router_logits"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # the one of all families

        aux_loss = load_balancing_loss_func(
            outputs.router_logits, config.num_experts, config.num_experts_per_tok, given.get("attention_mask")
        )
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    made = theirs.__func__.__globals__["FusedCausalLMOutput"]  # type: ignore[attr-defined]
    return made(loss=loss, log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask, aux_loss=aux_loss)
