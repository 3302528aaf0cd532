"""Gathering, reducing and adding up, in seconds counted by hand on a device of round figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.estimate.state import Sharing
from forebay.estimate.step_time import Elements, KernelTime, ShardingTime, StepOverhead
from tests.estimate.plain_device import device

# Memory of 1000 bytes/s; links of 10 bytes/s.
DEVICE = device(all_gather=10, reduce_scatter=10)
FOUR = Sharing(data=4, sharded=True, parameter=4, compute=2, summed=4)
PART = Elements(1000)
COPIED = (250 * 6 + 2 * 1000 * 2) / 1000  # the own quarter is cast, and what arrives is copied
SENT = 1000 * 2 * 3 / 4 / 10
REDUCED = (2 * 1000 * 4 + 250 * 8) / 1000
REDUCED_SENT = 1000 * 4 * 3 / 4 / 10
ADDED = 1000 * (2 + 2 * 4) / 1000
ADDED_IN_PLACE = 1000 * (2 * 4 - 2) / 1000  # where it is made: what its product would have written is not
FIRST = 1000 * (2 + 4) / 1000  # the first microbatch's become the sum
ZEROS = 1000 * 4 / 1000
LONG = KernelTime(1e6)


def test_an_engine_gathers_and_reduces_once_a_step_and_nothing_hides_it() -> None:
    shared = ShardingTime(DEVICE, replace(FOUR, gathered=True, reshard=False), 8)
    found = shared.step([PART, PART], Elements(0), 0, fused=True, clips=False)
    assert found == StepOverhead(
        pytest.approx(2 * (COPIED + SENT + ZEROS)), pytest.approx(2 * (REDUCED + REDUCED_SENT)), 0
    )
    assert shared.layer(PART, LONG, LONG) == pytest.approx((0, ADDED))


def test_an_engine_that_gives_experts_back_gathers_them_for_each_use() -> None:
    """Experts of this process alone: a gather to itself is a cast and two more copies."""
    shared = ShardingTime(DEVICE, replace(FOUR, ep=4, gathered=True, reshard=True), 8)
    again = 1000 * (6 + 2 * 2 * 2) / 1000
    assert shared.layer(Elements(0, 1000), LONG, LONG) == pytest.approx((again, again + ADDED_IN_PLACE))
    found = shared.step([Elements(1000, 1000)], Elements(0), 0, fused=True, clips=False)
    assert found.gather == pytest.approx(COPIED + SENT + 2 * ZEROS)
    # Their gradients are in the shards' dtype already: nothing to reduce and nothing to cast.
    assert found.reduce == pytest.approx(REDUCED + REDUCED_SENT)


def test_without_an_engine_a_layer_hides_the_links() -> None:
    """Each microbatch gathers for its forward and again for its backward; gradients are reduced once."""
    shared = ShardingTime(DEVICE, FOUR, 8)
    forward, backward = shared.layer(PART, LONG, LONG)
    assert forward == pytest.approx(COPIED)
    assert backward == pytest.approx(COPIED + (ADDED * 7 + FIRST + REDUCED) / 8)
    forward, _ = shared.layer(PART, KernelTime(100), LONG)
    assert forward == pytest.approx(COPIED + SENT - 100)


def test_what_hides_a_link_takes_longer_by_a_share_of_it() -> None:
    shared = ShardingTime(device(all_gather=10, reduce_scatter=10, contention=0.5), FOUR, 8)
    forward, backward = shared.layer(PART, LONG, LONG)
    assert forward == pytest.approx(COPIED + SENT / 2)
    assert backward == pytest.approx(COPIED + SENT / 2 + (ADDED * 7 + FIRST + REDUCED + REDUCED_SENT / 2) / 8)
    forward, _ = shared.layer(PART, KernelTime(100), LONG)
    assert forward == pytest.approx(COPIED + SENT - 100 + 50)


def test_gradients_of_embedding_and_head_are_added_up_too() -> None:
    """Of 4 microbatches the last 3, in bf16: each reads two gradients and writes one."""
    shared = ShardingTime(DEVICE, Sharing(parameter=2, compute=2, summed=4), 4)
    assert shared.step([PART], Elements(500), 0, fused=True, clips=False).reduce == pytest.approx(3 * 500 * 6 / 1000)
    found = ShardingTime(DEVICE, FOUR, 8).step([PART], Elements(1000), 0, fused=True, clips=False)
    assert found.reduce == pytest.approx(7 * ADDED + FIRST + REDUCED + REDUCED_SENT)


def test_weights_that_stay_are_gathered_once() -> None:
    forward, backward = ShardingTime(DEVICE, replace(FOUR, reshard=False), 8).layer(PART, LONG, LONG)
    assert forward == pytest.approx(COPIED / 8)
    assert backward == pytest.approx((ADDED * 7 + FIRST + REDUCED) / 8)


def test_reducing_each_microbatch_adds_nothing_up() -> None:
    _, backward = ShardingTime(DEVICE, replace(FOUR, sums=False), 8).layer(PART, LONG, LONG)
    assert backward == pytest.approx(COPIED + REDUCED)


def test_one_process_adds_up_and_gathers_nothing() -> None:
    shared = ShardingTime(DEVICE, Sharing(parameter=2, compute=2, summed=4), 4)
    assert shared.layer(PART, LONG, LONG) == pytest.approx((0, 3 / 4 * 1000 * 6 / 1000))
    assert shared.step([PART], Elements(0), 0, fused=True, clips=False) == StepOverhead(0, 0, 0)


def test_links_between_nodes() -> None:
    slow = device(node=2, all_gather=10, all_gather_between=1, reduce_scatter=10, reduce_scatter_between=1)
    found = ShardingTime(slow, replace(FOUR, gathered=True, reshard=False), 1).step([PART], Elements(0), 0, True, False)
    assert found.gather == pytest.approx(COPIED + 10 * SENT + ZEROS)
    assert found.reduce == pytest.approx(REDUCED + 10 * REDUCED_SENT)


def test_the_optimizer_reads_four_and_writes_three() -> None:
    """And the norm reads gradients once more, clipping reads and writes them: 8 or 10 passes, a little slower than copies."""
    shared = ShardingTime(DEVICE, Sharing(), 1)
    plain, clipped = (shared.step([], Elements(0), 1000, fused=True, clips=c).optimizer for c in (False, True))
    assert clipped / plain == pytest.approx(10 / 8)
    assert 8 < plain < 8 / 0.8
