"""Steps: which tickets come back at an event."""

import weakref

import pytest
import torch

from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState
from forebay.memory.step import RegionCall, Step, Transfers, _due_back
from tests.helpers import sent
from tests.memory.devices import SimulatedDevice

SIZE = 4096


def calls_away(step: Step, store: HostStore, *counts: int) -> tuple[list[RegionCall], list[list[Ticket]]]:
    """Calls of which so many tickets each are on the host, and the tickets."""
    calls, tickets = [], []
    for number, count in enumerate(counts):
        call = step.new_call(f"r{number}")
        own = [sent(store, torch.randint(0, 256, (SIZE,), dtype=torch.uint8)) for _ in range(count)]
        for ticket in own:
            store.release(ticket)
        call.tickets = [weakref.ref(ticket) for ticket in own]
        calls.append(call)
        tickets.append(own)
    return calls, tickets


@pytest.mark.parametrize(("room", "back"), [(0, 0), (1, 1), (SIZE, 1), (SIZE + 1, 2), (1e9, 5), (float("inf"), 5)])
def test_what_comes_back_fits_the_link_and_the_rest_follows(room: float, back: int) -> None:
    step, store = Step(), HostStore(torch.device("cpu"))
    calls, tickets = calls_away(step, store, 2, 3, 0)
    step.returning = [calls[1].key, calls[0].key]
    store.fetch(*_due_back(step, room))  # the last call's backward is next
    order = [*tickets[1], *tickets[0]]
    assert [t.state is TicketState.RETURNING for t in order] == [n < back for n in range(5)]
    calls[2].backward_started = True
    store.fetch(*_due_back(step, 0))
    assert all(t.state is TicketState.RETURNING for t in tickets[1]), "all of the call whose backward is next"
    calls[1].backward_started = True
    store.fetch(*_due_back(step, 0))
    assert all(t.state is TicketState.RETURNING for t in order) and not step.returning


def test_a_call_whose_graph_died_does_not_come_back() -> None:
    step, store = Step(), HostStore(torch.device("cpu"))
    calls, tickets = calls_away(step, store, 1, 1)
    step.returning = [calls[0].key, calls[1].key]
    del calls[0]
    store.fetch(*_due_back(step, float("inf")))
    assert tickets[0][0].state is TicketState.ON_HOST and tickets[1][0].state is TicketState.RETURNING


def test_marks_are_on_the_device_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on cuda:1 where cuda:0 is the current device, as in a script without `torch.cuda.set_device`."""
    device, store = SimulatedDevice(monkeypatch), HostStore(torch.device("cpu"))
    monkeypatch.setattr(store.lanes, "compute_stream", lambda: 1)
    transfers = Transfers(store)
    transfers._gpu = True
    of_forward = transfers.mark()
    device.current, device.clock = 1, 3.0  # autograd's thread
    assert of_forward.elapsed_time(transfers.mark()) == 3.0
