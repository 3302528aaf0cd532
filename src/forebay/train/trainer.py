"""One optimizer step on one process or on N: data, model, activation manager, gradients and optimizer.

Input: a valid `Config` and the `Mesh` of processes. Output: a `Trainer`, whose `step(n)` trains on batch n and returns a
`StepRecord` that is the same on every process. A step takes token windows by position, splits them into microbatches, sums
cross entropy over the microbatches and divides by the targets of the whole step, adds the router's load-balancing loss,
sums gradients over processes, clips, and updates parameters and router biases. The host waits for the device once a step,
when it reads the losses, and once more where a capacity can be exceeded (`forebay.train.capacity_retry`). `Trainer` owns
everything that it builds.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from forebay.config import Config, Schedule, check_experts, why_called
from forebay.errors import NotFinite, RunError, UsageError
from forebay.managed import Managed, manage
from forebay.models.families import moe_blocks
from forebay.models.packing import documents_apart
from forebay.models.router import RouterStats
from forebay.moe.dispatch import TokenDispatcher
from forebay.pipeline.partition import Partition, partition_of
from forebay.pipeline.schedule import PipelinePlan
from forebay.policy import format_bytes
from forebay.train import hf_io, parallel
from forebay.train.allocator_settings import expandable_segments
from forebay.train.capacity_retry import CapacityRetries
from forebay.train.cuda_graph import CudaGraphStep
from forebay.train.data import IGNORE, Batch, load_mixture
from forebay.train.distributed import Mesh, on_all
from forebay.train.engines import EngineParts, LocalGradients, PipelinedGradients, keep_stages, plan_of
from forebay.train.fast_path import fast_path_of
from forebay.train.generators import seed_all
from forebay.train.health import HealthRecorder, StepHealth
from forebay.train.metrics import StepRecord, allocator_bytes, peak_bytes, reserved_bytes
from forebay.train.model_checks import check_documents_apart, check_length
from forebay.train.staging import available_bytes
from forebay.train.tokenizer import Tokenizer, load_tokenizer
from forebay.train.world import ALONE, processes_of_node

# Smallest tensor that a pipeline offloads. A microbatch of a pipeline is short: the host takes as long to launch the copy
# of a smaller tensor as the device takes to compute.
_PIPELINE_MIN_BYTES = 16 << 20

# Host memory of a step's batch: the window, its inputs and its targets, int64 each; arrays and views of a window, measured.
_TOKEN_BYTES, _WINDOW_BYTES = 24, 1024

Microbatch = tuple[Tensor, ...]
"""Ids, shifted labels and, where documents are apart, positions; int64 [B, S]."""


def lr_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Factor on the learning rate at `step`, from 1, of `steps`: a pure function, so that no state has to be saved.

    A linear warm-up reaches 1 at step `warmup`; it is never 0. Then ``cosine`` falls along half a cosine to `minimum` at the last
    step; ``wsd`` stays at 1 until `decay` steps before the end and falls linearly to `minimum`; ``constant`` stays at 1.
    """
    if step <= schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
        falling = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        falling = min(1.0, max(0.0, (steps - step) / max(1, schedule.decay)))
    return schedule.minimum + (1.0 - schedule.minimum) * falling


class Trainer:
    """Model, manager, optimizer and data of one process.

    Args:
        mesh: the processes, which the caller closes; None for this process alone.
        partition: layers by stage of a pipeline, the same on all processes. Without one, ``parallel.partition = "auto"`` is the
            even partition: the trainer does not know what layers cost (`forebay.estimate.layers.plan_layers` does).

    Attributes:
        config: with a value for each key that was "auto"; see `forebay.config.fast_path`.
        model: a transformers `*ForCausalLM`, managed; sharded if there is a process group. Read this attribute anew after a step:
            steps may leave weights in another form (`forebay.train.weights_in_place`), which reading it turns back.
        memory: what `forebay.manage` returned.
        dispatcher: token dispatcher; None without expert parallelism.
        engine: runs the microbatches of a step; None if they run one after the other.

    Raises:
        UsageError, RunError: as `Mesh.open`, `load_mixture`, `hf_io.build` and `forebay.train.parallel` raise.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None, partition: Partition | None = None):
        with ExitStack() as stack:
            self.mesh = Mesh.open(config, ALONE) if mesh is None else mesh
            if mesh is None:
                stack.callback(self.mesh.close)
            stack.enter_context(expandable_segments(config.device.expandable_segments, self.mesh.device))
            self._build(fast_path_of(config, self.mesh).config, self.mesh, partition)
            self._end = stack.pop_all().close

    def _build(self, config: Config, mesh: Mesh, partition: Partition | None) -> None:
        self.config, self.device = config, mesh.device
        if config.device.threads:
            torch.set_num_threads(config.device.threads)
        _check_batch_memory(config, mesh)
        tokenizer = load_tokenizer(config.data.tokenizer)
        declared = hf_io.configuration(config.model, tokenizer.vocabulary, tokenizer.special)
        hf_io.check_vocabulary(declared, tokenizer.vocabulary)
        _check_same("another model", partial(hf_io.identity, config.model, declared), mesh)
        self.corpus = load_mixture(config.data, tokenizer)
        _check_same("other data", lambda: (self.corpus.identity, self.corpus.description), mesh)
        self._batches, self._held_out = self.corpus.batches(config.data, config.train, mesh.batch)
        self._ahead: tuple[int, tuple[Batch, list[Microbatch]]] | None = None  # a step's number, and its batch
        seed_all(config.train.seed)
        experts = self._build_model(tokenizer, declared, partition)
        self.dispatcher = parallel.dispatcher_of(self._model, mesh, config)
        self.memory = _manage(self._model, config, self.dispatcher)
        self._router = _router_stats(self._model)
        self._balance = hf_io.balance_coefficient(self._model.config)
        self.engine = self._build_engine(experts)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        o = config.optimizer
        groups = decay_groups(self._model, o.weight_decay)
        self.optimizer = parallel.ShardedAdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=o.fused or None)
        if self.engine is not None:
            self.optimizer.split_weight = self.engine.split_weight
        self._retries = CapacityRetries(
            mesh,
            self.dispatcher,
            self.memory.pages,
            self._router,
            eager=self.eager,
            on_resize=self.cuda_graph.release if self.cuda_graph is not None else lambda: None,
            ahead=self._updates_ahead,
        )
        self._freed_graph = False  # for an evaluation
        self._health = HealthRecorder(mesh, self._router, config.log.health, self.cuda_graph is not None)
        if mesh.rank:
            seed_all(config.train.seed + mesh.rank)  # weights are the same on all processes, dropout is not

    def _build_model(self, tokenizer: Tokenizer, declared: Any, partition: Partition | None) -> int:
        """Build this process's part of the model; returns the number of experts of a MoE layer, over all processes."""
        config, mesh = self.config, self.mesh
        experts = parallel.experts_in(declared)
        check_experts(mesh.ep, experts)
        self._shards: parallel.Shards | None = None
        self._stages: tuple[PipelinePlan, Partition] | None = None
        keep = None
        if mesh.pp > 1:
            plan, layers = plan_of(config, mesh), declared.get_text_config().num_hidden_layers
            partition = partition or partition_of(config, layers, mesh.batch.size)
            self._stages = plan, partition
            keep = partial(keep_stages, plan=plan, partition=partition, rank=mesh.pp_rank)

        def shard(model: Any) -> None:
            self._shards = parallel.shard(model, mesh, config)

        on_meta = shard if mesh.data is not None else None
        self._model = hf_io.build(
            config.model, tokenizer.vocabulary, self.device, on_meta, config.train.seed, keep, tokenizer.special
        )
        if config.data.packing == "documents":
            check_documents_apart(self._model)
        check_length(config.train.sequence, self._model.config)
        return experts

    def _build_engine(self, experts: int) -> LocalGradients | PipelinedGradients | None:
        parts = EngineParts(
            self._model,
            self.memory,
            self.config,
            self.mesh,
            self._router,
            self._balance,
            self.dispatcher,
            in_place=self.config.optimizer.fused,
        )
        try:
            if self._stages is not None:
                return PipelinedGradients(parts, *self._stages, experts)
            if self.config.has_engine:
                return LocalGradients(parts)
        except ValueError as error:
            raise UsageError(f"{self.config.engine_key}: {error}") from error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # After an error of this process alone, nothing may wait for the others, which wait for it: no barrier, and no device,
        # whose streams wait for what they send. What the trainer owns ends with the process.
        if error is None or self.mesh.size == 1:
            self.close()

    def close(self) -> None:
        """Take the manager off the model, which stays built, sharded and trained. Collective; the host waits for the device."""
        if self.engine is not None:
            self.engine.close()
            vars(self.optimizer).pop("split_weight", None)  # it would keep the engine
        self.memory.detach()
        if self.dispatcher is not None:
            self.dispatcher.close()
        self._ahead = None
        self._end()

    @property
    def model(self) -> Any:
        """See the class."""
        self._take_weights_back()
        return self._model

    def _take_weights_back(self) -> None:
        """See `forebay.train.weights_in_place`."""
        if self.engine is not None:
            self.engine.take_weights_back()

    @property
    def pipeline(self) -> PipelinedGradients | None:
        """The engine of a pipeline; None if `parallel.pp` is 1."""
        return self.engine if isinstance(self.engine, PipelinedGradients) else None

    @property
    def cuda_graph(self) -> CudaGraphStep | None:
        """The CUDA graph of a step; None without `memory.graph`, and on a CPU."""
        return self.engine.cuda_graph if self.engine is not None else None

    def eager(self) -> AbstractContextManager[None]:
        """Context in which steps are called, not replayed from a CUDA graph, whose memory is free."""
        return self.engine.eager() if self.engine is not None else nullcontext()

    @property
    def graph_status(self) -> str | None:
        """Whether steps run as a CUDA graph, or why not; None without `memory.graph`, and while it is undecided."""
        graph = self.cuda_graph
        if graph is None:
            on_gpu = self.device.type == "cuda"  # where the graph is put aside for an evaluation
            return (why_called(self.config, on_gpu, experts=0) or None) if self.config.step.graph else None
        if graph.eager_reason is not None:
            return f"steps cannot be captured and are launched by the host: {graph.eager_reason}"
        freed = ", whose memory evaluations need: it is captured again after each" if self._freed_graph else ""
        return f"forwards and backwards of a step are one CUDA graph{freed}" if graph.is_captured else None

    def step(self, number: int) -> StepRecord:
        """Train on the batch of step `number`, from 1.

        Raises:
            NotFinite: the loss or the gradient norm is not finite. Parameters may hold NaN then: do not save them.
            RuntimeError: another rank missed a token dispatch. Parameters and optimizer are unchanged.
        """
        started, held = time.perf_counter(), self._reset_peak()
        self._health.begin(number)
        rate = self.config.optimizer.lr * lr_factor(self.config.schedule, number, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lacked_room: list[bool] = []
        apply = partial(self._apply, lacked_room)
        (losses, norm), retry = self._retries.run(partial(self.gradients, number), apply, self._drop_gradients)
        self._drop_gradients()
        routing = self._health.routing()
        if self._router is not None and self._router.has_bias:
            self._router.sum_counts(self.mesh.sum_batch)
            self._router.update_bias(self.config.train.router_bias_rate)
        self._read_ahead(number + 1)
        loss, imbalance, size = torch.cat([losses, norm.float()[None]]).tolist()  # the host waits for the device
        if not (math.isfinite(loss) and math.isfinite(size)):
            raise NotFinite(
                f"step {number}: the loss is {loss} and the gradient norm {size}, which is not finite; "
                "lower optimizer.lr or lengthen schedule.warmup"
            )
        seconds, peaks, reserved, health = self._measure(started, held, routing, any(lacked_room))
        return StepRecord(
            step=number,
            seconds=seconds,
            cross_entropy_loss=loss,
            load_balance_loss=imbalance,
            learning_rate=rate,
            gradient_norm=size,
            tokens_per_second=self.config.train.batch * self.config.train.sequence / seconds,
            peak_bytes=max(peaks),
            on_gpu=self.device.type == "cuda",
            retry=retry,
            health=health,
            peak_bytes_by_rank=peaks,
            reserved_bytes_by_rank=reserved if any(reserved) else (),
        )

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _updates_ahead(self) -> bool:
        """Whether a step's update is launched before the host knows that its gradients are whole.

        Not after called steps: the host keeps up with the device there, and what other streams still read would not be free yet
        for the update and the next step (1.6 of 27.8 GB more in run 20 of the twentieth blind draw).
        """
        graph = self.cuda_graph
        return self.config.optimizer.fused and graph is not None and graph.has_graph

    def _apply(
        self, lacked_room: list[bool], parts: tuple[Tensor, Tensor], skip: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Clip and update; see `CapacityRetries.run`. Adds to `lacked_room` whether memory was lacking beside the CUDA graph.

        Returns:
            The two losses of the step, fp32 [2], and the norm of the gradients, on the device.
        """
        losses = self.mesh.sum(torch.stack(parts))
        norm, factor = parallel.clip_factor(self._parameters, self.config.train.clip, self.mesh)
        lacked_room.append(self._lacks_room_for_update())
        self.optimizer.update(factor, skip)
        return losses, norm

    def _reset_peak(self) -> int:
        """Begin to measure a step's peak memory; returns the bytes allocated now, 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        self.memory.manager.take_peak()
        return allocator_bytes(self.device, "allocated", "current")

    def _lacks_room_for_update(self) -> bool:
        """Whether the CUDA graph left too little memory for the optimizer's update, which gets the graph's then."""
        graph = self.cuda_graph
        if graph is None or not graph.has_graph:
            return False
        try:
            self.optimizer.rehearse()
        except torch.OutOfMemoryError:
            graph.release()  # here alone: the others do so before the next step
            return True
        return False

    def _make_room_for_evaluation(self) -> None:
        """Free the CUDA graph if any process may lack the memory of an evaluation beside it; the next step is captured again.

        An evaluation takes no more than a captured step. It cannot be tried out: a process that runs out of memory in the middle
        leaves the others waiting in a collective.
        """
        graph = self.cuda_graph
        if graph is not None and graph.has_graph and not self.mesh.all(graph.has_room_beside()):
            graph.release()
            self._freed_graph = True

    def _measure(
        self, started: float, held: int, routing: tuple[Tensor, Tensor] | None, lacks_room: bool
    ) -> tuple[float, tuple[int, ...], tuple[int, ...], StepHealth | None]:
        """Seconds of the slowest process; by pipeline rank, the largest peak of allocated and of reserved bytes; the health.

        If the update of any process lacked memory beside the CUDA graph, all give the graph up.
        """
        own_seconds = time.perf_counter() - started
        graph = self.cuda_graph
        # The allocator does not see a replay: its memory comes on top of what is held between steps.
        replayed = graph.peak_bytes - graph.result_bytes if graph is not None else 0
        peak = max(peak_bytes(self.device), self.memory.manager.take_peak(), held + replayed)
        reserved, own_rank = reserved_bytes(self.device), self.mesh.pp_rank
        own = [figure * (rank == own_rank) for rank in range(self.mesh.pp) for figure in (peak, reserved)]
        seconds, any_lacks_room, *figures = self.mesh.max(own_seconds, lacks_room, *own)
        if any_lacks_room and graph is not None:
            graph.give_up(
                "the optimizer's update has no room beside their graph"
                + ("" if self.config.optimizer.fused else "; optimizer.fused = true needs less")
            )
        health = self._health.finish(own_seconds, peak, routing)
        return seconds, tuple(map(int, figures[::2])), tuple(map(int, figures[1::2])), health

    def enough_capacity(self) -> float | None:
        """See `CapacityRetries.factor`. Collective; the host waits for the device."""
        return self._retries.factor()

    def gradients(self, number: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of step `number`: adds gradients, summed over processes, to the parameters'.

        The host does not wait for the device, unless the token dispatcher does.

        Returns:
            This process's part of the mean cross entropy and of the load balance, fp32 scalars on the device.
        """
        batch, microbatches = self._read(number)
        self._health.meet()
        count = self._count(batch.targets)
        run: Any = self.engine if self.engine is not None else self._run_in_turn
        with _no_collector():
            losses = run(microbatches, count, len(microbatches) * self.mesh.batch.size)
        if self._shards is not None:
            self._shards.finish()
        self._health.meet()
        return losses

    def discard(self) -> None:
        """Drop the gradients of `gradients` and the routers' counts, for a step that does not take place."""
        self._retries.discard(self._drop_gradients)

    def _run_in_turn(self, microbatches: list[Microbatch], count: Tensor | int, parts: int) -> tuple[Tensor, Tensor]:
        """One microbatch after the other; arguments and results as those of an engine."""
        cross_entropy = torch.zeros((), device=self.device)
        balance = torch.zeros((), device=self.device)
        for index, microbatch in enumerate(microbatches):
            if self._shards is not None:
                self._shards.microbatch(last=index == len(microbatches) - 1)
            loss, own, imbalance = self._loss(microbatch, count, parts)
            cross_entropy += own
            balance += imbalance
            loss.backward()
        return cross_entropy, balance

    def forward(self) -> Tensor:
        """The loss of the first microbatch, with its autograd graph: for a profile of saved tensors."""
        self._ready_for_the_whole_model()
        microbatch = self._microbatches(self._batches(0), called=True)[0]
        return self._loss(microbatch, microbatch[1].numel(), 1)[0]

    def evaluate(self, before_batch: Callable[[], None] = lambda: None) -> float:
        """Mean loss in nats per token over the validation batches, exact under a capacity.

        Leaves parameters and random generators unchanged.

        Args:
            before_batch: called before each batch on all processes. An error that it raises on all of them ends the evaluation.

        Raises:
            UsageError: there is no validation data. RunError: no token of it has a loss.
        """
        if self._held_out is None:
            raise UsageError("there is no validation data; set train.eval_every and data.validation")
        self._make_room_for_evaluation()
        if self.pipeline is None:  # which runs its stages as a step does
            self._ready_for_the_whole_model()
        total, count = 0.0, 0
        self._model.eval()
        try:
            with torch.no_grad(), self._retries.exactly():
                for number in range(self.config.train.eval_batches):
                    before_batch()
                    batch = self._held_out(number)
                    microbatches: Any = self._microbatches(batch, called=self.pipeline is None)
                    if self.pipeline is not None:
                        total += float(self.pipeline.evaluate(microbatches))
                    else:
                        total += sum(float(self._forward(microbatch, 1)) for microbatch in microbatches)
                    # Every pipeline rank has the same targets: count those of the first.
                    count += _with_loss(batch.targets) if self.mesh.pp_rank == 0 else 0
        finally:
            self._model.train()
            if self._shards is not None:
                self._shards.release()
        total, counted = self.mesh.sum(torch.tensor([total, count], dtype=torch.float64, device=self.device)).tolist()
        if not counted:
            raise RunError("no token of the validation batches has a loss; raise train.eval_batches or data.validation")
        return total / counted

    def _count(self, targets: Tensor) -> Tensor | int:
        """Targets of the step that have a loss, over all processes that share the batch. The host does not wait."""
        own = _with_loss(targets)
        if self.mesh.batch.size == 1:
            # A CUDA graph reads it from memory. Division by a number and by a tensor may differ in the last bit.
            return own if self.cuda_graph is None else torch.tensor(own, device=self.device)
        return self.mesh.sum_batch(torch.full((), own, dtype=torch.int64, device=self.device))

    def _loss(self, microbatch: Microbatch, count: Tensor | int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a microbatch, and its detached shares of the cross entropy and of the load balance.

        `count` targets and `parts` microbatches are those of the step over all processes.
        """
        if self._router is None:
            loss = self._forward(microbatch, count)
            return loss, loss.detach(), torch.zeros_like(loss)
        with self._router.recording():
            loss = self._forward(microbatch, count)
        with torch.set_grad_enabled(self._balance != 0):
            imbalance = self._router.load_balancing_loss().float() / parts
        self._router.clear()
        return loss + self._balance * imbalance, loss.detach(), imbalance.detach()

    def _ready_for_the_whole_model(self) -> None:
        """Before a forward of the model where steps may be an engine's."""
        self._take_weights_back()
        if self._shards is not None:
            self._shards.gather()

    def _forward(self, microbatch: Microbatch, count: Tensor | int) -> Tensor:
        """Sum of the cross entropies of [B, S] shifted targets, divided by `count`."""
        ids, labels, *positions = microbatch
        # With a KV cache, which transformers makes in evaluation, the model ignores where positions restart.
        apart: dict[str, Any] = {"use_cache": False} if self.config.data.packing == "documents" else {}
        if positions:
            apart["position_ids"] = positions[0]
        with documents_apart() if positions else nullcontext():
            output = self._model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count, **apart)
        return output.loss

    def _read(self, number: int) -> tuple[Batch, list[Microbatch]]:
        """The batch of step `number`, on the host and on the device."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            return ahead[1]
        batch = self._batches(number - 1)
        return batch, self._microbatches(batch, called=self.engine is None)

    def _read_ahead(self, number: int) -> None:
        """Read the batch of step `number` while a GPU computes the one before. Read after it, 16 windows of 1280 tokens kept an
        H200 waiting for 3 ms of 136 (run 06 of the twenty-third blind draw)."""
        if number <= self.config.train.steps:
            # An error is that of step `number`, which reads again.
            with suppress(Exception):
                self._ahead = number, self._read(number)

    def _microbatches(self, batch: Batch, called: bool) -> list[Microbatch]:
        """The microbatches of a batch, on the device.

        Args:
            called: the whole model is called with each. Then one in which no document begins inside a row has no positions, and
                needs no mask that tells documents apart.
        """
        size = self.config.microbatch(self.mesh.batch.size)
        # Page-locked: a copy from other memory waits for all that the device has to do, and the host with it.
        on_host = [t.pin_memory() if self.device.type == "cuda" else t for t in batch if t is not None]
        parts = [t.to(self.device, non_blocking=True).split(size) for t in on_host]
        found: list[Microbatch] = list(zip(*parts, strict=True))
        if batch.positions is None or not called:
            return found
        restart = [bool((own[:, 1:] == 0).any()) for own in batch.positions.split(size)]
        return [tokens if apart else tokens[:2] for tokens, apart in zip(found, restart, strict=True)]


def _check_same(what: str, own: Callable[[], tuple[str, str]], mesh: Mesh) -> None:
    """Raise `UsageError` on all processes if one has another model or other tokens, as from a file of its machine.

    Args:
        own: returns what has to be equal, and a description of it.
    """
    if mesh.size == 1:
        return
    first, *others = on_all(own)
    for rank, other in enumerate(others, 1):
        if other[0] != first[0]:
            raise UsageError(
                f"process {rank} has {what} ({other[1]}) than process 0 ({first[1]}); all processes need the same files"
            )


def _check_batch_memory(config: Config, mesh: Mesh) -> None:
    """Raise `UsageError` if the tokens of a step do not fit in this machine's memory: the kernel would kill the process."""
    train, processes = config.train, max(1, processes_of_node())
    needed = train.batch // mesh.batch.size * processes * (train.sequence * _TOKEN_BYTES + _WINDOW_BYTES)
    if needed > (free := available_bytes()):
        raise UsageError(
            f"train.batch = {train.batch} with train.sequence = {train.sequence} needs {format_bytes(needed)} of host memory for "
            f"the tokens of a step, and {format_bytes(free)} are free; lower train.batch"
        )


def _with_loss(targets: Tensor) -> int:
    """How many targets have a loss."""
    return int(np.count_nonzero(targets.numpy() != IGNORE))  # torch's threads are slow to begin, see `Batches`


@contextmanager
def _no_collector() -> Iterator[None]:
    """Context without Python's cyclic garbage collector. No cycle of a step holds tensors.

    A collection stops the host for a tenth of a second and more, at another time on each process, and all devices wait for it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two AdamW groups: matrices with `weight_decay`, vectors and all biases without."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def _router_stats(model: Any) -> RouterStats | None:
    if not moe_blocks(model):
        return None
    try:
        return RouterStats(model)
    except ValueError as error:
        raise UsageError(f"model.family: {error}") from error


def _manage(model: Any, config: Config, dispatcher: TokenDispatcher | None) -> Managed:
    try:
        return manage(
            model,
            policy=config.memory.policy,
            budget=config.memory.budget if config.memory.budget != "" else None,
            compile=config.memory.compile,
            attention="flex" if config.model.attention == "flex" else None,
            experts="forebay" if config.model.experts == "forebay" else None,
            loss="fused-always" if config.model.loss == "fused" else None,  # evaluation has to fit as training does
            offload=config.memory.offload,
            recompute=config.memory.recompute,
            dispatcher=dispatcher,
            precision=config.memory.precision,
            pages=config.memory.pages if config.memory.pages != "" else None,
            min_bytes=_PIPELINE_MIN_BYTES if config.parallel.pp > 1 and torch.cuda.is_available() else None,
        )
    except (ValueError, RuntimeError) as error:  # PolicyError is a ValueError; a missing compiler is a RuntimeError
        raise UsageError(f"[memory] and [model]: {error}") from error
