"""Sums and reductions of an engine's embedding and head, in bytes counted by hand: sums are 256 MiB, shards' gradients half."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forebay.estimate import fsdp
from forebay.estimate.allocator import GRADIENTS, Block, CachingAllocator
from forebay.estimate.fsdp import (
    FsdpLifecycle,
    GroupParam,
    ParamGroup,
    PersistentState,
    UnshardedLifecycle,
    bucket_bytes,
)
from forebay.estimate.state import Sharing

MIB = 1 << 20
ELEMENTS = 64 << 20  # of embedding and head each
TWO = Sharing(data=2, sharded=True, parameter=4, compute=2, summed=4, engine=True, pp=2)


def ends(*names: str, late: bool = True, tied: bool = False) -> tuple[CachingAllocator, UnshardedLifecycle]:
    groups = [ParamGroup(-1, False, 2, (GroupParam(name, name, ELEMENTS // 2, ELEMENTS, ELEMENTS),)) for name in names]
    allocator = CachingAllocator()
    return allocator, UnshardedLifecycle(allocator, groups, TWO, "compute", late=late, keep=True, tied=tied)


def step(allocator: CachingAllocator, params: UnshardedLifecycle) -> list[int]:
    """MiB beside gathered parameters: after `begin_step`, after `end_step`, at the end, and at the reduction's peak."""
    params.gather()
    before, levels = allocator.allocated, []
    params.begin_step()
    levels.append(allocator.allocated)
    params.end_step()
    levels.append(allocator.allocated)
    allocator.take_peak()
    params.reduce([], 16 * MIB)
    params.finish()
    levels += [allocator.allocated, allocator.peak_allocated]
    params.zero_grad()
    return [(level - before) // MIB for level in levels]


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        # The embedding's sum reuses the memory of the head's: one sum is there at a time, and it is sent without a copy.
        (("embedding", "head"), {}, [256, 256, 2 * 128, 256 + 2 * 128]),
        (("head",), {}, [256, 256, 128, 256 + 128]),
        (("embedding",), {}, [0, 0, 128, 256 + 128]),
        # Both sums from the beginning; the first shard's gradient beside them.
        (("embedding", "head"), {"late": False}, [512, 512, 2 * 128, 512 + 128]),
        # Tied: the head's sum from the beginning; the embedding's too, or it is made, beside a microbatch's rows, when reduced.
        (("embedding",), {"tied": True}, [256, 256, 128, 256 + 256 + 16]),
        (("embedding",), {"tied": True, "late": False}, [512, 256, 128, 256 + 128]),
    ],
)
def test_sums_of_embedding_and_head(names: tuple[str, ...], options: dict[str, bool], expected: list[int]) -> None:
    allocator, params = ends(*names, **options)
    assert [step(allocator, params) for _ in range(2)] == [expected] * 2


def test_reductions_of_a_cuda_graph_reuse_the_memory_of_its_activations() -> None:
    """The graph has the head's sum and 512 MiB of activations: room for the 2 x 128 of both shards and for what is gathered."""
    allocator, params = ends("embedding", "head")
    params.gather()
    gathered = allocator.allocated
    allocator.begin_graph()
    params.begin_step()
    allocator.free(allocator.malloc(512 * MIB, "compute"))
    params.end_step()
    params.hold()
    captured = allocator.reserved
    params.reduce([], 16 * MIB)
    allocator.end_graph()
    params.finish()
    assert allocator.reserved == captured and allocator.allocated - gathered == (256 + 2 * 128) * MIB
    params.zero_grad()
    assert allocator.allocated - gathered == 256 * MIB  # the head's sum is the graph's


@pytest.mark.parametrize("dtype", [4, 2])
@pytest.mark.parametrize("processes", [2, 1])
def test_replicas_all_reduce_what_their_shards_have_reduced(processes: int, dtype: int) -> None:
    """A weight of 64 MiB in fp32, two microbatches: each is reduced into a partial sum in fp32, and the last one is all-reduced.

    If it is cast then, FSDP2 keeps it beside its copy until the end of the backward.
    """
    group = ParamGroup(0, False, processes, (GroupParam("w", "", 16 * MIB // processes, 16 * MIB, 16 * MIB),))
    sharing = Sharing(data=processes, replicate=2, sharded=True, parameter=dtype, compute=2, summed=4, sums=False)
    allocator = CachingAllocator()
    params = FsdpLifecycle(allocator, [group], sharing, "compute")
    shard, held = 64 // processes, []
    for last in (False, True):
        params.enter(0, True, True)
        params.keeps(0, "w", allocator.malloc(32 * MIB, "compute"))
        params.leave(0, False, True, last)
        params._reshard(0)
        held.append(allocator.allocated // MIB)
    kept = 0 if dtype == 4 else 64 // processes
    assert held == [64 + shard, 64 + shard * dtype // 4 + kept]  # what was sent stays until the next reduction
    params.end_step()
    assert allocator.allocated == shard * dtype // 4 * MIB


def test_an_engines_replicas_reduce_in_place() -> None:
    """Of one process each: a sum becomes the gradient where it is."""
    group = ParamGroup(-1, False, 1, (GroupParam("head", "head", ELEMENTS, ELEMENTS, ELEMENTS),))
    allocator = CachingAllocator()
    sharing = Sharing(replicate=2, sharded=True, parameter=4, compute=2, summed=4, engine=True, pp=2)
    params = UnshardedLifecycle(allocator, [group], sharing, "compute", late=False, keep=True)
    assert [step(allocator, params) for _ in range(2)] == [[256, 256, 256, 256]] * 2


@pytest.mark.parametrize(("processes", "weights"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_resharded_experts_are_gathered_for_each_use(processes: int, weights: int) -> None:
    """Two layers' experts of 1 MiB in bf16; one is there at a time, after the first gathering too. One process casts them
    in one pass, and a single weight comes to where it lives; two processes need what arrives of several besides."""
    size = (1 << 19) // weights
    experts = tuple(GroupParam(str(n), "", size // processes, size, size) for n in range(weights))
    groups = [ParamGroup(n, True, processes, experts) for n in range(2)]
    sharing = Sharing(
        data=processes, sharded=True, parameter=4, compute=2, summed=2, engine=True, reshard=True, apart=True
    )
    allocator = CachingAllocator()
    params = UnshardedLifecycle(allocator, groups, sharing, "compute", late=False, keep=True)
    peaks = []

    def peak(run: Callable[[], None]) -> None:
        allocator.take_peak()
        run()
        peaks.append(sum(allocator.take_peak()) // MIB)

    peak(params.gather)
    assert allocator.allocated == 0
    peak(params.gather)
    for place in range(2):
        peak(partial(params.enter_experts, place, False))
        assert allocator.allocated == MIB
        params.leave_experts(place, False, False)
    first = 1 if (processes, weights) == (1, 2) else 2  # a process alone casts one by one at first
    later = 2 if (processes, weights) == (2, 2) else 1
    assert peaks == [first, 0, later, later]


def test_a_reduction_holds_the_last_gradient_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 2, 4 and 8 MiB in bf16, sent in 28 MiB of fp32. `chunk_cat` takes 8 bytes for 2 KiB of the half that stays; then
    the last but one is freed first, and the last one after the reduced 14 MiB are there."""
    sizes = {"a": MIB, "b": 2 * MIB, "c": 4 * MIB}
    params = tuple(GroupParam(name, "", size // 2, size, size) for name, size in sizes.items())
    sharing = Sharing(data=2, sharded=True, parameter=4, compute=2, summed=4, sums=False)
    allocator = CachingAllocator()
    params_of = FsdpLifecycle(allocator, [ParamGroup(0, False, 2, params)], sharing, "compute")
    for param in params:
        params_of.keeps(0, param.name, allocator.malloc(2 * param.whole, "compute"))
    events: list[float] = []
    malloc, free = allocator.malloc, allocator.free

    def noted_malloc(size: int, *more: Any) -> Block:
        events.append(size / MIB)
        return malloc(size, *more)

    def noted_free(block: Block) -> None:
        events.append(-block.size / MIB)
        free(block)

    monkeypatch.setattr(allocator, "malloc", noted_malloc)
    monkeypatch.setattr(allocator, "free", noted_free)
    params_of.leave(0, False, True, True)
    assert events == [28, 14 / 256, -14 / 256, -4, -2, 14, -8]


def test_what_arrived_is_held_until_the_next_layer_is_copied_out() -> None:
    """Layers of 2 MiB in bf16: in a forward, the last one's buffer, this one's, and its parameters."""
    size = 1 << 20
    groups = [ParamGroup(n, False, 2, (GroupParam("w", "", size // 2, size, size),)) for n in range(2)]
    sharing = Sharing(data=2, sharded=True, parameter=4, compute=2, summed=4)
    allocator = CachingAllocator()
    params = FsdpLifecycle(allocator, groups, sharing, "compute")
    for place in range(2):
        params.enter(place, True, False)
        params.leave(place, True, False, True)
    assert allocator.peak_allocated == (2 + 2 + 2) * MIB


def test_experts_of_their_own_module_are_whole_between_the_dispatchers_transfers_only() -> None:
    """EP 2 on two processes: 1 MiB of experts in bf16, whose gradient is cast to fp32 when their own backward ends."""
    size = 1 << 19
    groups = [
        ParamGroup(0, name == "experts", processes, (GroupParam(name, "", size // processes, size, size),))
        for name, processes in (("attention", 2), ("experts", 1))
    ]
    sharing = Sharing(data=2, ep=2, sharded=True, parameter=4, compute=2, summed=4, reshard=True, apart=True)
    allocator = CachingAllocator()
    params = FsdpLifecycle(allocator, groups, sharing, "compute")
    for backward in (False, True):
        held = []
        params.enter(0, True, backward)
        held.append(sorted(params._whole))
        params.enter_experts(0, backward)
        held.append(sorted(params._whole))
        if backward:
            params.keeps(0, "experts", allocator.malloc(MIB, "compute"))
        params.leave_experts(0, backward, True)
        held.append(sorted(params._whole))
        assert held == [[0], [0, 1], [0]]
        if not backward:
            params.leave(0, True, False, True)
            assert not params._whole
    assert [block.size for block in params._sums[1]] == [2 * MIB]


def test_a_graph_keeps_the_heads_sum_while_both_ends_are_reduced() -> None:
    """The group's sums in its order: 256 MiB of the embedding are freed when they were copied; the head's are the graph's."""
    names = ("embedding", "head")
    group = ParamGroup(-1, False, 2, tuple(GroupParam(name, name, ELEMENTS // 2, ELEMENTS, ELEMENTS) for name in names))
    allocator = CachingAllocator()
    params = UnshardedLifecycle(allocator, [group], TWO, "compute", late=True, keep=True)
    params.gather()
    before = allocator.allocated
    params.begin_step()
    params.end_step()
    params.hold()
    allocator.take_peak()
    params.reduce([], MIB)
    assert allocator.peak_allocated - before == (256 + 256 + 512 + 1) * MIB


@pytest.mark.parametrize("dtype", [2, 4])
def test_gradients_of_later_microbatches_are_added_as_they_are_made(dtype: int) -> None:
    """Two of 2 and 4 MiB in bf16. Sums in bf16 are the first microbatch's gradients, to which autograd adds; sums in fp32 are
    made after a layer's backward, until which its gradients wait for each other."""
    params = tuple(GroupParam(name, "", size, size, size) for name, size in (("a", 1 << 20), ("b", 2 << 20)))
    sharing = Sharing(sharded=True, parameter=4, compute=2, summed=dtype)
    allocator = CachingAllocator()
    params_of = FsdpLifecycle(allocator, [ParamGroup(0, False, 1, params)], sharing, "compute")
    kept = []
    for last in (False, True):
        held = allocator.allocated
        for name, size in (("a", 2 * MIB), ("b", 4 * MIB)):
            block = allocator.malloc(size, "compute")
            if not params_of.keeps(0, name, block):
                allocator.free(block)
        kept.append(allocator.allocated - held)
        params_of.leave(0, False, True, last)
        assert allocator.allocated == dtype * 3 * MIB
    assert kept == [6 * MIB, 0 if dtype == 2 else 6 * MIB]


def test_frozen_weights_are_gathered_and_not_reduced() -> None:
    """A frozen weight of 128 MiB in bf16 beside a trained one of 8 MiB in fp32, both gathered in bf16 by two processes."""
    frozen = GroupParam("w", "", 32 << 20, 64 << 20, 64 << 20, frozen=True)
    group = ParamGroup(0, False, 2, (frozen, GroupParam("a", "", 1 << 20, 2 << 20, 2 << 20)))
    sharing = Sharing(data=2, sharded=True, parameter=4, compute=2, summed=2, frozen=2, sums=False)
    allocator = CachingAllocator()
    params = FsdpLifecycle(allocator, [group], sharing, "compute")
    params.enter(0, True, True)
    assert allocator.allocated == (128 + 4) * MIB
    params.keeps(0, "a", allocator.malloc(4 * MIB, "compute"))
    allocator.take_peak()
    params.leave(0, False, True, True)
    assert allocator.peak_allocated == (128 + 4 + 4) * MIB
    params.end_step()
    assert allocator.allocated == 4 * MIB  # of the trained weight's shard, in fp32


def test_gradients_that_nobody_shares_are_cast_by_the_update_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 2 MiB in bf16 are the gradients; casts of 4 MiB are made in parts of 8, vectors after matrices."""
    monkeypatch.setattr(fsdp, "CAST_BYTES", 8 * MIB)
    size = 1 << 20
    ends = ParamGroup(-1, False, 1, (GroupParam("head", "head", size, size, size),))
    layers = [ParamGroup(n, False, 1, (GroupParam("w", "", size, size, size),)) for n in range(3)]
    norm = ParamGroup(3, False, 1, (GroupParam("norm", "", size // 4, size // 4, size // 4, vector=True),))
    shared = ParamGroup(4, False, 2, (GroupParam("v", "", size, 2 * size, 2 * size),))
    alone = Sharing(sharded=True, parameter=4, compute=2, summed=2)
    groups = [ends, *layers, norm, shared]
    allocator = CachingAllocator()
    weights = PersistentState(allocator, groups, alone)
    params = FsdpLifecycle(allocator, groups, alone, "compute")
    assert [params.is_late(n) for n in range(6)] == [True] * 5 + [False]
    for n in range(3):
        params.keeps(n, "w", allocator.malloc(2 * MIB, "compute"))
        params.leave(n, False, True, True)
    before = allocator.allocated
    params.end_step()
    assert allocator.allocated == before  # handed over as they are
    sizes: list[int] = []
    malloc = allocator.malloc
    monkeypatch.setattr(allocator, "malloc", lambda size, *more: (sizes.append(size // MIB), malloc(size, *more))[1])
    weights.optimize(params.is_late)
    moments = [0, 4, 4]
    assert sizes == [*moments, *(2 * [*moments, *moments, 4, 4]), 0, 1, 1, 1]
    sizes.clear()
    allocator.take_peak()
    before = allocator.allocated
    weights.optimize(params.is_late)
    assert sizes == [4, 4, 4, 4, 1] and allocator.peak_allocated - before == 8 * MIB
    assert allocator.allocated == before


@pytest.mark.parametrize("freezes", [False, True])
def test_buckets_are_those_of_ddp(freezes: bool) -> None:
    """Each as large, and all of them there before the first step, beside the parameters and besides their gradients."""
    draw = random.Random(freezes)
    weights = [nn.Parameter(torch.zeros(draw.choice((7, 1000, 300_000, 3 << 20, 20 << 20)))) for _ in range(40)]
    for weight in weights if freezes else ():
        weight.requires_grad = draw.random() < 0.5
    model = nn.Module()
    model.weights = nn.ParameterList(weights)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        really = [bucket.buffer().nbytes for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
    finally:
        dist.destroy_process_group()
    assert sorted(really) == sorted(bucket_bytes([w.nbytes for w in weights if w.requires_grad]))
    whole = [GroupParam(str(n), "", *[w.numel()] * 3, True, not w.requires_grad) for n, w in enumerate(weights)]
    allocator = CachingAllocator(1)
    PersistentState(allocator, [ParamGroup(0, False, 1, tuple(whole))], Sharing(replicate=2, random=False))
    assert allocator.by_role[GRADIENTS] == sum(really) == sum(w.nbytes for w in weights if w.requires_grad)
    assert allocator.allocated == sum(really) + sum(w.nbytes for w in weights)
