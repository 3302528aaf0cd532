"""Seconds of operations on a device of round figures."""

from __future__ import annotations

import pytest

from forebay.estimate.step_time import Clock, KernelTime
from forebay.estimate.types import OpCost
from tests.estimate.plain_device import device


def test_an_operation_is_as_long_as_the_slower_of_its_two_limits() -> None:
    """1e6 FLOP/s, 1e3 bytes/s."""
    clock = Clock(device())
    assert clock.seconds(OpCost("gemm", 5_000_000, 1000)) == pytest.approx(5)
    assert clock.seconds(OpCost("gemm", 5_000_000, 7000)) == pytest.approx(7)
    assert clock.seconds(OpCost("pointwise", 0, 3000)) == pytest.approx(3)


def test_each_kind_has_its_rate() -> None:
    rates = {"grouped": 1e6, "grouped_weights": 2e6, "attention": 4e6, "attention_backward": 8e6}
    clock = Clock(device(**rates))
    assert [clock.seconds(OpCost(kind, 8_000_000, 0)) for kind in rates] == pytest.approx([8, 4, 2, 1])
    wide = Clock(device(matmul_fp32=1e5, **rates), wide=True)
    assert wide.seconds(OpCost("grouped", 8_000_000, 0)) == pytest.approx(80)


def test_what_is_walked_is_slower_by_the_measured_share() -> None:
    """fp32 [32768, 2048] into bf16: 0.27 ms of torch's loop, 0.10 of a kernel that moves 16 bytes a thread."""
    clock = Clock(device())
    slow, fast = (clock.seconds(OpCost(kind, 0, 32768 * 2048 * 6)) for kind in ("unvectorized", "pointwise"))
    assert slow / fast == pytest.approx(0.27 / 0.10, rel=0.02)


def test_a_product_of_odd_rows_is_slower_unless_memory_holds_it_up() -> None:
    clock = Clock(device())
    even, odd = (clock.seconds(OpCost(kind, 10**6, 10)) for kind in ("gemm", "gemm_unaligned"))
    assert odd > 10 * even
    assert clock.seconds(OpCost("gemm_unaligned", 10**6, 10**6)) == pytest.approx(1000)


def test_kernels_have_gaps() -> None:
    assert Clock(device(kernel=0.5)).seconds(OpCost("pointwise", 0, 1000, launches=4)) == pytest.approx(1 + 4 * 0.5)


def test_an_exchange_goes_over_its_own_link() -> None:
    """Of 16 ranks, 8 a node, 7 of 15 others are on the same node."""
    slow = device(node=8, all_to_all_between=1e3)
    assert Clock(slow, ranks=8).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4e-3, rel=1e-3)
    assert Clock(slow, ranks=16).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4 * 8 / 15)
    lopsided = device(node=8, all_to_all=1e3, all_to_all_between=1e6)
    assert Clock(lopsided, ranks=16).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4 * 7 / 15)
    assert Clock(device(kernel=1.0)).seconds(OpCost("all_to_all", 0, 0)) == 0


def test_shares_of_a_spell() -> None:
    ops = [OpCost("gemm", 10**6, 0), OpCost("all_to_all", 0, 2 * 10**6), OpCost("grouped_weights", 3 * 10**6, 0, 2)]
    time = Clock(device()).kernel_time(ops)
    assert (time.compute, time.all_to_all, time.weight_grads) == pytest.approx((1, 2, 3))
    assert (time.launches, time.computing, time.alone) == pytest.approx((4, 4, 6))
    assert time + time == KernelTime(2 * time.compute, 2 * time.all_to_all, 2 * time.weight_grads, 8)
