"""HostStore and HostPool on a CPU: bytes come back, states are checked, blocks never share a byte.

Which stream waits for which is seen by streams and events that only take notes.
"""

import resource
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.memory.host_store import CopyDone, HostBlock, HostPool, HostStore, Ticket, TicketState
from tests.helpers import sent, used_bytes

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def fresh(device: str = "cpu", nbytes: int = 4096) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip_returns_the_bytes(device: str) -> None:
    store = HostStore(torch.device(device))
    source = fresh(device, 1 << 22)
    truth = source.clone()
    ticket = sent(store, source)
    store.release(ticket)
    assert ticket.state is TicketState.ON_HOST and ticket.device_bytes is None
    source.fill_(0xAA)
    store.fetch([ticket])
    assert torch.equal(store.wait(ticket), truth)
    assert torch.equal(store.wait(ticket), truth), "waiting twice is allowed"
    assert store.outbound.nbytes == store.inbound.nbytes == truth.numel()
    dead = weakref.ref(ticket)
    del ticket
    assert dead() is None and used_bytes(store.pool) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_backward_before_the_copy_is_over_takes_the_tensor_back(device: str) -> None:
    store = HostStore(torch.device(device))
    source = fresh(device)
    ticket = sent(store, source)
    store.fetch([ticket])
    assert ticket.state is TicketState.LEAVING
    assert store.wait(ticket).data_ptr() == source.data_ptr()
    store.release(ticket)
    assert ticket.state is TicketState.ON_DEVICE and store.inbound.nbytes == 0


def test_a_wrong_transition_names_both_states() -> None:
    ticket = HostStore(CPU).new_ticket(fresh(), None)
    with pytest.raises(RuntimeError, match="from unsent to on_host"):
        ticket.advance(TicketState.ON_HOST)


def test_a_closed_store_sends_nothing_and_its_tickets_stay_valid() -> None:
    """A model is detached between forward and backward: what has not left stays, what has left comes back."""
    store = HostStore(CPU)
    tickets = [store.new_ticket(fresh(), None) for _ in range(3)]
    unsent, leaving, away = tickets
    truth = [ticket.device_bytes.clone() for ticket in tickets]
    store.send([leaving, away])
    store.release(away)
    store.close()
    store.send([unsent])
    store.release(unsent)
    store.release(leaving)
    store.fetch(tickets)
    assert all(torch.equal(store.wait(ticket), bytes_) for ticket, bytes_ in zip(tickets, truth, strict=True))
    slab = weakref.ref(away.host_block.slab)
    del tickets, unsent, leaving, away
    assert slab() is None and not store.pool._returned and store.pool.reserved_bytes == 0


@pytest.mark.parametrize("emptied", ["unsent", "leaving", "leaving, filled again", "on the host"])
def test_a_storage_that_an_engine_empties_stays_with_the_engine_unless_it_has_left(emptied: str) -> None:
    """As FSDP1 does with unsharded weights: freed after forward, filled again before backward."""
    store = HostStore(CPU)
    weight = torch.arange(1024, dtype=torch.uint8)
    truth, storage = weight.clone(), weight.untyped_storage()
    ticket, other = store.new_ticket(weight, None), store.new_ticket(torch.ones(64, dtype=torch.uint8), None)
    if emptied != "unsent":
        store.send([ticket])
    if emptied == "on the host":
        store.release(ticket)
        storage.resize_(0)
        assert torch.equal(store.wait(ticket), truth)
        return
    storage.resize_(0)
    if emptied == "leaving, filled again":
        storage.resize_(64 << 20)  # so large that malloc maps it: at another address
        weight.copy_(truth)
    store.send([ticket, other])
    store.release(ticket)
    assert ticket.state is TicketState.ON_DEVICE and other.state is TicketState.LEAVING
    assert ticket.device_bytes is not None and ticket.device_bytes.untyped_storage().data_ptr() == storage.data_ptr()
    if emptied != "leaving, filled again":
        store.recall(ticket)  # ahead of time: no error yet
        with pytest.raises(RuntimeError, match="saved storage of 1024 bytes now has 0"):
            store.wait(ticket)
        storage.resize_(1024)
        weight.copy_(truth)
    assert torch.equal(store.wait(ticket), truth)
    del ticket, other
    assert used_bytes(store.pool) == 0


def test_a_store_counts_the_living_and_does_not_grow_with_the_dead() -> None:
    store = HostStore(CPU)
    kept = [store.new_ticket(fresh(nbytes=10), None) for _ in range(300)]
    for _ in range(10_000):
        store.new_ticket(torch.empty(0, dtype=torch.uint8), None)
    assert store.live_tickets == 300 and len(store._tickets) <= 2 * 300 + 256
    store.send(kept[:100])
    for ticket in kept[:100]:
        store.release(ticket)
    assert (store.live_bytes, store.device_bytes) == (3000, 2000)
    kept.clear()
    del ticket
    assert store.live_tickets == 0


# --- the pool ---------------------------------------------------------------------------------------------------------


def give_all(pool: HostPool, blocks: list[HostBlock]) -> None:
    for block in blocks:
        pool.give(block)


def test_blocks_have_the_exact_size_and_the_same_sizes_need_no_new_slab() -> None:
    pool = HostPool(pin=False)
    sizes = (1, 511, 512, 513, 5000, 70_000, 5000, 1_000_000)
    places = set()
    for _ in range(3):
        blocks = [pool.take(n) for n in sizes]
        assert tuple(block.bytes_.numel() for block in blocks) == sizes
        places.add(frozenset((id(block.slab), block.start) for block in blocks))
        give_all(pool, blocks[::-1])
    assert len(places) == 1, "blocks go out again as they came back"
    assert pool.reserved_bytes <= sum(sizes) + len(sizes) * 512 and used_bytes(pool) == 0


def test_only_slabs_without_a_used_slot_are_trimmed() -> None:
    pool = HostPool(pin=False)
    give_all(pool, [pool.take(3000) for _ in range(6)])
    pool.reset_stats()
    for _ in range(4):
        blocks = [pool.take(3000), pool.take(2900)]  # the same length, rounded
        assert [block.bytes_.numel() for block in blocks] == [3000, 2900]
        give_all(pool, blocks)
    pool.trim()
    assert pool.reserved_bytes == 2 * 3072 and used_bytes(pool) == 0
    pool.reset_stats()
    out = pool.take(3000)
    pool.reset_stats()
    pool.trim()
    assert pool.reserved_bytes == used_bytes(pool) == out.length


@pytest.mark.parametrize(("limit", "said"), [(65536, "to 65536 bytes"), (resource.RLIM_INFINITY, "sets no limit here")])
def test_memory_that_is_not_page_locked_says_what_to_do(monkeypatch: pytest.MonkeyPatch, limit: int, said: str) -> None:
    codes = [0, 2]
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: codes.pop(0), cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    pool = HostPool(pin=True, small_slab=4096)
    block = pool.take(4096)
    with pytest.raises(MemoryError) as refused:
        pool.take(10_000)
    for part in (
        "10240 bytes", "cudaErrorMemoryAllocation (2)", "already holds 4096 bytes", said, "ulimit -l unlimited",
        "memlock=-1", "offload less",
    ):  # fmt: skip
        assert part in str(refused.value)
    pool.give(block)
    assert pool.reserved_bytes == 4096 and used_bytes(pool) == 0, "the refused memory is not counted"
    assert pool.take(4096).start == block.start
    block.slab.pinned = False  # it may outlive this test, and cudart


# --- which stream waits for which -------------------------------------------------------------------------------------

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
