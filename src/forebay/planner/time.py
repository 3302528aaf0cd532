"""How long the parts of a model take on a device: a roofline, operation by operation.

In: the `OpCost`s of a part (`forebay.planner.costs`), and a `Clock` for a device. Out: a `Spell`: seconds of a forward or
backward, computing and exchanging apart, and the kernels that the host launches for them. Nothing is run.

    products, attention   max(FLOPs / what the device achieves at that size, bytes / bandwidth)
    gemm_odd              the same, at a share of the products' rate (`_ODD`)
    pointwise             bytes / bandwidth
    walked                bytes / a share of the bandwidth (`_WALKED`)
    exchange              bytes / all-to-all's rate at that size, within a node or between nodes, whichever takes longer
    each kernel           the time between two kernels on top

A spell has three shares, for they may run at different times: the experts' weight gradients, which nobody waits for; exchanges,
which another microbatch's computation can hide; and the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forebay.planner.device import DeviceProfile
from forebay.planner.figures import OpCost

_RATES: Mapping[str, str] = MappingProxyType(
    {
        "gemm": "matmul_bf16",
        "gemm_odd": "matmul_bf16",
        "grouped": "grouped",
        "grouped_weights": "grouped_weights",
        "attention": "attention",
        "attention_backward": "attention_backward",
    }
)


_WALKED = 0.37
"""Share of a copy's bandwidth of a kernel that finds each element by itself: 1.5 of 4.0 TB/s, measured on an H200 of torch's loop
from fp32 into bf16 (`forebay.kernels.scale`)."""
_ODD = 0.03
"""Share of a product's rate where rows do not begin at multiples of 16 bytes, some 20 TFLOP/s on an H200. Calibrated on GPT-OSS,
whose eager attention has 4097 scores a row; see docs/planner.md."""


@dataclass(frozen=True)
class Spell:
    """Seconds on the device; `launches` is a number, of kernels that the host launches.

    Attributes:
        compute: but for `weights`.
        exchange: all-to-alls.
        weights: the experts' weight gradients.
    """

    compute: float = 0.0
    exchange: float = 0.0
    weights: float = 0.0
    launches: float = 0

    @property
    def computing(self) -> float:
        """Seconds but for exchanges."""
        return self.compute + self.weights

    @property
    def alone(self) -> float:
        """Seconds where nothing runs beside it."""
        return self.computing + self.exchange

    def __add__(self, other: Spell) -> Spell:
        return Spell(
            self.compute + other.compute,
            self.exchange + other.exchange,
            self.weights + other.weights,
            self.launches + other.launches,
        )


NOTHING = Spell()


@dataclass(frozen=True)
class Clock:
    """Turns costs into seconds.

    Attributes:
        device: whose.
        ranks: that share experts, neighbours: as many of them on one node as it has GPUs.
        wide: products are in fp32: experts' and attention's run at fp32's rate too.
    """

    device: DeviceProfile
    ranks: int = 1
    wide: bool = False

    def spell(self, ops: Iterable[OpCost]) -> Spell:
        """Of operations that run one after the other."""
        compute = exchange = weights = 0.0
        launches = 0
        for op in ops:
            seconds = self.seconds(op)
            launches += op.launches
            if op.kind == "exchange":
                exchange += seconds
            elif op.kind == "grouped_weights":
                weights += seconds
            else:
                compute += seconds
        return Spell(compute, exchange, weights, launches)

    def seconds(self, op: OpCost) -> float:
        """Of one operation; an all-to-all of no bytes is none."""
        gap = op.launches * self.device.at("kernel")
        if op.kind == "exchange":
            return self._sent(op.bytes) + gap if op.bytes else 0.0
        moved = self.moved(op.bytes)
        if op.kind == "pointwise":
            return moved + gap
        if op.kind == "walked":
            return moved / _WALKED + gap
        rate = self.device.at("matmul_fp32" if self.wide else _RATES[op.kind], op.flops)
        share = _ODD if op.kind == "gemm_odd" else 1.0
        return max(op.flops / (rate * share), moved) + gap

    def _sent(self, count: float) -> float:
        """Of an all-to-all: what goes to this node's other GPUs and what goes to other nodes are on their way at once."""
        node = min(self.device.node, self.ranks)
        away = count * (self.ranks - node) / max(1, self.ranks - 1)
        here = count - away
        within = here / self.device.link("all_to_all", True, here) if here else 0.0
        return max(within, away / self.device.link("all_to_all", False, away) if away else 0.0)

    def moved(self, count: float) -> float:
        """Seconds in which so many bytes are read and written."""
        return count / self.device.at("bandwidth", count)
