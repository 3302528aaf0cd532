"""Forebay in Hugging Face `Trainer` and the trainers of TRL, which are subclasses of it.

Input: a policy and a budget, and a trainer that the callback is given to. Output: the trainer's model is managed while
`train()` runs, and figures of its memory are in the trainer's logs. The callback owns the `Managed` and detaches it.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from forebay.integrations.common import MemoryFigures, manage_arguments, plan_text
from forebay.integrations.trl import install_log_probs
from forebay.managed import Managed, manage, unwrap
from forebay.memory.overrides import drop_setting, hold_place, put_setting, setting
from forebay.policy import PolicyError

_OWNER = "trainer_callback"  # the setting of a managed model that says whose it is


class ForebayCallback(TrainerCallback):
    """Puts the model under `forebay.manage` while the trainer trains, and takes it off at the end.

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
            self._remove_log_probs = install_log_probs(inner)
        except BaseException:
            self._switch_checkpointing(True)
            raise
        put_setting(inner, _OWNER, self)
        self._model, self._state, self.plan = inner, state, ""
        self._figures = MemoryFigures(self.memory)

    def _check_device(self, args: TrainingArguments) -> None:
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
        if self._model is None or self.memory is None:
            return
        if self._remove_log_probs is not None:
            self._remove_log_probs()
        self.memory.detach()
        drop_setting(self._model, _OWNER)
        self._switch_checkpointing(True)
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
