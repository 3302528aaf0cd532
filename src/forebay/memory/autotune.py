"""Measures a step, plans it, and tries plans until the fastest one within the budget is known.

Input: what the manager reports between two steps. Output: the plan that is in force, and what it means for a region
call. `Planning` owns the plan, its timeline and the `Trials`; the manager owns regions and the store.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from forebay.memory.host_store import HostStore
from forebay.memory.offload_plan import (
    assignment_of,
    fit_link,
    is_interleaved,
    offload_all,
    plan_interleaved,
    under_budget,
)
from forebay.memory.recorder import Meter, Peaks, Recorder, Stopwatch
from forebay.memory.solver import Allowed, lowest, with_one_changed
from forebay.memory.timeline import CallFigures, Key, Plan, Rates, Timeline, simulate
from forebay.policy import BudgetError, PolicyError, format_bytes

# Which plan is in force while a few of them are tried, and which one stays.
#
# A plan is made from measuring cycles: their copies go one call at a time, recomputing was never timed, and what the allocator
# holds beside the saved tensors was seen under another plan. So the plan that looks fastest is not always the fastest, and its
# peak is somewhat off. Trials run plans and look.
#
# In: the timeline, the budget and the first plan; then, cycle by cycle, how long it took and how far its memory rose (`told`),
# or that it is no measure (`skipped`). Out: `plan`, which is to be in force in the next cycle, and whether that is for good
# (`over`). No device: who measures is `forebay.memory.recorder`, who carries out is `forebay.memory.autotune`.
#
# What is tried, in this order (`Trials._propose`):
#
#     first       the first plan, which leaves a margin of the budget
#     figures     what the solver makes of changed figures: recomputing costs less or more than thought, the link carries less,
#                 or nothing is offloaded. Whichever of these worlds is nearest to the real one makes the fastest plan.
#     lower       only while none was within the budget: less and less memory, at last the least there is
#     room        the figures of the fastest again, with the room that its peak left
#     changed     the fastest with one region placed otherwise, as long as that finds a faster one
#     all again   with plans that are expected to take much longer, too: the figures may be that far off
#
# By how much a measured peak was over the planned one (or under it, a negative number) is its *excess*. New figures are planned
# with the largest excess so far, what comes of the fastest plan with its own; `_SAFETY` of the budget stays free on top.
#
# How long: a plan is in force for one cycle that does not count (the allocator and page-locked memory settle), and three that
# do; one that is over the budget goes after the first of these. `MOST` cycles in all, 40: ten plans, if none is over. A first
# plan that costs nothing (it keeps everything) and is within the budget is not tried against others.

MOST = 40  # cycles, those that do not count included
_SETTLES = 1  # cycles behind a change of plan that do not count
_COUNTED = 3  # of which the least time counts: cycles with an optimizer's step or an evaluation in them are longer

# Of the budget, left over by plans whose excess is known: of equal cycles, peaks differ by single tensors.
_SAFETY = 0.003
# Times the least time expected of a plan within the budget: what is beyond is not tried at first, or not at all. On invented
# machines (docs/solver.md) 3 of 226 contests were lost by more than 2 % with the first alone, and 1 with both.
_FAR = 1.08, 1.3
_LOWER, _ROUNDS = 0.01, 4  # of the budget, less each time that nothing was within it
_CHANGED = 2  # plans at most that differ from the fastest by one region


@dataclass(frozen=True)
class Figures:
    """How a timeline's figures are changed. ``again``: times the seconds of recomputing; ``link``: times the rates; ``offloads``:
    whether anything may leave."""

    name: str
    again: float = 1.0
    link: float = 1.0
    offloads: bool = True

    def of(self, timeline: Timeline) -> Timeline:
        """The timeline with these figures."""

        def slower(call: CallFigures) -> CallFigures:
            return replace(call, again_seconds=call.recompute_seconds * self.again)

        return replace(timeline, calls=tuple(map(slower, timeline.calls))).on_link(self.link)


_AS_MEASURED = Figures("as measured")
_WORLDS = (
    _AS_MEASURED,
    Figures("recompute x 0.7", again=0.7),
    Figures("recompute x 1.4", again=1.4),
    Figures("link x 0.75", link=0.75),
    Figures("link x 0.5", link=0.5),
    Figures("recompute only", offloads=False),
)


@dataclass(frozen=True)
class Trial:
    """A plan that was in force.

    Attributes:
        name: what it was tried for.
        figures: those that it was planned with.
        expected_seconds: of its step, by the timeline as measured.
        milliseconds: the least that a cycle took, from its begin to the next one's: what lies between cycles is part of it.
        peak_bytes: the most that memory rose over the cycle's base.
    """

    name: str
    figures: Figures
    plan: Plan
    expected_seconds: float
    milliseconds: float = 0.0
    peak_bytes: int = 0

    @property
    def excess(self) -> int:
        return self.peak_bytes - self.plan.peak_bytes


class Trials:
    """Tries plans for `timeline`, beginning with `first`.

    Args:
        paths: regions that may be offloaded.
        recomputable: regions that may be recomputed.
        budget: bytes that a cycle's memory may rise over its base.

    Attributes:
        plan: in force in the cycle that comes.
        over: `plan` stays.
        tried: what was measured, in order.
        steps: told or skipped.
    """

    def __init__(
        self, timeline: Timeline, paths: frozenset[str], recomputable: frozenset[str], budget: int, first: Plan
    ):
        self.plan, self.over, self.steps = first, False, 0
        self.tried: list[Trial] = []
        self._timeline, self._paths, self._recomputable, self._budget = timeline, paths, recomputable, budget
        self._far = _FAR[0]
        self._solved: dict[tuple[Figures, int], Plan | None] = {}  # by budget
        self._seen, self._peak = 0, 0  # of the plan in force: cycles, and bytes
        self._times: list[Callable[[], float]] = []
        self._proposed = self._propose(first)
        self._begin(next(self._proposed))

    def told(self, milliseconds: Callable[[], float], peak: int) -> None:
        """A cycle went by with `plan` in force.

        Args:
            milliseconds: its time; asked for behind the last of a plan's cycles, since a GPU has to be waited for.
            peak: bytes that memory rose over the cycle's base, at most.
        """
        if self.over:
            return
        self.steps += 1
        self._seen += 1
        if self._seen > _SETTLES:
            self._times.append(milliseconds)
            self._peak = max(self._peak, peak)
            if len(self._times) == _COUNTED or self._peak > self._budget:
                self._next()
        if self.steps >= MOST:
            self._stay()

    def skipped(self) -> None:
        """A cycle went by that says nothing of `plan`: another batch than was measured, or no backward."""
        if not self.over:
            self.steps += 1
            if self.steps >= MOST:
                self._stay()

    def _begin(self, trial: Trial) -> None:
        self._now, self.plan = trial, trial.plan
        self._seen, self._peak, self._times = 0, 0, []

    def _next(self) -> None:
        """Note what is in force now, and go on to what is to be tried next."""
        least = min(milliseconds() for milliseconds in self._times)
        self.tried.append(replace(self._now, milliseconds=least, peak_bytes=self._peak))
        following = next(self._proposed, None) if self.steps + _SETTLES + _COUNTED <= MOST else None
        if following is None:
            self._stay()
        else:
            self._begin(following)

    def _stay(self) -> None:
        """With the fastest within the budget; if none is, with the lowest."""
        self.over, self._proposed = True, iter(())
        best = self._best()
        if best is None and self.tried:
            best = min(self.tried, key=lambda trial: trial.peak_bytes)
        self.plan = best.plan if best is not None else self.plan

    def _best(self) -> Trial | None:
        within = [trial for trial in self.tried if trial.peak_bytes <= self._budget]
        return min(within, key=lambda trial: trial.milliseconds, default=None)

    # --- what is tried --------------------------------------------------------------------------------------------

    def _propose(self, first: Plan) -> Iterator[Trial]:
        """What is tried next; asked for when the last one was measured."""
        yield Trial("first", _AS_MEASURED, first, self._expected(first))
        if not first.planned_bytes and not first.recompute and self._best() is not None:
            return
        for far in _FAR:
            self._far = far
            done: Trial | None = None
            for figures in _WORLDS:
                yield from self._planned(figures.name, figures, self._excess())
                if self.tried[-1].figures is figures and self.tried[-1].peak_bytes > self._budget:
                    yield from self._planned(figures.name, figures, self._excess())
            if self._best() is None:
                yield from self._lower()
            while (best := self._best()) is not done and best is not None:
                yield from self._planned("room", best.figures, best.excess)
                yield from self._changed(best)
                done = best

    def _excess(self) -> int:
        return max(trial.excess for trial in self.tried)

    def _target(self, excess: int) -> int:
        return int(self._budget * (1 - _SAFETY)) - excess

    def _planned(self, name: str, figures: Figures, excess: int) -> Iterator[Trial]:
        """The solver's plan, if there is one that is worth a trial."""
        budget = self._target(excess)
        if (figures, budget) not in self._solved:
            self._solved[figures, budget] = self._solve(figures, budget)
        plan = self._solved[figures, budget]
        if plan is not None:
            yield from self._worth(name, figures, plan)

    def _solve(self, figures: Figures, budget: int) -> Plan | None:
        paths = self._paths if figures.offloads else frozenset[str]()
        try:
            return under_budget(figures.of(self._timeline), paths, budget, self._recomputable)
        except BudgetError:
            return None

    def _lower(self) -> Iterator[Trial]:
        """Less memory each time until a plan is within the budget; then the least there is, which may take long."""
        for turn in range(1, _ROUNDS + 1):
            if self._best() is not None:
                return
            yield from self._planned("lower", _AS_MEASURED, self._excess() + int(turn * _LOWER * self._budget))
        plan = lowest(self._timeline, Allowed(self._paths, self._recomputable))
        if self._best() is None and not self._known(plan):
            yield Trial("lowest", _AS_MEASURED, plan, self._expected(plan))

    def _changed(self, best: Trial) -> Iterator[Trial]:
        allowed = Allowed(self._paths if best.figures.offloads else frozenset(), self._recomputable)
        timeline = best.figures.of(self._timeline)
        plans = with_one_changed(timeline, allowed, assignment_of(timeline, best.plan), self._target(best.excess))
        for plan in [plan for plan in plans if not self._known(plan)][:_CHANGED]:
            yield from self._worth("changed", best.figures, plan)

    def _worth(self, name: str, figures: Figures, plan: Plan) -> Iterator[Trial]:
        expected = self._expected(plan)
        within = [trial.expected_seconds for trial in self.tried if trial.peak_bytes <= self._budget]
        if not self._known(plan) and expected <= self._far * min(within, default=expected):
            yield Trial(name, figures, plan, expected)

    def _known(self, plan: Plan) -> bool:
        """Whether the same was tried: the same placements, settled and fetched at the same moments. What is never settled does
        not leave."""
        return any(_moves(trial.plan) == _moves(plan) for trial in self.tried)

    def _expected(self, plan: Plan) -> float:
        """Seconds of the step by the timeline as measured; copies are laid anew."""
        assignment = assignment_of(self._timeline, plan)
        return min(simulate(self._timeline, assignment, window).step_seconds for window in _windows(plan))


def _windows(plan: Plan) -> tuple[int | None, ...]:
    return (None, plan.planned_bytes // 4, 0) if plan.planned_bytes else (None,)


def _moves(plan: Plan) -> tuple[object, ...]:
    return plan.recompute, {key: plan.offload[key] for key in plan.settle_at}, plan.settle_at, plan.fetch_at


# What a manager's cycles go by: a measuring cycle's recorder, or a plan, and the cycles that correct it.
#
# The first cycles measure: everything that may leave does, one call at a time, which is slow and small. Then the planner
# decides from their sizes, times and bandwidths. What happens to its plan afterwards:
#
#     policy="auto", on one GPU        a few plans are tried, and the fastest that is within the budget stays
#                                      (`memory/autotune.py`)
#     microbatches alternate           the next cycles' times, and those of a captured step, correct it (`Stopwatch`)
#     else, and on a CPU               it stays
#
# until a batch saves more than was measured: then everything begins anew.
#
# In: `step_over` and `step_begins`, from the manager, between two cycles. Out: `plan`, and what it means for a call (`leave`,
# `settles`, `measured_items`); and what the manager tells figures to during a cycle: `recorder`, `stopwatch`, `meter`, of which
# one at most is there.
#
# Who owns what: this owns plan, timeline and trials. The store (rates, host memory) is the manager's, and so are regions: how
# they recompute by themselves is switched by a function that it gives.

_RETIMINGS = 3  # cycles after the measuring ones whose times correct the plan, where several microbatches are under way

# If more than this share of a captured cycle was spent waiting, by a plan made with a captured one's times, the next plan counts
# on so much less of the link. Rates while copying are known; what else is on the way between host and device, or how one late
# copy makes others late, is not.
_WAITS, _LESS = 1e-3, 0.85

# Of a budget, left over by the first plan: steps took up to 1.6 % of it more than their plans said, in 5 of 6 runs
# (benchmarks/results/auto.md). Where plans are tried, their peaks are known, and the next ones use it.
_MARGIN = 0.02


class Planning:
    """Plans for the cycles of one manager.

    Args:
        store: that carries plans out.
        placements: region path to keep, recompute, offload or auto.
        budget: bytes that a cycle's peak may rise over its base, or None.
        offload: "fit" or "all", see `forebay.memory.hooks.Manager`.
        switch_light: turns on or off that these regions recompute by themselves.

    Attributes:
        plan, timeline: in force, and what it was made from; None while cycles are measured.
        alternating: forwards and backwards of several microbatches do.
        offloaded: regions of which something leaves.
        leave: call to the ordinals of what it saves now that leave.
        save_again: calls that save something which a call of which something leaves saved before them.
        measured_items: call to the bytes of what it saves now, as they were measured.
        settles: moment to the calls that are settled there.
        unreached: calls that ran no backward in the measured cycle.
        outgrown: set by the manager: a call saved more than was measured.
        peaks: of the allocator, which measuring resets.
    """

    def __init__(
        self,
        store: HostStore,
        placements: Mapping[str, str],
        budget: int | None,
        offload: str,
        switch_light: Callable[[Iterable[str], bool], None],
    ):
        self.peaks = Peaks()
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.recorder: Recorder | None = None
        self.stopwatch: Stopwatch | None = None
        self.meter: Meter | None = None
        self.alternating = False
        self.outgrown = False
        self.offloaded: frozenset[str] = frozenset()
        self.leave: dict[Key, frozenset[int]] = {}
        self.save_again: frozenset[Key] = frozenset()
        self.measured_items: dict[Key, tuple[int, ...]] = {}
        self.settles: dict[tuple[str, Key], list[Key]] = {}
        self.unreached: Mapping[Key, tuple[int, ...]] = {}
        self._store, self._device = store, store.device
        self._auto = frozenset(path for path, placement in placements.items() if placement == "auto")
        self._offload_paths = frozenset(path for path, placement in placements.items() if placement == "offload")
        self._budget, self._offload, self._switch_light = budget, offload, switch_light
        self._measured = 0
        self._measured_base: int | None = None  # what was held before the last measuring cycle
        self._trials: Trials | None = None
        self._replayed: Stopwatch | None = None  # of a captured cycle
        self._retimings = 0
        self._share = 1.0  # of the link's rates that plans count on
        self._for_graphs = False  # the plan rests on a captured cycle's times
        self._trimmed = False

    # --- between two cycles ---------------------------------------------------------------------------------------

    def step_over(self) -> None:
        """The last cycle is over: decide how the next one goes. No ticket is alive, and the store still knows the copies."""
        if self.recorder is not None and self.recorder.complete:
            self._measured += 1
            # On a GPU the first cycle compiles, tunes and page-locks: its times say nothing.
            if self._measured >= (2 if self._device.type == "cuda" else 1):
                self._make_plan(self.recorder)
        elif self.outgrown:
            self._drop_plan()
        elif self.stopwatch is not None:
            self._plan_again(self.stopwatch)
        elif self.trying:
            self._try_on()
        elif (
            self.plan is not None and not self._trimmed and self._store.outbound.nbytes >= self.plan.planned_bytes // 2
        ):
            # Once, behind a cycle that used what the last plan needs: the measuring cycles held more. Page-locking what was let
            # go too early takes 0.32 s a GiB.
            self._store.trim()
            self._trimmed = True

    def step_begins(self, captured: bool, base: int | None) -> None:
        """See to it that the cycle that comes is measured as it has to be.

        Args:
            captured: in a CUDA graph.
            base: bytes that were held before it, where somebody looked early enough.
        """
        self.recorder = Recorder(self._device, base, self.peaks) if self.plan is None else None
        if self.recorder is not None:
            self._measured_base = base
        again = self.alternating and (
            self._store.lanes.time_captured or (self._retimings < _RETIMINGS and not captured)
        )
        timed = self.plan is not None and again and self._device.type == "cuda"
        self.stopwatch = Stopwatch(self._device, self.peaks) if timed else None
        self.meter = None
        if self.trying and not captured:
            assert self.timeline is not None and self.plan is not None
            # The first microbatch of several makes the gradients that the others find: all are measured from the same base.
            known = [b for b in (base, self._measured_base) if b is not None]
            self.meter = Meter(self._device, self.timeline, self.plan, max(known, default=None), self.peaks)

    @property
    def trying(self) -> bool:
        """Plans are being tried."""
        return self._trials is not None and not self._trials.over

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The plans that were tried, in order."""
        return tuple(self._trials.tried) if self._trials is not None else ()

    @property
    def measuring(self) -> bool:
        """The memory of the cycle that comes, or of this one, counts."""
        return self.plan is None or self.trying

    @property
    def settled(self) -> bool:
        """Whether cycles go on as the last one did: nothing is to be measured, tried, planned or page-locked any more."""
        if self.plan is None or self.outgrown or self.recorder is not None or self.stopwatch is not None or self.trying:
            return False
        retimed = not self.alternating or self._retimings >= _RETIMINGS or self._device.type != "cuda"
        return retimed and self._trimmed

    # --- a captured cycle -----------------------------------------------------------------------------------------

    def keep_stopwatch(self) -> None:
        """The last cycle was captured: its stopwatch is read when it has been replayed."""
        self._replayed, self.stopwatch = self.stopwatch, None

    def plan_again(self) -> None:
        """With the times of the last replay of a captured cycle: a graph is faster than calls, and the link carries less in it.
        Nothing where none was timed, or where the plan was made so and nobody waited longer than it says. Behind another plan
        cycles have to settle again."""
        if self._replayed is None or self.plan is None:
            return
        stopwatch, self._replayed = self._replayed, None
        # Of steps that the host launches nobody could tell: it may be the host.
        late = stopwatch.waited() > _WAITS + self.plan.stall_seconds / (self.plan.step_seconds or 1.0)
        if self._for_graphs and not late:
            return  # this plan was made for a graph, and it was right
        if self._for_graphs:  # else the rates in a graph will say what was wrong
            self._share *= _LESS
        self._for_graphs = True
        self._plan_again(stopwatch)

    # --- plans ----------------------------------------------------------------------------------------------------

    def _make_plan(self, recorder: Recorder) -> None:
        _, out_rate = self._store.outbound.measure()
        _, back_rate = self._store.inbound.measure()
        self.timeline = replace(recorder.timeline(out_rate, back_rate), memory_rate=self._store.memory_rate)
        self.unreached = recorder.unreached
        self.alternating = is_interleaved(self.timeline)
        if self.alternating:
            plan = self._plan_pipeline(self.timeline)
        elif self._auto:
            plan = self._plan_auto(self.timeline)
        elif self._offload == "all":
            plan = offload_all(self.timeline, self._offload_paths)
        else:
            plan = fit_link(self.timeline, self._offload_paths)
        if self._budget is not None and plan.peak_bytes > self._budget:
            raise BudgetError(
                f"this policy needs {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes) over what is held before the "
                f"step, more than the budget of {format_bytes(self._budget)}; raise it to that, or let policy='auto' choose"
            )
        self._follow_plan(plan)
        self._switch_light(plan.recompute, True)

    def _plan_auto(self, timeline: Timeline) -> Plan:
        assert self._budget is not None
        paths, gpu = self._auto | self._offload_paths, self._device.type == "cuda"
        plan = under_budget(timeline, paths, self._budget, self._auto, _MARGIN if gpu else 0.0)
        # On a CPU there are no times. Of several processes each would measure what the others try.
        if gpu and not _several_processes():
            self._trials = Trials(timeline, paths, self._auto, self._budget, plan)
        return plan

    def _plan_pipeline(self, timeline: Timeline) -> Plan:
        if self._auto:
            raise PolicyError(
                "policy='auto' is for forwards that are followed by their backwards; where those of several microbatches "
                "alternate, say which regions to offload"
            )
        return plan_interleaved(timeline, self._offload_paths, self._offload == "all")

    def _try_on(self) -> None:
        """Tell the trials of the last cycle, and follow the plan that they want to see next."""
        assert self._trials is not None and self.plan is not None
        found = self.meter.over() if self.meter is not None else None
        if found is None:
            self._trials.skipped()
        else:
            self._trials.told(*found)
        if self._trials.plan is not self.plan:
            self._switch_light(self.plan.recompute, False)
            self._follow_plan(self._trials.plan)
            self._switch_light(self._trials.plan.recompute, True)

    def _plan_again(self, stopwatch: Stopwatch) -> None:
        """With the times of the cycle that was just run as planned."""
        assert self.timeline is not None
        timeline = stopwatch.retimed(self.timeline, self._rates())
        self._retimings = self._retimings + 1 if timeline is not None else _RETIMINGS
        if timeline is not None:
            self.timeline = timeline
            self._follow_plan(self._plan_pipeline(timeline.on_link(self._share)))
            self._trimmed = False

    def _rates(self) -> Rates:
        """Of the last cycle's copies, which went by the plan: one of each call out, and one back."""
        assert self.timeline is not None and self.plan is not None
        out, back, leaves = self._store.outbound, self._store.inbound, self.plan.offload
        whole = Rates(out.rate(slice(None)), back.rate(slice(None)))
        if not len(out.copies) == len(back.copies) == len(leaves):
            return whole
        keys = [self.timeline.calls[m.call].key for m in self.timeline.events]
        first = sum(key in leaves for key in keys[: self.timeline.opening])
        last = sum(key in leaves for key in keys[self.timeline.closing :])
        return replace(
            whole,
            opening=out.rate(slice(first)) if first else None,
            closing=back.rate(slice(len(leaves) - last, None)) if last else None,
        )

    def _follow_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.offloaded = frozenset(path for path, _ in plan.offload)
        self.settles, self.measured_items, self.leave = {}, dict(self.unreached), {}
        assert self.timeline is not None
        self.save_again = frozenset(
            later for call in self.timeline.calls if call.key in plan.offload for later in call.shared_with
        )
        for call in self.timeline.calls:
            # What a light recomputation makes again was measured and is not saved any more: the items behind it move up.
            gone = call.largest if call.light_recompute and call.key[0] in plan.recompute else len(call.items)
            self.measured_items[call.key] = call.items[:gone] + call.items[gone + 1 :]
            self.leave[call.key] = frozenset(o - (o > gone) for o in plan.offload.get(call.key, ()) if o != gone)
        for key, event in plan.settle_at.items():
            self.settles.setdefault(event, []).append(key)

    def _drop_plan(self) -> None:
        """Measure again, from the next cycle on."""
        assert self.plan is not None
        self._switch_light(self.plan.recompute, False)
        self.plan, self.timeline, self._trials, self._measured = None, None, None, 0
        self.outgrown = self._trimmed = self.alternating = False
        self.offloaded = frozenset()
        self._retimings, self._share, self._for_graphs = 0, 1.0, False


def _several_processes() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
