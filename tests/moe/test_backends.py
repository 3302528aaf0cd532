"""Which dispatcher a name gives, and what is refused before anything is made."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay.moe import deepep, symmetric
from forebay.moe import dispatch as choose
from forebay.moe.dispatch import BACKENDS, LocalDispatcher, NcclDispatcher, make_dispatcher
from tests.moe.layers import E, group
from tests.ranks import run_ranks


def make(backend: str, size: int | None = 2, **more: Any) -> Any:
    settings = {"tokens": 16, "hidden": 32, "slots_per_token": 2, "dtype": torch.bfloat16, **more}
    return make_dispatcher(backend, None if size is None else group(size), settings.pop("num_experts", E), **settings)


class Made:
    """What a backend was asked for."""

    def __init__(self, group: Any, num_experts: int, **options: Any):
        self.group, self.num_experts, self.options = group, num_experts, options


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the two backends that this machine cannot run."""
    for module, kind in ((symmetric, "SymmetricDispatcher"), (deepep, "DeepEpDispatcher")):
        monkeypatch.setattr(module, kind, type(kind, (Made,), {}))
    yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [None, 1])
def test_one_rank_needs_no_dispatcher(backend: str, size: int | None) -> None:
    dispatcher = make(backend, size)
    assert isinstance(dispatcher, LocalDispatcher) and dispatcher.num_experts == E


def test_backends_by_name(backends: None) -> None:
    nccl, deepep = make("nccl"), make("deepep")
    assert isinstance(nccl, NcclDispatcher) and (nccl.size, nccl.num_experts) == (2, E)
    assert type(deepep).__name__ == "DeepEpDispatcher" and deepep.options == {"hidden": 32, "dtype": torch.bfloat16}
    shapes = {"tokens": 16, "hidden": 32, "slots_per_token": 2, "dtype": torch.bfloat16}
    for factor, wanted in (
        (None, {"exact": True, "capacity_factor": 1.0}),
        (1.5, {"exact": False, "capacity_factor": 1.5}),
    ):
        made = make("symmetric", capacity_factor=factor)
        assert type(made).__name__ == "SymmetricDispatcher" and made.num_experts == E
        assert made.options == {**shapes, **wanted}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, "SymmetricDispatcher"),
        ({"dtype": torch.float16}, "SymmetricDispatcher"),
        ({"dtype": torch.float32}, "SymmetricDispatcher"),
        ({"dtype": torch.float64}, "NcclDispatcher"),  # it does not carry fp64
        ({"hidden": 36}, "NcclDispatcher"),  # nor rows of odd bytes
    ],
)
def test_auto_is_symmetric_where_peers_are_reachable(
    backends: None, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], wanted: str
) -> None:
    monkeypatch.setattr(choose, "_peers_are_reachable", lambda group: True)
    assert type(make("auto", **more)).__name__ == wanted
    monkeypatch.setattr(choose, "_peers_are_reachable", lambda group: False)
    assert isinstance(make("auto", **more), NcclDispatcher)


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan")])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capacity_below_an_even_load_is_refused_first(
    backends: None, monkeypatch: pytest.MonkeyPatch, backend: str, size: int | None, factor: float
) -> None:
    monkeypatch.setattr(choose, "_peers_are_reachable", lambda group: pytest.fail("ranks were asked"))
    with pytest.raises(ValueError, match="capacity_factor must be at least 1"):
        make(backend, size, capacity_factor=factor)


@pytest.mark.parametrize("size", [None, 2])
def test_an_unknown_name_lists_the_valid_ones(size: int | None) -> None:
    with pytest.raises(ValueError, match=r"'nvshmem' is unknown; valid are auto, nccl, symmetric, deepep"):
        make("nvshmem", size)


def reachable(rank: int, world: int) -> dict[str, bool]:
    """The decision of all ranks, told of other machines than this one. Objects travel over the real group, which is gloo."""
    group = dist.group.WORLD
    assert group is not None
    found = {"no GPU": torch.cuda.is_available() or choose._peers_are_reachable(group)}
    # The rank's device, which pairs can read each other, the rank's host, the group's backends.
    cases: dict[str, tuple[int, Any, str, str]] = {
        "peers": (rank, lambda own, other: True, "a", "cuda:nccl"),
        "peers, and a backend for CPUs": (rank, lambda own, other: True, "a", "cpu:gloo,cuda:nccl"),
        "two hosts": (rank, lambda own, other: True, "ab"[rank], "cuda:nccl"),
        "one GPU": (0, lambda own, other: True, "a", "cuda:nccl"),
        "one cannot read": (rank, lambda own, other: own != 1, "a", "cuda:nccl"),
        "gloo": (rank, lambda own, other: True, "a", "cpu:gloo,cuda:gloo"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for name, (device, can_access, host, backends) in cases.items():
            patch.setattr(torch.cuda, "current_device", lambda device=device: device)
            patch.setattr(torch.cuda, "can_device_access_peer", can_access)
            patch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
            patch.setattr(choose.os, "uname", lambda host=host: SimpleNamespace(nodename=host))
            found[name] = choose._peers_are_reachable(group)
    return found


def test_all_ranks_decide_alike() -> None:
    for found in run_ranks(reachable, 2):
        assert found == {
            "no GPU": torch.cuda.is_available(),
            "peers": True,
            "peers, and a backend for CPUs": True,
            "two hosts": False,
            "one GPU": False,
            "one cannot read": False,
            "gloo": False,
        }
