"""Messages between ranks: what an arrival confirms, whatever the ranks' speeds, and buffers that are reused during capture."""

import random
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from forebay.config import SCHEDULES
from forebay.pipeline.p2p import DistLinks, Message, confirmed_by
from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, PipelinePlan, make_plan
from tests.ranks import run_ranks


def needs_and_makes(plan: PipelinePlan, rank: int) -> list[tuple[list[Message], list[tuple[Message, int]]]]:
    """For each action: the messages that it takes, and those that it makes, with their receivers."""
    found = []
    last = len(plan.ranks) - 1
    for action in plan.actions[rank]:
        takes, makes = [], []
        for part in action.parts or (action,):
            if part.kind == FORWARD:
                takes += [Message("F", part.stage, part.microbatch)] if part.stage else []
                makes += [Message("F", part.stage + 1, part.microbatch)] if part.stage < last else []
            elif part.kind in (BACKWARD, BACKWARD_INPUT):
                takes += [Message("B", part.stage, part.microbatch)] if part.stage < last else []
                makes += [Message("B", part.stage - 1, part.microbatch)] if part.stage else []
        others = [(m, plan.ranks[m.stage]) for m in makes if plan.ranks[m.stage] != rank]
        found.append(([m for m in takes if maker(plan, m) != rank], others))
    return found


def maker(plan: PipelinePlan, message: Message) -> int:
    return plan.ranks[message.stage - 1 if message.kind == "F" else message.stage + 1]


@pytest.mark.parametrize(("name", "pp", "microbatches"), [*product(SCHEDULES, (2, 4), (8, 16))])
def test_what_is_released_has_arrived(name: str, pp: int, microbatches: int) -> None:
    plan = make_plan(name, pp, microbatches)
    work = {rank: needs_and_makes(plan, rank) for rank in range(pp)}
    confirmed = {rank: confirmed_by(plan, rank) for rank in range(pp)}
    for seed in range(5):
        chance, place, sent, taken = random.Random(seed), dict.fromkeys(range(pp), 0), set(), set()
        held: dict[int, set[Message]] = {rank: set() for rank in range(pp)}
        most = 0
        # Ranks that race ahead and ranks that lag: one of those that can go on does.
        while any(place[r] < len(work[r]) for r in range(pp)):
            able = [r for r in range(pp) if place[r] < len(work[r]) and sent.issuperset(work[r][place[r]][0])]
            rank = chance.choice(able[:1] if seed == 0 else able[-1:] if seed == 1 else able)
            takes, makes = work[rank][place[rank]]
            taken.update(takes)
            for message in takes:
                for over in confirmed[rank].get(message, ()):
                    assert over in taken, f"{over} is still in transit at {message}"
                    held[rank].remove(over)
            for message, _ in makes:
                sent.add(message)
                held[rank].add(message)
            most = max(most, *map(len, held.values()))
            place[rank] += 1
        # At the end few are left: those that no message had to confirm.
        assert max(map(len, held.values())) <= 3 * pp
        assert most <= 4 * pp
    assert confirmed_by(make_plan(name, 1, 4), 0) == {}


ROUNDS = 5


def back_and_forth(rank: int, world: int, capturing: bool) -> dict[str, Any]:
    """Rank 0 sends, rank 1 replies; two messages are in transit at once. Received packets are kept and compared at the end."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    confirmed = {Message("B", 1, m): [Message("F", 2, m)] for m in range(ROUNDS)}
    links = DistLinks(group, [(0, 1), (1, 0)], torch.device("cpu"), [[0, 1]], confirmed if rank == 0 else {})
    like = [torch.empty(3, 4, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")]
    generator = torch.Generator().manual_seed(7)
    sent = [(torch.randn(3, 4, generator=generator).t().contiguous().t(), torch.arange(2) + m) for m in range(ROUNDS)]
    buffers: set[int] = set()
    original = DistLinks._buffer

    def noting(it: Any, wanted: Any) -> torch.Tensor:
        found = original(it, wanted)
        buffers.add(found.data_ptr())
        return found

    arrived = []
    with (
        mock.patch.object(DistLinks, "_capturing", lambda _: capturing),
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
        own = not any(t.data_ptr() in buffers for packet in arrived for t in packet)
    wanted = [(2 * x, ids + 1) for x, ids in sent] if rank == 0 else sent
    right = all(
        torch.equal(a, b) for got, to in zip(arrived, wanted, strict=True) for a, b in zip(got, to, strict=True)
    )
    return {"right": right, "buffers": len(buffers), "own": own, "left": len(links._sent) + len(links._buffers)}


@pytest.mark.parametrize("capturing", [False, True])
def test_buffers_are_reused_during_capture_and_packets_are_the_callers(capturing: bool) -> None:
    zero, one = run_ranks(back_and_forth, 2, capturing)
    assert zero["right"] and one["right"] and zero["left"] == one["left"] == 0
    if capturing:
        assert zero["own"] and one["own"]
        # Two shapes. Rank 0 sends while it expects; rank 1 reuses the buffer it received into, and gets no confirmation.
        assert zero["buffers"] == 4 and one["buffers"] == 2 * ROUNDS
    else:
        assert zero["buffers"] == one["buffers"] == 0
