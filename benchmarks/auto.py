"""policy="auto" against every placement, measured: one GPU, one small model, six budgets.

The model is Qwen3-MoE, hidden 2048, 2 layers, 64 experts top-8 of width 768, batch 4 x 4096, bf16, not compiled. (With
a batch of 2, part of a step's time is the host's, and varies by 3 %.) Its four regions have 81 policies of keep,
recompute and offload. Policies that offload run twice, with offload = "all" and with "fit". All run on the same model,
one after the other; a step is forward and backward.

1. Each policy: median step time, and peak over the memory held before the step.
2. Six budgets, evenly between the lowest peak and that of keep.
3. For each budget, `auto` and the two fastest policies within it, in turn, ROUNDS times: the fastest of 146 is the
   luckiest too, so it is measured again. `ratio` is auto's time over the best of these; `room` is what its peak leaves
   of the budget. `first ms` is the time of auto's first plan, `tried` the number of its plans, and `stays` the one that
   it kept.

Each arm is measured when its manager has settled. Under `autos`, the JSON file holds the timeline that auto measured in
each round and every plan that it tried, planned and measured: enough to ask on any machine why a plan was chosen.

    python benchmarks/auto.py                              # at most four minutes on an H200
    python benchmarks/auto.py --seconds 600 --layers 3     # of 729 policies, as many as fit into that time
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from common import GIB, median_ms, peak_of, sized, until_settled, write

import forebay
from forebay.memory.autotune import Trial
from forebay.memory.timeline import Plan, Timeline
from forebay.policy import BudgetError

BUDGETS = 6
RIVALS = 2
ROUNDS = 3
WARM = 3  # steps after the manager has settled
Policy = str | dict[str, str]


@dataclass(frozen=True)
class Arm:
    """A policy, and how it offloads; `budget` for auto."""

    name: str
    policy: Policy = field(hash=False)
    offload: str = "fit"
    budget: int | None = None


@dataclass(frozen=True)
class Figure:
    """Milliseconds of a step, and its peak over the base. `went_by`: timeline and trials of auto."""

    ms: float
    peak: int
    went_by: dict[str, Any] = field(default_factory=dict)


def build(layers: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "num_experts": 64, "norm_topk_prob": False, "vocab_size": 32768}
    config = Qwen3MoeConfig(**sized("qwen3-30b-a3b", **sizes))
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def regions(model: Any) -> list[str]:
    """Paths of the sublayers of the decoder layers."""
    return [
        f"model.layers.{n}.{sublayer}"
        for n in range(model.config.num_hidden_layers)
        for sublayer in ("self_attn", "mlp")
    ]


def arms(paths: list[str]) -> Iterator[Arm]:
    """Every placement of every region."""
    for choice in product(("keep", "recompute", "offload"), repeat=len(paths)):
        policy = dict(zip(paths, choice, strict=True))
        letters = "".join(c[0] for c in choice)
        if "offload" not in choice:
            yield Arm(letters, policy)
        else:
            yield from (Arm(f"{letters} {how}", policy, how) for how in ("fit", "all"))


def measure(model: Any, ids: torch.Tensor, arm: Arm, steps: int) -> Figure:
    """Measure one arm. The model is unmanaged afterwards.

    Raises:
        BudgetError: auto cannot meet the arm's budget.
    """
    mem = forebay.manage(model, policy=arm.policy, budget=arm.budget, offload=arm.offload)
    try:

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        settled = until_settled(mem, step)
        for _ in range(WARM):
            step()
        peak = peak_of(step)
        ms, _ = median_ms(step, steps)
        return Figure(ms, peak, {"settled": settled, **went_by(mem)} if arm.policy == "auto" else {})
    finally:
        mem.detach()


def went_by(mem: forebay.Managed) -> dict[str, Any]:
    """Timeline and trials of auto as JSON values."""
    assert mem.manager.tuner.timeline is not None
    return {
        "timeline": told(mem.manager.tuner.timeline),
        "trials": [tried(trial, mem.plan) for trial in mem.manager.tuner.trials],
    }


def told(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON values, in bytes and seconds, from which it can be rebuilt."""
    return {
        "calls": [vars(call) for call in timeline.calls],
        "moments": [vars(event) for event in timeline.events],
        "out_rate": timeline.out_rate,
        "back_rate": timeline.back_rate,
    }


def tried(trial: Trial, chosen: Plan | None) -> dict[str, Any]:
    """A trial as JSON values. An event of a plan is "F" or "B" and a call."""
    plan = trial.plan
    return {
        "name": trial.name,
        "figures": vars(trial.scenario),
        "stays": plan is chosen,
        "recompute": sorted(plan.recompute),
        "offload": [[key, sorted(items)] for key, items in plan.offload.items()],
        "settle_at": [*plan.release_at.items()],
        "fetch_at": [*plan.fetch_at.items()],
        "planned ms": 1e3 * plan.step_seconds,
        "expected ms": 1e3 * trial.expected_seconds,
        "measured ms": trial.milliseconds,
        "planned peak": plan.peak_bytes,
        "measured peak": trial.peak_bytes,
    }


def budgets(figures: dict[Arm, Figure]) -> list[int]:
    """The middles of six equal parts between the lowest peak and that of keeping everything."""
    low, high = min(f.peak for f in figures.values()), figures[next(a for a in figures if set(a.name) == {"k"})].peak
    return [low + (high - low) * (2 * k + 1) // (2 * BUDGETS) for k in range(BUDGETS)]


def sweep(all_arms: list[Arm], run: Callable[[Arm], Figure], seconds: float) -> dict[Arm, Figure]:
    """Figures of as many arms as `seconds` allow, spread evenly over the list."""
    found: dict[Arm, Figure] = {}
    end = time.monotonic() + seconds
    # Keep, all recomputed and all offloaded come first, then the others with a stride.
    stride = next(n for n in (61, 67, 71, 1) if len(all_arms) % n)
    order = [0, len(all_arms) // 2, len(all_arms) - 1, *(i * stride % len(all_arms) for i in range(len(all_arms)))]
    for index in dict.fromkeys(order):
        if time.monotonic() > end:
            break
        found[all_arms[index]] = run(all_arms[index])
    return found


def contest(
    figures: dict[Arm, Figure], budget: int, run: Callable[[Arm], Figure], autos: list[dict[str, Any]]
) -> dict[str, Any]:
    """Time auto and the fastest arms within the budget, in turn. Timelines and trials of auto are added to `autos`."""
    within = sorted((a for a, f in figures.items() if f.peak <= budget), key=lambda a: figures[a].ms)[:RIVALS]
    auto = Arm("auto", "auto", budget=budget)
    times: dict[Arm, list[float]] = {arm: [] for arm in (auto, *within)}
    peaks: list[int] = []
    for round_ in range(ROUNDS):
        for arm in times:
            try:
                figure = run(arm)
            except BudgetError as error:
                return {"budget GiB": budget / GIB, "best": within[0].name, "error": str(error)[:200]}
            times[arm].append(figure.ms)
            if arm is auto:
                peaks.append(figure.peak)
                own = {"budget": budget, "round": round_, "ms": figure.ms, "peak": figure.peak}
                autos.append({**own, **figure.went_by})
    medians = {arm: statistics.median(t) for arm, t in times.items()}
    best = min(within, key=lambda a: medians[a])
    return {
        "budget GiB": budget / GIB,
        "auto ms": medians[auto],
        "auto peak GiB": max(peaks) / GIB,
        "room MiB": (budget - max(peaks)) / (1 << 20),
        "within": max(peaks) <= budget,
        "best": best.name,
        "best ms": medians[best],
        "best peak GiB": figures[best].peak / GIB,
        "ratio": medians[auto] / medians[best],
        **outcome(autos[-1].get("trials", [])),
    }


def outcome(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of the trials of a round."""
    if not trials:
        return {}
    stays = next(trial["name"] for trial in trials if trial["stays"])
    return {"first ms": trials[0]["measured ms"], "tried": len(trials), "stays": stays}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120.0, help="for all policies; the budgets come on top")
    options = parser.parse_args()
    model = build(options.layers)
    generator = torch.Generator(device="cuda").manual_seed(1)
    ids = torch.randint(0, 32768, (options.batch, options.sequence), device="cuda", generator=generator)

    def run(arm: Arm) -> Figure:
        return measure(model, ids, arm, options.steps)

    run(Arm("warm", "offload", "all"))  # tunes kernels and page-locks memory once
    every = list(arms(regions(model)))
    figures = sweep(every, run, options.seconds)
    rows, autos = [], []
    for budget in budgets(figures):
        rows.append(contest(figures, budget, run, autos))
        print(rows[-1], flush=True)
    policies = [{"policy": a.name, "ms": f.ms, "peak GiB": f.peak / GIB} for a, f in figures.items()]
    write("auto", rows, **vars(options), policies_in_all=len(every), policies=policies, autos=autos)


if __name__ == "__main__":
    main()
