"""A run's folder and a plan to make pages of, without training: a pipeline of two ranks, as the trainer writes it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from forebay.config import Config, from_mapping
from forebay.estimate.device import load
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.pipeline.activity import ActionRecord, trace_json
from forebay.report.plan_page import Planned
from tests.train.common import MODEL

GIB = 1 << 30
NASTY = "<script>window.hurt=1</script>\"'&x"
VOID = {"br", "link", "meta"}
BLOCKS = {"div", "dl", "figure", "h1", "h2", "h3", "p", "pre", "section", "table", "ul"}
ACTIONS = [
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
    """As ``forebay plan`` makes it: with the time of a step on `device`, and placements chosen within `auto` bytes."""
    plan = plan_layers(settings, world)
    profile = load(device) if device else None
    fit = fit_run(settings, plan, world, budget, device=profile, auto=auto)
    return Planned(plan, fit)


def write_folder(folder: Path, settings: Config, steps: int = 12, gpu: bool = True) -> Path:
    """A finished run of two ranks on two H200, with every file. Peaks are 3 and 2 GiB, reserved 4 GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processes": 2, "device": "NVIDIA H200" if gpu else "CPU", "device_bytes": 141 * GIB if gpu else None}
    run = {"config": settings.to_dict(), "versions": {"torch": "2.13.0"}, "machine": machine}
    (folder / "run.json").write_text(json.dumps(run))
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record = {"step": step, "seconds": 0.5, "run_again": int(step == 2)}
        record |= {"cross_entropy_loss": 6.0 - step / 4, "tokens_per_second": 1000.0 * step}
        record |= {"peak_bytes": 3 * GIB, "peak_bytes_by_rank": [3 * GIB, 2 * GIB]}
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
    (folder / "pipeline.json").write_text(trace_json(ACTIONS))
    return folder


def chart_data(html: str) -> list[dict[str, Any]]:
    """The figures behind the tips of each chart."""
    return [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', html)]


class PageText(HTMLParser):
    """A page as a browser reads it.

    Attributes:
        sections: text by the name of its section, "" for the header.
        rows: tables of a section as lists of cells.
        wrong: tags that are not closed in order, attributes and ids given twice, blocks in a paragraph.
        scripts: (type, text).
        links: where they lead.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}
        self.rows: dict[str, list[list[str]]] = {}
        self.wrong: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.links: list[str] = []
        self._at, self._open, self._ids = "", list[str](), set[str]()
        self.feed(text)
        self.close()
        self.wrong += [f"{name} is not closed" for name in self._open]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if len(values) != len(attributes) or values.get("id") in self._ids:
            self.wrong.append(f"{name} has an attribute or an id twice: {attributes}")
        if name in BLOCKS and "p" in self._open:
            self.wrong.append(f"{name} in a paragraph")
        self._ids |= {values["id"]} if values.get("id") else set()  # type: ignore[arg-type]
        self.links += [v for key, v in attributes if key in ("href", "src", "srcset", "action", "xlink:href") and v]
        if name not in VOID:
            self._open.append(name)
        if name == "script":
            self.scripts.append((values.get("type"), ""))
        if name == "section":
            self._at = str(values["id"])
            self.sections[self._at], self.rows[self._at] = "", []
        if name == "tr":
            self.rows[self._at].append([])
        if name in ("td", "th"):
            self.rows[self._at][-1].append("")

    def handle_endtag(self, name: str) -> None:
        if not self._open or self._open.pop() != name:
            self.wrong.append(f"</{name}> closes something else")

    def handle_data(self, text: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + text)
        if inside in ("script", "style", "title"):
            return
        self.sections[self._at] += text
        if {"td", "th"} & set(self._open):
            self.rows[self._at][-1][-1] += text
