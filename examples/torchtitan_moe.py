"""A configuration of torchtitan with Forebay, for torchtitan's own trainer:

    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_moe --config qwen3_30b_a3b

Run as a script it prints what the overrides change. Arguments of torchtitan work as ever, such as --training.seq_len 8192.
"""

from torchtitan.config.override import apply_overrides
from torchtitan.models.qwen3 import config_registry
from torchtitan.trainer import Trainer


def qwen3_30b_a3b() -> Trainer.Config:
    """torchtitan's own configuration, with attention offloaded and MoE layers recomputed."""
    config = config_registry.qwen3_30b_a3b()
    policy = {"layers.*.attention": "offload", "layers.*.moe": "recompute"}
    config.override.imports = [
        ("forebay.integrations.torchtitan.memory", {"policy": policy}),
        "forebay.integrations.torchtitan.grouped_experts",
    ]
    config.activation_checkpoint = None  # Forebay's policy takes its place
    config.training.disable_cuda_graphs = True
    config.compile.components = ["loss"]
    return config


if __name__ == "__main__":
    found = qwen3_30b_a3b()
    print("\n".join(apply_overrides(found.override, found)[:4]))
