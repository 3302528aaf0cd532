"""Plans run every microbatch once on every stage, in an order that can be carried out; turns hide transfers."""

from itertools import pairwise, product

import pytest

from forebay.config import SCHEDULES
from forebay.pipeline.schedule import Action, PipelinePlan, forward_plan, local_plan, make_plan, turns, turns_of_stages

CASES = [(name, pp, factor * pp) for name, pp, factor in product(SCHEDULES, (1, 2, 3, 4), (2, 4))]
LISTS = [[bool(b) for b in bits] for n in range(1, 5) for bits in product((0, 1), repeat=n)]


def carried_out(plan: PipelinePlan) -> None:
    """Runs the plan; a message must have been sent before it is received."""
    left = [list(actions) for actions in plan.actions]
    last = len(plan.ranks) - 1
    done: set[tuple[str, int, int]] = set()
    before = {"W": ("I", 0), "SEND_F": ("F", 0), "SEND_B": ("B", 0), "RECV_F": ("SEND_F", -1), "RECV_B": ("SEND_B", 1)}

    def needs(action: Action) -> set[tuple[str, int, int]]:
        s, m = action.stage, action.microbatch
        if action.parts:
            return set().union(*map(needs, action.parts))
        if action.kind in before:
            kind, step = before[action.kind]
            return {(kind, s + step, m)}
        backward = action.kind != "F"
        other = s + 1 if backward else s - 1
        found = {("F", s, m)} if backward else set()
        if 0 <= other <= last:
            kind = "B" if backward else "F"
            found.add((kind, other, m) if plan.ranks[other] == plan.ranks[s] else (f"RECV_{kind}", s, m))
        return found

    while ready := [actions for actions in left if actions and needs(actions[0]) <= done]:
        for actions in ready:
            action = actions.pop(0)
            for a in action.parts or (action,):
                assert (a.kind, a.stage, a.microbatch) not in done
                done |= {(kind, a.stage, a.microbatch) for kind in {a.kind, "B" if a.kind == "I" else a.kind}}
    assert not any(left), "the plan cannot be carried out"


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_a_plan_runs_everything_once(name: str, pp: int, microbatches: int) -> None:
    plan = make_plan(name, pp, microbatches)
    carried_out(plan)
    for stage, rank in enumerate(plan.ranks):
        ran = [a for a in plan.computations(rank) if a.stage == stage]
        for kinds in ("F", "BI", "BW"):
            assert [a.microbatch for a in ran if a.kind in kinds] == list(range(microbatches))
    # Each direction between two ranks is a queue: sends and receives of a pair are in one order.
    for kind, step in (("F", 1), ("B", -1)):
        for a, b in {(x, y) for x, y in pairwise(plan.ranks)} | {(y, x) for x, y in pairwise(plan.ranks)}:
            sends = (x for x in plan.actions[a] if x.kind == f"SEND_{kind}" and plan.ranks[x.stage + step] == b)
            receives = (x for x in plan.actions[b] if x.kind == f"RECV_{kind}" and plan.ranks[x.stage - step] == a)
            sent = [(x.stage + step, x.microbatch) for x in sends]
            assert sent == [(x.stage, x.microbatch) for x in receives]
    forward = forward_plan(plan)
    carried_out(forward)
    assert {a.kind for actions in forward.actions for a in actions} <= {"F", "SEND_F", "RECV_F"}
    for stage, rank in enumerate(plan.ranks):
        assert [a.microbatch for a in forward.computations(rank) if a.stage == stage] == list(range(microbatches))


def test_a_single_rank_runs_in_turn_or_each_forward_with_the_backward_before() -> None:
    for microbatches, overlap in product((1, 2, 5), (False, True)):
        plan = local_plan(microbatches, overlap)
        carried_out(plan)
        assert plan.stages(0) == (0,) and plan.microbatches == microbatches
    in_turn, together = (local_plan(3, overlap).actions[0] for overlap in (False, True))
    assert [str(a) for a in in_turn] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert [[str(part) for part in a.each] for a in together] == [["0F0"], ["0F1", "0B0"], ["0F2", "0B1"], ["0B2"]]
    with pytest.raises(ValueError, match="no microbatches"):
        local_plan(0, True)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_weights_are_early_before_a_rank_waits_for_another_one(pp: int) -> None:
    plan, late = (make_plan("dualpipev", pp, 4 * pp, weights_early=early) for early in (True, False))
    assert all({"OVERLAP_F_B", "W"} <= {a.kind for a in actions} for actions in plan.actions)
    assert (plan.actions != late.actions) == (pp > 2)  # on two ranks they are early anyway
    carried_out(plan)
    for rank, (actions, others) in enumerate(zip(plan.actions, late.actions, strict=True)):
        assert sorted(map(str, actions)) == sorted(map(str, others))
        assert [a for a in actions if a.kind != "W"] == [a for a in others if a.kind != "W"]
        left: list[Action] = []
        for action in actions:
            if action.kind in ("B", "I") and plan.ranks[(action.stage + 1) % len(plan.ranks)] != rank:
                assert not left, f"rank {rank} waits before {action} with {left}"
            if action.kind == "I":
                left.append(Action("W", action.stage, action.microbatch))
            elif action.kind == "W":
                left.remove(action)
        for stage in plan.stages(rank):  # sums are made in the order of microbatches
            made = [a.microbatch for a in plan.computations(rank) if a.stage == stage and a.kind in ("B", "W")]
            assert made == sorted(made)


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "message"),
    [
        ("zero-bubble", 2, 4, "zero-bubble.*unknown"),
        ("1f1b", 4, 3, "3 microbatches"),
        ("dualpipev", 2, 3, "3 microbatches"),
        ("interleaved-1f1b", 2, 5, "5 microbatches"),
    ],
)
def test_refusals(name: str, pp: int, microbatches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(name, pp, microbatches)


def test_turns_run_every_computation() -> None:
    for forward, backward in product(LISTS, LISTS):
        order = turns(forward, backward)
        assert order.count("F") == sum(2 if e else 1 for e in forward)
        assert order.count("B") == sum(3 if e else 1 for e in backward)
        assert order[0] == "F"


@pytest.mark.parametrize(("forward", "backward"), [(n, m) for n in range(1, 7) for m in range(1, 7)])
def test_turns_hide_transfers(forward: int, backward: int) -> None:
    """MoE layers only: between two forward computations there is a backward's, and before the first of each backward layer
    a forward's, whenever there are enough of them."""
    text = "".join(turns([True] * forward, [True] * backward))
    if 2 * forward <= 3 * backward:
        assert "FF" not in text
    if 2 * forward >= backward:
        places = [i for i, c in enumerate(text) if c == "B"][::3]
        assert all(text[i - 1] == "F" for i in places)
    if (forward, backward) == (2, 2):
        assert text == "FBBFBFBBFB"  # the example in the docstring


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("forward", [[True], [False, True], [True] * 3])
@pytest.mark.parametrize("backward", [[True], [True, False], [True] * 4])
def test_a_stage_s_output_is_taken_one_computation_after_its_last(
    forward: list[bool], backward: list[bool], head: bool
) -> None:
    order = turns_of_stages(forward, backward, head)
    *before, last, taken = [n for n, turn in enumerate(order) if turn == "F"]
    assert len(before) + 1 == sum(2 if experts else 1 for experts in forward) + head
    assert order.count("B") == sum(3 if experts else 1 for experts in backward)
    assert taken == last + (2 if order[-1] == "B" or order[last + 1] == "B" else 1)
