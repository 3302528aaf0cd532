"""A run laid on one pipeline rank: what its fullest process holds, and placements that are chosen for it.

In: what a plan knows of the whole run (`Layout`), a rank, and placements. Out: a `Laid`: the rank's `RankFit`, reserved memory
included, its halves, and the `Choice` where placements were to be chosen. Nothing is kept between ranks.

A choice is made with the walk of `forebay.planner.fit`, in which memory is a sum over halves; what the allocator holds besides is
known only when its placements are laid. So a choice whose reserved memory is above the limit is made again, for as much less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from forebay.pipeline.causal_lm import adds_at_once
from forebay.pipeline.turns import turns
from forebay.planner.carried import Half, carried_by_path, plan_link
from forebay.planner.choose import Choice, Machine, choose, parts_by_path, rank_options
from forebay.planner.figures import ModelTrace
from forebay.planner.fit import Held, RankFit, Seen, Stage, alone, fit_rank, halves_of, within
from forebay.planner.pieces import Part, parts_of
from forebay.planner.reserved import Rank, reserve, shortened, with_reserved
from forebay.planner.sharded import groups_of
from forebay.planner.simulate import LIGHT, Plan
from forebay.planner.state import Sharing, State, Weights, state_of
from forebay.policy import format_bytes, parse_bytes
from forebay.train.config import Config
from forebay.train.planning import LayerPlan

_MESSAGES = 4  # tensors of hidden states on their way in a pipeline: one in and one out, each way
_LEAST, _LEAST_PIPELINE = 1 << 20, 16 << 20  # bytes below which the manager leaves a tensor where it is
_ATTEMPTS = 3  # at a choice: what the allocator holds besides depends on the placements, but little


@dataclass(frozen=True)
class Laid:
    """Of a rank. `over`: which one and by how much, if no placements were found that are within the limit."""

    stages: Mapping[int, Stage]
    fit: RankFit
    halves: tuple[Held, ...]
    state: State
    choice: Choice | None = None
    over: str = ""


@dataclass(frozen=True)
class Layout:
    """Of a run.

    Attributes:
        weights, prefix, trace, sharing: the model's shapes, the path of its layers, its trace, and who shares it.
        placements: half's path to placement, for ranks for which none are chosen.
        hidden: numbers of hidden states of a microbatch, tokens times width.
        exchange: bytes that exchanging tokens takes outside of the allocator.
        actions: by pipeline rank; None without a pipeline.
        budget: bytes a process may use; None where none was given.
        auto: bytes within which placements are chosen; None where they are the configuration's.
        machine: what placements cost.
    """

    config: Config
    plan: LayerPlan
    weights: Weights
    prefix: str
    trace: ModelTrace
    sharing: Sharing
    placements: Mapping[str, str]
    hidden: int
    exchange: int
    actions: Sequence[Sequence[Any]] | None
    budget: int | None
    auto: int | None
    machine: Machine

    @property
    def engine(self) -> bool:
        """A pipeline or overlap runs the stages."""
        return self.config.parallel.pp > 1 or self.config.parallel.overlap

    @property
    def chooses(self) -> bool:
        """Whether placements are chosen."""
        return self.auto is not None or self.config.memory.policy == "auto"

    def rank(self, number: int, seen: Seen | None = None) -> Laid:
        """Lay pipeline rank `number`; `seen` is told of every level of its step."""
        stages = _stages(self.plan, number)
        layers = [n for stage in stages.values() for n in stage.layers]
        ends = any(s.embedding for s in stages.values()), any(s.head for s in stages.values())
        state = state_of(self.weights, layers, *ends, self.sharing)
        state = replace(state, other=state.other + self.exchange)
        placements, choice, over = self.placements, None, ""
        if self.chooses:
            limit = self._limit(state)
            choice, total = self._chosen(number, state, stages, limit)
            placements = choice.placements
            if total > limit:
                over = f"rank {number} by {format_bytes(total - limit)}"
        fit, halves = self._fit(number, state, stages, placements, seen)
        return Laid(stages, fit, tuple(halves), state, choice, over)

    def _chosen(self, number: int, state: State, stages: Mapping[int, Stage], limit: int) -> tuple[Choice, int]:
        """The choice, and what it takes of the limit. The trainer's own choice asks for what is allocated alone."""
        options, times = rank_options(self.trace, stages, self._allowed(), self.machine, **self._ways())
        waits = self.auto is None or self.config.memory.offload == "all"
        within = limit
        for _ in range(_ATTEMPTS):
            choice = choose(
                number, state, options, times, self._todo(number), self._messages(), within, self.machine, waits
            )
            fit = self._fit(number, state, stages, choice.placements, None)[0]
            total = fit.total if self.auto is not None else fit.total - fit.cached
            if total <= limit or choice.fit.total > within:
                break
            within = min(within, choice.fit.total) - (
                total - limit
            )  # from what the walk had, not from what it might have had
        return choice, total

    def _fit(
        self, number: int, state: State, stages: Mapping[int, Stage], placements: Mapping[str, str], seen: Seen | None
    ) -> tuple[RankFit, list[Held]]:
        paper = self._on_paper(number, stages, placements)
        carried = None
        if paper.link is not None:
            carried = carried_by_path(paper.link, self._timed(stages, paper.stages), paper.hidden, paper.least)
        ways = {**self._ways(), "carried": carried}
        found = {n: halves_of(self.trace, stage, placements, **ways) for n, stage in stages.items()}
        fit = fit_rank(number, state, found, self._todo(number), self._messages(), seen)
        if self.sharing.gpu:
            fit = with_reserved(fit, reserve(paper))
        return fit, [half for stage in found.values() for half in stage]

    def _on_paper(self, number: int, stages: Mapping[int, Stage], placements: Mapping[str, str]) -> Rank:
        c = self.config
        layers = [n for stage in stages.values() for n in stage.layers]
        ends = any(s.embedding for s in stages.values()), any(s.head for s in stages.values())
        actions = self._todo(number) if self.actions is None else self.actions[number]
        vocabulary = self.trace.head_gradient, self.hidden * self.sharing.summed
        rank = Rank(
            groups_of(self.weights, layers, *ends, self.sharing),
            self.sharing,
            {
                n: parts_of(self.trace, stage, placements, prefix=self.prefix, recompute=c.memory.recompute)
                for n, stage in stages.items()
            },
            shortened(actions, self.engine),
            self.engine,
            vocabulary if self._summed() else None,
            self.hidden * self.sharing.compute,
            turns,
            graph=c.memory.graph,
            drawn=not (c.model.path and c.model.weights == "load"),
            pipeline=c.parallel.pp > 1,
            at_once=self._at_once(),
            tied=self.weights.tied,
            least=(_LEAST_PIPELINE if c.parallel.pp > 1 else _LEAST) if self.sharing.gpu else 1,
        )
        # A choice of placements says itself what leaves.
        if self.chooses or "offload" not in placements.values():
            return rank
        return replace(rank, link=self._link(number, rank, self._timed(stages, rank.stages)))

    def _link(self, number: int, rank: Rank, halves: Mapping[int, Sequence[Half]]) -> Plan:
        """What the run's manager will plan. Of a process alone, for each microbatch anew. On a CPU a copy takes no time."""
        todo = self._todo(number)
        m = self.machine
        rates = (
            (m.out_rate, m.back_rate, *(m.end_rates or (None, None)), m.copy_rate) if self.sharing.gpu else (inf, inf)
        )
        return plan_link(
            halves,
            todo if self.engine else [action for action in todo if action.microbatch == 0],
            rates,
            hidden=rank.hidden,
            least=rank.least,
            everything=self.config.memory.offload == "all",
        )

    def _timed(self, stages: Mapping[int, Stage], laid: Mapping[int, Sequence[Part]]) -> dict[int, list[Half]]:
        """The halves of stages with the seconds that they take, what is made again in backward included."""
        found: dict[int, list[Half]] = {}
        for number, stage in stages.items():
            traces = parts_by_path(self.trace, stage, self.prefix)
            found[number] = []
            for part in laid[number]:
                trace = traces[part.path]
                forward, backward = self.machine.seconds(trace)
                if part.events is trace.light_events:
                    backward += LIGHT * forward
                elif part.placement == "recompute":
                    backward += forward
                found[number].append(Half(part.path, part.events, part.placement == "offload", forward, backward))
        return found

    def _todo(self, number: int) -> Any:
        """What the rank computes in a step."""
        if self.actions is None:
            return alone(self.plan.microbatches, self.config.parallel.overlap)
        return [action for action in self.actions[number] if action.computes]

    def _messages(self) -> int:
        return _MESSAGES * self.hidden * self.sharing.compute if self.config.parallel.pp > 1 else 0

    def _summed(self) -> bool:
        """Whether the engine sums the vocabulary's gradients itself."""
        return self.engine and self.sharing.sharded and self.sharing.summed > self.sharing.compute

    def _at_once(self) -> bool:
        """Whether it adds those of embedded tokens as they are made."""
        (vocabulary, width), *_ = self.weights.embedding
        tokens = self.plan.microbatches * self.hidden // width
        return self._summed() and adds_at_once(tokens, vocabulary, self.sharing.compute)

    def _ways(self) -> dict[str, Any]:
        recompute = self.config.memory.recompute
        summed = {"summed": self._summed(), "at_once": self._at_once()}
        return {"prefix": self.prefix, "recompute": recompute, "engine": self.engine, **summed}

    def _allowed(self) -> frozenset[str]:
        """What the trainer can carry out; its own `policy = "auto"` stashes nothing."""
        if self.auto is None:
            return frozenset({"recompute", "offload"})
        found = {"recompute", *(("stash",) if self.config.parallel.ep > 1 else ())}
        return frozenset(found if self.config.parallel.overlap else {*found, "offload"})

    def _limit(self, state: State) -> int:
        """Bytes: `memory.budget` is over what is held before a forward, and counts for the trainer's own choice. The manager
        measures that in its second cycle: of several microbatches, with the gradients of the first."""
        if self.auto is not None:
            return self.auto
        before = state.parameters + state.optimizer + state.other
        before += state.gradients if state.at_once or self.plan.microbatches > 1 else 0
        own = before + parse_bytes(self.config.memory.budget)
        return own if self.budget is None else min(own, within(self.budget))


def _stages(plan: LayerPlan, rank: int) -> dict[int, Stage]:
    """The stages of a rank by number; its layers have places in the order of the forward."""
    found, last, before = {}, len(plan.partition.layers) - 1, 0
    for number in plan.partition.stages(rank):
        layers = plan.partition.layers[number]
        found[number] = Stage(layers, tuple(range(before, before + len(layers))), number == 0, number == last)
        before += len(layers)
    return found
