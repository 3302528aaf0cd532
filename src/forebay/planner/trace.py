"""What each part of a model saves, needs and computes for one microbatch, without a device and without weights.

In: a transformers `*ForCausalLM` on the meta device with all its layers, and a `Shape`. Out: a `ModelTrace`: figures for the
embedding, the two halves of every decoder layer, and the head with its loss. The model is used up: its layers are run as the run
itself runs them, with its experts, its loss and (under expert parallelism) its stages, on fake tensors. Nothing is kept.

How: of each *kind* of layer (its classes, the shapes of its parameters, its sliding window) at most two are run, and the last
half of a kind gives the kind's figures: what layers share, such as rotary tables, the first one saves. Each half is a graph of
its own, whose input is a leaf: forward is run and its memory watched (`forebay.planner.live`), then backward. A figure of *saved*
bytes is that of `forebay.saved.profile`: distinct storages that autograd saved first in this part, without parameters and their
views.

Fake tensors are on the fake CPU: torch's CPU wheels abort where autograd meets a fake CUDA tensor. Two things would differ and
are made those of a GPU. Storages are rounded to the caching allocator's 512 bytes; and `scaled_dot_product_attention` is one of
the GPU's fused kernels, which keep no scores and give their output the layout of the queries.

What is not the run's:

* `memory.compile`: halves are traced uncompiled. Of what autograd saves then, compiled code saves what that was made of (inputs,
  results of GEMMs, attention, the experts and reductions), which `forebay.planner.live` notes: torch's partitioner cuts there, or
  where fewer bytes cross, so that this bounds it. All that is made again is counted in backward's peak.
* A weight gradient is counted in backward's peak beside the sum it is added to. With one microbatch it *is* that sum: the peak is
  then too high by the gradients of one half.
* Flash attention is traced as the fused kernel, which saves the same; GPT-OSS, which has no such kernel in torch, as "eager".
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from forebay.models.families import decoder_layers, moe_block
from forebay.planner.figures import LayerTrace, ModelTrace, Shape
from forebay.planner.parts import Run


def trace_model(model: Any, shape: Shape) -> ModelTrace:
    """Trace `model`, which is on the meta device, in the dtype that is computed in, and not used again.

    Raises:
        ValueError: layers, experts or a loss of a kind that Forebay does not know, or experts that `ep` does not divide.
    """
    base = model.get_submodule(model.base_model_prefix)
    layers: list[Any] = [layer for _, layer in decoder_layers(model)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that Forebay knows")
    kinds = [_kind(layer) for layer in layers]
    numbers = sorted(n for k in set(kinds) for n in [i for i, kind in enumerate(kinds) if kind == k][:2])
    base.layers = _Chosen(layers[n] for n in numbers)
    model.config.use_cache = False
    with torch.enable_grad(), FakeTensorMode(), _FusedAttention() if shape.gpu else nullcontext():
        _make_fake(model)
        run = Run(model.train(), base, shape)
        run.forward()
        run.backward()
    halves = _by_half(run, numbers, layers, kinds)
    first = run.parts[f"{base_path(model)}.layers.0.self_attn"]
    return ModelTrace(
        run.parts["embedding"],
        tuple(halves[kind] for kind in kinds),
        run.parts["head"],
        first.saved - halves[kinds[numbers[0]]].attention.saved,
        run.balance,
        len(halves),
        run.head_gradient,
    )


def base_path(model: Any) -> str:
    """Module path of the base model."""
    return str(model.base_model_prefix)


class _Chosen(nn.ModuleList):
    """Some of a model's layers; a slice of it is all of them, for a base model takes as many as its configuration says."""

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


Kind = tuple[Any, Any]  # of the attention half, and of the other


def _kind(layer: Any) -> Kind:
    attention = type(layer.self_attn), getattr(layer.self_attn, "sliding_window", None), _shapes(layer.self_attn)
    return (type(layer), *attention), (type(layer.mlp), _shapes(layer.mlp))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _by_half(run: Run, numbers: list[int], layers: list[Any], kinds: list[Kind]) -> dict[Kind, LayerTrace]:
    """Of each kind, its halves as the last layer that has them."""
    attention, mlp = {}, {}
    for place, number in enumerate(numbers):
        path = f"{base_path(run.model)}.layers.{place}"
        attention[kinds[number][0]] = run.parts[f"{path}.self_attn"]
        mlp[kinds[number][1]] = run.parts[f"{path}.mlp"]
    is_moe = {kind[1]: moe_block("mlp", layer.mlp) is not None for kind, layer in zip(kinds, layers, strict=True)}
    return {kind: LayerTrace(attention[kind[0]], mlp[kind[1]], is_moe[kind[1]]) for kind in set(kinds)}


def _make_fake(model: nn.Module) -> None:
    """Parameters and buffers as fake tensors of the same shapes and dtypes."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # one parameter may have two names
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _FusedAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` as a GPU's fused kernels save: flash, or cuDNN's for heads of two widths and for masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace that function, pass on every other."""
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Both kernels give their output the layout of the queries, and take fewer heads of keys than of queries."""
    aten = torch.ops.aten
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
