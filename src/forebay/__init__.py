"""Forebay: activation memory of Mixture-of-Experts training. This module holds the public names.

They are imported when they are first used: `forebay --help` and errors in a config do not wait for torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.integrations.transformers import ForebayCallback
    from forebay.managed import Managed, manage
    from forebay.models.linear_cross_entropy import linear_cross_entropy
    from forebay.moe.experts import experts
    from forebay.policy import BudgetError, PolicyError

__version__ = "0.1.0"  # the only place that says it; pyproject.toml reads it from here
__all__ = ["BudgetError", "ForebayCallback", "Managed", "PolicyError", "experts", "linear_cross_entropy", "manage"]

if not TYPE_CHECKING:  # or a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        modules = {
            "BudgetError": "forebay.policy",
            "ForebayCallback": "forebay.integrations.transformers",
            "Managed": "forebay.managed",
            "PolicyError": "forebay.policy",
            "experts": "forebay.moe.experts",
            "linear_cross_entropy": "forebay.models.linear_cross_entropy",
            "manage": "forebay.managed",
        }
        if name not in modules:
            raise AttributeError(f"module 'forebay' has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
