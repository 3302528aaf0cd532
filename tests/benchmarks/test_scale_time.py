"""docs/scale.md says what the estimator says: lines of its tables, made again, and the arithmetic of the others."""

from __future__ import annotations

import pytest

from benchmarks.scale_time import PAGE, PUBLISHED, SWEEP, clusters, lost, profile, published, row
from forebay.estimate.layers import TraceCache


def table(name: str) -> list[str]:
    """The rows of a table of the page."""
    text = PAGE.read_text("utf-8").partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, 9])
def test_steps_are_the_estimators(number: int) -> None:
    assert row(SWEEP[number], TraceCache()) == table("steps")[number]


@pytest.mark.slow
def test_published_steps_are_the_estimators() -> None:
    assert published(PUBLISHED[2:]).splitlines()[2:] == table("published")[2:]


def test_every_run_has_its_line() -> None:
    assert [line.split(" | ")[:2] for line in table("steps")] == [[f"| {r.model}", str(r.gpus)] for r in SWEEP]
    names = [line.split(" | ")[0] for line in table("published")]
    assert names == [f"| {r.name}, {r.run.gpus} {r.device.upper()}" for r in PUBLISHED]
    assert clusters().splitlines()[2:] == table("clusters")


def test_published_seconds() -> None:
    """180K hours of 2048 GPUs for 10^12 tokens: 3.66 days, and 19.9 s for 15360 sequences of 4096 tokens."""
    assert PUBLISHED[0].seconds == pytest.approx(3.66 * 86400 * 15360 * 4096 / 1e12, rel=1e-3)


def test_the_interval_is_the_best() -> None:
    """Against all intervals: with saves for which training waits, nothing is lost to anything else."""
    save, failures = 100.0, 2.0
    rate = failures / 86400
    best = min(save / interval + rate * (interval / 2 + 600) for interval in range(100, 100_000, 10))
    assert lost(save, save, failures) == pytest.approx(best, rel=1e-3)
    assert lost(0.1, save, failures) < best


def test_an_h800_is_an_h100_with_a_slower_nvlink() -> None:
    h800, h100 = profile("h800"), profile("h100")
    changed = {name for name in h100.figures if h800.figures[name] != h100.figures[name]}
    assert changed == {"all_to_all", "all_gather", "reduce_scatter"}
    assert h800.at("all_gather") == pytest.approx(h100.at("all_gather") * 4 / 9)
