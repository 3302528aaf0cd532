"""Decides which plan a step follows: measures steps, tries plans, follows the best one.

Input: the end and the begin of each step, from the manager. Output: the plan in force (`Autotuner.plan`), what it means for
each region call (`Autotuner.lookup`), and the recorder of the current step. `Autotuner` owns the plan, its timeline and the
`Trials`; the manager owns regions and the store. Plans are made between steps, never inside a forward pass.
"""

import enum
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forebay.memory.host_store import HostStore
from forebay.memory.recorder import Peaks, Recorder, TimelineRecorder, TimingRecorder, TrialRecorder
from forebay.memory.solver import Solver, is_interleaved, plan_offload, under_budget
from forebay.memory.timeline import Assignment, CallFigures, EventName, Key, Plan, Timeline, TimelineEvent, simulate
from forebay.policy import RECOMPUTE_AND_OFFLOAD, BudgetError, PolicyError, format_bytes

MAX_TRIAL_STEPS = 40  # steps of all trials together, those that do not count included
_WARMUP_STEPS = 1  # after a change of plan; not counted, because the allocator and the host memory adapt to the plan
_TIMED_STEPS = 3  # the least time of these counts: steps with an optimizer step or an evaluation in them are longer
# Share of the budget that the first plan leaves free: steps took up to 1.6 % more than their plans said, in 5 of 6 runs
# (benchmarks/results/auto.md). Once plans were tried, their peaks are known and later plans use it.
_FIRST_PLAN_MARGIN = 0.02
# Share of the budget that plans leave free whose excess is known: peaks of equal steps differ by single tensors.
_PLAN_MARGIN = 0.003
# Plans that should take longer than these multiples of the best one so far are not tried: at first, and at all. On simulated
# machines (docs/solver.md) 3 of 226 contests were lost by more than 2 % with the first alone, and 1 with both.
_MAX_EXPECTED_RATIOS = 1.08, 1.3
_BUDGET_STEP, _ROUNDS = 0.01, 4  # share of the budget to give up each time that no plan was within it
_MAX_CHANGED_PLANS = 2  # plans at most that differ from the fastest by one region
_SLACK = 1.01  # a batch's bytes over those that a plan allows for
_MAX_ITEM_GROWTH = 1.5  # the same where microbatches alternate, whose rows vary between ranks
_MAX_MEASURED_STEPS = 10  # while a call is awaited
_CORRECTIONS = 3  # steps whose times correct the plan, where several microbatches are under way
# If more than this share of a CUDA graph step was spent waiting, by a plan made with a graph's times, the next plan counts on so
# much less of the link. Rates while copying are known; other traffic, or how one late copy delays others, is not.
_MAX_WAIT_SHARE, _LINK_BACKOFF = 1e-3, 0.85


@dataclass(frozen=True)
class Scenario:
    """An assumption about the figures of a timeline that a plan is made for.

    Attributes:
        again: factor of the seconds of recomputing.
        link: factor of the link's rates.
        offloads: whether anything may be offloaded.
    """

    name: str
    again: float = 1.0
    link: float = 1.0
    offloads: bool = True

    def applied_to(self, timeline: Timeline) -> Timeline:
        """The timeline as it would be in this scenario."""

        def slower(call: CallFigures) -> CallFigures:
            return replace(call, again_seconds=call.recompute_seconds * self.again)

        return replace(timeline, calls=tuple(map(slower, timeline.calls))).on_link(self.link)


_AS_MEASURED = Scenario("as measured")
_SCENARIOS = (
    _AS_MEASURED,
    Scenario("recompute x 0.7", again=0.7),
    Scenario("recompute x 1.4", again=1.4),
    Scenario("link x 0.75", link=0.75),
    Scenario("link x 0.5", link=0.5),
    Scenario("recompute only", offloads=False),
)


@dataclass(frozen=True)
class Trial:
    """A plan that was in force.

    Attributes:
        name: what it was tried for.
        scenario: the assumption that it was planned with.
        expected_seconds: of its step, by the timeline as measured.
        milliseconds: the least that a step took, from its begin to the next one's, with whatever lies between two steps.
        peak_bytes: the highest measured peak over the step's base.
    """

    name: str
    scenario: Scenario
    plan: Plan
    expected_seconds: float
    milliseconds: float = 0.0
    peak_bytes: int = 0

    @property
    def excess(self) -> int:
        """Bytes by which the measured peak exceeds the planned one; may be negative."""
        return self.peak_bytes - self.plan.peak_bytes


class Trials:
    """Runs a few plans and keeps the fastest whose measured peak is within the budget.

    A plan is made from recorded steps: their copies go one call at a time, recomputing was not timed, and the allocator's other
    memory was seen under another plan. So the plan that looks fastest need not be, and its peak is off. docs/solver.md lists
    which plans are tried. Needs no device.

    Args:
        paths: regions that may be offloaded.
        recomputable: regions that may be recomputed.
        budget: bytes that a step's memory may rise over its base.
        first: the plan to begin with.
        timed: times can be compared. Each of several processes would measure what the others try: then only plans that need less
            are tried, and only until one is within the budget.

    Attributes:
        plan: to follow in the next step.
        finished: `plan` stays.
        tried: the measured plans, in order.
        steps: recorded or skipped.
    """

    def __init__(
        self,
        timeline: Timeline,
        paths: frozenset[str],
        recomputable: frozenset[str],
        budget: int,
        first: Plan,
        timed: bool = True,
    ):
        self.plan, self.finished, self.steps = first, False, 0
        self.tried: list[Trial] = []
        self._timeline, self._paths, self._recomputable, self._budget = timeline, paths, recomputable, budget
        self._timed, self._max_ratio = timed, _MAX_EXPECTED_RATIOS[0]
        self._solvers: dict[Scenario, Solver] = {}
        self._seen, self._peak = 0, 0  # steps and bytes of the plan in force
        self._times: list[Callable[[], float]] = []
        self._proposals = self._propose(first)
        self._begin(next(self._proposals))

    def record(self, milliseconds: Callable[[], float], peak: int) -> None:
        """A step followed `plan`.

        Args:
            milliseconds: returns the step's time; called after the last of a plan's steps, because it waits for the device.
            peak: bytes over the step's base.
        """
        if self.finished:
            return
        self.steps += 1
        self._seen += 1
        if self._seen > _WARMUP_STEPS:
            self._times.append(milliseconds)
            self._peak = max(self._peak, peak)
            if len(self._times) == _TIMED_STEPS or self._peak > self._budget:
                self._next()
        if self.steps >= MAX_TRIAL_STEPS:
            self._finish()

    def skip(self) -> None:
        """A step says nothing about `plan`: it had another batch than the measured one, or no backward."""
        if not self.finished:
            self.steps += 1
            if self.steps >= MAX_TRIAL_STEPS:
                self._finish()

    def plan_for(self, timeline: Timeline) -> Plan | None:
        """The plan by other times, with the most that a trial took more than planned; it is not tried."""
        excess = max((trial.excess for trial in self.tried), default=0)
        return Solver(timeline, self._paths, self._recomputable).solve(self._target(max(0, excess)))

    def _begin(self, trial: Trial) -> None:
        self._now, self.plan = trial, trial.plan
        self._seen, self._peak, self._times = 0, 0, []

    def _next(self) -> None:
        least = min(milliseconds() for milliseconds in self._times)
        self.tried.append(replace(self._now, milliseconds=least, peak_bytes=self._peak))
        is_room = self.steps + _WARMUP_STEPS + _TIMED_STEPS <= MAX_TRIAL_STEPS
        following = next(self._proposals, None) if is_room else None
        if following is None:
            self._finish()
        else:
            self._begin(following)

    def _finish(self) -> None:
        """Stay with the fastest plan within the budget; if none is, with the lowest peak."""
        self.finished, self._proposals = True, iter(())
        best = self._best()
        if best is None and self.tried:
            best = min(self.tried, key=lambda trial: trial.peak_bytes)
        self.plan = best.plan if best is not None else self.plan

    def _best(self) -> Trial | None:
        within = [trial for trial in self.tried if trial.peak_bytes <= self._budget]
        return min(within, key=lambda trial: trial.milliseconds, default=None)

    # --- proposals ------------------------------------------------------------------------------------------------

    def _propose(self, first: Plan) -> Iterator[Trial]:
        """The next trial; resumed when the last one was measured."""
        yield Trial("first", _AS_MEASURED, first, self._expected(first))
        if not first.planned_bytes and not first.recompute and self._best() is not None:
            return
        if not self._timed:
            yield from self._lower()
            return
        for ratio in _MAX_EXPECTED_RATIOS:
            self._max_ratio = ratio
            done: Trial | None = None
            for scenario in _SCENARIOS:
                yield from self._planned(scenario.name, scenario, self._excess())
                if self.tried[-1].scenario is scenario and self.tried[-1].peak_bytes > self._budget:
                    yield from self._planned(scenario.name, scenario, self._excess())
            if self._best() is None:
                yield from self._lower()
            while (best := self._best()) is not done and best is not None:
                yield from self._planned("room", best.scenario, best.excess)
                yield from self._changed(best)
                done = best

    def _excess(self) -> int:
        return max(trial.excess for trial in self.tried)

    def _target(self, excess: int) -> int:
        return int(self._budget * (1 - _PLAN_MARGIN)) - excess

    def _planned(self, name: str, scenario: Scenario, excess: int) -> Iterator[Trial]:
        """The solver's plan, if there is one that is worth a trial."""
        plan = self._solver(scenario).solve(self._target(excess))
        if plan is not None:
            yield from self._if_worth(name, scenario, plan)

    def _solver(self, scenario: Scenario) -> Solver:
        if scenario not in self._solvers:
            offload = self._paths if scenario.offloads else frozenset[str]()
            self._solvers[scenario] = Solver(scenario.applied_to(self._timeline), offload, self._recomputable)
        return self._solvers[scenario]

    def _lower(self) -> Iterator[Trial]:
        """Plans with less memory each time until one is within the budget; at last the lowest, which may be slow."""
        for turn in range(1, _ROUNDS + 1):
            if self._best() is not None:
                return
            yield from self._planned("lower", _AS_MEASURED, self._excess() + int(turn * _BUDGET_STEP * self._budget))
        plan = self._solver(_AS_MEASURED).lowest()
        if self._best() is None and not self._is_tried(plan):
            yield Trial("lowest", _AS_MEASURED, plan, self._expected(plan))

    def _changed(self, best: Trial) -> Iterator[Trial]:
        plans = self._solver(best.scenario).with_one_changed(best.plan, self._target(best.excess))
        for plan in [plan for plan in plans if not self._is_tried(plan)][:_MAX_CHANGED_PLANS]:
            yield from self._if_worth("changed", best.scenario, plan)

    def _if_worth(self, name: str, scenario: Scenario, plan: Plan) -> Iterator[Trial]:
        expected = self._expected(plan)
        within = [trial.expected_seconds for trial in self.tried if trial.peak_bytes <= self._budget]
        if not self._is_tried(plan) and expected <= self._max_ratio * min(within, default=expected):
            yield Trial(name, scenario, plan, expected)

    def _is_tried(self, plan: Plan) -> bool:
        """Whether a plan with the same placements, released and fetched at the same events, was tried."""
        return any(_placement_key(trial.plan) == _placement_key(plan) for trial in self.tried)

    def _expected(self, plan: Plan) -> float:
        """Seconds of the step by the timeline as measured, with its copies scheduled anew."""
        numbers = {call.key: number for number, call in enumerate(self._timeline.calls)}
        assignment = Assignment({numbers[key]: items for key, items in plan.offload.items()}, plan.recompute)
        windows = (None, plan.planned_bytes // 4, 0) if plan.planned_bytes else (None,)
        return min(simulate(self._timeline, assignment, window).step_seconds for window in windows)


def _placement_key(plan: Plan) -> tuple[object, ...]:
    # A call that is never released is not offloaded.
    return plan.recompute, {key: plan.offload[key] for key in plan.release_at}, plan.release_at, plan.fetch_at


@dataclass(frozen=True)
class PlanLookup:
    """The plan in force, indexed by region call and by event.

    Attributes:
        regions: those that offload something.
        offload: call to the indices of the items it saves now that are offloaded.
        saves_offloaded: calls that save a storage again that an earlier call offloads.
        items: call to the bytes of the items it saves now, as measured.
        release_at: event to the calls whose device memory is released there.
        unreached: calls that ran no backward in the measured step.
    """

    regions: frozenset[str] = frozenset()
    offload: Mapping[Key, frozenset[int]] = field(default_factory=dict)
    saves_offloaded: frozenset[Key] = frozenset()
    items: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    release_at: Mapping[EventName, list[Key]] = field(default_factory=dict)
    unreached: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, timeline: Timeline, unreached: Mapping[Key, tuple[int, ...]]) -> "PlanLookup":
        offload: dict[Key, frozenset[int]] = {}
        items = dict(unreached)
        release_at: dict[EventName, list[Key]] = {}
        for call in timeline.calls:
            # The item that light recomputation makes again was measured and is not saved any more: those after it move up.
            recomputed = call.made_again >= 0 and call.key[0] in plan.recompute
            gone = call.made_again if recomputed else len(call.items)
            items[call.key] = call.items[:gone] + call.items[gone + 1 :]
            offload[call.key] = frozenset(i - (i > gone) for i in plan.offload.get(call.key, ()) if i != gone)
        for key, event in plan.release_at.items():
            release_at.setdefault(event, []).append(key)
        again = frozenset(k for call in timeline.calls if call.key in plan.offload for k in call.shared_with)
        return PlanLookup(frozenset(path for path, _ in plan.offload), offload, again, items, release_at, unreached)


class TuneState(enum.Enum):
    """The purpose of the next steps. The legal transitions are in `_TRANSITIONS`."""

    MEASURE = "measure"  # everything that may be offloaded is, one call at a time, and the step is recorded
    TRY = "try"  # plans are tried: policy="auto" on a GPU
    FOLLOW = "follow"  # a plan stays; graphs correct it by their times, or its first steps where microbatches alternate


_TRANSITIONS = frozenset(
    {
        (TuneState.MEASURE, TuneState.TRY),
        (TuneState.MEASURE, TuneState.FOLLOW),
        (TuneState.TRY, TuneState.FOLLOW),
        (TuneState.TRY, TuneState.MEASURE),  # a batch saved more than was measured
        (TuneState.FOLLOW, TuneState.MEASURE),  # the same
    }
)


class Autotuner:
    """The plans of one manager's steps.

    Args:
        store: carries plans out.
        placements: region path to keep, recompute, offload, recompute+offload or auto.
        budget: bytes that a step's peak may rise over its base, or None.
        offload: "fit" or "all", see `forebay.memory.hooks.Manager`.
        switch_light: turns the light recomputation of regions on or off.
        mark: records a CUDA event on the compute stream; None on a CPU.

    Attributes:
        state: changes only between two steps.
        plan, timeline: the plan in force, and the measured step it was made from; None while steps are measured.
        lookup: what `plan` means for a call.
        recorder: of the current step, or None.
        alternating: forwards and backwards of several microbatches alternate.
        length: of the measured batch: bytes of the hidden states that a call got, at most. Set by the manager.
        growth: how many times as long as the measured batch the longest one was. The plan leaves room for it.
        outgrown: set by the manager when a call saved other tensors than were measured, or by `call_grew` and `call_is_new`.
        peaks: of the allocator, which recorders reset.
    """

    def __init__(
        self,
        store: HostStore,
        placements: Mapping[str, str],
        budget: int | None,
        offload: str,
        switch_light: Callable[[Iterable[str], bool], None],
        mark: Callable[[], Any],
    ):
        self._store, self._device = store, store.device
        self._auto = frozenset(path for path, placement in placements.items() if placement == "auto")
        offloaded = ("offload", RECOMPUTE_AND_OFFLOAD)
        self._offload_paths = frozenset(path for path, placement in placements.items() if placement in offloaded)
        self._budget, self._offload, self._switch_light, self._mark = budget, offload, switch_light, mark
        self.peaks = Peaks()
        self.state = TuneState.MEASURE
        self.recorder: Recorder | None = None
        self.length = 0
        self._longest = 0.0  # the length of the longest batch so far
        self._warned_longest = 0.0
        self._awaited: Key | None = None  # the call that the next plan is to be made for
        self._start_over()

    def _start_over(self) -> None:
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.lookup = PlanLookup()
        self.alternating = self.outgrown = False
        self.growth = 1.0
        self._trials: Trials | None = None
        self._measured = 0  # steps
        self._measured_base: int | None = None  # bytes allocated before the last measured step
        self._corrections = 0
        self._trimmed = False
        self._captured: TimingRecorder | None = None  # of a CUDA graph step
        self._for_graphs = False  # the plan was made with a CUDA graph step's times
        self._link = 1.0  # share of the link's rates that plans count on

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The plans that were tried, in order."""
        return tuple(self._trials.tried) if self._trials is not None else ()

    @property
    def settled(self) -> bool:
        """Whether steps go on as the last one did: nothing is left to measure, try, plan or page-lock."""
        if self.state is not TuneState.FOLLOW or self.outgrown or self.recorder is not None:
            return False
        return self._trimmed and not (self._corrects and self._corrections < _CORRECTIONS)

    @property
    def _corrects(self) -> bool:
        return self.alternating and self._device.type == "cuda"

    # --- between two steps ----------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The last step is over: decide what the next one follows. No ticket is alive, and the store still knows the copies.

        Raises:
            BudgetError: no plan meets the budget.
        """
        if self.state is TuneState.MEASURE:
            self._end_measured_step()
        elif self.outgrown:
            self._drop_plan()
        elif self.state is TuneState.TRY:
            self._end_tried_step()
        elif isinstance(self.recorder, TimingRecorder):
            # A capture may hold several of the manager's steps. The last one's times are read when the graph was replayed.
            if not self._store.lanes.time_captured:
                self._correct(self.recorder)
        else:
            self._trim()

    def begin_step(self, captured: bool, base: int | None) -> None:
        """Choose the recorder of the next step.

        Args:
            captured: the step is captured in a CUDA graph.
            base: bytes allocated before it, if they were read early enough.
        """
        self.recorder = None
        if self.state is TuneState.MEASURE:
            self._measured_base = base
            self.recorder = TimelineRecorder(self._device, self._store, base, self.peaks)
        elif self.state is TuneState.TRY and not captured:
            assert self.timeline is not None and self.plan is not None
            # The first of several microbatches makes the gradients that the others find: all count from the same base.
            known = [b for b in (base, self._measured_base) if b is not None]
            self.recorder = TrialRecorder(self._device, self.timeline, self.plan, max(known, default=None), self.peaks)
        elif self._store.lanes.time_captured or (self._corrects and self._corrections < _CORRECTIONS and not captured):
            self.recorder = TimingRecorder(self._device, self._store, self.peaks)

    @property
    def allowed_growth(self) -> float:
        """How many times the measured bytes a call may save under the plan."""
        return (_MAX_ITEM_GROWTH if self.alternating else _SLACK) * self.growth

    def call_grew(self, growth: float) -> None:
        """A call got so many times the hidden states of the measured one. That may be more than the plan allows for."""
        if growth > self.allowed_growth:
            self.outgrown = True
            self._longest = max(self._longest, growth * self.length)

    def call_is_new(self, key: Key) -> None:
        """A call runs backward that did not, or not at all, in the measured step: the next plan is made from a step with it."""
        if not self.outgrown:
            self.outgrown, self._awaited = True, key

    def _go(self, to: TuneState) -> None:
        if (self.state, to) not in _TRANSITIONS:
            raise RuntimeError(f"the autotuner cannot go from {self.state.value} to {to.value}")
        self.state = to

    def _end_measured_step(self) -> None:
        recorder = self.recorder
        if not isinstance(recorder, TimelineRecorder) or not recorder.complete:
            return
        self._measured += 1
        # Steps of two kinds may take turns, such as those of two losses.
        awaits = self._awaited is not None and not recorder.reached(self._awaited)
        # On a GPU the first step compiles, tunes and page-locks: its times say nothing.
        if self._measured >= (_MAX_MEASURED_STEPS if awaits else 2 if self._device.type == "cuda" else 1):
            self._awaited = None
            try:
                self._make_plan(recorder)
            except BudgetError:  # the caller may go on with a smaller batch, which is measured anew
                self.recorder, self._longest = None, 0.0
                raise
            self._go(TuneState.FOLLOW if self._trials is None else TuneState.TRY)

    def _end_tried_step(self) -> None:
        assert self._trials is not None and self.plan is not None
        found = self.recorder.result() if isinstance(self.recorder, TrialRecorder) else None
        if found is None:
            self._trials.skip()
        else:
            self._trials.record(*found)
        if self._trials.plan is not self.plan:
            # Tensors of another placement do not fit the segments of the last one: a run of 14 layers reserved 26.3 GiB after its
            # trials; its recorded history, replayed with this, 23.2. A plan's first step does not count.
            torch.cuda.empty_cache()
            self._follow(self._trials.plan)
        if self._trials.finished:
            self._go(TuneState.FOLLOW)

    def _drop_plan(self) -> None:
        assert self.plan is not None
        self._switch_light(self.plan.recompute, False)
        self._start_over()
        self._go(TuneState.MEASURE)

    def _trim(self) -> None:
        """Free unused host memory, once, after a step that used what the last plan needs: measured steps used more. Page-locking
        again what was freed too early takes 0.32 s a GiB."""
        assert self.plan is not None
        if not self._trimmed and self._store.outbound.nbytes >= self.plan.planned_bytes // 2:
            self._store.trim()
            self._trimmed = True

    # --- CUDA graph steps -----------------------------------------------------------------------------------------

    def keep_recorder(self) -> None:
        """The last step was captured: its recorder is read when the graph has been replayed."""
        self._captured = None
        if isinstance(self.recorder, TimingRecorder):
            self._captured, self.recorder = self.recorder, None

    def plan_again(self) -> None:
        """Plan with the times of the last replay of a CUDA graph step: a graph is faster than the calls, and the link carries
        less in it. Does nothing if no graph was timed, or if the plan was made with a graph's times and waits are no longer
        than it says. With another plan steps have to warm up again."""
        if self._captured is None or self.plan is None:
            return
        recorder, self._captured = self._captured, None
        # Waits of eager steps are not evidence: they may be launch latency.
        late = recorder.waited() > _MAX_WAIT_SHARE + self.plan.stall_seconds / (self.plan.step_seconds or 1.0)
        if self._for_graphs and not late:
            return
        if self._for_graphs:  # else the rates measured in a graph correct the plan
            self._link *= _LINK_BACKOFF
        self._for_graphs = True
        self._correct(recorder)

    # --- plans ----------------------------------------------------------------------------------------------------

    def _make_plan(self, recorder: TimelineRecorder) -> None:
        out_rate, back_rate = self._store.outbound.rate(slice(None)), self._store.inbound.rate(slice(None))
        timeline = recorder.timeline(out_rate, back_rate, self._mark)
        self.timeline = timeline = replace(timeline, memory_rate=self._store.memory_rate)
        self.alternating = is_interleaved(timeline)
        self._longest = max(self._longest, self.length)
        self.growth = self._longest / self.length if self.length else 1.0
        plan = self._plan_auto(timeline) if self._auto and not self.alternating else self._plan_offload(timeline)
        if self._budget is not None and plan.peak_bytes > self._budget:
            raise BudgetError(
                f"this policy needs {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes) over what is allocated before the "
                f"step, more than the budget of {format_bytes(self._budget)}; raise it to that, or let policy='auto' choose"
            )
        self._follow(plan, recorder.unreached)

    def _plan_auto(self, timeline: Timeline) -> Plan:
        """The plan for the longest batch so far: if the measured one was shorter, for a budget that is as much smaller."""
        assert self._budget is not None
        paths, gpu = self._auto | self._offload_paths, self._device.type == "cuda"
        budget, margin = int(self._budget / self.growth), _FIRST_PLAN_MARGIN if gpu else 0.0
        try:
            plan = under_budget(timeline, paths, budget, self._auto, margin)
        except BudgetError:
            plan = Solver(timeline, paths, self._auto).lowest()
            if self.growth == 1.0 or plan.peak_bytes > self._budget:
                raise
            self._warn_of_longest(int(self.growth * plan.peak_bytes))
        if gpu:  # a CPU has no times, and no peaks
            self._trials = Trials(timeline, paths, self._auto, budget, plan, not _several_processes())
            torch.cuda.empty_cache()  # see `_end_tried_step`
        return plan

    def _warn_of_longest(self, needed: int) -> None:
        """Warn once of a batch for which no placement suffices: what was measured is shorter, and fits."""
        if self._longest <= self._warned_longest:
            return
        self._warned_longest = self._longest
        assert self._budget is not None
        warnings.warn(
            f"batches as long as the longest so far need about {format_bytes(needed)} ({needed} bytes) over what is allocated "
            f"before the step under every placement, more than the budget of {format_bytes(self._budget)}; raise it to that, or "
            "make batches shorter",
            stacklevel=2,
        )

    def _plan_offload(self, timeline: Timeline) -> Plan:
        if self.alternating and self._auto:
            raise PolicyError(
                "policy='auto' needs steps in which every forward is followed by its backward; where forwards and backwards of "
                "several microbatches alternate, name the regions to offload"
            )
        return plan_offload(timeline, self._offload_paths, self._offload == "all")

    def _correct(self, recorder: TimingRecorder) -> None:
        """Plan with the times of the step that was just run as planned."""
        assert self.timeline is not None
        timeline = recorder.retimed(self._as_run(self._with_rates(self.timeline)))
        self._corrections = self._corrections + 1 if timeline is not None else _CORRECTIONS
        if timeline is not None:
            self.timeline = self._as_measured(timeline, self.timeline)
            self._follow(self._plan_corrected())
            self._trimmed = False

    def _as_run(self, timeline: Timeline) -> Timeline:
        """The timeline with what the plan in force recomputes. In the measured step, nothing was that a plan chooses to."""
        events = (replace(e, seconds=e.seconds + self._again(timeline, e)) for e in timeline.events)
        return replace(timeline, events=tuple(events))

    def _as_measured(self, retimed: Timeline, before: Timeline) -> Timeline:
        """The inverse of `_as_run` for new times. If plans choose what is recomputed, memory stays that of a step in which
        nothing was, and so does the last event, which has no new time."""
        if not self._auto:
            return retimed
        events = [
            replace(old, seconds=max(new.seconds - self._again(retimed, new), 0.0), idle=new.idle)
            for old, new in zip(before.events[:-1], retimed.events, strict=False)
        ]
        return replace(retimed, events=(*events, before.events[-1]))

    def _again(self, timeline: Timeline, event: TimelineEvent) -> float:
        """Seconds in which the plan in force recomputes in an event."""
        assert self.plan is not None
        call = timeline.calls[event.call]
        return call.recompute_seconds if event.kind == "B" and call.key[0] in self.plan.recompute else 0.0

    def _plan_corrected(self) -> Plan:
        """The plan by the corrected timeline; of `policy="auto"` the one in force if no other is within the budget."""
        assert self.timeline is not None and self.plan is not None
        timeline = self.timeline.on_link(self._link)
        if not self._auto:
            return self._plan_offload(timeline)
        assert self._trials is not None
        return self._trials.plan_for(timeline) or self.plan

    def _with_rates(self, timeline: Timeline) -> Timeline:
        """The timeline with the rates of the last step's copies. By the plan there is one copy out and one back for each call."""
        assert self.plan is not None
        out, back, offloaded = self._store.outbound, self._store.inbound, self.plan.offload
        every, first, last = slice(None), 0, 0
        if len(out.copies) == len(back.copies) == len(offloaded):
            keys = [timeline.calls[event.call].key for event in timeline.events]
            first = sum(key in offloaded for key in keys[: timeline.opening])
            last = sum(key in offloaded for key in keys[timeline.closing :])
        return replace(
            timeline,
            out_rate=out.rate(every) or timeline.out_rate,
            back_rate=back.rate(every) or timeline.back_rate,
            opening_rate=out.rate(slice(first)) if first else None,
            closing_rate=back.rate(slice(len(offloaded) - last, None)) if last else None,
        )

    def _follow(self, plan: Plan, unreached: Mapping[Key, tuple[int, ...]] | None = None) -> None:
        assert self.timeline is not None
        self._switch_light(self.plan.recompute if self.plan is not None else (), False)
        self._switch_light(plan.recompute, True)
        self.plan = plan
        self.lookup = PlanLookup.of(plan, self.timeline, self.lookup.unreached if unreached is None else unreached)


def _several_processes() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
