"""Checkpoints in a remote folder: whole or not there, resumed on another machine, and never in the way of training.

The store is a folder, fsspec's memory, or (where s3fs and moto are installed) an S3 server on this machine.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import pytest
import torch

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.train import checkpoint, restore
from forebay.train.checkpoint import Checkpoints
from forebay.train.durable import FolderLock
from forebay.train.loop import train
from forebay.train.remote import RemoteFolder, open_checked
from forebay.train.run_folder import claim_start
from tests.ranks import run_ranks
from tests.train.common import losses, metrics, pair, quiet


class S3:
    """An S3 server with the bucket ``bucket``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        s3fs = pytest.importorskip("s3fs")
        self._server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        for name, value in {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        self.post("reset")
        fsspec.filesystem("s3").mkdir("bucket")

    def post(self, action: str, data: bytes = b"") -> None:
        plain = {"Content-Type": "text/plain"}
        urlopen(Request(f"{self.url}/moto-api/{action}", data=data, headers=plain, method="POST")).close()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3(monkeypatch)
    yield server
    server.stop()


@pytest.fixture(params=["folder", "memory", pytest.param("s3", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield "s3://bucket/some/run"
    elif request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        yield "memory://some/run"
    else:
        yield str(tmp_path / "some" / "run")


def test_a_run_goes_on_on_another_machine(url: str, tiny: Callable[..., Config], tmp_path: Path) -> None:
    def settings(steps: int, folder: str, to: str = url) -> Config:
        checkpoints = {"every": 2, "remote": to}
        return tiny(
            train={"steps": steps},
            schedule={"kind": "constant"},
            checkpoint=checkpoints,
            log={"folder": str(tmp_path / folder)},
        )

    whole = losses(train(settings(9, "whole", ""), quiet()))
    first = train(settings(5, "machine"), quiet(), resume="auto")
    remote = RemoteFolder(url)
    assert list(remote.names()) == ["step-00000004", "step-00000005"]
    begun = losses(first)
    shutil.rmtree(first)
    with pytest.raises(UsageError, match="holds the checkpoints of a run; go on with it by --resume auto"):
        train(settings(9, "machine"), quiet())
    second = train(settings(9, "machine"), quiet(), resume="auto")
    assert begun + losses(second) == whole
    newest = remote.newest()
    assert list(remote.names()) == ["step-00000008", "step-00000009"] and newest and newest[0] == "step-00000009"
    for name in remote.names():
        remote.get(name, tmp_path / name)
        restore.verify(tmp_path / name)


def test_the_newer_one_is_resumed(url: str, tiny: Callable[..., Config], tmp_path: Path) -> None:
    config, remote = tiny(checkpoint={"keep": 3}), RemoteFolder(url)
    here = tmp_path / "run" / "checkpoints"
    Checkpoints(here, remote=remote).save(1, *pair(1), {})
    Checkpoints(tmp_path / "elsewhere", remote=remote).save(2, *pair(2), {})

    def resumed(how: str) -> tuple[Path | None, tuple[Path, ...]]:
        with FolderLock() as lock:
            start = claim_start(config, how, lock, remote)
        return start.resumed, start.earlier

    two, one = here / "step-00000002", here / "step-00000001"
    assert resumed("auto") == (two, (one,))
    model, _ = pair(0)
    restore.load(two, model)
    assert torch.equal(model.weight, torch.full((1, 2), 2.0))
    Checkpoints(here, 3).save(1, *pair(3), {})  # of a branch, written last and not uploaded
    assert resumed("auto") == (one, (two,))
    assert resumed("") == (one, ())
    shutil.rmtree(here)
    assert resumed("") == (two, ())
    next(two.glob("*.distcp")).unlink()  # a disk that fails; the copy there is whole
    assert resumed("auto") == (two, ())
    restore.load(two, model)
    assert sorted(p.name for p in here.iterdir()) == [two.name]


def test_what_is_not_whole_is_not_seen(url: str, tmp_path: Path) -> None:
    remote, (files, root) = RemoteFolder(url), fsspec.core.url_to_fs(url)
    assert remote.names() == {} and remote.newest() is None
    store = Checkpoints(tmp_path / "here", 1, remote=remote)
    path = store.save(1, *pair(1), {})
    remote.put(path.rename(path.with_name("step-00000002")), ["__0_0.distcp", "trainer.json"])
    assert list(remote.names()) == ["step-00000001"]
    newest = remote.newest()
    assert newest is not None and newest[0] == "step-00000001"
    files.pipe_file(f"{root}/step-00000002/left", b"over")
    store.save(2, *pair(2), {})
    assert list(remote.names()) == ["step-00000002"]
    files.invalidate_cache()
    assert not files.exists(f"{root}/step-00000002/left") and not files.exists(f"{root}/step-00000001")


def test_age_keeps_some_there_too(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six checkpoints, each written an hour after the one before; the local ones have the same age here."""
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "time", lambda: now)
    remote = RemoteFolder(url)
    for step in range(1, 7):
        now += 3600
        Checkpoints(tmp_path, 2, 2.5, remote).save(step, *pair(step), {})
    assert list(remote.names()) == [f"step-0000000{step}" for step in (1, 4, 5, 6)]


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_a_manifest_cannot_name_files_elsewhere(url: str, tmp_path: Path, name: str) -> None:
    files, root = fsspec.core.url_to_fs(url, **({} if "://" in url else {"auto_mkdir": True}))
    files.pipe_file(
        f"{root}/step-00000001/manifest.json", json.dumps({"files": {name: [1, ""]}, "written": 1}).encode()
    )
    with pytest.raises(RunError, match="which is not in its folder"):
        RemoteFolder(url).get("step-00000001", tmp_path / "to")
    assert not (tmp_path / "outside").exists()


def test_an_upload_that_fails_is_said_and_training_goes_on(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = RemoteFolder.put

    def fails(self: RemoteFolder, folder: Path, names: list[str]) -> None:
        if folder.name in ("step-00000002", "step-00000006"):
            raise RunError("the store is gone")
        put(self, folder, names)

    monkeypatch.setattr(RemoteFolder, "put", fails)
    console, remote = quiet(), RemoteFolder(str(tmp_path / "remote"))
    settings = tiny(train={"steps": 6}, checkpoint={"every": 2, "remote": remote.url})
    with pytest.raises(
        RunError, match=r"the run is done; checkpoint .*6 is whole, but could not be uploaded: the store is gone"
    ):
        train(settings, console)
    assert console.file.getvalue().replace("\n", " ").count("could not be uploaded") == 2  # type: ignore[attr-defined]
    newest = restore.find(tmp_path / "run")
    restore.verify(newest)
    assert newest.name == "step-00000006" and list(remote.names()) == ["step-00000004"]
    assert len(metrics(tmp_path / "run")) == 6
    with pytest.raises(RunError, match=r"the run is done; checkpoint .*6 is whole, but could not be uploaded"):
        train(settings, quiet(), resume="auto")
    monkeypatch.setattr(RemoteFolder, "put", put)
    train(settings, quiet(), resume="auto")
    assert list(remote.names()) == ["step-00000004", "step-00000006"]


def test_a_remote_that_cannot_be_is_refused_before_anything_is_written(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="No such file or directory; check that the folder or bucket exists"):
        train(tiny(checkpoint={"remote": "/proc/none/run"}), quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_buckets_and_credentials(s3: S3, tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    def refused(url: str) -> str:
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UsageError) as caught:
            train(tiny(checkpoint={"remote": url}), quiet())
        return str(caught.value)

    assert "bucket does not exist" in refused("s3://nowhere/run")
    s3.post("reset-auth", b"0")
    assert "Access Key Id you provided does not exist" in refused("s3://bucket/run")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "credentials" in refused("s3://bucket/run")
    s3.stop()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "cannot be written" in refused("s3://bucket/run")


def uploading(rank: int, world: int, folder: str) -> list[str]:
    """The files that this process uploaded."""
    remote = open_checked(f"{folder}/remote")
    assert remote is not None
    sent: list[str] = []
    put = remote.put
    remote.put = lambda path, files: (sent.extend(files), put(path, files))[1]  # type: ignore[method-assign]
    store = Checkpoints(Path(folder) / "here", remote=remote)
    store.start(1, *pair(1), {}, background=True)
    saved: Any = store.wait()
    assert not saved.not_uploaded
    return sent


def test_processes_share_the_upload(tmp_path: Path) -> None:
    first, second = run_ranks(uploading, 2, str(tmp_path))
    assert first and second and not set(first) & set(second) and first[-1] == "manifest.json"
    restore.verify(tmp_path / "remote" / "step-00000001")
    assert sorted(p.name for p in (tmp_path / "remote").iterdir()) == ["step-00000001"]
