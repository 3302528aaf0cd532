"""What a run leaves for its report: counted by hand, on one process and on a pipeline."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from forebay.config import Config, from_mapping
from forebay.errors import RunError
from forebay.train.loop import train
from forebay.train.run_outputs import write_result
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.test_pipeline_profile import MODEL


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def test_of_one_process(tiny: Callable[..., Config]) -> None:
    config = tiny(
        train={"steps": 2},
        memory={"policy": {"model.layers.0.*attn": "recompute"}},
        log={"profile": True, "tensorboard": True},
    )
    with Trainer(config) as trainer:
        parameters = list(trainer.model.parameters())
        profile = trainer.memory.profile(trainer.forward)
    folder = train(config, quiet())
    (rank,) = json.loads((folder / "result.json").read_text())["ranks"]
    elements = sum(p.numel() for p in parameters)
    assert rank["parameter_bytes"] == 4 * elements
    assert rank["optimizer_bytes"] == 8 * elements + 4 * len(parameters)  # two moments, and a step's number each
    assert rank["placements"]["model.layers.0.self_attn"] == "recompute"
    assert json.loads((folder / "profile.json").read_text()) == json.loads(profile.to_json())
    assert json.loads((folder / "run.json").read_text())["machine"] == {
        "processes": 1,
        "device": "CPU",
        "device_bytes": None,
    }
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(step["peak_bytes_by_rank"] == [step["peak_bytes"]] for step in steps)
    assert not any("reserved_bytes_by_rank" in step for step in steps)  # a CPU has no caching allocator


def test_a_profile_is_not_taken_unless_asked_for(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    assert (folder / "result.json").is_file() and not (folder / "profile.json").exists()


def test_a_resumed_run_does_not_show_what_it_was(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 2}, checkpoint={"every": 1}), quiet())
    assert (folder / "result.json").is_file()

    class Stopped(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(Stopped):
            train(tiny(train={"steps": 2}), quiet(), resume=str(folder / "checkpoints" / "step-00000001"))
    assert not (folder / "result.json").exists()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone.*result\.json cannot be written: No such file.*the run itself is done"):
        write_result(tmp_path / "gone" / "result.json", "{}")


def pipeline(rank: int, world: int, folder: str) -> tuple[int, int]:
    """Bytes of this rank's parameters, and how many it has, after a run."""
    config = from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": MODEL},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": 8, "microbatch": 1, "sequence": 16, "steps": 2},
            "parallel": {"pp": 2, "dispatch": "nccl"},
            "checkpoint": {"last": False},
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run", "progress": "off", "profile": True},
        }
    )
    train(config, quiet())
    from forebay.train.distributed import Mesh

    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        own = [p for p in trainer.model.parameters() if isinstance(p, torch.Tensor)]
        return sum(p.numel() * p.element_size() for p in own), len(own)


def test_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    by_rank = run_ranks(pipeline, 2, str(tmp_path))
    ranks = json.loads((tmp_path / "run" / "result.json").read_text())["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1]
    assert [r["parameter_bytes"] for r in ranks] == [size for size, _ in by_rank]
    assert [r["optimizer_bytes"] for r in ranks] == [2 * size + 4 * count for size, count in by_rank]
    layers = [{path.split(".")[2] for path in r["placements"]} for r in ranks]
    assert layers[0].isdisjoint(layers[1]) and len(layers[0] | layers[1]) == MODEL["num_hidden_layers"]
    profiles = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert [p["rank"] for p in profiles] == [0, 1] and all(p["peak_bytes"] > 0 for p in profiles)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(len(s["peak_bytes_by_rank"]) == 2 and max(s["peak_bytes_by_rank"]) == s["peak_bytes"] for s in steps)
