"""Whole steps as one CUDA graph, the default, against the same steps launched by the host, on one GPU, two or four.

Configurations are some of the blind draws (`benchmarks/planner_blind.py`; `draw:number`), with Forebay's experts and the fused
loss, so both arms compute the same. Those of two GPUs share weights alone (FSDP2); those of four, with twice the batch, share
weights, experts (EP 2) or a pipeline (PP 2). The host's arm frees gathered weights after each use, as it does by default, and
overlaps microbatches of expert groups. Each arm has processes of its own. Times are medians of 9 whole steps
with the optimizer's, the same in both arms, once nothing is left to measure, plan and capture. Peaks are of the first
process's life, `peak` with the graph's memory while it is replayed.

    python benchmarks/local_graph.py                 # two minutes on one H200: results/local_graph.json
    python benchmarks/local_graph.py --gpus 2        # three minutes on two: results/sharded_graph.json
    python benchmarks/local_graph.py --gpus 4        # five minutes on four: results/sharded_graph_4gpu.json
    python benchmarks/local_graph.py --runs 4:02 5:08 28:06 5:14 --packing documents --name documents_graph
    python benchmarks/local_graph.py --runs qwen2_moe granitemoe ernie4_5_moe lfm2_moe llama --name families_graph

The last one has 6 layers at published widths (`WIDTHS`), in bf16, 4 microbatches of 2048 tokens.
"""

import argparse
import json
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import GIB, environment_of_rank, results_folder, write
from planner_blind import entries_of
from planner_measure import MOST, graph_bytes, settled

from forebay.config import from_mapping
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer

RUNS = {
    1: ("4:02", "3:07", "5:22", "5:08", "1:12", "5:09", "5:14"),
    2: ("28:05", "26:05", "22:17", "20:17", "12:17"),
    4: ("28:05", "26:05", "20:17", "22:02", "28:08", "26:08", "26:11", "21:23"),
}
NAMES = {1: "local_graph", 2: "sharded_graph", 4: "sharded_graph_4gpu"}
# Of the config.json of Qwen1.5-MoE-A2.7B, granite-3.1-3b-a800m-base, ERNIE-4.5-21B-A3B-Base, LFM2-8B-A1B and Llama-3.2-1B.
WIDTHS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936},
        **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        **{"shared_expert_intermediate_size": 5632, "intermediate_size": 5632},
    },
    "granitemoe": {
        **{"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 49155},
        **{"num_local_experts": 40, "num_experts_per_tok": 8, "intermediate_size": 512},
        **{"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.015625},
    },
    "ernie4_5_moe": {
        **{"hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 103424},
        **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
        **{"intermediate_size": 12288, "head_dim": 128},
    },
    "lfm2_moe": {
        **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536},
        **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "intermediate_size": 7168},
        **{"num_dense_layers": 2, "layer_types": ["conv", "conv", "full_attention"] * 2},
    },
    "llama": {
        **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        **{"intermediate_size": 8192, "head_dim": 64},
    },
}
PORT = 29500
TIMED = 9
LEAST = (
    12  # steps before the timed ones; by then both arms have nothing left to measure, or the losses are of other steps
)
_DEFAULTS = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}
_MESH = ("ep", "pp", "schedule", "partition")


def sections_of(run: str, graph: bool, gpus: int, packing: str = "joined") -> tuple[str, dict[str, Any]]:
    """The name and the configuration of an arm."""
    if run in WIDTHS:
        sizes = {**WIDTHS[run], "num_hidden_layers": 6}
        return run, {
            "model": {"family": run, "config": sizes, "dtype": "bfloat16"},
            "data": {"packing": packing},
            "train": {"batch": 4, "microbatch": 1, "sequence": 2048, "steps": MOST},
            "memory": {"graph": "auto" if graph else False},
            "log": {"folder": f"/tmp/{run}", "progress": "off"},
        }
    draw, number = run.split(":")
    drawn = json.loads((Path(__file__).parent / "results" / f"planner_blind_{draw}.json").read_text())["runs"]
    name, entry = next(found for found in entries_of(drawn).items() if found[0].startswith(number))
    found = json.loads(json.dumps(entry.sections))
    found["model"] |= {"loss": "fused", "experts": "forebay"}
    found["data"] = {"packing": packing}
    found["memory"] |= {"graph": "auto" if graph else False, "recompute": "light"}
    mesh = {key: value for key, value in found["parallel"].items() if key in _MESH}
    found["parallel"] = {"timeout": 60, **_DEFAULTS, **mesh} | ({} if graph else {"reshard": True})
    found["train"]["batch"] *= gpus // entry.gpus
    found["optimizer"]["fused"] = True
    return f"{draw}:{name}", found


def figures(run: str, graph: bool, gpus: int, packing: str) -> dict[str, Any]:
    """Those of one arm's first process, in processes of its own."""
    with get_context("fork").Pool(gpus) as pool:
        return pool.starmap(arm, [(run, graph, rank, gpus, packing) for rank in range(gpus)], chunksize=1)[0]


def arm(run: str, graph: bool, rank: int, gpus: int, packing: str) -> dict[str, Any]:
    """The figures of this process of an arm."""
    os.environ |= environment_of_rank(rank, gpus, PORT)
    name, sections = sections_of(run, graph, gpus, packing)
    settings = from_mapping(sections, origin=name)
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        number = 1
        while number <= LEAST or (not mesh.all(settled(trainer)) and number < MOST):
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, choices=list(RUNS), default=1)
    parser.add_argument("--runs", nargs="*")
    parser.add_argument("--packing", choices=("joined", "documents"), default="joined")
    parser.add_argument("--name", help="of the results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for run in options.runs or RUNS[options.gpus]:
        host, graph = pair = [figures(run, captured, options.gpus, options.packing) for captured in (False, True)]
        graph["time"] = graph["ms"] / host["ms"]
        graph["memory"] = graph["reserved GiB"] / host["reserved GiB"]
        rows += pair
        print(graph, flush=True)
    name = options.name or NAMES[options.gpus]
    write(name, rows)  # not earlier: it opens the GPU, which processes forked from this one could not
    print(results_folder() / f"{name}.json")


if __name__ == "__main__":
    main()
