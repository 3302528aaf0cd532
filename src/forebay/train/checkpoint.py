"""Checkpoints that are written whole or not at all, read only when whole, and resumed bitwise.

Input: a model, its optimizer, the random generators and the trainer's position. Output: a folder per checkpoint under the
run's ``checkpoints/``, in the format of ``torch.distributed.checkpoint``, with names and shapes of the whole model, so that
another number of processes or another layout reads it too. All processes call the methods of `Checkpoints` and `load` together.
A save in the background writes from a copy in host memory, in a thread with a process group of its own. A checkpoint may come
from elsewhere: all of it is read as plain data, JSON and tensors. The optimizer's settings are the configuration's; learning
rate and data order are functions of the step, so they have no state to save.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from forebay.errors import RunError, UsageError, first_line
from forebay.train.distributed import on_all, on_main, rank_and_size
from forebay.train.durable import make_folder, replace_text, sync, sync_tree, write_synced
from forebay.train.remote import MANIFEST, RemoteFolder
from forebay.train.staging import HostCopies

_DESCRIPTIONS = (
    described.BytesStorageMetadata,
    described.ChunkStorageMetadata,
    described.Metadata,
    described.MetadataIndex,
    described.StorageMeta,
    described.TensorProperties,
    described.TensorStorageMetadata,
    described._MEM_FORMAT_ENCODING,
)
# The classes that a checkpoint's ``.metadata`` may name, besides dtypes: what torch 2.11 to 2.13 write for tensors. Each is
# a plain record, or makes one.
_PLAIN_CLASSES = MappingProxyType(
    {
        ("collections", "OrderedDict"): dict,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        # A path is pickled with its class; only its text matters.
        ("pathlib", "PosixPath"): PurePath,
        ("pathlib", "WindowsPath"): PurePath,
        ("pathlib._local", "PosixPath"): PurePath,
        ("pathlib._local", "WindowsPath"): PurePath,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    }
    | {(described.__name__, kind.__name__): kind for kind in _DESCRIPTIONS}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN_CLASSES:
            return _PLAIN_CLASSES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in a description of tensors")


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint without running code in it.

    torch's reader unpickles ``.metadata`` without restriction, so a checkpoint of unknown origin could run any command.
    Here the pickle may name `_PLAIN_CLASSES` only, and files outside of the folder are not opened.

    Raises:
        RunError: from `read_metadata`: ``.metadata`` is missing, damaged, or more than a description of tensors in this folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                found = _Unpickler(stream).load()
            self._check(found)
        except RunError:
            raise
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror}") from error
        except Exception as error:  # a pickle that was damaged on purpose may raise anything
            raise RunError(
                f"{file} is not read: {first_line(error)}; it is damaged or was not written by Forebay, and could run code"
            ) from error
        found.storage_meta = described.StorageMeta(load_id=self.load_id)
        return found

    def _check(self, found: Any) -> None:
        """Check all types, and that every file lies in the folder: torch joins its name with the folder's."""
        if not isinstance(found, described.Metadata):
            raise ValueError(f"it holds a {type(found).__name__}, not a description of tensors")
        kinds = (described.TensorStorageMetadata, described.BytesStorageMetadata)
        for name, stored in found.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(stored, kinds):
                raise ValueError(f"it describes {name!r} as a {type(stored).__name__}")
        for index, place in found.storage_data.items():
            if not isinstance(index, described.MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
                raise ValueError("its table of files is not what torch writes")
            name = place.relative_path
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".distcp"):
                raise ValueError(f"it names the file {name!r}, which is no tensor file of this folder")


class PlainPlanner(DefaultLoadPlanner):
    """Loads tensors and refuses other values, which torch would unpickle without restriction."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise RunError(f"{read_item.dest_index.fqn} is not a tensor in the checkpoint")


class Damaged(RunError):
    """A file of a checkpoint is missing or not as it was written."""


_PREFIX, _PARTIAL = "step-", ".partial-"
_BEFORE = "-before"  # suffix of a checkpoint while its step is saved again
_SAME_MODEL = "resume with the configuration it was made with"


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
    """What a checkpoint holds.

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
    ``.partial-step-...``, synced and renamed. ``latest`` holds the name of the newest and is written just before the
    rename; while it names a folder that does not exist, the newest that exists counts. So a crash, a full disk or a power
    cut at any time leaves the newest whole checkpoint to be found, and the next save removes what it left behind.

    One save is under way at a time: `start` begins it, `wait` ends it.

    Args:
        folder: ``<run>/checkpoints``; created with the first checkpoint.
        keep: number of newest checkpoints that stay.
        keep_hours: hours between older ones that stay too; 0 for none.
        remote: gets each checkpoint after it was written here, and keeps as many.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_hours: float = 0.0, remote: RemoteFolder | None = None):
        self.folder, self.keep, self.keep_hours, self.remote = folder, keep, keep_hours, remote
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
        """Write a checkpoint, point ``latest`` to it, and delete those that need not stay. Gradients must be None.

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
        began, final = time.monotonic(), self.folder / f"{_PREFIX}{step:08d}"
        try:
            tensors = _collect(model, optimizer)
            copied, waited = self._copied(tensors) if background else (None, "")
        except (RuntimeError, RunError) as error:
            raise self._failed(final, error) from error
        taken = _Snapshot(
            tensors if copied is None else copied,
            copied is not None,
            {**about, "step": step},
            _host_states(),
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

    def close(self) -> BaseException | None:
        """Wait for a save under way, if not for the other processes, and free its memory; returns the error of a failed one."""
        commit, self._commit = self._commit, None
        if commit is not None and commit.ident is not None:
            commit.join()
        if self._copies is not None:
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
            _write(partial, taken, group)
            on_main(lambda: self._publish(partial, final), group)
        except (CheckpointException, OSError, RuntimeError, RunError) as error:
            raise self._failed(final, error) from error
        finally:
            if rank_and_size()[0] == 0:
                _discard(partial)

    def _upload(self, path: Path, group: dist.ProcessGroup | None) -> str:
        """Upload a checkpoint, each process a part of its files; returns why that failed, or ""."""
        remote, (rank, size) = self.remote, rank_and_size()
        assert remote is not None

        def expire() -> None:
            written = remote.names()
            remote.remove(self._expired({name: written[name] for name in written if name != path.name}))

        try:
            on_main(lambda: remote.begin(path.name), group)
            files = sorted(_manifest(path))
            on_all(lambda: remote.put(path, files[rank::size]), group)
            on_main(lambda: remote.finish(path), group)
            on_main(expire, group)
        except (OSError, RuntimeError, RunError) as error:
            return f"checkpoint {path} is whole, but could not be uploaded: {first_line(error)}"
        return ""

    def fetch(self) -> Path | None:
        """Download the remote folder's newest checkpoint if it was written after the newest one here. By one process only.

        Raises:
            RunError: it cannot be read from there or written here.
        """
        found = None if self.remote is None else self.remote.newest()
        if self.remote is None or found is None:
            return None
        name, written = found
        own = self.latest()
        if own is not None and _written(own) >= written:
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
        found: list[tuple[int, str]] = []
        for path in self.folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # no manifest, or a thread removes the checkpoint now
                found.append(((path / MANIFEST).stat().st_mtime_ns, path.name))
        return [self.folder / name for _, name in sorted(found)]

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names, else the newest; None if there is none."""
        named = self._pointed()
        if named is not None and (self.folder / named).is_dir():
            return self.folder / named
        found = self.all()
        return found[-1] if found else None

    def _pointed(self) -> str | None:
        """The name in ``latest``; never a path out of the folder."""
        try:
            named = (self.folder / "latest").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return named if named.startswith(_PREFIX) and Path(named).name == named else None

    def _begin(self, partial: Path) -> None:
        """Create an empty folder, and remove what a crash left. The run's lock keeps other processes out."""
        make_folder(self.folder)
        for left in [*self.folder.glob(f"{_PARTIAL}*"), self.folder / ".latest.new"]:
            _discard(left)
        for before in self.folder.glob(f"{_PREFIX}*{_BEFORE}"):
            if before.with_name(before.name.removesuffix(_BEFORE)).is_dir():
                _discard(before)  # otherwise it is the only checkpoint of its step
        partial.mkdir()

    def _publish(self, partial: Path, final: Path) -> None:
        """Rename the new checkpoint and point ``latest`` to it. A whole checkpoint exists under some name at all times.

        ``latest`` is written while no folder has the name. So it either names the new checkpoint or nothing, and then
        `latest` goes by age. A checkpoint of the same step, from an earlier branch of the run, is renamed first.
        """
        before, pointed = final.with_name(f"{final.name}{_BEFORE}"), self._pointed()
        again = final.exists()
        try:
            if again:
                final.rename(before)
                sync(self.folder)
            replace_text(self.folder / "latest", final.name)
            partial.rename(final)
        except OSError:
            with contextlib.suppress(OSError):  # a second failure leaves what a crash would leave
                self._roll_back(before if again else None, final, pointed)
            raise
        sync(self.folder)
        others = {p.name: (p / MANIFEST).stat().st_mtime for p in self.all() if p not in (final, before)}
        older = [self.folder / name for name in self._expired(others)]
        for old in [*([before] if before.exists() else []), *older]:
            _discard(old)

    def _expired(self, others: Mapping[str, float]) -> list[str]:
        """Of checkpoints older than the newest, and when each was written, oldest first: those that need not stay."""
        spared: list[float] = []
        expired = []
        for name in list(others)[: -(self.keep - 1) or None]:
            if self.keep_hours and (not spared or others[name] - spared[-1] >= 3600 * self.keep_hours):
                spared.append(others[name])
            else:
                expired.append(name)
        return expired

    def _roll_back(self, before: Path | None, final: Path, pointed: str | None) -> None:
        """Undo `_publish`: ``latest`` first, or it could name the old checkpoint as if it were new."""
        if self._pointed() != pointed:
            if pointed is None:
                (self.folder / "latest").unlink()
            else:
                replace_text(self.folder / "latest", pointed)
        if before is not None and before.exists():
            before.rename(final)
        sync(self.folder)

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


def find(given: Path) -> Path:
    """The checkpoint of a given checkpoint folder, run folder or ``checkpoints`` folder.

    Raises:
        UsageError: there is none.
    """
    if (given / MANIFEST).is_file() or (given.name.startswith(_PREFIX) and given.is_dir()):
        return given
    for folder in (given / "checkpoints", given):
        found = Checkpoints(folder).latest()
        if found is not None:
            return found
    raise UsageError(f"{given} holds no checkpoint; give a run's folder or one of its checkpoints/{_PREFIX}... folders")


def verify(path: Path) -> None:
    """Compare every file with the manifest, each process a part of them.

    Raises:
        RunError: a file is missing, truncated or altered. The message names it and an earlier checkpoint, if there is one.
    """
    rank, size = rank_and_size()
    on_all(lambda: _compare(path, dict(list(_manifest(path).items())[rank::size])))


def _written(path: Path) -> float:
    """When a checkpoint was written, in seconds since 1970; 0 for one that is damaged or older than this entry."""
    try:
        return float(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file."""
    manifest = path / MANIFEST
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, f"{manifest.name} is missing or unreadable") from error


def _compare(path: Path, files: Mapping[str, Any]) -> None:
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise _damaged(path, f"the content of {name} has changed since it was written")


def read_about(path: Path) -> dict[str, Any]:
    """The `about` of `Checkpoints.save`, with ``step``, without reading tensors.

    Raises:
        RunError: a JSON file is missing or damaged.
    """
    _compare(path, {name: of for name, of in _manifest(path).items() if name.endswith(".json")})
    return json.loads((path / "trainer.json").read_text(encoding="utf-8"))["about"]


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Verify a checkpoint and read it into a model and, to resume, its optimizer and the random generators.

    Call it last, when no random numbers are drawn any more before the next step. A process without a counterpart in the
    checkpoint gets random numbers of its own, which depend on those of process 0.

    Returns:
        The `about` of `Checkpoints.save`, with ``step``.

    Raises:
        RunError: the checkpoint is damaged, or its tensors do not fit this model; the first one is named.
    """
    verify(path)
    rank, size = rank_and_size()
    record = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    counterpart = rank if rank < len(record["rng"]) else 0
    reader = PlainReader(path)
    held = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {"model": get_model_state_dict(model)}
    settings: dict[str, Any] = {}
    if optimizer is not None:
        # The settings stay this optimizer's: a checkpoint's would silently override the configuration.
        wanted["optimizer"], settings = _optimizer_state(model, optimizer)
        # Only generators that were saved and exist here: the run may move to a machine with or without a GPU.
        wanted["rng"] = {name: state for name, state in _torch_rng(counterpart).items() if f"rng.{name}" in held}
    _check_fits(path, held, wanted["model"])
    _read_tensors(path, wanted, reader, size)
    set_model_state_dict(model, wanted["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, {**wanted["optimizer"], **settings}, options=_by_parameter())
        for name, state in wanted["rng"].items():
            (torch.set_rng_state if name.endswith("-cpu") else torch.cuda.set_rng_state)(state)
        _set_host_states(record["rng"][counterpart])
        if counterpart != rank:
            seed_all(int(torch.randint(1 << 62, (rank + 1,))[rank]))
    return record["about"]


def _read_tensors(path: Path, wanted: dict[str, Any], reader: PlainReader, size: int) -> None:
    """Fill the tensors of `wanted` in place."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is uninitialized", with one process
            dcp.load(wanted, storage_reader=reader, planner=PlainPlanner(), no_dist=size == 1)
    except (CheckpointException, OSError, RuntimeError) as error:
        cause = cause_of(error)
        # torch's own text advises to load it all the same.
        foreign = isinstance(cause, pickle.UnpicklingError)
        why = "its tensors are not plain data, and are not unpickled" if foreign else first_line(cause)
        raise RunError(f"checkpoint {path} cannot be read: {why}") from error


def _by_parameter() -> StateDictOptions:
    """Optimizer state as ``param_groups.NAME.lr``: lists of groups would collide, as processes hold different parameters."""
    return StateDictOptions(flatten_optimizer_state_dict=True)


def _optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and settings of the optimizer, both by parameter."""
    found = get_optimizer_state_dict(model, optimizer, options=_by_parameter())
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
    state: dict[str, dict[str, Any]] = {"rng": _torch_rng(rank_and_size()[0])}

    def collect_own() -> None:
        state["model"] = get_model_state_dict(model)
        state["optimizer"], _ = _optimizer_state(model, optimizer)

    on_all(collect_own)  # a process that runs out of memory here must not leave the others waiting in what follows
    # Not `catch_warnings`, whose end in a thread would undo what other threads did to the filters meanwhile.
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|uninitialized)", UserWarning)
    return state


def _write(partial: Path, taken: _Snapshot, group: dist.ProcessGroup | None) -> None:
    rank, size = rank_and_size()
    # Trap: thread_count above 1 loses an exception of another thread (a full disk), and the file with it.
    # Trap: sync_files of torch 2.11 to 2.13 syncs before Python's buffer is written, which loses the end of each file.
    # Trap: if torch copies ahead, it waits for the compute stream, even where nothing is on the device.
    ahead = 0 if taken.is_copy else _COPY_AHEAD
    writer = dcp.FileSystemWriter(partial, thread_count=1, sync_files=False, per_thread_copy_ahead=ahead)
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
    parts = on_all(lambda: {n: (os.path.getsize(partial / n), _digest(partial / n)) for n in names[rank::size]}, group)
    files = {name: part[name] for name in names for part in parts if name in part}
    manifest = {"files": files, "written": time.time()}
    on_main(lambda: write_synced(partial / MANIFEST, json.dumps(manifest)), group)
    on_main(lambda: sync_tree(partial), group)


def _check_fits(path: Path, held: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Check names and shapes of the checkpoint's weights against the model, of which several processes may hold parts."""
    another = f"checkpoint {path} is of another model"

    def check_own() -> list[str]:
        for name, tensor in model.items():
            stored = held.get(f"model.{name}")
            if stored is None:
                raise RunError(f"{another}: it has no {name}; {_SAME_MODEL}")
            if not isinstance(stored, TensorStorageMetadata):
                raise RunError(f"checkpoint {path} is damaged: its {name} is not a tensor")
            if hasattr(tensor, "shape") and tuple(stored.size) != tuple(tensor.shape):
                shapes = f"{name} has shape {list(stored.size)}, this model needs {list(tensor.shape)}"
                raise RunError(f"{another}: {shapes}; {_SAME_MODEL}")
        return list(model)

    known = {f"model.{name}" for names in on_all(check_own) for name in names}
    for name in held:
        if name.startswith("model.") and name not in known:
            raise RunError(f"{another}: this one has no {name.removeprefix('model.')}; {_SAME_MODEL}")


def _damaged(path: Path, what: str) -> Damaged:
    others = [p for p in Checkpoints(path.parent).all() if p != path]
    advice = (
        f"resume from an earlier one: --resume {others[-1]}" if others else "there is no other checkpoint beside it"
    )
    return Damaged(f"checkpoint {path} is damaged: {what}; {advice}")


def cause_of(error: BaseException) -> BaseException:
    """The first failure inside torch's `CheckpointException` (a BaseException); of its causes the OSError, if there is one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _torch_rng(rank: int) -> dict[str, torch.Tensor]:
    """States of torch's generators of this process and its current GPU, named by rank and device."""
    states = {f"{rank}-cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}-cuda"] = torch.cuda.get_rng_state()
    return states


def seed_all(seed: int) -> None:
    """Seed all generators, including those of every CUDA device."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _host_states() -> dict[str, Any]:
    """States of Python's and NumPy's generators, as JSON."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [name, np.asarray(key).tolist(), *rest]}


def _set_host_states(states: Mapping[str, Any]) -> None:
    """Restore what `_host_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))


class SavedRngStates:
    """The states of all generators at construction, with that of `device` if it is a CUDA device.

    Reading or setting the state of a CUDA generator does not synchronize with the device: the state is on the host.
    """

    def __init__(self, device: torch.device):
        self._device, self._host, self._cpu = device, _host_states(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        _set_host_states(self._host)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
