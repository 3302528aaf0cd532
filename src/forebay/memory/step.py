"""One step: its region calls, when their tickets move, and the figures reported of it.

A *step* of the memory package is not an optimizer step: it begins when a region is entered while no earlier call waits for its
backward, and ends when the next one begins. So with plain gradient accumulation each microbatch is a step of its own, as on the
last rank of a 1F1B pipeline, while several forwards followed by their backwards, or all microbatches of a pipeline's rank where
they alternate, are one. Calls are numbered as they come; the autograd graph owns them. The order of backwards is the one given
by a schedule, or else the reverse of the forwards. At the start of each call's forward and backward, `Transfers` sends, releases,
fetches and waits for tickets of the `HostStore`.
"""

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.memory.autotune import Autotuner
from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState
from forebay.memory.overrides import CallSite, LightRecompute
from forebay.memory.recorder import Marks, Recorder, TimelineRecorder
from forebay.memory.storage import RegionWeights
from forebay.memory.timeline import Key, Plan


@dataclass(frozen=True)
class StepReport:
    """Figures of the last step. None where a CPU has none.

    Attributes:
        planned_bytes: bytes that the step's plan takes off the device; 0 in a step that is measured for a plan.
        moved_bytes: bytes copied to the host: fewer than planned where they are compressed.
        d2h_gbps, h2d_gbps: 1e9 bytes a second while copying, out and back.
        wait_ms: time for which the compute stream waited for copies.
        saved_bytes_by_placement: bytes of the storages that regions saved for one backward: "offload" left the device,
            compressed if they are, "keep" stayed, "recompute" stayed for recomputed regions (their inputs). Small ones that are
            never offloaded count only for regions that the policy keeps. A storage that two regions save counts for both. For a
            call that offloads nothing by the plan, the bytes of the measured step count.
        recomputed: number of regions that run their forward again.
    """

    planned_bytes: int
    moved_bytes: int
    d2h_gbps: float | None
    h2d_gbps: float | None
    wait_ms: float | None
    saved_bytes_by_placement: dict[str, int]
    recomputed: int


@dataclass(eq=False)
class Region:
    """A managed region. `light` switches how it recomputes by itself; None: under a checkpoint."""

    path: str
    placement: str  # keep, recompute, offload, recompute+offload or auto
    site: CallSite
    light: LightRecompute | None


@dataclass(eq=False, slots=True)
class KnownStorage:
    """A storage that was saved in this step: the first call that saved it, its index among that call's items, and its ticket
    if it is offloaded. `weak` keeps the storage's address as an object from being reused, not its memory."""

    weak: StorageWeakRef
    key: Key
    number: int
    item: int
    ticket: "weakref.ref[Ticket] | None"


@dataclass(eq=False, slots=True, weakref_slot=True)
class RegionCall:
    """One forward of one region. Owned by the autograd graph, through packed tensors and gradient hooks.

    Attributes:
        number: of the call in its step; `forward`: of the model's forward in the step.
        items: bytes of each storage the call saved first.
        tickets: of the storages that the call saved; weak, because the graph owns them.
        unsent: tickets to be sent when the forward is over, owned until then.
        offload: indices of the items to be offloaded; None for all.
        rounds: what is offloaded may be compressed.
        light: the region's, if this call makes a tensor again under it.
        made_again: index of the item that is that tensor; -1 if none was saved yet.
        compute: the stream that the call runs on; None on a CPU.
        abandoned: no backward is expected: the forward failed, or a backward through its model's forward is over.
        hooks: on the outputs' gradients; they announce the call's backward.
    """

    key: Key
    step: "Step"
    number: int = 0
    forward: int = 0
    items: list[int] = field(default_factory=list)
    tickets: list["weakref.ref[Ticket]"] = field(default_factory=list)
    unsent: list[Ticket] = field(default_factory=list)
    offload: frozenset[int] | None = None
    rounds: bool = False
    light: LightRecompute | None = None
    made_again: int = -1
    compute: Any = None
    backward_started: bool = False
    abandoned: bool = False
    hooks: list[Any] = field(default_factory=list)

    def note_made_again(self, saved: torch.Tensor) -> None:
        """The last item is of this tensor. See `made_again`."""
        # A tie goes to the later one: hidden states are saved before what experts make of them.
        is_largest = self.made_again < 0 or self.items[-1] >= self.items[self.made_again]
        if self.light is not None and is_largest and self.light.may_make(saved):
            self.made_again = len(self.items) - 1

    def remove_hooks(self) -> None:
        """Take the hooks off the outputs: an output may outlive the graph, and be another call's output too."""
        while self.hooks:
            self.hooks.pop().remove()

    def live_tickets(self) -> list[Ticket]:
        return [t for ref in self.tickets if (t := ref()) is not None]

    @property
    def finished(self) -> bool:
        """Backward has run, or is not expected. A loss that the user keeps still holds the graph's nodes, but no saved
        tensors."""
        return self.abandoned or (self.backward_started and not self.live_tickets())


class Step:
    """The calls of one step and what they saved. Holds calls weakly: a call is alive as long as its graph.

    Args:
        backwards: the order of the step's backwards, if it is known.

    Attributes:
        saved: storages by `forebay.memory.storage.storage_key`. `saved_by`: by their first call, only while measuring.
        unreleased: calls whose device memory is not released yet.
        returning: calls that are due to come back, of which some tickets may still be on the host.
        weights: of regions, if a schedule says that they are steady within a step.
        saved_bytes, offloaded_bytes: of regions whose storages may be offloaded. `host_bytes`: the offloaded ones' on the host.
    """

    def __init__(self, backwards: Sequence[Key] = ()) -> None:
        self.saved: dict[tuple[int, int], KnownStorage] = {}
        self.saved_by: dict[Key, list[KnownStorage]] = {}
        self.unreleased: list[weakref.ref[RegionCall]] = []
        self.returning: list[Key] = []
        self.weights: dict[str, RegionWeights] = {}
        self.saved_bytes = self.offloaded_bytes = self.host_bytes = 0
        self._calls: list[weakref.ref[RegionCall]] = []
        self._by_key: dict[Key, weakref.ref[RegionCall]] = {}
        self._counts: dict[str, int] = {}
        self._forward = 0  # the model's forward that runs: another one begins where a region comes again
        self._in_forward: set[str] = set()
        self._n_finished = 0  # calls before this one are finished: a pipeline's step has thousands
        self._backwards = backwards
        self._place = 0  # in `backwards`: those before have begun

    def forget_storages(self) -> None:
        """Drop the records of storages, which a call that the user keeps alive would keep with its step."""
        self.saved.clear()
        self.saved_by.clear()
        self.weights.clear()

    def new_call(self, path: str) -> RegionCall:
        count = self._counts.get(path, 0)
        self._counts[path] = count + 1
        if path in self._in_forward:
            self._forward += 1
            self._in_forward.clear()
        self._in_forward.add(path)
        call = RegionCall((path, count), self, len(self._calls), self._forward)
        self._calls.append(weakref.ref(call))
        self._by_key[call.key] = self._calls[-1]
        return call

    def backward_finished(self, forwards: Collection[int]) -> None:
        """A backward went through these forwards. No other is expected of them or of those before them: the caller may keep an
        output that the loss does not use, or the traceback of a failed forward. A backward that comes after all still works."""
        self._abandon(max(forwards, default=-1))

    def forward_failed(self) -> None:
        """No backward is expected of the forward that runs."""
        self._abandon(self._forward)

    def _abandon(self, newest: int) -> None:
        for ref in self._calls[self._n_finished :]:
            call = ref()
            if call is not None and call.forward <= newest:
                call.abandoned = True

    @property
    def finished(self) -> bool:
        """Every call's graph was dropped, has run backward, or is not expected to."""
        while self._n_finished < len(self._calls):
            call = self._calls[self._n_finished]()
            if call is not None and not call.finished:
                return False
            self._n_finished += 1
        return True

    def unreleased_calls(self) -> list[RegionCall]:
        return [call for ref in self.unreleased if (call := ref()) is not None]

    def find(self, key: Key) -> RegionCall | None:
        ref = self._by_key.get(key)
        return ref() if ref is not None else None

    def next_backward(self) -> RegionCall | None:
        """The call whose backward is expected next: by the known order, or else the latest that has not run backward.

        Returns:
            None if the order is over, or if the forward of the next backward has not run yet: what comes after it would be
            fetched too early.
        """
        order = self._backwards
        if not order:
            return next(
                (c for ref in reversed(self._calls) if (c := ref()) is not None and not c.backward_started), None
            )
        while self._place < len(order):
            path, count = order[self._place]
            call = self.find((path, count))
            if call is None and self._counts.get(path, 0) <= count:
                return None
            if call is not None and not call.backward_started:
                return call
            self._place += 1
        return None


class Transfers:
    """Moves the tickets of one store at a step's events: by the plan, or one call at a time while there is none.

    Attributes:
        captured: the step is captured in a CUDA graph.
    """

    def __init__(self, store: HostStore):
        self._store = store
        self._gpu = store.device.type == "cuda"
        self.captured = False
        self._waits: list[Marks] = []  # of the current step
        self._spare_cuda_events: list[Any] = []  # recorded in earlier steps

    def begin_step(self, previous: Step) -> None:
        """Settle what the previous step left, and count from here."""
        self.release(previous.unreleased_calls())
        self._store.reset_stats()
        self._spare_cuda_events.extend(event for pair in self._waits for event in pair)
        self._waits.clear()

    def on_event(self, kind: str, call: RegionCall, tuner: Autotuner) -> None:
        """The forward ("F") or backward ("B") of `call` starts: release, fetch and wait for what is due."""
        plan, recorder = tuner.plan, tuner.recorder
        marks = None
        if recorder is not None:
            recorder.before_waits()
        if plan is None:
            before = self.mark()
            self._one_call_at_a_time(kind, call, recorder)
            marks = before, self.mark()
        elif plan.planned_bytes:
            timed = recorder is not None and recorder.times_events
            marks = self._follow(kind, call, plan, tuner.lookup.release_at.get((kind, call.key), ()), timed)
        if recorder is not None:
            recorder.after_waits(kind, call.key, marks)

    def _one_call_at_a_time(self, kind: str, call: RegionCall, recorder: Recorder | None) -> None:
        """Without a plan one call's copy out is under way, and the next call in backward order is fetched ahead."""
        step = call.step
        self.release(other for other in step.unreleased_calls() if other is not call)
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
        call.step.returning += plan.fetch_at.get((kind, call.key), ())
        if call.step.returning:
            room = inf if self.captured else plan.returns.get((kind, call.key), inf)
            self._store.fetch(*_due_back(call.step, room))
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
            call.step.host_bytes += sum(ticket.host_bytes for ticket in unsent)

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
        """Record a CUDA event with a time on the store's device, on its current stream; None on a CPU, and in a graph that is not
        timed.

        Trap: the current device need not be the store's in a forward, and autograd's thread makes it that in the backward.
        """
        if not self._gpu or (self.captured and not self._store.lanes.time_captured):
            return None
        if self.captured:
            event = self._store.lanes.captured_event()
        else:
            event = self._spare_cuda_events.pop() if self._spare_cuda_events else torch.cuda.Event(enable_timing=True)
        event.record(self._store.lanes.compute_stream())
        return event

    def forget_waits(self) -> None:
        """The step was captured: its CUDA events belong to the graph."""
        self._waits.clear()

    def wait_ms(self) -> float | None:
        """Time for which the compute stream waited in this step; None on a CPU. Waits for the device."""
        if not self._gpu:
            return None
        torch.cuda.synchronize(self._store.device)
        return float(sum(before.elapsed_time(after) for before, after in self._waits))


def _due_back(step: Step, room: float) -> list[list[Ticket]]:
    """The tickets of `step.returning` whose copies are enqueued now, by call: of about `room` bytes, and all of the call whose
    backward is next.

    Trap: what is enqueued for the link is copied in that order, whatever the streams. FSDP2 sends a few addresses to the device
    before it reduces a layer's gradients, and the compute stream waits for them: behind all copies of the next layer, 11 of 180
    ms in each microbatch of run 17 of the twenty-fourth draw.
    """
    found, following = [], step.next_backward()
    waiting = list(step.returning)  # several threads may run a model: what one misses comes back when it is needed
    for place, key in enumerate(waiting):
        call = step.find(key)
        away = [t for t in call.live_tickets() if t.state is TicketState.ON_HOST] if call is not None else []
        sizes = accumulate((t.host_bytes for t in away), initial=0)
        now = [t for t, before in zip(away, sizes, strict=False) if call is following or before < room]
        room -= sum(t.host_bytes for t in now)
        found.append(now)
        if len(now) < len(away):
            step.returning = waiting[place:]
            return found
    step.returning = []
    return found


def _overdue(step: Step, plan: Plan) -> list[RegionCall]:
    """At the first backward after forwards: the calls to be released at a forward that has not come. Where all forwards come
    before all backwards it will not come."""
    unreleased, step.unreleased = step.unreleased_calls(), []
    return [call for call in unreleased if plan.release_at.get(call.key, "-")[0] == "F"]


def _exclude_held_elsewhere(recorder: TimelineRecorder, call: RegionCall) -> None:
    """A storage that was offloaded but is still alive is in use elsewhere, such as the batch by its loader: offloading it
    frees nothing. To be called when the call's own backward begins: the locals of its forward are gone."""
    for saved in call.step.saved_by.get(call.key, ()):
        ticket = saved.ticket() if saved.ticket is not None else None
        if ticket is not None and ticket.state is TicketState.ON_HOST and not saved.weak.expired():
            recorder.exclude(saved.key, saved.item)
