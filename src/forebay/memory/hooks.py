"""The manager: regions, pack and unpack, the life of a step.

In: a model, its regions (slots around pieces of its forward) and a placement for each. Out: the same results, bit for
bit, with the saved tensors where the policy wants them.

The way of a saved tensor: a region's forward runs inside ``saved_tensors_hooks``; ``pack`` decides whether its storage
leaves (weights, small tensors and what the plan keeps are returned as detached aliases) and gives it to the store,
which returns a ticket; the autograd node owns the ticket. When the forward is over, the region's tickets are sent to the
host together: the host pays for events and streams once a call and not once a tensor. When the gradient reaches the
region's output, the manager waits for the region's tickets and starts the fetches that are due; ``unpack`` cuts the saved
view out of the ticket's bytes. The ticket dies with the node, and its memory is free.

Who owns what: the graph owns tickets and region calls; the manager owns the store (streams, host memory), the planning and
nothing that lives as long as a step. There is no module-level state: two managers do not meet.

When what leaves, is settled and fetched is `memory/autotune.py`'s: the first cycles measure, then there is a plan.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from forebay.memory.autotune import Planning, Trial
from forebay.memory.host_store import HostStore, Ledger, Ticket, TicketState
from forebay.memory.recompute import foreign_saved_tensor_hooks, recomputed, refuse_nested_checkpointing
from forebay.memory.recorder import Recorder, RegionCall, StepCalls
from forebay.memory.regions import Slot
from forebay.memory.storage import (
    RegionWeights,
    SavedAlias,
    StorageIdentity,
    View,
    raise_modified_inplace,
    storable,
    storage_bytes,
    version_counter,
)
from forebay.memory.streams import external_event
from forebay.memory.timeline import Key, Plan, Timeline
from forebay.policy import Claim, PolicyError

_MIN_BYTES_CUDA = 1 << 20  # a 1 MiB copy reaches 40 of 55 GB/s (H200); below that launches cost more than they free

_VARIES = 1.5  # by so much a microbatch's tensors may exceed the measured one's before everything is measured again

_NEIGHBOURS = 2  # calls; a tensor that runs from one region into the next or the one after may still leave


@dataclass(frozen=True)
class StepReport:
    """How the last cycle (one forward and its backward, usually) went. None where a CPU has no figure.

    Attributes:
        planned_bytes: bytes that the step's plan takes off the device; 0 in a step that is measured for a plan.
        moved_bytes: bytes copied to the host.
        d2h_gbps, h2d_gbps: 1e9 bytes a second while copying, out and back.
        wait_ms: time the compute stream waited for copies in the last cycle.
        saved_bytes_by_placement: bytes of the storages that regions saved for one backward: "offload" left the device,
            "keep" stayed, "recompute" stayed for recomputed regions (their inputs). Small ones that never leave are counted
            only for regions that the policy keeps; a storage that two regions save is counted for both. For a call of which
            nothing leaves by the plan, what the measured cycle saved is counted.
        recomputed: regions that run their forward again.
    """

    planned_bytes: int
    moved_bytes: int
    d2h_gbps: float | None
    h2d_gbps: float | None
    wait_ms: float | None
    saved_bytes_by_placement: dict[str, int]
    recomputed: int


@dataclass(eq=False)
class _Region:
    path: str
    placement: str  # keep, recompute, offload, or auto
    slot: Slot
    light: Callable[[bool], None] | None  # how the region recomputes by itself; None: under a checkpoint


@dataclass(eq=False, slots=True)
class _Seen:
    """A storage met in this cycle: which call saved it first, as its how-manieth item, and its ticket if it left."""

    identity: StorageIdentity
    key: Key
    number: int
    ordinal: int
    ticket: "weakref.ref[Ticket] | None"


class _Packed:
    """What autograd owns in place of a tensor that left: the ticket, its region call, how to cut the view, and the version that
    backward expects."""

    __slots__ = ("call", "counter", "ticket", "version", "view")

    def __init__(self, call: RegionCall, ticket: Ticket, tensor: torch.Tensor, nothing: torch.Tensor):
        self.call, self.ticket, self.view = call, ticket, View.of(tensor)
        self.counter = version_counter(tensor, nothing)
        self.version = self.counter._version

    def check(self) -> None:
        """Raise as autograd would if the tensor, wherever it is now, was written to since it was saved."""
        if self.counter._version != self.version:
            path, (dtype, size) = self.call.key[0], self.view[:2]
            raise_modified_inplace(path, dtype, size, self.counter._version, self.version)


class Manager:
    """Placements on the regions of one model. Use `forebay.manage` to make one for a Hugging Face model.

    Args:
        slots: region path to slot. Regions without a claim are kept; they still mark the passing of time.
        claims: placements, from `forebay.policy.resolve`; placement "auto" leaves the choice to the planner.
        device: the device whose saved tensors are managed.
        budget: bytes that the step's peak may rise over the memory held before it; needs an offload or auto region.
        offload: "fit" offloads as much as the link carries without waiting, "all" everything.
        recompute: "light" uses a slot's `light_recompute` where it has one; any other mode of `forebay.memory.regions`
            checkpoints the whole region.
        min_bytes: storages below this stay on the device. Default: 1 MiB on CUDA, 1 elsewhere.

    Raises:
        PolicyError: a budget without anything to decide, ``stash`` (no region is paged), an unknown `offload`.
        ValueError: a region to be recomputed that is already under gradient checkpointing.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        claims: list[Claim],
        device: torch.device,
        *,
        budget: int | None = None,
        offload: str = "fit",
        recompute: str = "light",
        min_bytes: int | None = None,
    ):
        chosen = {c.path: c.placement for c in claims}
        _check(claims, budget, offload)
        self.ledger = Ledger()
        self._recompute = recompute
        self._regions = {
            path: _Region(path, chosen.get(path, "keep"), slot, slot.light_recompute if recompute == "light" else None)
            for path, slot in slots.items()
        }
        self._plans = any(r.placement in ("offload", "auto") for r in self._regions.values())
        self._step_calls = StepCalls()
        self._awaits_call = False  # a cycle has begun, and its first call is on the way
        self._planned = False  # the next cycle is
        self._followed: Plan | None = None  # in the last cycle
        self._budget, self._offload, self._wanted_min_bytes = budget, offload, min_bytes
        self._manage_on(device)
        self._base: int | None = None  # bytes held before the cycle that is about to begin, where a forward told
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._seen_by: dict[Key, list[_Seen]] = {}  # while measuring
        self._saved_by: dict[Key, int] = {}  # bytes, in the last cycle that was measured
        self._shared: set[Key] = set()  # calls of whose storages another call saved one too, in the same cycle
        self._leaving: list[weakref.ref[RegionCall]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._spare_marks: list[Any] = []  # events of cycles that are over
        self._tally = {"saved": 0, "offload": 0}  # bytes: of regions whose storages may leave, and that did
        self._held: dict[str, int] = {}  # region kept by the policy, or recomputed -> bytes it was seen to save
        self._backwards: list[Key] = []
        self._steady = False
        self._weights: dict[str, RegionWeights] = {}  # of a cycle, if they are steady
        self._captured = False
        self._warned: set[str] = set()  # regions that ran where they cannot be managed
        self._task = -1  # autograd's number of the backward that runs, or ran last
        self._reached: set[int] = set()  # forwards of the cycle that it goes through
        self._nothing = torch.empty(0)
        self._around: Callable[[str], AbstractContextManager[Any]] | None = None
        for region in self._regions.values():
            if region.placement == "recompute":
                refuse_nested_checkpointing(region.path, region.slot.module)
        for region in self._regions.values():
            self._install(region)

    def _manage_on(self, device: torch.device) -> None:
        """Begin anew with the saved tensors of `device`."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # tensors say "cuda:0", never "cuda"
        self._device = device
        least = _MIN_BYTES_CUDA if device.type == "cuda" else 1
        self._min_bytes = self._wanted_min_bytes if self._wanted_min_bytes is not None else least
        self.store = HostStore(device)
        placements = {path: region.placement for path, region in self._regions.items()}
        self._planning = Planning(self.store, placements, self._budget, self._offload, self._switch_light)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        # Trap: a `StorageWeakRef` (`StorageIdentity`) that is copied frees its reference twice.
        raise TypeError("a Manager belongs to one model in one process; copy or pickle the model, not what manages it")

    # --- what a user asks ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """In force; None while cycles are measured, or where nothing is to be decided."""
        return self._planning.plan

    @property
    def timeline(self) -> Timeline | None:
        """The measured cycle that the plan is based on."""
        return self._planning.timeline

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The plans that were tried, in order; none but of policy="auto" on one GPU."""
        return self._planning.trials

    @property
    def placements(self) -> dict[str, str]:
        """Region path to the placement in force now; what the planner has yet to decide reads "auto"."""
        return {path: self._in_force(region) or "auto" for path, region in self._regions.items()}

    def report(self) -> StepReport:
        """Figures of the last cycle; ask after its backward. Waits for the device."""
        out, out_rate = self.store.outbound.measure()
        _, back_rate = self.store.inbound.measure()
        waits = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            waits = sum(a.elapsed_time(b) for a, b in self._waits)
        return StepReport(
            planned_bytes=self._followed.planned_bytes if self._followed else 0,
            moved_bytes=out,
            d2h_gbps=out_rate / 1e9 if out_rate else None,
            h2d_gbps=back_rate / 1e9 if back_rate else None,
            wait_ms=waits,
            saved_bytes_by_placement=self._saved_by_placement(),
            recomputed=sum(placement == "recompute" for placement in self.placements.values()),
        )

    def _saved_by_placement(self) -> dict[str, int]:
        left = self._tally["offload"]
        totals = {"offload": left, "keep": self._tally["saved"] - left}
        totals = {kind: nbytes for kind, nbytes in totals.items() if nbytes}
        for path, region in self._regions.items():
            placement = self._in_force(region) or ""
            if path in self._held and (placement == "recompute" or region.placement == "keep"):
                totals[placement] = totals.get(placement, 0) + self._held[path]
        return totals

    def follow(self, backwards: Sequence[Key], steady: bool) -> None:
        """Be told the order of backwards in a cycle, such as a pipeline's schedule has it, instead of finding it out.

        Args:
            backwards: (region path, number of its call in the cycle); regions that are not managed are left out.
            steady: the weights stay where they are from a cycle's first forward to its last backward.
        """
        self._backwards = [key for key in backwards if key[0] in self._regions]
        self._steady = steady

    def forward_begins(self, device: torch.device) -> None:
        """Be told that the whole model's forward begins. What is held on the device now was held before the step, if one begins;
        when the first region is entered, the embedding's output is there already.

        Args:
            device: where the model is now. Trainers move a model after it was managed.
        """
        if device != self._device and device.type != "meta":
            self._move_to(device)
        if not torch.is_grad_enabled():
            return
        if (
            self._budget is not None
            and self._planning.measuring
            and self._device.type == "cuda"
            and self._step_calls.quiet
        ):
            self._base = torch.cuda.memory_allocated(self._device)

    def _move_to(self, device: torch.device) -> None:
        """The model was moved: what is alive stays with the store that holds it."""
        if self.plan is not None:
            self._switch_light(self.plan.recompute, False)
        self.store.close()
        self._manage_on(device)
        self._step_calls, self._planned, self._followed = StepCalls(), False, None

    def forward_failed(self) -> None:
        """Be told that the whole model's forward raised. Its traceback may hold its calls, and no backward comes."""
        self._step_calls.forward_failed()

    def take_peak(self) -> int:
        """Bytes that were allocated at most at the times that `torch.cuda.max_memory_allocated` does not tell of because measured
        cycles reset it; since the last call. 0 where none was measured."""
        return self._planning.peaks.take()

    def idle(self) -> None:
        """Be told that the device now waits for another process: nothing computes, and `offload = "all"` counts on most of it for
        copies."""
        if self._planning.recorder is not None:
            self._planning.recorder.idle()
        elif self._planning.stopwatch is not None:
            self._planning.stopwatch.idle(self._mark)

    @property
    def settled(self) -> bool:
        """Whether cycles go on as the last one did: nothing is to be measured, tried, planned or page-locked any more."""
        return not self._plans or self._planning.settled

    @contextmanager
    def capturing(self, timed: bool = False) -> Iterator[None]:
        """Within, whole cycles are captured in a CUDA graph, and each must end with `join`: no event passes between inside and
        outside.

        Args:
            timed: its moments and copies are timed when it is replayed, for `plan_again`.
        """
        self._captured, self.store.lanes.time_captured = True, timed
        self.store.synchronize()
        self.store.lanes.flags.begin()  # those of this graph: they stay until the next one
        try:
            yield
        finally:
            self._planning.keep_stopwatch()
            self._captured = self.store.lanes.time_captured = False
            self._waits.clear()
            self.store.synchronize()

    def plan_again(self) -> None:
        """See `forebay.memory.autotune.Planning.plan_again`."""
        self._planning.plan_again()

    def join(self) -> None:
        """At the end of a cycle. In a capture the compute stream waits for all copies. Else the next cycle is planned now: all of
        a pipeline's ranks are here at once, and would wait for each other's plans if each made its own when its next forward
        comes."""
        self.store.lanes.join()
        if self._plans and not self._captured and self._step_calls.quiet and not self._planned:
            self._planning.step_over()
            self._planned = True

    @contextmanager
    def suspended(self, around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """Within, regions run unmanaged, each forward inside ``around(path)``. Graphs made before keep their tickets."""
        recomputing = [r.light for r in self._regions.values() if r.light and self._in_force(r) == "recompute"]
        self._around = around
        for switch in recomputing:
            switch(False)
        try:
            yield
        finally:
            self._around = None
            for switch in recomputing:
                switch(True)

    def detach(self) -> None:
        """Put the model back as it was. Graphs that are alive stay valid and can still run backward."""
        for region in reversed(self._regions.values()):
            if region.light is not None:
                region.light(False)
            region.slot.restore()
        self._regions = {}
        self.store.close()

    # --- a region's forward ---------------------------------------------------------------------------------------

    def _install(self, region: _Region) -> None:
        if region.placement == "recompute" and region.light is not None:
            region.light(True)
        mode = "full" if self._recompute == "light" else self._recompute
        region.slot.wrap(
            lambda forward: partial(self._run, region, forward, recomputed(forward, mode, region.slot.called_modules))
        )

    def _run(
        self, region: _Region, forward: Callable[..., Any], again: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._around is not None:
            with self._around(region.path):
                return forward(*args, **kwargs)
        if not torch.is_grad_enabled() or self._is_unmanaged_here(region):
            return forward(*args, **kwargs)
        if self._plans and self._step_calls.quiet and not self._awaits_call:
            self._begin_step()  # before the placement is looked up: the plan may change here
        placement = self._in_force(region)
        if region.path not in self._held and (placement == "recompute" or region.placement == "keep"):
            return self._first_call(region, forward, again, args, kwargs)
        if placement == "recompute" and region.light is None:
            forward = again
        if not self._plans:
            return forward(*args, **kwargs)
        call = self._enter(region)
        try:
            out = self._run_call(region, call, placement, forward, args, kwargs)
        except BaseException:
            call.given_up = True  # the traceback holds the call, for as long as the caller keeps it
            raise
        self._watch(call, out)
        return out

    def _run_call(
        self,
        region: _Region,
        call: RegionCall,
        placement: str | None,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The forward of a call of which something may leave."""
        call.light_recompute = region.light is not None
        if self._planning.recorder is not None:
            call.input_bytes = self._input_bytes(args, kwargs)
        elif self._planning.meter is not None:
            self._planning.meter.entered(call.key, self._input_bytes(args, kwargs))
        if self._is_left_alone(call, placement):
            out = forward(*args, **kwargs)
        else:
            weights = self._weights_of(region)
            call.compute = self.store.lanes.compute_stream()
            call.leaving = self._planning.leave.get(call.key, frozenset()) if self.plan is not None else None
            with saved_tensors_hooks(partial(self._pack, call, weights), partial(self._unpack, region.path)):
                out = forward(*args, **kwargs)
            self._send(call)
            self._count("saved", sum(call.items))
            self._planning.outgrown = self._planning.outgrown or self._exceeds_plan(call)
        if self._planning.recorder is not None:
            self._planning.recorder.region_left(call)
            self._saved_by[call.key] = sum(call.items)
        return out

    def _is_unmanaged_here(self, region: _Region) -> bool:
        """Whether the region runs where saved tensors are somebody else's: see `foreign_saved_tensor_hooks`.

        Raises:
            PolicyError: there is a budget, which would not hold.
        """
        others = foreign_saved_tensor_hooks()
        if others is None:
            return False
        if region.placement in ("keep", "recompute"):
            # The caller's checkpoint recomputes it, and other hooks take what they were asked to take.
            return True
        problem = f"region {region.path!r} runs inside {others}, where it cannot be placed {region.placement!r}"
        if self._budget is not None:
            raise PolicyError(f"{problem}, so the budget would not hold: remove that, or the budget")
        if region.path not in self._warned:
            self._warned.add(region.path)
            warnings.warn(f"{problem}: it runs unmanaged there. To have it managed, remove that", stacklevel=2)
        return True

    def _first_call(
        self, region: _Region, forward: Callable[..., Any], again: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a region that stays on the device for the first time, and count for the report what it holds there."""
        self._held[region.path] = 0
        if self._in_force(region) == "recompute" and region.light is None:
            self._held[region.path] = self._input_bytes(args, kwargs)  # a checkpoint keeps these and nothing else
            return self._run(region, forward, again, *args, **kwargs)
        weights = RegionWeights(region.slot.module)
        counted: dict[tuple[int, int], StorageIdentity] = {}

        def count(tensor: torch.Tensor) -> SavedAlias:
            storage = storable(tensor, self._device, 1, weights)
            if storage is not None:
                identity = StorageIdentity(storage, tensor._version)
                if identity.key not in counted:
                    counted[identity.key] = identity
                    self._held[region.path] += storage.nbytes()
            return SavedAlias(tensor)

        def counting(*a: Any, **k: Any) -> Any:
            with saved_tensors_hooks(count, lambda kept: kept.get(region.path)):
                return forward(*a, **k)

        return self._run(region, counting, again, *args, **kwargs)

    def _in_force(self, region: _Region) -> str | None:
        """The placement now; None while the planner has yet to decide."""
        if region.placement in ("keep", "recompute"):
            return region.placement
        if self.plan is None:
            return "offload" if region.placement == "offload" else None
        if region.path in self.plan.recompute:
            return "recompute"
        return "offload" if region.path in self._planning.offloaded else "keep"

    def _weights_of(self, region: _Region) -> RegionWeights:
        """Looking them up costs as much as a region's kernels take to launch: once a cycle, where that is enough."""
        if not self._steady:
            return RegionWeights(region.slot.module)
        if region.path not in self._weights:
            self._weights[region.path] = RegionWeights(region.slot.module, steady=True)
        return self._weights[region.path]

    def _is_left_alone(self, call: RegionCall, placement: str | None) -> bool:
        """Whether nothing that this call saves has to be looked at: nothing of it leaves, nor of the calls of which it saves
        something again, and it was not the first to save what another call saves as well, whose items would be numbered anew.
        """
        if self.plan is None:
            return placement in ("keep", "recompute")
        if call.key in self.plan.offload or call.key in self._planning.save_again:
            return False
        if call.key in self._shared and placement != "recompute":
            return False
        self._count("saved", self._saved_by.get(call.key, 0) if placement != "recompute" else 0)
        return True

    def _count(self, kind: str, nbytes: int) -> None:
        self._tally[kind] += nbytes

    def _input_bytes(self, args: Any, kwargs: Any) -> int:
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        storages = (storable(t, self._device, self._min_bytes, frozenset()) for t in tensors)
        return sum({s.data_ptr(): s.nbytes() for s in storages if s is not None}.values())

    def _watch(self, call: RegionCall, out: Any) -> None:
        """See to it that the first gradient to reach an output announces this region's backward."""

        def begin(_: torch.Tensor) -> None:
            self._backward_begins(call)

        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            # A leaf is somebody's weight or input: it outlives the graph, and would gather a hook each forward.
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                call.hooks.append(leaf.register_hook(begin))

    # --- pack and unpack ------------------------------------------------------------------------------------------

    def _pack(self, call: RegionCall, weights: RegionWeights, tensor: torch.Tensor) -> Any:
        storage = storable(tensor, self._device, self._min_bytes, weights)
        if storage is None:
            return SavedAlias(tensor)
        key = StorageIdentity.key_of(storage, tensor._version)
        seen = self._known(key)
        if seen is None:
            ticket = self._admit(call, storage)
            held = weakref.ref(ticket) if ticket is not None else None
            if held is not None:
                call.tickets.append(held)
            seen = _Seen(StorageIdentity(storage, key[1]), call.key, call.number, len(call.items) - 1, held)
            self._seen[key] = seen
            if self._planning.recorder is not None:
                self._seen_by.setdefault(call.key, []).append(seen)
        else:
            ticket = seen.ticket() if seen.ticket is not None else None
            if seen.ticket is not None and seen.key != call.key and seen.ticket not in call.tickets:
                call.tickets.append(seen.ticket)
            if self._planning.recorder is not None:
                self._meet_again(self._planning.recorder, call, seen)
        return SavedAlias(tensor) if ticket is None else _Packed(call, ticket, tensor, self._nothing)

    def _meet_again(self, recorder: Recorder, call: RegionCall, seen: _Seen) -> None:
        """While measuring. What regions far apart save in common (rotary tables) is needed by the last of them, soon after the
        turn: a plan that waits for the first one's backward would fetch it late."""
        if call.key != seen.key:
            self._shared.add(seen.key)
        if call.number > seen.number + _NEIGHBOURS:
            recorder.exclude(seen.key, seen.ordinal)
        elif call.key != seen.key:
            recorder.share(seen.key, call.key)

    def _known(self, key: tuple[int, int]) -> _Seen | None:
        """Where this storage was met before. One storage is stored once, whoever saves views of it."""
        seen = self._seen.get(key)
        if seen is None or seen.identity.expired or (seen.ticket is not None and seen.ticket() is None):
            return None
        return seen

    def _admit(self, call: RegionCall, storage: torch.UntypedStorage) -> Ticket | None:
        """Give a storage met for the first time its ordinal, and a ticket if it is to leave."""
        ordinal = len(call.items)
        call.items.append(storage.nbytes())
        if call.leaving is not None and ordinal not in call.leaving:
            return None
        ticket = self.store.hold(storage_bytes(storage, self._device), call.compute)
        self.ledger.enter(ticket, *call.key)
        call.held.append(ticket)
        if not self._planning.alternating and (not self._leaving or self._leaving[-1]() is not call):
            self._leaving.append(weakref.ref(call))
        return ticket

    def _send(self, call: RegionCall) -> None:
        """Let what was packed until now begin its way to the host."""
        if call.held:
            held, call.held = call.held, []
            self._count("offload", sum(ticket.nbytes for ticket in held))
            self.store.send(held)

    def _exceeds_plan(self, call: RegionCall) -> bool:
        """More bytes than were measured: a longer batch, for which the plan does not hold."""
        if self.plan is None:
            return False
        measured = self._planning.measured_items.get(call.key, ())
        if len(call.items) > len(measured):
            return True
        # Between ranks that route as they like, rows vary.
        slack = _VARIES if self._planning.alternating else 1.01
        return any(then and now > slack * then for now, then in zip(call.items, measured, strict=False))

    def _unpack(self, path: str, packed: SavedAlias | _Packed) -> torch.Tensor:
        if isinstance(packed, SavedAlias):
            return packed.get(path)
        packed.check()
        self._backward_begins(packed.call)
        return packed.view.cut(self.store.wait(packed.ticket))

    # --- the life of a cycle --------------------------------------------------------------------------------------

    def _enter(self, region: _Region) -> RegionCall:
        call = self._step_calls.new_call(region.path)
        self._awaits_call = False
        self._event("F", call)
        return call

    def _backward_begins(self, call: RegionCall) -> None:
        if call.backward_started:
            return
        call.backward_started = True
        call.remove_hooks()
        if call.cycle is not self._step_calls:
            self._take_back(call)  # it was given up: its cycle is over
            return
        if call.key in self._planning.unreached:
            self._planning.outgrown = True
        if not self._backwards:
            self._note_reached(call)
        self._event("B", call)

    def _note_reached(self, call: RegionCall) -> None:
        """When the backward that runs now is over, no more is expected of calls of the same forward."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        if task != self._task:
            self._task, self._reached = task, set()
            Variable._execution_engine.queue_callback(partial(self._step_calls.backward_is_over, self._reached))
        self._reached.add(call.forward)

    def _begin_step(self) -> None:
        if not self._planned:
            self._planning.step_over()
        self._planned = False
        self._settle(other for ref in self._leaving if (other := ref()) is not None)
        self.store.reset_stats()
        self._step_calls, self._awaits_call, self._task = StepCalls(), True, -1
        self._seen.clear()
        self._seen_by.clear()
        self._weights.clear()
        self._leaving.clear()
        self._spare_marks.extend(event for pair in self._waits for event in pair)
        self._waits.clear()
        self._tally = {"saved": 0, "offload": 0}
        if self.plan is None:
            self._shared.clear()
            self._saved_by.clear()
        base, self._base = self._base, None
        self._planning.step_begins(self._captured, base)
        self._followed = self.plan

    def _event(self, kind: str, call: RegionCall) -> None:
        """A region's forward or backward starts: settle, wait and fetch what is due."""
        if self._planning.recorder is not None:
            self._planning.recorder.before_waits(kind, call.key)
        if self.plan is None:
            self._step_by_step(kind, call)
        elif self.plan.planned_bytes:
            if self._planning.stopwatch is not None:
                self._planning.stopwatch.before_event()
            leaving = self._due(kind, call, self.plan)
            awaited = kind == "B" and bool(call.tickets)
            before = self._mark() if leaving or awaited or self._planning.stopwatch is not None else None
            self._settle(leaving)
            self._fetch(self.plan.fetch_at.get((kind, call.key), ()))
            if awaited:
                self._take_back(call)
            if before is not None:
                self._waits.append((before, self._mark()))
            if self._planning.stopwatch is not None:
                away = self.ledger.live_bytes - self.ledger.device_bytes
                self._planning.stopwatch.event(kind, call.key, *self._waits[-1], away)
        if self._planning.recorder is not None:
            self._planning.recorder.after_waits(self.ledger.device_bytes)
        elif self._planning.meter is not None:
            self._planning.meter.event(kind, call.key)

    def _step_by_step(self, kind: str, call: RegionCall) -> None:
        """Without a plan: one call's copy at a time, and the next call in backward order fetched ahead."""
        self._settle(other for ref in self._leaving if (other := ref()) is not None and other is not call)
        self._leaving = [ref for ref in self._leaving if ref() is call]
        if kind == "B":
            if self._planning.recorder is not None:
                self._exclude_held_elsewhere(self._planning.recorder, call)
            self._take_back(call)
            following = self._step_calls.next_backward(self._backwards)
            if following is not None:
                self.store.fetch(following.live_tickets())

    def _exclude_held_elsewhere(self, recorder: Recorder, call: RegionCall) -> None:
        """What has left but whose storage is still alive is held by someone else, such as the batch by its loader: moving
        it frees nothing. Called when the call's own backward begins: the locals of its forward are gone."""
        for seen in self._seen_by.get(call.key, ()):
            ticket = seen.ticket() if seen.ticket is not None else None
            if ticket is not None and ticket.state is TicketState.ON_HOST and not seen.identity.expired:
                recorder.exclude(seen.key, seen.ordinal)

    def _due(self, kind: str, call: RegionCall, plan: Plan) -> list[RegionCall]:
        """The calls to be settled at a moment."""
        due = [
            other
            for key in self._planning.settles.get((kind, call.key), ())
            if (other := self._step_calls.find(key)) is not None
        ]
        if kind == "B" and self._leaving:
            # Where all forwards come before all backwards, a moment of a forward that has not come will not.
            for ref in self._leaving:
                other = ref()
                if other is not None and plan.settle_at.get(other.key, "-")[0] == "F":
                    due.append(other)
            self._leaving.clear()
        return due

    def _fetch(self, keys: Sequence[Key]) -> None:
        if keys:
            wanted = [other.live_tickets() for key in keys if (other := self._step_calls.find(key)) is not None]
            self.store.fetch(*wanted)

    def _settle(self, calls: Iterable[RegionCall]) -> None:
        for call in calls:
            self._send(call)
            for ticket in call.live_tickets():
                self.store.settle(ticket)

    def _take_back(self, call: RegionCall) -> None:
        for ticket in call.live_tickets():
            if ticket.state is not TicketState.ON_DEVICE:
                self.store.recall(ticket)

    def _mark(self) -> Any:
        if self._device.type != "cuda" or (self._captured and not self.store.lanes.time_captured):
            return None
        if self._captured:
            event = external_event()
            event.record()
            return event
        event = self._spare_marks.pop() if self._spare_marks else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _switch_light(self, paths: Iterable[str], on: bool) -> None:
        for path in paths:
            switch = self._regions[path].light
            if switch is not None:
                switch(on)


def _check(claims: list[Claim], budget: int | None, offload: str) -> None:
    if offload not in ("fit", "all"):
        raise PolicyError(f"offload={offload!r} is unknown; valid are 'fit' (what the link carries) and 'all'")
    placements = {c.placement for c in claims}
    for claim in claims:
        if claim.placement == "stash":
            raise PolicyError(
                f"{claim.pattern!r} asks for 'stash', but {claim.path!r} is no paged region; "
                "valid here are keep, recompute, offload"
            )
    if "auto" in placements and budget is None:
        raise PolicyError(
            "policy='auto' needs a budget, such as budget='6GiB': the peak over the memory held before a step"
        )
    if budget is not None and not placements & {"auto", "offload"}:
        raise PolicyError(
            "a budget needs policy='auto' or regions placed 'offload'; with keep and recompute nothing is left to decide"
        )
