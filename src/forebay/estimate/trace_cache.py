"""Caches what a plan computes about a model (traces, pipeline actions) for as long as a plan or search lasts.

Input: a `Config`. Output: `ModelFacts` of its model, the trace of any `Shape` and pipeline actions. Many meshes and sizes of one
model share most of these: traces that differ in how experts are shared have all but the MoE sublayers in common. The model is on
the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from forebay.config import Config, Model
from forebay.errors import UsageError, first_line
from forebay.estimate.processes import forked_map
from forebay.estimate.state import WeightShapes, weight_shapes
from forebay.estimate.trace import layers_path, trace_model
from forebay.estimate.types import ModelTrace, Shape
from forebay.models.families import UnknownLayerError, called_paths, decoder_layers, why_whole
from forebay.pipeline.p2p import neighbors
from forebay.pipeline.peer_links import slots_and_words, slots_of
from forebay.pipeline.schedule import make_plan
from forebay.train import hf_io

MOST_LAYERS = 1024
"""Layers of a model that is planned. One of them makes no tensors, and still takes half a megabyte and 6 ms."""


@dataclass(frozen=True)
class ModelFacts:
    """A model on the meta device, its parameter shapes, paths of modules that can be regions, the path of its layers, paths of
    the sublayers of all layers, in forward order, the attention counted, and `why_whole`."""

    model: Any
    weights: WeightShapes
    paths: tuple[str, ...]
    prefix: str
    sublayers: list[str]
    attention: str
    whole: str


class TraceCache:
    """A cache for one plan or search.

    Args:
        adapt: changes a model, on the meta device, before its shapes are read or it is traced.
        shape: fields of every `Shape`, in place of the asked ones.

    Attributes:
        pipeline, slots: a step of all pipeline ranks, and the slots of each into which others copy packets; arguments as for
            `make_plan`.
    """

    def __init__(self, adapt: Callable[[Any], None] | None = None, **shape: Any) -> None:
        self._adapt, self._shape = adapt, shape
        # By what decides the model.
        self._declared: dict[str, Any] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._traces: dict[tuple[str, Shape], ModelTrace | str] = {}  # or why there is none
        self._alike: dict[tuple[str, Shape], ModelTrace] = {}  # by `Shape.without_experts`
        self.pipeline = cache(make_plan)
        self.slots = cache(self._slots)

    def declared(self, config: Config) -> Any:
        """`forebay.train.hf_io.declared_by`, which takes 2 ms and is asked for four times a mesh."""
        key = _key(config)
        if key not in self._declared:
            self._declared[key] = hf_io.declared_by(config)
        return self._declared[key]

    def facts(self, config: Config) -> ModelFacts:
        """Raises UsageError for attention that the family does not support, for more layers than are planned, or for layers of an
        unknown family."""
        key = _key(config)
        if key not in self._facts:
            declared = self.declared(config)
            if (layers := declared.get_text_config().num_hidden_layers) > MOST_LAYERS:
                raise UsageError(
                    f"num_hidden_layers = {layers} are more than a plan takes; valid is at most {MOST_LAYERS}"
                )
            model, attention = _skeleton(config.model, declared, self._adapt)
            try:
                sublayers = [path for y in decoder_layers(model) for path in (y.attention_path, y.block_path)]
            except UnknownLayerError as error:
                raise UsageError(f"the layers of this model cannot be planned: {error}") from error
            base = model.get_submodule(model.base_model_prefix)
            absent = [name for name in ("layers", "embed_tokens") if not hasattr(base, name)]
            if absent or not sublayers:
                what = " and no ".join(absent or ["layers of two sublayers"])
                raise UsageError(f"the layers of this model cannot be planned: {type(base).__name__} has no {what}")
            paths, prefix = tuple(called_paths(model)), layers_path(model)
            self._facts[key] = ModelFacts(
                model, weight_shapes(model), paths, prefix, sublayers, attention, why_whole(model)
            )
        return self._facts[key]

    def trace(self, config: Config, shape: Shape) -> ModelTrace:
        """The trace of one microbatch. Raises UsageError for a model that cannot be traced, or not be cut into the stages of a
        pipeline, or see `facts`."""
        if config.parallel.pp > 1 and (why := self.facts(config).whole):
            raise UsageError(f"parallel.pp = {config.parallel.pp}: {why}; valid is 1")
        asked = self._key_of(config, shape)
        if asked not in self._traces:
            self._traces[asked] = self._traced((config, shape))
        if isinstance(found := self._traces[asked], str):
            raise UsageError(found)
        return found

    def make(self, asked: Iterable[tuple[Config, Shape]], processes: int, progress: Callable[[], None]) -> None:
        """Make many traces in several processes, for `trace`. `progress` is called after each."""
        missing: dict[tuple[str, Shape], tuple[Config, Shape]] = {}
        for config, shape in asked:
            with suppress(UsageError):  # `trace` raises it again
                self.facts(config)
                missing.setdefault(self._key_of(config, shape), (config, shape))
        missing = {key: one for key, one in missing.items() if key not in self._traces}
        for key, found in zip(missing, forked_map(self._traced, list(missing.values()), processes), strict=True):
            self._traces[key] = found
            progress()

    def _traced(self, asked: tuple[Config, Shape]) -> ModelTrace | str:
        config, shape = asked
        key, shape = self._key_of(config, shape)
        model, like = self.facts(config).model, (key, shape.without_experts())
        try:
            found = trace_model(model, shape, self._alike.get(like))
        except ValueError as error:
            return f"this model cannot be traced: {first_line(error)}"
        self._alike.setdefault(like, found)
        return found

    def _key_of(self, config: Config, shape: Shape) -> tuple[str, Shape]:
        return _key(config), replace(shape, **self._shape)

    def _slots(self, *schedule: Any) -> int:
        plan = self.pipeline(*schedule)
        return slots_and_words(neighbors(plan.ranks), slots_of(plan))[0]


def _key(config: Config) -> str:
    return repr((config.model, config.data.tokenizer))


def _skeleton(section: Model, declared: Any, adapt: Callable[[Any], None] | None) -> tuple[Any, str]:
    """The model on the meta device in the dtype of computation, and the attention it is counted with."""
    given = hf_io.given_to_transformers(section.attention) or hf_io.plain_attention(declared)
    asked = "sdpa" if given.startswith("flash") else given
    dtype = getattr(torch, section.computed_in)
    for attention in (asked, "eager"):
        try:
            model = hf_io.on_meta(copy.deepcopy(declared), dtype, attention)
        except ValueError as error:
            if attention == "eager" or section.attention == "sdpa":
                raise UsageError(f"model.attention = {section.attention!r}: {first_line(error)}") from error
        else:
            hf_io.check_flex(model, section.attention)
            if adapt is not None:
                adapt(model)
            return model, section.attention if section.attention == "flex" else attention
    raise AssertionError("a model has eager attention")
