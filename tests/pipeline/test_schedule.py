"""Plans: every stage runs every microbatch once, in an order that can be carried out, and torch's refusals are ours."""

from itertools import pairwise

import pytest

from forebay.pipeline.schedule import Action, PipelinePlan, forward_plan, make_plan

CASES = [
    (name, pp, microbatches)
    for name in ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
    for pp in (1, 2, 3, 4)
    for microbatches in (2 * pp, 4 * pp)
]


def carried_out(plan: PipelinePlan) -> list[str]:
    """Runs the plan with messages that must have been sent before they are received; what ran, in the order of completion."""
    places = [0] * len(plan.actions)
    last = len(plan.ranks) - 1
    done: set[tuple[str, int, int]] = set()
    ran: list[str] = []

    def needs(action: Action) -> set[tuple[str, int, int]]:
        s, m = action.stage, action.microbatch
        local_before = s > 0 and plan.ranks[s - 1] == plan.ranks[s]
        local_behind = s < last and plan.ranks[s + 1] == plan.ranks[s]
        match action.kind:
            case "F":
                return set() if s == 0 else {("F", s - 1, m) if local_before else ("RECV_F", s, m)}
            case "B" | "I":
                return {("F", s, m)} | (set() if s == last else {("B", s + 1, m) if local_behind else ("RECV_B", s, m)})
            case "W":
                return {("I", s, m)}
            case "SEND_F":
                return {("F", s, m)}
            case "SEND_B":
                return {("B", s, m)}
            case "RECV_F":
                return {("SEND_F", s - 1, m)}
            case "RECV_B":
                return {("SEND_B", s + 1, m)}
        return set().union(*(needs(a) for a in action.parts))

    progress = True
    while progress:
        progress = False
        for rank, place in enumerate(places):
            if place < len(plan.actions[rank]):
                action = plan.actions[rank][place]
                # A receive may be made ready before it was sent; what needs it may not run.
                if action.kind.startswith("RECV") or needs(action) <= done:
                    if action.kind.startswith("RECV") and not needs(action) <= done:
                        continue
                    for a in action.parts or (action,):
                        assert (a.kind, a.stage, a.microbatch) not in done
                        done.add((a.kind, a.stage, a.microbatch))
                        if a.kind == "I":
                            done.add(("B", a.stage, a.microbatch))
                    ran.append(str(action))
                    places[rank] += 1
                    progress = True
    assert places == [len(a) for a in plan.actions], "the plan cannot be carried out"
    return ran


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_a_plan_runs_everything_once(name: str, pp: int, microbatches: int) -> None:
    plan = make_plan(name, pp, microbatches)
    carried_out(plan)
    for stage, rank in enumerate(plan.ranks):
        ran = [a for a in plan.computations(rank) if a.stage == stage]
        for kinds in ("F", "BI", "BW"):
            assert [a.microbatch for a in ran if a.kind in kinds] == list(range(microbatches))


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_sends_and_receives_of_a_pair_are_in_one_order(name: str, pp: int, microbatches: int) -> None:
    """Each direction between two ranks is a queue."""
    plan = make_plan(name, pp, microbatches)
    for kind, step in (("F", 1), ("B", -1)):
        for a, b in {(x, y) for x, y in pairwise(plan.ranks)} | {(y, x) for x, y in pairwise(plan.ranks)}:
            sent = [
                (x.stage + step, x.microbatch)
                for x in plan.actions[a]
                if x.kind == f"SEND_{kind}" and plan.ranks[x.stage + step] == b
            ]
            got = [
                (x.stage, x.microbatch)
                for x in plan.actions[b]
                if x.kind == f"RECV_{kind}" and plan.ranks[x.stage - step] == a
            ]
            assert sent == got


def test_dualpipev_overlaps_and_defers() -> None:
    plan = make_plan("dualpipev", 2, 8)
    kinds = [{a.kind for a in actions} for actions in plan.actions]
    assert all("OVERLAP_F_B" in k and "W" in k for k in kinds)
    assert plan.ranks == (0, 1, 1, 0)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_weights_are_early_before_a_rank_waits_for_another_one(pp: int) -> None:
    plan, late = (make_plan("dualpipev", pp, 4 * pp, weights_early=early) for early in (True, False))
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


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_forward_only(name: str, pp: int, microbatches: int) -> None:
    plan = forward_plan(make_plan(name, pp, microbatches))
    carried_out(plan)
    assert {a.kind for actions in plan.actions for a in actions} <= {"F", "SEND_F", "RECV_F"}


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "said"),
    [
        ("zero-bubble", 2, 4, "zero-bubble.*unknown"),
        ("1f1b", 4, 3, "3 microbatches"),
        ("dualpipev", 2, 3, "3 microbatches"),
        ("interleaved-1f1b", 2, 5, "5 microbatches"),
    ],
)
def test_refusals(name: str, pp: int, microbatches: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(name, pp, microbatches)
