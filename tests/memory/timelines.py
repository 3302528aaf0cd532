"""Timelines for tests of the planner, and every placement there is."""

import random
from collections.abc import Iterator
from itertools import product

from forebay.memory.timeline import Assignment, CallFigures, Plan, Timeline, TimelineEvent, simulate

WINDOWS = (None, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 0)  # divisors of what is offloaded; more than the solver tries


def paths_of(timeline: Timeline) -> frozenset[str]:
    return frozenset(call.key[0] for call in timeline.calls)


def random_timeline(chance: random.Random, regions: int, transient: int = 600) -> Timeline:
    """Regions of one to four items; links from far too slow to much too fast."""
    calls = []
    for i in range(regions):
        light = chance.random() < 0.4
        items = tuple(chance.randint(20, 1000) for _ in range(chance.randint(1, 4)))
        inputs = 0 if light else chance.randint(5, 100)
        again = items.index(max(items)) if light else -1
        calls.append(CallFigures((f"r{i}", 0), items, chance.uniform(0.5, 2.0), light, inputs, made_again=again))
    events = [
        TimelineEvent("F", i, c.seconds * chance.uniform(1, 1.2), chance.randint(0, 100), chance.randint(0, transient))
        for i, c in enumerate(calls)
    ]
    events += [
        TimelineEvent("B", i, c.seconds * chance.uniform(1.6, 2.4), chance.randint(0, 300), chance.randint(0, 900))
        for i, c in reversed([*enumerate(calls)])
    ]
    rate = chance.choice([50.0, 200.0, 500.0, 1500.0, 5000.0])
    return Timeline(tuple(calls), tuple(events), rate, rate * chance.uniform(0.9, 1.1))


def placements(timeline: Timeline) -> Iterator[Plan]:
    """All 3^n ways to keep, recompute or offload whole regions, each simulated with eleven windows."""
    paths = list(dict.fromkeys(c.key[0] for c in timeline.calls))
    for choice in product("kro", repeat=len(paths)):
        chosen = dict(zip(paths, choice, strict=True))
        again = frozenset(p for p in paths if chosen[p] == "r")
        offload = {i: frozenset(range(len(c.items))) for i, c in enumerate(timeline.calls) if chosen[c.key[0]] == "o"}
        leaving = sum(sum(timeline.calls[i].items) for i in offload)
        for share in WINDOWS if leaving else (None,):
            window = None if share is None else int(leaving / share) if share else 0
            yield simulate(timeline, Assignment(offload, again), window)


def pipeline(
    microbatches: int,
    ahead: int,
    layers: int,
    rate: float,
    seconds: float = 1e-3,
    items: tuple[int, ...] = (4_000_000, 1_000_000),
) -> Timeline:
    """1F1B of one rank: `ahead` forwards before the first backward, each of `layers` region calls."""
    calls, events = [], []

    def run(kind: str, m: int) -> None:
        for layer in range(layers) if kind == "F" else reversed(range(layers)):
            if kind == "F":
                calls.append(CallFigures((f"layer{layer}", m), items, seconds))
            duration = seconds if kind == "F" else 2 * seconds
            events.append(TimelineEvent(kind, m * layers + layer, duration, 0, 1_000_000))

    for m in range(ahead):
        run("F", m)
    for m in range(microbatches):
        run("B", m)
        if m + ahead < microbatches:
            run("F", m + ahead)
    return Timeline(tuple(calls), tuple(events), rate, rate)
