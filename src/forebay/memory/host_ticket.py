"""Ticket: stands for the bytes of one saved storage, and says where they are.

Input: the uint8 view of a device storage, and the pool that gets the host block back. Output: the named states, one checked
transition, and what a device block needs before it returns to its allocator. The autograd graph owns the ticket, the ticket owns
the bytes, and its death frees them; `forebay.memory.host_store.HostStore` moves them. Bytes that may be rounded are compressed on
the device when they leave it and expanded there when they are read (`forebay.memory.storage.compress`).
"""

import enum
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from forebay.memory.copy_lanes import CopyDone, on_stream
from forebay.memory.host_pool import HostBlock, HostPool
from forebay.memory.storage import compress, expand


class TicketState(enum.Enum):
    """Where a ticket's bytes are. These are the only transitions:

    ``UNSENT`` -> ``LEAVING`` (copy out enqueued) -> ``ON_HOST`` (device memory dropped) -> ``RETURNING`` (copy back enqueued) ->
    ``ON_DEVICE``; and ``UNSENT`` or ``LEAVING`` -> ``ON_DEVICE``, where the bytes never left: backward came first, or another
    engine (FSDP) emptied the storage and fills it again itself.
    """

    UNSENT = "unsent"
    LEAVING = "leaving"
    ON_HOST = "on_host"
    RETURNING = "returning"
    ON_DEVICE = "on_device"

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a slow call to Python


_TRANSITIONS = frozenset(
    {
        (TicketState.UNSENT, TicketState.LEAVING),
        (TicketState.UNSENT, TicketState.ON_DEVICE),
        (TicketState.LEAVING, TicketState.ON_HOST),
        (TicketState.LEAVING, TicketState.ON_DEVICE),
        (TicketState.ON_HOST, TicketState.RETURNING),
        (TicketState.RETURNING, TicketState.ON_DEVICE),
    }
)


@dataclass(eq=False, repr=False, slots=True)
class _HeldBytes:
    """The bytes of a ticket, and what freeing them takes. Dies with its ticket.

    Trap: the ticket itself has no ``__del__``. While that of an object runs, weak references still give the object: another
    thread would go on with a ticket whose bytes are gone.
    """

    pool: HostPool
    device_bytes: torch.Tensor | None
    compute: Any
    others: tuple[Any, ...]
    host_block: HostBlock | None = None
    out: CopyDone | None = None
    back: CopyDone | None = None

    def guard_block(self) -> None:
        """Before the device block returns to its allocator: the streams that may get it next wait for all that uses it.

        Trap: that includes the copy out of a ticket that was taken back while leaving. Its bytes are not needed, but the memory
        that it reads may be unmapped (expandable segments, ``torch.cuda.empty_cache()``).
        """
        last = self.back or self.out  # a copy back comes after `release`, which waited for the copy out
        if last is not None:
            last.block(self.compute)
            for other in self.others:  # the block may belong to the allocator of any of them
                last.block(other)
        for other in self.others:
            self.compute.wait_stream(other)

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        # Trap: this runs at any time, in any thread, also in a garbage collection within any call of the store or the pool. It
        # must not change what a call works on: it only enqueues waits and appends to a deque.
        if ending():
            return
        if self.host_block is not None:
            self.pool.give(self.host_block)
        if self.device_bytes is not None:
            self.guard_block()
            self.device_bytes = None


def _held(name: str) -> Any:
    def put(ticket: "Ticket", value: Any) -> None:
        setattr(ticket.held, name, value)

    return property(attrgetter(f"held.{name}"), put)


class Ticket:
    """The bytes of one storage. The autograd graph owns it; its death frees the bytes.

    Attributes:
        nbytes: size of the storage.
        device_bytes: the uint8 device tensor, compressed or not, or None; until the ticket leaves, a view of the saved storage.
        compute: the stream that made the bytes and reads them again; None on a CPU.
        rounds: the bytes may be compressed on their way out; then a view in another dtype does not come back.
        others: further streams that saved the storage or read it.
        compressed: the bytes were compressed, and are not expanded yet.
        state: where the bytes are; changed only through `advance`.
        host_block: where they are on the host, which goes back to `pool`; None until they are sent.
        out, back: the last copy out and the last copy back.
        address: data pointer of the bytes when they were sent.
    """

    __slots__ = ("__weakref__", "address", "compressed", "held", "nbytes", "rounds", "state")

    device_bytes: Any = _held("device_bytes")
    compute: Any = _held("compute")
    others: Any = _held("others")
    host_block: Any = _held("host_block")
    out: Any = _held("out")
    back: Any = _held("back")

    def __init__(
        self,
        pool: HostPool,
        nbytes: int,
        device_bytes: torch.Tensor,
        compute: Any,
        rounds: bool,
        others: tuple[Any, ...] = (),
    ):
        self.held = _HeldBytes(pool, device_bytes, compute, others)
        self.nbytes, self.rounds, self.compressed, self.address = nbytes, rounds, False, 0
        self.state = TicketState.UNSENT

    @property
    def host_bytes(self) -> int:
        """Bytes that were copied to the host, or would be uncompressed."""
        return self.host_block.bytes_.numel() if self.host_block is not None else self.nbytes

    @property
    def is_emptied(self) -> bool:
        """Whether the storage was resized to less than it held."""
        held = self.device_bytes
        return held is not None and held.untyped_storage().nbytes() < held.numel()

    def advance(self, to: TicketState) -> None:
        """Go to another state.

        Raises:
            RuntimeError: there is no such transition.
        """
        if (self.state, to) not in _TRANSITIONS:
            raise RuntimeError(f"a ticket cannot go from {self.state.value} to {to.value}")
        self.state = to

    def compress(self) -> None:
        """Give up the storage for a compressed copy. Streams that used it may get its block next: they wait for that."""
        assert self.device_bytes is not None
        for other in self.others:
            self.compute.wait_stream(other)
        with on_stream(self.compute):
            self.device_bytes, self.compressed = compress(self.device_bytes), True
        for other in self.others:
            other.wait_stream(self.compute)

    def expand(self) -> None:
        """Give up the compressed bytes for the expanded ones, on the compute stream."""
        assert self.device_bytes is not None
        with on_stream(self.compute):
            expanded = expand(self.device_bytes, self.nbytes)
        self.held.guard_block()  # the compressed block's
        self.device_bytes, self.compressed = expanded, False
