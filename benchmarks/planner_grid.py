"""The fixed grid of `benchmarks/planner.py`: the runs that are planned and measured, as data.

Five models at their published widths, cut to 2-8 layers so that a run is measured in seconds; placements, sequences of
1k to 32k tokens, microbatches of 1 and 2, and meshes of 1, 2 and 4 GPUs. An `Entry` holds the sections of a
configuration, which estimator and trainer both get. Nothing here is computed from a plan or a measurement.

Published shapes: config.json of Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V2-Lite, mistralai/Mixtral-8x7B-v0.1,
openai/gpt-oss-20b and allenai/OLMoE-1B-7B-0924. `max_position_embeddings` is 32768 in all of them, for the long
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import MODELS as PUBLISHED

POSITIONS = 32768

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": PUBLISHED["qwen3-30b-a3b"],
    "dsv2": PUBLISHED["deepseek-v2-lite"],
    "mixtral": {
        "family": "mixtral",
        "config": {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        },
    },
    "gpt-oss": {
        "family": "gpt_oss",
        "attention": "eager",  # sdpa has no attention sinks
        "config": {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "intermediate_size": 2880,
            "sliding_window": 128,
            "vocab_size": 201088,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    },
    "olmoe": {
        "family": "olmoe",
        "config": {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "intermediate_size": 1024,
            "vocab_size": 50304,
        },
    },
    "tiny": {
        "family": "qwen3_moe",
        "config": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "vocab_size": 320,
        },
    },
}


@dataclass(frozen=True)
class Entry:
    """One configuration.

    Attributes:
        name: also the name of its files.
        gpus: number of processes.
        sections: for `forebay.config.from_mapping`.
        skew: None for the router's own choice. A number draws the choice: the fullest rank's experts get that many times the mean
            load of a rank; 1 gives every expert the same load.
        trace: record the caching allocator's history, from the build to the end of the third step.
    """

    name: str
    gpus: int
    sections: dict[str, dict[str, Any]]
    skew: float | None = None
    trace: bool = False

    @property
    def group(self) -> str:
        """GPUs and what they share; errors are averaged over it."""
        p = self.sections["parallel"]
        shared = [f"PP {p['pp']} {p.get('schedule', '')}".strip()] if p.get("pp", 1) > 1 else []
        shared += [f"EP {p['ep']}"] if p.get("ep", 1) > 1 else []
        shared += [f"{p['replicate']} replicas"] if p.get("replicate", 1) > 1 else []
        return (
            f"{self.gpus} GPU" + ", " * bool(shared) + " x ".join(shared) + ", FSDP2" * (self.gpus > 1 and not shared)
        )

    @property
    def placement(self) -> str:
        """The placement in a word."""
        memory = self.sections["memory"]
        policy = memory.get("policy", "keep")
        kind = policy if isinstance(policy, str) else "+".join(sorted(set(policy.values())))
        mode = {"recompute": memory.get("recompute", "light"), "offload": memory.get("offload", "fit")}.get(kind)
        return f"{kind} {mode}" if mode else kind


MIXED = {"*.self_attn": "offload", "*.mlp": "recompute"}
STASH = {"*.mlp.experts": "stash"}
OVERLAP = {"overlap": True, "reshard": False}
EXACT = {"dispatch": "symmetric"}
EVEN = {"dispatch": "symmetric", "capacity_factor": 1.0}


def entry(
    model: str,
    layers: int,
    sequence: int,
    *,
    gpus: int = 1,
    batch: int = 2,
    microbatch: int = 1,
    bf16: bool = False,
    loss: str = "fused",
    device: str = "auto",
    memory: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    skew: float | None = None,
    trace: bool = False,
    more: str = "",
) -> Entry:
    """An entry, named by its settings. `bf16`: parameters and states are bf16 too; otherwise fp32."""
    base = MODELS[model]
    dtypes = {"dtype": "bfloat16"} if bf16 else {"dtype": "float32", "compute": "bfloat16"}
    config = {**base["config"], "num_hidden_layers": layers, "max_position_embeddings": POSITIONS}
    sections = {
        "model": {**base, "config": config, "loss": loss, **dtypes},
        "train": {"steps": 100, "batch": batch, "microbatch": microbatch, "sequence": sequence},
        "optimizer": {"lr": 1e-5},
        "memory": memory or {},
        "parallel": {"timeout": 60, **(parallel or {})},
        "device": {"type": device},
    }
    made = Entry("", gpus, sections, skew, trace)
    size = f"{sequence // 1024}k" if sequence >= 1024 else str(sequence)
    words = [f"{gpus}g", f"{model}-{layers}L", f"{size}x{microbatch}", made.placement.replace(" ", "."), more]
    return Entry("-".join(w for w in words if w), gpus, sections, skew, trace)


def _one() -> list[Entry]:
    return [
        entry("qwen3", 2, 1024, batch=4, trace=True),
        entry("qwen3", 3, 4096, bf16=True, more="bf16"),
        entry("qwen3", 3, 8192, batch=4, microbatch=2, bf16=True, more="bf16"),
        entry("qwen3", 4, 4096, bf16=True, memory={"policy": "recompute"}, trace=True, more="bf16"),
        entry("qwen3", 3, 32768, memory={"policy": "recompute", "recompute": "full"}),
        entry(
            "qwen3",
            4,
            4096,
            batch=4,
            microbatch=2,
            bf16=True,
            memory={"policy": "offload", "offload": "all"},
            trace=True,
        ),
        entry("qwen3", 5, 8192, bf16=True, memory={"policy": "offload"}, more="bf16"),
        entry("qwen3", 2, 4096, bf16=True, loss="transformers", more="logits"),
        entry("qwen3", 3, 4096, batch=4, parallel=OVERLAP, memory={"compile": True}, more="overlap-compile"),
        entry("dsv2", 3, 2048, batch=4, microbatch=2, trace=True),
        entry("dsv2", 4, 16384, memory={"policy": "recompute"}),
        entry("dsv2", 4, 4096, batch=4, memory={"policy": "offload"}),
        entry("dsv2", 5, 4096, memory={"policy": MIXED}, bf16=True, more="bf16"),
        entry("dsv2", 3, 4096, batch=4, parallel=OVERLAP, memory={"graph": True}, more="overlap-graph"),
        entry("mixtral", 2, 2048),
        entry("mixtral", 2, 8192, memory={"policy": "recompute"}),
        entry("mixtral", 2, 4096, batch=4, microbatch=2, bf16=True, memory={"policy": "offload", "offload": "all"}),
        entry("gpt-oss", 2, 2048, trace=True),
        entry("gpt-oss", 2, 4096, bf16=True, memory={"policy": "recompute", "recompute": "full"}),
        entry("gpt-oss", 3, 1024, batch=4, microbatch=2, bf16=True, memory={"policy": "recompute"}),
        entry("olmoe", 6, 4096, batch=4, microbatch=2),
        entry("olmoe", 4, 16384, bf16=True, trace=True, more="bf16"),
        entry("olmoe", 6, 32768, bf16=True, memory={"policy": "offload"}, more="bf16"),
        entry("olmoe", 4, 8192, memory={"compile": True}, more="compile"),
        entry("olmoe", 4, 4096, memory={"policy": "recompute", "recompute": "save-dispatch"}),
        entry("olmoe", 6, 8192, bf16=True, memory={"policy": "auto", "budget": "9GiB"}, more="bf16"),
    ]


def _two() -> list[Entry]:
    ep, pp = {"ep": 2}, {"pp": 2, "schedule": "1f1b", "reshard": False}
    replicas = {"replicate": 2}
    return [
        entry("qwen3", 4, 4096, gpus=2, batch=4, more="fsdp"),
        entry("olmoe", 6, 8192, gpus=2, batch=4, memory={"policy": "recompute"}, parallel={"reshard": False}, more="fsdp"),
        entry("mixtral", 2, 4096, gpus=2, batch=4, parallel={"reduce": "microbatch"}, more="fsdp"),
        entry("dsv2", 4, 16384, gpus=2, batch=2, memory={"policy": "offload"}, more="fsdp"),
        entry("gpt-oss", 2, 2048, gpus=2, batch=2, bf16=True, more="fsdp-bf16"),
        entry("qwen3", 4, 4096, gpus=2, batch=4, parallel={**ep, "dispatch": "nccl"}, skew=1, more="ep-nccl"),
        entry("qwen3", 6, 4096, gpus=2, batch=4, parallel={**ep, **EVEN, **OVERLAP}, skew=1, trace=True, more="ep-overlap"),
        entry("qwen3", 6, 8192, gpus=2, batch=4, parallel={**ep, **EXACT, "capacity_factor": 2.0, **OVERLAP},
              memory={"policy": STASH}, skew=1, more="ep"),
        entry("qwen3", 4, 4096, gpus=2, batch=4, parallel={**ep, **EVEN, **OVERLAP}, memory={"compile": True}, skew=1,
              more="ep-compile"),
        entry("dsv2", 6, 4096, gpus=2, batch=4, parallel={**ep, **EXACT, **OVERLAP}, memory={"policy": "recompute"}, trace=True,
              more="ep"),
        entry("dsv2", 4, 4096, gpus=2, batch=4, parallel={**ep, **EXACT}, skew=1.5, more="ep-skew1.5"),
        entry("dsv2", 4, 4096, gpus=2, batch=4, parallel={**ep, **EXACT, "capacity_factor": 2.0, **OVERLAP},
              memory={"policy": STASH, "graph": True}, skew=1, more="ep-graph"),
        entry("olmoe", 6, 8192, gpus=2, batch=4, microbatch=2, parallel=ep, skew=1, more="ep"),
        entry("mixtral", 2, 8192, gpus=2, batch=4, parallel=ep, memory={"policy": "offload", "offload": "all"}, skew=1,
              more="ep"),
        entry("gpt-oss", 4, 2048, gpus=2, batch=4, parallel=ep, skew=1, more="ep"),
        entry("qwen3", 4, 4096, gpus=2, batch=4, parallel=pp, more="1f1b"),
        entry("dsv2", 6, 2048, gpus=2, batch=8, microbatch=2, parallel=pp, memory={"policy": "recompute"}, more="1f1b"),
        entry("olmoe", 6, 8192, gpus=2, batch=6, parallel=pp, memory={"policy": "offload"}, more="1f1b"),
        entry("dsv2", 8, 4096, gpus=2, batch=8, parallel={**pp, "schedule": "dualpipev"}, more="dualpipev"),
        entry("dsv2", 6, 4096, gpus=2, batch=8, parallel={**pp, "schedule": "dualpipev"}, memory={"graph": True},
              more="dualpipev-graph"),
        entry("qwen3", 6, 4096, gpus=2, batch=8, parallel={**pp, "schedule": "zbv"}, more="zbv"),
        entry("olmoe", 8, 4096, gpus=2, batch=8, microbatch=2, parallel={**pp, "schedule": "interleaved-1f1b"},
              more="interleaved"),
        entry("qwen3", 2, 4096, gpus=2, batch=4, parallel=replicas, more="replicas"),
        entry("dsv2", 3, 4096, gpus=2, batch=4, bf16=True, parallel={**replicas, "reduce": "microbatch"}, more="replicas-bf16"),
        entry("qwen3", 2, 4096, gpus=2, batch=4, parallel={**replicas, **OVERLAP}, more="replicas-overlap"),
    ]  # fmt: skip


def _four() -> list[Entry]:
    ep, both = {"ep": 4}, {"pp": 2, "ep": 2, "reshard": False}
    four = {"pp": 4, "schedule": "1f1b", "reshard": False}
    return [
        entry("qwen3", 6, 8192, gpus=4, batch=8, more="fsdp"),
        entry("mixtral", 3, 4096, gpus=4, batch=4, more="fsdp"),
        entry("dsv2", 6, 32768, gpus=4, batch=4, memory={"policy": "recompute"}, more="fsdp"),
        entry("olmoe", 6, 4096, gpus=4, batch=8, parallel={"ep": 2}, skew=1, more="fsdp2xep2"),
        entry("qwen3", 8, 4096, gpus=4, batch=16, parallel={**ep, **EVEN, "overlap": True}, skew=1, more="ep-overlap"),
        entry("dsv2", 8, 4096, gpus=4, batch=8, parallel={**ep, "dispatch": "nccl"}, more="ep-nccl-own"),
        entry("qwen3", 6, 4096, gpus=4, batch=8, parallel={**ep, **EXACT}, skew=2, more="ep-skew2"),
        entry("dsv2", 6, 4096, gpus=4, batch=8, parallel={**ep, **EXACT, "capacity_factor": 4.0, **OVERLAP},
              memory={"policy": STASH}, skew=3, more="ep-skew3"),
        entry("qwen3", 8, 4096, gpus=4, batch=16, parallel={**both, **EVEN}, skew=1, more="dualpipev"),
        entry("qwen3", 8, 4096, gpus=4, batch=16, parallel={**both, **EVEN}, memory={"policy": {"*.mlp": "recompute"}}, skew=1,
              more="dualpipev"),
        entry("dsv2", 8, 4096, gpus=4, batch=16, parallel={**both, **EVEN}, memory={"compile": True}, skew=1,
              more="dualpipev-compile"),
        entry("dsv2", 8, 4096, gpus=4, batch=16, parallel={**both, **EVEN, "schedule": "zbv"}, skew=1, more="zbv"),
        entry("qwen3", 8, 2048, gpus=4, batch=16, parallel={**both, **EVEN, "schedule": "interleaved-1f1b"}, skew=1,
              more="interleaved"),
        entry("dsv2", 8, 4096, gpus=4, batch=16, parallel={**both, **EVEN}, memory={"policy": "offload"}, skew=1,
              more="dualpipev"),
        entry("olmoe", 8, 4096, gpus=4, batch=8, parallel=four, more="1f1b"),
        entry("qwen3", 8, 4096, gpus=4, batch=8, parallel=four, memory={"policy": "recompute"}, more="1f1b"),
        entry("qwen3", 4, 4096, gpus=4, batch=8, parallel={"replicate": 2}, more="replicas"),
        entry("olmoe", 4, 4096, gpus=4, batch=8, bf16=True, parallel={"replicate": 2, "reduce": "microbatch"},
              more="replicas-bf16"),
        entry("qwen3", 4, 4096, gpus=4, batch=8, parallel={"replicate": 2, "ep": 2}, skew=1, more="replicas-ep"),
        entry("dsv2", 6, 4096, gpus=4, batch=8, parallel={"replicate": 2, "pp": 2, "schedule": "1f1b", "reshard": False},
              more="replicas-1f1b"),
    ]  # fmt: skip


GRID: tuple[Entry, ...] = (*_one(), *_two(), *_four())


def tiny() -> tuple[Entry, ...]:
    """Five entries for a CPU: one process, experts and layers on two processes, and one that cannot be built."""
    pp = {"pp": 2, "schedule": "1f1b", "reshard": False}
    return (
        entry("tiny", 2, 64, device="cpu", trace=True),
        entry("tiny", 2, 64, device="cpu", bf16=True, memory={"policy": "offload", "offload": "all"}),
        entry("tiny", 2, 128, device="cpu", parallel={"ep": 3}, more="wrong"),
        entry("tiny", 2, 64, gpus=2, batch=4, device="cpu", parallel={"ep": 2}, skew=1.5, more="ep"),
        entry("tiny", 2, 64, gpus=2, batch=4, device="cpu", parallel=pp, more="1f1b"),
    )
