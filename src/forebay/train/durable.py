"""Files and folders that survive a crash, and a lock on a folder that does not.

In: paths and texts. Out: on disk, whole or as before.

    write_synced(file, text)     a new file, on disk when the call returns
    replace_text(file, text)     the file has the old or the new text at every moment
    make_folder(folder)          a folder and its parents
    sync, sync_files, sync_tree  one file or folder; several; everything in a folder
    FolderLock                   one holder a folder, among all processes; the kernel drops it when the process ends

A name in a folder is on disk only when the folder itself was synced, after the file that it names. Nothing here is kept but
the open file of a lock.
"""

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK = ".lock"
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


def write_synced(file: Path, content: str) -> None:
    """Write a file that no one reads before its folder is synced."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_text(file: Path, content: str) -> None:
    """Write or replace a file at once."""
    new = file.with_name(f".{file.name}.new")
    try:
        write_synced(new, content)
        new.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync(file.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and the parents that are missing; each is on disk."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Put a folder with all that is in it on disk."""
    sync_files((*folder.rglob("*"), folder))


def sync_files(paths: Iterable[Path]) -> None:
    """Put the contents of these files and folders on disk; what is neither is left alone."""
    for path in paths:
        if path.is_dir() or path.is_file():
            sync(path)


class FolderLock:
    """Holds at most one folder, by ``flock`` on its file ``.lock``, until `release` or the end of the process (kill -9 too).

    The file names the process that holds the folder. Some network file systems have no locks: `take` then warns and succeeds.

    Attributes:
        locked: whether a lock is held, and not only a folder on a file system without locks.
    """

    def __init__(self) -> None:
        self.locked = False
        self._folder: Path | None = None
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, folder: Path) -> bool:
        """Whether the folder, which exists, is this object's now. Does not wait.

        Raises:
            OSError: the lock's file cannot be made.
            RuntimeError: this object holds a folder already.
        """
        if self._handle is not None:
            raise RuntimeError(f"this lock holds {self._folder} already; release it first")
        while True:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(handle)
                    raise
                warnings.warn(
                    f"the file system of {folder} has no locks ({error.strerror}): "
                    "make sure that no other process uses this folder at the same time",
                    stacklevel=2,
                )
                self._folder, self._handle = folder, handle
                return True
            # Trap: who held it may have removed the file after it was opened here; another process may hold a new one by now.
            if _same_file(handle, folder / LOCK):
                break
            os.close(handle)
        self._folder, self._handle, self.locked = folder, handle, True
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Let go of the folder. A folder with nothing in it but the lock is removed. Nothing, if none is held."""
        if self._handle is None or self._folder is None:
            return
        folder, handle = self._folder, self._handle
        self._folder, self._handle = None, None
        try:
            with contextlib.suppress(OSError):
                if self.locked and _same_file(handle, folder / LOCK):
                    (folder / LOCK).unlink()
                    folder.rmdir()
        finally:
            self.locked = False
            os.close(handle)


def holder(folder: Path) -> str:
    """Who holds a folder, such as ``process 17 on node3``."""
    try:
        return (folder / LOCK).read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
