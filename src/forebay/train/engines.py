"""Computes the gradients of a step with an engine of `forebay.pipeline`: microbatches in turn, overlapped, or in a pipeline.

Input: a managed model, or this rank's part of it, sharded by FSDP2 or not, and the microbatches of a step. Output:
gradients on its parameters, as the forward and backward of one microbatch after the other leave them, and the losses where
the last stage is. (Under mixed precision the gradients of experts, embedding and head are not rounded to bf16 before they
are summed.) `LocalGradients` and `PipelinedGradients` own their engine, the CUDA graph of a step, and the hooks on
parameters and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forebay.config import Config
from forebay.errors import UsageError
from forebay.kernels.flags import StreamWords
from forebay.managed import Managed
from forebay.models.families import all_layers, cut_in_two, keep_part, why_whole
from forebay.models.router import RouterStats, balance_loss
from forebay.moe.backends import peers_are_reachable
from forebay.moe.dispatch import TokenDispatcher
from forebay.pipeline.model import CutLayer, CutModel, Microbatch
from forebay.pipeline.p2p import DistLinks, Links, confirmed_by, neighbors
from forebay.pipeline.partition import Partition, held_by
from forebay.pipeline.peer_links import PeerLinks, PeerMailboxes, packet_bytes, slots_and_words, slots_of
from forebay.pipeline.runtime import Balance, LocalBalance, PipelineRuntime, Stage, StageBalance, Watcher
from forebay.pipeline.schedule import BACKWARD_WEIGHT, FORWARD, PipelinePlan, forward_plan, local_plan, make_plan
from forebay.train.cuda_graph import CudaGraphStep, Microbatches, StepState
from forebay.train.distributed import Mesh
from forebay.train.heartbeat import ending_after
from forebay.train.metrics import allocator_bytes
from forebay.train.unsharded_step import DeferredExperts, UnshardedStep
from forebay.train.weights_in_place import SplitWeight

# Graphs whose replays are timed: the first one's plan rests on the times of calls, the others' on those of the graph before.
_TIMED_GRAPHS = 3
# Seconds within which the first replay of a graph has to end, and its share of the time that processes wait for each other: one
# whose replay ended waits in a collective until the others have waited for theirs, and once more that long to make it end.
_REPLAY_ENDS, _REPLAY_SHARE = 300.0, 0.4


@dataclass(frozen=True)
class EngineParts:
    """What an engine works with.

    Attributes:
        model: a `*ForCausalLM`, or this pipeline rank's part of it, under the manager `memory`.
        router: counts the routers' choices; None for a dense model.
        balance: coefficient of the load-balancing loss.
        dispatcher: token dispatcher of the experts; None for a dense model.
        in_place: compute with weights in their shards' memory (`forebay.train.weights_in_place`). Callers then call
            `GradientEngine.take_weights_back` before they read or change weights between steps.
    """

    model: Any
    memory: Managed
    config: Config
    mesh: Mesh
    router: RouterStats | None
    balance: float
    dispatcher: TokenDispatcher | None
    in_place: bool = False


class GradientEngine:
    """Base of the engines: gathers parameters, calls or replays the step, and reduces gradients.

    Args:
        cut: the model as an engine runs it.

    Attributes:
        cuda_graph: the CUDA graph of a step; None if steps are always called.
        watcher: observes every action of the following steps, which are then called; None for no observer.

    Raises:
        ValueError: see `CutModel`.
    """

    cuda_graph: CudaGraphStep | None = None
    watcher: Watcher | None = None
    _runtime: PipelineRuntime
    _balance: Balance | None = None
    _boxes: PeerMailboxes | None = None

    def __init__(self, parts: EngineParts, cut: CutModel):
        self._parts, self._cut, self._device, self._router = parts, cut, parts.mesh.device, parts.router
        self._unsharded = UnshardedStep(parts.model, cut, parts.config.step.reshard, parts.in_place)
        # A model that somebody held through a step is saved whole, and loaded whole: what is written to split weights is lost.
        self._before_state_dict = (
            parts.model.register_state_dict_pre_hook(lambda *_: self.take_weights_back()),
            parts.model.register_load_state_dict_pre_hook(lambda *_: self.take_weights_back()),
        )
        self._deferred = DeferredExperts(parts.model)
        self._deferred.store.sums = self._unsharded.expert_sum

    def __call__(
        self, microbatches: Sequence[tuple[Tensor, ...]], count: Tensor | int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a step to the parameters'. With a CUDA graph, set gradients to None before each step.

        Args:
            microbatches: ids and labels [B, S] each, labels shifted, and positions [B, S] where documents are apart. The same on
                all ranks of a pipeline.
            count: targets of the step over all processes that share the batch; losses are divided by it.
            parts: microbatches of the step over these processes; the load balance is divided by it.

        Returns:
            This process's part of the cross entropy and of the load balance, scalars; 0 on ranks without the last stage.

        Raises:
            RuntimeError: there is a CUDA graph, and gradients of another step.
        """
        if self._balance is not None:
            self._balance.parts = parts
        graph = self.cuda_graph
        run: Any = self._run if graph is None or self.watcher is not None else graph
        step = partial(self._with_gathered, run, self._tokens(microbatches), count)
        losses, imbalance = self._on_stream(step)
        return losses, imbalance

    def take_weights_back(self) -> None:
        """Make the parameters hold all weights in their own dtype, until the next step."""

        def take_back() -> tuple[Tensor, ...]:
            with self._graph_memory():
                self._unsharded.take_weights_back()
            return ()

        self._on_stream(take_back)

    def split_weight(self, parameter: Tensor) -> SplitWeight | None:
        """How the memory of a parameter is split now; None if it holds the weight in its own dtype."""
        return self._unsharded.split_weight(parameter)

    def close(self) -> None:
        """Remove the hooks from parameters and modules, and free the CUDA graph."""
        if self.cuda_graph is not None:
            self.cuda_graph.release()
            self.cuda_graph = None
        self._unsharded.close()
        for hook in self._before_state_dict:
            hook.remove()
        self._deferred.close()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Context in which steps are called, not replayed. The memory of a CUDA graph is free for them."""
        graph, self.cuda_graph = self.cuda_graph, None
        if graph is not None:
            graph.release()
        try:
            yield
        finally:
            self.cuda_graph = graph

    def _with_gathered(self, run: Any, microbatches: Microbatches, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """`run` between gathering parameters and reducing gradients, which allocate in the memory of the CUDA graph."""
        graph = self.cuda_graph
        if graph is not None and graph.has_graph and self._unsharded.has_gradients():
            raise RuntimeError(
                "gradients of another step are still there; set them to None before a step that replays a CUDA graph"
            )
        with self._graph_memory():
            self._unsharded.gather()
        losses, imbalance = run(microbatches, count)
        with self._graph_memory():
            self._unsharded.reduce()
        return losses, imbalance

    def _on_stream(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`run()` on the stream of the CUDA graph, if there is one."""
        return run() if self.cuda_graph is None else self.cuda_graph.on_stream(run)

    def _graph_memory(self) -> AbstractContextManager[None]:
        """See `CudaGraphStep.graph_memory`."""
        return nullcontext() if self.cuda_graph is None else self.cuda_graph.graph_memory()

    def _run(self, microbatches: Microbatches, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """The part of a step that may be captured: it does not synchronize with the device or with other processes' hosts."""
        self._cut.check()
        work = self._work(microbatches, count)
        self._begin(sum(ids.numel() for ids, _ in microbatches))
        with nullcontext() if self._router is None else self._router.counting():
            losses = self._runtime.run(work, self._cut.hidden, watcher=self.watcher)
        self._unsharded.end(count)
        imbalance = self._finish()
        return losses.sum() if losses is not None else torch.zeros((), device=self._device), imbalance

    def _tokens(self, microbatches: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor]]:
        """Ids and labels; what positions become is written to the memory that the step reads."""
        for place, (_, _, *positions) in enumerate(microbatches):
            if positions:
                self._cut.write_arguments(place, positions[0])
        return [(ids, labels) for ids, labels, *_ in microbatches]

    def _work(self, microbatches: Microbatches, count: Tensor | int) -> list[Microbatch]:
        apart = self._parts.config.data.packing == "documents"
        return [Microbatch(*tokens, count, place if apart else None) for place, tokens in enumerate(microbatches)]

    def _begin(self, tokens: int) -> None:
        self._unsharded.begin(tokens)

    def _capture(self) -> None:
        """Capture steps from now on, if the configuration says so."""
        config, mesh, memory, boxes = self._parts.config, self._parts.mesh, self._parts.memory, self._boxes
        if not captures(config, mesh):
            return
        self._unsharded.keep_weights()
        states = [StepState(self._unsharded.take_gradients, self._unsharded.put_gradients)]
        if self._router is not None:
            states.append(StepState(self._router.take_counts, self._router.add_counts))
        pages = memory.pages
        self.cuda_graph = CudaGraphStep(
            self._run,
            states,
            mesh.device,
            lambda: 0 if pages is None else pages.generation,
            mesh.all,
            ready=lambda: memory.settled,
            around=memory.manager.capturing,
            # A replayed step is faster than the called ones that the manager plans by: the link carries less in it.
            timed_graphs=_TIMED_GRAPHS if {"offload", "auto"} & config.memory.placements else 0,
            plan_again=memory.manager.plan_again,
            moves=lambda: memory.plan is not None and memory.plan.planned_bytes > 0,
            flags=[memory.manager.store.lanes.flags, self._runtime.context.flags, *([] if boxes is None else [boxes])],
            ends=min(_REPLAY_ENDS, _REPLAY_SHARE * config.parallel.timeout),
            alone=mesh.size == 1,
            # A process whose graph did not go on was late for the others.
            forget=self._forget,
            take_peak=memory.manager.take_peak,
        )

    def _forget(self) -> None:
        """Clear what a graph that was made to end left behind; collective."""
        if self._parts.dispatcher is not None:
            self._parts.dispatcher.clear_lost()
        if self._boxes is not None:
            self._boxes.clear()

    def _finish(self) -> Tensor:
        """End the step; this process's part of the load balance."""
        imbalance = self._balance.take_losses() if self._balance is not None else torch.zeros((), device=self._device)
        self._parts.memory.manager.join()
        return imbalance


class LocalGradients(GradientEngine):
    """Runs a model without pipeline stages: one microbatch after the other, or (`parallel.overlap`) each forward beside the
    backward before it, which hides the communication of both.

    Losses and gradients are bitwise those of plain autograd, one microbatch after the other. The order of overlapped computations
    (`forebay.pipeline.schedule.turns`, drawn in docs/expert_parallel.md) follows from the list of layers alone. So it is the same
    on every rank, and no rank waits for a transfer that another one enqueues later.
    """

    def __init__(self, parts: EngineParts):
        cut = CutModel(parts.model, parts.memory, getattr(torch, parts.config.model.computed_in))
        super().__init__(parts, cut)
        if parts.router is not None:
            self._balance = LocalBalance(balance_loss, parts.balance, self._device)
        microbatches = microbatches_of(parts.config, parts.mesh)
        plan = local_plan(microbatches, parts.config.step.overlap)
        self._has_budget, self._is_one = parts.config.memory.policy == "auto", microbatches == 1
        self._begun = 0  # bytes of gradients that the step's begin allocated, where a budget counts them
        stage = Stage(cut.layers, self._budgeted_prologue if self._has_budget else cut.prologue, cut.epilogue)
        self._runtime = PipelineRuntime(
            {0: stage}, plan, 0, None, self._device, balance=self._balance, weights=self._deferred.store
        )
        self._capture()

    def _budgeted_prologue(self, microbatch: Microbatch) -> Tensor:
        """The prologue, where a budget counts from. A single microbatch makes the gradients, and of several all find them."""
        self._parts.memory.manager.step_begins(self._begun if self._is_one else -self._unsharded.missing_gradients())
        return self._cut.prologue(microbatch)

    def _begin(self, tokens: int) -> None:
        if not (self._has_budget and self._is_one and self._device.type == "cuda"):
            super()._begin(tokens)
            return
        held = allocator_bytes(self._device, "allocated", "current")
        super()._begin(tokens)
        self._begun = allocator_bytes(self._device, "allocated", "current") - held


def captures(config: Config, mesh: Mesh) -> bool:
    return config.step.graph and mesh.device.type == "cuda"


def plan_of(config: Config, mesh: Mesh) -> PipelinePlan:
    """The plan of a step, for a configuration that `check_world` accepted."""
    p = config.parallel
    return make_plan(p.schedule, p.pp, microbatches_of(config, mesh), p.chunks, config.weights_early)


def microbatches_of(config: Config, mesh: Mesh) -> int:
    return config.microbatches(mesh.batch.size)


def keep_stages(model: Any, plan: PipelinePlan, partition: Partition, rank: int) -> None:
    """Reduce a model on the meta device to the stages of pipeline rank `rank`.

    Raises:
        UsageError: the first and the last stage share a weight and are on two ranks, a layer that is cut in two cannot be, or
            layers hand on more than hidden states; on every rank alike.
    """
    if model.config.get_text_config().tie_word_embeddings and plan.ranks[0] != plan.ranks[-1]:
        raise UsageError(
            f"parallel.schedule = {plan.name!r} has the embedding on another rank than the head, and this model has one weight "
            "for both (tie_word_embeddings); valid are 'dualpipev' and 'zbv', or tie_word_embeddings = false in model.config"
        )
    if why := why_whole(model):
        raise UsageError(f"parallel.pp = {len(plan.actions)}: {why}; valid is 1")
    try:
        for number in {layer.number for stage in partition.layers for layer in stage if not layer.is_whole}:
            cut_in_two(all_layers(model)[number])
    except ValueError as error:
        raise UsageError(f"parallel.partition: {error}") from error
    stages = plan.stages(rank)
    layers = held_by(partition.layers[stage] for stage in stages)
    keep_part(
        model,
        [layer.number for layer in layers],
        embedding=0 in stages,
        head=len(plan.ranks) - 1 in stages,
        without_attention=[layer.number for layer in layers if not layer.attention],
        without_mlp=[layer.number for layer in layers if not layer.mlp],
    )


class PipelinedGradients(GradientEngine):
    """Runs the stages of this pipeline rank.

    Args:
        plan, partition: actions of a step, and layers by stage.
        experts: of a MoE layer, over all processes; 0 for a dense model.
    """

    def __init__(self, parts: EngineParts, plan: PipelinePlan, partition: Partition, experts: int):
        config, mesh, memory = parts.config, parts.mesh, parts.memory
        assert mesh.pipeline is not None
        super().__init__(parts, CutModel(parts.model, memory, getattr(torch, config.model.computed_in)))
        self.plan, self.partition = plan, partition
        self._rank, self._memory = mesh.pp_rank, memory
        if experts:
            self._balance = StageBalance(experts, parts.balance, mesh.device)
        self._links = self._links_of(plan, mesh.pipeline)
        self._stages = {s: self._stage(s) for s in plan.stages(mesh.pp_rank)}
        regions = {s: [path for layer in self._layers(s) for path in layer.regions] for s in self._stages}
        memory.manager.follow(_backward_order(plan, self._rank, regions), steady=not config.step.reshard)
        self._runtime = self._runtime_of(plan)
        self._forward_runtime: PipelineRuntime | None = None
        self._capture()

    def __call__(
        self, microbatches: Sequence[tuple[Tensor, ...]], count: Tensor | int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """See `GradientEngine`."""
        with self._limited():
            return super().__call__(microbatches, count, parts)

    def _limited(self) -> AbstractContextManager[None]:
        """Context that ends the process if its host takes longer than `parallel.timeout`: a stream that waits for a copy of
        another rank holds up the host before it gets to a collective, whose timeout NCCL watches."""
        seconds = self._parts.config.parallel.timeout
        why = f"a step of pipeline rank {self._rank} took more than parallel.timeout = {seconds} s: another rank hangs"
        return nullcontext() if self._boxes is None else ending_after(seconds, why)

    def close(self) -> None:
        super().close()
        if self._boxes is not None:
            self._boxes.close()

    @property
    def links(self) -> str:
        """How messages travel."""
        return self._links.about

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """The sum of the cross entropies of all targets, fp32; 0 on ranks without the last stage.

        It takes as many microbatches as a step has. The caller gives gathered parameters back.
        """
        if self._forward_runtime is None:
            self._forward_runtime = self._runtime_of(forward_plan(self.plan))
        self._cut.check()
        self._unsharded.gather()
        work = self._work(self._tokens(microbatches), 1)
        with self._limited():
            losses = self._forward_runtime.run(work, self._cut.hidden)
        if self._balance is not None:
            self._balance.take_losses()
        return losses.float().sum() if losses is not None else torch.zeros((), device=self._device)

    @contextmanager
    def watched(self, watcher: Watcher, instead: Callable[[int, Stage], Stage] | None = None) -> Iterator[None]:
        """Context in which `watcher` observes every action, and `instead(number, stage)` runs in the place of each stage."""
        before = self._runtime.stages
        if instead is not None:
            self._runtime.stages = {number: instead(number, stage) for number, stage in before.items()}
        self.watcher = watcher
        try:
            yield
        finally:
            self._runtime.stages, self.watcher = before, None

    def _links_of(self, plan: PipelinePlan, group: ProcessGroup) -> Links:
        """Copies into each other's memory where the GPUs of all pipelines can, unless the configuration says NCCL."""
        config, mesh, pairs = self._parts.config, self._parts.mesh, neighbors(plan.ranks)
        asked = mesh.device.type == "cuda" and config.parallel.may_share
        # Collective, so asked on all ranks before anything that can differ between them.
        if asked and mesh.all(peers_are_reachable(group) and StreamWords.of_driver() is not None):
            slots = slots_of(plan)
            size = self._packet_bytes(config.microbatch(mesh.batch.size) * config.train.sequence)
            self._boxes = PeerMailboxes(group, *slots_and_words(pairs, slots), size, mesh.device)
            return PeerLinks(mesh.pp_rank, pairs, slots, self._boxes)
        confirmed = confirmed_by(plan, mesh.pp_rank)
        timeout = timedelta(seconds=config.parallel.timeout)
        return DistLinks(group, pairs, mesh.device, mesh.pipelines, confirmed, timeout)

    def _packet_bytes(self, tokens: int) -> int:
        """Bytes of the largest packet: hidden states of `tokens`, and what the load balance adds."""
        like = [self._cut.hidden(Microbatch(torch.empty(1, tokens), torch.empty(0), 1))]
        return packet_bytes(like + ([*self._balance.like()[0]] if self._balance is not None else []))

    def _layers(self, stage: int) -> list[CutLayer]:
        return [self._cut.layer(*layer) for layer in self.partition.layers[stage]]

    def _stage(self, number: int) -> Stage:
        cut = self._cut
        return Stage(
            layers=self._layers(number),
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
        )


def _backward_order(plan: PipelinePlan, rank: int, regions: Mapping[int, Sequence[str]]) -> list[tuple[str, int]]:
    """The calls of regions (path, number of the call) in the order in which the plan runs their backwards.

    Args:
        regions: by stage of this rank, the paths that a forward calls, in order.
    """
    counts: dict[str, int] = {}
    called: dict[tuple[int, int], list[tuple[str, int]]] = {}
    order: list[tuple[str, int]] = []
    for action in plan.computations(rank):
        here = (action.stage, action.microbatch)
        if action.kind == FORWARD:
            called[here] = []
            for path in regions[action.stage]:
                called[here].append((path, counts.get(path, 0)))
                counts[path] = counts.get(path, 0) + 1
        elif action.kind != BACKWARD_WEIGHT:
            order += reversed(called.pop(here))
    return order
