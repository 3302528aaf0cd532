"""Calibration on this CPU: the shapes and plausibility of its figures."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay import cli
from forebay.errors import UsageError
from forebay.estimate import calibrate
from forebay.estimate.calibrate import Sizes, check_path, complete, measured, measured_links
from forebay.estimate.device import FIGURES, load
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SMALL = Sizes(
    products=((16, 16, 16), (64, 64, 64)),
    grouped=((2, 16, 16, 16), (2, 32, 32, 32)),
    attention=(1, 2, 32, 16),
    copies=(1 << 12, 1 << 16),
    links=1 << 16,
    collectives=(1 << 10, 1 << 14),
)


def test_seconds_are_those_of_one_run() -> None:
    # A shared machine may take longer, and never less.
    assert 0.01 <= calibrate.seconds(lambda: time.sleep(0.01), CPU) < 1
    calls = []
    calibrate.seconds(lambda: calls.append(1), CPU)
    assert len(calls) > 100  # short runs are timed many at once


def test_rates_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every run a second long, rates are counts."""
    monkeypatch.setattr(calibrate, "seconds", lambda run, device: (run(), 1.0)[1])
    assert calibrate.products(CPU, SMALL, torch.float32) == [[2 * 16**3, 2 * 16**3], [2 * 64**3, 2 * 64**3]]
    for weights in (False, True):
        assert calibrate.grouped(CPU, SMALL, weights) == [[2 * 2 * 16**3] * 2, [2 * 2 * 32**3] * 2]
    assert calibrate.bandwidth(CPU, SMALL) == [[2 << 12, 2 << 12], [2 << 16, 2 << 16]]
    said: list[str] = []
    assert calibrate.host_rates(CPU, SMALL, lambda: said.append("ready")) == (1 << 16,) * 3
    assert len(said) == 3
    pairs = 2 * 32 * 32 / 2  # two heads, half of all
    assert calibrate.attention(CPU, SMALL, math.inf) == (2 * 2 * pairs * 16, 5 * 2 * pairs * 16)
    # The kernels around its backward read dO, O and the query's gradient in fp32, and write that: a quarter of a second here.
    around = 1.3 * 2 * 32 * 16 * (2 * 2 + 4 + 2)
    assert calibrate.attention(CPU, SMALL, 4 * around)[1] == pytest.approx(5 * 2 * pairs * 16 / 0.75, rel=1e-3)


def test_a_profile_of_this_machine(tmp_path: Path) -> None:
    """All figures are there, those that were measured say so, and the file can be loaded."""
    profile = complete(measured(CPU, SMALL), "mine", "a CPU", 1)
    assert set(profile.figures) == set(FIGURES)
    links = {n for n in FIGURES if n.startswith(("all_", "reduce_")) or n in ("contention", "memory")}
    assert {n for n, f in profile.figures.items() if f.source == "measured"} == set(FIGURES) - links
    assert profile.figures["all_to_all"].value == load("h200").figures["all_to_all"].value
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(profile.as_dict()))
    assert load(str(file)) == profile


def test_the_share_of_several_gpus_of_a_host_is_the_h200s_if_one_was_measured() -> None:
    shares = []
    for profile in (complete(measured(CPU, SMALL), "mine", "eight CPUs", 8), load("h200")):
        alone, together = profile.host(1, False), profile.host(16, False)
        assert profile.host(8, False) == together
        shares.append([b / a for a, b in zip(alone, together, strict=True)])
    assert shares[0] == pytest.approx(shares[1]) and max(shares[1]) < 0.9


def test_a_pipeline_copies_both_ways_at_once_but_at_its_ends() -> None:
    profile = load("h200")
    assert profile.host(4, True) == (profile.at("host_both", 4) / 0.9,) * 2 + profile.host(4, False)
    assert profile.host(4, True)[0] < 0.7 * profile.host(4, False)[0]


def _links(rank: int, world: int, on_node: int) -> dict[str, Any]:
    return measured_links(CPU, SMALL, on_node)


def test_links_of_two_processes_of_one_machine() -> None:
    found = run_ranks(_links, 2, 2)
    hosts = {name: found[0].pop(name) for name in ("host_out", "host_back", "host_both")}
    assert all([gpus for gpus, _ in curve] == [1, 2] and all(rate > 2 for _, rate in curve) for curve in hosts.values())
    for name in hosts:
        assert found[1].pop(name)[1][1] > 2  # only the first measures alone
    assert found[0] == found[1]  # the slowest one's
    assert set(found[0]) == {"all_to_all", "all_gather", "reduce_scatter"}
    assert [size for size, _ in found[0]["all_to_all"]] == [512, 8192]  # half stays
    assert all(rate > 0 for _, rate in found[0]["all_to_all"])


def test_links_of_two_machines() -> None:
    found = run_ranks(_links, 2, 1)
    assert set(found[0]) == {"all_to_all_between", "all_gather_between", "reduce_scatter_between"}


def test_invalid_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        check_path(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        check_path(tmp_path / "missing" / "mine.json")
    check_path(tmp_path / "mine.json")


def test_save_profile_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--save-profile", str(tmp_path / "mine.json")]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("forebay: --save-profile measures a GPU, and torch finds none here") and error.count("\n") == 1
    )
    assert not (tmp_path / "mine.json").exists() and not dist.is_initialized()


@pytest.mark.gpu
def test_save_profile_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under a minute; plausible rates, and the file can be loaded."""
    file, started = tmp_path / "mine.json", time.perf_counter()
    assert cli.main(["doctor", "--save-profile", str(file)]) == 0
    assert time.perf_counter() - started < 60
    profile = load(str(file))
    assert profile.at("matmul_bf16", 1e12) > profile.at("matmul_bf16", 1e9) > 1e11
    assert profile.at("bandwidth", 1e9) > profile.at("host_out") > 1e9
    assert 1e-7 < profile.at("kernel") < 1e-4 and 1e-7 < profile.at("launch") < 1e-3
