"""Copies of a run's checkpoints in a remote folder that fsspec reaches, such as ``s3://bucket/run``.

Input: folders of whole checkpoints on this machine. Output: the same below the URL, ``step-00000010/...``. ``manifest.json`` is
uploaded last and removed first, so a folder that has one is whole. All processes share the upload of a checkpoint, each with
credentials of its own. Nothing is kept but the connection.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from forebay.errors import RunError, UsageError, first_line
from forebay.train.distributed import on_all, rank_and_size

T = TypeVar("T")
MANIFEST = "manifest.json"
PREFIX = "step-"
NAME = re.compile(rf"{PREFIX}\d{{8,}}")
"""Names of a run's checkpoints. Copies that somebody made have others: whole or not, they are not the run's to remove."""


class RemoteFolder:
    """A folder of checkpoints behind a URL of fsspec, or a path.

    Raises:
        UsageError: fsspec knows no such URL, or needs a package that is not installed.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        try:
            local = fsspec.utils.get_protocol(self.url) in ("file", "local")
            self._files, self._root = fsspec.core.url_to_fs(self.url, **({"auto_mkdir": True} if local else {}))
        except (ImportError, ValueError) as error:
            raise UsageError(f"checkpoint.remote = {url!r} cannot be used: {first_line(error)}") from error
        except Exception as error:  # of any package
            raise self._refused(error) from error

    def check(self, name: str) -> None:
        """Write and remove a file `name`, to see that the store can be reached and lets this process write.

        Raises:
            UsageError: it cannot, such as for wrong credentials or a bucket that does not exist.
        """
        try:
            self._files.pipe_file(self._path(name), b"")
            self._files.rm_file(self._path(name))
        except Exception as error:
            raise self._refused(error) from error

    def names(self) -> dict[str, float]:
        """Whole checkpoints, and when each was written in seconds since 1970; oldest first.

        Raises:
            RunError: the store cannot be read.
        """
        found = self._try("read", self._written)
        return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))

    def newest(self) -> tuple[str, float] | None:
        """Name and time of the newest checkpoint; None if there is none. Raises as `names`."""
        return next(reversed(self.names().items()), None)

    def put(self, folder: Path, files: list[str]) -> None:
        """Upload some files of a checkpoint's folder, which all processes share among them.

        Raises:
            RunError: the store does not take one of them.
        """
        for file in files:
            self._try("written", partial(self._files.put_file, str(folder / file), self._path(folder.name, file)))

    def finish(self, folder: Path) -> None:
        """Mark a checkpoint as whole. All its files are there."""
        self.put(folder, [MANIFEST])

    def remove(self, names: list[str]) -> None:
        for name in names:
            self._try("written", partial(self._remove, name))

    def get(self, name: str, folder: Path) -> None:
        """Download a checkpoint into a folder. Its digests are not compared.

        Raises:
            RunError: the store cannot be read, or the manifest names a file outside of the folder.
        """
        manifest = self._try("read", lambda: self._read(name, MANIFEST))
        for file in [*self._listed(name, manifest), MANIFEST]:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self._try("read", partial(self._files.get_file, self._path(name, file), str(target)))

    def _listed(self, name: str, manifest: str) -> list[str]:
        """Names of the files of a checkpoint."""
        try:
            names = list(json.loads(manifest)["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.url}/{name}/{MANIFEST} is unreadable") from error
        for file in names:
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts:
                raise RunError(f"{self.url}/{name}/{MANIFEST} names {file!r}, which is not in its folder")
        return names

    def _written(self) -> dict[str, float]:
        self._files.invalidate_cache()
        try:
            folders = [PurePosixPath(p).name for p in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return {}
        written: dict[str, float] = {}
        for name in folders:
            if NAME.fullmatch(name):
                with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # not whole
                    written[name] = float(json.loads(self._read(name, MANIFEST))["written"])
        return written

    def _remove(self, name: str) -> None:
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name, MANIFEST))
        with suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _read(self, *parts: str) -> str:
        return self._files.cat_file(self._path(*parts)).decode()

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    def _try(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # each store has errors of its own
            raise RunError(f"{self.url} cannot be {what}: {_reason(error)}") from error

    def _refused(self, error: Exception) -> UsageError:
        advice = "check that the folder or bucket exists, and the credentials of this process"
        return UsageError(f"checkpoint.remote = {self.url!r} cannot be written: {_reason(error)}; {advice}")


def open_checked(url: str) -> RemoteFolder | None:
    """The remote folder of a run after `RemoteFolder.check` on all processes, which call this together; None for "".

    Raises:
        UsageError: as `RemoteFolder` and `RemoteFolder.check`.
    """
    opened: list[RemoteFolder] = []

    def open_own() -> None:
        opened.append(RemoteFolder(url))
        opened[0].check(f".check-{rank_and_size()[0]}")

    if url:
        on_all(open_own)
    return opened[0] if opened else None


def _reason(error: Any) -> str:
    return getattr(error, "strerror", None) or first_line(error)
