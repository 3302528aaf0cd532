"""Locks on folders."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from forebay.train.durable import FolderLock, holder


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    came, told = os.pipe()
    child = os.fork()
    if child == 0:
        FolderLock().take(tmp_path)
        os.write(told, b"1")
        os.kill(os.getpid(), 9)
    os.read(came, 1)
    os.waitpid(child, 0)
    os.close(came)
    os.close(told)
    assert str(child) in holder(tmp_path)
    with FolderLock() as lock:
        assert lock.take(tmp_path)


def test_a_lock_whose_file_was_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes its file and lets go after another one has opened it."""
    first, second, third = FolderLock(), FolderLock(), FolderLock()
    (tmp_path / "keep").touch()
    assert first.take(tmp_path)
    opened = os.open

    def releases(path: Any, *arguments: Any) -> int:
        handle = opened(path, *arguments)
        first.release()
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", releases)
        assert second.take(tmp_path)
    assert not third.take(tmp_path)
    with pytest.raises(RuntimeError, match="holds"):
        second.take(tmp_path)
    second.release()
    second.release()
    assert third.take(tmp_path)
    third.release()
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock() as lock, pytest.warns(UserWarning, match="has no locks"):
        assert lock.take(tmp_path) and not lock.locked
