"""The facts of a run's processes that its fast path depends on; see `forebay.config.fast_path`."""

import torch

from forebay.config import Config, Facts, FastPath, is_open, resolve
from forebay.moe.backends import symmetric_reaches
from forebay.train import hf_io
from forebay.train.distributed import Mesh
from forebay.train.tokenizer import load_tokenizer
from forebay.train.world import processes_of_node


def fast_path_of(config: Config, mesh: Mesh) -> FastPath:
    """Give the keys that are "auto" their values for a run on these processes. Collective.

    Raises:
        UsageError: the model's configuration is wrong.
    """
    gpu = mesh.device.type == "cuda"
    if not (gpu and is_open(config) and mesh.ep * mesh.pp > 1):
        return resolve(config, Facts(gpu, mesh.size, "", False))
    declared = hf_io.configuration(config.model, load_tokenizer(config.data.tokenizer).vocabulary)
    dtype = getattr(torch, config.model.compute or config.model.dtype)
    group, hidden = mesh.expert_group, declared.get_text_config().hidden_size
    reaches = processes_of_node() >= mesh.size if group is None else symmetric_reaches(group, hidden, dtype)
    return resolve(config, Facts(gpu, mesh.size, str(declared.model_type), mesh.all(reaches)))
