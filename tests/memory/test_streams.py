"""What copies cost the host beside themselves, and who waits for whom, seen by streams and events that only take notes."""

from typing import Any

import pytest
import torch

from forebay.memory.host_store import HostStore, HostTicket, TicketState

Notes = list[tuple[Any, ...]]


class Event:
    made = 0

    def __init__(self, enable_timing: bool = False):
        self.recorded = 0
        Event.made += 1

    def record(self, stream: "Stream") -> None:
        self.recorded += 1
        stream.notes.append((stream.name, "record", self, self.recorded))


class Stream:
    def __init__(self, name: str, notes: Notes):
        self.name, self.notes = name, notes

    def wait_event(self, event: Event) -> None:
        self.notes.append((self.name, "wait", event, event.recorded))

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append((self.name, "wait", other.name))

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        self.notes.append((self.name, "enter"))

    def __exit__(self, *_: object) -> None:
        pass


class Noted:
    """A store of CPU memory whose lanes are `Stream`s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        self.notes: Notes = []
        self.store = HostStore(torch.device("cpu"))
        self.compute = Stream("compute", self.notes)
        lanes: Any = self.store.lanes
        lanes.out_stream, lanes.back_stream = Stream("out", self.notes), Stream("back", self.notes)
        lanes._ready = Event()

    def leave(self, count: int) -> list[HostTicket]:
        tickets = [self.store.hold(torch.full((4096,), i, dtype=torch.uint8), self.compute) for i in range(count)]
        self.store.send(tickets)
        return tickets

    def round_trip(self, count: int) -> None:
        tickets = self.leave(count)
        for ticket in tickets:
            self.store.settle(ticket)
        self.store.fetch(tickets)
        assert all(bool((self.store.wait(t) == i).all()) for i, t in enumerate(tickets))

    def count(self, kind: str) -> int:
        return sum(note[1] == kind for note in self.notes)


def test_tensors_that_leave_together_cost_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for count in (1, 9):
        noted = Noted(monkeypatch)
        for _ in range(2):
            noted.round_trip(count)
            noted.store.restart()
            noted.notes.clear()
        made = Event.made
        noted.round_trip(count)
        assert Event.made == made, "events of cycles that are over are recorded again"
        costs.append([noted.count(kind) for kind in ("record", "wait", "enter")])
    # Each way: ready, begin, end; the lane waits for compute, compute for the lane, and out for the copy back from those slots.
    # Contexts: out, where memory is allocated, back.
    assert costs == [[6, 5, 3], [6, 5, 3]]


def test_a_slot_is_written_behind_the_last_copy_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    tickets = noted.leave(3)
    for ticket in tickets:
        noted.store.settle(ticket)
    noted.store.fetch(tickets[:1], tickets[1:])  # two batches, each with its own end
    ends = [ticket.back.pair[1] for ticket in tickets]  # type: ignore[union-attr, index]
    assert ends[0] is not ends[1] and ends[1] is ends[2]
    del tickets, ticket
    noted.notes.clear()
    again = noted.leave(3)
    order = [note[1:3] for note in noted.notes if note[0] == "out"]
    entered = order.index(("enter",))
    assert {("wait", end) for end in ends} <= set(order[:entered])
    assert all(ticket.slot.last_read is not None for ticket in again)  # type: ignore[union-attr]


def test_a_copy_back_comes_behind_the_copy_out_through_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    (ticket,) = noted.leave(1)
    noted.store.settle(ticket)
    noted.store.fetch([ticket])
    assert ticket.out is not None and ticket.out.pair is not None
    settled = next(i for i, n in enumerate(noted.notes) if n[:3] == ("compute", "wait", ticket.out.pair[1]))
    ready = max(i for i, n in enumerate(noted.notes) if n[:2] == ("compute", "record"))
    taken = next(i for i, n in enumerate(noted.notes) if n[0] == "back")
    assert settled < ready < taken and noted.notes[taken][2:] == noted.notes[ready][2:]


def test_what_is_still_held_costs_nothing_and_is_not_sent_once_backward_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted(monkeypatch)
    ticket = noted.store.hold(torch.ones(4096, dtype=torch.uint8), noted.compute)
    noted.store.settle(ticket)
    noted.store.fetch([ticket])
    assert ticket.state is TicketState.HELD and bool((noted.store.wait(ticket) == 1).all())
    noted.store.send([ticket])
    assert ticket.state is TicketState.ON_DEVICE and not noted.notes and noted.store.pool.reserved_bytes == 0
    del ticket
    assert noted.store.live_tickets == noted.store.live_bytes == 0


def test_a_ticket_that_dies_while_leaving_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    tickets = noted.leave(4)
    noted.notes.clear()
    tickets.clear()
    assert [note[:2] for note in noted.notes] == [("compute", "wait")]


def test_a_ticket_taken_back_while_leaving_is_waited_for_when_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be unmapped under the copy that still reads it."""
    noted = Noted(monkeypatch)
    (ticket,) = noted.leave(1)
    noted.store.wait(ticket)
    assert ticket.state is TicketState.ON_DEVICE and ticket.out is not None and ticket.out.pair is not None
    out = ticket.out.pair[1]
    noted.notes.clear()
    noted.store.wait(ticket)
    assert not noted.notes, "backward does not wait for it"
    del ticket
    assert [note[:3] for note in noted.notes] == [("compute", "wait", out)]


def test_a_ticket_that_came_back_dies_without_waiting_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    tickets = noted.leave(1)
    noted.store.settle(tickets[0])
    noted.store.wait(tickets[0])
    noted.notes.clear()
    tickets.clear()
    assert not noted.notes


def test_bytes_read_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    side = Stream("side", noted.notes)
    (ticket,) = noted.leave(1)
    noted.store.settle(ticket)
    noted.notes.clear()
    noted.store.lanes.other_stream = lambda compute: side  # type: ignore[method-assign]
    noted.store.wait(ticket)
    assert ticket.back is not None and ticket.back.pair is not None
    waits = [note[:3] for note in noted.notes if note[1] == "wait"]
    assert ("compute", "wait", ticket.back.pair[1]) in waits and ("side", "wait", ticket.back.pair[1]) in waits
    noted.store.lanes.other_stream = lambda compute: None  # type: ignore[method-assign]
    noted.notes.clear()
    noted.store.wait(ticket)
    assert not noted.notes
    del ticket
    assert noted.notes == [("compute", "wait", "side")], "before the block is given to compute again"


def test_bytes_made_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    side = Stream("side", noted.notes)
    noted.store.lanes.other_stream = lambda compute: side  # type: ignore[method-assign]
    (ticket,) = noted.leave(1)
    out = [note for note in noted.notes if note[0] == "out"]
    assert out.index(("out", "wait", "side")) < out.index(("out", "enter"))
    noted.notes.clear()
    noted.store.settle(ticket)
    assert ticket.out is not None and ticket.out.pair is not None
    end = ticket.out.pair[1]
    # The block goes back to the allocator of the stream that made it, whichever that is.
    assert [note[:3] for note in noted.notes] == [
        ("compute", "wait", end), ("side", "wait", end), ("compute", "wait", "side"),
    ]  # fmt: skip


def test_nothing_waits_for_copies_that_the_host_has_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket from before a capture that dies within it: a wait for its event would end the capture."""
    noted = Noted(monkeypatch)
    tickets = noted.leave(2)
    noted.store.settle(tickets[1])
    noted.store.fetch(tickets[1:])
    noted.store.synchronize()
    noted.notes.clear()
    tickets.clear()
    assert not noted.notes
    assert not [note for note in noted.notes if note[1] == "wait" and note[2] != "compute"]
    noted.leave(2)  # in the slots that were read
    assert [note[:2] for note in noted.notes if note[1] == "wait"] == [("out", "wait"), ("compute", "wait")]


def test_a_slab_is_unregistered_when_its_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    monkeypatch.setattr(Event, "synchronize", lambda event: noted.notes.append(("host", "wait", event)), raising=False)
    cudart = type("", (), {"cudaHostUnregister": lambda self, at: noted.notes.append(("host", "unregister"))})
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    (ticket,) = noted.leave(1)
    noted.store.settle(ticket)
    noted.store.close()
    noted.store.wait(ticket)  # after the store has closed: the last to know of this copy is the slab
    assert ticket.slot is not None and ticket.back is not None and ticket.back.pair is not None
    ticket.slot.slab.pinned, end = True, ticket.back.pair[1]
    noted.notes.clear()
    del ticket
    assert noted.notes == [("host", "wait", end), ("host", "unregister")]
