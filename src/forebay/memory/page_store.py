"""PageStore: saved rows wait in pages of one arena, where only the device knows how many rows there are.

Input: for each tensor of a layer the most rows there can be, the bytes of a row, and a device tensor with the number of live
rows. Output: a `PageTicket` with a `PageTable` for each tensor; the kernels `stash` and `restore`, or a kernel that computes with
the rows anyway, write and read the pages. The autograd graph owns the ticket; when it dies, a kernel gives the pages back.

    ticket = store.take([PagedRows(live, 4096, 2048)])      # one launch, no host synchronization
    stash([x], ticket.tables)
    ...                                                     # backward
    restore(ticket.tables, [x_again])
    del ticket                                              # one launch: the pages are free for the next take
"""

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import PAGE_ALIGN, Arena, FreePages, PagedRows, PageTable, all_free, give_pages, take_pages
from forebay.memory.host_pool import HostBlock, HostPool
from forebay.memory.locked import locked

# Steps differ: an arena has one device page more for each so many that the largest step needed. What a later step needs beyond
# that is on the host for that step, and on the device in the next.
_MARGIN = 64


@dataclass(frozen=True)
class PageReport:
    """What a step needed.

    Attributes:
        bytes_out: of the most pages that were out at once, or would have been had there been enough.
        resized: the arena was replaced; CUDA graphs that use it must be captured again.
    """

    bytes_out: int
    resized: bool


class _PageCounts(NamedTuple):
    """Pages of a ticket: needed if all rows are live, of these in the arena, and in memory of its own on the device and on the
    host."""

    bound: int
    shared: int
    device: int
    host: int


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class PageTicket:
    """The pages of one `take`. Gives them back when it dies.

    Attributes:
        tables: where the rows are, in the order of `take`; valid while the ticket is alive.
    """

    _store: "PageStore"
    tables: tuple[PageTable, ...]
    _memory: "_PageMemory"
    _stream: Any
    _captured_in: int | None  # the store's epoch; None: not taken in a capture
    _counts: _PageCounts
    _generation: int  # the store's

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not ending():
            self._store._ticket_died(self)


@dataclass(eq=False)
class _PageMemory:
    """Memory of the pages of one ticket. `host_block` keeps host pages page-locked; None without any."""

    arena: Arena
    host_block: HostBlock | None

    @property
    def pages(self) -> int:
        return self.arena.device_pages + self.arena.host_pages

    def must_wait(self) -> bool:
        return self.host_block is not None  # device memory is freed in the order of its stream, host memory at once

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if self.must_wait() and self.arena.device.is_cuda and not ending():
            torch.cuda.synchronize(self.arena.device.device)


@dataclass(eq=False)
class _SharedPages(_PageMemory):
    """The store's arena with its free pages. Lives as long as the store or a ticket uses it."""

    free: FreePages

    def must_wait(self) -> bool:
        return True  # kernels may still use it, on other streams than it was allocated on


class PageStore:
    """Pages of one device. Owns their memory; the graph owns the tickets. Several threads may use it.

    A page holds whole rows of one tensor. Device pages go out first and host pages after them, page by page: one tensor may be in
    both. If a replayed CUDA graph finds too few pages for a layer, that layer gets none, `missing_flag` says so until the step's
    end, and the step must be run again within `exactly`.

    Sizes. In the first step `take` reads the live rows on the host, and each ticket has just the pages it needs in memory of its
    own. `end_step` then makes the arena: on the device what was out at once and a margin, on the host what the tickets that were
    alive at once could need with all rows live. Nothing is missing while shapes and the number of tickets stay the same. Later
    steps only let it grow, at their end.

    Streams. The compute stream orders takes, gives and copies. A ticket may die in autograd's thread, or in a garbage collection
    under another current stream: it gives back on the stream it was taken on.

    CUDA graphs. A ticket taken in a capture gives back in that capture or not at all (a capture that failed has taken nothing).
    One taken before that dies during the capture must not give back in every replay: its pages wait for the next take outside.

    Args:
        device: where the rows are.
        page_bytes: bytes of a page, a multiple of 512. Each saved tensor wastes half a page on average.
        device_budget: most bytes of pages on the device, the rest goes to the host; None: as many as a step needs.
        backend: of the kernels.

    Attributes:
        last: the last report of `end_step`, or None.
        generation: number of arenas made so far. A CUDA graph is valid for the one it was captured with.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        page_bytes: int = 256 << 10,
        device_budget: int | None = None,
        backend: Backend = "auto",
    ):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.page_bytes = page_bytes
        self.device_budget = device_budget
        self.backend: Backend = backend
        self.generation = 0
        self.last: PageReport | None = None
        self._memory: _SharedPages | None = None
        self._closed = False
        self._exact = 0  # depth of `exactly`
        self._epoch = 0  # number of step ends and arenas: a ticket captured in an earlier one gives nothing back
        self._last_stream: Any = None  # the one that used the free pages last
        # Not reentrant: a ticket that dies within a call must not change what that call works on.
        self._lock = threading.Lock()
        # A ticket may die at any time, in any thread. It only appends to these; the next call looks at them.
        self._dead: deque[tuple[_PageCounts, int]] = deque()
        self._deferred_gives: deque[tuple[_PageMemory, tuple[PageTable, ...], Any]] = deque()
        self._alive = 0
        self._total = _PageCounts(0, 0, 0, 0)  # of the live tickets; `shared`: in this arena
        self._worst_bound = 0  # largest total bound so far
        self._most_own = 0  # most pages of tickets' own in this step

    @property
    @locked
    def live_tickets(self) -> int:
        self._count_dead()
        return self._alive

    @property
    def device_pages(self) -> int:
        """Pages of the arena on the device."""
        return self._memory.arena.device_pages if self._memory is not None else 0

    @property
    def host_pages(self) -> int:
        """Pages of the arena on the host."""
        return self._memory.arena.host_pages if self._memory is not None else 0

    @property
    @locked
    def device_bytes(self) -> int:
        """Bytes of pages on the device: of the arena, and of tickets' own."""
        self._count_dead()
        return (self.device_pages + self._total.device) * self.page_bytes

    @property
    @locked
    def host_bytes(self) -> int:
        """Bytes of pages on the host: of the arena, and of tickets' own."""
        self._count_dead()
        return (self.host_pages + self._total.host) * self.page_bytes

    @locked
    def take(self, wanted: Sequence[PagedRows]) -> PageTicket:
        """Pages for the tensors of one layer, all or none of them.

        Without an arena, within `exactly`, and if it might not hold all that is out, the host waits for the device once and the
        ticket gets memory of its own: on the device as far as the budget goes beside the arena and other such tickets, and the
        rest on the host. In a capture it gets pages of the arena in any case.

        Args:
            wanted: rows of one or two tensors. The `live` tensors must keep their values while the ticket is alive.

        Raises:
            ValueError: rows that fit no page, or more live rows than rows.
            RuntimeError: the store is closed, or there is no arena while a CUDA graph is captured.
        """
        self._check_open()
        bounds = self._bounds(wanted)
        stream = self._stream()
        capturing = self._is_capturing(stream)
        self._count_dead()
        if not capturing:
            self._give_deferred()
        memory: _PageMemory
        # More tokens than in earlier steps, or more forwards before their backwards.
        outgrown = self._memory is not None and self._total.shared + sum(bounds) > self._memory.pages
        if self._memory is None or self._exact or (outgrown and not capturing):
            if capturing:
                raise RuntimeError(
                    "pages cannot be counted while a CUDA graph is captured: run a step and end_step() before, and "
                    "capture outside of exactly()"
                )
            memory, tables = self._take_exactly(wanted, bounds)
            counts = _PageCounts(sum(bounds), 0, memory.arena.device_pages, memory.arena.host_pages)
        else:
            memory = self._memory
            tables = self._take_from(self._memory, wanted, bounds, stream, capturing)
            counts = _PageCounts(sum(bounds), sum(bounds), 0, 0)
        self._alive += 1
        self._add(counts, 1)
        self._worst_bound = max(self._worst_bound, self._total.bound)
        self._most_own = max(self._most_own, self._total.device + self._total.host)
        return PageTicket(self, tables, memory, stream, self._epoch if capturing else None, counts, self.generation)

    @locked
    def end_step(self) -> PageReport:
        """Wait for the device, report what the step needed, and make room for as much in the next step.

        The arena grows if no ticket is alive and the step had pages on the host for which the device budget has room, or could
        have needed more pages than there are.

        Raises:
            MemoryError: the host cannot allocate or page-lock that much. torch.OutOfMemoryError: the device cannot. There is
                no arena then, as in the first step.
        """
        self._check_open()
        if self._is_capturing(self._stream()):
            raise RuntimeError("end_step() waits for the device: not while a CUDA graph is captured")
        self._epoch += 1
        self._count_dead()
        idle = self._alive == 0  # the dead have given their pages, or deferred that
        self._give_deferred()
        self._wait()
        most = self._most_own
        if self._memory is not None:
            free = self._memory.free
            head, tail, _, most_shared = free.state.tolist()
            out = head - tail + self._memory.pages
            most = max(most, most_shared)
            if idle and (out or most_shared > self.device_pages):
                # All are free, also those that a graph took and did not give, such as a forward that was replayed without its
                # backward. Device pages first. In place: captured CUDA graphs keep using them.
                fresh = all_free(free.pages.numel(), self.device)
                free.pages.copy_(fresh.pages)
                free.state.copy_(fresh.state)
            else:
                free.state.copy_(torch.tensor([head, tail, 0, out], device="cpu"))
            self._last_stream = self._stream()
        self._most_own = self._total.device + self._total.host
        resized = idle and self._fit(most)
        self.last = PageReport(most * self.page_bytes, resized)
        return self.last

    @locked
    def resize(self, device_pages: int, host_pages: int) -> None:
        """Replace the arena. Tickets that are alive keep theirs, beside the new one. Not while a CUDA graph is captured.

        Raises:
            MemoryError, torch.OutOfMemoryError: see `end_step`.
        """
        self._replace_arena(device_pages, host_pages)

    def _replace_arena(self, device_pages: int, host_pages: int) -> None:
        self._count_dead()
        self._give_deferred()
        self._wait()
        host_block = None
        if self._memory is not None and self._memory.arena.host_pages == host_pages and self._alive == 0:
            host_block = self._memory.host_block  # page-locking is slow, and nothing else uses it
        self._memory = None  # before the next is allocated: often there is no room for both
        self._last_stream = None
        self.generation += 1
        self._total = self._total._replace(shared=0)
        self._epoch += 1
        host, host_block = self._host_memory(host_pages, host_block)
        free = all_free(device_pages + host_pages, self.device)
        self._memory = _SharedPages(self._arena(device_pages, host), host_block, free)

    def missing_flag(self) -> Tensor:
        """int64 [1] on the device: the most pages that were missing in this step. 0: every live row was saved."""
        if self._memory is None:
            return torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._memory.free.state[2:3]

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, each ticket has just the pages it needs, in memory of its own: for the capacity retry of a step."""
        self._exact += 1
        try:
            yield
        finally:
            self._exact -= 1

    @locked
    def close(self) -> None:
        """Drop the arena. Tickets that a graph still owns stay valid; the memory lives until the last of them dies."""
        if self._closed:
            return
        self._closed = True
        self._give_deferred()
        self._wait()
        self._memory = None
        self._last_stream = None

    def _bounds(self, wanted: Sequence[PagedRows]) -> list[int]:
        """Pages that each tensor needs if all its rows are live."""
        widest = max(rows.row_bytes for rows in wanted)
        if widest > self.page_bytes:
            raise ValueError(
                f"a row of {widest} bytes does not fit a page of {self.page_bytes}: "
                f"page_bytes must be {-(-widest // PAGE_ALIGN) * PAGE_ALIGN} or more"
            )
        return [-(-rows.rows // (self.page_bytes // rows.row_bytes)) for rows in wanted]

    def _take_from(
        self, memory: _SharedPages, wanted: Sequence[PagedRows], bounds: Sequence[int], stream: Any, capturing: bool
    ) -> tuple[PageTable, ...]:
        self._order_after_last(stream, capturing)
        needs = [
            (rows.live, self.page_bytes // rows.row_bytes, bound) for rows, bound in zip(wanted, bounds, strict=True)
        ]
        pages = take_pages(memory.free, needs, backend=self.backend)
        return tuple(
            PageTable(memory.arena, numbers, rows.live, rows.rows, rows.row_bytes)
            for numbers, rows in zip(pages, wanted, strict=True)
        )

    def _take_exactly(
        self, wanted: Sequence[PagedRows], bounds: Sequence[int]
    ) -> tuple[_PageMemory, tuple[PageTable, ...]]:
        counts = []
        lives = torch.cat([rows.live.reshape(1).long() for rows in wanted]).tolist()
        for count, rows in zip(lives, wanted, strict=True):
            if not 0 <= count <= rows.rows:
                raise ValueError(f"{count} live rows of a tensor of {rows.rows}")
            counts.append(-(-count // (self.page_bytes // rows.row_bytes)))
        memory = self._own_pages(sum(counts))
        tables, first = [], 0
        for rows, count, bound in zip(wanted, counts, bounds, strict=True):
            pages = torch.full((bound,), -1, dtype=torch.int32, device=self.device)
            torch.arange(first, first + count, dtype=torch.int32, device=self.device, out=pages[:count])
            tables.append(PageTable(memory.arena, pages, rows.live, rows.rows, rows.row_bytes))
            first += count
        return memory, tuple(tables)

    def _own_pages(self, count: int) -> _PageMemory:
        taken = self.device_pages + self._total.device
        on_device = min(count, max(0, self._within_budget(taken + count) - taken))
        host, host_block = self._host_memory(count - on_device, None)
        return _PageMemory(self._arena(on_device, host), host_block)

    def _arena(self, device_pages: int, host: Tensor) -> Arena:
        device = torch.empty(device_pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        return Arena(device, host, self.page_bytes)

    def _host_memory(self, pages: int, host_block: HostBlock | None) -> tuple[Tensor, HostBlock | None]:
        """Memory of host pages, from `host_block` if there is one; it lives as long as the block."""
        if not pages:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), host_block
        if host_block is None:
            pool = HostPool(pin=self.device.type == "cuda", small_slab=0)
            host_block = pool.take(pages * self.page_bytes)
            pool.close()
        return host_block.bytes_, host_block

    def _fit(self, most: int) -> bool:
        """Make the arena large enough for a step with `most` pages out at once. Whether it was replaced."""
        device, host = self.device_pages, self.host_pages
        if self._memory is None or most > device:
            enough = max(1, min(most - (-most // _MARGIN), self._worst_bound))
            device = max(device, self._within_budget(enough))
        host = max(host, self._worst_bound - device)
        if self._worst_bound == 0 or (device, host) == (self.device_pages, self.host_pages):
            return False
        self._replace_arena(device, host)
        return True

    def _within_budget(self, pages: int) -> int:
        """As many of `pages` as the device budget allows."""
        return pages if self.device_budget is None else min(pages, self.device_budget // self.page_bytes)

    def _ticket_died(self, ticket: PageTicket) -> None:
        # Trap: this runs at any time, in any thread, also within a call, under any current stream, within a capture or not.
        try:
            if ticket._memory.must_wait():
                self._give_or_defer(ticket)
        finally:  # last: `end_step` takes all pages back if no ticket is alive
            self._dead.append((ticket._counts, ticket._generation))

    def _give_or_defer(self, ticket: PageTicket) -> None:
        memory, stream = ticket._memory, ticket._stream
        current = self._stream()
        capturing = self._is_capturing(stream)
        capture_near = capturing or (current != stream and self._is_capturing(current))
        captured = ticket._captured_in is not None
        if captured and capturing and ticket._captured_in == self._epoch:
            with suppress(RuntimeError):  # the capture has failed, and what it took was never taken
                self._give(memory, ticket.tables, stream, capturing)
        elif capture_near:
            # Keep the memory too: freeing it waits for the device. A captured ticket of an earlier epoch gives nothing.
            self._deferred_gives.append((memory, () if captured else ticket.tables, stream))
        elif captured or not isinstance(memory, _SharedPages):
            return
        elif self._lock.acquire(blocking=False):
            try:
                self._give(memory, ticket.tables, stream, capturing)
            finally:
                self._lock.release()
        else:
            self._deferred_gives.append((memory, ticket.tables, stream))

    def _give(self, memory: _PageMemory, tables: Sequence[PageTable], stream: Any, capturing: bool) -> None:
        """Nothing for a ticket's own memory, which is freed with it."""
        if not isinstance(memory, _SharedPages):
            return
        self._order_after_last(stream, capturing)
        with self._on(stream):
            give_pages(memory.free, [table.pages for table in tables], backend=self.backend)

    def _give_deferred(self) -> None:
        while self._deferred_gives:
            memory, tables, stream = self._deferred_gives.popleft()
            if tables:
                self._give(memory, tables, stream, False)

    def _count_dead(self) -> None:
        while self._dead:
            counts, generation = self._dead.popleft()
            self._add(counts if generation == self.generation else counts._replace(shared=0), -1)
            self._alive -= 1

    def _add(self, counts: _PageCounts, sign: int) -> None:
        self._total = _PageCounts(*(total + sign * n for total, n in zip(self._total, counts, strict=True)))

    def _order_after_last(self, stream: Any, capturing: bool) -> None:
        """Make `stream` wait for the one that used the free pages last. The device is idle when a capture begins, so a captured
        stream has nothing to wait for."""
        if self._last_stream is not None and self._last_stream != stream and not capturing:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

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
