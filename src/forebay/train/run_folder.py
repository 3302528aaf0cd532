"""The folder of a run: which one it takes, and the files that it writes there for its report (`forebay report RUN`).

Input: a `Config` and what to resume. Output: a `Start`. A run never writes into the folder of another run: it takes the first of
NAME, NAME-2, NAME-3, ... that holds none (or, with "auto", that it was stopped in), and a `FolderLock` keeps out a second run
that starts at the same time. The files about a `Trainer` are ``result.json``, what each pipeline rank held and where its saved
bytes waited; ``profile.json`` (with `log.profile`), what a forward pass saves; ``pipeline.json`` (with `log.timeline`), what each
pipeline rank ran in one step. They describe the first process of each stage, whose shards are the largest. All processes call
`watch_step`, `held_by_rank` and `profile_forward`; the main one writes. Nothing is kept.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.memory.step import StepReport
from forebay.memory.storage import local
from forebay.pipeline.activity import ActionRecord, ActionRecorder, bubble, trace_json
from forebay.train import checkpoint, restore
from forebay.train.distributed import Mesh
from forebay.train.durable import LOCK, FolderLock, holder, make_folder, replace_text
from forebay.train.pipeline_profile import profile_ranks
from forebay.train.remote import RemoteFolder
from forebay.train.trainer import Trainer

T = TypeVar("T")
RUN, RESULT, PROFILE = "run.json", "result.json", "profile.json"
AUTO = "auto"


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder and, when resumed, the checkpoint.

    Attributes:
        is_auto: the command resumes what there is to resume, and starts otherwise.
        earlier: checkpoints to resume if `resumed` is damaged, newest first; with `is_auto` only.
    """

    folder: Path
    resumed: Path | None = None
    is_auto: bool = False
    earlier: tuple[Path, ...] = ()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def before(self) -> Path | None:
        """What `--resume` takes to go on as this run did, until it has written a checkpoint; None if it did not resume."""
        is_copy = self.resumed is not None and self.resumed.parent != self.checkpoints
        return self.resumed if is_copy or self.resumed is None else self.folder


def claim_start(config: Config, resume: str | None, lock: FolderLock, remote: RemoteFolder | None = None) -> Start:
    """Where a run begins, its folder locked until `lock` is released.

    Args:
        config: a new run takes the first free and unlocked one of `log.folder` = NAME, NAME-2, NAME-3, ...
        resume: None starts a new run. "auto" resumes the newest of those that have a checkpoint. If there is none it starts, in
            the folder of the last run if that has this configuration and did not come to its end. Else see `where_to_resume`; a
            checkpoint that lies in no run's folder begins a new run.
        remote: with "" and "auto", its newest checkpoint is downloaded if there is none here that was written later.

    Raises:
        UsageError: there is nothing to resume, or another process trains in that folder; with "auto" in any of them. A new run
            whose remote folder holds checkpoints.
        RunError: the folder cannot be written, or the remote one cannot be read.
    """
    if resume is None and remote is not None and remote.names():
        raise UsageError(
            f"checkpoint.remote = {remote.url!r} holds the checkpoints of a run; "
            "go on with it by --resume auto, or set checkpoint.remote to another folder"
        )
    start = _found(config, resume, remote is not None)
    if start is not None and start.resumed is not None and start.resumed.parent != start.checkpoints:
        start = replace(_claim_free(config, None, lock), resumed=start.resumed)  # a copy, outside of its run's folder
    elif start is not None:
        _lock_to_resume(start, lock)
    else:
        start = _claim_free(config, resume, lock)
    if resume in (AUTO, ""):
        start = _with_remote(config, start, resume == AUTO, remote)
    if resume == "" and start.resumed is None:
        raise _nothing_to_resume(config)
    return start


def _found(config: Config, resume: str | None, may_be_remote: bool) -> Start | None:
    """The checkpoint of this machine that is resumed; None for a new run, and if there is none where there need not be one."""
    if resume is None:
        return None
    if resume == AUTO:
        return _resumable(config)
    try:
        return where_to_resume(config, resume)
    except UsageError:
        if resume or not may_be_remote:
            raise
        return None


def _claim_free(config: Config, resume: str | None, lock: FolderLock) -> Start:
    """The first free folder of `log.folder`, locked."""
    if resume == AUTO:  # do not start beside a run that has no checkpoint yet: it is this one, in another job
        begun = list(takewhile(Path.is_dir, _numbered(config)))
        for folder in begun:
            _lock_to_resume(Start(folder), lock)
            if folder == begun[-1] and _was_stopped(folder, config):
                return Start(folder)
            lock.release()
    for folder in filter(_is_free, _numbered(config)):
        start = Start(folder)
        if _lock(start, lock):
            if _is_free(folder):
                return start
            lock.release()  # another run held it until now, and is done
    raise AssertionError("there is always another folder")


def _with_remote(config: Config, start: Start, is_auto: bool, remote: RemoteFolder | None) -> Start:
    """`start`, or what resumes the checkpoint that was downloaded to its folder because it is newer."""
    c = config.checkpoint
    checkpoints = checkpoint.Checkpoints(start.checkpoints, c.keep, c.keep_hours, remote)
    fetched = checkpoints.fetch()
    if fetched is None:
        return start
    others = [path for path in checkpoints.all() if path != fetched] if is_auto else []
    return Start(start.folder, fetched, is_auto, tuple(reversed(others)))


def where_to_resume(config: Config, resume: str) -> Start:
    """The checkpoint to resume: that of a run or checkpoint folder, or for "" of the newest of the numbered runs that has one.

    Raises:
        UsageError: there is nothing to resume.
    """
    if resume:
        path = Path(
            os.path.abspath(restore.find(Path(resume).expanduser()))
        )  # it may be given from within a run's folder
        return Start(path.parent.parent, path)
    found = _resumable(config)
    if found is None:
        raise _nothing_to_resume(config)
    return Start(found.folder, found.resumed)


def _nothing_to_resume(config: Config) -> UsageError:
    return UsageError(
        f"{Path(config.log.folder).expanduser()} holds no checkpoint to resume; "
        "start without --resume or with --resume auto, or name a run or checkpoint folder"
    )


def _resumable(config: Config) -> Start | None:
    """The checkpoint that "auto" resumes: the newest one of the newest of the numbered runs that has one."""
    newest: Path | None = None
    for folder in takewhile(Path.is_dir, _numbered(config)):
        newest = checkpoint.Checkpoints(folder / "checkpoints").latest() or newest
    if newest is None:
        return None
    others = [path for path in checkpoint.Checkpoints(newest.parent).all() if path != newest]
    return Start(newest.parent.parent, newest, is_auto=True, earlier=tuple(reversed(others)))


def unwritable(folder: Path, error: OSError) -> RunError:
    """The error for a run's folder that cannot be written."""
    return RunError(f"the run's folder {folder} cannot be written: {error.strerror}; set log.folder to another")


def _lock_to_resume(start: Start, lock: FolderLock) -> None:
    if not _lock(start, lock):
        raise UsageError(
            f"the run {start.folder} is going on in {holder(start.folder)}; wait for its end or stop it, then --resume it"
        )


def _lock(start: Start, lock: FolderLock) -> bool:
    try:
        make_folder(start.folder)
        return lock.take(start.folder)
    except OSError as error:
        raise unwritable(start.folder, error) from error


def _was_stopped(folder: Path, config: Config) -> bool:
    """Whether a run with this configuration began in the folder and was stopped."""
    try:
        begun = json.loads((folder / RUN).read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError):
        return False
    return begun == json.loads(json.dumps(config.to_dict())) and not (folder / RESULT).exists()


def _is_free(folder: Path) -> bool:
    """Whether no run has written into the folder. A lock file alone does not count: its run may be over."""
    return not folder.is_dir() or all(entry.name == LOCK for entry in folder.iterdir())


def _numbered(config: Config) -> Iterator[Path]:
    base = Path(config.log.folder).expanduser()
    return chain([base], (base.with_name(f"{base.name}-{number}") for number in count(2)))


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
        with trainer.eager():
            return step(), []
    dist.barrier(mesh.pipeline)  # the clocks of all ranks start together
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    recorder = ActionRecorder(mesh.pp_rank, trainer.device)
    with trainer.eager(), engine.watched(recorder):
        result = step()
    return result, [record for records in mesh.of_pipeline(recorder.records()) for record in records]


def write_timeline(records: list[ActionRecord], folder: Path, title: str) -> str:
    """Write ``pipeline.json``, a Perfetto trace, which `forebay report` draws; returns a line for the log.

    Raises:
        RunError: the file cannot be written.
        ValueError: there are no records.
    """
    trace = folder / "pipeline.json"
    try:
        replace_text(trace, trace_json(records))
    except OSError as error:
        raise RunError(
            f"the timeline cannot be written into {folder}: {error.strerror}; leave log.timeline out"
        ) from error
    idle = ", ".join(f"{share:.1%} of rank {rank}" for rank, share in bubble(records).items())
    return f"timeline of {title}: {trace}, which forebay report {folder} draws; idle {idle}"


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
        "parameter_bytes": sum(local(p).nbytes for p in trainer.model.parameters()),
        "optimizer_bytes": sum(local(t).nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor)),
        "placements": dict(trainer.memory.placements),
        "saved_bytes": dict(last.saved_bytes_by_placement),
        "moved_bytes": last.moved_bytes,
        "d2h_gbps": last.d2h_gbps,
        "h2d_gbps": last.h2d_gbps,
        "wait_ms": last.wait_ms,
    }
    return trainer.mesh.of_pipeline(own)


def profile_forward(trainer: Trainer) -> str:
    """The bytes saved by a forward pass without placements, or by each pipeline rank in a step, as the JSON text that
    ``forebay profile --json`` prints."""
    with trainer.eager():  # a replayed CUDA graph runs no hooks
        if trainer.pipeline is None:
            return trainer.memory.profile(trainer.forward).to_json()
        return json.dumps([found.as_dict() for found in profile_ranks(trainer)], indent=1)


def write_result(path: Path, text: str) -> None:
    """Write a file of the run; a RunError if it cannot be written."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; the run itself is done") from error
