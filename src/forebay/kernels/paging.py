"""Pages that the device allocates itself, and copies of rows into and out of them; nothing waits for the host.

Input: live row counts on the device, tensors of rows, and an `Arena` of device and pinned host memory that the caller owns.
Output: tables of page numbers, and rows in pages. A page holds page_rows = page_bytes // row_bytes whole rows of one tensor:
row r is on page `table[r // page_rows]` at row r % page_rows. Pages 0 .. D-1 are device memory, the others pinned host
memory, which kernels address like their own (`cudaHostRegister`); a table may mix them. Example, 6 pages of 512 bytes, rows
of 200 bytes: `take_pages` for up to 7 rows of which 5 are live, from a stack that begins [4, 0, 3, ...], returns table = [4,
0, 3, -1]; rows 0 and 1 are on page 4, rows 2 and 3 on page 0, row 4 on page 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, cdiv, launch, next_power_of_2, packed, use_triton

# Elements of `FreePages.state`.
HEAD, TAIL, SHORT, MOST = 0, 1, 2, 3
_HEAD, _TAIL, _SHORT, _MOST = tl.constexpr(HEAD), tl.constexpr(TAIL), tl.constexpr(SHORT), tl.constexpr(MOST)
# Bytes. Pages begin on sectors of memory, and can be viewed in any dtype.
PAGE_ALIGN = 512
# Most tensors that pages are taken for at once: the experts' input and their first product.
TOGETHER = 2
# Words that a program moves. Swept on an H200 at 65536 x 2048 bf16, relative to `copy_`, stash and restore: 256 words on 4 warps
# 0.99, 0.92; 512 on 4 0.99, 0.99; 512 on 8 0.99, 0.92; 1024 0.96, 0.96; persistent programs, four to sixteen per multiprocessor,
# 0.88 to 0.92.
_TILE_WORDS = 512
_WARPS = 4
# In the interpreter a program costs as much as a thousand words, so few programs iterate over the tiles.
_INTERPRETED_PROGRAMS = 3
_TABLE_BLOCK = 1024
# Common divisor of all addresses in bytes -> word. Triton has no word of 16 bytes: it merges two of 8.
_WORDS: Mapping[int, torch.dtype] = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class PagedRows(NamedTuple):
    """A request for pages: rows [0, live) of one tensor of `rows` rows.

    Attributes:
        live: [1] int32 or int64 on the compute device.
    """

    live: Tensor
    rows: int
    row_bytes: int


class Arena(NamedTuple):
    """The memory of all pages.

    Attributes:
        device: [D * page_bytes] uint8 on the compute device, beginning on 16 bytes; may be empty.
        host: [(N - D) * page_bytes] uint8, registered with the device, beginning on 16 bytes; may be empty.
        page_bytes: a multiple of 512.
    """

    device: Tensor
    host: Tensor
    page_bytes: int

    @property
    def device_pages(self) -> int:
        return self.device.numel() // self.page_bytes

    @property
    def host_pages(self) -> int:
        return self.host.numel() // self.page_bytes

    @property
    def host_at(self) -> int:
        """Distance from the end of `device` to `host`, in units of 16 bytes."""
        if not self.host.numel():
            return 0
        return (self.host.data_ptr() - self.device.data_ptr() - self.device.numel()) // 16

    def page(self, number: int) -> Tensor:
        """[page_bytes] uint8: a view."""
        memory, at = (self.device, number) if number < self.device_pages else (self.host, number - self.device_pages)
        return memory[at * self.page_bytes : (at + 1) * self.page_bytes]


class PageTable(NamedTuple):
    """The pages of one saved tensor.

    Attributes:
        pages: [ceil(rows / page_rows)] int32 on the compute device; -1: no page.
        live: [1] int32 or int64 on the compute device, at most `rows`: rows [0, live) are saved.
        rows: the most rows that there can be.
        row_bytes: of one row, at most a page.
    """

    arena: Arena
    pages: Tensor
    live: Tensor
    rows: int
    row_bytes: int

    @property
    def page_rows(self) -> int:
        return self.arena.page_bytes // max(1, self.row_bytes)


class FreePages(NamedTuple):
    """A stack of free pages on the device: the first HEAD + N - TAIL entries of `pages` are empty.

    With a stack, host pages are used only when more pages are out at once than the device has; a ring would use them in turn.

    Attributes:
        pages: [N] int32, page numbers.
        state: [4] int64: HEAD (pages ever taken), TAIL (pages given back, plus N), SHORT (most pages that were missing in a
            call), MOST (most pages out at once, had there been enough). The owner may zero the last two between steps.
    """

    pages: Tensor
    state: Tensor


def all_free(n_pages: int, device: torch.device | str) -> FreePages:
    """All pages free, in order."""
    state = torch.zeros(4, dtype=torch.int64, device=device)
    state[TAIL] = n_pages
    return FreePages(torch.arange(n_pages, dtype=torch.int32, device=device), state)


@triton.jit
def _needed(live_ptr, page_rows, max_pages):
    """Pages for the live rows, int64."""
    live = tl.maximum(tl.load(live_ptr).to(tl.int64), 0)
    return tl.minimum((live + page_rows - 1) // page_rows, max_pages)


@triton.jit
def _take(free_ptr, table_ptr, place, needed, max_pages, BLOCK: tl.constexpr):
    """`needed` pages from `place` on, then -1."""
    start = 0
    while start < max_pages:
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(free_ptr + place + at, mask=at < needed, other=-1)
        tl.store(table_ptr + at, pages, mask=at < max_pages)
        start += BLOCK


@triton.jit(
    do_not_specialize=["n_pages", "live_0", "live_1", "page_rows_0", "page_rows_1", "max_pages_0", "max_pages_1"]
)
def _take_kernel(
    free_ptr, state_ptr, n_pages, live_0, live_1, page_rows_0, page_rows_1, max_pages_0, max_pages_1, table_0, table_1,
    BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: pages for all tables or for none."""
    head = tl.load(state_ptr + _HEAD)
    tail = tl.load(state_ptr + _TAIL)
    short = tl.load(state_ptr + _SHORT)
    most = tl.load(state_ptr + _MOST)
    needed_0 = _needed(live_0, page_rows_0, max_pages_0)
    needed_1 = head * 0
    if BOTH:
        needed_1 = _needed(live_1, page_rows_1, max_pages_1)
    total = needed_0 + needed_1
    missing = total - (tail - head)
    enough = (missing <= 0).to(tl.int64)
    needed_0 *= enough
    needed_1 *= enough
    place = head + n_pages - tail
    _take(free_ptr, table_0, place, needed_0, max_pages_0, BLOCK)
    if BOTH:
        _take(free_ptr, table_1, place + needed_0, needed_1, max_pages_1, BLOCK)
    tl.store(state_ptr + _HEAD, head + total * enough)
    tl.store(state_ptr + _SHORT, tl.maximum(short, missing))
    tl.store(state_ptr + _MOST, tl.maximum(most, head + n_pages - tail + total))


@triton.jit
def _give(free_ptr, table_ptr, place, size, BLOCK: tl.constexpr):
    """Store the pages of a table before `place`, in their order. Returns the place of the first."""
    start = 0
    count = 0
    while start < size:
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + at, mask=at < size, other=-1)
        count += tl.sum((pages >= 0).to(tl.int32), 0)
        start += BLOCK
    place -= count
    start = 0
    at_place = place
    while start < size:
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + at, mask=at < size, other=-1)
        held = (pages >= 0).to(tl.int32)
        tl.store(free_ptr + at_place + tl.cumsum(held, 0) - held, pages, mask=held > 0)
        at_place += tl.sum(held, 0)
        start += BLOCK
    return place


@triton.jit(do_not_specialize=["n_pages", "size_0", "size_1"])
def _give_kernel(
    free_ptr, state_ptr, n_pages, table_0, table_1, size_0, size_1, BOTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The second table first, which restores the order in which they were taken."""
    tail = tl.load(state_ptr + _TAIL)
    last = tl.load(state_ptr + _HEAD) + n_pages - tail
    place = last
    if BOTH:
        place = _give(free_ptr, table_1, place, size_1, BLOCK)
    place = _give(free_ptr, table_0, place, size_0, BLOCK)
    tl.store(state_ptr + _TAIL, tail + (last - place))


@triton.jit
def page_place(page, device_pages, host_at, PAGE_WORDS: tl.constexpr, WORDS_IN_16: tl.constexpr):
    """Offset of pages from the arena's device memory in words, int64."""
    beyond = tl.where(page >= device_pages, tl.cast(host_at, tl.int64), 0)
    return page.to(tl.int64) * PAGE_WORDS + beyond * WORDS_IN_16


@triton.jit
def row_places(
    pages_ptr, rows, exists, device_pages, host_at, PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, WORDS_IN_16: tl.constexpr
):  # fmt: skip
    """Offsets of rows from the arena's device memory in words, and which of the rows that exist have a page."""
    PAGE_ROWS: tl.constexpr = PAGE_WORDS // ROW_WORDS
    slot = rows.to(tl.int32) // PAGE_ROWS
    page = tl.load(pages_ptr + slot, mask=exists, other=-1)
    place = page_place(page, device_pages, host_at, PAGE_WORDS, WORDS_IN_16) + (rows - slot * PAGE_ROWS) * ROW_WORDS
    return place, page >= 0


@triton.jit(do_not_specialize=["live_ptr", "device_pages", "host_at"])
def _move_kernel(
    rows_ptr, arena_ptr, pages_ptr, live_ptr, device_pages, host_at: tl.int64, STASH: tl.constexpr,
    PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, PAGE_ROWS: tl.constexpr, WORDS_IN_16: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Tile program_id(0) and every num_programs-th after it; `arena_ptr` is the device memory in words of the rows."""
    FULL: tl.constexpr = PAGE_ROWS * ROW_WORDS
    TILES: tl.constexpr = (FULL + TILE - 1) // TILE
    tile = tl.program_id(0)
    live = tl.load(live_ptr).to(tl.int64)
    tiles = ((live + PAGE_ROWS - 1) // PAGE_ROWS).to(tl.int32) * TILES
    while tile < tiles:
        slot = tile // TILES
        page = tl.load(pages_ptr + slot)
        at = (tile - slot * TILES) * TILE + tl.arange(0, TILE)
        before = slot.to(tl.int64) * FULL
        # Live words of this page are whole rows, so divisible as a row, which the compiler cannot see.
        words = tl.minimum(live * ROW_WORDS - before, FULL).to(tl.int32)
        inside = at < tl.multiple_of(words, ROW_WORDS & -ROW_WORDS)
        rows = rows_ptr + before + at
        place = arena_ptr + page_place(page, device_pages, host_at, PAGE_WORDS, WORDS_IN_16) + at
        if STASH:
            # Rows do not depend on the page number: both loads are in flight at once.
            tl.store(place, tl.load(rows, mask=inside), mask=inside & (page >= 0))
        else:
            tl.store(rows, tl.load(place, mask=inside & (page >= 0), other=0), mask=inside)
        tile += tl.num_programs(0)


def take_pages(
    stack: FreePages, wanted: Sequence[tuple[Tensor, int, int]], *, backend: Backend = "auto"
) -> list[Tensor]:
    """A table [max_pages] int32 for each of one or two tensors, in one launch: pages for all of them, or -1 everywhere.

    If a call needs more pages than are free, SHORT is set; the caller then discards the step's gradients.

    Args:
        wanted: (live [1] int32 or int64 on the device, page_rows, max_pages) of each tensor; live rows need at most max_pages.

    Raises:
        ValueError: no tensor or more than two; live counts or free pages of another shape or device, or not contiguous.
        TypeError: of another dtype.
    """
    _check_free(stack)
    _check_together(wanted)
    wanted = [(packed("live", live, stack.pages, [1], INDICES), fit, most) for live, fit, most in wanted]
    # Tables begin on 16 bytes, so that kernels are not compiled again for other alignments.
    lengths = [-(-most // 4) * 4 for _, _, most in wanted]
    memory = torch.empty(sum(lengths), dtype=torch.int32, device=stack.pages.device)
    tables = [part[:most] for part, (_, _, most) in zip(memory.split(lengths), wanted, strict=True)]
    if not use_triton(backend, stack.pages):
        _take_reference(stack, wanted, tables)
        return tables
    lives, page_rows, max_pages = (_padded(part) for part in zip(*wanted, strict=True))
    launch(
        _take_kernel, (1,),
        stack.pages, stack.state, stack.pages.shape[0], *lives, *page_rows, *max_pages, *_padded(tables),
        BOTH=len(wanted) == 2, BLOCK=_TABLE_BLOCK, num_warps=4,
    )  # fmt: skip
    return tables


def give_pages(stack: FreePages, tables: Sequence[Tensor], *, backend: Backend = "auto") -> None:
    """Free the pages of the tables of one `take_pages`, in one launch; entries of -1 are skipped.

    Args:
        tables: one or two, [max_pages] int32 each, any stride.

    Raises:
        ValueError, TypeError: another number of tables, a table or free pages of another shape, device or dtype.
    """
    _check_free(stack)
    _check_together(tables)
    tables = [packed("table", table, stack.pages, [None], [torch.int32]) for table in tables]
    if not use_triton(backend, stack.pages):
        _give_reference(stack, tables)
        return
    launch(
        _give_kernel, (1,),
        stack.pages, stack.state, stack.pages.shape[0], *_padded(tables), *_padded([t.numel() for t in tables]),
        BOTH=len(tables) == 2, BLOCK=_TABLE_BLOCK, num_warps=4,
    )  # fmt: skip


def stash(tensors: Sequence[Tensor], tables: Sequence[PageTable], *, backend: Backend = "auto") -> None:
    """Copy rows [0, live) of each tensor to its pages, one launch each. Rows without a page are not written.

    The plain form waits for the device. 65536 rows of 2048 bf16 (537 MB read and written) take 0.13 ms at 4 TB/s, and on host
    pages 5 ms at 53 GB/s.

    Args:
        tensors: contiguous, [rows, ...] with the table's row_bytes to a row, of any dtype.

    Raises:
        ValueError: a tensor that does not match its table.
    """
    for tensor, table in zip(tensors, tables, strict=True):
        _move(tensor, table, True, backend)


def restore(tables: Sequence[PageTable], outs: Sequence[Tensor], *, backend: Backend = "auto") -> None:
    """Copy pages to rows [0, live) of each tensor; rows without a page become zeros, later rows are not written. See `stash`."""
    for tensor, table in zip(outs, tables, strict=True):
        _move(tensor, table, False, backend)


def _move(tensor: Tensor, table: PageTable, to_pages: bool, backend: Backend) -> None:
    check_table(table)
    if (
        not tensor.is_contiguous()
        or tensor.dim() == 0
        or tensor.shape[0] != table.rows
        or tensor.nbytes != table.rows * table.row_bytes
    ):
        raise ValueError(
            f"a table of {table.rows} rows of {table.row_bytes} bytes needs a contiguous tensor of as many, got "
            f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        )
    arena, fit = table.arena, table.page_rows
    if tensor.device != arena.device.device:
        raise ValueError(f"a tensor on {tensor.device} for pages on {arena.device.device}")
    if not tensor.numel():
        return
    if not use_triton(backend, table.pages):
        _move_reference(tensor, table, to_pages)
        return
    word = _WORDS[math.gcd(16, table.row_bytes, tensor.data_ptr())]
    row = table.row_bytes // word.itemsize
    tile = min(_TILE_WORDS, next_power_of_2(fit * row))
    programs = table.pages.numel() * cdiv(fit * row, tile)  # as many as there are tiles, if all rows are live
    if not tensor.is_cuda:
        programs = min(programs, _INTERPRETED_PROGRAMS)
    launch(
        _move_kernel, (programs,),
        tensor.view(-1).view(word), arena.device.view(word), table.pages, table.live, arena.device_pages, arena.host_at,
        STASH=to_pages, PAGE_WORDS=arena.page_bytes // word.itemsize, ROW_WORDS=row, PAGE_ROWS=fit,
        WORDS_IN_16=16 // word.itemsize, TILE=tile, num_warps=_WARPS,
    )  # fmt: skip


def check_table(table: PageTable) -> None:
    """Check a table before it is passed to a kernel.

    Raises:
        ValueError: an arena that is not aligned or not contiguous, a row that is larger than a page, another number of entries
            than the rows need, or entries that are not contiguous.
        TypeError: entries or a live count of another dtype.
    """
    arena = table.arena
    for name, memory in (("device", arena.device), ("host", arena.host)):
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(
                f"an arena's {name} memory must be contiguous [bytes] uint8, got {list(memory.shape)} {memory.dtype}, "
                f"strides {memory.stride()}"
            )
    if arena.page_bytes % PAGE_ALIGN or arena.device.data_ptr() % 16 or arena.host.data_ptr() % 16:
        raise ValueError(
            f"an arena begins on 16 bytes and its pages are multiples of {PAGE_ALIGN} bytes, got memory at "
            f"{arena.device.data_ptr():#x} and {arena.host.data_ptr():#x}, pages of {arena.page_bytes} bytes"
        )
    if table.row_bytes > table.arena.page_bytes:
        raise ValueError(f"a row of {table.row_bytes} bytes does not fit on a page of {table.arena.page_bytes}")
    if table.pages.shape != (cdiv(table.rows, table.page_rows),):
        raise ValueError(
            f"{table.rows} rows, {table.page_rows} on a page, need {cdiv(table.rows, table.page_rows)} entries, "
            f"got {tuple(table.pages.shape)}"
        )
    if not table.pages.is_contiguous():  # not copied, because a CUDA graph capture would keep the copy
        raise ValueError(f"a table's entries must be contiguous, got strides {table.pages.stride()}")
    packed("a table's entries", table.pages, arena.device, [None], [torch.int32])
    packed("live", table.live, arena.device, [1], INDICES)


def _check_free(stack: FreePages) -> None:
    """Free pages are read and written in place."""
    packed("free pages", stack.pages, stack.pages, [None], [torch.int32])
    packed("state of free pages", stack.state, stack.pages, [4], [torch.int64])
    if not (stack.pages.is_contiguous() and stack.state.is_contiguous()):
        raise ValueError(f"free pages must be contiguous, got strides {stack.pages.stride()}, {stack.state.stride()}")


def _check_together(some: Sequence) -> None:
    if not 0 < len(some) <= TOGETHER:
        raise ValueError(f"pages are taken and given for 1 to {TOGETHER} tensors at once, got {len(some)}")


def _padded(some: Sequence) -> list:
    """With the first one in the place of a second that is not there: unused arguments compile no further kernels."""
    return [some[0], some[-1]]


def _take_reference(stack: FreePages, wanted: Sequence[tuple[Tensor, int, int]], tables: Sequence[Tensor]) -> None:
    n_pages, (head, tail, short, most) = stack.pages.shape[0], stack.state.tolist()
    needed = [min(max(0, -(-int(live) // page_rows)), max_pages) for live, page_rows, max_pages in wanted]
    missing = sum(needed) - (tail - head)
    most = max(most, head + n_pages - tail + sum(needed))
    numbers = stack.pages.tolist()
    for table, count in zip(tables, needed, strict=True):
        pages = [-1] * table.numel()
        if missing <= 0:
            out = head + n_pages - tail
            pages[:count] = numbers[out : out + count]
            head += count
        table.copy_(torch.tensor(pages, dtype=torch.int32, device="cpu"))
    stack.state.copy_(torch.tensor([head, tail, max(short, missing), most], device="cpu"))


def _give_reference(stack: FreePages, tables: Sequence[Tensor]) -> None:
    pages = [page for table in tables for page in table.tolist() if page >= 0]
    head, tail = stack.state[:2].tolist()
    out = head + stack.pages.shape[0] - tail
    stack.pages[out - len(pages) : out] = torch.tensor(pages, dtype=torch.int32, device=stack.pages.device)
    stack.state[TAIL] += len(pages)


def _move_reference(tensor: Tensor, table: PageTable, to_pages: bool) -> None:
    rows = tensor.view(table.rows, -1).view(torch.uint8)
    live, fit = int(table.live), table.page_rows
    for slot, number in enumerate(table.pages.tolist()):
        piece = rows[slot * fit : min((slot + 1) * fit, live)].view(-1)
        if number < 0 and not to_pages:
            piece.zero_()
        elif number >= 0:
            page = table.arena.page(number)[: piece.numel()]
            (page if to_pages else piece).copy_(piece if to_pages else page)
