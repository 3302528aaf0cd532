"""What sharded weights cost a step in time: gathering them, reducing their gradients, and adding gradients up.

In: how many elements the parts of a stage have, a `Sharing`, and a device. Out: seconds, of a step and of each microbatch of
a layer.

Gathering N elements of n processes: each casts its own part and sends it, and what arrives is copied to where weights live.

    bytes of device memory   N / n (parameter + compute) + 2 N compute, and 2 N compute more where n = 1: a gather to itself
    bytes of the link        N compute (n - 1) / n

Reducing: gradients are copied in chunks, summed over processes, and the own part is cast. Nothing is reduced where n = 1, but
cast where two dtypes meet.

    bytes of device memory   2 N summed + N / n (summed + parameter)
    bytes of the link        N summed (n - 1) / n

Adding a microbatch's gradients to the sum of the others: N (compute + 2 summed) bytes. Where sums are wider than gradients, FSDP2
converts the first microbatch's: N (compute + summed). An engine begins with zeros: N summed; its experts add where they make a
gradient (`forebay.kernels.weight_sum`), which is neither written nor read: N (2 summed - compute), for their products count it.

Engines (`forebay.train.gathered`) gather once before a step and reduce once behind it, and nothing hides that; experts that are
given back after each use are gathered for each forward and backward. Otherwise FSDP2 gathers the next layer while one runs, and
reduces one while the next runs: what the link takes longer than the layer waits, and copies always run. What hides a transfer
takes longer itself, by the share of it (`contention`) that an all-to-all costs. Embedding and head are gathered and reduced where
nothing hides it, and their gradients are added up as a layer's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.planner.device import DeviceProfile
from forebay.planner.state import Sharing
from forebay.planner.steptime import Besides
from forebay.planner.time import Clock, Spell

_STEPPING = 0.88
"""Share of a copy's bandwidth at which the optimizer's and clipping's kernels go over many tensors at once. Calibrated on the
grid, see docs/planner.md."""


@dataclass(frozen=True)
class Elements:
    """That a process computes with in a part: of its experts, and of all else."""

    rest: int
    experts: int = 0


@dataclass(frozen=True)
class Moved:
    """Seconds of copies on the device, and of the link."""

    copies: float = 0.0
    link: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.copies + other.copies, self.link + other.link)

    @property
    def exposed(self) -> float:
        """Seconds where nothing hides it."""
        return self.copies + self.link

    def beside(self, seconds: float, contention: float) -> float:
        """Seconds where the link has so many seconds to hide behind, each of which `contention` makes longer."""
        hidden = min(self.link, seconds)
        return self.copies + self.link - hidden + contention * hidden


@dataclass(frozen=True)
class SharedTime:
    """See the module docstring.

    Attributes:
        microbatches: of a process in a step.
    """

    device: DeviceProfile
    sharing: Sharing
    microbatches: int
    _clock: Clock = field(init=False)
    _contention: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_clock", Clock(self.device))
        object.__setattr__(self, "_contention", self.device.at("contention"))

    def layer(self, part: Elements, forward: Spell, backward: Spell) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through a layer, besides its own."""
        s, count = self.sharing, self.microbatches
        adding = self._adding(part)
        if not s.sharded:
            return 0.0, adding
        if s.gathered:
            again = self._gather(part.experts, self._columns).exposed if s.reshard else 0.0
            return again, again + adding
        gather, reduce = self._gathers(part), self._reduces(part)
        times = 1.0 if s.reshard else 1.0 / count
        back = 0.0 if not s.reshard else gather.beside(backward.computing, self._contention)
        reduced = reduce.beside(backward.computing, self._contention) / (count if s.sums else 1)
        return times * gather.beside(forward.computing, self._contention), back + adding + reduced

    def step(self, parts: Sequence[Elements], ends: Elements, parameters: int, fused: bool, clips: bool) -> Besides:
        """Seconds of a rank's step besides its microbatches'.

        Args:
            parts, ends: of all its layers, and of embedding and head.
            parameters: bytes of its own shards.
            fused: AdamW reads parameter, gradient and two moments and writes all but the gradient, once; else in passes of one
                operation each, about 14 reads and writes of a shard more.
            clips: gradients are scaled.
        """
        s = self.sharing
        optimizer = self._clock.moved(parameters * ((7 if fused else 21) + 1 + 2 * clips)) / _STEPPING
        adding = self.microbatches * self._adding(ends)
        if not s.sharded:
            return Besides(reduce=adding, optimizer=optimizer)
        inside = parts if s.gathered else ()
        gathers = sum((self._gathers(p) for p in (*inside, ends)), Moved())
        if s.gathered and s.reshard:  # experts come with their layers
            gathers = sum((self._gather(p.rest, s.data) for p in (*inside, ends)), Moved())
        reduces = sum((self._reduces(p) for p in (*inside, ends)), Moved())
        if s.gathered:  # zeros to sum in
            zeros = s.summed * sum(p.rest + p.experts for p in (*inside, ends))
            gathers += Moved(copies=self._clock.moved(zeros))
        return Besides(gathers.exposed, reduces.exposed + (0.0 if s.gathered else adding), optimizer)

    @property
    def _columns(self) -> int:
        return self.sharing.data // self.sharing.ep

    def _gathers(self, part: Elements) -> Moved:
        s = self.sharing
        if s.ep == 1:
            return self._gather(part.rest + part.experts, s.data)
        return self._gather(part.rest, s.data) + self._gather(part.experts, self._columns)

    def _reduces(self, part: Elements) -> Moved:
        s = self.sharing
        if s.ep == 1:
            return self._reduce(part.rest + part.experts, s.data)
        return self._reduce(part.rest, s.data) + self._reduce(part.experts, self._columns)

    def _gather(self, elements: int, processes: int) -> Moved:
        s = self.sharing
        moved = elements / processes * (s.parameter + s.compute) + 2 * elements * s.compute * (
            2 if processes == 1 else 1
        )
        sent = elements * s.compute * (processes - 1) / processes
        return Moved(self._clock.moved(moved), sent / self.device.link("all_gather", self._within))

    def _reduce(self, elements: int, processes: int) -> Moved:
        s = self.sharing
        if processes == 1:
            cast = 0 if s.summed == s.parameter else elements * (s.summed + s.parameter)
            return Moved(self._clock.moved(cast))
        moved = 2 * elements * s.summed + elements / processes * (s.summed + s.parameter)
        sent = elements * s.summed * (processes - 1) / processes
        return Moved(self._clock.moved(moved), sent / self.device.link("reduce_scatter", self._within))

    def _adding(self, part: Elements) -> float:
        """Into zeros or an earlier sum; without an engine the first microbatch's gradients are the sum."""
        s, count = self.sharing, self.microbatches
        if s.sharded and not (s.gathered or s.sums):
            return 0.0
        summed = s.summed if s.sharded else s.compute
        share = 1.0 if s.gathered and s.sharded else (count - 1) / count
        moved = share * (s.compute + 2 * summed)
        if s.sharded and not s.gathered and summed != s.compute:  # the first one's become the sum by a conversion
            moved += (s.compute + summed) / count
        experts = moved - 2 * s.compute if s.adds_in_place else moved
        return self._clock.moved(part.rest * moved + part.experts * experts)

    @property
    def _within(self) -> bool:
        return self.sharing.data <= self.device.node
