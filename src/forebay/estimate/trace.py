"""What each part of a model saves, needs and computes for one microbatch, without a device and without weights.

Input: a transformers `*ForCausalLM` on the meta device, and a `Shape`. Output: a `ModelTrace`: figures for the embedding, both
sublayers of every decoder layer, and the head with its loss. The model is used up: at most two layers of each kind run on fake
tensors (`forebay.estimate.trace_run`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.estimate.fake_model import GpuFunctions, fuse_sinks, make_fake
from forebay.estimate.trace_run import TraceRun
from forebay.estimate.types import LayerTrace, ModelTrace, PartTrace, Shape
from forebay.models.families import decoder_layers, moe_blocks


def trace_model(model: Any, shape: Shape, like: ModelTrace | None = None) -> ModelTrace:
    """Trace `model`, which is on the meta device, in the dtype of computation.

    `like` is a trace of the same model, with the same `Shape.without_experts`: only embedding and MoE sublayers run, and the rest
    is taken from it.

    Saved bytes are counted as `forebay.memory.profiler` does: distinct storages that autograd saves first in this part, without
    parameters and their views. With compiled sublayers, saved bytes are those of torch's partitioner, within 2 %. A weight
    gradient is counted in the peak of backward beside the sum it is added to; with one microbatch it is that sum, and the peak is
    too high by the gradients of one sublayer.

    Raises:
        ValueError: layers, experts or a loss that Forebay does not know, transformers' experts in another dtype than bfloat16, or
            `ep` does not divide the experts.
    """
    base = model.get_submodule(model.base_model_prefix)
    # The first trace has checked how the layers are built. To check again takes a tenth of the time of this one.
    layers: list[Any] = [parts.module for parts in decoder_layers(model)] if like is None else list(base.layers)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that Forebay knows")
    kinds = [_kind(layer) for layer in layers]
    several = 2 if like is None else 1  # what layers share, the first one saves
    numbers = sorted(n for k in set(kinds) for n in [i for i, kind in enumerate(kinds) if kind == k][:several])
    routers = len(moe_blocks(model))
    last, shares = _last_of_kinds(base_path(model), [kinds[n] for n in numbers])
    every, base.layers = base.layers, _Chosen(layers[n] for n in numbers)
    model, base.layers = copy.deepcopy(model), every  # a trace uses its model up
    model.config.use_cache = False
    with torch.enable_grad(), FakeTensorMode(), GpuFunctions() if shape.gpu else nullcontext():
        make_fake(model)
        if shape.flex:
            fuse_sinks(model)
        known = {} if like is None else _without_experts(like, numbers, model)
        run = TraceRun(model.train(), model.get_submodule(model.base_model_prefix), shape, known, shares, routers)
        run.forward()
        run.backward()
    sublayers = {kind: _layer_trace(run, last, kind, layers[kinds.index(kind)]) for kind in set(kinds)}
    found: TraceRun | ModelTrace = run if like is None else like
    return ModelTrace(
        run.parts["embedding"],
        tuple(sublayers[kind] for kind in kinds),
        run.parts["head"],
        found.shared,
        found.balance,
        found.given,
        found.unused,
        run.parts.get("balance") if like is None else like.router_loss,
    )


def _without_experts(trace: ModelTrace, numbers: list[int], model: Any) -> dict[str, PartTrace]:
    """The head, attention and dense sublayers of a trace, by the path that layer `numbers[n]` has as the n-th."""
    found = {"head": trace.head}
    for place, number in enumerate(numbers):
        layer, path = trace.layers[number], f"{base_path(model)}.layers.{place}"
        found[f"{path}.self_attn"] = layer.attention
        if not layer.is_moe:
            found[f"{path}.mlp"] = layer.mlp
    return found


def base_path(model: Any) -> str:
    return str(model.base_model_prefix)


class _Chosen(nn.ModuleList):
    """Some layers of a model. Any slice is all of them: a base model slices as many as its configuration says."""

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


LayerKind = tuple[Any, Any]  # of the attention sublayer, and of the MoE or dense one


def _kind(layer: Any) -> LayerKind:
    attention = type(layer.self_attn), getattr(layer.self_attn, "sliding_window", None), _shapes(layer.self_attn)
    return (type(layer), *attention), (type(layer.mlp), _shapes(layer.mlp))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _last_of_kinds(base: str, kinds: list[LayerKind]) -> tuple[dict[Any, str], frozenset[str]]:
    """Paths of the last sublayer of each kind in a model of layers of these kinds, and paths of the others.

    What layers share, such as rotary tables, the first one saves, so the last one has the figures of its kind.
    """
    both = [
        (f"{base}.layers.{n}.{name}", k)
        for n, kind in enumerate(kinds)
        for name, k in zip(("self_attn", "mlp"), kind, strict=True)
    ]
    last = {kind: path for path, kind in both}
    return last, frozenset(path for path, _ in both).difference(last.values())


def _layer_trace(run: TraceRun, last: Mapping[Any, str], kind: LayerKind, layer: Any) -> LayerTrace:
    attention, mlp = (run.parts[last[sublayer]] for sublayer in kind)
    return LayerTrace(attention, mlp, bool(moe_blocks(layer)))
