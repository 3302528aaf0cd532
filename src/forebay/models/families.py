"""Which transformers classes Forebay knows, and what their parts are called.

In: a model. Out: its decoder layers and MoE blocks, or an error that names a class that is not known
and the ones that are. Read in transformers 5.17; a class is known by its name and its module, and only
as long as it runs its own forward. Nothing is changed here and nothing kept.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from forebay.saved.slots import is_managed, is_patched

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
