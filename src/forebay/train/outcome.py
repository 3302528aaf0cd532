"""What a run leaves of itself for its report (`forebay report RUN`), beside its metrics.

In: a `Trainer`. Out: plain figures, and the two files that hold them, in the run's folder:

    result.json     at the end: what each pipeline rank held and where its saved bytes waited, of the process that is the
                    first of its stage, whose shards are the largest
    profile.json    with `log.profile`, at the end: what a forward pass saves; the same text as ``forebay profile --json``

Nothing here is kept. Of several processes all call `held_by_rank` and `profile`; the main one calls `write`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forebay.report.saved import profile_ranks
from forebay.saved.identify import local
from forebay.saved.manager import StepReport
from forebay.train.durable import replace_text
from forebay.train.errors import RunError
from forebay.train.mesh import Mesh
from forebay.train.trainer import Trainer

RESULT, PROFILE = "result.json", "profile.json"


def machine(mesh: Mesh) -> dict[str, Any]:
    """What the run is on: its processes, and the name and bytes of one device; a CPU's bytes are not known here."""
    if mesh.device.type == "cuda":
        found = torch.cuda.get_device_properties(mesh.device)
        return {"processes": mesh.size, "device": found.name, "device_bytes": found.total_memory}
    return {"processes": mesh.size, "device": "CPU", "device_bytes": None}


def held_by_rank(trainer: Trainer, last: StepReport) -> list[dict[str, Any]]:
    """By rank of this process's pipeline: bytes of parameters and optimizer state, placements, and what became of saved bytes.

    Args:
        last: the manager's report of the last step's backward.
    """
    states = trainer.optimizer.state.values()
    own = {
        "rank": trainer.mesh.pp_rank,
        "parameter_bytes": sum(_bytes(p) for p in trainer.model.parameters()),
        "optimizer_bytes": sum(_bytes(t) for s in states for t in s.values() if isinstance(t, torch.Tensor)),
        "placements": dict(trainer.memory.placements),
        "saved_bytes": dict(last.saved_bytes_by_placement),
        "moved_bytes": last.moved_bytes,
        "d2h_gbps": last.d2h_gbps,
        "h2d_gbps": last.h2d_gbps,
        "wait_ms": last.wait_ms,
    }
    if trainer.mesh.pipeline is None:
        return [own]
    found: list[Any] = [None] * trainer.mesh.pp
    dist.all_gather_object(found, own, group=trainer.mesh.pipeline)
    return found


def profile(trainer: Trainer) -> str:
    """What a forward pass saves with the placements off, or each rank of a pipeline in a step, as ``forebay profile --json``."""
    if trainer.pipeline is None:
        return trainer.memory.profile(trainer.forward).to_json()
    with trainer.pipeline.called():  # a step that is replayed from a graph shows nothing
        return json.dumps([found.as_dict() for found in profile_ranks(trainer)], indent=1)


def write(path: Path, text: str) -> None:
    """Write a file of the run.

    Raises:
        RunError: it cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; the run itself is done") from error


def _bytes(tensor: torch.Tensor) -> int:
    """Of this process's part."""
    own = local(tensor)
    return own.numel() * own.element_size()
