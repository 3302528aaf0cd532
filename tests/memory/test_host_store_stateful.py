"""HostStore against a model of it, while tickets die at any point of its calls: here, in another thread, by the collector.

A call of the store runs under a trace function that counts the bytecodes of its functions and lets tickets die at a chosen one,
as the garbage collector may. After each call the blocks that are out are those of the live tickets, no two share a byte, and
each ticket's bytes are those that were held. Blocks that came back are filled with 0xFF, a NaN: bytes read from there show.
"""

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from forebay.memory import copy_lanes, host_pool, host_store, host_ticket
from forebay.memory.host_pool import HostBlock, HostPool
from forebay.memory.host_store import HostStore
from forebay.memory.host_ticket import Ticket, TicketState
from tests.helpers import sent, used_bytes

MODULES = (copy_lanes, host_pool, host_store, host_ticket)
SOURCE = "".join(map(inspect.getsource, MODULES))
FILES = {module.__file__ for module in MODULES}
SIZES = (1, 512, 700, 1024, 1500, 2000, 3000, 5000)
WITH_BLOCK = (TicketState.LEAVING, TicketState.ON_HOST, TicketState.RETURNING)


class Held(NamedTuple):
    ticket: Ticket
    truth: torch.Tensor


class Death(NamedTuple):
    """A share of the tickets dies at bytecode number `at` of what a call runs of a function."""

    function: str
    at: int
    share: float
    way: str


def deaths(*functions: str) -> Any:
    """Within a call that runs these of the stores' functions."""
    assert all(f"def {name}(" in SOURCE for name in functions), functions
    return st.builds(
        Death,
        st.sampled_from(functions),
        st.integers(0, 60),
        st.sampled_from([0.3, 0.7, 1.0]),
        st.sampled_from(["here", "thread", "collector"]),
    )


class PoisonedPool(HostPool):
    def give(self, block: HostBlock) -> None:
        block.bytes_.fill_(0xFF)
        super().give(block)


def kill(victims: list[Any], way: str) -> None:
    """Drop the last references to tickets."""
    if way == "collector":
        cycle: list[Any] = [*victims]
        cycle.append(cycle)
        victims.clear()
        del cycle
        gc.collect(0)
    elif way == "thread":
        thread = threading.Thread(target=victims.clear)
        thread.start()
        thread.join()
    else:
        victims.clear()


@contextmanager
def injected(at: int, what: Callable[[], None], function: str = "") -> Iterator[Callable[[], bool]]:
    """Call `what` before bytecode number `at` of the stores' code, or of its functions of that name; at the end if there are
    fewer. What is yielded tells whether it was called before the end."""
    left, done, early = at, False, False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, done, early
        if event == "opcode" and not done:
            left -= 1
            if left < 0:
                done = early = True
                what()
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if done or code.co_filename not in FILES or function not in ("", code.co_name):
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield lambda: early
    finally:
        sys.settrace(before)
        if not done:
            what()


some = st.lists(st.integers(0, 30), min_size=1, max_size=6)


class Stores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(torch.device("cpu"))
        self.store.pool = PoisonedPool(pin=False)
        self.held: list[Held] = []
        self.made = 0
        self.loud: list[Any] = []  # exceptions of finalizers, which Python only prints
        self.hook, sys.unraisablehook = sys.unraisablehook, self.loud.append
        gc.disable()

    def teardown(self) -> None:
        try:
            self.held.clear()
            gc.collect()
            self.slots_are_those_of_live_tickets()
            self.store.reset_stats()
            self.store.trim()
            assert self.store.pool.reserved_bytes == 0
        finally:
            gc.enable()
            sys.unraisablehook = self.hook

    def attacked(self, death: Death, call: Callable[[], Any], used: list[Held]) -> Any:
        """The call's result, while a share of the tickets that it is not given die."""
        others = [held for held in self.held if held not in used]
        doomed = {id(held) for held in others[: round(death.share * len(others))]}
        victims: list[Any] = [held.ticket for held in self.held if id(held) in doomed]
        self.held = [held for held in self.held if id(held) not in doomed]
        others.clear()
        with injected(death.at, lambda: kill(victims, death.way), death.function):
            return call()

    def pick(self, numbers: list[int]) -> list[Held]:
        return list({id(h): h for n in numbers if self.held and (h := self.held[n % len(self.held)])}.values())

    @rule(
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=8),
        death=deaths("new_ticket", "send", "_copy_out", "take", "_merge_free"),
        send=st.booleans(),
    )
    def hold(self, sizes: list[int], death: Death, send: bool) -> None:
        fresh: list[Held] = []
        for size in sizes:
            self.made += 1
            truth = torch.full((size,), self.made % 251, dtype=torch.uint8)
            ticket = self.attacked(death, lambda truth=truth: self.store.new_ticket(truth.clone(), None), fresh)
            fresh.append(Held(ticket, truth))
            self.held.append(fresh[-1])
            del ticket
        if send:
            self.attacked(death, lambda: self.store.send([h.ticket for h in fresh]), fresh)

    @precondition(lambda self: self.held)
    @rule(which=some, death=deaths("send", "_copy_out", "take", "_merge_free", "_collect_returned", "give"))
    def send(self, which: list[int], death: Death) -> None:
        chosen = self.pick(which)
        self.attacked(death, lambda: self.store.send([h.ticket for h in chosen]), chosen)
        assert all(h.ticket.state is not TicketState.UNSENT for h in chosen)

    @precondition(lambda self: self.held)
    @rule(which=some, death=deaths("release", "guard_block", "advance"))
    def release(self, which: list[int], death: Death) -> None:
        chosen = self.pick(which)
        self.attacked(death, lambda: [self.store.release(h.ticket) for h in chosen], chosen)
        assert all(h.ticket.state is not TicketState.LEAVING for h in chosen)

    @precondition(lambda self: self.held)
    @rule(which=some, death=deaths("fetch", "_copy_back", "copy_back", "_allocate_target"))
    def fetch(self, which: list[int], death: Death) -> None:
        chosen = self.pick(which)
        tickets = [h.ticket for h in chosen]
        half = len(tickets) // 2
        self.attacked(death, lambda: self.store.fetch(tickets[:half], tickets[half:], tickets[:1]), chosen)
        assert all(ticket.state is not TicketState.ON_HOST for ticket in tickets)

    @precondition(lambda self: self.held)
    @rule(which=some, death=deaths("wait", "recall", "fetch"))
    def wait(self, which: list[int], death: Death) -> None:
        chosen = self.pick(which)
        for held in chosen:
            got = self.attacked(death, lambda held=held: self.store.wait(held.ticket), chosen)
            assert torch.equal(got, held.truth)

    @rule(
        death=deaths("trim", "_merge_free", "give", "_collect_returned"),
        call=st.sampled_from(["reset_stats", "trim", "synchronize"]),
    )
    def between_steps(self, death: Death, call: str) -> None:
        self.attacked(death, getattr(self.store, call), [])

    @invariant()
    def slots_are_those_of_live_tickets(self) -> None:
        assert not self.loud, f"a finalizer raised: {self.loud[0]}"
        blocks = [held.ticket.host_block for held in self.held if held.ticket.host_block is not None]
        assert used_bytes(self.store.pool) == sum(block.length for block in blocks), "a block was lost, or is out twice"
        places = sorted((block.slab.memory.data_ptr() + block.start, block.length) for block in blocks)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(places))

    @invariant()
    def bytes_are_there(self) -> None:
        for ticket, truth in self.held:
            if ticket.device_bytes is not None:
                assert torch.equal(ticket.device_bytes, truth)
            if ticket.state in WITH_BLOCK:
                assert ticket.host_block is not None and torch.equal(ticket.host_block.bytes_, truth)


# Not shrunk: each attempt takes as long as an example.
QUICK = {"deadline": None, "database": None, "phases": (Phase.explicit, Phase.generate)}
Stores.TestCase.settings = settings(max_examples=15, stateful_step_count=20, derandomize=True, **QUICK)
TestStores = Stores.TestCase


@pytest.mark.slow
def test_long_runs() -> None:
    run_state_machine_as_test(Stores, settings=settings(max_examples=300, stateful_step_count=50, **QUICK))


@pytest.mark.parametrize("way", ["here", "thread"])
@pytest.mark.parametrize("call", ["new_ticket", "send", "fetch", "trim"])
def test_tickets_may_die_at_each_bytecode_of_a_call(call: str, way: str) -> None:
    """Blocks of three lengths have come back, so a block of a fourth makes holes of them all."""
    at = 0
    while _dies_at(at, call, way):
        at += 1
    assert at > 5


def _dies_at(at: int, call: str, way: str) -> bool:
    """Whether the call has that many bytecodes."""
    store = HostStore(torch.device("cpu"))
    away = [sent(store, torch.full((700,), 7, dtype=torch.uint8))]
    store.release(away[0])
    doomed = [sent(store, torch.full((size,), 3, dtype=torch.uint8)) for size in (512, 2048, 4096)]
    for size in (512, 1024, 1536):
        sent(store, torch.zeros(size, dtype=torch.uint8))  # dies at once: its block is in the pool again
    fresh = [store.new_ticket(torch.full((3000,), 5, dtype=torch.uint8), None)]
    calls: dict[str, Callable[[], Any]] = {
        "new_ticket": lambda: fresh.append(store.new_ticket(torch.zeros(9, dtype=torch.uint8), None)),
        "send": lambda: store.send(fresh),
        "fetch": lambda: store.fetch(away),
        "trim": store.trim,
    }
    with injected(at, lambda: kill(doomed, way)) as early:
        calls[call]()
    blocks = [t.host_block for t in (*away, *fresh) if t.host_block is not None]
    assert used_bytes(store.pool) == sum(block.length for block in blocks), f"bytecode {at}"
    assert bool((store.wait(away[0]) == 7).all() and (store.wait(fresh[0]) == 5).all())
    return early()
