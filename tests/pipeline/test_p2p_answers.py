"""A message shows that others have arrived: never one that has not, whatever the ranks' speeds, and soon."""

import random

import pytest

from forebay.pipeline.p2p import Message, confirmed_by
from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, PipelinePlan, make_plan

CASES = [
    (name, pp, microbatches)
    for name in ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
    for pp in (2, 4)
    for microbatches in (8, 16)
]


def needs_and_makes(plan: PipelinePlan, rank: int) -> list[tuple[list[Message], list[tuple[Message, int]]]]:
    """Of each action: the messages it takes, and those it makes, with their receivers."""
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


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_what_is_let_go_of_has_arrived(name: str, pp: int, microbatches: int) -> None:
    plan = make_plan(name, pp, microbatches)
    work = {rank: needs_and_makes(plan, rank) for rank in range(pp)}
    told = {rank: confirmed_by(plan, rank) for rank in range(pp)}
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
                for over in told[rank].get(message, ()):
                    assert over in taken, f"{over} is on its way still when {message} comes"
                    held[rank].remove(over)
            for message, _ in makes:
                sent.add(message)
                held[rank].add(message)
            most = max(most, *map(len, held.values()))
            place[rank] += 1
        # At the end little is left: what nobody had to answer.
        assert max(map(len, held.values())) <= 3 * pp
        assert most <= 4 * pp


def test_a_rank_alone_has_nothing_to_tell() -> None:
    assert confirmed_by(make_plan("1f1b", 1, 4), 0) == {}
