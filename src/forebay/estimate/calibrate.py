"""``forebay doctor --save-profile FILE``: measures a device and writes its profile for ``forebay plan --device FILE``.

Input: a path, and the processes that torchrun started, or this one alone. Output: a JSON file of
`forebay.estimate.device`: rates of GEMMs, attention, copies and collectives by size, each the median of several runs. It
takes about half a minute. `save_profile` owns the process group that it makes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forebay.errors import RunError, UsageError
from forebay.estimate.device import DEFAULT, DeviceProfile, load, of_dict
from forebay.estimate.op_costs import around_attention
from forebay.memory.timeline import DUPLEX_RATE_SHARE
from forebay.models.compile import attention_backends
from forebay.train.world import World

Curve = list[list[float]]
"""[size, rate], ascending."""

_WARM, _TIMES = 2, 7
_LONG_ENOUGH = 2e-3  # seconds between two events: a hundred times their own cost
_HEAT, _HEATING = 8192, 16  # rows of a square matrix, and its products: 25 ms on an H200
_TINY = 400  # kernels in a row: fewer than a stream queues before the host has to wait (1024)


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure; the defaults need a GPU of 20 GB. Inputs are random, because zeros draw less power and run faster.

    Attributes:
        products: (M, K, N).
        grouped: (experts, rows of each, K, N).
        attention: (batch, heads, sequence, width of a head).
        copies, links: bytes on the device, and to and from the host.
        collectives: bytes that each process sends in total.
    """

    products: tuple[tuple[int, int, int], ...] = (
        (1024, 1024, 1024),
        (4096, 2048, 512),
        (8192, 1024, 2048),
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
    copies: tuple[int, ...] = (1 << 18, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
    links: int = 256 << 20
    collectives: tuple[int, ...] = (1 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one `run()`, by the device's own events on CUDA."""
    inner = _long_enough(run, device)
    return statistics.median(_once(run, device, inner) for _ in range(_TIMES))


def seconds_in_a_step(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one `run()` as in a training step: in a CUDA graph, so that no launch is waited for, and right after
    products that take the GPU to its power limit. An H200 multiplies 10 % slower there than after a pause."""
    if device.type != "cuda":
        return seconds(run, device)
    inner = _long_enough(run, device)
    graph = _captured(run, inner)
    hot = torch.randn(_HEAT, _HEAT, device=device, dtype=torch.bfloat16)

    def heat() -> None:
        for _ in range(_HEATING):
            hot @ hot

    return statistics.median(_once(graph.replay, device, 1, heat) for _ in range(_TIMES)) / inner


def _captured(run: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def _long_enough(run: Callable[[], Any], device: torch.device) -> int:
    """Warm up; how many times to `run()` between two events."""
    for _ in range(_WARM):
        run()
    return max(1, min(200, int(_LONG_ENOUGH / max(_once(run, device, 1), 1e-7))))


def _once(run: Callable[[], Any], device: torch.device, times: int, before: Callable[[], Any] = lambda: None) -> float:
    """Seconds of a `run()`; `before` is called once before them on CUDA, and not timed."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Curve:
    found = []
    for m, k, n in sizes.products:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        flops = 2.0 * m * k * n
        found.append([flops, flops / seconds_in_a_step(partial(torch.matmul, a, b), device)])
    return sorted(found)


def grouped(device: torch.device, sizes: Sizes, weights: bool) -> Curve:
    """FLOP/s of `F.grouped_mm` in bf16 with equal loads: rows with matrices, or (`weights`) rows with rows."""
    # Where torch has no kernel for it, it reads the loads on the host, which no CUDA graph can.
    has_kernel = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    timed = seconds_in_a_step if has_kernel else seconds
    found = []
    for experts, rows, k, n in sizes.grouped:
        a = torch.randn(experts * rows, k, device=device, dtype=torch.bfloat16)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
        if weights:
            left, right = a.t(), torch.randn(experts * rows, n, device=device, dtype=torch.bfloat16)
        else:
            left, right = a, torch.randn(experts, n, k, device=device, dtype=torch.bfloat16).transpose(-2, -1)
        flops = 2.0 * experts * rows * k * n
        found.append([flops, flops / timed(partial(F.grouped_mm, left, right, offs=ends), device)])
    return sorted(found)


def attention(device: torch.device, sizes: Sizes, copied: float) -> tuple[float, float]:
    """FLOP/s of causal `scaled_dot_product_attention` in bf16, forward and backward, with the kernels that compiled sublayers
    prefer. Half of all pairs count: 2 GEMMs forward, 5 backward, without the kernels around them, at `copied` bytes/s."""
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

        ahead = seconds_in_a_step(forward, device)
        back = seconds(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), device)
    back -= min(back / 2, around_attention(q, k, v) / copied)
    return 2 * product / ahead, 5 * product / back


def bandwidth(device: torch.device, sizes: Sizes) -> Curve:
    """Bytes/s that a kernel reads and writes together, by the bytes of both. Small ones stay in the cache, as in a step."""
    found = []
    for size in sizes.copies:
        source = torch.randn(size // 2, device=device).to(torch.bfloat16)
        target = torch.empty_like(source)
        took = seconds_in_a_step(partial(torch.neg, source, out=target), device)
        found.append([2.0 * size, 2.0 * size / took])
    return sorted(found)


def host_rates(
    device: torch.device, sizes: Sizes, ready: Callable[[], Any] = lambda: None
) -> tuple[float, float, float]:
    """Bytes/s to pinned host memory, from it, and each way with both at once. `ready` is called before each measurement."""
    cuda = device.type == "cuda"
    hosts = [torch.randint(0, 256, (sizes.links,), dtype=torch.uint8) for _ in range(2)]
    hosts = [host.pin_memory() for host in hosts] if cuda else hosts
    here = [torch.randint(0, 256, (sizes.links,), device=device, dtype=torch.uint8) for _ in range(2)]
    out = partial(hosts[0].copy_, here[0], non_blocking=True)
    back = partial(here[1].copy_, hosts[1], non_blocking=True)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []

    def both() -> None:
        if not cuda:
            out()
            back()
        for stream, copy in zip(streams, (out, back), strict=False):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)

    def rate(run: Callable[[], Any]) -> float:
        ready()
        return sizes.links / seconds(run, device)

    return rate(out), rate(back), rate(both)


def launch(device: torch.device) -> float:
    """Seconds of the host for an operation, as plans count them: those of small transformer blocks, forward and backward.

    A loop over one operation would not tell hosts apart: modules, views and autograd differ by 2.2 between two hosts whose
    launches of one kernel differ by 1.2.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    blocks = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(device, dtype)
    x = torch.randn(1, 64, _Block.width, device=device, dtype=dtype)

    def step() -> float:
        blocks.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        blocks(x).sum().backward()
        return (time.perf_counter() - started) / _BLOCKS / _BLOCK_LAUNCHES

    for _ in range(_WARM):
        step()
    return statistics.median(step() for _ in range(_TIMES))


_BLOCKS = 6
_BLOCK_LAUNCHES = 185
"""Operations of `launch` that a block takes: 0.53 of those of a decoder layer of Qwen3-MoE (3.48 ms on a host of 10 microseconds,
benchmarks/results/step_hosts.json), as are the operations that it dispatches."""


class _Block(nn.Module):
    """Attention and a gated MLP with norms in fp32, as in transformers, so small that the device waits for the host."""

    width, heads = 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(self.width, self.width, bias=False) for _ in range(3))
        self.out = nn.Linear(self.width, self.width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(self.width, self.width, bias=False) for _ in range(3))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(self.width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self.norms[0])
        q, k, v = (p(normed).view(1, -1, self.heads, self.width // self.heads).transpose(1, 2) for p in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        normed = self._norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def kernel(device: torch.device) -> float:
    """Seconds of the device for a tiny kernel in a row of them, without the host: in a CUDA graph."""
    if device.type != "cuda":
        return launch(device)
    x = torch.zeros(1, device=device)
    x.add_(1)
    torch.cuda.synchronize(device)
    return seconds(_captured(partial(x.add_, 1), _TINY).replay, device) / _TINY


def collectives(device: torch.device, sizes: Sizes, group: dist.ProcessGroup | None) -> tuple[Curve, float, float]:
    """Rates of the slowest process of a group: bytes/s that leave it in an all-to-all, by bytes; at the largest size, bytes/s
    that reach it in an all-gather, and that leave it in a reduce-scatter."""
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
    return sorted(curve), size * away / gather, size * away / reduce


def contention(device: torch.device, sizes: Sizes, group: dist.ProcessGroup | None) -> float:
    """Seconds by which GEMMs are slower beside all-to-alls, as a share of the all-to-alls'; between 0.01 and 1. Needs CUDA.

    Measured with ten all-to-alls of 32 MiB beside GEMMs of about twice their time.
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
    """Seconds of the slowest process for one collective `run()`. All processes run it equally often."""
    for _ in range(_WARM):
        run()
    took = torch.tensor(
        [statistics.median(_once(run, device, 5) for _ in range(_TIMES))], device=device, dtype=torch.float64
    )
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


_HOST = ("host_out", "host_back", "host_both")
_LINKS = ("all_to_all", "all_gather", "reduce_scatter")


def save_profile(path: Path) -> DeviceProfile | None:
    """Measure this process's GPU, and write the profile. Collective; returns None on all processes but the first.

    A process alone does not measure links to other GPUs: those figures are the H200's, marked as estimated. Raises UsageError if
    there is no GPU, or `path` is not a possible file, and RunError if the file cannot be written.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "--save-profile measures a GPU, and torch finds none here; run it on the machine that you plan for, "
            "or give forebay plan one of the profiles that come with Forebay"
        )
    check_path(path)
    world = World.of_environment()
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group("nccl", device_id=device)
    try:
        figures = measured(device, Sizes())
        if world.size > 1:
            figures |= measured_links(device, Sizes(), int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    finally:
        if world.size > 1:
            dist.destroy_process_group()
    if not world.is_main:
        return None
    name = torch.cuda.get_device_name(device)
    profile = complete(figures, path.stem, name, torch.cuda.device_count())
    try:
        path.write_text(json.dumps(profile.as_dict(), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return profile


def check_path(path: Path) -> None:
    """Raises UsageError if `path` cannot be a file, before anything is measured."""
    if path.is_dir():
        raise UsageError(f"--save-profile {path} is a folder; valid is the name of a file to write")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save-profile {path}: there is no folder {path.absolute().parent}")


def measured(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Values of the figures of one device, by the names of `forebay.estimate.device.FIGURES`."""
    copies = bandwidth(device, sizes)
    ahead, back = attention(device, sizes, copies[-1][1])
    found: dict[str, Any] = {
        "matmul_bf16": products(device, sizes, torch.bfloat16),
        "matmul_fp32": products(device, sizes, torch.float32),
        "grouped": grouped(device, sizes, weights=False),
        "grouped_weights": grouped(device, sizes, weights=True),
        "attention": ahead,
        "attention_backward": back,
        "bandwidth": copies,
        **dict(zip(_HOST, host_rates(device, sizes), strict=True)),
        "launch": launch(device),
        "kernel": kernel(device),
    }
    if device.type == "cuda":
        found["memory"] = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
    return found


def measured_links(device: torch.device, sizes: Sizes, on_node: int) -> dict[str, Any]:
    """Values of the figures of the links between the processes of the default group, `on_node` of them on each machine: within
    a node and, with several machines, between nodes. Collective."""
    found: dict[str, Any] = {}
    count = dist.get_world_size()
    group = None
    if 1 < on_node < count:
        group, _ = dist.new_subgroups(on_node)
    if on_node > 1:
        found |= _host_links(device, sizes, on_node)
        found |= dict(zip(_LINKS, collectives(device, sizes, group), strict=True))
        if device.type == "cuda":
            found["contention"] = contention(device, sizes, group)
    if on_node < count:
        between = collectives(device, sizes, None)
        found |= {f"{name}_between": rate for name, rate in zip(_LINKS, between, strict=True)}
    return found


def _host_links(device: torch.device, sizes: Sizes, on_node: int) -> dict[str, Any]:
    """The rates of one process alone, and of the slowest while all copy. Both ways at once alone is derived, not measured."""
    dist.barrier()
    alone = host_rates(device, sizes)[:2] if dist.get_rank() % on_node == 0 else (1.0, 1.0)
    dist.barrier()
    slowest = torch.tensor(host_rates(device, sizes, dist.barrier), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    together = slowest.tolist()
    first = (*alone, min(alone) * DUPLEX_RATE_SHARE)
    return {name: [[1.0, one], [float(on_node), all_]] for name, one, all_ in zip(_HOST, first, together, strict=True)}


def complete(figures: dict[str, Any], name: str, title: str, node: int) -> DeviceProfile:
    """A profile of measured figures, completed with the H200's.

    The host's rates for several GPUs at once need several processes: without them, one GPU's rate is scaled as the H200's are.
    """
    raw = load(DEFAULT).as_dict()
    for key in _HOST:
        if isinstance(figures.get(key), float):
            one = raw[key]["value"][0][1]
            figures = {**figures, key: [[gpus, figures[key] * rate / one] for gpus, rate in raw[key]["value"]]}
    for key in raw.keys() - {"name", "title", "node"}:
        if key in figures:
            raw[key] = {
                "value": figures[key],
                "source": "measured",
                "where": f"forebay doctor --save-profile, torch {torch.__version__}",
            }
        else:
            raw[key] |= {
                "source": "estimated",
                "where": "the H200's: it takes several processes (torchrun) to measure it",
            }
    raw |= {"name": name, "title": title, "node": max(1, node)}
    return of_dict(raw, "that was measured")
