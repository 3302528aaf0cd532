"""Orders of kernels: of a MoE block counted by hand, and of random graphs."""

from __future__ import annotations

import random

import pytest

from forebay.estimate.kernel_order import least_peak_order
from forebay.estimate.types import Log, Mark, NewStorage, Op

NONE: frozenset[int] = frozenset()


def made(number: int, size: int, fused: bool = False) -> tuple[NewStorage, ...]:
    return (NewStorage(number, size, fused, NONE),)


def numbers(log: Log) -> list[int]:
    return [m.number for entry in log if isinstance(entry, Op) for m in entry.made]


def test_shared_experts_run_before_experts_that_save_more() -> None:
    """The experts' rows (3) are held. A gate (4) and an up projection (5) are too, the activation (6) is not: it is gone before
    the experts run, as in a recorded history of a DeepSeek-V2, and the peak is 300 + 2 x 60 + 8, not 300 + 3 x 60 + 8."""
    experts: Log = [Op(False, tuple(range(1, 2)), (*made(2, 4), *made(3, 300)))]
    shared: Log = [
        Mark.MATMUL, Op(False, tuple(range(1, 2)), made(4, 60)),
        Mark.MATMUL, Op(False, tuple(range(1, 2)), made(5, 60)),
        Op(True, (4, 5), made(6, 60, fused=True)),
        Mark.MATMUL, Op(False, (6,), made(7, 4)),
    ]  # fmt: skip
    last: Log = [Op(True, (2, 7), made(8, 4, fused=True))]
    found = least_peak_order([*experts, *shared, *last], {6, 8}, {3, 4, 5, 8}, {})
    assert numbers(found) == [4, 5, 6, 7, 2, 3, 8]
    assert all(isinstance(found[at + 1], Op) for at, entry in enumerate(found) if isinstance(entry, Mark))


def test_a_tensor_that_is_made_again_comes_from_the_kernel_that_reads_the_same_saved_one() -> None:
    """Eager attention: probabilities (10) come from saved scores (1), as does the scores' gradient (12), which needs that of
    the probabilities (11). The product that reads the probabilities (13) runs after that kernel."""
    log: Log = [
        Op(True, (1,), made(10, 100, fused=True)),
        Mark.MATMUL, Op(False, (10, 2), made(13, 5)),
        Mark.MATMUL, Op(False, (2, 3), made(11, 100)),
        Op(True, (1, 11), made(12, 100, fused=True)),
        Mark.MATMUL, Op(False, (12, 3), made(14, 5)),
    ]  # fmt: skip
    order = numbers(least_peak_order(log, {10, 12}, {13, 14}, {1: 100, 2: 5, 3: 5}))
    assert order[:3] == [11, 10, 12]


def test_kernels_that_read_the_same_tensors_are_one() -> None:
    """SwiGLU: the activation (10), and the gradients of gate (12) and up (13), come from both and the activation's gradient
    (11). An H200 makes all three in one kernel, and frees what it reads when that is over."""
    log: Log = [
        Op(True, (1, 2), made(10, 100, fused=True)),
        Mark.MATMUL, Op(False, (3, 10), made(14, 5)),
        Mark.MATMUL, Op(False, (3, 4), made(11, 100)),
        Op(True, (1, 2, 11), made(12, 100, fused=True)),
        Mark.MATMUL, Op(False, (12,), made(15, 10)),
        Op(True, (1, 11), made(13, 100, fused=True)),
        Mark.MATMUL, Op(False, (13,), made(16, 10)),
    ]  # fmt: skip
    found = least_peak_order(log, {10, 12, 13}, {14, 15, 16}, {1: 100, 2: 100, 3: 10, 4: 5})
    together = next(e for e in found if isinstance(e, Op) and e.fused)
    assert {m.number for m in together.made} == {10, 12, 13} and set(together.reads) == {1, 2, 11}


@pytest.mark.parametrize("seed", range(40))
def test_every_result_comes_after_what_it_reads_and_the_peak_is_not_higher(seed: int) -> None:
    chance = random.Random(seed)
    log: Log = []
    for n in range(4, chance.randint(6, 16)):
        reads = tuple(chance.sample(range(n), chance.randint(1, 3)))
        log.append(Op(False, reads, made(n, chance.randint(1, 100))))
    outputs = {len(log) + 3, *chance.sample(range(4, len(log) + 4), 1)}
    inputs = {n: chance.randint(1, 100) for n in range(4)}
    found = [entry for entry in least_peak_order(log, set(), outputs, inputs) if isinstance(entry, Op)]
    assert sorted(map(id, found)) == sorted(map(id, log))
    there = set(inputs)
    for op in found:
        assert there.issuperset(op.reads)
        there.update(numbers([op]))
    assert peak(found, outputs, inputs) <= peak([op for op in log if isinstance(op, Op)], outputs, inputs)


def peak(ops: list[Op], outputs: set[int], inputs: dict[int, int]) -> int:
    """By brute force: at each operation, what was made before or is made now and is read now or later, or is an output."""
    sizes = inputs | {m.number: m.size for op in ops for m in op.made}
    most = 0
    for at, op in enumerate(ops):
        there = set(inputs).union(*(numbers([before]) for before in ops[: at + 1]))
        later = outputs.union(numbers([op]), *(rest.reads for rest in ops[at:]))
        most = max(most, sum(sizes[n] for n in there & later))
    return max(most, sum(sizes[n] for n in inputs if any(n in op.reads for op in ops)))
