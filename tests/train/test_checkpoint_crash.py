"""Crash points: after a crash, a power cut or an error at any call that changes a disk, the newest whole checkpoint is found.

`Disk` stands in the place of the calls of `os` that change or sync files. It can end all work at one of them, as a kill does,
or fail one of them. `after_power_cut` makes the worst folder that a power cut may leave then: of each file what was synced last,
of each folder the names that were there when it was synced last.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.config import Data, DataSource
from forebay.errors import RunError
from forebay.train import restore, shards
from forebay.train.checkpoint import Checkpoints
from forebay.train.durable import LOCK
from forebay.train.shards import Corpus, load_corpus
from forebay.train.tokenizer import load_tokenizer

_CALLS = ("fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")


class Crash(BaseException):
    """The process is gone: nothing it does from here on has an effect."""


class Disk:
    """Counts calls in `folder` and ends at number `at` (from 0): by `Crash` from then on, or by one OSError.

    Attributes:
        calls: names of the calls so far.
    """

    def __init__(self, folder: Path, at: int = -1, error: bool = False):
        self.folder, self.at, self.error = folder, at, error
        self.calls: list[str] = []
        self._content: dict[int, tuple[bytes, int]] = {}  # and time of the last change
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: list[int] = []  # so that no number of a file is given to another one

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in _CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if number == self.at and self.error:
                raise OSError(errno.EIO, "Input/output error")
            if 0 <= self.at <= number and not self.error:
                raise Crash
            if name == "fsync":
                return self._synced(arguments[0])
            return call(*arguments, **options)

        return watched

    def _synced(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        number = os.fstat(handle).st_ino
        self._open.append(os.dup(handle))
        if path.is_dir():
            self._names[number] = {p.name: (p.stat().st_ino, p.is_dir()) for p in path.iterdir()}
        else:
            self._content[number] = path.read_bytes(), path.stat().st_mtime_ns

    def start(self) -> None:
        """Take the present content of the folder as synced."""
        for path in (self.folder, *self.folder.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            self._synced(handle)
            os.close(handle)

    def after_power_cut(self, target: Path) -> None:
        self._restore(self.folder.stat().st_ino, target)

    def _restore(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, (inside, is_folder) in self._names.get(number, {}).items():
            if is_folder:
                self._restore(inside, target / name)
            else:
                content, changed = self._content.get(inside, (b"", 0))
                (target / name).write_bytes(content)
                os.utime(target / name, ns=(changed, changed))

    def close(self) -> None:
        for handle in self._open:
            os.close(handle)


class TinyConfig:
    def to_dict(self) -> dict[str, str]:
        return {"model_type": "tiny"}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict())

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(self.to_json_string())


class Configured(nn.Linear):
    """A model that has a configuration to save beside it."""

    config = TinyConfig()

    def __init__(self, number: float):
        super().__init__(2, 1)
        nn.init.constant_(self.weight, number)


def pair(number: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Configured(number)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(folder: Path, step: int, number: int, background: bool = False) -> None:
    store = Checkpoints(folder)
    assert store.start(step, *pair(number), {"number": number}, background) == background
    store.wait()


def right(folder: Path, acknowledged: int) -> int:
    """The number of the checkpoint that is found: the newest whole one, and no older than the last that was reported written."""
    whole = []
    for path in folder.glob("step-*"):
        with suppress(RunError):
            restore.verify(path)
            whole.append(restore.read_about(path)["number"])
    found = Checkpoints(folder).latest()
    assert found is not None and found == restore.find(folder)
    model, _ = pair(-1.0)
    number = restore.load(found, model)["number"]
    assert torch.equal(model.weight, torch.full((1, 2), float(number)))
    assert (found / "model" / "config.json").read_text() == '{"model_type": "tiny"}'
    assert number == max(whole) >= acknowledged
    return number


def clean(folder: Path, steps: list[int]) -> None:
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{s:08d}" for s in steps]


# The steps saved before, the one that is saved when it happens, and what stays when another one of that step is saved after it.
STORIES = {
    "the next step": ([1, 2], 3, [2, 3]),
    "the same step": ([1, 2], 2, [1, 2]),
    "the step of an abandoned branch": ([5, 10, 6], 10, [6, 10]),
    "a step below the newest": ([5, 10], 6, [6, 10]),
}


def points(before: Path, patch: pytest.MonkeyPatch, work: Callable[[Path], object]) -> int:
    """How many calls `work` makes in a copy of the folder `before`."""
    folder = shutil.copytree(before, before.with_name("counted"))
    disk = Disk(folder)
    with patch.context() as patched:
        disk.install(patched)
        work(folder)
    disk.close()
    assert "fsync" in disk.calls and {"rename", "replace"} & set(disk.calls)
    return len(disk.calls)


def prepared(tmp_path: Path, patch: pytest.MonkeyPatch, story: str) -> int:
    """Save what a story begins with; returns the number of calls of its save."""
    earlier, step, _ = STORIES[story]
    for number, before in enumerate(earlier):
        save(tmp_path / "before", before, number)
    return points(tmp_path / "before", patch, lambda folder: save(folder, step, len(earlier)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No real disk is waited for, and torch's checkpoints say nothing."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("story", "background"), [*((story, False) for story in STORIES), ("the next step", True)])
def test_a_crash_at_every_call_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str, background: bool
) -> None:
    earlier, step, left = STORIES[story]
    number = len(earlier)
    for at in range(prepared(tmp_path, monkeypatch, story)):
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"at-{at}")
        disk = Disk(folder, at)
        disk.start()
        with monkeypatch.context() as patched, suppress(Crash):
            disk.install(patched)
            save(folder, step, number, background)
        cut = tmp_path / f"cut-{at}"
        disk.after_power_cut(cut)
        disk.close()
        right(folder, number - 1)
        right(cut, number - 1)
        for each in (folder, cut):
            save(each, step, number + 1)
            assert right(each, number + 1) == number + 1
            assert not list(each.glob(".*")) and not list(each.glob("*-before")), at
        clean(folder, left)


@pytest.mark.parametrize("story", STORIES)
def test_an_error_at_every_call_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str) -> None:
    earlier, step, left = STORIES[story]
    number = len(earlier)
    for at in range(prepared(tmp_path, monkeypatch, story)):
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"at-{at}")
        disk = Disk(folder, at, error=True)
        written = True
        with monkeypatch.context() as patched:
            disk.install(patched)
            try:
                save(folder, step, number)
            except RunError as error:
                assert "Input/output error" in str(error) and "could not be written" in str(error)
                written = False
        disk.close()
        right(folder, number if written else number - 1)
        save(folder, step, number + 1)
        assert right(folder, number + 1) == number + 1
        clean(folder, left)


def test_a_failed_second_rename_leaves_the_earlier_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 0)
    rename = os.rename
    calls: list[str] = []

    def second_fails(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == "step-00000001" and not calls:
            calls.append("failed")
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target, **options)

    with monkeypatch.context() as patched, pytest.raises(RunError, match="Input/output error"):
        patched.setattr(os, "rename", second_fails)
        save(tmp_path, 1, 1)
    clean(tmp_path, [1])
    assert right(tmp_path, 0) == 0
    save(tmp_path, 1, 2)
    clean(tmp_path, [1])
    assert right(tmp_path, 2) == 2


def test_the_very_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that is made for it: each folder's name is on disk too."""
    home = tmp_path / "home"
    home.mkdir()
    disk = Disk(home)
    disk.start()
    with monkeypatch.context() as patched:
        disk.install(patched)
        save(home / "run" / "checkpoints", 1, 0)
    disk.after_power_cut(tmp_path / "cut")
    disk.close()
    assert right(tmp_path / "cut" / "run" / "checkpoints", 0) == 0


def corpus(home: Path) -> Corpus:
    source = DataSource("text", str(home / "text"))
    return load_corpus(source, Data(cache=str(home / "cache" / "data"), workers=1), load_tokenizer("bytes"))


def test_crashes_and_errors_at_every_call_of_tokenization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two shards: the second run goes on with the ones that are whole."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    names = {f"shard-0000{n}.{ending}" for n in (0, 1) for ending in ("bin", "ends", "json")}

    def check(home: Path) -> None:
        found = corpus(home)
        assert found.read(0, len(found)).tolist() == [*b"a few", 256, *b"words", 256]
        (folder,) = (home / "cache" / "data").iterdir()
        assert {p.name for p in folder.iterdir()} - {LOCK} == {*names, "index.json"}

    (tmp_path / "before" / "text").mkdir(parents=True)
    (tmp_path / "before" / "text" / "a").write_text("a few")
    (tmp_path / "before" / "text" / "b").write_text("words")
    number = points(tmp_path / "before", monkeypatch, corpus)
    for error in (False, True):
        for at in range(number):
            home = shutil.copytree(tmp_path / "before", tmp_path / f"at-{at}-{error}")
            disk = Disk(home, at, error)
            disk.start()
            with monkeypatch.context() as patched, suppress(Crash, RunError):
                disk.install(patched)
                corpus(home)
            cut = home.with_name(f"cut-{home.name}")
            disk.after_power_cut(cut)
            disk.close()
            check(home)
            check(cut)
