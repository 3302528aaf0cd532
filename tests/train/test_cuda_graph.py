"""When a step is called, captured and replayed, with a fake graph whose replay calls the captured step again.

`test_cuda_graph_gpu` and `test_engines_gpu` compare the bits of real graphs.
"""

import time
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from forebay.train.cuda_graph import CudaGraphStep, StepState
from forebay.train.engines import GradientEngine


class Pretence:
    """Replaces torch.cuda. A replay runs the captured step on the same inputs, and writes its results to the same tensors.

    Attributes:
        recording: the graph that is captured now.
        graphs: number of graphs so far.
        ends: whether a launched replay has ended.
        milliseconds: time of each called step.
        room: pool that memory is allocated from.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.recording: Any = None
        self.graphs = 0
        self.ends = True
        self.milliseconds = 0.0
        self.room: Any = None
        for name in ("Stream", "stream", "current_stream", "synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        for name in ("CUDAGraph", "graph", "use_mem_pool"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def event(self, enable_timing: bool = False) -> Any:
        return MagicMock(query=lambda: self.ends, elapsed_time=lambda _: self.milliseconds)

    def CUDAGraph(self) -> Any:
        self.graphs += 1
        return MagicMock(pool=lambda: ("pool", self.graphs))

    @contextmanager
    def graph(self, graph: Any, **_: Any) -> Any:
        self.recording = graph
        try:
            yield
        finally:
            self.recording = None

    @contextmanager
    def use_mem_pool(self, pool: Any, _: Any) -> Any:
        self.room = pool.id
        try:
            yield
        finally:
            self.room = None


class Engine:
    """A step that multiplies tokens by a number, adds to a gradient, and records the shapes of its calls."""

    def __init__(self, pretence: Pretence, **more: Any):
        self.pretence = pretence
        self.calls: list[torch.Size] = []
        self.gradient: torch.Tensor | None = None
        self.version = 0
        self.error: Exception | None = None
        self.agrees = True
        kept = StepState(self._take, self._put)
        self.step = CudaGraphStep(
            self._body, [kept], torch.device("cpu"), lambda: self.version, lambda here: here and self.agrees, **more
        )

    def run(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, which must be right, and the gradient."""
        ids, self.gradient = torch.randint(1, 99, shape), None
        (loss,) = self.step([(ids, ids)], 7)
        assert self.gradient is not None
        assert torch.equal(loss, ids.sum() * 7)
        assert torch.equal(self.gradient, ids * 7)
        return loss, self.gradient

    def _body(self, parts: Any, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls.append(parts[0][0].shape)
        if self.pretence.recording is not None and self.error is not None:
            try:
                raise self.error
            finally:
                raise RuntimeError("the capture had ended")
        loss, gradient = parts[0][0].sum() * count, parts[0][0] * count
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        graph = self.pretence.recording
        if graph is not None:

            def again() -> None:
                loss.copy_(parts[0][0].sum() * count)
                gradient.copy_(parts[0][0] * count)

            graph.replay = again
            loss.zero_()  # a capture computes nothing
            gradient.zero_()
        return (loss,)

    def _take(self) -> Any:
        gradient, self.gradient = self.gradient, None
        return gradient

    def _put(self, gradient: Any) -> None:
        if gradient is not None:
            self.gradient = gradient


@pytest.fixture
def pretence(monkeypatch: pytest.MonkeyPatch) -> Pretence:
    return Pretence(monkeypatch)


def test_called_thrice_then_captured_then_replayed(pretence: Pretence) -> None:
    engine = Engine(pretence)
    for calls in (1, 2, 3, 4, 4, 4):
        engine.run(3, 5)
        assert len(engine.calls) == calls
        assert engine.step.is_captured == (calls == 4)
    assert pretence.graphs == 1


def test_a_first_replay_that_does_not_end_is_ended_and_its_step_called(pretence: Pretence) -> None:
    flags = MagicMock(open=lambda: setattr(pretence, "ends", True))
    calls_at_forgetting: list[int] = []
    engine = Engine(pretence, flags=[flags], ends=0.05, forget=lambda: calls_at_forgetting.append(len(engine.calls)))
    for _ in range(3):
        engine.run(3, 5)
    pretence.ends = False
    engine.run(3, 5)
    assert pretence.ends
    assert len(engine.calls) == 5  # the capture, and the call in its place
    assert calls_at_forgetting == [4], "what the replay noted elsewhere is gone before the call"
    assert engine.step.eager_reason is not None and "did not end" in engine.step.eager_reason
    engine.run(3, 5)
    assert len(engine.calls) == 6 and not engine.step.is_captured


@pytest.mark.parametrize("alone", [True, False])
def test_a_replay_of_a_long_step_is_waited_for(
    pretence: Pretence, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """It ends after 3 s, where short steps have 1 s. Other processes would wait in a collective, which has a timeout, so their
    steps are not as long."""
    flags = MagicMock(open=lambda: setattr(pretence, "ends", True))
    engine = Engine(pretence, flags=[flags], ends=1, alone=alone)
    for _ in range(3):
        engine.run(3, 5)
    pretence.ends, pretence.milliseconds = False, 1e3 if alone else 500
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _: setattr(pretence, "ends", pretence.ends or next(clock) >= 3))
    engine.run(3, 5)
    assert engine.step.is_captured == alone
    assert engine.step.eager_reason == (None if alone else "its first replay did not end within 1 s")


def test_what_is_made_to_end_may_take_a_step(pretence: Pretence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open flags do not end a replay at once: the rest of its kernels runs. This one takes 30 s more."""
    clock = iter(range(1000))
    opened: list[int] = []
    flags = MagicMock(open=lambda: opened.append(next(clock)))
    engine = Engine(pretence, flags=[flags], ends=4, alone=True)
    for _ in range(3):
        engine.run(3, 5)
    pretence.ends, pretence.milliseconds = False, 20e3
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        time, "sleep", lambda _: setattr(pretence, "ends", bool(opened) and next(clock) > opened[0] + 30)
    )
    engine.run(3, 5)
    assert opened[0] > 80 and engine.step.eager_reason == "its first replay did not end within 80 s"


def test_what_does_not_end_although_flags_are_open_is_an_error(
    pretence: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(pretence, ends=1)
    for _ in range(3):
        engine.run(3, 5)
    pretence.ends = False
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(RuntimeError, match="does not end although all flags"):
        engine.run(3, 5)
    assert next(clock) < 10


@pytest.mark.parametrize(("seconds", "captured"), [(12, True), (13, False)])
def test_steps_as_long_as_processes_wait_for_each_other_are_called(
    pretence: Pretence, seconds: int, captured: bool
) -> None:
    engine = Engine(pretence, ends=24)
    pretence.milliseconds = 1e3 * seconds
    for _ in range(7):
        engine.run(3, 5)
    assert engine.step.is_captured == captured
    if not captured:
        assert engine.step.eager_reason == "steps take more than half of the 24 s that a first replay may take"
        assert len(engine.calls) == 7


def test_one_step_that_is_held_up_does_not_turn_the_graph_off(pretence: Pretence) -> None:
    engine = Engine(pretence, ends=24)
    for _ in range(3):
        engine.run(3, 5)
    pretence.milliseconds = 20e3
    engine.run(3, 5)
    assert not engine.step.has_graph and engine.step.eager_reason is None
    pretence.milliseconds = 1e3
    engine.run(3, 5)
    assert engine.step.is_captured


def test_a_peak_that_a_timed_step_resets_counts(pretence: Pretence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorders of times reset the allocator's peak at each event, and keep the highest."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 40)
    peaks = iter([500, 110, 500, 20])  # before and after each capture
    engine = Engine(pretence, take_peak=lambda: next(peaks))
    for _ in range(4):
        engine.run(3, 5)
    assert engine.step.peak_bytes == 100
    engine.step.release()
    engine.run(3, 5)
    assert engine.step.peak_bytes == 30


def test_results_of_one_step_stay_when_the_next_one_runs(pretence: Pretence) -> None:
    engine = Engine(pretence)
    for _ in range(4):
        engine.run(2, 2)
    first, _ = engine.run(2, 2)
    before = first.clone()
    engine.run(2, 2)
    assert torch.equal(first, before)


def test_not_before_all_is_settled(pretence: Pretence) -> None:
    settled = []
    engine = Engine(pretence, ready=lambda: bool(settled))
    for _ in range(6):
        engine.run(2)
    assert not engine.step.is_captured
    settled.append(True)
    engine.run(2)
    assert engine.step.is_captured


def test_another_shape_and_other_pages_are_captured_anew(pretence: Pretence) -> None:
    engine = Engine(pretence)
    for _ in range(5):
        engine.run(2, 4)
    for _ in range(3):  # all has to warm up again
        engine.run(3, 4)
        assert not engine.step.is_captured
    engine.run(3, 4)
    assert (pretence.graphs, len(engine.calls)) == (2, 8)
    engine.run(3, 4)
    engine.version = 1
    engine.run(3, 4)
    assert (pretence.graphs, len(engine.calls)) == (3, 9)


def test_a_capture_that_fails_is_given_up_and_says_why(pretence: Pretence) -> None:
    engine = Engine(pretence)
    engine.error = ValueError("asked the device for a number")
    for _ in range(6):
        engine.run(2)
    assert engine.step.eager_reason == "ValueError: asked the device for a number"
    assert not engine.step.is_captured
    assert pretence.graphs == 2, "its own, and one to take the generator of random numbers out of a capture"


def test_all_give_it_up_if_one_does(pretence: Pretence) -> None:
    engine = Engine(pretence)
    for _ in range(3):
        engine.run(2)
    answers = iter([True, True, False])
    engine.step._all_agree = lambda here: next(answers)
    engine.run(2)
    assert engine.step.eager_reason == "another process could not capture it"
    engine.run(2)
    assert len(engine.calls) == 6


@pytest.mark.parametrize("graphs", [0, 1])
def test_no_graph_is_timed_if_its_plan_moves_nothing(pretence: Pretence, graphs: int) -> None:
    """From the first graph on, or since the plan that the first one's times made."""
    timed_captures: list[bool] = []

    @contextmanager
    def around(timed: bool) -> Any:
        timed_captures.append(timed)
        yield

    engine = Engine(pretence, around=around, timed_graphs=3, moves=lambda: pretence.graphs < graphs)
    for _ in range(3 + 2 * graphs + 1):
        engine.run(3, 5)
    assert timed_captures == [True] * graphs + [False] and engine.step.is_captured


def test_graphs_that_are_timed_make_another_plan_and_are_captured_anew(pretence: Pretence) -> None:
    timed_captures: list[bool] = []
    plans: list[int] = []

    @contextmanager
    def around(timed: bool) -> Any:
        timed_captures.append(timed)
        yield

    engine = Engine(pretence, around=around, timed_graphs=2, plan_again=lambda: plans.append(pretence.graphs))
    stays = []
    for _ in range(3 + 2 + 2 + 3):
        engine.run(3, 5)
        stays.append(engine.step.is_captured)
    assert timed_captures == [True, True, False]
    assert plans == [1, 2], "once after the replays of each timed graph"
    assert stays == [False] * 7 + [True] * 3


def test_a_timed_graph_of_another_shape_is_not_asked(pretence: Pretence) -> None:
    plans: list[int] = []
    engine = Engine(
        pretence, around=lambda timed: nullcontext(), timed_graphs=1, plan_again=lambda: plans.append(pretence.graphs)
    )
    for _ in range(4):
        engine.run(3, 5)
    engine.run(2, 5)  # after one replay
    assert plans == []
    for _ in range(5):
        engine.run(2, 5)
    assert plans == [2] and engine.step.is_captured


class Around(GradientEngine):
    """Records the memory pool in which weights are gathered, the step runs and gradients are reduced."""

    def __init__(self, pretence: Pretence):
        self.inner = Engine(pretence)
        self.cuda_graph, self._unsharded = self.inner.step, self  # type: ignore[assignment]
        self.pretence, self.gradients = pretence, False
        self.rooms: list[Any] = []

    def gather(self) -> None:
        self.rooms.append(self.pretence.room)

    reduce = gather

    def has_gradients(self) -> bool:
        return self.gradients

    def _run(self, parts: Any, count: Any) -> Any:
        self.gather()
        return self.inner._body(parts, count)

    def step(self, replay: bool = True) -> list[Any]:
        self.rooms, self.inner.gradient = [], None
        ids = torch.randint(1, 99, (2, 2))
        captured = self.cuda_graph
        assert captured is not None
        run: Any = captured if replay else self._run
        self._with_gathered(lambda *given: (*run(*given), None), [(ids, ids)], 7)
        return self.rooms


def test_around_a_graph_its_memory_is_allocated_in(pretence: Pretence) -> None:
    """But not within the step: the next replay would overwrite a step that is called beside a graph."""
    engine = Around(pretence)
    for _ in range(3):
        assert engine.step() == [None, None]
    assert engine.step() == [None, ("pool", 1)]  # captured after its gathering
    assert engine.step() == [("pool", 1)] * 2
    assert engine.step(replay=False) == [("pool", 1), None, ("pool", 1)]
    with engine.eager():
        assert engine.cuda_graph is None
    assert engine.step() == [None, ("pool", 2)]


def test_gradients_that_a_replay_would_write_over_are_refused(pretence: Pretence) -> None:
    engine = Around(pretence)
    engine.gradients = True  # without a graph they may be
    for _ in range(4):
        engine.step()
    with pytest.raises(RuntimeError, match="gradients of another step"):
        engine.step()
