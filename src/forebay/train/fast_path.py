"""Finds the facts from which `forebay.config.fast_path` chooses: a run asks its machine, a plan assumes them.

Input: a `Config`, and where its processes are. Output: the `FastPath`, the same in a run and in its plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from forebay.config import Config, Facts, FastPath, check_world, is_open, resolve, shares_weights, why_called
from forebay.config.checks import check
from forebay.config.sections import AUTO
from forebay.errors import UsageError
from forebay.models.families import UnknownLayerError, called_paths, decoder_layers
from forebay.moe.backends import peers_are_reachable, symmetric_takes, topology_of
from forebay.policy import PolicyError, container_of
from forebay.policy import resolve as assign
from forebay.train.distributed import Mesh
from forebay.train.hf_io import chosen_attention, declared_by, skeleton
from forebay.train.parallel import experts_in
from forebay.train.weights_in_place import is_split


@dataclass(frozen=True)
class Outline:
    """A model before it is built.

    Attributes:
        weights: elements of each weight, and whether it belongs to experts; of tied ones, once.
        paths: of the modules that can be regions.
        sublayers: paths of the sublayers of its decoder layers.
    """

    weights: Sequence[tuple[int, bool]]
    paths: Sequence[str]
    sublayers: Sequence[str]


def fast_path_of(config: Config, mesh: Mesh) -> FastPath:
    """Give the keys that are "auto" their values for a run on these processes. Collective.

    Raises:
        UsageError: the model's configuration is wrong.
    """

    def nearness() -> tuple[bool, bool]:
        reaches = mesh.expert_group is None or mesh.all(peers_are_reachable(mesh.expert_group))
        return reaches, topology_of(dist.group.WORLD).count == 1  # type: ignore[arg-type]

    declared = partial(declared_by, config)
    return choose_path(config, mesh.device.type == "cuda", mesh.size, nearness, declared, _outline)


def choose_path(
    config: Config,
    gpu: bool,
    processes: int,
    nearness: Callable[[], tuple[bool, bool]],
    declared: Callable[[], Any],
    outline: Callable[[Config, Any], Outline],
) -> FastPath:
    """Give the keys that are "auto" their values.

    Args:
        gpu: whether the processes compute on GPUs.
        nearness: returns `Facts.reaches`, but for rows, and `Facts.one_node`. Called, by all processes, if that decides.
        declared: returns the Hugging Face configuration of the run's model.
        outline: returns the outline of a run's model, from the run's configuration and that one. Called if that decides.

    Raises:
        UsageError: the model's configuration is wrong.
    """
    if config.model.attention == AUTO:
        attention = chosen_attention(config, declared(), gpu)
        config = replace(config, model=replace(config.model, attention=attention))
    p, m = config.parallel, config.model
    if not (gpu and is_open(config)):
        return resolve(config, Facts(gpu, processes, ""))
    model, is_local = declared(), p.ep * p.pp == 1
    # Else the given value of memory.graph decides alone, and a skeleton of the model would be made for nothing.
    decides = config.memory.graph == AUTO or (config.memory.graph is False and not is_local)
    gathers = decides and p.pp == 1 and (m.is_mixed or shares_weights(config, processes))
    sketch = outline(config, model) if gathers or (decides and isinstance(config.memory.policy, dict)) else None
    text = model.get_text_config()
    takes_rows = p.ep == 1 or symmetric_takes(text.hidden_size, getattr(torch, m.computed_in))
    reaches, one_node = nearness() if not is_local or (decides and processes > 1) else (True, True)
    facts = Facts(
        gpu,
        processes,
        str(model.model_type),
        reaches=reaches and takes_rows,
        one_node=one_node,
        takes_rows=takes_rows,
        gathered=bytes_of_graph(config, processes, sketch.weights) if gathers and sketch else 0,
        layers=getattr(text, "num_hidden_layers", 0),
        jitters=bool(getattr(text, "router_jitter_noise", 0)),
        container=_container(config.memory.policy, sketch) if sketch else None,
    )
    path = resolve(config, facts)
    return path if not path.advises_graph or _takes_graph(config, facts, experts_in(model)) else path.without_advice()


def _takes_graph(config: Config, facts: Facts, experts: int) -> bool:
    """Whether a run with `memory.graph = true` starts and captures its steps, as far as facts tell. An obstacle is the first of
    several, and others may be in the way of that as well."""
    captured = replace(config, memory=replace(config.memory, graph=True))
    try:
        check(captured)
        check_world(captured, facts.processes)
    except UsageError:
        return False
    dispatches = config.parallel.ep == 1 or facts.reaches  # by the symmetric dispatcher, which alone runs in a graph
    return dispatches and facts.container is None and not why_called(captured, facts.gpu, experts)


def _outline(config: Config, declared: Any) -> Outline:
    model = skeleton(config.model, declared)
    try:
        sublayers = [path for layer in decoder_layers(model) for path in (layer.attention_path, layer.block_path)]
    except UnknownLayerError:
        sublayers = []
    weights = [(p.numel(), ".experts." in name) for name, p in model.named_parameters()]
    return Outline(weights, called_paths(model), sublayers)


def bytes_of_graph(config: Config, processes: int, weights: Iterable[tuple[int, bool]]) -> int:
    """Bytes that each of `processes` without pipelines holds more in a graph than in a called step, as `Facts.gathered`.

    Args:
        weights: elements of each weight, and whether it belongs to experts.
    """
    ep, m = config.parallel.ep, config.model
    dtype, computes = getattr(torch, m.dtype), getattr(torch, m.computed_in)
    if ep > 1:  # called steps gather other weights once as well
        shared = processes > ep * config.parallel.replicate
        return sum(n for n, is_expert in weights if is_expert) // ep * computes.itemsize if shared else 0
    if not shares_weights(config, processes):  # each has all weights, and all gradients in any case
        return sum(n for n, _ in weights if not is_split(n, dtype, computes)) * computes.itemsize
    # With several microbatches a called step holds whole gradients as well: FSDP2 reduces them after the last one.
    sums = 4 if config.parallel.gradients == "float32" else computes.itemsize
    whole = computes.itemsize + (sums if config.microbatches(processes) < 2 else 0)
    return sum(n for n, _ in weights) * whole


def _container(policy: str | Mapping[str, str], sketch: Outline) -> str | None:
    """The first module that a policy places and that contains sublayers."""
    if isinstance(policy, str):
        return None
    experts = [path for path in sketch.paths if path.endswith(".experts")]
    try:
        claims = assign(policy, sketch.paths, experts=experts, everything=sketch.sublayers)
    except PolicyError:
        return None  # `forebay.manage` raises it
    return container_of({claim.path: claim.placement for claim in claims}, sketch.sublayers)
