"""What a plan refuses, chooses and notes, where a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit, fit_run
from forebay.train.trainer import Trainer
from tests.train.common import DENSE, MODEL, config, write_text

pytestmark = pytest.mark.usefixtures("shared_traces")


def fit_of(settings: Any, world: int = 1, auto: int | None = None) -> Fit:
    return fit_run(settings, plan_layers(settings, world), world, auto, auto=auto)


@pytest.mark.parametrize(
    ("model", "policy", "said"),
    [
        ({}, "stash", "without expert parallelism"),
        ({}, {"*.mlp.experts": "stash"}, "without expert parallelism"),
        ({}, {"*.self_attn": "stash"}, "which is no paged region; valid are the experts of MoE layers"),
        ({"family": "qwen3", "config": DENSE}, "stash", "and this model has none"),
    ],
)
def test_plans_refuse_a_stash_that_runs_refuse(
    tmp_path: Path, model: dict[str, Any], policy: str | dict[str, str], said: str
) -> None:
    settings = config(write_text(tmp_path, 500), MODEL, model=model, memory={"policy": policy})
    reasons = []
    for refuses in (Trainer, fit_of):
        with pytest.raises(UsageError, match=said) as caught:
            refuses(settings)
        reasons.append(str(caught.value).split(": ", 1)[1])
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize(
    ("world", "parallel", "experts", "takes"),
    [
        (1, {"overlap": True}, "forebay", True),
        (2, {"ep": 2}, "forebay", True),
        (2, {"pp": 2, "schedule": "1f1b"}, "forebay", True),
        (2, {}, "forebay", False),
        (1, {}, "transformers", False),
    ],
    ids=str,
)
def test_plans_take_a_stash_where_a_dispatcher_brings_rows(
    tmp_path: Path, world: int, parallel: dict[str, Any], experts: str, takes: bool
) -> None:
    model, train = {"experts": experts, "dtype": "bfloat16"}, {"batch": 8, "microbatch": 1}
    settings = config(tmp_path, MODEL, model=model, train=train, memory={"policy": "stash"}, parallel=parallel)
    if not takes:
        with pytest.raises(UsageError, match="'stash' puts 'stash' on"):
            fit_of(settings, world)
        return
    placed = {row["placement"]: row["parts"] for row in fit_of(settings, world).placements()}
    assert placed["stash"] == MODEL["num_hidden_layers"]
