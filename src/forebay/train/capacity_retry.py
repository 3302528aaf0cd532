"""Repeats the gradients of a step that exceeded a capacity, exactly.

Input: a callable that computes a step's gradients, one that applies them, and what may leave something out of them: a token
dispatcher with a capacity, a page store. Output: what was applied misses nothing, and a `CapacityRetry` if it took two
attempts. The first attempt runs at full speed and the device notes what did not fit. The update may follow at once and read on
the device whether to change anything: the host does not wait for the gradients to launch it. If any process lost something,
nothing was changed; all drop their gradients, restore the random generators and the routers' counts, and compute and apply the
gradients again in exact mode. `CapacityRetries` owns the capacity factor that the run has needed so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from forebay.memory.page_store import PageReport, PageStore
from forebay.models.router import RouterStats
from forebay.moe.dispatch import TokenDispatcher
from forebay.train.distributed import Mesh
from forebay.train.generators import SavedRngStates

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class CapacityRetry:
    """Why a step was repeated."""

    rows: bool  # the dispatcher left rows out
    pages: bool  # a page store had too few pages
    factor: float | None  # smallest capacity factor that would have kept every row; None if no row was lost


class CapacityRetries:
    """Runs the gradients of steps and repeats those that exceeded a capacity. Methods are collective but `exactly`, `discard`.

    Args:
        dispatcher: token dispatcher; None without expert parallelism.
        pages: page store of stashed regions; None without any.
        router: counts of the routers' choices; None for a dense model.
        eager: context in which a step runs without a CUDA graph. A replayed graph cannot be exact.
        on_resize: called on all processes after the page store of any process was resized: all must give up their graph together.
        ahead: whether the next update can read on the device that it is to change nothing. Else the host waits for the gradients
            before it.

    Attributes:
        needed: whether any process can exceed a capacity. If not, `run` only calls `gradients` and `apply`.
        page_report: the page store's report of the last step; None without pages.
    """

    def __init__(
        self,
        mesh: Mesh,
        dispatcher: TokenDispatcher | None,
        pages: PageStore | None,
        router: RouterStats | None,
        eager: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_resize: Callable[[], None] = lambda: None,
        ahead: Callable[[], bool] = lambda: True,
    ):
        self._mesh, self._dispatcher, self._pages, self._router = mesh, dispatcher, pages, router
        self._eager, self._on_resize, self._ahead = eager, on_resize, ahead
        has_capacity = dispatcher is not None and dispatcher.lost_flag() is not None
        # Collective: pipeline ranks without experts or stashed regions take part in the retries of the others.
        any_capacity, any_pages = mesh.max(has_capacity, pages is not None)
        self.needed, self._any_pages = bool(any_capacity or any_pages), bool(any_pages)
        self.page_report: PageReport | None = None
        self._largest_factor = 0.0

    def run(
        self, gradients: Callable[[], T], apply: Callable[[T, Tensor | None], R], drop: Callable[[], None]
    ) -> tuple[R, CapacityRetry | None]:
        """The result of `apply(gradients(), skip)`, and why both were called twice, if they were.

        Args:
            apply: with `skip`, fp32 [] on the device, it must change nothing that lasts where that is 1; None is 0.
            drop: removes the gradients.

        Raises:
            RuntimeError: a rank missed a token dispatch. Gradients are dropped, and nothing was applied.
        """
        if not self.needed:
            result = gradients()
            self._check_dispatcher(drop)
            return apply(result, None), None
        rng = SavedRngStates(self._mesh.device)
        counts = self._router.counts() if self._router is not None else None
        result = gradients()
        exceeded, ahead = self._exceeded(), self._ahead()
        applied = apply(result, exceeded.amax().float()) if ahead else None
        rows, pages, late = exceeded.tolist()  # the host waits for the device
        if late:
            self._check_dispatcher(drop)
            self.discard(drop)
            raise RuntimeError("another rank missed a token dispatch; parameters and optimizer are unchanged")
        retry = None
        if rows or pages:
            del result
            drop()
            rng.restore()
            if self._router is not None and counts is not None:
                self._router.restore_counts(counts)
            with self._eager(), self.exactly():
                if self._dispatcher is not None and rows:
                    self._dispatcher.clear_lost()
                result = gradients()
            self._check_dispatcher(drop)
            retry = CapacityRetry(rows > 0, pages > 0, self._measure_factor() if rows else None)
        # Before an update that is not launched yet: the first one makes AdamW's moments, in the memory of the first step's pages,
        # which are more than those of later steps.
        self._end_pages()
        if retry is not None or not ahead:
            applied = apply(result, None)
        return cast(R, applied), retry

    def discard(self, drop: Callable[[], None]) -> None:
        """Drop gradients and the routers' counts, for a step that does not take place. Not collective."""
        drop()
        if self._router is not None:
            self._router.reset_counts()

    def factor(self) -> float | None:
        """The smallest capacity factor that would have kept every row of the run; None without a capacity."""
        return max(self._largest_factor, self._suggested_factor()) or None

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Context in which nothing is left out and the host waits for sizes; without a capacity, no change."""
        if not self.needed:
            yield
            return
        with (
            self._dispatcher.exactly() if self._dispatcher is not None else nullcontext(),
            self._pages.exactly() if self._pages is not None else nullcontext(),
        ):
            yield

    def _end_pages(self) -> None:
        if not self._any_pages:
            return
        if self._pages is not None:
            self.page_report = self._pages.end_step()
        (resized,) = self._mesh.max(self.page_report is not None and self.page_report.resized)
        if resized:
            self._on_resize()

    def _exceeded(self) -> Tensor:
        """Whether any process lost rows, lacked pages, or waited for a rank in vain: int64 [3] of 0 and 1, on the device.

        All processes, of other expert groups and pipeline ranks too, decide alike: one that repeated a step alone would wait.
        """
        lost, late = (None, None) if (d := self._dispatcher) is None else (d.lost_flag(), d.late_flag())
        missing = self._pages.missing_flag() if self._pages is not None else None
        zero = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
        flags = torch.cat([zero if flag is None else flag for flag in (lost, missing, late)])
        return self._mesh.sum(flags.clamp_(max=1)).clamp_(max=1)

    def _check_dispatcher(self, drop: Callable[[], None]) -> None:
        """If a rank missed a dispatch, gradients are wrong and nothing may be made of them.

        This comes before the next collective: ranks that noticed nothing wait there, and do not step either.
        """
        if self._dispatcher is None:
            return
        try:
            self._dispatcher.check()
        except RuntimeError:
            self.discard(drop)
            raise

    def _measure_factor(self) -> float | None:
        """The factor that the exact attempt needed. The first attempt routed other rows after the first one that it lost."""
        largest = self._suggested_factor()
        self._largest_factor = max(self._largest_factor, largest)
        return largest or None

    def _suggested_factor(self) -> float:
        own = self._dispatcher.suggested_factor() if self._dispatcher is not None else None
        return self._mesh.max(own or 0.0)[0]
