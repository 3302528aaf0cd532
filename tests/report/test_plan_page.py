"""The page of a plan: its figures are those of the table and the JSON, and it is written where it may be."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from forebay import cli
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit
from forebay.estimate.step_time import StepTime
from forebay.estimate.walk import RankFit
from forebay.policy import format_bytes
from forebay.report.html import ranges
from forebay.report.plan_page import plan_page, time_section, time_tiles
from forebay.report.sections import Curves
from tests.products import first
from tests.report.pages import config, plan_of
from tests.report.test_run_page import Words

pytestmark = pytest.mark.usefixtures("shared_traces")
SMALL = """
[model]
family = "qwen3_moe"
[model.config]
hidden_size = 16
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
intermediate_size = 16
moe_intermediate_size = 8
num_experts = 4
num_experts_per_tok = 2
[train]
batch = 8
microbatch = 1
sequence = 16
[parallel]
pp = 2
[device]
type = "cpu"
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(SMALL)
    return str(tmp_path / "small.toml")


def test_levels_lead_to_the_table(tmp_path: Path) -> None:
    """The highest level of each rank's curve is its line, part by part."""
    plan = plan_of(config(tmp_path), 2, None)
    assert [max(levels, key=lambda level: level.total).total for levels in plan.levels.values()] == [
        rank.total for rank in plan.fit.ranks
    ]
    for rank in plan.fit.ranks:
        peak = max(plan.levels[rank.rank], key=lambda level: level.total)
        assert peak.where == rank.where and peak.bytes["activations"] == rank.activations
        assert peak.bytes["gradients"] == rank.gradients


def test_the_page_has_the_figures_of_the_json(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert cli.main(["plan", small, "--json", "--budget=1GiB", "--html", str(page)]) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]  # and nothing else is printed
    words = Words(page.read_text("utf-8"))
    assert fit["verdict"].startswith("Fits 1.00 GiB")
    assert "Fits" + fit["verdict"].removeprefix("Fits ") in words.sections[""]  # the word is there once
    for rank, row in zip(fit["ranks"], words.rows["ranks"][1:], strict=True):
        names = (
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "transient",
            "cached",
            "other",
            "total",
            "headroom",
        )
        assert row == [str(rank["rank"]), "", *(format_bytes(rank[name]) for name in names)]
    (kept,) = fit["placements"]
    (row,) = [row for row in words.rows["placements"] if row[0].startswith("keep")]
    assert row[1:4] == [str(kept["parts"]), format_bytes(kept["saved_bytes"]), format_bytes(kept["held_bytes"])]
    drawn = [json.loads(d) for d in re.findall(r'<script type="application/json">(.*?)</script>', page.read_text())]
    assert len(drawn) == len(fit["ranks"])
    highest = max(sum(values) for d in drawn for values in zip(*(s["values"] for s in d["series"]), strict=True))
    unit = {" KiB": 1 << 10, " MiB": 1 << 20}[drawn[0]["unit"]]
    assert highest == pytest.approx(max(r["total"] for r in fit["ranks"]) / unit, rel=1e-3)


@pytest.mark.parametrize(("budget", "code", "word"), [("300KiB", 3, "Does not fit"), (None, 0, "No budget")])
def test_verdicts(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str | None, code: int, word: str
) -> None:
    page = tmp_path / "plan.html"
    asked = [] if budget is None else [f"--budget={budget}"]
    assert cli.main(["plan", small, *asked, "--html", str(page)]) == code, capsys.readouterr().err
    assert capsys.readouterr().out.endswith(f"page {page}\n")
    assert word in Words(page.read_text()).sections[""]


def test_pages_that_cannot_be_written(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is planned, and nothing is overwritten."""
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html><title>mine</title>")
    for file, said in (
        (tmp_path / "no" / "plan.html", "no is no folder, so plan.html cannot be written into it"),
        (tmp_path, "is a folder; name a file"),
        (mine, "mine.html is there already and is no page that Forebay wrote"),
        (Path(small), "small.toml is there already"),
    ):
        assert cli.main(["plan", small, "--html", str(file)]) == 2
        out, error = capsys.readouterr()
        assert out == "" and said in error and error.count("\n") == 1
    assert mine.read_text() == "<!doctype html><title>mine</title>"
    page = tmp_path / "plan.html"
    assert [cli.main(["plan", small, "--html", str(page)]) for _ in range(2)] == [0, 0]


def test_on_a_gpu_the_curve_is_in_use_and_a_line_is_taken(tmp_path: Path) -> None:
    """The highest level is what is allocated at most, and what the allocator holds besides is the line over it."""
    settings = config(tmp_path, device={"type": "cuda"})
    plan = plan_of(settings, 2, None)
    for rank in plan.fit.ranks:
        peak = max(plan.levels[rank.rank], key=lambda level: level.height)
        assert (peak.total, peak.where) == (rank.allocated, rank.where)
        assert rank.cached > 0 and rank.total == rank.allocated + rank.cached
    text = plan_page(plan, settings, "gpu.toml")
    words = Words(text)
    most = plan.fit.fullest
    said = (
        f"in use at most {format_bytes(most.allocated)}, at {most.where}; taken from the GPU {format_bytes(most.total)}"
    )
    assert said in words.sections["step"]
    assert f"{format_bytes(most.reserved)} of it reserved by torch's allocator" in words.sections[""]
    assert "allocated at most" not in words.sections[""]
    assert text.count('class="ceiling s-cached"') == len(plan.fit.ranks)
    assert "ceiling s-cached" not in plan_page(plan_of(config(tmp_path), 2, None), settings, "cpu.toml")


def test_levels_are_at_most_what_is_in_use_at_most(tmp_path: Path) -> None:
    """By hand: 90 are in use at most. A level of 100 loses 10 of its transient 30; one of 95 all of its 2, and no more; one of
    80 nothing."""
    plan = plan_layers(config(tmp_path), 2)
    curves = Curves()

    def level(activations: int, transient: int, where: str) -> RankFit:
        return RankFit(0, 10, 10, 10, activations, transient, 0, where, 0)

    for found in (level(40, 30, "a"), level(63, 2, "b"), level(45, 5, "c")):
        curves.seen("0F0", found)
    settled = RankFit(0, 10, 10, 10, 40, 20, 0, "a", 0, cached=7)
    levels = curves.planned(plan, Fit((settled,), 2, 1, None, (), ())).levels[0]
    assert [(one.total, one.cut) for one in levels] == [(90, 10), (93, 2), (80, 0)]
    assert [one.bytes["transient"] for one in levels] == [20, 0, 5]


STEP = StepTime(
    device="h200",
    schedule=2.0,
    launched=2.0,
    gather=0.1,
    reduce=0.1,
    optimizer=0.3,
    host=1.0,
    busy=(1.5, 1.0),
    exposed=(0.25, 0.0),
    tokens=5000,
)


def test_a_steps_time_by_hand() -> None:
    """2 s of schedule, 0.1 each of gathering and reducing, 0.3 of optimizer: 2.5 s, of which the host's 1 s is no part."""
    assert time_tiles(STEP) == [
        ("expected step time", "2.500 s", "on h200"),
        ("tokens a second", "2,000", "of all processes"),
        ("bubble", "25 to 50 %", "by pipeline rank"),
    ]
    section = time_section(STEP)
    rows = Words(f'<section id="time">{section.body}</section>').rows["time"]
    assert [row[1:3] for row in rows[1:6]] == [
        ["2.000 s", "80.0 %"],
        ["100.0 ms", "4.0 %"],
        ["100.0 ms", "4.0 %"],
        ["300.0 ms", "12.0 %"],
        ["2.500 s", "100.0 %"],
    ]
    assert [row[:4] for row in rows[7:]] == [
        ["0", "1.500 s", "250.0 ms", "25.0 %"],
        ["1", "1.000 s", "0.0 ms", "50.0 %"],
    ]
    assert (
        "data sheets" not in section.lead
        and "needs 1.000 s to launch" in section.lead
        and "memory.graph" not in section.lead
    )


def test_a_step_that_waits_for_its_host_on_a_device_from_data_sheets() -> None:
    """The schedule's 2 s, and 2 more until the host's 4 are over: 4.5 s."""
    step = replace(STEP, device="h100", measured=False, launched=4.0, host=4.0, busy=(2.0,), exposed=(0.0,))
    assert time_tiles(step)[0] == ("expected step time", "4.500 s", "on h100, from data sheets")
    assert len(time_tiles(step)) == 2
    section = time_section(step)
    rows = Words(f'<section id="time">{section.body}</section>').rows["time"]
    assert [row[1:3] for row in rows[1:3]] == [["2.000 s", "44.4 %"], ["2.000 s", "44.4 %"]]
    assert "on h100, from data sheets" in section.lead and "memory.graph = true" in section.lead


def test_the_devices_time_is_on_the_page(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert cli.main(["plan", small, "--json", "--device=a100", "--html", str(page)]) == 0
    step = json.loads(capsys.readouterr().out)["fit"]["step"]
    words = Words(page.read_text("utf-8"))
    assert (
        "on a100, from data sheets" in words.sections[""] and f"{step['tokens_per_second']:,.0f}" in words.sections[""]
    )
    assert [row[3] for row in words.rows["time"][-2:]] == [f"{100 * share:.1f} %" for share in step["bubble"]]


def test_chosen_placements(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the JSON, with what all of its layers free."""
    page = tmp_path / "plan.html"
    cli.main(["plan", small, "--json"])
    peak = max(r["total"] for r in json.loads(capsys.readouterr().out)["fit"]["ranks"])
    asked = ["plan", small, "--json", "--auto", f"--budget={peak - 2000}B", "--html", str(page)]
    assert cli.main(asked) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert fit["chosen"]
    words = Words(page.read_text("utf-8"))
    rows = [row for row in words.rows["placements"] if len(row) == 8][1:]
    for row, chosen in zip(rows, fit["chosen"], strict=True):
        every = format_bytes(chosen["freed_bytes"] * len(chosen["layers"]))
        assert row[:4] == [str(chosen["rank"]), chosen["placement"], chosen["half"], ranges(chosen["layers"])]
        assert row[4:7] == [format_bytes(chosen["freed_bytes"]), f"{chosen['milliseconds']:.2f} ms", every]
    paid = [row for row in words.rows["placements"] if len(row) == 5][1:]
    assert [row[3] for row in paid] == [f"{ms:.1f} ms" for ms in fit["chosen_cost_ms"]]
    assert "chosen placements cost" in words.sections[""]


def test_ranges() -> None:
    assert [ranges(n) for n in ([0, 1, 2, 5], [3], [1, 3], [])] == ["0 to 2, 5", "3", "1, 3", ""]


@pytest.mark.parametrize(
    ("what", "budget"), first(1, [("microbatch", "1KiB"), ("microbatch", "1GiB"), ("mesh", "1GiB")])
)
def test_a_search_is_the_same_with_a_page(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, budget: str
) -> None:
    """Also one that finds nothing: its budget is below the parameters."""
    page = tmp_path / "plan.html"
    asked = ["plan", small, "--json", f"--search={what}", f"--budget={budget}", "--gpus=2"]
    codes, told = [], []
    for more in ([], ["--html", str(page)]):
        codes.append(cli.main([*asked, *more]))
        told.append(json.loads(capsys.readouterr().out))
    assert codes[0] == codes[1] == (3 if budget == "1KiB" else 0) and told[0] == told[1]
    words = Words(page.read_text("utf-8"))
    search = told[0]["search"]
    assert search["sentence"] in words.sections["search"]
    for name, value in (search["found"] or {}).items():
        assert f"--set {name}={value}" in words.sections["search"]
    rows = [row for row in words.rows["search"][1:]]
    if what == "mesh":
        assert [row[1] for row in rows] == [format_bytes(c["peak"]) for c in search["meshes"]]
    else:
        assert {(row[0], row[1]) for row in rows} == {
            (str(t["value"]), format_bytes(t["headroom"])) for t in search["tried"]
        }
