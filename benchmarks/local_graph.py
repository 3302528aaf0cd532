"""Whole steps on one GPU as one CUDA graph, the default, against the same steps launched by the host.

Configurations are some of the blind draws (`benchmarks/planner_blind.py`; `draw:number`), without overlap, with Forebay's experts
and the fused loss, so both arms compute the same. The host's arm frees gathered weights after each use, as it does by default.
Each arm has a process of its own. Times are medians of 9 whole steps with the optimizer's, the same in both arms, once nothing is
left to measure, plan and capture. Peaks are of the process's life, `peak` with the graph's memory while it is replayed.

    python benchmarks/local_graph.py                 # two minutes on one H200
    python benchmarks/local_graph.py 4:02 5:08
"""

import json
import statistics
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import GIB, results_folder, write
from planner_blind import entries_of
from planner_measure import MOST, graph_bytes, settled

from forebay.config import from_mapping
from forebay.train.trainer import Trainer

RUNS = ("4:02", "3:07", "5:22", "5:08", "1:12", "5:09", "5:14")
TIMED = 9
LEAST = (
    12  # steps before the timed ones; by then both arms have nothing left to measure, or the losses are of other steps
)
_DEFAULTS = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}


def sections_of(run: str, graph: bool) -> tuple[str, dict[str, Any]]:
    """The name and the configuration of an arm."""
    draw, number = run.split(":")
    drawn = json.loads((Path(__file__).parent / "results" / f"planner_blind_{draw}.json").read_text())["runs"]
    name, entry = next(found for found in entries_of(drawn).items() if found[0].startswith(number))
    found = json.loads(json.dumps(entry.sections))
    found["model"] |= {"loss": "fused", "experts": "forebay"}
    found["memory"] |= {"graph": "auto" if graph else False, "recompute": "light"}
    found["parallel"] = {"timeout": 60, **_DEFAULTS}
    found["optimizer"]["fused"] = True
    return f"{draw}:{name}", found


def arm(run: str, graph: bool) -> dict[str, Any]:
    """The figures of one arm, in this process."""
    name, sections = sections_of(run, graph)
    with Trainer(from_mapping(sections, origin=name)) as trainer:
        number = 1
        while number <= LEAST or (not settled(trainer) and number < MOST):
            trainer.step(number)
            number += 1
        seconds, peaks = [], []
        for n in range(number, number + TIMED):
            torch.cuda.synchronize()
            started = time.perf_counter()
            record = trainer.step(n)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            peaks.append(max(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() + graph_bytes(trainer)))
        captured = trainer.cuda_graph is not None and trainer.cuda_graph.is_captured
        if captured != graph:
            raise RuntimeError(f"{name}: {trainer.graph_status}")
        return {
            "run": name,
            "arm": "graph" if graph else "host",
            "ms": 1e3 * statistics.median(seconds),
            "ms from": 1e3 * min(seconds),
            "ms to": 1e3 * max(seconds),
            "peak GiB": max(peaks) / GIB,
            "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
            "step": record.step,
            "loss": record.cross_entropy_loss,
        }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for run in sys.argv[1:] or RUNS:
        pair = []
        for graph in (False, True):
            with get_context("fork").Pool(1) as pool:
                pair.append(pool.apply(arm, (run, graph)))
        host, graph_row = pair
        graph_row["time"] = graph_row["ms"] / host["ms"]
        graph_row["memory"] = graph_row["reserved GiB"] / host["reserved GiB"]
        rows += pair
        print(graph_row, flush=True)
    write("local_graph", rows)  # not earlier: it opens the GPU, which processes forked from this one could not
    print(results_folder() / "local_graph.json")


if __name__ == "__main__":
    main()
