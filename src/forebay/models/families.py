"""Decoder layers and MoE blocks of transformers models, and models cut down to some of their layers.

Input: a model. Output: its decoder layers and MoE blocks, found by the structure of their forward methods
(`forebay.models.structure`), or an error that names the class without that structure. A module counts as its class only
while it runs that class's own forward. `keep_part` reduces a causal language model to the layers of one pipeline rank;
what remains keeps its names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import call
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from forebay.memory.kv_cache import takes_a_cache
from forebay.memory.overrides import is_managed, is_patched
from forebay.models.forward_source import own_function
from forebay.models.structure import Halves, RoutedForward, called_before, halves_of, routing_of


class UnknownLayerError(ValueError):
    """A model has decoder layers that are not two sublayers."""


@dataclass(frozen=True, eq=False)
class MoeBlock:
    """The parts of a transformers MoE block; `path` is the block's module path."""

    path: str
    module: nn.Module
    router: nn.Module
    """Maps [T, H] to what `routing.outputs` names: logits [T, E], weights [T, K], ids [T, K] int64."""
    experts: nn.Module
    """The module that holds the experts' weights, inside any adapter."""
    routing: RoutedForward
    """Has the name of the router. Look it up at each call: it may be replaced."""


class Stages(NamedTuple):
    """Functions before and after the experts of a MoE layer: one of the layer and one of its block each.

    Those of `Halves.stages` and `RoutedForward.stages`; or, where the experts' sums are just added, `Halves.front` and
    `RoutedForward.front`, with nothing after them.
    """

    front: tuple[Callable[..., Any], Callable[..., Any]]
    back: tuple[Callable[..., Any], Callable[..., Any]] | None


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A decoder layer as two sublayers.

    Attributes:
        path, module: of the layer.
        mixer, block: names in the layer of the modules that give the sublayers their paths, such as "self_attn" and "mlp". Look
            them up at each call: they may be replaced.
        moe: the block's parts; None for a dense one, or one whose forward is not its class's.
    """

    path: str
    module: Any
    halves: Halves
    mixer: str
    block: str
    moe: MoeBlock | None

    @property
    def has_attention(self) -> bool:
        """Whether a part of the model has the first sublayer; see `keep_part`."""
        return self.mixer in self.module._modules

    @property
    def has_mlp(self) -> bool:
        """Whether a part of the model has the second sublayer; see `keep_part`."""
        return self.block in self.module._modules

    @property
    def attention_path(self) -> str:
        return f"{self.path}.{self.mixer}"

    def stages(self, direct: bool, once: Callable[..., Any] = call) -> Stages | None:
        """Functions for what a MoE layer does before its experts, and after them. None if the layer cannot be cut there.

        Args:
            direct: see `RoutedForward.front`.
            once: calls a method of a structure, or has its earlier result.
        """
        assert self.moe is not None, "a dense layer has no stages"
        routing, halves = self.moe.routing, self.halves
        block, shared = once(routing.front, direct) or (None, False)
        half = once(halves.front, self.block, shared)
        if block is not None and half is not None:
            return Stages((half, block), None)
        blocks, around = once(routing.stages, direct), once(halves.stages, self.block)
        return None if blocks is None or around is None else Stages(*zip(around, blocks, strict=True))

    @property
    def has_stages(self) -> bool:
        """Whether what comes before and after a MoE block's experts can run apart, as expert parallelism needs; True without
        experts."""
        return self.moe is None or self.stages(direct=False) is not None

    @property
    def block_path(self) -> str:
        return f"{self.path}.{self.block}"


def has_decoder_layers(model: nn.Module) -> bool:
    """Whether `decoder_layers` finds any, or raises."""
    return any(_layer_base(module) is not None for module in model.modules())


def called_paths(model: nn.Module) -> list[str]:
    """Paths of the modules of `model` that can be regions, in module order: a module list is never called, so it is none."""
    return [path for path, module in model.named_modules() if type(module).forward is not nn.Module.forward]


def moe_blocks(model: nn.Module) -> list[MoeBlock]:
    """The MoE blocks below `model` that call their experts with the output of a router, in module order."""
    known = _Known()
    found = (known.block(path, module) for path, module in model.named_modules())
    return [block for block in found if block is not None]


def decoder_layers(model: nn.Module) -> Iterator[LayerParts]:
    """Every decoder layer below `model`, in module order.

    Raises:
        UnknownLayerError: a transformers layer that is not two sublayers.
        ValueError: a layer whose forward is replaced, or that is managed already.
    """
    known = _Known()
    for path, module in model.named_modules():
        base = _layer_base(module)
        if base is None:
            continue
        halves = known.halves(base)
        if halves is None:
            raise _unknown(path, module)
        _refuse_override(path, module, base)
        mixer, block = _main_module(module, halves.first), _main_module(module, halves.second)
        if mixer is None or block is None:
            raise _unknown(path, module)  # BERT's cross-attention, which a decoder alone has not
        inner = getattr(module, block)
        moe = (
            None
            if forward_is_replaced(inner) or not halves.calls_once(block)
            else known.block(f"{path}.{block}", inner)
        )
        if moe is None and halves.given and _has_experts(module):
            raise UnknownLayerError(  # ERNIE's vision model, Gemma 4
                f"{path!r} is a {type(module).__name__}, whose second half reads {', '.join(halves.given)} beside hidden states, "
                "and has experts that are not called with the output of a router alone"
            )
        yield LayerParts(path, module, halves, mixer, block, moe)


def _unknown(path: str, module: nn.Module) -> UnknownLayerError:
    return UnknownLayerError(
        f"{path!r} is a {type(module).__name__}, whose forward is not two sublayers, mixer and feed-forward, "
        "with one value between them"
    )


def _has_experts(module: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())


def whole_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every decoder layer of the language models in `model`, whatever it is made of.

    Raises:
        ValueError: a layer whose forward is replaced, or that is managed already.
    """
    for path, module in model.named_modules():
        if (
            not isinstance(module, PreTrainedModel)
            or "input_ids" not in inspect.signature(type(module).forward).parameters
        ):
            continue
        for name, layers in module.named_children():
            for number, layer in layers.named_children() if isinstance(layers, nn.ModuleList) else ():
                base = transformers_base(layer)
                if base is not None and isinstance(layer, GradientCheckpointingLayer):
                    found = ".".join(part for part in (path, name, number) if part)
                    _refuse_override(found, layer, base)
                    yield found, layer


def check_block(parts: LayerParts) -> None:
    """Raise ValueError if the block cannot be spelled out: another library's class, a replaced forward, or unknown routing."""
    path, block = parts.block_path, getattr(parts.module, parts.block)
    base = transformers_base(block)
    if base is None:
        raise ValueError(
            f"{path!r} is a {type(block).__name__}, which is not a class of transformers: it is not supported here"
        )
    _refuse_override(path, block, base)
    if parts.moe is None and _has_experts(block):
        raise ValueError(
            f"{path!r} is a {type(block).__name__}, which does not call its experts with the output of a router as rows, ids and "
            "weights: it is not supported here"
        )
    for name in ("jitter_noise", "input_jitter_noise"):
        if getattr(block, name, 0):
            raise ValueError(f"{path!r} has router_jitter_noise ({name}), which is not supported here; set it to 0")


def innermost(module: Any) -> nn.Module:
    """The module inside PEFT's wrappers (``base_layer``), or `module` itself."""
    while _child(module, "base_layer") is not None:
        module = module.base_layer
    inner: nn.Module = module
    return inner


def _child(module: Any, name: str) -> nn.Module | None:
    """The child called `name`; not an attribute, which PEFT's wrappers pass on."""
    children = module.__dict__.get("_modules", {})
    return children[name] if name in children else None  # noqa: SIM401, a scripted module's children have no `get`


def transformers_base(module: nn.Module) -> type[nn.Module] | None:
    """The transformers model class whose forward `module` has by its class; None if there is none.

    FSDP2 and parametrizations make a subclass on the fly, so the bases count.
    """
    for base in type(module).__mro__:
        if "forward" in vars(base) and base.__module__.startswith("transformers.models."):
            return base
    return None


class _Known:
    """Structures by class. One object for each question about a model, so that layers of a class share their functions."""

    def __init__(self) -> None:
        self._halves: dict[type[nn.Module], Halves | None] = {}
        self._routing: dict[type[nn.Module], RoutedForward | None] = {}

    def halves(self, base: type[nn.Module]) -> Halves | None:
        if base not in self._halves:
            self._halves[base] = halves_of(base.forward)
        return self._halves[base]

    def block(self, path: str, module: Any) -> MoeBlock | None:
        if _child(module, "experts") is None or isinstance(module, GradientCheckpointingLayer):
            return None
        base = transformers_base(module)
        if base is None:
            return None
        if base not in self._routing:
            self._routing[base] = routing_of(base.forward, module._modules)
        routing = self._routing[base]
        if routing is None:
            return None
        return MoeBlock(path, module, innermost(getattr(module, routing.router)), innermost(module.experts), routing)


def _layer_base(module: nn.Module) -> type[nn.Module] | None:
    """The transformers class of a decoder layer: one that is given hidden states, and a KV cache or (DeepSeek-V4) the tokens.
    None for other modules."""
    if not isinstance(module, GradientCheckpointingLayer):
        return None
    base = transformers_base(module)
    if base is None:
        return None
    parameters = inspect.signature(base.forward).parameters.keys()
    is_decoder = takes_a_cache(parameters) or "input_ids" in parameters
    return base if "hidden_states" in parameters and is_decoder else None


def _main_module(layer: nn.Module, names: Sequence[str]) -> str | None:
    """The one of `names` with experts, or with the most modules inside: a norm has none. None if the layer has none of them."""
    found = {name: module for name in names if isinstance(module := getattr(layer, name, None), nn.Module)}
    return max(
        found,
        key=lambda name: (hasattr(found[name], "experts"), sum(1 for _ in found[name].modules()), names.index(name)),
        default=None,
    )


def forward_is_replaced(module: nn.Module) -> bool:
    """Whether `module` runs another forward than that of its transformers class."""
    base = transformers_base(module)
    if base is None or is_managed(module) or is_patched(module):
        return True
    return own_function(type(module).forward) is not own_function(base.forward)


def _refuse_override(path: str, module: nn.Module, base: type[nn.Module]) -> None:
    if is_managed(module):
        raise ValueError(f"{path!r} ({type(module).__name__}) is managed already: detach that first")
    if forward_is_replaced(module):
        raise ValueError(
            f"the forward of {path!r} ({type(module).__name__}) has been replaced and is no longer {base.__name__}'s: undo that "
            "first, or call forebay.manage before it"
        )


class LocalLayers(nn.ModuleDict):
    """The decoder layers of one pipeline rank, by their index in the whole model.

    Attributes:
        everything: all layers of the whole model, in order. Layers that are not kept are not children of this module, so
            they get no memory; their structure can still be inspected.
        absent: layers, and modules of layers that are cut in two, that are not here, by their paths below this one.
    """

    def __init__(self, layers: Iterable[nn.Module], kept: Collection[int]):
        super().__init__()
        self.everything = tuple(layers)
        self.absent: dict[str, nn.Module] = {str(n): layer for n, layer in enumerate(self.everything) if n not in kept}
        for number in sorted(kept):
            self.add_module(str(number), self.everything[number])

    def leave_out(self, number: int, names: Sequence[str]) -> None:
        """Make modules of layer `number` no children of it any more; they remain its attributes."""
        layer = self.everything[number]
        for name in names:
            module = getattr(layer, name)
            del layer._modules[name]
            layer.__dict__[name] = self.absent[f"{number}.{name}"] = module


def keep_part(
    model: Any,
    layers: Iterable[int],
    embedding: bool,
    head: bool,
    *,
    without_attention: Collection[int] = (),
    without_mlp: Collection[int] = (),
) -> None:
    """Cut a `*ForCausalLM` down in place, so that a pipeline rank makes, reads, shards and saves its own layers only.

    ``model.model.layers`` becomes a `LocalLayers`; without the embedding ``embed_tokens`` is None; without the head the
    last norm is ``nn.Identity()`` and ``lm_head`` None. Modules that are kept have the names of the whole model, so the same
    random weights and checkpoint keys belong to it. Do not call the part's own forward: the pipeline calls its layers.

    Args:
        model: the whole model, best on the meta device.
        layers: indices of the decoder layers to keep, in any order; at least one.
        embedding: keep the token embedding.
        head: keep the last norm and the language-model head.
        without_attention, without_mlp: those of `layers` of which only the other sublayer is kept.

    Raises:
        ValueError: no layers, unknown or repeated indices, tied embedding and head on different ranks, a layer that cannot be
            cut in two, layers that hand on more than hidden states (`why_whole`), or a model that is a part already.
    """
    base = model.get_submodule(model.base_model_prefix)
    if isinstance(base.layers, LocalLayers):
        raise ValueError(f"this {type(model).__name__} is a part already: cut a whole model")
    if why := why_whole(model):
        raise ValueError(why)
    kept, count = sorted(layers), len(base.layers)
    if not kept:
        raise ValueError(f"a part needs at least one of the {count} decoder layers")
    if len(set(kept)) < len(kept) or kept[0] < 0 or kept[-1] >= count:
        raise ValueError(f"layers {kept} must be distinct and between 0 and {count - 1}, the model's last layer")
    if not {*without_attention, *without_mlp} <= set(kept):
        raise ValueError(f"layers of which one sublayer is left out must be among those that are kept, {kept}")
    left_out = [(n, cut_in_two(base.layers[n])[0]) for n in without_attention]
    left_out += [(n, cut_in_two(base.layers[n])[1]) for n in without_mlp]
    if model.config.get_text_config().tie_word_embeddings:
        if embedding != head:
            raise ValueError(
                f"{type(model).__name__} has one weight for embedding and head (tie_word_embeddings), which must stay on one "
                "rank: use a V schedule, or set tie_word_embeddings = false"
            )
        if not embedding:
            model.all_tied_weights_keys, model._tied_weights_keys = {}, None  # or transformers would look for them
    base.layers = LocalLayers(base.layers, kept)
    for number, names in left_out:
        base.layers.leave_out(number, names)
    if not embedding:
        model.set_input_embeddings(None)
    if not head:
        setattr(base, final_norm(base), nn.Identity())
        model.lm_head = None


def why_whole(model: Any) -> str:
    """Why a model cannot be cut down to some of its layers; "" if it can, or if its layers are of an unknown kind."""
    try:
        passed = next((parts.halves.passed for parts in decoder_layers(model)), ())
        streams = stream_head(model.get_submodule(model.base_model_prefix))
    except ValueError:  # what cannot be cut at all is refused later, with its reason
        return ""
    if not passed and streams is None:
        return ""
    what = " and ".join([*passed, *(["several residual streams"] if streams else [])])
    return f"the layers of {type(model).__name__} return {what}, and stages send one stream of hidden states alone"


def sublayer_modules(layer: nn.Module, halves: Halves) -> tuple[list[str], list[str]] | None:
    """Names of the modules of each of a layer's sublayers; None if some weight is in neither or in both."""
    first, second = (
        [name for name in dict.fromkeys(names) if isinstance(getattr(layer, name, None), nn.Module)]
        for names in (halves.first, halves.second)
    )
    weights = {name.partition(".")[0] for name, _ in layer.named_parameters()}
    belong = weights <= {*first, *second} and not weights & set(first) & set(second)
    return (first, second) if belong else None


def cut_in_two(layer: nn.Module) -> tuple[list[str], list[str]]:
    """`sublayer_modules` of a decoder layer.

    Raises:
        ValueError: it cannot be cut in two.
    """
    (parts,) = decoder_layers(layer)
    found = sublayer_modules(layer, parts.halves)
    if found is None:
        raise ValueError(
            f"a {type(layer).__name__} cannot be cut in two, because it has weights of its own or shares some between its "
            "sublayers; give whole numbers of layers"
        )
    return found


def stream_head(base: Any) -> str | None:
    """The name of the module of a base model that makes one hidden state of several residual streams, before the last norm, as
    DeepSeek-V4 has; None where layers have one stream."""
    name = called_before(type(base).forward, final_norm(base))
    return name if name is not None and isinstance(getattr(base, name, None), nn.Module) else None


def final_norm(base: Any) -> str:
    """The name of the norm after the last layer in a base model, or of what a part has in its place.

    Raises:
        ValueError: no module of the base model, or several, could be it.
    """
    children = dict(base.named_children())
    names = [n for n, m in children.items() if isinstance(m, nn.Identity) or {p.ndim for p in m.parameters()} == {1}]
    # OLMo's has no weight. Rotary embeddings have buffers.
    names = names or [n for n, m in children.items() if not (*m.parameters(), *m.buffers())]
    if len(names) != 1:
        raise ValueError(
            f"{type(base).__name__} has no single norm after its layers: {', '.join(names) or 'there is none'}"
        )
    return names[0]


def all_layers(model: Any) -> tuple[nn.Module, ...]:
    """Every decoder layer of the whole model in order, including those that a part does not hold."""
    layers = model.get_submodule(model.base_model_prefix).layers
    return layers.everything if isinstance(layers, LocalLayers) else tuple(layers)


def absent_layers(model: Any) -> list[tuple[str, nn.Module]]:
    """Path and module of the decoder layers that a part does not hold, and of modules of layers that are cut in two; a policy of
    the whole model may name them."""
    prefix = getattr(model, "base_model_prefix", "")
    layers = getattr(getattr(model, prefix, None), "layers", None)
    if not isinstance(layers, LocalLayers):
        return []
    return [(f"{prefix}.layers.{path}", module) for path, module in layers.absent.items()]
