"""Which layers each pipeline rank of a run has, what they cost, and the traces of a model.

Input: a valid `Config`. Output: the `LayerPlan` that ``forebay plan`` prints. `Traces` keeps the traces of one plan
or search; the model is built on the meta device and only its shapes are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.config import Config, Model, check_world
from forebay.errors import UsageError, first_line
from forebay.estimate.state import WeightShapes, weights_of
from forebay.estimate.trace import base_path, trace_model
from forebay.estimate.types import ModelTrace, Shape
from forebay.pipeline.costs import Costs, costs_of, partition_of, pipeline_shape, priced
from forebay.pipeline.partition import Partition, even_partition, in_flight
from forebay.pipeline.schedule import Action, make_plan
from forebay.policy import format_bytes
from forebay.train import hf_io
from forebay.train.data import load_tokenizer

if TYPE_CHECKING:
    from rich.table import Table


# What a plan knows of a model, and its traces, each made once for as long as a question is asked.
#
# In: a `Config` and the Hugging Face configuration it declares. Out: a `Known`: shapes of weights, module paths, attention, and
# the trace of any `Shape`. A `Traces` lives as long as one plan or one search: many meshes and sizes of one model share most of
# what is traced, and the trace is most of what a plan takes. A trace uses its model up, so the model is built again for the
# next one, on the meta device.


@dataclass(frozen=True)
class Known:
    """Of a model: shapes of its parameters, paths of its modules, path of its layers, and the attention that is counted."""

    weights: WeightShapes
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
        """What `make`, which is `forebay.pipeline.costs.costs_of`, says of `sharing` processes."""
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


# Which layers each pipeline rank of a run has, and what that costs it; without a GPU, weights or other processes.
#
# In: a valid `Config`. Out: a `Partition`, or the `LayerPlan` that ``forebay plan`` prints. The model is built on the meta
# device: its shapes are all that is read.


@dataclass(frozen=True)
class LayerPlan:
    """What ``forebay plan`` shows.

    Attributes:
        schedule: of the pipeline.
        microbatches: that a pipeline runs in a step.
        tokens: of a microbatch.
        partition: as the configuration asks for it, with time (seconds on an H200) and memory (bytes) by rank.
        even: the same number of layers on every stage, with time and memory.
        in_flight: by stage, microbatches held at most.
    """

    schedule: str
    microbatches: int
    tokens: int
    partition: Partition
    even: Partition
    in_flight: tuple[int, ...]

    def rows(self) -> list[dict[str, Any]]:
        """By pipeline rank: its stages with their layers and microbatches in flight, share of time, and bytes."""
        p, last = self.partition, len(self.partition.layers) - 1
        assert p.time is not None and p.memory is not None
        return [
            {
                "rank": rank,
                "stages": [
                    {
                        "stage": stage,
                        "layers": list(p.layers[stage]),
                        "embedding": stage == 0,
                        "head": stage == last,
                        "in_flight": self.in_flight[stage],
                    }
                    for stage in p.stages(rank)
                ],
                "time_share": time / sum(p.time),
                "activation_bytes": round(p.memory[rank]),
            }
            for rank, time in enumerate(p.time)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "tokens_per_microbatch": self.tokens,
            "partition": list(self.partition.counts),
            "balance": self.partition.balance,
            "even_balance": self.even.balance,
            "ranks": self.rows(),
        }

    def table(self) -> Table:
        """For a terminal of 80 columns: a line a stage."""
        from rich.table import Table

        table = Table(
            title=f"{self.schedule}, {self.microbatches} microbatches of {self.tokens} tokens",
            caption=self._caption(),
            caption_justify="left",
        )
        for name in ("rank", "stage", "layers", "in flight", "time", "activations"):
            table.add_column(name, justify="left" if name == "layers" else "right")
        for row in self.rows():
            stages = row["stages"]
            table.add_row(
                str(row["rank"]),
                "\n".join(str(s["stage"]) for s in stages),
                "\n".join(_named(s) for s in stages),
                "\n".join(str(s["in_flight"]) for s in stages),
                f"{100 * row['time_share']:.1f} %",
                format_bytes(row["activation_bytes"]),
            )
        return table

    def _caption(self) -> str:
        return (
            f"Slowest rank over the mean: {self.partition.balance:.3f}; with layers split evenly {self.even.balance:.3f}. "
            "Time is estimated for an H200. Activations are an estimate in bfloat16, all of them kept."
        )


def _named(stage: dict[str, Any]) -> str:
    layers = stage["layers"]
    numbers = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    return "embedding + " * stage["embedding"] + numbers + " + head" * stage["head"]


def plan_layers(config: Config, world: int = 0, traces: Traces | None = None) -> LayerPlan:
    """The plan of a run on `world` processes; 0 is as few as `config` can run on: ``parallel.pp`` x ``parallel.ep``.

    Args:
        traces: of other runs of the same question.

    Raises:
        UsageError: what `check_world`, `forebay.train.hf_io.configuration` and `partition_of` raise.
    """
    world = world or config.parallel.pp * config.parallel.ep
    check_world(config, world)
    declared = hf_io.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)
    sharing = world // config.parallel.pp
    costs = (traces or Traces()).costs(config, declared, sharing, costs_of)
    asked = partition_of(config, declared, sharing, costs)
    schedule, pp, chunks, microbatches = pipeline_shape(config, sharing)
    even = even_partition(len(costs.layers), schedule, pp, chunks)
    return LayerPlan(
        schedule if pp > 1 else "no pipeline",
        microbatches,
        config.microbatch(sharing) * config.train.sequence,
        asked,
        priced(even, costs, schedule, microbatches),
        tuple(in_flight(schedule, s, pp, microbatches, chunks) for s in range(len(asked.layers))),
    )
