"""Files that a run writes for its report (`forebay report RUN`), beside its metrics.

Input: a `Trainer`. Output, in the run's folder: ``result.json``, what each pipeline rank held and where its saved bytes
waited; ``profile.json`` (with `log.profile`), what a forward pass saves; ``pipeline.json`` and ``pipeline.png`` (with
`log.timeline`), what each pipeline rank ran in one step. They describe the first process of each stage, whose shards are
the largest. All processes call `watch_step`, `held_by_rank` and `profile_forward`; the main one writes. Nothing is kept.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forebay.errors import RunError, UsageError
from forebay.memory.step import StepReport
from forebay.memory.storage import local
from forebay.pipeline.activity import ActionRecord, ActionRecorder, bubble, draw, trace_json
from forebay.train.distributed import Mesh
from forebay.train.durable import replace_text
from forebay.train.pipeline_profile import profile_ranks
from forebay.train.trainer import Trainer

T = TypeVar("T")
RESULT, PROFILE = "result.json", "profile.json"


def watch_step(trainer: Trainer, step: Callable[[], T]) -> tuple[T, list[ActionRecord]]:
    """The result of `step()`, and what the ranks of the first pipeline ran in it; no records on other pipelines.

    The step is not replayed from a CUDA graph on any process, since the host has to observe each action.

    Raises:
        UsageError: the trainer has no pipeline.
    """
    mesh, engine = trainer.mesh, trainer.pipeline
    if engine is None:
        raise UsageError("parallel.pp is 1: there is no pipeline whose timeline could be shown")
    if mesh.batch.rank:
        with engine.eager():
            return step(), []
    dist.barrier(mesh.pipeline)  # the clocks of all ranks start together
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    recorder = ActionRecorder(mesh.pp_rank, trainer.device)
    with engine.eager(), engine.watched(recorder):
        result = step()
    return result, [record for records in _all_ranks(mesh, recorder.records()) for record in records]


def write_timeline(records: list[ActionRecord], folder: Path, title: str) -> str:
    """Write ``pipeline.json`` (a Perfetto trace) and, if matplotlib is installed, ``pipeline.png``.

    Returns:
        The line that says so.

    Raises:
        RunError: the files cannot be written.
        ValueError: there are no records.
    """
    trace, picture, missing = folder / "pipeline.json", folder / "pipeline.png", ""
    try:
        replace_text(trace, trace_json(records))
        try:
            draw(records, picture, title)
        except UsageError as error:
            missing = f"; {error}"
    except OSError as error:
        raise RunError(
            f"the timeline cannot be written into {folder}: {error.strerror}; leave log.timeline out"
        ) from error
    files = f"{trace}" if missing else f"{picture}, {trace}"
    idle = ", ".join(f"{share:.1%} of rank {rank}" for rank, share in bubble(records).items())
    return f"timeline of {title}: {files}; idle {idle}{missing}"


def machine(mesh: Mesh) -> dict[str, Any]:
    """Number of processes, and name and memory of one device; the memory of a CPU is not known."""
    if mesh.device.type == "cuda":
        found = torch.cuda.get_device_properties(mesh.device)
        return {"processes": mesh.size, "device": found.name, "device_bytes": found.total_memory}
    return {"processes": mesh.size, "device": "CPU", "device_bytes": None}


def held_by_rank(trainer: Trainer, last: StepReport) -> list[dict[str, Any]]:
    """By rank of this process's pipeline: bytes of parameters and optimizer states, placements, saved and copied bytes.

    Args:
        last: the manager's report of the last step's backward.
    """
    states = trainer.optimizer.state.values()
    own = {
        "rank": trainer.mesh.pp_rank,
        "parameter_bytes": sum(_local_bytes(p) for p in trainer.model.parameters()),
        "optimizer_bytes": sum(_local_bytes(t) for s in states for t in s.values() if isinstance(t, torch.Tensor)),
        "placements": dict(trainer.memory.placements),
        "saved_bytes": dict(last.saved_bytes_by_placement),
        "moved_bytes": last.moved_bytes,
        "d2h_gbps": last.d2h_gbps,
        "h2d_gbps": last.h2d_gbps,
        "wait_ms": last.wait_ms,
    }
    return _all_ranks(trainer.mesh, own)


def profile_forward(trainer: Trainer) -> str:
    """What a forward pass saves without placements, or each pipeline rank in a step; JSON as of ``forebay profile --json``."""
    if trainer.pipeline is None:
        return trainer.memory.profile(trainer.forward).to_json()
    with trainer.pipeline.eager():  # a replayed CUDA graph runs no hooks
        return json.dumps([found.as_dict() for found in profile_ranks(trainer)], indent=1)


def write_result(path: Path, text: str) -> None:
    """Write a file of the run.

    Raises:
        RunError: it cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; the run itself is done") from error


def _all_ranks(mesh: Mesh, own: Any) -> list[Any]:
    """The value of each rank of this process's pipeline."""
    if mesh.pipeline is None:
        return [own]
    found: list[Any] = [None] * mesh.pp
    dist.all_gather_object(found, own, group=mesh.pipeline)
    return found


def _local_bytes(tensor: torch.Tensor) -> int:
    own = local(tensor)
    return own.numel() * own.element_size()
