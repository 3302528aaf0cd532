"""benchmarks/README.md says what the planner says: lines of its tables, made again."""

from __future__ import annotations

import pytest

from benchmarks.scale import PAGE, RUNS, published, put, scale


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 6, 10])
def test_lines_of_the_table_are_the_planners(number: int) -> None:
    line = scale([RUNS[number]]).splitlines()[-1]
    assert line in PAGE.read_text("utf-8").splitlines()


def test_every_run_has_its_line() -> None:
    page = PAGE.read_text("utf-8").partition("<!-- scale -->")[2].partition("<!-- end of scale -->")[0]
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {run.model}{', recompute' * bool(run.others)}", str(run.gpus)] for run in RUNS
    ]


@pytest.mark.slow
def test_published_figures_agree() -> None:
    table = published()
    assert table in PAGE.read_text("utf-8")
    for line in table.splitlines()[2:]:
        _, _, said, planned, _, _ = line.split("|")
        wanted = float(said.replace("B", "").split("=")[-1])
        assert float(planned.replace("B", "")) == pytest.approx(wanted, rel=0.01)


def test_tables_are_put_between_their_marks() -> None:
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert put(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no marks of 'y'"):
        put(page, "y", "new")
