"""The bandwidth of a GPU's link to the host: alone or with the host's other GPUs, one way or both, beside kernels, in a graph.

Each process copies its own page-locked memory in pieces of 64 MiB, out on one stream and back on another, as stores do.

    GPUs        that copy at the same time
    ways        out (to the host), back, or both at once
    by          streams, or one CUDA graph that holds all copies
    beside      nothing, or bf16 GEMMs on a third stream: 6 ms of each round of copies, which takes 19 to 47
    memory      on the NUMA node of the process's processors: `any`, or each node in turn where there are several
    GB/s        bytes over the time of all rounds: least and mean of the GPUs that copy

    torchrun --nproc-per-node 4 benchmarks/host_link.py
"""

import argparse
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ranks, write

PIECE = 64 << 20  # bytes
PIECES = 16  # each way; held twice, on the device and on the host
ROUNDS = 4  # of all pieces, timed


class Lanes:
    """Buffers and streams of one GPU. Its host memory is on the node of the processors that the process runs on now."""

    def __init__(self, device: torch.device):
        self.streams = {way: torch.cuda.Stream(device) for way in ("out", "back")}
        self.busy = torch.cuda.Stream(device)
        self.host = {
            way: [torch.empty(PIECE, dtype=torch.uint8).random_().pin_memory() for _ in range(PIECES)]
            for way in self.streams
        }
        self.there = {
            way: [torch.randint(255, (PIECE,), dtype=torch.uint8, device=device) for _ in range(PIECES)]
            for way in self.streams
        }
        self.factors = [torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.product = torch.empty_like(self.factors[0])

    def run(self, ways: tuple[str, ...], products: int) -> None:
        """Enqueue a round after the work of the current stream, which waits for it."""
        current = torch.cuda.current_stream()
        used = [self.streams[way] for way in ways] + ([self.busy] if products else [])
        for stream in used:
            stream.wait_stream(current)
        for way in ways:
            with torch.cuda.stream(self.streams[way]):
                for host, there in zip(self.host[way], self.there[way], strict=True):
                    (host if way == "out" else there).copy_(there if way == "out" else host, non_blocking=True)
        if products:
            with torch.cuda.stream(self.busy):
                for _ in range(products):
                    torch.mm(*self.factors, out=self.product)
        for stream in used:
            current.wait_stream(stream)


def milliseconds(lanes: Lanes, ways: tuple[str, ...], graph: bool, products: int) -> float:
    """Time of `ROUNDS` warm rounds, while the other GPUs that take part do the same."""
    lanes.run(ways, products)
    torch.cuda.synchronize()
    run: Any = lambda: lanes.run(ways, products)  # noqa: E731
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(ROUNDS):
                lanes.run(ways, products)
        run = captured.replay
        run()
        torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(1 if graph else ROUNDS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def nodes() -> dict[str, set[int]]:
    """Name to processors: all that this process may use, and those of each NUMA node where there are several."""
    found = {"any": os.sched_getaffinity(0)}
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        spans = [span.split("-") for span in (folder / "cpulist").read_text().strip().split(",") if span]
        found[folder.name] = {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
    found = {name: own for name, processors in found.items() if (own := processors & found["any"])}
    return found if len(found) > 2 else {"any": found["any"]}


@contextmanager
def bound(processors: set[int]) -> Iterator[None]:
    """Run this process on these processors: memory that it touches first is on their node."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(lanes: Lanes, memory: str, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    world = dist.get_world_size()
    ways: tuple[tuple[str, ...], ...] = (("out",), ("back",), ("out", "back"))
    for gpus, way, graph, beside in itertools.product(sorted({1, world}), ways, (False, True), (0, 4)):
        takes = dist.get_rank() < gpus
        if takes:
            taken = milliseconds(lanes, way, graph, beside)
        else:
            dist.barrier()
            taken = float("inf")
        rates = torch.tensor([ROUNDS * PIECES * PIECE / taken / 1e6], device=device)
        everyone = [torch.empty_like(rates) for _ in range(world)]
        dist.all_gather(everyone, rates)
        own = [float(r) for r in everyone[:gpus]]
        rows.append(
            {
                "GPUs": gpus,
                "ways": " and ".join(way),
                "by": "graph" if graph else "streams",
                "beside": "products" if beside else "nothing",
                "memory": memory,
                "GB/s, least": min(own),
                "GB/s, mean": sum(own) / len(own),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="host_link")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ranks() as device:
        for memory, processors in nodes().items():
            with bound(processors):
                rows += measure(Lanes(device), memory, device)
                torch._C._host_emptyCache()  # otherwise the next node would reuse this node's memory
        if dist.get_rank() == 0:
            sizes = {name: len(processors) for name, processors in nodes().items()}
            write(args.name, rows, world=dist.get_world_size(), nodes=sizes)


if __name__ == "__main__":
    main()
