"""Which stream waits for which: copies of a `HostStore` whose streams and events only take notes."""

from typing import Any

import pytest
import torch

from forebay.memory.copy_lanes import CopyDone
from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState

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

    def __init__(self) -> None:
        self.notes: Notes = []
        self.store = HostStore(torch.device("cpu"))
        self.compute, self.side = Stream("compute", self.notes), Stream("side", self.notes)
        lanes: Any = self.store.lanes
        lanes.out_stream, lanes.back_stream = Stream("out", self.notes), Stream("back", self.notes)
        lanes._ready = Event()

    def current_stream_is(self, other: Stream | None) -> None:
        self.store.lanes.other_stream = lambda compute: other  # type: ignore[method-assign]

    def send(self, count: int, nbytes: int = 4096) -> list[Ticket]:
        tickets = [
            self.store.new_ticket(torch.full((nbytes,), i, dtype=torch.uint8), self.compute) for i in range(count)
        ]
        self.store.send(tickets)
        return tickets

    def released(self) -> Ticket:
        (ticket,) = self.send(1)
        self.store.release(ticket)
        return ticket

    def round_trip(self, count: int) -> None:
        tickets = self.send(count)
        for ticket in tickets:
            self.store.release(ticket)
        self.store.fetch(tickets)
        assert all(bool((self.store.wait(t) == i).all()) for i, t in enumerate(tickets))

    def count(self, kind: str) -> int:
        return sum(note[1] == kind for note in self.notes)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return Noted()


def end(copy: CopyDone | None) -> Event:
    assert copy is not None and copy.pair is not None
    return copy.pair[1]  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 9])
def test_tensors_that_leave_together_cost_as_much_as_one(noted: Noted, count: int) -> None:
    for _ in range(2):
        noted.round_trip(count)
        noted.store.reset_stats()
        noted.notes.clear()
    made = Event.made
    noted.round_trip(count)
    assert Event.made == made, "events of steps that are over are recorded again"
    # Each way: ready, begin, end; the lane waits for compute, compute for the lane, and out for the copy back from those blocks.
    # Contexts: out, where memory is allocated, back.
    assert [noted.count(kind) for kind in ("record", "wait", "enter")] == [6, 5, 3]


@pytest.mark.parametrize("nbytes", [4096, 4090, 1000], ids=["same size", "same length", "cut from a hole"])
def test_a_block_is_written_after_the_last_copy_from_it(noted: Noted, nbytes: int) -> None:
    tickets = noted.send(3)
    for ticket in tickets:
        noted.store.release(ticket)
    noted.store.fetch(tickets[:1], tickets[1:])  # two batches, each with its own end
    ends = [end(ticket.back) for ticket in tickets]
    assert ends[0] is not ends[1] and ends[1] is ends[2]
    del tickets, ticket
    noted.notes.clear()
    again = noted.send(3, nbytes)
    order = [note[1:3] for note in noted.notes if note[0] == "out"]
    waited = [note[1] for note in order[: order.index(("enter",))] if note[0] == "wait"]
    assert all(ticket.host_block is not None and end(ticket.host_block.last_read) in waited for ticket in again)
    assert nbytes == 1000 or set(ends) <= set(waited)


def test_a_copy_back_waits_for_the_copy_out_through_compute(noted: Noted) -> None:
    ticket = noted.released()
    noted.store.fetch([ticket])
    released = next(i for i, n in enumerate(noted.notes) if n[:3] == ("compute", "wait", end(ticket.out)))
    ready = max(i for i, n in enumerate(noted.notes) if n[:2] == ("compute", "record"))
    taken = next(i for i, n in enumerate(noted.notes) if n[0] == "back")
    assert released < ready < taken and noted.notes[taken][2:] == noted.notes[ready][2:]


def test_a_held_ticket_costs_nothing_and_is_not_sent_once_backward_has_it(noted: Noted) -> None:
    ticket = noted.store.new_ticket(torch.ones(4096, dtype=torch.uint8), noted.compute)
    noted.store.release(ticket)
    noted.store.fetch([ticket])
    assert ticket.state is TicketState.UNSENT and bool((noted.store.wait(ticket) == 1).all())
    noted.store.send([ticket])
    assert ticket.state is TicketState.ON_DEVICE and not noted.notes and noted.store.pool.reserved_bytes == 0


def test_a_ticket_that_dies_is_waited_for_once(noted: Noted) -> None:
    tickets = noted.send(4)
    noted.notes.clear()
    tickets.clear()
    assert [note[:2] for note in noted.notes] == [("compute", "wait")], "four that were leaving, one copy"
    ticket = noted.released()
    noted.store.wait(ticket)
    noted.notes.clear()
    del ticket
    assert not noted.notes, "it came back, and compute has waited for that"


def test_a_storage_is_compressed_between_the_streams_that_use_it_and_the_copy(noted: Noted) -> None:
    noted.current_stream_is(noted.side)
    ticket = noted.store.new_ticket(torch.ones(4096, dtype=torch.uint8), noted.compute, True)
    noted.store.send([ticket])
    order = [note[:2] for note in noted.notes]
    # `side` wrote the storage, and may be the one that gets its block next.
    assert order[:3] == [("compute", "wait"), ("compute", "enter"), ("side", "wait")]
    assert order.index(("compute", "record")) > 2, "the copy waits for compute as of then"
    noted.notes.clear()
    assert ticket.compressed and noted.store.wait(ticket).numel() == 4096 and not ticket.compressed
    order = [note[:2] for note in noted.notes]
    # The copy out still reads the compressed block, which is dropped; `side` reads the expanded one.
    assert ("compute", "wait") in order[order.index(("compute", "enter")) :] and order[-1] == ("side", "wait")


def test_a_ticket_taken_back_while_leaving_is_waited_for_when_it_dies(noted: Noted) -> None:
    """Its memory may be unmapped under the copy that still reads it."""
    (ticket,) = noted.send(1)
    noted.store.wait(ticket)
    assert ticket.state is TicketState.ON_DEVICE
    out = end(ticket.out)
    noted.notes.clear()
    noted.store.wait(ticket)
    assert not noted.notes, "backward does not wait for it"
    del ticket
    assert [note[:3] for note in noted.notes] == [("compute", "wait", out)]


def test_bytes_read_on_another_stream(noted: Noted) -> None:
    ticket = noted.released()
    noted.notes.clear()
    noted.current_stream_is(noted.side)
    noted.store.wait(ticket)
    waits = [note[:3] for note in noted.notes if note[1] == "wait"]
    assert ("compute", "wait", end(ticket.back)) in waits and ("side", "wait", end(ticket.back)) in waits
    noted.current_stream_is(None)
    noted.notes.clear()
    noted.store.wait(ticket)
    assert not noted.notes
    del ticket
    assert noted.notes == [("compute", "wait", "side")], "before the block is given to compute again"


def test_bytes_made_on_another_stream(noted: Noted) -> None:
    noted.current_stream_is(noted.side)
    (ticket,) = noted.send(1)
    out = [note for note in noted.notes if note[0] == "out"]
    assert out.index(("out", "wait", "side")) < out.index(("out", "enter"))
    noted.notes.clear()
    noted.store.release(ticket)
    copied = end(ticket.out)
    # The block goes back to the allocator of the stream that made it, whichever that is.
    assert [note[:3] for note in noted.notes] == [
        ("compute", "wait", copied), ("side", "wait", copied), ("compute", "wait", "side"),
    ]  # fmt: skip


def test_bytes_saved_again_on_another_stream(noted: Noted) -> None:
    """`side` computes with them too, and is joined later than their memory is dropped."""
    (ticket,) = noted.send(1)
    storage = ticket.device_bytes.untyped_storage()
    assert noted.store.may_stand_for(ticket, storage)
    noted.current_stream_is(noted.side)
    assert noted.store.may_stand_for(ticket, storage)
    noted.notes.clear()
    noted.store.release(ticket)
    assert noted.notes[-1] == ("compute", "wait", "side"), "before the block is given to compute again"
    assert not noted.store.may_stand_for(ticket, storage), "nothing would hold the block for `side`"
    noted.current_stream_is(None)
    assert noted.store.may_stand_for(ticket, storage), "compute is not given the block before it has used it"


def test_nothing_waits_for_copies_that_the_host_has_waited_for(noted: Noted) -> None:
    """A ticket from before a capture that dies within it: a wait for its event would end the capture."""
    tickets = noted.send(2)
    noted.store.release(tickets[1])
    noted.store.fetch(tickets[1:])
    noted.store.synchronize()
    noted.notes.clear()
    tickets.clear()
    assert not noted.notes
    noted.send(2)  # in the blocks that were read
    assert [note[:2] for note in noted.notes if note[1] == "wait"] == [("out", "wait"), ("compute", "wait")]


def test_a_slab_is_unregistered_when_its_copies_are_over(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda event: noted.notes.append(("host", "wait", event)), raising=False)
    cudart = type("", (), {"cudaHostUnregister": lambda self, at: noted.notes.append(("host", "unregister"))})
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    ticket = noted.released()
    noted.store.close()
    noted.store.wait(ticket)  # after the store has closed: only the slab still knows of this copy
    assert ticket.host_block is not None
    ticket.host_block.slab.pinned, back = True, end(ticket.back)
    noted.notes.clear()
    del ticket
    assert noted.notes == [("host", "wait", back), ("host", "unregister")]
