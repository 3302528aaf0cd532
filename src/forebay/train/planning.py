"""Which layers each pipeline rank of a run has, and what that costs it; without a GPU, weights or other processes.

In: a valid `Config`. Out: a `Partition`, or the `LayerPlan` that ``forebay plan`` prints. The model is built on the meta
device: its shapes are all that is read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.models.costs import Costs, model_costs
from forebay.pipeline.partition import (
    Partition,
    even_partition,
    in_flight,
    of_counts,
    partition_layers,
    with_costs,
)
from forebay.policy import format_bytes
from forebay.train import hf
from forebay.train.config import Config, check_world
from forebay.train.data import load_tokenizer
from forebay.train.errors import UsageError, first_line
from forebay.train.traced import Traces

if TYPE_CHECKING:
    from rich.table import Table


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
        UsageError: what `check_world`, `forebay.train.hf.configuration` and `partition_of` raise.
    """
    world = world or config.parallel.pp * config.parallel.ep
    check_world(config, world)
    declared = hf.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)
    sharing = world // config.parallel.pp
    costs = (traces or Traces()).costs(config, declared, sharing, costs_of)
    asked = partition_of(config, declared, sharing, costs)
    schedule, pp, chunks, microbatches = _pipeline(config, sharing)
    even = even_partition(len(costs.layers), schedule, pp, chunks)
    return LayerPlan(
        schedule if pp > 1 else "no pipeline",
        microbatches,
        config.microbatch(sharing) * config.train.sequence,
        asked,
        _priced(even, costs, schedule, microbatches),
        tuple(in_flight(schedule, s, pp, microbatches, chunks) for s in range(len(asked.layers))),
    )


def partition_of(config: Config, declared: Any, sharing: int, costs: Costs | None = None) -> Partition:
    """Which layers each stage has, as ``parallel.partition`` says; the same on every process. With costs by rank.

    Args:
        declared: the Hugging Face configuration.
        sharing: processes that share the batch, those of one stage.
        costs: `costs_of` the same, where they are known already.

    Raises:
        UsageError: the model's layers cannot be cut so, or are of a family that Forebay does not know.
    """
    costs = costs_of(config, declared, sharing) if costs is None else costs
    schedule, pp, chunks, microbatches = _pipeline(config, sharing)
    asked = config.parallel.partition
    try:
        if asked == "auto":
            return partition_layers(
                costs.layers,
                schedule,
                pp,
                embedding=costs.embedding,
                head=costs.head,
                microbatches=microbatches,
                chunks=chunks,
            )
        if isinstance(asked, str) or pp == 1:
            chosen = even_partition(len(costs.layers), schedule, pp, chunks)
        else:
            chosen = of_counts(asked, len(costs.layers), schedule, pp, chunks)
    except ValueError as error:
        raise UsageError(f"parallel.partition = {asked!r}: {error}") from error
    return _priced(chosen, costs, schedule, microbatches)


def costs_of(config: Config, declared: Any, sharing: int) -> Costs:
    """What the layers of the model cost, for one microbatch of each of `sharing` processes.

    Raises:
        UsageError: a family that Forebay does not know.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Every family has eager attention, which needs no package; what it saves is counted by `model.attention`.
        # transformers writes that into the configuration: hence the copy.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(declared), attn_implementation="eager")
    try:
        return model_costs(
            model, config.train.sequence, config.microbatch(sharing), config.model.attention, config.parallel.ep
        )
    except ValueError as error:
        raise UsageError(f"the layers of this model cannot be planned: {first_line(error)}") from error


def _pipeline(config: Config, sharing: int) -> tuple[str, int, int, int]:
    """Schedule, ranks, chunks and microbatches; without a pipeline that is one stage, which runs one after the other."""
    p = config.parallel
    microbatches = config.train.batch // sharing // config.microbatch(sharing)
    return (p.schedule if p.pp > 1 else "1f1b"), p.pp, p.chunks, microbatches


def _priced(partition: Partition, costs: Costs, schedule: str, microbatches: int) -> Partition:
    return with_costs(
        partition,
        costs.layers,
        schedule,
        embedding=costs.embedding,
        head=costs.head,
        microbatches=microbatches,
    )
