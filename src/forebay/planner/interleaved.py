"""What leaves for the host where forwards and backwards of several microbatches alternate, as in a pipeline.

In: a `Timeline` in which a forward follows some backward. Out: a `Plan` by which nobody waits, or not for long.

There is no turn here, before which everything leaves and after which it comes back (`forebay.planner.solve` plans for that): the
link carries both ways all the time, and memory is level for most of a step. So what is chosen is a *kind* of item, the same
storage of the same region in all microbatches, and a peak falls by what of it is away at any one time:

    kind      (region, which of its calls in a microbatch, ordinal); those that wait longest first
    accepted  if memory becomes lower where it is high: the mean of (memory)^16 over moments falls; and, unless there may be
              waits, if the copies take no more than a small share of the step from the device's own memory

Calls of accepted kinds are laid on the link (`forebay.planner.lanes`). At last what leaves and need not stays after all, those
first that are away for the shortest time: memory may be as high at any moment as it is where nothing can be done about it, and
each byte that travels takes time from the device's own memory.

By a plan for which nobody waits, memory is highest in a pipeline's first forwards, or in its last backwards: they follow each
other faster than the link carries. With `everything` they wait, rather than raise memory above a level: the lowest for which all
waits are a small share of the step, or a higher one for which they are so much shorter that the rest would have bought little.
Copies then also go on for most of the time in which the device waits for other processes (`Moment.idle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from forebay.planner.lanes import Laid, Step
from forebay.planner.simulate import Plan, Timeline

_POWER = 16
WAITS = 0.02
"""Share of the step, with `everything`; a pipeline's other ranks may wait at the same time, or for this one."""
# Share of what a rank computes in a step that copies may take of its device's own memory if nobody is to wait. What they take
# is lost, even on ranks that wait for others: of two H200s 9.9, 12.9, 20.5 and 27.0 GiB a step each way, of both together, cost
# 0.25, 0.41, 0.52 and 0.84 %. The last of these bytes buy least: with 0.0025 peaks fell by 16 to 34 % more, for 43 % more bytes.
_TAKEN = 0.0018
_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0)  # of `WAITS`, that are tried
# Share of a peak that a share of the step's time has to buy, at least: of PP 4 on H200s a rank's last 1.5 % of time bought 1.4 %
# of its peak, and another's first 0.7 % bought 11 %.
_WORTH = 2
_IDLE = 0.8  # of the time in which a process waits for another one, with `everything`, that the link is counted on
# Of the kinds, those that wait longest first, that are tried to leave. With 4 peaks were up to 10 % higher (PP 2 and 4 of
# DeepSeek-V2-Lite's shapes); with 64 they are no lower.
_PARTS = 16
_EVERY = 4  # of these parts are tried with smaller shares
_FINE = 1 / 128  # of a peak, within which its level is the lowest

Kind = list[tuple[int, int]]  # (call, ordinal) of each


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    kinds = "".join(m.kind for m in timeline.moments)
    return "F" in kinds.lstrip("F")


def plan_interleaved(timeline: Timeline, paths: frozenset[str], everything: bool = False) -> Plan:
    """Offload of the regions `paths` what lowers the peak, as far as the link carries it without anybody waiting, and its copies
    take little of the device's own memory.

    `peak_bytes` of a plan for no paths is that of keeping everything.

    Args:
        everything: the compute stream may wait for the link, 2 % of the step at most, if that lowers the peak further, and copies
            count on idle time.
    """
    step = Step(timeline, _IDLE if everything else 0.0)
    most = inf if everything else _TAKEN * step.seconds * timeline.memory_rate / 2  # copies out, and back
    chosen: Kind = []
    best = step.lay([])
    height = _height(best)
    kinds = _kinds(step, paths)
    for kind in kinds:
        laid = step.lay([*chosen, *kind])
        high = _height(laid)
        if high < height * (1 - 1e-9):
            laid.keep_what_may_stay()
            if sum(laid.bytes.values()) <= most:
                chosen.extend(kind)
                best, height = laid, high
    found = [best, *_waiting(step, kinds, best)] if everything else [best]
    return min(found, key=_cost).plan()


def _waiting(step: Step, kinds: Sequence[Kind], best: Laid) -> Iterator[Laid]:
    """What has the lowest peak, and a lower one than `best`, of those for which nobody waits longer than each of some limits."""
    ends = sorted({-(-len(kinds) * part // _PARTS) for part in range(1, _PARTS + 1)})  # few kinds have fewer parts
    for share in _SHARES:
        lowest = best
        for end in ends if share == 1 or len(ends) < _PARTS else ends[_EVERY - 1 :: _EVERY]:
            items = [item for kind in kinds[:end] for item in kind]
            lowest = min(
                [lowest, *_lower(step, items, lowest.peak, share * WAITS * step.seconds)], key=lambda laid: laid.peak
            )
        if lowest is not best:
            lowest.keep_what_may_stay()
            yield lowest


def _cost(laid: Laid) -> float:
    """In bytes."""
    return laid.peak * (1 + _WORTH * laid.stall() / laid.step.seconds)


def _lower(step: Step, items: Kind, peak: float, limit: float) -> Iterator[Laid]:
    """`items` laid lower and lower, from `peak` on, as long as all waits take no longer than `limit` seconds."""
    low, high = 0.0, peak * (1 - _FINE)
    level = high  # first: these items may not lower the peak at all
    while high - low > _FINE * peak:
        laid = step.lay(items, level)
        if laid.stall() > limit:
            low = level
        else:
            high = level
            yield laid
        level = (low + high) / 2


def _height(laid: Laid) -> float:
    """How high memory is where it is high."""
    top = sum(laid.step.sizes) or 1
    return sum(w * (m / top) ** _POWER for w, m in zip(laid.step.each, laid.memory, strict=True))


def _kinds(step: Step, paths: frozenset[str]) -> list[Kind]:
    """Those that wait longest first."""
    counts: dict[str, int] = {}
    for call in step.calls:
        counts[call.key[0]] = counts.get(call.key[0], 0) + 1
    fewest = min(counts.values(), default=1)
    found: dict[tuple[str, int, int], Kind] = {}
    for index, call in enumerate(step.calls):
        path, count = call.key
        if path not in paths or index not in step.forward or index not in step.backward:
            continue
        times = max(counts[path] // fewest, 1)  # a half in stages is called twice for a microbatch
        for ordinal, size in enumerate(call.items):
            if size:
                found.setdefault((path, count % times, ordinal), []).append((index, ordinal))

    def wait(items: Kind) -> float:
        waits = [step.starts[step.backward[c]] - step.starts[step.forward[c]] for c, _ in items]
        return sum(waits) / len(waits)

    return sorted(found.values(), key=wait, reverse=True)
