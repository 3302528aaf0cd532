"""Token dispatcher over symmetric memory: the GPUs of one host read and write each other's memory.

Input and output are those of `forebay.moe.dispatch.TokenDispatcher`, bitwise the results of `NcclDispatcher`. Each operation is
one kernel launch (`forebay.kernels.symm_dispatch`) that overlaps local copies and sums with the transfer. With a
capacity, nothing synchronizes with the host and a captured CUDA graph can be replayed with other ids and splits. A dispatcher
owns its symmetric memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.kernels.symm_dispatch import exchange_tokens, exchange_values, receive_tokens, return_rows, send_tokens
from forebay.kernels.symm_mem import LATE, PeerLayout, PeerMemory, read_counts
from forebay.moe.dispatch import Handle, TokenDispatcher, aligned, host_int

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SymmetricDispatcher(TokenDispatcher):
    """Dispatch and combine over the memory of the peers.

    The capacity is C rows and S live slots; a slot is a (row, expert) pair that this rank computes:

        S = min(P * T * min(K, E / P), capacity_factor * T * K), rounded up to `ALIGNMENT`
        C = min(P * T, S)

    capacity_factor is relative to an even split of all slots; from P on nothing can exceed it. All ranks record what each one
    needs. Rows above the capacity are dropped: `lost_flag` reports it on the device, `check` raises, and results since then are
    wrong until they are recomputed within `exactly`. Without a capacity factor, and within `exactly`, each dispatch waits once
    for the counts, and C and S are the exact numbers rounded up to `ALIGNMENT`.

    Handle:

        source [C] int32       p * T + t: row r is token t of rank p; -1 for unused rows
        places [t, P] int32    -1 where a token did not go to rank p
        starts [P + 1] int32   where each rank's rows begin
        counts [2] int64       only with exact sizes: rows and live slots received, on the CPU

    Args:
        group: the expert-parallel process group, all on one host, each with a GPU of its own and peer access to the others
            (NVLink). The constructor is collective.
        num_experts: E, a multiple of the group's size.
        tokens: T, the most that a rank dispatches at once; the same on all ranks.
        hidden: H; a row must be a multiple of 16 bytes.
        slots_per_token: K.
        dtype: of the rows: bf16, fp16 or fp32. Weights may be any of them too.
        capacity_factor: at least 1; None for exact sizes, with one host synchronization a dispatch.
        timeout_s: how long a kernel waits for the other ranks.

    Attributes:
        capacity_rows, capacity_slots: C and S; with exact sizes the largest that are possible.

    Raises:
        ValueError: a capacity factor below 1, rows of other sizes, another dtype, experts that the ranks do not divide.
        RuntimeError: no CUDA device, or memory that cannot be shared among the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        tokens: int,
        hidden: int,
        slots_per_token: int,
        dtype: torch.dtype,
        capacity_factor: float | None = 2.0,
        timeout_s: float = 120.0,
    ):
        super().__init__(group.rank(), group.size(), num_experts)
        if capacity_factor is not None and not capacity_factor >= 1:
            raise ValueError(f"capacity_factor must be at least 1 (an even split), got {capacity_factor}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        if min(tokens, hidden, slots_per_token) < 1 or timeout_s <= 0:
            raise ValueError(
                f"tokens, hidden, slots_per_token and timeout_s must be positive, got {tokens}, {hidden}, "
                f"{slots_per_token}, {timeout_s}"
            )
        layout = PeerLayout(self.size, tokens, slots_per_token, hidden * dtype.itemsize)
        most = self.size * tokens * min(slots_per_token, self.local_experts)
        exact = capacity_factor is None
        allowed = most if capacity_factor is None else min(most, math.ceil(capacity_factor * tokens * slots_per_token))
        self.capacity_slots = aligned(allowed)
        self.capacity_rows = min(self.size * tokens, self.capacity_slots)
        self._bounded, self._can_lose = not exact, not exact and self.capacity_slots < aligned(most)
        self._most_exact = 0  # most slots that this rank needed in a dispatch with exact sizes
        self._tokens, self._hidden, self._slots, self._dtype, self._exact = (
            tokens, hidden, slots_per_token, dtype, exact,
        )  # fmt: skip
        self._group: Any = group
        self._timeout_s = timeout_s
        self._memory: PeerMemory | None = self._share(layout)

    def _share(self, layout: PeerLayout) -> PeerMemory:
        """Allocate and exchange addresses. Collective."""
        import torch.distributed._symmetric_memory as symmetric

        if not torch.cuda.is_available():
            raise RuntimeError(
                "the symmetric dispatcher needs a CUDA device; on CPUs use the nccl dispatcher over gloo"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        base = symmetric.empty(layout.total, dtype=torch.uint8, device=device)
        base.zero_()
        torch.cuda.synchronize(device)  # before any rank can write a flag into it
        shared = symmetric.rendezvous(base, self._group)
        own = shared.buffer_ptrs[self.rank]
        return PeerMemory(
            base,
            torch.tensor([p - own for p in shared.buffer_ptrs], dtype=torch.int64, device=device),
            torch.zeros(layout.state_size, dtype=torch.int64, device=device),
            self.rank,
            layout,
            timeout_ns=int(self._timeout_s * 1e9),
            programs=torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """ValueError for tokens that the dispatcher was not made for."""
        peers = self._open()
        self._check_rows("x", x, self._tokens)
        if ids.shape[1] != self._slots or weights.dtype not in DTYPES:
            raise ValueError(
                f"made for {self._slots} slots a token and weights in bf16, fp16 or fp32; "
                f"got {ids.shape[1]} slots and {weights.dtype}"
            )
        if not self._exact:
            # Every need is recorded, for `suggested_factor`; `capacity_rows` alone decides what fits.
            places, received = exchange_tokens(x, ids, weights, self.capacity_rows, self.local_experts, peers)
            rows, local_ids, row_weights, source, starts = received
            return rows, local_ids, row_weights, [source, places, starts]
        places = send_tokens(x, ids, weights, self.local_experts, peers)
        # The only host synchronization.
        counts = read_counts(peers).sum(0).cpu()
        self._most_exact = max(self._most_exact, int(counts[1]))
        rows, local_ids, row_weights, source, starts = receive_tokens(
            aligned(int(counts[0])), aligned(int(counts[1])), self._hidden, self._dtype, weights.dtype,
            self.local_experts, peers,
        )  # fmt: skip
        return rows, local_ids, row_weights, [source, places, starts, counts]

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        peers = self._open()
        source, places, starts, *_ = handle
        self._check_rows("values", values, places.shape[0])
        return exchange_values(values, source, starts, peers)

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        peers = self._open()
        source, places, starts, *_ = handle
        self._check_rows("rows", rows, source.shape[0])
        if init is not None and (init.shape != (n_tokens, self._hidden) or init.dtype == torch.float64):
            raise ValueError(
                f"init must be {(n_tokens, self._hidden)} and not in fp64, got {tuple(init.shape)} in {init.dtype}"
            )
        return return_rows(rows, narrow, source, starts, places, init, peers)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """S; with exact sizes the live slots received, rounded up to `ALIGNMENT`."""
        return aligned(host_int(handle[3][1])) if len(handle) == 4 else self.capacity_slots

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        rows: Any = torch.library.get_ctx().new_dynamic_size() if self._exact else self.capacity_rows
        handle = [
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty((tokens, self.size), dtype=torch.int32, device=device),
            torch.empty(self.size + 1, dtype=torch.int32, device=device),
        ]
        return rows, [*handle, torch.empty(2, dtype=torch.int64, device="cpu")] if self._exact else handle

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Waits for the device once. RuntimeError if a rank was late before: what it did not
        send has no size."""
        if self._exact:
            yield
            return
        self._read_needs()
        self._exact = True
        try:
            yield
        finally:
            self._exact = False

    def lost_flag(self) -> Tensor | None:
        """By how many slots the largest need exceeds the capacity. None if none can."""
        if not self._can_lose:
            return None
        return (self._needs().amax(0, keepdim=True) - self.capacity_slots).clamp_(min=0)

    def late_flag(self) -> Tensor | None:
        return self._open().state[LATE : LATE + 1]

    def clear_lost(self) -> None:
        """Also forgets that a rank was late: nothing waits for it until then (`forebay.kernels.symm_mem`)."""
        self._most_exact = 0
        self._needs().zero_()
        self._open().state[LATE].zero_()  # torch 2.11 waits for the device in `state[LATE] = 0`

    def suggested_factor(self) -> float | None:
        """RuntimeError if a rank was late."""
        if not self._bounded:
            return None
        need = max(self._most_exact, *self._read_needs())
        return self._factor_for(need) if need else None

    def check(self) -> None:
        """Waits for the device once. Also RuntimeError if a rank was late.

        Every rank raises for the overflow of any, and resets the recorded needs.
        """
        needs = self._read_needs()
        rank = max(range(self.size), key=needs.__getitem__)
        if needs[rank] > self.capacity_slots:
            self.clear_lost()
            raise RuntimeError(
                f"rank {rank} needed {needs[rank]} slots and has {self.capacity_slots}: rows were dropped since the last "
                f"check; a capacity_factor of {self._factor_for(needs[rank]):g} would have been enough"
            )

    def _needs(self) -> Tensor:
        """[P] int64, a view: the largest need of each rank in slots since `clear_lost`."""
        peers = self._open()
        at = peers.layout.needs_at
        return peers.base[at : at + 8 * self.size].view(torch.int64)

    def _read_needs(self) -> list[int]:
        """`_needs` on the host. RuntimeError if a rank was late."""
        peers = self._open()
        late, *needs = torch.cat([peers.state[LATE : LATE + 1], self._needs()]).tolist()
        if late:
            peers.state[LATE].zero_()
            raise RuntimeError(
                f"rank {late - 1} of {self.size} did not join an operation within {self._timeout_s:g} s of rank "
                f"{self.rank}; results since the last check are wrong"
            )
        return needs

    def _factor_for(self, need: int) -> float:
        return max(1.0, math.ceil(100 * need / (self._tokens * self._slots)) / 100)

    def close(self) -> None:
        """Free the symmetric memory. Collective, because ranks read from each other."""
        if self._memory is not None:
            if self._memory.base.is_cuda:
                torch.cuda.synchronize(self._memory.base.device)
            dist.barrier(self._group)
            self._memory = None

    def _open(self) -> PeerMemory:
        if self._memory is None:
            raise RuntimeError("this dispatcher is closed")
        return self._memory

    def _check_rows(self, what: str, rows: Tensor, most: int) -> None:
        if rows.shape[0] > most or rows.shape[1] != self._hidden or rows.dtype != self._dtype:
            raise ValueError(
                f"{what}: the dispatcher takes up to {most} rows of {self._hidden} in {self._dtype}, "
                f"got {rows.shape[0]} of {rows.shape[1]} in {rows.dtype}"
            )
