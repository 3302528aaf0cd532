"""Checkpoints: written whole or not at all, read only when whole, resumed bitwise.

In: a model, its optimizer, the random generators and what the trainer knows of its position. Out: a folder a checkpoint
under the run's ``checkpoints/``, in the format of ``torch.distributed.checkpoint``:

    checkpoints/latest                    name of the newest whole one
    checkpoints/step-00000010/.metadata, *.distcp    tensors: model, optimizer's state, torch's generators
                              trainer.json           step, data, configuration, Python's and numpy's generators by process
                              model/config.json      the Hugging Face configuration, for export
                              manifest.json          size and SHA-256 of every file above

All processes of a run call `Checkpoints.save` and `load` together: each writes its own shards of DTensors, and process 0 what
is said once. A process may hold a part of the model's layers: together they hold all of it. Tensors are known by the whole
model's names and shapes, so another number of processes, laid out in another way, reads them too.

A checkpoint is written to ``.partial-step-...``, synced to disk, and renamed. ``latest`` is written just before: while it names
a folder that is not there, the newest one that is there counts. So a crash or a failure (a full disk, a kill, a power cut) at
any moment leaves the newest whole checkpoint to be found; the next `save` removes what it left behind.

The optimizer's settings are the configuration's, not the checkpoint's; the learning rate and the order of data are functions of
the step. So there is no state of theirs to save.

A checkpoint may come from elsewhere: all of it is read as plain data (JSON, tensors; see `forebay.train.checkpoint`).
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
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
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
from forebay.train.distributed import on_main, processes, together
from forebay.train.durable import make_folder, sync, sync_files, sync_tree
from forebay.train.durable import replace_text as _replace_text
from forebay.train.durable import write_synced as _write_synced

# Tensors of a checkpoint as plain data: reading one never runs code that is in it.
#
# In: a folder in the format of ``torch.distributed.checkpoint``. Out: its metadata, and its tensors in the caller's.
#
# torch's own reader unpickles ``.metadata``, and values that are not tensors, with all that pickle can do: a checkpoint of
# unknown origin could run any command. Here a pickle may name the classes of torch's metadata and nothing else, values that are
# not tensors are not read, and files outside of the folder are not opened. No state is kept.

# What torch 2.11 to 2.13 write for tensors; dtypes beside these. Each one is a plain record or makes one.
_KNOWN = MappingProxyType(
    {
        ("collections", "OrderedDict"): dict,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        # A path is written as what it was; only its text matters.
        **{
            (module, name): PurePath
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath")
        },
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        **{
            (described.__name__, kind.__name__): kind
            for kind in (
                described.BytesStorageMetadata,
                described.ChunkStorageMetadata,
                described.Metadata,
                described.MetadataIndex,
                described.StorageMeta,
                described.TensorProperties,
                described.TensorStorageMetadata,
                described._MEM_FORMAT_ENCODING,
            )
        },
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a description of tensors has no use for")


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint's folder.

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
        except Exception as error:  # pickles that are damaged on purpose raise anything
            raise RunError(
                f"{file} is not read: {first_line(error)}; it is damaged, or not written by Forebay, and could run code"
            ) from error
        found.storage_meta = described.StorageMeta(load_id=self.load_id)
        return found

    def _check(self, found: Any) -> None:
        """Types, and that what is to be opened lies in the folder: torch joins the names with the folder's."""
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
    """Fills tensors; a value that is no tensor is refused. (torch would unpickle it with all that pickle can do.)"""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise RunError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint")


_PREFIX, _PARTIAL = "step-", ".partial-"
_BEFORE = "-before"  # after the name of a checkpoint whose step is just being saved again
_SAME_MODEL = "resume with the configuration it was made with"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``<run>/checkpoints``; made when the first one is written.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder, keep

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> Path:
        """Write one, move ``latest`` to it, and delete all but the newest `keep`.

        Args:
            step: number of the last finished step.
            model, optimizer: what to save; gradients must be None.
            about: what else `load` shall give back; JSON.

        Raises:
            RunError: it could not be written (a full disk, say); earlier ones are as they were.
        """
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            on_main(lambda: self._begin(partial))
            _write(partial, model, optimizer, {**about, "step": step})
            on_main(lambda: self._publish(partial, final))
        except (CheckpointException, OSError, RuntimeError, RunError) as error:
            raise self._failed(final, error) from error
        finally:
            if processes()[0] == 0:
                _discard(partial)
        return final

    def all(self) -> list[Path]:
        """Whole or damaged, in the order in which they were written."""
        found = [p for p in self.folder.glob(f"{_PREFIX}*") if (p / "manifest.json").is_file()]
        return sorted(found, key=lambda p: ((p / "manifest.json").stat().st_mtime_ns, p.name))

    def latest(self) -> Path | None:
        """What ``latest`` names; the newest folder if that is not there; None if there is none."""
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
        """An empty folder for the new checkpoint; what a crash left in `folder` goes. The run's lock keeps others out."""
        make_folder(self.folder)
        for left in [*self.folder.glob(f"{_PARTIAL}*"), self.folder / ".latest.new"]:
            _discard(left)
        for before in self.folder.glob(f"{_PREFIX}*{_BEFORE}"):
            if before.with_name(before.name.removesuffix(_BEFORE)).is_dir():
                _discard(before)  # else it is the only one of its step
        partial.mkdir()

    def _publish(self, partial: Path, final: Path) -> None:
        """Give the new checkpoint its name, and ``latest`` too. There is a whole checkpoint under some name at every moment.

        ``latest`` is written while nothing has the name: then it either names the new checkpoint, or nothing, and `latest` goes
        by age. What has the name already (the same step of an earlier branch) is set aside first.
        """
        before, pointed = final.with_name(f"{final.name}{_BEFORE}"), self._pointed()
        again = final.exists()
        try:
            if again:
                final.rename(before)
                sync(self.folder)
            _replace_text(self.folder / "latest", final.name)
            partial.rename(final)
        except OSError:
            with contextlib.suppress(OSError):  # as after a crash, then
                self._take_back(before if again else None, final, pointed)
            raise
        sync(self.folder)
        for old in ([before] if before.exists() else []) + self._outdated(final, before):
            _discard(old)

    def _take_back(self, before: Path | None, final: Path, pointed: str | None) -> None:
        """Undo what came before a rename that failed: first ``latest``, or it could name the old one as if it were new."""
        if self._pointed() != pointed:
            if pointed is None:
                (self.folder / "latest").unlink()
            else:
                _replace_text(self.folder / "latest", pointed)
        if before is not None and before.exists():
            before.rename(final)
        sync(self.folder)

    def _outdated(self, newest: Path, before: Path) -> list[Path]:
        """All but the newest `keep`."""
        return [p for p in self.all() if p not in (newest, before)][: -(self.keep - 1) or None]

    def _failed(self, final: Path, error: BaseException) -> RunError:
        cause = cause_of(error)
        if isinstance(cause, KeyboardInterrupt):
            raise cause  # a second Ctrl-C while writing; dcp wraps even this
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(cause)
        before = self.latest()
        kept = f"the earlier checkpoint {before} is intact" if before else "there is no earlier checkpoint"
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; free some space, or set log.folder to another disk" if full else ""
        return RunError(f"checkpoint {final} could not be written: {reason}; {kept}{advice}")


def find(given: Path) -> Path:
    """The checkpoint that a person means by a checkpoint's folder, a run's folder or its ``checkpoints`` folder.

    Raises:
        UsageError: there is none.
    """
    if (given / "manifest.json").is_file() or (given.name.startswith(_PREFIX) and given.is_dir()):
        return given
    for folder in (given / "checkpoints", given):
        found = Checkpoints(folder).latest()
        if found is not None:
            return found
    raise UsageError(f"{given} holds no checkpoint; give a run's folder or one of its checkpoints/{_PREFIX}... folders")


def verify(path: Path) -> None:
    """Compare every file with the manifest; several processes take a part of the files each.

    Raises:
        RunError: a file is missing, truncated or altered; the message names it and an earlier checkpoint, if there is one.
    """
    rank, size = processes()
    together(lambda: _compare(path, dict(list(_manifest(path).items())[rank::size])))


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest by name."""
    manifest = path / "manifest.json"
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
    """What was given to `Checkpoints.save` as `about`, with ``step``. Looks at no tensors.

    Raises:
        RunError: one of the small files is missing or damaged.
    """
    _compare(path, {name: of for name, of in _manifest(path).items() if name.endswith(".json")})
    return json.loads((path / "trainer.json").read_text(encoding="utf-8"))["about"]


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Verify a checkpoint and read it into a model and, for a resumption, its optimizer and the random generators.

    Call it last, when nothing draws random numbers any more before the next step. A process that had no counterpart when the
    checkpoint was written goes on with numbers of its own, which depend on those of process 0.

    Returns:
        What was given to `Checkpoints.save` as `about`, with ``step``.

    Raises:
        RunError: the checkpoint is damaged, or its tensors are not this model's; the first one is named.
    """
    verify(path)
    rank, size = processes()
    record = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    counterpart = rank if rank < len(record["rng"]) else 0
    reader = PlainReader(path)
    held = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {"model": get_model_state_dict(model)}
    settings: dict[str, Any] = {}
    if optimizer is not None:
        # The settings stay this optimizer's: a checkpoint's would silently undo what the configuration says now.
        wanted["optimizer"], settings = _optimizer_state(model, optimizer)
        # Generators of GPUs that were not there then are left alone, and there is no place for those that are gone.
        wanted["rng"] = {name: state for name, state in _torch_rng(counterpart).items() if f"rng.{name}" in held}
    _check_fits(path, held, wanted["model"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is uninitialized": one process is meant
            dcp.load(wanted, storage_reader=reader, planner=PlainPlanner(), no_dist=size == 1)
    except (CheckpointException, OSError, RuntimeError) as error:
        cause = cause_of(error)
        # torch's own text advises to load it all the same.
        foreign = isinstance(cause, pickle.UnpicklingError)
        why = "its tensors are not plain data, and are not unpickled" if foreign else first_line(cause)
        raise RunError(f"checkpoint {path} cannot be read: {why}") from error
    set_model_state_dict(model, wanted["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, {**wanted["optimizer"], **settings}, options=_by_parameter())
        _set_rng(wanted["rng"], record["rng"][counterpart])
        if counterpart != rank:
            _seed(int(torch.randint(1 << 62, (rank + 1,))[rank]))
    return record["about"]


def _by_parameter() -> StateDictOptions:
    """The optimizer's state as ``param_groups.NAME.lr``: lists of groups would collide where processes hold other parameters."""
    return StateDictOptions(flatten_optimizer_state_dict=True)


def _optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's tensors, and its settings, both by parameter."""
    found = get_optimizer_state_dict(model, optimizer, options=_by_parameter())
    settings = {name: value for name, value in found.items() if name.startswith("param_groups.")}
    return {name: value for name, value in found.items() if name not in settings}, settings


def _discard(path: Path) -> None:
    """Remove a file or folder, as far as it goes. A checkpoint loses its name first, so that no part of it looks like a whole."""
    gone = path if path.name.startswith(".") else path.with_name(f"{_PARTIAL}old-{path.name}")
    with contextlib.suppress(OSError):
        if gone != path:
            path.rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)


def _write(partial: Path, model: Any, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> None:
    rank, size = processes()
    state: dict[str, Any] = {"rng": _torch_rng(rank)}

    def collect() -> None:
        state["model"] = get_model_state_dict(model)
        state["optimizer"], _ = _optimizer_state(model, optimizer)

    together(collect)  # a process without memory for it must not leave the others in what follows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as in `load`
        # One thread: an exception in another thread of this writer (a full disk) would be lost, and the file with it.
        # Trap: sync_files of torch 2.11 to 2.13 syncs before Python's buffer is written: the end of each file is lost.
        writer = dcp.FileSystemWriter(partial, thread_count=1, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=size == 1)
    together(lambda: sync_files(partial.glob(f"__{rank}_*")))
    generators = together(_host_rng)
    on_main(lambda: _write_once(partial, model, about, generators))
    names = on_main(lambda: sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file()))
    parts = together(lambda: {n: (os.path.getsize(partial / n), _digest(partial / n)) for n in names[rank::size]})
    files = {name: part[name] for name in names for part in parts if name in part}
    on_main(lambda: _write_synced(partial / "manifest.json", json.dumps({"files": files})))
    on_main(lambda: sync_tree(partial))


def _write_once(partial: Path, model: Any, about: Mapping[str, Any], generators: list[dict[str, Any]]) -> None:
    """What process 0 writes for all."""
    _write_synced(partial / "trainer.json", json.dumps({"about": about, "rng": generators}))
    if hasattr(model, "config"):
        (partial / "model").mkdir()
        model.config.save_pretrained(partial / "model")


def _check_fits(path: Path, held: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """The checkpoint's weights are the model's, by name and shape; a model of which several processes hold parts is one."""

    def names() -> list[str]:
        _check_held(path, held, model)
        return list(model)

    known = {name for found in together(names) for name in found}
    for name in held:
        if name.startswith("model.") and name.removeprefix("model.") not in known:
            raise RunError(
                f"checkpoint {path} is of another model: this one has no {name.removeprefix('model.')}; {_SAME_MODEL}"
            )


def _check_held(path: Path, held: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """The checkpoint has what this process needs."""
    for name, tensor in model.items():
        stored = held.get(f"model.{name}")
        if stored is None:
            raise RunError(f"checkpoint {path} is of another model: it has no {name}; {_SAME_MODEL}")
        if not isinstance(stored, TensorStorageMetadata):
            raise RunError(f"checkpoint {path} is damaged: its {name} is no tensor")
        if hasattr(tensor, "shape") and tuple(stored.size) != tuple(tensor.shape):
            shapes = f"{name} has shape {list(stored.size)}, this model needs {list(tensor.shape)}"
            raise RunError(f"checkpoint {path} is of another model: {shapes}; {_SAME_MODEL}")


def _damaged(path: Path, what: str) -> RunError:
    others = [p for p in Checkpoints(path.parent).all() if p != path]
    advice = (
        f"resume from an earlier one: --resume {others[-1]}" if others else "there is no other checkpoint beside it"
    )
    return RunError(f"checkpoint {path} is damaged: {what}; {advice}")


def cause_of(error: BaseException) -> BaseException:
    """The exception inside dcp's wrapper (which is no Exception), else the OSError it was raised from, else itself."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _torch_rng(rank: int) -> dict[str, torch.Tensor]:
    """States of torch's generators, by names that say whose they are: a process's own, and that of its current GPU."""
    states = {f"{rank}-cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}-cuda"] = torch.cuda.get_rng_state()
    return states


def _host_rng() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [name, np.asarray(key).tolist(), *rest]}


def _set_rng(device: Mapping[str, torch.Tensor], host: Mapping[str, Any]) -> None:
    for name, state in device.items():
        (torch.set_rng_state if name.endswith("-cpu") else torch.cuda.set_rng_state)(state)
    version, words, gauss = host["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = host["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
