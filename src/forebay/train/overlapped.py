"""A step's gradients with each microbatch's communication behind another's computation: the trainer's use of the engine.

In: a managed model, sharded by FSDP2 or not, and a step's microbatches. Out: gradients on its parameters, as plain forward and
backward of one microbatch after the other leave them (under mixed precision those of experts, embedding and head are not rounded
to bf16 before they are summed), and the losses.

The engine is `forebay.pipeline.overlap`; `forebay.train.gathered` has the weights ready for it. `OverlappedGradients` owns both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from forebay.models.manage import Managed
from forebay.models.router import RouterStats, balance_loss
from forebay.pipeline.causal_lm import CutModel, Microbatch
from forebay.pipeline.overlap import OverlappedStep
from forebay.train.captured import CapturableEngine, Parts, captured_step
from forebay.train.gathered import DeferredExperts, GatheredStep


class OverlappedGradients(CapturableEngine):
    """Forward and backward of all microbatches of a step.

    Args:
        model: a `*ForCausalLM` under `memory`, with all regions kept.
        router: what counts the routers' choices; None for a dense model.
        balance: coefficient of the load-balancing loss.
        reshard: give the experts' gathered weights back after each use, and gather them again in backward; everything else
            stays gathered for the step.
        graph: capture a step's forwards and backwards in one CUDA graph, once all is warm; not with `reshard`.
        agreed: for `graph`: whether something is true on all processes.

    Attributes:
        captured: the graph and when it is made; None without `graph`.

    Raises:
        ValueError: see `CutModel`.
    """

    def __init__(
        self,
        model: Any,
        memory: Managed,
        device: torch.device,
        router: RouterStats | None,
        balance: float,
        reshard: bool = False,
        graph: bool = False,
        agreed: Callable[[bool], bool] = bool,
    ):
        self._router, self._balance, self._device = router, balance, device
        cut = CutModel(model, memory)
        self._parts = 1
        self._imbalance: list[Tensor] = []
        routers = self._balance_of if router is not None else None
        self._deferred = DeferredExperts(model)
        self._step = OverlappedStep(
            cut.layers, cut.prologue, cut.epilogue, device, routers=routers, weights=self._deferred.store
        )
        self._gathered = GatheredStep(model, cut, reshard)
        self._deferred.store.sums = self._gathered.expert_sum
        if graph:
            self.captured = captured_step(
                self._run, self._gathered, router, memory, device, agreed, flags=self._step.flags
            )

    def __call__(
        self, microbatches: Sequence[tuple[Tensor, Tensor]], count: Tensor | int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients are added to what is there. With a graph nothing may be there: forget gradients before each step.

        Args:
            microbatches: ids and labels [B, S] each; labels are shifted.
            count: targets of the step over all processes, by which losses are divided.
            parts: microbatches of the step over all processes, by which the load balance is divided.

        Returns:
            This process's part of the cross entropy and of the load balance, scalars.

        Raises:
            RuntimeError: there is a graph, and gradients of another step.
        """
        self._parts = parts
        return self._whole_step(microbatches, count)

    def _run(self, microbatches: Parts, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """What asks nothing of other processes but the exchange, and nothing of the device."""
        self._imbalance = []
        work = [Microbatch(ids, labels, count) for ids, labels in microbatches]
        self._gathered.begin(sum(ids.numel() for ids, _ in microbatches))
        with nullcontext() if self._router is None else self._router.counting():
            losses = self._step.run(work)
        self._gathered.end(count)
        imbalance = torch.stack(self._imbalance).sum() if self._imbalance else torch.zeros((), device=self._device)
        return losses.sum(), imbalance

    def close(self) -> None:
        """Remove what was put on parameters and modules, and give up the graph."""
        self._give_up_graph()
        self._gathered.close()
        self._deferred.close()

    def _balance_of(self, said: list[tuple[Tensor, Tensor]]) -> Tensor:
        with torch.set_grad_enabled(self._balance != 0):
            imbalance = balance_loss(said).float() / self._parts
        self._imbalance.append(imbalance.detach())
        return self._balance * imbalance
