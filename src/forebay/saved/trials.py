"""Which plan is in force while a few of them are tried, and which one stays.

A plan is made from measuring cycles: their copies go one call at a time, recomputing was never timed, and what the allocator
holds beside the saved tensors was seen under another plan. So the plan that looks fastest is not always the fastest, and its peak
is somewhat off. Trials run plans and look.

In: the timeline, the budget and the first plan; then, cycle by cycle, how long it took and how far its memory rose (`told`), or
that it is no measure (`skipped`). Out: `plan`, which is to be in force in the next cycle, and whether that is for good (`over`).
No device: who measures is `forebay.saved.meter`, who carries out is `forebay.saved.planning`.

What is tried, in this order (`Trials._propose`):

    first       the first plan, which leaves a margin of the budget
    figures     what the solver makes of changed figures: recomputing costs less or more than thought, the link carries less, or
                nothing is offloaded. Whichever of these worlds is nearest to the real one makes the fastest plan.
    lower       only while none was within the budget: less and less memory, at last the least there is
    room        the figures of the fastest again, with the room that its peak left
    changed     the fastest with one region placed otherwise, as long as that finds a faster one
    all again   with plans that are expected to take much longer, too: the figures may be that far off

By how much a measured peak was over the planned one (or under it, a negative number) is its *excess*. New figures are planned
with the largest excess so far, what comes of the fastest plan with its own; `_SAFETY` of the budget stays free on top.

How long: a plan is in force for one cycle that does not count (the allocator and page-locked memory settle), and three that do;
one that is over the budget goes after the first of these. `MOST` cycles in all, 40: ten plans, if none is over. A first plan that
costs nothing (it keeps everything) and is within the budget is not tried against others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from forebay.planner.milp import Allowed, lowest, with_one_changed
from forebay.planner.simulate import CallFigures, Plan, Timeline, simulate
from forebay.planner.solve import assignment_of, under_budget
from forebay.policy import BudgetError

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
        cycles: told or skipped.
    """

    def __init__(
        self, timeline: Timeline, paths: frozenset[str], recomputable: frozenset[str], budget: int, first: Plan
    ):
        self.plan, self.over, self.cycles = first, False, 0
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
        self.cycles += 1
        self._seen += 1
        if self._seen > _SETTLES:
            self._times.append(milliseconds)
            self._peak = max(self._peak, peak)
            if len(self._times) == _COUNTED or self._peak > self._budget:
                self._next()
        if self.cycles >= MOST:
            self._stay()

    def skipped(self) -> None:
        """A cycle went by that says nothing of `plan`: another batch than was measured, or no backward."""
        if not self.over:
            self.cycles += 1
            if self.cycles >= MOST:
                self._stay()

    def _begin(self, trial: Trial) -> None:
        self._now, self.plan = trial, trial.plan
        self._seen, self._peak, self._times = 0, 0, []

    def _next(self) -> None:
        """Note what is in force now, and go on to what is to be tried next."""
        least = min(milliseconds() for milliseconds in self._times)
        self.tried.append(replace(self._now, milliseconds=least, peak_bytes=self._peak))
        following = next(self._proposed, None) if self.cycles + _SETTLES + _COUNTED <= MOST else None
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
