"""Slots from slabs: never shared, exactly sized, merged when they come back."""

import random
import resource
from types import SimpleNamespace

import pytest
import torch

from forebay.memory.host_store import HostPool
from tests.helpers import used_bytes


def test_slots_have_the_exact_size_and_come_back() -> None:
    pool = HostPool(pin=False)
    slots = [pool.take(n) for n in (1, 511, 512, 513, 100_000)]
    assert [s.bytes_.numel() for s in slots] == [1, 511, 512, 513, 100_000]
    for slot in slots:
        pool.give(slot)
    assert used_bytes(pool) == 0
    pool.trim()
    assert pool.reserved_bytes == 0


def test_the_same_sizes_again_need_no_new_slab() -> None:
    pool = HostPool(pin=False)
    for _ in range(3):
        slots = [pool.take(n) for n in (5000, 70_000, 5000, 1_000_000)]
        reserved = pool.reserved_bytes
        for slot in reversed(slots):
            pool.give(slot)
    assert pool.reserved_bytes == reserved <= 5000 * 2 + 70_000 + 1_000_000 + 4 * 512


def test_random_takes_and_gives_never_share_a_byte() -> None:
    chance = random.Random(3)
    pool = HostPool(pin=False)
    out: list[tuple[object, int]] = []
    for round_ in range(3000):
        if out and chance.random() < 0.5:
            slot, mark = out.pop(chance.randrange(len(out)))
            assert bool((slot.bytes_ == mark).all())  # type: ignore[attr-defined]
            pool.give(slot)  # type: ignore[arg-type]
        else:
            slot, mark = pool.take(chance.choice([0, 1, 100, 513, 4096, 20_000])), round_ % 256
            slot.bytes_.fill_(mark)
            out.append((slot, mark))
    for slot, mark in out:
        assert bool((slot.bytes_ == mark).all())  # type: ignore[attr-defined]
        pool.give(slot)  # type: ignore[arg-type]
    assert used_bytes(pool) == 0


def test_a_slab_outlives_the_pool_while_a_slot_is_out() -> None:
    pool = HostPool(pin=False)
    slot = pool.take(64)
    slot.bytes_.copy_(torch.arange(64, dtype=torch.uint8))
    pool.close()
    assert torch.equal(slot.bytes_, torch.arange(64, dtype=torch.uint8))


def test_a_slot_that_came_back_goes_out_again_as_it_was() -> None:
    pool = HostPool(pin=False)
    slots = [pool.take(3000) for _ in range(6)]
    kept = slots.pop(2)
    places = {(id(slot.slab), slot.start) for slot in slots}
    for slot in slots:
        pool.give(slot)
    again = [pool.take(3000) for _ in range(5)]
    reserved = pool.reserved_bytes
    assert len({(id(s.slab), s.start) for s in again} | {(id(kept.slab), kept.start)}) == 6, "one place, two slots"
    assert {(id(s.slab), s.start) for s in again} == places
    for slot in [*again, kept]:
        pool.give(slot)
    pool.trim()
    assert pool.reserved_bytes == 0 and used_bytes(pool) == 0
    fresh = pool.take(3000)
    assert used_bytes(pool) == fresh.length and pool.reserved_bytes <= reserved


def test_only_slabs_that_a_cycle_used_are_spared() -> None:
    pool = HostPool(pin=False)
    for slot in [pool.take(3000) for _ in range(6)]:
        pool.give(slot)
    pool.restart()
    for _ in range(4):
        slots = [pool.take(3000), pool.take(2900)]  # the same length, rounded
        assert [slot.bytes_.numel() for slot in slots] == [3000, 2900]
        for slot in slots:
            pool.give(slot)
    pool.trim(spare_used=True)
    assert pool.reserved_bytes == 2 * 3072 and used_bytes(pool) == 0
    pool.restart()
    pool.trim(spare_used=True)
    assert pool.reserved_bytes == 0


@pytest.mark.parametrize(("limit", "said"), [(65536, "to 65536 bytes"), (resource.RLIM_INFINITY, "sets no limit here")])
def test_memory_that_is_not_page_locked_says_what_to_do(monkeypatch: pytest.MonkeyPatch, limit: int, said: str) -> None:
    codes = [0, 2]
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: codes.pop(0), cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    pool = HostPool(pin=True, small_slab=4096)
    slot = pool.take(4096)
    with pytest.raises(MemoryError) as refused:
        pool.take(10_000)
    for part in (
        "10240 bytes", "cudaErrorMemoryAllocation (2)", "already holds 4096 bytes", said, "ulimit -l unlimited",
        "memlock=-1", "offload less",
    ):  # fmt: skip
        assert part in str(refused.value)
    pool.give(slot)
    assert pool.reserved_bytes == 4096 and used_bytes(pool) == 0, "the refused memory is not counted"
    assert pool.take(4096).start == slot.start
    slot.slab.pinned = False  # it may outlive this test, and cudart


def test_a_slot_that_comes_back_after_the_pool_is_closed_frees_its_slab() -> None:
    pool = HostPool(pin=False)
    slots = [pool.take(512), pool.take(512)]
    slab = slots[0].slab
    pool.give(slots.pop())
    pool.close()
    pool.give(slots.pop())
    assert not pool._given and not slab.in_pool and pool.reserved_bytes == 0
