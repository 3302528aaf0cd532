"""Dispatch and combine between N GPUs: the symmetric dispatcher against NCCL's, and against NCCL's own even all-to-all.

It checks before it times: (1) forward and all gradients of dispatch, experts and combine are bitwise those of the NCCL
dispatcher, for uneven, empty and one-sided routing; (2) host synchronizations of forward and backward: 0 with
symmetric, 1 with NCCL; (3) forward and backward in one CUDA graph, replayed with other ids; (4) rows over the capacity
are an error on every rank.

Payloads are 1 to 512 MiB a rank: bytes of the rows that a rank receives, its own included (H = 2048, bf16, K = 8 of E =
128, random routing). Rows of the table:

    all-to-all       `all_to_all_single` of the payload in even parts: the limit of NCCL
    nccl transfer    `all_to_all_single` of the NCCL dispatcher's rows with its splits, nothing else
    nccl ...         its dispatch (with index, gather, slots and the host's wait) and combine (with the sum)
    symmetric ...    dispatch (lists, copy, wait, gather), combine (scatter, wait, sum), and combine's gradient

GB/s counts bytes received from other ranks; `of all-to-all` divides it by that of the first row with the same payload.
`ms` is the time on the GPU with launches queued behind a pause; it is missing where an operation waits for the host.
`eager ms` is without the pause. Median of 30, slowest rank.

    torchrun --nproc-per-node 2 benchmarks/ep_exchange.py
"""

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import MIB, largest, median_ms, queued_ms, ranks, write
from torch import Tensor

from forebay.moe.dispatch import NcclDispatcher, TokenDispatcher, combine, dispatch
from forebay.moe.experts import experts
from forebay.moe.symmetric import SymmetricDispatcher

H, K, E, INNER = 2048, 8, 128, 128
REPEATS = 30
PAUSE_CYCLES = 20_000_000  # 10 ms: longer than it takes to queue REPEATS calls


def all_true(value: bool) -> bool:
    return largest(0.0 if value else 1.0) == 0.0


def choose(tokens: int, kind: str, generator: torch.Generator) -> Tensor:
    if kind == "first rank":
        return torch.arange(K, device="cuda").expand(tokens, K).contiguous()
    ids = torch.rand(tokens, E, device="cuda", generator=generator).topk(K).indices
    return (
        ids.masked_fill(torch.rand(ids.shape, device="cuda", generator=generator) < 0.3, -1) if kind == "holes" else ids
    )


def layer_inputs(tokens: int, kind: str, seed: int, dispatcher: TokenDispatcher) -> dict[str, Tensor]:
    own = torch.Generator("cuda").manual_seed(100 * seed + dispatcher.rank)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=own) * scale).bfloat16()

    n = dispatcher.local_experts
    return {
        "ids": choose(tokens, kind, own),
        "x": randn(tokens, H),
        "weights": torch.rand(tokens, K, device="cuda", generator=own),
        "init": randn(tokens, H),
        "gate_up": randn(n, 2 * INNER, H, scale=0.02),
        "down": randn(n, H, INNER, scale=0.05),
        "dy": randn(tokens, H),
    }


def layer(dispatcher: TokenDispatcher, given: dict[str, Tensor]) -> list[Tensor]:
    """y, and the gradients of x, weights, init, gate_up and down."""
    trained = [given[n].detach().requires_grad_() for n in ("x", "weights", "init", "gate_up", "down")]
    x, weights, init, gate_up, down = trained
    sent = dispatch(x, given["ids"], weights, dispatcher)
    rows = experts(sent.rows, sent.ids, sent.weights, gate_up, down, max_rows=sent.max_rows)
    y = combine(rows, sent.handle, init)
    return [y.detach(), *torch.autograd.grad(y, trained, given["dy"])]


def symmetric_for(group: Any, tokens: int, **options: Any) -> SymmetricDispatcher:
    given = {"tokens": tokens, "hidden": H, "slots_per_token": K, "dtype": torch.bfloat16, **options}
    return SymmetricDispatcher(group, E, **given)


def equal_to_nccl(ours: TokenDispatcher, nccl: TokenDispatcher, tokens: list[int], kind: str, seed: int) -> bool:
    given = layer_inputs(tokens[ours.rank], kind, seed, ours)
    return all(torch.equal(a, b) for a, b in zip(layer(ours, given), layer(nccl, given), strict=True))


def check_bitwise(group: Any, nccl: NcclDispatcher) -> bool:
    size = nccl.size
    ours = symmetric_for(group, 2048, capacity_factor=float(size))
    exact = symmetric_for(group, 2048, capacity_factor=None)
    cases = [
        ([2048] * size, "random"),
        ([1000 + 37 * r for r in range(size)], "random"),
        ([0] + [513] * (size - 1), "random"),
        ([1] + [0] * (size - 1), "random"),
        ([0] * size, "random"),
        ([777] * size, "first rank"),
        ([1025 - r for r in range(size)], "holes"),
    ]
    fine = True
    for seed, (tokens, kind) in enumerate(cases):
        for dispatcher in (ours, exact):
            equal = equal_to_nccl(dispatcher, nccl, tokens, kind, seed)
            if not equal:
                print(
                    f"rank {ours.rank}: not equal: {tokens} {kind} {'exact' if dispatcher is exact else ''}", flush=True
                )
            fine &= equal
    ours.check()
    exact.check()
    ours.close()
    exact.close()
    return all_true(fine)


def count_syncs(dispatcher: TokenDispatcher) -> int:
    given = layer_inputs(1024, "random", 7, dispatcher)
    layer(dispatcher, given)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        layer(dispatcher, given)
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def check_graph(ours: SymmetricDispatcher, nccl: NcclDispatcher) -> bool:
    fixed = layer_inputs(1024, "random", 20, ours)
    layer(ours, fixed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    layer(ours, fixed)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks its own events from another thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = layer(ours, fixed)
    fine = True
    for seed, kind in enumerate(("random", "holes", "random", "random")):
        other = layer_inputs(1024, kind, 30 + seed, ours)
        wanted = layer(nccl, other)
        for name, t in fixed.items():
            t.copy_(other[name])
        graph.replay()
        fine &= all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
    ours.check()
    return all_true(fine)


def check_overflow(group: Any) -> bool:
    ours = symmetric_for(group, 512, capacity_factor=1.0)
    layer(ours, layer_inputs(512, "first rank", 0, ours))
    try:
        ours.check()
        said = ""
    except RuntimeError as error:
        said = str(error)
    ours.check()
    ours.close()
    return all_true(f"rank 0 needed {512 * K * ours.size} slots" in said)


def medians(call: Callable[[], Any], queued: bool = True) -> tuple[float | None, float]:
    """(ms on the GPU or None, eager ms) of the slowest rank."""
    for _ in range(3):
        call()
    found = []
    for measure in (lambda: queued_ms(call, REPEATS, PAUSE_CYCLES), lambda: median_ms(call, REPEATS)[1]):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        found.append(largest(statistics.median(measure())) if queued or len(found) else None)
    return found[0], float(found[1] or 0.0)


def tokens_for(payload: int, ranks: int) -> int:
    """Tokens for which a rank receives about `payload` bytes: a token goes to a rank with probability `share`."""
    share = 1 - math.comb(E - E // ranks, K) / math.comb(E, K)
    return max(1, round(payload / (2 * H * ranks * share)))


def times(group: Any, nccl: NcclDispatcher, mib: int) -> list[dict[str, Any]]:
    size, rank = nccl.size, nccl.rank
    payload, tokens = mib * MIB, tokens_for(mib * MIB, nccl.size)
    table: list[dict[str, Any]] = []

    def row(what: str, off_rank: float, call: Callable[[], Any], queued: bool = True) -> None:
        ms, eager = medians(call, queued)
        rate = off_rank / (ms if ms is not None else eager) / 1e6
        base = table[0]["GB/s"] if table else rate
        table.append(
            {"MiB a rank": mib, "what": what, "off-rank MiB": off_rank / MIB, "ms": ms, "eager ms": eager, "GB/s": rate,
             "of all-to-all": rate / base}
        )  # fmt: skip

    even = torch.randn(payload // (2 * H) // size * size, H, device="cuda").bfloat16()
    landed = torch.empty_like(even)
    row("all-to-all", even.nbytes * (size - 1) / size, lambda: dist.all_to_all_single(landed, even, group=group))
    given = layer_inputs(tokens, "random", 50, nccl)
    x, ids, weights, init = given["x"], given["ids"], given["weights"], given["init"]
    rows, _, _, handle = nccl.dispatch(x, ids, weights)
    splits = handle[2].tolist()
    out, back = splits[:size], splits[size : 2 * size]
    received = 2.0 * H * (sum(back) - back[rank])
    returned = 2.0 * H * (sum(out) - out[rank])
    buffer = x[handle[0]]
    row("nccl transfer", received, lambda: dist.all_to_all_single(rows[: sum(back)], buffer, back, out, group=group))
    row("nccl dispatch", received, lambda: nccl.dispatch(x, ids, weights), queued=False)
    row("nccl combine", returned, lambda: nccl.collect(rows, None, handle, tokens, init))
    ours = symmetric_for(group, tokens)
    exact = symmetric_for(group, tokens, capacity_factor=None)
    got, _, _, way = ours.dispatch(x, ids, weights)
    row("symmetric dispatch", received, lambda: ours.dispatch(x, ids, weights))
    row("symmetric combine", returned, lambda: ours.collect(got, None, way, tokens, init))
    row("symmetric combine gradient", received, lambda: ours.spread(x, way, got.shape[0]))
    row("symmetric exact dispatch", received, lambda: exact.dispatch(x, ids, weights), queued=False)
    ours.check()
    ours.close()
    exact.close()
    return table


def checked(group: Any, nccl: NcclDispatcher) -> dict[str, Any]:
    """The four checks.

    Raises:
        SystemExit: one of them failed.
    """
    ours = symmetric_for(group, 2048, timeout_s=20.0)
    checks = {
        "bitwise as nccl": check_bitwise(group, nccl),
        "host syncs, symmetric": count_syncs(ours),
        "host syncs, nccl": count_syncs(nccl),
        "graph with other ids": check_graph(ours, nccl),
        "overflow is an error": check_overflow(group),
    }
    ours.close()
    right = all(checks[n] is True for n in checks if "syncs" not in n) and checks["host syncs, symmetric"] == 0
    if not right or checks["host syncs, nccl"] != 1:
        raise SystemExit(f"wrong, not timed: {checks}")
    return checks


def run(sizes: list[int]) -> None:
    group: Any = dist.group.WORLD
    nccl = NcclDispatcher(group, E)
    checks = checked(group, nccl)
    table = [row for mib in sizes for row in times(group, nccl, mib)]
    if dist.get_rank() == 0:
        write(f"ep_exchange_{dist.get_world_size()}gpu", table, checks=checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 8, 32, 128, 512])
    args = parser.parse_args()
    with ranks(timeout=timedelta(seconds=60)):
        run(args.mib)


if __name__ == "__main__":
    main()
