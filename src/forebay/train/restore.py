"""Reads checkpoints: finds the one to go on from, compares it with its manifest, and fills a model and an optimizer.

Input: a folder that `forebay.train.checkpoint` wrote, perhaps elsewhere. Output: tensors, random generators and the trainer's
position. All of it is read as plain data, JSON and tensors, so no code in it runs. All processes call `verify` and `load`
together; `find` and `read_about` read on one.
"""

import io
import json
import pickle
import re
import warnings
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, set_optimizer_state_dict

from forebay.errors import RunError, UsageError, first_line
from forebay.train.checkpoint import Checkpoints, by_parameter, cause_of, lack_of, optimizer_state, read_manifest
from forebay.train.distributed import on_all, rank_and_size
from forebay.train.durable import digest_of
from forebay.train.generators import seed_all, set_host_states, torch_states
from forebay.train.remote import MANIFEST, PREFIX

# Keys of a model's configuration that change no forward of it, or only those of training.
_MAY_CHANGE = re.compile(
    r"_.*|architectures|(torch_)?dtype|transformers_version|use_cache|output_.*|.*_token_id|initializer_.*"
    r"|.*dropout.*|.*jitter.*|router_aux_loss_coef|aux_loss_alpha|seq_aux"
)
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
# The classes that a checkpoint's ``.metadata`` may name, besides dtypes: what torch 2.11 to 2.15 write for tensors. Each is
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


def find(given: Path) -> Path:
    """The checkpoint of a given checkpoint folder, run folder or ``checkpoints`` folder.

    Raises:
        UsageError: there is none.
    """
    if (given / MANIFEST).is_file() or (given.name.startswith(PREFIX) and given.is_dir()):
        return given
    for folder in (given / "checkpoints", given):
        found = Checkpoints(folder).latest()
        if found is not None:
            return found
    raise UsageError(f"{given} holds no checkpoint; give a run's folder or one of its checkpoints/{PREFIX}... folders")


def verify(path: Path) -> None:
    """Compare every file with the manifest, each process a part of them.

    Raises:
        RunError: a file is missing, truncated or altered. The message names it and an earlier checkpoint, if there is one.
    """
    rank, size = rank_and_size()
    on_all(lambda: _compare(path, dict(list(_manifest(path).items())[rank::size])))


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file."""
    manifest = path / MANIFEST
    try:
        return {str(name): (int(size), str(digest)) for name, (size, digest) in read_manifest(path)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last two: JSON of another shape
        raise _damaged(path, f"{manifest.name} is missing or unreadable") from error


def _compare(path: Path, files: Mapping[str, Any]) -> None:
    for name, (size, digest) in files.items():
        try:
            lack = lack_of(path, name, size)
            changed = not lack and digest_of(path / name) != digest
        except OSError as error:  # a bad block of the disk
            raise _damaged(path, f"{name} cannot be read: {error.strerror}") from error
        if lack or changed:
            raise _damaged(path, lack or f"the content of {name} has changed since it was written")


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
        RunError: the checkpoint is damaged.
        UsageError: it is of another model; the first tensor or setting that differs is named.
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
        wanted["optimizer"], settings = optimizer_state(model, optimizer)
        # Only generators that were saved and exist here: the run may move to a machine with or without a GPU.
        wanted["rng"] = {name: state for name, state in torch_states(counterpart).items() if f"rng.{name}" in held}
    _check_fits(path, held, wanted["model"])
    _check_configuration(path, model)
    _read_tensors(path, wanted, reader, size)
    set_model_state_dict(model, wanted["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, {**wanted["optimizer"], **settings}, options=by_parameter())
        for name, state in wanted["rng"].items():
            (torch.set_rng_state if name.endswith("-cpu") else torch.cuda.set_rng_state)(state)
        set_host_states(record["rng"][counterpart])
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


def _check_fits(path: Path, held: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Check names and shapes of the checkpoint's weights against the model, of which several processes may hold parts."""

    def check_own() -> list[str]:
        for name, tensor in model.items():
            stored = held.get(f"model.{name}")
            if stored is None:
                raise _of_another_model(path, f"it has no {name}")
            if not isinstance(stored, TensorStorageMetadata):
                raise RunError(f"checkpoint {path} is damaged: its {name} is not a tensor")
            if hasattr(tensor, "shape") and tuple(stored.size) != tuple(tensor.shape):
                shapes = f"{name} has shape {list(stored.size)}, this model needs {list(tensor.shape)}"
                raise _of_another_model(path, shapes)
        return list(model)

    known = {f"model.{name}" for names in on_all(check_own) for name in names}
    for name in held:
        if name.startswith("model.") and name not in known:
            raise _of_another_model(path, f"this one has no {name.removeprefix('model.')}")


def _check_configuration(path: Path, model: Any) -> None:
    """Check that the checkpoint's model computes what this one does: names and shapes of its tensors may be the same."""
    config, file = getattr(model, "config", None), path / "model" / "config.json"
    if config is None or not file.exists():
        return
    stored = _computing(json.loads(file.read_text(encoding="utf-8")))
    own = _computing(json.loads(config.to_json_string()))  # as the file was written: without what is the default
    defaults = type(config)().to_dict()
    for name in sorted(stored.keys() | own.keys()):
        was, now = (found.get(name, defaults.get(name)) for found in (stored, own))
        if was != now:
            raise _of_another_model(path, f"its {name} is {was}, this model's is {now}")


def _computing(config: Any) -> Any:
    """The part of a model's configuration that its forward depends on, with those of its parts."""
    if not isinstance(config, dict):
        return config
    return {name: _computing(value) for name, value in config.items() if not _MAY_CHANGE.fullmatch(name)}


def _of_another_model(path: Path, why: str) -> UsageError:
    return UsageError(f"checkpoint {path} is of another model: {why}; resume with the configuration it was made with")


def _damaged(path: Path, what: str) -> Damaged:
    earlier = list(takewhile(lambda other: other != path, Checkpoints(path.parent).all()))
    advice = f"resume from an earlier one: --resume {earlier[-1]}" if earlier else "there is no earlier one beside it"
    return Damaged(f"checkpoint {path} is damaged: {what}; {advice}")
