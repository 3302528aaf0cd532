"""The loss of Hugging Face causal language models without the logits of all tokens.

Input: a `*ForCausalLM` of a supported family. `install_fused_loss` replaces its forward and its head's, so that
`model(labels=...)` computes the loss by `forebay.models.linear_cross_entropy` in training mode, and returns what undoes it.
`head_loss` is the loss of hidden states alone.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forebay.memory.overrides import InnerForward, install, is_managed, is_outermost, is_patched
from forebay.models.families import transformers_base
from forebay.models.linear_cross_entropy import linear_cross_entropy

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

    With labels (int64 [B, S]) the loss equals the original's up to rounding: `shift_labels`, `num_items_in_batch`,
    `ignore_index`, `logits_to_keep` and, under `output_router_logits`, the router's auxiliary loss work as they do there.
    The output has `logits=None`. The original forward runs without labels, in `eval()`, under transforms of torch.func,
    and, with a warning, if the head was changed since. A deep copy has the family's own loss.

    Args:
        model: a transformers model of a class in `_FAMILIES` (FSDP2's subclasses included), with neither `forward` nor
            `lm_head.forward` replaced on the instance.
        in_eval: fuse the loss in `eval()` too.

    Returns:
        Removes both overrides, also under a forward installed on top. A second call does nothing.

    Raises:
        ValueError: an unsupported class, a transformation of the logits, a custom loss function, a head that is not a plain
            linear layer, or a replaced forward.
    """
    family = _check_model(model)
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    undo = ExitStack()
    undo.callback(install(model, partial(_FusedForward, family, head, in_eval)))
    undo.callback(install(head, lambda inner: _head_forward))
    return undo.close


class _FusedForward:
    """The forward of a `*ForCausalLM`, with the loss computed inside a call of its head.

    FSDP2's hooks on the head unshard the weight before and reduce its gradient after that call.
    """

    def __init__(self, family: type[nn.Module], head: nn.Module, in_eval: bool, inner: InnerForward):
        self._name, self._adds_aux = family.__name__, _FAMILIES[family.__name__]
        self._head, self._in_eval, self._inner = head, in_eval, inner
        self._module = sys.modules[family.__module__]
        output_class = "MoeCausalLMOutputWithPast" if self._adds_aux else "CausalLMOutputWithPast"
        self._output_class = getattr(self._module, output_class)
        parameters = list(inspect.signature(family.forward).parameters.values())[1:]
        self._names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._warned_head = self._warned_eval = False

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        labels = given.pop("labels", None)
        if labels is None or torch._C._are_functorch_transforms_active():
            return self._inner(*args, **kwargs)
        if not (model.training or self._in_eval):
            return self._warn_in_backward(self._inner(*args, **kwargs))
        if len(given) + 1 < len(args) + len(kwargs):
            # Too many arguments, or one given twice: the original raises Python's own TypeError.
            return self._inner(*args, **kwargs)
        change = _change_of(model.lm_head, self._head)
        if change is not None:
            self._warn_of_head(change)
            return self._inner(*args, **kwargs)
        return self._run(model, labels, given)

    def _run(self, model: Any, labels: Tensor, given: dict[str, Any]) -> Any:
        return_dict = given.pop("return_dict", None)
        logits_to_keep = given.pop("logits_to_keep", 0)
        if self._adds_aux and given.get("output_router_logits") is None:
            given["output_router_logits"] = model.config.output_router_logits
        # Explicit, because a config with return_dict=False would otherwise give a tuple here.
        outputs = model.model(**given, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss = head_loss(model.lm_head, outputs.last_hidden_state[:, kept, :], labels, **given)
        fields = {
            "past_key_values": outputs.past_key_values,
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
        }
        if self._adds_aux:
            fields["router_logits"] = outputs.router_logits
            if given["output_router_logits"]:
                fields["aux_loss"] = aux_loss = self._module.load_balancing_loss_func(
                    outputs.router_logits, model.num_experts, model.num_experts_per_tok, given.get("attention_mask")
                )
                loss = loss + model.router_aux_loss_coef * aux_loss.to(loss.device)
        output = self._output_class(loss=loss, logits=None, **fields)
        if return_dict is None:
            return_dict = model.config.return_dict
        return output if return_dict else output.to_tuple()

    def _warn_of_head(self, change: str) -> None:
        if not self._warned_head:
            self._warned_head = True
            warnings.warn(
                f"lm_head {change} since forebay.manage, which the fused loss leaves out: the model's own loss runs, and "
                "holds logits [tokens, vocabulary]; undo that, call manage() again, or pass loss=None to silence this",
                stacklevel=3,
            )

    def _warn_in_backward(self, output: Any) -> Any:
        """Warn once if an output of `eval()` is trained on: `from_pretrained` returns a model in `eval()`."""
        loss = output[0] if isinstance(output, tuple) else output.loss

        def warn(_: Tensor) -> None:
            if not self._warned_eval:
                self._warned_eval = True
                warnings.warn(
                    f"backward through a {self._name} in eval(): the fused loss is for training mode, so the model's own loss "
                    "ran and held logits [tokens, vocabulary]; call model.train() before training, or pass "
                    "loss='fused-always' to forebay.manage",
                    stacklevel=2,
                )

        if loss.requires_grad and not self._warned_eval:
            loss.register_hook(warn)
        return output


def _change_of(now: nn.Module, head: nn.Module) -> str | None:
    """What the head `now` does that a call of `head` with targets would not, for a message; None if nothing."""
    if now is not head:
        return f"has become a {type(now).__name__} (an adapter or a new head)"
    if not is_outermost(head):
        return "got another forward"
    # A hook would get the loss where it expects logits. FSDP's hooks, which unshard the weight, look at neither.
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    for hook in (h for kind in hooks for h in kind.values()):
        if not str(getattr(hook, "__module__", None)).startswith(("torch.distributed.", "forebay.")):
            return f"got the module hook {hook!r}"
    return None


def _head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Tensor:
    """Logits, or with targets the loss (`options` as in `linear_cross_entropy`)."""
    if targets is None:
        return nn.Linear.forward(self, hidden)
    if isinstance(self.weight, DTensor):
        raise ValueError(
            "fused loss: lm_head.weight is a DTensor inside the head's own call (tensor parallelism), which is not supported"
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
    loss = head(hidden.reshape(-1, hidden.shape[-1]), targets, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _check_model(model: nn.Module) -> type[nn.Module]:
    """The transformers class whose forward `model` runs. Raises ValueError if its loss cannot be fused."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    for field in _LOGIT_TRANSFORMS:
        value = getattr(config, field, None)
        if value not in (None, 1):
            raise ValueError(
                f"fused loss: {name} transforms its logits (config.{field}={value!r}), which is not supported"
            )
    family = transformers_base(model, _FAMILIES)
    if family is None:
        raise ValueError(f"fused loss: {name} is not a supported model; supported are {', '.join(_FAMILIES)}")
    if inspect.getattr_static(type(model), "forward") is not family.forward:
        raise ValueError(f"fused loss: {name} overrides the forward of {family.__name__}, whose loss it would replace")
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"fused loss: {name} has a custom loss_function ({model.loss_function!r}); only transformers' ForCausalLMLoss can "
            "be fused"
        )
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"fused loss: lm_head is a {type(head).__name__}, not a plain torch.nn.Linear (an adapter or a quantized layer "
            "cannot be fused)"
        )
    for path, owner in (("forward", model), ("lm_head.forward", head)):
        if is_managed(owner) or is_patched(owner):
            raise ValueError(
                f"fused loss: {path} of this {name} is already replaced on the instance (by a fused loss, Accelerate or a "
                "hook); install the fused loss before that"
            )
    return family
