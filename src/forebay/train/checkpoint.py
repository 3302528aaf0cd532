"""Checkpoints that are written whole or not at all, in the background, and kept by count and age.

Input: a model, its optimizer, the random generators and the trainer's position. Output: a folder per checkpoint under the
run's ``checkpoints/``, in the format of ``torch.distributed.checkpoint``, with names and shapes of the whole model, so that
another number of processes or another layout reads it too; `forebay.train.restore` does. All processes call the methods of
`Checkpoints` together. A save in the background writes from a copy in host memory, in a thread with a process group of its
own. The optimizer's settings are the configuration's; learning rate and data order are functions of the step, so they have
no state to save.
"""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from forebay.errors import RunError, first_line
from forebay.train.distributed import on_all, on_main, rank_and_size
from forebay.train.durable import digest_of, make_folder, sync, sync_tree, write_synced
from forebay.train.generators import host_states, torch_states
from forebay.train.remote import MANIFEST, NAME, PREFIX, RemoteFolder
from forebay.train.staging import HostCopies

_PARTIAL = ".partial-"
_BEFORE = "-before"  # suffix of a checkpoint while its step is saved again


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written.

    Attributes:
        seconds: from the call of `Checkpoints.start` until it was whole, and uploaded if there is a remote folder.
        waited: why training waited although the save was to run in the background; "" if it did not.
        not_uploaded: why the remote folder does not have it; "" if it does, or there is none.
    """

    path: Path
    seconds: float
    waited: str = ""
    not_uploaded: str = ""


@dataclass(frozen=True)
class _Snapshot:
    """The content of a checkpoint.

    Attributes:
        tensors: by part and name; on the host if `is_copy`, else those that training changes.
        generators: the states of this process's Python and NumPy generators.
    """

    tensors: Mapping[str, Mapping[str, Any]]
    is_copy: bool
    about: Mapping[str, Any]
    generators: Mapping[str, Any]
    config: Any  # the model's transformers configuration; None if it has none


class _Commit(threading.Thread):
    """Runs a save, in this thread or as one, and keeps what it returned or raised. A daemon: a second Ctrl-C does not wait."""

    def __init__(self, save: Callable[[], SavedCheckpoint]):
        super().__init__(name="forebay-checkpoint", daemon=True)
        self._save = save
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.saved = self._save()
        except BaseException as error:
            self.error = error

    def result(self) -> SavedCheckpoint:
        if self.error is not None:
            raise self.error
        assert self.saved is not None
        return self.saved


# How long processes wait for each other in a save: longer than in a step, as one may sync or upload while others are done.
# A lost process is noticed sooner, by `Heartbeat`.
_PATIENCE = 1800.0  # seconds
_COPY_AHEAD = 10_000_000  # bytes from the device while earlier ones are written; torch's default


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint is a folder ``step-00000010`` with ``.metadata`` and ``*.distcp`` (tensors of model, optimizer and torch's
    generators), ``trainer.json`` (step, data, configuration, Python's and NumPy's generators by process),
    ``model/config.json`` (for export) and ``manifest.json`` (size and SHA-256 of every other file). It is written to
    ``.partial-step-...``, synced and renamed; the newest is the one that was written last. So a crash, a full disk or a power
    cut at any time leaves the newest whole checkpoint to be found, and the next save removes what it left behind.

    One save is under way at a time: `start` begins it, `wait` ends it.

    Args:
        folder: ``<run>/checkpoints``; created with the first checkpoint.
        keep: number of newest checkpoints that stay.
        keep_hours: hours between older ones that stay too; 0 for none.
        remote: gets each checkpoint after it was written here, and keeps as many.

    Attributes:
        damaged: names of checkpoints that were found damaged. They do not count for `keep`, or an older one that is whole would
            be deleted in place of them, and they stay.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_hours: float = 0.0, remote: RemoteFolder | None = None):
        self.folder, self.keep, self.keep_hours, self.remote = folder, keep, keep_hours, remote
        self.damaged: set[str] = set()
        self._commit: _Commit | None = None
        self._copies: HostCopies | None = None
        self._group: dist.ProcessGroup | None = None  # gloo, for the thread alone
        self._unconnected = ""  # why there is no such group

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> Path:
        """`start` and `wait`; returns the checkpoint."""
        self.start(step, model, optimizer, about)
        saved = self.wait()
        assert saved is not None
        return saved.path

    def start(
        self,
        step: int,
        model: Any,
        optimizer: torch.optim.Optimizer,
        about: Mapping[str, Any],
        background: bool = False,
    ) -> bool:
        """Write a checkpoint, and delete those that need not stay. Gradients must be None.

        Args:
            step: number of the last finished step.
            about: what else `load` returns; JSON.
            background: return when the state is copied to host memory; a thread goes on. Else, and if there is no room for
                the copy, the checkpoint is written when this returns.

        Returns:
            Whether a thread goes on.

        Raises:
            RunError: the state could not be collected; earlier checkpoints are unchanged.
            RuntimeError: a save is under way.
        """
        if self._commit is not None:
            raise RuntimeError("a save is under way; call wait() first")
        began, final = time.monotonic(), self.folder / f"{PREFIX}{step:08d}"
        try:
            tensors = _collect(model, optimizer)
            copied, waited = self._copied(tensors) if background else (None, "")
        except (RuntimeError, RunError) as error:
            raise self._failed(final, error) from error
        taken = _Snapshot(
            tensors if copied is None else copied,
            copied is not None,
            {**about, "step": step},
            host_states(),
            getattr(model, "config", None),
        )
        group = None if copied is None else self._group
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def save() -> SavedCheckpoint:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread begins on device 0, and would make a context there
            self._write_whole(final, taken, group)
            missing = self._upload(final, group) if self.remote is not None else ""
            return SavedCheckpoint(final, time.monotonic() - began, waited, missing)

        self._commit = _Commit(save)
        (self._commit.run if copied is None else self._commit.start)()
        return copied is not None

    @property
    def under_way(self) -> bool:
        """Whether `start` was called and `wait` was not. The same on all processes."""
        return self._commit is not None

    @property
    def is_writing(self) -> bool:
        """Whether this process's thread runs."""
        return self._commit is not None and self._commit.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the save under way failed on this process."""
        return self._commit is not None and self._commit.error is not None

    def wait(self) -> SavedCheckpoint | None:
        """The checkpoint that `start` began, when it is whole; None if no save is under way.

        Raises:
            RunError: it could not be written, such as on a full disk; earlier ones are unchanged.
        """
        commit, self._commit = self._commit, None
        if commit is None:
            return None
        if commit.ident is None:  # it ran in this thread
            return commit.result()
        commit.join()
        failed = on_all(lambda: commit.error is not None)  # a lost connection may show on some processes only
        if any(failed) and commit.error is None:
            raise RunError(f"the last checkpoint could not be written by process {failed.index(True)}")
        return commit.result()

    def close(self, free: bool = True) -> BaseException | None:
        """Wait for a save under way, if not for the other processes, and free its memory; returns the error of a failed one.
        `free`: give the memory back before the process ends."""
        commit, self._commit = self._commit, None
        if commit is not None and commit.ident is not None:
            commit.join()
        if self._copies is not None and free:
            self._copies.free()
        return None if commit is None else commit.error

    def _copied(self, tensors: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]] | None, str]:
        """Copies of the tensors for the thread; None, and why, if it cannot have them."""
        if self._copies is None:
            self._copies = HostCopies()
            self._unconnected = self._connect()
        if self._unconnected:
            return None, f"the processes cannot reach each other with gloo as well: {self._unconnected}"
        copied = self._copies.copy(tensors)
        return copied, "" if copied is not None else "the host has no room for a copy of the state to write it from"

    def _connect(self) -> str:
        """Make the thread's process group; returns why one of the processes could not, or ""."""
        if rank_and_size()[1] == 1:
            return ""
        own = ""
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE))
        except RuntimeError as error:
            own = first_line(error)
        return next(filter(None, on_all(lambda: own)), "")

    def _write_whole(self, final: Path, taken: _Snapshot, group: dist.ProcessGroup | None) -> None:
        """Write and publish a checkpoint, or raise RunError and leave nothing of it."""
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            on_main(lambda: self._begin(partial), group)
            # A clock that was set back, or another machine's, must not make this one older than those that are there.
            after = on_main(lambda: max(self._times().values(), default=0.0), group)
            _write(partial, taken, group, after)
            on_main(lambda: self._publish(partial, final), group)
        except (CheckpointException, OSError, RuntimeError, RunError) as error:
            raise self._failed(final, error) from error
        finally:
            if rank_and_size()[0] == 0:
                _discard(partial)

    def upload_missing(self, path: Path) -> str:
        """Upload a checkpoint that the remote folder lacks, as after a kill; returns why that failed, or ""."""
        remote = self.remote
        if remote is None or on_main(lambda: remote.names().get(path.name, 0.0) >= _written(path)):
            return ""
        return self._upload(path, None)

    def _upload(self, path: Path, group: dist.ProcessGroup | None) -> str:
        """Upload a checkpoint, each process a part of its files; returns why that failed, or ""."""
        remote, (rank, size) = self.remote, rank_and_size()
        assert remote is not None

        def expire() -> None:
            written = remote.names()
            remote.remove(self._expired({name: written[name] for name in written if name != path.name}))

        try:
            on_main(lambda: remote.remove([path.name]), group)  # what an earlier or broken upload left of it
            files = sorted(read_manifest(path)["files"])
            on_all(lambda: remote.put(path, files[rank::size]), group)
            on_main(lambda: remote.finish(path), group)
            on_main(expire, group)
        except (OSError, RuntimeError, RunError) as error:
            return f"checkpoint {path} is whole, but could not be uploaded: {first_line(error)}"
        return ""

    def fetch(self) -> Path | None:
        """Download the remote folder's newest checkpoint if it was written after the newest one here, or if that one lacks a file
        or a part of one. By one process only.

        Raises:
            RunError: it cannot be read from there or written here.
        """
        found = None if self.remote is None else self.remote.newest()
        if self.remote is None or found is None:
            return None
        name, written = found
        own = self.latest()
        if own is not None and _written(own) >= written and _is_complete(own):
            return None
        partial, final = self.folder / f"{_PARTIAL}{name}", self.folder / name
        try:
            self._begin(partial)
            self.remote.get(name, partial)
            sync_tree(partial)
            self._publish(partial, final)
        except OSError as error:
            raise RunError(
                f"checkpoint {self.remote.url}/{name} cannot be written to {final}: {error.strerror}"
            ) from error
        finally:
            _discard(partial)
        return final

    def all(self) -> list[Path]:
        """All checkpoints, whole or damaged, in the order in which they were written."""
        return [self.folder / name for name in self._times()]

    def latest(self) -> Path | None:
        """The newest checkpoint; None if there is none."""
        return next(reversed(self.all()), None)

    def _times(self) -> dict[str, float]:
        """When each checkpoint was written, oldest first."""
        found: list[tuple[float, str]] = []
        for path in self.folder.glob(f"{PREFIX}*"):
            if NAME.fullmatch(path.name.removesuffix(_BEFORE)) is None:
                continue
            with contextlib.suppress(OSError):  # no manifest, or a thread removes the checkpoint now
                found.append((_written(path) or (path / MANIFEST).stat().st_mtime, path.name))
        return {name: when for when, name in sorted(found)}

    def _begin(self, partial: Path) -> None:
        """Create an empty folder, and remove what a crash left. The run's lock keeps other processes out."""
        make_folder(self.folder)
        for left in self.folder.glob(f"{_PARTIAL}*"):
            _discard(left)
        for before in self.folder.glob(f"{PREFIX}*{_BEFORE}"):
            if before.with_name(before.name.removesuffix(_BEFORE)).is_dir():
                _discard(before)  # otherwise it is the only checkpoint of its step
        partial.mkdir()

    def _publish(self, partial: Path, final: Path) -> None:
        """Rename the new checkpoint. A whole checkpoint exists under some name at all times.

        One of the same step, from an earlier branch of the run, is renamed first.
        """
        before = final.with_name(f"{final.name}{_BEFORE}")
        try:
            if final.exists():
                final.rename(before)
                sync(self.folder)
            partial.rename(final)
        except OSError:
            with contextlib.suppress(OSError):  # a second failure leaves what a crash would leave
                if before.exists() and not final.exists():
                    before.rename(final)
                    sync(self.folder)
            raise
        sync(self.folder)
        self.damaged.discard(final.name)  # of the same step
        others = {name: when for name, when in self._times().items() if name not in (final.name, before.name)}
        older = [self.folder / name for name in self._expired(others)]
        for old in [*([before] if before.exists() else []), *older]:
            _discard(old)

    def _expired(self, others: Mapping[str, float]) -> list[str]:
        """The checkpoints that need not stay, of those older than the newest, given with their times, oldest first."""
        spared: list[float] = []
        expired = []
        whole = [name for name in others if name not in self.damaged]
        for name in whole[: -(self.keep - 1) or None]:
            if self.keep_hours and (not spared or others[name] - spared[-1] >= 3600 * self.keep_hours):
                spared.append(others[name])
            else:
                expired.append(name)
        return expired

    def _failed(self, final: Path, error: BaseException) -> RunError:
        cause = cause_of(error)
        if isinstance(cause, KeyboardInterrupt):
            raise cause  # a second Ctrl-C while writing: torch wraps it too
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(cause)
        before = self.latest()
        kept = f"the earlier checkpoint {before} is intact" if before else "there is no earlier checkpoint"
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; free some space, or set log.folder to another disk" if full else ""
        return RunError(f"checkpoint {final} could not be written: {reason}; {kept}{advice}")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: ``files``, the size and digest of each, and ``written``, seconds since 1970."""
    found: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return found


def _written(path: Path) -> float:
    """When a checkpoint was written, in seconds since 1970; 0 for one that is damaged."""
    try:
        return float(read_manifest(path)["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _is_complete(path: Path) -> bool:
    """Whether all files of a readable manifest are there, in their sizes. Digests are compared when they are loaded."""
    files = read_manifest(path)["files"]
    return not any(lack_of(path, name, size) for name, (size, _) in files.items())


def lack_of(path: Path, name: str, size: int) -> str:
    """For an error message: that the file is missing, or has another size. "" if neither is so."""
    file = path / name
    if not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return ""


def by_parameter() -> StateDictOptions:
    """Optimizer state as ``param_groups.NAME.lr``: lists of groups would collide, as processes hold different parameters."""
    return StateDictOptions(flatten_optimizer_state_dict=True)


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and settings of the optimizer, both by parameter."""
    found = get_optimizer_state_dict(model, optimizer, options=by_parameter())
    settings = {name: value for name, value in found.items() if name.startswith("param_groups.")}
    return {name: value for name, value in found.items() if name not in settings}, settings


def _discard(path: Path) -> None:
    """Remove a file or folder as far as possible. A checkpoint is renamed first, so that no part of it looks whole."""
    gone = path if path.name.startswith(".") else path.with_name(f"{_PARTIAL}old-{path.name}")
    with contextlib.suppress(OSError):
        if gone != path:
            path.rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)


def _collect(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Tensors of generators, model and optimizer, which are the ones that training changes."""
    state: dict[str, dict[str, Any]] = {"rng": torch_states(rank_and_size()[0])}

    def collect_own() -> None:
        state["model"] = get_model_state_dict(model)
        state["optimizer"], _ = optimizer_state(model, optimizer)

    on_all(collect_own)  # a process that runs out of memory here must not leave the others waiting in what follows
    # Not `catch_warnings`, whose end in a thread would undo what other threads did to the filters meanwhile.
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|uninitialized)", UserWarning)
    return state


def _write(partial: Path, taken: _Snapshot, group: dist.ProcessGroup | None, after: float) -> None:
    """Write all files of a checkpoint, and sync them; its time is later than `after`, in seconds since 1970."""
    rank, size = rank_and_size()
    # Trap: thread_count above 1 loses an exception of another thread (a full disk), and the file with it.
    # Trap: sync_files of torch 2.11 to 2.13 syncs before Python's buffer is written, which loses the end of each file.
    # Trap: if torch copies ahead, it waits for the compute stream, even where nothing is on the device.
    ahead = 0 if taken.is_copy else _COPY_AHEAD
    writer = _Writer(partial, thread_count=1, sync_files=False, per_thread_copy_ahead=ahead)
    dcp.save(dict(taken.tensors), storage_writer=writer, process_group=group, no_dist=size == 1)

    def sync_own() -> None:
        for file in partial.glob(f"__{rank}_*"):
            sync(file)

    on_all(sync_own, group)
    generators = on_all(lambda: taken.generators, group)

    def write_once() -> None:
        write_synced(partial / "trainer.json", json.dumps({"about": taken.about, "rng": generators}))
        if taken.config is not None:
            (partial / "model").mkdir()
            taken.config.save_pretrained(partial / "model")

    on_main(write_once, group)
    names = on_main(lambda: sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file()), group)
    parts = on_all(
        lambda: {n: (os.path.getsize(partial / n), digest_of(partial / n)) for n in names[rank::size]}, group
    )
    files = {name: part[name] for name in names for part in parts if name in part}
    manifest = {"files": files, "written": max(time.time(), after + 0.001)}
    on_main(lambda: write_synced(partial / MANIFEST, json.dumps(manifest)), group)
    on_main(lambda: sync_tree(partial), group)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, whose error is the OSError that caused it: torch sends errors to other processes without their causes."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = cause_of(error)
            if cause is error:
                raise
            raise cause from error


def cause_of(error: BaseException) -> BaseException:
    """The first failure inside torch's `CheckpointException` (a BaseException); of its causes the OSError, if there is one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    inner: BaseException | None = error
    seen: set[int] = set()  # contexts may go round: one that is raised again while its own consequence is handled
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, OSError):
            return inner
        seen.add(id(inner))
        inner = inner.__cause__ or inner.__context__
    return error
