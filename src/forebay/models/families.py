"""Supported transformers classes, the parts of their layers, and models cut down to some of their layers.

Input: a model. Output: its decoder layers and MoE blocks, or an error that names the unknown class and the supported
ones. A class is known by its name and module, and only while it runs its own forward. `keep_part` reduces a causal
language model to the layers of one pipeline rank; what remains keeps its names.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from forebay.memory.overrides import is_managed, is_patched

# Decoder layers whose forward is exactly the two residual sublayers (read in transformers 5.17).
LAYERS = (
    "DeepseekV2DecoderLayer",
    "DeepseekV3DecoderLayer",
    "Glm4MoeDecoderLayer",
    "GptOssDecoderLayer",
    "LlamaDecoderLayer",
    "MixtralDecoderLayer",
    "OlmoeDecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
)
# MoE block -> (attribute of its router, attribute of its shared experts or None).
_MOE_BLOCKS: Mapping[str, tuple[str, str | None]] = {
    "DeepseekV2Moe": ("gate", "shared_experts"),
    "DeepseekV3MoE": ("gate", "shared_experts"),
    "Glm4MoeMoE": ("gate", "shared_experts"),
    "GptOssMLP": ("router", None),
    "MixtralSparseMoeBlock": ("gate", None),
    "OlmoeSparseMoeBlock": ("gate", None),
    "Qwen3MoeSparseMoeBlock": ("gate", None),
}
# Dense MLPs map a tensor to a tensor.
_DENSE_BLOCKS = (
    "DeepseekV2MLP",
    "DeepseekV3MLP",
    "Glm4MoeMLP",
    "LlamaMLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
)


class UnknownLayerError(ValueError):
    """A model has decoder layers of an unsupported transformers class."""


@dataclass(frozen=True, eq=False)
class MoeBlock:
    """The parts of a transformers MoE block; `path` is the block's module path."""

    path: str
    router: nn.Module
    """Maps [T, H] to (logits [T, E], weights [T, K], ids [T, K] int64)."""
    experts: nn.Module
    """The module that holds the experts' weights, inside any adapter."""
    shared: nn.Module | None
    names: tuple[str, str | None]
    """The block's attributes for router and shared experts. Look them up at each call: they may be replaced."""


def has_known_layers(model: nn.Module) -> bool:
    """Whether some module below `model` is a decoder layer of a class in `LAYERS`."""
    return any(transformers_base(module, LAYERS) is not None for module in model.modules())


def moe_blocks(model: nn.Module) -> list[MoeBlock]:
    """The MoE blocks of supported classes below `model`, in module order."""
    found = ((path, module, transformers_base(module, _MOE_BLOCKS)) for path, module in model.named_modules())
    return [_parts(path, module, base.__name__) for path, module, base in found if base is not None]


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of every decoder layer below `model`.

    Raises:
        UnknownLayerError: a transformers layer of an unsupported class.
        ValueError: a layer whose forward is replaced, or that is managed already.
    """
    for path, module in model.named_modules():
        base = transformers_base(module, LAYERS)
        if base is not None:
            _refuse_override(path, module, base)
            yield path, module
        elif type(module).__name__.endswith("DecoderLayer") and type(module).__module__.startswith("transformers."):
            raise UnknownLayerError(
                f"{path!r} is a {type(module).__name__}, which is not known to be two residual sublayers; supported are "
                f"{', '.join(LAYERS)}"
            )


def moe_block(path: str, mlp: nn.Module) -> MoeBlock | None:
    """The parts of a decoder layer's MLP if it is a MoE block; None if it is dense.

    Raises:
        ValueError: an unsupported class, a replaced forward, or a Mixtral block with router jitter.
    """
    base = transformers_base(mlp, (*_MOE_BLOCKS, *_DENSE_BLOCKS))
    if base is None:
        raise ValueError(
            f"{path!r} is a {type(mlp).__name__}, which is not supported; supported are "
            f"{', '.join((*_MOE_BLOCKS, *_DENSE_BLOCKS))}"
        )
    _refuse_override(path, mlp, base)
    if getattr(mlp, "jitter_noise", 0):
        raise ValueError(f"{path!r} has router_jitter_noise, which is not supported here; set it to 0")
    return None if base.__name__ in _DENSE_BLOCKS else _parts(path, mlp, base.__name__)


def innermost(module: Any) -> nn.Module:
    """The module inside PEFT's wrappers (``base_layer``), or `module` itself."""
    while isinstance(module.__dict__.get("_modules", {}).get("base_layer"), nn.Module):
        module = module.base_layer
    inner: nn.Module = module
    return inner


def transformers_base(module: nn.Module, names: Container[str]) -> type[nn.Module] | None:
    """The transformers class in `names` that `module` is an instance of; None if there is none.

    FSDP2 and parametrizations make a subclass on the fly, so the bases count.
    """
    for base in type(module).__mro__:
        if base.__name__ in names and base.__module__.startswith("transformers.models."):
            return base
    return None


def _parts(path: str, block: Any, name: str) -> MoeBlock:
    router, shared = _MOE_BLOCKS[name]
    shared_experts = None if shared is None else getattr(block, shared)
    return MoeBlock(path, innermost(getattr(block, router)), innermost(block.experts), shared_experts, (router, shared))


def _refuse_override(path: str, module: nn.Module, base: type[nn.Module]) -> None:
    if is_managed(module):
        raise ValueError(f"{path!r} ({type(module).__name__}) is managed already: detach that first")
    if is_patched(module) or _own_forward(type(module)) is not _own_forward(base):
        raise ValueError(
            f"the forward of {path!r} ({type(module).__name__}) has been replaced and is no longer {base.__name__}'s: undo that "
            "first, or call forebay.manage before it"
        )


def _own_forward(kind: type[nn.Module]) -> Any:
    """The forward of a class. Transformers 5.23 wraps that of every subclass of a layer, FSDP2's too, to checkpoint it."""
    return inspect.unwrap(
        kind.forward, stop=lambda f: f.__globals__["__name__"] != GradientCheckpointingLayer.__module__
    )


class LocalLayers(nn.ModuleDict):
    """The decoder layers of one pipeline rank, by their index in the whole model.

    Attributes:
        everything: all layers of the whole model, in order. Those that are not kept are not children of this module, so
            they get no memory; their structure can still be inspected.
    """

    def __init__(self, layers: Iterable[nn.Module], kept: Iterable[int]):
        super().__init__()
        self.everything = tuple(layers)
        for number in sorted(kept):
            self.add_module(str(number), self.everything[number])

    @property
    def numbers(self) -> tuple[int, ...]:
        """Indices of the kept layers, ascending."""
        return tuple(int(name) for name in self)


def keep_part(model: Any, layers: Iterable[int], embedding: bool, head: bool) -> None:
    """Cut a `*ForCausalLM` down in place, so that a pipeline rank makes, reads, shards and saves its own layers only.

    ``model.model.layers`` becomes a `LocalLayers`; without the embedding ``embed_tokens`` is None; without the head the
    last norm is ``nn.Identity()`` and ``lm_head`` None. What is kept has its names of the whole model, so the same
    random weights and checkpoint keys belong to it. Do not call the part's own forward: the pipeline calls its layers.

    Args:
        model: the whole model, best on the meta device.
        layers: indices of the decoder layers to keep, in any order; at least one.
        embedding: keep the token embedding.
        head: keep the last norm and the language-model head.

    Raises:
        ValueError: no layers, unknown or repeated indices, tied embedding and head on different ranks, or a model that
            is a part already.
    """
    base = model.get_submodule(model.base_model_prefix)
    if isinstance(base.layers, LocalLayers):
        raise ValueError(f"this {type(model).__name__} is a part already: cut a whole model")
    kept, count = sorted(layers), len(base.layers)
    if not kept:
        raise ValueError(f"a part needs at least one of the {count} decoder layers")
    if len(set(kept)) < len(kept) or kept[0] < 0 or kept[-1] >= count:
        raise ValueError(f"layers {kept} must be distinct and between 0 and {count - 1}, the model's last layer")
    if model.config.get_text_config().tie_word_embeddings:
        if embedding != head:
            raise ValueError(
                f"{type(model).__name__} has one weight for embedding and head (tie_word_embeddings), which must stay on one "
                "rank: use a V schedule, or set tie_word_embeddings = false"
            )
        if not embedding:
            model.all_tied_weights_keys, model._tied_weights_keys = {}, None  # or transformers would look for them
    base.layers = LocalLayers(base.layers, kept)
    if not embedding:
        model.set_input_embeddings(None)
    if not head:
        base.norm = nn.Identity()
        model.lm_head = None


def all_layers(model: Any) -> tuple[nn.Module, ...]:
    """Every decoder layer of the whole model in order, including those that a part does not hold."""
    layers = model.get_submodule(model.base_model_prefix).layers
    return layers.everything if isinstance(layers, LocalLayers) else tuple(layers)


def absent_paths(model: Any) -> list[str]:
    """Module paths in the decoder layers that a part does not hold; a policy of the whole model may name them."""
    prefix = getattr(model, "base_model_prefix", "")
    layers = getattr(getattr(model, prefix, None), "layers", None)
    if not isinstance(layers, LocalLayers):
        return []
    return [
        f"{prefix}.layers.{number}" + (f".{name}" if name else "")
        for number, layer in enumerate(layers.everything)
        if number not in layers.numbers
        for name, _ in layer.named_modules()
    ]
