"""PageStore: saved rows wait in pages of one arena, where only the device knows how many rows there are.

In: for each tensor of a layer the most rows there can be, the bytes of one, and a tensor on the device that says how many are
live. Out: a `PageTicket` with a `PageTable` for each; the kernels `stash` and `restore`, or a kernel that has the rows in hand
anyway, write and read the pages. The autograd graph owns the ticket. When it dies, a kernel gives the pages back.

    ticket = store.take([Rows(live, 4096, 2048)])      # one launch, no host synchronisation
    stash([x], ticket.tables)
    ...                                                # backward
    restore(ticket.tables, [x_again])
    del ticket                                         # one launch: the pages are free for whoever takes next

A page holds whole rows of one width. A tensor takes ceil(live / rows of a page) pages; what is free is known to the device
only. Pages of the device go out first and pages of the host when there are no more, one by one: half of a tensor may lie here,
half there. When the arena has too few for a layer, the layer gets none, and `missing_flag` says so until the step's end: the
step must be run again, within `exactly`.

Size. The first step is counted: `take` reads the live rows on the host, and each ticket has just the pages it needs in memory
of its own. `end_step` then makes the arena: on the device what was out at once, and a margin; on the host what tickets alive at
once could need if all their rows were live. So nothing can be missing while shapes and the number of tickets stay as they
were. Later steps only grow it, at their end.

Streams. Everything runs on the compute stream, which orders takes, gives and copies among one another. A ticket may die in
autograd's thread, or in a garbage collection within somebody's ``with torch.cuda.stream(side)``: it remembers the stream it was
taken on and gives back there.

CUDA graphs. A take that is captured belongs to its graph, and so must its give: a ticket taken in a capture gives back in that
capture or not at all (a capture that failed has taken nothing). One taken before, which happens to die while the capture runs,
must not give back in every replay: its pages wait for the next take outside.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import (
    PAGE_ALIGN,
    TOGETHER,
    Arena,
    FreePages,
    PagedRows,
    PageTable,
    all_free,
    give_pages,
    take_pages,
)
from forebay.memory.host_store import HostPool, HostSlot

# Steps differ. One that needs a page more for each so many than the one that was counted still stays on the device; what more is
# needed lies on the host for that step, and on the device in the next.
_MARGIN = 64


@dataclass(frozen=True)
class PageReport:
    """What a step needed, and what the next one has.

    Attributes:
        pages_out: most pages that were out at once, or would have been had there been enough.
        bytes_out: of them.
        device_bytes, host_bytes: of the arena, as it is from now on.
        missing_pages: how many were missing, at most; above 0, rows were not saved.
        spilled: pages of the host were out.
        resized: the arena is another one than before; CUDA graphs that use it must be captured again.
        reclaimed_pages: were out although no ticket is alive, and are free again: of a graph that takes without giving, such as
            a forward pass that was replayed without its backward pass.
    """

    pages_out: int
    bytes_out: int
    device_bytes: int
    host_bytes: int
    missing_pages: int
    spilled: bool
    resized: bool
    reclaimed_pages: int


class _Pages(NamedTuple):
    """A number of each."""

    device: int
    host: int


class PageTicket:
    """Pages of one `take`. Gives them back when it dies.

    Attributes:
        tables: where the rows lie, in the order of `take`. Only good while the ticket is alive.
    """

    __slots__ = ("__weakref__", "_bound", "_captured_in", "_held", "_memory", "_own", "_store", "_stream", "tables")

    def __init__(
        self,
        store: "PageStore",
        tables: tuple[PageTable, ...],
        memory: "_Memory | _Own",
        stream: Any,
        captured_in: int | None,
        bound: int,
        held: int,
    ):
        self.tables = tables
        self._store = store
        self._memory = memory if isinstance(memory, _Memory) else None
        self._own = memory if isinstance(memory, _Own) else None
        self._stream = stream
        self._captured_in = captured_in  # the store's epoch, or None for a take that was no part of a capture
        self._bound = bound  # pages, if all rows are live
        self._held = held  # pages, as far as the host knows

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not ending():
            self._store._released(self)


@dataclass(eq=False)
class _Memory:
    """An arena with its free pages; lives as long as the store uses it or a ticket of it is alive."""

    arena: Arena
    stack: FreePages
    slot: HostSlot | None  # of the host pages, which are page-locked as long as this is alive
    device_pages: int
    host_pages: int

    @property
    def pages(self) -> int:
        return self.device_pages + self.host_pages

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        # Kernels may still be using the memory, on other streams than it was allocated on. They use that of the host without
        # any allocator knowing.
        if self.arena.device.is_cuda and not ending():
            torch.cuda.synchronize(self.arena.device.device)


@dataclass(eq=False)
class _Own:
    """An arena of one ticket's, with just the pages that it needs."""

    arena: Arena
    slot: HostSlot | None  # of the host pages
    device_pages: int
    host_pages: int

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        # Device memory is given back in its stream's order, that of the host at once.
        if self.slot is not None and self.arena.device.is_cuda and not ending():
            torch.cuda.synchronize(self.arena.device.device)


class PageStore:
    """Pages of one device. Owns their memory; tickets are owned by the graph. Used by one thread at a time.

    Args:
        device: where the rows are.
        page_bytes: of a page, a multiple of 512. Each saved tensor wastes half a page on average.
        device_budget: most bytes of the arena on the device; None: as many as a step needs.
        spill: have pages on the host behind those of the device. Without, a step can need more than there is.
        backend: of the kernels.

    Attributes:
        last: what the last `end_step` said; None before it.
        generation: counts the arenas that there have been. A CUDA graph is good for the one it was captured with.

    Raises:
        ValueError: a page size that does not fit, a negative budget.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        page_bytes: int = 256 << 10,
        device_budget: int | None = None,
        spill: bool = True,
        backend: Backend = "auto",
    ):
        if page_bytes <= 0 or page_bytes % PAGE_ALIGN:
            raise ValueError(f"page_bytes must be a multiple of {PAGE_ALIGN}, got {page_bytes}")
        if device_budget is not None and device_budget < 0:
            raise ValueError(f"device_budget must not be negative, got {device_budget}")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.page_bytes = page_bytes
        self.device_budget = device_budget
        self.spill = spill
        self.backend: Backend = backend
        self.generation = 0
        self.last: PageReport | None = None
        self._memory: _Memory | None = None
        self._closed = False
        self._exact = 0  # depth of `exactly`
        self._epoch = 0  # counts ends of steps and arenas: a ticket captured in an earlier one gives nothing back
        self._last: Any = None  # stream that used the free pages last
        self._all_live: dict[int, Tensor] = {}  # constants, by value
        # A ticket may die at any moment, in any thread. What it leaves here is counted by the next call.
        self._dead: deque[tuple[int, int, _Pages]] = deque()
        self._late: deque[tuple[_Memory, tuple[PageTable, ...], Any]] = deque()
        self._alive = 0
        self._bound = 0  # pages that the live tickets could need
        self._worst = 0  # the most of it
        self._held = 0  # pages that are out, as far as the host knows
        self._private = _Pages(0, 0)  # of them, in memory of tickets' own
        self._private_most = 0  # the most of it in this step

    @property
    def live_tickets(self) -> int:
        """Tickets that are alive."""
        self._count_dead()
        return self._alive

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages that are out. The host does not know how many rows are live: it counts them all."""
        self._count_dead()
        return self._held * self.page_bytes

    @property
    def sized(self) -> bool:
        """Whether there is an arena, that is: whether `take` does without the host."""
        return self._memory is not None

    @property
    def device_pages(self) -> int:
        """Pages of the arena on the device."""
        return self._memory.device_pages if self._memory is not None else 0

    @property
    def host_pages(self) -> int:
        """Pages of the arena on the host."""
        return self._memory.host_pages if self._memory is not None else 0

    @property
    def device_bytes(self) -> int:
        """Memory of pages on the device: the arena's, and that of tickets' own."""
        self._count_dead()
        return (self.device_pages + self._private.device) * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Memory of pages on the host: the arena's, and that of tickets' own."""
        self._count_dead()
        return (self.host_pages + self._private.host) * self.page_bytes

    def take(self, wanted: Sequence[PagedRows]) -> PageTicket:
        """Pages for the tensors of one layer, all or none of them.

        Without an arena, and within `exactly`, the host waits for the device once and the ticket has memory of its own: on the
        device as far as the budget goes beside the arena and other such tickets, and with `spill` on the host behind that.

        Args:
            wanted: one to four tensors' rows. The `live` tensors must keep their values until the ticket is dead.

        Raises:
            ValueError: rows that no page holds, malformed rows, a budget below what this layer can need.
            RuntimeError: the store is closed, or has no arena yet while a CUDA graph is captured.
        """
        self._check_open()
        bounds = self._bounds(wanted)
        bound = sum(bounds)
        stream = self._stream()
        capturing = self._is_capturing(stream)
        self._count_dead()
        if not capturing:
            self._give_late()
        memory: _Memory | _Own | None = None if self._exact else self._memory
        if memory is None:
            if capturing:
                raise RuntimeError(
                    "pages cannot be counted while a CUDA graph is captured: run a step and end_step() before, and "
                    "capture outside of exactly()"
                )
            tables, memory = self._take_exactly(wanted, bounds)
            held = memory.device_pages + memory.host_pages
            device, host = self._private
            self._private = _Pages(device + memory.device_pages, host + memory.host_pages)
            self._private_most = max(self._private_most, sum(self._private))
        else:
            assert isinstance(memory, _Memory)
            self._in_order(stream, capturing)
            lives = [self._live(rows) for rows in wanted]
            needs = [
                (live, self.page_bytes // rows.row_bytes, most)
                for live, rows, most in zip(lives, wanted, bounds, strict=True)
            ]
            pages = take_pages(memory.stack, needs, backend=self.backend)
            tables = tuple(
                PageTable(memory.arena, numbers, live, rows.rows, rows.row_bytes)
                for numbers, live, rows in zip(pages, lives, wanted, strict=True)
            )
            held = bound
        self._alive += 1
        self._held += held
        self._bound += bound
        self._worst = max(self._worst, self._bound)
        return PageTicket(self, tables, memory, stream, self._epoch if capturing else None, bound, held)

    def end_step(self) -> PageReport:
        """Wait for the device, say what the step needed, and make room for as much in the next.

        The arena grows when no ticket is alive and the step had pages on the host that the budget has room for on the device,
        or could have needed more than there are.

        Raises:
            MemoryError: the host cannot give or page-lock as much. torch.OutOfMemoryError: the device cannot. There is no
                arena then, as in the first step.
        """
        self._check_open()
        if self._is_capturing(self._stream()):
            raise RuntimeError("end_step() waits for the device: not while a CUDA graph is captured")
        self._epoch += 1
        self._give_late()
        self._wait()
        idle = self.live_tickets == 0
        most, missing, spilled, reclaimed = self._private_most, 0, False, 0
        if self._memory is not None:
            stack = self._memory.stack
            head, tail, missing, out_most = stack.state.tolist()
            out = head - tail + self._memory.pages
            most = max(most, out_most)
            spilled = out_most > self._memory.device_pages
            reclaimed = out if idle else 0
            if idle and (out or spilled):  # in place: captured graphs go on with it
                _refill(stack)
            else:
                stack.state.copy_(torch.tensor([head, tail, 0, out]))
            self._last = self._stream()
        self._private_most = sum(self._private)
        resized = idle and self._fit(most)
        self.last = PageReport(
            pages_out=most,
            bytes_out=most * self.page_bytes,
            device_bytes=self.device_pages * self.page_bytes,
            host_bytes=self.host_bytes,
            missing_pages=missing,
            spilled=spilled,
            resized=resized,
            reclaimed_pages=reclaimed,
        )
        return self.last

    def resize(self, device_pages: int, host_pages: int) -> None:
        """Make another arena, of so many pages. Tickets that are alive keep the one they have, beside it.

        Raises:
            ValueError: no page at all, more than the budget, or host pages where spilling is off.
            MemoryError, torch.OutOfMemoryError: see `end_step`.
        """
        self._check_open()
        if device_pages < 0 or host_pages < 0 or device_pages + host_pages == 0:
            raise ValueError(f"an arena of {device_pages} device pages and {host_pages} host pages")
        if device_pages > self._budget_pages(device_pages):
            raise ValueError(
                f"{device_pages} device pages are {device_pages * self.page_bytes} bytes, the budget is {self.device_budget}"
            )
        if host_pages and not self.spill:
            raise ValueError(f"{host_pages} host pages asked for, but spilling to the host is off")
        if self._is_capturing(self._stream()):
            raise RuntimeError("an arena cannot be made while a CUDA graph is captured")
        self._give_late()
        self._wait()
        slot = None
        if self._memory is not None and self._memory.host_pages == host_pages and self.live_tickets == 0:
            slot = self._memory.slot  # page-locking is slow, and nobody else uses it
        self._memory = None  # before the next is allocated: often there is no room for both
        self._last = None
        self.generation += 1
        self._epoch += 1
        self._memory = self._allocate(device_pages, host_pages, slot)

    def missing_flag(self) -> Tensor:
        """int64 [1] on the device: pages that were missing in this step, at most. 0: every live row was saved."""
        self._check_open()
        if self._memory is None:
            return torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._memory.stack.state[2:3]

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, tickets have just the pages they need, in memory of their own: for the step that is run again."""
        self._check_open()
        self._exact += 1
        try:
            yield
        finally:
            self._exact -= 1

    def close(self) -> None:
        """Let go of the arena. Tickets that a graph still owns stay valid, and it lives until the last of them dies."""
        if self._closed:
            return
        self._closed = True
        self._give_late()
        self._wait()
        self._memory = None
        self._last = None
        self._all_live.clear()

    def _bounds(self, wanted: Sequence[PagedRows]) -> list[int]:
        """Pages of each, if all its rows are live."""
        if not 1 <= len(wanted) <= TOGETHER:
            raise ValueError(f"a ticket is for 1 to {TOGETHER} tensors, got {len(wanted)}")
        bounds = []
        for live, rows, row_bytes in wanted:
            if rows < 0 or row_bytes <= 0:
                raise ValueError(f"{rows} rows of {row_bytes} bytes")
            if row_bytes > self.page_bytes:
                raise ValueError(
                    f"a row of {row_bytes} bytes does not fit a page of {self.page_bytes}: "
                    f"page_bytes must be {-(-row_bytes // PAGE_ALIGN) * PAGE_ALIGN} or more"
                )
            if live is not None and (
                live.numel() != 1 or live.device != self.device or live.dtype not in (torch.int32, torch.int64)
            ):
                raise ValueError(
                    f"live must be one int32 or int64 on {self.device}, got {tuple(live.shape)} {live.dtype} on {live.device}"
                )
            bounds.append(-(-rows // (self.page_bytes // row_bytes)))
        if not self.spill and sum(bounds) > self._budget_pages(sum(bounds)):
            raise ValueError(
                f"a layer can need {sum(bounds)} pages, and without spilling to the host a device_budget of "
                f"{sum(bounds) * self.page_bytes} bytes or more; it is {self.device_budget}"
            )
        return bounds

    def _live(self, rows: PagedRows) -> Tensor:
        if rows.live is not None:
            return rows.live
        known = self._all_live.get(rows.rows)
        # Not kept: within a capture it would be memory of the graph, without a value until the graph is replayed.
        return known if known is not None else self._constant(rows.rows)

    def _constant(self, value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self.device)

    def _take_exactly(self, wanted: Sequence[PagedRows], bounds: Sequence[int]) -> tuple[tuple[PageTable, ...], "_Own"]:
        for rows in wanted:
            if rows.live is None and rows.rows not in self._all_live:
                self._all_live[rows.rows] = self._constant(rows.rows)
        unknown = [rows.live.reshape(1).long() for rows in wanted if rows.live is not None]
        read = iter(torch.cat(unknown).tolist() if unknown else ())
        counts = []
        for rows in wanted:
            count = rows.rows if rows.live is None else next(read)
            if not 0 <= count <= rows.rows:
                raise ValueError(f"{count} live rows of a tensor of {rows.rows}")
            counts.append(-(-count // (self.page_bytes // rows.row_bytes)))
        own = self._own_pages(sum(counts))
        tables, first = [], 0
        for rows, count, most in zip(wanted, counts, bounds, strict=True):
            pages = torch.full((most,), -1, dtype=torch.int32, device=self.device)
            torch.arange(first, first + count, dtype=torch.int32, device=self.device, out=pages[:count])
            tables.append(PageTable(own.arena, pages, self._live(rows), rows.rows, rows.row_bytes))
            first += count
        return tuple(tables), own

    def _own_pages(self, count: int) -> "_Own":
        on_device = count
        if self.spill:
            taken = self.device_pages + self._private.device
            on_device = min(count, max(0, self._budget_pages(taken + count) - taken))
        host, slot = self._host_memory(count - on_device, None)
        device = torch.empty(on_device * self.page_bytes, dtype=torch.uint8, device=self.device)
        return _Own(Arena(device, host, self.page_bytes), slot, on_device, count - on_device)

    def _fit(self, most: int) -> bool:
        """Make the arena large enough for a step that has `most` pages out at once. True if it is another one now."""
        device, host = self.device_pages, self.host_pages
        if self._memory is None or most > device:
            enough = max(1, min(most - (-most // _MARGIN), self._worst))
            device = max(device, self._budget_pages(enough))
        if self.spill:
            host = max(host, self._worst - device)
        if self._worst == 0 or (device, host) == (self.device_pages, self.host_pages):
            return False
        self.resize(device, host)
        return True

    def _budget_pages(self, pages: int) -> int:
        """As many of `pages` as the budget allows."""
        return pages if self.device_budget is None else min(pages, self.device_budget // self.page_bytes)

    def _allocate(self, device_pages: int, host_pages: int, slot: HostSlot | None) -> _Memory:
        host, slot = self._host_memory(host_pages, slot)
        device = torch.empty(device_pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        stack = all_free(device_pages + host_pages, self.device)
        return _Memory(Arena(device, host, self.page_bytes), stack, slot, device_pages, host_pages)

    def _host_memory(self, pages: int, slot: HostSlot | None) -> tuple[Tensor, HostSlot | None]:
        """So many host pages, of `slot` if there is one; they live as long as the slot."""
        if not pages:
            return torch.empty(0, dtype=torch.uint8), slot
        if slot is None:
            pool = HostPool(pin=self.device.type == "cuda", small_slab=0)
            slot = pool.take(pages * self.page_bytes)
            pool.close()
        return slot.bytes_, slot

    def _released(self, ticket: PageTicket) -> None:
        """A ticket dies. Any thread, any current stream, within a capture or not."""
        memory, stream = ticket._memory, ticket._stream
        own = ticket._own
        self._dead.append(
            (ticket._bound, ticket._held, _Pages(own.device_pages, own.host_pages) if own else _Pages(0, 0))
        )
        if memory is None:
            return
        current = self._stream()
        capturing = self._is_capturing(stream)
        nearby = capturing or (current != stream and self._is_capturing(current))
        captured = ticket._captured_in is not None
        if captured and capturing and ticket._captured_in == self._epoch:
            with suppress(RuntimeError):  # the capture has failed, and what it took was never taken
                self._give(memory, ticket.tables, stream, capturing)
        elif nearby:  # memory, too, must not be let go of within a capture
            self._late.append((memory, () if captured else ticket.tables, stream))
        elif not captured:
            self._give(memory, ticket.tables, stream, capturing)

    def _give(self, memory: _Memory, tables: Sequence[PageTable], stream: Any, capturing: bool) -> None:
        self._in_order(stream, capturing)
        with self._on(stream):
            give_pages(memory.stack, [table.pages for table in tables], backend=self.backend)

    def _give_late(self) -> None:
        while self._late:
            memory, tables, stream = self._late.popleft()
            if tables:
                self._give(memory, tables, stream, False)

    def _count_dead(self) -> None:
        while self._dead:
            bound, held, private = self._dead.popleft()
            self._alive -= 1
            self._bound -= bound
            self._held -= held
            self._private = _Pages(self._private.device - private.device, self._private.host - private.host)

    def _in_order(self, stream: Any, capturing: bool) -> None:
        """Make `stream` wait for the one that used the free pages before, if that is another. A capture begins with nothing to
        wait for: the device is idle then."""
        if self._last is not None and self._last != stream and not capturing:
            stream.wait_stream(self._last)
        self._last = stream

    def _stream(self) -> Any:
        """The current stream; None on a CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        here = stream is None or (self.device.index == torch.cuda.current_device() and stream == self._stream())
        return nullcontext() if here else torch.cuda.stream(stream)

    def _is_capturing(self, stream: Any) -> bool:
        if stream is None:
            return False
        with self._on(stream):
            return torch.cuda.is_current_stream_capturing()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the page store is closed")


def _refill(stack: FreePages) -> None:
    """All pages free again, those of the device first. In place."""
    fresh = all_free(stack.pages.numel(), stack.pages.device)
    stack.pages.copy_(fresh.pages)
    stack.state.copy_(fresh.state)
