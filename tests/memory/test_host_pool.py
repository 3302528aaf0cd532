"""HostPool: blocks have the exact size, never share a byte, and cost no new memory when the same sizes are asked for again."""

import random
import resource
from types import SimpleNamespace

import pytest
import torch

from forebay.memory.host_pool import HostBlock, HostPool
from tests.helpers import used_bytes


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


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_out_keep_their_bytes_and_those_that_came_back_are_found_again(seed: int) -> None:
    chance = random.Random(seed)
    pool = HostPool(pin=False)
    out: dict[int, HostBlock] = {}
    for number in range(250):
        if out and chance.random() < 0.5:
            value = chance.choice([*out])
            block = out.pop(value)
            assert (block.bytes_ == value).all()
            pool.give(block)
        else:
            out[number] = pool.take(chance.choice((600, 5000, chance.randint(1, 40_000))))
            out[number].bytes_.fill_(number)
        assert used_bytes(pool) == sum(block.length for block in out.values())
    give_all(pool, [*out.values()])
    reserved = pool.reserved_bytes
    whole = [pool.take(size) for size in {slab.memory.numel() for slab in pool._slabs}]
    assert pool.reserved_bytes == reserved and used_bytes(pool) == sum(block.length for block in whole)


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


@pytest.mark.gpu
def test_a_refused_page_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to register memory twice. Its error would be reported by the next kernel that is launched."""
    pool = HostPool(pin=True, small_slab=0)
    block = pool.take(1 << 20)
    monkeypatch.setattr("forebay.memory.host_pool.torch.empty", lambda *_, **__: block.slab.memory)
    with pytest.raises(MemoryError, match=r"cudaErrorHostMemoryAlreadyRegistered \(712\)"):
        pool.take(1 << 20)
    monkeypatch.undo()
    assert int(torch.arange(3, device="cuda:0").sum()) == 3
