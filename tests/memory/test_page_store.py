"""PageStore: sizes, spilling, growth, errors, and tickets that die late, early, elsewhere or in a capture."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import PagedRows, give_pages, restore, stash, take_pages
from forebay.memory.page_store import PageStore, PageTicket

PAGE = 512
Saved = tuple[Tensor, int]  # a tensor and its live rows
NewStore = Callable[..., PageStore]


@pytest.fixture(
    params=[
        pytest.param(("cpu", "reference"), id="reference"),
        pytest.param(
            ("cpu", "triton"), id="interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")
        ),
        pytest.param(("cuda:0", "auto"), id="gpu", marks=pytest.mark.gpu),
    ]
)
def new(request: pytest.FixtureRequest) -> NewStore:
    """`new_store` on each device, with each backend."""
    device, backend = request.param
    return lambda pages=(), **more: new_store(pages, device, backend, **more)


def new_store(pages: Sequence[int] = (), device: str = "cpu", backend: Backend = "reference", **more: Any) -> PageStore:
    """With an arena of `pages` on the device and on the host, or without one."""
    store = PageStore(device, page_bytes=PAGE, backend=backend, **more)
    if pages:
        store.resize(*pages)
    return store


def count(n: int, device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


def put(store: PageStore, *saved: Saved) -> PageTicket:
    wanted = [
        PagedRows(count(live, tensor.device), tensor.shape[0], tensor.shape[1] * tensor.element_size())
        for tensor, live in saved
    ]
    ticket = store.take(wanted)
    stash([tensor for tensor, _ in saved], ticket.tables, backend=store.backend)
    return ticket


def fetched(store: PageStore, ticket: PageTicket, *saved: Saved) -> bool:
    """Whether the live rows are there again, and what is after them was left alone."""
    outs = [torch.full_like(tensor, 77) for tensor, _ in saved]
    restore(ticket.tables, outs, backend=store.backend)
    return all(
        torch.equal(out[:live], tensor[:live]) and bool((out[live:] == 77).all())
        for out, (tensor, live) in zip(outs, saved, strict=True)
    )


def wide(n: int, device: str | torch.device = "cpu", width: int = 128) -> Tensor:
    """n rows of one page each, if of 128 columns."""
    return torch.randn(n, width, device=device)


def free(store: PageStore) -> tuple[int, int, int]:
    """Pages out, most that were missing, and most that were out."""
    assert store._memory is not None
    head, tail, short, most = store._memory.free.state.tolist()
    return head + store._memory.pages - tail, short, most


def whole(store: PageStore) -> bool:
    """All pages are free and each is there once."""
    assert store._memory is not None
    return free(store)[0] == 0 and sorted(store._memory.free.pages.tolist()) == list(range(store._memory.pages))


def pages_of(store: PageStore) -> tuple[int, int]:
    return store.device_pages, store.host_pages


def spilled(store: PageStore) -> bool:
    """Pages of the host were out in this step."""
    return free(store)[2] > store.device_pages


# --- sizes and growth -------------------------------------------------------------------------------------------------


def test_the_first_step_is_counted_and_the_arena_made_for_it(new: NewStore) -> None:
    store = new()
    first, second = (wide(100, store.device), 20), (wide(60, store.device), 13)
    ticket = put(store, first, second)
    assert store._memory is None and ticket.tables[0].arena.device.nbytes == 33 * PAGE, "just the live pages"
    assert ticket.tables[0].arena.host.numel() == 0 and store.device_bytes == 33 * PAGE
    other = put(store, first)
    assert fetched(store, ticket, first, second) and fetched(store, other, first)
    del ticket
    last = put(store, second)
    del other, last
    report = store.end_step()
    # 33 + 20 pages were out at once, 160 + 100 could have been; 53 / 64 is 1.
    assert report.bytes_out == 53 * PAGE and report.resized
    assert pages_of(store) == (54, 260 - 54) and store.generation == 1
    assert (store.device_bytes, store.host_bytes) == (54 * PAGE, 206 * PAGE)
    ticket = put(store, first, second)
    assert ticket.tables[0].arena.device.nbytes == 54 * PAGE and fetched(store, ticket, first, second)
    assert store.live_tickets == 1
    del ticket
    assert store.live_tickets == 0 and whole(store)
    report = store.end_step()
    assert report.bytes_out == 33 * PAGE and not report.resized and store.generation == 1


@pytest.mark.parametrize(
    ("rows", "live", "pages"), [(10, 10, (10, 0)), (8, 0, (1, 7))], ids=["no margin beyond the bound", "no live rows"]
)
def test_the_arena_holds_what_tickets_can_need(rows: int, live: int, pages: tuple[int, int]) -> None:
    store = new_store()
    report = store.end_step()
    assert store._memory is None and not report.resized and report.bytes_out == 0, "a step without tickets"
    put(store, (wide(rows), live))
    assert store.end_step().resized and pages_of(store) == pages
    ticket = put(store, saved := (wide(rows), rows))
    assert fetched(store, ticket, saved)
    del ticket
    assert spilled(store) == (pages[1] > 0)
    store.end_step()
    assert store.device_pages == rows, "and learns from the next step"


def test_no_host_page_goes_out_while_there_are_pages_on_the_device(new: NewStore) -> None:
    """Rounds that take more pages than the device has, but never at once. The link is a hundred times slower than memory."""
    store = new((8, 24))
    older = put(store, a := (wide(3, store.device), 3))
    for _ in range(6):
        younger = put(store, b := (wide(4, store.device), 4))
        for ticket in (older, younger):
            assert int(ticket.tables[0].pages.max()) < 8, "a page of the host"
        assert fetched(store, older, a) and fetched(store, younger, b)
        older, a = younger, b
        del younger, ticket
    del older
    assert whole(store) and not spilled(store)


def test_after_a_step_that_spilled_the_device_pages_go_out_first_again() -> None:
    store = new_store((4, 8), device_budget=4 * PAGE)
    tickets = [put(store, (wide(3), 3)) for _ in range(4)]
    for i in (1, 3, 0, 2):
        tickets[i] = None  # type: ignore[call-overload]
    assert spilled(store)
    store.end_step()
    ticket = put(store, (wide(4), 4))
    assert sorted(ticket.tables[0].pages.tolist()) == [0, 1, 2, 3]


def test_a_captured_layer_without_room_gets_nothing_says_so_and_harms_no_other(
    new: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new((10, 0), device_budget=20 * PAGE)
    flag = store.missing_flag()
    ticket = put(store, fits := (wide(10, store.device), 7))
    assert int(flag) == 0
    with monkeypatch.context() as patch:
        patch.setattr(store, "_is_capturing", lambda _: True)
        lost = put(store, (wide(2, store.device), 2), (wide(4, store.device), 4))
        assert int(flag) == 3 and all(bool((table.pages == -1).all()) for table in lost.tables), "all or none"
        small = put(store, third := (wide(3, store.device), 3))
        assert int(flag) == 3 and fetched(store, ticket, fits) and fetched(store, small, third), "later ones may fit"
        del lost, small
    del ticket
    assert whole(store)
    with store.exactly():  # the step again
        tickets = [put(store, fits), put(store, third), put(store, third), put(store, third)]
        assert fetched(store, tickets[0], fits) and fetched(store, tickets[3], third)
        tickets.clear()
    report = store.end_step()
    assert report.bytes_out == 16 * PAGE and report.resized and int(store.missing_flag()) == 0
    assert store.device_pages == 17, "what the exact step had out at once, and a margin"


def test_a_layer_that_might_find_no_room_gets_pages_of_its_own(new: NewStore) -> None:
    """A longer sequence than in earlier steps, or another forward before the first one's backward."""
    store = new((10, 0), device_budget=20 * PAGE)
    first = put(store, a := (wide(7, store.device), 7))
    second = put(store, b := (wide(4, store.device), 1))  # 3 pages are free, and it could need 4
    third = put(store, c := (wide(3, store.device), 3))
    assert store.device_bytes == 11 * PAGE and int(store.missing_flag()) == 0
    assert fetched(store, first, a) and fetched(store, second, b) and fetched(store, third, c)
    del first, second, third
    assert whole(store) and store.end_step().resized and store.device_pages + store.host_pages == 14


def test_the_device_part_grows_after_a_step_that_spilled_and_the_host_memory_is_kept() -> None:
    store = new_store()
    hosts = set()
    for live, after in ((2, (3, 61)), (32, (33, 61)), (16, (33, 61)), (64, (64, 61))):
        ticket = put(store, saved := (wide(64), live))
        assert fetched(store, ticket, saved) and int(store.missing_flag()) == 0
        del ticket
        before = store.generation
        report = store.end_step()
        assert pages_of(store) == after and report.resized == (store.generation > before) == (live != 16)
        assert store._memory is not None
        hosts.add(store._memory.arena.host.data_ptr())
    assert len(hosts) == 1


def test_a_step_end_without_growth_keeps_the_memory_that_graphs_know() -> None:
    store = new_store((2, 8), device_budget=2 * PAGE)
    memory = store._memory
    assert memory is not None
    places = [t.data_ptr() for t in (memory.arena.device, memory.arena.host, memory.free.pages, memory.free.state)]
    put(store, (wide(6), 6))
    flag = store.missing_flag()
    assert spilled(store)
    store.end_step()
    assert store._memory is memory and store.missing_flag().data_ptr() == flag.data_ptr()
    assert places == [t.data_ptr() for t in (memory.arena.device, memory.arena.host, *memory.free)]


def test_a_failed_resize_leaves_a_store_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store((4, 4))

    def no_room(self: Any, nbytes: int) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("forebay.memory.page_store.HostPool.take", no_room)
        with pytest.raises(MemoryError):
            store.resize(4, 8)
    assert store._memory is None and store.generation == 2
    ticket = put(store, saved := (wide(6), 5))
    assert fetched(store, ticket, saved)
    del ticket
    assert store.end_step().resized and store._memory is not None


def test_exactly_ends_with_the_outermost_context_and_in_an_error_too() -> None:
    store = new_store((4, 4))
    saved = wide(8), 3
    with store.exactly():
        with pytest.raises(KeyError), store.exactly():
            raise KeyError
        assert put(store, saved).tables[0].arena.device.nbytes == 3 * PAGE
    assert put(store, saved).tables[0].arena.device.nbytes == 4 * PAGE


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([PagedRows(torch.tensor([5]), 4, 4)], "5 live rows of a tensor of 4"),
        ([PagedRows(torch.tensor([-1]), 4, 4)], "-1 live rows of a tensor of 4"),
        ([PagedRows(count(4), 4, 1030)], r"row of 1030 bytes.*page_bytes must be 1536 or more"),
    ],
)
def test_rows_that_cannot_be_taken(wanted: Sequence[PagedRows], said: str) -> None:
    store = new_store()
    with pytest.raises(ValueError, match=said):
        store.take(wanted)
    assert store.live_tickets == 0 and store.end_step().bytes_out == 0


def test_a_closed_store_says_so() -> None:
    store = new_store((4, 0))
    for _ in range(2):
        store.close()
    for use in (lambda: store.take([PagedRows(count(1), 1, 4)]), store.end_step):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert store.device_bytes == store.host_bytes == store.live_tickets == 0


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_ticket_that_outlives_its_arena_gives_back_to_it(new: NewStore) -> None:
    store = new((3, 3))
    old = store._memory
    assert old is not None
    before = put(store, a := (wide(5, store.device), 5))
    store.resize(4, 3)
    after = put(store, b := (wide(5, store.device), 5))
    assert store.live_tickets == 2 and fetched(store, before, a) and fetched(store, after, b)
    assert old.free.state.tolist()[:2] == [5, 6]
    del before
    assert old.free.state.tolist()[:2] == [5, 11], "to its own stack"
    assert free(store)[0] == 5 and fetched(store, after, b)
    del after
    assert whole(store) and store.live_tickets == 0


def test_tickets_outlive_a_closed_store(new: NewStore) -> None:
    store = new((3, 3))
    first, second = put(store, a := (wide(3, store.device), 2)), put(store, b := (wide(3, store.device), 3))
    with store.exactly():
        third = put(store, a)
    store.close()
    assert fetched(store, first, a) and fetched(store, third, a)
    del first, third
    assert fetched(store, second, b)
    del store
    assert second.tables[0].arena.host.numel() == 3 * PAGE
    del second


def in_a_cycle_of_references(tickets: list[PageTicket]) -> None:
    tickets.append(tickets)  # type: ignore[arg-type]


def in_another_thread(tickets: list[PageTicket]) -> None:
    thread = threading.Thread(target=tickets.clear)
    thread.start()
    thread.join()


def in_an_exception(tickets: list[PageTicket]) -> None:
    kept = [tickets.pop()]
    with pytest.raises(KeyError):
        raise KeyError(str(kept))


@pytest.mark.parametrize("dies", [in_a_cycle_of_references, in_another_thread, in_an_exception])
def test_a_ticket_may_die_anywhere(dies: Callable[[list[PageTicket]], None]) -> None:
    store = new_store((4, 0))
    dies([put(store, (wide(4), 4))])
    gc.collect()
    assert whole(store) and store.live_tickets == 0


def test_a_ticket_that_dies_within_a_take_gives_back_after_it() -> None:
    """As in a garbage collection."""
    store = new_store((8, 0))
    dying = [put(store, (wide(3), 3))]

    class Live(Tensor):
        def __int__(self) -> int:  # the store has looked at the free pages and has not taken any yet
            dying.clear()
            return 2

    taken = store.take([PagedRows(count(2).as_subclass(Live), 2, PAGE)])
    assert not dying and store.live_tickets == 1
    others = [put(store, (wide(3), 3)) for _ in range(2)]
    used = [page for ticket in (taken, *others) for page in ticket.tables[0].pages.tolist()]
    assert sorted(used) == list(range(8))
    del taken, others
    assert store.live_tickets == 0
    store.end_step()
    assert whole(store)


@pytest.mark.parametrize("pages", [(), (5, 31)], ids=["their own", "the arena's"])
def test_threads_get_pages_of_their_own(hasty_threads: None, pages: Sequence[int]) -> None:
    store = new_store(pages)

    def rounds(seed: int) -> list[bool]:
        tensors = [torch.full((6, 128), float(10 * seed + n)) for n in range(2)]
        found = []
        for _ in range(30):
            saved = [(tensor, live) for tensor, live in zip(tensors, (6, 1 + seed), strict=True)]
            tickets = [put(store, one) for one in saved]
            found += [fetched(store, ticket, one) for ticket, one in zip(tickets, saved, strict=True)]
        return found

    with ThreadPoolExecutor(3) as pool:
        assert all(right for found in pool.map(rounds, range(3)) for right in found)
    assert store.live_tickets == 0
    store.end_step()
    assert whole(store)


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


def test_the_graph_owns_tickets_from_forward_to_backward(new: NewStore) -> None:
    store = new()
    for step in range(3):
        x = wide(6, store.device).requires_grad_()
        y = x
        for _ in range(3):
            y = Square.apply(y, store, count(4, store.device))
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
        assert store.end_step().bytes_out == 12 * PAGE
    assert whole(store) and store.generation == 1


def test_tickets_at_the_end_of_the_process_are_quiet() -> None:
    program = (
        "import torch\n"
        "live = torch.tensor([4])\n"
        "from forebay.kernels.paging import PagedRows\nfrom forebay.memory.page_store import PageStore\n"
        "store = PageStore('cpu', page_bytes=512, backend='reference')\n"
        "private = store.take([PagedRows(live, 4, 512)])\n"
        "store.resize(4, 4)\n"
        "cycle = [store.take([PagedRows(live, 4, 512)])]\n"
        "cycle.append(cycle)\n"
        "torch.kept = store.take([PagedRows(live, 4, 512)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pages_that_a_replay_took_and_never_gave_are_free_at_the_end_of_the_step() -> None:
    store = new_store((4, 4))
    assert store._memory is not None
    taken = take_pages(store._memory.free, [(count(3), 1, 3)], backend="reference")  # as a forward graph alone does
    held = put(store, (wide(2), 2))
    store.end_step()
    assert taken[0].tolist() == [0, 1, 2] and free(store)[0] == 5, "not known while a ticket is alive"
    del held
    store.end_step()
    assert whole(store)


# --- captures ---------------------------------------------------------------------------------------------------------


class PretendCapture:
    """A store that believes, on a CPU, that a capture is running; what is 'captured' runs at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.store = new_store((8, 0))
        self.capturing = False
        self.given: list[int] = []
        self.refuses = False
        monkeypatch.setattr(self.store, "_is_capturing", lambda stream: self.capturing)
        monkeypatch.setattr("forebay.memory.page_store.give_pages", self.give)

    def give(self, stack: Any, tables: Sequence[Tensor], backend: Backend) -> None:
        if self.refuses:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.given.append(sum(int((table >= 0).sum()) for table in tables))
        give_pages(stack, tables, backend=backend)

    def put(self, pages: int) -> PageTicket:
        return put(self.store, (wide(pages), pages))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendCapture:
    return PretendCapture(monkeypatch)


def test_a_ticket_of_a_capture_gives_back_in_it_and_quietly_if_it_failed(pretend: PretendCapture) -> None:
    pretend.capturing = True
    ticket = pretend.put(3)
    del ticket
    assert pretend.given == [3] and whole(pretend.store)
    ticket = pretend.put(3)
    pretend.refuses = True
    ticket.__del__()  # `del` would only print what is raised


def test_a_ticket_of_a_capture_that_failed_gives_nothing_back(pretend: PretendCapture) -> None:
    pretend.capturing = True
    tickets = [pretend.put(2) for _ in range(2)]
    pretend.capturing = False
    tickets.pop()
    pretend.put(4)
    pretend.store.end_step()
    pretend.capturing = True  # the next capture, in which a ticket of the last one dies
    tickets.pop()
    assert pretend.given == [4] and pretend.store.live_tickets == 0
    pretend.capturing = False
    pretend.store.end_step()
    assert whole(pretend.store)


def test_an_older_ticket_that_dies_in_a_capture_gives_back_after_it_and_once(pretend: PretendCapture) -> None:
    before = pretend.put(3)
    pretend.capturing = True
    inside = pretend.put(2)
    del before, inside
    pretend.put(1)
    assert pretend.given == [2, 1] and free(pretend.store)[0] == 3
    pretend.capturing = False
    pretend.put(4)
    assert pretend.given == [2, 1, 3, 4] and whole(pretend.store)


def test_host_pages_of_a_ticket_of_its_own_stay_until_a_capture_is_over(pretend: PretendCapture) -> None:
    """A ticket of the first step, or of a repeated one, whose graph is dropped late. To free its memory waits for the device."""
    store = pretend.store
    store.device_budget = 0
    with store.exactly():
        ticket = pretend.put(3)
    assert ticket._memory.host_block is not None
    slab = weakref.ref(ticket._memory.host_block.slab)
    pretend.capturing = True
    del ticket
    assert slab() is not None and store.live_tickets == 0
    pretend.capturing = False
    pretend.put(1)
    assert slab() is None and pretend.given == [1]


def test_what_waits_for_the_device_is_refused_in_a_capture(pretend: PretendCapture) -> None:
    pretend.capturing = True
    store = pretend.store
    with store.exactly(), pytest.raises(RuntimeError, match=r"outside of exactly\(\)"):
        pretend.put(2)
    with pytest.raises(RuntimeError, match="captured"):
        store.end_step()
    assert store.generation == 1 and store.live_tickets == 0
    store._memory = None
    with pytest.raises(RuntimeError, match=r"run a step and end_step\(\) before"):
        pretend.put(2)
