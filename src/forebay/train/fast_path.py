"""The fast path of a run and of its plan: one decision, of facts that a run finds and a plan assumes.

Input: a `Config`, and where its processes are. Output: the `FastPath` that `forebay.config.fast_path` chooses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from forebay.config import Config, Facts, FastPath, is_open, resolve
from forebay.config.sections import AUTO
from forebay.moe.backends import peers_are_reachable, symmetric_takes, topology_of
from forebay.train.distributed import Mesh, needs_group
from forebay.train.hf_io import declared_by, elements_of


def fast_path_of(config: Config, mesh: Mesh) -> FastPath:
    """Give the keys that are "auto" their values for a run on these processes. Collective.

    Raises:
        UsageError: the model's configuration is wrong.
    """

    def are_near() -> bool:
        if mesh.expert_group is None:
            return topology_of(dist.group.WORLD).count == 1  # type: ignore[arg-type]
        return mesh.all(peers_are_reachable(mesh.expert_group))

    declared, elements = partial(declared_by, config), partial(elements_of, config.model)
    return choose_path(config, mesh.device.type == "cuda", mesh.size, are_near, declared, elements)


def choose_path(
    config: Config,
    gpu: bool,
    processes: int,
    are_near: Callable[[], bool],
    declared: Callable[[], Any],
    elements: Callable[[Any], int],
) -> FastPath:
    """Give the keys that are "auto" their values.

    Args:
        gpu: whether the processes compute on GPUs.
        are_near: whether the GPUs of each expert group read each other's memory; without expert groups, whether all processes
            are on one node. Called, by all processes, if that decides.
        declared: returns the Hugging Face configuration of the run's model.
        elements: returns the number of parameters of a model with that configuration.

    Raises:
        UsageError: the model's configuration is wrong.
    """
    p, m = config.parallel, config.model
    if not (gpu and is_open(config)):
        return resolve(config, Facts(gpu, processes, "", False))
    model = declared()
    if p.ep * p.pp == 1:
        itself = processes > 1 or config.memory.graph != AUTO or not needs_group(config)
        gathered = 0 if itself else elements(model) * getattr(torch, m.compute).itemsize
        return resolve(config, Facts(gpu, processes, str(model.model_type), True, gathered=gathered))
    hidden = model.get_text_config().hidden_size
    takes_rows = p.ep == 1 or symmetric_takes(hidden, getattr(torch, m.compute or m.dtype))
    return resolve(config, Facts(gpu, processes, str(model.model_type), takes_rows and are_near(), takes_rows))
