"""The gradients of a step from an engine of `forebay.pipeline`: overlapped microbatches, or a pipeline.

Input: a managed model or this rank's part of it, sharded by FSDP2 or not, and the microbatches of a step. Output:
gradients on its parameters, and the losses where the last stage is. `OverlappedGradients` and `PipelinedGradients`
own their engine and its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from forebay.config import Config
from forebay.errors import UsageError
from forebay.managed import Managed
from forebay.models.families import keep_part
from forebay.models.router import RouterStats, balance_loss
from forebay.pipeline.model import CutLayer, CutModel, Microbatch
from forebay.pipeline.p2p import DistLinks, Links, confirmed_by, neighbours
from forebay.pipeline.partition import Partition
from forebay.pipeline.runtime import OverlappedStep, PipelineRuntime, Stage, StageBalance, Watcher
from forebay.pipeline.schedule import BACKWARD_WEIGHT, FORWARD, Action, PipelinePlan, forward_plan, make_plan
from forebay.train.cuda_graph import CudaGraphEngine, Parts, cuda_graph_step
from forebay.train.distributed import Mesh
from forebay.train.unsharded_step import DeferredExperts, UnshardedStep

# A step's gradients with each microbatch's communication behind another's computation: the trainer's use of the engine.
#
# In: a managed model, sharded by FSDP2 or not, and a step's microbatches. Out: gradients on its parameters, as plain forward
# and backward of one microbatch after the other leave them (under mixed precision those of experts, embedding and head are not
# rounded to bf16 before they are summed), and the losses.
#
# The engine is `forebay.pipeline.runtime`; `forebay.train.unsharded_step` has the weights ready for it. `OverlappedGradients`
# owns both.


class OverlappedGradients(CudaGraphEngine):
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
        self._unsharded = UnshardedStep(model, cut, reshard)
        self._deferred.store.sums = self._unsharded.expert_sum
        if graph:
            self.captured = cuda_graph_step(
                self._run, self._unsharded, router, memory, device, agreed, flags=self._step.flags
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
        self._unsharded.begin(sum(ids.numel() for ids, _ in microbatches))
        with nullcontext() if self._router is None else self._router.counting():
            losses = self._step.run(work)
        self._unsharded.end(count)
        imbalance = torch.stack(self._imbalance).sum() if self._imbalance else torch.zeros((), device=self._device)
        return losses.sum(), imbalance

    def close(self) -> None:
        """Remove what was put on parameters and modules, and give up the graph."""
        self._give_up_graph()
        self._unsharded.close()
        self._deferred.close()

    def _balance_of(self, router_outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        with torch.set_grad_enabled(self._balance != 0):
            imbalance = balance_loss(router_outputs).float() / self._parts
        self._imbalance.append(imbalance.detach())
        return self._balance * imbalance


# A step's gradients on a pipeline: the trainer's use of the runtime.
#
# In: this pipeline rank's part of a model (`forebay.models.families`), managed and sharded, and a step's microbatches. Out:
# gradients on its parameters, and the losses where the last stage is.
#
#     plan_of, keep_stages       what a rank does in a step, and what it needs of the model for that
#     PipelinedGradients(...)    stages, links and runtime; a call is a step, `evaluate` a forward
#
# `PipelinedGradients` owns the runtime, the links and the hooks on gathered parameters.


def plan_of(config: Config, mesh: Mesh) -> PipelinePlan:
    """The plan of a step. `check_world` has made sure that there is one."""
    p = config.parallel
    microbatches = config.train.batch // mesh.batch.size // config.microbatch(mesh.batch.size)
    return make_plan(p.schedule, p.pp, microbatches, p.chunks, config.weights_early)


def keep_stages(model: Any, plan: PipelinePlan, partition: Partition, rank: int) -> None:
    """Leave of a model on the meta device what pipeline rank `rank` has of it.

    Raises:
        UsageError: on every rank alike, if first and last stage share a weight and are on two ranks.
    """
    if model.config.get_text_config().tie_word_embeddings and plan.ranks[0] != plan.ranks[-1]:
        raise UsageError(
            f"parallel.schedule = {plan.name!r} has the embedding on another rank than the head, and this model has one weight "
            "for both (tie_word_embeddings); valid are 'dualpipev' and 'zbv', or tie_word_embeddings = false in model.config"
        )
    stages = plan.stages(rank)
    layers = [number for stage in stages for number in partition.layers[stage]]
    keep_part(model, layers, embedding=0 in stages, head=len(plan.ranks) - 1 in stages)


class PipelinedGradients(CudaGraphEngine):
    """Forward and backward of all microbatches of a step, on this pipeline rank.

    Args:
        model: its part of a `*ForCausalLM`, under `memory`.
        experts: of each MoE layer, over all processes; 0 for a dense model.
        router: what counts the routers' choices; None where there are none.
        balance: coefficient of the load-balancing loss.
        early_release: see `PipelineRuntime`.
        graph: capture a step's forwards and backwards in one CUDA graph, once all is warm; not with `parallel.reshard`.
        agreed: for `graph`: whether something is true on all processes.

    Attributes:
        captured: the graph and when it is made; None without `graph`. Steps that are watched are called.
        plan, partition: of a step, and of the layers.
        ran: the actions of the last step, as they ran.
        watcher: is told of every action of the steps to come; None for nobody.

    Raises:
        ValueError: see `CutModel`.
    """

    def __init__(
        self,
        model: Any,
        memory: Managed,
        config: Config,
        mesh: Mesh,
        plan: PipelinePlan,
        partition: Partition,
        *,
        experts: int,
        router: RouterStats | None,
        balance: float,
        early_release: bool = True,
        graph: bool = False,
        agreed: Callable[[bool], bool] = bool,
    ):
        assert mesh.pipeline is not None
        self.plan, self.partition, self.ran, self.watcher = plan, partition, list[Action](), None
        self._device, self._router, self._rank = mesh.device, router, mesh.pp_rank
        pipelines = torch.arange(mesh.size).view(mesh.pp, -1).t().tolist()
        confirmed = confirmed_by(plan, mesh.pp_rank)
        self._links: Links = DistLinks(mesh.pipeline, neighbours(plan.ranks), mesh.device, pipelines, confirmed)
        self._balance = StageBalance(experts, balance, mesh.device) if experts else None
        self._cut = cut = CutModel(model, memory, getattr(torch, config.model.compute or config.model.dtype))
        self._unsharded = UnshardedStep(model, cut, config.parallel.reshard)
        self._deferred = DeferredExperts(model)
        self._deferred.store.sums = self._unsharded.expert_sum
        self._stages = {s: self._stage(s, partition) for s in plan.stages(mesh.pp_rank)}
        self._memory, self._early_release = memory, early_release
        memory.manager.follow(self._backwards(plan, partition), steady=not config.parallel.reshard)
        self._runtime = self._runtime_of(plan)
        if graph:
            policy = config.memory.policy
            offloads = "offload" in (policy.values() if isinstance(policy, Mapping) else (policy,))
            self.captured = cuda_graph_step(
                self._run, self._unsharded, router, memory, mesh.device, agreed, offloads, self._runtime.context.flags
            )
        self._forward: PipelineRuntime | None = None

    watcher: Watcher | None

    def __call__(
        self, microbatches: Sequence[tuple[Tensor, Tensor]], count: Tensor | int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients are added to what is there. With a graph nothing may be there: forget gradients before each step.

        Args:
            microbatches: ids and labels [B, S] each; labels are shifted. The same on all ranks of the pipeline.
            count: targets of the step over all processes that share the batch, by which losses are divided.
            parts: microbatches of the step over these, by which the load balance is divided.

        Returns:
            This process's part of the cross entropy and of the load balance, scalars: 0 on ranks without the last stage.

        Raises:
            RuntimeError: there is a graph, and gradients of another step.
        """
        if self._balance is not None:
            self._balance.scale = 1 / parts
        return self._whole_step(microbatches, count, replay=self.watcher is None)

    def _run(self, microbatches: Parts, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """What may be captured: it asks nothing of the device."""
        work = [Microbatch(ids, labels, count) for ids, labels in microbatches]
        self._unsharded.begin(sum(ids.numel() for ids, _ in microbatches))
        with nullcontext() if self._router is None else self._router.counting():
            losses, self.ran = self._runtime.run(work, self._cut.hidden, watcher=self.watcher)
        self._unsharded.end(count)
        imbalance = self._balance.take_losses() if self._balance is not None else torch.zeros((), device=self._device)
        self._memory.manager.join()
        return losses.sum() if losses is not None else torch.zeros((), device=self._device), imbalance

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The sum of the cross entropies of all targets, fp32; 0 on ranks without the last stage. As many microbatches as in a
        step. Leaves gathered weights to be given back by the caller."""
        if self._forward is None:
            self._forward = self._runtime_of(forward_plan(self.plan))
        self._unsharded.gather()
        work = [Microbatch(ids, labels, 1) for ids, labels in microbatches]
        losses, _ = self._forward.run(work, self._cut.hidden)
        if self._balance is not None:
            self._balance.take_losses()
        return losses.float().sum() if losses is not None else torch.zeros((), device=self._device)

    @contextmanager
    def watched(self, watcher: Watcher, instead: Callable[[int, Stage], Stage] | None = None) -> Iterator[None]:
        """Within, steps tell `watcher` of every action, and run `instead(number, stage)` in the place of each stage."""
        before = self._runtime.stages
        if instead is not None:
            self._runtime.stages = {number: instead(number, stage) for number, stage in before.items()}
        self.watcher = watcher
        try:
            yield
        finally:
            self._runtime.stages, self.watcher = before, None

    def close(self) -> None:
        """Remove what was put on parameters and modules, and give up the graph."""
        self._give_up_graph()
        self._unsharded.close()
        self._deferred.close()

    def _backwards(self, plan: PipelinePlan, partition: Partition) -> list[tuple[str, int]]:
        """The regions' calls in the order in which they run backward: the plan's."""
        counts: dict[str, int] = {}
        called: dict[tuple[int, int], list[tuple[str, int]]] = {}
        order: list[tuple[str, int]] = []
        for action in plan.computations(self._rank):
            here = (action.stage, action.microbatch)
            if action.kind == FORWARD:
                called[here] = []
                for number in partition.layers[action.stage]:
                    for path in self._layer(number).regions:
                        called[here].append((path, counts.get(path, 0)))
                        counts[path] = counts.get(path, 0) + 1
            elif action.kind != BACKWARD_WEIGHT:
                order += reversed(called.pop(here))
        return order

    def _layer(self, number: int) -> CutLayer:
        return self._cut.layers[self._cut.numbers.index(number)]

    def _stage(self, number: int, partition: Partition) -> Stage:
        cut = self._cut
        return Stage(
            layers=[self._layer(n) for n in partition.layers[number]],
            prologue=cut.prologue if number == 0 else None,
            epilogue=cut.epilogue if number == len(self.plan.ranks) - 1 else None,
            enter=cut.enter,
        )

    def _runtime_of(self, plan: PipelinePlan) -> PipelineRuntime:
        return PipelineRuntime(
            self._stages,
            plan,
            self._rank,
            self._links,
            self._device,
            balance=self._balance,
            weights=self._deferred.store,
            idle=self._memory.manager.idle,
            early_release=self._early_release,
        )
