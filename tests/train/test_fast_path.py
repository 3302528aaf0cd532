"""The fast path of runs and plans: the same for both, said in a line, and given up without a trace if a capture fails."""

import io
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

from forebay.config import Config
from forebay.estimate.device import load
from forebay.estimate.layers import fast_path_of as planned_path
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.moe.backends import Topology
from forebay.train import engines, fast_path
from forebay.train.distributed import Mesh
from forebay.train.loop import train
from forebay.train.parallel import ShardedAdamW
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import MODEL, WIDE, config, differing, figures_of, state_of, write_text
from tests.train.families import fields_of
from tests.train.test_cuda_graph import Pretence

OPEN: dict[str, Any] = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}


def opened(folder: Path | str, device: str, **changes: dict[str, Any]) -> Config:
    """A run whose fast path is open."""
    return config(
        folder,
        model={"config": MODEL, "dtype": "float32", "compute": "bfloat16", **changes.get("model", {})},
        train={"batch": 8, "microbatch": 1, "steps": 2, **changes.get("train", {})},
        memory={"graph": "auto", **changes.get("memory", {})},
        parallel={**OPEN, **changes.get("parallel", {})},
        device={"type": device},
    )


MORE: list[dict[str, Any]] = [
    {},
    {"memory": {"graph": False}},
    {"memory": {"policy": "offload"}},
    {"memory": {"policy": {"model.layers.*": "recompute"}}},
    {"memory": {"policy": {"model": "offload"}}},
    {"memory": {"policy": {"model.layers": "recompute"}}},  # a list, which is no region
    {"memory": {"policy": {"*.self_attn": "recompute", "*.experts": "keep"}}},
    {"memory": {"policy": {"no such module": "recompute"}}},
    {"model": {"config": {**MODEL, "hidden_size": 20}}},  # 40 bytes a row, which symmetric memory does not take
    {"model": {"config": {**MODEL, "attention_dropout": 0.1}}},  # test_cuda_graph_gpu and test_engines_gpu capture it
]


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        ({}, 1), ({}, 2), ({"replicate": 2}, 2), ({"pp": 2}, 2),
        ({"ep": 2}, 2), ({"ep": 2, "dispatch": "nccl"}, 2), ({"ep": 4}, 4), ({"ep": 2}, 4), ({"pp": 2}, 4),
    ],
    ids=str,
)  # fmt: skip
def test_plans_and_runs_choose_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    world: int,
    more: dict[str, dict[str, Any]],
    reaches: bool,
) -> None:
    """Where processes are as near as plans assume."""
    asked = opened(tmp_path, "cuda", **more, parallel=parallel)
    monkeypatch.setattr(fast_path, "peers_are_reachable", lambda _: reaches)
    monkeypatch.setattr(fast_path, "topology_of", lambda _: Topology((0,) * world))
    mesh: Any = SimpleNamespace(
        device=torch.device("cuda"), size=world, ep=asked.parallel.ep, pp=asked.parallel.pp,
        expert_group="group" if asked.parallel.ep > 1 else None, all=lambda answer: answer,
    )  # fmt: skip
    found, planned = fast_path.fast_path_of(asked, mesh), planned_path(asked, world)
    if reaches or not planned.is_fast or asked.parallel.ep == 1 or asked.parallel.dispatch == "nccl":
        assert found.config == planned.config
        assert found == planned or not reaches
    else:
        assert not found.is_fast and "read each other's memory" in found.line
    if "pp" not in parallel and ("model" in asked.memory.policy or "model.layers.*" in asked.memory.policy):
        assert "memory.policy places" in planned.line or asked.parallel.ep > 1
        step = planned.config.step
        assert not step.graph and planned.is_fast == (asked.parallel.ep > 1 and step.capacity_factor > 0)
    if parallel == {} and "self_attn" in str(more):
        assert planned.is_fast
    if parallel == {"ep": 2} and reaches and not isinstance(asked.memory.policy, dict):
        assert planned.config.step.overlap == ("20" not in str(more) and "offload" not in str(more))
        assert "multiple of 16 bytes" in planned.line or "20" not in str(more)


@pytest.mark.parametrize(
    ("vocabulary", "microbatch", "fast"),
    [(30_000_000, 1, True), (30_000_000, 4, False), (80_000_000, 1, False)],
)
def test_sharded_weights_are_gathered_for_whole_steps_where_they_are_small(
    tmp_path: Path, vocabulary: int, microbatch: int, fast: bool
) -> None:
    """They take 1.8 or 4.8 GiB in bf16; sums in fp32, which only steps of one microbatch add, twice as much."""
    sizes = {**MODEL, "vocab_size": vocabulary}
    asked = opened(tmp_path, "cuda", model={"config": sizes}, train={"microbatch": microbatch})
    path = planned_path(asked, 2)
    assert path.is_fast == fast
    assert fast or "weights and gradients of whole steps on each process would take" in path.line


@pytest.mark.parametrize(("width", "world", "fast"), [(1 << 17, 4, True), (1 << 18, 4, False), (1 << 18, 2, True)])
def test_experts_of_groups_that_share_them_are_gathered_where_they_are_small(
    tmp_path: Path, width: int, world: int, fast: bool
) -> None:
    """128 experts of each layer take 3 or 6 GiB in bf16; with two processes each has its own."""
    sizes = {**MODEL, "moe_intermediate_size": width, "num_experts": 256}
    path = planned_path(opened(tmp_path, "cuda", model={"config": sizes}, parallel={"ep": 2}), world)
    assert path.config.step.graph == fast and path.is_fast
    assert fast or "experts of whole steps on each process would take 6.0 GiB more" in path.line


def path_of_a_pipeline(rank: int, world: int, folder: str, agent: str) -> str:
    """The line of a run whose processes were started by several agents of torchrun, or by no torchrun at all."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if agent:
        os.environ["GROUP_RANK"] = str(rank)
    mesh: Any = SimpleNamespace(device=torch.device("cuda"), size=world, ep=1, pp=2, expert_group=None)
    return fast_path.fast_path_of(opened(folder, "cuda", parallel={"pp": 2}), mesh).line


@pytest.mark.parametrize(("agents", "line"), [("", "fast path"), ("two", "host-launched: processes of several nodes")])
def test_a_node_is_known_without_its_number_of_processes(tmp_path: Path, agents: str, line: str) -> None:
    for said in run_ranks(path_of_a_pipeline, 2, str(tmp_path), agents):
        assert said.startswith(line)


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
    layers = replace(asked, memory=replace(asked.memory, policy={"model.layers.*": "recompute"}))
    notes = fit_run(layers, plan_layers(layers, 2), 2).notes
    said = "Fast path: room for 2.0 times even routing; launched by the host: memory.policy places 'model.layers.0'"
    assert any(note.startswith(said) for note in notes)


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


def overlapped(folder: str, dropout: float = 0.1, **memory: Any) -> Config:
    return config(
        folder,
        {**WIDE, "num_hidden_layers": 2, "attention_dropout": dropout},
        train={"batch": 8, "microbatch": 2, "steps": 6, "eval_every": 1, "eval_batches": 1},
        data={"validation": 0.2},
        optimizer={"fused": False},
        memory=memory,
        parallel={"overlap": True, "reshard": False},
    )


Outcome = tuple[dict[str, torch.Tensor], list[Any], list[bool], str | None]


def outcome(settings: Config, evaluates: bool = False, steps: int = 6) -> Outcome:
    """State, figures of steps and evaluations, after which steps there is a graph, and what the run says of it."""
    figures: list[Any] = []
    held = []
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        for number in range(1, steps + 1):
            figures.append(figures_of(trainer.step(number)))
            figures += [trainer.evaluate()] if evaluates else []
            held.append(trainer.cuda_graph is not None and trainer.cuda_graph.has_graph)
        return state_of(trainer), figures, held, trainer.graph_status


def captures(patch: pytest.MonkeyPatch) -> Pretence:
    """Steps are captured on this CPU. A capture computes the step, so its first replay has its results."""
    patch.setattr(engines, "captures", lambda config, mesh: config.step.graph)
    return Pretence(patch)


def test_a_capture_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step computes all of its gradients before the end of its capture fails."""
    # A capture on a CPU would draw the random numbers of dropout.
    eager, graph = (overlapped(write_text(tmp_path), dropout=0.0, graph=graph) for graph in (False, True))
    called, figures, *_ = outcome(eager)
    pretence = captures(monkeypatch)

    @contextmanager
    def fails(captured: Any, **more: Any) -> Any:
        with pretence.graph(captured, **more):
            yield
        raise RuntimeError("a stream was asked for its state")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    failed, same, _, said = outcome(graph)
    assert figures == same and not differing(called, failed)
    assert said is not None and said.endswith("launched by the host: RuntimeError: a stream was asked for its state")


def rehearsed_without_memory(optimizer: ShardedAdamW, rehearse: Any = ShardedAdamW.rehearse) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", MagicMock(side_effect=torch.OutOfMemoryError("full")))
        rehearse(optimizer)


def lacking_room(rank: int, world: int, folder: str) -> tuple[list[str], bool, bool, str | None]:
    """Differing tensors, whether figures agree, whether there is a graph after any step, and what the run says of it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(ShardedAdamW, "rehearse", rehearsed_without_memory)
        called, figures, *_ = outcome(overlapped(folder, graph=False))
        captures(patch)
        lacking, same, held, said = outcome(overlapped(folder, graph=True))
    return differing(called, lacking), figures == same, any(held), said


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_without_room_beside_the_graph_gets_its_memory(tmp_path: Path, world: int) -> None:
    """Before anything is updated, and all processes give their graphs up for the lack of one."""
    for differ, agree, any_held, said in run_ranks(lacking_room, world, write_text(tmp_path)):
        assert not differ and agree and not any_held
        assert said is not None and "launched by the host: the optimizer's update has no room" in said


def test_a_rehearsed_update_allocates_no_more(tmp_path: Path) -> None:
    """On a CPU it shows the sizes: the roots of all second moments of a group."""
    with Trainer(overlapped(write_text(tmp_path))) as trainer:
        trainer.optimizer.rehearse()  # there are no moments yet
        trainer.step(1)
        parts = trainer.gradients(2)
        sizes: list[torch.Size] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda t: sizes.append(t.shape))
            trainer.optimizer.rehearse()
        assert len(parts) == 2 and sizes == [
            p.shape for group in trainer.optimizer.param_groups for p in group["params"]
        ]


@pytest.mark.parametrize("free", [99, 100])
def test_an_evaluation_without_room_beside_the_graph_gets_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """`free` bytes beside a graph that takes 100."""
    has_room, folder = free == 100, write_text(tmp_path)
    steps = 4 if has_room else 6
    called, figures, *_ = outcome(overlapped(folder, graph=False), True, steps)
    captures(monkeypatch)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 200))
    state, same, held, said = outcome(overlapped(folder, graph=True), True, steps)
    assert figures == same and held == [False] * (steps - 1) + [has_room]
    assert has_room or not differing(called, state)
    assert not has_room or said == "forwards and backwards of a step are one CUDA graph"


@pytest.mark.parametrize(
    ("family", "device", "more", "attention"),
    [
        ("gpt_oss", "cuda", {}, "flex"),
        ("deepseek_v4", "cuda", {}, "flex"),
        ("gpt_oss", "cpu", {}, "eager"),
        ("gpt_oss", "cuda", {"memory": {"compile": False}}, "eager"),
        ("gpt_oss", "cuda", {"data": {"packing": "documents"}}, "eager"),  # flex would cross documents
        ("gpt_oss", "cuda", {"model": {"attention": "eager"}}, "eager"),
        ("granitemoe_swa", "cuda", {}, "eager"),  # not among those that ran
        ("qwen3_moe", "cuda", {}, "sdpa"),
        ("qwen3_moe", "cuda", {"memory": {"graph": False}}, "sdpa"),
    ],
)
def test_attention_of_auto(
    tmp_path: Path, family: str, device: str, more: dict[str, dict[str, Any]], attention: str
) -> None:
    settings = config(
        tmp_path,
        model={"family": family, "config": fields_of(family), "attention": "auto", **more.get("model", {})},
        memory={"compile": True, "graph": "auto", **more.get("memory", {})},
        data=more.get("data", {}),
        device={"type": device},
    )
    assert planned_path(settings, 1).config.model.attention == attention
