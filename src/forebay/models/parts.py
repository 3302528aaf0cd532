"""A part of a Hugging Face causal language model: some of its decoder layers, with or without embedding and head.

In: a `*ForCausalLM`, best on the meta device, and what to keep of it. Out: the same object with the rest gone, so that a rank of
a pipeline makes, reads, shards and saves its own layers only:

    model.model.embed_tokens      None without the embedding
    model.model.layers            `LocalLayers`: those that are kept, by their number in the whole
    model.model.norm, lm_head     nn.Identity() and None without the head

What is kept has the names that it has in the whole model: the same random weights, tensors of a folder and keys of a checkpoint
belong to it. The part's own forward is not to be called: whoever runs the pipeline calls its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


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
