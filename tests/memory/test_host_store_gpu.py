"""HostStore on a GPU with slow copies: a copy stream sleeps, and what could overtake it is provoked.

Memory that is free again is filled with 0xFF, which is a NaN in each floating dtype: bytes read from there show.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState
from tests.helpers import delayed, fill_free_parts, free_blocks, sent, used_bytes

pytestmark = pytest.mark.gpu

SLEEP = 100_000_000  # clock ticks: about 50 ms
NBYTES = 32 << 20  # above the allocator's small blocks, so that blocks are reused and unmapped as a whole


@pytest.fixture
def store() -> Iterator[HostStore]:
    torch.cuda.empty_cache()
    store = HostStore(torch.device("cuda:0"))
    yield store
    torch.cuda.synchronize()
    store.close()


@pytest.fixture
def expandable() -> Iterator[None]:
    """Memory in segments that ``empty_cache`` unmaps. Blocks of other segments stay as they are."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def fresh() -> torch.Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda:0")


def poison(reused: int | None = None) -> list[torch.Tensor]:
    """New blocks, full of 0xFF; one of them at the address `reused`."""
    blocks = [torch.full((NBYTES,), 0xFF, dtype=torch.uint8, device="cuda:0") for _ in range(4)]
    assert reused is None or reused in [block.data_ptr() for block in blocks], "the test needs the same block again"
    return blocks


def poison_free_blocks(store: HostStore) -> None:
    """On the host, when no copy is under way."""
    torch.cuda.synchronize()
    for block in free_blocks(store.pool):
        block.bytes_.fill_(0xFF)


def released(store: HostStore) -> tuple[Ticket, torch.Tensor]:
    """A ticket whose bytes are on the host only, and a copy of them."""
    source = fresh()
    truth = source.clone()
    ticket = sent(store, source)
    store.release(ticket)
    return ticket, truth


def test_a_slow_copy_out_is_not_overtaken(store: HostStore) -> None:
    """Compute goes on to overwrite the memory that the copy is to read, and to fetch it again."""
    delayed(store.lanes.out_stream, SLEEP)()
    ticket, truth = released(store)
    poisoned = poison()
    store.fetch([ticket])
    assert torch.equal(store.wait(ticket), truth)
    assert all(bool((p == 0xFF).all()) for p in poisoned)


def test_memory_is_not_unmapped_under_a_copy_of_a_ticket_that_was_taken_back(
    store: HostStore, expandable: None
) -> None:
    """The copy out goes on when backward takes the ticket back. An access to unmapped memory would end the process' context."""
    _leftovers = fill_free_parts()  # or `source` is a part of a segment that stays
    source = fresh()
    delayed(store.lanes.out_stream, SLEEP)()
    ticket = sent(store, source)
    del source
    store.wait(ticket)
    assert ticket.state is TicketState.ON_DEVICE and ticket.out is not None and ticket.out.pair is not None
    out = ticket.out
    assert not out.pair[1].query(), "the test needs a copy that is under way"
    del ticket
    torch.cuda.empty_cache()  # unmaps after the present work of compute, and compute waits for the copy
    assert out.pair[1].query(), "unmapped under the copy"
    torch.cuda.synchronize()


@pytest.mark.parametrize("state", ["leaving", "taken back", "returning"])
def test_a_block_is_not_given_to_compute_under_a_copy(store: HostStore, state: str) -> None:
    """What is written to it afterwards stays, and the copies had what they were to have."""
    if state == "returning":
        ticket, truth = released(store)
        delayed(store.lanes.back_stream, SLEEP)()
        store.fetch([ticket])
    else:
        source = fresh()
        truth = source.clone()
        delayed(store.lanes.out_stream, SLEEP)()
        ticket = sent(store, source)
        del source
        if state == "taken back":
            store.wait(ticket)
    assert ticket.host_block is not None and ticket.device_bytes is not None
    place, address = ticket.host_block.bytes_, ticket.device_bytes.data_ptr()
    del ticket
    reused = poison(address)
    torch.cuda.synchronize()
    assert all(bool((r == 0xFF).all()) for r in reused)
    assert torch.equal(place, truth.cpu()), "the copy out read what was written later"


def test_a_block_is_not_written_while_it_is_read(store: HostStore) -> None:
    """A ticket dies while it returns; the next one gets its block."""
    ticket, truth = released(store)
    delayed(store.lanes.back_stream, SLEEP)()
    back = store.wait(ticket)
    assert ticket.host_block is not None
    place = ticket.host_block.bytes_.data_ptr()
    del ticket
    other, second = released(store)
    assert other.host_block is not None and other.host_block.bytes_.data_ptr() == place, (
        "the test needs the same block again"
    )
    assert torch.equal(back, truth)
    assert torch.equal(store.wait(other), second)


def test_a_stream_that_unpacks_waits_for_the_copy_back(store: HostStore) -> None:
    """Saved on the compute stream, read on a side stream that waits for nothing."""
    side = torch.cuda.Stream()
    ticket, truth = released(store)
    poisoned = poison()
    torch.cuda.synchronize()
    del poisoned
    delayed(store.lanes.back_stream, SLEEP)()
    store.fetch([ticket])
    with torch.cuda.stream(side):
        seen = store.wait(ticket).clone()
    side.synchronize()
    assert torch.equal(seen, truth)


def test_compute_does_not_reuse_a_block_that_another_stream_reads(store: HostStore) -> None:
    side = torch.cuda.Stream()
    ticket, truth = released(store)
    with torch.cuda.stream(side):
        back = store.wait(ticket)
        address = back.data_ptr()
        torch.cuda._sleep(SLEEP)
        seen = back.clone()
    del back, ticket
    reused = poison(address)
    torch.cuda.synchronize()
    assert torch.equal(seen, truth) and reused


def test_a_storage_that_a_side_stream_made(store: HostStore) -> None:
    """The region's stream is compute; the tensor is made, saved and freed on a side stream."""
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        source = torch.arange(NBYTES, device="cuda:0", dtype=torch.int64).to(torch.uint8)
        address = source.data_ptr()
        ticket = store.new_ticket(source, compute)
    del source
    delayed(store.lanes.out_stream, SLEEP)()
    store.send([ticket])
    store.release(ticket)
    with torch.cuda.stream(side):  # the side stream's allocator has the block
        reused = poison(address)
    truth = torch.arange(NBYTES, device="cuda:0", dtype=torch.int64).to(torch.uint8)
    assert torch.equal(store.wait(ticket), truth) and reused


def test_backward_of_a_side_stream_through_autograd(store: HostStore) -> None:
    """Autograd runs a node's backward on its forward's stream: there the saved bytes must be."""
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(NBYTES // 4, device="cuda:0", requires_grad=True)
    plain = torch.autograd.grad((x * x * x).sum(), x)[0]
    tickets: list[Ticket] = []

    def pack(tensor: torch.Tensor) -> object:
        flat = torch.empty(0, dtype=torch.uint8, device="cuda:0")
        flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
        ticket = store.new_ticket(flat, compute)
        tickets.append(ticket)
        return ticket

    def unpack(ticket: object) -> torch.Tensor:
        return store.wait(ticket).view(torch.float32)  # type: ignore[arg-type]

    side.wait_stream(compute)
    with torch.cuda.stream(side), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = x * x * x
    compute.wait_stream(side)
    loss = y.sum()
    store.send(tickets)
    for ticket in tickets:
        store.release(ticket)
    del y
    delayed(store.lanes.back_stream, SLEEP)()
    store.fetch(tickets)
    del ticket
    tickets.clear()  # the graph has them
    loss.backward()
    reused = poison()
    torch.cuda.synchronize()
    assert torch.equal(x.grad, plain) and reused  # type: ignore[arg-type]


def test_tickets_of_a_closed_store_stay_valid(store: HostStore) -> None:
    """Detached between forward and backward: one ticket in each state; slabs die with the last ticket, after its copy."""
    sources = [fresh() for _ in range(4)]
    truth = [source.clone() for source in sources]
    tickets = [store.new_ticket(source, store.lanes.compute_stream()) for source in sources]
    del sources
    store.send(tickets[1:])
    for ticket in tickets[2:]:
        store.release(ticket)
    store.fetch(tickets[3:])
    assert [t.state.name for t in tickets] == ["UNSENT", "LEAVING", "ON_HOST", "RETURNING"]
    store.close()
    store.send(tickets)
    for ticket in tickets:
        store.release(ticket)
    assert store.pool.reserved_bytes == 0
    delayed(store.lanes.back_stream, SLEEP)()
    bytes_ = [store.wait(ticket) for ticket in tickets]
    del tickets, ticket  # page-locked memory goes with them: not before the copies from it are over
    host = [torch.full((NBYTES,), 0xFF, dtype=torch.uint8) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(bytes_, truth, strict=True)) and host


@pytest.mark.parametrize("when", ["unsent", "leaving", "on the host"])
def test_a_storage_that_an_engine_empties(store: HostStore, when: str) -> None:
    weight = fresh()
    truth, storage = weight.clone(), weight.untyped_storage()
    ticket = store.new_ticket(weight, store.lanes.compute_stream())
    if when != "unsent":
        delayed(store.lanes.out_stream, SLEEP)()
        store.send([ticket])
    if when == "on the host":
        store.release(ticket)
    storage.resize_(0)
    reused = poison()
    store.send([ticket])
    store.release(ticket)
    assert ticket.state is (TicketState.ON_HOST if when == "on the host" else TicketState.ON_DEVICE)
    if when != "on the host":
        with pytest.raises(RuntimeError, match="resized after the forward pass"):
            store.wait(ticket)
    storage.resize_(NBYTES)
    weight.copy_(truth)
    assert torch.equal(store.wait(ticket), truth)
    del ticket, reused
    poison_free_blocks(store)
    assert torch.equal(weight, truth) and used_bytes(store.pool) == 0


def test_slots_that_came_back_are_not_read(store: HostStore) -> None:
    """Three steps of tickets that die in each state, with NaN in each free block between them."""
    for _ in range(3):
        sources = [fresh() for _ in range(6)]
        truth = [source.clone() for source in sources]
        tickets = [store.new_ticket(source, store.lanes.compute_stream()) for source in sources]
        del sources
        store.send(tickets[1:])
        for ticket in tickets[2:]:
            store.release(ticket)
        store.fetch(tickets[3:4])
        del tickets[0], tickets[0]  # held and leaving
        poison_free_blocks(store)
        store.fetch(tickets)
        for ticket, bytes_ in zip(tickets, truth[2:], strict=True):
            assert torch.equal(store.wait(ticket), bytes_)
        del tickets, ticket
        poison_free_blocks(store)
    assert used_bytes(store.pool) == 0


def test_a_ticket_from_before_a_capture_may_die_within_it(store: HostStore) -> None:
    before = sent(store, fresh())
    store.synchronize()
    x = torch.ones(1024, device="cuda:0")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        y = x + 1
        del before
        graph.capture_end()
    store.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x + 1)
