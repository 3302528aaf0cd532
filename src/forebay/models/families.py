"""Which transformers classes Forebay knows, the names of their parts, and how to keep a part of a model.

Input: a model. Output: its decoder layers and MoE blocks, or an error that names the unknown class and the known
ones. A class is known by its name and module, and only as long as it runs its own forward. `keep_part` reduces a
causal language model to some of its layers, with or without embedding and head; what remains keeps its names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from forebay.memory.regions import is_managed, is_patched

# Which transformers classes Forebay knows, and what their parts are called.
#
# In: a model. Out: its decoder layers and MoE blocks, or an error that names a class that is not known
# and the ones that are. Read in transformers 5.17; a class is known by its name and its module, and only
# as long as it runs its own forward. Nothing is changed here and nothing kept.

# Decoder layers whose forward is exactly the two residual halves (read in transformers 5.17).
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
# Their MLPs: MoE block -> (name of its router, name of its shared experts or None) ...
_MOE_BLOCKS: Mapping[str, tuple[str, str | None]] = {
    "DeepseekV2Moe": ("gate", "shared_experts"),
    "DeepseekV3MoE": ("gate", "shared_experts"),
    "Glm4MoeMoE": ("gate", "shared_experts"),
    "GptOssMLP": ("router", None),
    "MixtralSparseMoeBlock": ("gate", None),
    "OlmoeSparseMoeBlock": ("gate", None),
    "Qwen3MoeSparseMoeBlock": ("gate", None),
}
# ... and dense ones, which map a tensor to a tensor.
_DENSE_BLOCKS = (
    "DeepseekV2MLP",
    "DeepseekV3MLP",
    "Glm4MoeMLP",
    "LlamaMLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
)


class UnknownLayerError(ValueError):
    """A model has decoder layers of a transformers class that is not known; the message names it and those that are."""


@dataclass(frozen=True, eq=False)
class MoeBlock:
    """The parts of a transformers MoE block; `path` is the block's module path."""

    path: str
    router: nn.Module
    """Returns (logits [T, E], weights [T, K], ids [T, K] int64) of [T, H]."""
    experts: nn.Module
    """The module that holds the experts' weights, also where an adapter is wrapped around it."""
    shared: nn.Module | None
    names: tuple[str, str | None]
    """The block's attributes for router and shared experts. They are looked up at each call, because they may be replaced."""


def has_known_layers(model: nn.Module) -> bool:
    """Whether some module below `model` is a decoder layer of a class in `LAYERS`."""
    return any(_known_base(module, LAYERS) is not None for module in model.modules())


def moe_blocks(model: nn.Module) -> list[MoeBlock]:
    """The MoE blocks below `model` that are of a class in `_MOE_BLOCKS`, in module order."""
    named = [(path, module, _known_base(module, _MOE_BLOCKS)) for path, module in model.named_modules()]
    return [_parts(path, module, name) for path, module, name in named if name is not None]


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of every decoder layer below `model`.

    Raises:
        UnknownLayerError: naming it, for a transformers layer of an unknown class.
        ValueError: naming it, for a layer with an overridden forward, or one that is managed already.
    """
    for path, module in model.named_modules():
        name = _known_base(module, LAYERS)
        if name is None:
            if _is_foreign_layer(module):
                raise UnknownLayerError(
                    f"{path!r} is a {type(module).__name__}, which Forebay does not know to be two "
                    f"residual halves; supported are {', '.join(LAYERS)}"
                )
            continue
        _refuse_override(path, module, name)
        yield path, module


def moe_block(path: str, mlp: nn.Module) -> MoeBlock | None:
    """The parts of a decoder layer's MLP if that is a MoE block, None if it is dense.

    Raises:
        ValueError: naming it, for an unknown class, an overridden forward, or a Mixtral block that jitters.
    """
    name = _known_base(mlp, (*_MOE_BLOCKS, *_DENSE_BLOCKS))
    if name is None:
        raise ValueError(
            f"{path!r} is a {type(mlp).__name__}, which Forebay does not know; supported are "
            f"{', '.join((*_MOE_BLOCKS, *_DENSE_BLOCKS))}"
        )
    _refuse_override(path, mlp, name)
    if getattr(mlp, "jitter_noise", 0):
        raise ValueError(f"{path!r} has router_jitter_noise, which halves do not do; set it to 0")
    return None if name in _DENSE_BLOCKS else _parts(path, mlp, name)


def _parts(path: str, block: Any, name: str) -> MoeBlock:
    router, shared = _MOE_BLOCKS[name]
    held = None if shared is None else getattr(block, shared)
    return MoeBlock(path, innermost(getattr(block, router)), innermost(block.experts), held, (router, shared))


def innermost(module: Any) -> nn.Module:
    """The module that PEFT's wrappers are around (``base_layer``), or `module` itself."""
    while isinstance(module.__dict__.get("_modules", {}).get("base_layer"), nn.Module):
        module = module.base_layer
    inner: nn.Module = module
    return inner


def _is_foreign_layer(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__.endswith("DecoderLayer") and kind.__module__.startswith("transformers.")


def _known_base(module: nn.Module, names: Container[str]) -> str | None:
    """The name of the transformers class in `names` that `module` is of.

    FSDP2 and parametrisations subclass on the fly, so the bases count.
    """
    for base in type(module).__mro__:
        if base.__name__ in names and base.__module__.startswith("transformers.models."):
            return base.__name__
    return None


def _refuse_override(path: str, module: nn.Module, name: str) -> None:
    base: Any = next(b for b in type(module).__mro__ if b.__name__ == name)
    if is_managed(module):
        raise ValueError(f"{path!r} ({type(module).__name__}) is under management already: detach that first")
    if is_patched(module) or type(module).forward is not base.forward:
        raise ValueError(
            f"the forward of {path!r} ({type(module).__name__}) has been replaced, so it is no longer "
            f"{name}'s: undo that first, or install Forebay before it"
        )


# A part of a Hugging Face causal language model: some of its decoder layers, with or without embedding and head.
#
# In: a `*ForCausalLM`, best on the meta device, and what to keep of it. Out: the same object with the rest gone, so that a rank
# of a pipeline makes, reads, shards and saves its own layers only:
#
#     model.model.embed_tokens      None without the embedding
#     model.model.layers            `LocalLayers`: those that are kept, by their number in the whole
#     model.model.norm, lm_head     nn.Identity() and None without the head
#
# What is kept has the names that it has in the whole model: the same random weights, tensors of a folder and keys of a
# checkpoint belong to it. The part's own forward is not to be called: whoever runs the pipeline calls its layers.


class LocalLayers(nn.ModuleDict):
    """Some of a model's decoder layers, by number.

    Attributes:
        everything: all layers of the whole model, in order. Those that are not kept are no children of this module: they get no
            memory and take no part in anything, but can be asked what they are.
    """

    def __init__(self, layers: Iterable[nn.Module], kept: Iterable[int]):
        super().__init__()
        self.everything = tuple(layers)
        for number in sorted(kept):
            self.add_module(str(number), self.everything[number])

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the layers that are kept, rising."""
        return tuple(int(name) for name in self)


def keep_part(model: Any, layers: Iterable[int], embedding: bool, head: bool) -> None:
    """Cut `model` down, in place.

    Args:
        model: a whole `*ForCausalLM`.
        layers: numbers of the decoder layers to keep, in any order; at least one.
        embedding: keep the token embedding.
        head: keep the last norm and the language-model head.

    Raises:
        ValueError: no layers, numbers that the model does not have or that are given twice, embedding and head that share their
            weight and would be parted, or a model that is cut already.
    """
    base = model.get_submodule(model.base_model_prefix)
    if isinstance(base.layers, LocalLayers):
        raise ValueError(f"this {type(model).__name__} is a part already: cut a whole model")
    kept = sorted(layers)
    _check_numbers(kept, len(base.layers))
    if model.config.get_text_config().tie_word_embeddings:
        if embedding != head:
            raise ValueError(
                f"{type(model).__name__} has one weight for embedding and head (tie_word_embeddings), which cannot be parted: "
                "keep both on the same rank (a schedule of the V kind does), or set tie_word_embeddings = false"
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
    """Every decoder layer of the whole model in order, also those that a part does not hold."""
    layers = model.get_submodule(model.base_model_prefix).layers
    return layers.everything if isinstance(layers, LocalLayers) else tuple(layers)


def paths_elsewhere(model: Any) -> list[str]:
    """Module paths in the decoder layers that a part does not hold, for which a policy of the whole model may have patterns;
    none for a whole model."""
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


def _check_numbers(kept: list[int], count: int) -> None:
    if not kept:
        raise ValueError(f"a part needs at least one of the {count} decoder layers")
    if len(set(kept)) < len(kept) or kept[0] < 0 or kept[-1] >= count:
        raise ValueError(f"layers {kept} are not different ones of 0 to {count - 1}, which the model has")
