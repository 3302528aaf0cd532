"""Ranks that several processes estimate: the results of one process, in order, and no process outlives the map."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from forebay.config import from_mapping
from forebay.errors import RunError, UsageError
from forebay.estimate import trace_cache
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.estimate.processes import forked_map, usable
from forebay.estimate.trace_cache import TraceCache
from forebay.estimate.types import Shape
from forebay.train.heartbeat import _is_gone
from tests.ranks import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def square_and_process(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_are_in_order_and_shared_between_processes(processes: int, count: int) -> None:
    found = list(forked_map(square_and_process, range(count), processes))
    assert [square for square, _ in found] == [n * n for n in range(count)]
    assert len({process for _, process in found}) == min(processes, count)
    assert not multiprocessing.active_children()


def test_an_error_of_any_process_is_raised_here() -> None:
    def refuse(number: int) -> int:
        if number == 4:
            raise UsageError("not four")
        return number

    with pytest.raises(UsageError, match="not four"):
        list(forked_map(refuse, range(6), 3))
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_an_error() -> None:
    def die(number: int) -> int:
        if number == 1:
            os._exit(9)
        return number

    with pytest.raises(RunError, match="out of memory"):
        list(forked_map(die, range(2), 2))


def test_processes_end_with_the_iterator() -> None:
    found = forked_map(lambda number: time.sleep(60 * (number > 1)) or number, range(100), 2)
    assert next(found) == 0 and len(multiprocessing.active_children()) == 2
    found.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert usable() >= 1


def test_processes_end_if_the_first_one_is_killed(tmp_path: Path) -> None:
    """Their answers are larger than what a pipe holds, and nobody reads them any more."""

    def large(number: int) -> bytes:
        (tmp_path / str(os.getpid())).touch()
        return bytes(1 << 20)

    def plan() -> None:
        found = forked_map(large, range(6), 3)
        next(found)
        time.sleep(60)

    first = multiprocessing.get_context("fork").Process(target=plan)
    first.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "not all have started", 20)
    first.kill()
    first.join()
    wait_until(lambda: all(_is_gone(int(file.name)) for file in tmp_path.iterdir()), "some are left", 20)


def test_a_plan_is_the_same_in_several_processes() -> None:
    model = {"family": "qwen3_moe", "config": {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 512}}
    config = from_mapping(
        {
            "model": model,
            "train": {"batch": 16, "microbatch": 1, "sequence": 64},
            "parallel": {"pp": 4},
            "device": {"type": "cuda"},
        }
    )
    traces = TraceCache()
    plan = plan_layers(config, 4, traces)
    alone = fit_run(config, plan, 4, traces=traces)
    assert fit_run(config, plan, 4, traces=traces, processes=3) == alone
    for stop in (0, alone.ranks[3].total, 2 * alone.fullest.total):
        stopped = fit_run(config, plan, 4, traces=traces, stop_above=stop)
        assert fit_run(config, plan, 4, traces=traces, stop_above=stop, processes=3) == stopped


def test_traces_are_the_same_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({"model": {"family": "qwen3_moe"}, "train": {"sequence": 64}})
    shapes = [Shape(64, 1, ep=ep, compiled=compiled) for ep in (1, 2, 4) for compiled in (False, True)]
    here, there = TraceCache(), TraceCache()
    expected = [here.trace(config, shape) for shape in shapes]
    told: list[None] = []
    there.make([(config, shape) for shape in shapes * 2], 2, lambda: told.append(None))
    monkeypatch.setattr(trace_cache, "trace_model", pytest.fail)  # nothing is left to trace
    assert [there.trace(config, shape) for shape in shapes] == expected and len(told) == len(shapes)


def test_why_there_is_no_trace_is_known_without_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"family": "qwen3_moe", "dtype": "float32"}
    config, traces = from_mapping({"model": model, "train": {"sequence": 64}}), TraceCache()
    wanted = [(config, Shape(64, 1, experts="transformers", ep=ep)) for ep in (1, 2)]
    traces.make(wanted, 2, lambda: None)
    monkeypatch.setattr(trace_cache, "trace_model", pytest.fail)
    for asked in wanted:
        with pytest.raises(UsageError, match=r"this model cannot be traced: .* in bfloat16 only, not in float32"):
            traces.trace(*asked)
