"""The loss of transformers' causal language models without logits.

`install_fused_loss` replaces the forward of a `*ForCausalLM` and of its head, so that `model(labels=...)` computes its loss by
`forebay.models.linear_cross_entropy` in training mode, and returns what undoes it. `head_loss` is the loss of a model's hidden
states alone.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss

from forebay.memory.overrides import InnerForward, install, is_managed, is_outermost, is_patched
from forebay.models.families import transformers_base
from forebay.models.forward_source import called, expression, rewritten, source_of
from forebay.models.linear_cross_entropy import linear_cross_entropy


def install_fused_loss(model: nn.Module, in_eval: bool = False) -> Callable[[], None]:
    """Make `model(labels=...)` compute its loss without logits in training mode, until the returned call undoes it.

    With labels (int64 [B, S]) the loss equals the original's up to rounding: `shift_labels`, `num_items_in_batch`,
    `ignore_index`, `logits_to_keep` and, under `output_router_logits`, the router's auxiliary loss work as they do there.
    The output has `logits=None`. The original forward runs without labels, in `eval()`, under transforms of torch.func,
    and, with a warning, if the head was changed since. A deep copy has the family's own loss.

    Args:
        model: a transformers model whose forward has the structure that `_fused` needs (FSDP2's subclasses included), with
            neither `forward` nor `lm_head.forward` replaced on the instance.
        in_eval: fuse the loss in `eval()` too.

    Returns:
        Removes both overrides, also under a forward installed on top. A second call does nothing.

    Raises:
        ValueError: a forward that does more with its logits than its loss, a custom loss function, a head that is not a plain
            linear layer, or a replaced forward.
    """
    fused = _check_model(model)
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    undo = ExitStack()
    # The head's own is there as long as the model's, whichever thread removes them.
    undo.callback(install(head, lambda inner: _head_forward))
    undo.callback(install(model, partial(_FusedForward, model, fused, head, in_eval)))
    return undo.close


class _FusedForward:
    """The forward of a `*ForCausalLM`, with the loss computed inside a call of its head.

    FSDP2's hooks on the head unshard the weight before and reduce its gradient after that call.
    """

    def __init__(
        self, model: nn.Module, fused: Callable[..., Any], head: nn.Module, in_eval: bool, inner: InnerForward
    ):
        self._name, self._fused = type(model).__name__, fused
        self._head, self._in_eval, self._inner = head, in_eval, inner
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._warned_head = self._warned_eval = False

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", dict(zip(self._names, args, strict=False)).get("labels"))
        if labels is None or torch._C._are_functorch_transforms_active():
            return self._inner(*args, **kwargs)
        if not (model.training or self._in_eval):
            return self._warn_in_backward(self._inner(*args, **kwargs))
        change = _change_of(model, self._head)
        # A tuple without logits would have each later entry in the place of the one before.
        if kwargs.get("return_dict") is False:
            change = "return_dict=False returns logits"
        if change is not None:
            if not self._warned_head:
                self._warned_head = True
                warnings.warn(
                    f"{change}, which the fused loss leaves out: the model's own forward runs, and holds logits [tokens, "
                    "vocabulary]; undo that, or for a new head detach and call manage() again, or pass loss=None to silence this",
                    stacklevel=2,
                )
            return self._inner(*args, **kwargs)
        return self._fused(model, _loss_of_hidden, *args, **kwargs)

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


def _change_of(model: Any, head: nn.Module) -> str | None:
    """Why the model's loss or head no longer equals a call of `head` with targets, for a message; None if it does."""
    if model.loss_function is not ForCausalLMLoss:
        return f"loss_function has become {model.loss_function!r}"
    if model.lm_head is not head:
        return f"lm_head has become a {_class_of(model.lm_head)} (an adapter or a new head)"
    if not is_outermost(head):
        return "lm_head got another forward"
    # A hook would get the loss where it expects logits. FSDP's hooks, which unshard the weight, look at neither.
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    for hook in (h for kind in hooks for h in kind.values()):
        if not str(getattr(hook, "__module__", None)).startswith(("torch.distributed.", "forebay.")):
            return f"lm_head has the module hook {hook!r}"
    return None


def _class_of(module: nn.Module) -> str:
    """With its package: PEFT's classes have the names of torch's."""
    return f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"


def _loss_of_hidden(head: Any, logits: Tensor, labels: Tensor, vocab_size: Any = None, **options: Any) -> Tensor:
    """Takes the place of a family's ``loss_function`` where `logits` are the hidden states before the head."""
    if is_managed(head):
        try:
            return head_loss(head, logits, labels, **options)
        except TypeError:
            if is_managed(head):
                raise
    # The override was removed since this forward began, or by another thread just now.
    return ForCausalLMLoss(head(logits), labels, vocab_size, **options)


def _head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Tensor:
    """Logits, or with targets the loss (`options` as in `linear_cross_entropy`)."""
    if targets is None:
        return nn.Linear.forward(self, hidden)
    if isinstance(self.weight, DTensor):
        raise ValueError(
            "fused loss: lm_head.weight is a DTensor inside the head's own call (tensor parallelism), which is not supported"
        )
    return linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, **options)


def logits_scale(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function for the hidden states that a `*ForCausalLM` gives its head. It multiplies them by the factor of the logits, if
    the family has one, as the fused loss does. For a head that stays in float32 (HY-V4 from transformers 5.24 on), it converts
    them."""
    family = transformers_base(model)
    source = None if family is None else source_of(family.forward)
    scales = [] if source is None else [statement for statement in source.tree.body if _scales_logits(statement)]
    if source is not None and scales:
        return partial(source.make([*scales, ast.Return(expression("logits", scales[-1]))], "logits"), model)
    if "lm_head" in (getattr(model, "_keep_in_fp32_modules_strict", None) or ()):
        return partial(_in_dtype_of, model.lm_head)
    return lambda hidden: hidden


def _in_dtype_of(head: Any, hidden: Tensor) -> Tensor:
    return hidden.to(head.weight.dtype)  # asked at each call: FSDP2 gathers it in the dtype of computation


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


def _check_model(model: nn.Module) -> Callable[..., Any]:
    """The model's forward with a fused loss, see `_fused`. Raises ValueError if its loss cannot be fused."""
    name = type(model).__name__
    family = transformers_base(model)
    if family is None:
        raise ValueError(f"fused loss: {name} is not a model of transformers")
    if inspect.getattr_static(type(model), "forward") is not family.forward:
        raise ValueError(f"fused loss: {name} overrides the forward of {family.__name__}, whose loss it would replace")
    fused, scales = _fused(family)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"fused loss: {name} has a custom loss_function ({model.loss_function!r}); only transformers' ForCausalLMLoss can "
            "be fused"
        )
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"fused loss: lm_head is a {_class_of(head)}, not a plain torch.nn.Linear (an adapter or a quantized layer "
            "cannot be fused)"
        )
    if scales and head.bias is not None:
        raise ValueError(
            f"fused loss: {name} scales the logits of a head with a bias; only those of a head without one can be fused"
        )
    for path, owner in (("forward", model), ("lm_head.forward", head)):
        if is_managed(owner) or is_patched(owner):
            raise ValueError(
                f"fused loss: {path} of this {name} is already replaced on the instance (by a fused loss, Accelerate or a "
                "hook); install the fused loss before that"
            )
    return fused


def _fused(family: type[nn.Module]) -> tuple[Callable[..., Any], bool]:
    """The forward of a `*ForCausalLM` without logits: ``f(model, loss, *args, **kwargs)``; and whether it scales its logits.

    What the forward has as ``logits`` are the hidden states before the head, ``loss(lm_head, logits, labels, ...)`` takes
    the place of ``self.loss_function``, and the output has no logits. All else, such as the router's auxiliary loss, is the
    family's own code.

    Raises:
        ValueError: a forward in which the head's output is used otherwise. It may be multiplied or divided by a number, which is
            done to the hidden states then.
    """
    source = source_of(family.forward)
    if source is None or not {*source.decorator_names} <= {"can_return_tuple", "deprecate_kwarg"}:
        raise ValueError(
            f"fused loss: the source of {family.__name__}.forward cannot be read, or it has unknown decorators"
        )
    calls = [name for name, _ in called(source.tree.body)]
    if calls.count("lm_head") != 1 or calls.count("loss_function") != 1:
        raise ValueError(
            f"fused loss: {family.__name__} does not compute its loss by one call of lm_head and one of loss_function"
        )
    body = rewritten(source.tree.body, {"loss_function": _loss_call})
    at = next(i for i, statement in enumerate(body) if any(name == "lm_head" for name, _ in called([statement])))
    body[at] = _hidden_for_logits(body[at])
    scales = any(_scales_logits(statement) for statement in body[at:])
    for statement in body[at:]:
        if not _spares_logits(statement):
            raise ValueError(
                f"fused loss: {family.__name__} does more with its logits than its loss, which is not supported: "
                f"{ast.unparse(statement).splitlines()[0]}"
            )
    return source.decorated(source.make(body, "_loss", own=True)), scales


def _loss_call(call: ast.Call) -> str:
    return f"_loss(self.lm_head, {ast.unparse(call).partition('(')[2]}"


def _hidden_for_logits(statement: ast.stmt) -> ast.stmt:
    """``logits = self.lm_head(hidden)`` without the head, and without a cast of its output: the loss is computed in fp32."""
    match statement:
        case ast.Assign([ast.Name("logits")], ast.Call(ast.Attribute(ast.Call(_, [hidden], []), "float"), [], [])):
            statement.value = hidden
        case ast.Assign([ast.Name("logits")], ast.Call(ast.Attribute(ast.Name("self"), "lm_head"), [hidden], [])):
            statement.value = hidden
    return statement


def _scales_logits(statement: ast.stmt) -> bool:
    """Whether it is ``logits = logits * self.config.factor``, or a division."""
    match statement:
        case ast.Assign([ast.Name("logits")], ast.BinOp(ast.Name("logits"), ast.Mult() | ast.Div(), ast.Attribute())):
            return True
    return False


def _spares_logits(statement: ast.stmt) -> bool:
    """Whether a statement of the head or after it uses logits for the loss alone. Takes them out of what is returned."""
    if _scales_logits(statement):
        return True
    match statement:
        case ast.Return(ast.Call(keywords=keywords)):
            for keyword in keywords:
                if keyword.arg == "logits":
                    keyword.value = expression("None", keyword.value)
    loss = {
        n
        for c in ast.walk(statement)
        if isinstance(c, ast.Call) and ast.unparse(c.func) == "_loss"
        for n in ast.walk(c)
    }
    uses = [
        n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "logits" and isinstance(n.ctx, ast.Load)
    ]
    return not any(name == "lm_head" for name, _ in called([statement])) and loss.issuperset(uses)
