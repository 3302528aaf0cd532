"""The memory of a rank during a walk: what one step leaves for the next.

Input: a `RankRun`. `forebay.estimate.walk_step` plays a step on it, `forebay.estimate.walk` whole runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forebay.estimate.allocator import ROLES, Block, CachingAllocator
from forebay.estimate.expandable import ExpandableAllocator
from forebay.estimate.fsdp import (
    DEFAULT,
    FsdpLifecycle,
    ParamLifecycle,
    PersistentState,
    PlainLifecycle,
    UnshardedLifecycle,
)
from forebay.estimate.offloading import OffloadManager
from forebay.estimate.rank_run import RankRun, StepLevel
from forebay.estimate.types import GPU_BLOCK

WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on Hopper for each handle and stream (`CUBLAS_WORKSPACE_CONFIG`, torch's notes on CUDA): one of the
thread that runs forward, and without an engine one of autograd's."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RunMemory:
    """An allocator, and those who allocate from it from one step to the next.

    Attributes:
        weights: parameters and AdamW's moments.
        params: what a step unshards, and gradients.
        manager: of offloading; its plan.
        stream: on which the step computes.
        arena: of pages; None before the first step.
        tables: masks and rotary tables of an engine.
        levels, peak: the highest levels of this step, and of all.
    """

    def __init__(self, run: RankRun):
        self.allocator = (
            ExpandableAllocator() if run.expandable else CachingAllocator(GPU_BLOCK if run.sharing.gpu else 1)
        )
        self._run = run
        # A CUDA graph step has a stream of its own, from the first step on.
        self.stream = "graph" if run.graph else DEFAULT
        self.weights = PersistentState(self.allocator, run.groups, run.sharing)
        self.params = self._lifecycle(run)
        self._workspaces: list[Block] = []
        self.arena: Block | None = None
        self.tables: Block | None = None
        self.manager = OffloadManager(
            self.allocator, self.stream, run.link, run.hidden, run.least, run.engine, run.measured is not None
        )
        self.peak = StepLevel("", "", (0,) * len(ROLES))
        self.levels: list[StepLevel] = []
        self.note("", "initialization")

    def note(self, action: str, where: str, live: Mapping[str, int] = _NOTHING) -> None:
        """Record the highest level since the last call."""
        level = StepLevel(action, where, tuple(self.allocator.take_peak()), dict(live))
        self.levels.append(level)
        if level.allocated > self.peak.allocated:
            self.peak = level

    def workspace(self, number: int) -> None:
        """Allocate cuBLAS's workspace of a thread if it is not there."""
        if self._run.sharing.gpu and number >= len(self._workspaces):
            self._workspaces.append(self.allocator.malloc(WORKSPACE, self.stream))

    def release_cache(self) -> None:
        """Before a capture, and as a graph is released: cuBLAS's workspaces are made anew, in the graph's pool or outside."""
        for block in self._workspaces:
            self.allocator.free(block)
        self._workspaces = []
        self.allocator.empty_cache()

    def _lifecycle(self, run: RankRun) -> ParamLifecycle:
        if not run.sharing.sharded:
            return PlainLifecycle(self.allocator)
        if run.engine:
            return UnshardedLifecycle(
                self.allocator,
                run.groups,
                run.sharing,
                self.stream,
                late=run.summed > 0 and not run.at_once,
                keep=run.graph,
                tied=run.summed > 0 and run.tied,
            )
        return FsdpLifecycle(self.allocator, run.groups, run.sharing, self.stream)
