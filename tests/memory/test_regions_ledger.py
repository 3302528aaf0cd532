"""The ledger holds nothing, and forgets what is dead."""

from forebay.memory.host_store import Ledger, Ticket, TicketState


def test_it_counts_the_living_and_does_not_grow_with_the_dead() -> None:
    ledger = Ledger()
    kept = [Ticket(10, None, TicketState.ON_HOST) for _ in range(300)]
    for ticket in kept:
        ledger.enter(ticket, "a", 0)
    for _ in range(10_000):
        ledger.enter(Ticket(1, None, TicketState.ON_HOST), "b", 1)
    assert ledger.live_tickets == 300 and ledger.live_bytes == 3000 and ledger.by_region() == {"a": 3000}
    assert len(ledger._entries) <= 2 * 300 + 256
    kept.clear()
    del ticket
    assert ledger.live_tickets == 0
