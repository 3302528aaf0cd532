"""Moves the tickets of a step at its events: by the plan, or one call at a time while there is none.

Input: the start of each region call's forward and backward, and the autotuner's plan. Output: tickets sent, released, fetched
and waited for through the `HostStore`, and the time that the compute stream waited. The manager owns one `Transfers` a store;
the graph owns the tickets.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from forebay.memory.autotune import Autotuner
from forebay.memory.host_store import HostStore, Ledger, TicketState
from forebay.memory.recorder import Marks, Recorder, TimelineRecorder
from forebay.memory.step import RegionCall, Step
from forebay.memory.streams import external_event
from forebay.memory.timeline import Key, Plan


class Transfers:
    """When the bytes of one store move.

    Attributes:
        captured: the step is captured in a CUDA graph.
    """

    def __init__(self, store: HostStore, ledger: Ledger):
        self._store, self._ledger = store, ledger
        self._gpu = store.device.type == "cuda"
        self.captured = False
        self._waits: list[Marks] = []  # of the current step
        self._spare_cuda_events: list[Any] = []  # recorded in earlier steps

    def begin_step(self, previous: Step) -> None:
        """Settle what the previous step left, and count from here."""
        self.release(call for ref in previous.unreleased if (call := ref()) is not None)
        self._store.reset_stats()
        self._spare_cuda_events.extend(event for pair in self._waits for event in pair)
        self._waits.clear()

    def on_event(self, kind: str, call: RegionCall, tuner: Autotuner) -> None:
        """The forward ("F") or backward ("B") of `call` starts: release, fetch and wait for what is due."""
        plan, recorder = tuner.plan, tuner.recorder
        marks, device_bytes, host_bytes = None, 0, 0
        if recorder is not None:
            recorder.before_waits()
        if plan is None:
            before = self.mark()
            self._one_call_at_a_time(kind, call, recorder)
            device_bytes = self._ledger.device_bytes
            marks = before, self.mark()
        elif plan.planned_bytes:
            timed = recorder is not None and recorder.times_events
            marks = self._follow(kind, call, plan, tuner.lookup.release_at.get((kind, call.key), ()), timed)
            if timed:
                host_bytes = self._ledger.live_bytes - self._ledger.device_bytes
        if recorder is not None:
            recorder.after_waits(kind, call.key, marks, device_bytes, host_bytes)

    def _one_call_at_a_time(self, kind: str, call: RegionCall, recorder: Recorder | None) -> None:
        """Without a plan one call's copy out is under way, and the next call in backward order is fetched ahead."""
        step = call.step
        self.release(other for ref in step.unreleased if (other := ref()) is not None and other is not call)
        step.unreleased = [ref for ref in step.unreleased if ref() is call]
        if kind == "B":
            if isinstance(recorder, TimelineRecorder):
                _exclude_held_elsewhere(recorder, call)
            self.take_back(call)
            following = step.next_backward()
            if following is not None:
                self._store.fetch(following.live_tickets())

    def _follow(self, kind: str, call: RegionCall, plan: Plan, to_release: Sequence[Key], timed: bool) -> Marks | None:
        """Returns the marks around the waits, if there were any or if the event is `timed`."""
        due = [other for key in to_release if (other := call.step.find(key)) is not None]
        if kind == "B" and call.step.unreleased:
            due += _overdue(call.step, plan)
        awaited = kind == "B" and bool(call.tickets)
        before = self.mark() if due or awaited or timed else None
        if due:
            self.release(due)
        fetches = plan.fetch_at.get((kind, call.key), ())
        if fetches:
            wanted = [other.live_tickets() for key in fetches if (other := call.step.find(key)) is not None]
            self._store.fetch(*wanted)
        if awaited:
            self.take_back(call)
        if before is None:
            return None
        self._waits.append((before, self.mark()))
        return self._waits[-1]

    def send(self, call: RegionCall) -> None:
        """Begin the copies out of what the call has packed so far. The host pays for CUDA events and streams once a call, not
        once a tensor."""
        if call.unsent:
            unsent, call.unsent = call.unsent, []
            call.step.offloaded_bytes += sum(ticket.nbytes for ticket in unsent)
            self._store.send(unsent)

    def release(self, calls: Iterable[RegionCall]) -> None:
        """Wait for the calls' copies out on the compute stream, and free the device memory."""
        for call in calls:
            self.send(call)
            for ticket in call.live_tickets():
                self._store.release(ticket)

    def take_back(self, call: RegionCall) -> None:
        """Wait for the call's copies back on the compute stream."""
        for ticket in call.live_tickets():
            if ticket.state is not TicketState.ON_DEVICE:
                self._store.recall(ticket)

    def mark(self) -> Any:
        """Record a CUDA event with a time on the current stream; None on a CPU, and in a graph that is not timed."""
        if not self._gpu or (self.captured and not self._store.lanes.time_captured):
            return None
        event = self._new_cuda_event()
        event.record()
        return event

    def _new_cuda_event(self) -> Any:
        if self.captured:
            return external_event()
        return self._spare_cuda_events.pop() if self._spare_cuda_events else torch.cuda.Event(enable_timing=True)

    def forget_waits(self) -> None:
        """The step was captured: its CUDA events belong to the graph."""
        self._waits.clear()

    def wait_ms(self) -> float | None:
        """Time for which the compute stream waited in this step; None on a CPU. Waits for the device."""
        if not self._gpu:
            return None
        torch.cuda.synchronize(self._store.device)
        return float(sum(before.elapsed_time(after) for before, after in self._waits))


def _overdue(step: Step, plan: Plan) -> list[RegionCall]:
    """At the first backward after forwards: the calls to be released at a forward that has not come. Where all forwards come
    before all backwards it will not come."""
    unreleased, step.unreleased = [call for ref in step.unreleased if (call := ref()) is not None], []
    return [call for call in unreleased if plan.release_at.get(call.key, "-")[0] == "F"]


def _exclude_held_elsewhere(recorder: TimelineRecorder, call: RegionCall) -> None:
    """A storage that was offloaded but is still alive is in use elsewhere, such as the batch by its loader: offloading it
    frees nothing. To be called when the call's own backward begins: the locals of its forward are gone."""
    for saved in call.step.saved_by.get(call.key, ()):
        ticket = saved.ticket() if saved.ticket is not None else None
        if ticket is not None and ticket.state is TicketState.ON_HOST and not saved.identity.expired:
            recorder.exclude(saved.key, saved.item)
