"""HostStore, HostPool and Ledger on a CPU: bytes come back, states are checked, blocks never share a byte."""

import random
import resource
import weakref
from types import SimpleNamespace

import pytest
import torch

from forebay.memory.host_store import HostBlock, HostPool, HostStore, Ledger, TicketState
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
    assert store.pool.reserved_bytes == 0


@pytest.mark.parametrize("emptied", ["unsent", "leaving", "leaving, filled again"])
def test_a_storage_that_an_engine_empties_stays_with_the_engine(emptied: str) -> None:
    """As FSDP1 does with unsharded weights: freed after forward, filled again before backward."""
    store = HostStore(CPU)
    weight = torch.arange(1024, dtype=torch.uint8)
    truth, storage = weight.clone(), weight.untyped_storage()
    ticket, other = store.new_ticket(weight, None), store.new_ticket(torch.ones(64, dtype=torch.uint8), None)
    if emptied != "unsent":
        store.send([ticket])
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


def test_a_storage_that_is_emptied_after_its_bytes_have_left_comes_back() -> None:
    store = HostStore(CPU)
    weight = torch.arange(1024, dtype=torch.uint8)
    truth = weight.clone()
    ticket = sent(store, weight)
    store.release(ticket)
    weight.untyped_storage().resize_(0)
    assert torch.equal(store.wait(ticket), truth)


def test_a_ledger_counts_the_living_and_does_not_grow_with_the_dead() -> None:
    ledger, store = Ledger(), HostStore(CPU)
    kept = [store.new_ticket(fresh(nbytes=10), None) for _ in range(300)]
    for ticket in kept:
        ledger.enter(ticket, "a", 0)
    for _ in range(10_000):
        ledger.enter(store.new_ticket(kept[0].device_bytes[:1], None), "b", 1)  # type: ignore[index]
    assert ledger.live_tickets == 300 and ledger.by_region() == {"a": 3000}
    assert len(ledger._entries) <= 2 * 300 + 256
    store.send(kept[:100])
    for ticket in kept[:100]:
        store.release(ticket)
    assert (ledger.live_bytes, ledger.device_bytes) == (3000, 2000)
    kept.clear()
    del ticket
    assert ledger.live_tickets == 0


# --- the pool


def give_all(pool: HostPool, blocks: list[HostBlock]) -> None:
    for block in blocks:
        pool.give(block)


def place(block: HostBlock) -> tuple[int, int]:
    return id(block.slab), block.start


def test_slots_have_the_exact_size_and_the_same_sizes_need_no_new_slab() -> None:
    pool = HostPool(pin=False)
    sizes = (1, 511, 512, 513, 5000, 70_000, 5000, 1_000_000)
    for _ in range(3):
        blocks = [pool.take(n) for n in sizes]
        reserved = pool.reserved_bytes
        assert tuple(block.bytes_.numel() for block in blocks) == sizes
        give_all(pool, blocks[::-1])
    assert pool.reserved_bytes == reserved <= sum(sizes) + len(sizes) * 512 and used_bytes(pool) == 0


def test_random_takes_and_gives_never_share_a_byte() -> None:
    chance = random.Random(3)
    pool = HostPool(pin=False)
    out: list[tuple[HostBlock, int]] = []
    for round_ in range(3000):
        if out and chance.random() < 0.5:
            block, mark = out.pop(chance.randrange(len(out)))
            assert bool((block.bytes_ == mark).all())
            pool.give(block)
        else:
            block, mark = pool.take(chance.choice([0, 1, 100, 513, 4096, 20_000])), round_ % 256
            block.bytes_.fill_(mark)
            out.append((block, mark))
    assert all(bool((block.bytes_ == mark).all()) for block, mark in out)
    give_all(pool, [block for block, _ in out])
    assert used_bytes(pool) == 0


def test_a_block_that_came_back_goes_out_again_as_it_was() -> None:
    pool = HostPool(pin=False)
    blocks = [pool.take(3000) for _ in range(6)]
    kept = blocks.pop(2)
    places = {place(block) for block in blocks}
    give_all(pool, blocks)
    again = [pool.take(3000) for _ in range(5)]
    assert {place(block) for block in again} == places and place(kept) not in places, "one place, two blocks"


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


def test_slots_outlive_a_closed_pool() -> None:
    pool = HostPool(pin=False)
    blocks = [pool.take(64) for _ in range(3)]
    blocks[0].bytes_.copy_(torch.arange(64, dtype=torch.uint8))
    pool.give(blocks[1])
    pool.close()
    pool.give(blocks[2])
    assert not pool._returned and not blocks[2].slab.in_pool and pool.reserved_bytes == 0
    assert torch.equal(blocks[0].bytes_, torch.arange(64, dtype=torch.uint8))
