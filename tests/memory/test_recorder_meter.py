"""A cycle's time and peak, by the allocator's figures; and that plans may change from cycle to cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay.memory import autotune
from forebay.memory.autotune import MOST
from forebay.memory.hooks import Manager
from forebay.memory.recorder import Meter, Peaks, highest_rise
from forebay.memory.regions import ModuleSlot
from forebay.memory.storage import storable, storage_bytes
from forebay.memory.timeline import Assignment, CallFigures, Key, Plan, Timeline, TimelineEvent, simulate
from forebay.policy import Claim

CALLS = (CallFigures(("a", 0), (8,), 4e-3, input_bytes=100), CallFigures(("b", 0), (12,), 4e-3, input_bytes=100))
TIMELINE = Timeline(
    CALLS,
    (
        TimelineEvent("F", 0, 0.01),
        TimelineEvent("F", 1, 0.01),
        TimelineEvent("B", 1, 0.01, 0, 30),
        TimelineEvent("B", 0, 0.01, 0, 20),
    ),
)
KEEP = simulate(TIMELINE, Assignment())


class Device:
    """What stands for a GPU: its clock, bytes now, and at most since it was last asked to begin anew."""

    def __init__(self) -> None:
        self.clock, self.now, self.top = 0.0, 0, 0

    def rises(self, to: int, now: int) -> None:
        self.top, self.now = max(self.top, to), now


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = device.clock

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: device.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: device.top)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(device, "top", device.now))
    return device


def run(device: Device, base: int | None = None, epilogue: int = 0, inputs: int = 100) -> Meter:
    """1000 bytes are held, 50 more come before the first region; 200 at most in B1, `epilogue` behind the last moment."""
    device.rises(1050, 1050)
    meter = Meter(torch.device("cuda", 0), TIMELINE, KEEP, base)
    for kind, key, top, now in (("F", "a", 1100, 1090), ("F", "b", 1150, 1140), ("B", "b", 1200, 1080)):
        if kind == "F":
            meter.entered((key, 0), inputs)
        meter.event(kind, (key, 0))
        device.rises(top, now)
    meter.event("B", ("a", 0))
    device.rises(1105, 1000)
    device.rises(1000 + epilogue, 1000)
    device.clock = 7.0
    return meter


def figures(meter: Meter) -> tuple[float, int]:
    found = meter.over()
    assert found is not None
    return found[0](), found[1]


def test_the_peak_is_over_what_was_held_before_the_forward(device: Device) -> None:
    assert figures(run(device, base=1000)) == (7.0, 200)
    assert figures(run(device)) == (0.0, 150)  # nobody told: over what the first region found


def test_the_optimizer_s_memory_is_not_the_plan_s(device: Device) -> None:
    assert figures(run(device, base=1000, epilogue=5000))[1] == 200
    # 80 at the last moment's start, and of its rise no more than the 30 of the other backward moment.
    device.rises(0, 0)
    meter = Meter(torch.device("cuda", 0), TIMELINE, KEEP, 0)
    device.rises(80, 80)
    meter.event("B", ("a", 0))
    device.rises(9000, 80)
    assert figures(meter)[1] == 110


def test_who_asks_for_the_peak_behind_a_meter_is_told(device: Device) -> None:
    peaks = Peaks()
    device.rises(5000, 1000)  # before the meter
    meter = Meter(torch.device("cuda", 0), TIMELINE, KEEP, 0, peaks)
    assert peaks.highest == 5000 and peaks.take() == 5000
    device.rises(7000, 1000)
    meter.event("B", ("a", 0))
    assert peaks.take() == 7000 and peaks.take() == 0 and device.top == 1000


def test_what_is_recomputed_rises_too() -> None:
    again = simulate(TIMELINE, Assignment(recompute=frozenset("b")))
    assert highest_rise(TIMELINE, KEEP) == 30
    assert highest_rise(replace(TIMELINE, calls=(CALLS[0], replace(CALLS[1], input_bytes=2))), again) == 40


def test_another_batch_or_a_dropped_forward_is_no_measure(device: Device) -> None:
    assert run(device, inputs=98).over() is None
    meter = Meter(torch.device("cuda", 0), TIMELINE, KEEP, None)
    meter.event("F", ("a", 0))
    assert meter.over() is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(self.up(x).tanh()), 0.25)


def plans(timeline: Timeline) -> Iterator[Plan]:
    """Keep, offload and recompute, in every order, for the first region too."""
    every = {i: frozenset(range(len(c.items))) for i, c in enumerate(timeline.calls)}
    for kinds in ("kkkk", "oooo", "rrrr", "okro", "kkkk", "rork", "krok", "oror", "rrrr", "oooo"):
        again = frozenset(timeline.calls[i].key[0] for i, kind in enumerate(kinds) if kind == "r")
        yield simulate(timeline, Assignment({i: every[i] for i, kind in enumerate(kinds) if kind == "o"}, again))


class Script:
    """Stands for trials: another plan each cycle."""

    def __init__(self, timeline: Timeline, *_: object) -> None:
        self.plans = [*plans(timeline)]
        self.told_of, self.skips, self.tried = [], 0, ()  # type: ignore[var-annotated]

    @property
    def plan(self) -> Plan:
        return self.plans[min(len(self.told_of), len(self.plans) - 1)]

    @property
    def over(self) -> bool:
        return len(self.told_of) >= len(self.plans)

    def told(self, milliseconds: Callable[[], float], peak: int) -> None:
        self.told_of.append((milliseconds(), peak))


class Always:
    """Stands for a meter on a machine without a device."""

    def __init__(self, *_: object) -> None:
        self.last: Key | None = None

    def entered(self, key: Key, input_bytes: int) -> None:
        assert input_bytes > 0

    def event(self, kind: str, key: Key) -> None:
        self.last = key

    def over(self) -> tuple[Callable[[], float], int]:
        assert self.last == ("0", 0)
        return lambda: 1.0, 1


def test_plans_change_between_cycles_and_no_bit_of_the_results_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(8, 16, requires_grad=True)
        model(x).square().mean().backward()
        assert x.grad is not None
        return [x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(4)])

    scripts: list[Script] = []

    def auto(self: autotune.Planning, timeline: Timeline) -> Plan:
        scripts.append(Script(timeline))
        self._trials = scripts[-1]  # type: ignore[assignment]
        return scripts[-1].plan

    monkeypatch.setattr(autotune.Planning, "_plan_auto", auto)
    monkeypatch.setattr(autotune, "Meter", Always)
    truth, model = gradients(network()), network()
    slots = {str(i): ModuleSlot(block) for i, block in enumerate(model)}
    mem = Manager(slots, [Claim(p, "auto", p) for p in slots], torch.device("cpu"), budget=1 << 40, min_bytes=1)
    for cycle in range(16):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), truth, strict=True))
        assert mem.ledger.live_tickets == 0
        if mem.plan is not None:
            script = scripts[0]
            assert mem.plan is script.plan and len(script.told_of) == min(cycle - 1, len(script.plans))
            assert mem.report().moved_bytes == mem.plan.planned_bytes
            assert {p for p, q in mem.placements.items() if q == "recompute"} == mem.plan.recompute
            assert mem.settled == (cycle > len(script.plans) + 1), "one cycle more, behind which host memory is let go"
    assert len(scripts) == 1, "a plan seemed outgrown"
    assert mem.settled


def test_auto_tries_plans_from_end_to_end(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Nothing but the device is invented: each look at its clock takes a millisecond, and its memory is the saved tensors'."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    slots = {str(i): ModuleSlot(block) for i, block in enumerate(model)}
    mem = Manager(slots, [Claim(p, "auto", p) for p in slots], torch.device("cpu"), budget=5000, min_bytes=1)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(mem, "_device", gpu)
    monkeypatch.setattr(mem._planning, "_device", gpu)

    def allocated(_: object) -> int:
        device.clock += 1.0
        device.rises(mem.ledger.device_bytes, mem.ledger.device_bytes)
        return device.now

    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr("forebay.memory.hooks.storable", lambda t, _, n, w: storable(t, torch.device("cpu"), n, w))
    monkeypatch.setattr("forebay.memory.hooks.storage_bytes", lambda s, _: storage_bytes(s, torch.device("cpu")))
    model.register_forward_pre_hook(lambda *_: mem.forward_begins(gpu))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(8, 16)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth, cycles = gradients(), 1
    while not mem.settled:
        assert all(torch.equal(a, b) for a, b in zip(gradients(), truth, strict=True))
        cycles += 1
        assert cycles <= MOST + 4
    assert mem.plan is not None and mem.trials and any(trial.plan is mem.plan for trial in mem.trials)
    assert all(trial.milliseconds > 0 for trial in mem.trials)
    assert len({trial.plan.recompute for trial in mem.trials}) + len({str(t.plan.offload) for t in mem.trials}) > 2
    model(torch.randn(64, 16)).sum().backward()  # a longer batch
    gradients()
    assert mem.plan is None and not mem.trials and not mem.settled
