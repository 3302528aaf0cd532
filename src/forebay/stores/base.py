"""The store's contract and the ticket with its named states.

A store takes the bytes of tensors (`hold`, `send`), brings them back ahead of time (`fetch`) and makes the compute stream
wait for them (`wait`). What it hands out is a `Ticket`; the autograd graph owns it, and when the last reference goes,
the ticket gives its memory back. No store keeps a strong reference to a ticket.
"""

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class State(enum.Enum):
    """Where a ticket's bytes are. Arrows are the only legal steps:

    ``HELD`` -> ``LEAVING`` (copy out enqueued) -> ``ON_HOST`` (copied out, device memory dropped) -> ``RETURNING`` (fetch
    enqueued) -> ``ON_DEVICE``; ``HELD`` or ``LEAVING`` -> ``ON_DEVICE`` (backward came before the copy was enqueued, or over:
    nothing is moved back; or an engine emptied the storage, and fills it again).
    """

    HELD = "held"
    LEAVING = "leaving"
    ON_HOST = "on_host"
    RETURNING = "returning"
    ON_DEVICE = "on_device"

    __hash__ = object.__hash__  # each is one object; the enum's own hash is that of its name, by a call to Python


_NEXT = frozenset(
    {
        (State.HELD, State.LEAVING),
        (State.HELD, State.ON_DEVICE),
        (State.LEAVING, State.ON_HOST),
        (State.LEAVING, State.ON_DEVICE),
        (State.ON_HOST, State.RETURNING),
        (State.RETURNING, State.ON_DEVICE),
    }
)


class Ticket:
    """Bytes of one storage, held by a store.

    Attributes:
        nbytes: size of the storage.
        state: where the bytes are; changed only through `step`.
        device_bytes: the uint8 device tensor, while there is one; until the ticket leaves, a view of the storage that was held.
    """

    __slots__ = ("__weakref__", "device_bytes", "nbytes", "state")

    def __init__(self, nbytes: int, device_bytes: torch.Tensor | None, state: State):
        self.nbytes = nbytes
        self.device_bytes = device_bytes
        self.state = state

    def step(self, to: State) -> None:
        """Go to the next state.

        Raises:
            RuntimeError: the step is not one of the arrows; both states are named.
        """
        if (self.state, to) not in _NEXT:
            raise RuntimeError(f"a ticket cannot go from {self.state.value} to {to.value}")
        self.state = to


class Store(Protocol):
    """What the saved-tensor manager asks of a store. All calls are made on the host and none of them blocks it.

    Tensors that are saved together leave together and come back together: what a copy costs the host beside itself (events,
    streams) it costs once for all of them.
    """

    def hold(self, device_bytes: torch.Tensor, compute: Any) -> Ticket:
        """Take the bytes of a storage (uint8, on the device), which stay where they are until `send`.

        Args:
            compute: the stream that made them and is to read them again; None on a CPU. If the current stream is another, that
                one is waited for as well.
        """

    def send(self, tickets: Sequence[Ticket]) -> None:
        """Enqueue the copies out. Those that are not held stay as they are."""

    def settle(self, ticket: Ticket) -> None:
        """Make the compute stream wait for the copy out and drop the device memory. No-op unless leaving."""

    def fetch(self, *batches: Sequence[Ticket]) -> None:
        """Enqueue the way back; a batch is there when all of it is. Those that are not on the host stay as they are; who is in
        two batches comes back with the first."""

    def wait(self, ticket: Ticket) -> torch.Tensor:
        """The uint8 device tensor, safe to use on the compute stream and on the current one; fetches first if nobody did."""

    def close(self) -> None:
        """Give all memory back."""
