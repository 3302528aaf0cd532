"""HostPool: host memory that is reserved once, page-locked on a GPU, and lent in blocks of exact size.

Input: a number of bytes. Output: a `HostBlock`, which its holder gives back or drops. The pool owns slabs, from which it cuts the
blocks; a block keeps its slab alive. The pool copies nothing: its users record in blocks and slabs the last copies from and to
them, because a block comes back while copies from it are only enqueued.
"""

import resource
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.memory.copy_lanes import CopyDone

_ALIGN = 512  # bytes; keeps views of every dtype aligned, and is the device allocator's rounding
_SMALL_SLAB = 64 << 20  # bytes; smaller page-locked blocks share slabs of this size
# What cudaHostRegister returns. torch knows only the texts, and that of 2 is "out of memory" for a limit as well.
_CUDA_ERRORS: Mapping[int, str] = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    801: "cudaErrorNotSupported",
}


@dataclass(eq=False, slots=True)
class HostBlock:
    """A piece of a slab.

    Attributes:
        bytes_: uint8, of exactly the size asked for.
        length: bytes it takes of the slab, rounded up.
        last_read: the last copy from here. Trap: a copy that writes here must wait for it, because a block comes back while
            copies from it are only enqueued.
    """

    bytes_: torch.Tensor
    slab: "_Slab"
    start: int
    length: int
    last_read: CopyDone | None = None


@dataclass(eq=False)
class _Slab:
    """One registered piece of host memory. All readers share one stream and all writers another, so the last copy of each kind
    ends after all others of its kind."""

    memory: torch.Tensor
    pinned: bool
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, length), sorted, never adjacent
    last_read: CopyDone | None = None
    last_written: CopyDone | None = None
    in_pool: bool = True
    used: bool = True  # since the pool's `reset_stats`

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

    def cut(self, start: int, length: int, nbytes: int, last_read: CopyDone | None) -> HostBlock:
        return HostBlock(self.memory[start : start + nbytes], self, start, length, last_read)

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not self.pinned or ending():
            return
        try:
            # Trap: memory that is unregistered while a copy uses it is lost to that copy.
            for copy in (self.last_read, self.last_written):
                if copy is not None:
                    copy.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


class HostPool:
    """Slabs of host memory, and blocks of exact size cut from them.

    ``torch.empty(pin_memory=True)`` is not used: the caching host allocator rounds each block up to a power of two, up to twice
    the bytes. Here ordinary memory is registered with ``cudaHostRegister``. That takes about 0.32 s a GiB, so it happens in the
    first step only: blocks go out again as they came back, and become holes for other sizes only if none fits.

    Args:
        pin: page-lock the slabs (needs CUDA).
        small_slab: page-locked blocks smaller than this share slabs of this many bytes; 0: a slab for each new block.
    """

    def __init__(self, pin: bool, small_slab: int = _SMALL_SLAB):
        self._pin = pin
        self._small_slab = small_slab if pin else 0
        self._slabs: list[_Slab] = []
        # Blocks that are free, by length. A step asks for the same sizes again, thousands of them in a pipeline: searching all
        # holes each time, or keeping them merged, would take the host longer than the device computes.
        self._free: dict[int, list[HostBlock]] = {}
        self._returned: deque[HostBlock] = deque()  # since the last call: `give` may run in the middle of any other

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> HostBlock:
        """A block of `nbytes`: a free one of that length, else from the smallest hole that fits, else from a new slab.

        Raises:
            MemoryError: the host cannot allocate or page-lock that much.
        """
        self._collect_returned()
        length = -(-nbytes // _ALIGN) * _ALIGN
        free = self._free.get(length)
        if free:
            block = free.pop()
            block.slab.used = True
            if block.bytes_.numel() == nbytes:
                return block
            return block.slab.cut(block.start, length, nbytes, block.last_read)
        self._merge_free()
        slab, hole = self._smallest_hole(length) or (self._grow(max(length, self._small_slab)), 0)
        slab.used = True
        return slab.cut(slab.take(hole, length), length, nbytes, slab.last_read)

    def give(self, block: HostBlock) -> None:
        """Return a block, from any thread and in the middle of any other call. A copy from it may still run."""
        if block.slab.in_pool:  # else the block dies here, and the last one takes its slab along
            self._returned.append(block)

    def reset_stats(self) -> None:
        """Start anew to note which slabs are used, for `trim`."""
        for slab in self._slabs:
            slab.used = False

    def trim(self) -> None:
        """Free the slabs without a block that is out, now or since `reset_stats`. The host waits for their copies."""
        self._merge_free()
        for slab in self._slabs:
            slab.in_pool = not slab.idle or slab.used
        self._slabs = [slab for slab in self._slabs if slab.in_pool]

    def close(self) -> None:
        """Free every slab; one that has blocks out lives on until the last of them dies."""
        for slab in self._slabs:
            slab.in_pool = False
        self._slabs.clear()
        self._free.clear()
        self._returned.clear()

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if block.slab.in_pool:
                self._free.setdefault(block.length, []).append(block)

    def _merge_free(self) -> None:
        """Turn the free blocks into holes."""
        self._collect_returned()
        for blocks in self._free.values():
            for block in blocks:
                block.slab.give(block.start, block.length)
        self._free.clear()

    def _smallest_hole(self, length: int) -> tuple[_Slab, int] | None:
        """The slab and the index of the smallest hole of at least `length`; None if there is none."""
        holes = ((room, slab, i) for slab in self._slabs for i, (_, room) in enumerate(slab.holes) if room >= length)
        best = min(holes, key=lambda found: found[0], default=None)
        return best and best[1:]

    def _grow(self, size: int) -> _Slab:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is
        except RuntimeError as error:
            raise MemoryError(
                f"cannot allocate {size} bytes of host memory for offloaded activations; this pool already holds "
                f"{self.reserved_bytes} bytes. Offload less: fewer regions, or a larger device budget"
            ) from error
        if self._pin:
            self._page_lock(memory)
        slab = _Slab(memory, self._pin, [(0, size)])
        self._slabs.append(slab)
        return slab

    def _page_lock(self, memory: torch.Tensor) -> None:
        size = memory.numel()
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if code != 0:
            _clear_cuda_error()
            raise MemoryError(
                f"cannot page-lock {size} bytes of host memory for offloaded activations: cudaHostRegister "
                f"returned {_CUDA_ERRORS.get(code, 'error')} ({code}). This pool already holds {self.reserved_bytes} bytes; "
                f"{_locked_limit()}. Raise the limit (`ulimit -l unlimited`; for a container `--ulimit memlock=-1`, and "
                "enough memory), or offload less: fewer regions, or a larger device budget"
            )


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "`ulimit -l` sets no limit here, so it is the container's or the machine's"
    return f"`ulimit -l` limits locked memory to {limit} bytes"


def _clear_cuda_error() -> None:
    """Clear the error of a refused call; the next kernel launch would report it as its own."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
