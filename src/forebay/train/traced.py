"""What a plan knows of a model, and its traces, each made once for as long as a question is asked.

In: a `Config` and the Hugging Face configuration it declares. Out: a `Known`: shapes of weights, module paths, attention, and the
trace of any `Shape`. A `Traces` lives as long as one plan or one search: many meshes and sizes of one model share most of what is
traced, and the trace is most of what a plan takes. A trace uses its model up, so the model is built again for the next one, on
the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forebay.models.costs import Costs
from forebay.pipeline.schedule import Action, make_plan
from forebay.planner.figures import ModelTrace, Shape
from forebay.planner.state import Weights, weights_of
from forebay.planner.trace import base_path, trace_model
from forebay.train.config import Config, Model
from forebay.train.errors import UsageError, first_line


@dataclass(frozen=True)
class Known:
    """Of a model: shapes of its parameters, paths of its modules, path of its layers, and the attention that is counted."""

    weights: Weights
    paths: tuple[str, ...]
    prefix: str
    attention: str


class Traces:
    """See the module docstring."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._unused: dict[str, Any] = {}  # a model that nothing was traced on so far
        self._traces: dict[tuple[str, Shape], ModelTrace] = {}
        self._actions: dict[Any, tuple[tuple[Action, ...], ...]] = {}
        self._costs: dict[Any, Costs] = {}

    def known(self, section: Model, declared: Any) -> Known:
        """What a model has.

        Raises:
            UsageError: attention that the family has not.
        """
        key = _key(section, declared)
        if key not in self._known:
            model, attention = _skeleton(section, declared)
            paths = tuple(name for name, _ in model.named_modules())
            self._known[key] = Known(weights_of(model), paths, f"{base_path(model)}.layers", attention)
            self._unused[key] = model
        return self._known[key]

    def trace(self, section: Model, declared: Any, shape: Shape) -> ModelTrace:
        """The trace of one microbatch.

        Raises:
            UsageError: a model that cannot be traced.
        """
        key = _key(section, declared)
        if (key, shape) not in self._traces:
            model = self._unused.pop(key, None) or _skeleton(section, declared)[0]
            try:
                self._traces[key, shape] = trace_model(model, shape)
            except ValueError as error:
                raise UsageError(f"this model cannot be traced: {first_line(error)}") from error
        return self._traces[key, shape]

    def costs(self, config: Config, declared: Any, sharing: int, make: Callable[[Config, Any, int], Costs]) -> Costs:
        """What `make`, which is `forebay.train.planning.costs_of`, says of `sharing` processes."""
        sizes = config.train.sequence, config.microbatch(sharing), config.parallel.ep
        key = (_key(config.model, declared), *sizes)
        if key not in self._costs:
            self._costs[key] = make(config, declared, sharing)
        return self._costs[key]

    def actions(self, *schedule: Any) -> tuple[tuple[Action, ...], ...]:
        """What each rank does in a step; arguments are those of `make_plan`."""
        if schedule not in self._actions:
            self._actions[schedule] = make_plan(*schedule).actions
        return self._actions[schedule]


def _key(section: Model, declared: Any) -> str:
    return f"{section.attention} {section.compute or section.dtype} {declared.to_json_string(use_diff=False)}"


def _skeleton(section: Model, declared: Any) -> tuple[Any, str]:
    """The model on the meta device, in the dtype that is computed in, and the attention that it has."""
    from transformers import AutoModelForCausalLM

    asked = "sdpa" if section.attention.startswith("flash") else section.attention
    dtype = getattr(torch, section.compute or section.dtype)
    for attention in (asked, "eager"):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(declared), attn_implementation=attention, dtype=dtype
                ), attention
        except ValueError as error:
            if attention == "eager" or section.attention == "sdpa":
                raise UsageError(f"model.attention = {section.attention!r}: {first_line(error)}") from error
    raise AssertionError("a model has eager attention")
