"""PageStore against a model of it: 10,000 random puts, fetches, releases, step ends and resizes, in any order.

The model knows what each live ticket must give back and which pages it has. After each step no page belongs to two tickets, the
bytes are those that were put, the device's counts (pages out, most) are the model's, and none is missing. When all tickets are
dead every page is free, once.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.paging import PagedRows, restore, stash
from forebay.memory.page_store import PageStore, PageTicket

STEPS = 10_000
SEED = 20_250_805
PAGE = 512
BUDGET = 40  # pages
# Bytes of a row and dtype: a page of rows, a few, one with half a page left over, an odd number, one byte.
KINDS = (
    (16, torch.float32), (66, torch.bfloat16), (256, torch.float16), (260, torch.float32),
    (512, torch.int64), (77, torch.uint8), (1, torch.uint8), (170, torch.bfloat16),
)  # fmt: skip
OFTEN = {
    "put": 1000, "put exactly": 200, "put exactly, some on the host": 20, "put, too many for the arena": 20,
    "put across device and host": 50, "fetch": 1000, "fetch of an older arena": 20, "release": 1000,
    "grown by a step's end": 5, "step's end that had spilled": 20, "resize with tickets alive": 10,
}  # fmt: skip


class Account:
    """The model of one arena."""

    def __init__(self, device_pages: int, pages: int):
        self.device_pages, self.pages = device_pages, pages
        self.out = self.most = 0


class Put(NamedTuple):
    """What the model knows of a ticket. `account` is None for one with pages of its own."""

    ticket: PageTicket
    saved: list[tuple[Tensor, int]]  # bytes [rows, row_bytes], live
    pages: list[int]
    bound: int
    account: Account | None
    own: tuple[int, int]  # pages of its own, on the device and on the host


class Model:
    def __init__(self, store: PageStore):
        self.store = store
        self.chance = np.random.default_rng(SEED)
        self.account: Account | None = None
        self.puts: list[Put] = []
        self.worst = self.own_most = 0
        self.happened: Counter[str] = Counter()

    def put(self) -> None:
        store, device = self.store, self.store.device
        exact = self.account is None or self.chance.random() < 0.1
        saved, dtypes, wanted, needs, bound = [], [], [], [], 0
        for _ in range(int(self.chance.integers(1, 3))):
            row_bytes, dtype = KINDS[int(self.chance.integers(len(KINDS)))]
            rows = int(self.chance.integers(0, 24))
            live = int(self.chance.integers(0, rows + 1))
            fit = PAGE // row_bytes
            saved.append((self.bytes_of(rows, row_bytes), live))
            dtypes.append(dtype)
            count = torch.tensor(
                [live], dtype=torch.int32 if self.chance.random() < 0.5 else torch.int64, device=device
            )
            wanted.append(PagedRows(count, rows, row_bytes))
            needs.append(-(-saved[-1][1] // fit))
            bound += -(-rows // fit)
        shared = sum(p.bound for p in self.puts if p.account is self.account)
        outgrown = self.account is not None and shared + bound > self.account.pages
        self.happened["put, too many for the arena"] += outgrown and not exact
        if exact:
            with store.exactly():
                ticket = store.take(wanted)
        else:
            ticket = store.take(wanted)
        exact |= outgrown
        stash([b.view(t) for (b, _), t in zip(saved, dtypes, strict=True)], ticket.tables, backend=store.backend)
        need, own, account = sum(needs), (0, 0), None
        if exact:
            own = self.expect_own_pages(ticket, need)
        else:
            assert self.account is not None
            account = self.account
            account.most = max(account.most, account.out + need)
            account.out += need
            self.happened["put"] += 1
        tables = [table.pages.tolist() for table in ticket.tables]
        for table, n in zip(tables, needs, strict=True):
            assert all(page >= 0 for page in table[:n]) and all(page == -1 for page in table[n:])
        pages = [page for table in tables for page in table if page >= 0]
        if account is not None:
            on_host = sum(page >= account.device_pages for page in pages)
            self.happened["put across device and host"] += 0 < on_host < len(pages)
            assert all(page < account.pages for page in pages)
        self.puts.append(Put(ticket, saved, pages, bound, account, own))
        self.worst = max(self.worst, sum(p.bound for p in self.puts))
        self.own_most = max(self.own_most, self.own_pages())

    def expect_own_pages(self, ticket: PageTicket, need: int) -> tuple[int, int]:
        arena = ticket.tables[0].arena
        room = BUDGET - (self.account.device_pages if self.account else 0) - sum(p.own[0] for p in self.puts)
        own = min(need, max(0, room)), max(0, need - max(0, room))
        assert (arena.device.nbytes, arena.host.nbytes) == (own[0] * PAGE, own[1] * PAGE)
        self.happened["put exactly"] += 1
        self.happened["put exactly, some on the host"] += own[1] > 0
        return own

    def own_pages(self) -> int:
        return sum(len(p.pages) for p in self.puts if p.account is None)

    def bytes_of(self, rows: int, row_bytes: int) -> Tensor:
        values = self.chance.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self.store.device).copy_(torch.from_numpy(values))

    def pick(self) -> int:
        return int(self.chance.integers(len(self.puts)))

    def fetch(self) -> None:
        if not self.puts:
            return
        put = self.puts[self.pick()]
        outs = [torch.full_like(b, 0x5A) for b, _ in put.saved]
        restore(put.ticket.tables, outs, backend=self.store.backend)
        for out, (b, live) in zip(outs, put.saved, strict=True):
            assert torch.equal(out[:live], b[:live])
            assert bool((out[live:] == 0x5A).all()), "rows after the live ones are not the store's"
        self.happened["fetch"] += 1
        self.happened["fetch of an older arena"] += put.account is not None and put.account is not self.account

    def release(self) -> None:
        if self.puts:
            put = self.puts.pop(self.pick())
            if put.account is not None:
                put.account.out -= len(put.pages)
            self.happened["release"] += 1

    def release_all(self) -> None:
        while self.puts:
            self.release()
        memory = self.store._memory
        if memory is not None:
            assert sorted(memory.free.pages.tolist()) == list(range(memory.pages)), "a page is lost, or there twice"

    def end_step(self) -> None:
        before = (self.store.device_pages, self.store.host_pages)
        report = self.store.end_step()
        account, idle = self.account, not self.puts
        most = max(self.own_most, account.most if account else 0)
        spilled = account is not None and account.most > account.device_pages
        assert report.bytes_out == most * PAGE
        device, host = after = (self.store.device_pages, self.store.host_pages)
        assert report.resized == (before != after)
        if idle and self.worst:
            assert device + host >= self.worst, "not enough for what tickets at once could need"
            assert device >= min(most, BUDGET), "less on the device than the step had out, and than the budget"
        assert device >= before[0] and host >= before[1] and (idle or not report.resized)
        if report.resized:
            self.account = Account(device, device + host)
            self.happened["grown by a step's end"] += 1
        elif account is not None:
            account.most = account.out
        self.own_most = self.own_pages()
        self.happened["step's end that had spilled"] += spilled

    def resize(self) -> None:
        device, host = (int(n) for n in self.chance.integers(0, BUDGET + 1, 2))
        self.store.resize(device, host + 1)
        self.account = Account(device, device + host + 1)
        self.happened["resize with tickets alive"] += bool(self.puts)

    def check(self) -> None:
        owners: Counter[tuple[int, int]] = Counter()
        for put in self.puts:
            owners.update((id(put.ticket.tables[0].arena.device), page) for page in put.pages)
        assert max(owners.values(), default=1) == 1, "a page belongs to two tickets"
        store = self.store
        assert store.live_tickets == len(self.puts)
        for nbytes, arena, which in (
            (store.device_bytes, store.device_pages, 0),
            (store.host_bytes, store.host_pages, 1),
        ):
            assert nbytes == PAGE * (arena + sum(p.own[which] for p in self.puts))
        if self.account is not None:
            assert store._memory is not None
            head, tail, short, most = store._memory.free.state.tolist()
            out = head + self.account.pages - tail
            assert (out, short, most) == (self.account.out, 0, self.account.most)
            assert out == sum(len(p.pages) for p in self.puts if p.account is self.account)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "reference", id="reference"),
        pytest.param("cuda:0", "auto", id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_ten_thousand_random_steps(device: str, backend: Backend) -> None:
    store = PageStore(device, page_bytes=PAGE, device_budget=BUDGET * PAGE, backend=backend)
    model = Model(store)
    steps: list[tuple[Any, float]] = [
        (model.put, 0.40), (model.fetch, 0.27), (model.release, 0.30),
        (model.end_step, 0.015), (model.release_all, 0.01), (model.resize, 0.005),
    ]  # fmt: skip
    bounds = np.cumsum([share for _, share in steps])
    for number in range(STEPS):
        step = steps[int(np.searchsorted(bounds, model.chance.random() * bounds[-1], side="right"))][0]
        try:
            step()
            if step == model.release_all and model.chance.random() < 0.5:
                model.end_step()
            model.check()
        except Exception as error:
            raise AssertionError(f"step {number} ({step.__name__}) of seed {SEED}") from error
    model.release_all()
    model.end_step()
    model.check()
    rare = {what: model.happened[what] for what, least in OFTEN.items() if model.happened[what] < least}
    assert not rare, f"happened too rarely for a test: {rare}"
