"""Checkpoints are whole or not there; what is damaged is named; nothing that was there gets lost."""

import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from forebay.errors import RunError, UsageError
from forebay.train import checkpoint
from forebay.train.checkpoint import Checkpoints


def make(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has seen one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = make()
    path = Checkpoints(tmp_path).save(7, model, optimizer, {"data": "abc"})
    expected = draws()
    other, its_optimizer = make(seed=1)
    assert checkpoint.load(path, other, its_optimizer) == {"data": "abc", "step": 7}
    assert draws() == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    before, after = optimizer.state_dict(), its_optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert state.keys() == after["state"][index].keys()
        assert all(torch.equal(state[k], after["state"][index][k]) for k in state)


@pytest.mark.parametrize("gpus", [(False, True), (True, False), (True, True)])
def test_with_and_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[bool, bool]) -> None:
    """A run may go on where there is a GPU and was none, or the other way round; the generators that both have come back."""
    set_before: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_before.append)

    def pretend(gpu: bool) -> None:
        states = {"0-cpu": torch.get_rng_state(), **({"0-cuda": torch.get_rng_state()} if gpu else {})}
        monkeypatch.setattr(checkpoint, "_torch_rng", lambda rank: states)

    pretend(gpus[0])
    path = Checkpoints(tmp_path).save(1, *make(), {})
    pretend(gpus[1])
    checkpoint.load(path, *make())
    assert len(set_before) == all(gpus)


def test_frozen_and_unused_parameters(tmp_path: Path) -> None:
    model, _ = make()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    path = Checkpoints(tmp_path).save(1, model, optimizer, {})
    assert checkpoint.load(path, model, optimizer)["step"] == 1


def test_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, *make(), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000003"]
    assert checkpoints.latest() == tmp_path / "step-00000003"


def test_a_branch_from_an_earlier_step_outlives_the_later_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 6):
        checkpoints.save(step, *make(), {})
    assert checkpoints.latest() == tmp_path / "step-00000006"
    assert [p.name for p in checkpoints.all()] == ["step-00000010", "step-00000006"]


def test_the_same_step_again(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, *make(seed=0), {"try": 1})
    path = Checkpoints(tmp_path).save(1, *make(seed=1), {"try": 2})
    assert checkpoint.load(path, make()[0])["try"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_keep_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, *make(), {})
    checkpoints.save(2, *make(), {})
    assert [p.name for p in checkpoints.all()] == ["step-00000002"]


def test_latest_survives_a_lost_pointer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(1, *make(), {})
    (tmp_path / "latest").write_text("step-00000009")
    assert checkpoints.latest() == tmp_path / "step-00000001"
    (tmp_path / "latest").unlink()
    assert checkpoints.latest() == tmp_path / "step-00000001"


def fail_with(error: BaseException) -> Any:
    """In the place of torch's function that writes the tensors: half a file, then `error`."""

    def write(self: Any, plan: Any, planner: Any) -> None:
        Path(self.path, "__0_0.distcp").write_bytes(b"half")
        raise error

    return write


def test_disk_full_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = make()
    earlier = checkpoints.save(1, model, optimizer, {})
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError) as caught:
        checkpoints.save(2, model, optimizer, {})
    for part in ("step-00000002", "No space left on device", f"earlier checkpoint {earlier} is intact", "log.folder"):
        assert part in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    checkpoint.verify(earlier)
    assert checkpoints.latest() == earlier


def test_disk_full_at_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError, match="there is no earlier checkpoint"):
        Checkpoints(tmp_path).save(1, *make(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["_digest", "write_synced", "replace_text"])
def test_disk_full_at_the_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    earlier = checkpoints.save(1, *make(), {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr(checkpoint, where, full)
        checkpoints.save(2, *make(), {})
    assert checkpoints.latest() == earlier
    checkpoint.verify(earlier)
    checkpoints.save(3, *make(), {})


def test_an_interrupt_while_writing_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps even KeyboardInterrupt in its own exception."""
    earlier = Checkpoints(tmp_path).save(1, *make(), {})
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(2, *make(), {})
    assert Checkpoints(tmp_path).latest() == earlier


def test_one_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch loses an exception in a second one (a full disk, say) and reports the checkpoint as written."""
    threads = []
    init = dcp.FileSystemWriter.__init__

    def spy(self: Any, path: Any, **options: Any) -> None:
        threads.append(options.get("thread_count"))
        init(self, path, **options)

    monkeypatch.setattr(dcp.FileSystemWriter, "__init__", spy)
    Checkpoints(tmp_path).save(1, *make(), {})
    assert threads == [1]


def damage_cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def damage_flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_cut, "__0_0.distcp has"),
        (damage_flip, "the content of __0_0.distcp has changed"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "trainer.json").write_text("{"), "trainer.json has 1 bytes"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is missing or unreadable"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing or unreadable"),
    ],
)
def test_damage_is_named_and_an_earlier_one_offered(tmp_path: Path, damage: Any, said: str) -> None:
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    earlier = checkpoints.save(1, model, optimizer, {})
    newest = checkpoints.save(2, model, optimizer, {})
    damage(newest)
    with pytest.raises(RunError) as caught:
        checkpoint.load(newest, model, optimizer)
    assert said in str(caught.value)
    assert f"checkpoint {newest} is damaged" in str(caught.value)
    assert f"--resume {earlier}" in str(caught.value)
    checkpoint.load(earlier, model, optimizer)


def test_another_model_is_named(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, *make(width=4), {})
    with pytest.raises(RunError, match=r"0\.weight has shape \[4, 3\], this model needs \[8, 3\]"):
        checkpoint.load(path, make(width=8)[0])
    with pytest.raises(RunError, match=r"another model: it has no 2\.weight"):
        checkpoint.load(path, nn.Sequential(*make()[0], nn.Linear(2, 2)))
    with pytest.raises(RunError, match=r"another model: this one has no 1\.weight"):
        checkpoint.load(path, make()[0][:1])


def test_find(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "run" / "checkpoints").save(1, *make(), {})
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints", path):
        assert checkpoint.find(given) == path
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint.find(tmp_path)
