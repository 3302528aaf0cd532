"""The folder of a run: which one a new run takes, and where a resumed run continues.

Input: a `Config` and what to resume. Output: a `Start`. A run never writes into the folder of another run: it takes the
first of NAME, NAME-2, NAME-3, ... that holds none, and a `FolderLock` keeps out a second run that starts at the same time.
Nothing is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.train import checkpoint
from forebay.train.durable import LOCK, FolderLock, holder, make_folder


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder and, when resumed, the checkpoint."""

    folder: Path
    resumed: Path | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def claim_start(config: Config, resume: str | None, lock: FolderLock) -> Start:
    """`where_to_start`, with the run's folder locked until `lock` is released. A new run takes the next folder if one is locked.

    Raises:
        UsageError: there is nothing to resume, or another process trains in that folder.
        RunError: the folder cannot be written.
    """
    if resume is not None:
        start = where_to_start(config, resume)
        if not _lock(start, lock):
            raise UsageError(
                f"the run {start.folder} is going on in {holder(start.folder)}; wait for its end or stop it, then --resume it"
            )
        return start
    for folder in filter(_is_free, _numbered(Path(config.log.folder).expanduser())):
        start = Start(folder)
        if _lock(start, lock):
            if _is_free(folder):
                return start
            lock.release()  # another run held it until now, and is done
    raise AssertionError("there is always another folder")


def where_to_start(config: Config, resume: str | None) -> Start:
    """The folder of a new run, or the checkpoint to resume.

    Args:
        config: `log.folder` is NAME, the first of NAME, NAME-2, NAME-3, ...
        resume: None starts a new run; "" resumes the newest of these runs that has a checkpoint; else a run or checkpoint folder.

    Raises:
        UsageError: there is nothing to resume.
    """
    base = Path(config.log.folder).expanduser()
    if resume is None:
        return Start(next(filter(_is_free, _numbered(base))))
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


def unwritable(folder: Path, error: OSError) -> RunError:
    """The error for a run's folder that cannot be written."""
    return RunError(f"the run's folder {folder} cannot be written: {error.strerror}; set log.folder to another")


def _lock(start: Start, lock: FolderLock) -> bool:
    try:
        make_folder(start.folder)
        return lock.take(start.folder)
    except OSError as error:
        raise unwritable(start.folder, error) from error


def _is_free(folder: Path) -> bool:
    """Whether no run has written into the folder. A lock file alone does not count: its run may be over."""
    return not folder.is_dir() or all(entry.name == LOCK for entry in folder.iterdir())


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1
