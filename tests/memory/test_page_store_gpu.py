"""PageStore on a GPU: order between streams, no waits on the host, and CUDA graphs."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from forebay.kernels.paging import PagedRows, restore, stash
from forebay.memory.page_store import PageStore, PageTicket
from tests.memory.test_page_store import PAGE, count, fetched, free, new_store, put, spilled, whole, wide

pytestmark = pytest.mark.gpu

GPU = "cuda:0"


def test_a_ticket_gives_back_on_the_stream_it_was_taken_on() -> None:
    """It dies under another stream, while the rows are yet to be read on its own."""
    store = new_store((4, 4), GPU, "auto")
    assert store._memory is not None
    put(store, (wide(6, GPU), 6))  # compiled
    torch.cuda.synchronize()
    taken, given = store._memory.free.state.tolist()[:2]
    ticket = put(store, (x := wide(6, GPU), 6))
    restore(ticket.tables, [out := torch.zeros_like(x)])  # compiled here: that may take longer than the sleep
    out.zero_()
    side = torch.cuda.Stream()  # the first one makes 32: that may take longer, too
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    restore(ticket.tables, [out])
    with torch.cuda.stream(side):
        del ticket
        assert store._memory.free.state.tolist()[:2] == [taken + 6, given], "before the rows were read"
    other = put(store, (poison := torch.full_like(x, 3.0), 6))
    assert torch.equal(out, x) and free(store)[0] == 6 and fetched(store, other, (poison, 6))
    del other
    assert whole(store)


def test_takes_on_one_stream_wait_for_gives_on_another() -> None:
    store = new_store((6, 0), GPU, "auto")
    a, b = (wide(6, GPU), 6), (wide(6, GPU), 6)
    put(store, a)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ticket = put(store, a)
        torch.cuda._sleep(200_000_000)
        del ticket  # enqueued after the sleep
    other = put(store, b)
    assert int(store.missing_flag()) == 0 and fetched(store, other, b)


def test_takes_copies_and_gives_do_not_wait_for_the_device() -> None:
    store = new_store((), GPU, "auto")
    x, y, live, every = wide(64, GPU), wide(64, GPU, 96), count(40, GPU), count(64, GPU)
    out = torch.zeros_like(x), torch.zeros_like(y)
    wanted = [PagedRows(live, 64, x[:1].nbytes), PagedRows(every, 64, y[:1].nbytes)]

    def step() -> None:
        ticket = store.take(wanted)
        stash([x, y], ticket.tables)
        restore(ticket.tables, out)

    step()
    store.end_step()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        store.missing_flag()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[0][:40], x[:40]) and torch.equal(out[1], y)


def graph_of(store: PageStore, live: Tensor, x: Tensor, out: Tensor, layers: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tickets = []
        three = torch.full((1,), 3, device=GPU)  # the graph's own
        for i in range(layers):
            ticket = store.take([PagedRows(live, x.shape[0], x[:1].nbytes), PagedRows(three, 3, 64)])
            stash([x + i, out[i, :3, :16].contiguous()], ticket.tables)
            tickets.append(ticket)
        del ticket
        for i in reversed(range(layers)):
            restore(tickets[i].tables, [out[i], torch.empty(3, 16, device=GPU)])
            tickets.pop()
    return graph


def test_a_graph_is_replayed_with_other_row_counts() -> None:
    store = new_store((40, 80), GPU, "auto")
    x, live, out = wide(32, GPU), count(5, GPU), torch.zeros(3, 32, 128, device=GPU)
    ticket = put(store, (x, 5), (wide(3, GPU, 16), 3))  # compiled
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
    assert spilled(store) and int(store.missing_flag()) == 0 and store.end_step().bytes_out == 3 * 33 * PAGE


def test_a_capture_that_fails_leaves_the_free_pages_as_they_were() -> None:
    store = new_store((8, 8), GPU, "auto")
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
    assert whole(store)


def test_a_capture_that_the_device_ends_leaves_the_free_pages_as_they_were() -> None:
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
        "before = store._memory.free.state.tolist()\n"
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
        "    print(store._memory.free.state.tolist() == before, store.live_tickets)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout == "True 0\n" and "ignored" not in done.stderr, done.stderr


def test_an_eager_ticket_that_dies_in_a_capture_is_not_given_in_every_replay() -> None:
    store = new_store((16, 0), GPU, "auto")
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


def test_host_pages_are_not_freed_in_a_capture() -> None:
    store = new_store((4, 0), GPU, "auto", device_budget=0)
    with store.exactly():
        eager = [put(store, (x := wide(4, GPU), 4))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        eager.clear()
    graph.replay()
    assert torch.equal(y, x + 1)
    store.end_step()


def test_host_pages_are_freed_only_when_no_kernel_reads_them() -> None:
    store = new_store((0, 8), GPU, "auto")
    ticket = put(store, (x := wide(8, GPU), 8))
    store.close()
    torch.cuda._sleep(500_000_000)
    out = torch.zeros_like(x)
    restore(ticket.tables, [out])
    del ticket, store
    assert torch.equal(out, x)
