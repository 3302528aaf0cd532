"""A device of round figures, to count by hand."""

from __future__ import annotations

from forebay.estimate.device import FIGURES, DeviceProfile, Figure

ROUND = {"bandwidth": 1e3, "kernel": 1e-9, "launch": 1e-9, "contention": 1e-9}


def device(node: int = 8, **figures: float) -> DeviceProfile:
    """Every rate is 1e6, bandwidth 1e3, and times are almost 0, except for `figures`."""
    values = {**dict.fromkeys(FIGURES, 1e6), **ROUND, **figures}
    made = {name: Figure(((0.0, value),), "measured", "here") for name, value in values.items()}
    return DeviceProfile("plain", "a plain device", node, made)
