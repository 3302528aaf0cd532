"""HostStore: bytes come back whatever happens between, and a store does not grow."""

import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from forebay.memory import host_pool
from forebay.memory.host_store import HostStore, Traffic
from forebay.memory.host_ticket import TicketState
from tests.helpers import sent, used_bytes

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def fresh(device: str = "cpu", nbytes: int = 4096) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def test_rates_count_what_was_copied_and_plans_count_storages() -> None:
    traffic = Traffic()
    for size, copied, milliseconds in ((400, 200, 1.0), (800, 400, 2.0), (100, 50, None)):  # the last one was not timed
        traffic.add(size, copied, mock.Mock(milliseconds=lambda taken=milliseconds: taken))
    assert traffic.rate(slice(None)) == pytest.approx(400e3) and traffic.rate(slice(2, None)) is None
    assert traffic.measure() == (650, pytest.approx(200e3))


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


def test_a_thread_sends_while_another_one_trims() -> None:
    """As at the end of a step, of which a call in another thread is no part any more. A block is not given out twice."""
    store = HostStore(torch.device("cpu"))
    first, other = (sent(store, torch.full((4096,), n, dtype=torch.uint8)) for n in (1, 9))
    store.release(other)
    del first  # its block is free
    second = store.new_ticket(torch.full((4096,), 2, dtype=torch.uint8), None)
    sender = threading.Thread(target=store.send, args=([second],))
    give = host_pool._Slab.give

    def slowly(slab: Any, start: int, length: int) -> None:
        if sender.ident is None:
            sender.start()
            sender.join(0.5)
        give(slab, start, length)

    with mock.patch.object(host_pool._Slab, "give", slowly):
        store.trim()
    sender.join()
    store.release(second)
    third = sent(store, torch.full((4096,), 3, dtype=torch.uint8))
    store.release(third)
    assert [int(store.wait(ticket)[0]) for ticket in (second, third)] == [2, 3]
