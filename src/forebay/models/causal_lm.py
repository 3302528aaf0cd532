"""Hugging Face causal language models with the loss fused into the head.

In: a `*ForCausalLM` instance. Out: the same instance, whose `forward(labels=...)` in training mode hands the last
hidden states to `forebay.loss.linear_cross_entropy` instead of making logits for all tokens, and
returns the family's own output class with `logits=None`. Without labels, in `eval()` and under torch.func's transforms the
original forward runs.

    model.forward(input_ids, ..., labels) -> lm.model(input_ids, ...) -> hidden [B, S, H]
        -> model.lm_head(hidden, targets) -> loss (+ router_aux_loss_coef * auxiliary loss)

The two overrides, of `model.forward` and `model.lm_head.forward`, are all the state there is (see `forebay.saved.slots`);
`restore()` takes them off. The loss runs *inside* a call of the head because
that is where FSDP2's hooks gather the weight before and scatter its gradient after. A head that was replaced since (by an
adapter on it) computes something else: the original forward runs then, with a warning.

A model is taken only if what its class's forward does around the loss is known here: the class is
in `_FAMILIES`, its loss is transformers' `ForCausalLMLoss`, its head is a plain `nn.Linear`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forebay.loss import linear_cross_entropy
from forebay.saved.slots import Below, Run, install, is_managed, is_outermost, is_patched

# Class name -> does its forward add the router's auxiliary loss? (Read in transformers 5.17.)
_FAMILIES: Mapping[str, bool] = {
    "DeepseekV2ForCausalLM": False,
    "DeepseekV3ForCausalLM": False,
    "Glm4MoeForCausalLM": False,
    "GptOssForCausalLM": True,
    "GraniteForCausalLM": False,  # with logits_scaling 1
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "MixtralForCausalLM": True,
    "OlmoeForCausalLM": True,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "Qwen3MoeForCausalLM": True,
}
# Configuration fields that change the logits after the head, unless they are 1: Gemma, Cohere, Granite and others.
_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)


def install_fused_loss(model: nn.Module, in_eval: bool = False) -> Callable[[], None]:
    """Make `model(labels=...)` compute its loss without logits in training mode, until the returned call undoes it.

    With labels (int64 [B, S]), the loss equals the original's up to rounding: shifted labels or a
    given `shift_labels`, `num_items_in_batch`, `ignore_index` and `logits_to_keep` count as
    they do there, and the router's auxiliary loss is added under `output_router_logits`. The output
    has `logits=None`. Without labels, and in `eval()`, nothing changes. A deep copy has the family's own loss.

    Args:
        model: a transformers model of a class in `_FAMILIES` (FSDP2's subclasses included), with
            neither `forward` nor `lm_head.forward` replaced on the instance.
        in_eval: fuse the loss in `eval()` too.

    Returns:
        restore(): removes the overrides, also under a forward that somebody put on top. A second call does nothing.

    Raises:
        ValueError: naming what is not supported: the class, a transformation of the logits, a
            custom loss function, a head that is no plain linear layer, an override in the way.
    """
    family = _family(model)
    signature = inspect.signature(family.forward)
    parameters = list(signature.parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    module = sys.modules[family.__module__]
    adds_aux = _FAMILIES[family.__name__]
    output_name = "MoeCausalLMOutputWithPast" if adds_aux else "CausalLMOutputWithPast"
    output_class = getattr(module, output_name)
    head: Any = model.lm_head
    warned: list[str] = []
    trained_in_eval: list[bool] = []

    def evaluated(output: Any) -> Any:
        """`from_pretrained` returns a model in `eval()`: a loop that trains it there is told what that costs, once."""
        loss = output[0] if isinstance(output, tuple) else output.loss

        def warn(_: Tensor) -> None:
            if not trained_in_eval:
                trained_in_eval.append(True)
                warnings.warn(
                    f"backward through a {family.__name__} in eval(): the fused loss is for training mode, so the model's own "
                    "loss ran and held logits [tokens, vocabulary]; call model.train() before training, or pass "
                    "loss='fused-always' to forebay.manage",
                    stacklevel=2,
                )

        if loss.requires_grad and not trained_in_eval:
            loss.register_hook(warn)
        return output

    def fused(below: Below) -> Run:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            labels = given.pop("labels", None)
            if labels is None or torch._C._are_functorch_transforms_active():
                return below(*args, **kwargs)
            if not (self.training or in_eval):
                return evaluated(below(*args, **kwargs))
            if len(given) + 1 < len(args) + len(kwargs):
                # Too many arguments, or one given twice: Python's own TypeError comes from there.
                return below(*args, **kwargs)
            changed = _change_of(self.lm_head, head)
            if changed is not None:
                if not warned:
                    warned.append(changed)
                    warnings.warn(
                        f"lm_head {changed} since forebay.manage, which the fused loss leaves out: the model's own loss runs, "
                        "and holds logits [tokens, vocabulary]; undo that, call manage() again, or pass loss=None to silence "
                        "this",
                        stacklevel=2,
                    )
                return below(*args, **kwargs)
            return_dict = given.pop("return_dict", None)
            logits_to_keep = given.pop("logits_to_keep", 0)
            if adds_aux and given.get("output_router_logits") is None:
                given["output_router_logits"] = self.config.output_router_logits

            # Named, because a config with return_dict=False would otherwise give a tuple here.
            outputs = self.model(**given, return_dict=True)
            hidden = outputs.last_hidden_state
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            loss = head_loss(self.lm_head, hidden[:, kept, :], labels, **given)
            fields = {
                "past_key_values": outputs.past_key_values,
                "hidden_states": outputs.hidden_states,
                "attentions": outputs.attentions,
            }
            if adds_aux:
                fields["router_logits"] = outputs.router_logits
                if given["output_router_logits"]:
                    aux_loss = module.load_balancing_loss_func(
                        outputs.router_logits,
                        self.num_experts,
                        self.num_experts_per_tok,
                        given.get("attention_mask"),
                    )
                    fields["aux_loss"] = aux_loss
                    loss = loss + self.router_aux_loss_coef * aux_loss.to(loss.device)
            output = output_class(loss=loss, logits=None, **fields)
            if return_dict is None:
                return_dict = self.config.return_dict
            return output if return_dict else output.to_tuple()

        return forward

    undo = [install(model, fused), install(head, lambda below: _head_forward)]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _change_of(now: nn.Module, head: nn.Module) -> str | None:
    """What the head `now` does that a call of `head` with targets would not, in words; None if nothing."""
    if now is not head:
        return f"has become a {type(now).__name__} (an adapter or a new head)"
    if not is_outermost(head):
        return "got another forward"
    # A hook gets the loss here where it expects logits. FSDP's, which gather the weight, look at neither.
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    for hook in (h for kind in hooks for h in kind.values()):
        if not str(getattr(hook, "__module__", None)).startswith(("torch.distributed.", "forebay.")):
            return f"got the module hook {hook!r}"
    return None


def _head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Tensor:
    """The head's forward: logits, or with targets the loss (`options` as in the loss)."""
    if targets is None:
        return nn.Linear.forward(self, hidden)
    if isinstance(self.weight, DTensor):
        raise ValueError(
            "fused loss: lm_head.weight is a DTensor inside the head's own call (tensor "
            "parallelism), which is not supported"
        )
    return linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, **options)


def head_loss(
    head: Callable[..., Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`transformers.loss.loss_utils.ForCausalLMLoss` on normed hidden states [B, S, H], through a head with the fused loss.

    Args:
        head: the head, or its forward.
        labels: [B, S] int64; not read if `shift_labels` [B, S] is given.
        num_items_in_batch: what the sum is divided by; None for the mean.
    """
    if shift_labels is None:
        # Token n predicts label n + 1; the last one predicts nothing.
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = head(
        hidden.reshape(-1, hidden.shape[-1]),
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _family(model: nn.Module) -> type[nn.Module]:
    """The transformers class whose forward `model` runs; ValueError if the loss cannot be fused."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    for field in _LOGIT_TRANSFORMS:
        if getattr(config, field, None) not in (None, 1):
            raise ValueError(
                f"fused loss: {name} transforms its logits (config.{field}="
                f"{getattr(config, field)!r}), which is not supported"
            )
    # FSDP2 and parametrisations make a subclass on the fly, so look for the class among the bases.
    family: Any = next(
        (
            base
            for base in type(model).__mro__
            if base.__name__ in _FAMILIES and base.__module__.startswith("transformers.models.")
        ),
        None,
    )
    if family is None:
        raise ValueError(f"fused loss: {name} is not a supported model; supported are {', '.join(_FAMILIES)}")
    if inspect.getattr_static(type(model), "forward") is not family.forward:
        raise ValueError(f"fused loss: {name} overrides the forward of {family.__name__}, whose loss it would replace")
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"fused loss: {name} has a custom loss_function ({model.loss_function!r}); only "
            "transformers' ForCausalLMLoss can be fused"
        )
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"fused loss: lm_head is a {type(head).__name__}, not a plain torch.nn.Linear "
            "(an adapter or a quantised layer cannot be fused)"
        )
    for path, owner in (("forward", model), ("lm_head.forward", head)):
        if is_managed(owner) or is_patched(owner):
            raise ValueError(
                f"fused loss: {path} of this {name} is already replaced on the instance (by a "
                "fused loss, Accelerate or a hook); install the fused loss before that"
            )
    return family
