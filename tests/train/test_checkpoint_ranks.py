"""Checkpoints of several processes: replicas, failures of one rank, random numbers. test_matrix.py resumes on other meshes."""

import io
import json
import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from forebay.errors import RunError, UsageError
from forebay.train import checkpoint, restore
from forebay.train.checkpoint import Checkpoints
from forebay.train.distributed import ALONE, Mesh
from forebay.train.loop import train
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import MODEL, WIDE, config, digests, small_files, write_text


def layers_of(folder: str, layers: int, **parallel: Any) -> Any:
    """A model whose first layer is dense, so that a pipeline rank may have no experts."""
    sizes = {**WIDE, "mlp_only_layers": [0], "num_hidden_layers": layers}
    return config(folder, sizes, train={"batch": 8, "microbatch": 1}, parallel=parallel)


def with_and_without_replicas(rank: int, world: int, folder: str) -> list[Any]:
    """Digests of what is loaded and of the parameters after a step, on a mesh with replicas, without, and with them again."""
    found: list[Any] = []
    last = None
    for step, replicate in ((1, 2), (2, 1), (3, 2)):
        settings = layers_of(folder, 3, replicate=replicate, ep=2, dispatch="nccl")
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            if last is not None:
                restore.load(last, trainer.model, trainer.optimizer)
                found.append(digests(trainer))
            trainer.step(step)
            found.append(digests(trainer))
            store = Checkpoints(Path(folder) / "checkpoints", keep=3)
            last = store.save(step, trainer.model, trainer.optimizer, {"config": settings.to_dict()})
    return found


def test_replicas_write_each_tensor_once_and_their_number_may_change(tmp_path: Path) -> None:
    one, *others = run_ranks(with_and_without_replicas, 4, write_text(tmp_path))
    assert all(other == one for other in others)  # replicas are equal, and stay so
    first, loaded, second, again, third = one
    assert loaded == first and again == second and first != second != third
    for path in Checkpoints(tmp_path / "checkpoints").all():
        described = restore.PlainReader(path).read_metadata()
        # Of a tensor that two processes write, the description knows one place.
        known = sum(place.length for place in described.storage_data.values())
        assert known == sum(file.stat().st_size for file in path.glob("*.distcp"))
        for tensor in described.state_dict_metadata.values():
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel()


def refusing(rank: int, world: int, folder: str, path: str) -> list[str]:
    """Messages of a pipeline of 5 layers, and of one of 3."""
    messages = []
    for layers in (5, 3):
        settings = layers_of(folder, layers, pp=2, ep=2, schedule="1f1b")
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer, pytest.raises(UsageError) as caught:
            restore.load(Path(path), trainer.model, trainer.optimizer)
        messages.append(str(caught.value))
    return messages


def test_another_model_is_named_by_every_pipeline_rank(tmp_path: Path) -> None:
    """Only some ranks hold the layer, or none does."""
    settings = layers_of(write_text(tmp_path), 4)
    with Mesh.open(settings, ALONE) as mesh, Trainer(settings, mesh) as trainer:
        path = Checkpoints(tmp_path / "checkpoints").save(1, trainer.model, trainer.optimizer, {})
    results = run_ranks(refusing, 4, str(tmp_path), str(path))
    assert all(message == results[0] for message in results)
    more, fewer = results[0]
    assert "another model: it has no model.layers.4." in more
    assert "another model: this one has no model.layers.3." in fewer


def failing(rank: int, world: int, folder: str) -> list[str]:
    """Messages: of a save where one rank has no memory, of two where it cannot write, of loading a damaged file."""
    settings = config(folder, parallel={"ep": 2})
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        trainer.step(1)
        store = Checkpoints(Path(folder) / "checkpoints")
        first = store.save(1, trainer.model, trainer.optimizer, {})
        messages = []
        for where, error in (("get_optimizer_state_dict", no_memory), ("digest_of", full_disk)):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as caught:
                if rank == 1:
                    patch.setattr(checkpoint, where, error)
                store.save(2, trainer.model, trainer.optimizer, {})
            messages.append(str(caught.value))
        with small_files(10_000 if rank == 1 else resource.RLIM_INFINITY), pytest.raises(RunError) as caught:
            store.save(2, trainer.model, trainer.optimizer, {})
        messages.append(str(caught.value))
        assert store.latest() == first
        restore.verify(first)
        torch.distributed.barrier()
        if rank == 0:
            damaged = sorted(first.glob("*.distcp"))[-1]
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        torch.distributed.barrier()
        with pytest.raises(RunError) as caught:
            restore.load(first, trainer.model, trainer.optimizer)
        return [*messages, str(caught.value)]


def resumed(rank: int, world: int, folder: str) -> list[str]:
    """The checkpoints that this rank loads: for rank 1, a file of the newest one is not there yet."""
    settings = config(folder, MODEL, train={"batch": 4, "steps": 4}, checkpoint={"every": 2, "keep": 3})
    train(settings, Console(file=io.StringIO()))
    loaded: list[str] = []
    compare, load = restore._compare, restore.load

    def late(path: Path, files: Any) -> None:
        if rank == 1 and path.name == "step-00000004" and "trainer.json" in files:
            raise restore._damaged(path, "trainer.json is missing")
        compare(path, files)

    def loading(path: Path, *args: Any) -> Any:
        loaded.append(path.name)
        return load(path, *args)

    longer = replace(settings, train=replace(settings.train, steps=5))
    with mock.patch.object(restore, "_compare", late), mock.patch.object(restore, "load", loading):
        train(longer, Console(file=io.StringIO()), resume="auto")
    return loaded


def test_all_ranks_go_on_from_one_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(resumed, 2, write_text(tmp_path), seconds=100) == [["step-00000002"]] * 2


def no_memory(*_: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def full_disk(file: Path) -> str:
    raise OSError(28, "No space left on device")


def test_one_rank_fails_and_all_say_so(tmp_path: Path) -> None:
    results = run_ranks(failing, 2, write_text(tmp_path))
    assert results[0] == results[1]
    memory, full, short, damaged = results[0]
    assert "step-00000002 could not be written: out of memory" in memory and "step-00000001 is intact" in memory
    assert "No space left on device (process 1 on " in full and "step-00000001 is intact" in full
    assert "step-00000002 could not be written: File too large; " in short and "free some space" in short
    assert "damaged" in damaged and ".distcp" in damaged
    assert json.loads((tmp_path / "checkpoints" / "step-00000001" / "trainer.json").read_text())["about"]["step"] == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000001"]


Numbers = tuple[float, float, float]


def draw() -> Numbers:
    """One of each generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


def drawing(rank: int, world: int, folder: str, alone: str) -> tuple[Numbers, Numbers, Numbers]:
    """Random numbers of a process after it saved, after it loaded that, and after it loaded a checkpoint of one process."""
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = Checkpoints(Path(folder)).save(1, model, optimizer, {})
    saved = draw()
    restore.load(path, model, optimizer)
    loaded = draw()
    restore.load(Path(alone), model, optimizer)
    return saved, loaded, draw()


def test_each_process_draws_on(tmp_path: Path) -> None:
    """Each process continues its own numbers; without a counterpart it draws other numbers than its neighbors."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    alone = Checkpoints(tmp_path / "alone").save(1, model, optimizer, {})
    before = draw()
    results = run_ranks(drawing, 3, str(tmp_path / "three"), str(alone))
    assert all(saved == loaded for saved, loaded, _ in results)
    assert len({saved for saved, _, _ in results}) == 3
    assert results[0][2] == before
    assert len({numbers[i] for _, _, numbers in results for i in range(3)}) == 9
    restore.load(next((tmp_path / "three").glob("step-*")), model, optimizer)  # fewer go on: the first ones' numbers
    assert draw() == results[0][0]
