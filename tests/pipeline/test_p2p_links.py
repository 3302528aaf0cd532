"""Packets in a capture go through boxes that are used again, and are the caller's own. A CPU says that it captures."""

from typing import Any
from unittest import mock

import pytest
import torch

from forebay.pipeline.p2p import DistLinks, Message
from tests.ranks import run_ranks

ROUNDS = 5


def back_and_forth(rank: int, world: int, captured: bool) -> dict[str, Any]:
    """Rank 0 sends, rank 1 answers; two messages are on their way at once. What arrives is kept, written to, and compared at the
    end."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    there = {Message("B", 1, m): [Message("F", 2, m)] for m in range(ROUNDS)}
    links = DistLinks(group, [(0, 1), (1, 0)], torch.device("cpu"), [[0, 1]], there if rank == 0 else {})
    like = [torch.empty(3, 4, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")]
    generator = torch.Generator().manual_seed(7)
    sent = [(torch.randn(3, 4, generator=generator).t().contiguous().t(), torch.arange(2) + m) for m in range(ROUNDS)]
    boxes: set[int] = set()
    box = DistLinks._buffer

    def noting(it: Any, wanted: Any) -> torch.Tensor:
        found = box(it, wanted)
        boxes.add(found.data_ptr())
        return found

    arrived = []
    with (
        mock.patch.object(DistLinks, "_capturing", lambda _: captured),
        mock.patch.object(DistLinks, "_buffer", noting),
    ):
        for m in range(ROUNDS):
            if rank == 0:
                links.expect(Message("B", 1, m), 1, like)
                links.send(Message("F", 2, m), 1, sent[m])
                arrived.append(links.receive(Message("B", 1, m)))
            else:
                links.expect(Message("F", 2, m), 0, like)
                x, ids = links.receive(Message("F", 2, m))
                arrived.append((x, ids))
                links.send(Message("B", 1, m), 0, (2 * x, ids + 1))
        links.finish()
        own = not any(t.data_ptr() in boxes for packet in arrived for t in packet)
    wanted = [(2 * x, ids + 1) for x, ids in sent] if rank == 0 else sent
    right = all(
        torch.equal(a, b) for got, to in zip(arrived, wanted, strict=True) for a, b in zip(got, to, strict=True)
    )
    return {"right": right, "boxes": len(boxes), "own": own, "left": len(links._sent) + len(links._buffers)}


@pytest.mark.parametrize("captured", [False, True])
def test_boxes_are_used_again_and_packets_are_the_callers(captured: bool) -> None:
    zero, one = run_ranks(back_and_forth, 2, captured)
    assert zero["right"] and one["right"] and zero["left"] == one["left"] == 0
    if captured:
        assert zero["own"] and one["own"]
        # Of two shapes. Rank 0 sends while it expects; rank 1 sends in the box that it received into, and hears of no arrival.
        assert zero["boxes"] == 4 and one["boxes"] == 2 * ROUNDS
    else:
        assert zero["boxes"] == one["boxes"] == 0
