"""`forebay plan --auto` on random runs and budgets: is there an answer whenever recomputing everything fits, does a larger
budget never cost more, and how far is it from the best of all placements of two and three layers? Needs no GPU.

    python benchmarks/solver_auto.py --pairs 200 --out benchmarks/results/solver_auto.json
"""

import argparse
import json
import math
import random
import time
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.estimate.fit import least_budget
from forebay.estimate.layers import fast_path_of, plan_layers, sharing_of
from forebay.estimate.placement import ChoiceCosts, rank_options
from forebay.estimate.plan import _estimator, ask
from forebay.estimate.rank import RunEstimator
from forebay.estimate.trace_cache import TraceCache
from forebay.models.catalog import PUBLISHED

BUDGETS = 5  # of each run
SMALL = 800  # placements of which all are walked


def drawn(chance: random.Random, traces: TraceCache) -> tuple[str, RunEstimator]:
    """A run that can be run."""
    while True:
        layers, world = chance.choice([2, 2, 3, 4, 6, 8, 12]), chance.choice([1, 2, 4, 8])
        settings = [f"model.config={{num_hidden_layers={layers}}}", f"train.microbatch={chance.choice([1, 2])}"]
        settings.append(f"train.sequence={chance.choice([1024, 2048, 4096, 8192])}")
        if world > 1 and layers >= 4 and chance.random() < 0.25:
            settings.append("parallel.pp=2")
        elif world > 1 and chance.random() < 0.2:
            settings.append("parallel.overlap=true")
        settings += ['memory.recompute="full"'] * (chance.random() < 0.2)
        name = chance.choice(list(PUBLISHED))
        try:
            config = fast_path_of(ask(name, settings, world).config, world).config
            run, _ = _estimator(
                config, plan_layers(config, world), None, 1.0, None, 1, traces, sharing_of(config, world)
            )
        except UsageError:
            continue
        return f"{name}, {world} GPUs, {', '.join(settings)}", run


def needs(run: RunEstimator, placements: dict[str, str]) -> int:
    """The smallest budget that fits these placements."""
    fit = run._estimate(0, placements).fit
    return least_budget(fit.total, fit.error)


def row(name: str, run: RunEstimator) -> dict[str, Any]:
    parts = run._placed(0, {})
    options = rank_options(parts, run._allowed(), run.machine, run.config.memory.recompute)
    sublayers = [own for stage in options.values() for own in stage]
    recomputed = {o.path: o.placement for own in sublayers for o in own if o.placement == "recompute"}
    least = needs(run, recomputed)
    most = max(needs(run, {}), least)
    clocked = {part.path: run.clock.both_ways(part.trace) for stage in parts.values() for part in stage}
    times = {path: [time.alone for time in both] for path, both in clocked.items()}
    plain = run.plan.microbatches * sum(map(sum, times.values()))
    every = []
    if math.prod(map(len, sublayers)) <= SMALL:
        costs = ChoiceCosts(options, times, (), run.plan.microbatches, run.machine, False)
        for chosen in product(*(range(len(own)) for own in sublayers)):
            seconds, waited = costs.seconds(chosen)
            if waited < 1e-9:
                every.append((seconds, needs(run, {o.path: o.placement for o in costs.placed(chosen)})))
    costs_ms: list[float] = []
    worst, took, infeasible = 1.0, 0.0, 0
    for k in range(BUDGETS):
        budget = least + (most - least) * k // (BUDGETS - 1)
        begun = time.process_time()
        found = replace(run, auto=budget).rank(0)
        took = max(took, time.process_time() - begun)
        assert found.choice is not None
        infeasible += bool(found.over)
        costs_ms.append(1e3 * found.choice.seconds)
        best = min((s for s, t in every if t <= budget), default=math.inf)
        worst = max(worst, (plain + found.choice.seconds) / (plain + best))
    rises = sum(later > earlier + 1e-6 for earlier, later in pairwise(costs_ms))
    return {
        "run": name,
        "sublayers": len(sublayers),
        "all placements": len(every),
        "milliseconds": costs_ms,
        "infeasible": infeasible,
        "not monotone": rises,
        "over the best": worst,
        "CPU seconds": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance, traces = random.Random(options.seed), TraceCache()
    rows = []
    for _ in range(-(-options.pairs // BUDGETS)):
        rows.append(row(*drawn(chance, traces)))
        shown = {name: value for name, value in rows[-1].items() if name != "milliseconds"}
        print(shown, flush=True)
    summary = {
        "pairs": BUDGETS * len(rows),
        "infeasible though recomputing everything fits": sum(r["infeasible"] for r in rows),
        "a larger budget costs more": sum(r["not monotone"] for r in rows),
        "runs of which all placements were walked": sum(r["all placements"] > 0 for r in rows),
        "worst step time over the best of all": max(r["over the best"] for r in rows),
        "most CPU seconds": max(r["CPU seconds"] for r in rows),
    }
    print(json.dumps(summary, indent=1))
    if options.out:
        options.out.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
