"""`benchmarks/planner_hf.py` on the CPU: a tiny run of both arms, and the table of their errors."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

SMALL = ("hidden_size=64", "num_hidden_layers=1", "num_experts=8", "moe_intermediate_size=32", "vocab_size=512")
HF = (
    "max_length=32",
    "per_device_train_batch_size=2",
    "dtype=float32",
    "lora_r=4",
    "lora_target_modules=q_proj,v_proj",
)
MEMORY = ("memory.policy=offload", "device.expandable_segments=true")


@pytest.fixture
def planner_hf(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("planner_hf")


@pytest.mark.integration
def test_both_arms_run_once_and_are_compared_with_their_plans(
    planner_hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = planner_hf.Run("one", "qwen3-30b-a3b", HF, tuple(f"model.config.{s}" for s in SMALL) + MEMORY)
    plan = {"reserved": 90, "allocated": 110, "seconds": 1.0, "parameters": 1}
    file, rows = tmp_path / "planner_hf_7.json", tmp_path / "planner_hf_7_measured.jsonl"
    file.write_text(json.dumps({"runs": [planner_hf.asdict(run) | {"planned": dict.fromkeys(planner_hf.ARMS, plan)}]}))
    monkeypatch.setenv("FOREBAY_RESULTS", str(tmp_path))
    planner_hf.run(file, 300)
    measured = planner_hf.read(rows)
    assert [row["arm"] for row in measured] == list(planner_hf.ARMS)
    assert all(len(row["seconds"]) == planner_hf.STEPS - planner_hf.WARM for row in measured), measured
    assert measured[1]["report"]["moved"] > 0
    planner_hf.run(file, 300)
    assert planner_hf.read(rows) == measured, "it runs what has not run"

    rows.write_text("".join(json.dumps(row | {"reserved": 100, "allocated": 100}) + "\n" for row in measured))
    planner_hf.show(file)
    out = capsys.readouterr().out
    assert (
        "as it is, reserved %: 1 runs, mean 10.00, -10.0 to -10.0" in out
        and "Forebay, allocated %: 1 runs, mean 10.00" in out
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "fsdp", [pytest.param("true", id="fsdp"), pytest.param("false", id="ddp", marks=pytest.mark.slow)]
)
def test_two_processes_share_a_run(planner_hf: Any, fsdp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms, with accumulation; as many steps as on one GPU."""
    hf = (*HF, "gradient_accumulation_steps=2", "bf16=true", f"fsdp={fsdp}")
    run = planner_hf.Run("two", "qwen3-30b-a3b", hf, tuple(f"model.config.{s}" for s in SMALL) + MEMORY, 2)
    file = tmp_path / "planner_hf_8.json"
    file.write_text(json.dumps({"runs": [planner_hf.asdict(run) | {"planned": {}}]}))
    monkeypatch.setenv("FOREBAY_RESULTS", str(tmp_path))
    planner_hf.run(file, 500)
    rows = planner_hf.read(tmp_path / "planner_hf_8_measured.jsonl")
    assert [row["arm"] for row in rows] == list(planner_hf.ARMS)
    assert all(len(row["seconds"]) == planner_hf.STEPS - planner_hf.WARM for row in rows), rows


def test_a_seed_draws_the_same_runs(planner_hf: Any) -> None:
    for gpus in (1, 2):
        one, other = ([planner_hf.drawn(random.Random(seed), n, gpus) for n in range(20)] for seed in (5, 5))
        assert one == other
        for run in one:
            assert planner_hf.read_arguments(run.hf).dtype == "bfloat16" and run.configuration().model.family
            assert run.gpus == gpus and (gpus > 1) == any(text.startswith("fsdp=") for text in run.hf)
