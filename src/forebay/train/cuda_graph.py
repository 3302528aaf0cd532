"""A step's forwards and backwards as one CUDA graph: captured once, replayed with other tokens.

In: what an engine enqueues between gathering weights and reducing gradients, as a function of the step's microbatches and of
their number of targets. Out: what it returns, and gradients where it leaves them, bit for bit those of calling it.

    first steps         called: compilers, planners and stores settle; so do those of another shape
    the next one        its inputs are copied to tensors of the graph's own, the call is captured, and the graph runs
    from then on        inputs are copied, the graph runs, gradients are put where the call would have put them

Where a plan rests on how long things take (offloading), the first graphs are timed: what they say when they are replayed makes
another plan, steps are called until that has settled, and the next graph is captured. The last one is not timed.

The host then enqueues one launch a step. Another shape, or a page store of another size, is captured anew. If a capture fails on
any process, all go on by calling, and `why_not` says why. So they do if a graph's first replay does not end: its streams wait for
each other by flags, which CUDA does not know of (`forebay.kernels.flags`).

Gathered weights must stay where they are from step to step: `UnshardedStep.keep_weights` sees to that. Between replays the memory
that a step needs belongs to the graph's pool, and nobody uses it. So what gathers and reduces allocates there too (`room`): the
gradients on the shards are gone when the next replay begins, or it would write over them. `release` gives the memory back, for a
step that has to be called.

`CudaGraphStep` owns the stream that all of it runs on (autograd remembers on which stream a parameter's gradient is accumulated,
so it is the same one from the first step on), the graph, its inputs, and the gradients that it writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.flags import Flags
from forebay.managed import Managed
from forebay.models.router import RouterStats
from forebay.train.unsharded_step import UnshardedStep

Parts = Sequence[tuple[Tensor, Tensor]]
Body = Callable[[Parts, Tensor], tuple[Tensor, ...]]
# Seconds within which a graph's first replay has to end; who waits for another process that long gives up as well.
_ENDS = 300.0
_CALLS = 3  # steps before the capture: the first sizes page stores, then memory of that size is used, then all is warm
_REPLAYS = 2  # of a graph before it is asked for times: the first one uploads it
_TIMED = 3  # graphs: the first one's plan rests on the times of calls, the others' on those of another plan, and on its waits


class StepState:
    """What a captured call changes besides what it returns. An engine says what that is.

    Args:
        take: what calls left so far (gradients, counts); nothing of it stays where it was.
        put: adds what one call left, or what was taken, to nothing or to what is there.
    """

    def __init__(self, take: Callable[[], Any], put: Callable[[Any], None]):
        self.take, self.put = take, put


class Timing:
    """How plans follow the times of captured steps.

    Args:
        graphs: to be timed, one after the other; on all processes as many.
        plan_again: behind the replays of one, before the next is captured.
    """

    def __init__(self, graphs: int, plan_again: Callable[[], None]):
        self.graphs, self.plan_again = graphs, plan_again


@dataclass(frozen=True)
class _GraphPool:
    """A graph's, as `torch.cuda.use_mem_pool` asks for one."""

    id: Any


class CudaGraphStep:
    """See the module docstring.

    Args:
        body: (microbatches, count) -> tensors. It must ask nothing of the device, and do the same whenever it is called.
        kept: what else it changes.
        device: a CUDA device.
        version: changes when a graph captured before is no longer right, such as a page store's size; on all processes, or who
            changes it calls `release` on all.
        agreed: whether it is true on all processes; collective.
        ready: whether calls do the same from now on.
        around: around(timed): within, the call is captured.
        timing: None where no plan rests on times.
        flags: by which streams of the graph wait for each other.

    Attributes:
        why_not: why steps are called and not captured; None while they are to be.
        peak_bytes, left_bytes: device memory that the captured call took at most, and that what it left takes (gradients and
            results); 0 without a graph. The allocator does not see a graph run.
    """

    def __init__(
        self,
        body: Body,
        kept: Sequence[StepState],
        device: torch.device,
        version: Callable[[], int],
        agreed: Callable[[bool], bool],
        *,
        ready: Callable[[], bool] = lambda: True,
        around: Callable[[bool], AbstractContextManager[None]] = lambda timed: nullcontext(),
        timing: Timing | None = None,
        flags: Sequence[Flags] = (),
    ):
        self.why_not: str | None = None
        self.peak_bytes = self.left_bytes = 0
        self._body, self._kept, self._device, self._version, self._agreed = body, list(kept), device, version, agreed
        self._ready, self._around, self._timing, self._flags = ready, around, timing, flags
        self._replays = 0  # of a graph that is timed
        self._stream = torch.cuda.Stream(device)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._signature: Any = None
        self._shapes: Any = None
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._outputs: tuple[Tensor, ...] = ()
        self._left: list[Any] = []

    @property
    def captured(self) -> bool:
        """Whether there is a graph, and it stays."""
        return self._graph is not None and not self._timed

    @property
    def has_graph(self) -> bool:
        """Whether there is a graph now."""
        return self._graph is not None

    @property
    def _timed(self) -> bool:
        return self._timing is not None and self._timing.graphs > 0

    def on_stream(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`run()` on the graph's stream, in order with the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = run()
        current.wait_stream(self._stream)
        return results

    @contextmanager
    def room(self) -> Iterator[None]:
        """Within, and within `on_stream`, this thread allocates in the graph's memory; without a graph, as always. What is still
        there when the graph runs is written over. Trap: if the device has no room for more, the allocator does not give back
        what it has cached elsewhere, as of an evaluation."""
        if self._graph is None:
            yield
            return
        pool: Any = _GraphPool(self._graph.pool())
        with torch.cuda.use_mem_pool(pool, self._device):
            yield

    def __call__(self, parts: Parts, count: Tensor | int) -> tuple[Tensor, ...]:
        """A step; within `on_stream`."""
        self._count.fill_(count) if isinstance(count, int) else self._count.copy_(count)
        signature = ([(ids.shape, labels.shape) for ids, labels in parts], self._version())
        if self._graph is not None and (signature != self._signature or (self._timed and self._replays >= _REPLAYS)):
            timed = self._replays >= _REPLAYS
            self.release()
            if timed and self._timing is not None:
                self._timing.graphs -= 1
                self._timing.plan_again()
        if self._shapes not in (None, signature[0]):
            self._calls = 0  # masks, compilers and stores have to settle again
        self._shapes = signature[0]
        fresh = self._graph is None
        if fresh:
            self._calls += 1
            # All capture the same step: one that only captures does not answer another one's messages.
            if self.why_not is not None or self._calls <= _CALLS or not self._agreed(self._ready()):
                return self._body(parts, self._count)
            if not self._capture(parts, signature):
                return self._body(parts, self._count)
        for own, given in zip(self._inputs, parts, strict=True):
            own[0].copy_(given[0])
            own[1].copy_(given[1])
        assert self._graph is not None
        self._graph.replay()
        if fresh and not self._agreed(self._ends()):
            self.why_not = f"its first replay did not end within {_ENDS:.0f} s"
            self.release()
            return self._body(parts, self._count)
        self._replays += self._timed
        for kept, left in zip(self._kept, self._left, strict=True):
            kept.put(left)
        return tuple(t.clone() for t in self._outputs)  # the next step writes to them

    def release(self) -> None:
        """Give up the graph and its memory. The next step is captured again: to be called on all processes alike."""
        torch.cuda.synchronize(self._device)  # it may be running
        self._graph, self._signature, self._replays = None, None, 0
        self._inputs, self._outputs, self._left = [], (), []
        self.peak_bytes = self.left_bytes = 0
        for flags in self._flags:
            flags.begin()  # their words are the graph's memory
        _clear_workspaces()  # see `_capture`
        torch.cuda.empty_cache()

    def _capture(self, parts: Parts, signature: Any) -> bool:
        """Whether there is a graph now, on every process alike."""
        self._inputs = [(ids.clone(), labels.clone()) for ids, labels in parts]
        before = [kept.take() for kept in self._kept]  # the graph starts from nothing
        graph = torch.cuda.CUDAGraph()
        reason = None
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        # cuBLAS keeps a stream's workspace for good. Made now, it is in the graph's pool: whoever clears it later, as another
        # graph that is given up does, frees nothing that this one needs; its own giving up has to, or segments would stay held.
        _clear_workspaces()
        try:
            # Other threads (NCCL's watchdog) ask for events while this one captures.
            with (
                self._around(self._timed),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._outputs = self._body(self._inputs, self._count)
        except Exception as error:  # whatever it is: the other processes wait to hear of it
            reason = _first_cause(error)
            self._free_generator()
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - held
        self.left_bytes = torch.cuda.memory_allocated(self._device) - held
        self._left = [kept.take() for kept in self._kept]
        for kept, had in zip(self._kept, before, strict=True):
            kept.put(had)
        if not self._agreed(reason is None):
            self.why_not = reason or "another process could not capture it"
            self.release()
            return False
        self._graph, self._signature = graph, signature
        return True

    def _free_generator(self) -> None:
        """Trap: a capture that fails leaves torch's generator of random numbers in it, where it refuses to draw for calls
        ("Offset increment outside graph capture"). The end of a capture that succeeds takes it out."""
        with (
            suppress(RuntimeError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=self._device)

    def _ends(self) -> bool:
        """Whether the replay that was just launched ends by itself. If not, it is made to, and what it wrote is of no use."""
        end = torch.cuda.Event()
        end.record(self._stream)
        late = time.monotonic() + _ENDS
        while not end.query():
            if time.monotonic() > late:
                self._end(end)
                return False
            time.sleep(1e-3)
        return True

    def _end(self, end: torch.cuda.Event) -> None:
        late = time.monotonic() + _ENDS
        while not end.query():
            if time.monotonic() > late:
                raise RuntimeError(
                    "a captured step does not end, though nothing in it waits for this process any more; another one may be gone"
                )
            for flags in self._flags:
                flags.open()
            time.sleep(0.1)


def _clear_workspaces() -> None:
    if torch.backends.cuda.is_built():
        torch._C._cuda_clearCublasWorkspaces()


def _first_cause(error: BaseException) -> str:
    """What ended a capture says no more than that it had ended; what came before says why."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class CudaGraphEngine:
    """What engines share whose steps can be captured: weights are gathered, the step is called or replayed, gradients reduced.

    Attributes:
        captured: the graph and when it is made; None where steps are called only.
    """

    captured: CudaGraphStep | None = None
    _unsharded: UnshardedStep

    @contextmanager
    def called(self) -> Iterator[None]:
        """Within, steps are called and not captured, and a graph's memory is free for them."""
        captured, self.captured = self.captured, None
        if captured is not None:
            captured.release()
        try:
            yield
        finally:
            self.captured = captured

    def _run(self, microbatches: Parts, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """What is captured: it asks nothing of the device."""
        raise NotImplementedError

    def _whole_step(self, microbatches: Parts, count: Tensor | int, replay: bool = True) -> tuple[Tensor, Tensor]:
        """From gathering to reducing; with a graph, on its stream. `replay` False calls, though there is one."""
        captured = self.captured
        if captured is None:
            return self._around(self._run, microbatches, count)
        run: Any = captured if replay else self._run
        losses, imbalance = captured.on_stream(partial(self._around, run, microbatches, count))
        return losses, imbalance

    def _around(self, run: Any, microbatches: Parts, count: Tensor | int) -> tuple[Tensor, Tensor]:
        captured = self.captured
        if captured is not None and captured.has_graph and self._unsharded.has_gradients():
            raise RuntimeError("gradients of another step are still there: a captured step needs them to be None")
        room = nullcontext if captured is None else captured.room
        with room():
            self._unsharded.gather()
        losses, imbalance = run(microbatches, count)
        with room():
            self._unsharded.reduce()
        return losses, imbalance

    def _give_up_graph(self) -> None:
        if self.captured is not None:
            self.captured.release()
            self.captured = None


def cuda_graph_step(
    body: Body,
    unsharded: UnshardedStep,
    router: RouterStats | None,
    memory: Managed,
    device: torch.device,
    agreed: Callable[[bool], bool],
    timed: bool = False,
    flags: Flags | None = None,
) -> CudaGraphStep:
    """For an engine that runs `body` between gathering and reducing: gradients and the routers' counts are what it leaves.
    `timed`: on some process `memory` plans by the times that steps take. `flags`: of the engine's own streams."""
    unsharded.keep_weights()
    kept = [StepState(unsharded.take_gradients, unsharded.put_gradients)]
    if router is not None:
        kept.append(StepState(router.take_counts, router.add_counts))
    pages = memory.pages
    return CudaGraphStep(
        body,
        kept,
        device,
        lambda: 0 if pages is None else pages.generation,
        agreed,
        ready=lambda: memory.settled,
        around=memory.manager.capturing,
        timing=Timing(_TIMED, memory.manager.plan_again) if timed else None,
        flags=[memory.manager.store.lanes.flags, *([flags] if flags is not None else [])],
    )
