"""Expert parallelism without host synchronization: what the paged stash and CUDA graph steps are worth, on N GPUs.

The models of `common.py`, 8 layers; EP over all ranks, sequence 4096, microbatch 1; parameters and AdamW states are fp32 shards,
compute is bf16, and the forward of a microbatch overlaps with the backward of the one before. All arms draw the same routing:
`--skew 1` gives every expert the same load; `--skew s` gives the busiest expert of a layer about s times the mean. Arms:

    nccl            exact sizes, one host synchronization a layer, launched by the host
    exact           the same through symmetric memory
    capacity        symmetric memory with room for `--capacity` times the even load, no synchronization; saved tensors are padded
    stash           the same with the experts' rows in pages
    graph           the same with forwards and backwards of the step in one CUDA graph
    graph, keep     as capacity, in one CUDA graph
    graph, recompute    the same with the experts recomputed
    ..., reshard    the same with the experts' weights in bf16 for each use only
    auto            what `parallel.ep` alone gives
    local           EP 1 on one GPU in one CUDA graph: the same tokens a GPU without expert parallelism (run with one rank)

A step is forward and backward of all microbatches, until the reduced gradients are on their shards. Columns:

    tokens/s, against nccl    of the median step of the slowest rank; its time over that of nccl in the same run
    host s                    until the host has launched a step
    peak over base GiB        over what is held before the step, without gradients and pages; the rank that uses most. Of a graph,
                              what its capture took at most, or its results and what their reduction adds, and the unsharded
                              weights, which stay
    reserved GiB              of the caching allocator after the steps, with the graphs' pools
    reserved over base GiB    without parameters and AdamW's states, which every arm holds between steps
    padding saved GiB         of x and h at the peak: what is saved at capacity less what the live rows take
    pages over rows           bytes of pages in use, at most, over bytes of their rows
    peak fell by              of `stash` against `capacity`, as a share of the padding
    equal                     losses and gradients of one step equal those of `capacity`, bit for bit

    torchrun --nproc-per-node 2 benchmarks/paging_ep.py --models qwen3-30b-a3b --skew 1 4
"""

import argparse
import gc
import math
import statistics
from typing import Any

import torch
import torch.distributed as dist
from common import (
    GIB,
    MODELS,
    balanced_ids,
    by_host,
    force_routing,
    gathered_bytes,
    largest,
    popular_ids,
    popularity_of,
    ranks,
    settle_memory,
    timed_together,
    write,
)

from forebay.config import Config, from_mapping
from forebay.memory.storage import local
from forebay.models.families import moe_blocks
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer

# Arm -> sections of the configuration.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "nccl": {"parallel": {"dispatch": "nccl"}},
    "exact": {"parallel": {"dispatch": "symmetric"}},
    "capacity": {"parallel": {"dispatch": "symmetric", "capacity_factor": 0.0}},
    "stash": {"parallel": {"dispatch": "symmetric", "capacity_factor": 0.0}, "memory": {"policy": {"*.mlp.experts": "stash"}}},
    "graph": {
        "parallel": {"dispatch": "symmetric", "capacity_factor": 0.0},
        "memory": {"policy": {"*.mlp.experts": "stash"}, "graph": True},
    },
    "graph, keep": {"parallel": {"dispatch": "symmetric", "capacity_factor": 0.0}, "memory": {"graph": True}},
    "graph, recompute": {
        "parallel": {"dispatch": "symmetric", "capacity_factor": 0.0},
        "memory": {"policy": {"*.mlp.experts": "recompute"}, "graph": True},
    },
    "graph, reshard": {
        "parallel": {"dispatch": "symmetric", "capacity_factor": 0.0, "reshard": True},
        "memory": {"graph": True},
    },
    "graph, stash, reshard": {
        "parallel": {"dispatch": "symmetric", "capacity_factor": 0.0, "reshard": True},
        "memory": {"policy": {"*.mlp.experts": "stash"}, "graph": True},
    },
    "auto": {},
    "local": {"parallel": {"overlap": False}, "memory": {"graph": True}},
}  # fmt: skip
# Calls of the same step before it is compared: the first sizes the page store, and Inductor may draw random numbers in it; a
# graph is captured in the fourth.
CALLS = {"graph": 6}


def settings(args: argparse.Namespace, model: str, arm: str, world: int) -> Config:
    own = ARMS[arm]
    parallel = {"ep": world, "gradients": "compute"}
    if own:
        parallel |= {"overlap": True, "reshard": False, **own["parallel"]}
    if "capacity_factor" in parallel:
        parallel["capacity_factor"] = args.capacity
    sections = {
        "model": {**MODELS[model], "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"compile": True, **own.get("memory", {})},
        "parallel": parallel,
        "log": {"folder": "/tmp/forebay-paging"},
    }
    return from_mapping(by_host(sections) if own else sections, origin="benchmarks/paging_ep.py")


def route(model: torch.nn.Module, skew: float) -> None:
    """Force every router's choice: balanced, or with a popularity of experts that is fixed for a layer."""
    for layer, block in enumerate(moe_blocks(model)):
        force_routing([block.router], balanced_ids if skew == 1 else Skewed(skew, layer))


class Skewed:
    """Draws ids of which the most popular expert gets `skew` times the mean load, and all others a slope down from there."""

    def __init__(self, skew: float, layer: int):
        self._skew, self._layer = skew, layer
        self._popularity: torch.Tensor | None = None

    def __call__(self, tokens: int, experts: int, k: int, device: torch.device) -> torch.Tensor:
        if self._popularity is None:
            order = torch.randperm(experts, generator=torch.Generator().manual_seed(self._layer))
            self._popularity = self._sloped(experts, k)[order].to(device)
        return popular_ids(self._popularity, tokens, k)

    def _sloped(self, experts: int, k: int) -> torch.Tensor:
        def load(ids: torch.Tensor) -> torch.Tensor:
            counts = torch.bincount(ids.view(-1), minlength=experts).float()
            return counts.max() / counts.mean()

        return popularity_of(load, -torch.arange(experts) / experts, k, self._skew, self._layer)


def measure(
    args: argparse.Namespace, name: str, arm: str, skew: float, reference: list[torch.Tensor]
) -> dict[str, Any]:
    config = settings(args, name, arm, dist.get_world_size())
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        route(trainer.model, skew)
        torch.cuda.empty_cache()
        equal = None
        if not args.fast and arm in ("capacity", "stash", "graph"):
            equal = same_step(trainer, CALLS.get(arm, 3), reference)
        trainer.step(1)  # makes AdamW's states, which are part of the base
        for number in range(2, 2 + args.warm):
            trainer.gradients(number)
            trainer.optimizer.zero_grad(set_to_none=True)
            if trainer.memory.pages is not None:
                trainer.memory.pages.end_step()
        settle_memory()
        steps = [timed(trainer, 2 + args.warm + i) for i in range(args.steps)]
        pages = trainer.memory.pages
        report = pages.end_step() if pages is not None else None
        seconds = [s[0] for s in steps]
        arena = pages.device_bytes if pages is not None else 0  # held between steps, for the steps
        peak = max(s[1] for s in steps)
        if trainer.config.step.graph:
            graph = trainer.cuda_graph
            assert graph is not None and graph.is_captured, trainer.graph_status
            # In a replay the allocator sees only what `reduce` adds to the graph's results.
            peak = max(graph.peak_bytes, peak + graph.result_bytes) + gathered_bytes(trainer.engine)
        row = {
            "model": name,
            "skew": skew,
            "arm": arm,
            "ranks": mesh.size,
            "tokens/s": args.batch * args.sequence / statistics.median(seconds),
            "fastest, slowest s": f"{min(seconds):.3f}, {max(seconds):.3f}",
            "host s": statistics.median(s[2] for s in steps),
            "peak over base GiB": largest(peak + arena) / GIB,
            "reserved GiB": largest(torch.cuda.memory_reserved()) / GIB,
            "reserved over base GiB": largest(torch.cuda.memory_reserved() - owned_bytes(trainer)) / GIB,
            "equal": equal,
        }
        if pages is not None and report is not None:
            row["pages out GiB"] = report.bytes_out / GIB
            row["device pages GiB"] = pages.device_bytes / GIB
            row["host pages GiB"] = pages.host_bytes / GIB
        return row


def owned_bytes(trainer: Trainer) -> int:
    """Bytes of this rank's parameters and AdamW states."""
    states = [v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(local(t).untyped_storage().nbytes() for t in [*trainer.model.parameters(), *states])


def same_step(trainer: Trainer, calls: int, reference: list[torch.Tensor]) -> bool:
    """Whether losses and gradients of step 1 equal `reference`, which the first arm fills.

    The step runs `calls` times from the weights and the random state of a new trainer, and the last call counts.
    """
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuDNN's attention is not deterministic
    for _ in range(calls):
        torch.cuda.set_rng_state(states[0])
        torch.set_rng_state(states[1])
        trainer.optimizer.zero_grad(set_to_none=True)
        losses = trainer.gradients(1)
        if trainer.memory.pages is not None:
            trainer.memory.pages.end_step()
    found = [t.detach().clone().cpu() for t in losses]
    # A piece of each gradient: all of them are as large as the model.
    found += [
        local(p.grad).flatten()[: 1 << 18].clone().cpu() for p in trainer.model.parameters() if p.grad is not None
    ]
    trainer.optimizer.zero_grad(set_to_none=True)
    torch.cuda.set_rng_state(states[0])
    torch.set_rng_state(states[1])
    torch.use_deterministic_algorithms(False)
    if not reference:
        reference.extend(found)
    same = len(found) == len(reference) and all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    return largest(0.0 if same else 1.0) == 0


def timed(trainer: Trainer, number: int) -> tuple[float, float, float]:
    """Seconds of the slowest rank, peak over base of the rank that uses most, seconds until this rank's host is through."""
    trainer.optimizer.zero_grad(set_to_none=True)
    seconds, host, base = timed_together(lambda: trainer.gradients(number))
    return seconds, largest(torch.cuda.max_memory_allocated() - base), host


def padding(args: argparse.Namespace, name: str, world: int) -> tuple[float, float]:
    """Bytes of one layer's x and h with an even load: (saved at capacity, taken by live rows)."""
    c = MODELS[name]["config"]
    experts = c.get("n_routed_experts") or c["num_experts"]
    tokens, k, width, inner = args.sequence, c["num_experts_per_tok"], c["hidden_size"], c["moe_intermediate_size"]
    slots = min(world * tokens * min(k, experts // world), math.ceil(args.capacity * tokens * k))
    # A token travels to a rank unless all its K experts are elsewhere.
    local_experts = experts // world
    nowhere = math.prod((experts - local_experts - i) / (experts - i) for i in range(k))
    rows = world * tokens * (1 - nowhere)
    return (min(world * tokens, slots) * width + slots * 2 * inner) * 2, (rows * width + tokens * k * 2 * inner) * 2


def compare(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        others = {r["arm"]: r for r in rows if (r["model"], r["skew"]) == (row["model"], row["skew"])}
        if "nccl" in others:
            row["against nccl"] = f"{others['nccl']['tokens/s'] / row['tokens/s']:.3f}"
        if row["arm"] == "stash" and "capacity" in others and row["skew"] == 1:
            saved, there = padding(args, row["model"], row["ranks"])
            layers = 8 - MODELS[row["model"]]["config"].get("first_k_dense_replace", 0)
            row["padding saved GiB"] = layers * (saved - there) / GIB
            row["pages over rows"] = f"{row['pages out GiB'] * GIB / (layers * there):.4f}"
            fell = others["capacity"]["peak over base GiB"] - row["peak over base GiB"]
            row["peak fell by"] = f"{fell:.2f} GiB, {fell / row['padding saved GiB']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["nccl", "capacity", "stash", "graph"])
    parser.add_argument("--skew", nargs="+", type=float, default=[1.0])
    parser.add_argument("--capacity", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--fast", action="store_true", help="do not compare losses and gradients")
    parser.add_argument("--name", default="paging_ep")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ranks():
        for name in args.models:
            for skew in args.skew:
                reference: list[torch.Tensor] = []
                for arm in args.arms:
                    rows.append(measure(args, name, arm, skew, reference))
                    compare(args, rows)
                    gc.collect()
                    if dist.get_rank() == 0:
                        write(args.name, rows, world=dist.get_world_size(), capacity=args.capacity)


if __name__ == "__main__":
    main()
