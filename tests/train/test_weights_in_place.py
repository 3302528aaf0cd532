"""Weights that are computed with in the memory of their shards: nothing differs from gathered copies, and there are none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from forebay.memory.storage import fsdp_group, local
from forebay.models.families import moe_blocks
from forebay.train import restore, weights_in_place
from forebay.train.checkpoint import Checkpoints
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from forebay.train.weights_in_place import SplitWeight
from tests.ranks import run_ranks
from tests.train.common import GPU_FAMILIES, MIXED_PRECISION, WIDE, config, differing, figures_of, write_text

MESHES: dict[str, dict[str, Any]] = {  # of two processes
    "experts over both, all else in shards": {"ep": 2, "overlap": True},
    "the same, gathered for each use": {"ep": 2, "overlap": True, "reshard": True},
    "two replicas": {"ep": 1, "replicate": 2, "overlap": True},
    "two stages": {"ep": 1, "pp": 2, "schedule": "1f1b"},
}


@contextmanager
def sizes(large: int, piece: int) -> Iterator[None]:
    """Context in which weights from `large` elements on are split, and joined `piece` elements at a time."""
    with (
        mock.patch.object(weights_in_place, "LARGE", large),
        mock.patch.object(weights_in_place, "PIECE", piece),
    ):
        yield


def bits_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int32)


@pytest.mark.parametrize("piece", [8, 24, 1 << 20])
@pytest.mark.parametrize("n", [16, 32, 48, 16 * 61])
def test_a_weight_is_split_and_joined_in_its_memory(n: int, piece: int) -> None:
    with sizes(1, piece):
        weight = torch.randn(n)
        weight.view(torch.int32)[::5] |= 0xFFFF
        weight.view(torch.int32)[::5] ^= 0x7FFF  # ties
        before, memory = weight.clone(), SplitWeight(weight)
        for _ in range(2):
            memory.split()
            assert torch.equal(memory.high, before.bfloat16())
            assert memory.high.data_ptr() == weight.data_ptr()
            memory.join()
            assert torch.equal(bits_of(weight), bits_of(before))


def settings(folder: str, dtype: str, gradients: str, **parallel: Any) -> Any:
    return config(
        folder,
        {**WIDE, "num_hidden_layers": 3},
        model={"dtype": dtype, "compute": "bfloat16" if dtype == "float32" else ""},
        train={"batch": 8, "microbatch": 2, "eval_every": 2, "eval_batches": 1},
        data={"validation": 0.2},
        memory={"graph": not parallel},  # steps of an engine; a CPU captures none
        parallel={"dispatch": "auto", "gradients": gradients, "reshard": False, **parallel},
    )


def trained(settings: Any, mesh: Any, in_place: bool, steps: int = 4) -> tuple[dict[str, Any], list[Any]]:
    """State and figures after some steps: the weights are read after half of them, and evaluated with before the last one."""
    with sizes(256 if in_place else 1 << 40, 80), Trainer(settings, mesh) as trainer:
        engine: Any = trainer.engine
        if not in_place:
            engine._unsharded._in_place = weights_in_place.WeightsInPlace(())
        figures = [figures_of(trainer.step(number)) for number in range(1, steps // 2 + 1)]
        assert set(experts_in_place(trainer)) == {in_place}
        state = state_by_name(trainer)
        assert not any(experts_in_place(trainer))
        figures += [figures_of(trainer.step(number)) for number in range(steps // 2 + 1, steps)]
        figures += [trainer.evaluate(), figures_of(trainer.step(steps))]
        assert trainer.cuda_graph is None or trainer.cuda_graph.is_captured
        return {"half": state, "last": state_by_name(trainer)}, figures


def state_by_name(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This process's part of parameters and optimizer states."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        states = {"": parameter, **trainer.optimizer.state[parameter]}
        found |= {f"{name} {key}": local(value.detach()).clone() for key, value in states.items()}
    return found


def experts_in_place(trainer: Trainer) -> list[bool]:
    """Of each expert weight, whether the gathered one is in the memory of its shard, and FSDP2 holds no other."""
    model: Any = trainer._model
    experts = {id(p) for block in moe_blocks(model) for p in block.experts.parameters()}
    groups = (fsdp_group(module) for module in model.modules() if isinstance(module, FSDPModule))
    return [
        local(r.unsharded_param.data).data_ptr() == r._sharded_param_data.data_ptr() and not r.all_gather_outputs
        for group in groups
        for r in (group.fsdp_params if group is not None else ())
        if id(r.sharded_param) in experts
    ]


def compared(rank: int, world: int, folder: str, dtype: str, gradients: str, parallel: dict[str, Any]) -> list[str]:
    chosen = settings(folder, dtype, gradients, **parallel)
    with Mesh.open(chosen) as mesh:
        wanted, figures = trained(chosen, mesh, False)
        found, same = trained(chosen, mesh, True)
    wrong = [name for when in wanted for name in differing(wanted[when], found[when])]
    return wrong if figures == same else [*wrong, f"{figures} {same}"]


@pytest.mark.parametrize(
    ("dtype", "gradients"), [("float32", "float32"), ("float32", "compute"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("name", MESHES)
def test_training_changes_no_bit(tmp_path: Path, name: str, dtype: str, gradients: str) -> None:
    assert run_ranks(compared, 2, write_text(tmp_path), dtype, gradients, MESHES[name]) == [[], []]


def test_one_process_gathers_no_large_weight(tmp_path: Path) -> None:
    chosen = settings(write_text(tmp_path), "float32", "compute")
    wanted, figures = trained(chosen, None, False)
    found, same = trained(chosen, None, True)
    assert figures == same
    for when, state in wanted.items():
        assert not differing(state, found[when])


def test_weights_are_whole_after_a_step_that_failed(tmp_path: Path) -> None:
    chosen = settings(write_text(tmp_path), "float32", "compute")
    with sizes(256, 80), Trainer(chosen) as trainer:
        trainer.step(1)
        wanted, engine = state_by_name(trainer), trainer.engine
        assert engine is not None
        fails = mock.patch.object(engine._runtime, "run", side_effect=RuntimeError("failed"))
        with fails, pytest.raises(RuntimeError, match="failed"):
            trainer.step(2)
        assert engine._unsharded._in_place, "weights were lent when it failed"
        assert not differing(state_by_name(trainer), wanted)
        loss = trainer.evaluate()
        trainer.step(2)
        model = trainer._model
    assert loss > 0 and all(local(p.detach()).isfinite().all() for p in model.parameters())  # closed, with all weights


def test_a_weight_that_cannot_be_joined_yet_is_joined_once(tmp_path: Path) -> None:
    chosen = settings(write_text(tmp_path), "float32", "compute")
    with sizes(256, 80), Trainer(chosen) as trainer:
        trainer.step(1)
        wanted = state_by_name(trainer)
        trainer.gradients(2)  # splits, and changes nothing
        trainer.optimizer.zero_grad(set_to_none=True)
        join, calls = SplitWeight.join, list[int]()

        def third_fails(weight: SplitWeight) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("full")
            join(weight)

        with mock.patch.object(SplitWeight, "join", third_fails), pytest.raises(torch.OutOfMemoryError):
            trainer.model  # noqa: B018
        assert not differing(state_by_name(trainer), wanted)


def test_split_weights_are_not_changed_or_saved_as_if_they_were_whole(tmp_path: Path) -> None:
    chosen = settings(write_text(tmp_path), "float32", "compute")
    with sizes(256, 80), Trainer(chosen) as trainer:
        held = trainer.model
        trainer.step(1)
        trainer.gradients(2)
        with pytest.raises(RuntimeError, match=r"call update\(None\) instead of step"):
            trainer.optimizer.step()
        saved = {name: local(t).clone() for name, t in held.state_dict().items()}
        wanted = {name: local(t).clone() for name, t in trainer.model.state_dict().items()}
        assert not differing(saved, wanted)


def test_a_held_model_loads_whole_weights(tmp_path: Path) -> None:
    with sizes(256, 80), Trainer(settings(write_text(tmp_path), "float32", "compute")) as trainer:
        held = trainer.model
        wanted = {name: t.detach().clone() for name, t in held.state_dict().items()}
        trainer.step(1)
        held.load_state_dict(wanted)
        found = {name: local(t.detach()) for name, t in trainer.model.state_dict().items()}
        assert not differing({name: local(t) for name, t in wanted.items()}, found)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reshard", [False, True])
def test_replayed_steps_change_no_bit(tmp_path: Path, reshard: bool) -> None:
    chosen = config(
        write_text(tmp_path, 2000),
        GPU_FAMILIES["qwen3_moe"],
        model={**MIXED_PRECISION, "attention": "eager"},  # dq of flash attention's backward differs between two calls
        train={"batch": 6, "microbatch": 2, "sequence": 1024, "eval_every": 2, "eval_batches": 1},
        data={"validation": 0.2},
        memory={"graph": True},
        parallel={"overlap": True, "reshard": reshard},
        device={"type": "cuda", "threads": 0},
    )
    wanted, figures = trained(chosen, None, False, steps=10)
    found, same = trained(chosen, None, True, steps=10)
    assert figures == same
    for when, state in wanted.items():
        assert not differing(state, found[when])


def test_a_checkpoint_holds_whole_weights(tmp_path: Path) -> None:
    """Written after a step, and read by a trainer that goes on from it."""
    chosen = settings(write_text(tmp_path), "float32", "compute")
    with sizes(256, 80), Mesh.open(chosen) as mesh, Trainer(chosen, mesh) as trainer:
        trainer.step(1)
        path = Checkpoints(tmp_path / "checkpoints").save(1, trainer.model, trainer.optimizer, {})
        figures = figures_of(trainer.step(2))
        with Trainer(chosen, mesh) as other:
            restore.load(path, other.model, other.optimizer)
            assert figures_of(other.step(2)) == figures
            assert not differing(state_by_name(trainer), state_by_name(other))
