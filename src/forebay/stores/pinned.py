"""Host memory for saved bytes: slabs, and exact-size slots cut from them.

In: a size in bytes. Out: a `Slot`, a contiguous uint8 tensor of just that size. A slot comes back through `give` and goes out
again as it is to who asks for its size; when nobody has, it becomes a hole and is merged with its neighbours, so a later step
with other shapes can use the room. On a GPU machine slabs are page-locked.

Why not ``torch.empty(pin_memory=True)``: the caching host allocator rounds every block up to a power of two (up to
2x the bytes). Here ordinary memory of the exact size is registered with ``cudaHostRegister`` instead. Registering
costs about 0.32 s a GiB, so it happens while the first step runs and not again.

A slot carries the end of the last copy that read from it, and so does a slab. Who writes into a slot waits for its own, or, if
it was cut from a hole, for its slab's (readers are on one stream and so in order among themselves, and so are writers): a slot
that is handed out when its copy was only enqueued is a race that others have shipped.
"""

from dataclasses import dataclass, field

import torch

from forebay.stores.streams import Done

_ALIGN = 512  # bytes; keeps every dtype's views aligned, and equals the device allocator's rounding
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


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    pinned: bool
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, length), sorted, never adjacent
    last_read: Done | None = None
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

    def __del__(self) -> None:
        if self.pinned:
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

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are out."""
        holes = sum(size for slab in self._slabs for _, size in slab.holes)
        return self.reserved_bytes - holes - sum(slot.length for slots in self._returned.values() for slot in slots)

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`: one that came back, else from the tightest hole, else from a new slab.

        Raises:
            MemoryError: the host cannot give or page-lock that much; the message says how much the pool holds.
        """
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
        """Take a slot back. A copy from it may still run: whoever writes there next waits for `last_read`."""
        if slot.slab.in_pool:
            self._returned.setdefault(slot.length, []).append(slot)

    def restart(self) -> None:
        """Count from here which slabs are used."""
        for slab in self._slabs:
            slab.used = False

    def forget_reads(self) -> None:
        """No copy from any slot that is in the pool is under way: nobody needs to wait for one."""
        for slab in self._slabs:
            slab.last_read = None
        for slots in self._returned.values():
            for slot in slots:
                slot.last_read = None

    def trim(self, spare_used: bool = False) -> None:
        """Let go of the slabs of which no slot is out. Copies must be over (synchronise the lanes first).

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

    def _cut(self, slab: _Slab, start: int, length: int, nbytes: int, last_read: Done | None) -> Slot:
        return Slot(slab.memory[start : start + nbytes], slab, start, length, last_read)

    def _merge(self) -> None:
        """Make holes of the slots that came back."""
        for slots in self._returned.values():
            for slot in slots:
                slot.slab.give(slot.start, slot.length)
        self._returned.clear()

    def _grow(self, size: int) -> _Slab:
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(self._exhausted(size)) from error
        if self._pin:
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
            if int(code) != 0:
                raise MemoryError(f"{self._exhausted(size)} (cudaHostRegister: error {int(code)})")
        slab = _Slab(memory, self._pin, [(0, size)])
        self._slabs.append(slab)
        return slab

    def _exhausted(self, size: int) -> str:
        return f"the host gave no {size} bytes for offloaded activations; the pool already holds {self.reserved_bytes} bytes"
