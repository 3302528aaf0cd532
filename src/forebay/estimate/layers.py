"""Which layers each pipeline rank of a run has, what they cost it, and what expert groups over several nodes cost.

Input: a valid `Config`. Output: the `LayerPlan` that ``forebay plan`` prints, and whose partition ``forebay train`` takes; and
the sentence of `slow_link` for the person who starts the run. What layers cost is the trace of a microbatch; no device, weights
or other processes are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from rich.table import Table

from forebay.config import Config, FastPath, check_experts, check_world
from forebay.errors import UsageError
from forebay.estimate.device import DEFAULT, DeviceProfile
from forebay.estimate.device import load as load_device
from forebay.estimate.layer_time import Clock, KernelTime, LayerTimer
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import DTYPE_BYTES, SAME_HOST, Sharing
from forebay.estimate.step_time import Beside, Elements, ShardingTime
from forebay.estimate.trace_cache import TraceCache
from forebay.estimate.types import GPU_BLOCK, PartTrace, Shape, StageLayers
from forebay.pipeline.partition import (
    LayerCost,
    ModelCosts,
    Partition,
    StageLayer,
    even_partition,
    in_flight,
    listed,
    partition_of,
    pipeline_shape,
    with_costs,
)
from forebay.policy import format_bytes
from forebay.train import hf_io
from forebay.train.fast_path import Outline, choose_path
from forebay.train.parallel import experts_in


@dataclass(frozen=True)
class LayerPlan:
    """The partition of a model's layers.

    Attributes:
        microbatches, tokens: of a step, and of a microbatch.
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
        layers, last = self.partition.layers, len(self.partition.layers) - 1
        return {n: StageLayers(layers[n], n == 0, n == last) for n in self.partition.stages(rank)}

    def rows(self) -> list[dict[str, Any]]:
        """By pipeline rank: its stages with their layers and microbatches in flight, share of time, and bytes."""
        p = self.partition
        assert p.time is not None and p.memory is not None
        return [
            {
                "rank": rank,
                "stages": [
                    {
                        "stage": number,
                        "layers": [layer.number for layer in stage.layers if layer.is_whole],
                        "sublayers": [str(layer) for layer in stage.layers if not layer.is_whole],
                        "embedding": stage.embedding,
                        "head": stage.head,
                        "in_flight": self.in_flight[number],
                    }
                    for number, stage in self.stages(rank).items()
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
        table = Table(
            title=f"{self.schedule}, {self.microbatches} microbatches of {self.tokens} tokens",
            caption=f"Slowest rank over the mean: {self.partition.balance:.3f}; "
            f"with layers split evenly {self.even.balance:.3f}. "
            "Time is estimated for an H200. Activations are those of a run that keeps all.",
            caption_justify="left",
        )
        for name in ("rank", "stage", "layers", "in flight", "time", "activations"):
            table.add_column(name, justify="left" if name == "layers" else "right")
        for row in self.rows():
            stages = row["stages"]
            table.add_row(
                str(row["rank"]),
                "\n".join(str(s["stage"]) for s in stages),
                "\n".join(self.named(s["stage"]) for s in stages),
                "\n".join(str(s["in_flight"]) for s in stages),
                f"{100 * row['time_share']:.1f} %",
                format_bytes(row["activation_bytes"]),
            )
        return table

    def named(self, stage: int) -> str:
        """The parts of the model on a stage, such as "embedding + 0-3"."""
        last = len(self.partition.layers) - 1
        return "embedding + " * (stage == 0) + listed(self.partition.layers[stage]) + " + head" * (stage == last)


def fast_path_of(config: Config, world: int, traces: TraceCache | None = None) -> FastPath:
    """The fast path of a run on `world` processes of hosts of 8 GPUs. Raises UsageError if the model's configuration is wrong."""
    near = config.parallel.ep <= SAME_HOST, world <= SAME_HOST
    traces = traces or TraceCache()

    def outline(config: Config, _: Any) -> Outline:
        facts = traces.facts(config)
        return Outline(facts.weights.sizes, facts.paths, facts.sublayers)

    declared = partial(traces.declared, config)
    return choose_path(config, config.device.type != "cpu", world, lambda: near, declared, outline)


def plan_layers(config: Config, world: int = 0, traces: TraceCache | None = None) -> LayerPlan:
    """The plan of a run on `world` processes; 0 means as few as `config` can run on: `Config.processes`.

    Raises:
        UsageError: what `check_world`, `forebay.train.hf_io.configuration`, `TraceCache.trace` and `partition_of` raise.
    """
    world, traces = world or config.processes, traces or TraceCache()
    check_world(config, world)
    config = fast_path_of(config, world, traces).config
    check_experts(config.parallel.ep, experts_in(traces.declared(config)))
    sharing = world // config.parallel.pp
    costs = layer_costs(config, sharing_of(config, world), traces)
    asked = partition_of(config, len(costs.layers), sharing, costs)
    schedule, pp, chunks, microbatches = pipeline_shape(config, sharing)
    even = even_partition(len(costs.layers), schedule, pp, chunks)
    return LayerPlan(
        schedule if pp > 1 else "no pipeline",
        microbatches,
        config.microbatch(sharing) * config.train.sequence,
        asked,
        with_costs(even, costs, schedule, microbatches),
        tuple(in_flight(schedule, s, pp, microbatches, chunks) for s in range(len(asked.layers))),
    )


def layer_costs(config: Config, sharing: Sharing, traces: TraceCache) -> ModelCosts:
    """Seconds on an H200 and saved bytes of each part for one microbatch, if all are kept.

    Where all-to-alls run beside another microbatch, a layer takes the longer of computing and all-to-alls.
    """
    facts, declared = traces.facts(config), traces.declared(config)
    trace = traces.trace(config, shape_of(config, declared, sharing))
    device = load_device(DEFAULT)
    schedule, *_, microbatches = pipeline_shape(config, sharing.batch)
    timer = LayerTimer(Clock.of(device, config, EvenRouting.of(declared), sharing), config, trace)
    summed = ShardingTime(device, sharing, microbatches)

    def cost(layer: StageLayer) -> LayerCost:
        traced = trace.layers[layer.number]
        forward, backward = timer.layer(layer)
        beside = Beside(forward.computing, backward.computing, backward.computing)  # as of layers alike
        more = summed.layer(Elements.of(facts.weights.of(layer), sharing), beside)
        both = forward + backward + KernelTime(sum(more))
        hidden = schedule == "dualpipev"
        saved = sum(part.saved for _, part in traced.on(layer)) + (trace.balance if traced.is_moe and layer.mlp else 0)
        return LayerCost(max(both.computing, both.all_to_all) if hidden else both.alone, saved)

    def end(part: PartTrace) -> LayerCost:
        forward, backward = timer.clock.both_ways(part)
        return LayerCost(forward.alone + backward.alone, part.saved)

    first = {id(traced): number for number, traced in reversed(list(enumerate(trace.layers)))}  # of each kind
    alike, known = [first[id(traced)] for traced in trace.layers], cache(cost)
    return ModelCosts(
        tuple(known(StageLayer(number)) for number in alike),
        end(trace.embedding),
        end(trace.head),
        tuple(known(StageLayer(number, mlp=False)) for number in alike) if facts.weights.divisible else (),
    )


def shape_of(config: Config, declared: Any, sharing: Sharing, skew: float = 1.0) -> Shape:
    c, p = config, config.parallel
    return Shape(
        c.train.sequence,
        c.microbatch(sharing.batch),
        c.model.experts,
        c.model.loss,
        stages=c.cuts_at_dispatch,
        ep=p.ep,
        skew=skew,
        capacity_factor=c.step.capacity_factor if p.may_share else 0.0,
        compiled=c.memory.compile,
        flex=c.model.attention == "flex" and sharing.gpu,
        rounds=c.memory.precision == "fp8",
        balance=hf_io.balance_coefficient(declared) != 0,
        block=GPU_BLOCK if sharing.gpu else 1,
        gpu=sharing.gpu,
        deferred_weight_grads=sharing.engine,
    )


def sharing_of(config: Config, world: int) -> Sharing:
    p, m = config.parallel, config.model
    parameter, compute = DTYPE_BYTES[m.dtype], DTYPE_BYTES[m.computed_in]
    batch = world // p.pp
    several = config.microbatches(batch) > 1
    sharded = world > 1 or config.model.is_mixed
    return Sharing(
        batch // p.replicate,
        p.ep,
        p.pp,
        p.replicate,
        sharded=sharded,
        parameter=parameter,
        compute=compute,
        summed=4 if p.gradients == "float32" and sharded else compute,
        engine=config.has_engine,
        reshard=config.step.reshard,
        apart=sharded and config.experts_apart,
        sums=several and p.reduce == "step",
        gpu=config.device.type != "cpu",
        fused=config.optimizer.fused,
        random=not (m.path and m.weights == "load"),
    )


# --- expert groups over several nodes ------------------------------------------------------------------------------------

_TRANSFERS = 4  # dispatch, combine and their backwards


def slow_link(config: Config, world: int, per_node: int, device: DeviceProfile) -> str:
    """Says that expert groups are over several nodes, and what that costs; "" if none is, and for a model without experts.

    Expert groups are consecutive processes, and nodes have `per_node` consecutive ones each. Nothing is traced: the count is that
    of `forebay.moe.hierarchical` and, where nodes divide a group unevenly or `parallel.dispatch` asks for it, of
    `NcclDispatcher`, with even routing.
    """
    ep = config.parallel.ep
    if per_node >= world or per_node % ep == 0:
        return ""
    try:
        traces = TraceCache()
        declared = traces.declared(config)
        if not experts_in(declared):
            return ""  # the run itself says why it cannot start
        layers = traces.facts(config).weights.layers
        moe_layers = sum(any(weight.experts for weight in layer) for layer in layers) / config.parallel.pp
        sharing = world // config.parallel.pp
        rows = EvenRouting.of(declared).between_nodes(ep, per_node, config.parallel.dispatch)
        row = declared.get_text_config().hidden_size * DTYPE_BYTES[config.model.computed_in]
        count = _TRANSFERS * moe_layers * (config.train.batch * config.train.sequence / sharing) * rows * row
        rate = device.link("all_to_all", False, config.microbatch(sharing) * config.train.sequence * rows * row)
        cost = (
            f"each process sends {count / 1e9:.2f} GB a step over the network, about {count / rate:.3f} s at "
            f"{rate / 1e9:.1f} GB/s ({device.name}'s profile) where no computation hides it"
        )
    except UsageError:  # of a model that is not on this machine, or that plans do not know
        cost = "every layer's tokens cross the network, many times slower than links inside a node"
    return (
        f"parallel.ep = {ep} puts groups that share experts over several nodes of {per_node}: {cost}; "
        f"parallel.ep = {math.gcd(ep, per_node)} stays inside"
    )
