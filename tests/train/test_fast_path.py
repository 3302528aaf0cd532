"""The fast path of runs and plans: the same for both, said in a line, and given up without a trace if a capture fails."""

import io
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from forebay.config import Config
from forebay.estimate.device import load
from forebay.estimate.layers import fast_path_of as planned_path
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.train import engines, fast_path
from forebay.train.loop import train
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import MODEL, WIDE, config, differing, state_of, write_text
from tests.train.test_cuda_graph import Pretence

OPEN: dict[str, Any] = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}


def opened(folder: Path | str, device: str, **changes: dict[str, Any]) -> Config:
    """A run whose fast path is open."""
    return config(
        folder,
        MODEL,
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 1, "steps": 2},
        memory={"graph": "auto", **changes.get("memory", {})},
        parallel={**OPEN, **changes.get("parallel", {})},
        device={"type": device},
    )


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("more", [{}, {"memory": {"graph": False}}, {"memory": {"policy": "offload"}}], ids=str)
@pytest.mark.parametrize("parallel", [{}, {"ep": 2}, {"pp": 2}, {"ep": 2, "dispatch": "nccl"}, {"ep": 4}], ids=str)
def test_plans_and_runs_choose_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    more: dict[str, dict[str, Any]],
    reaches: bool,
) -> None:
    """On GPUs that plans assume; others answer for themselves."""
    asked = opened(tmp_path, "cuda", **more, parallel=parallel)
    world = asked.processes
    monkeypatch.setattr(fast_path, "symmetric_reaches", lambda *_: reaches)
    monkeypatch.setattr(fast_path, "processes_of_node", lambda: world)
    mesh: Any = SimpleNamespace(
        device=torch.device("cuda"), size=world, ep=asked.parallel.ep, pp=asked.parallel.pp,
        expert_group="group" if asked.parallel.ep > 1 else None, all=lambda answer: answer,
    )  # fmt: skip
    found, planned = fast_path.fast_path_of(asked, mesh), planned_path(asked, world)
    if reaches or asked.parallel.ep == 1 or asked.parallel.dispatch == "nccl" or "offload" in asked.memory.placements:
        assert found.config == planned.config
        assert found == planned or not reaches
    else:
        assert planned.is_fast and not found.is_fast and "read each other's memory" in found.line


def test_a_plan_is_that_of_the_flags_by_hand(tmp_path: Path) -> None:
    asked = opened(write_text(tmp_path), "cuda", parallel={"ep": 2})
    by_hand = replace(
        asked,
        memory=replace(asked.memory, graph=True),
        parallel=replace(asked.parallel, overlap=True, reshard=False, capacity_factor=2.0),
    )
    fits = [fit_run(c, plan_layers(c, 2), 2, device=load("h200")) for c in (asked, by_hand)]
    assert fits[0].ranks == fits[1].ranks and fits[0].step == fits[1].step
    assert any(note.startswith("Fast path: one CUDA graph a step") for note in fits[0].notes)
    assert not any("ast path" in note for note in fits[1].notes)


def trained(rank: int, world: int, folder: str) -> tuple[str, dict[str, Any]]:
    written = io.StringIO()
    asked = opened(folder, "cpu", parallel={"ep": 2})
    run = train(asked, Console(file=written, width=400))
    return written.getvalue(), json.loads((run / "run.json").read_text())["config"]


def test_a_run_says_what_it_chose_and_writes_it_down(tmp_path: Path) -> None:
    (said, chosen), (other, _) = run_ranks(trained, 2, write_text(tmp_path))
    assert said.count("host-launched: there is no GPU to capture steps on") == 1 and not other
    parallel = {key: chosen["parallel"][key] for key in OPEN}
    assert (
        parallel == {"overlap": False, "reshard": True, "capacity_factor": 0.0} and chosen["memory"]["graph"] is False
    )


def test_a_capture_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step computes all of its gradients before the end of its capture fails."""
    folder = write_text(tmp_path)
    states, figures = [], []
    for graph in (False, True):
        asked = config(
            folder,
            {**WIDE, "num_hidden_layers": 2},
            train={"batch": 6, "microbatch": 2, "steps": 6},
            memory={"graph": graph},
            parallel={"overlap": True, "reshard": False},
        )
        with monkeypatch.context() as patch:
            if graph:
                fails(patch)
            with Trainer(asked) as trainer:
                records = [trainer.step(number) for number in range(1, 7)]
                states.append(state_of(trainer))
                said = trainer.graph_status
        figures.append([(r.cross_entropy_loss, r.load_balance_loss, r.gradient_norm) for r in records])
    assert figures[0] == figures[1]
    assert not differing(*states)
    assert (
        said == "steps cannot be captured and are launched by the host: RuntimeError: a stream was asked for its state"
    )


def fails(patch: pytest.MonkeyPatch) -> None:
    """Captures are tried on this CPU, and fail at their end."""
    pretence = Pretence(patch)
    patch.setattr(engines, "captures", lambda config, mesh: config.step.graph)

    @contextmanager
    def graph(captured: Any, **more: Any) -> Any:
        with pretence.graph(captured, **more):
            yield
        raise RuntimeError("a stream was asked for its state")

    patch.setattr(torch.cuda, "graph", graph)
