"""A step's gradients with each microbatch's communication behind another's computation: the trainer's use of the engine.

In: a managed model, sharded by FSDP2 or not, and a step's microbatches. Out: gradients on its parameters, as plain forward and
backward of one microbatch after the other leave them, and the losses.

The engine (`forebay.pipeline.overlap`) runs stages and not modules, so FSDP2's hooks do not see the step: weights are
gathered here once before it, and gradients reduced once behind it, as `torch.distributed.pipelining` does it. Under mixed
precision each gradient is added into a float32 sum as soon as it is made, so no second set of gradients waits for a microbatch's end.

`OverlappedGradients` owns the engine and the hooks on gathered parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from forebay.models.manage import Managed
from forebay.models.router import RouterStats, balance_loss
from forebay.pipeline.causal_lm import CutModel, Microbatch
from forebay.pipeline.overlap import OverlappedStep


class OverlappedGradients:
    """Forward and backward of all microbatches of a step.

    Args:
        model: a `*ForCausalLM` under `memory`, with all regions kept.
        router: what counts the routers' choices; None for a dense model.
        balance: coefficient of the load-balancing loss.

    Raises:
        ValueError: see `CutModel`.
    """

    def __init__(self, model: Any, memory: Managed, device: torch.device, router: RouterStats | None, balance: float):
        self._model, self._router, self._balance = model, router, balance
        self._device = device
        self._cut = cut = CutModel(model, memory)
        self._parts = 1
        self._imbalance: list[Tensor] = []
        routers = self._balance_of if router is not None else None
        self._step = OverlappedStep(cut.layers, cut.prologue, cut.epilogue, device, routers=routers)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sharded = isinstance(model, FSDPModule)

    def __call__(
        self, microbatches: Sequence[tuple[Tensor, Tensor]], count: Tensor | int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients are added to what is there.

        Args:
            microbatches: ids and labels [B, S] each; labels are shifted.
            count: targets of the step over all processes, by which losses are divided.
            parts: microbatches of the step over all processes, by which the load balance is divided.

        Returns:
            This process's part of the cross entropy and of the load balance, scalars.
        """
        self._parts, self._imbalance = parts, []
        work = [Microbatch(ids, labels, count) for ids, labels in microbatches]
        if self._sharded:
            self._gather()
        head = self._begin_head_sum()
        if self._router is None:
            losses = self._step.run(work)
        else:
            with self._router.counting():
                losses = self._step.run(work)
        if head is not None:
            self._end_head_sum(head, count)
        if self._sharded:
            self._reduce()
        imbalance = torch.stack(self._imbalance).sum() if self._imbalance else torch.zeros((), device=self._device)
        return losses.sum(), imbalance

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _balance_of(self, said: list[tuple[Tensor, Tensor]]) -> Tensor:
        with torch.set_grad_enabled(self._balance != 0):
            imbalance = balance_loss(said).float() / self._parts
        self._imbalance.append(imbalance.detach())
        return self._balance * imbalance

    def _begin_head_sum(self) -> Any:
        """Under mixed precision, let the loss add the head's gradient to a sum; the FSDP2 parameter it is for."""
        weight, bias = self._cut.head.weight, self._cut.head.bias
        if not self._sharded or bias is not None or not weight.requires_grad:
            return None
        for group in self._groups():
            for held in group.fsdp_params:
                if held.unsharded_param is weight and held.reduce_dtype == torch.float32 != weight.dtype:
                    self._cut.head_sum = torch.zeros_like(weight, dtype=torch.float32)
                    return held
        return None

    def _end_head_sum(self, held: Any, count: Tensor | int) -> None:
        head_sum, self._cut.head_sum = self._cut.head_sum, None
        assert head_sum is not None
        head_sum.div_(count)
        if held.unsharded_accumulated_grad is None:
            held.unsharded_accumulated_grad = head_sum
        else:  # tied to the embedding, which has its own part
            held.unsharded_accumulated_grad.add_(head_sum)

    def _groups(self) -> list[Any]:
        states = fully_shard.state(self._model)._state_ctx.all_states  # type: ignore[attr-defined]
        return [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]

    def _gather(self) -> None:
        fully_shard.state(self._model)._lazy_init()  # type: ignore[attr-defined]  # the root's forward would do it
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        if not self._hooks:
            # FSDP2 makes each gathered parameter once and fills it again for every step: hooks on it last.
            for group in self._groups():
                for held in group.fsdp_params:
                    self._accumulate(held)

    def _accumulate(self, held: Any) -> None:
        """Add each gradient of a gathered parameter into a sum of the dtype that is reduced in."""
        dtype = held.reduce_dtype
        if dtype is None or not held.unsharded_param.requires_grad:
            return

        def add(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.dtype == dtype:
                return  # autograd itself sums in this dtype
            if held.unsharded_accumulated_grad is None:
                held.unsharded_accumulated_grad = gradient.to(dtype)
            else:
                _local(held.unsharded_accumulated_grad).add_(_local(gradient))
            parameter.grad = None

        self._hooks.append(held.unsharded_param.register_post_accumulate_grad_hook(add))

    def _reduce(self) -> None:
        for group in self._groups():
            group.reduce_grads, group.reshard_after_backward = True, True
            group.post_backward()
        # Joins FSDP2's streams; without it the optimizer could read shards that are still being written.
        fully_shard.state(self._model)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
