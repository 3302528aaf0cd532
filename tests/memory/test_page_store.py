"""PageStore: sizes, spilling to the host, growth, `exactly`, and tickets that die late, early, elsewhere or within a capture."""

import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import PagedRows, give_pages, restore, stash, take_pages
from forebay.memory.page_store import PageStore, PageTicket

BACKENDS = [
    pytest.param("cpu", "reference", id="reference"),
    pytest.param("cpu", "triton", id="interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")),
    pytest.param("cuda:0", "auto", id="gpu", marks=pytest.mark.gpu),
]
GPU = torch.device("cuda:0")
PAGE = 512


def new_store(device: str | torch.device = "cpu", backend: Backend = "reference", **more: Any) -> PageStore:
    return PageStore(device, page_bytes=PAGE, backend=backend, **more)


def count(n: int, device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


def rows_of(tensor: Tensor, live: int | None) -> PagedRows:
    return PagedRows(
        None if live is None else count(live, tensor.device),
        tensor.shape[0],
        tensor[:1].nbytes if tensor.shape[0] else tensor.shape[1] * tensor.element_size(),
    )


def put(store: PageStore, *saved: tuple[Tensor, int | None]) -> PageTicket:
    ticket = store.take([rows_of(tensor, live) for tensor, live in saved])
    stash([tensor for tensor, _ in saved], ticket.tables, backend=store.backend)
    return ticket


def fetched(store: PageStore, ticket: PageTicket, *saved: tuple[Tensor, int | None]) -> bool:
    """Whether the live rows are there again, and what lies behind them was left alone."""
    outs = [torch.full_like(tensor, 77) for tensor, _ in saved]
    restore(ticket.tables, outs, backend=store.backend)
    return all(
        torch.equal(out[:live], tensor[:live]) and bool((out[tensor.shape[0] if live is None else live :] == 77).all())
        for out, (tensor, live) in zip(outs, saved, strict=True)
    )


def wide(n: int, device: str | torch.device = "cpu", width: int = 128) -> Tensor:
    """n rows; of 128 columns, and so one page each."""
    return torch.randn(n, width, device=device)


def sized(store: PageStore, device_pages: int, host_pages: int = 0) -> PageStore:
    store.resize(device_pages, host_pages)
    return store


def free(store: PageStore) -> tuple[int, int, int]:
    """Pages out, SHORT, MOST."""
    assert store._memory is not None
    head, tail, short, most = store._memory.stack.state.tolist()
    return head + store._memory.pages - tail, short, most


def whole(store: PageStore) -> bool:
    """All pages are free and each is there once."""
    assert store._memory is not None
    return free(store)[0] == 0 and sorted(store._memory.stack.pages.tolist()) == list(range(store._memory.pages))


# ---------------------------------------------------------------------------------------------------------------- life, sizes


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_the_first_step_is_counted_and_the_arena_made_for_it(device: str, backend: Backend) -> None:
    store = new_store(device, backend)
    first, second = (wide(100, device), 20), (wide(60, device), 13)
    ticket = put(store, first, second)
    assert not store.sized and ticket.tables[0].arena.device.nbytes == 33 * PAGE, "just the live pages"
    assert ticket.tables[0].arena.host.numel() == 0 and store.live_bytes == 33 * PAGE == store.device_bytes
    other = put(store, first)
    assert fetched(store, ticket, first, second) and fetched(store, other, first)
    del ticket
    last = put(store, second)
    del other, last
    assert int(store.missing_flag()) == 0
    report = store.end_step()
    # 33 + 20 pages were out at once, 160 + 100 could have been; 53 / 64 is 1.
    assert report.pages_out == 53 and report.bytes_out == 53 * PAGE and report.resized
    assert (store.device_pages, store.host_pages) == (54, 260 - 54) and store.generation == 1
    assert (report.device_bytes, report.host_bytes) == (store.device_bytes, store.host_bytes) == (54 * PAGE, 206 * PAGE)
    assert report.missing_pages == 0 and not report.spilled and report.reclaimed_pages == 0
    ticket = put(store, first, second)
    assert ticket.tables[0].arena.device.nbytes == 54 * PAGE and fetched(store, ticket, first, second)
    assert store.live_tickets == 1 and store.live_bytes == 160 * PAGE, "the host only knows how many there can be"
    del ticket
    assert store.live_tickets == 0 and store.live_bytes == 0 and whole(store)
    report = store.end_step()
    assert report.pages_out == 33 and not report.resized and store.generation == 1


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_widths_dtypes_and_empty_tensors_come_back(device: str, backend: Backend) -> None:
    store = new_store(device, backend)
    saved = (
        (torch.randn(7, 33, device=device).bfloat16(), 5),  # 66 bytes: 7 rows a page
        (torch.randint(0, 99, (9, 5), dtype=torch.uint8, device=device), None),
        (torch.randn(4, 128, device=device), 0),
        (torch.randn(0, 16, device=device), None),
    )
    for _ in range(3):  # counted, then in the arena
        ticket = put(store, *saved)
        assert [len(table.pages) for table in ticket.tables] == [1, 1, 4, 0]
        assert fetched(store, ticket, *saved)
        del ticket
        store.end_step()
    assert store.generation == 1 and store.device_pages == 3 and store.host_pages == 3


def test_no_margin_beyond_what_tickets_can_need() -> None:
    store = new_store()
    put(store, (wide(10), None))
    report = store.end_step()
    assert store.device_pages == 10 and store.host_pages == 0 and not report.spilled


def test_a_step_without_tickets_leaves_the_store_without_an_arena() -> None:
    store = new_store()
    report = store.end_step()
    assert not store.sized and not report.resized and report.pages_out == 0
    put(store, (wide(3), None))
    assert store.end_step().resized


def test_a_first_step_without_live_rows_still_makes_an_arena_that_holds_all() -> None:
    store = new_store()
    put(store, (wide(8), 0))
    store.end_step()
    assert store.device_pages + store.host_pages == 8
    ticket = put(store, saved := (wide(8), None))
    assert fetched(store, ticket, saved)
    del ticket
    assert store.end_step().spilled and store.device_pages == 8, "and learns from the next step"


# ---------------------------------------------------------------------------------------------------------------- host pages


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_half_the_pages_on_the_host_no_second_run_and_right_results(device: str, backend: Backend) -> None:
    store = new_store(device, backend, device_budget=20 * PAGE)
    layers = [((wide(10, device), 10), (wide(20, device, 64), 20)) for _ in range(2)]
    for step in range(3):
        tickets = [put(store, *layer) for layer in layers]
        if step:
            tables = [table for ticket in tickets for table in ticket.tables]
            on_host = [int((table.pages >= store.device_pages).sum()) for table in tables]
            assert sum(on_host) == 20 == store.device_pages, "half of them"
        assert int(store.missing_flag()) == 0
        assert all(fetched(store, ticket, *layer) for ticket, layer in zip(tickets, layers, strict=True))
        while tickets:
            tickets.pop()
        report = store.end_step()
        assert report.pages_out == 40 and report.missing_pages == 0 and report.spilled == (step > 0)
        assert (store.device_pages, store.host_pages) == (20, 20) and whole(store)
    assert store.generation == 1, "there is no room for more"


def test_one_tensor_lies_half_here_and_half_there() -> None:
    store = sized(new_store(), 3, 5)
    ticket = put(store, saved := (wide(8), 7))
    assert ticket.tables[0].pages.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    assert fetched(store, ticket, saved)
    arena = ticket.tables[0].arena
    assert torch.equal(arena.device.view(torch.float32).view(3, 128), saved[0][:3])
    assert torch.equal(arena.host.view(torch.float32).view(5, 128)[:4], saved[0][3:7])


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_no_host_page_goes_out_while_there_are_pages_on_the_device(device: str, backend: Backend) -> None:
    """Rounds that take more pages than the device has, but never at once. The link is a hundred times slower than memory."""
    store = sized(new_store(device, backend), 8, 24)
    older = put(store, a := (wide(3, device), 3))
    for _ in range(6):
        younger = put(store, b := (wide(4, device), 4))
        for ticket in (older, younger):
            assert int(ticket.tables[0].pages.max()) < 8, "a page of the host"
        assert fetched(store, older, a) and fetched(store, younger, b)
        older, a = younger, b
        del younger, ticket
    del older
    assert whole(store) and not store.end_step().spilled


def test_after_a_step_that_spilled_the_device_pages_go_out_first_again() -> None:
    store = sized(new_store(device_budget=4 * PAGE), 4, 8)
    tickets = [put(store, (wide(3), None)) for _ in range(4)]
    for i in (1, 3, 0, 2):
        tickets[i] = None  # type: ignore[call-overload]
    assert store.end_step().spilled
    ticket = put(store, (wide(4), None))
    assert sorted(ticket.tables[0].pages.tolist()) == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------- too few pages


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_a_layer_without_room_gets_nothing_says_so_and_harms_nobody(device: str, backend: Backend) -> None:
    store = sized(new_store(device, backend, device_budget=20 * PAGE, spill=False), 10)
    flag = store.missing_flag()
    ticket = put(store, fits := (wide(10, device), 7))
    assert int(flag) == 0
    lost = put(store, (wide(2, device), 2), (wide(4, device), 4))
    assert int(flag) == 3 and all(bool((table.pages == -1).all()) for table in lost.tables), "all or none"
    small = put(store, third := (wide(3, device), 3))
    assert int(flag) == 3 and fetched(store, ticket, fits) and fetched(store, small, third), "later ones may fit"
    del ticket, lost, small
    assert whole(store)
    with store.exactly():  # the step again
        tickets = [put(store, fits), put(store, third), put(store, third), put(store, third)]
        assert fetched(store, tickets[0], fits) and fetched(store, tickets[3], third)
        tickets.clear()
    report = store.end_step()
    assert report.missing_pages == 3 and report.pages_out == 16 and report.resized and int(store.missing_flag()) == 0
    assert store.device_pages == 17, "what the exact step had out at once, and a margin"
    assert not store.end_step().missing_pages


def test_growth_stops_at_the_budget_and_no_step_is_silently_short() -> None:
    store = new_store(device_budget=10 * PAGE, spill=False)
    put(store, (wide(10), 2))
    store.end_step()
    assert (store.device_pages, store.host_pages) == (3, 0)
    for _ in range(2):
        tickets = [put(store, (wide(10), 10)), put(store, (wide(10), 10))]
        tickets.clear()
        report = store.end_step()
        assert report.missing_pages > 0
    assert store.device_pages == 10 and not report.resized


# ---------------------------------------------------------------------------------------------------------------- growth


def test_the_device_part_grows_after_a_step_that_spilled() -> None:
    store = new_store()
    for live, after, spilled in (
        (2, (3, 61), False),
        (32, (33, 61), True),
        (16, (33, 61), False),
        (64, (64, 61), True),
    ):
        ticket = put(store, saved := (wide(64), live))
        assert fetched(store, ticket, saved) and int(store.missing_flag()) == 0
        del ticket
        before = store.generation
        report = store.end_step()
        assert (store.device_pages, store.host_pages) == after and report.spilled == spilled
        assert report.resized == (store.generation > before) == (live != 16)


def test_host_pages_grow_with_what_tickets_can_need() -> None:
    store = new_store(device_budget=4 * PAGE)
    put(store, (wide(8), 8))
    store.end_step()
    assert (store.device_pages, store.host_pages) == (4, 4)
    locked = store._memory and store._memory.slot
    store.end_step()
    assert store._memory and store._memory.slot is locked
    put(store, (wide(16), 4))
    report = store.end_step()
    assert (store.device_pages, store.host_pages) == (4, 12) and report.resized and not report.spilled


def test_host_memory_is_kept_when_only_the_device_part_grows() -> None:
    store = new_store()
    put(store, (wide(64), 2))
    store.end_step()
    memory = store._memory
    assert memory is not None
    host = memory.arena.host.data_ptr()
    del memory
    put(store, (wide(64), 40))
    assert store.end_step().resized
    assert store._memory is not None and store._memory.arena.host.data_ptr() == host


def test_nothing_grows_while_a_ticket_is_alive() -> None:
    store = sized(new_store(), 2, 8)
    held = put(store, saved := (wide(4), 4))
    report = store.end_step()
    assert report.spilled and not report.resized and store.generation == 1 and fetched(store, held, saved)
    assert report.reclaimed_pages == 0 and free(store) == (4, 0, 4), "what is out stays out, marks begin there"
    del held
    assert store.end_step().resized and store.device_pages == 4 and whole(store)


def test_a_step_end_without_growth_keeps_the_memory_that_graphs_know() -> None:
    store = sized(new_store(device_budget=2 * PAGE), 2, 8)
    memory = store._memory
    assert memory is not None
    places = [t.data_ptr() for t in (memory.arena.device, memory.arena.host, memory.stack.pages, memory.stack.state)]
    put(store, (wide(6), 6))
    flag = store.missing_flag()
    assert store.end_step().spilled
    assert store._memory is memory and store.missing_flag().data_ptr() == flag.data_ptr()
    assert places == [t.data_ptr() for t in (memory.arena.device, memory.arena.host, *memory.stack)]


def test_a_failed_resize_leaves_a_store_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sized(new_store(), 4, 4)

    def no_room(self: Any, nbytes: int) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("forebay.memory.page_store.HostPool.take", no_room)
        with pytest.raises(MemoryError):
            store.resize(4, 8)
    assert not store.sized and store.generation == 2
    ticket = put(store, saved := (wide(6), 5))
    assert fetched(store, ticket, saved)
    del ticket
    assert store.end_step().resized and store.sized


# ---------------------------------------------------------------------------------------------------------------- exactly


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_exact_tickets_live_among_the_others(device: str, backend: Backend) -> None:
    store = sized(new_store(device, backend), 4, 4)
    a, b, c = ((wide(8, device), 3) for _ in range(3))
    first = put(store, a)
    with store.exactly():
        second = put(store, b)
        with store.exactly():
            pass
        assert put(store, a).tables[0].arena.device.nbytes == 3 * PAGE
        assert free(store)[0] == 3 and store.device_bytes == 7 * PAGE
    third = put(store, c)
    assert free(store)[0] == 6 and int(store.missing_flag()) == 0
    assert fetched(store, first, a) and fetched(store, second, b) and fetched(store, third, c)
    del first
    assert fetched(store, second, b) and fetched(store, third, c)
    del second
    assert store.device_bytes == 4 * PAGE and fetched(store, third, c)
    del third
    assert whole(store)


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_tickets_with_pages_of_their_own_keep_to_the_budget(device: str, backend: Backend) -> None:
    """In the first step, and beside an arena that has most of the budget: what goes over it lies on the host."""
    store = PageStore(device, page_bytes=PAGE, device_budget=5 * PAGE, backend=backend)
    saved = [(wide(8, device), 3) for _ in range(3)]
    tickets = [put(store, one) for one in saved]
    assert (store.device_bytes, store.host_bytes) == (5 * PAGE, 4 * PAGE)
    assert all(fetched(store, ticket, one) for ticket, one in zip(tickets, saved, strict=True))
    tickets.clear()
    assert (store.device_bytes, store.host_bytes) == (0, 0)
    report = store.end_step()
    assert report.pages_out == 9 and store.device_pages == 5
    on_host = store.host_bytes
    with store.exactly():
        again = [put(store, one) for one in saved]
    assert (store.device_bytes, store.host_bytes) == (5 * PAGE, on_host + 9 * PAGE)
    assert all(fetched(store, ticket, one) for ticket, one in zip(again, saved, strict=True))


def test_exactly_ends_with_an_exception() -> None:
    store = sized(new_store(), 4, 4)
    with pytest.raises(KeyError), store.exactly():
        raise KeyError
    assert put(store, (wide(8), 3)).tables[0].arena.device.nbytes == 4 * PAGE


# ---------------------------------------------------------------------------------------------------------------- errors


def test_a_row_that_no_page_holds_names_the_page_that_would() -> None:
    store = new_store()
    with pytest.raises(ValueError, match=r"row of 1030 bytes.*page_bytes must be 1536 or more"):
        store.take([PagedRows(None, 4, 1030)])
    assert PageStore("cpu", page_bytes=1536).take([PagedRows(None, 4, 1030)]).tables[0].page_rows == 1
    assert store.live_tickets == 0


def test_a_budget_below_one_layer_without_host_pages_names_the_one_that_would_do() -> None:
    store = new_store(device_budget=9 * PAGE, spill=False)
    with pytest.raises(
        ValueError, match=f"can need 10 pages.*device_budget of {10 * PAGE} bytes or more; it is {9 * PAGE}"
    ):
        store.take([PagedRows(count(1), 6, PAGE), PagedRows(count(1), 4, PAGE)])
    new_store(device_budget=10 * PAGE, spill=False).take([PagedRows(count(1), 6, PAGE), PagedRows(count(1), 4, PAGE)])
    new_store(device_budget=0).take([PagedRows(count(1), 6, PAGE)])


@pytest.mark.parametrize("page_bytes", [0, -512, 100, 513])
def test_a_page_size_that_does_not_fit(page_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 512, got {page_bytes}"):
        PageStore("cpu", page_bytes=page_bytes)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([], "1 to 4 tensors, got 0"),
        ([PagedRows(None, 1, 4)] * 5, "1 to 4 tensors, got 5"),
        ([PagedRows(None, -1, 4)], "-1 rows of 4 bytes"),
        ([PagedRows(None, 1, 0)], "1 rows of 0 bytes"),
        ([PagedRows(torch.ones(2, dtype=torch.int32), 1, 4)], r"live must be one int32 or int64 on cpu, got \(2,\)"),
        ([PagedRows(torch.ones(1), 1, 4)], "torch.float32"),
        ([PagedRows(torch.ones(1, dtype=torch.int32, device="meta"), 1, 4)], "on meta"),
        ([PagedRows(torch.tensor([5]), 4, 4)], "5 live rows of a tensor of 4"),
        ([PagedRows(torch.tensor([-1]), 4, 4)], "-1 live rows of a tensor of 4"),
    ],
)
def test_malformed_rows(wanted: Sequence[PagedRows], said: str) -> None:
    store = new_store()
    with pytest.raises(ValueError, match=said):
        store.take(wanted)
    assert store.live_tickets == 0 and store.end_step().pages_out == 0


def test_arenas_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="0 device pages and 0 host pages"):
        new_store().resize(0, 0)
    with pytest.raises(ValueError, match="-1 device pages"):
        new_store().resize(-1, 4)
    with pytest.raises(ValueError, match="3 device pages are 1536 bytes, the budget is 1535"):
        new_store(device_budget=1535).resize(3, 0)
    with pytest.raises(ValueError, match="spilling to the host is off"):
        new_store(spill=False).resize(3, 1)
    with pytest.raises(ValueError, match="device_budget must not be negative"):
        new_store(device_budget=-1)


def test_a_closed_store_says_so() -> None:
    store = sized(new_store(), 4)
    store.close()
    store.close()
    for use in (
        lambda: store.take([PagedRows(None, 1, 4)]),
        store.end_step,
        store.missing_flag,
        lambda: store.resize(1, 0),
        lambda: store.exactly().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert store.device_bytes == store.host_bytes == store.live_tickets == 0


# ---------------------------------------------------------------------------------------------------------------- death


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_tickets_die_in_any_order(device: str, backend: Backend) -> None:
    store = sized(new_store(device, backend), 6, 6)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        saved = [(wide(4, device), live) for live in (3, 4, 1, 2)]
        tickets: dict[int, PageTicket] = {i: put(store, one) for i, one in enumerate(saved)}
        for i in order:
            assert all(fetched(store, ticket, saved[k]) for k, ticket in tickets.items())
            del tickets[i]
        assert whole(store)


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_a_ticket_that_outlives_its_arena_gives_back_to_it(device: str, backend: Backend) -> None:
    store = sized(new_store(device, backend), 3, 3)
    old = store._memory
    assert old is not None
    before = put(store, a := (wide(5, device), 5))
    store.resize(4, 3)
    after = put(store, b := (wide(5, device), 5))
    assert store.live_tickets == 2 and fetched(store, before, a) and fetched(store, after, b)
    assert old.stack.state.tolist()[:2] == [5, 6]
    del before
    assert old.stack.state.tolist()[:2] == [5, 11], "to its own stack"
    assert free(store)[0] == 5 and fetched(store, after, b)
    del after
    assert whole(store) and store.live_tickets == 0


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_tickets_outlive_a_closed_store(device: str, backend: Backend) -> None:
    store = sized(new_store(device, backend), 3, 3)
    first, second = put(store, a := (wide(3, device), 2)), put(store, b := (wide(3, device), 3))
    with store.exactly():
        third = put(store, a)
    store.close()
    assert fetched(store, first, a) and fetched(store, third, a)
    del first, third
    assert fetched(store, second, b)
    del store
    assert second.tables[0].arena.host.numel() == 3 * PAGE
    del second


def test_a_ticket_in_a_cycle_of_references_is_collected() -> None:
    store = sized(new_store(), 4)
    holder: dict[str, Any] = {"ticket": put(store, (wide(4), 4))}
    holder["self"] = holder
    del holder
    gc.collect()
    assert whole(store) and store.live_tickets == 0


def test_a_ticket_may_die_in_another_thread() -> None:
    store = sized(new_store(), 4)
    tickets = [put(store, (wide(4), 4))]
    thread = threading.Thread(target=tickets.clear)
    thread.start()
    thread.join()
    assert whole(store) and store.live_tickets == 0


def test_an_exception_between_forward_and_backward_loses_no_page() -> None:
    store = sized(new_store(), 8)

    def step() -> None:
        kept = [put(store, (wide(4), 3)), put(store, (wide(4), 2))]
        assert len(kept) == 2
        raise KeyError("a layer failed")

    for _ in range(3):
        with pytest.raises(KeyError):
            step()
        assert whole(store)
    assert store.end_step().pages_out == 5


class Square(torch.autograd.Function):
    """Saves its input in pages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: PageStore, live: Tensor) -> Tensor:
        ctx.store, ctx.shape = store, x.shape
        ctx.ticket = store.take([PagedRows(live, x.shape[0], x[:1].nbytes)])
        stash([x], ctx.ticket.tables, backend=store.backend)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = torch.zeros(ctx.shape, device=grads[0].device)
        restore(ctx.ticket.tables, [x], backend=ctx.store.backend)
        ctx.ticket = None
        return 2 * x * grads[0], None, None


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_the_graph_owns_tickets_from_forward_to_backward(device: str, backend: Backend) -> None:
    store = new_store(device, backend)
    for step in range(3):
        x = wide(6, device).requires_grad_()
        y = x
        for _ in range(3):
            y = Square.apply(y, store, count(4, device))
        truth = x.detach().clone().requires_grad_()
        (truth**8).backward(torch.ones_like(truth))
        assert store.live_tickets == 3
        if step == 1:
            del y, x  # a graph without a backward
        else:
            y.backward(torch.ones_like(y))
            assert x.grad is not None and truth.grad is not None
            torch.testing.assert_close(x.grad[:4], truth.grad[:4])
        assert store.live_tickets == 0
        assert store.end_step().pages_out == 12
    assert whole(store) and store.generation == 1


def test_two_stores_do_not_meet() -> None:
    one, two = sized(new_store(), 4, 4), sized(new_store(), 4, 4)
    a, b = (wide(6), 6), (wide(6), 5)
    first, second = put(one, a), put(two, b)
    assert one.live_tickets == two.live_tickets == 1 and free(one)[0] == 6 and free(two)[0] == 5
    with one.exactly():
        assert put(two, (wide(2), 2)).tables[0].arena is second.tables[0].arena
    del first
    assert whole(one) and free(two)[0] == 5 and fetched(two, second, b)
    one.close()
    assert fetched(two, second, b) and not two.end_step().resized


def test_tickets_at_the_end_of_the_process_are_quiet() -> None:
    program = (
        "import torch\n"
        "from forebay.kernels.paging import PagedRows\nfrom forebay.memory.page_store import PageStore\n"
        "store = PageStore('cpu', page_bytes=512, backend='reference')\n"
        "private = store.take([PagedRows(None, 4, 512)])\n"
        "store.resize(4, 4)\n"
        "cycle = [store.take([PagedRows(None, 4, 512)])]\n"
        "cycle.append(cycle)\n"
        "torch.kept = store.take([PagedRows(None, 4, 512)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_ticket_that_dies_while_the_interpreter_ends_does_nothing() -> None:
    store = sized(new_store(), 4)
    ticket = put(store, (wide(4), 4))
    ticket.__del__(lambda: True)
    assert free(store)[0] == 4 and store.live_tickets == 1
    del ticket
    assert whole(store)


def test_pages_that_a_replay_took_and_never_gave_are_free_at_the_end_of_the_step() -> None:
    store = sized(new_store(), 4, 4)
    assert store._memory is not None
    taken = take_pages(store._memory.stack, [(count(3), 1, 3)], backend="reference")  # as a forward graph alone does
    held = put(store, (wide(2), 2))
    assert store.end_step().reclaimed_pages == 0, "who can tell, while a ticket is alive?"
    del held
    report = store.end_step()
    assert taken[0].tolist() == [0, 1, 2] and report.reclaimed_pages == 3 and whole(store)


# ---------------------------------------------------------------------------------------------------------------- captures


class Pretence:
    """Says that a capture is running, on a CPU; what is 'captured' runs at once."""

    def __init__(self, store: PageStore, monkeypatch: pytest.MonkeyPatch):
        self.capturing = False
        self.given: list[int] = []
        monkeypatch.setattr(store, "_is_capturing", lambda stream: self.capturing)

        def give(stack: Any, tables: Sequence[Tensor], backend: Backend) -> None:
            self.given.append(sum(int((table >= 0).sum()) for table in tables))
            give_pages(stack, tables, backend=backend)

        monkeypatch.setattr("forebay.memory.page_store.give_pages", give)


def test_a_ticket_of_a_capture_gives_back_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sized(new_store(), 8)
    pretence = Pretence(store, monkeypatch)
    pretence.capturing = True
    ticket = put(store, (wide(4), 3))
    del ticket
    assert pretence.given == [3] and whole(store)


def test_a_ticket_of_a_capture_that_failed_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sized(new_store(), 8)
    pretence = Pretence(store, monkeypatch)
    pretence.capturing = True
    tickets = [put(store, (wide(2), 2)) for _ in range(2)]
    pretence.capturing = False
    tickets.pop()
    put(store, (wide(4), 4))
    store.end_step()
    pretence.capturing = True  # the next capture, in which a ticket of the last one dies
    tickets.pop()
    assert pretence.given == [4] and store.live_tickets == 0
    pretence.capturing = False
    assert store.end_step().reclaimed_pages == 4, "here the pretended capture did take them"


def test_a_give_that_a_failed_capture_refuses_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sized(new_store(), 8)
    pretence = Pretence(store, monkeypatch)
    pretence.capturing = True
    ticket = put(store, (wide(4), 3))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr("forebay.memory.page_store.give_pages", refuse)
    ticket.__del__()  # `del` would only print what is raised


def test_a_ticket_from_before_that_dies_in_a_capture_gives_back_after_it_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = sized(new_store(), 8)
    pretence = Pretence(store, monkeypatch)
    before = put(store, (wide(3), 3))
    pretence.capturing = True
    inside = put(store, (wide(2), 2))
    del before, inside
    put(store, (wide(1), 1))
    assert pretence.given == [2, 1] and free(store)[0] == 3
    pretence.capturing = False
    put(store, (wide(4), 4))
    assert pretence.given == [2, 1, 3, 4] and whole(store)


def test_what_waits_for_the_device_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store()
    pretence = Pretence(store, monkeypatch)
    pretence.capturing = True
    with pytest.raises(RuntimeError, match=r"run a step and end_step\(\) before"):
        put(store, (wide(2), 2))
    pretence.capturing = False
    sized(store, 4)
    pretence.capturing = True
    with store.exactly(), pytest.raises(RuntimeError, match=r"outside of exactly\(\)"):
        put(store, (wide(2), 2))
    with pytest.raises(RuntimeError, match="captured"):
        store.end_step()
    with pytest.raises(RuntimeError, match="captured"):
        store.resize(4, 4)
    assert store.generation == 1 and store.live_tickets == 0


# ---------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_ticket_gives_back_on_the_stream_it_was_taken_on() -> None:
    """It dies under another stream, while the rows are yet to be read on its own."""
    store = sized(new_store(GPU, "auto"), 4, 4)
    assert store._memory is not None
    put(store, (wide(6, GPU), 6))  # compiled
    torch.cuda.synchronize()
    taken, given = store._memory.stack.state.tolist()[:2]
    ticket = put(store, (x := wide(6, GPU), 6))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    out = torch.zeros_like(x)
    restore(ticket.tables, [out])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        del ticket
        assert store._memory.stack.state.tolist()[:2] == [taken + 6, given], "before the rows were read"
    other = put(store, (poison := torch.full_like(x, 3.0), 6))
    assert torch.equal(out, x) and free(store)[0] == 6 and fetched(store, other, (poison, 6))
    del other
    assert whole(store)


@pytest.mark.gpu
def test_takes_on_one_stream_wait_for_gives_on_another() -> None:
    store = sized(new_store(GPU, "auto"), 6)
    a, b = (wide(6, GPU), 6), (wide(6, GPU), 6)
    put(store, a)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ticket = put(store, a)
        torch.cuda._sleep(200_000_000)
        del ticket  # enqueued behind the sleep
    other = put(store, b)
    assert int(store.missing_flag()) == 0 and fetched(store, other, b)


@pytest.mark.gpu
def test_takes_copies_and_gives_do_not_wait_for_the_device() -> None:
    store = new_store(GPU, "auto")
    x, y, live = wide(64, GPU), wide(64, GPU, 96), count(40, GPU)
    out = torch.zeros_like(x), torch.zeros_like(y)
    wanted = [PagedRows(live, 64, x[:1].nbytes), PagedRows(None, 64, y[:1].nbytes)]

    def cycle() -> None:
        ticket = store.take(wanted)
        stash([x, y], ticket.tables)
        restore(ticket.tables, out)

    cycle()
    store.end_step()
    cycle()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
        store.missing_flag()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[0][:40], x[:40]) and torch.equal(out[1], y)


def graph_of(store: PageStore, live: Tensor, x: Tensor, out: Tensor, layers: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tickets = []
        for i in range(layers):
            ticket = store.take([PagedRows(live, x.shape[0], x[:1].nbytes), PagedRows(None, 3, 64)])
            stash([x + i, out[i, :3, :16].contiguous()], ticket.tables)
            tickets.append(ticket)
        del ticket
        for i in reversed(range(layers)):
            restore(tickets[i].tables, [out[i], torch.empty(3, 16, device=GPU)])
            tickets.pop()
    return graph


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_row_counts() -> None:
    store = sized(new_store(GPU, "auto"), 40, 80)
    x, live, out = wide(32, GPU), count(5, GPU), torch.zeros(3, 32, 128, device=GPU)
    ticket = put(store, (x, 5), (wide(3, GPU, 16), None))  # compiled
    restore(ticket.tables, [torch.empty_like(x), torch.empty(3, 16, device=GPU)])
    del ticket
    graph = graph_of(store, live, x, out, 3)
    assert whole(store) and store.live_tickets == 0, "a capture runs nothing"
    for rows in (5, 32, 0, 17, 1):
        live.fill_(rows)
        x.normal_()
        out.fill_(9.0)
        graph.replay()
        for i in range(3):
            assert torch.equal(out[i, :rows], x[:rows] + i) and bool((out[i, rows:] == 9).all())
        assert free(store)[:2] == (0, 0) and whole(store)
    eager = put(store, saved := (wide(8, GPU), 8))
    graph.replay()
    assert fetched(store, eager, saved), "replays and eager tickets share the free pages"
    del eager
    report = store.end_step()
    assert report.pages_out == 3 * 33 and report.spilled and report.missing_pages == 0


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_ring_as_it_was() -> None:
    store = sized(new_store(GPU, "auto"), 8, 8)
    x, live = wide(8, GPU), count(6, GPU)
    put(store, (x, 6))
    kept: list[PageTicket] = []
    with pytest.raises(KeyError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept.append(store.take([PagedRows(live, 8, x[:1].nbytes)]))
        inside = store.take([PagedRows(live, 8, x[:1].nbytes)])
        del inside
        raise KeyError
    kept.clear()
    assert whole(store) and store.live_tickets == 0
    ticket = put(store, (x, 6))
    assert fetched(store, ticket, (x, 6))
    del ticket
    assert whole(store) and store.end_step().reclaimed_pages == 0


@pytest.mark.gpu
def test_a_capture_that_the_device_ends_leaves_the_ring_as_it_was() -> None:
    """In a process of its own: what torch keeps of such a capture may disturb later ones."""
    program = (
        "import torch\n"
        "from forebay.kernels.paging import PagedRows\n"
        "from forebay.memory.page_store import PageStore\n"
        "store = PageStore('cuda', page_bytes=512)\n"
        "live = torch.tensor([3], device='cuda')\n"
        "take = lambda: store.take([PagedRows(live, 4, 512)])\n"
        "take()\n"
        "store.end_step()\n"
        "take(), take()\n"
        "before = store._memory.stack.state.tolist()\n"
        "kept = []\n"
        "try:\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "        kept += [take(), take()]\n"
        "        try:\n"
        "            live.item()\n"
        "        finally:\n"
        "            kept.pop()\n"
        "except RuntimeError:\n"
        "    kept.clear()\n"
        "    print(store._memory.stack.state.tolist() == before, store.live_tickets)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout == "True 0\n" and "ignored" not in done.stderr, done.stderr


@pytest.mark.gpu
def test_an_eager_ticket_that_dies_in_a_capture_is_not_given_in_every_replay() -> None:
    store = sized(new_store(GPU, "auto"), 16)
    x, live = wide(4, GPU), count(4, GPU)
    eager = [put(store, (x, 4))]
    out = torch.zeros_like(x)
    restore(eager[0].tables, [out])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ticket = store.take([PagedRows(live, 4, x[:1].nbytes)])
        eager.clear()
        stash([x], ticket.tables)
        restore(ticket.tables, [out])
        del ticket
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert free(store)[0] == 4
    put(store, (x, 4))
    assert whole(store)


@pytest.mark.gpu
def test_host_pages_are_let_go_of_only_when_nobody_reads_them() -> None:
    store = sized(new_store(GPU, "auto"), 0, 8)
    ticket = put(store, (x := wide(8, GPU), 8))
    store.close()
    torch.cuda._sleep(500_000_000)
    out = torch.zeros_like(x)
    restore(ticket.tables, [out])
    del ticket, store
    assert torch.equal(out, x)
