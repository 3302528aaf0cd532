"""Which layers each pipeline rank of a run has, and what they cost it.

Input: a valid `Config`. Output: the `LayerPlan` that ``forebay plan`` prints. The model is built on the meta device, and only
its shapes are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.config import Config, check_world
from forebay.estimate.trace_cache import TraceCache
from forebay.estimate.types import StageLayers
from forebay.pipeline.costs import partition_of, pipeline_shape, priced
from forebay.pipeline.partition import Partition, even_partition, in_flight
from forebay.policy import format_bytes
from forebay.train import hf_io
from forebay.train.data import load_tokenizer

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LayerPlan:
    """The partition of a model's layers.

    Attributes:
        schedule: of the pipeline.
        microbatches: of a step.
        tokens: of a microbatch.
        partition: as configured, with time (seconds on an H200) and memory (bytes) by rank.
        even: the same number of layers on every stage, with time and memory.
        in_flight: by stage, the most microbatches held.
    """

    schedule: str
    microbatches: int
    tokens: int
    partition: Partition
    even: Partition
    in_flight: tuple[int, ...]

    def stages(self, rank: int) -> dict[int, StageLayers]:
        """The stages of a pipeline rank."""
        layers, found, before = self.partition.layers, dict[int, StageLayers](), 0
        for number in self.partition.stages(rank):
            places = tuple(range(before, before + len(layers[number])))
            found[number] = StageLayers(layers[number], places, number == 0, number == len(layers) - 1)
            before += len(places)
        return found

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


def plan_layers(config: Config, world: int = 0, traces: TraceCache | None = None) -> LayerPlan:
    """The plan of a run on `world` processes; 0 means as few as `config` can run on: ``parallel.pp`` x ``parallel.ep``.

    Args:
        traces: to reuse, and to add to.

    Raises:
        UsageError: what `check_world`, `forebay.train.hf_io.configuration` and `partition_of` raise.
    """
    world = world or config.parallel.pp * config.parallel.ep
    check_world(config, world)
    declared = hf_io.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)
    sharing = world // config.parallel.pp
    costs = (traces or TraceCache()).costs(config, declared, sharing)
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
