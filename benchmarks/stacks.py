"""What a well-informed user adds to transformers on one GPU, as arms of `single_gpu.py`: SonicMoE's experts, Liger's kernels,
selective checkpointing, compiled layers, and these together.

Selective checkpointing saves the outputs of matrix products, grouped products and attention, and recomputes the rest of a layer.
SonicMoE's operations write into tensors that they are given, which torch's policies cannot save, so its experts are recomputed
with it; the arms "attention checkpointed" recompute attention only.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sonic
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Stack:
    """One combination. `checkpointing` is "", "layers", "selective" or "attention"; `liger` is "", "loss" or "kernels"."""

    name: str
    experts: str = ""
    liger: str = ""
    checkpointing: str = ""
    compiled: bool = False


BEFORE_SONIC = (
    Stack("transformers"),
    Stack("transformers, gradient checkpointing", checkpointing="layers"),
    Stack("selective checkpointing", checkpointing="selective"),
    Stack("Liger's loss", liger="loss"),
    Stack("Liger's kernels", liger="kernels"),
    Stack("Liger's kernels, selective checkpointing", liger="kernels", checkpointing="selective"),
)
WITH_SONIC = (
    Stack("SonicMoE", "sonicmoe"),
    Stack("SonicMoE, Liger's loss", "sonicmoe", "loss"),
    Stack("SonicMoE, Liger's kernels", "sonicmoe", "kernels"),
    Stack("SonicMoE, Liger's kernels, selective checkpointing", "sonicmoe", "kernels", "selective"),
    Stack("SonicMoE, Liger's kernels, attention checkpointed", "sonicmoe", "kernels", "attention"),
    Stack("SonicMoE, Liger's kernels, gradient checkpointing", "sonicmoe", "kernels", "layers"),
)
COMPILED = (Stack("SonicMoE, Liger's loss, compiled layers", "sonicmoe", "loss", compiled=True),)


def _saved_by_selection() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten._grouped_mm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        }
    )


def _checkpoint(model: Any, how: str) -> None:
    if how == "attention":
        for layer in model.model.layers:
            layer.self_attn.forward = functools.partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        saved = _saved_by_selection()

        def policy(_: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(options)


@contextmanager
def _liger(model: Any, what: str) -> Iterator[None]:
    """Liger's loss, or with "kernels" its norms and rotary embedding too, which it sets in transformers' module."""
    if not what:
        yield
        return
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    names = ("apply_rotary_pos_emb", "Qwen3MoeRMSNorm")
    before = {name: getattr(module, name) for name in names}
    rest = what == "kernels"
    apply_liger_kernel_to_qwen3_moe(rope=rest, rms_norm=rest, swiglu=False, model=model)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def entered(stack: Stack, model: Any) -> Iterator[None]:
    """`model`, a Qwen3-MoE of transformers, under the combination."""
    if stack.experts:
        sonic.install_in_transformers()
        model.set_experts_implementation(stack.experts)
    if stack.checkpointing:
        _checkpoint(model, stack.checkpointing)
    if stack.compiled:
        for layer in model.model.layers:
            layer.mlp.experts.forward = torch.compiler.disable(layer.mlp.experts.forward)
            layer.forward = torch.compile(layer.forward)
    with _liger(model, stack.liger):
        yield
