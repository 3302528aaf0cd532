"""HostStore: bytes come back, states are checked, and the two known races do not happen."""

import gc

import pytest
import torch

from forebay.memory.host_store import HostStore, Ticket, TicketState
from tests.helpers import delayed, used_bytes

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def fresh(device: str, nbytes: int = 1 << 22) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip_returns_the_bytes(device: str) -> None:
    store = HostStore(torch.device(device))
    source = fresh(device)
    truth = source.clone()
    ticket = store.put(source)
    store.settle(ticket)
    assert ticket.state is TicketState.ON_HOST and ticket.device_bytes is None
    source.fill_(0xAA)
    store.fetch([ticket])
    assert torch.equal(store.wait(ticket), truth)
    assert torch.equal(store.wait(ticket), truth), "waiting twice is allowed"
    assert store.outbound.nbytes == store.inbound.nbytes == truth.numel()
    del ticket
    gc.collect()
    assert store.live_tickets == 0 and used_bytes(store.pool) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_backward_before_the_copy_is_over_takes_the_tensor_back(device: str) -> None:
    store = HostStore(torch.device(device))
    source = fresh(device)
    ticket = store.put(source)
    store.fetch([ticket])
    assert ticket.state is TicketState.LEAVING
    assert store.wait(ticket).data_ptr() == source.data_ptr()
    store.settle(ticket)
    assert ticket.state is TicketState.ON_DEVICE and store.inbound.nbytes == 0


def test_a_wrong_step_names_both_states() -> None:
    ticket = Ticket(4, None, TicketState.ON_HOST)
    with pytest.raises(RuntimeError, match="from on_host to on_device"):
        ticket.step(TicketState.ON_DEVICE)


def test_tickets_outlive_a_closed_store() -> None:
    store = HostStore(torch.device("cpu"))
    source = fresh("cpu", 4096)
    ticket = store.put(source)
    store.settle(ticket)
    store.close()
    assert torch.equal(store.wait(ticket), source)


def test_a_closed_store_takes_no_more_host_memory() -> None:
    """A model is detached between forward and backward: what has not left stays, what has left comes back."""
    store = HostStore(torch.device("cpu"))
    held, leaving, away = (store.hold(fresh("cpu", 4096), None) for _ in range(3))
    truth = [ticket.device_bytes.clone() for ticket in (held, leaving, away)]
    store.send([leaving, away])
    store.settle(away)
    store.close()
    store.send([held])
    store.settle(held)
    store.settle(leaving)
    store.fetch([held, leaving, away])
    for ticket, bytes_ in zip((held, leaving, away), truth, strict=True):
        assert torch.equal(store.wait(ticket), bytes_)
    assert store.pool.reserved_bytes == 0
    del held, leaving, away, ticket
    assert store.live_tickets == store.live_bytes == 0


@pytest.mark.parametrize("emptied", ["held", "leaving", "leaving, filled again"])
def test_a_storage_that_an_engine_empties_stays_with_the_engine(emptied: str) -> None:
    """As FSDP1 does with gathered weights: freed after forward, filled again before backward."""
    store = HostStore(torch.device("cpu"))
    weight = torch.arange(1024, dtype=torch.uint8)
    truth, storage = weight.clone(), weight.untyped_storage()
    ticket, other = store.hold(weight, None), store.hold(torch.ones(64, dtype=torch.uint8), None)
    if emptied != "held":
        store.send([ticket])
    taken = torch.empty(1024, dtype=torch.uint8)  # before it is freed: memory may not be given out again at one address
    storage.resize_(0)
    if emptied == "leaving, filled again":
        keep = [torch.empty(1024, dtype=torch.uint8) for _ in range(8)]
        storage.resize_(1024)
        weight.copy_(truth)
        del keep
    store.send([ticket, other])
    store.settle(ticket)
    if emptied == "leaving, filled again" and ticket.state is TicketState.ON_HOST:
        pytest.skip("the allocator gave the same address")
    assert ticket.state is TicketState.ON_DEVICE and other.state is TicketState.LEAVING and taken.numel()
    assert ticket.device_bytes is not None and ticket.device_bytes.untyped_storage().data_ptr() == storage.data_ptr()
    if emptied != "leaving, filled again":
        store.recall(ticket)  # ahead of time: no error yet
        with pytest.raises(RuntimeError, match="saved storage of 1024 bytes now has 0"):
            store.wait(ticket)
        storage.resize_(1024)
        weight.copy_(truth)
    assert torch.equal(store.wait(ticket), truth)
    del ticket, other
    assert store.live_tickets == 0 and used_bytes(store.pool) == 0


def test_a_storage_that_is_emptied_when_its_bytes_have_left_comes_back() -> None:
    store = HostStore(torch.device("cpu"))
    weight = torch.arange(1024, dtype=torch.uint8)
    truth = weight.clone()
    ticket = store.put(weight)
    store.settle(ticket)
    weight.untyped_storage().resize_(0)
    assert torch.equal(store.wait(ticket), truth)


@pytest.mark.gpu
def test_a_slow_copy_out_is_not_overtaken() -> None:
    """The copy lane sleeps while compute goes on to overwrite the memory it is to read, and to fetch it again."""
    store = HostStore(torch.device("cuda:0"))
    source = fresh("cuda:0")
    truth = source.clone()
    delayed(store.lanes.out_stream, 50_000_000)()
    ticket = store.put(source)
    del source
    store.settle(ticket)
    poison = [torch.full((1 << 22,), 0x55, dtype=torch.uint8, device="cuda:0") for _ in range(4)]
    store.fetch([ticket])
    assert torch.equal(store.wait(ticket), truth)
    assert all(bool((p == 0x55).all()) for p in poison)


@pytest.mark.gpu
def test_a_slot_is_not_rewritten_under_a_slow_copy_back() -> None:
    store = HostStore(torch.device("cuda:0"))
    first, second = fresh("cuda:0"), fresh("cuda:0")
    truth = first.clone()
    ticket = store.put(first)
    del first
    store.settle(ticket)
    delayed(store.lanes.back_stream, 50_000_000)()
    store.fetch([ticket])
    returned = ticket.device_bytes
    place = ticket.slot.bytes_.data_ptr()
    del ticket  # the slot is free while the copy back from it has only been enqueued
    other = store.put(second)
    assert other.slot.bytes_.data_ptr() == place, "the test needs the same slot again"
    torch.cuda.synchronize()
    assert torch.equal(returned, truth)


@pytest.mark.gpu
def test_a_ticket_that_dies_while_returning_leaves_no_copy_behind() -> None:
    store = HostStore(torch.device("cuda:0"))
    ticket = store.put(fresh("cuda:0"))
    store.settle(ticket)
    delayed(store.lanes.back_stream, 50_000_000)()
    store.fetch([ticket])
    del ticket
    reused = torch.full((1 << 22,), 0x55, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    assert bool((reused == 0x55).all())
