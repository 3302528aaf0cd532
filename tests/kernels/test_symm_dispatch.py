"""Rows between ranks through each other's memory. One process runs all ranks, one after another, without waiting."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.permute import combine_rows
from forebay.kernels.symm_dispatch import (
    _empty_sums,
    _launch_rows,
    _launch_sums,
    dispatch_reference,
    receive_tokens,
    send_tokens,
)
from forebay.kernels.symm_mem import BEGUN, DONE, EPOCH, LISTS, TICKETS, PeerLayout, PeerMemory, read_counts
from tests.kernels.common import DEVICE, moved_on, strided, turned

LOCAL = 3  # experts of each rank


# The two halves of `exchange_values` and of `return_rows`: here all ranks fill before any rank drains.


def send_values(values: Tensor, peers: PeerMemory) -> None:
    _launch_rows(peers, fill=(values, None, None, None))


def receive_values(source: Tensor, starts: Tensor, width: int, dtype: torch.dtype, peers: PeerMemory) -> Tensor:
    out = torch.empty((source.shape[0], width), dtype=dtype, device=peers.base.device)
    _launch_rows(peers, drain=(out, None, None, source, starts))
    return out


def push_rows(rows: Tensor, narrow: Tensor | None, source: Tensor, starts: Tensor, peers: PeerMemory) -> None:
    _launch_sums(peers, rows, narrow, source, starts)


def sum_rows(
    rows: Tensor, narrow: Tensor | None, starts: Tensor, places: Tensor, init: Tensor | None, peers: PeerMemory
) -> tuple[Tensor, Tensor | None]:
    sums = _empty_sums(rows, narrow, places)
    _launch_sums(peers, rows, narrow, None, starts, drain=(places, init, *sums))
    return sums


class World:
    """P ranks in one process. `fill` and `drain` of an operation are called for all ranks in turn."""

    def __init__(self, ranks: int, tokens: int, slots: int, width: int, dtype: torch.dtype, programs: int = 3):
        self.layout = PeerLayout(ranks, tokens, slots, width * dtype.itemsize, chunk_bytes=512)
        memory = [torch.zeros(self.layout.total, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
        self.peers = [
            PeerMemory(
                own,
                torch.tensor([m.data_ptr() - own.data_ptr() for m in memory], device=DEVICE),
                torch.zeros(self.layout.state_size, dtype=torch.int64, device=DEVICE),
                rank,
                self.layout,
                programs=programs,
                meet=lambda: None,
            )
            for rank, own in enumerate(memory)
        ]

    def each(self, call: Callable[..., Any], *by_rank: Any) -> list[Any]:
        return [call(*(a[p.rank] for a in by_rank), p) for p in self.peers]

    def needs(self, rank: int) -> list[int]:
        at = self.layout.needs_at
        return self.peers[rank].base[at : at + 8 * self.layout.ranks].view(torch.int64).tolist()


def inputs(counts: list[int], k: int, width: int, dtype: torch.dtype, weights: torch.dtype, kind: str) -> list[Any]:
    """x, ids, weights by rank; "all to one": every slot is rank 0's; "none": no slot has an expert."""
    experts = LOCAL * len(counts)
    x = [torch.randn(t, width, device=DEVICE).to(dtype) for t in counts]
    ids = [torch.rand(t, max(experts, k), device=DEVICE).argsort(1)[:, :k] % experts for t in counts]
    if kind == "all to one":
        ids = [i % LOCAL for i in ids]
    if kind == "holes":
        ids = [i.masked_fill(torch.rand_like(i, dtype=torch.float32) < 0.4, -1) for i in ids]
    if kind == "none":
        ids = [torch.full_like(i, -1) for i in ids]
    return [x, ids, [torch.rand(t, k, device=DEVICE).to(weights) for t in counts]]


def dispatched(
    world: World, x: list[Tensor], ids: list[Tensor], weights: list[Tensor], capacity: int, slots: int
) -> Any:
    """places by rank, and what each rank received."""
    places = world.each(lambda *a: send_tokens(*a[:3], LOCAL, a[3]), x, ids, weights)
    received = world.each(
        lambda p: receive_tokens(capacity, slots, x[0].shape[1], x[0].dtype, weights[0].dtype, LOCAL, p)
    )
    return places, received


CASES = [
    # tokens of each rank, K, H, dtype, weights' dtype, ids, steps. A tile is 4096 words and up to 128 rows, lists go by 512.
    ([5, 7], 2, 16, torch.bfloat16, torch.float32, "random", 3),  # both halves, and the first again
    ([0, 0], 2, 16, torch.float16, torch.float32, "random", 1),
    ([1, 0, 0], 1, 24, torch.bfloat16, torch.bfloat16, "random", 1),
    ([6, 0, 9, 4], 3, 40, torch.float32, torch.float32, "holes", 1),
    ([3, 2, 4], 3, 2880, torch.bfloat16, torch.float16, "random", 1),
    ([3, 3], 8, 1408, torch.bfloat16, torch.float32, "random", 1),
    ([513, 2], 2, 8, torch.bfloat16, torch.float32, "random", 1),
    ([129, 3], 4, 8, torch.float32, torch.float32, "all to one", 1),
    ([5, 3], 2, 16, torch.bfloat16, torch.float32, "none", 1),
]
LARGE = [
    ([6, 0, 9, 4], 3, 40, torch.float32, torch.float32, "holes", 3),
    ([9, 8, 7], 3, 2880, torch.bfloat16, torch.float16, "random", 3),
    ([1025, 511], 2, 8, torch.bfloat16, torch.float32, "random", 3),
    ([127, 128, 129, 3], 4, 8, torch.float32, torch.float32, "all to one", 3),
]


@pytest.mark.parametrize(
    ("counts", "k", "width", "dtype", "weights", "kind", "steps"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)],
)
def test_rows_go_there_and_back(counts, k, width, dtype, weights, kind, steps) -> None:
    ranks, tokens_max = len(counts), max(max(counts), 1)
    world = World(ranks, tokens_max, k, width, dtype)
    for step in range(steps):
        x, ids, w = inputs(counts, k, width, dtype, weights, kind)
        places, received = dispatched(world, x, ids, w, ranks * tokens_max, ranks * tokens_max * k)
        for rank, (rows, local, row_weights, source, starts) in enumerate(received):
            wanted = dispatch_reference(x, ids, w, rank, LOCAL, tokens_max)
            n = wanted[0].shape[0]
            for got, want in zip((rows, local, row_weights, source), wanted, strict=True):
                assert torch.equal(got[:n], want)
            assert (local[n:] == -1).all() and (source[n:] == -1).all()
            assert starts[0] == 0 and starts[-1] == n
            senders = source[:n] // tokens_max
            assert torch.equal(starts.diff(), torch.bincount(senders, minlength=ranks).int())
            assert world.needs(rank) == [0] * ranks

        # Other rows on each rank, so that a wrong landing place shows.
        back = [torch.randn_like(r[0]) for r in received]
        thin = [torch.randn(r[2].shape, device=DEVICE).to(weights) for r in received]
        for r, b, t in zip(received, back, thin, strict=True):
            b[int(r[4][-1]) :] = t[int(r[4][-1]) :] = torch.nan  # unused rows are not read
        init = [torch.randn_like(t) for t in x] if step or steps == 1 else [None] * ranks
        world.each(lambda b, t, r, p: push_rows(b, t, r[3], r[4], p), back, thin, received)
        sums = world.each(lambda b, t, r, at, i, p: sum_rows(b, t, r[4], at, i, p), back, thin, received, places, init)
        for rank, (y, narrow) in enumerate(sums):
            assert_sum(y, whole_sum(back, received, rank, counts[rank], tokens_max, init[rank]))
            assert_sum(narrow, whole_sum(thin, received, rank, counts[rank], tokens_max, None))

        values = [torch.randn_like(t) for t in x]
        world.each(send_values, values)
        again = world.each(lambda r, p: receive_values(r[3], r[4], width, dtype, p), received)
        for rank, rows in enumerate(again):
            wanted = dispatch_reference(values, ids, w, rank, LOCAL, tokens_max)[0]
            assert torch.equal(rows[: wanted.shape[0]], wanted)
    for p in world.peers:
        assert p.state[EPOCH] == 3 * steps and p.state[BEGUN] == p.state[DONE] == 0
        assert not p.state[TICKETS:LISTS].any()


def whole_sum(
    rows: list[Tensor], received: list[Any], rank: int, n: int, tokens_max: int, init: Tensor | None
) -> Tensor:
    """combine_rows over all ranks' rows at once."""
    at = torch.full((n, len(rows)), -1, dtype=torch.int32, device=DEVICE)
    first = 0
    for p, (_, _, _, source, _) in enumerate(received):
        mine = (source >= 0) & (source // tokens_max == rank)
        at[(source[mine] % tokens_max).long(), p] = (first + mine.nonzero()[:, 0]).int()
        first += source.shape[0]
    return combine_rows(torch.cat(rows), at, init=init)


def assert_sum(got: Tensor, wanted: Tensor) -> None:
    # The interpreter cuts bf16 off where the GPU and torch round: one ulp, there alone.
    ulp = 2**-7 if got.dtype is torch.bfloat16 and DEVICE == "cpu" else 0.0
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=ulp)


def test_what_does_not_fit_is_left_out_and_told_to_all() -> None:
    world = World(2, 8, 2, 16, torch.float32)
    x, ids, w = inputs([8, 8], 2, 16, torch.float32, torch.float32, "all to one")
    ids = [i + LOCAL for i in ids]  # to rank 1, whose own rows come last
    places, received = dispatched(world, x, ids, w, 11, 11)
    rows, local, _, source, starts = received[1]
    wanted = dispatch_reference(x, ids, w, 1, LOCAL, 8)
    assert torch.equal(rows, wanted[0][:11]) and torch.equal(source, wanted[3][:11])
    assert torch.equal(local, wanted[1][:11])
    assert starts.tolist() == [0, 8, 11]
    assert world.needs(0) == world.needs(1) == [0, 32]

    # On the way back, what was left out is neither sent nor read.
    back = [torch.full((20, 16), torch.nan, device=DEVICE)[:11] for _ in range(2)]
    back[1][:] = 1
    world.each(lambda b, r, p: push_rows(b, None, r[3], r[4], p), back, received)
    sums = world.each(lambda b, r, at, p: sum_rows(b, None, r[4], at, None, p)[0], back, received, places)
    assert torch.equal(sums[0], torch.ones_like(sums[0]))
    assert torch.equal(sums[1], torch.cat([torch.ones_like(sums[1][:3]), torch.zeros_like(sums[1][3:])]))

    # A smaller need later does not hide it.
    dispatched(world, *inputs([6, 6], 2, 16, torch.float32, torch.float32, "all to one"), 11, 11)
    assert world.needs(1) == [24, 32]


def test_counts_before_the_rows() -> None:
    world = World(2, 4, 2, 16, torch.float32)
    x, ids, w = inputs([4, 3], 2, 16, torch.float32, torch.float32, "all to one")
    world.each(lambda *a: send_tokens(*a[:3], LOCAL, a[3]), x, ids, w)
    assert [c.tolist() for c in world.each(read_counts)] == [[[4, 8], [3, 6]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize("view", [strided, turned, moved_on])
def test_tensors_of_every_call_as_views(view: Callable[[Tensor], Tensor]) -> None:
    """The results are those of plain tensors; ids may be of any integer dtype."""
    x, ids, w = inputs([4, 3], 2, 8, torch.float32, torch.float32, "random")
    back, thin = [torch.randn(8, 8, device=DEVICE) for _ in x], [torch.randn(8, 2, device=DEVICE) for _ in x]
    init = [torch.randn_like(t) for t in x]

    def round_trip(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Any]:
        world = World(2, 4, 2, 8, torch.float32)
        chosen = [view(t.to(dtype)) for t in ids]
        places, got = dispatched(world, [view(t) for t in x], chosen, [view(t) for t in w], 8, 16)
        live = [int(g[4][-1]) for g in got]
        world.each(lambda b, t, g, p: push_rows(view(b), view(t), view(g[3]), view(g[4]), p), back, thin, got)
        sums = world.each(
            lambda b, t, g, at, i, p: sum_rows(view(b), view(t), view(g[4]), view(at), view(i), p),
            back, thin, got, places, init,
        )  # fmt: skip
        world.each(lambda t, p: send_values(view(t), p), x)
        values = world.each(lambda g, p: receive_values(view(g[3]), view(g[4]), 8, torch.float32, p), got)
        received = [[t[:n] for t in g[:4]] for g, n in zip(got, live, strict=True)]
        return [places, received, sums, [v[:n] for v, n in zip(values, live, strict=True)]]

    wanted = round_trip(lambda t: t, torch.int64)
    torch.testing.assert_close(round_trip(view, torch.int16), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_single_row_of_wider_rows(tokens: int) -> None:
    """It is contiguous, and its stride may be odd; so may that of no row."""
    world = World(2, 1, 1, 16, torch.bfloat16)
    x = [torch.randn(2, 21, device=DEVICE).bfloat16()[:tokens, :16] for _ in range(2)]
    ids, w = ([torch.zeros(tokens, 1, device=DEVICE).to(dtype) for _ in x] for dtype in (torch.int64, torch.float32))
    places, received = dispatched(world, x, ids, w, 2, 2)
    rows = received[0][0][: 2 * tokens]
    assert torch.equal(rows, torch.cat(x))
    back = [
        torch.randn(2, 21, device=DEVICE).bfloat16()[:2, :16].clone(),
        torch.randn(1, 21, device=DEVICE).bfloat16()[:, :16],
    ]
    received[1] = (*received[1][:3], received[1][3][:1], received[1][4])
    world.each(lambda b, r, p: push_rows(b, None, r[3], r[4], p), back, received)
    sums = world.each(lambda b, r, at, p: sum_rows(b, None, r[4], at, None, p)[0], back, received, places)
    assert torch.equal(torch.cat(sums), back[0][: 2 * tokens])


def test_what_is_not_sent() -> None:
    layout = PeerLayout(2, 4, 2, 32)
    base, offsets = torch.zeros(layout.total, dtype=torch.uint8, device=DEVICE), torch.zeros(2).long().to(DEVICE)
    state = torch.zeros(layout.state_size, dtype=torch.int64, device=DEVICE)
    peers = PeerMemory(base, offsets, state, 0, layout, meet=lambda: None)
    x, w = torch.randn(4, 8, device=DEVICE), torch.randn(4, 2, device=DEVICE)
    ids = torch.tensor([[0, 1]] * 4, device=DEVICE)
    source, starts = torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.tensor([0, 2, 4], device=DEVICE).int()
    for call, error, message in (
        (lambda: send_tokens(x[:, :4], ids, w, 2, peers), ValueError, "rows of 32 bytes"),
        (lambda: send_tokens(x, ids[:3], w, 2, peers), ValueError, r"ids must be \[4, 2\]"),
        (lambda: send_tokens(x, ids.float(), w, 2, peers), TypeError, "ids must be"),
        (lambda: send_tokens(x, ids, w.double(), 2, peers), ValueError, "of 2 or 4 bytes"),
        (lambda: send_values(torch.cat([x, x[:1]]), peers), ValueError, "5 tokens for memory of 4"),
        (lambda: push_rows(x, None, source.long(), starts, peers), TypeError, r"source must be torch\.int32"),
        (lambda: push_rows(x, None, source, starts[::2], peers), ValueError, r"starts must be \[3\]"),
        (lambda: sum_rows(x, None, starts, source.view(4, 1), None, peers), ValueError, r"places must be \[4, 2\]"),
        (lambda: PeerMemory(base, offsets.repeat(2)[::2], state, 0, layout), ValueError, "offsets must be contiguous"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 2, 20), "multiple of 16 bytes, got 20"),
        ((1, 4, 2, 32), "two ranks or more, got 1"),
        ((2, 2**28, 8, 32), r"more than 2\*\*31"),
    ],
)
def test_layouts_that_are_refused(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeerLayout(*shape)


def test_regions_do_not_overlap() -> None:
    at = PeerLayout(3, 7, 5, 48)
    sizes = [
        (at.flags_at, 9 * 24), (at.needs_at, 24), (at.rows_at, 7 * 48), (at.ids_at, 7 * 20), (at.weights_at, 7 * 20),
        (at.lists_at, 7 * 12), (at.counts_at, 24), (at.landing_at, 21 * 48), (at.narrow_at, 21 * 20),
        (at.rows_at + at.half, at.half),
    ]  # fmt: skip
    for (begin, size), (following, _) in pairwise(sizes):
        assert begin + size <= following and following % 16 == 0
    assert at.total == at.rows_at + 2 * at.half and at.half % 128 == 0
