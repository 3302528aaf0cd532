"""What recorders make of the device's clock and allocator, both simulated; and the allocator's own figures on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.memory.recorder import Peaks, TimelineRecorder, TimingRecorder, TrialRecorder, highest_rise, requested
from forebay.memory.timeline import Assignment, CallFigures, Timeline, TimelineEvent, simulate
from tests.helpers import fill_free_parts
from tests.memory.devices import SimulatedDevice

GPU = torch.device("cuda", 0)
MIB = 1 << 20
CALLS = (CallFigures(("a", 0), (8,), 4e-3, input_bytes=100), CallFigures(("b", 0), (8,), 4e-3, input_bytes=100))
ORDER = (("F", 0), ("F", 1), ("B", 1), ("B", 0))
TIMELINE = Timeline(CALLS, tuple(TimelineEvent(kind, call, 0.010) for kind, call in ORDER), 1e9, 1e9)
KEEP = simulate(TIMELINE, Assignment())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return SimulatedDevice(monkeypatch)


# --- a recorded timeline ----------------------------------------------------------------------------------------------


def test_a_recorded_timeline_has_times_without_waits_and_memory_over_the_base(device: SimulatedDevice) -> None:
    """1000 bytes before the step; events begin at 0, 5, 11 and 31 ms and wait 1 ms each; a pause from 8 ms on. Call "c" runs no
    backward: its 4 bytes count as other memory."""
    store: Any = SimpleNamespace()
    recorder = TimelineRecorder(GPU, store, 1000, Peaks())
    for kind, path, start, top, saved in (("F", "a", 0, 1030, 0), ("F", "c", 4, 1036, 8), ("F", "b", 5, 1040, 12)):
        recorder.before_waits()
        before = device.mark(start)
        device.clock, device.now, store.device_bytes = start + 1, 1005 + saved, saved
        recorder.entered((path, 0), 100)
        recorder.after_waits(kind, (path, 0), (before, device.mark()))
        device.rises(top)
        device.clock = start + 3
        recorder.region_left((path, 0), [4 if path == "c" else 8], False, -1, device.mark)
    recorder.idle(device.mark)
    recorder.share(("a", 0), ("b", 0))
    recorder.share(("a", 0), ("c", 0))
    for path, start, saved in (("b", 11, 20), ("a", 31, 8)):
        recorder.before_waits()
        before = device.mark(start)
        device.clock, device.now, store.device_bytes = start + 1, 1005 + saved, saved
        recorder.after_waits("B", (path, 0), (before, device.mark()))
        device.rises(device.now + (7 if path == "b" else 90))
    device.clock = 99
    timeline = recorder.timeline(2e9, None, device.mark)
    assert recorder.complete and recorder.unreached == {("c", 0): (4,)}
    assert [(m.kind, timeline.calls[m.call].key[0]) for m in timeline.events] == [*zip("FFBB", "abba", strict=True)]
    # b's forward ends where the pause begins; the last event runs on into the optimizer and is cut to the other backward.
    assert [m.seconds for m in timeline.events] == pytest.approx([0.003, 0.002, 0.019, 0.019])
    assert [m.other for m in timeline.events] == [5, 9, 9, 9], "and 4 of the call without a backward"
    assert [m.transient for m in timeline.events] == [25, 23, 7, 7]
    assert [c.seconds for c in timeline.calls] == pytest.approx([0.002, 0.002])
    assert timeline.calls[0] == CallFigures(("a", 0), (8,), timeline.calls[0].seconds, False, 100, None, (("b", 0),))
    assert (timeline.out_rate, timeline.back_rate) == (2e9, float("inf"))


@pytest.mark.parametrize("looks", range(3))
def test_another_thread_leaves_a_region_while_the_timeline_is_made(looks: int) -> None:
    """It entered the region, "c", in the step that this thread found over. Call "d" runs no backward: only the figures of calls
    are asked for it, and the other thread goes on in the middle of one of these looks."""
    left: list[tuple[str, int]] = []

    class Path(str):
        __slots__ = ()

        def __hash__(self) -> int:
            if self == "d" and left and left.pop() and not left:
                recorder.region_left((Path("c"), 0), [4], False, -1, lambda: None)
            return super().__hash__()

    store: Any = SimpleNamespace()
    recorder = TimelineRecorder(torch.device("cpu"), store, None, Peaks())
    for kind, path in (("F", "a"), ("F", "d"), ("F", "b"), ("F", "c"), ("B", "b"), ("B", "a")):
        recorder.after_waits(kind, (Path(path), 0), (None, None))
        if kind == "F" and path != "c":
            recorder.region_left((Path(path), 0), [8], False, -1, lambda: None)
    left = [("c", 0)] * looks
    timeline = recorder.timeline(None, None, lambda: None)
    assert not left and [call.key for call in timeline.calls] == [("a", 0), ("b", 0)]
    assert [(event.kind, event.call) for event in timeline.events] == [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    assert recorder.unreached == {("d", 0): (8,)} | ({("c", 0): (4,)} if looks else {})


def test_items_of_a_call_that_raised_are_excluded_without_a_word() -> None:
    """It saved a storage that a much later region saves again, and its caller caught the error."""
    store: Any = SimpleNamespace()
    recorder = TimelineRecorder(torch.device("cpu"), store, None, Peaks())
    recorder.after_waits("F", ("a", 0), (None, None))
    recorder.exclude(("a", 0), 0)
    assert recorder.unreached == {}


# --- corrected times --------------------------------------------------------------------------------------------------


def run(
    device: SimulatedDevice,
    starts: tuple[float, ...] = (0, 5, 11, 31),
    wait: float = 0.0,
    idle: tuple[float | None, ...] = (None,) * 4,
    levels: tuple[tuple[int, int, int], ...] = ((0, 0, 0),) * 4,
    rounding: tuple[int, ...] = (0,) * 4,
    waiting: tuple[int, ...] = (0,) * 4,
) -> TimingRecorder:
    """`levels`: bytes at the start, at most and on the host, of each event."""
    store: Any = SimpleNamespace(device_bytes=0)
    recorder = TimingRecorder(GPU, store, Peaks())
    for index, (kind, call) in enumerate(ORDER[: len(starts)]):
        recorder.before_waits()
        device.now, top, store.live_bytes = levels[index]
        device.rounding, device.waiting = rounding[index], waiting[index]
        before = device.mark(starts[index])
        device.clock += wait
        recorder.after_waits(kind, CALLS[call].key, (before, device.mark()))
        device.top = top
        if idle[index] is not None:
            device.clock = idle[index]
            recorder.idle(device.mark)
            device.clock += 1
            recorder.idle(device.mark)  # the second wait of the same pause
    return recorder


def retimed(recorder: TimingRecorder, timeline: Timeline = TIMELINE) -> Timeline:
    found = recorder.retimed(timeline)
    assert found is not None
    return found


def test_shorter_times_count_and_waits_do_not(device: SimulatedDevice) -> None:
    assert run(device, starts=()).waited() == 0.0
    recorder = run(device, wait=1)
    timeline = retimed(recorder)
    # 5 - 1, 6 - 1, and 19 is longer than what was measured; the last event has no end.
    assert [m.seconds for m in timeline.events] == pytest.approx([0.004, 0.005, 0.010, 0.010])
    # A forward is as much shorter as its own event, not as the step.
    assert [c.seconds for c in timeline.calls] == pytest.approx([4e-3 * 4 / 10, 4e-3 * 5 / 10])
    assert recorder.waited() == pytest.approx(4 / 32)
    assert recorder.retimed(replace(TIMELINE, events=TIMELINE.events[:3])) is None, "another step"


def test_idle_times_are_told_apart(device: SimulatedDevice) -> None:
    timeline = retimed(run(device, idle=(2, None, 15, None)))
    assert [m.idle for m in timeline.events] == pytest.approx([0.003, 0.0, 0.016, 0.0])
    assert [m.seconds for m in timeline.events] == pytest.approx([0.002, 0.006, 0.004, 0.010])


@pytest.mark.parametrize(
    ("away", "rounding", "waiting", "counts", "other", "rises"),
    [
        # At F1 100 + 8 + 5 bytes; at B1 those 8 more less 8 that are away; at B0 call 1's are gone and call 0's are back.
        (8, (0,) * 4, (0,) * 4, True, [0, 5, 5, 5], [20, 27, 12, 0]),
        # By 0, 3, 1 and 2 bytes the allocator gives more than what is asked for; one that does not count that is believed.
        (0, (0, 3, 1, 2), (0,) * 4, True, [0, 5, 5, 5], [20, 27, 12, 0]),
        (0, (0, 3, 1, 2), (0,) * 4, False, [0, 8, 6, 7], [20, 27, 12, 0]),
        # 0, 70, 70 and 0 bytes are gone, but not for another stream; of a peak what is allocated is nearer then.
        (0, (2,) * 4, (0, 70, 70, 0), True, [0, 5, 5, 5], [20, 27 + 2, 12 + 2, 0]),
    ],
)
def test_memory_is_what_tensors_request_without_saved_items(
    device: SimulatedDevice,
    away: int,
    rounding: tuple[int, ...],
    waiting: tuple[int, ...],
    counts: bool,
    other: list[int],
    rises: list[int],
) -> None:
    """Two calls save 8 bytes each; 100 bytes were there before, 5 more come at F1 and stay."""
    device.counts_requests = counts
    at_b1 = 121 - away
    levels = ((100, 120, 0), (113, 140, 0), (at_b1, at_b1 + 12, away), (113, 130, 0))
    timeline = retimed(run(device, levels=levels, rounding=rounding, waiting=waiting))
    assert [m.other for m in timeline.events] == other
    assert [m.transient for m in timeline.events] == rises


# --- the time and peak of a trial -------------------------------------------------------------------------------------

RISING = replace(TIMELINE, events=(*TIMELINE.events[:2], *(replace(m, transient=30) for m in TIMELINE.events[2:])))


def trial(device: SimulatedDevice, base: int | None, epilogue: int = 0, inputs: int = 100) -> TrialRecorder:
    """1000 bytes are held, 50 more come before the first region; 200 at most in B1, `epilogue` after the last event."""
    device.now = device.top = 1050
    recorder = TrialRecorder(GPU, RISING, KEEP, base, Peaks())
    for kind, path, top, now in (("F", "a", 1100, 1090), ("F", "b", 1150, 1140), ("B", "b", 1200, 1080)):
        if kind == "F":
            recorder.entered((path, 0), inputs)
        recorder.before_waits()
        recorder.after_waits(kind, (path, 0), None)
        device.rises(top, now)
    recorder.after_waits("B", ("a", 0), None)
    device.rises(1105, 1000)
    device.rises(1000 + epilogue)
    device.clock = 7.0
    return recorder


@pytest.mark.parametrize(
    ("base", "epilogue", "peak"),
    [(1000, 0, 200), (None, 0, 150), (1000, 5000, 200)],
    ids=["over what was held before the forward", "nobody told", "the optimizer's memory is not the plan's"],
)
def test_the_peak_of_a_trial(device: SimulatedDevice, base: int | None, epilogue: int, peak: int) -> None:
    found = trial(device, base, epilogue).result()
    assert found is not None
    assert (found[0](), found[1]) == (7.0, peak)


def test_a_trial_on_another_device_than_the_current_one(device: SimulatedDevice) -> None:
    """Which one is current may also change between two steps."""
    device.current = 1
    recorder = trial(device, 1000)
    device.current = 2
    found = recorder.result()
    assert found is not None and found[0]() == 7.0


def test_of_the_last_event_no_more_counts_than_another_backward_rises(device: SimulatedDevice) -> None:
    recorder = TrialRecorder(GPU, RISING, KEEP, 0, Peaks())
    device.rises(80, 80)
    recorder.after_waits("B", ("a", 0), None)
    device.rises(9000, 80)
    found = recorder.result()
    assert found is not None and found[1] == 80 + 30
    again = simulate(RISING, Assignment(recompute=frozenset("b")))
    small = replace(RISING, calls=(CALLS[0], replace(CALLS[1], items=(12,), input_bytes=2)))
    assert highest_rise(RISING, KEEP) == 30 and highest_rise(small, again) == 40, "what is recomputed rises too"


def test_another_batch_or_a_dropped_forward_is_no_measure(device: SimulatedDevice) -> None:
    assert trial(device, 1000, inputs=98).result() is None
    recorder = TrialRecorder(GPU, RISING, KEEP, None, Peaks())
    recorder.after_waits("F", ("a", 0), None)
    assert recorder.result() is None


def test_peaks_before_a_reset_are_kept(device: SimulatedDevice) -> None:
    peaks = Peaks()
    device.now, device.top = 1000, 5000  # before the trial
    recorder = TrialRecorder(GPU, RISING, KEEP, 0, peaks)
    assert peaks.highest == 5000 and peaks.take() == 5000
    device.rises(7000)
    recorder.after_waits("B", ("a", 0), None)
    assert peaks.take() == 7000 and peaks.take() == 0 and device.top == 1000


# --- the allocator's figures ------------------------------------------------------------------------------------------


def taken(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_a_block_that_is_given_out_whole_counts_as_what_was_requested() -> None:
    gpu = torch.device("cuda")
    torch.cuda.synchronize()
    _leftovers = fill_free_parts()
    hole = taken(17 * MIB + MIB // 2)  # a segment of 18 MiB, of which half a MiB is not split off
    before, held = requested(gpu)[0] - hole.nbytes, torch.cuda.memory_allocated() - 18 * MIB
    del hole
    size = 17 * MIB + MIB // 4 + 1
    asked = taken(size)
    assert requested(gpu)[0] == before + size
    assert torch.cuda.memory_allocated() == held + 18 * MIB
    torch.cuda.reset_peak_memory_stats()
    more = taken(5 * MIB + 1)
    del more, asked
    assert requested(gpu) == (before, before + size + 5 * MIB + 1)


@pytest.mark.gpu
def test_what_another_stream_may_still_read_is_gone() -> None:
    gpu, side = torch.device("cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    before = requested(gpu)[0]
    given = taken(16 * MIB)
    given.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 30)
    del given
    assert requested(gpu)[0] == before
    torch.cuda.synchronize()
