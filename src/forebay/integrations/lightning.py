"""Forebay in Lightning: a callback that puts the model of a LightningModule under `forebay.manage` while `fit` runs.

Input: a policy and a budget, and a `Trainer` that the callback is given to, of `lightning` or of `pytorch_lightning`. The
callback owns the `Managed`; it detaches when `fit` ends or raises.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from forebay.integrations.common import MemoryFigures, manage_arguments, plan_text
from forebay.managed import Managed, manage, pretrained_models


class LightningForebayCallback(Callback):
    """Puts the model under `forebay.manage` while `fit` runs, and restores it at the end or after an exception.

    The model is managed after `setup`, `configure_model` and the strategy have built, moved and wrapped it, and before the first
    batch. Its own gradient checkpointing is suspended, with a warning, in layers in which the policy places something.

    In steps that Lightning logs (``log_every_n_steps``), it logs ``memory/peak``, the highest allocated memory so far, and
    ``memory/offloaded``, what left the device in the last step; both in GiB, of the first process. (Without a GPU the peak is
    the process's resident memory.) When the plan is final, it prints the number of regions by placement.

    Args:
        policy: as for `forebay.manage`. Paths begin at the managed model.
        budget: bytes, or text such as ``"6GiB"``: how far a step's peak may rise over the memory held before it (parameters,
            gradients and optimizer states).
        model: path of the model in the LightningModule. Default: the only transformers model that is trained, or else the only
            child that is.
        options: `compile`, `attention`, `experts`, `loss`, `offload`, `recompute`, `min_bytes` and `precision` of
            `forebay.manage`.

    Attributes:
        memory: what `forebay.manage` returned in the last `fit`; None before.

    Raises:
        PolicyError: an invalid policy, budget or option; in `fit`, a pattern that matches nothing.
        ValueError: in `fit`, `model` names nothing, or by default there is not exactly one; the model is managed already.
    """

    def __init__(
        self,
        policy: str | Mapping[str, str] = "auto",
        budget: int | str | None = None,
        *,
        model: str | None = None,
        **options: Any,
    ):
        self.memory: Managed | None = None
        self._arguments = manage_arguments(type(self).__name__, policy, budget, options)
        self._path = model
        self._figures: MemoryFigures | None = None
        self._announced = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._arguments["budget"] is not None and trainer.strategy.root_device.type == "cpu":
            rank_zero_warn(f"budget={self._arguments['budget']!r} limits GPU memory, and this run is on CPUs")
        self.memory = manage(_trained_model(pl_module, self._path), **self._arguments)
        self._figures, self._announced = MemoryFigures(self.memory), False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.memory is None or self._figures is None:
            return
        if not self._announced and self.memory.settled:
            self._announced = True
            rank_zero_info(f"Forebay's plan: {plan_text(self.memory)}")
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if every and trainer.global_step % every == 0:
            figures = self._figures.read(trainer.strategy.root_device)
            pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.memory is not None:
            self.memory.detach()


def _trained_model(module: nn.Module, path: str | None) -> nn.Module:
    if path is not None:
        found = dict(module.named_modules()).get(path)
        if found is None or not path:
            children = ", ".join(name for name, _ in module.named_children())
            raise ValueError(f"model={path!r} is no module of {type(module).__name__}; its children are {children}")
        return found
    inner = pretrained_models(module).items() or module.named_children()
    trained = {name: m for name, m in inner if _is_trained(m)}
    if len(trained) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(trained)} models that are trained ({', '.join(trained) or 'none'}), and one is "
            "managed: name it, as in model='model'"
        )
    return next(iter(trained.values()))


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
