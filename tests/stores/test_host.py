"""HostStore: bytes come back, states are checked, and the two known races do not happen."""

import gc

import pytest
import torch

from forebay.stores.base import State, Ticket
from forebay.stores.host import HostStore
from forebay.stores.streams import delayed

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
    assert ticket.state is State.ON_HOST and ticket.device_bytes is None
    source.fill_(0xAA)
    store.fetch([ticket])
    assert torch.equal(store.wait(ticket), truth)
    assert torch.equal(store.wait(ticket), truth), "waiting twice is allowed"
    assert store.outbound.nbytes == store.inbound.nbytes == truth.numel()
    del ticket
    gc.collect()
    assert store.live_tickets == 0 and store.pool.used_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_backward_before_the_copy_is_over_takes_the_tensor_back(device: str) -> None:
    store = HostStore(torch.device(device))
    source = fresh(device)
    ticket = store.put(source)
    store.fetch([ticket])
    assert ticket.state is State.LEAVING
    assert store.wait(ticket).data_ptr() == source.data_ptr()
    store.settle(ticket)
    assert ticket.state is State.ON_DEVICE and store.inbound.nbytes == 0


def test_a_wrong_step_names_both_states() -> None:
    ticket = Ticket(4, None, State.ON_HOST)
    with pytest.raises(RuntimeError, match="from on_host to on_device"):
        ticket.step(State.ON_DEVICE)


def test_tickets_outlive_a_closed_store() -> None:
    store = HostStore(torch.device("cpu"))
    source = fresh("cpu", 4096)
    ticket = store.put(source)
    store.settle(ticket)
    store.close()
    assert torch.equal(store.wait(ticket), source)


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
