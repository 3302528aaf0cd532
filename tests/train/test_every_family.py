"""The trainer takes every MoE family whose routers return logits and ids, and dense ones of the same structure."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forebay.config import Model, fast_path
from forebay.models.router import BIASES
from forebay.train import hf_io
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.models.conftest import WITH_BACK
from tests.ranks import run_ranks
from tests.train.common import config, figures_of, write_text
from tests.train.families import FAMILIES, IN_GROUPS, fields_of, has_router_loss

# With factors of embedded tokens and logits, or with layers whose experts' sum is scaled or normed.
PIPED = ("granite", "granitemoehybrid", "lfm2_moe", "afmoe", "ernie4_5_moe")
GROUPED = tuple(family for family in WITH_BACK if family in IN_GROUPS)
SCALED = {"granite": {"embedding_multiplier": 2.3, "logits_scaling": 6.0, "residual_multiplier": 0.3}}


def trained(
    folder: Path,
    family: str,
    graph: bool = False,
    compile: bool = False,
    pp: int = 1,
    ep: int = 1,
    layers: int = 2,
    microbatch: int = 2,
    overlap: bool | str = "auto",
    **model: Any,
) -> tuple[list[tuple[float, ...]], dict[str, float]]:
    """Figures of the steps, and the largest number in each router's bias after them."""
    coefficient = {"router_aux_loss_coef": 0.1} if has_router_loss(family) else {}
    sizes = {**fields_of(family, layers), **coefficient, **SCALED.get(family, {})}
    settings = config(
        folder,
        model={"family": family, "config": sizes, "attention": "eager", **model},
        train={"batch": 4, "microbatch": microbatch, "sequence": 32, "steps": 2, "router_bias_rate": 0.01},
        memory={"graph": graph, "compile": compile},
        parallel={"overlap": overlap, "reshard": "auto", "capacity_factor": "auto", "pp": pp, "ep": ep},
    )
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        figures = [figures_of(trainer.step(number)) for number in (1, 2)]
        biases = {n: float(b.abs().max()) for n, b in trainer.model.named_buffers() if n.endswith("_bias")}
        assert not any(n.endswith(("correction_bias", "expert_bias")) for n, _ in trainer.model.named_parameters())
    return figures, biases


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_every_family_are_those_of_transformers_code(tmp_path: Path, family: str) -> None:
    """With Forebay's experts and loss the sums have another order: float32 has 24 bits, two steps lose a few."""
    write_text(tmp_path)
    ours, moved = trained(tmp_path, family)
    engines, moved_too = trained(tmp_path, family, graph=True)  # its steps are called here
    theirs, also_moved = trained(tmp_path, family, experts="transformers", loss="transformers")
    for own, engine, its in zip(ours, engines, theirs, strict=True):
        assert own == pytest.approx(its, rel=1e-5) and engine == pytest.approx(its, rel=1e-5)
    assert moved == moved_too == also_moved and all(moved.values())


@pytest.mark.parametrize("family", ["granitemoe", "ernie4_5_moe"])
def test_an_engine_compiles_what_is_before_and_after_experts_that_are_not_just_added(
    tmp_path: Path, family: str, no_codegen: None
) -> None:
    """Not the experts: their weight gradients are deferred, which breaks a graph."""
    write_text(tmp_path)
    engines, moved = trained(tmp_path, family, graph=True, compile=True)
    plain, also_moved = trained(tmp_path, family, compile=True)
    for engine, own in zip(engines, plain, strict=True):
        assert engine == pytest.approx(own, rel=1e-5)
    assert moved == also_moved


def test_an_engine_runs_under_hooks_on_all_modules(tmp_path: Path) -> None:
    write_text(tmp_path)
    wanted = trained(tmp_path, "granitemoe", graph=True)
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match="do not see MoE blocks of an engine"):
        assert trained(tmp_path, "granitemoe", graph=True) == wanted


def test_an_engine_cuts_models_whose_last_norm_has_no_weight(tmp_path: Path) -> None:
    write_text(tmp_path)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    runs = []
    for graph in (False, True):
        settings = config(
            tmp_path, model={"family": "olmo", "config": sizes}, train={"sequence": 32}, memory={"graph": graph}
        )
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            runs.append([figures_of(trainer.step(number)) for number in (1, 2)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("family", ["afmoe", "minimax_m2"])
def test_a_folders_biases_are_read_in_float32(tmp_path: Path, family: str) -> None:
    """By one process, which transformers reads for, as by several."""
    cpu = torch.device("cpu")
    model = hf_io.build(Model(family=family, config=fields_of(family), dtype="bfloat16", attention="eager"), 320, cpu)
    for name, bias in model.named_buffers():
        if name.endswith(BIASES):
            bias.fill_(0.001)
    hf_io.save(model, tmp_path / "out")
    section = Model(family="", path=str(tmp_path / "out"), dtype="bfloat16", attention="eager")
    for shard in (None, lambda _: None):
        held = {n: b for n, b in hf_io.build(section, 320, cpu, shard=shard).named_buffers() if n.endswith(BIASES)}
        assert held and all(torch.equal(b, torch.full_like(b, 0.001, dtype=torch.float32)) for b in held.values())


def piped(rank: int, world: int, folder: str) -> list[list[tuple[float, ...]]]:
    return [trained(Path(folder), family, pp=world, layers=4, microbatch=1)[0] for family in PIPED]


def test_pipelines_compute_what_one_process_does(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    wanted = [trained(tmp_path, family, layers=4, microbatch=1, loss="transformers")[0] for family in PIPED]
    for found in run_ranks(piped, 2, folder):
        for figures, alone in zip(found, wanted, strict=True):
            assert figures == [pytest.approx(step, rel=1e-5) for step in alone]


def in_groups(rank: int, world: int, folder: str) -> list[list[list[tuple[float, ...]]]]:
    """Steps that overlap, and others."""
    return [
        [trained(Path(folder), family, ep=world, microbatch=1, overlap=o)[0] for o in (True, False)]
        for family in GROUPED
    ]


def test_expert_groups_compute_what_one_process_does(tmp_path: Path) -> None:
    """Tokens travel between the experts and what is done with their sums."""
    folder = write_text(tmp_path)
    wanted = [trained(tmp_path, family, microbatch=1, loss="transformers")[0] for family in GROUPED]
    for found in run_ranks(in_groups, 2, folder):
        for runs, alone in zip(found, wanted, strict=True):
            for figures in runs:
                assert figures == [pytest.approx(step, rel=1e-5) for step in alone]


def test_the_page_names_families_in_graphs() -> None:
    page = Path("docs/models.md").read_text(encoding="utf-8")
    section = page.partition("## Steps as CUDA graphs")[2].partition("##")[0]
    assert set(fast_path.FAMILIES) == set(FAMILIES) & set(re.findall(r"\w+", section))
    assert set(fast_path.FAMILIES) <= set(FAMILIES)
