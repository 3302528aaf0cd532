"""Checkpoints of several processes: the same model bit for bit on another mesh, bitwise resumption, and failures of one rank."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.train import checkpoint
from forebay.train.checkpoint import Checkpoints
from forebay.train.config import from_mapping
from forebay.train.errors import RunError
from tests.ranks import run_ranks

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
}


def config(folder: str, ep: int) -> Any:
    return from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": TINY},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": 4, "sequence": 16, "steps": 9},
            "parallel": {"ep": ep},
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run"},
        },
        origin="test",
    )


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def fingerprints(trainer: Any) -> dict[str, str]:
    """Digests of every whole parameter and of its optimizer's states."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        tensors = {"": parameter, **trainer.optimizer.state[parameter]}
        for key, value in tensors.items():
            found[f"{name} {key}"] = hashlib.sha256(whole(value).contiguous().numpy().tobytes()).hexdigest()
    return found


def go_on(
    rank: int, world: int, folder: str, ep: int, resume: str | None, save: bool
) -> tuple[dict[str, str], Any, str]:
    """(fingerprints after loading or two steps, loss and norm of the step after, path of a checkpoint made in between)."""
    from forebay.train.mesh import Mesh
    from forebay.train.trainer import Trainer

    settings = config(folder, ep)
    path = ""
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        if resume is None:
            for number in (1, 2):
                trainer.step(number)
        else:
            trainer.step(1)  # AdamW's states exist, and everything differs from what is loaded
            assert checkpoint.load(Path(resume), trainer.model, trainer.optimizer)["step"] == 2
        if save:
            store = Checkpoints(Path(folder) / f"checkpoints-{world}-{ep}")
            path = str(store.save(2, trainer.model, trainer.optimizer, {"world": world}))
        prints = fingerprints(trainer)
        record = trainer.step(3)
    return prints, (record.cross_entropy_loss, record.gradient_norm), path


def test_another_mesh_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 200)
    folder = str(tmp_path)
    written = run_ranks(go_on, 4, folder, 2, None, True)
    prints, figures, path = written[0]
    assert all(r[0] == prints and r[1] == figures for r in written)
    again = run_ranks(go_on, 4, folder, 2, path, False)
    assert all(r[0] == prints and r[1] == figures for r in again)  # the same mesh goes on bitwise
    for world, ep in ((2, 2), (2, 1)):
        for got, (loss, norm), _ in run_ranks(go_on, world, folder, ep, path, False):
            assert got == prints
            assert (loss, norm) == pytest.approx(figures, rel=1e-5)
    got, (loss, norm), alone = go_on(0, 1, folder, 1, path, True)
    assert got == prints and (loss, norm) == pytest.approx(figures, rel=1e-5)
    for got, (loss, norm), _ in run_ranks(go_on, 2, folder, 2, alone, False):  # and back
        assert got == prints and (loss, norm) == pytest.approx(figures, rel=1e-5)


def failing(rank: int, world: int, folder: str) -> list[str]:
    """Messages of a save in which one rank cannot write, and of a load of a checkpoint with a damaged file."""
    from forebay.train.mesh import Mesh
    from forebay.train.trainer import Trainer

    settings = config(folder, 2)
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        trainer.step(1)
        store = Checkpoints(Path(folder) / "checkpoints")
        first = store.save(1, trainer.model, trainer.optimizer, {})
        digest = checkpoint._digest
        if rank == 1:
            checkpoint._digest = full_disk
        with pytest.raises(RunError) as caught:
            store.save(2, trainer.model, trainer.optimizer, {})
        checkpoint._digest = digest
        messages = [str(caught.value)]
        assert store.latest() == first
        checkpoint.verify(first)
        torch.distributed.barrier()
        if rank == 0:
            damaged = sorted(first.glob("*.distcp"))[-1]
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        torch.distributed.barrier()
        with pytest.raises(RunError) as caught:
            checkpoint.load(first, trainer.model, trainer.optimizer)
        return [*messages, str(caught.value)]


def full_disk(file: Path) -> str:
    raise OSError(28, "No space left on device")


def test_one_rank_fails_and_all_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 200)
    results = run_ranks(failing, 2, str(tmp_path))
    for full, damaged in results:
        assert "No space left on device" in full and "step-00000001 is intact" in full
        assert "damaged" in damaged and ".distcp" in damaged
    assert json.loads((tmp_path / "checkpoints" / "step-00000001" / "trainer.json").read_text())["about"]["step"] == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]
