"""One step of a run, watched: what each rank of the pipeline ran when, as a picture and a trace in a folder.

In: a `Trainer` on a pipeline, and a step. Out: `Ran` records of the pipeline that the main process is in, then two files:

    pipeline.png     see `forebay.report.pipeline.draw`; only where matplotlib is installed
    pipeline.json    for https://ui.perfetto.dev

Of the processes that share the batch, whose pipelines run the same plan, only the first one's is watched. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forebay.report.pipeline import Ran, bubble, draw, perfetto
from forebay.report.recorder import Recorder
from forebay.train.errors import RunError, UsageError
from forebay.train.trainer import Trainer

T = TypeVar("T")


def watch(trainer: Trainer, step: Callable[[], T]) -> tuple[T, list[Ran]]:
    """What `step()` returned, and what the ranks of the first pipeline ran in it; no records on processes of other pipelines.

    All processes call it. Clocks start together, behind a barrier. Who runs what when is the host's doing: the step is not
    replayed from a graph, on any process.

    Raises:
        UsageError: the trainer has no pipeline.
    """
    mesh, engine = trainer.mesh, trainer.pipeline
    if engine is None:
        raise UsageError("parallel.pp is 1: there is no pipeline whose timeline could be shown")
    if mesh.batch.rank:
        with engine.called():
            return step(), []
    dist.barrier(mesh.pipeline)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    recorder = Recorder(mesh.pp_rank, trainer.device)
    with engine.called(), engine.watched(recorder):
        result = step()
    found: list[Any] = [None] * mesh.pp
    dist.all_gather_object(found, recorder.records(), group=mesh.pipeline)
    return result, [record for ran in found for record in ran]


def write(records: list[Ran], folder: Path, title: str) -> str:
    """Write the trace and, if matplotlib is installed, the picture into `folder`; returns the line that says so.

    Raises:
        RunError: the files cannot be written.
        ValueError: no records.
    """
    trace, picture, missing = folder / "pipeline.json", folder / "pipeline.png", ""
    try:
        perfetto(records, trace)
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
