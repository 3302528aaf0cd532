"""Draw docs/single_gpu.svg from benchmarks/results/single_gpu.json: step time against memory after the forward pass; and, where
benchmarks/results/fp8_loss.json is there, docs/fp8_loss.svg: the loss by step, with exact saving and with rows in 8 bits.

python benchmarks/plot.py
"""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_ROOT = Path(__file__).parent
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 860, 400, 64, 836, 348, 28
_MOST_MS = 320  # arms that take seconds would flatten all others; a note names them
_OURS, _THEIRS, _GRAY = "#0b6e99", "#b04a2f", "#444444"


def text(x: float, y: float, words: str, anchor: str = "start", color: str = _GRAY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="0.8"/>'


class Chart:
    """Axes in ms and GiB, and the labels that are placed."""

    def __init__(self, most_gib: float):
        self.most_gib = most_gib
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
            ' font-family="system-ui, sans-serif" font-size="13">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        ]
        self._taken: list[float] = []

    def x(self, gib: float) -> float:
        return _LEFT + gib / self.most_gib * (_RIGHT - _LEFT)

    def y(self, ms: float) -> float:
        return _BOTTOM - ms / _MOST_MS * (_BOTTOM - _TOP)

    def axes(self) -> None:
        for ms in range(0, _MOST_MS + 1, 80):
            self.parts.append(line(_LEFT, self.y(ms), _RIGHT, self.y(ms), "#dddddd"))
            self.parts.append(text(_LEFT - 8, self.y(ms) + 4, str(ms), "end"))
        for gib in range(0, int(self.most_gib) + 1, 5):
            self.parts.append(text(self.x(gib), _BOTTOM + 20, str(gib), "middle"))
        self.parts.append(text(_RIGHT, _HEIGHT - 12, "GiB after forward, over weights and gradients", "end"))
        self.parts.append(text(_LEFT, _TOP - 10, "ms a step (forward and backward), one H200"))

    def point(self, row: dict[str, Any]) -> None:
        ours = row["arm"].startswith("forebay")
        color = _OURS if ours else _THEIRS
        x, y = self.x(row["after forward GiB"]), self.y(row["ms"])
        label_y = y + 4
        while any(abs(label_y - other) < 16 for other in self._taken):
            label_y += 16
        self._taken.append(label_y)
        at_right = x > 0.6 * _WIDTH
        label_x = x - 12 if at_right else max(x, self.x(5.6)) + 14 if ours else x + 12
        if ours:
            self.parts.append(line(x, y, label_x - 3, label_y - 4, color))
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{color}"/>')
        words = f"{row['arm']}  ({row['ms']:.0f} ms, {row['after forward GiB']:.1f} GiB)"
        self.parts.append(text(label_x, label_y, words, "end" if at_right else "start", "#222222"))


def loss_curves(curves: dict[str, list[float]]) -> str:
    """An SVG of losses by step, one line for each name."""
    steps = max(len(curve) for curve in curves.values())
    low, high = (pick(loss for curve in curves.values() for loss in curve) for pick in (min, max))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]

    def place(step: int, loss: float) -> tuple[float, float]:
        across, up = step / max(steps - 1, 1), (loss - low) / ((high - low) or 1.0)
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    for n in range(5):
        loss = low + n * (high - low) / 4
        y = place(0, loss)[1]
        parts += [line(_LEFT, y, _RIGHT, y, "#dddddd"), text(_LEFT - 8, y + 4, f"{loss:.2f}", "end")]
    for step in range(0, steps, max(steps // 6, 1)):
        parts.append(text(place(step, low)[0], _BOTTOM + 20, str(step + 1), "middle"))
    for number, ((name, curve), color) in enumerate(zip(curves.items(), (_OURS, _THEIRS, _GRAY), strict=False)):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(step, loss) for step, loss in enumerate(curve)))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.4" stroke-opacity="0.8"/>'
        )
        parts.append(text(_RIGHT, _TOP + 16 * (number + 1), f"{name}: {curve[-1]:.4f}", "end", color))
    parts += [text(_RIGHT, _HEIGHT - 12, "step", "end"), text(_LEFT, _TOP - 10, "loss, nats a token"), "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    losses = _ROOT / "results" / "fp8_loss.json"
    if losses.is_file():
        (_ROOT.parent / "docs" / "fp8_loss.svg").write_text(loss_curves(json.loads(losses.read_text())["curves"]))
    results = json.loads((_ROOT / "results" / "single_gpu.json").read_text())["rows"]
    rows = [r for r in results if "ms" in r and "again" not in r["arm"]]
    shown = [r for r in rows if r["ms"] <= _MOST_MS]
    chart = Chart(max(r["after forward GiB"] for r in shown) * 1.15)
    chart.axes()
    for row in sorted(shown, key=lambda r: (-r["ms"], r["after forward GiB"])):
        chart.point(row)
    slow = ", ".join(f"{r['arm']} {r['ms']:.0f} ms" for r in rows if r["ms"] > _MOST_MS)
    chart.parts.append(text(_RIGHT, _TOP + 20, f"off the chart: {slow}" if slow else "", "end"))
    target = _ROOT.parent / "docs" / "single_gpu.svg"
    target.write_text("\n".join([*chart.parts, "</svg>"]) + "\n")
    print(target)


if __name__ == "__main__":
    main()
