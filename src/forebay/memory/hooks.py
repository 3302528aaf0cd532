"""The autograd boundary: regions, pack and unpack, and the life of a step.

Input: a model's regions (each with its `CallSite`) and a placement for each. Output: bitwise the same results, with
the saved tensors where the policy wants them. A region's forward runs inside ``saved_tensors_hooks``. `Manager._pack` gets each
tensor that autograd saves: it returns a detached alias of a weight, a small tensor or one that the plan keeps, and gives the
storage of any other to the store, whose ticket the autograd node owns. When the forward is over, the region's tickets are sent
to the host together. When the gradient reaches the region's output, the manager waits for the region's tickets and starts the
fetches that are due. `Manager._unpack` cuts the saved view out of the ticket's bytes. The ticket dies with the node, and its
memory is free. The graph owns tickets and region calls; the manager owns the store and the `Autotuner`, which decides what is
offloaded.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from forebay.memory.autotune import Autotuner, TuneState
from forebay.memory.call_growth import CallGrowth
from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState
from forebay.memory.overrides import CallSite, LightRecompute
from forebay.memory.recompute import recomputed
from forebay.memory.recorder import TimelineRecorder
from forebay.memory.refusals import check_claims, foreign_saved_tensor_hooks, refuse_nested_checkpointing
from forebay.memory.step import KnownStorage, Region, RegionCall, Step, StepReport, Transfers
from forebay.memory.storage import (
    RegionWeights,
    SavedAlias,
    View,
    gathered_bytes,
    given_parameters,
    holds_rows,
    raise_modified_inplace,
    storable,
    storage_bytes,
    storage_key,
    version_counter,
)
from forebay.memory.timeline import Key, Plan
from forebay.policy import RECOMPUTE_AND_OFFLOAD, Claim, PolicyError

_MIN_BYTES_CUDA = 1 << 20  # a 1 MiB copy reaches 40 of 55 GB/s (H200); below that launches cost more than they free
_RECOMPUTED = ("recompute", RECOMPUTE_AND_OFFLOAD)
_MAX_SHARING_DISTANCE = 2  # calls; a storage that is saved again within so many calls may still be offloaded


class _Packed:
    """What autograd owns in place of an offloaded tensor: the ticket, its region call, how to cut the view, and the version that
    backward expects."""

    __slots__ = ("call", "counter", "ticket", "version", "view")

    def __init__(self, call: RegionCall, ticket: Ticket, tensor: torch.Tensor, empty: torch.Tensor):
        self.call, self.ticket, self.view = call, ticket, View.of(tensor)
        self.counter = version_counter(tensor, empty)
        self.version = self.counter._version

    def check(self) -> None:
        """Raise as autograd would if the tensor was written to since it was saved."""
        if self.counter._version != self.version:
            path, (dtype, size) = self.call.key[0], self.view[:2]
            raise_modified_inplace(path, dtype, size, self.counter._version, self.version)


class Manager:
    """Placements on the regions of one model. Use `forebay.manage` to make one for a Hugging Face model.

    Args:
        sites: region path to call site. Regions without a claim are kept; they still count as events.
        claims: placements, from `forebay.policy.resolve`; placement "auto" leaves the choice to the solver.
        device: the device whose saved tensors are managed.
        budget: bytes that the step's peak may rise over the memory allocated before it; needs an offload or auto region.
        offload: "fit" offloads what the link carries without waiting and lowers the peak, "all" everything but, on a GPU, what
            the last call saves, which its backward reads at once.
        recompute: "light" uses a call site's `light_recompute` where it has one; any other mode of `forebay.memory.recompute`
            checkpoints the whole region.
        min_bytes: storages below this stay on the device. Default: 1 MiB on CUDA, 1 elsewhere.
        precision: "fp8" compresses the rows that are offloaded (`forebay.memory.storage.holds_rows`), but not the inputs of
            regions that run their forward again under a checkpoint: that has to be the same forward. "exact" compresses nothing.

    Raises:
        PolicyError: a budget without anything to decide, ``stash`` (no region is paged), an unknown `offload`.
        ValueError: a region to be recomputed that is already under gradient checkpointing.
    """

    def __init__(
        self,
        sites: Mapping[str, CallSite],
        claims: list[Claim],
        device: torch.device,
        *,
        budget: int | None = None,
        offload: str = "fit",
        recompute: str = "light",
        min_bytes: int | None = None,
        precision: str = "exact",
    ):
        check_claims(claims, budget, offload)
        chosen = {claim.path: claim.placement for claim in claims}
        self._recompute, self._compresses = recompute, precision == "fp8"
        self._regions = {
            path: Region(path, placement := chosen.get(path, "keep"), site, _light(site, placement, recompute))
            for path, site in sites.items()
        }
        self._plans = any(
            region.placement in ("offload", RECOMPUTE_AND_OFFLOAD, "auto") for region in self._regions.values()
        )
        self._budget, self._offload, self._wanted_min_bytes = budget, offload, min_bytes
        self._backwards: list[Key] = []
        self._steady = False
        self._around: Callable[[str], AbstractContextManager[Any]] | None = None
        self._kept_bytes: dict[str, int] = {}  # bytes that each kept or recomputed region was seen to save
        self._warned: set[str] = set()  # regions that ran where they cannot be managed
        self._empty = torch.empty(0, device="cpu")
        self._backward_task = -1  # autograd's number of the backward that runs, or ran last
        self._reached: set[int] = set()  # forwards of the step that it goes through
        self._base: int | None = None  # bytes allocated before the step that is about to begin
        self._shared: set[Key] = set()  # calls with a storage that another call of the same step saves too
        # Held to end and begin a step: threads may run forwards of one model at once, and all find that a step is over.
        self._between_steps = threading.RLock()
        self._manage_on(device)
        for region in self._regions.values():
            if region.placement in _RECOMPUTED:
                refuse_nested_checkpointing(region.path, region.site.module)
        for region in self._regions.values():
            self._install(region)

    def _manage_on(self, device: torch.device) -> None:
        """Start over with the saved tensors of `device`."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # tensors say "cuda:0", never "cuda"
        least = _MIN_BYTES_CUDA if device.type == "cuda" else 1
        self._min_bytes = self._wanted_min_bytes if self._wanted_min_bytes is not None else least
        self.store = HostStore(device)
        self._transfers = Transfers(self.store)
        placements = {path: region.placement for path, region in self._regions.items()}
        self.tuner = Autotuner(
            self.store, placements, self._budget, self._offload, self._switch_light, self._transfers.mark
        )
        self._growth = CallGrowth(self.tuner, self._budget)
        self._step = Step(self._backwards)
        self._ended = False  # `end_step` of the last step was called
        self._followed: Plan | None = None  # in the last step
        self._recording: TimelineRecorder | None = None  # of the current step, while measuring
        self._device = device  # last: a thread that finds it here uses the rest

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        # Trap: a `StorageWeakRef` that is copied frees its reference twice.
        raise TypeError("a Manager belongs to one model in one process; copy or pickle the model, not its manager")

    # --- state and figures --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while steps are measured, and if there is nothing to decide."""
        return self.tuner.plan

    @property
    def placements(self) -> dict[str, str]:
        """Region path to the placement in force; "auto" until there is a plan."""
        return {path: self._in_force(region) or "auto" for path, region in self._regions.items()}

    @property
    def settled(self) -> bool:
        """Whether steps go on as the last one did: nothing is left to measure, try, plan or page-lock."""
        return not self._plans or self.tuner.settled

    def report(self) -> StepReport:
        """Figures of the last step; call after its backward. Waits for the device."""
        out, out_rate = self.store.outbound.measure()
        _, back_rate = self.store.inbound.measure()
        return StepReport(
            planned_bytes=self._followed.planned_bytes if self._followed else 0,
            moved_bytes=out,
            d2h_gbps=out_rate / 1e9 if out_rate else None,
            h2d_gbps=back_rate / 1e9 if back_rate else None,
            wait_ms=self._transfers.wait_ms(),
            saved_bytes_by_placement=self._saved_by_placement(),
            recomputed=sum(placement in _RECOMPUTED for placement in self.placements.values()),
        )

    def _saved_by_placement(self) -> dict[str, int]:
        kept = self._step.saved_bytes - self._step.offloaded_bytes
        totals = {"offload": self._step.host_bytes, "keep": kept}
        totals = {placement: nbytes for placement, nbytes in totals.items() if nbytes}
        for path, region in self._regions.items():
            placement = self._in_force(region) or ""
            if path in self._kept_bytes and (placement == "recompute" or region.placement == "keep"):
                totals[placement] = totals.get(placement, 0) + self._kept_bytes[path]
        return totals

    def take_peak(self) -> int:
        """Peak of allocated bytes since the last call, at the times that `torch.cuda.max_memory_allocated` does not cover because
        measured steps reset it. 0 if none was measured."""
        return self.tuner.peaks.take()

    # --- calls from the training loop ---------------------------------------------------------------------------------

    def follow(self, backwards: Sequence[Key], steady: bool) -> None:
        """Set the order of backwards in a step, such as a pipeline's schedule has it.

        Args:
            backwards: (region path, index of its call in the step); regions that are not managed are ignored.
            steady: the weights keep their storages from a step's first forward to its last backward.
        """
        self._backwards = [key for key in backwards if key[0] in self._regions]
        self._steady = steady

    def forward_begins(self, device: torch.device, model: torch.nn.Module) -> None:
        """The whole model's forward begins. If a step begins with it, that step is planned now, and the memory allocated now is
        its base: when the first region is entered, the embedding's output exists already. What FSDP2 gathered before the forward
        (the weights outside of the layers) is the step's.

        Args:
            device: where the model is now. Trainers move a model after it was managed.

        Raises:
            BudgetError: no plan meets the budget.
        """
        if device != self._device and device.type != "meta":
            self._move_to(device)
        if torch.is_grad_enabled():
            self._growth.count_trained(model)
            self.step_begins(gathered_bytes(model))

    def step_begins(self, own: int = 0) -> None:
        """A step begins with the next region, if the last one is over: it is planned now, and what is allocated now is its base.

        Args:
            own: bytes of that memory that are the step's; negative: as many that are not there yet are not the step's.

        Raises:
            BudgetError: no plan meets the budget.
        """
        self._end_step()
        measures = self._budget is not None and self.tuner.state is not TuneState.FOLLOW
        if measures and self._device.type == "cuda":
            with self._between_steps:
                if self._step.finished:
                    self._base = torch.cuda.memory_allocated(self._device) - own

    def _move_to(self, device: torch.device) -> None:
        """Tickets that are alive stay with the store that holds them."""
        with self._between_steps:
            if device == self._device:
                return  # another thread's forward was first
            if self.plan is not None:
                self._switch_light(self.plan.recompute, False)
            self.store.close()
            self._manage_on(device)

    def forward_failed(self) -> None:
        """The whole model's forward raised. The traceback may hold its calls, and no backward comes."""
        self._step.forward_failed()

    def idle(self) -> None:
        """The device now waits for another process: it computes nothing, and `offload = "all"` counts on most of that time for
        copies."""
        if self.tuner.recorder is not None:
            self.tuner.recorder.idle(self._transfers.mark)

    def join(self) -> None:
        """Call at the end of a step. In a capture the compute stream waits for all copies. Else the next step is planned now: all
        ranks of a pipeline are here at once, and would wait for each other's plans if each made its own at its next forward."""
        self.store.lanes.join()
        self._end_step()

    @contextmanager
    def capturing(self, timed: bool = False) -> Iterator[None]:
        """Context in which whole steps are captured in a CUDA graph. Each must end with `join`: no CUDA event passes between
        inside and outside.

        Args:
            timed: time the step's events and copies when the graph is replayed, for `plan_again`.
        """
        self._transfers.captured = True
        self.store.synchronize()
        self.store.lanes.begin_capture(timed)
        try:
            yield
        finally:
            self.tuner.keep_recorder()
            self._transfers.captured = self.store.lanes.time_captured = False
            self._transfers.forget_waits()
            self.store.synchronize()

    def plan_again(self) -> None:
        """Plan with the times of the last replay; see `forebay.memory.autotune.Autotuner.plan_again`."""
        self.tuner.plan_again()

    @contextmanager
    def suspended(self, around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """Context in which regions run unmanaged, each forward inside ``around(path)``. Earlier graphs keep their tickets."""
        paths = [path for path, placement in self.placements.items() if placement == "recompute"]
        self._around = around
        self._switch_light(paths, False)
        try:
            yield
        finally:
            self._around = None
            self._switch_light(paths, True)

    def detach(self) -> None:
        """Restore the model. Graphs that are alive stay valid and can still run backward."""
        with self._between_steps:  # else a plan that another thread makes now switches light recomputation on again
            self._switch_light(self._regions, False)
            regions, self._regions = self._regions, {}
            for region in reversed(regions.values()):
                region.site.restore()
            self.store.close()

    # --- a region's forward -------------------------------------------------------------------------------------------

    def _install(self, region: Region) -> None:
        if region.placement == "recompute" and region.light is not None:
            region.light(True)
        site = region.site
        # Choosing what to keep takes every operation through Python, up to 50 microseconds each.
        chooses = self._recompute == "save-dispatch" and site.dispatches
        mode = "save-dispatch" if chooses else "full"

        def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
            has_experts = region.light is None or (forward is not site.front and forward is not site.back)
            checkpointed = recomputed(forward, mode, site.called_modules, site.module)
            return partial(self._run, region, forward, checkpointed, has_experts)

        site.wrap(wrapped)

    def _run(
        self,
        region: Region,
        forward: Callable[..., Any],
        checkpointed: Callable[..., Any],
        has_experts: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A region's forward; `checkpointed` is the same under a checkpoint."""
        if (around := self._around) is not None:  # once: another thread may end the profile
            with around(region.path):
                return forward(*args, **kwargs)
        if not torch.is_grad_enabled() or self._is_unmanaged_here(region):
            return forward(*args, **kwargs)
        call, placement = self._enter(region)
        if region.path not in self._kept_bytes and (placement == "recompute" or region.placement == "keep"):
            forward = self._count_kept(region, forward, args, kwargs)
        if placement in _RECOMPUTED and region.light is None:
            forward = checkpointed  # its inputs pass the hooks of `_run_packed`
        if call is None:
            return forward(*args, **kwargs)
        call.rounds = self._compresses and forward is not checkpointed
        call.light = region.light if has_experts else None
        self._transfers.on_event("F", call, self.tuner)
        recorder = self.tuner.recorder
        try:
            if recorder is not None and recorder.reads_inputs:
                recorder.entered(call.key, self._input_bytes(args, kwargs))
            if self._saves_nothing_new(call, placement):
                self._growth.compare_inputs(call, args, kwargs)
                out = forward(*args, **kwargs)
            else:
                out = self._run_packed(region, call, forward, args, kwargs)
            if (recording := self._recording) is not None:  # once: a thread may begin the next step now
                is_light, mark = region.light is not None, self._transfers.mark
                recording.region_left(call.key, call.items, is_light, call.made_again, mark)
                self._growth.record(call, args, kwargs)
        except BaseException:
            call.abandoned = True  # the traceback holds the call, for as long as the caller keeps it
            raise
        self._watch(call, out)
        return out

    def _enter(self, region: Region) -> tuple[RegionCall | None, str | None]:
        """The region's placement, and its call in the step, which begins here if the last one is over; None if nothing plans."""
        if not self._plans:
            return None, self._in_force(region)
        with self._between_steps:
            if self._step.finished:
                self._begin_step()
            placement = self._in_force(region)
            return self._step.new_call(region.path), placement

    def _run_packed(self, region: Region, call: RegionCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of a call that may offload something."""
        weights = self._weights_of(region).with_arguments((args, kwargs))
        call.compute = self.store.lanes.compute_stream()
        call.offload = self.tuner.lookup.offload.get(call.key, frozenset()) if self.plan is not None else None
        with saved_tensors_hooks(partial(self._pack, call, weights), partial(self._unpack, region.path)):
            out = forward(*args, **kwargs)
        self._transfers.send(call)
        self._step.saved_bytes += sum(call.items)
        if self.plan is not None:
            self._growth.compare_items(call, args, kwargs)
        return out

    def _watch(self, call: RegionCall, out: Any) -> None:
        """Let the first gradient that reaches an output announce this region's backward."""

        def begin(_: torch.Tensor) -> None:
            self._backward_begins(call)

        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            # A leaf of autograd is someone's weight or input: it outlives the graph, and would gather a hook each forward.
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                call.hooks.append(leaf.register_hook(begin))

    def _is_unmanaged_here(self, region: Region) -> bool:
        """Whether the region runs where its saved tensors belong to others; see `foreign_saved_tensor_hooks`.

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

    def _in_force(self, region: Region) -> str | None:
        """The placement now; None until there is a plan for it."""
        if region.placement in ("keep", "recompute"):
            return region.placement
        if (plan := self.plan) is None:  # once: another thread may drop it
            return None if region.placement == "auto" else region.placement
        if region.path in plan.recompute:
            return "recompute"
        offloaded = region.path in self.tuner.lookup.regions
        if region.placement == RECOMPUTE_AND_OFFLOAD:
            return RECOMPUTE_AND_OFFLOAD if offloaded else "recompute"
        return "offload" if offloaded else "keep"

    def _saves_nothing_new(self, call: RegionCall, placement: str | None) -> bool:
        """Whether the call can run without hooks: it offloads nothing, saves nothing again that another call offloads, and is not
        the first to save a storage of another call, whose items would be numbered differently."""
        if (plan := self.plan) is None:  # once: another thread may drop it
            return placement in ("keep", "recompute")
        if call.key in plan.offload or call.key in self.tuner.lookup.saves_offloaded:
            return False
        if placement != "recompute":
            if call.key in self._shared:
                return False
            self._step.saved_bytes += self._growth.saved_bytes(call.key)
        return True

    def _weights_of(self, region: Region) -> RegionWeights:
        """Looking weights up takes the host as long as a region's kernels: once a step, if they are steady."""
        if not self._steady:
            return RegionWeights(region.site.module)
        if region.path not in self._step.weights:
            self._step.weights[region.path] = RegionWeights(region.site.module, steady=True)
        return self._step.weights[region.path]

    def _count_kept(self, region: Region, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """In the first call of a region that stays on the device: count the bytes that it holds there, for the report."""
        self._kept_bytes[region.path] = 0
        if self._in_force(region) == "recompute" and region.light is None:
            self._kept_bytes[region.path] = self._input_bytes(args, kwargs)  # a checkpoint keeps these and nothing else
            return forward
        weights = RegionWeights(region.site.module).with_arguments((args, kwargs))
        counted: dict[tuple[int, int], StorageWeakRef] = {}

        def count(tensor: torch.Tensor) -> SavedAlias:
            storage = storable(tensor, self._device, 1, weights)
            if storage is not None and (key := storage_key(storage, tensor._version)) not in counted:
                counted[key] = StorageWeakRef(storage)
                self._kept_bytes[region.path] += storage.nbytes()
            return SavedAlias(tensor)

        def counting(*a: Any, **k: Any) -> Any:
            with saved_tensors_hooks(count, lambda kept: kept.get(region.path)):
                return forward(*a, **k)

        return counting

    def _input_bytes(self, args: Any, kwargs: Any) -> int:
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        weights = given_parameters((args, kwargs))
        storages = (storable(t, self._device, self._min_bytes, weights) for t in tensors)
        return sum({s.data_ptr(): s.nbytes() for s in storages if s is not None}.values())

    # --- pack and unpack ----------------------------------------------------------------------------------------------

    def _pack(self, call: RegionCall, weights: RegionWeights, tensor: torch.Tensor) -> SavedAlias | _Packed:
        """Called by autograd for each tensor that it saves in a region's forward. Returns what autograd owns instead."""
        storage = storable(tensor, self._device, self._min_bytes, weights)
        if storage is None:
            return SavedAlias(tensor)
        key = storage_key(storage, tensor._version)
        saved = self._saved_before(key)
        if saved is None:
            ticket = self._record_saved(call, storage, key, call.rounds and holds_rows(tensor))
            if self._recording is not None:
                call.note_made_again(tensor)
        else:
            ticket = saved.ticket() if saved.ticket is not None else None
            if ticket is not None and not self.store.may_stand_for(ticket, storage):
                return SavedAlias(tensor)
            if ticket is not None and ticket.rounds and not (call.rounds and tensor.dtype is torch.bfloat16):
                # Needed to the bit.
                if ticket.state is not TicketState.UNSENT:
                    return SavedAlias(tensor)
                ticket.rounds = False
            if saved.ticket is not None and saved.key != call.key and saved.ticket not in call.tickets:
                call.tickets.append(saved.ticket)
            if (recording := self._recording) is not None:
                self._record_shared(recording, call, saved)
        return SavedAlias(tensor) if ticket is None else _Packed(call, ticket, tensor, self._empty)

    def _unpack(self, path: str, packed: SavedAlias | _Packed) -> torch.Tensor:
        """Called by autograd for each saved tensor that backward reads, any number of times."""
        if isinstance(packed, SavedAlias):
            return packed.get(path)
        packed.check()
        self._backward_begins(packed.call)
        return packed.view.cut(self.store.wait(packed.ticket))

    def _saved_before(self, key: tuple[int, int]) -> KnownStorage | None:
        """The storage, if it was saved in this step: it is stored once, however many nodes save views of it."""
        saved = self._step.saved.get(key)
        if saved is None or saved.weak.expired() or (saved.ticket is not None and saved.ticket() is None):
            return None
        return saved

    def _record_saved(
        self, call: RegionCall, storage: torch.UntypedStorage, key: tuple[int, int], rounds: bool
    ) -> Ticket | None:
        """Record a storage that this step saves for the first time. Returns its ticket if it is to be offloaded."""
        item = len(call.items)
        call.items.append(storage.nbytes())
        ticket: Ticket | None = None
        ref: weakref.ref[Ticket] | None = None
        if call.offload is None or item in call.offload:
            ticket = self.store.new_ticket(storage_bytes(storage, self._device), call.compute, rounds)
            ref = weakref.ref(ticket)
            call.unsent.append(ticket)
            call.tickets.append(ref)
            unreleased = self._step.unreleased
            if not self.tuner.alternating and (not unreleased or unreleased[-1]() is not call):
                unreleased.append(weakref.ref(call))
        saved = KnownStorage(StorageWeakRef(storage), call.key, call.number, item, ref)
        self._step.saved[key] = saved
        if self._recording is not None:
            self._step.saved_by.setdefault(call.key, []).append(saved)
        return ticket

    def _record_shared(self, recorder: TimelineRecorder, call: RegionCall, saved: KnownStorage) -> None:
        """A storage that distant regions save (rotary tables) is needed by the last of them, soon after the turn: a plan that
        waits for the first one's backward would fetch it late."""
        if call.key != saved.key:
            self._shared.add(saved.key)
        if call.number > saved.number + _MAX_SHARING_DISTANCE:
            recorder.exclude(saved.key, saved.item)
        elif call.key != saved.key:
            recorder.share(saved.key, call.key)

    # --- the life of a step -------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Plan the next step, if the last one is over."""
        if self._around is not None:
            return  # a new plan would switch light recomputation on or off within a profile
        with self._between_steps:
            if self._plans and not self._transfers.captured and not self._ended and self._step.finished:
                self.tuner.end_step()
                self._ended = True

    def _begin_step(self) -> None:
        if not self._ended:
            self.tuner.end_step()
        self._ended, self._backward_task = False, -1
        self._transfers.begin_step(self._step)
        self._step.forget_storages()
        self._step = Step(self._backwards)
        if self.plan is None:
            self._shared.clear()
            self._growth.clear()
        base, self._base = self._base, None
        self.tuner.begin_step(self._transfers.captured, base)
        recorder = self.tuner.recorder
        self._recording = recorder if isinstance(recorder, TimelineRecorder) else None
        self._followed = self.plan

    def _backward_begins(self, call: RegionCall) -> None:
        if call.backward_started:
            return
        call.backward_started = True
        call.remove_hooks()
        if call.step is not self._step:
            self._transfers.take_back(call)  # it was abandoned: its step is over
            return
        if self.plan is not None and call.key not in self.tuner.lookup.offload:
            self.tuner.call_is_new(call.key)
        if not self._backwards:
            self._note_reached(call)
        self._transfers.on_event("B", call, self.tuner)

    def _note_reached(self, call: RegionCall) -> None:
        """When the backward that runs now is over, no more is expected of calls of the same forward."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        if task != self._backward_task:
            self._backward_task, self._reached = task, set()
            finished = partial(self._step.backward_finished, self._reached)
            Variable._execution_engine.queue_callback(finished)
            # If the backward fails, autograd drops the callback without calling it. The caller may keep the loss.
            weakref.finalize(finished, self._step.backward_finished, self._reached).atexit = False
        self._reached.add(call.forward)

    def _switch_light(self, paths: Iterable[str], on: bool) -> None:
        for path in paths:
            region = self._regions.get(path)
            if region is not None and region.light is not None:
                region.light(on)


def _light(site: CallSite, placement: str, recompute: str) -> LightRecompute | None:
    """How a region recomputes by itself. Under "recompute+offload" its inputs are all that is left to offload."""
    return site.light_recompute if recompute == "light" and placement != RECOMPUTE_AND_OFFLOAD else None
