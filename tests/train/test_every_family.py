"""The trainer takes every MoE family whose routers return logits and ids, and dense ones of the same structure."""

import re
from pathlib import Path
from typing import Any

import pytest

from forebay.config import fast_path
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import config, figures_of, write_text
from tests.train.families import FAMILIES, fields_of, has_router_loss

# With factors of embedded tokens and logits, or with layers whose experts' sum is scaled or normed.
PIPED = ("granite", "granitemoehybrid", "lfm2_moe", "afmoe", "ernie4_5_moe")
SCALED = {"granite": {"embedding_multiplier": 2.3, "logits_scaling": 6.0, "residual_multiplier": 0.3}}


def trained(
    folder: Path,
    family: str,
    graph: bool = False,
    compile: bool = False,
    pp: int = 1,
    layers: int = 2,
    microbatch: int = 2,
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
        parallel={"overlap": "auto", "reshard": "auto", "capacity_factor": "auto", "pp": pp},
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
def test_experts_of_an_engine_that_are_not_just_added_are_not_compiled(
    tmp_path: Path, family: str, no_codegen: None
) -> None:
    """Their weight gradients are deferred, which breaks a graph."""
    write_text(tmp_path)
    engines, moved = trained(tmp_path, family, graph=True, compile=True)
    plain, also_moved = trained(tmp_path, family, compile=True)
    for engine, own in zip(engines, plain, strict=True):
        assert engine == pytest.approx(own, rel=1e-5)
    assert moved == also_moved


def piped(rank: int, world: int, folder: str) -> list[list[tuple[float, ...]]]:
    return [trained(Path(folder), family, pp=world, layers=4, microbatch=1)[0] for family in PIPED]


def test_pipelines_compute_what_one_process_does(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    wanted = [trained(tmp_path, family, layers=4, microbatch=1, loss="transformers")[0] for family in PIPED]
    for found in run_ranks(piped, 2, folder):
        for figures, alone in zip(found, wanted, strict=True):
            assert figures == [pytest.approx(step, rel=1e-5) for step in alone]


def test_the_page_names_families_in_graphs() -> None:
    page = Path("docs/models.md").read_text(encoding="utf-8")
    section = page.partition("## Steps as CUDA graphs")[2].partition("##")[0]
    assert set(fast_path.FAMILIES) == set(FAMILIES) & set(re.findall(r"\w+", section))
    assert set(fast_path.FAMILIES) <= set(FAMILIES)
