"""Pages: the stack against a list of free pages, rows in pages against their definition, byte by byte."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import (
    HEAD,
    MOST,
    SHORT,
    TAIL,
    Arena,
    FreePages,
    PageTable,
    all_free,
    give_pages,
    restore,
    stash,
    take_pages,
)
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned
from tests.products import cover

POISON = 0xA7


def arena_of(device_pages: int, host_pages: int, page_bytes: int = 512) -> Arena:
    """Poisoned."""
    device = torch.full((device_pages * page_bytes,), POISON, dtype=torch.uint8, device=DEVICE)
    host = torch.full((host_pages * page_bytes,), POISON, dtype=torch.uint8)
    return Arena(device, host.pin_memory() if DEVICE == "cuda" and host_pages else host, page_bytes)


def noise(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """All bit patterns, NaNs among them."""
    return torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, device=DEVICE).view(dtype)


def count(live: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([live], dtype=dtype, device=DEVICE)


def bytes_of(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8).reshape(rows.shape[0], rows.shape[1] * rows.element_size())


def bit_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def table_for(
    arena: Arena, rows: Tensor, live: int, pages: Sequence[int], dtype: torch.dtype = torch.int64
) -> PageTable:
    """The first of `pages` that the live rows need."""
    row_bytes = rows.shape[1] * rows.element_size()
    page_rows = arena.page_bytes // row_bytes
    most, needed = -(-rows.shape[0] // page_rows), -(-live // page_rows)
    numbers = torch.tensor([*pages[:needed], *[-1] * (most - needed)], dtype=torch.int32, device=DEVICE)
    return PageTable(arena, numbers, count(live, dtype), rows.shape[0], row_bytes)


def poisoned_like(rows: Tensor) -> Tensor:
    return torch.full_like(rows.view(torch.uint8), POISON).view(rows.dtype)


def check_stash(given: Sequence[Tensor], tables: Sequence[PageTable], backend: Backend) -> None:
    """Rows go to their places, no other byte of the arena is written, and they come back."""
    arena = tables[0].arena
    wanted = memory_of(arena)
    for rows, table in zip(given, tables, strict=True):
        as_defined(wanted, rows, table)
    stash(given, tables, backend=backend)
    assert torch.equal(memory_of(arena), wanted)
    outs = [poisoned_like(rows) for rows in given]
    restore(tables, outs, backend=backend)
    for out, rows, table in zip(outs, given, tables, strict=True):
        live = int(table.live)
        assert bit_equal(out[:live], rows[:live]) and (out[live:].view(torch.uint8) == POISON).all()


def memory_of(arena: Arena) -> Tensor:
    """[N, page_bytes] on the CPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # kernels write host pages too
    return torch.cat((arena.device.cpu(), arena.host)).view(-1, arena.page_bytes)


def as_defined(memory: Tensor, rows: Tensor, table: PageTable) -> None:
    """Write the live rows to `memory` one by one."""
    pages = table.pages.tolist()
    for r, row in enumerate(bytes_of(rows).cpu()[: int(table.live)]):
        page, at = pages[r // table.page_rows], r % table.page_rows * table.row_bytes
        if page >= 0:
            memory[page, at : at + table.row_bytes] = row


@backends
def test_the_example_of_the_docstring(backend) -> None:
    stack = FreePages(torch.tensor([4, 0, 3, 1, 2, 5], dtype=torch.int32, device=DEVICE), all_free(6, DEVICE).state)
    arena = arena_of(2, 4)
    rows = noise(7, 50, torch.float32)
    live = count(5)
    (pages,) = take_pages(stack, [(live, 2, 4)], backend=backend)
    assert pages.tolist() == [4, 0, 3, -1] and pages.dtype == torch.int32
    assert stack.state.tolist() == [3, 6, 0, 3]
    stash([rows], [PageTable(arena, pages, live, 7, 200)], backend=backend)
    memory = memory_of(arena)
    for row, (page, at) in enumerate([(4, 0), (4, 200), (0, 0), (0, 200), (3, 0)]):
        assert torch.equal(memory[page, at : at + 200], bytes_of(rows)[row].cpu())
    give_pages(stack, [pages], backend=backend)
    assert stack.state.tolist() == [3, 9, 0, 3]
    assert [stack.pages[i % 6].item() for i in range(3, 9)] == [1, 2, 5, 4, 0, 3]


# (rows, width, dtype, page_bytes). Words are of 8 bytes (two at once where rows are multiples of 16), 4, 2 and 1; tiles of 2048.
SHAPES = [
    (0, 8, torch.bfloat16, 512),
    (1, 1, torch.bfloat16, 512),  # rows of 2 bytes
    (1, 8, torch.float32, 512),
    (7, 25, torch.float32, 512),  # of 100: 5 on a page, 12 bytes idle
    (31, 8, torch.bfloat16, 512),  # of 16: 32 on a page
    (32, 8, torch.bfloat16, 512),
    (33, 8, torch.bfloat16, 512),
    (65, 8, torch.bfloat16, 512),
    (11, 3, torch.float16, 512),  # of 6
    (200, 5, torch.uint8, 512),  # of 5: 102 on a page
    (13, 3, torch.float64, 512),  # of 24
    (5, 256, torch.bfloat16, 512),  # one on a page, all of it
    (4, 129, torch.bfloat16, 512),  # one on a page, half of it
    (23, 1408, torch.bfloat16, 32768),  # of 2816: 11 on a page, two tiles of 2048 words with a tail
    (9, 2880, torch.bfloat16, 65536),  # of 5760: 11 on a page
    (12, 1023, torch.float16, 8192),  # of 2046: 2-byte words, 4 on a page, two tiles
]


@backends
@pytest.mark.parametrize(("shape", "where"), cover(SHAPES, ["device", "host", "mixed"]))
def test_rows_go_to_their_places_and_come_back(shape, where, backend) -> None:
    rows, width, dtype, page_bytes = shape
    given = noise(rows, width, dtype)
    page_rows = page_bytes // (width * dtype.itemsize)
    n_pages = -(-rows // page_rows) + 2
    device_pages = {"device": n_pages, "host": 0, "mixed": n_pages // 2}[where]
    edges = {0, 1, rows // 2, page_rows - 1, page_rows, page_rows + 1, rows - 1, rows}
    for live in sorted(x for x in edges if 0 <= x <= rows):
        arena = arena_of(device_pages, n_pages - device_pages, page_bytes)
        assert (arena.device_pages, arena.host_pages) == (device_pages, n_pages - device_pages)
        table = table_for(arena, given, live, torch.randperm(n_pages).tolist(), [torch.int32, torch.int64][live % 2])
        check_stash([given], [table], backend)


@backends
@pytest.mark.parametrize("number", [1, 6])
def test_several_tensors_at_once(number: int, backend) -> None:
    """Different widths, dtypes and live counts, one tensor empty."""
    arena, free = arena_of(20, 40), torch.randperm(60).tolist()
    given, tables = [], []
    for i, (rows, width, dtype) in enumerate(
        [(33, 8, torch.bfloat16), (7, 25, torch.float32), (0, 4, torch.float32), (40, 7, torch.float16), (3, 5, torch.uint8),
         (9, 64, torch.float64)][:number]
    ):  # fmt: skip
        given.append(noise(rows, width, dtype))
        tables.append(table_for(arena, given[-1], [20, 7, 0, 40, 1, 8][i], free[10 * i :]))
    check_stash(given, tables, backend)


@backends
def test_rows_without_a_page_are_not_written_and_read_as_zeros(backend) -> None:
    arena = arena_of(2, 2)
    given = noise(70, 8, torch.bfloat16)
    whole = table_for(arena, given, 70, [3, 0, 1])
    table = whole._replace(pages=torch.tensor([3, -1, 1], dtype=torch.int32, device=DEVICE))
    wanted = memory_of(arena)
    as_defined(wanted, given, table)
    stash([given], [table], backend=backend)
    assert torch.equal(memory_of(arena), wanted)
    out = torch.full_like(given.view(torch.uint8), POISON)
    restore([table], [out], backend=backend)
    expected = given.view(torch.uint8).clone()
    expected[32:64] = 0
    assert torch.equal(out, expected)
    none = table._replace(pages=torch.full_like(table.pages, -1))
    stash([given], [none], backend=backend)
    assert torch.equal(memory_of(arena), wanted)
    restore([none], [out], backend=backend)
    assert (out == 0).all()


@backends
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_a_tensor_that_does_not_begin_on_16_bytes(offset: int, backend) -> None:
    arena = arena_of(2, 2)
    given = noise(1, 40 * 8 + 8, torch.bfloat16).view(-1)[offset : offset + 320].view(40, 8)
    table = table_for(arena, given, 39, [2, 1])
    stash([given], [table], backend=backend)
    out = torch.zeros(40 * 8 + 8, dtype=torch.bfloat16, device=DEVICE)[8 - offset : 328 - offset].view(40, 8)
    restore([table], [out], backend=backend)
    assert bit_equal(out[:39], given[:39]) and (out[39] == 0).all()


@backends
def test_more_than_there_is_gives_nothing_to_anyone(backend) -> None:
    stack = all_free(10, DEVICE)
    (first,) = take_pages(stack, [(count(6), 1, 8)], backend=backend)
    assert first.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    # 2 and 3 pages are needed, 4 are free.
    short = take_pages(stack, [(count(2), 1, 4), (count(7, torch.int32), 3, 3)], backend=backend)
    assert [t.tolist() for t in short] == [[-1] * 4, [-1] * 3]
    assert stack.state.tolist() == [6, 10, 1, 11]
    worse = take_pages(stack, [(count(9), 1, 9)], backend=backend)
    assert worse[0].tolist() == [-1] * 9 and stack.state.tolist() == [6, 10, 5, 15]
    # Less than before is missing, and no page is given back for what was not taken.
    give_pages(stack, short, backend=backend)
    give_pages(stack, worse, backend=backend)
    take_pages(stack, [(count(5), 1, 5)], backend=backend)
    assert stack.state.tolist() == [6, 10, 5, 15]
    # Exactly what is free is not too much.
    (rest,) = take_pages(stack, [(count(4), 1, 4)], backend=backend)
    assert rest.tolist() == [6, 7, 8, 9] and stack.state.tolist() == [10, 10, 5, 15]
    give_pages(stack, [rest, first], backend=backend)
    assert stack.state[TAIL] - stack.state[HEAD] == 10 and sorted(stack.pages.tolist()) == list(range(10))


@backends
def test_nothing_is_taken_for_nothing(backend) -> None:
    stack = all_free(3, DEVICE)
    for nothing, entries in (((count(0), 4, 2), 2), ((count(-1), 1, 1), 1)):
        tables = take_pages(stack, [nothing, (count(0), 1, 0)], backend=backend)
        assert [t.tolist() for t in tables] == [[-1] * entries, []]
        give_pages(stack, tables, backend=backend)
    assert stack.state.tolist() == [0, 3, 0, 0]
    empty = all_free(0, DEVICE)
    assert take_pages(empty, [(count(1), 1, 2)], backend=backend)[0].tolist() == [-1, -1]
    assert empty.state.tolist() == [0, 0, 1, 1]


@backends
def test_free_pages_are_a_stack(backend) -> None:
    """Tables of one and of many blocks, given back in any order, one or two at a time."""
    random = np.random.default_rng(5)
    n_pages = 1200
    stack = all_free(n_pages, DEVICE)
    free, held = list(range(n_pages)), []
    short = most = 0
    for _ in range(120):
        if held and random.random() < 0.4:
            picked = [held.pop(random.integers(len(held))) for _ in range(min(len(held), random.integers(1, 3)))]
            give_pages(stack, [table for table, _ in picked], backend=backend)
            free[:0] = [page for _, pages in picked for page in pages]
            continue
        wanted, needs = [], []
        for _ in range(random.integers(1, 3)):
            rows, page_rows = int(random.choice([0, 1, 5, 300, 1100])), int(random.integers(1, 4))
            live = int(random.integers(rows + 1))
            wanted.append((count(live, torch.int32), page_rows, -(-rows // page_rows)))
            needs.append(-(-live // page_rows))
        tables = take_pages(stack, wanted, backend=backend)
        most = max(most, n_pages - len(free) + sum(needs))
        missing = sum(needs) - len(free)
        short = max(short, missing)
        for table, need, (_, _, entries) in zip(tables, needs, wanted, strict=True):
            pages = [] if missing > 0 else [free.pop(0) for _ in range(need)]
            assert table.tolist() == pages + [-1] * (entries - len(pages))
            held.append((table, pages))
        head, tail = stack.state[HEAD].item(), stack.state[TAIL].item()
        assert tail - head == len(free)
        assert stack.pages[n_pages - len(free) :].tolist() == free
    assert stack.state[SHORT] == short > 0 and stack.state[MOST] == most > n_pages
    assert stack.state[HEAD] > 3 * n_pages
    for table, _ in held:
        give_pages(stack, [table], backend=backend)
    assert sorted(stack.pages.tolist()) == list(range(n_pages)) and stack.state[TAIL] - stack.state[HEAD] == n_pages


def test_tables_do_not_share_memory_and_begin_on_16_bytes() -> None:
    first, second = take_pages(all_free(20, DEVICE), [(count(n), 1, n) for n in (5, 3)])
    assert first.data_ptr() % 16 == second.data_ptr() % 16 == 0
    first.fill_(-7)
    assert second.tolist() == [5, 6, 7]


@backends
def test_views(backend) -> None:
    """Tables are copied where they are only read, and refused where a kernel would write to them or move rows by the byte."""
    stack = all_free(6, DEVICE)
    live = torch.tensor([9, 5, 9], device=DEVICE)[1:2]
    (table,) = take_pages(stack, [(live, 2, 4)], backend=backend)
    assert table.tolist() == [0, 1, 2, -1]
    rows = noise(7, 50, torch.float32)
    good = PageTable(arena_of(6, 0), moved_on(table), live, 7, 200)
    check_stash([moved_on(rows)], [good], backend)
    for bad in (strided(rows), turned(rows), rows[:1].expand(7, 50)):
        with pytest.raises(ValueError, match="needs a contiguous tensor"):
            stash([bad], [good], backend=backend)
        with pytest.raises(ValueError, match="needs a contiguous tensor"):
            restore([good], [bad], backend=backend)
    for wrong in (stack._replace(pages=strided(stack.pages)), stack._replace(state=strided(stack.state))):
        with pytest.raises(ValueError, match="free pages must be contiguous"):
            take_pages(wrong, [(live, 2, 4)], backend=backend)
        with pytest.raises(ValueError, match="free pages must be contiguous"):
            give_pages(wrong, [table], backend=backend)
    give_pages(stack, [strided(table)], backend=backend)
    assert stack.pages.tolist() == list(range(6)) and stack.state[:2].tolist() == [3, 9]


def test_refusals() -> None:
    arena = arena_of(4, 0)
    given = noise(33, 8, torch.bfloat16)
    table = table_for(arena, given, 33, [0, 1])
    for tensors, tables, message in (
        ([given[:32]], [table], "33 rows of 16 bytes"),
        ([given], [table._replace(pages=table.pages[:1])], "need 2 entries"),
        ([noise(2, 260, torch.bfloat16)], [table._replace(rows=2, row_bytes=520)], "does not fit on a page of 512"),
        ([given], [table._replace(arena=arena._replace(page_bytes=520))], "multiples of 512"),
        ([given], [table._replace(arena=arena._replace(device=arena.device[8:520]))], "begins on 16"),
        ([given], [table._replace(arena=arena._replace(device=arena.device[::2]))], "memory must be contiguous"),
        ([given], [table._replace(pages=strided(table.pages))], "entries must be contiguous"),
        ([given], [table._replace(live=torch.tensor([5, 5], device=DEVICE))], r"live must be \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            stash(tensors, tables)
    with pytest.raises(TypeError, match=r"entries must be torch\.int32"):
        stash([given], [table._replace(pages=table.pages.long())])
    for number in (0, 3):
        with pytest.raises(ValueError, match="1 to 2 tensors"):
            take_pages(all_free(8, DEVICE), [(count(1), 1, 1)] * number)
        with pytest.raises(ValueError, match="1 to 2 tensors"):
            give_pages(all_free(8, DEVICE), [torch.zeros(1, dtype=torch.int32, device=DEVICE)] * number)
    with pytest.raises(ValueError, match=r"live must be \[1\]"):
        take_pages(all_free(8, DEVICE), [(count(5).view(1, 1), 2, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1023, 1024])
def test_more_bytes_and_words_than_32_bits_count(width: int) -> None:
    """2**31 words of 2 bytes, and 2**32 bytes; pages in reverse, so that the first rows have large offsets as well."""
    rows, page_bytes = 2**21 + 2**13, 1 << 18
    given = torch.randint(-(2**15), 2**15, (rows, width), dtype=torch.int16, device="cuda")
    n_pages = -(-rows // (page_bytes // (2 * width)))
    arena = Arena(
        torch.empty(n_pages * page_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(0, dtype=torch.uint8),
        page_bytes,
    )
    assert given.nbytes > 2**32 and arena.device.numel() > 2**32
    assert width % 2 == 0 or given.numel() > 2**31
    pages = torch.arange(n_pages - 1, -1, -1, dtype=torch.int32, device="cuda")
    live = count(rows - 1)
    table = PageTable(arena, pages, live, rows, 2 * width)
    stash([given], [table])
    out = torch.zeros_like(given)
    restore([table], [out])
    assert torch.equal(out[:-1], given[:-1]) and (out[-1] == 0).all()
    last = arena.page(int(pages[-1]))[: 2 * width].view(torch.int16)
    assert torch.equal(last, given[(n_pages - 1) * table.page_rows])


@pytest.mark.gpu
def test_in_a_graph_with_other_live_counts_at_each_replay() -> None:
    """Take, stash, restore and give, device pages for half of it; no call waits for the host."""
    page_bytes, rows = 4096, 1000
    given = [noise(rows, 100, torch.bfloat16), noise(rows, 37, torch.float32)]
    outs = [torch.empty_like(g) for g in given]
    need = sum(-(-rows // (page_bytes // b)) for b in (200, 148))
    arena, stack = arena_of(need // 2, need - need // 2, page_bytes), all_free(need, DEVICE)
    lives = [count(10), count(20, torch.int32)]

    def step() -> None:
        wanted = [
            (live, page_bytes // b, -(-rows // (page_bytes // b))) for live, b in zip(lives, (200, 148), strict=True)
        ]
        pages = take_pages(stack, wanted)
        tables = [PageTable(arena, p, live, rows, b) for p, live, b in zip(pages, lives, (200, 148), strict=True)]
        stash(given, tables)
        restore(tables, outs)
        give_pages(stack, pages[::-1])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in [(0, 0), (rows, rows), (1, 999), (513, 0), (20, 21), (rows, 1)]:
        for tensor in given:
            tensor.copy_(noise(*tensor.shape, tensor.dtype))
        for out in outs:
            out.view(torch.uint8).fill_(POISON)
        arena.device.fill_(POISON)
        lives[0].fill_(a)
        lives[1].fill_(b)
        graph.replay()
        torch.cuda.synchronize()
        for live, out, tensor in zip((a, b), outs, given, strict=True):
            assert bit_equal(out[:live], tensor[:live])
            assert (out[live:].view(torch.uint8) == POISON).all()
        assert stack.state[TAIL] - stack.state[HEAD] == need and stack.state[SHORT] == 0
    assert stack.state[MOST] == need
    assert sorted(stack.pages.tolist()) == list(range(need))
