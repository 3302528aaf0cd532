"""A run on one pipeline rank: the memory of its fullest process, its placements, and the time of the run's step.

Input: a valid `Config`, its `LayerPlan`, traces and placements. Output: the rank's `RankEstimate`, and a `StepTime`. This
module knows what the trainer does with each configuration key. Nothing is kept between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from math import inf

from forebay.config import Config
from forebay.config.fast_path import GRAPH_NODES
from forebay.estimate.allocator import ROLES
from forebay.estimate.fit import RankFit, largest_total, least_budget, planning_error
from forebay.estimate.fsdp import ParamGroup, least_bytes, param_groups
from forebay.estimate.layer_time import NO_TIME, Clock, KernelTime, LayerTimer
from forebay.estimate.layers import LayerPlan
from forebay.estimate.offloading import ENDS, is_cut, offloaded_bytes
from forebay.estimate.parts import Part, part_of, placed_parts
from forebay.estimate.placement import Choice, ChoiceCosts, Machine, Option, option, rank_options
from forebay.estimate.rank_run import Link, RankRun, StepLevel, Walked
from forebay.estimate.state import Sharing, Weight, WeightShapes, outside_bytes
from forebay.estimate.step_time import Beside, Elements, ScheduleTimer, ShardingTime, StageTime, StepOverhead, StepTime
from forebay.estimate.types import ModelTrace, OpCost, PartTrace, StageLayers
from forebay.estimate.walk import shortened, walk
from forebay.kernels.token_rows import workspace_bytes
from forebay.pipeline.model import adds_at_once
from forebay.pipeline.partition import StageLayer, held_by
from forebay.pipeline.schedule import Action, local_plan
from forebay.policy import format_bytes, parse_bytes

_BUSY = 0.9
"""Share of a link's rates that copies of a CUDA graph reach if they never rest: 55 GB/s to the host for 8 ms, then 50, and 51
back (benchmarks/results/busy_link.json). Called steps on the same machine: 55 (benchmarks/results/planner_measured.jsonl)."""
_LEAST, _LEAST_PIPELINE = 1 << 20, 16 << 20  # bytes below which the manager does not offload a tensor


@dataclass(frozen=True)
class RankEstimate:
    """A rank's estimate.

    Attributes:
        levels, before: see `Walked`.
        stall: seconds of a step in which the device waits for copies to and from the host.
        over: the rank and by how much it exceeds the limit, if no placements fit.
    """

    fit: RankFit
    levels: tuple[StepLevel, ...]
    sublayers: tuple[Option, ...]
    before: int
    stall: float = 0.0
    choice: Choice | None = None
    over: str = ""


@dataclass(frozen=True)
class RunEstimator:
    """What the estimate of each rank needs.

    Attributes:
        prefix: module path of the layers.
        placements: sublayer path to placement, for ranks that do not choose their own.
        hidden: elements of a microbatch's hidden states.
        beside: bytes that a process holds beside what is walked: the token dispatcher's, and masks of documents.
        actions: by pipeline rank; None without a pipeline.
        why_called: why a run with `memory.graph` calls its steps; "" if it captures them.
        budget: bytes a process may use; None if not given.
        auto: bytes within which placements are chosen, with a share for the plan's own error; None to take the configuration's.
    """

    config: Config
    plan: LayerPlan
    weights: WeightShapes
    prefix: str
    trace: ModelTrace
    sharing: Sharing
    placements: Mapping[str, str]
    hidden: int
    beside: int
    clock: Clock
    actions: Sequence[Sequence[Action]] | None
    why_called: str
    budget: int | None
    auto: int | None

    @cached_property
    def machine(self) -> Machine:
        device = self.clock.device
        out_rate, back_rate, *ends = device.host(self.sharing.world, self.sharing.pp > 1)
        return Machine(cache(self._added), out_rate, back_rate, device.at("bandwidth", 1 << 30), tuple(ends))

    @cached_property
    def timer(self) -> LayerTimer:
        return LayerTimer(self.clock, self.config, self.trace, self.sharing.trainer)

    @property
    def captured(self) -> bool:
        return self.config.step.graph and not self.why_called

    @property
    def launch(self) -> float:
        """Seconds of the host for a launch; 0 for a CUDA graph step."""
        return 0.0 if self.captured else self.clock.device.at("launch")

    def error(self, placements: Mapping[str, str]) -> float:
        """The share for the plan's own error; see `forebay.estimate.fit`."""
        policy = {"auto"} if self.config.memory.policy == "auto" else set()
        compiled, placed = self.config.memory.compile, {*placements.values(), *policy}
        pipeline, whole_scores = self.config.parallel.pp > 1, self.config.model.attention == "eager"
        return planning_error(self.sharing.world, compiled, placed, self.captured, pipeline, whole_scores)

    @property
    def _measures(self) -> bool:
        """Whether the trainer chooses placements, with times that it measures."""
        return self.auto is None and self.config.memory.policy == "auto"

    @property
    def chooses(self) -> bool:
        return self.auto is not None or self._measures

    def rank(self, number: int) -> RankEstimate:
        return self._chosen(number) if self.chooses else self._estimate(number, self.placements)

    @property
    def _outside(self) -> int:
        """Bytes of a rank that are not the allocator's, without those of the token dispatcher and of a graph."""
        p = self.config.parallel
        # Interleaved stages go round: with three ranks or more, a rank sends to one neighbor and receives from the other.
        return outside_bytes(self.sharing, p.schedule != "1f1b" and (p.schedule != "interleaved-1f1b" or p.pp == 2))

    def least(self) -> tuple[int, int]:
        """Bytes below which the peak of the fullest rank is not, and that rank: parameters, what a step makes of them, and what
        sublayers that are kept save."""
        runs = [self._run(number, self.placements) for number in range(self.config.parallel.pp)]
        found = [self._least(run.groups) + (0 if self.chooses else run.kept) for run in runs]
        return max((size + self._outside, number) for number, size in enumerate(found))

    def mean(self) -> int:
        """Bytes below which the peak of the fullest rank is not, whatever layers each has: the mean of what parameters take."""
        ranks = self.config.parallel.pp
        return sum(self._least(self._groups(n)) for n in range(ranks)) // ranks + self._outside

    def _least(self, groups: Sequence[ParamGroup]) -> int:
        return least_bytes(groups, self.sharing, self.plan.microbatches)

    def _chosen(self, number: int) -> RankEstimate:
        """The cheapest estimate within the limit, or the nearest to it. The trainer's own choice limits bytes in use only."""
        memory = self.config.memory
        parts = self._placed(number, {})
        options = rank_options(parts, self._allowed(), self.machine, self.config.recompute)
        times = {
            part.path: [time.alone for time in self.clock.both_ways(part.trace)] for part in chain(*parts.values())
        }
        waits = self.auto is None or memory.offload == "all"

        # A walk takes most of the time.
        estimate = cache(lambda placements: self._estimate(number, dict(placements)))

        def used(placements: Mapping[str, str]) -> int:
            fit = estimate(frozenset(placements.items())).fit
            return least_budget(fit.total, fit.error) if self.auto is not None else fit.allocated

        kept = estimate(frozenset())
        limit = self._limit(kept)
        costs = ChoiceCosts(options, times, kept.levels, self.plan.microbatches, self.machine, waits)
        choice = costs.choose(number, limit, used)
        over = f"rank {number} by {format_bytes(choice.peak - limit)}" if choice.peak > limit else ""
        found = estimate(frozenset(choice.placements.items()))
        # The manager's plan may leave bytes on the device that the choice has on the host.
        freed = {k.path: k.held - now.held for k, now in zip(kept.sublayers, found.sublayers, strict=True)}
        choice = replace(choice, placed=tuple(replace(p, freed=freed[p.path]) for p in choice.placed))
        return replace(found, stall=choice.waits if self._measures else found.stall, choice=choice, over=over)

    def _estimate(self, number: int, placements: Mapping[str, str]) -> RankEstimate:
        run = self._run(number, placements)
        walked = walk(run)
        sublayers = []
        for part in chain(*run.stages.values()):
            carried = None
            if part.placement == "offload" and walked.plan is not None:
                carried = offloaded_bytes(walked.plan, part, run)
            placement = placements.get(part.path, "keep")
            sublayers.append(option(part, placement, self.config.recompute, self.machine, carried))
        stall = 0.0 if walked.plan is None else walked.plan.stall_seconds
        steps = 1 if run.interleaves else self.plan.microbatches  # of the manager in a step
        fit = self._fit(number, walked, placements)
        return RankEstimate(fit, walked.levels, tuple(sublayers), walked.before, steps * stall)

    def _fit(self, number: int, walked: Walked, placements: Mapping[str, str]) -> RankFit:
        layers = sum(len(stage.layers) for stage in self.plan.stages(number).values())
        cached = walked.reserved - walked.peak.allocated if self.sharing.gpu else 0
        graph = GRAPH_NODES * layers * self.plan.microbatches if self.captured else 0
        other = self._outside + self.beside + graph
        held = dict(zip(ROLES, walked.peak.by_role, strict=True))
        error = self.error(placements)
        return RankFit(number, **held, other=other, where=walked.peak.where, cached=cached, error=error)

    def _run(self, number: int, placements: Mapping[str, str]) -> RankRun:
        c, pipeline = self.config, self.config.parallel.pp > 1
        actions = self.computations(number) if self.actions is None else self.actions[number]
        placed, measured = self._placed(number, placements), None
        if self._measures:
            measured = self._placed(number, {part.path: "offload" for part in chain(*placed.values())})
        router_loss = self.trace.router_loss if self.sharing.engine and not pipeline else None
        return RankRun(
            self._groups(number),
            self.sharing,
            placed,
            shortened(actions, self.sharing.engine),
            self._adding_tokens() if self.sharing.adds_in_place else 0,
            self.hidden * self.sharing.compute,
            graph=c.step.graph and self.sharing.gpu,
            fails=self.why_called != "",
            expandable=c.device.expandable_segments and self.sharing.gpu,
            at_once=self._at_once(),
            tied=self.weights.tied,
            least=(_LEAST_PIPELINE if pipeline else _LEAST) if self.sharing.gpu else 1,
            # The trainer's own choice of placements counts on what the link carries already.
            link=None if self._measures or "offload" not in placements.values() else self._link(),
            measured=measured,
            router_loss=None if router_loss is None else part_of("router loss", "head", router_loss),
        )

    def _groups(self, number: int) -> list[ParamGroup]:
        return param_groups(self.weights, *layers_and_ends(self.plan.stages(number)), self.sharing)

    def _placed(self, number: int, placements: Mapping[str, str]) -> dict[int, list[Part]]:
        mode = self.config.recompute
        return {
            n: placed_parts(self.trace, stage, placements, prefix=self.prefix, recompute=mode)
            for n, stage in self.plan.stages(number).items()
        }

    def _link(self) -> Link:
        """The link with which the walk's manager plans. On a CPU a copy takes no time."""
        m, gpu = self.machine, self.sharing.gpu
        everything = self.config.memory.offload == "all"
        share = _BUSY if self.captured and not m.end_rates else 1.0
        ends = m.end_rates or (None, None)
        rates = (share * m.out_rate, share * m.back_rate, *ends, m.copy_rate) if gpu else (inf, inf)
        return Link(rates, self._seconds, everything)

    def _seconds(self, part: Part) -> list[tuple[float, float]]:
        """Seconds of the forward and of the backward of each of a part's calls, on the slower of device and host."""
        if part.path in ENDS:
            forward, backward = self.timer.end(part.trace)
        else:
            forward, backward = self.timer.sublayer(part.trace, "recompute" if part.light else part.placement)
        whole = self._takes(forward), self._takes(backward)
        if not is_cut(part, self.sharing.engine):
            return [whole]
        shares = self._before_experts(part.trace.forward_ops), self._before_experts(part.trace.backward_ops[::-1])
        front = [seconds * share for seconds, share in zip(whole, shares, strict=True)]
        return [(front[0], front[1]), (whole[0] - front[0], whole[1] - front[1])]

    def _added(self, part: PartTrace, placement: str) -> float:
        kept, placed = (sum(map(self._takes, self.timer.sublayer(part, p))) for p in ("keep", placement))
        # One more write in forward, and a read.
        stashed = 2 * part.stash[1] / self.machine.copy_rate if placement == "stash" else 0.0
        return max(placed - kept, 0.0) + stashed

    def _before_experts(self, ops: Sequence[OpCost]) -> float:
        """Share of the seconds of `ops` before the experts' first one, or the first transfer to them."""
        seconds = [self.clock.seconds(op) for op in ops]
        kinds = ("all_to_all", "grouped", "grouped_weights")
        first = next((n for n, op in enumerate(ops) if op.kind in kinds), len(ops))
        return sum(seconds[:first]) / (sum(seconds) or 1.0)

    def _takes(self, time: KernelTime) -> float:
        return max(time.alone, self.launch * time.launches)

    def computations(self, number: int) -> list[Action]:
        """The actions of a pipeline rank that compute."""
        if self.actions is None:
            return list(local_plan(self.plan.microbatches, self.config.step.overlap).actions[0])
        return [action for action in self.actions[number] if action.computes]

    def _adding_tokens(self) -> int:
        """Bytes that it takes for a moment to add a microbatch's gradients of embedded tokens to the vocabulary's."""
        width = self.weights.embedding[0].shape[1]
        if self.sharing.gpu:
            return workspace_bytes(self.hidden // width, width)
        return self.hidden * self.sharing.summed

    def _at_once(self) -> bool:
        """Whether it adds those of embedded tokens as they are made."""
        vocabulary, width = self.weights.embedding[0].shape
        tokens = self.plan.microbatches * self.hidden // width
        return self.sharing.adds_in_place and adds_at_once(tokens, vocabulary, self.sharing.compute)

    def _allowed(self) -> frozenset[str]:
        """Placements that the trainer can carry out. Its own `policy = "auto"` does not stash."""
        if self.auto is None:
            return frozenset({"recompute", "offload"})
        found = {"recompute", *(("stash",) if self.config.parallel.ep > 1 else ())}
        return frozenset(found if self.config.step.overlap else {*found, "offload"})

    def _limit(self, kept: RankEstimate) -> int:
        """Bytes that placements may use. For the trainer's own choice, `memory.budget` counts from what is held before a
        forward."""
        if self.auto is not None:
            return self.auto
        own = kept.before + kept.fit.other + parse_bytes(self.config.memory.budget)
        return own if self.budget is None else min(own, largest_total(self.budget, self.error({})))


def layers_and_ends(stages: Mapping[int, StageLayers]) -> tuple[list[StageLayer], bool, bool]:
    """A rank's layers, and whether it has embedding and head."""
    every = stages.values()
    return held_by(s.layers for s in every), any(s.embedding for s in every), any(s.head for s in every)


# In operations of the profile's `launch`, as in `forebay.estimate.layer_time`.
MICROBATCH_START, MICROBATCH_HEAD = 90, 130
"""The host's work for a microbatch around its layers: masks and rotary tables; the loss, autograd's start and end."""
FSDP_LAUNCHES = 250
"""The host's work for a group of FSDP2 in a microbatch, besides launching its kernels. A third of it is in the forward."""
STEP_LAUNCHES = 380
"""What the host does in a step while the device is idle: the batch, the optimizer's groups, reading the loss."""
GRAPH_STEP_LAUNCHES = 160
"""The same with a step's CUDA graph: the device waits for 2 ms between two replays (run 10 of the twenty-sixth draw), and nine
steps of 22 to 44 ms of draws 24 to 27 took 0.7 to 1.0 ms longer than planned with 100."""
GRAPH_PARAMETER = 1.3
"""What that has besides for each of a rank's parameters where processes share them: the gather before the replay is launched by a
host that has waited for the device. Runs 08 and 20 of the twentieth blind draw, on two H200s: 2.8 ms with 120 parameters, on a
host of 15.9 microseconds a launch, and 10.7 ms with 377, of 13.1."""


@dataclass(frozen=True)
class StepTimer:
    """Computes the time of a step.

    Attributes:
        placements: sublayer path to placement; the default is "keep".
        parameters: by pipeline rank, bytes of its own shards.
        stall: seconds in which the device waits for copies to and from the host, of the rank that waits longest.
    """

    run: RunEstimator
    placements: Mapping[str, str]
    parameters: Sequence[int]
    stall: float = 0.0

    def step(self) -> StepTime:
        config, pp, engine = self.run.config, self.run.config.parallel.pp, self.run.sharing.engine
        device = self.run.clock.device
        stages = [self.run.plan.stages(rank) for rank in range(pp)]
        actions = [self.run.computations(rank) for rank in range(pp)]
        times = {n: self._stage(stage) for mine in stages for n, stage in mine.items()}
        ranks = [next(r for r, mine in enumerate(stages) if n in mine) for n in sorted(times)]
        message, contention = self._message() if pp > 1 else 0.0, device.at("contention")
        on_device = ScheduleTimer(actions, ranks, times, message, engine, contention)
        launch = self.run.launch
        called = replace(on_device, launch=launch) if launch else on_device
        overheads = [self._overhead(rank, stages[rank]) for rank in range(pp)]
        slowest = max(overheads, key=lambda b: b.gather + b.reduce)
        return StepTime(
            device=device.name,
            schedule=on_device.seconds + self.stall,
            launched=called.seconds + self.stall,
            gather=slowest.gather,
            reduce=slowest.reduce,
            optimizer=max(b.optimizer for b in overheads),
            host=max(on_device.launches) * launch,
            busy=tuple(on_device.busy),
            exposed=tuple(on_device.exposed),
            tokens=config.train.batch * config.train.sequence,
            measured=bool(device.measured()),
            launch=launch,
            around=self._around(max(map(self._weights, stages))) * device.at("launch"),
        )

    def _around(self, parameters: int) -> float:
        """Launches in which the device is idle. A called step of an engine has those of a captured one too."""
        sharing = self.run.sharing
        shared = sharing.sharded and sharing.data > 1
        captured = GRAPH_STEP_LAUNCHES + GRAPH_PARAMETER * parameters * shared
        return captured if self.run.captured else max(STEP_LAUNCHES, captured * sharing.engine)

    def _weights(self, stages: Mapping[int, StageLayers]) -> int:
        """Parameters of a rank, counted by their tensors."""
        layers = layers_and_ends(stages)[0]
        return sum(len(self.run.weights.of(layer)) for layer in layers) + len(self._ends(stages))

    def _ends(self, stages: Mapping[int, StageLayers]) -> tuple[Weight, ...]:
        """The parameters of embedding and head that a rank has."""
        _, embedding, head = layers_and_ends(stages)
        return self.run.weights.embedding * embedding + self.run.weights.head * head

    def _sharding(self) -> ShardingTime:
        return ShardingTime(self.run.clock.device, self.run.sharing, self.run.plan.microbatches)

    def _stage(self, stage: StageLayers) -> StageTime:
        timer, sharding, engine = self.run.timer, self._sharding(), self.run.sharing.engine
        forward: list[KernelTime] = []
        backward: list[KernelTime] = []
        fsdp = self.run.sharing.sharded and not engine
        group = FSDP_LAUNCHES if fsdp else 0
        own = [timer.layer(layer, self._placements_in(layer.number)) for layer in stage.layers]
        ahead, back = ([time.computing for time in times] for times in zip(*own, strict=True))
        head = timer.end(self.run.trace.head) if stage.head else (NO_TIME, NO_TIME)
        beside = map(Beside, [0.0, *ahead], [*back[1:], head[1].computing], [0.0, *back])
        for layer, (f, b), hides in zip(stage.layers, own, beside, strict=False):
            more = sharding.layer(self._elements(layer), hides)
            forward.append(f + KernelTime(more[0], launches=group / 3))
            backward.insert(0, b + KernelTime(more[1], launches=2 * group / 3))
        if stage.embedding:
            f, b = timer.end(self.run.trace.embedding)
            forward[0] = forward[0] + f + KernelTime(launches=MICROBATCH_START + group / 3)
            if not engine:  # an engine adds the tokens' gradients to the vocabulary's once a step
                backward[-1] = backward[-1] + b
        if stage.head:
            f, b = head
            forward.append((f + b if engine else f) + KernelTime(launches=MICROBATCH_HEAD))
            if not engine:
                backward.insert(0, b + KernelTime(launches=2 * group / 3))
        return StageTime(tuple(forward), tuple(backward))

    def _placements_in(self, number: int) -> dict[str, str]:
        path = f"{self.run.prefix}.{number}"
        return {name: self.placements.get(f"{path}.{name}", "keep") for name in self.run.trace.layers[number].names}

    def _elements(self, layer: StageLayer) -> Elements:
        return Elements.of(self.run.weights.of(layer), self.run.sharing)

    def _overhead(self, rank: int, stages: Mapping[int, StageLayers]) -> StepOverhead:
        layers = [self._elements(n) for stage in stages.values() for n in stage.layers]
        ends = Elements.of(self._ends(stages), self.run.sharing)
        fused, clips = self.run.config.optimizer.fused, self.run.config.train.clip > 0
        frozen = self.run.sharing.frozen * sum(e.frozen for e in (*layers, ends))
        trained = self.parameters[rank] - frozen // (self.run.sharing.data if self.run.sharing.sharded else 1)
        return self._sharding().step(layers, ends, trained, fused, clips)

    def _message(self) -> float:
        """Seconds of a microbatch's hidden states to the next rank."""
        device, size = self.run.clock.device, self.run.trace.layers[0].attention.inputs
        replica = self.run.sharing.data * self.run.sharing.pp
        return size / device.link("all_to_all", replica <= device.node, size) + device.at("kernel")
