"""Searches against brute force: over functions that are known, and over real plans."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from forebay import cli
from forebay.config import Config, divisors, fast_path, from_mapping
from forebay.errors import UsageError
from forebay.estimate import processes as estimate_processes
from forebay.estimate import search as search_module
from forebay.estimate import trace_cache
from forebay.estimate.device import load
from forebay.estimate.fit import EAGER_ERROR, SEVERAL_GPUS_ERROR, RankFit, least_budget
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit, PlanRequest, ask, bounding, fit_run
from forebay.estimate.rank import RunEstimator
from forebay.estimate.search import Candidate, MeshShape, largest, largest_of_both, meshes, ranked, search
from forebay.estimate.trace import trace_model
from forebay.estimate.trace_cache import TraceCache
from forebay.estimate.types import ModelTrace
from forebay.policy import format_bytes
from forebay.train import hf_io

pytestmark = pytest.mark.usefixtures("shared_traces")


def seeds(count: int) -> Callable[[Callable[[random.Random], None]], Callable[[], None]]:
    """The test with generators of this many seeds, in turn."""

    def of(test: Callable[[random.Random], None]) -> Callable[[], None]:
        def run() -> None:
            for seed in range(count):
                try:
                    test(random.Random(seed))
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}") from error

        return run

    return of


@seeds(200)
def test_the_largest_of_a_falling_headroom(rng: random.Random) -> None:
    """Lines, curves and steps: as brute force, in fewer tries than bisecting twice."""
    values = sorted(rng.sample(range(1, 10_000), rng.randint(1, 600)))
    power, scale, budget = rng.choice([0.3, 1, 2, 3]), rng.randint(1, 100), rng.randint(-100, 10**7)
    step = rng.choice([1, 1, 50])

    def headroom(value: int) -> int:
        return budget - scale * int((value // step * step) ** power)

    found = largest(values, headroom)
    fitting = [v for v in values if headroom(v) >= 0]
    assert (found.found.value if found.found else None) == (fitting[-1] if fitting else None)
    rest = values[len(fitting) :]
    assert (found.next.value if found.next else None) == (rest[0] if rest else None)
    assert len({t.value for t in found.tried}) == len(found.tried) <= 4 * len(values).bit_length() + 2
    assert all(t.headroom == headroom(t.value) for t in found.tried)


@seeds(300)
def test_the_largest_of_two_falling_headrooms(rng: random.Random) -> None:
    """Steps that the host launches begin at any value, and leave more or less than those before."""
    count = rng.randint(1, 60)
    first = rng.randint(0, count + 1)  # that the host launches
    drops = [rng.randint(0, 3) for _ in range(count)]
    start, launched = rng.randint(-5, 60), rng.randint(-5, 60)
    rooms = [start - sum(drops[:n]) if n < first else launched - sum(drops[first:n]) for n in range(count)]
    values = range(3, count + 3)

    def room(value: int) -> int:
        return rooms[value - 3]

    found = largest_of_both(values, room, lambda value: value - 3 < first, largest(values, room))
    fitting = [value for value in values if room(value) >= 0]
    assert (found.found.value if found.found else None) == (fitting[-1] if fitting else None)
    assert len({t.value for t in found.tried}) == len(found.tried)
    assert found.next is None or (room(found.next.value) < 0 and found.next in found.tried)
    assert found.next is not None or fitting[-1] == values[-1]


def test_an_interrupted_search_of_a_second_side_has_the_first_ones() -> None:
    def room(value: int) -> int:
        if value > 5:
            raise KeyboardInterrupt
        return 3 - value

    found = largest_of_both(range(1, 9), room, lambda value: value < 6, largest(range(1, 6), room))
    assert found.found is not None and found.found.value == 3 and found.interrupted and found.next is None


@seeds(100)
def test_what_is_found_holds_whatever_the_headroom_does(rng: random.Random) -> None:
    """It fits, and its successor was tried and does not, even for noise."""
    rooms = [rng.randint(-5, 5) for _ in range(rng.randint(1, 60))]
    found = largest(range(len(rooms)), rooms.__getitem__)
    if found.found is None:
        assert rooms[0] < 0 and found.next is not None and found.next.value == 0
    else:
        at = found.found.value
        assert rooms[at] >= 0
        assert at == len(rooms) - 1 if found.next is None else (found.next.value == at + 1 and rooms[at + 1] < 0)


@seeds(100)
def test_without_monotony_the_largest_of_all_is_found(rng: random.Random) -> None:
    rooms = [rng.randint(-5, 1) for _ in range(rng.randint(1, 30))]
    found = largest(range(len(rooms)), rooms.__getitem__, monotone=False)
    fitting = [n for n, room in enumerate(rooms) if room >= 0]
    assert (found.found.value if found.found else None) == (fitting[-1] if fitting else None)


@pytest.mark.parametrize("gpus", [1, 6, 7, 8, 24])
def test_meshes_are_all_there_are(gpus: int) -> None:
    every = {
        (pp, ep, fsdp)
        for pp in range(1, gpus + 1)
        for ep in range(1, gpus + 1)
        for fsdp in range(1, gpus + 1)
        if pp * ep * fsdp == gpus
    }
    found = list(meshes(gpus))
    assert {(m.pp, m.ep, m.fsdp) for m in found} == every and len(found) == len(every)
    assert [len(divisors(n)) for n in (1, 7, 12)] == [1, 2, 6]


def test_replicas_have_whole_hosts_unless_their_number_is_given() -> None:
    found = list(meshes(16, node=8))
    assert {m.replicate for m in found} == {1, 2} and all(m.replicate * m.pp * m.ep * m.fsdp == 16 for m in found)
    assert [m for m in found if m.replicate == 2] == [replace(m, replicate=2) for m in meshes(8)]
    for node in (None, 8):
        assert list(meshes(16, 4, node)) == [replace(m, replicate=4) for m in meshes(4)] and not list(
            meshes(16, 3, node)
        )
    assert str(MeshShape(1, 4, 2, 2)) == "PP 1 x EP 4 x FSDP 2 x 2 replicas"


def candidate(name: int, peak: int, fits: bool | None, seconds: float | None = None) -> Candidate:
    return Candidate(MeshShape(name, 1, 1), peak, 0, fits, seconds)


def order(*candidates: Candidate) -> list[int]:
    return [c.mesh.pp for c in ranked(candidates)]


def test_meshes_in_order() -> None:
    """What fits comes first, then what is fast, then what is small; of what does not fit, what is nearest to it."""
    assert order(candidate(1, 30, True), candidate(2, 50, False), candidate(3, 20, True)) == [3, 1, 2]
    assert order(candidate(1, 20, True, 2.0), candidate(2, 30, True, 1.0), candidate(3, 40, False, 0.1)) == [2, 1, 3]
    assert order(candidate(1, 60, False, 0.1), candidate(2, 50, False, 9.0)) == [2, 1]
    assert order(candidate(1, 30, None), candidate(2, 20, None)) == [2, 1]


# --- over real plans ----------------------------------------------------------------------------------------------------

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}


def tiny(batch: int = 32, microbatch: int = 1, sequence: int = 128, **sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "model": {"family": "qwen3_moe", "config": TINY},
        "train": {"batch": batch, "microbatch": microbatch, "sequence": sequence},
        "device": {"type": "cuda"},
        "parallel": {},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return from_mapping(raw)


def peak(config: Config, world: int) -> int:
    """Planned on its own."""
    return fit_run(config, plan_layers(config, world), world).fullest.total


def with_(config: Config, section: str, /, **values: Any) -> Config:
    raw = config.to_dict()
    raw[section].update(values)
    return from_mapping(raw)


@pytest.mark.parametrize(("pp", "ep", "world"), [(1, 1, 1), (1, 2, 2), (2, 1, 4)])
def test_the_largest_microbatch_is_that_of_brute_force(pp: int, ep: int, world: int) -> None:
    config = tiny(parallel={"pp": pp, "ep": ep})
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if (32 // (world // pp)) // n >= (2 * pp if pp > 1 else 1)]
    peaks = {n: peak(with_(config, "train", microbatch=n), world) for n in sizes}
    error = SEVERAL_GPUS_ERROR if world > 1 else EAGER_ERROR
    budget = least_budget(sorted(peaks.values())[-2], error)  # all but the one that needs most
    found = search(PlanRequest(config), "microbatch", world, budget)
    assert found.settings == {"train.microbatch": max(n for n in sizes if least_budget(peaks[n], error) <= budget)}
    assert found.fit.fits and found.fit.fullest.total == peaks[found.config.train.microbatch]
    everything = search(PlanRequest(config), "microbatch", world, 10 * max(peaks.values()))
    assert everything.settings == {"train.microbatch": sizes[-1]}
    assert "train.batch = 32 allows no larger one" in everything.sentence


@pytest.mark.parametrize(("what", "section", "option", "middle", "step"), [
    ("sequence", "train", "sequence", 512, 128),
    ("layers", "model", "num_hidden_layers", 6, 1),
])  # fmt: skip
def test_the_largest_sequence_and_depth(what: str, section: str, option: str, middle: int, step: int) -> None:
    """A budget that is one value's least finds the last value with no more, and one byte less the last one below: segments are of
    2 MiB and more, so that neighbors may reserve as much."""
    config = tiny()

    def at(value: int) -> Config:
        if section == "model":
            return with_(config, "model", config={**TINY, option: value})
        return with_(config, section, **{option: value})

    peaks = {value: peak(at(value), 1) for value in range(step, 2 * middle, step)}
    exact = least_budget(peaks[middle], EAGER_ERROR)
    for budget in (exact, exact - 1):
        wanted = max(value for value, size in peaks.items() if least_budget(size, EAGER_ERROR) <= budget)
        found = search(PlanRequest(config), what, 1, budget)
        assert list(found.settings.values()) == [wanted]
        assert found.fit.fullest.total == peaks[wanted]
        assert least_budget(peaks[wanted], EAGER_ERROR) <= budget < least_budget(peaks[wanted + step], EAGER_ERROR)
        assert {t.value for t in found.tried} >= {wanted, wanted + step}
        assert found.config == at(wanted)
        assert f" is {wanted} " in found.sentence and f"with {wanted + step} " in found.sentence


@pytest.mark.parametrize(
    ("most", "size", "compute"), [("MOST_NODES", 72_000_000, ""), ("MOST_GATHERED", 180_000, "bfloat16")]
)
def test_a_deeper_model_that_the_host_launches_may_fit(
    most: str, size: int, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 4 layers are captured, with nodes and with gathered weights of that many bytes; 5 take less."""
    monkeypatch.setattr(fast_path, most, size)
    config = tiny(batch=32, model={"dtype": "float32" if compute else "bfloat16", "compute": compute})
    four, five = (with_(config, "model", config={**TINY, "num_hidden_layers": n}) for n in (4, 5))
    assert peak(five, 1) < peak(four, 1)
    budget = least_budget(peak(five, 1), EAGER_ERROR)
    found = search(PlanRequest(config), "layers", 1, budget)
    (depth,) = found.settings.values()
    assert depth >= 5 and found.fit.fits and not any("Fast path" in note for note in found.fit.notes)
    tried = {t.value: t.headroom for t in found.tried}
    assert tried[depth] >= 0 > tried[depth + 1]
    assert f"is {depth} layers" in found.sentence and f"with {depth + 1} layers" in found.sentence
    # Fewer that are captured need less room for the plan's error.
    assert list(search(PlanRequest(config), "layers", 1, budget - 1).settings.values()) == [3]


def test_a_depth_has_the_layers_that_the_policy_names() -> None:
    """One layer was tried first, which a pattern for the layers 2 and 3 does not match."""
    config = tiny(memory={"policy": {"model.layers.[23].mlp": "recompute", "*.self_attn": "recompute"}})
    found = search(PlanRequest(config), "layers", 1, 1 << 26)
    assert not found.settings and "even with 3 layers" in found.sentence
    three = with_(config, "model", config={**TINY, "num_hidden_layers": 3})
    assert search(PlanRequest(config), "layers", 1, least_budget(peak(three, 1), EAGER_ERROR)).settings


def test_a_sequence_ends_where_the_model_does() -> None:
    found = search(PlanRequest(tiny()), "sequence", 1, 1 << 40)
    assert found.settings == {"train.sequence": 1024}
    assert "max_position_embeddings are 1024" in found.sentence


def test_nothing_fits_and_why() -> None:
    """Parameters alone, with optimizer states, or the peak; with the bytes that are missing."""
    config = tiny()
    least = fit_run(config, plan_layers(config, 1), 1).ranks[0]
    for budget, said in (
        (least.parameters - 1, "even with 1 sequence the parameters alone take"),
        (least.parameters, "the parameters and optimizer states alone take"),
        (least_budget(least.total, least.error) - 1, "the peak is"),
    ):
        found = search(PlanRequest(config), "microbatch", 1, budget)
        assert found.settings == {} and found.fit.fits is False
        assert said in found.sentence and "more than there is" in found.sentence
    assert "1 B more than there is" in found.sentence and found.as_dict()["found"] is None


def test_meshes_are_ranked_and_refused_by_the_trainers_rules() -> None:
    config = tiny(batch=48)
    found = search(PlanRequest(config), "mesh", 6, 1 << 40)
    fine = {c.mesh: c.peak for c in found.candidates}
    reasons = {mesh: reason for mesh, reason in found.refused}
    assert len(fine) + len(reasons) == 9 and not set(fine) & set(reasons)
    # 3 does not divide 8 experts, and a V of 6 ranks has 12 stages for 8 layers.
    assert set(fine) == {
        MeshShape(1, 1, 6),
        MeshShape(1, 2, 3),
        MeshShape(2, 1, 3),
        MeshShape(3, 1, 2),
        MeshShape(3, 2, 1),
    }
    assert "does not divide the model's 8 experts" in reasons[MeshShape(1, 3, 2)]
    assert reasons[MeshShape(6, 1, 1)].startswith("parallel.partition = 'auto': ")
    for mesh, size in fine.items():
        assert size == peak(with_(config, "parallel", pp=mesh.pp, ep=mesh.ep), 6)
    assert [c.peak for c in found.candidates] == sorted(fine.values())
    assert found.settings == {"parallel.pp": found.candidates[0].mesh.pp, "parallel.ep": found.candidates[0].mesh.ep}
    assert "lowest peak" in found.sentence and found.table() is not None
    none = search(PlanRequest(config), "mesh", 6, least_budget(min(fine.values())) - 1)
    assert not none.settings and none.sentence.startswith("No mesh fits") and "1 B more" in none.sentence


def test_a_mesh_is_planned_until_it_is_known_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is found as without a stop. Of the others a bound is known: of parameters alone nothing is traced."""
    request = PlanRequest(tiny(model={"config": {**TINY, "num_experts": 64, "hidden_size": 256}}))
    exact = {c.mesh: c for c in search(request, "mesh", 4, None, device=load("h200")).candidates}
    assert all(not c.at_least for c in exact.values())
    peaks = sorted(c.peak for c in exact.values())
    planned: list[MeshShape] = []

    def counting(config: Config, *args: Any, **keywords: Any) -> Fit:
        planned.append(MeshShape(config.parallel.pp, config.parallel.ep, 4 // config.parallel.pp // config.parallel.ep))
        return fit_run(config, *args, **keywords)

    monkeypatch.setattr(search_module, "fit_run", counting)
    found = search(request, "mesh", 4, least_budget(peaks[1]), device=load("h200"))
    assert sum(c.fits is True for c in found.candidates) == 2
    for c in found.candidates:
        assert c.at_least or c == replace(exact[c.mesh], fits=c.fits)
        assert c.peak <= exact[c.mesh].peak and (c.peak > peaks[1]) == (c.fits is False)
    assert any(c.at_least for c in found.candidates) and len(planned) == len(set(planned))
    monkeypatch.setattr(RunEstimator, "least", lambda run: (1 << 50 if run.config.parallel.pp > 1 else 0, 0))
    planned.clear()
    found = search(request, "mesh", 4, least_budget(peaks[1]))
    assert {mesh.pp for mesh in planned} == {1} and {c.mesh for c in found.candidates} == set(exact)
    monkeypatch.undo()
    nearest = search(request, "mesh", 4, least_budget(peaks[0]) - 1).candidates[0]
    assert nearest.peak == peaks[0] and not nearest.at_least and nearest.fits is False


def test_the_nearest_mesh_is_the_one_that_needs_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger share for the plan's own error may need more than a higher peak does."""
    FakePlanner(monkeypatch)
    calls = []

    def fit(config: Config, plan: Any, world: int, *_: Any, stop_above: int | None, **__: Any) -> Fit:
        calls.append(pp := config.parallel.pp)
        assert len(calls) < 50
        size, error = (100_000_000, 0.05) if pp == 1 else (96_000_000, 0.15)
        ranks = tuple(RankFit(n, size, 0, 0, 0, 0, 0, "here", error=error) for n in range(pp))
        return Fit(
            ranks if stop_above is None or least_budget(size, error) <= stop_above else ranks[:1],
            world,
            1,
            None,
            (),
            (),
        )

    monkeypatch.setattr(search_module, "fit_run", fit)
    found = search(PlanRequest(tiny()), "mesh", 2, 50_000_000)
    assert found.candidates[0].mesh.pp == 1 and "No mesh fits" in found.sentence


def test_the_headroom_of_a_mesh_is_that_of_its_plan() -> None:
    """A called step of one GPU has a larger share than those of several."""
    request = PlanRequest(tiny(memory={"graph": False}))
    peak = search(request, "mesh", 1, 1 << 40).candidates[0].peak
    found = search(request, "mesh", 1, least_budget(peak, 0.06))
    table = found.table()
    assert table is not None and found.candidates[0].fits is False
    room = found.fit.fullest.headroom(least_budget(peak, 0.06))
    (shown,) = next(column for column in table.columns if column.header == "headroom").cells
    assert shown == f"-{format_bytes(-room)}" and found.candidates[0].headroom(least_budget(peak, 0.06)) == room


@pytest.mark.parametrize(
    "parallel", [{}, {"ep": 2}, {"pp": 2}, {"pp": 2, "ep": 2}, {"overlap": True, "ep": 2}, {"pp": 4}]
)
@pytest.mark.parametrize("reshard", [False, True])
def test_no_peak_is_below_its_bound(parallel: dict[str, Any], reshard: bool) -> None:
    for gradients in ("float32", "compute"):
        config = tiny(
            batch=16,
            parallel={**parallel, "reshard": reshard, "gradients": gradients},
            model={"dtype": "float32", "compute": "bfloat16"},
        )
        plan, traces = plan_layers(config, 4), trace_cache.TraceCache()
        most = fit_run(config, plan, 4, traces=traces).fullest.total
        bounds = bounding(config, plan, 4, traces)
        assert 0 < bounds.mean() <= bounds.least()[0] <= most
        even = replace(config, parallel=replace(config.parallel, partition="even"))
        assert bounding(even, plan_layers(even, 4), 4, traces).mean() == bounds.mean()


class FakePlanner:
    """Fits of one rank, whose bytes are a million for each pipeline rank or sequence; Ctrl-C at call `stops_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stops_at: int = -1):
        self.calls, self.stops_at = 0, stops_at
        real = plan_layers(tiny(), 1)
        monkeypatch.setattr(search_module, "plan_layers", lambda *_: real)
        bounds = SimpleNamespace(least=lambda: (0, 0), mean=lambda: 0)
        monkeypatch.setattr(search_module, "bounding", lambda *_: bounds)
        monkeypatch.setattr(search_module, "fit_run", self)
        monkeypatch.setattr(search_module._Runs, "shapes", lambda *_: [])
        monkeypatch.setattr("forebay.estimate.processes.usable", lambda: 1)  # the calls are counted in this process

    def __call__(self, config: Config, plan: Any, world: int, *_: Any, **__: Any) -> Fit:
        if self.calls == self.stops_at:
            raise KeyboardInterrupt
        self.calls += 1
        size = 1_000_000 * config.parallel.pp * config.train.microbatch
        ranks = tuple(RankFit(n, size, 0, 0, 0, 0, 0, "here") for n in range(config.parallel.pp))
        return Fit(ranks, world, 1, None, (), ())


def test_an_interrupted_search_has_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePlanner(monkeypatch, stops_at=2)
    said: list[str] = []
    found = search(PlanRequest(tiny()), "mesh", 4, 1 << 40, progress=said.append)
    assert found.interrupted and found.settings == {"parallel.pp": 1, "parallel.ep": 1} and len(found.candidates) == 2
    assert found.sentence.startswith("The search was interrupted after 2 of 6 meshes. 2 of 2 meshes")
    assert said[0] == "0 of 6 meshes planned"
    assert said[-1] == "2 of 6 meshes planned; best so far PP 1 x EP 1 x FSDP 4, 976.56 KiB"
    assert found.as_dict()["interrupted"] is True
    FakePlanner(monkeypatch, stops_at=2)
    said.clear()
    found = search(PlanRequest(tiny(batch=64)), "microbatch", 1, 20_000_000, progress=said.append)
    assert found.interrupted and not found.settings and "No microbatch fits" in found.sentence
    assert said[1] == "planned runs: 1; next is 32 sequences"
    for what in ("mesh", "microbatch"):
        FakePlanner(monkeypatch, stops_at=0)
        with pytest.raises(KeyboardInterrupt):
            search(PlanRequest(tiny()), what, 4, 1 << 40)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("budget", [None, 1 << 40, 1 << 24])
def test_processes_change_nothing_and_trace_each_shape_once(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are GPUs, a process that was forked after a backward cannot run one: the first process runs none."""
    first, traced = os.getpid(), multiprocessing.get_context("fork").Value("q")

    def counted(*arguments: Any) -> ModelTrace:
        with traced.get_lock():
            traced.value += 1
        return trace_model(*arguments)

    def elsewhere(*arguments: Any) -> ModelTrace:
        assert os.getpid() != first
        return counted(*arguments)

    monkeypatch.undo()  # `shared_traces`
    request, found, counts = PlanRequest(tiny(batch=12)), [], []
    for processes, trace in ((1, counted), (3, elsewhere)):
        monkeypatch.setattr("forebay.estimate.trace_cache.trace_model", trace)
        found.append(search(request, "mesh", 6, budget, device=load("h200"), processes=processes))
        counts.append(traced.value)
    assert found[1] == found[0] and len(found[0].refused) > 1 and counts[1] == 2 * counts[0] > 0
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_interrupted_search_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_and_stay(*arguments: Any) -> None:
        answer(*arguments)
        time.sleep(600)  # or it might be over before it is interrupted

    answer = estimate_processes._answer
    monkeypatch.setattr(estimate_processes, "_answer", answer_and_stay)

    def stop(sentence: str) -> None:
        if "best so far" in sentence:
            assert multiprocessing.active_children()
            raise KeyboardInterrupt

    found = search(PlanRequest(tiny()), "mesh", 4, 1 << 40, progress=stop, processes=2)
    assert found.interrupted and found.settings and not multiprocessing.active_children()


def test_progress_is_a_line_of_a_terminal_after_a_second_and_lines_in_a_pipe() -> None:
    now = [0.0]
    out = StringIO()
    with cli._Progress(Console(file=out, force_terminal=False, width=20), lambda: now[0]) as progress:
        for now[0] in (0.5, 1.2, 5.5, 6.3, 10.6):
            progress(f"{now[0]} of 41 meshes planned, a line that is not wrapped")
    lines = [f"{at} of 41 meshes planned, a line that is not wrapped" for at in (1.2, 6.3)]
    assert out.getvalue().splitlines() == lines
    out, now[0] = StringIO(), 0.0
    with cli._Progress(Console(file=out, force_terminal=True), lambda: now[0]) as progress:
        progress("too early")
        now[0] = 1.0
        progress("first")
    assert "first" in out.getvalue() and "too early" not in out.getvalue() and out.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(("stops_at", "code"), [(2, 130), (0, 130), (-1, 0)])
def test_an_interrupted_command(
    stops_at: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output has nothing but JSON; the code is the shell's for Ctrl-C."""
    FakePlanner(monkeypatch, stops_at)
    small = [f"--set=model.config.{name}={value}" for name, value in TINY.items()]
    search_arguments = ["--gpus=4", "--search=mesh", "--budget=1GiB", "--json"]
    assert cli.main(["plan", "qwen3-30b-a3b", *small, *search_arguments]) == code
    out, err = capsys.readouterr()
    assert ("interrupted" in err or "Ctrl-C" in err) == (code == 130)
    assert (json.loads(out)["search"].get("interrupted", False) is (stops_at > 0)) if out else stops_at == 0


def test_meshes_by_time_where_a_device_is_named() -> None:
    found = search(PlanRequest(tiny()), "mesh", 4, 1 << 40, device=load("h200"))
    times = [c.seconds for c in found.candidates]
    assert len(times) > 1 and times == sorted(times, key=lambda t: t or 0.0)
    best = with_(tiny(), "parallel", pp=found.candidates[0].mesh.pp, ep=found.candidates[0].mesh.ep)
    alone = fit_run(best, plan_layers(best, 4), 4, device=load("h200"))
    assert alone.step is not None and times[0] == alone.step.seconds
    assert "expected to be the fastest" in found.sentence


def test_searches_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="needs --budget"):
        search(PlanRequest(tiny()), "sequence", 1, None)
    with pytest.raises(UsageError, match="'nothing' is unknown; valid are microbatch, sequence, layers, mesh"):
        search(PlanRequest(tiny()), "nothing", 1, 1)
    with pytest.raises(UsageError, match=r"train\.batch = 32 is no multiple of the 3 processes"):
        search(PlanRequest(tiny()), "microbatch", 3, 1 << 40)
    with pytest.raises(UsageError, match="no mesh of 7 GPUs can be run"):
        search(PlanRequest(tiny()), "mesh", 7, 1 << 40)
    with pytest.raises(
        UsageError, match=r"parallel\.replicate = 3 does not divide the 8 processes; valid are 1, 2, 4, 8"
    ):
        search(PlanRequest(tiny(parallel={"replicate": 3})), "mesh", 8, 1 << 40)


def test_traces_are_shared_and_change_nothing() -> None:
    """A run planned after others is the run planned alone."""
    traces = TraceCache()
    meshes: list[dict[str, int]] = [{"ep": 2}, {"ep": 4}, {"pp": 2}, {"pp": 2, "ep": 2}, {}]
    for config in (tiny(8, microbatch=2), tiny(8, sequence=64), *(tiny(8, parallel=mesh) for mesh in meshes)):
        shared, alone = (
            fit_run(config, plan_layers(config, 4, cache), 4, traces=cache) for cache in (traces, TraceCache())
        )
        assert shared == alone


def test_a_bare_model_has_settings_that_follow_the_gpus() -> None:
    asked = ask("OLMoE-1B-7B", processes=8)
    c = asked.config
    assert (c.parallel.ep, c.train.batch, c.train.sequence, c.model.compute) == (8, 32, 4096, "bfloat16")
    assert "parallel.ep=8" in asked.sentence() and "train.batch=32" in asked.sentence()
    mine = ask("olmoe-1b-7b", ["parallel.ep=2", "train.batch=64", "model.config.num_hidden_layers=4"], 8)
    assert mine.config.parallel.ep == 2 and mine.config.train.batch == 64 and not mine.rebatch
    assert hf_io.configuration(mine.config.model, 257).num_hidden_layers == 4
    assert ask("olmoe-1b-7b", processes=6).config.parallel.ep == 2  # 6 and 64 experts
    assert ask("olmoe-1b-7b", ["model.config.max_position_embeddings=2048"]).config.train.sequence == 2048
    assert ask("gpt-oss-20b").config.model.attention == "flex" and asked.config.model.attention == "sdpa"
    assert ask("gpt-oss-20b", ["memory.compile=false"]).config.model.attention == "eager"


def test_a_bare_models_batch_follows_its_microbatch() -> None:
    small = [f"model.config.{name}={value}" for name, value in TINY.items()]
    asked = ask("qwen3-30b-a3b", [*small, "train.sequence=512", "memory.compile=false", "model.config.vocab_size=320"])
    base = fit_run(asked.config, plan_layers(asked.config, 1), 1).fullest.total
    found = search(asked, "microbatch", 1, least_budget(base, EAGER_ERROR) + (8 << 20))
    size = found.settings["train.microbatch"]
    assert size > 1 and found.settings["train.batch"] == 4 * size == found.config.train.batch


@pytest.mark.parametrize("quantized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_with_a_config_alone(tmp_path: Path, quantized: bool) -> None:
    """As downloaded: no weights are there, or needed; those on the hub may be quantized. Depth goes on with the pattern."""
    from transformers import AutoConfig

    others = ("moe_intermediate_size", "num_experts")
    shared = {name: value for name, value in TINY.items() if name not in others}
    fields = {**shared, "num_local_experts": 8, "sliding_window": 64, "vocab_size": 320}
    declared = AutoConfig.for_model("gpt_oss", **fields).to_dict()
    if quantized:
        declared["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    # On a CPU, where a peak is of bytes and not of segments.
    asked = ask(str(tmp_path), ["train.sequence=128", "memory.compile=false", "device.type=cpu"], 2)
    assert ask(str(tmp_path / "config.json"), ["train.sequence=128"], 2).config.model.path == str(tmp_path)
    assert asked.config.model.path == str(tmp_path) and asked.config.parallel.ep == 2
    fit = fit_run(asked.config, plan_layers(asked.config, 2), 2)
    by_name = tiny(model={"family": "gpt_oss", "config": fields, "attention": "eager"}, parallel={"ep": 2})
    assert fit.parameters == fit_run(by_name, plan_layers(by_name, 2), 2).parameters
    found = search(asked, "layers", 2, least_budget(fit.fullest.total))
    assert found.settings["model.config.num_hidden_layers"] == 8
    assert found.settings["model.config.layer_types"] == ["sliding_attention", "full_attention"] * 4
