"""Forebay: the activation memory of Mixture-of-Experts training. Public names, nothing else.

The names are loaded when they are first asked for: `forebay --help` and a typo in a config should not take the seconds
that importing torch and transformers takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.managed import Managed, manage
    from forebay.models.linear_cross_entropy import linear_cross_entropy
    from forebay.moe.experts import experts
    from forebay.policy import BudgetError, PolicyError

__all__ = ["BudgetError", "Managed", "PolicyError", "experts", "linear_cross_entropy", "manage"]


def __getattr__(name: str) -> Any:
    homes = {
        "BudgetError": "forebay.policy",
        "Managed": "forebay.managed",
        "PolicyError": "forebay.policy",
        "experts": "forebay.moe.experts",
        "linear_cross_entropy": "forebay.models.linear_cross_entropy",
        "manage": "forebay.managed",
    }
    if name not in homes:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
