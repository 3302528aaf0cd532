"""Checkpoints of several processes: the same model bit for bit on another mesh, bitwise resumption, and failures of one rank."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.errors import RunError
from forebay.models.families import keep_part
from forebay.train import checkpoint, hf_io, parallel
from forebay.train.checkpoint import Checkpoints
from forebay.train.distributed import ALONE, Mesh
from forebay.train.loop import export
from forebay.train.trainer import Trainer, decay_groups
from tests.ranks import run_ranks
from tests.train.common import CPU, WIDE, config, digest, digests, union, write_text


def export_of(path: Path, out: Path) -> Any:
    """The model that transformers loads from an exported checkpoint."""
    from transformers import AutoModelForCausalLM

    assert export(path, out) == path
    return AutoModelForCausalLM.from_pretrained(out)


def digests_of(model: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.named_parameters()}


# Layouts of 4 layers over processes: (pp, ep) and, by pipeline rank, numbers, embedding, head.
LAYOUTS: dict[str, Any] = {
    "alone": (1, 1, [(range(4), True, True)]),
    "v": (2, 2, [((0, 3), True, True), ((1, 2), False, False)]),
    "chain": (2, 2, [((0,), True, False), ((1, 2, 3), False, True)]),
}
DENSE_FIRST = {**WIDE, "mlp_only_layers": [0]}  # a pipeline rank may have no experts


class Held:
    """A process's part of a model in a layout, with an optimizer that has seen a step."""

    def __init__(self, mesh: Mesh, settings: Any, parts: Any, seed: int):
        def cut(model: Any) -> None:
            if len(parts) > 1:
                keep_part(model, *parts[mesh.pp_rank])

        def shard(model: Any) -> None:
            if mesh.data is not None:
                parallel.shard(model, mesh, settings)

        self.model = hf_io.build(settings.model, 257, CPU, shard, seed, cut)
        groups = decay_groups(self.model, 0.25)
        self.optimizer = parallel.ShardedAdamW(groups, lr=seed / 100, betas=(0.5, seed / 10))
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * seed + 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def facts(self) -> dict[str, Any]:
        return digests(self)

    def settings(self) -> list[tuple[Any, ...]]:
        """The optimizer's, by group: a checkpoint does not change them."""
        return [(g["lr"], tuple(g["betas"]), g["weight_decay"], len(g["params"])) for g in self.optimizer.param_groups]


def layout(folder: str, name: str, layers: int = 4) -> Any:
    pp, ep, parts = LAYOUTS[name]
    sizes = {**DENSE_FIRST, "num_hidden_layers": layers}
    return config(folder, sizes, train={"batch": 16, "microbatch": 1}, parallel={"pp": pp, "ep": ep}), parts


def saved(rank: int, world: int, folder: str, name: str) -> tuple[dict[str, Any], str]:
    """Facts of this process's part in a layout, and the checkpoint."""
    settings, parts = layout(folder, name)
    with Mesh.open(settings, ALONE if world == 1 else None) as mesh:
        held = Held(mesh, settings, parts, 1)
        path = Checkpoints(Path(folder) / name).save(5, held.model, held.optimizer, {"config": settings.to_dict()})
        return held.facts(), str(path)


def test_a_pipelines_checkpoint_is_a_whole_model(tmp_path: Path) -> None:
    """Bit for bit, parameters and AdamW's states, for one process and for transformers. test_matrix.py has all meshes."""
    ranks = run_ranks(saved, 4, str(tmp_path), "v")
    written, path = union(facts for facts, _ in ranks), Path(ranks[0][1])
    settings, parts = layout(str(tmp_path), "alone")
    with Mesh.open(settings, ALONE) as mesh:
        held = Held(mesh, settings, parts, 2)
        before, own = held.facts(), held.settings()
        assert checkpoint.load(path, held.model, held.optimizer)["step"] == 5
        assert held.facts() == written and held.settings() == own
        assert all(value != before[name] for name, value in written.items() if not name.endswith(" step"))
    assert {name.split()[-1] for name in written} >= {"exp_avg", "exp_avg_sq", "step"}
    assert digests_of(export_of(path, tmp_path / "exported")) == {
        name.rstrip(): digest for name, digest in written.items() if name.endswith(" ")
    }


def refusing(rank: int, world: int, folder: str, path: str) -> list[str]:
    """Messages of a pipeline of 5 layers, and of one of 4 whose second rank lacks the last layer."""
    messages = []
    for count, numbers in ((5, (1, 2, 3, 4)), (4, (1, 2))):
        settings, (first, (_, *ends)) = layout(folder, "chain", count)
        with Mesh.open(settings) as mesh, pytest.raises(RunError) as caught:
            held = Held(mesh, settings, [first, (numbers, *ends)], 1)
            checkpoint.load(Path(path), held.model, held.optimizer)
        messages.append(str(caught.value))
    return messages


def test_another_model_is_named_by_every_pipeline_rank(tmp_path: Path) -> None:
    """Only some ranks hold the layer, or none does."""
    _, path = saved(0, 1, str(tmp_path), "alone")
    results = run_ranks(refusing, 4, str(tmp_path), path)
    assert all(message == results[0] for message in results)
    more, fewer = results[0]
    assert "another model: it has no model.layers.4." in more
    assert "another model: this one has no model.layers.3." in fewer


def failing(rank: int, world: int, folder: str) -> list[str]:
    """Messages: of a save where one rank has no memory, of one where it cannot write, of loading a damaged file."""
    settings = config(folder, parallel={"ep": 2})
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


def no_memory(*_: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def full_disk(file: Path) -> str:
    raise OSError(28, "No space left on device")


def test_one_rank_fails_and_all_say_so(tmp_path: Path) -> None:
    results = run_ranks(failing, 2, write_text(tmp_path))
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
    """Random numbers of a process after it saved, after it loaded that, and after it loaded a checkpoint of one process."""
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
    checkpoint.load(next((tmp_path / "three").glob("step-*")), model, optimizer)  # fewer go on: the first ones' numbers
    assert draw() == results[0][0]
