"""Crash-safe files and folders, and a lock on a folder that ends with its process.

Input: paths and texts. A file or folder is on disk either whole or as it was before. A name in a folder is on disk only after the
folder was synced, which has to follow the sync of the file that it names. Nothing is kept but the open file of a lock.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

LOCK = ".lock"
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


def write_synced(file: Path, content: str) -> None:
    """Write and sync a file. Its name is on disk once its folder is synced."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def replacing(file: Path, new: Path) -> Iterator[BinaryIO]:
    """The open file `new`, which takes the place of `file` at the end, synced; or is removed. Sync its folder afterwards."""
    try:
        with new.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def replace_text(file: Path, content: str) -> None:
    """Write or replace a file atomically: it has the old or the new text at every moment."""
    with replacing(file, file.with_name(f".{file.name}.new")) as stream:
        stream.write(content.encode())
    sync(file.parent)


def make_folder(folder: Path) -> None:
    """Make and sync a folder and its missing parents."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Write a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir() or path.is_file():
            sync(path)


class FolderLock:
    """Locks at most one folder, with ``flock`` on its file ``.lock``, until `release` or the end of the process (kill -9 too).

    The file names the process that holds the folder. On a file system without locks `take` warns and succeeds.

    Attributes:
        locked: whether a lock is held; False on a file system without locks.
    """

    def __init__(self) -> None:
        self.locked = False
        self._held: tuple[Path, int] | None = None  # folder, and handle of its lock file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, folder: Path) -> bool:
        """Lock an existing folder; False if another process holds it. Does not wait.

        Raises:
            OSError: the lock file cannot be created.
            RuntimeError: this object already holds a folder.
        """
        if self._held is not None:
            raise RuntimeError(f"this lock already holds {self._held[0]}; release it first")
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
                self._held = folder, handle
                return True
            # Trap: the previous holder may have removed the file after it was opened here, and another process may hold a
            # new one.
            if _same_file(handle, folder / LOCK):
                break
            os.close(handle)
        self._held, self.locked = (folder, handle), True
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Unlock the folder, if one is held. A folder that contains nothing but the lock is removed."""
        if self._held is None:
            return
        (folder, handle), self._held = self._held, None
        try:
            with contextlib.suppress(OSError):
                if self.locked and _same_file(handle, folder / LOCK):
                    (folder / LOCK).unlink()
                    folder.rmdir()
        finally:
            self.locked = False
            os.close(handle)


def holder(folder: Path) -> str:
    """The process that holds a folder, such as ``process 17 on node3``."""
    with contextlib.suppress(OSError):
        return (folder / LOCK).read_text(encoding="utf-8").strip() or "another process"
    return "another process"


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
