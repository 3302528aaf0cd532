"""What a device achieves at the operations that training consists of, measured.

In: a device, and the `Sizes` to try. Out: rates as the figures of `forebay.planner.device` want them: [size, rate] by size,
or a number. Inputs are random numbers (zeros draw less power, and run faster). Every figure is a median of several runs after
some that do not count; on a CUDA device by its own events, enough runs between two that the host's launches are not what is
timed.

Nothing is kept. Memory is freed when a function returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forebay.models.compile import attention_backends

Curve = list[list[float]]

_WARM, _TIMES = 2, 7
_LONG_ENOUGH = 2e-3  # seconds between two events: a hundred times what they cost
_TINY = 400  # kernels at once: fewer than a stream takes before the host has to wait (1024)


@dataclass(frozen=True)
class Sizes:
    """What is tried; the defaults are for a GPU of 20 GB and more.

    Attributes:
        products: (M, K, N).
        grouped: (experts, rows of each, K, N).
        attention: (batch, heads, sequence, width of a head).
        copies, links: bytes on the device, and to and from the host.
        collectives: bytes that each process sends in all.
    """

    products: tuple[tuple[int, int, int], ...] = (
        (1024, 1024, 1024),
        (4096, 2048, 512),
        (4096, 2048, 4096),
        (8192, 4096, 4096),
        (16384, 2048, 32768),
    )
    grouped: tuple[tuple[int, int, int, int], ...] = (
        (16, 256, 2048, 768),
        (32, 1024, 2048, 768),
        (64, 1024, 2048, 1536),
        (32, 4096, 2880, 2880),
    )
    attention: tuple[int, int, int, int] = (2, 32, 4096, 128)
    copies: tuple[int, ...] = (4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
    links: int = 256 << 20
    collectives: tuple[int, ...] = (1 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one `run()`, the median."""
    for _ in range(_WARM):
        run()
    inner = max(1, min(200, int(_LONG_ENOUGH / max(_once(run, device, 1), 1e-7))))
    return statistics.median(_once(run, device, inner) for _ in range(_TIMES))


def _once(run: Callable[[], Any], device: torch.device, times: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Curve:
    """FLOP/s of `a @ b`, by FLOPs."""
    found = []
    for m, k, n in sizes.products:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        flops = 2.0 * m * k * n
        found.append([flops, flops / seconds(partial(torch.matmul, a, b), device)])
    return _ascending(found)


def grouped(device: torch.device, sizes: Sizes, weights: bool) -> Curve:
    """FLOP/s of `F.grouped_mm` in bf16, all experts with as many rows: rows with matrices, or (`weights`) rows with rows."""
    found = []
    for experts, rows, k, n in sizes.grouped:
        a = torch.randn(experts * rows, k, device=device, dtype=torch.bfloat16)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
        if weights:
            left, right = a.t(), torch.randn(experts * rows, n, device=device, dtype=torch.bfloat16)
        else:
            left, right = a, torch.randn(experts, n, k, device=device, dtype=torch.bfloat16).transpose(-2, -1)
        flops = 2.0 * experts * rows * k * n
        found.append([flops, flops / seconds(partial(F.grouped_mm, left, right, offs=ends), device)])
    return _ascending(found)


def attention(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """FLOP/s of causal `scaled_dot_product_attention` in bf16, forward and backward, with the kernels that compiled halves
    prefer. Half of all pairs count: 2 products forward, 5 backward."""
    batch, heads, sequence, width = sizes.attention
    q, k, v = (
        torch.randn(batch, heads, sequence, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    product = batch * heads * sequence * sequence * width  # 2 FLOPs, half of the pairs
    with attention_backends():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        dy = torch.randn_like(y)

        def forward() -> Tensor:
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        ahead = seconds(forward, device)
        back = seconds(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), device)
    return 2 * product / ahead, 5 * product / back


def bandwidth(device: torch.device, sizes: Sizes) -> Curve:
    """Bytes/s that copies read and write, by the sum of both."""
    found = []
    for size in sizes.copies:
        source = torch.randint(0, 256, (size,), device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        took = seconds(partial(target.copy_, source), device)
        found.append([2.0 * size, 2.0 * size / took])
    return _ascending(found)


def host_link(device: torch.device, sizes: Sizes, ready: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """Bytes/s to pinned host memory, and from it. `ready` is called before either, when all is there."""
    host = torch.randint(0, 256, (sizes.links,), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    here = torch.randint(0, 256, (sizes.links,), device=device, dtype=torch.uint8)
    ready()
    out = seconds(lambda: host.copy_(here, non_blocking=True), device)
    ready()
    back = seconds(lambda: here.copy_(host, non_blocking=True), device)
    return sizes.links / out, sizes.links / back


def host_both(device: torch.device, sizes: Sizes, ready: Callable[[], Any] = lambda: None) -> float:
    """Bytes/s each way, to pinned host memory and from it at once. `ready` is called once, when all is there."""
    cuda = device.type == "cuda"
    hosts = [torch.randint(0, 256, (sizes.links,), dtype=torch.uint8) for _ in range(2)]
    hosts = [host.pin_memory() for host in hosts] if cuda else hosts
    here = [torch.randint(0, 256, (sizes.links,), device=device, dtype=torch.uint8) for _ in range(2)]
    ways = [(hosts[0], here[0]), (here[1], hosts[1])]  # (target, source)
    streams = [torch.cuda.Stream(device) for _ in ways] if cuda else []

    def run() -> None:
        if not cuda:
            for target, source in ways:
                target.copy_(source)
        for stream, (target, source) in zip(streams, ways, strict=False):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)

    run()
    ready()
    return sizes.links / seconds(run, device)


def launch(device: torch.device) -> float:
    """Seconds of the host for an operation that it does not wait for."""
    x = torch.zeros(1, device=device)

    def many() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(_TINY):
            x.add_(1)
        return (time.perf_counter() - started) / _TINY

    many()
    return statistics.median(many() for _ in range(_TIMES))


def kernel(device: torch.device) -> float:
    """Seconds of the device for a kernel that does nothing worth the name, one behind the other, without the host."""
    x = torch.zeros(1, device=device)
    if device.type != "cuda":
        return launch(device)
    x.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_TINY):
            x.add_(1)
    return seconds(graph.replay, device) / _TINY


def collectives(device: torch.device, sizes: Sizes, group: dist.ProcessGroup | None) -> tuple[Curve, float, float]:
    """Of all processes of a group, the slowest one's: bytes/s that leave each in an all-to-all, by bytes; that reach it in an
    all-gather; that leave it in a reduce-scatter. The latter two at the largest size."""
    count = dist.get_world_size(group)
    away = (count - 1) / count
    curve = []
    for size in sizes.collectives:
        mine = torch.randn(size // 2 // count * count, device=device).to(torch.bfloat16)
        theirs = torch.empty_like(mine)
        took = _slowest(partial(dist.all_to_all_single, theirs, mine, group=group), device, group)
        curve.append([size * away, size * away / took])
    size = max(sizes.collectives)
    whole = torch.randn(size // 2 // count * count, device=device).to(torch.bfloat16)
    part = torch.randn(whole.numel() // count, device=device).to(torch.bfloat16)
    gather = _slowest(lambda: dist.all_gather_into_tensor(whole, part, group=group), device, group)
    reduce = _slowest(lambda: dist.reduce_scatter_tensor(part, whole, group=group), device, group)
    return _ascending(curve), size * away / gather, size * away / reduce


def contention(device: torch.device, sizes: Sizes, group: dist.ProcessGroup | None) -> float:
    """By how much products take longer with all-to-alls beside them, as a share of these; between 0.01 and 1. Needs streams.

    An all-to-all of 32 MiB, and a product that takes about as long, both ten times.
    """
    count, size = dist.get_world_size(group), 32 << 20
    mine = torch.randn(size // 2 // count * count, device=device).to(torch.bfloat16)
    theirs, side = torch.empty_like(mine), torch.cuda.Stream(device)
    a = torch.randn(4096, 2048, device=device, dtype=torch.bfloat16)
    b = torch.randn(2048, 4096, device=device, dtype=torch.bfloat16)

    def exchange() -> None:
        for _ in range(10):
            dist.all_to_all_single(theirs, mine, group=group)

    def compute(times: int) -> None:
        for _ in range(times):
            a @ b

    alone = _slowest(exchange, device, group)
    times = max(10, int(alone / _slowest(lambda: compute(1), device, group)) * 2)

    def both() -> None:
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            exchange()
        compute(times)
        main.wait_stream(side)

    longer = _slowest(both, device, group) - _slowest(lambda: compute(times), device, group)
    return min(1.0, max(0.01, longer / alone))


def _slowest(run: Callable[[], Any], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Of one `run()` that all processes of a group take part in; a fixed number of times, or they would wait for each other."""
    for _ in range(_WARM):
        run()
    took = torch.tensor(
        [statistics.median(_once(run, device, 5) for _ in range(_TIMES))], device=device, dtype=torch.float64
    )
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


def _ascending(found: Curve) -> Curve:
    """By size, each size once."""
    return [[size, rate] for size, rate in sorted({size: rate for size, rate in found}.items())]
