"""The estimator against measurements: allocated and reserved peaks, and the time of a step, over a fixed grid.

The grid is `benchmarks/planner_grid.py`: five models, all placements, 1k to 32k tokens, on 1, 2 and 4 GPUs. Estimator
and trainer get the same configuration. Measured is the trainer's own step, optimizer included, in a process for each
GPU (`benchmarks/planner_measure.py`).

    python benchmarks/planner.py measure --out DIR            runs what this machine's GPUs can run (`--only` for a part)
    python benchmarks/planner.py compare                      plans each run, without a GPU: results/planner.json and .md
    python benchmarks/planner.py compare --tight FILE         also writes limits within 3 % of the plan on what torch may reserve
    python benchmarks/planner.py measure --out DIR --tight FILE --name planner_tight    which of them run out of memory
    python benchmarks/planner.py plan                         plans only

Columns of `compare`, in GiB of the rank that uses most, and (planned - measured) / measured in per cent:

    allocated, reserved   the most in the process's life. Reserved is what torch took from the driver
    outside               of torch: CUDA context, kernels, NCCL, symmetric memory
    step s                median of three warm steps of the slowest rank
    skew                  of the plan: what was asked for, or what was measured if the router chose
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import GIB, by_host, environment, markdown, results_folder, write
from planner_grid import GRID, Entry, tiny
from planner_measure import measure

from forebay.config import Config, from_mapping
from forebay.estimate.device import DEFAULT, load
from forebay.estimate.fit import headroom, planning_error
from forebay.estimate.layers import fast_path_of, plan_layers
from forebay.estimate.plan import fit_run
from forebay.estimate.trace_cache import TraceCache

FACTORS = (1.0, 1.01, 1.03, 0.99, 0.97)  # of the planned peak, in turn
TIGHT = 20


def planned(
    entry: Entry, skew: float | None, traces: TraceCache | None = None, device: str = DEFAULT
) -> dict[str, Any]:
    """The plan of an entry: bytes of the rank that uses most, seconds of a step on `device`, and the fast path's keys.

    `traces`: to reuse, and to add to.
    """
    config, traces = config_of(entry), traces or TraceCache()
    plan = plan_layers(config, entry.gpus, traces)
    fit = fit_run(config, plan, entry.gpus, skew=skew or 1.0, device=load(device), traces=traces).as_dict()
    ranks = fit["ranks"]
    return {
        "parameters": fit["parameters"],
        "allocated": max(rank["total"] - rank["other"] - rank["cached"] for rank in ranks),
        "reserved": max(rank["total"] - rank["other"] for rank in ranks),
        "outside": max(rank["other"] for rank in ranks),
        "seconds": fit["step"]["seconds"],
        "ranks": ranks,
        "placements": fit["placements"],
        "keys": asdict(fast_path_of(config, entry.gpus, traces).config.step),
    }


def config_of(entry: Entry) -> Config:
    """Its steps are launched by the host, where the entry says nothing else."""
    return from_mapping(by_host(entry.sections), origin=entry.name)


def as_run(entry: Entry, row: dict[str, Any]) -> Entry:
    """The entry with the layers by stage that its pipeline ran with: costs of layers may have changed since. Runs that do not say
    how they sent messages did so through NCCL, those that do not say whether segments grew had some that do not."""
    if not any(rank and rank.get("expandable") for rank in row["ranks"]):
        fixed = {**entry.sections.get("device", {}), "expandable_segments": False}
        entry = replace(entry, sections={**entry.sections, "device": fixed})
    ran = next((rank for rank in row["ranks"] if rank and rank.get("layers")), None)
    if ran is not None:
        through = {} if ran.get("links") or entry.sections["parallel"].get("ep", 1) > 1 else {"dispatch": "nccl"}
        parallel = {**entry.sections["parallel"], **through, "partition": ran["layers"]}
        return replace(entry, sections={**entry.sections, "parallel": parallel})
    return entry


def skew_of(row: dict[str, Any], entry: Entry) -> float | None:
    """The skew of a plan: what was asked for, or the measured mean over all layers of the router's own choice."""
    if entry.skew is not None:
        return entry.skew
    seen = [rank["skew"][1] for rank in row["ranks"] if rank.get("skew")]
    return max(seen, default=None)


def compared(entry: Entry, row: dict[str, Any], plan: dict[str, Any], skew: float | None) -> dict[str, Any]:
    """One row of the table."""
    ranks = row["ranks"]
    line: dict[str, Any] = {
        "configuration": entry.name,
        "group": entry.group,
        "placement": entry.placement,
        "skew": skew,
    }
    for name, key in (("allocated", "life_allocated"), ("reserved", "life_reserved"), ("outside", "outside")):
        got = max(rank[key] for rank in ranks)
        line |= {
            f"{name} measured": got / GIB,
            f"{name} planned": plan[name] / GIB,
            f"{name} %": percent(plan[name], got),
        }
    took = max(statistics.median(rank["seconds"]) for rank in ranks)
    line |= {"step s measured": took, "step s planned": plan["seconds"], "step s %": percent(plan["seconds"], took)}
    return line


def on_gpus(row: dict[str, Any]) -> bool:
    """Whether a run ended well and has figures of GPUs."""
    return "error" not in row and all(rank["outside"] is not None for rank in row["ranks"])


def percent(plan: float | None, got: float) -> float | None:
    return None if plan is None else 100 * (plan - got) / got


def summary(lines: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Mean and worst absolute errors, of all rows and by each of `keys`."""
    found = [_errors("all", lines)]
    for key in keys:
        found += [_errors(kind, [x for x in lines if x[key] == kind]) for kind in sorted({x[key] for x in lines})]
    return found


def _errors(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"of": name, "configurations": len(lines)}
    for what in ("allocated %", "reserved %", "step s %"):
        errors = [x[what] for x in lines if x[what] is not None]
        row |= {
            f"{what} mean": statistics.mean(map(abs, errors)) if errors else None,
            f"{what} worst": max(errors, key=abs) if errors else None,
            f"{what} lowest": min(errors, default=None),
        }
    return row


def tight(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Name to bytes that torch may reserve, within 3 % of the plan, of about `TIGHT` entries spread over the grid."""
    step = max(1, len(lines) // TIGHT)
    chosen = lines[::step][:TIGHT]
    return {
        x["configuration"]: round(x["reserved planned"] * GIB * FACTORS[i % len(FACTORS)]) for i, x in enumerate(chosen)
    }


def error_of(entry: Entry) -> float:
    """The share of the peak that a plan leaves for its own error. `entry`: as planned, with no fast path key at "auto"."""
    memory, pipeline = entry.sections["memory"], entry.sections["parallel"].get("pp", 1) > 1
    compiled, captured = bool(memory.get("compile")), bool(memory.get("graph"))
    whole_scores = entry.sections["model"].get("attention") == "eager"
    return planning_error(entry.gpus, compiled, placements_of(entry), captured, pipeline, whole_scores)


def placements_of(entry: Entry) -> set[str]:
    policy = entry.sections["memory"].get("policy", "keep")
    return {policy} if isinstance(policy, str) else set(policy.values())


def verdicts(entries: dict[str, Entry], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For runs under a limit: whether the plan says that they fit, and whether they ran."""
    found = []
    for row in rows:
        if "error" in row and not row["oom"]:
            continue
        entry = as_run(entries[row["name"]], row)
        plan, oom = planned(entry, skew_of(row, entry) if not row.get("error") else entry.skew), bool(row.get("oom"))
        # With the allowance for the plan's error that `forebay plan --budget` makes.
        fits = headroom(plan["reserved"], row["limit"], error_of(entry)) >= 0
        retries = max((rank.get("retries", 0) for rank in row["ranks"] if rank), default=0)
        found.append(
            {
                "configuration": entry.name,
                "limit GiB": row["limit"] / GIB,
                "planned GiB": plan["reserved"] / GIB,
                "says": "fits" if fits else "does not fit",
                "ran": "out of memory" if oom else "yes",
                "gave back its cache": retries,
                "wrong": "yes" if fits and oom else "",
            }
        )
    return found


def compare(options: argparse.Namespace, entries: dict[str, Entry]) -> None:
    rows = read(options.measured)
    lines = []
    for row in filter(on_gpus, rows):
        entry = as_run(entries[row["name"]], row)
        skew = skew_of(row, entry)
        lines.append(compared(entry, row, planned(entry, skew), skew))
    totals = summary(lines, "group", "placement")
    print(markdown(totals), end="\n\n")
    where = options.measured.with_suffix(".environment.json")
    measured_on = json.loads(where.read_text()) if where.exists() else None
    more: dict[str, Any] = {
        "measured_on": measured_on,
        "summary": totals,
        "failed": {r["name"]: r["error"] for r in rows if "error" in r},
    }
    if options.ran_tight:
        more["tight"] = verdicts(entries, read(options.ran_tight))
        print(markdown(more["tight"]), end="\n\n")
    write(options.name, lines, **more)
    tables = [totals, *([more["tight"]] if "tight" in more else []), lines]
    (results_folder() / f"{options.name}.md").write_text("\n\n".join(map(markdown, tables)) + "\n")
    for name, error in more["failed"].items():
        print(f"not measured: {name}: {error}")
    if options.tight:
        options.tight.write_text(json.dumps(tight(lines), indent=1) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of `measure`. For each name the last row that is no error, so that a part can be measured again."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "error" not in row or "error" in found.get(row["name"], row):
            found[row["name"]] = row
    return list(found.values())


def plans(entries: Iterable[Entry]) -> None:
    lines = []
    for entry in entries:
        plan = planned(entry, entry.skew)
        figures = {name: plan[name] / GIB for name in ("allocated", "reserved", "outside")}
        lines.append({"configuration": entry.name, "group": entry.group, **figures, "step s": plan["seconds"]})
    print(markdown(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    measuring.add_argument("--seconds", type=float, help="limit for a run")
    measuring.add_argument("--deadline", type=float, default=540, help="seconds after which no run begins")
    measuring.add_argument("--name", default="planner_measured", help="of the files in --out")
    comparing = commands.add_parser("compare")
    comparing.add_argument("--measured", type=Path, default=results_folder() / "planner_measured.jsonl")
    comparing.add_argument("--ran-tight", type=Path, help="what `measure --tight` wrote")
    comparing.add_argument("--name", default="planner")
    planning = commands.add_parser("plan")
    for command in (measuring, comparing):
        command.add_argument("--tight", type=Path, help="limits: written by compare, obeyed by measure")
    for command in (measuring, comparing, planning):
        command.add_argument("--only", nargs="+", default=[""], help="entries with one of these in their names")
        command.add_argument("--tiny", action="store_true", help="the small grid that a CPU runs")
    options = parser.parse_args()
    everything = tiny() if options.tiny else GRID
    entries = {e.name: e for e in everything if any(part in e.name for part in options.only)}
    match options.command:
        case "measure":
            limits = json.loads(options.tight.read_text()) if options.tight else {}
            asked = [e for e in entries.values() if not limits or e.name in limits]
            measure(
                asked, options.out, options.name, 2 if options.tiny else options.gpus,
                seconds=options.seconds, deadline=options.deadline, limits=limits,
            )  # fmt: skip
            # Last, because it makes a context on the first GPU.
            (options.out / f"{options.name}.environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
        case "compare":
            compare(options, entries)
        case "plan":
            plans(entries.values())


if __name__ == "__main__":
    main()
