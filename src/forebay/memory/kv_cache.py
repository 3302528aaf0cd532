"""Which argument of a transformers module is its KV cache.

Releases before 5.24 call it by one name in attention, by others in state-space models; from 5.24 on all call it ``cache``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_FROM_5_24 = "cache"
_BEFORE = ("past_key_values", "cache_params", "layer_past")
CACHE_ARGUMENTS = frozenset({_FROM_5_24, *_BEFORE})


def takes_a_cache(parameters: Collection[str]) -> bool:
    """Whether a decoder layer's forward with these parameters is given the model's KV cache."""
    return "past_key_values" in parameters or _FROM_5_24 in parameters


def is_given_a_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments, by name, writes to a KV cache."""
    # Trap: a module of the user's own may have an argument `cache` that is no KV cache.
    of_transformers = any(
        base.__module__.startswith("transformers.") for base in type(arguments.get(_FROM_5_24)).__mro__
    )
    return of_transformers or any(arguments.get(name) is not None for name in _BEFORE)
