"""Whether a step's calls save more than those that its plan was made for."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from forebay.memory.autotune import Autotuner
from forebay.memory.step import RegionCall
from forebay.memory.timeline import Key


class CallGrowth:
    """Records the sizes of calls in a measured step, and tells the tuner of larger ones under a plan.

    Args:
        tuner: which makes the plans.
        budget: see `forebay.memory.hooks.Manager`.
    """

    def __init__(self, tuner: Autotuner, budget: int | None):
        self._tuner, self._budget = tuner, budget
        self._saved: dict[Key, int] = {}
        self._inputs: dict[Key, int] = {}  # bytes of hidden states
        self._trained = 0  # most trained weights so far

    def clear(self) -> None:
        """A step is measured again."""
        self._saved.clear()
        self._inputs.clear()
        self._tuner.length = 0

    def record(self, call: RegionCall, args: Any, kwargs: Any) -> None:
        """Record a call of a measured step after its forward."""
        self._saved[call.key] = sum(call.items)
        self._inputs[call.key] = length = _hidden_bytes(args, kwargs)
        self._tuner.length = max(self._tuner.length, length)

    def saved_bytes(self, key: Key) -> int:
        """Bytes that a call saved when it was measured; 0 if it was not."""
        return self._saved.get(key, 0)

    def count_trained(self, model: nn.Module) -> None:
        """A plan for fewer trained weights is outgrown: calls save more, and those of frozen layers were no calls of a step."""
        if self._budget is None:
            return
        tuner, trained = self._tuner, sum(weight.requires_grad for weight in model.parameters())
        # Adapters may take turns: only more than ever counts.
        tuner.outgrown = tuner.outgrown or (tuner.plan is not None and trained > self._trained)
        self._trained = max(self._trained, trained)

    def compare_inputs(self, call: RegionCall, args: Any, kwargs: Any) -> None:
        """Tell the tuner of a longer batch under a plan that offloads nothing: its calls run without hooks, so only their inputs
        tell. It holds as long as its peak stays within the budget."""
        plan = self._tuner.plan  # once: another thread may drop it
        if self._budget is not None and plan is not None and not plan.offload:
            growth = self._growth(call, args, kwargs)
            if plan.peak_bytes * growth > self._budget:
                self._tuner.call_grew(growth)

    def compare_items(self, call: RegionCall, args: Any, kwargs: Any) -> None:
        """Tell the tuner if the call saved more than was measured."""
        tuner = self._tuner
        measured = tuner.lookup.items.get(call.key, ())
        if tuple(call.items) == measured:
            return
        growth = self._growth(call, args, kwargs)
        tuner.call_grew(growth)
        if len(call.items) > len(measured):  # a longer batch has fewer items below the size floor
            exceeds = growth <= 1.0
        else:
            most = tuner.allowed_growth
            exceeds = any(then and now > most * then for now, then in zip(call.items, measured, strict=False))
        tuner.outgrown = tuner.outgrown or exceeds

    def _growth(self, call: RegionCall, args: Any, kwargs: Any) -> float:
        """How many times the measured bytes a call's inputs have: a longer batch. 1 if that is not known."""
        then = self._inputs.get(call.key)
        return _hidden_bytes(args, kwargs) / then if then else 1.0


def _hidden_bytes(args: Any, kwargs: Any) -> int:
    """Bytes of a call's hidden states. Not of masks, which come and go with padding, and of rotary tables."""
    tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad)
    return sum(t.nbytes for t in tensors if not isinstance(t, nn.Parameter))
