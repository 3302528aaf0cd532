"""The page of a plan: its figures are those of the table and the JSON, and it is written where it may be."""

import json
import re
from pathlib import Path

import pytest

from forebay import cli
from forebay.policy import format_bytes
from tests.report.pages import config, plan_of
from tests.report.test_run_page import Words

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
    assert fit["verdict"] in words.sections[""] and "Fits" in words.sections[""]
    for rank, row in zip(fit["ranks"], words.rows["ranks"][1:], strict=True):
        names = ("parameters", "gradients", "optimizer", "activations", "transient", "other", "total", "headroom")
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
