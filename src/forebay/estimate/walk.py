"""The walk over a rank's steps: its allocations, in the order of the run, played on a model of torch's caching allocator.

Input: a `RankRun`: the parts of a rank's stages (`forebay.estimate.parts`), its actions in a step, and its parameters
(`forebay.estimate.fsdp`). Output: a `Walked`: peak bytes of segments, and what is in use at the highest level. NCCL's buffers,
symmetric memory and the CUDA context are not the allocator's: see `forebay.estimate.state`. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from forebay.estimate.allocator import ACTIVATIONS, OPTIMIZER
from forebay.estimate.fsdp import DEFAULT, UnshardedLifecycle
from forebay.estimate.offloading import MEASURED_STEPS
from forebay.estimate.rank_run import RankRun, Walked
from forebay.estimate.types import PAGE
from forebay.estimate.walk_step import RunMemory, StepWalk
from forebay.pipeline.schedule import Action

STEPS = 3
"""Steps to play. The second has the optimizer's moments beside it; the third may find the second's segments cut differently:
GPT-OSS on two H200s reserved 4.3 GiB more in its third step, as it does here. A fourth never needed more. With
expandable segments the third repeats the second, and is not played."""
_MARGIN = 64  # the arena of `forebay.memory.page_store` has one page more for each so many
# Microbatches to walk without a pipeline: the first begins the gradients, the second finds them, the third repeats.
_MICROBATCHES = 3


def walk(run: RankRun, steps: int | None = None) -> Walked:
    """Play whole steps; by default `STEPS` after those that the manager measures."""
    return AllocatorRun(run).steps(steps if steps is not None else STEPS + _measured(run))


def shortened(actions: Sequence[Action], engine: bool) -> Sequence[Action]:
    """Without an engine, only the first microbatches: later ones repeat the last of them."""
    return actions if engine else [a for a in actions if a.microbatch < _MICROBATCHES]


def _measured(run: RankRun) -> int:
    """Steps in which a manager measures."""
    if run.link is None and run.measured is None:
        return 0
    microbatches = len({action.microbatch for action in run.actions})
    return MEASURED_STEPS if run.interleaves else MEASURED_STEPS // max(1, microbatches)


class AllocatorRun(RunMemory):
    """A run so far, which plays whole steps."""

    def steps(self, number: int) -> Walked:
        """Play whole steps with their optimizer's. A CUDA graph step is captured after them. A replay takes no more memory,
        but the gathering before it does, from the graph's pool."""
        captured = self._run.graph and not self._run.fails
        last: Hashable = None
        for n in range(number):
            # Earlier steps make the moments, or may empty the cache before plans are tried.
            layout = self.allocator.layout() if n > _measured(self._run) else None
            if layout is not None and layout == last:
                break  # it would repeat the step before
            last = layout
            self._step()
        if captured:
            self._step(captured=True)
        if captured and isinstance(self.params, UnshardedLifecycle):
            self.allocator.begin_graph()
            self.params.gather()
            self.allocator.end_graph()
            self.note("", "gathering of parameters")
        levels = self.levels
        if all(level.allocated < self.peak.allocated for level in levels):
            levels = [self.peak, *levels]
        before = self.manager.before + self.allocator.by_role[OPTIMIZER]
        return Walked(self.allocator.peak_reserved, self.peak, tuple(levels), before, self.manager.plan)

    def _step(self, captured: bool = False) -> None:
        self.levels = []
        self.gradients(captured)
        self.weights.optimize(self.params.is_late)
        self.note("", "optimizer")
        self.params.zero_grad()

    def gradients(self, captured: bool = False) -> None:
        """Play all forwards and backwards of a step. A captured one allocates from a pool of its own, beside what the steps
        before it left when the cache is emptied."""
        params, allocator = self.params, self.allocator
        unsharded = params if isinstance(params, UnshardedLifecycle) else None
        if unsharded:
            unsharded.gather()
        if captured:
            self.release_cache()
            allocator.begin_graph()
        self.note("", "gathering of parameters")
        step = StepWalk(self, self._run)
        params.begin_step()
        step.run()
        params.end_step()
        token_grads = step.end()
        if unsharded and captured:
            unsharded.hold()
        if unsharded:
            unsharded.reduce(token_grads, self._run.summed)
        if captured:
            allocator.end_graph()
        if unsharded:
            unsharded.finish()
        self.note("", "reduction")
        self._settle_arena(step.most_stashed)

    def _settle_arena(self, most: int) -> None:
        """The first step sizes the arena of pages, with a margin, outside of the graph's stream. Resizing it releases the CUDA
        graph."""
        if self.arena is None and most:
            pages = most // PAGE
            self.arena = self.allocator.malloc((pages + -(-pages // _MARGIN)) * PAGE, DEFAULT, ACTIVATIONS)
            if self._run.graph:
                self.release_cache()
