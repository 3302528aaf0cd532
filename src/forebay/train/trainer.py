"""One optimizer step: model, activation manager, optimizer, data, and how they act on each other, on one process or on N.

In: a valid `Config` and the `Mesh` of processes. Out: a `Trainer` whose `step(n)` trains on batch n and returns a `StepRecord`,
the same on every process. The run around it (folders, checkpoints, signals, what is printed) is `forebay.train.loop`.

The way of a batch: token windows by position, each process its own -> microbatches -> forward (activations managed, cross
entropy summed over the microbatch and divided by the target count of the whole step, so uneven parts weigh as they should)
+ coefficient x the router's load-balancing loss -> backward, gradients summed over processes -> gradient norm and clipping ->
AdamW -> the router's bias update. The host waits for the device once a step, when it reads the losses. Where a capacity bounds
what experts receive, or pages what they stash, it also asks, before clipping, whether anything went over: the gradients are then
made once more, exactly (`forebay.train.capacity_retry`).

`Trainer` owns everything that it builds; `close` takes the manager off the model. The mesh is its own only if none was given.
"""

import gc
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch

from forebay.config import Config, check_experts
from forebay.errors import RunError, UsageError
from forebay.managed import manage
from forebay.models.families import moe_blocks
from forebay.models.router import RouterStats
from forebay.moe.dispatch import TokenDispatcher
from forebay.pipeline.costs import partition_of
from forebay.pipeline.partition import Partition
from forebay.pipeline.schedule import PipelinePlan
from forebay.train import hf_io, parallel
from forebay.train.capacity_retry import CapacityRetries
from forebay.train.cuda_graph import CudaGraphStep
from forebay.train.data import Windows, load_corpus, load_tokenizer, split
from forebay.train.distributed import ALONE, Mesh
from forebay.train.engines import OverlappedGradients, PipelinedGradients, keep_stages, plan_of
from forebay.train.hf_io import balance_coefficient
from forebay.train.metrics import StepRecord, peak_bytes, reserved_bytes

# Learning rate by step, as a pure function: no state to save, nothing to restore.
#
# In: the step's number and a `Schedule` section. Out: the factor on `optimizer.lr` for that step.
#
# Three shapes share the warm-up, which rises in a line and reaches 1 at step `warmup`:
#
# * ``cosine``: half a cosine from 1 down to `minimum` at the last step.
# * ``wsd`` (warm-up, stable, decay): 1 until `decay` steps before the end, then a line down to `minimum`.
# * ``constant``: 1.


class ScheduleLike(Protocol):
    """The fields of the ``[schedule]`` section that matter here."""

    @property
    def kind(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def decay(self) -> int: ...
    @property
    def minimum(self) -> float: ...


def factor(schedule: ScheduleLike, step: int, steps: int) -> float:
    """Factor on the learning rate.

    Args:
        schedule: kind, warmup (steps), decay (steps) and minimum (a fraction of the learning rate).
        step: 1-based number of the optimizer step; the first step has number 1.
        steps: number of the last step.

    Returns:
        A factor in (0, 1]: never 0 during the warm-up, `minimum` at the last step of ``cosine`` and ``wsd``.
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


_PIPELINE_BYTES = 16 << 20
IGNORE = -100  # target that no loss is computed for, as in transformers


class Trainer:
    """Model, manager, optimizer and data of one process.

    Args:
        config: a valid one.
        mesh: the processes; None for this one alone. It stays the caller's.

    Attributes:
        model: a transformers `*ForCausalLM`, managed; sharded if there is a process group.
        memory: what `forebay.manage` returned.
        dispatcher: how tokens travel to their experts; None if `parallel.ep` is 1.
        optimizer: AdamW over the model's trainable parameters.
        corpus: the tokens.

    Raises:
        UsageError, RunError: see `forebay.train.hf_io`, `forebay.train.data`, `forebay.train.distributed` and
        `forebay.train.parallel`. PolicyError, BudgetError: from the policy.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None):
        self.mesh = Mesh.open(config, ALONE) if mesh is None else mesh
        self._own_mesh = self.mesh if mesh is None else None
        try:
            self._build(config, self.mesh)
        except BaseException:
            if self._own_mesh is not None:
                self._own_mesh.close()
            raise

    def _build(self, config: Config, mesh: Mesh) -> None:
        self.config, self.device = config, mesh.device
        if config.device.threads:
            torch.set_num_threads(config.device.threads)
        tokenizer = load_tokenizer(config.data.tokenizer)
        self.corpus = load_corpus(config.data, tokenizer)
        train, held_out = split(self.corpus, config.data.validation)
        size, batch, seed = config.train.sequence, config.train.batch, config.train.seed
        self._windows = Windows(train, size, batch, seed, mesh.batch)
        self._held_out = (
            Windows(held_out, size, batch, seed, mesh.batch, "validation data") if config.train.eval_every else None
        )
        declared = hf_io.configuration(config.model, tokenizer.vocabulary)
        check_experts(mesh.ep, parallel.experts_in(declared))
        _seed(seed)
        self._shards: parallel.Shards | None = None
        plan = plan_of(config, mesh) if mesh.pp > 1 else None
        partition = partition_of(config, declared, mesh.batch.size) if plan is not None else None
        self.model = hf_io.build(
            config.model,
            tokenizer.vocabulary,
            self.device,
            self._shard if mesh.data is not None else None,
            seed,
            None
            if plan is None or partition is None
            else partial(keep_stages, plan=plan, partition=partition, rank=mesh.pp_rank),
        )
        _check_positions(self.model, size)
        self.dispatcher = parallel.dispatcher_of(self.model, mesh, config)
        self.memory = _manage(self.model, config, self.dispatcher)
        self._router = RouterStats(self.model) if moe_blocks(self.model) else None  # None: a dense model
        self._balance = balance_coefficient(self.model.config)
        self._gradients = self._engine(plan, partition, parallel.experts_in(declared))
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _adamw(self.model, config)
        called = self._gradients.called if self._gradients is not None else nullcontext
        renewed = self.captured.release if self.captured is not None else _nothing
        self._retries = CapacityRetries(mesh, self.dispatcher, self.memory.pages, self._router, called, renewed)
        if mesh.rank:
            _seed(seed + mesh.rank)  # weights are the same on all processes, dropout is not

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pipeline(self) -> PipelinedGradients | None:
        """What runs a step's microbatches through the stages; None if `parallel.pp` is 1."""
        return self._gradients if isinstance(self._gradients, PipelinedGradients) else None

    @property
    def captured(self) -> CudaGraphStep | None:
        """The graph of a step; None without `memory.graph`, and on a CPU."""
        return self._gradients.captured if self._gradients is not None else None

    @property
    def graph_says(self) -> str | None:
        """Whether steps are replayed from a graph, or why not; None if `memory.graph` is not set, or it is not known yet."""
        captured = self.captured
        if captured is None:
            return "there is no CUDA device to capture steps on" if self.config.memory.graph else None
        if captured.why_not is not None:
            return f"steps cannot be captured and are launched by the host: {captured.why_not}"
        return "forwards and backwards of a step are one CUDA graph" if captured.captured else None

    def _graph_bytes(self) -> int:
        """What a replayed step takes beside what is held between steps: the allocator does not see it."""
        return self.captured.peak_bytes - self.captured.left_bytes if self.captured is not None else 0

    def close(self) -> None:
        """Take the manager off the model; the model is as it was built and sharded, but trained."""
        if self._gradients is not None:
            self._gradients.close()
        self.memory.detach()
        if self.dispatcher is not None:
            self.dispatcher.close()
        if self._own_mesh is not None:
            self._own_mesh.close()

    def step(self, number: int) -> StepRecord:
        """Train on the batch of step `number` (from 1).

        Raises:
            RunError: a loss or gradient that is not finite. Parameters may hold NaN then: do not save them.
            RuntimeError: another rank did not come to an exchange. Parameters and optimizer are as they were.
        """
        started, held = time.perf_counter(), 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.memory.manager.take_peak()
            held = torch.cuda.memory_allocated(self.device)
        rate = self.config.optimizer.lr * factor(self.config.schedule, number, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        drop = partial(self.optimizer.zero_grad, set_to_none=True)
        parts, rerun = self._retries.run(partial(self.gradients, number), drop)
        if self.dispatcher is not None:
            self._check_exchange(self.dispatcher)
        losses = self.mesh.sum(torch.stack(parts))
        norm = parallel.clip_gradients(self._parameters, self.config.train.clip, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._router is not None and self._router.has_bias:
            self._router.sum_counts(self.mesh.sum_batch)
            self._router.update_bias(self.config.train.router_bias_rate)
        loss, imbalance, size = torch.cat([losses, norm.float()[None]]).tolist()
        if not (np.isfinite(loss) and np.isfinite(size)):
            raise RunError(
                f"step {number}: the loss is {loss} and the gradient norm {size}, which is not finite; "
                "lower optimizer.lr or lengthen schedule.warmup, and go on from an earlier checkpoint with --resume"
            )
        most = max(peak_bytes(self.device), self.memory.manager.take_peak(), held + self._graph_bytes())
        here = (self.mesh.pp_rank == rank for rank in range(self.mesh.pp))
        own = [figure * mine for mine in here for figure in (most, reserved_bytes(self.device))]
        seconds, *figures = self.mesh.max(time.perf_counter() - started, *own)
        peaks, reserved = (tuple(map(int, figures[n::2])) for n in (0, 1))
        tokens = self.config.train.batch * self.config.train.sequence
        return StepRecord(
            number,
            seconds,
            loss,
            imbalance,
            rate,
            size,
            tokens / seconds,
            max(peaks),
            self.device.type == "cuda",
            rerun,
            peaks,
            reserved if any(reserved) else (),
        )

    def _check_exchange(self, dispatcher: TokenDispatcher) -> None:
        """Before anything is made of the gradients: without a rank that did not come they are wrong.

        Before the next collective too: the ranks that noticed nothing wait there, and do not step either.
        """
        try:
            dispatcher.check()
        except RuntimeError:
            self.discard()
            raise

    def enough_capacity(self) -> float | None:
        """The smallest capacity factor with which no step so far would have been run again; None without a capacity.

        Collective; waits for the device.
        """
        return self._retries.factor()

    def gradients(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of all microbatches of step `number`: gradients, summed over processes, are on the parameters.

        They are added to what is there. The host does not wait for the device, but where the exchange does.

        Returns:
            This process's part of the mean cross entropy and of the load balance, fp32 scalars on the device.
        """
        inputs, targets = self._windows(number - 1)
        parts = self._microbatches(inputs, targets)
        count = self._count(targets)
        with _no_collector():
            if self._gradients is not None:
                losses = self._gradients(parts, count, len(parts) * self.mesh.batch.size)
            else:
                losses = self._in_turn(parts, count)
        if self._shards is not None:
            self._shards.finish()
        return losses

    def discard(self) -> None:
        """Forget the gradients that `gradients` left and the routing it counted: no step comes of them."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._router is not None:
            self._router.reset_counts()

    def _in_turn(
        self, parts: list[tuple[torch.Tensor, torch.Tensor]], count: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one microbatch after the other."""
        cross_entropy = torch.zeros((), device=self.device)
        balance = torch.zeros((), device=self.device)
        for index, (ids, labels) in enumerate(parts):
            if self._shards is not None:
                self._shards.microbatch(last=index == len(parts) - 1)
            loss, own, imbalance = self._loss(ids, labels, count, len(parts) * self.mesh.batch.size)
            cross_entropy += own
            balance += imbalance
            loss.backward()
        return cross_entropy, balance

    def forward(self) -> torch.Tensor:
        """The loss of the first microbatch, with its graph. For the profile."""
        ids, labels = self._microbatches(*self._windows(0))[0]
        return self._loss(ids, labels, labels.numel(), 1)[0]

    def evaluate(self) -> float:
        """Mean loss in nats a token over the validation batches, whatever capacity there is. Leaves parameters and random
        generators alone."""
        if self._held_out is None:
            raise UsageError("there is no validation data; set train.eval_every and data.validation")
        total, count = 0.0, 0
        self.model.eval()
        try:
            with torch.no_grad(), self._retries.exactly():
                for number in range(self.config.train.eval_batches):
                    parts = self._microbatches(*self._held_out(number))
                    total += self._evaluate(parts)
                    # Every stage has the same targets: the first ones count.
                    count += sum(labels.numel() for _, labels in parts) if self.mesh.pp_rank == 0 else 0
        finally:
            self.model.train()
        if self._shards is not None:
            self._shards.release()
        total, counted = self.mesh.sum(torch.tensor([total, count], dtype=torch.float64, device=self.device)).tolist()
        return total / counted

    def _shard(self, model: Any) -> None:
        """Before the model has any memory: each process then makes or reads its own part only."""
        self._shards = parallel.shard(model, self.mesh, self.config)

    def _engine(
        self, plan: PipelinePlan | None, partition: Partition | None, experts: int
    ) -> OverlappedGradients | PipelinedGradients | None:
        """What runs a step's forwards and backwards; None: they run one after the other."""
        config = self.config
        try:
            if plan is not None and partition is not None:
                return PipelinedGradients(
                    self.model,
                    self.memory,
                    config,
                    self.mesh,
                    plan,
                    partition,
                    experts=experts,
                    router=self._router,
                    balance=self._balance,
                    graph=config.memory.graph and self.device.type == "cuda",
                    agreed=self._agreed,
                )
            if config.parallel.overlap:
                return OverlappedGradients(
                    self.model,
                    self.memory,
                    self.device,
                    self._router,
                    self._balance,
                    reshard=config.parallel.reshard,
                    graph=config.memory.graph and self.device.type == "cuda",
                    agreed=self._agreed,
                )
        except ValueError as error:
            raise UsageError(f"parallel.{'overlap' if plan is None else 'pp'}: {error}") from error
        return None

    def _agreed(self, here: bool) -> bool:
        """Whether it is true on all processes."""
        (wrong,) = self.mesh.max(not here)
        return not wrong

    def _evaluate(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """The sum of the cross entropies of a validation batch, or this process's part of it."""
        if self.pipeline is not None:
            return float(self.pipeline.evaluate(parts))
        return sum(float(self._forward(ids, labels, 1)) for ids, labels in parts)

    def _count(self, targets: torch.Tensor) -> torch.Tensor | int:
        """Targets of the step that a loss is computed for, over all that share the batch. The host does not wait for it."""
        own = int((targets != IGNORE).sum())
        if self.mesh.batch.size == 1:
            # A graph reads it from memory. Divided by a number or by a tensor, the last bit may be another.
            return own if self.captured is None else torch.tensor(own, device=self.device)
        return self.mesh.sum_batch(torch.full((), own, dtype=torch.int64, device=self.device))

    def _loss(
        self, ids: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | int, parts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What backward starts from; and, detached, this microbatch's share of the cross entropy and of the load balance.

        `count` targets and `parts` microbatches has the step over all processes.
        """
        if self._router is None:
            loss = self._forward(ids, labels, count)
            return loss, loss.detach(), torch.zeros_like(loss)
        with self._router.recording():
            loss = self._forward(ids, labels, count)
        with torch.set_grad_enabled(self._balance != 0):
            imbalance = self._router.load_balancing_loss().float() / parts
        self._router.clear()
        return loss + self._balance * imbalance, loss.detach(), imbalance.detach()

    def _forward(self, ids: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
        """Sum of the cross entropies of [B, S] targets, over `count`. Targets are shifted already."""
        output = self.model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count)
        return output.loss

    def _microbatches(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = self.config.microbatch(self.mesh.batch.size)
        ids = inputs.to(self.device, non_blocking=True).split(size)
        return list(zip(ids, targets.to(self.device, non_blocking=True).split(size), strict=True))


def _nothing() -> None:
    """There is no graph to be given up."""


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's cyclic garbage collector waits. One that runs within a step stops the host for a tenth of a second and more, at
    another moment on each process, and the others' devices wait for this one's. Nothing of a step needs it: no cycles hold
    tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two AdamW groups: matrices with `weight_decay`, vectors and every bias without."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def _adamw(model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    o = config.optimizer
    return parallel.ShardedAdamW(
        decay_groups(model, o.weight_decay), lr=o.lr, betas=o.betas, eps=o.eps, fused=o.fused or None
    )


def _manage(model: Any, config: Config, dispatcher: TokenDispatcher | None) -> Any:
    try:
        return manage(
            model,
            policy=config.memory.policy,
            budget=config.memory.budget if config.memory.budget != "" else None,
            compile=config.memory.compile,
            experts="forebay" if config.model.experts == "forebay" else None,
            loss="fused-always" if config.model.loss == "fused" else None,  # evaluation is to fit as training does
            offload=config.memory.offload,
            recompute=config.memory.recompute,
            dispatcher=dispatcher,
            pages=config.memory.pages if config.memory.pages != "" else None,
            # A microbatch of a pipeline is short: what takes the host as long to hand over as the device to compute stays.
            min_bytes=_PIPELINE_BYTES if config.parallel.pp > 1 and torch.cuda.is_available() else None,
        )
    except (ValueError, RuntimeError) as error:  # PolicyError is a ValueError; no compiler is a RuntimeError
        raise UsageError(f"[memory] and [model]: {error}") from error


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # every CUDA device's generator too


def _check_positions(model: Any, sequence: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise UsageError(
            f"train.sequence = {sequence} is longer than the model's max_position_embeddings = {longest}; valid is at most that"
        )
