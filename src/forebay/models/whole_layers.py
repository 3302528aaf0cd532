"""Decoder layers that are not two sublayers, compiled whole.

Input: a model of transformers, some of whose layers `forebay.models.blocks` cannot cut: attention and MLP side by side (Cohere),
routers that hand on their hidden states (Zaya). Output: the same model, each of whose layers runs as one compiled graph. Its
modules are called as transformers calls them, so hooks and adapters on them run in the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from forebay.memory.kv_cache import is_given_a_cache
from forebay.memory.overrides import ForwardFn, InnerForward, install
from forebay.models.blocks import collected_outputs
from forebay.models.compile import check_compiler, compile_sublayer
from forebay.models.families import whole_layers
from forebay.models.forward_source import own_function

# transformers passes them on to layers, which do not read them. The number of targets is another one in each step, and would
# compile anew.
_NOT_FOR_LAYERS = ("labels", "num_items_in_batch", "shift_labels")


def install_whole_layers(model: nn.Module) -> tuple[dict[str, str], Callable[[], None]]:
    """Compile each decoder layer of the language models in `model`; layers of a class share their graphs.

    A layer's own forward runs, uncompiled, with a KV cache, under gradient checkpointing, and where outputs of modules inside,
    such as attention weights or a router's, are collected.

    Returns:
        The paths of the modules inside, with that of their layer; and what undoes it.

    Raises:
        ValueError: there is no such layer, or one whose forward is replaced.
        RuntimeError: no compiler for the model's device.
    """
    layers = dict(whole_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers of transformers to compile")
    check_compiler(next(model.parameters()).device.type)
    compiled = compile_sublayer(decoder_layer, attention=True)
    undo = ExitStack()
    for layer in layers.values():
        undo.callback(install(layer, _compiled_around(layer, compiled)))
    inside = {f"{path}.{name}": path for path, layer in layers.items() for name, _ in layer.named_modules() if name}
    return inside, undo.close


def decoder_layer(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer's forward as a function, without transformers' checkpoint around it."""
    return forward(layer, *args, **kwargs)


def _compiled_around(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[[InnerForward], ForwardFn]:
    forward = own_function(type(layer).forward)
    dropped = set(_NOT_FOR_LAYERS) - set(inspect.signature(forward).parameters)

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
            if checkpointed or is_given_a_cache(kwargs) or collected_outputs():
                return inner(*args, **kwargs)
            return compiled(self, forward, *args, **{k: v for k, v in kwargs.items() if k not in dropped})

        return run

    return around
