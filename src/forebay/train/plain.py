"""Tensors of a checkpoint as plain data: reading one never runs code that is in it.

In: a folder in the format of ``torch.distributed.checkpoint``. Out: its metadata, and its tensors in the caller's.

torch's own reader unpickles ``.metadata``, and values that are not tensors, with all that pickle can do: a checkpoint of unknown
origin could run any command. Here a pickle may name the classes of torch's metadata and nothing else, values that are not
tensors are not read, and files outside of the folder are not opened. No state is kept.
"""

import io
import pickle
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from forebay.train.errors import RunError, first_line

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
