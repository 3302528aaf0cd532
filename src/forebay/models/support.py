"""Support of each MoE family of the installed transformers, found by building a small model of each.

Output of `families`: a row for each family, from the code that `forebay.manage` asks. Models are built on the meta device from
the defaults of their configuration class with a few layers, so nothing is downloaded and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from forebay.models.families import LayerParts, check_block, decoder_layers
from forebay.models.fused_loss import install_fused_loss
from forebay.models.hf_experts import experts_modules, why_own

_LAYERS = 8  # one of each kind, such as Jamba's attention, which comes every eighth layer
# For the fields that have no default in some family.
_SIZES: Mapping[str, Any] = {
    "head_dim": 64,
    "layer_types": ["full_attention"] * _LAYERS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}


@dataclass(frozen=True)
class FamilySupport:
    """The parts of one family that run on Forebay's code.

    Attributes:
        family: the folder of transformers that has the model.
        model_type: of its configuration.
        experts: Forebay's experts run.
        sublayers: the decoder layers are two sublayers each.
        loss: the loss is computed without logits.
        falls_back: what does not run and what does instead; "" if there is nothing.
    """

    family: str
    model_type: str
    experts: bool
    sublayers: bool
    loss: bool
    falls_back: str


def families() -> Iterator[FamilySupport]:
    """A row for each MoE family, in alphabetical order."""
    names = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    folders = sorted((model_type_to_module_name(model_type), model_type) for model_type in names)
    for family, found in groupby(folders, key=lambda pair: pair[0]):
        file = Path(transformers.__file__).parent / "models" / family / f"modeling_{family}.py"
        if file.exists() and "self.experts(" in file.read_text("utf-8"):
            # A model of text alone before one that also has a vision tower.
            types = sorted((t for _, t in found), key=lambda t: t not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            yield _support(family, {model_type: names[model_type] for model_type in types})


def _support(family: str, names: Mapping[str, str]) -> FamilySupport:
    for model_type, name in names.items():
        for fields in ({"num_hidden_layers": _LAYERS}, {"text_config": {"num_hidden_layers": _LAYERS}}, {}):
            model = _built(model_type, name, fields)
            if model is not None:
                return _asked(family, model_type, model)
    return FamilySupport(family, next(iter(names)), False, False, False, "its configuration's defaults make no model")


def _built(model_type: str, name: str, fields: Mapping[str, Any]) -> nn.Module | None:
    kind = CONFIG_MAPPING[model_type]
    try:
        default = kind(**fields)
        missing = {field: size for field, size in _SIZES.items() if getattr(default, field, size) is None}
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, name)(kind(**fields, **missing))
    except Exception:  # transformers raises many kinds here
        return None
    return model


def _asked(family: str, model_type: str, model: nn.Module) -> FamilySupport:
    notes: list[str] = []
    experts = [why_own(module) for _, module in experts_modules(model)]
    why = next(filter(None, experts), None if experts else "transformers lets no other implementation compute them")
    if why is not None:
        notes.append(f"its own experts ({why})")
    try:
        layers = list(decoder_layers(model))
    except ValueError:
        layers = []
    notes += _limits(layers) if layers else ["whole decoder layers as regions"]
    try:
        install_fused_loss(model)()
        loss = True
    except ValueError:
        loss = False
        notes.append("its own loss")
    return FamilySupport(family, model_type, why is None, bool(layers), loss, "; ".join(notes))


def _limits(layers: list[LayerParts]) -> list[str]:
    """Features that the sublayers do not support."""
    try:
        for parts in layers:
            check_block(parts)
    except ValueError:
        return ["no compile=True", "no expert parallelism"]
    return [] if all(parts.has_stages for parts in layers) else ["no expert parallelism"]
