"""Checkpoints of several processes: the same model bit for bit on another mesh, bitwise resumption, and failures of one rank."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.train import checkpoint
from forebay.train.checkpoint import Checkpoints
from forebay.train.config import from_mapping
from forebay.train.errors import RunError
from forebay.train.run import export
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
            found[f"{name} {key}"] = digest(value)
    return found


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(whole(tensor).contiguous().numpy().tobytes()).hexdigest()


def export_of(path: Path, out: Path) -> Any:
    """What transformers makes of an exported checkpoint."""
    from transformers import AutoModelForCausalLM

    assert export(path, out) == path
    return AutoModelForCausalLM.from_pretrained(out)


def digests_of(model: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.named_parameters()}


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
            path = str(store.save(2, trainer.model, trainer.optimizer, {"config": settings.to_dict()}))
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
    assert digests_of(export_of(Path(path), tmp_path / "exported")) == {
        name.rstrip(): digest for name, digest in prints.items() if name.endswith(" ")
    }
    for got, (loss, norm), _ in run_ranks(go_on, 2, folder, 2, alone, False):  # and back
        assert got == prints and (loss, norm) == pytest.approx(figures, rel=1e-5)


def failing(rank: int, world: int, folder: str) -> list[str]:
    """Messages: of a save where one rank has no memory, of one where it cannot write, of loading a damaged file."""
    from forebay.train.mesh import Mesh
    from forebay.train.trainer import Trainer

    settings = config(folder, 2)
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        trainer.step(1)
        store = Checkpoints(Path(folder) / "checkpoints")
        first = store.save(1, trainer.model, trainer.optimizer, {})
        messages = []
        for where, error in (("get_optimizer_state_dict", no_memory), ("_digest", full_disk)):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as caught:
                if rank == 1:
                    patch.setattr(checkpoint, where, error)
                store.save(2, trainer.model, trainer.optimizer, {})
            messages.append(str(caught.value))
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


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def full_disk(file: Path) -> str:
    raise OSError(28, "No space left on device")


def test_one_rank_fails_and_all_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 200)
    results = run_ranks(failing, 2, str(tmp_path))
    assert results[0] == results[1]
    memory, full, damaged = results[0]
    assert "step-00000002 could not be written: out of memory" in memory and "step-00000001 is intact" in memory
    assert "No space left on device (process 1 on " in full and "step-00000001 is intact" in full
    assert "damaged" in damaged and ".distcp" in damaged
    assert json.loads((tmp_path / "checkpoints" / "step-00000001" / "trainer.json").read_text())["about"]["step"] == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]


Numbers = tuple[float, float, float]


def draw() -> Numbers:
    """One of each generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


def drawing(rank: int, world: int, folder: str, alone: str) -> tuple[Numbers, Numbers, Numbers]:
    """What a process draws after it saved, after it loads that, and after it loads what one process saved."""
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = Checkpoints(Path(folder)).save(1, model, optimizer, {})
    saved = draw()
    checkpoint.load(path, model, optimizer)
    loaded = draw()
    checkpoint.load(Path(alone), model, optimizer)
    return saved, loaded, draw()


def test_each_process_draws_on(tmp_path: Path) -> None:
    """Its own numbers; where it has none to go on with, others than its neighbours."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    alone = Checkpoints(tmp_path / "alone").save(1, model, optimizer, {})
    before = draw()
    results = run_ranks(drawing, 3, str(tmp_path / "three"), str(alone))
    assert all(saved == loaded for saved, loaded, _ in results)
    assert len({saved for saved, _, _ in results}) == 3
    assert results[0][2] == before
    assert len({numbers[i] for _, _, numbers in results for i in range(3)}) == 9
    checkpoint.load(next((tmp_path / "three").glob("step-*")), model, optimizer)  # fewer go on: the first ones' numbers
    assert draw() == results[0][0]
