"""A training run from its first to its last step: checkpoints, signals, failures and output.

Input: a `Config` and what to resume. Output: the run's folder with ``run.json``, ``metrics.jsonl``, ``checkpoints/``, and
the files of `forebay.train.run_folder`. The main process chooses the folder, writes and prints; all processes save their
part of a checkpoint and evaluate. Ctrl-C, SIGTERM or SIGUSR1 ends the run after the current step or validation
batch, with a checkpoint, and `train.time_limit` early enough to write one; a second Ctrl-C ends it at once. `train` owns the
lock on the folder, the mesh, the heartbeat and the trainer for as long as it runs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch.distributed.fsdp import FSDPModule

from forebay.config import Config, FastPath, check_world, from_mapping, parse_duration
from forebay.errors import (
    DoesNotFit,
    ForebayError,
    Interrupted,
    NotFinite,
    PeerLost,
    Preempted,
    ReportedElsewhere,
    RunError,
    Stopped,
    UsageError,
    exit_code_of,
    first_line,
    host_is_full,
    lacks_host_memory,
)
from forebay.memory.profiler import SavedProfile
from forebay.memory.step import StepReport
from forebay.pipeline.partition import Partition
from forebay.train import checkpoint, hf_io, restore, run_folder
from forebay.train.distributed import Mesh, World, not_found, on_all
from forebay.train.durable import FolderLock, replace_text
from forebay.train.fast_path import fast_path_of
from forebay.train.heartbeat import Heartbeat, ending_after
from forebay.train.loggers import Logger, open_loggers
from forebay.train.metrics import Reporter, SilentReporter, StepRecord, Summary, summary_tables, usable_bytes
from forebay.train.pipeline_profile import PipelineProfile, profile_ranks
from forebay.train.remote import RemoteFolder, open_checked
from forebay.train.run_folder import PROFILE, RESULT, RUN, Start, claim_start, unwritable, write_result
from forebay.train.stop import StopRequest, TimeLimit
from forebay.train.tokenizer import folder_of
from forebay.train.trainer import Trainer

# Settings that the order of the data depends on: a resumed run with another value would skip or repeat text.
_SAME_ON_RESUME = (("train", "batch"), ("train", "sequence"), ("train", "seed"), ("data", "validation"))
# Seconds that a run which is out of memory waits for advice, at first without a word: a plan takes 4 s, but a search of the
# placements of a pipeline minutes. Other processes wait longer, for an answer that comes at the last moment.
_SILENT, _PLANNING, _ANSWER = 5.0, 60.0, 10.0


def train(
    config: Config,
    console: Console,
    resume: str | None = None,
    partition: Callable[[], Partition] | None = None,
    what_fits: Callable[[int], str] | None = None,
) -> Path:
    """Train until `train.steps`, printing to `console`.

    Args:
        resume: see `forebay.train.run_folder.claim_start`.
        partition: returns the layers of each stage; called on the main process. None: see `Trainer`.
        what_fits: returns what to change for a run that needs more than so many bytes of a device, for the error's message.

    Returns:
        The run's folder.

    Raises:
        Interrupted, Preempted: a signal reached any process, or the time limit is near; the message says what was saved.
        DoesNotFit, NotFinite, PeerLost: as `forebay.errors` says.
        ReportedElsewhere: the run failed and another process reports why.
        UsageError, RunError: as their messages say.
    """
    limit = TimeLimit(parse_duration(config.train.time_limit) if config.train.time_limit else math.inf)
    world = World.of_environment()
    check_world(config, world.size)
    start: Start | None = None

    def advice() -> str:
        return "it had not begun" if start is None else _intact_checkpoint(start)

    with StopRequest().listening() as stop, FolderLock() as lock, _joined(config, world, advice, what_fits) as mesh:
        path = fast_path_of(config, mesh)
        config = path.config
        remote = open_checked(config.checkpoint.remote)
        start = mesh.on_main(lambda: claim_start(config, resume, lock, remote))
        layers = None if partition is None else mesh.on_main(partition)
        with _stopping(stop, start):
            trainer = Trainer(config, mesh, layers)
        with trainer:
            return _TrainingRun(path, console, start, trainer, stop, limit, remote).run()


def profile(config: Config, partition: Callable[[], Partition] | None = None) -> SavedProfile | list[PipelineProfile]:
    """Profile what autograd saves in this process's first forward; on a pipeline, in the first step, by rank of this process's.
    Changes no parameter, writes no file.

    Args:
        partition: as for `train`.

    Raises:
        DoesNotFit: the device or the host ran out of memory.
        ReportedElsewhere: the profile failed and another process reports why.
        UsageError, RunError: as their messages say.
    """
    world = World.of_environment()
    check_world(config, world.size)
    with (
        _joined(config, world, lambda: "nothing was written") as mesh,
        Trainer(config, mesh, None if partition is None else mesh.on_main(partition)) as trainer,
    ):
        return trainer.memory.profile(trainer.forward) if trainer.pipeline is None else profile_ranks(trainer)


def export(run: Path, out: Path) -> tuple[Path, str]:
    """Write the model of a run's newest checkpoint, or of the given one, as a folder that transformers loads.

    Returns:
        The checkpoint that was exported; and the folder of its run's tokenizer if that is not here, and so not in `out`, else "".

    Raises:
        UsageError: there is no checkpoint, or `out` is not new or empty (see `hf_io.save`).
        RunError: the checkpoint is damaged.
    """
    hf_io.check_new(out)  # before a large model is read
    path = restore.find(run)
    config = from_mapping(restore.read_about(path)["config"], origin=str(path))
    model = hf_io.from_folder_config(path / "model", getattr(torch, config.model.dtype))
    restore.load(path, model)
    source = Path(config.model.path).expanduser() if config.model.path else None
    tokenizer = folder_of(config.data.tokenizer)
    missing = tokenizer is not None and not tokenizer.is_dir()
    hf_io.save(model, out, None if missing else tokenizer, source)
    return path, config.data.tokenizer if missing else ""


def _join(config: Config, world: World) -> Mesh:
    """The other processes, if all are there within `parallel.timeout`: from then on, `Heartbeat` watches them."""
    if world.size == 1:
        return Mesh.open(config, world)
    at = f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with ending_after(config.parallel.timeout, str(not_found(world, config.parallel.timeout, at))):
        return Mesh.open(config, world)


@contextmanager
def _joined(
    config: Config, world: World, advice: Callable[[], str], what_fits: Callable[[int], str] | None = None
) -> Iterator[Mesh]:
    """Context with all processes of a run, which watch each other. One of them reports a failure, and names a lost process.

    Args:
        advice: what the message of a lost process adds.
        what_fits: as for `train`.
    """
    with (
        _join(config, world) as mesh,
        _reported_once(mesh),
        _heartbeat(config, mesh, advice) as heart,
        _advising_memory(mesh, what_fits, config.parallel.timeout / 4 if mesh.size > 1 else math.inf),
        _naming_lost(heart, advice),
    ):
        yield mesh


@contextmanager
def _reported_once(mesh: Mesh) -> Iterator[None]:
    """Context whose error stays itself on the first process that fails, and becomes `ReportedElsewhere` on the others."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # All processes stop together, and the one that holds the store may be gone before another one asks it.
        if mesh.world.is_main if isinstance(error, Stopped) else mesh.first_to_fail():
            raise
        raise ReportedElsewhere(exit_code_of(error)) from error


@contextmanager
def _stopping(stop: StopRequest, start: Start) -> Iterator[None]:
    """Context before the first step. An error in it after a signal ends the run as stopped.

    The signal may be its cause: it ends processes that tokenize too.
    """
    try:
        yield
    except Exception as error:
        if not stop.signal:
            raise
        again = f"go on with --resume {start.before}" if start.before else "start it again"
        said = f"stopped by {signal.Signals(stop.signal).name} before the first step, while data and model were prepared; {again}"
        raise _stopped_by(stop.signal)(said) from error


def _stopped_by(number: int) -> type[Stopped]:
    """The error of a run that a signal ends, or for 0 the time limit."""
    return Interrupted if number == signal.SIGINT else Preempted


@contextmanager
def _naming_lost(heart: Heartbeat | None, advice: Callable[[], str]) -> Iterator[None]:
    """Context that turns the error of a collective, whose text names no process, into one that names the lost process."""
    try:
        yield
    except (RuntimeError, ForebayError) as error:
        if isinstance(error, torch.OutOfMemoryError) or lacks_host_memory(error):  # RuntimeErrors too
            raise
        # Collectives fail inside of a save and of the choice of a dispatcher too, which wrap what they raise.
        raised = error if isinstance(error, RuntimeError) else checkpoint.cause_of(error.__cause__ or error)
        lost = heart.find_lost() if heart is not None and isinstance(raised, RuntimeError) else None
        if lost is None:
            raise
        raise PeerLost(f"{lost}; {advice()}", lost.exit_code) from error


@contextmanager
def _advising_memory(mesh: Mesh, what_fits: Callable[[int], str] | None, patience: float) -> Iterator[None]:
    """Context that turns a lack of memory into `DoesNotFit`, with advice if it is the device's. `patience`: see `_advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = "" if what_fits is None else _advice_of_first(mesh, partial(_advice, what_fits, mesh, patience))
        raise DoesNotFit("; ".join(filter(None, (first_line(error), advice)))) from error
    except (MemoryError, RuntimeError) as error:
        if lacks_host_memory(error):
            raise host_is_full(error) from error
        raise


def _advice(what_fits: Callable[[int], str], mesh: Mesh, patience: float) -> str:
    """What `what_fits` returns; a plan that takes too long, or fails, does not hold up or replace the error that it is for.

    Args:
        patience: seconds of each of the two waits at most: the collectives of processes that have memory time out meanwhile, and
            would report that.
    """
    found: list[str] = []
    budget = usable_bytes(mesh.device)
    silent, planning = min(_SILENT, patience), min(_PLANNING, patience)

    def plan() -> None:
        try:
            found.append(what_fits(budget))
        except Exception as error:
            found.append(f"the planner failed: {first_line(error)}")

    thread = threading.Thread(target=plan, daemon=True)
    thread.start()
    thread.join(silent)
    if thread.is_alive():
        print("forebay: out of memory; the planner looks for what fits", file=sys.stderr, flush=True)
        thread.join(planning)
    late = f"the planner has no advice after {silent + planning:.0f} s; forebay plan --auto may find some"
    return found[0] if found else late


def _advice_of_first(mesh: Mesh, advise: Callable[[], str]) -> str:
    """The advice of the first process that ran out of memory: the others wait, as torchrun ends all when one of them ends."""
    asked, answer = "forebay/out-of-memory", "forebay/what-fits"
    if mesh.size == 1 or mesh.store is None:
        return advise()
    with suppress(RuntimeError):  # DistError too: a plan that takes too long, or the process with the store is gone
        if mesh.store.add(asked, 1) == 1:
            mesh.store.set(answer, advise())
        mesh.store.wait([answer], timedelta(seconds=_SILENT + _PLANNING + _ANSWER))
        return str(mesh.store.get(answer).decode())
    return ""


def _heartbeat(config: Config, mesh: Mesh, advice: Callable[[], str]) -> AbstractContextManager[Heartbeat | None]:
    if mesh.size == 1 or mesh.store is None:
        return nullcontext()
    # Shorter than the timeout of collectives, which ends the process without naming the one that is lost.
    return Heartbeat(mesh.store, mesh.rank, mesh.size, 0.8 * config.parallel.timeout, advice)


def _intact_checkpoint(start: Start) -> str:
    newest = checkpoint.Checkpoints(start.checkpoints).latest()
    if newest is not None:
        return f"the checkpoint {newest} is intact: go on with --resume {start.folder}"
    return "there is no checkpoint yet" + (f": go on with --resume {start.before}" if start.before else "")


class _ValidationStopped(Exception):
    """All processes end an evaluation between two batches."""


class _TrainingRun:
    """The steps of a run, between the construction of the trainer and the closing tables."""

    def __init__(
        self,
        path: FastPath,
        console: Console,
        start: Start,
        trainer: Trainer,
        stop: StopRequest,
        limit: TimeLimit,
        remote: RemoteFolder | None,
    ):
        config = path.config
        self.path, self.config, self.console, self.start, self.trainer = path, config, console, start, trainer
        self.stop, self.limit = stop, limit
        self.mesh = trainer.mesh
        self.checkpoints = checkpoint.Checkpoints(
            start.checkpoints, config.checkpoint.keep, config.checkpoint.keep_hours, remote
        )
        self.records: list[StepRecord] = []
        self.save_began_at = self.saved_at = 0  # steps
        self.saved: checkpoint.SavedCheckpoint | None = None
        self._said_too_often = False
        self._graph_status: str | None = None

    def run(self) -> Path:
        """All steps; see `train`. A failure waits for a save under way; a second Ctrl-C does not."""
        try:
            folder = self._run()
        except Exception as error:
            self._close(failed=True)
            if isinstance(error, NotFinite):
                # The newest one may have been written after the weights went wrong.
                older = ", or name an older one there" if len(self.checkpoints.all()) > 1 else ""
                raise NotFinite(f"{error}; {_intact_checkpoint(self.start)}{older}") from error
            raise
        self._close()
        return folder

    def _close(self, failed: bool = False) -> None:
        # To unlock pages waits for the device, which after a failure may wait for another process.
        lost = self.checkpoints.close(free=not failed or self.mesh.size == 1)
        if lost is not None and self.mesh.world.is_main:
            self.console.print(str(lost), soft_wrap=True, markup=False)  # gloo's texts name files in brackets

    def _run(self) -> Path:
        c = self.config
        done = self._resume() if self.start.resumed else 0
        if done >= c.train.steps:
            if self.mesh.world.is_main:
                self.console.print(
                    f"run {self.start.folder} is at step {done} of {c.train.steps}: nothing is left to do",
                    soft_wrap=True,
                )
            assert self.start.resumed is not None
            if missing := self.checkpoints.upload_missing(self.start.resumed):
                raise RunError(f"the run is done; {missing}")
            return self.start.folder
        self.save_began_at = self.saved_at = done
        self.mesh.on_main(self._write_run_file)
        loggers: list[Logger] = []
        self.mesh.on_main(lambda: loggers.extend(open_loggers(c, self.start.folder, done)))
        try:
            reporter = (
                Reporter(self.start.folder, self.console, c.train.steps, done, loggers, c.log.progress)
                if self.mesh.world.is_main
                else SilentReporter()
            )
        except OSError as error:  # such as metrics.jsonl of another user
            raise unwritable(self.start.folder, error) from error
        with reporter as report:
            self._announce(report, done)
            self._check_stop(done, report)
            for number in range(done + 1, c.train.steps + 1):
                self.records.append(self._step(number, report))
                if number == c.train.steps:
                    last = self.trainer.memory.report()  # of a backward: before a validation pass
                if c.train.eval_every and number % c.train.eval_every == 0:
                    self._validate(number, report)
                self.limit.stepped()
                self._check_stop(number, report)
        enough = self.trainer.enough_capacity()
        self._write_outputs(last)
        if self.mesh.world.is_main:
            summary = Summary(
                period=f"one step of pipeline rank {self.mesh.pp_rank}" if self.mesh.pp > 1 else "one microbatch",
                placements=self.trainer.memory.placements,
                report=last,
                records=self.records,
                folder=self.start.folder,
                capacity_factor=c.step.capacity_factor if enough is not None else None,
                enough_capacity_factor=enough,
            )
            for table in summary_tables(summary):
                self.console.print(table)
        if self._missing_upload:
            raise RunError(f"the run is done; {self._missing_upload}")
        return self.start.folder

    def _check_stop(self, number: int, report: Reporter) -> None:
        """Save after step `number` if a checkpoint is due, and raise `Stopped` if the run ends there: on all processes."""
        is_last = number == self.config.train.steps
        asked, is_near = self._save_if_due(number, report, is_last)
        if is_last or not (asked or is_near):
            return
        self._finish_save(report)  # begun before, with just enough time left
        by = signal.Signals(asked).name if asked else f"train.time_limit = {self.config.train.time_limit}"
        raise _stopped_by(asked)(self._stopped(number, by))

    def _save_if_due(self, number: int, report: Reporter, is_last: bool) -> tuple[int, bool]:
        """Save after step `number` if a checkpoint is due, or one is to be measured, or the run ends there.

        Returns:
            The number of the signal that asked any process to stop, 0 for none; and whether the time limit is near.
        """
        c, saves = self.config.checkpoint, self.checkpoints
        asked, is_near, needs_save, is_writing, failed = self.mesh.max(
            self.stop.signal,
            self.limit.is_near,
            c.last and self.limit.needs_measured_save,
            saves.is_writing,
            saves.has_failed,
        )
        if saves.under_way and (failed or not is_writing):
            self._finish_save(report)
        ends = bool(asked or is_near or is_last)
        wants_save = self._wants_save(number, ends, bool(asked) and not is_last, bool(needs_save))
        if wants_save and number > self.save_began_at:
            self._save(number, report, c.background and not (ends or needs_save))
        if ends or needs_save:
            self._finish_save(report)
        if wants_save or needs_save:
            (is_near,) = self.mesh.max(self.limit.is_near)  # it may have taken the time that one more step needs
        return int(asked), bool(is_near)

    def _wants_save(self, number: int, ends: bool, stopped: bool, needs_save: bool) -> bool:
        """Whether step `number` is to be saved.

        Args:
            ends: the run ends after it, `stopped`: because of a signal.
            needs_save: no save has shown yet how long one takes.
        """
        c, under_way = self.config.checkpoint, self.checkpoints.under_way
        if under_way and stopped:
            # That save began less time ago than another one would take: the steps since then are cheaper to repeat.
            return False
        is_due = bool(c.every) and number % c.every == 0
        return is_due or (c.last and (ends or (needs_save and not under_way)))

    def _save(self, number: int, report: Reporter, background: bool) -> None:
        """Begin to save, after the save under way."""
        if self.checkpoints.under_way:
            if background and not self._said_too_often:
                self._said_too_often = True
                report.say(
                    f"step {number}: training waits until the checkpoint of step {self.save_began_at} is whole; "
                    "a larger checkpoint.every avoids that"
                )
            self._finish_save(report)
        about = {"data": self.trainer.corpus.identity, "config": self.config.to_dict()}
        self.limit.save_began()
        self.save_began_at = number
        if not self.checkpoints.start(number, self.trainer.model, self.trainer.optimizer, about, background):
            self._finish_save(report)

    def _finish_save(self, report: Reporter) -> None:
        """Wait for the save under way, if there is one."""
        before, saved = self.saved, self.checkpoints.wait()
        if saved is None:
            return
        self.saved, self.saved_at = saved, self.save_began_at
        self.limit.saved(saved.seconds)
        if saved.waited and not (before and before.waited):
            report.say(f"step {self.saved_at}: training waits while checkpoints are written: {saved.waited}")
        if saved.not_uploaded:
            report.say(saved.not_uploaded)

    @property
    def _missing_upload(self) -> str:
        return self.saved.not_uploaded if self.saved is not None else ""

    def _write_outputs(self, last: StepReport) -> None:
        folder, main = self.start.folder, self.mesh.world.is_main
        ranks = run_folder.held_by_rank(self.trainer, last)
        if main:
            write_result(folder / RESULT, json.dumps({"ranks": ranks}, indent=1))
        if self.config.log.profile:
            text = run_folder.profile_forward(self.trainer)
            if main:
                write_result(folder / PROFILE, text)

    def _step(self, number: int, report: Reporter) -> StepRecord:
        if number == self.config.log.timeline:
            record, ran = run_folder.watch_step(self.trainer, partial(self.trainer.step, number))
            report.step(record)
            title = f"{self.config.parallel.schedule}, step {number}"
            report.say(self.mesh.on_main(lambda: run_folder.write_timeline(ran, self.start.folder, title)))
        else:
            record = self.trainer.step(number)
            report.step(record)
        status = self.trainer.graph_status
        if status not in (None, self._graph_status):
            self._graph_status = status
            report.say(f"step {number}: {status}")
        return record

    def _validate(self, number: int, report: Reporter) -> None:
        """Evaluate after step `number`, unless the run has to stop meanwhile.

        Raises:
            NotFinite: the validation loss is not finite.
        """
        try:
            loss = self.trainer.evaluate(self._check_validation)
        except _ValidationStopped:
            report.say(f"step {number}: the run has to stop, without a validation loss of this step")
        else:
            if not math.isfinite(loss):  # the update broke the weights, which must not be saved
                raise NotFinite(
                    f"step {number}: the validation loss is {loss}, which is not finite; "
                    "lower optimizer.lr or lengthen schedule.warmup"
                )
            report.validation(number, loss)

    def _check_validation(self) -> None:
        asked, lacks_time = self.mesh.max(self.stop.signal, self.limit.leaves_only_saves)
        if asked or lacks_time:
            raise _ValidationStopped

    def _resume(self) -> int:
        """Load the checkpoint to resume; returns its step. A damaged one is passed over if `Start` names others."""
        assert self.start.resumed is not None
        *others, oldest = (self.start.resumed, *self.start.earlier)
        for path in others:
            try:
                return self._load(path)
            except restore.Damaged as error:
                self.checkpoints.damaged.add(path.name)
                if self.mesh.world.is_main:
                    self.console.print(str(error), soft_wrap=True)
        return self._load(oldest)

    def _load(self, path: Path) -> int:
        self.start = replace(self.start, resumed=path)
        # One that finds a damaged file, as on a file system that is late, must not go on to another checkpoint alone.
        about = on_all(lambda: restore.read_about(path))[0]
        self._check_same(path, about)
        if about["step"] >= self.config.train.steps:
            if self.start.is_auto:
                restore.verify(path)
                return int(about["step"])
            raise UsageError(
                f"checkpoint {path} is at step {about['step']}, and train.steps is {self.config.train.steps}: "
                "nothing is left to do; set train.steps to more"
            )
        restore.load(path, self.trainer.model, self.trainer.optimizer)
        return int(about["step"])

    def _check_same(self, path: Path, about: dict[str, Any]) -> None:
        if about["data"] != self.trainer.corpus.identity:
            raise UsageError(
                f"checkpoint {path} was trained on other data than [data] names; "
                "resume with the same data, or start a new run from an export"
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
        # Each pipeline stage has other layers: count one process of each.
        own = sum(p.numel() for p in model.parameters()) if self.mesh.batch.rank == 0 else 0
        count = int(self.mesh.sum(torch.tensor(own, dtype=torch.int64, device=device)))
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        dtype = self.config.model.dtype + (f" ({compute} to compute)" if (compute := self.config.model.compute) else "")
        many = f"{self.mesh.size} x " if self.mesh.size > 1 else ""
        layers = f", layers over {self.mesh.pp} ({self.config.parallel.schedule})" if self.mesh.pp > 1 else ""
        replicas = f", {self.mesh.replicate} replicas" if self.mesh.replicate > 1 else ""
        shared = replicas + layers + (f", experts over {self.mesh.ep}" if self.mesh.ep > 1 else "")
        report.say(f"{_class_name(model)}: {count / 1e6:,.1f} M parameters, {dtype}, on {many}{name}{shared}")
        if self.trainer.dispatcher is not None and self.trainer.dispatcher.about:
            report.say(f"tokens travel by {self.trainer.dispatcher.about}")
        if self.trainer.pipeline is not None:
            report.say(f"stages send by {self.trainer.pipeline.links}")
        if self.path.line:
            report.say(self.path.line)
        report.say(f"data {self.trainer.corpus.description}")
        report.say(
            f"run {self.start.folder}" + (f", resumed after step {done} from {self.start.resumed}" if done else "")
        )

    def _stopped(self, number: int, by: str) -> str:
        if not self.saved_at:
            saved = "there is no checkpoint" + (", as checkpoint.last is false" if number else " yet")
        else:
            which = "its checkpoint" if self.saved_at == number else f"the checkpoint of step {self.saved_at}"
            seconds, where = "", self.start.before
            if self.saved is not None:
                seconds, where = f", written in {self.saved.seconds:.1f} s,", self.start.folder
            saved = f"{which}{seconds} is safe in {where}; go on with --resume {where}"
        upload = f"; {self._missing_upload}" if self._missing_upload else ""
        return f"stopped by {by} after step {number} of {self.config.train.steps}; {saved}{upload}"

    def _write_run_file(self) -> None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"config": self.config.to_dict(), "versions": versions, "machine": run_folder.machine(self.mesh)}
        try:
            (self.start.folder / RESULT).unlink(missing_ok=True)  # of the same run, when it had fewer steps
            replace_text(self.start.folder / RUN, json.dumps(about, indent=2))
        except OSError as error:
            raise unwritable(self.start.folder, error) from error


def _class_name(model: Any) -> str:
    """The name of the model's class in transformers. FSDP2 makes a subclass on the fly."""
    kind = type(model)
    return (kind.__mro__[2] if isinstance(model, FSDPModule) else kind).__name__
