"""A training run from its first to its last step: folders, checkpoints, signals and output.

Input: a `Config` and what to resume. Output: the folder of the run, with `run.json`, `metrics.jsonl`, checkpoints,
and on request `profile.json`, `pipeline.png` and `pipeline.json`. The main process chooses the folder, writes and
prints; all processes save their part of a checkpoint. Ctrl-C or SIGTERM ends the run after the current step, with a
checkpoint.
"""

from __future__ import annotations

import json
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from torch.distributed.fsdp import FSDPModule

from forebay.config import Config, check_world, from_mapping
from forebay.errors import Interrupted, ReportedElsewhere, RunError, UsageError
from forebay.memory.hooks import StepReport
from forebay.memory.storage import local
from forebay.pipeline.activity import ActionRecord, ActionRecorder, bubble, draw, trace_json
from forebay.train import checkpoint
from forebay.train.distributed import Heartbeat, Mesh, World
from forebay.train.durable import LOCK, FolderLock, holder, make_folder, replace_text
from forebay.train.metrics import Reporter, SilentReporter, StepRecord, Summary, summary_tables
from forebay.train.saved_profile import PipelineProfile, profile_ranks
from forebay.train.trainer import Trainer

# One step of a run, watched: what each rank of the pipeline ran when, as a picture and a trace in a folder.
#
# In: a `Trainer` on a pipeline, and a step. Out: `ActionRecord`s of the pipeline that the main process is in, then two files:
#
#     pipeline.png     see `forebay.pipeline.activity.draw`; only where matplotlib is installed
#     pipeline.json    for https://ui.perfetto.dev
#
# Of the processes that share the batch, whose pipelines run the same plan, only the first one's is watched. Nothing is kept.

T = TypeVar("T")


def watch_step(trainer: Trainer, step: Callable[[], T]) -> tuple[T, list[ActionRecord]]:
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
    recorder = ActionRecorder(mesh.pp_rank, trainer.device)
    with engine.called(), engine.watched(recorder):
        result = step()
    found: list[Any] = [None] * mesh.pp
    dist.all_gather_object(found, recorder.records(), group=mesh.pipeline)
    return result, [record for ran in found for record in ran]


def write_timeline(records: list[ActionRecord], folder: Path, title: str) -> str:
    """Write the trace and, if matplotlib is installed, the picture into `folder`; returns the line that says so.

    Raises:
        RunError: the files cannot be written.
        ValueError: no records.
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


# What a run leaves of itself for its report (`forebay report RUN`), beside its metrics.
#
# In: a `Trainer`. Out: plain figures, and the two files that hold them, in the run's folder:
#
#     result.json     at the end: what each pipeline rank held and where its saved bytes waited, of the process that is the
#                     first of its stage, whose shards are the largest
#     profile.json    with `log.profile`, at the end: what a forward pass saves; the same text as ``forebay profile --json``
#
# Nothing here is kept. Of several processes all call `held_by_rank` and `profile_forward`; the main one calls `write_result`.

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


def profile_forward(trainer: Trainer) -> str:
    """What a forward pass saves with the placements off, or each rank of a pipeline in a step, as ``forebay profile --json``."""
    if trainer.pipeline is None:
        return trainer.memory.profile(trainer.forward).to_json()
    with trainer.pipeline.called():  # a step that is replayed from a graph shows nothing
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


def _bytes(tensor: torch.Tensor) -> int:
    """Of this process's part."""
    own = local(tensor)
    return own.numel() * own.element_size()


# A training run from its first to its last step: folders, checkpoints, signals, and what a person sees.
#
# In: a `Config` and what to resume. Out: a run's folder:
#
#     run.json        configuration, versions, and what it runs on
#     metrics.jsonl   a record a step
#     checkpoints/    see `forebay.train.checkpoint`
#     tensorboard/    if asked for
#     result.json, profile.json      what its report shows of memory; the latter if asked for; see `forebay.train.loop`
#     pipeline.png, pipeline.json    what each rank of the pipeline ran in one step, if asked for; see `forebay.train.loop`
#
# Of several processes the main one decides on the folder, writes and prints; all save their part of a checkpoint and evaluate.
#
# A run never writes into a folder that holds another one. While it runs, it holds a lock on its folder: a second run that starts
# at the same time takes the next folder, and --resume of a run that is going on is refused.
#
# Ctrl-C or SIGTERM ends the run after the step in progress, with a checkpoint; a second Ctrl-C ends it at once, and the earlier
# checkpoint is what remains.

# What the order of data depends on: a resumed run with another value would skip or repeat text.
_SAME_ON_RESUME = (("train", "batch"), ("train", "sequence"), ("train", "seed"), ("data", "validation"))


class StopRequest:
    """Whether the run was asked to stop, and by which signal. The second Ctrl-C is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Listen to SIGINT and SIGTERM in the main thread; elsewhere signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder and, when resumed, the checkpoint."""

    folder: Path
    resumed: Path | None = None


def claim_start(config: Config, resume: str | None, lock: FolderLock) -> Start:
    """`where_to_start`, and the run's folder is this process's until `lock` is released.

    A new run takes the next folder where another process has just taken the first.

    Raises:
        UsageError: nothing to resume, or another process trains in that folder.
        RunError: the folder cannot be written.
    """
    starts: Iterator[Start]
    if resume is None:
        starts = (Start(f) for f in _numbered(Path(config.log.folder).expanduser()) if _is_free(f))
    else:
        starts = iter([where_to_start(config, resume)])
    for start in starts:
        try:
            make_folder(start.folder)
            taken = lock.take(start.folder)
        except OSError as error:
            raise _unwritable(start.folder, error) from error
        if resume is not None and not taken:
            raise UsageError(
                f"the run {start.folder} is going on in {holder(start.folder)}; wait for its end or stop it, then --resume it"
            )
        if taken and (resume is not None or _is_free(start.folder)):
            return start
        lock.release()  # another run was faster: it holds the folder, or it did and is done
    raise AssertionError("folders' numbers have no end")


def where_to_start(config: Config, resume: str | None) -> Start:
    """The folder of a new run, or the checkpoint to resume.

    Args:
        config: `log.folder` is the folder's name; the first of NAME, NAME-2, NAME-3, ... that holds no run is taken.
        resume: None starts anew; "" resumes the newest of these runs that has a checkpoint; else a run or checkpoint.

    Raises:
        UsageError: nothing to resume.
    """
    base = Path(config.log.folder).expanduser()
    if resume is None:
        return Start(next(f for f in _numbered(base) if _is_free(f)))
    if resume:
        found = checkpoint.find(Path(resume).expanduser())
        return Start(found.parent.parent, found)
    newest: Path | None = None
    for folder in _numbered(base):
        if not folder.is_dir():
            break
        newest = checkpoint.Checkpoints(folder / "checkpoints").latest() or newest
    if newest is None:
        raise UsageError(
            f"{base} holds no checkpoint to resume; start without --resume, or name a run or checkpoint folder"
        )
    return Start(newest.parent.parent, newest)


def train(config: Config, console: Console, resume: str | None = None) -> Path:
    """Train until `train.steps`, printing to `console`.

    Returns:
        The run's folder.

    Raises:
        Interrupted: by Ctrl-C or SIGTERM of any process; the message says what was saved.
        SaidElsewhere: of several processes, all but one raise this when the run fails.
        UsageError, RunError: as their messages say.
    """
    world = World.of_environment()
    check_world(config, world.size)
    with (
        StopRequest().listening() as stop,
        FolderLock() as lock,
        Mesh.open(config, world) as mesh,
        _one_says_why(mesh),
    ):
        start = mesh.on_main(lambda: claim_start(config, resume, lock))
        advice = partial(_intact, start)
        with _heartbeat(config, mesh, advice) as heart, Trainer(config, mesh) as trainer, _blaming(heart, advice):
            return _TrainingRun(config, console, start, trainer, stop).go()


def profile(config: Config) -> list[PipelineProfile]:
    """What autograd saves in the first step, by rank of this process's pipeline. No parameter changes and nothing is written.

    Raises:
        SaidElsewhere: of several processes, all but one raise this on a failure.
        UsageError, RunError: as their messages say; the former also for `parallel.pp` of 1.
    """
    world = World.of_environment()
    check_world(config, world.size)
    with (
        Mesh.open(config, world) as mesh,
        _one_says_why(mesh),
        _heartbeat(config, mesh, _nothing_lost) as heart,
        Trainer(config, mesh) as trainer,
        _blaming(heart, _nothing_lost),
    ):
        return profile_ranks(trainer)


@contextmanager
def _one_says_why(mesh: Mesh) -> Iterator[None]:
    """What fails within is raised on the first process that fails; on others it is `ReportedElsewhere`."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if mesh.speaks_first():
            raise
        raise ReportedElsewhere(getattr(error, "exit_code", RunError.exit_code)) from error


@contextmanager
def _blaming(heart: Heartbeat | None, advice: Callable[[], str]) -> Iterator[None]:
    """What a collective raises within, whose own text names nobody, names the process that is gone, if one is."""
    try:
        yield
    except (RuntimeError, RunError) as error:
        # A checkpoint's collectives fail too, and it says in its own words that it was not written.
        raised = error if isinstance(error, RuntimeError) else checkpoint.cause_of(error.__cause__ or error)
        gone = heart.who_is_gone() if heart is not None and isinstance(raised, RuntimeError) else ""
        if not gone:
            raise
        raise RunError(f"{gone}; {advice()}") from error


def _heartbeat(config: Config, mesh: Mesh, advice: Callable[[], str]) -> AbstractContextManager[Heartbeat | None]:
    """The thread that notices when another process dies; nothing for one process."""
    if mesh.size == 1 or mesh.store is None:
        return nullcontext()
    # Within the collectives' timeout, after which they end the process without a word of who was missing.
    return Heartbeat(mesh.store, mesh.rank, mesh.size, 0.8 * config.parallel.timeout, advice)


def _nothing_lost() -> str:
    return "nothing was written"


def _intact(start: Start) -> str:
    newest = checkpoint.Checkpoints(start.folder / "checkpoints").latest()
    if newest is None:
        return "there is no checkpoint yet"
    return f"the checkpoint {newest} is intact: go on with --resume {start.folder}"


def _is_free(folder: Path) -> bool:
    """Whether no run has written into the folder: a lock alone says nothing, its run may be over."""
    return not folder.is_dir() or all(entry.name == LOCK for entry in folder.iterdir())


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(f"the run's folder {folder} cannot be written: {error.strerror}; set log.folder to another")


def export(run: Path, out: Path) -> Path:
    """Write the model of a run's newest checkpoint (or of the given one) as a folder that transformers loads.

    Returns:
        The checkpoint that was exported.

    Raises:
        UsageError: there is no checkpoint, or `out` is taken.
        RunError: the checkpoint is damaged.
    """
    from forebay.train import hf_io
    from forebay.train.data import load_tokenizer

    path = checkpoint.find(run)
    config = from_mapping(checkpoint.read_about(path)["config"], origin=str(path))
    model = hf_io.from_folder_config(path / "model", getattr(torch, config.model.dtype))
    checkpoint.load(path, model)
    hf_io.save(model, out, load_tokenizer(config.data.tokenizer).folder)
    return path


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def _class_of(model: Any) -> str:
    """The name of a model's class as transformers has it: FSDP2 makes a subclass on the fly."""
    kind = type(model)
    return (kind.__mro__[2] if isinstance(model, FSDPModule) else kind).__name__


class _TrainingRun:
    """The loop. Holds the records that the summary needs."""

    def __init__(self, config: Config, console: Console, start: Start, trainer: Trainer, stop: StopRequest):
        self.config, self.console, self.start, self.trainer, self.stop = config, console, start, trainer, stop
        self.mesh = trainer.mesh
        self.checkpoints = checkpoint.Checkpoints(start.folder / "checkpoints", config.checkpoint.keep)
        self.records: list[StepRecord] = []
        self.saved_at = 0
        self._graph_said: str | None = None

    def go(self) -> Path:
        """All steps; see `train`."""
        c = self.config
        done = self._resume() if self.start.resumed else 0
        self.saved_at = done
        self._write_run_file()
        with self._reporter(done) as report:
            self._announce(report, done)
            for number in range(done + 1, c.train.steps + 1):
                record = self._step(number, report)
                self.records.append(record)
                if number == c.train.steps:
                    last = self.trainer.memory.report()  # of a backward: before a validation pass
                if c.train.eval_every and number % c.train.eval_every == 0:
                    report.validation(number, self.trainer.evaluate())
                stopped = self._stopped()
                if self._is_due(number, stopped):
                    self._save(number)
                if stopped and number < c.train.steps:
                    raise self._interrupted(number, stopped)
        enough = self.trainer.enough_capacity()
        self._leave(last)
        if self.mesh.world.is_main:
            for table in summary_tables(self._summary(last, enough)):
                self.console.print(table)
        return self.start.folder

    def _leave(self, last: StepReport) -> None:
        """The files of the run's report."""
        folder, main = self.start.folder, self.mesh.world.is_main
        ranks = held_by_rank(self.trainer, last)
        if main:
            write_result(folder / RESULT, json.dumps({"ranks": ranks}, indent=1))
        if self.config.log.profile:
            text = profile_forward(self.trainer)
            if main:
                write_result(folder / PROFILE, text)

    def _step(self, number: int, report: Reporter) -> StepRecord:
        record = self._timed_step(number, report)
        graph = self.trainer.graph_says
        if graph not in (None, self._graph_said):
            self._graph_said = graph
            report.say(f"step {number}: {graph}")
        return record

    def _timed_step(self, number: int, report: Reporter) -> StepRecord:
        if number != self.config.log.timeline:
            record = self.trainer.step(number)
            report.step(record)
            return record
        record, ran = watch_step(self.trainer, partial(self.trainer.step, number))
        report.step(record)
        title = f"{self.config.parallel.schedule}, step {number}"
        report.say(self.mesh.on_main(lambda: write_timeline(ran, self.start.folder, title)))
        return record

    def _reporter(self, done: int) -> Reporter:
        c = self.config
        if not self.mesh.world.is_main:
            return SilentReporter()
        return Reporter(self.start.folder, self.console, c.train.steps, done, c.log.tensorboard, c.log.progress)

    def _stopped(self) -> str:
        """Which signal any of the processes got, or "". All have to stop after the same step."""
        (number,) = self.mesh.max(signal.Signals[self.stop.signal] if self.stop.signal else 0)
        return signal.Signals(int(number)).name if number else ""

    def _resume(self) -> int:
        path = self.start.resumed
        assert path is not None
        about = checkpoint.read_about(path)
        self._check_same(path, about)
        if about["step"] >= self.config.train.steps:
            raise UsageError(
                f"checkpoint {path} is at step {about['step']}, and train.steps is {self.config.train.steps}: "
                "nothing is left to do; set train.steps to more"
            )
        checkpoint.load(path, self.trainer.model, self.trainer.optimizer)
        return int(about["step"])

    def _check_same(self, path: Path, about: dict[str, Any]) -> None:
        if about["data"] != self.trainer.corpus.identity:
            raise UsageError(
                f"checkpoint {path} was trained on other data than [data] names; "
                "resume with the same, or start anew from an export"
            )
        now = self.config.to_dict()
        for section, key in _SAME_ON_RESUME:
            before = about["config"][section][key]
            if before != now[section][key]:
                raise UsageError(
                    f"checkpoint {path} was made with {section}.{key} = {before}, not {now[section][key]}; resume with {before}"
                )

    def _announce(self, report: Reporter, done: int) -> None:
        model, device = self.trainer.model, self.trainer.device
        # Of a pipeline, each group of processes has other layers: one of each group counts.
        own = sum(p.numel() for p in model.parameters()) if self.mesh.batch.rank == 0 else 0
        count = int(self.mesh.sum(torch.tensor(own, dtype=torch.int64, device=device)))
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        dtype = self.config.model.dtype + (f" ({needed} to compute)" if (needed := self.config.model.compute) else "")
        many = f"{self.mesh.size} x " if self.mesh.size > 1 else ""
        layers = f", layers over {self.mesh.pp} ({self.config.parallel.schedule})" if self.mesh.pp > 1 else ""
        shared = layers + (f", experts over {self.mesh.ep}" if self.mesh.ep > 1 else "")
        report.say(f"{_class_of(model)}: {count / 1e6:,.1f} M parameters, {dtype}, on {many}{name}{shared}")
        report.say(f"data {self.trainer.corpus.description}")
        report.say(
            f"run {self.start.folder}" + (f", resumed after step {done} from {self.start.resumed}" if done else "")
        )

    def _is_due(self, number: int, stopped: str) -> bool:
        c = self.config.checkpoint
        if c.every and number % c.every == 0:
            return True
        return c.last and (number == self.config.train.steps or bool(stopped))

    def _save(self, number: int) -> None:
        about = {"data": self.trainer.corpus.identity, "config": self.config.to_dict()}
        self.checkpoints.save(number, self.trainer.model, self.trainer.optimizer, about)
        self.saved_at = number

    def _interrupted(self, number: int, by: str) -> Interrupted:
        if self.saved_at:
            after = f"its checkpoint is safe in {self.start.folder}; go on with --resume {self.start.folder}"
            if self.saved_at != number:
                after = f"the checkpoint of step {self.saved_at} is safe; go on with --resume {self.start.folder}"
        else:
            after = "no checkpoint was asked for (checkpoint.last = false)"
        return Interrupted(f"stopped by {by} after step {number} of {self.config.train.steps}; {after}")

    def _write_run_file(self) -> None:
        self.mesh.on_main(self._write_run_file_here)

    def _write_run_file_here(self) -> None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"config": self.config.to_dict(), "versions": versions, "machine": machine(self.mesh)}
        content = json.dumps(about, indent=2)
        try:
            # Of the same run, when it had fewer steps to do.
            (self.start.folder / RESULT).unlink(missing_ok=True)
            replace_text(self.start.folder / "run.json", content)
        except OSError as error:
            raise _unwritable(self.start.folder, error) from error

    def _summary(self, last: StepReport, enough: float | None) -> Summary:
        records = self.records
        steady = records[1:] or records
        return Summary(
            cycle=f"one step of pipeline rank {self.mesh.pp_rank}" if self.mesh.pp > 1 else "one microbatch",
            placements=self.trainer.memory.placements,
            saved_bytes=last.saved_bytes_by_placement,
            moved_bytes=last.moved_bytes,
            d2h_gbps=last.d2h_gbps,
            h2d_gbps=last.h2d_gbps,
            wait_ms=last.wait_ms,
            first_loss=records[0].cross_entropy_loss,
            last_loss=records[-1].cross_entropy_loss,
            tokens_per_second=statistics.median(r.tokens_per_second for r in steady),
            peak_bytes=max(r.peak_bytes for r in records),
            on_gpu=self.trainer.device.type == "cuda",
            folder=self.start.folder,
            steps_run_again=sum(r.rerun is not None for r in records),
            capacity_factor=self.config.parallel.capacity_factor if enough is not None else None,
            enough_capacity_factor=enough,
        )
