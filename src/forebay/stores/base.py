"""The store's contract and the ticket with its named states.

A store takes the bytes of a tensor (`put`), brings them back ahead of time (`fetch`) and makes the compute stream
wait for them (`wait`). What it hands out is a `Ticket`; the autograd graph owns it, and when the last reference goes,
the ticket gives its memory back. No store keeps a strong reference to a ticket.
"""

import enum
from typing import Protocol

import torch


class State(enum.Enum):
    """Where a ticket's bytes are. Arrows are the only legal steps:

    ``LEAVING`` -> ``ON_HOST`` (copied out, device memory dropped) -> ``RETURNING`` (fetch enqueued) -> ``ON_DEVICE``;
    ``LEAVING`` -> ``ON_DEVICE`` (backward came before the copy was over: nothing is moved back).
    """

    LEAVING = "leaving"
    ON_HOST = "on_host"
    RETURNING = "returning"
    ON_DEVICE = "on_device"


_NEXT = frozenset(
    {
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
        device_bytes: the uint8 device tensor, while there is one.
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
    """What the saved-tensor manager asks of a store. All calls are made on the host and none of them blocks it."""

    def put(self, device_bytes: torch.Tensor) -> Ticket:
        """Take the bytes of a storage (uint8, on the device); the copy out is enqueued."""

    def settle(self, ticket: Ticket) -> None:
        """Make the compute stream wait for the copy out and drop the device memory. No-op unless leaving."""

    def fetch(self, ticket: Ticket) -> None:
        """Enqueue the way back. No-op unless on the host."""

    def wait(self, ticket: Ticket) -> torch.Tensor:
        """The uint8 device tensor, safe to use on the compute stream; fetches first if nobody did."""

    def close(self) -> None:
        """Give all memory back."""
