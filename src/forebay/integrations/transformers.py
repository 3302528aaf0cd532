"""Forebay in Hugging Face `Trainer` and the trainers of TRL, which are subclasses of it.

Input: a policy and a budget, and a trainer that the callback is given to. Output: the trainer's model is managed while
`train()` runs, and figures of its memory are in the trainer's logs. Under TRL's `SFTTrainer`, a frozen head (as under LoRA)
computes log-probabilities by `forebay.models.linear_cross_entropy`. The callback owns what it installs and removes it.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from forebay.integrations.common import MemoryFigures, manage_arguments, plan_text
from forebay.managed import Managed, manage, refuse_replicas, unwrap
from forebay.memory.overrides import drop_setting, hold_place, is_managed, put_setting, setting
from forebay.models.linear_cross_entropy import linear_log_probs
from forebay.policy import PolicyError

_OWNER = "trainer_callback"  # the setting of a managed model that says whose it is
_SFT_FIELDS = ("log_probs", "entropy", "is_top1")  # what SFTTrainer asks for. Other trainers differentiate the entropy.
_SFT_SETTINGS: Mapping[str, object] = {
    "temperature": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "cast_lm_head_to_fp32": False,
}


class ForebayCallback(TrainerCallback):
    """Puts the model under `forebay.manage` while the trainer trains, and restores it at the end.

    The trainer may apply PEFT, mixed precision, DDP and FSDP as it does without this. A placement for all regions, or "auto",
    takes the place of gradient checkpointing; with a mapping, layers that it keeps stay checkpointed.

    Each row of the trainer's logs gets ``memory/peak``, the highest allocated memory so far, and ``memory/offloaded``, what left
    the device in the last step; both in GiB, of the first process. (Without a GPU the peak is the process's resident memory.)
    One row gets ``memory/plan``, the number of regions by placement, when the plan is final.

    After an exception in `train()` the model stays managed, until `train()` is called again or `detach()`.

    Args:
        policy: as for `forebay.manage`.
        budget: bytes, or text such as ``"6GiB"``: how far a step's peak may rise over the memory held before it (parameters,
            gradients and optimizer states).
        options: `compile`, `attention`, `experts`, `loss`, `offload`, `recompute`, `min_bytes` and `precision` of
            `forebay.manage`. Compile only where batches have few different shapes, such as packed ones.

    Attributes:
        memory: what `forebay.manage` returned in the last `train()`; None before.
        plan: the number of regions by placement, such as ``"30 offload, 18 keep"``; empty until it is logged.

    Raises:
        PolicyError: an invalid policy, budget or option; when the trainer is made, a budget without a GPU; when training begins,
            a pattern that matches nothing.
        ValueError: when training begins: two of these callbacks, or a model that is managed already.
    """

    def __init__(self, policy: str | Mapping[str, str] = "auto", budget: int | str | None = None, **options: Any):
        self.memory: Managed | None = None
        self._arguments = manage_arguments(type(self).__name__, policy, budget, options)
        self._model: nn.Module | None = None
        self._state: TrainerState | None = None
        self._checkpointed: list[Any] = []  # layers whose gradient checkpointing is switched off
        self._figures: MemoryFigures | None = None
        self._remove_log_probs: Callable[[], None] | None = None
        self.plan = ""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Before mixed precision and TRL wrap the model's forward: the fused loss must run inside of that."""
        self._check_device(args)
        hold_place(unwrap(model)[0])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """After `prepare`, with the model that is trained."""
        self._check_device(args)  # again, for a callback that was added later
        inner, _prefix = unwrap(model)
        owner = setting(inner, _OWNER)
        if isinstance(owner, ForebayCallback):
            twice = owner is not self and owner._state is state
            owner.detach()  # its `train()` raised
            if twice:
                raise ValueError("this trainer has two ForebayCallbacks, and a model can be managed once: remove one")
        self.detach()
        _call_first(self)
        if isinstance(self._arguments["policy"], str):
            layers: list[Any] = list(inner.modules())
            self._checkpointed = [m for m in layers if m.__dict__.get("gradient_checkpointing")]
        self._switch_checkpointing(False)
        try:
            self.memory = manage(model, **self._arguments)
            self._model, self._state, self.plan = inner, state, ""  # from here on `detach` restores the model
            put_setting(inner, _OWNER, self)
            self._figures = MemoryFigures(self.memory)
            self._remove_log_probs = _install_log_probs(inner)
        except BaseException:
            self.detach()
            raise

    def _check_device(self, args: TrainingArguments) -> None:
        refuse_replicas(args.n_gpu)  # in which the Trainer wraps the model later
        if self._arguments["budget"] is not None and args.device.type == "cpu" and not args.use_cpu:
            raise PolicyError(
                f"budget={self._arguments['budget']!r} limits GPU memory, and this process has no GPU: check "
                "torch.cuda.is_available(), or pass use_cpu=True in the training arguments to try a budget on a CPU"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to the rows of training steps; for these the trainer has waited for the device already."""
        last = logs is not None and "train_loss" in logs
        if self.memory is None or self._figures is None or logs is None or not ("loss" in logs or last):
            return
        found: dict[str, Any] = {**self._figures.read(args.device)}
        if not self.plan and (self.memory.settled or last):
            self.plan = plan_text(self.memory)
            found["memory/plan"] = self.plan
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)  # was copied from `logs` before

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the model, if it is managed by this callback."""
        self._switch_checkpointing(True)
        if self._model is None or self.memory is None:
            return
        if self._remove_log_probs is not None:
            self._remove_log_probs()
        self.memory.detach()
        drop_setting(self._model, _OWNER)
        self._model = self._state = self._figures = None

    def _switch_checkpointing(self, on: bool) -> None:
        for layer in self._checkpointed:
            layer.gradient_checkpointing = on
        if on:
            self._checkpointed = []


def _call_first(callback: TrainerCallback) -> None:
    """Move `callback` before the others of the trainer that calls it.

    Reporters (report_to) come before the callbacks of users, and would not see what `on_log` adds. A callback is not told its
    trainer, so it is looked for among the callers.
    """
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and callback in (callbacks := frame.f_locals["self"].callbacks):
        # Trap: `callbacks` is being walked. Only those that have been called already change places.
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def _install_log_probs(model: Any) -> Callable[[], None] | None:
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
        return _fused_forward(theirs, head, self, *args, **kwargs)

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
    return found.get("outputs") == _SFT_FIELDS and all(found.get(k, inspect) == v for k, v in _SFT_SETTINGS.items())


def _frozen(head: nn.Module) -> bool:
    return not any(p.requires_grad for p in head.parameters())


def _fused_forward(theirs: Callable[..., Any], head: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
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
