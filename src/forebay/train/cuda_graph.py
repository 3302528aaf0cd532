"""Captures the forwards and backwards of a step in one CUDA graph and replays it with other tokens.

Input: the part of a step between gathering parameters and reducing gradients, as a function of the microbatches and of the
number of targets. Output: its results and the gradients it leaves, bitwise those of calling it. The first steps are called,
until compilers, planners and stores have warmed up; the next one is captured, and later ones copy their inputs and launch the
graph. Another input shape or page store size makes a new graph. If a capture fails on any process, the first replay does
not end, or the owner gives the graph up, all processes call every step from then on. `CudaGraphStep` owns the stream of the
step, the graph, its inputs and the gradients that it writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Microbatches = Sequence[tuple[Tensor, Tensor]]
Body = Callable[[Microbatches, Tensor], tuple[Tensor, ...]]
# Steps before the capture: the first sizes page stores, the second uses memory of that size, the third is warm.
_CALLS = 3
_SLOWER = 4  # times a called step, after which a replay that still runs has deadlocked
_REPLAYS = 2  # replays of a timed graph before its times are read: the first one uploads the graph


@dataclass(frozen=True)
class StepState:
    """State that a step changes besides what it returns."""

    take: Callable[[], Any]  # removes and returns what calls have left so far (gradients, counts)
    put: Callable[[Any], None]  # adds what `take` returned to what is there


@dataclass(frozen=True)
class _GraphPool:
    """The memory pool of a graph, as `torch.cuda.use_mem_pool` takes it."""

    id: Any


class Waits(Protocol):
    """What streams of a graph wait for; see `forebay.kernels.flags.Flags`."""

    def begin(self) -> None:
        """Another graph begins."""

    def open(self) -> None:
        """Make the running graph stop waiting."""


class CudaGraphStep:
    """Calls, captures or replays a step; see the module docstring.

    Args:
        body: (microbatches, count) -> tensors. It must not synchronize with the device, and must do the same in every call.
        states: what else `body` changes.
        version: a number that changes when a captured graph is no longer valid, such as with the size of a page store. It
            changes on all processes together, or its owner calls `release` on all.
        all_agree: whether a condition holds on all processes; collective.
        ready: whether `body` does the same in every call from now on.
        around: around(timed) is the context of the capture.
        timed_graphs: number of graphs to time, one after the other; the same on all processes.
        plan_again: called after the replays of each timed graph, before the next capture, to plan by the measured times.
        moves: whether the plan moves anything: if on no process, no graph is timed any more.
        flags: what streams of the graph wait for, of this process and of others.
        ends: seconds within which the first replay has to end, and again once it is made to. A process that waits for another one
            longer than both gives up. Steps that take more than half of it when called are not captured.
        alone: no other process waits for this one: `_SLOWER` times the last called step is waited for if that is longer, and
            steps of any length are captured.
        forget: called after a first replay that did not end by itself, on all processes, before its step is called: clears what
            it noted elsewhere.
        take_peak: returns the peak of allocated bytes that the body's own resets of the allocator's peak hid since the last call.

    Attributes:
        eager_reason: why all steps are called; None while they are to be captured.
        peak_bytes: peak memory of the captured step; 0 without a graph. The allocator does not see a replay.
        result_bytes: memory of the gradients and results of the captured step; 0 without a graph.
    """

    def __init__(
        self,
        body: Body,
        states: Sequence[StepState],
        device: torch.device,
        version: Callable[[], int],
        all_agree: Callable[[bool], bool],
        *,
        ready: Callable[[], bool] = lambda: True,
        around: Callable[[bool], AbstractContextManager[None]] = lambda timed: nullcontext(),
        timed_graphs: int = 0,
        plan_again: Callable[[], None] = lambda: None,
        moves: Callable[[], bool] = lambda: True,
        flags: Sequence[Waits] = (),
        ends: float = 300.0,
        alone: bool = False,
        forget: Callable[[], None] = lambda: None,
        take_peak: Callable[[], int] = lambda: 0,
    ):
        self.eager_reason: str | None = None
        self.peak_bytes = self.result_bytes = 0
        self._body, self._states, self._device, self._version = body, list(states), device, version
        self._all_agree, self._ready, self._around, self._flags = all_agree, ready, around, flags
        self._timed_graphs, self._plan_again, self._moves = timed_graphs, plan_again, moves  # graphs still to be timed
        self._ends, self._alone, self._forget, self._take_peak = ends, alone, forget, take_peak
        self._replays = 0  # of a timed graph
        self._too_long = 0  # called steps, when a capture was due
        # Autograd remembers the stream on which a parameter's gradient is accumulated: it is this one from the first step on.
        self._stream = torch.cuda.Stream(device)
        self._calls = 0
        self._around_call = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # the last called step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._signature: Any = None
        self._shapes: Any = None
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._outputs: tuple[Tensor, ...] = ()
        self._left: list[Any] = []  # what the graph writes of each state

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph that stays: one that is not timed."""
        return self._graph is not None and not self._timed_graphs

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def on_stream(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`run()` on the graph's stream, ordered with the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = run()
        current.wait_stream(self._stream)
        return results

    @contextmanager
    def graph_memory(self) -> Iterator[None]:
        """Context, within `on_stream`, in which this thread allocates from the graph's pool, which is unused between replays.

        Replays overwrite what is still there. Without a graph, memory is allocated as usual. Trap: if the device is full, the
        allocator does not free blocks that it caches in other pools, such as those of an evaluation.
        """
        if self._graph is None:
            yield
            return
        pool: Any = _GraphPool(self._graph.pool())
        with torch.cuda.use_mem_pool(pool, self._device):
            yield

    def __call__(self, microbatches: Microbatches, count: Tensor | int) -> tuple[Tensor, ...]:
        """Run a step; within `on_stream`."""
        self._count.fill_(count) if isinstance(count, int) else self._count.copy_(count)
        shapes = [(ids.shape, labels.shape) for ids, labels in microbatches]
        signature = shapes, self._version()
        self._release_outdated(signature)
        if self._shapes not in (None, shapes):
            self._calls = 0  # masks, compilers and stores have to warm up again
        self._shapes = shapes
        is_first_replay = self._graph is None
        if self._graph is None and not (self._may_capture() and self._capture(microbatches, signature)):
            return self._call(microbatches)
        for (ids, labels), (new_ids, new_labels) in zip(self._inputs, microbatches, strict=True):
            ids.copy_(new_ids)
            labels.copy_(new_labels)
        assert self._graph is not None
        self._graph.replay()
        if is_first_replay and not self._all_agree(self._replay_ends()):
            self.give_up(f"its first replay did not end within {self._patience():.0f} s")
            self._forget()
            return self._body(microbatches, self._count)
        self._replays += self._timed_graphs > 0
        for state, left in zip(self._states, self._left, strict=True):
            state.put(left)
        return tuple(t.clone() for t in self._outputs)  # the next replay overwrites the outputs

    def has_room_beside(self) -> bool:
        """Whether as much memory is free beside the graph as the captured step takes. Empties the allocator's cache."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0] >= self.peak_bytes

    def release(self) -> None:
        """Free the graph and its memory; call it on all processes together. The next step is captured again."""
        torch.cuda.synchronize(self._device)  # the graph may be running
        self._graph, self._signature, self._replays = None, None, 0
        self._inputs, self._outputs, self._left = [], (), []
        self.peak_bytes = self.result_bytes = 0
        for flags in self._flags:
            flags.begin()  # their words are in the graph's memory
        _clear_workspaces()  # see `_capture`
        torch.cuda.empty_cache()

    def give_up(self, reason: str) -> None:
        """Free the graph and its memory for good: the steps from now on are called. All processes do it in the same step."""
        self.eager_reason = reason
        self.release()

    def _call(self, microbatches: Microbatches) -> tuple[Tensor, ...]:
        start, end = self._around_call
        start.record(self._stream)
        results = self._body(microbatches, self._count)
        end.record(self._stream)
        return results

    def _called_seconds(self) -> float:
        """Seconds of the last called step. The host waits for its end."""
        start, end = self._around_call
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _patience(self) -> float:
        """Seconds that the first replay may take, and again the rest of it once all flags are open."""
        return max(self._ends, _SLOWER * self._called_seconds()) if self._alone else self._ends

    def _release_outdated(self, signature: Any) -> None:
        """Release a graph of other inputs, and one whose times were measured."""
        if self._graph is None:
            return
        measured = self._replays >= _REPLAYS
        if measured or signature != self._signature:
            self.release()
            if measured:
                self._timed_graphs -= 1
                self._plan_again()

    def _may_capture(self) -> bool:
        self._calls += 1
        # All processes capture the same step: one that captures does not answer the messages of one that calls.
        if self.eager_reason is not None or self._calls <= _CALLS or not self._all_agree(self._ready()):
            return False
        # A replay of a step that takes as long as a process may wait for another one looks like a deadlock.
        if self._all_agree(self._alone or 2 * self._called_seconds() <= self._ends):
            if self._timed_graphs and self._all_agree(not self._moves()):
                self._timed_graphs = 0
            return True
        self._too_long += 1
        if self._too_long == _CALLS:  # not one step alone, which something may have held up
            self.eager_reason = f"steps take more than half of the {self._ends:.0f} s that a first replay may take"
        return False

    def _capture(self, microbatches: Microbatches, signature: Any) -> bool:
        """Capture the step; False on all processes if any of them fails."""
        self._inputs = [(ids.clone(), labels.clone()) for ids, labels in microbatches]
        before = [state.take() for state in self._states]  # the graph starts from nothing
        graph = torch.cuda.CUDAGraph()
        reason = None
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._take_peak()
        # Trap: cuBLAS keeps a stream's workspace until it is cleared. Cleared here, it is allocated again in the graph's
        # pool, so a later clear (when another graph is released) frees nothing that this graph needs. `release` has to
        # clear it too, or its segments would stay.
        _clear_workspaces()
        try:
            # thread_local: other threads (NCCL's watchdog) query events during the capture.
            with (
                self._around(self._timed_graphs > 0),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._outputs = self._body(self._inputs, self._count)
        except Exception as error:  # of any kind: the other processes wait for the outcome
            reason = _first_cause(error)
            self._free_generator()
        self.peak_bytes = max(torch.cuda.max_memory_allocated(self._device), self._take_peak()) - held
        self.result_bytes = torch.cuda.memory_allocated(self._device) - held
        self._left = [state.take() for state in self._states]
        for state, taken in zip(self._states, before, strict=True):
            state.put(taken)
        if not self._all_agree(reason is None):
            self.give_up(reason or "another process could not capture it")
            return False
        self._graph, self._signature = graph, signature
        return True

    def _free_generator(self) -> None:
        """Take torch's random generator out of a failed capture, with an empty one.

        Trap: it stays in the failed capture and refuses to draw for calls ("Offset increment outside graph capture"). The end of
        a successful capture takes it out.
        """
        with (
            suppress(RuntimeError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=self._device)

    def _replay_ends(self) -> bool:
        """Whether the first replay ends by itself; if not, it is made to, and its results are useless.

        Streams of a graph wait for each other by flags (`forebay.kernels.flags`), which CUDA does not know: they may deadlock.
        """
        end = torch.cuda.Event()
        end.record(self._stream)
        deadline = time.monotonic() + self._patience()
        while not end.query():
            if time.monotonic() > deadline:
                self._force_end(end)
                return False
            time.sleep(1e-3)
        return True

    def _force_end(self, end: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._patience()
        while not end.query():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the CUDA graph of a step does not end although all flags of this process are open; "
                    "another process may be gone"
                )
            for flags in self._flags:
                flags.open()
            time.sleep(0.1)


def _clear_workspaces() -> None:
    if torch.backends.cuda.is_built():
        torch._C._cuda_clearCublasWorkspaces()


def _first_cause(error: BaseException) -> str:
    """The error that ended a capture. The last one of the chain only says that the capture had ended."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
