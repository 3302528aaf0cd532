"""Tiny configurations of every family that the trainer takes, from those of `tests.models.conftest`."""

from typing import Any

from tests.models.conftest import CAUSAL_LMS, MORE_FAMILIES, build_tiny

_VISION = {"glm4v_moe", "glm5_next", "qwen3_vl_moe"}  # no causal language models
_LOGITS_ONLY = {"jamba"}  # its router returns no ids
_ALL = {name: table for name, table in {**CAUSAL_LMS, **MORE_FAMILIES}.items() if name not in _VISION | _LOGITS_ONLY}


def _model_type(name: str) -> str:
    import transformers

    return str(getattr(transformers, _ALL[name][0]).model_type)


_BY_TYPE = {_model_type(name): name for name in sorted(_ALL)}
FAMILIES = tuple(_BY_TYPE)
_DENSE = {"granite", "llama", "mistral", "qwen2", "qwen3"}
IN_GROUPS = tuple(family for family in FAMILIES if family not in _DENSE)
"""Those that expert parallelism takes."""


def tiny_of(family: str, dtype: Any, attention: str = "eager") -> Any:
    """A model of `fields_of` four layers."""
    return build_tiny(_BY_TYPE[family], dtype, **fields_of(family, 4), attn_implementation=attention)


def has_router_loss(family: str) -> bool:
    """Whether the family's configuration has a factor of the router's loss."""
    import transformers

    return hasattr(getattr(transformers, _ALL[_BY_TYPE[family]][0])(), "router_aux_loss_coef")


def fields_of(family: str, layers: int = 2) -> dict[str, Any]:
    """Keys of [model.config]: those that the family's configuration has. `layers` is even; the first two repeat."""
    import transformers

    name, fields = _ALL[_BY_TYPE[family]]
    kind = getattr(transformers, name)
    of_data = {"vocab_size", "max_position_embeddings", "model_max_length"}
    known = {*kind().to_dict(), *kind.attribute_map, "head_dim"} - of_data
    fields = {key: value for key, value in fields.items() if key in known}
    repeated = {key: value * (layers // 2) for key, value in fields.items() if key.endswith("_types")}
    return {**fields, **repeated, "num_hidden_layers": layers}
