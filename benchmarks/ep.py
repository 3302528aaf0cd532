"""The trainer with expert parallelism on N GPUs: tokens a second, and peak memory.

DeepSeek-V2-Lite and Qwen3-30B-A3B at their published widths, 8 layers; EP over all ranks, sequence 4096, microbatch 1,
global batch 64. Parameters and AdamW states are fp32 shards, compute is bf16. A step is forward and backward of all
microbatches, until the reduced gradients are on their shards. The table has tokens a second (median step of the slowest
rank) and the peak over the memory held before the step, gradients and unsharded weights included, of the rank that uses
most.

Balanced routing gives every expert the same number of tokens, drawn afresh for each microbatch and layer. Arms:

    float32      gradients are accumulated in fp32; the experts' unsharded weights are freed after each use
    own routing  the same with the (random) router's choice and exact sizes: one host synchronization a layer
    bfloat16     gradients are accumulated in bf16; unsharded weights stay for the step
    in turn      as float32, one microbatch after the other: no communication is hidden

    torchrun --nproc-per-node 4 benchmarks/ep.py                  # both models, all arms
    torchrun --nproc-per-node 4 benchmarks/ep.py --models qwen3-30b-a3b --arms float32 --dispatch nccl
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import (
    GIB,
    MODELS,
    balanced_ids,
    by_host,
    force_routing,
    largest,
    ranks,
    settle_memory,
    timed_together,
    write,
)

from forebay.config import Config, from_mapping
from forebay.models.families import moe_blocks
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer

# Arm -> (routing, keys of [parallel]). Balanced loads need no more than an even capacity, and no host synchronization.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("balanced", {"overlap": True, "reshard": True, "capacity_factor": 1.0}),
    "own routing": ("router", {"overlap": True, "reshard": True, "capacity_factor": 0.0}),
    "bfloat16": ("balanced", {"overlap": True, "reshard": False, "gradients": "compute", "capacity_factor": 1.0}),
    "in turn": ("balanced", {"overlap": False, "reshard": False, "capacity_factor": 1.0}),
}


def settings(args: argparse.Namespace, model: str, parallel: dict[str, Any], world: int) -> Config:
    sections = {
        "model": {**MODELS[model], "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"policy": args.policy, "compile": True},
        "parallel": {"ep": world, "dispatch": args.dispatch, **parallel},
        "log": {"folder": "/tmp/forebay-ep"},
    }
    return from_mapping(by_host(sections), origin="benchmarks/ep.py")


def force_balance(model: torch.nn.Module) -> None:
    """Replace each router's choice by a random balanced one."""
    force_routing((block.router for block in moe_blocks(model)), balanced_ids)


def measure(args: argparse.Namespace, name: str, arm: str) -> dict[str, Any]:
    routing, parallel = ARMS[arm]
    config = settings(args, name, parallel, dist.get_world_size())
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        if routing == "balanced":
            force_balance(trainer.model)
        trainer.step(1)  # makes AdamW's states, which are part of the base
        trainer.optimizer.zero_grad(set_to_none=True)
        settle_memory()  # only once: the allocator's cache is part of a warm step
        seconds, peaks = [], []
        for number in range(2, 2 + args.warm + args.steps):
            trainer.optimizer.zero_grad(set_to_none=True)
            took, _, base = timed_together(partial(trainer.gradients, number))
            seconds.append(took)
            peaks.append(largest(torch.cuda.max_memory_allocated() - base) / GIB)
        timed = seconds[args.warm :]
        return {
            "model": name,
            "arm": arm,
            "routing": routing,
            "dispatch": type(trainer.dispatcher).__name__,
            "policy": args.policy,
            "tokens/s": args.batch * args.sequence / statistics.median(timed),
            "slowest, fastest step s": f"{max(timed):.3f}, {min(timed):.3f}",
            "peak over base GiB": max(peaks[args.warm :]),
            "base GiB": base / GIB,
            "reserved GiB": torch.cuda.memory_reserved() / GIB,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--dispatch", default="auto")
    parser.add_argument("--policy", default="keep")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--name", default="ep")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ranks():
        for arm in args.arms:
            for name in args.models:
                rows.append(measure(args, name, arm))
                if dist.get_rank() == 0:
                    write(args.name, rows, world=dist.get_world_size(), arms=ARMS)


if __name__ == "__main__":
    main()
