"""Every tested family, on one process and on meshes, against transformers' own model in float64; see `tests.train.reference`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay.train.hf_io import TESTED
from tests.ranks import run_ranks
from tests.train.reference import Case, disagreements, write_model, write_texts

OFFLOADED: dict[str, Any] = {"policy": {"*.self_attn": "offload", "*.mlp": "recompute"}, "offload": "all"}
ON_TWO: list[dict[str, Any]] = [
    {"parallel": {"ep": 2, "reshard": False}, "memory": {"policy": "stash"}},
    {"parallel": {"pp": 2, "schedule": "zbv"}, "sizes": {"tie_word_embeddings": True}},
    {"parallel": {"ep": 2, "overlap": True}},
    {"parallel": {"pp": 2, "schedule": "dualpipev"}, "memory": OFFLOADED},
    {"parallel": {"replicate": 2}, "memory": OFFLOADED},
    {"parallel": {"pp": 2, "schedule": "interleaved-1f1b"}},
    {"parallel": {"reduce": "microbatch"}, "memory": {"policy": "recompute"}},
    {"parallel": {"overlap": True}},
]
# The last one has factors of embedded tokens and logits, and experts whose sum is scaled.
FAMILIES = (*TESTED, "granitemoe")


def case_of(family: str, **changes: Any) -> Case:
    return Case(family, documents=family != "gpt_oss", masked=True, **changes)


@pytest.mark.parametrize("family", TESTED)
def test_one_process(family: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    case = case_of(family, memory=OFFLOADED)
    write_model(case, tmp_path / "model")
    assert disagreements(case, tmp_path, tmp_path / "model") == []


def on_a_rank(rank: int, world: int, texts: str) -> list[list[str]]:
    torch.set_num_threads(1)
    found = []
    for family, changes in zip(FAMILIES, ON_TWO, strict=True):
        case, folder = case_of(family, train={"batch": 4}, **changes), Path(texts) / family
        if rank == 0:
            write_model(case, folder)
        dist.barrier()
        found.append([f"{family}: {wrong}" for wrong in disagreements(case, Path(texts), folder)])
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    return found


def test_two_processes(tmp_path: Path) -> None:
    write_texts(tmp_path)
    assert run_ranks(on_a_rank, 2, str(tmp_path)) == [[[] for _ in FAMILIES]] * 2
