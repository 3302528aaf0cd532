"""Host memory for saved bytes: slabs, and exact-size slots cut from them.

In: a size in bytes. Out: a `Slot`, a contiguous uint8 tensor of just that size. A slot comes back through `give` and goes out
again as it is to who asks for its size; when nobody has, it becomes a hole and is merged with its neighbours, so a later step
with other shapes can use the room. On a GPU machine slabs are page-locked.

Why not ``torch.empty(pin_memory=True)``: the caching host allocator rounds every block up to a power of two (up to
2x the bytes). Here ordinary memory of the exact size is registered with ``cudaHostRegister`` instead. Registering
costs about 0.32 s a GiB, so it happens while the first step runs and not again.

A slot carries the end of the last copy that read from it, and so does a slab. Who writes into a slot waits for its own, or, if
it was cut from a hole, for its slab's (readers are on one stream and so in order among themselves, and so are writers): a slot
that is handed out when its copy was only enqueued is a race that others have shipped. A slab that dies waits for both on the
host: page-locked memory that is unregistered under a copy is lost to it.

A slot may come back at any moment, in any thread: the collector runs where it likes, within a call of this pool too. So `give`
adds to a deque and changes nothing else; the next call looks there first.
"""

import resource
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.stores.streams import Done

_ALIGN = 512  # bytes; keeps every dtype's views aligned, and equals the device allocator's rounding
# Names of what cudaHostRegister returns: torch has the text alone, and 2 reads "out of memory" for a limit as well.
_CUDA_ERRORS: Mapping[int, str] = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    801: "cudaErrorNotSupported",
}
_SMALL_SLAB = 64 << 20  # slots below this share slabs of this size; larger ones get a slab of their own size


@dataclass(eq=False, slots=True)
class Slot:
    """A piece of a slab. ``bytes_`` is a uint8 tensor of exactly the size asked for; ``last_read`` is to be waited for by who
    writes there."""

    bytes_: torch.Tensor
    slab: "_Slab"
    start: int
    length: int
    last_read: Done | None = None

    def read_by(self, copy: Done) -> None:
        """Be told that `copy` reads from here; copies are told of in their order."""
        self.last_read = self.slab.last_read = copy

    def written_by(self, copy: Done) -> None:
        """Be told that `copy` writes here; copies are told of in their order."""
        self.slab.last_written = copy


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    pinned: bool
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, length), sorted, never adjacent
    last_read: Done | None = None
    last_written: Done | None = None
    in_pool: bool = True
    used: bool = True  # since the pool's `restart`

    @property
    def idle(self) -> bool:
        return self.holes == [(0, self.memory.numel())]

    def take(self, hole: int, length: int) -> int:
        start, room = self.holes[hole]
        if room == length:
            del self.holes[hole]
        else:
            self.holes[hole] = (start + length, room - length)
        return start

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not self.pinned or ending():
            return
        try:
            for copy in (self.last_read, self.last_written):
                if copy is not None:
                    copy.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())

    def give(self, start: int, length: int) -> None:
        self.holes.append((start, length))
        self.holes.sort()
        merged: list[tuple[int, int]] = []
        for begin, size in self.holes:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self.holes = merged


class HostPool:
    """Slabs of host memory, owned by one store.

    Args:
        pin: page-lock the slabs (needs CUDA).
        small_slab: page-locked slots below as many bytes share slabs of this size; 0: each slab is as large as its first slot.
    """

    def __init__(self, pin: bool, small_slab: int = _SMALL_SLAB):
        self._pin = pin
        self._small_slab = small_slab if pin else 0
        self._slabs: list[_Slab] = []
        # Slots as they came back, by length. A step asks for the same sizes again and again, a pipeline's for thousands: to look
        # through all holes each time, or to keep them merged, would take the host longer than the device computes.
        self._returned: dict[int, list[Slot]] = {}
        self._given: deque[Slot] = deque()  # what came back since the last call

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are out."""
        self._sort_given()
        holes = sum(size for slab in self._slabs for _, size in slab.holes)
        return self.reserved_bytes - holes - sum(slot.length for slots in self._returned.values() for slot in slots)

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`: one that came back, else from the tightest hole, else from a new slab.

        Raises:
            MemoryError: the host cannot give or page-lock that much; the message says how much the pool holds.
        """
        self._sort_given()
        length = -(-nbytes // _ALIGN) * _ALIGN
        returned = self._returned.get(length)
        if returned:
            slot = returned.pop()
            slot.slab.used = True
            if slot.bytes_.numel() == nbytes:
                return slot
            return self._cut(slot.slab, slot.start, length, nbytes, slot.last_read)
        self._merge()
        best = min(
            ((room, slab, i) for slab in self._slabs for i, (_, room) in enumerate(slab.holes) if room >= length),
            key=lambda found: found[0],
            default=None,
        )
        if best is None:
            slab, hole = self._grow(max(length, self._small_slab)), 0
        else:
            _, slab, hole = best
        slab.used = True
        return self._cut(slab, slab.take(hole, length), length, nbytes, slab.last_read)

    def give(self, slot: Slot) -> None:
        """Take a slot back, from any thread and in the middle of any other call. A copy from it may still run: the next to write
        there waits for `last_read`."""
        if slot.slab.in_pool:  # else it dies here, and its slab with the last of them
            self._given.append(slot)

    def restart(self) -> None:
        """Count from here which slabs are used."""
        for slab in self._slabs:
            slab.used = False

    def trim(self, spare_used: bool = False) -> None:
        """Let go of the slabs of which no slot is out. The host waits for copies that are not over.

        Args:
            spare_used: not of those of which one was out since `restart`.
        """
        self._merge()
        for slab in self._slabs:
            slab.in_pool = not slab.idle or (spare_used and slab.used)
        self._slabs = [slab for slab in self._slabs if slab.in_pool]

    def close(self) -> None:
        """Let go of every slab; one of which slots are out lives on until the last of them dies."""
        for slab in self._slabs:
            slab.in_pool = False
        self._slabs.clear()
        self._returned.clear()
        self._given.clear()

    def _cut(self, slab: _Slab, start: int, length: int, nbytes: int, last_read: Done | None) -> Slot:
        return Slot(slab.memory[start : start + nbytes], slab, start, length, last_read)

    def _sort_given(self) -> None:
        """Put what came back where `take` looks for it."""
        while self._given:
            slot = self._given.popleft()
            if slot.slab.in_pool:
                self._returned.setdefault(slot.length, []).append(slot)

    def _merge(self) -> None:
        """Make holes of the slots that came back."""
        self._sort_given()
        for slots in self._returned.values():
            for slot in slots:
                slot.slab.give(slot.start, slot.length)
        self._returned.clear()

    def _grow(self, size: int) -> _Slab:
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(
                f"the host has no {size} bytes for offloaded activations; this pool already holds {self.reserved_bytes}. "
                "Offload less: fewer regions, or a larger device budget"
            ) from error
        if self._pin:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
            if code != 0:
                _clear_error()
                raise MemoryError(
                    f"the system did not page-lock {size} bytes of host memory for offloaded activations: cudaHostRegister "
                    f"returned {_CUDA_ERRORS.get(code, 'error')} ({code}). This pool already holds {self.reserved_bytes} bytes; "
                    f"{_locked_limit()}. Raise the limit (`ulimit -l unlimited`; for a container `--ulimit memlock=-1`, and "
                    "enough memory), or offload less: fewer regions, or a larger device budget"
                )
        slab = _Slab(memory, self._pin, [(0, size)])
        self._slabs.append(slab)
        return slab


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "`ulimit -l` sets no limit here, so it is the container's or the machine's"
    return f"`ulimit -l` limits locked memory to {limit} bytes"


def _clear_error() -> None:
    """Take the error that a refused call left in CUDA: the next kernel's launch would report it as its own."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
