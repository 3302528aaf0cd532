"""How long a sublayer or layer takes for one microbatch: a roofline for every operation, and what the host does around it.

Input: the `OpCost`s of a trace, a device profile, and a `Config`. Output: `KernelTime`s: a `Clock` makes them of operations, a
`LayerTimer` of layers under their placements. Gathers and reductions are in `forebay.estimate.step_time`. Nothing is run or kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from forebay.config import Config
from forebay.estimate.device import DeviceProfile
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import SAME_HOST, Sharing
from forebay.estimate.types import ModelTrace, OpCost, PartTrace
from forebay.pipeline.partition import StageLayer

_RATES: Mapping[str, str] = MappingProxyType(
    {"gemm": "matmul_bf16", "gemm_sum": "matmul_bf16", "gemm_fp32": "matmul_fp32", "gemm_unaligned": "matmul_bf16"}
)
"""The figures of operations whose kind is not the name of their figure."""
_UNVECTORIZED = 1.2e-12
"""Seconds of the multiprocessors, whatever the memory, for each element that an unvectorized kernel reads or writes. On an H100
and an H200 alike, bf16 moves at 1.5 TB/s (`forebay.kernels.cross_entropy.scale`, and five kernels of 2.8 GB in run 10 of the
eighteenth draw); on an H200 fp32 at 2.5. Products of halves, as in rotary positions, take 2.2 ps instead of 1.2."""
_SKINNY = 0.4
"""Share of a copy's bandwidth that a product in fp32 with a router's few columns reaches: 1.4 to 1.9 TB/s for 16 to 32."""
_MATRICES, _SUMS = 0.82, 0.73
"""Shares of a copy's bandwidth that bound experts with few rows: of `F.grouped_mm` (3.4 TB/s), and of what adds gradients to
sums: `forebay.kernels.grouped` (3.0), and cuBLAS for a head (2.8)."""
_PAIRS, _DEPTH, _STORE = 66, 9.3e-9, 2.4e-6
"""`F.grouped_mm` on an H200: tiles of 256 x 256 that it computes at once, each by two of 132 multiprocessors; seconds of one for
each element of its inner sums; and seconds to store one, in which nothing is multiplied. Measured: the products of runs 06 and 13
of the twenty-third draw (`benchmarks/results/captured_kernels.json`). Others' seconds are as many times as long as their rate of
large products is lower than `_RATE`."""
_RATE = 660e12
"""FLOP/s of large ones on an H200, at its power limit."""
_TILED = 2.2
"""Exponent with which the times of computing and moving add up: tiles wait for their operands some of the time."""
_SMALL_DEPTH, _SMALL_STORE, _SMALL_TILED = 2.4e-9, 1.85e-6, 4.0
"""The same of small tiles, of which one is stored while another is computed: seven products of runs 06 and 10 of the twenty-sixth
draw (17 and 112 rows an expert) within 12 %."""
_ADDED = 0.87
"""Share of the rate of gradients that their own kernel reaches which adds them to sums."""
_UNALIGNED = 0.19
"""Share of a GEMM's rate with unaligned rows: 139 and 168 TFLOP/s forward and backward, for 32 heads of 128 on an H100 with 1921
scores a row (run 10 of the eighteenth draw)."""


@dataclass(frozen=True)
class KernelTime:
    """Seconds on the device, in the shares that may run at different times.

    Attributes:
        compute: all but the other two.
        all_to_all: another microbatch's computation can hide it.
        weight_grads: of the experts; nothing waits for them.
        launches: of the host, in operations of the profile's `launch`.
    """

    compute: float = 0.0
    all_to_all: float = 0.0
    weight_grads: float = 0.0
    launches: float = 0

    @property
    def computing(self) -> float:
        return self.compute + self.weight_grads

    @property
    def alone(self) -> float:
        """Seconds if nothing runs beside it."""
        return self.computing + self.all_to_all

    def __add__(self, other: KernelTime) -> KernelTime:
        return KernelTime(
            self.compute + other.compute,
            self.all_to_all + other.all_to_all,
            self.weight_grads + other.weight_grads,
            self.launches + other.launches,
        )


NO_TIME = KernelTime()


@dataclass(frozen=True)
class Clock:
    """Turns costs into seconds.

    GEMMs and attention take the longer of FLOPs at the rate of their size and bytes at the bandwidth, or at a share of it;
    other operations their bytes at it, and their loads besides; an all-to-all its bytes at the rate of their size. Gradients that
    are added to sums in place take longer than either. Each kernel adds the gap between two.

    Attributes:
        ranks: that share experts; consecutive ones fill the nodes.
        wide: computation is in fp32: experts and attention run at the rate of fp32 GEMMs too.
        crossing: see `EvenRouting.crossing_share`.
        sums: bytes of a sum read and written for each byte of an expert's matrix, where its gradient is added in place; else 0.
    """

    device: DeviceProfile
    ranks: int = 1
    wide: bool = False
    crossing: float = 1.0
    sums: float = 0.0

    @classmethod
    def of(cls, device: DeviceProfile, config: Config, routing: EvenRouting, sharing: Sharing) -> Clock:
        p = config.parallel
        sums = 2 * sharing.summed / sharing.compute if sharing.adds_in_place else 0.0
        return cls(device, p.ep, sharing.compute == 4, routing.crossing_share(p.ep, device.node, p.dispatch), sums)

    def both_ways(self, part: PartTrace) -> tuple[KernelTime, KernelTime]:
        """Forward and backward of a part that is kept."""
        return self.kernel_time(part.forward_ops), self.kernel_time(part.backward_ops)

    def kernel_time(self, ops: Iterable[OpCost]) -> KernelTime:
        compute = all_to_all = weight_grads = 0.0
        launches = 0
        for op in ops:
            seconds = self.seconds(op)
            launches += op.launches
            if op.kind == "all_to_all":
                all_to_all += seconds
            elif op.kind == "grouped_weights":
                weight_grads += seconds
            else:
                compute += seconds
        return KernelTime(compute, all_to_all, weight_grads, launches)

    def seconds(self, op: OpCost) -> float:
        """The time of one operation. An all-to-all of no bytes takes none."""
        gap = op.launches * self.device.at("kernel")
        if op.kind == "all_to_all":
            return self._all_to_all(op.bytes) + gap if op.bytes else 0.0
        moved = self.device.moving(op.bytes)
        if op.kind == "pointwise":
            return math.hypot(moved, _UNVECTORIZED * op.loads) + gap
        rate = self.device.at("matmul_fp32" if self.wide else _RATES.get(op.kind, op.kind), op.flops)
        computed = op.flops * op.padding / rate
        match op.kind:
            case "gemm_unaligned":
                computed /= _UNALIGNED
            case "gemm_sum":  # tiles are computed while sums of others are moved, but not all of the time
                return (computed**3 + (moved / _SUMS) ** 3) ** (1 / 3) + gap
            case "gemm_fp32" if not self.wide:
                moved /= _SKINNY
            case "grouped_weights" if self.sums:
                moved = self.device.moving(op.bytes + (self.sums - 1) * op.matrices) / _SUMS
                # A tile's products hide a part of another's sums.
                return ((computed / _ADDED) ** 1.5 + moved**1.5) ** (2 / 3) + gap
            case "grouped" | "grouped_weights" if not self.wide:
                return self._tiled(op) + gap
        return max(computed, moved) + gap

    def _tiled(self, op: OpCost) -> float:
        """`F.grouped_mm` in bf16: whole tiles, in turns of all multiprocessors. Large products run at the rate that power allows,
        that of the largest one in the profile."""
        turns, moved = -(-op.tiles // _PAIRS), self.device.moving(op.bytes) / _MATRICES
        depth, store, power = (_SMALL_DEPTH, _SMALL_STORE, _SMALL_TILED) if op.small else (_DEPTH, _STORE, _TILED)
        computed = turns * (op.depth * depth + store) * _RATE / self.device.at("grouped", math.inf)
        waits = (computed**power + moved**power) ** (1 / power)
        return max(waits, op.flops / self.device.at(op.kind, math.inf))

    def _all_to_all(self, count: float) -> float:
        """The transfers within the node and between nodes run at once, or one after the other where rows cross once a node."""
        node = min(self.device.node, self.ranks)
        away = count * (self.ranks - node) / max(1, self.ranks - 1)
        if self.crossing == 1:
            return max(self._link(True, count - away), self._link(False, away))
        received = count * self.ranks / (self.ranks - 1)
        return self._link(False, away * self.crossing) + self._link(True, received * (node - 1) / node)

    def _link(self, within: bool, count: float) -> float:
        return count / self.device.link("all_to_all", within, count) if count else 0.0


_SYNCHRONIZED: Mapping[str, float] = {"nccl": 3.0e-3, "symmetric": 1.4e-3}
"""Seconds by which a dispatch of exact sizes is slower, for each layer and microbatch: the host waits in it, and has no launches
ahead afterwards. Calibrated: nccl against capacity in benchmarks/results/paging_ep2_qwen3.md, and Qwen3's own routing against
float32 in ep.md. The dispatch alone, in ep_exchange_4gpu.md, is slower by 0.6 and 0.1 ms."""

_EXCHANGE_WAIT = 0.45e-3
"""Seconds that the GPUs of an expert group wait for each other, for each layer and microbatch, even if overlap hides the
transfers. Without it, 18 graphs of blind draws 10 to 17 took 4 to 32 % longer than planned, and those of
benchmarks/results/paging_ep2_*.md 5 %."""


def dispatch_wait(config: Config) -> float:
    """Seconds by which a dispatch of exact sizes is slower than one with a capacity."""
    if config.parallel.ep == 1:
        return 0.0
    if is_symmetric(config):
        return 0.0 if config.step.capacity_factor else _SYNCHRONIZED["symmetric"]
    return _SYNCHRONIZED["nccl"]


def is_symmetric(config: Config) -> bool:
    """Whether the token dispatcher copies directly to other GPUs' memory."""
    p = config.parallel
    return p.dispatch == "symmetric" or (p.dispatch == "auto" and p.ep <= SAME_HOST)


# What the host does, in operations of the profile's `launch`, which `forebay.estimate.calibrate` measures. Fitted together to 90
# called steps on four machines, with nothing beside them: 12 of draw 34, 34 of draws 22 to 33 again, 44 of transformers' Trainer
# (benchmarks/results: blind_called_again.json, planner_hf_*). The same run takes up to 1.6 times as long on another host.
KERNEL = 0.2
"""What each kernel adds."""
SUBLAYER, SUBLAYER_PIPELINE, SUBLAYER_DIRECT = 150, 110, 90
"""The host's work in a sublayer's forward or backward that does not grow with its kernels: modules, hooks, autograd, guards. Less
in a pipeline: five that their hosts limit (draws 32 to 35) took 0.85 times what 150 makes of them, and their code has needed 0.89
times the host's time since. Least where it is compiled, or an engine calls it without dispatch between processes."""
CUT = 15
"""The same for a sublayer that is split at the token dispatcher."""
ALL_TO_ALL = 6
"""What an all-to-all adds: 0.09 ms eager (benchmarks/results/ep_exchange_4gpu.md)."""
STATISTICS = 13
"""The trainer's statistics of a router's choice take the device as long as so many empty kernels: four small ones. The host's
part is in `SUBLAYER`, which was fitted to steps with more of them."""
OFFLOADED, STASHED = 1.7, 22
"""What each offloaded tensor adds, and what a sublayer's pages add."""


_KEPT: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class LayerTimer:
    """Times the layers of a model.

    "keep" and "stash" take the time of the trace: pages cost the device 1 % of a layer (benchmarks/LOG.md). "recompute" runs the
    forward again in backward, or only the first product of Forebay's experts. Offloading costs no kernel time.

    Attributes:
        statistics: `forebay train` counts what routers choose.
    """

    clock: Clock
    config: Config
    trace: ModelTrace
    statistics: bool = True

    def layer(self, here: StageLayer, placements: Mapping[str, str] = _KEPT) -> tuple[KernelTime, KernelTime]:
        """A layer's forward, with the wait for the exact sizes of a token dispatch, and its backward. `placements`: by the name
        of a sublayer; the default is "keep"."""
        layer = self.trace.layers[here.number]
        forward = backward = NO_TIME
        for name, part in layer.on(here):
            f, b = self.sublayer(part, placements.get(name, "keep"))
            forward, backward = forward + f, backward + b
        if layer.is_moe and here.mlp:
            waits, met = dispatch_wait(self.config), _EXCHANGE_WAIT * (self.config.parallel.ep > 1)
            counting = self.clock.seconds(OpCost("pointwise", 0, 0, STATISTICS)) * self.statistics
            forward = forward + KernelTime(
                compute=waits + met + counting, launches=waits / self.clock.device.at("launch")
            )
        return forward, backward

    def end(self, part: PartTrace) -> tuple[KernelTime, KernelTime]:
        """The embedding or the head."""
        forward, backward = self.clock.both_ways(part)
        return self._launched(forward), self._launched(backward)

    def sublayer(self, part: PartTrace, placement: str) -> tuple[KernelTime, KernelTime]:
        config = self.config
        p = config.parallel
        direct = config.memory.compile or (config.has_engine and p.ep * p.pp == 1)
        calling = SUBLAYER_DIRECT if direct else SUBLAYER_PIPELINE if p.pp > 1 else SUBLAYER
        tensors = len(part.events.saved) if part.events is not None else 1
        storing = {"offload": OFFLOADED * tensors, "stash": STASHED}.get(placement, 0.0)
        around = calling + CUT * config.cuts_at_dispatch + storing
        ahead, back = self.clock.both_ways(part)
        forward = self._launched(ahead, around + _transfers(part.forward_ops))
        backward = self._launched(back, around + _transfers(part.backward_ops))
        if placement != "recompute":
            return forward, backward
        if config.recompute == "light" and part.light is not None:
            again = part.light.backward_ops
            return forward, self._launched(self.clock.kernel_time(again), around + _transfers(again))
        return forward, forward + backward  # the host runs the forward's Python too

    def _launched(self, time: KernelTime, around: float = 0.0) -> KernelTime:
        """With what the host does for each kernel, and `around` them."""
        return replace(time, launches=KERNEL * time.launches + around)


def _transfers(ops: Iterable[OpCost]) -> int:
    return ALL_TO_ALL * sum(op.kind == "all_to_all" for op in ops)
