"""Where a region sits in a model's forward, and how it is put there and taken away.

In: a place in the forward (a whole module here; the halves of a decoder layer in `forebay.models.halves`). Out: a `Slot`,
whose callable the manager wraps. The slot owns the replaced attribute and restores it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch


class Slot(Protocol):
    """A place in a model's forward where a region sits."""

    module: torch.nn.Module
    """The module whose weights the region uses."""
    light_recompute: Callable[[bool], None] | None
    """Switches the region's own, cheaper recomputation of its largest saved tensor; None if it has none."""

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrapper(current)`` in the place of the current callable."""

    def restore(self) -> None:
        """Put everything back as it was before `wrap`."""


class ModuleSlot:
    """The slot of a whole module: its ``forward``, replaced on the instance. Module hooks stay outside the region."""

    def __init__(self, module: torch.nn.Module, light_recompute: Callable[[bool], None] | None = None):
        self.module = module
        self.light_recompute = light_recompute
        self._before: Callable[..., Any] | None = None
        self._wrapped = False

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._before = self.module.__dict__.get("forward")
        inner = self.module.forward
        self.module.forward = wraps(inner)(wrapper(inner))  # type: ignore[method-assign]
        self._wrapped = True

    def restore(self) -> None:
        if not self._wrapped:
            return
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before  # type: ignore[method-assign]
        self._wrapped = False
