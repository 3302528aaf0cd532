"""What a chart draws: places by hand, peaks that are not lost, scales that hold their values."""

import math
import random

import pytest

from forebay.report.charts import (
    Box,
    Ceiling,
    Curve,
    Level,
    Scale,
    action_label,
    activity,
    byte_scale,
    curves,
    has_stages,
    scale,
    stacked,
    thinned,
)
from tests.report.pages import chart_data

TEN = Scale(1.0, "B", 0.0, 10.0, (0.0, 5.0, 10.0))


def level(total: int, action: str = "0F0", **parts: int) -> Level:
    return Level(action, f"at {total}", parts or {"activations": total})


def test_a_stack_of_two_columns_by_hand() -> None:
    """Parameters of 2 below activations of 3 and of 8, on a scale of 10 that is 1000 units high and wide."""
    drawn = stacked([level(5, parameters=2, activations=3), level(10, parameters=2, activations=8)], TEN, [], "", "")
    assert 'd="M0 800.0H1000.0V1000.0H0.0Z" class="band f-parameters"' in drawn
    assert 'd="M0 500.0H500.0V0.0H1000.0V800.0H0.0Z" class="band f-activations"' in drawn
    assert "f-gradients" not in drawn
    assert 'class="tag" style="left:75.00%;bottom:100.00%"' in drawn and "10 B" in drawn
    (told,) = chart_data(drawn)
    assert told["start"] == 1 and told["x"] == ["F0: at 5", "F0: at 10"]
    with pytest.raises(ValueError, match="no levels to draw"):
        stacked([], TEN, [], "", "")


def test_lines_and_points_over_a_stack() -> None:
    """Points are at the end of their action's last column."""
    levels = [level(5), level(6), level(4, "0B0"), level(1, "")]
    drawn = stacked(levels, TEN, [Ceiling("budget", 9, "budget")], "", "", {"0F0": 5, "0B0": 2, "gone": 3, "0I0": 0})
    assert 'd="M0 100.0H1000" class="ceiling s-budget"' in drawn
    assert 'd="M500.0 500.0h0M750.0 800.0h0" class="dots s-measured"' in drawn


def test_no_peak_is_lost() -> None:
    random.seed(3)
    for count in (1, 239, 240, 241, 12345):
        levels = [level(random.randrange(10**9)) for _ in range(count)]
        found = thinned(levels)
        assert len(found) == min(count, 240)
        assert max(f.total for f in found) == max(one.total for one in levels)
        positions = [levels.index(f) for f in found]
        assert positions == sorted(positions)


@pytest.mark.parametrize("most", [1, 700, 1 << 20, 66.44 * (1 << 20), 1 << 30, 61.04 * (1 << 30), 5.7e12])
def test_a_scale_of_bytes(most: float) -> None:
    """It holds its largest value without much to spare, and neighboring labels differ."""
    found = byte_scale(most)
    assert found.low == 0 and most <= found.high <= 2 * most
    assert found.unit == ("GiB" if most >= 1 << 30 else "MiB" if most >= 1 << 20 else "KiB")
    labels = [tick.text for tick in found.labels()]
    assert len(set(labels)) == len(labels) and 3 <= len(labels) <= 8


def test_scales_by_hand() -> None:
    assert scale(0, 40).ticks == (0, 10, 20, 30, 40)
    assert scale(4.75, 5.72).ticks == pytest.approx((4.75, 5.0, 5.25, 5.5, 5.75))
    assert [t.text for t in scale(4.75, 5.72).labels()] == ["4.75", "5.00", "5.25", "5.50", "5.75"]
    assert [t.text for t in scale(0, 0.2).labels()] == ["0.00", "0.05", "0.10", "0.15", "0.20"]
    flat = scale(3.0, 3.0)
    assert flat.low <= 3.0 < flat.high and all(math.isfinite(t) for t in flat.ticks)


def test_curves_by_hand() -> None:
    x = Scale(1.0, "", 1.0, 3.0, (1.0, 3.0))
    found = [Curve("loss", [(1, 10), (2, 5), (3, 0)]), Curve("b", [(3, 7)], "two", dots=True)]
    drawn = curves(found, x, TEN, "", digits=2)
    assert 'd="M0.0 0.0L500.0 500.0L1000.0 1000.0" class="curve s-one"' in drawn
    assert 'd="M1000.0 300.0h0" class="dots s-two"' in drawn
    (told,) = chart_data(drawn)
    assert told["x"] == ["step 1", "step 2", "step 3"] and told["places"] == [0, 0.5, 1]
    assert [s["values"] for s in told["series"]] == [[10, 5, 0], [None, None, 7]]


def test_boxes_by_hand() -> None:
    x = Scale(1.0, "ms", 0.0, 100.0, (0.0, 50.0, 100.0))
    boxes = [Box("F", 10, 60, "forward", 3, 0.5, 0.5), Box("B", 60, 61, "backward", 4, later=True)]
    drawn = activity([("rank 0", "5 % idle", boxes)], x, "")
    assert 'x="100.0" y="500" width="500.0" height="500" class="f-F"' in drawn
    assert 'x="600.0" y="0" width="10.0" height="1000" class="f-B later"' in drawn
    assert 'class="m" style="left:35.00%;top:75%">3</span>' in drawn
    assert ">4</span>" not in drawn  # no room for it


def test_labels_of_actions() -> None:
    assert [action_label(a) for a in ("0F3", "(12F13;7B1)OVERLAP_F_B", "3W0", "")] == ["F3", "F13 B1", "W0", "step"]
    assert [action_label(a, True) for a in ("0F3", "(12F13;7B1)OVERLAP_F_B", "")] == ["0F3", "12F13 7B1", "step"]
    assert has_stages([level(1, "(0F3;7B1)OVERLAP_F_B")]) and has_stages([level(1, "0F3"), level(1, "1F3")])
    assert not has_stages([level(1, "0F3"), level(1, "0B3"), level(1, "(0F4;0B2)OVERLAP_F_B"), level(1, "")])
