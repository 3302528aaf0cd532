"""Records of processes and experts: by hand, of a slow process, and of experts shared by processes and pipeline stages."""

import math
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.errors import UsageError
from forebay.models.router import RouterStats
from forebay.train.distributed import Mesh
from forebay.train.health import StepHealth
from forebay.train.loop import train
from forebay.train.trainer import Trainer
from tests.models.conftest import EXPERTS, TOP_K, build_tiny, token_ids
from tests.ranks import run_ranks
from tests.train.common import GLM, config, figures_of, metrics, quiet, write_text


def test_figures_by_hand() -> None:
    health = StepHealth((0, 0, 1, 1), (1.0, 1.5, 3.0, 3.25), (10, 30, 20, 5), (0, 3), ((4, 0), (1, 3)), (0.5, 0.25))
    # Of the stage of processes 0 and 1; those of the other stage have longer to compute.
    assert health.slowest == (1, 0.25)
    assert health.max_over_mean == (2.0, 1.5) and health.unused == (1, 0)
    scalars = health.scalars()
    assert scalars["expert_load_max_over_mean"] == 2.0 and scalars["unused_experts"] == 1
    assert scalars["router_entropy"] == 0.375 and scalars["router_entropy/layer_3"] == 0.25
    assert health.lists()["expert_load_by_expert/layer_3"] == (1, 3)
    assert health.line() == (
        "slowest-process 1 (0.250 sec behind the median) | fullest-process 1 (0.00 GB) | "
        "expert-load 2.00 of the mean in layer 0 | unused-experts 1 | router-entropy 0.3750"
    )
    assert StepHealth((0,), (1.0,), (10,)).line() == ""


def test_entropy_is_that_of_the_logits() -> None:
    model = build_tiny("qwen3_moe")
    stats = RouterStats(model)
    with torch.no_grad(), stats.recording():
        model(input_ids=token_ids())
    assert stats.entropy_sums().sum() == 0
    stats.measures_entropy = True
    with torch.no_grad(), stats.recording():
        model(input_ids=token_ids())
    for record, (entropy, tokens) in zip(stats.records, stats.entropy_sums().tolist(), strict=True):
        p = record.logits.double().softmax(-1)
        assert entropy == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
        assert tokens == 32 and 0 < entropy / tokens <= math.log(EXPERTS)
    assert stats.load().sum(1).tolist() == [2 * 32 * TOP_K] * len(stats.records)
    assert stats.layers == sorted(stats.layers) and len(stats.layers) == len(stats.records)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_records_are_of_their_step_alone(tiny: Callable[..., Config], family: str) -> None:
    """Also of a family that balances by a bias, which resets the counts."""
    model = {"family": "glm4_moe", "config": GLM} if family == "glm4_moe" else {}
    folder = train(tiny(model=model, train={"steps": 5}, log={"health": 2}), quiet())
    records = [r for r in metrics(folder) if "busy_seconds_by_process" in r]
    assert [r["step"] for r in records] == [2, 4]
    layers = [1] if family == "glm4_moe" else [0, 1]
    for record in records:
        assert sorted(k for k in record if "by_expert" in k) == [f"expert_load_by_expert/layer_{n}" for n in layers]
        assert all(sum(record[f"expert_load_by_expert/layer_{n}"]) == 4 * 16 * 2 for n in layers)
        assert 0 < record["router_entropy"] <= math.log(4) and record["rerun_steps"] == 0
        assert "slowest_process" in record


def test_losses_do_not_depend_on_it(tiny: Callable[..., Config]) -> None:
    found = []
    for every in (0, 1):
        with Trainer(tiny(log={"health": every})) as trainer:
            steps = [trainer.step(n) for n in (1, 2, 3)]
        assert [s.health is not None for s in steps] == [bool(every)] * 3
        found.append([figures_of(s) for s in steps])
    assert found[0] == found[1]


def slow_one(rank: int, world: int, folder: str) -> list[Any]:
    """The records of steps in which process 1 sleeps: before its gradients, as if it read data, or at their end."""
    settings = config(folder, train={"batch": 8, "microbatch": 1}, log={"health": 1})
    found = []
    for where in ("data", "gradients"):
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            meet, turn = trainer._health.meet, count(where == "data")

            def slow(meet: Any = meet, turn: Any = turn) -> None:
                if next(turn) % 2 and rank == 1:
                    time.sleep(0.5)
                meet()

            trainer._health.meet = slow  # type: ignore[method-assign]
            healths = [trainer.step(n).health for n in (1, 2, 3)]
        assert all(h is not None for h in healths)
        found += [(h.slowest, h.load, h.layers, len(h.busy_seconds), h.line()) for h in healths[1:] if h is not None]
    return found


def test_the_slow_process_is_named(tmp_path: Path) -> None:
    by_rank = run_ranks(slow_one, 2, write_text(tmp_path))
    assert all(found == by_rank[0] for found in by_rank) and len(by_rank[0]) == 4
    for (number, behind), load, layers, processes, line in by_rank[0]:
        assert number == 1 and behind > 0.1 and f"slowest-process {number} (" in line
        assert layers == (0, 1) and all(sum(of) == 8 * 16 * 2 for of in load) and processes == len(by_rank)


def shared(rank: int, world: int, folder: str, meshes: list[dict[str, Any]]) -> list[Any]:
    found = []
    for parallel in meshes:
        settings = config(folder, train={"batch": 8, "microbatch": 1}, log={"health": 2}, parallel=parallel)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            assert trainer.step(1).health is None
            health = trainer.step(2).health
        assert health is not None
        found.append((health.layers, health.load, [round(e, 4) for e in health.entropy]))
    return found


def test_experts_of_all_processes_and_stages(tmp_path: Path) -> None:
    """The same figures as on one process, on every process."""
    folder, meshes = write_text(tmp_path), [{"ep": 2}, {"pp": 2, "schedule": "1f1b"}, {"replicate": 2}]
    ((alone,),) = run_ranks(shared, 1, folder, [{}])
    assert run_ranks(shared, 2, folder, meshes) == [[alone] * 3] * 2


def test_a_file_that_node_exporter_does_not_read() -> None:
    with pytest.raises(UsageError, match=r"log\.prometheus = 'x.txt' must end in \.prom"):
        from_mapping({"model": {"family": "qwen3_moe"}, "log": {"prometheus": "x.txt"}})
