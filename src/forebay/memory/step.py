"""The region calls of one step, which autograd's graph owns, and the figures reported of a step.

A *step* of the memory package is not an optimizer step: it begins when a region is entered while no earlier call waits for its
backward, and ends when the next one begins, so with plain gradient accumulation each microbatch is a step of its own, while
several forwards followed by their backwards, or all microbatches of a pipeline, are one. Calls are numbered as they come. The
order of backwards is the one given by a schedule, or else the reverse of the forwards.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.memory.host_store import Ticket
from forebay.memory.overrides import CallSite
from forebay.memory.storage import RegionWeights, StorageIdentity
from forebay.memory.timeline import Key


@dataclass(frozen=True)
class StepReport:
    """Figures of the last step. None where a CPU has none.

    Attributes:
        planned_bytes: bytes that the step's plan takes off the device; 0 in a step that is measured for a plan.
        moved_bytes: bytes copied to the host.
        d2h_gbps, h2d_gbps: 1e9 bytes a second while copying, out and back.
        wait_ms: time for which the compute stream waited for copies.
        saved_bytes_by_placement: bytes of the storages that regions saved for one backward: "offload" left the device,
            "keep" stayed, "recompute" stayed for recomputed regions (their inputs). Small ones that are never offloaded
            count only for regions that the policy keeps. A storage that two regions save counts for both. For a call that
            offloads nothing by the plan, the bytes of the measured step count.
        recomputed: number of regions that run their forward again.
    """

    planned_bytes: int
    moved_bytes: int
    d2h_gbps: float | None
    h2d_gbps: float | None
    wait_ms: float | None
    saved_bytes_by_placement: dict[str, int]
    recomputed: int


@dataclass(eq=False)
class Region:
    """A managed region. `light` switches how it recomputes by itself; None: under a checkpoint."""

    path: str
    placement: str  # keep, recompute, offload or auto
    site: CallSite
    light: Callable[[bool], None] | None


@dataclass(eq=False, slots=True)
class KnownStorage:
    """A storage that was saved in this step: the first call that saved it, its index among that call's items, and its ticket
    if it is offloaded."""

    identity: StorageIdentity
    key: Key
    number: int
    item: int
    ticket: "weakref.ref[Ticket] | None"


@dataclass(eq=False, slots=True, weakref_slot=True)
class RegionCall:
    """One forward of one region. Owned by the autograd graph, through packed tensors and gradient hooks.

    Attributes:
        number: of the call in its step; `forward`: of the model's forward in the step.
        items: bytes of each storage the call saved first.
        tickets: of the storages that the call saved; weak, because the graph owns them.
        unsent: tickets to be sent when the forward is over, owned until then.
        offload: indices of the items to be offloaded; None for all.
        compute: the stream that the call runs on; None on a CPU.
        abandoned: no backward is expected: the forward failed, or a backward through its model's forward is over.
        hooks: on the outputs' gradients; they announce the call's backward.
    """

    key: Key
    step: "Step"
    number: int = 0
    forward: int = 0
    items: list[int] = field(default_factory=list)
    tickets: list["weakref.ref[Ticket]"] = field(default_factory=list)
    unsent: list[Ticket] = field(default_factory=list)
    offload: frozenset[int] | None = None
    compute: Any = None
    backward_started: bool = False
    abandoned: bool = False
    hooks: list[Any] = field(default_factory=list)

    def remove_hooks(self) -> None:
        """Take the hooks off the outputs: an output may outlive the graph, and be another call's output too."""
        while self.hooks:
            self.hooks.pop().remove()

    def live_tickets(self) -> list[Ticket]:
        return [t for ref in self.tickets if (t := ref()) is not None]

    @property
    def finished(self) -> bool:
        """Backward has run, or is not expected. A loss that the user keeps still holds the graph's nodes, but no saved
        tensors."""
        return self.abandoned or (self.backward_started and not self.live_tickets())


class Step:
    """The calls of one step and what they saved. Holds calls weakly: a call is alive as long as its graph.

    Args:
        backwards: the order of the step's backwards, if it is known.

    Attributes:
        saved: storages by identity. `saved_by`: the same by their first call, only while measuring.
        unreleased: calls whose device memory is not released yet; see `forebay.memory.transfers`.
        weights: of regions, if a schedule says that they are steady within a step.
        saved_bytes, offloaded_bytes: of regions whose storages may be offloaded.
    """

    def __init__(self, backwards: Sequence[Key] = ()) -> None:
        self.saved: dict[tuple[int, int], KnownStorage] = {}
        self.saved_by: dict[Key, list[KnownStorage]] = {}
        self.unreleased: list[weakref.ref[RegionCall]] = []
        self.weights: dict[str, RegionWeights] = {}
        self.saved_bytes = self.offloaded_bytes = 0
        self._calls: list[weakref.ref[RegionCall]] = []
        self._by_key: dict[Key, weakref.ref[RegionCall]] = {}
        self._counts: dict[str, int] = {}
        self._forward = 0  # the model's forward that runs: another one begins where a region comes again
        self._in_forward: set[str] = set()
        self._n_finished = 0  # calls before this one are finished: a pipeline's step has thousands
        self._backwards = backwards
        self._place = 0  # in `backwards`: those before have begun

    def forget_storages(self) -> None:
        """Drop the records of storages, which a call that the user keeps alive would keep with its step."""
        self.saved.clear()
        self.saved_by.clear()
        self.weights.clear()

    def new_call(self, path: str) -> RegionCall:
        count = self._counts.get(path, 0)
        self._counts[path] = count + 1
        if path in self._in_forward:
            self._forward += 1
            self._in_forward.clear()
        self._in_forward.add(path)
        call = RegionCall((path, count), self, len(self._calls), self._forward)
        self._calls.append(weakref.ref(call))
        self._by_key[call.key] = self._calls[-1]
        return call

    def backward_finished(self, forwards: Collection[int]) -> None:
        """A backward went through these forwards. No other is expected of them or of those before them: the caller may keep an
        output that the loss does not use, or the traceback of a failed forward. A backward that comes after all still works."""
        self._abandon(max(forwards, default=-1))

    def forward_failed(self) -> None:
        """No backward is expected of the forward that runs."""
        self._abandon(self._forward)

    def _abandon(self, newest: int) -> None:
        for ref in self._calls[self._n_finished :]:
            call = ref()
            if call is not None and call.forward <= newest:
                call.abandoned = True

    @property
    def finished(self) -> bool:
        """Every call's graph was dropped, has run backward, or is not expected to."""
        while self._n_finished < len(self._calls):
            call = self._calls[self._n_finished]()
            if call is not None and not call.finished:
                return False
            self._n_finished += 1
        return True

    def find(self, key: Key) -> RegionCall | None:
        ref = self._by_key.get(key)
        return ref() if ref is not None else None

    def next_backward(self) -> RegionCall | None:
        """The call whose backward is expected next: by the known order, or else the latest that has not run backward.

        Returns:
            None if the order is over, or if the forward of the next backward has not run yet: what comes after it would be
            fetched too early.
        """
        order = self._backwards
        if not order:
            return next(
                (c for ref in reversed(self._calls) if (c := ref()) is not None and not c.backward_started), None
            )
        while self._place < len(order):
            path, count = order[self._place]
            call = self.find((path, count))
            if call is None and self._counts.get(path, 0) <= count:
                return None
            if call is not None and not call.backward_started:
                return call
            self._place += 1
        return None
