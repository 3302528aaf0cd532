"""The trainer on N GPUs with its experts spread over them: tokens a second, and activation memory.

Two models at their published widths, cut to 8 layers: DeepSeek-V2-Lite (hidden 2048, 16 MLA heads, 64 experts top-6 of
width 1408, 2 shared, first layer dense, vocabulary 102400) and Qwen3-30B-A3B (32 heads, 4 KV heads of 128, 128 experts top-8
of width 768, vocabulary 151936). EP over all ranks, PP 1, sequence 4096, microbatch 1, global batch 64; parameters and AdamW
states are fp32 shards, compute bf16.

A step is forward and backward of all microbatches of the global batch, until the reduced gradients lie on the shards.
Columns: tokens of the global batch over its wall time on the slowest rank (median of the timed steps); peak over the memory
held before the step with gradients set to None, so that gradients and gathered parameters count; the largest of all ranks.

Routing `balanced` gives every expert the same number of tokens, drawn afresh for each microbatch and layer as random
permutations, so that tokens spread over ranks as random ones do; `router` is the (random) model's own. Arms:

    float32      gradients of the microbatches are summed in fp32; the experts' gathered weights are given back after each use
    own routing  the same, routed by the router, with exact sizes: one host synchronisation a layer
    bfloat16     gradients are summed in the dtype that is computed in; gathered weights stay for the step
    in turn      as float32, microbatches one after the other: nothing hides the communication

    torchrun --nproc-per-node 4 benchmarks/ep.py                  # both models, all arms
    torchrun --nproc-per-node 4 benchmarks/ep.py --models qwen3-30b-a3b --arms float32 --dispatch nccl
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from common import GIB, settle_memory, write

from forebay.config import from_mapping
from forebay.models.families import moe_blocks

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "family": "deepseek_v2",
        "config": {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
            "vocab_size": 102400,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 4096,
        },
    },
    "qwen3-30b-a3b": {
        "family": "qwen3_moe",
        "config": {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
        },
    },
}


# Arm -> (routing, keys of [parallel]). Balanced loads need no more than an even capacity, and no host synchronisation.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("balanced", {"overlap": True, "reshard": True, "capacity_factor": 1.0}),
    "own routing": ("router", {"overlap": True, "reshard": True, "capacity_factor": 0.0}),
    "bfloat16": ("balanced", {"overlap": True, "reshard": False, "gradients": "compute", "capacity_factor": 1.0}),
    "in turn": ("balanced", {"overlap": False, "reshard": False, "capacity_factor": 1.0}),
}


def settings(args: argparse.Namespace, model: str, parallel: dict[str, Any], world: int) -> Any:
    sections = {
        "model": {**MODELS[model], "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"policy": args.policy, "compile": True},
        "parallel": {"ep": world, "dispatch": args.dispatch, **parallel},
        "log": {"folder": "/tmp/forebay-ep"},
    }
    return from_mapping(sections, origin="benchmarks/ep.py")


def force_balance(model: torch.nn.Module) -> None:
    """Each router's choice becomes a random balanced one; its weights are its own probabilities of that choice."""
    for block in moe_blocks(model):
        _balance(block.router)


def _balance(router: Any) -> None:
    original = router.forward

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, ids = original(x)
        ids = balanced_ids(logits.shape[0], logits.shape[1], ids.shape[1], logits.device)
        chosen = logits.float().softmax(-1).gather(1, ids).to(weights.dtype)
        return logits, chosen, ids

    router.forward = forward


def balanced_ids(tokens: int, experts: int, k: int, device: torch.device) -> torch.Tensor:
    """[T, K] int64: in each block of E tokens every expert is chosen K times, and nobody chooses one twice.

    Within a block token t takes places (t + s_j) mod E of a random permutation, s_j being K different random shifts.
    """
    blocks = -(-tokens // experts)
    permutation = torch.rand(blocks, experts, device=device).argsort(1)
    shifts = torch.rand(blocks, experts, device=device).argsort(1)[:, None, :k]
    places = (torch.arange(experts, device=device)[None, :, None] + shifts) % experts
    ids = permutation.gather(1, places.view(blocks, -1)).view(-1, k)
    return ids[:tokens]


def measure(args: argparse.Namespace, name: str, arm: str) -> dict[str, Any]:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    routing, parallel = ARMS[arm]
    config = settings(args, name, parallel, dist.get_world_size())
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        if routing == "balanced":
            force_balance(trainer.model)
        trainer.step(1)  # makes AdamW's states, which belong to what is held
        seconds, peaks = [], []
        for number in range(2, 2 + args.warm + args.steps):
            trainer.optimizer.zero_grad(set_to_none=True)
            if number == 2:
                settle_memory()  # only once: what the allocator holds is part of a warm step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            dist.barrier()
            torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.gradients(number)
            torch.cuda.synchronize()
            figures = torch.tensor(
                [time.perf_counter() - started, torch.cuda.max_memory_allocated() - base],
                device="cuda",
                dtype=torch.float64,
            )
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            seconds.append(float(figures[0]))
            peaks.append(float(figures[1]) / GIB)
        tokens = args.batch * args.sequence
        timed = seconds[args.warm :]
        return {
            "model": name,
            "arm": arm,
            "routing": routing,
            "dispatch": type(trainer.dispatcher).__name__,
            "policy": args.policy,
            "tokens/s": tokens / statistics.median(timed),
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
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows: list[dict[str, Any]] = []
    for arm in args.arms:
        for name in args.models:
            rows.append(measure(args, name, arm))
            if dist.get_rank() == 0:
                write(args.name, rows, world=dist.get_world_size(), arms=ARMS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
