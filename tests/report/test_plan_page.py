"""The page of a plan: its figures are those of the table and the JSON, and it overwrites nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.estimate.placement import ranges
from forebay.estimate.step_time import StepTime
from forebay.policy import format_bytes
from forebay.report.plan_page import plan_page, time_section, time_tiles
from tests.conftest import Run
from tests.helpers import toml_table
from tests.products import first
from tests.report.pages import PageText, chart_data, config, plan_of
from tests.train.common import MODEL

pytestmark = pytest.mark.usefixtures("shared_traces")
SMALL = f"""
model.family = "qwen3_moe"
model.config = {toml_table({**MODEL, "num_hidden_layers": 4})}
train = {{batch = 8, microbatch = 1, sequence = 16}}
parallel.pp = 2
device.type = "cpu"
"""
COLUMNS = "parameters gradients optimizer activations transient cached other total headroom".split()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def test_the_page_has_the_figures_of_the_json(small: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "plan.html"
    code, out, _ = run("plan", small, "--json", "--budget=1GiB", "--device=a100", "--html", page)
    fit = json.loads(out)["fit"]  # nothing else is printed
    text = PageText(page.read_text("utf-8"))
    assert code == 0 and fit["verdict"].startswith("Fits 1.00 GiB")
    assert "Fits" + fit["verdict"].removeprefix("Fits ") in text.sections[""]  # the word is there once
    for rank, row in zip(fit["ranks"], text.rows["ranks"][1:], strict=True):
        assert row == [str(rank["rank"]), "", *(format_bytes(rank[name]) for name in COLUMNS)]
    (kept,) = fit["placements"]
    (row,) = [row for row in text.rows["placements"] if row[0].startswith("keep")]
    assert row[1:4] == [str(kept["parts"]), format_bytes(kept["saved_bytes"]), format_bytes(kept["held_bytes"])]
    assert "on a100, from data sheets" in text.sections[""]
    assert f"{fit['step']['tokens_per_second']:,.0f}" in text.sections[""]
    assert [row[3] for row in text.rows["time"][-2:]] == [f"{100 * share:.1f} %" for share in fit["step"]["bubble"]]
    drawn = chart_data(page.read_text())
    assert len(drawn) == len(fit["ranks"])
    highest = max(sum(values) for d in drawn for values in zip(*(s["values"] for s in d["series"]), strict=True))
    unit = {" KiB": 1 << 10, " MiB": 1 << 20}[drawn[0]["unit"]]
    assert highest == pytest.approx(max(r["total"] for r in fit["ranks"]) / unit, rel=1e-3)


@pytest.mark.parametrize(("budget", "code", "word"), [("300KiB", 3, "Does not fit"), (None, 0, "No budget")])
def test_verdicts(small: Path, tmp_path: Path, run: Run, budget: str | None, code: int, word: str) -> None:
    page = tmp_path / "plan.html"
    found, out, error = run("plan", small, *([] if budget is None else [f"--budget={budget}"]), "--html", page)
    assert found == code and out.endswith(f"page {page}\n"), error
    assert word in PageText(page.read_text()).sections[""]


def test_pages_that_cannot_be_written(small: Path, tmp_path: Path, run: Run) -> None:
    """Raised before anything is planned, and nothing is overwritten but a page of Forebay's."""
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html><title>mine</title>")
    for file, message in (
        (tmp_path / "no" / "plan.html", "no is not a folder; create it"),
        (tmp_path, "is a folder; name a file"),
        (mine, "mine.html exists and is not a page that Forebay wrote"),
        (small, "small.toml exists"),
    ):
        code, out, error = run("plan", small, "--html", file)
        assert (code, out) == (2, "") and message in error and error.count("\n") == 1
    assert mine.read_text() == "<!doctype html><title>mine</title>"
    page = tmp_path / "plan.html"
    assert [run("plan", small, "--html", page)[0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_highest_level_is_the_peak_of_the_table(tmp_path: Path, device: str) -> None:
    """On a GPU the stack is allocated memory, and a line over it is what the allocator holds as well."""
    settings = config(tmp_path, device={"type": device})
    plan = plan_of(settings, 2, None)
    for rank in plan.fit.ranks:
        peak = max(plan.levels[rank.rank], key=lambda level: level.total)
        assert (peak.total, peak.where) == (rank.allocated, rank.where)
        assert rank.total == rank.allocated + rank.cached and (rank.cached > 0) == (device == "cuda")
        assert (peak.bytes["activations"], peak.bytes["gradients"]) == (rank.activations, rank.gradients)
    html = plan_page(plan, settings, "name.toml")
    assert html.count('class="ceiling s-cached"') == (len(plan.fit.ranks) if device == "cuda" else 0)
    if device == "cuda":
        text, most = PageText(html), plan.fit.fullest
        used = f"in use at most {format_bytes(most.allocated)}, at {most.where}"
        assert f"{used}; taken from the GPU {format_bytes(most.total)}" in text.sections["step"]
        assert f"{format_bytes(most.reserved)} of it reserved by torch's allocator" in text.sections[""]
        assert "allocated at most" not in text.sections[""]
        assert "symmetric memory, a CUDA graph's nodes" in text.sections["ranks"]


SECONDS = {"schedule": 2.0, "launched": 2.0, "gather": 0.1, "reduce": 0.1, "optimizer": 0.3, "host": 1.0}
STEP = StepTime(device="h200", busy=(1.5, 1.0), exposed=(0.25, 0.0), tokens=5000, **SECONDS)


def time_rows(step: StepTime) -> list[list[str]]:
    return PageText(f'<section id="time">{time_section(step).body}</section>').rows["time"]


def test_a_steps_time_by_hand() -> None:
    """2 s of schedule, 0.1 each of gathering and reducing, 0.3 of optimizer: 2.5 s; the host's 1 s is hidden."""
    assert time_tiles(STEP) == [
        ("expected step time", "2.500 s", "on h200"),
        ("tokens a second", "2,000", "of all processes"),
        ("bubble", "25 to 50 %", "by pipeline rank"),
    ]
    rows, lead = time_rows(STEP), time_section(STEP).lead
    times, shares = zip(*(row[1:3] for row in rows[1:6]), strict=True)
    assert times == ("2.000 s", "100.0 ms", "100.0 ms", "300.0 ms", "2.500 s")
    assert shares == ("80.0 %", "4.0 %", "4.0 %", "12.0 %", "100.0 %")
    assert [row[:4] for row in rows[7:]] == [
        ["0", "1.500 s", "250.0 ms", "25.0 %"],
        ["1", "1.000 s", "0.0 ms", "50.0 %"],
    ]
    assert "data sheets" not in lead and "needs 1.000 s to launch" in lead and "memory.graph" not in lead


def test_a_step_that_waits_for_its_host_on_a_device_from_data_sheets() -> None:
    """The schedule's 2 s, and 2 more until the host's 4 are over: 4.5 s."""
    step = replace(STEP, device="h100", measured=False, launched=4.0, host=4.0, busy=(2.0,), exposed=(0.0,))
    assert time_tiles(step)[0] == ("expected step time", "4.500 s", "on h100, from data sheets")
    assert len(time_tiles(step)) == 2
    assert [row[1:3] for row in time_rows(step)[1:3]] == [["2.000 s", "44.4 %"], ["2.000 s", "44.4 %"]]
    assert "on h100, from data sheets" in time_section(step).lead and "memory.graph = true" in time_section(step).lead
    assert time_section(replace(step, capturable=False)).lead.endswith("That is longer than they run.")


def test_chosen_placements(small: Path, tmp_path: Path, run: Run) -> None:
    """Each line of the JSON, with the sum over its layers."""
    page = tmp_path / "plan.html"
    peak = max(r["total"] for r in json.loads(run("plan", small, "--json")[1])["fit"]["ranks"])
    code, out, _ = run("plan", small, "--json", "--auto", f"--budget={peak - 2000}B", "--html", page)
    fit = json.loads(out)["fit"]
    assert code == 0 and fit["chosen"]
    text = PageText(page.read_text("utf-8"))
    rows = [row for row in text.rows["placements"] if len(row) == 8][1:]
    for row, chosen in zip(rows, fit["chosen"], strict=True):
        every = format_bytes(chosen["freed_bytes"] * len(chosen["layers"]))
        assert row[:4] == [str(chosen["rank"]), chosen["placement"], chosen["half"], ranges(chosen["layers"], " to ")]
        assert row[4:7] == [format_bytes(chosen["freed_bytes"]), f"{chosen['milliseconds']:.2f} ms", every]
    paid = [row for row in text.rows["placements"] if len(row) == 5][1:]
    assert [row[3] for row in paid] == [f"{ms:.1f} ms" for ms in fit["chosen_cost_ms"]]
    assert "chosen placements cost" in text.sections[""]


@pytest.mark.parametrize(
    ("what", "budget"), first(1, [("microbatch", "1KiB"), ("microbatch", "1GiB"), ("mesh", "1GiB")])
)
def test_a_search_is_the_same_with_a_page(small: Path, tmp_path: Path, run: Run, what: str, budget: str) -> None:
    """Also one that finds nothing: its budget is below the parameters."""
    page = tmp_path / "plan.html"
    asked = ["plan", small, "--json", f"--search={what}", f"--budget={budget}", "--gpus=2"]
    plain, paged = run(*asked), run(*asked, "--html", page)
    # A search that takes long says so on the error stream; how long it takes is not compared.
    said = [
        [line for line in out[2].splitlines() if not re.match(r"planned runs: |\d+ of \d+ meshes planned\b", line)]
        for out in (plain, paged)
    ]
    assert plain[:2] == paged[:2] and said[0] == said[1] and plain[0] == (3 if budget == "1KiB" else 0)
    text, search = PageText(page.read_text("utf-8")), json.loads(plain[1])["search"]
    assert search["sentence"] in text.sections["search"]
    for name, value in (search["found"] or {}).items():
        assert f"--set {name}={value}" in text.sections["search"]
    rows = text.rows["search"][1:]
    if what == "mesh":
        assert [row[1] for row in rows] == [format_bytes(c["peak"]) for c in search["meshes"]]
    else:
        tried = {(str(t["value"]), format_bytes(t["headroom"])) for t in search["tried"]}
        assert {(row[0], row[1]) for row in rows} == tried
