"""Device profiles: those that come with Forebay, files, and invalid files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forebay.estimate.device import FIGURES, SOURCES, Figure, load, names, of_dict


def test_the_profiles_that_come_with_forebay() -> None:
    assert names() == ("a100", "b200", "h100", "h200", "rtx4090")
    for name in names():
        profile = load(name)
        assert profile.name == name and set(profile.figures) == set(FIGURES)
        for figure in profile.figures.values():
            assert figure.source in SOURCES and len(figure.where) > 5
        assert load(name.upper()) == profile
        assert bool(profile.measured()) == (name == "h200")


def test_faster_devices_are_faster() -> None:
    """In the order of their data sheets."""
    order = [load(name) for name in ("a100", "h100", "h200", "b200")]
    for figure in ("matmul_bf16", "attention", "bandwidth", "memory"):
        values = [profile.at(figure, 1e12) for profile in order]
        assert values == sorted(values), figure
    assert load("rtx4090").at("all_to_all", 1e8) < order[0].at("all_to_all", 1e8) / 5


def test_a_figure_between_two_sizes() -> None:
    """Halfway in logarithms is the geometric mean."""
    figure = Figure(((10.0, 4.0), (1000.0, 64.0)), "measured", "here")
    assert [figure.at(size) for size in (0, 10, 1000, 1e9)] == [4, 4, 64, 64]
    assert figure.at(100) == pytest.approx(math.sqrt(4 * 64))


def test_a_file_is_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(load("h200").as_dict()))
    assert load(str(file)) == load("h200")


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'h20' is neither .* the nearest valid name is 'h200'; valid profiles are a100, b200"
    ):
        load("h20")


def changed(**changes: Any) -> dict[str, Any]:
    return {**load("h200").as_dict(), **changes}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "not a JSON object"),
        ({k: v for k, v in load("h200").as_dict().items() if k != "kernel"}, "lacks kernel"),
        (changed(speed=3), "has speed, which no profile has"),
        (changed(node=0), "node is 0"),
        (changed(kernel=3e-6), "kernel is not a figure"),
        (changed(kernel={"value": 0, "source": "measured", "where": ""}), "above 0"),
        (changed(kernel={"value": "fast", "source": "measured", "where": ""}), "valid is a number"),
        (changed(kernel={"value": [], "source": "measured", "where": ""}), "valid is a number"),
        (changed(kernel={"value": 1, "source": "guessed", "where": ""}), "source 'guessed'; valid are measured"),
        (changed(bandwidth={"value": [[2, 1], [1, 1]], "source": "measured", "where": ""}), "ascending"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, raw: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_dict(raw, "x")
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=said):
        load(str(file))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        load(str(file))


def test_the_profile_has_the_rates_that_the_doctor_measured() -> None:
    """Of a GPU that is hot: profiles are between it and one after a pause. A gap of `kernel` follows each product."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_profile.json"
    measured, given = json.loads(file.read_text("utf-8")), load("h200")
    for name in ("matmul_bf16", "grouped", "grouped_weights"):
        for flops, rate in measured[name]["value"]:
            if flops > 5e9:
                planned = flops / given.at(name, flops) + given.at("kernel")
                assert planned == pytest.approx(flops / rate + measured["kernel"]["value"], rel=0.15), (name, flops)


@pytest.mark.parametrize("name", ["h100", "b200", "a100", "rtx4090"])
def test_rates_from_data_sheets_are_the_h200s_times_a_ratio(name: str) -> None:
    ours, given = load("h200"), load(name)
    ratios = [
        rate / ours.at(figure, flops)
        for figure in ("matmul_bf16", "grouped", "grouped_weights")
        for flops, rate in given.figures[figure].value
    ]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-3)
