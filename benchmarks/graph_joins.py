"""The cost of waiting for copies in a CUDA graph: by edges of the graph, and by flags.

The main chain is 600 rounds of two GEMMs (8192 x 2048 x 2048, bf16) and two element-wise kernels (1024 numbers, 96 MiB).
On two other streams, copies to and from page-locked memory begin every few rounds, and some rounds later the chain waits for
them. `ratio` is the time over that of the chain alone in the same run. All arms take turns.

    python benchmarks/graph_joins.py            # a minute on one H200
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import median_ms, write

from forebay.kernels.flags import Flags

ROUNDS, ALTERNATIONS, REPEATS = 600, 5, 4
BUFFERS = 8


@dataclass(frozen=True)
class Arm:
    """Copies of `kib` KiB each way begin every `every` rounds; `late` rounds later the chain waits, by `joins`: edge or flag."""

    every: int = 0
    late: int = 0
    kib: int = 0
    joins: str = "edge"


SHAPES = (Arm(15, 4, 4), Arm(3, 2, 4), Arm(15, 12, 50 << 10), Arm(4, 3, 12 << 10))


class Work:
    """The tensors of the chain, and of the copies on both sides."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.rows = torch.randn(8192, 2048, device=device, dtype=torch.bfloat16)
        self.other = torch.empty_like(self.rows)
        # Orthogonal, so that 1200 products neither vanish nor overflow.
        self.weight = torch.linalg.qr(torch.randn(2048, 2048, device=device))[0].bfloat16()
        self.small = torch.randn(1024, device=device)
        self.large = torch.randn(48 << 20, device=device, dtype=torch.bfloat16)
        elements = max(arm.kib for arm in SHAPES) << 8
        self.here = [torch.randn(elements, device=device) for _ in range(BUFFERS)]
        self.there = [torch.randn(elements, pin_memory=True) for _ in range(BUFFERS)]
        self.back = [torch.empty_like(t) for t in self.here]
        self.lanes = torch.cuda.Stream(), torch.cuda.Stream()
        self.flags = Flags(device)

    def round(self) -> None:
        torch.mm(self.rows, self.weight, out=self.other)
        torch.mm(self.other, self.weight, out=self.rows)
        self.small.mul_(-1.0)
        self.large.mul_(-1.0)


def run(work: Work, arm: Arm) -> None:
    """Run the chain on the current stream."""
    chain = torch.cuda.current_stream()
    waits: deque[tuple[int, Callable[[], None]]] = deque()
    for number in range(ROUNDS):
        work.round()
        if arm.every and number % arm.every == 0:
            buffer = number // arm.every % BUFFERS
            pairs = (work.here[buffer], work.there[buffer]), (work.there[buffer], work.back[buffer])
            for lane, (source, target) in zip(work.lanes, pairs, strict=True):
                waits.append((number + arm.late, copy(work, arm, chain, lane, source, target)))
        while waits and waits[0][0] <= number:
            waits.popleft()[1]()
    for _, wait in waits:
        wait()
    if arm.every:
        for lane in work.lanes:
            chain.wait_stream(lane)


def copy(work: Work, arm: Arm, chain: Any, lane: Any, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Begin a copy; returns the function that makes the chain wait for it."""
    flag = work.flags.take() if arm.joins == "flag" else None
    lane.wait_event(chain.record_event())
    elements = arm.kib << 8
    with torch.cuda.stream(lane):
        target[:elements].copy_(source[:elements], non_blocking=True)
        if flag is not None:
            flag.set(lane)
            return lambda: flag.block(chain)
        end = lane.record_event()
    return lambda: chain.wait_event(end)


def captured(work: Work, arm: Arm) -> Callable[[], None]:
    """Capture the arm; returns the function that replays it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(work, Arm(arm.every, arm.late, arm.kib))
    torch.cuda.synchronize()
    work.flags.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(work, arm)
    graph.replay()
    return graph.replay


def main() -> None:
    torch.manual_seed(0)
    work = Work()
    arms = [Arm(), *(Arm(s.every, s.late, s.kib, joins) for s in SHAPES for joins in ("edge", "flag"))]
    steps = {arm: captured(work, arm) for arm in arms}
    times: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for _ in range(ALTERNATIONS):
        for arm, step in steps.items():
            times[arm].append(median_ms(step, REPEATS)[0])
    assert work.rows.isfinite().all() and work.rows.any()
    medians = {arm: statistics.median(found) for arm, found in times.items()}
    rows = [
        {
            "copies": f"2 x {arm.kib} KiB every {arm.every} rounds" if arm.every else "none",
            "waited for": f"{arm.late} rounds later" if arm.every else "",
            "by": arm.joins if arm.every else "",
            "ms": medians[arm],
            "ratio": medians[arm] / medians[Arm()],
        }
        for arm in arms
    ]
    write("graph_joins", rows)


if __name__ == "__main__":
    main()
