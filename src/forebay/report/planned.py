"""What the planner says of a configuration, with the whole curve of every rank's step.

In: a valid `Config` and a number of processes. Out: a `Planned`. It is what ``forebay plan`` prints, and for each pipeline rank
the level at every half of its step, of which the table has the highest.

Levels are what is in use. They are told by the walk of `forebay.planner.fit`, in which a half needs all that it needs at once.
The allocator on paper (`forebay.planner.reserved`) knows better, but only what is in use at most. So what a level has above that
is taken off what comes and goes, and what the highest has too little is added, as the table has it. What the allocator reserves
has no curve: it gives nothing back within a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.planner.fit import RankFit
from forebay.report.charts import PARTS, Level
from forebay.train.config import Config
from forebay.train.fitting import Fit, fit_run
from forebay.train.planning import LayerPlan, plan_layers


@dataclass(frozen=True)
class Planned:
    """A plan, its verdict, and by pipeline rank the levels of a step in their order."""

    plan: LayerPlan
    fit: Fit
    levels: Mapping[int, Sequence[Level]]


class Curves:
    """Collects the levels of one plan, as `forebay.planner.fit` tells of them."""

    def __init__(self) -> None:
        self._levels: dict[int, list[Level]] = {}

    def seen(self, action: str, level: RankFit) -> None:
        """See `forebay.planner.fit.Seen`."""
        self._levels.setdefault(level.rank, []).append(Level(action, level.where, parts_of(level)))

    def planned(self, plan: LayerPlan, fit: Fit) -> Planned:
        """The plan with the levels that were told of."""
        most = {rank.rank: rank.allocated for rank in fit.ranks}
        return Planned(
            plan,
            fit,
            {r: _topped([_settled(level, most[r]) for level in found], most[r]) for r, found in self._levels.items()},
        )


def _settled(level: Level, most: int) -> Level:
    """With at most `most` bytes, as far as what comes and goes can be less."""
    cut = min(max(0, level.total - most), level.bytes["transient"])
    return replace(level, bytes={**level.bytes, "transient": level.bytes["transient"] - cut}, cut=cut) if cut else level


def _topped(levels: list[Level], most: int) -> list[Level]:
    """With the highest one at `most` bytes, if all are below: what the walk does not know of comes and goes there."""
    top = max(range(len(levels)), key=lambda i: levels[i].total)
    more = max(0, most - levels[top].total)
    transient = levels[top].bytes["transient"] + more
    return [
        *levels[:top],
        replace(levels[top], bytes={**levels[top].bytes, "transient": transient}),
        *levels[top + 1 :],
    ]


def planned(config: Config, world: int) -> Planned:
    """Plan a run on `world` processes, without a budget.

    Raises:
        UsageError: as `forebay.train.planning.plan_layers` and `forebay.train.fitting.fit_run` do.
    """
    curves = Curves()
    plan = plan_layers(config, world)
    return curves.planned(plan, fit_run(config, plan, world, seen=curves.seen))


def parts_of(level: RankFit) -> dict[str, int]:
    """Bytes by what they are."""
    return {part: getattr(level, part) for part in PARTS}
