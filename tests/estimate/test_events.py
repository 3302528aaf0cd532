"""The events of a part from logs written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.estimate.events import cut_nearest, head_events, part_events, split_backward
from forebay.estimate.types import Freed, Mark, NewStorage, Op, PartEvents

NONE = frozenset[int]()


def op(reads: tuple[int, ...] = (), *made: tuple[int, int], fused: bool = False, of: frozenset[int] = NONE) -> Op:
    return Op(fused, reads, tuple(NewStorage(n, size, fused, of or frozenset([n])) for n, size in made))


# x=0 -> a=1 (fused) -> b=2 (GEMM, reads 1) -> c=3 (fused) -> d=4 (fused, reads 3) -> output=5 (GEMM, reads 4)
FORWARD: list[Any] = [
    op((0,), (1, 10), fused=True, of=frozenset([0])),
    op((1,), (2, 20)),
    op((2,), (3, 30), fused=True, of=frozenset([2])),
    op((3,), (4, 40), fused=True, of=frozenset([2])),
    Freed(3),
    op((4,), (5, 50)),
]
# The weight's gradient reads d, then da = 8; c's derivative is fused with what reads it; the other weight's reads a; dx = 12.
BACKWARD: list[Any] = [
    op((6, 4), (7, 5)),
    Freed(7),
    op((6,), (8, 40)),
    Freed(6),
    Freed(4),
    op((8, 2), (9, 30), fused=True, of=frozenset([6])),
    Freed(8),
    op((9, 2), (10, 20), fused=True, of=frozenset([6])),
    Freed(9),
    Freed(2),
    op((10, 1), (11, 5)),
    Freed(11),
    Freed(1),
    op((10,), (12, 10)),
    Freed(10),
]


def test_an_uncompiled_part_follows_its_log() -> None:
    named = PartEvents(0, 5, 6, 12, (7, 11), frozenset([1, 2, 4]), NONE)
    no_grad: list[Any] = [op((0,), (20, 10)), op((20,), (21, 20)), Freed(20), op((21,), (22, 50)), Freed(21)]
    found = part_events(FORWARD, BACKWARD, named, False, no_grad)
    assert found.forward == ((1, 10), (2, 20), (3, 30), (4, 40), (3, 0), (5, 50))
    assert [e for e in found.backward if e[1]] == [(7, 5), (8, 40), (9, 30), (10, 20), (11, 5), (12, 10)]
    assert not found.saves_x and found.weight_grads == (7, 11)
    # A forward without a graph has numbers of its own, except for the output.
    assert found.forward_no_grad == ((20, 10), (21, 20), (20, 0), (5, 50), (21, 0))


def test_a_compiled_part_materializes_what_its_gemms_read() -> None:
    """c is fused into d; a and d are made for the GEMMs and dropped; x and b stay saved. In backward d is recomputed
    for the weight's gradient, da's consumer is fused, and a is recomputed for the other weight's."""
    found = part_events(FORWARD, BACKWARD, PartEvents(0, 5, 6, 12, (7, 11), frozenset([0, 2]), NONE), compiled=True)
    assert found.forward == ((1, 10), (2, 20), (1, 0), (4, 40), (5, 50), (4, 0))
    assert found.saves_x
    # da = 8; the kernel that makes d again and 10, both from b, which is freed then, and computes 9; d's product; a again from x,
    # its gradient, dx. Gradients of weights leave the graph when it is over.
    assert found.backward == (
        (8, 40), (4, 40), (10, 20), (8, 0), (2, 0), (7, 5), (6, 0), (4, 0),
        (1, 10), (0, 0), (11, 5), (1, 0), (12, 10), (10, 0), (7, 0), (11, 0),
    )  # fmt: skip


def test_a_storage_that_two_gemms_read_is_recomputed_once() -> None:
    log: list[Any] = [op((6, 1), (7, 5)), op((6, 1), (8, 5))]
    found = part_events(FORWARD, log, PartEvents(0, 5, 6, -1, (7, 8), (0, 2), NONE), compiled=True)
    assert found.backward == ((2, 0), (1, 10), (0, 0), (7, 5), (8, 5), (6, 0), (1, 0), (7, 0), (8, 0))


def test_marks_stay_around_transfers() -> None:
    log: list[Any] = [
        op((0,), (1, 8)),
        Mark.ALL_TO_ALL_BEGIN,
        op((1,), (2, 8)),
        Mark.ALL_TO_ALL_END,
        Freed(1),
        op((2,), (3, 8)),
    ]
    found = part_events(log, [], PartEvents(0, 3, -1, -1, (), frozenset([2]), frozenset([2])), compiled=False)
    assert found.forward == ((1, 8), (-1, Mark.ALL_TO_ALL_BEGIN), (2, 8), (-1, Mark.ALL_TO_ALL_END), (1, 0), (3, 8))
    assert found.backward == ((2, 0),)  # its free is not in the log


def test_one_kernel_recomputes_all_that_comes_from_the_same_storages() -> None:
    """d, and a copy of it that another GEMM reads later, come from b: both are made when the first of them is needed."""
    forward = [
        op((0,), (1, 10)),
        op((1,), (2, 20)),
        op((2,), (4, 40), fused=True, of=frozenset([2])),
        op((4,), (5, 50), fused=True, of=frozenset([2])),
        op((4, 5), (6, 60)),
    ]
    backward: list[Any] = [op((7, 4), (8, 5)), op((7, 5), (9, 5))]
    found = part_events(forward, backward, PartEvents(0, 6, 7, -1, (8, 9), (2,), NONE), compiled=True)
    assert [e for e in found.backward if e[1]] == [(4, 40), (5, 50), (8, 5), (9, 5)]


def test_experts_between_pieces_save_what_they_read_as_it_is() -> None:
    """The norm's result 1, which compiled code could make from x, is held for the experts' backward and freed by it. The piece
    before them makes it again for a GEMM of its own."""
    begin, end = Mark.EXPERTS_BEGIN, Mark.EXPERTS_END
    forward: list[Any] = [
        op((0,), (1, 10), fused=True, of=frozenset([0])),
        op((1,), (2, 20)),
        begin,
        op((1,), (5, 50)),
        end,
    ]
    backward: list[Any] = [begin, op((6, 1), (7, 70)), end, op((1, 7), (8, 5)), Freed(8), op((7,), (12, 10)), Freed(7)]
    named = PartEvents(0, 5, 6, 12, {8: "router"}, (0, 1), NONE)
    found = part_events(forward, backward, named, compiled=True)
    assert (1, 0) not in found.forward
    there = [event for event in found.backward if event[0] >= 0 and event[0] != 6]
    again = next(n for n, size in there if size == 10 and n != 12)
    assert there[:3] == [(7, 70), (1, 0), (again, 10)] and again not in (0, 1)
    assert (1, 10) not in there and (again, 0) in there


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_residual_sum_in_the_front_is_the_last_reader_of_x(shared: bool, compiled: bool) -> None:
    """Shared experts are added to it there; else combine reads it, which adds the experts' results."""
    residual = 2 if shared else 0
    begin, end = Mark.ALL_TO_ALL_BEGIN, Mark.ALL_TO_ALL_END
    forward: list[Any] = [
        op((0,), (1, 10)), op((0, 1), (2, 10)), begin, op((1,), (3, 30)), end, op((3,), (4, 30)),
        begin, op((4, residual), (5, 10)), end,
    ]  # fmt: skip
    named = PartEvents(0, 5, 6, -1, {}, (), frozenset({3, 5}))
    assert part_events(forward, [], named, compiled).front_x is shared
    assert not part_events(forward[:2], [], named, compiled).front_x


def test_dispatch_takes_memory_before_the_weight_gradients_that_hide_it() -> None:
    """Its result, 9, which autograd's order has after down's gradient, 8, and the rows for it, 7. What it sends, 6, is held."""
    begin, end = Mark.ALL_TO_ALL_BEGIN, Mark.ALL_TO_ALL_END
    backward: list[Any] = [
        op((5,), (6, 60)), Mark.WEIGHT_GRADS, op((5,), (7, 70)), op((7,), (8, 80)), Freed(7),
        begin, op((6,), (9, 90)), end, Freed(6), op((9,), (12, 10)), Freed(9),
    ]  # fmt: skip
    named = PartEvents(0, 4, 5, 12, {8: "down"}, (), frozenset({9}))
    found = part_events([op((0,), (4, 40))], backward, named, compiled=False).backward
    assert [n for n, size in found if n >= 0 and size] == [6, 9, 7, 8, 12]
    assert found.index((6, 0)) > found.index((-1, begin))
    undeferred = [entry for entry in backward if entry != Mark.WEIGHT_GRADS]
    found = part_events([op((0,), (4, 40))], undeferred, named, compiled=False).backward
    assert [n for n, size in found if n >= 0 and size] == [6, 7, 8, 9, 12]


@pytest.mark.parametrize("transferred", [False, True])
def test_what_waits_for_deferred_weight_gradients(transferred: bool) -> None:
    """Their gathered rows, 8 and 10, and frees of their operands: h, 2, the activation, 7, and the experts' rows and gradient,
    which are copies if they were transferred, else the sublayer's own. The order of marks stays."""
    begin, end, weights = ((-1, m) for m in (Mark.EXPERTS_BEGIN, Mark.EXPERTS_END, Mark.WEIGHT_GRADS))
    first = (begin, (7, 70), (6, 60))
    rows = ((8, 80), (9, 90), (8, 0), (7, 0), (9, 0), (10, 80), (11, 90), (10, 0), (2, 0), (11, 0))
    rest = ((12, 10), (1, 0), (6, 0), (5, 0))
    backward = (*first, weights, *rows[:4], end, rows[4], begin, *rows[5:8], end, *rows[8:], *rest)
    names = {9: "mlp.experts.down_proj", 11: "mlp.experts.gate_up_proj"}
    copies = frozenset({6} if transferred else ())
    events = PartEvents(0, 4, 5, 12, names, (1, 2), copies, experts_x=1, experts_h=2, backward=backward)
    now, later = split_backward(events)
    held = () if transferred else ((5, 0), (1, 0))
    assert now == (*first, weights, end, begin, end, *(e for e in rest if e not in held))
    assert later == (*rows, *held)
    assert split_backward(replace(events, backward=rest)) == (rest, ())


def test_the_piece_before_experts_has_an_order_of_its_own() -> None:
    """Shared experts: both gradients, 8 and 9, come from one kernel, which their products wait for. The experts come first."""
    begin, end = Mark.EXPERTS_BEGIN, Mark.EXPERTS_END
    forward: list[Any] = [op((0,), (1, 20)), op((0,), (2, 20)), begin, op((0,), (5, 50)), end]
    backward: list[Any] = [
        begin, op((6, 0), (7, 70)), end,
        op((6,), (10, 20)),
        op((10, 1, 2), (8, 20), fused=True, of=frozenset([10])),
        op((8,), (11, 5)), Freed(8),
        op((10, 1), (9, 20), fused=True, of=frozenset([10])), Freed(10),
        op((9,), (12, 10)), Freed(9),
    ]  # fmt: skip
    found = part_events(forward, backward, PartEvents(0, 5, 6, 12, {}, (0, 1, 2), NONE), compiled=True).backward
    made = [n for n, size in found if n >= 0 and size]
    assert made[:2] == [7, 10] and set(made[2:4]) == {8, 9}
    assert min(found.index((1, 0)), found.index((2, 0))) > max(found.index((8, 20)), found.index((9, 20)))


def test_the_gradients_of_experts_are_added_up_before_the_piece_before_them() -> None:
    """Those of compiled code after it: it is one node of autograd's graph."""
    begin, end = Mark.EXPERTS_BEGIN, Mark.EXPERTS_END
    backward: list[Any] = [
        begin, op((6,), (7, 70)), op((6,), (9, 30)), end, Freed(9),
        op((7, 0), (8, 20)), Freed(8), op((7,), (12, 10)), Freed(7),
    ]  # fmt: skip
    named = PartEvents(0, 5, 6, 12, {9: "gate_up", 8: "router"}, (0,), NONE)
    found = part_events([begin, op((0,), (5, 50)), end], backward, named, compiled=True).backward
    assert found.index((9, 0)) < found.index((8, 20))
    assert found.index((8, 0)) > found.index((12, 10))


def test_a_saved_storage_lives_until_the_last_kernel_of_a_fused_run() -> None:
    """8 is materialized, because it is no pointwise operation's, but the kernel that makes 9 makes it too and reads a = 1."""
    forward = [op((0,), (1, 10)), op((1,), (2, 20), fused=True, of=frozenset([1])), op((2,), (3, 30))]
    backward: list[Any] = [
        Op(True, (6, 2), (NewStorage(8, 80, False, NONE),)),
        op((8,), (9, 90), fused=True, of=frozenset([8])),
        op((9,), (12, 5)),
    ]
    found = part_events(forward, backward, PartEvents(0, 3, 6, 12, (), (1,), NONE), compiled=True)
    assert found.backward.index((1, 0)) > found.backward.index((9, 90))


def test_a_product_of_a_recomputed_tensor_waits_for_the_kernel_that_makes_it() -> None:
    """Eager attention: probabilities 2 come from the scores 1 again, in the kernel that makes the scores' gradient 9 of that of
    the probabilities 8. So all four are there at once, and v's gradient 7 is made afterwards. It is freed after the graph."""
    forward = [op((0,), (1, 20)), op((1,), (2, 20), fused=True, of=frozenset([1])), op((2,), (5, 5))]
    backward: list[Any] = [
        Mark.MATMUL, op((6, 2), (7, 5)), Freed(7),
        Mark.MATMUL, op((6,), (8, 20)),
        op((8, 2), (9, 20), fused=True, of=frozenset([8])), Freed(8),
        Mark.MATMUL, op((9, 0), (12, 10)), Freed(9),
    ]  # fmt: skip
    found = part_events(forward, backward, PartEvents(0, 5, 6, 12, {7: "v"}, (0, 1), NONE), compiled=True).backward
    assert [e for e in found if e[0] >= 0] == [
        (8, 20), (2, 20), (9, 20), (8, 0), (1, 0), (7, 5), (6, 0), (2, 0), (12, 10), (9, 0), (0, 0), (7, 0),
    ]  # fmt: skip


def test_a_kernel_that_needs_the_product_cannot_come_before_it() -> None:
    forward = [op((0,), (1, 20)), op((1,), (2, 20), fused=True, of=frozenset([1])), op((2,), (5, 5))]
    backward: list[Any] = [
        Mark.MATMUL,
        op((6, 2), (8, 20)),
        op((8, 2), (9, 20), fused=True),
        Mark.MATMUL,
        op((9,), (12, 10)),
    ]
    found = part_events(forward, backward, PartEvents(0, 5, 6, 12, {}, (0, 1), NONE), compiled=True).backward
    assert [e[0] for e in found if e[0] >= 0 and e[1]] == [2, 8, 9, 12]


@pytest.mark.parametrize("pieces", [False, True])
def test_the_gradient_of_gate_up_is_made_after_compiled_code(pieces: bool) -> None:
    """By another node of autograd's graph; where experts run between pieces of compiled code, at once."""
    reads = (6,)
    backward: list[Any] = [
        op((6,), (8, 5)), Op(False, reads, ()), Mark.GATE_UP_GRAD, Op(False, reads, (NewStorage(9, 70, False, NONE),)),
        Op(False, reads, ()), Freed(9), *[Mark.EXPERTS_END] * pieces, op((8,), (12, 10)),
    ]  # fmt: skip
    named = PartEvents(0, 5, 6, 12, {9: "gate_up"}, (), NONE)
    found = part_events(FORWARD, backward, named, True).backward
    assert [n for n, size in found if n >= 0 and size] == ([8, 9, 12] if pieces else [8, 12, 9])
    assert found.index((9, 0)) > found.index((9, 70))


def test_the_first_product_takes_the_workspace_after_its_result() -> None:
    log: list[Any] = [op((0,), (1, 10)), Mark.MATMUL, op((1,), (2, 20)), Freed(1), Mark.MATMUL, op((2,), (3, 30))]
    found = part_events(log, [], PartEvents(0, 9, -1, -1, {}, (), NONE), compiled=False)
    assert [e for e in found.forward if e[1]] == [(1, 10), (2, 20), (-1, Mark.MATMUL), (3, 30)]


def test_a_free_is_no_mark_of_its_number() -> None:
    assert Mark(7) == Mark(7) and Mark(7) != Freed(7) and Mark(3) != Mark(7)
    assert [Freed(7), Mark(7)].index(Mark(7)) == 1


def test_a_compiled_norm_saves_its_input_and_a_number_a_row_and_the_loss_after_it_what_its_log_says() -> None:
    """The norm's copy of x in fp32 (1) is fused, and so is its gradient (8). Of the loss nothing is: logits (4), their
    softmax (5)."""
    forward: list[Any] = [
        op((0,), (1, 40), fused=True, of=frozenset([0])), Op(True, (1,), (NewStorage(2, 1, False, frozenset([2])),)),
        op((1, 2), (3, 20), fused=True, of=frozenset([0, 2])), Mark.FINAL_NORM_END, Freed(1),
        op((3,), (4, 50)), op((4,), (5, 60)), Freed(4),
    ]  # fmt: skip
    backward: list[Any] = [
        op((5,), (6, 50)), Freed(5), op((6, 3), (7, 20)), Freed(6), Freed(3), Mark.FINAL_NORM_BACKWARD,
        op((7, 0), (8, 40), fused=True, of=frozenset([7, 0])), Freed(7),
        op((8, 2), (12, 20), fused=True, of=frozenset([7, 0, 2])), Freed(8),
    ]  # fmt: skip
    named = PartEvents(0, 9, 10, 12, {}, (1, 2, 3, 5), NONE)  # as the log has it, which is not compiled
    found = head_events(forward, backward, named, 3, 7)
    assert [e for e in found.forward if e[0] >= 0] == [(2, 1), (3, 20), (4, 50), (5, 60), (4, 0)]
    assert [e for e in found.backward if e[0] >= 0] == [
        (6, 50), (5, 0), (7, 20), (6, 0), (3, 0), (12, 20), (7, 0), (2, 0),
    ]  # fmt: skip
    assert found.saves_x and found.dx == 12


@pytest.mark.parametrize("size, others, saved", [(21, (), {2}), (30, (), {1}), (21, (1,), {1})])
def test_a_compiled_forward_saves_what_it_assembles_if_that_takes_as_many_bytes(
    size: int, others: tuple[int, ...], saved: set[int]
) -> None:
    """Scores 1, with sinks 2, probabilities 3; 2 is saved in place of 1, unless it is larger, or 1 is saved itself."""
    log: list[Any] = [
        op((0,), (1, 20)),
        op((1,), (2, size), fused=True, of=frozenset([1])),
        op((2,), (3, size), fused=True, of=frozenset([1])),
    ]
    cut, found = cut_nearest(log, (3, *others), {2}, {1: 20})
    assert found.keys() == saved
    assert cut[2].made[0].origins == saved
