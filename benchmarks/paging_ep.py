"""Expert parallelism without a host synchronisation: what the paged stash and the captured step are worth, on N GPUs.

The models of `benchmarks/ep.py`, cut to 8 layers; EP over all ranks, sequence 4096, microbatch 1; parameters and AdamW states are
fp32 shards, compute bf16, forward of one microbatch with the backward of the one before (`parallel.overlap`). All arms draw the
same routing: `--skew 1` gives every expert the same load; with `--skew s` the busiest expert of a layer is given about s times
the mean, by a popularity that is fixed for a layer. Arms:

    nccl            exact sizes, one host synchronisation a layer, launched by the host
    exact           the same through symmetric memory
    capacity        symmetric memory with room for `--capacity` times the even load, no synchronisation; what is saved is padded
    stash           the same, experts' rows in pages
    graph           the same, and forwards and backwards of the step in one CUDA graph

A step is forward and backward of all microbatches of the global batch, until the reduced gradients lie on the shards. Columns:

    tokens/s, against nccl    over the wall time of a step on the slowest rank, median; time over that of nccl in the same run
    host s                    until the host was through with a step
    peak over base GiB        highest memory of a step over what is held before, gradients None and without pages; the largest
                              rank. A graph's own memory is not the allocator's to count while it runs: `-`
    reserved GiB              of the caching allocator after the steps, graphs' pools included
    padding saved GiB         of x and h at the peak: what is saved at capacity less what rows were there
    pages over rows           bytes of pages out, at most, over bytes of the rows in them
    peak fell by              of `stash` against `capacity`, as a share of the padding
    equal                     losses and gradients of one step on the same batch and weights are those of `capacity`, bit for bit

    torchrun --nproc-per-node 2 benchmarks/paging_ep.py --models qwen3-30b-a3b --skew 1 4
"""

import argparse
import gc
import math
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from common import GIB, settle_memory, write
from ep import MODELS, balanced_ids

from forebay.config import from_mapping
from forebay.memory.storage import local
from forebay.models.families import moe_blocks

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
}  # fmt: skip
# Calls of the same step before it is compared: a store's first call sizes it, a graph is captured in the fourth. Compilers may
# draw random numbers in the first.
CALLS = {"graph": 6}


def settings(args: argparse.Namespace, model: str, arm: str, world: int) -> Any:
    own = ARMS[arm]
    parallel = {"ep": world, "overlap": True, "reshard": False, "gradients": "compute", **own["parallel"]}
    if "capacity_factor" in parallel:
        parallel["capacity_factor"] = args.capacity
    sections = {
        "model": {**MODELS[model], "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"compile": True, **own.get("memory", {})},
        "parallel": parallel,
        "log": {"folder": "/tmp/forebay-paging"},
    }
    return from_mapping(sections, origin="benchmarks/paging_ep.py")


def force_routing(model: torch.nn.Module, skew: float) -> None:
    """Each router's choice becomes a drawn one; its weights are its own probabilities of that choice."""
    for number, block in enumerate(moe_blocks(model)):
        _draw(block.router, skew, number)


def _draw(router: Any, skew: float, layer: int) -> None:
    original = router.forward
    popularity: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, ids = original(x)
        tokens, experts, k = logits.shape[0], logits.shape[1], ids.shape[1]
        if skew == 1:
            ids = balanced_ids(tokens, experts, k, logits.device)
        else:
            if experts not in popularity:
                popularity[experts] = skewed(experts, k, skew, layer).to(logits.device)
            noise = -torch.empty(tokens, experts, device=logits.device).exponential_().log()
            ids = (popularity[experts] + noise).topk(k, sorted=False).indices
        chosen = logits.float().softmax(-1).gather(1, ids).to(weights.dtype)
        return logits, chosen, ids

    router.forward = forward


def skewed(experts: int, k: int, skew: float, seed: int) -> torch.Tensor:
    """Log-popularity [E], such that drawing K of E without putting back gives the first `skew` times the mean load, and all
    others a slope down from there, at random places."""
    slope, low, high = 0.0, 0.0, 40.0
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty(4096, experts).exponential_(generator=generator).log()
    ramp = -torch.arange(experts) / experts
    for _ in range(20):
        slope = (low + high) / 2
        load = torch.bincount((slope * ramp + noise).topk(k).indices.view(-1), minlength=experts).float()
        low, high = (slope, high) if load.max() < skew * load.mean() else (low, slope)
    return (slope * ramp)[torch.randperm(experts, generator=generator)]


def measure(
    args: argparse.Namespace, name: str, arm: str, skew: float, reference: list[torch.Tensor]
) -> dict[str, Any]:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    config = settings(args, name, arm, dist.get_world_size())
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        force_routing(trainer.model, skew)
        torch.cuda.empty_cache()
        equal = None
        if arm in ("capacity", "stash", "graph"):
            equal = same_step(trainer, CALLS.get(arm, 3), reference)
        trainer.step(1)  # makes AdamW's states, which belong to what is held
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
        arena = pages.device_bytes if pages is not None else 0  # held between steps, but for the steps
        graphed = config.memory.graph
        if graphed:
            why = trainer.captured.why_not
            assert why is None, why
        row = {
            "model": name,
            "skew": skew,
            "arm": arm,
            "ranks": mesh.size,
            "tokens/s": args.batch * args.sequence / statistics.median(seconds),
            "fastest, slowest s": f"{min(seconds):.3f}, {max(seconds):.3f}",
            "host s": statistics.median(s[2] for s in steps),
            "peak over base GiB": None if graphed else (max(s[1] for s in steps) + arena) / GIB,
            "reserved GiB": most(torch.cuda.memory_reserved()) / GIB,
            "equal": equal,
        }
        if report is not None:
            row["pages out GiB"] = report.bytes_out / GIB
            row["device pages GiB"] = report.device_bytes / GIB
            row["host pages GiB"] = report.host_bytes / GIB
        return row


def same_step(trainer: Any, calls: int, reference: list[torch.Tensor]) -> bool:
    """Whether losses and gradients of step 1 are `reference`, which is filled by the first arm that asks. With the weights and
    the random state of a new trainer; the last of `calls` counts, each of which is made of the same state."""
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuDNN's attention adds up in any order
    for _ in range(calls):
        torch.cuda.set_rng_state(states[0])
        torch.set_rng_state(states[1])
        trainer.optimizer.zero_grad(set_to_none=True)
        losses = trainer.gradients(1)
        if trainer.memory.pages is not None:
            trainer.memory.pages.end_step()
    found = [t.detach().clone().cpu() for t in losses]
    # Of each gradient a piece: all of them are as large as the model.
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
    return most(0.0 if same else 1.0) == 0


def timed(trainer: Any, number: int) -> tuple[float, float, float]:
    """Seconds of the slowest rank, peak over base in bytes of the largest, seconds until this rank's host was through."""
    trainer.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    trainer.gradients(number)
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return most(time.perf_counter() - started), most(torch.cuda.max_memory_allocated() - base), host


def most(value: float) -> float:
    """Of all ranks."""
    t = torch.tensor(float(value), dtype=torch.float64, device="cuda")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def padding(args: argparse.Namespace, name: str, world: int) -> tuple[float, float]:
    """Bytes of one layer's x and h with an even load: (saved at capacity, of rows that are there)."""
    c = MODELS[name]["config"]
    experts = c.get("n_routed_experts") or c["num_experts"]
    tokens, k, width, inner = args.sequence, c["num_experts_per_tok"], c["hidden_size"], c["moe_intermediate_size"]
    slots = min(world * tokens * min(k, experts // world), math.ceil(args.capacity * tokens * k))
    # A token goes to a rank unless all its K experts are elsewhere.
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
    parser.add_argument("--name", default="paging_ep")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for skew in args.skew:
            reference: list[torch.Tensor] = []
            for arm in args.arms:
                rows.append(measure(args, name, arm, skew, reference))
                compare(args, rows)
                gc.collect()
                if dist.get_rank() == 0:
                    write(args.name, rows, world=dist.get_world_size(), capacity=args.capacity)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
