"""The dispatcher over a process group: its orders against slow loops, results against a simulation, and odd inputs."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forebay.moe.dispatch import (
    ALIGNMENT,
    NcclDispatcher,
    TokenDispatcher,
    combine,
    destinations,
    dispatch,
    order_by_rank,
)
from tests.moe.layers import E, H, K, equal, group, inputs, layer
from tests.ranks import run_ranks

WORLD = 2

ROUTES = {
    "top k": lambda: torch.rand(17, 12).argsort(1)[:, :5],
    "holes": lambda: torch.rand(17, 12).argsort(1)[:, :5].masked_fill(torch.rand(17, 5) < 0.6, -1),
    "out of range": lambda: torch.randint(-20, 40, (17, 5)),
    "int32": lambda: torch.randint(0, 12, (17, 5), dtype=torch.int32),
    "one rank": lambda: torch.randint(3, 6, (17, 5)),
    "none": lambda: torch.full((4, 5), -1),
    "no tokens": lambda: torch.zeros(0, 5, dtype=torch.int64),
}


@pytest.mark.parametrize("case", ROUTES)
def test_destinations_and_their_order(case: str) -> None:
    ids, ranks, held = ROUTES[case](), 4, 3
    sends, slots = destinations(ids, ranks * held, ranks)
    wanted = [[any(p * held <= e < (p + 1) * held for e in token) for p in range(ranks)] for token in ids.tolist()]
    assert sends.dtype == torch.bool and sends.tolist() == wanted
    flat = ids.flatten().tolist()
    assert slots.tolist() == [sum(p * held <= e < (p + 1) * held for e in flat) for p in range(ranks)]
    sent, places = order_by_rank(sends, int(sends.sum()))
    order = [(p, t) for p in range(ranks) for t in range(len(wanted)) if wanted[t][p]]
    assert sent.dtype == places.dtype == torch.int32
    assert sent.tolist() == [t for _, t in order]
    places_wanted = [[order.index((p, t)) if wanted[t][p] else -1 for p in range(ranks)] for t in range(len(wanted))]
    assert places.tolist() == places_wanted and places.is_contiguous()


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def by_hand(rank: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int]]]:
    """Rows, ids and weights that this rank receives, and (rank, token) of each row: slot by slot."""
    held = E // dist.get_world_size()
    rows, row_ids, row_weights, source = [], [], [], []
    for p, (xs, them, ws) in enumerate(gathered((x, ids, weights))):
        for t in range(len(xs)):
            local = [e - rank * held if rank * held <= e < (rank + 1) * held else -1 for e in them[t].tolist()]
            if max(local) >= 0:
                rows.append(xs[t])
                row_ids.append(torch.tensor(local))
                row_weights.append(ws[t])
                source.append((p, t))
    empty = (x.new_empty(0, H), ids.new_empty(0, K), weights.new_empty(0, K))
    stacked = [torch.stack(t) if t else e for t, e in zip((rows, row_ids, row_weights), empty, strict=True)]
    return stacked[0], stacked[1], stacked[2], source


def summed(rank: int, n_tokens: int, rows: Tensor, source: list[tuple[int, int]], init: Tensor | None) -> Tensor:
    """The sums over ranks, in their order, in fp32 or fp64, rounded once."""
    compute = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(n_tokens, rows.shape[1], dtype=compute)
    total = total if init is None else total + init
    for theirs, at in gathered((rows, source)):
        for row, (p, t) in zip(theirs, at, strict=True):
            if p == rank:
                total[t] += row
    return total.to(rows.dtype)


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
]


def simulated(rank: int, dispatcher: TokenDispatcher, given: dict[str, Tensor]) -> list[bool]:
    """Dispatch and combine, forward and backward, bit for bit what a loop over everyone's tensors gives."""
    x, w, init = (given[n].detach().clone().requires_grad_() for n in ("x", "w", "init"))
    sent = dispatch(x, given["ids"], w, dispatcher)
    rows, ids, weights, source = by_hand(rank, given["x"], given["ids"], given["w"])
    n = len(rows)
    live = sent.ids[:n] >= 0
    y = combine(sent.rows, sent.handle, init)
    d_rows = torch.zeros_like(sent.rows)
    d_rows[:n] = rows * 3
    d_weights = torch.where(sent.ids >= 0, torch.ones_like(sent.weights), 0)
    gradients = (given["dy"], d_rows, d_weights)
    dx, dw, d_init = torch.autograd.grad((y, sent.rows, sent.weights), (x, w, init), gradients)
    # The gradient of a row: what its token's dy is, beside the one given; added in the rows' dtype, as autograd does.
    dy_rows = by_hand(rank, given["dy"], given["ids"], given["w"])[0]
    bound = -(-int(live.sum()) // ALIGNMENT) * ALIGNMENT
    return [
        sent.rows.shape[0] % ALIGNMENT == 0 and n <= sent.rows.shape[0] < n + ALIGNMENT,
        sent.max_rows == bound,
        torch.equal(sent.rows[:n], rows),
        torch.equal(sent.ids[:n], ids.int()) and bool((sent.ids[n:] == -1).all()),
        sent.weights.dtype == w.dtype and torch.equal(sent.weights[:n][live], weights[live]),
        torch.equal(y, summed(rank, len(x), rows, source, given["init"])),
        torch.equal(dx, summed(rank, len(x), dy_rows + rows * 3, source, None)),
        torch.equal(dw, torch.where((given["ids"] >= 0) & (given["ids"] < E), torch.ones_like(dw), 0)),
        torch.equal(d_init, given["dy"]),
    ]


def strided(t: Tensor) -> Tensor:
    """The same numbers, every other one of a wider tensor."""
    return torch.stack([t, torch.full_like(t, 7)], -1).flatten(-2)[..., ::2]


def odd_inputs(rank: int, world: int) -> dict[str, Any]:
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    found: dict[str, Any] = {}
    for seed, (dtype, weights) in enumerate(DTYPES):
        given = inputs(rank, (9, 6)[rank], "random", seed, dtype)
        given["w"] = given["w"].to(weights)
        if weights == torch.bfloat16:
            given["w"][0] = 1e30  # out of fp16's range
        found[f"{dtype}, {weights}"] = simulated(rank, dispatcher, given)
    given = inputs(rank, 7, "random", 20)
    found["int32 ids"] = simulated(rank, dispatcher, {**given, "ids": given["ids"].int()})
    bad = given["ids"].clone()
    bad[0, 0], bad[1, 1], bad[2], bad[3, 2] = E, -5, -1, 1000
    found["ids out of range"] = simulated(rank, dispatcher, {**given, "ids": bad})

    plain = layer(dispatcher, given)
    found["not contiguous"] = equal(layer(dispatcher, {name: strided(t) for name, t in given.items()}), plain)
    broken = {**given, "w": given["w"].clone()}
    if rank == 1:
        broken["w"][2, 1] = torch.nan
    y, dx, dw, *_ = layer(dispatcher, broken)
    others = torch.ones(7, dtype=torch.bool)
    others[2] = rank != 1
    found["nan"] = [
        y[2].isnan().any().item() == (rank == 1),
        dx[2].isnan().any().item() == (rank == 1),
        *equal([t[others] for t in (y, dx, dw)], [t[others] for t in plain[:3]]),
    ]

    # Only received rows: unused ones are undefined, and would differ from run to run.
    given = inputs(rank, ALIGNMENT // WORLD, "random", 30)
    given["ids"][:, 0], given["ids"][:, 1] = rank, E // WORLD + rank
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    torch.library.opcheck(torch.ops.forebay.dispatch.default, (x, given["ids"], w, dispatcher))
    sent = dispatch(x.detach(), given["ids"], w.detach(), dispatcher)
    rows, init, handle = sent.rows.requires_grad_(), given["init"].requires_grad_(), sent.handle.tensors
    torch.library.opcheck(torch.ops.forebay.combine.default, (rows, init, handle, len(x), dispatcher))
    torch.library.opcheck(torch.ops.forebay.spread.default, (init.detach(), handle, ALIGNMENT, dispatcher))
    torch.library.opcheck(torch.ops.forebay.collect.default, (rows.detach(), sent.weights, handle, len(x), dispatcher))
    found["received"] = [rows.shape[0] == ALIGNMENT]
    del sent, rows, handle
    found["handles"] = [dispatcher.live_handles == 0]
    return found


def test_dtypes_strides_nan_and_ids_out_of_range() -> None:
    for rank, found in enumerate(run_ranks(odd_inputs, WORLD)):
        for case, checks in found.items():
            assert all(checks), (rank, case, checks)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 experts cannot be divided evenly among 2 ranks; valid .* 1, 3, 9"):
        NcclDispatcher(group(), 9)
    dispatcher = NcclDispatcher(group(), E)
    x, ids, weights = torch.zeros(4, H), torch.zeros(4, K, dtype=torch.int64), torch.zeros(4, K)
    for wrong in ((x[:3], ids, weights), (x, ids, weights[:, :2]), (x, ids[:, 0], weights), (x[0], ids, weights)):
        with pytest.raises(ValueError, match="do not fit"):
            dispatch(*wrong, dispatcher)


def synchronizations(rank: int, world: int) -> list[str]:
    torch.cuda.set_device(rank)
    dispatcher = NcclDispatcher(dist.new_group(backend="nccl"), E)
    given = inputs(rank, 64, "random", 0, torch.bfloat16, "cuda")
    layer(dispatcher, given)  # compiles kernels, starts communicators
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer(dispatcher, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]


@pytest.mark.gpu
@pytest.mark.multi
def test_the_host_waits_once_a_layer() -> None:
    for found in run_ranks(synchronizations, 2):
        assert len(found) == 1, found
