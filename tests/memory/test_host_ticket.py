"""Ticket: states are checked, and its death frees the bytes with or without its store."""

from itertools import product
from unittest import mock

import pytest
import torch

from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import TicketState
from tests.helpers import sent, used_bytes


def test_a_wrong_transition_names_both_states() -> None:
    ways = {
        "unsent": {"leaving", "on_device"},
        "leaving": {"on_host", "on_device"},
        "on_host": {"returning"},
        "returning": {"on_device"},
        "on_device": set(),
    }
    ticket = HostStore(torch.device("cpu")).new_ticket(torch.zeros(8, dtype=torch.uint8), None)
    for source, target in product(TicketState, TicketState):
        ticket.state = source
        if target.value in ways[source.value]:
            ticket.advance(target)
            assert ticket.state is target
        else:
            with pytest.raises(RuntimeError, match=f"from {source.value} to {target.value}"):
                ticket.advance(target)


def test_nobody_finds_a_ticket_that_dies() -> None:
    """Another thread may look for tickets while one gives its bytes back."""
    store = HostStore(torch.device("cpu"))
    ticket = sent(store, torch.ones(4096, dtype=torch.uint8))
    found = []
    with mock.patch.object(store.pool, "give", lambda _: found.append(store.live_tickets)):
        del ticket
    assert found == [0]


def test_a_ticket_that_outlives_its_store_frees_its_bytes() -> None:
    store = HostStore(torch.device("cpu"))
    leaving, on_host = (sent(store, torch.ones(4096, dtype=torch.uint8)) for _ in range(2))
    store.release(on_host)
    pool = store.pool
    del store
    assert used_bytes(pool) == 2 * 4096
    del leaving, on_host
    assert used_bytes(pool) == 0
