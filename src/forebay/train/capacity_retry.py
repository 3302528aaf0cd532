"""A step that went over a capacity runs again, exactly: the same step, as if it had been exact at once.

In: how to compute a step's gradients, and what may leave something out of them: an exchange with a capacity, a store of pages.
Out: gradients of which nothing is missing, and a `CapacityRetry` if it took two attempts.

    remember the random generators and the routers' counts
    gradients                            at full speed: the device notes what did not fit, nobody waits
    read the notes of all processes      the host waits for the device
    if anything was left out: drop the gradients, put back what was remembered, clear the notes, and gradients again, within
    `exactly()` of both, where the host waits for sizes and nothing is left out

Between the two attempts stands nothing that a step changes: parameters, optimizer and the routers' biases come after the
gradients, the data go by the step's number. All processes decide alike, those of other expert groups and pipeline ranks too: one
that ran a step alone would wait for the others for ever.

`CapacityRetries` owns the measured need of the run, and nothing that lives as long as a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from forebay.memory.page_store import PageReport, PageStore
from forebay.models.router import RouterStats
from forebay.moe.dispatch import TokenDispatcher
from forebay.train.distributed import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class CapacityRetry:
    """Why a step was run again.

    Attributes:
        rows: rows were left out by an exchange.
        pages: a store of pages had too few.
        factor: the capacity factor with which no row would have been left out; None if none was.
    """

    rows: bool
    pages: bool
    factor: float | None


class CapacityRetries:
    """Runs the gradients of steps, and those again that lack something. Collective, as are its methods but `exactly`.

    Args:
        dispatcher: how tokens travel; None if they do not.
        pages: where residuals are stashed; None if they are not.
        router: whose counts a step adds to.
        called: a context within which a step is called, where it would replay a graph: that cannot be exact.
        renewed: called on all processes when the pages of any are other ones than before: nobody may replay a graph while another
            one calls.

    Attributes:
        needed: whether anything can be left out, on any process. If not, `run` only calls.
        page_report: what the pages said of the last step; None without any.
    """

    def __init__(
        self,
        mesh: Mesh,
        dispatcher: TokenDispatcher | None,
        pages: PageStore | None,
        router: RouterStats | None,
        called: Callable[[], AbstractContextManager[None]] = nullcontext,
        renewed: Callable[[], None] = lambda: None,
    ):
        self._mesh, self._dispatcher, self._pages, self._router = mesh, dispatcher, pages, router
        self._called, self._renewed = called, renewed
        loses = dispatcher is not None and dispatcher.lost_flag() is not None
        # A pipeline rank without experts, or without a stashed region, has to come along.
        rows, paged = mesh.max(loses, pages is not None)
        self.needed, self._paged = bool(rows or paged), bool(paged)
        self.page_report: PageReport | None = None
        self._factor = 0.0  # enough for every step that was run again

    def run(self, gradients: Callable[[], T], drop: Callable[[], None]) -> tuple[T, CapacityRetry | None]:
        """What `gradients()` returned, at last; and why it was called again, if it was.

        Args:
            gradients: leaves gradients on the parameters.
            drop: takes them away.
        """
        if not self.needed:
            return gradients(), None
        generators = _Generators(self._mesh.device)
        counts = self._router.counts() if self._router is not None else None
        result = gradients()
        rows, pages = self._left_out()
        rerun = None
        if rows or pages:
            del result
            drop()
            generators.restore()
            if self._router is not None and counts is not None:
                self._router.restore_counts(counts)
            with self._called(), self.exactly():
                if self._dispatcher is not None and rows:
                    self._dispatcher.clear_lost()
                result = gradients()
            rerun = CapacityRetry(rows, pages, self._factor_of_this_step() if rows else None)
        self._end_pages()
        return result, rerun

    def factor(self) -> float | None:
        """The smallest capacity factor with which no step of the run would have been run again; None without a capacity."""
        own = self._dispatcher.suggested_factor() if self._dispatcher is not None else None
        (most,) = self._mesh.max(max(self._factor, own or 0.0))
        return most or None

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, nothing is left out, and the host waits for sizes. Nothing, if nothing ever is."""
        if not self.needed:
            yield
            return
        with (
            self._dispatcher.exactly() if self._dispatcher is not None else nullcontext(),
            self._pages.exactly() if self._pages is not None else nullcontext(),
        ):
            yield

    def _end_pages(self) -> None:
        if not self._paged:
            return
        if self._pages is not None:
            self.page_report = self._pages.end_step()
        (resized,) = self._mesh.max(self.page_report is not None and self.page_report.resized)
        if resized:
            self._renewed()

    def _left_out(self) -> tuple[bool, bool]:
        """Whether rows and pages went missing, on any process. Waits for the device."""
        lost = self._dispatcher.lost_flag() if self._dispatcher is not None else None
        missing = self._pages.missing_flag() if self._pages is not None else None
        none = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
        flags = torch.cat([none if flag is None else flag for flag in (lost, missing)])
        rows, pages = self._mesh.sum(flags.clamp(max=1)).tolist()
        return rows > 0, pages > 0

    def _factor_of_this_step(self) -> float | None:
        """By what the exact attempt needed: behind the first row left out, the other one routed something else."""
        own = self._dispatcher.suggested_factor() if self._dispatcher is not None else None
        (most,) = self._mesh.max(own or 0.0)
        self._factor = max(self._factor, most)
        return most or None


class _Generators:
    """The random generators of this process as they are now. No device is waited for: a CUDA generator's state is the host's."""

    def __init__(self, device: torch.device):
        self._device = device
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
