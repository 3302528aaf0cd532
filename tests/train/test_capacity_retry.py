"""A step that exceeded a capacity and ran again is bitwise the step that was exact at once.

The dispatcher is gloo's, which drops rows in dispatches that the test names.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.config import Config, Parallel, from_mapping
from forebay.errors import RunError
from forebay.memory.page_store import PageReport
from forebay.moe import backends as dispatchers
from forebay.moe.dispatch import Handle, NcclDispatcher
from forebay.train.capacity_retry import CapacityRetries, CapacityRetry
from forebay.train.distributed import ALONE, Mesh
from forebay.train.trainer import Trainer
from tests.helpers import count_handles
from tests.ranks import run_ranks
from tests.train.common import CPU, GLM, MODEL, differing, figures_of, state_of

ROOMY = 1.25  # capacity factor that the dispatcher below suggests; more on higher ranks
STEPS = 5
DROPOUT = {"num_hidden_layers": 3, "attention_dropout": 0.1}  # so that the random generators matter
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe", "config": {**MODEL, **DROPOUT, "router_aux_loss_coef": 0.01}},
    "glm4_moe": {"family": "glm4_moe", "config": {**GLM, **DROPOUT}},
}
TRAIN = {"steps": STEPS, "batch": 8, "microbatch": 1, "clip": 0.5, "router_bias_rate": 0.01}


class NarrowDispatcher(NcclDispatcher):
    """Drops two thirds of a rank's rows in the dispatches `short`, counted from 1 since `begin`."""

    def __init__(self, group: Any, num_experts: int):
        super().__init__(group, num_experts)
        self.short: set[int] = set()
        self.count, self.exact = 0, False
        self.lost = torch.zeros(1, dtype=torch.int64)

    def begin(self, short: set[int]) -> None:
        self.short, self.count = short, 0

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        self.count += 1
        if not self.exact and self.count in self.short:
            over = torch.arange(ids.numel()).view(ids.shape) >= ids.numel() // 3
            self.lost += over.sum()
            ids = ids.masked_fill(over, -1)
        return super().dispatch(x, ids, weights)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        assert not self.exact
        self.exact = True
        try:
            yield
        finally:
            self.exact = False

    def lost_flag(self) -> Tensor:
        return self.lost

    def clear_lost(self) -> None:
        self.lost.zero_()

    def suggested_factor(self) -> float:
        return ROOMY + self.rank


@contextmanager
def opened(raw: dict[str, Any], narrowed: bool) -> Iterator[Trainer]:
    """A trainer and its mesh, with a dispatcher that drops rows, or with one that drops none."""
    config, kind = from_mapping(raw), NarrowDispatcher if narrowed else NcclDispatcher
    with (
        patch.object(dispatchers, "make_dispatcher", lambda _, group, experts, **__: kind(group, experts)),
        patch.object(Trainer, "_updates_ahead", lambda _: True),  # as beside a CUDA graph
        Mesh.open(config) as mesh,
        Trainer(config, mesh) as trainer,
    ):
        yield trainer


def all_state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a step may change."""
    found = state_of(trainer)
    found["torch's generator"] = torch.get_rng_state()
    found["Python's and numpy's generators"] = torch.tensor([random.random(), np.random.rand()])
    if trainer._router is not None:
        found["router counts"] = trainer._router.load()
    return found


def short_in(step: int, dispatches: int, pp_rank: int) -> set[int]:
    """Twice in a row, in the first layer and in the last; of a pipeline, on one rank alone; then in two layers on all."""
    return {
        2: {1} if pp_rank == 0 else set(),
        3: {dispatches} if pp_rank in (0, 1) else set(),
        4: set() if pp_rank == 0 else {2},
        5: {1, dispatches // 2},
    }.get(step, set())


def trained(raw: dict[str, Any], narrowed: bool) -> tuple[dict[str, Tensor], list[Any], list[Any]]:
    """State at the end, losses and norms, and why steps were run again."""
    with opened(raw, narrowed) as trainer:
        dispatcher, dispatches = trainer.dispatcher, 0
        handles = count_handles(dispatcher)
        figures, why = [], []
        for step in range(1, STEPS + 1):
            if isinstance(dispatcher, NarrowDispatcher):
                short = short_in(step, dispatches, trainer.mesh.pp_rank) if step > 1 else set()
                # In the second attempt too, if it is not exact.
                dispatcher.begin(short | {n + dispatches for n in short})
            record = trainer.step(step)
            if isinstance(dispatcher, NarrowDispatcher):
                dispatches = dispatches or dispatcher.count
                assert dispatcher.count == dispatches * (2 if record.retry else 1), (step, dispatcher.count, dispatches)
            figures.append(figures_of(record))
            why.append(record.retry)
        assert handles() == 0
        return all_state(trainer), figures, why


def both_ways(rank: int, world: int, raws: list[dict[str, Any]]) -> list[tuple[list[str], bool, list[bool]]]:
    """For each configuration: differing tensors, whether figures agree, and which steps ran twice."""
    found = []
    for raw in raws:
        wanted, figures, none = trained(raw, narrowed=False)
        got, same, why = trained(raw, narrowed=True)
        assert none == [None] * STEPS and wanted.keys() == got.keys() and len(wanted) > 20
        assert all(w is None or w == CapacityRetry(True, False, ROOMY + raw["parallel"]["ep"] - 1) for w in why)
        found.append((differing(wanted, got), same == figures, [w is not None for w in why]))
    return found


def check(raws: list[dict[str, Any]], world: int) -> None:
    for rank, results in enumerate(run_ranks(both_ways, world, raws, seconds=400)):
        for raw, (wrong, figures, twice) in zip(raws, results, strict=True):
            label = (rank, raw["model"]["family"], raw["parallel"], raw["memory"])
            assert not wrong, (label, wrong)
            assert figures, label
            assert twice == [False, True, True, raw["parallel"]["pp"] > 1, True], label


def test_two_processes(tiny: Callable[..., Config]) -> None:
    """Two microbatches a step and process."""
    offload = {"policy": {"*.mlp": "recompute", "*.self_attn": "offload"}, "offload": "all"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("qwen3_moe", {"parallel": {"reshard": False}}),
        ("qwen3_moe", {"parallel": {"reduce": "microbatch"}, "memory": offload}),
        ("qwen3_moe", {"parallel": {"overlap": True}}),
        ("glm4_moe", {"memory": {"policy": {"*.experts": "stash"}}}),
    ]
    raws = []
    for name, changes in cases:
        parallel = {"ep": 2, **changes.get("parallel", {})}
        train = {**TRAIN, "batch": 4}
        raws.append(tiny(model=MODELS[name], train=train, **{**changes, "parallel": parallel}).to_dict())
    check(raws, 2)


def test_pipelines_of_expert_groups(tiny: Callable[..., Config]) -> None:
    """pp = 2, ep = 2: ranks whose own experts had room run the step again too."""
    raws = [
        tiny(model=MODELS[name], train=TRAIN, parallel={"pp": 2, "ep": 2, "schedule": schedule}).to_dict()
        for name, schedule in (("qwen3_moe", "1f1b"), ("glm4_moe", "dualpipev"))
    ]
    for raw in raws:
        raw["model"]["config"] = {**raw["model"]["config"], "num_hidden_layers": 4}
    check(raws, 4)


def validation(rank: int, world: int, raw: dict[str, Any]) -> list[Any]:
    """Losses with an exchange that leaves everything short, and without."""
    losses = []
    for narrowed in (True, False):
        with opened(raw, narrowed) as trainer:
            if isinstance(trainer.dispatcher, NarrowDispatcher):
                trainer.dispatcher.begin(set(range(1000)))
            losses.append(trainer.evaluate())
            losses.append(trainer.enough_capacity())
            if isinstance(trainer.dispatcher, NarrowDispatcher):
                assert trainer.dispatcher.lost == 0 and not trainer.dispatcher.exact
    return losses


def test_validation_is_exact(tiny: Callable[..., Config]) -> None:
    raw = tiny(model=MODELS["qwen3_moe"], train={**TRAIN, "eval_every": 1}, parallel={"ep": 2}).to_dict()
    for short, enough, wanted, none in run_ranks(validation, 2, raw):
        assert short == wanted and enough == ROOMY + 1 and none is None


class Pages:
    """The part of a page store that `CapacityRetries` uses."""

    def __init__(self) -> None:
        self.missing = torch.zeros(1, dtype=torch.int64)
        self.is_exact, self.ended = False, 0

    def missing_flag(self) -> Tensor:
        return self.missing

    @contextmanager
    def exactly(self) -> Iterator[None]:
        self.is_exact = True
        try:
            yield
        finally:
            self.is_exact = False

    def end_step(self) -> PageReport:
        """A page more was out than in the step before; after one that lacked some, the arena is another one."""
        self.ended += 1
        resized = bool(self.missing)
        self.missing.zero_()
        return PageReport(self.ended, resized)


def retries(pages: Any, **options: Any) -> CapacityRetries:
    mesh = Mesh(ALONE, CPU, Parallel(), timedelta(1), False, None)
    return CapacityRetries(mesh, None, pages, None, **options)


def test_pages_that_run_out() -> None:
    pages, drawn, dropped, captured = Pages(), [], [], [True]

    @contextmanager
    def called() -> Iterator[None]:
        captured[0] = False
        yield
        captured[0] = True

    renewed: list[int] = []
    skips: list[float | None] = []

    def noted(result: Any, skip: Tensor | None) -> Any:
        assert pages.ended in (0, 1) and not pages.is_exact
        skips.append(None if skip is None else float(skip))
        return result

    runs = retries(pages, eager=called, on_resize=lambda: renewed.append(pages.ended))

    def gradients() -> Tensor:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        assert captured[0] is not pages.is_exact
        pages.missing += 3 * (not pages.is_exact)
        return torch.tensor(float(len(drawn)))

    result, rerun = runs.run(gradients, noted, lambda: dropped.append(1))
    assert result == 2.0 and rerun == CapacityRetry(rows=False, pages=True, factor=None)
    assert drawn[0] == drawn[1] and dropped == [1] and pages.ended == 1 and not pages.is_exact
    assert runs.page_report is not None and runs.page_report.bytes_out == 1 and runs.factor() is None
    assert renewed == [1], "a graph of other pages is given up, once"
    assert skips == [1.0, None]
    result, rerun = runs.run(lambda: "enough", noted, lambda: dropped.append(2))
    assert skips == [1.0, None, 0.0]
    assert (result, rerun, dropped, pages.ended, renewed) == ("enough", None, [1], 2, [1])


def test_an_update_that_cannot_skip_waits_for_the_gradients() -> None:
    pages, applied = Pages(), list[tuple[float, Tensor | None]]()

    def gradients() -> float:
        pages.missing += 1 - int(pages.is_exact)
        return float(pages.is_exact)

    def apply(exact: float, skip: Tensor | None) -> None:
        assert pages.ended == 1, "what the step's pages took is free for the update"
        applied.append((exact, skip))

    runs = retries(pages, ahead=lambda: False)
    _, rerun = runs.run(gradients, apply, lambda: None)
    assert rerun is not None and applied == [(1.0, None)]
    pages.is_exact = True
    assert runs.run(gradients, lambda exact, skip: "applied", lambda: None) == ("applied", None)


class LateRanks:
    """The part of a token dispatcher that `CapacityRetries` uses; this rank waited for another one in vain, or did not."""

    def __init__(self, noticed: bool):
        self.noticed = noticed

    def lost_flag(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def late_flag(self) -> Tensor:
        return torch.ones(1, dtype=torch.int64)

    def check(self) -> None:
        if self.noticed:
            raise RuntimeError("rank 1 of 2 did not join")


@pytest.mark.parametrize(("noticed", "message"), [(True, "rank 1 of 2 did not join"), (False, "another rank missed")])
def test_nothing_is_made_of_gradients_that_miss_a_rank(noticed: bool, message: str) -> None:
    mesh = Mesh(ALONE, CPU, Parallel(), timedelta(1), False, None)
    runs = CapacityRetries(mesh, LateRanks(noticed), None, None)  # type: ignore[arg-type]
    skips, dropped = list[float](), list[int]()
    with pytest.raises(RuntimeError, match=message):
        runs.run(lambda: 1, lambda _, skip: skips.append(float(skip)), lambda: dropped.append(1))  # type: ignore[arg-type]
    assert skips == [1.0] and dropped == [1]


def test_an_error_in_the_second_attempt_is_an_error() -> None:
    pages = Pages()

    def gradients() -> None:
        if pages.is_exact:
            raise RunError("out of luck")
        pages.missing += 1

    with pytest.raises(RunError, match="out of luck"):
        retries(pages).run(gradients, lambda *_: None, lambda: None)
    assert not pages.is_exact


def test_nothing_is_asked_where_nothing_is_left_out() -> None:
    runs = retries(None)
    with patch("torch.get_rng_state", side_effect=AssertionError), patch.object(runs, "_exceeded") as asked:
        assert runs.run(lambda: 7, lambda seven, _: seven, lambda: None) == (7, None)
        with runs.exactly():
            pass
    assert not runs.needed and not asked.called and runs.factor() is None


def one_rank_with_pages(rank: int, world: int, raw: dict[str, Any]) -> list[bool]:
    """Only the last rank has any, and they are short once."""
    pages = Pages() if rank == world - 1 else None
    mesh = Mesh.open(from_mapping(raw))
    runs = CapacityRetries(mesh, None, pages, None)  # type: ignore[arg-type]
    asked = []
    for missing in (0, 1, 0):

        def gradients(missing: int = missing) -> None:
            asked.append(1)
            if pages is not None and not pages.is_exact:
                pages.missing += missing

        asked.append(runs.run(gradients, lambda *_: None, lambda: None)[1] is not None)
    return asked


def test_processes_agree(tiny: Callable[..., Config]) -> None:
    assert run_ranks(one_rank_with_pages, 2, tiny().to_dict()) == [[1, False, 1, 1, True, 1, False]] * 2
