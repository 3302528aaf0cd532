"""Shared by the integrations: the arguments that they pass on to `forebay.manage`, and figures for a trainer's log.

Input: what a user gave to a callback or plugin, and later what `forebay.manage` returned. The callbacks own the `Managed`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from forebay.errors import nearest
from forebay.managed import Managed, check_options
from forebay.policy import PolicyError, refuse_stash
from forebay.train.metrics import peak_bytes

# Options of `manage` that a trainer can pass on. The others are for expert parallelism.
OPTIONS = ("compile", "attention", "experts", "loss", "offload", "recompute", "min_bytes", "precision")
_GIB = 1 << 30


def manage_arguments(
    owner: str, policy: str | Mapping[str, str], budget: int | str | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `manage`.

    Args:
        owner: the name of the class that was given them, for messages.

    Raises:
        PolicyError: an unknown option, or a value that is invalid for any model.
    """
    valid = ("policy", "budget", *OPTIONS)
    for name in options:
        if name not in OPTIONS:
            hint = nearest(name, valid, "option")
            raise PolicyError(f"{owner} has no option {name!r}; {hint}valid are {', '.join(valid)}")
    check_options(policy, budget=budget, **options)
    refuse_stash(owner, policy)
    return {"policy": policy, "budget": budget, **options}


class MemoryFigures:
    """Figures of a managed model for a trainer's log, in GiB, of this process."""

    def __init__(self, memory: Managed):
        self._memory, self._peak = memory, 0

    def read(self, device: torch.device) -> dict[str, float]:
        """``memory/peak``, the highest allocated memory so far (without a GPU the process's resident memory), and
        ``memory/offloaded``, what left the device in the last step. Waits for the device."""
        self._peak = max(self._peak, peak_bytes(device), self._memory.manager.take_peak())
        return {"memory/peak": self._peak / _GIB, "memory/offloaded": self._memory.report().moved_bytes / _GIB}


def plan_text(memory: Managed) -> str:
    """The number of regions by placement, such as ``"30 offload, 18 keep"``."""
    counts = Counter(memory.placements.values())
    return ", ".join(f"{count} {placement}" for placement, count in counts.most_common())
