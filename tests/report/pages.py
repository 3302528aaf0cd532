"""A run's folder and a plan to make pages of, in no time: a pipeline of two ranks, written as the trainer writes it."""

import json
from pathlib import Path
from typing import Any

from forebay.config import Config, from_mapping
from forebay.estimate.device import load
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.pipeline.activity import ActionRecord, trace_json
from forebay.report.sections import Curves, Planned
from tests.train.conftest import MODEL

GIB = 1 << 30
RAN = [
    ActionRecord(0, "F", "0F0", 0.0, 10.0, 1 << 20),
    ActionRecord(0, "SEND_F", "0SEND_F0", 10.0, 11.0, 1 << 20),
    ActionRecord(1, "F", "1F0", 11.0, 21.0, 1 << 20),
    ActionRecord(1, "OVERLAP_F_B", "(1F1;1B0)OVERLAP_F_B", 21.0, 41.0, 2 << 20),
    ActionRecord(0, "B", "0B0", 42.0, 60.0, 1 << 20),
    ActionRecord(1, "I", "1I1", 42.0, 50.0, 1 << 20),
    ActionRecord(1, "W", "1W1", 50.0, 56.0, 1 << 20),
]


def config(folder: Path, **changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen3_moe", "config": {**MODEL, "num_hidden_layers": 4}},
        "data": {"source": "text", "path": str(folder / "text.txt"), "cache": str(folder / "cache")},
        "train": {"steps": 12, "batch": 8, "microbatch": 1, "sequence": 16},
        "parallel": {"pp": 2, "dispatch": "nccl"},
        "memory": {"policy": {"model.layers.0.*": "offload", "model.layers.1.self_attn": "recompute"}},
        "log": {"folder": str(folder / "run"), "timeline": 3},
        "device": {"type": "cpu"},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return from_mapping(sections)


def plan_of(settings: Config, world: int, budget: int | None, device: str = "", auto: int | None = None) -> Planned:
    """As ``forebay plan`` makes it; with the time of a step on `device`, and placements that are chosen within `auto` bytes."""
    curves = Curves()
    plan = plan_layers(settings, world)
    profile = load(device) if device else None
    fit = fit_run(settings, plan, world, budget, device=profile, auto=auto, seen=curves.seen)
    return curves.planned(plan, fit)


def write_folder(folder: Path, settings: Config, steps: int = 12, gpu: bool = True) -> Path:
    """A run of two ranks on two H200, all of whose files are there. Peaks are 3 and 2 GiB, reserved 4 GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processes": 2, "device": "NVIDIA H200" if gpu else "CPU", "device_bytes": 141 * GIB if gpu else None}
    about = {"config": settings.to_dict(), "versions": {"torch": "2.13.0"}, "machine": machine}
    (folder / "run.json").write_text(json.dumps(about))
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record = {
            "step": step,
            "seconds": 0.5,
            "cross_entropy_loss": 6.0 - step / 4,
            "tokens_per_second": 1000.0 * step,
        }
        record |= {"peak_bytes": 3 * GIB, "peak_bytes_by_rank": [3 * GIB, 2 * GIB], "run_again": int(step == 2)}
        records.append(record | ({"reserved_bytes_by_rank": [4 * GIB, 4 * GIB]} if gpu else {}))
        records += [{"step": step, "validation_loss": 5.5}] if step % 4 == 0 else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ranks = [
        {
            "rank": rank,
            "parameter_bytes": 1000 + rank,
            "optimizer_bytes": 2000,
            "placements": {f"model.layers.{rank}.self_attn": "keep", f"model.layers.{rank}.mlp": "offload"},
            "saved_bytes": {"keep": 5 << 20, "offload": 7 << 20},
            "moved_bytes": 7 << 20,
            "d2h_gbps": 51.25,
            "h2d_gbps": None,
            "wait_ms": 0.5,
        }
        for rank in range(2)
    ]
    (folder / "result.json").write_text(json.dumps({"ranks": ranks}))
    saved = [
        {"stage": 0, "layer": 0, "part": part, "microbatch": 0, "bytes": 3 << 20, "weight_bytes": 0}
        for part in ("attention", "experts")
    ]
    profile = [
        {"rank": rank, "peak_bytes": 9 << 20, "peak_in_flight": {"0": 4, "3": 1}, "saved": saved} for rank in range(2)
    ]
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "pipeline.json").write_text(trace_json(RAN))
    return folder
