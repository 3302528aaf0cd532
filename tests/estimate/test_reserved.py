"""A rank's allocations in order: events by hand, and whole steps against real ones watched on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from forebay.estimate.allocator import CachingAllocator
from forebay.estimate.events import NamedStorages, part_events, peak_of
from forebay.estimate.fsdp import ParamGroup, UnshardedLifecycle, param_groups
from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.parts import Part, placed_parts
from forebay.estimate.reserved import WORKSPACE, AllocatorRun, RankRun, Reserved, reserve, shortened, with_reserved
from forebay.estimate.state import Sharing, weight_shapes
from forebay.estimate.trace import base_path, trace_model
from forebay.estimate.types import ALL_TO_ALL_BEGIN, ALL_TO_ALL_END, Freed, Mark, NewStorage, Op, PartEvents, Shape
from forebay.estimate.walk import RankFit, StageLayers, local_actions
from forebay.managed import manage
from forebay.pipeline.schedule import Action, turns

MIB = 1 << 20
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


def test_a_part_that_is_not_compiled_is_as_it_was_noted() -> None:
    found = part_events(
        FORWARD, BACKWARD, NamedStorages(0, 5, 6, 12, (7, 11), frozenset([1, 2, 4]), NONE), compiled=False
    )
    assert found.forward == ((1, 10), (2, 20), (3, 30), (4, 40), (3, 0), (5, 50))
    assert [e for e in found.backward if e[1]] == [(7, 5), (8, 40), (9, 30), (10, 20), (11, 5), (12, 10)]
    assert not found.saves_x and found.weight_grads == (7, 11)
    # Without saving, each is free behind its last reader.
    assert found.forward_no_grad == ((1, 10), (2, 20), (1, 0), (3, 30), (2, 0), (4, 40), (3, 0), (5, 50), (4, 0))


def test_a_compiled_part_makes_what_its_gemms_read_and_makes_it_again() -> None:
    """c is fused into d; a and d are made for the GEMMs and dropped; of what is saved x and b are left. In backward d is made for
    the weight's gradient, da's consumer is fused, a is made for the other weight's."""
    found = part_events(FORWARD, BACKWARD, NamedStorages(0, 5, 6, 12, (7, 11), frozenset([0, 2]), NONE), compiled=True)
    assert found.forward == ((1, 10), (2, 20), (1, 0), (4, 40), (5, 50), (4, 0))
    assert found.saves_x
    # d + its gradient; da; then 10, where b is read for the last time, a, its gradient, x's last use, dx.
    assert found.backward == (
        (4, 40), (7, 5), (4, 0), (7, 0), (8, 40), (6, 0), (8, 0), (10, 20), (2, 0),
        (1, 10), (11, 5), (1, 0), (0, 0), (11, 0), (12, 10), (10, 0),
    )  # fmt: skip
    assert peak_of(found.backward, {2: 20, 6: 50}) == 45


def test_marks_stay_where_tokens_travel() -> None:
    log: list[Any] = [
        op((0,), (1, 8)),
        Mark(ALL_TO_ALL_BEGIN),
        op((1,), (2, 8)),
        Mark(ALL_TO_ALL_END),
        Freed(1),
        op((2,), (3, 8)),
    ]
    found = part_events(log, [], NamedStorages(0, 3, -1, -1, (), frozenset([2]), frozenset([2])), compiled=False)
    assert found.forward == ((1, 8), (-1, ALL_TO_ALL_BEGIN), (2, 8), (-1, ALL_TO_ALL_END), (1, 0), (3, 8))
    assert found.backward == ((2, 0),)  # let go of by nobody who was watched


# --- laid by hand -----------------------------------------------------------------------------------------------------


def part(place: Any, name: str, saved: int, workspace: int, size: int = 16 * MIB, **more: Any) -> Part:
    """Saves `saved`, needs `workspace` besides each way, and hands on `size`."""
    events = PartEvents(
        forward=((1, saved), (2, workspace), (3, size), (2, 0)),
        backward=((5, workspace), (6, size), (5, 0), (4, 0), (1, 0)),
        forward_no_grad=((1, saved), (2, workspace), (3, size), (2, 0), (1, 0)),
        x=0, output=3, gradient=4, dx=6, saves_x=True, weight_grads=(), transferred=NONE,
    )  # fmt: skip
    return Part(name, place, events, **more)


ALONE = Sharing(sharded=False, parameter=4, compute=4)
EMBEDDING = Part(
    "embedding",
    "embedding",
    PartEvents(((1, 16 * MIB),), ((2, 0),), ((1, 16 * MIB),), -1, 1, 2, -1, False, (), NONE),
)


def rank(parts: list[Part], microbatches: int = 1, groups: list[ParamGroup] | None = None, **more: Any) -> RankRun:
    given = {"engine": False, "summed": None, "hidden": 16 * MIB, "turns": turns, "random": False, **more}
    actions = shortened(local_actions(microbatches, False), False)
    return RankRun(groups or [], ALONE, {0: [EMBEDDING, *parts]}, actions, **given)


def test_levels_of_a_step_by_hand() -> None:
    """Two halves: x, what each saves, the output; the second one's backward has its workspace, dx and all that is saved."""
    sublayers = [part(0, "l.0.self_attn", 32 * MIB, 64 * MIB), part(0, "l.0.mlp", 48 * MIB, 96 * MIB)]
    found = reserve(rank(sublayers), steps=1)
    forward = 16 + 32 + 16 + 48 + 96 + 16
    backward = 16 + 32 + 16 + 48 + 16 + 96 + 16  # the output is its own gradient here
    assert found.allocated - WORKSPACE == max(forward - 0, backward) * MIB
    assert found.reserved >= found.allocated


def test_recomputation_and_offloading_hold_less() -> None:
    def most(placement: str) -> int:
        sublayers = [part(n, f"l.{n}.mlp", 256 * MIB, 16 * MIB, placement=placement) for n in range(8)]
        return reserve(rank(sublayers)).allocated - WORKSPACE

    keep, recompute, offload = map(most, ("keep", "recompute", "offload"))
    assert keep >= 8 * (256 + 16) * MIB
    assert recompute < 256 * MIB + 12 * 16 * MIB + 32 * MIB
    assert offload < 4 * (256 + 16) * MIB + 64 * MIB


def test_a_third_microbatch_needs_nothing_more() -> None:
    sublayers = [part(n, f"l.{n}.mlp", 100 * MIB, 40 * MIB) for n in range(4)]
    assert reserve(rank(sublayers, 3)) == reserve(rank(sublayers, 30))


def test_moments_are_made_behind_the_first_step() -> None:
    """Two of them, as large as the parameters; they may take what the step left, so reserved grows by less."""
    group = ParamGroup(0, False, 1, (64 * MIB,), (64 * MIB,), (64 * MIB,), ("",), (False,))
    found = AllocatorRun(rank([part(0, "l.0.mlp", MIB, MIB)], groups=[group]))
    assert found.allocator.allocated == 256 * MIB
    found.steps(1)
    assert found.allocator.allocated - WORKSPACE == 3 * 256 * MIB + 512  # and the step count


def test_a_captured_step_has_memory_of_its_own() -> None:
    sublayers = [part(n, f"l.{n}.mlp", 100 * MIB, 40 * MIB) for n in range(4)]
    called, captured = reserve(rank(sublayers)), reserve(rank(sublayers, graph=True))
    assert captured.reserved >= called.reserved
    assert captured.allocated == called.allocated


VOCABULARY = 64 << 20  # elements of embedding and head each
TWO = Sharing(data=2, sharded=True, parameter=4, compute=2, summed=4, gathered=True, pp=2)


def ends(*names: str, late: bool = True, tied: bool = False) -> tuple[CachingAllocator, UnshardedLifecycle]:
    groups = [
        ParamGroup(-1, False, 2, (VOCABULARY // 2,), (VOCABULARY,), (VOCABULARY,), (name,), (False,)) for name in names
    ]
    allocator = CachingAllocator()
    return allocator, UnshardedLifecycle(allocator, groups, TWO, "compute", late=late, keep=True, tied=tied)


def reduced(allocator: CachingAllocator, life: UnshardedLifecycle) -> tuple[int, int]:
    """Of a step that has nothing but its ends: what is held behind it, and at most, besides gathered weights."""
    life.gather()
    before = allocator.allocated
    life.begin_step()
    life.end_step()
    allocator.reset_peaks()
    life.reduce([], 16 * MIB)
    life.finish()
    return allocator.allocated - before, allocator.peak_allocated - before


def test_the_embeddings_sum_takes_the_memory_of_the_heads() -> None:
    """Sums are 256 MiB, halves of them the shards' gradients. One sum is there at a time, sent from where it is."""
    for names, most in ((("embedding", "head"), 256 + 2 * 128), (("head",), 256 + 128), (("embedding",), 256 + 128)):
        allocator, life = ends(*names)
        assert reduced(allocator, life) == (128 * len(names) * MIB, most * MIB)
        life.zero_grad()
        assert reduced(allocator, life) == (128 * len(names) * MIB, most * MIB)


def test_a_sum_that_is_there_already_is_sent_from_where_it_is() -> None:
    """Both sums from the begin, 512 MiB; the first shard's gradient beside them."""
    allocator, life = ends("embedding", "head", late=False)
    for _ in range(2):
        assert reduced(allocator, life) == (2 * 128 * MIB, (512 + 128) * MIB)
        life.zero_grad()


@pytest.mark.parametrize(("late", "begun", "most"), [(True, 256, 256 + 256 + 16), (False, 512, 256 + 128)])
def test_an_embedding_that_is_the_head_has_two_sums(late: bool, begun: int, most: int) -> None:
    """256 MiB each: the head's from the begin; the embedding's too, or it is made, beside a microbatch's rows, to be reduced."""
    allocator, life = ends("embedding", late=late, tied=True)
    for _ in range(2):
        life.gather()
        before = allocator.allocated
        life.begin_step()
        assert allocator.allocated - before == begun * MIB
        life.end_step()
        assert allocator.allocated - before == 256 * MIB
        allocator.reset_peaks()
        life.reduce([], 16 * MIB)
        life.finish()
        assert (allocator.allocated - before, allocator.peak_allocated - before) == (128 * MIB, most * MIB)
        life.zero_grad()


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_of_embedded_tokens_gather_unless_they_are_added_at_once(at_once: bool) -> None:
    """16 MiB a microbatch, and 32 in the dtype of the sum for a moment."""

    def most(microbatches: int, spread: int = 32 * MIB) -> int:
        sublayer = part(0, "l.0.mlp", 8 * MIB, 4 * MIB)
        actions = [Action(kind, 0, n) for n in range(microbatches) for kind in ("F", "RECV_B", "B")]
        vocabulary = 0, spread
        given = rank([sublayer], engine=True, pipeline=True, summed=vocabulary, at_once=at_once)
        return reserve(replace(given, sharing=TWO, actions=actions), steps=1).allocated

    few, many, more = most(4), most(12), most(20)
    assert more - many == many - few == (0 if at_once else 8 * 16 * MIB)
    assert most(4, 1024 * MIB) - most(4, 512 * MIB) == (512 * MIB if at_once else 0)


def test_what_reduces_a_captured_step_lies_where_its_activations_did() -> None:
    """The graph has the head's sum and 512 MiB of activations: room for the 2 x 128 of both shards and for what is gathered."""
    allocator, life = ends("embedding", "head")
    life.gather()
    gathered = allocator.allocated
    allocator.begin_graph("step")
    life.begin_step()
    allocator.free(allocator.malloc(512 * MIB, "compute"))
    life.end_step()
    life.hold()
    life.reduce([], 16 * MIB)
    allocator.end_graph()
    life.finish()
    taken = allocator.reserved
    for _ in range(2):
        assert allocator.allocated - gathered == (256 + 2 * 128) * MIB
        life.zero_grad()
        assert allocator.allocated - gathered == 256 * MIB  # the head's sum is the graph's
        allocator.begin_graph("step")
        life.gather()
        life.restore()
        life.reduce([], 16 * MIB)
        allocator.end_graph()
        life.finish()
    assert allocator.reserved == taken


def test_cached_is_what_the_allocator_holds_beside() -> None:
    fit = RankFit(0, 100, 10, 200, 50, 40, 7, "somewhere", 50)
    found = with_reserved(fit, Reserved(reserved=450, allocated=390, by_step=(450,)))
    assert (found.transient, found.cached, found.allocated, found.reserved, found.total) == (30, 60, 397, 450, 457)
    # More in use than the levels say is reserved as well; what is not comes and goes is never taken off.
    assert with_reserved(fit, Reserved(500, 460, ())).total == 507
    assert with_reserved(fit, Reserved(320, 310, ())).total == 367


# --- against real steps -----------------------------------------------------------------------------------------------

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "use_cache": False,
}


def built(device: str) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig(**COMMON), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()


@pytest.mark.parametrize(("placement", "mode"), [("keep", "light"), ("recompute", "light"), ("recompute", "full")])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_in_use_at_most_is_that_of_a_real_step(
    monkeypatch: pytest.MonkeyPatch, placement: str, mode: str, microbatches: int
) -> None:
    """Forwards and backwards of a managed model on a CPU, every storage watched; and the same on allocator, laid by its parts.
    cuBLAS's workspaces, larger than all of this model, are made small."""
    monkeypatch.setattr("forebay.estimate.reserved.WORKSPACE", 512)
    sequence = 2048
    model = built("cpu")
    ids = torch.randint(0, 256, (1, sequence))
    live = OpRecorder(512)
    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    with manage(model, policy=placement, recompute=mode):

        def step() -> None:
            for _ in range(microbatches):
                model(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=ids.numel()).loss.backward()

        step()
        model.zero_grad(set_to_none=True)
        with live:
            step()
    meta = built("meta")
    weights, prefix = weight_shapes(meta), f"{base_path(meta)}.layers"
    trace = trace_model(meta, Shape(sequence, 1, block=512, gpu=False))
    stage = StageLayers(tuple(range(4)), tuple(range(4)), True, True)
    placements = {f"{prefix}.{n}.{sublayer}": placement for n in range(4) for sublayer in ("self_attn", "mlp")}
    parts = placed_parts(trace, stage, placements, prefix=prefix, recompute=mode)
    groups = param_groups(weights, range(4), True, True, ALONE)
    laid = RankRun(groups, ALONE, {0: parts}, local_actions(microbatches, False), False, None, 0, turns, random=False)
    run = AllocatorRun(laid)
    before = run.allocator.allocated
    run.gradients()
    assert run.allocator.peak_allocated - before == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("actions", [("F", "RECV_B", "B"), ("F", "RECV_B", "I", "W")], ids="-".join)
def test_experts_gradients_in_place_are_never_there(actions: tuple[str, ...]) -> None:
    """gate_up's 400 and down's 200 MiB, which both are made behind dx; each is made of 130 MiB of rows, and waits with 20."""
    made = ((1, 50 * MIB), (3, 16 * MIB))
    backward = ((6, 16 * MIB), (4, 0), (11, 200 * MIB), (11, 0), (10, 400 * MIB), (10, 0), (1, 0))
    events = PartEvents(
        made, backward, made, x=0, output=3, gradient=4, dx=6, saves_x=True, weight_grads=(10, 11), transferred=NONE
    )
    sublayer = Part("l.0.mlp", 0, events, deferred=20 * MIB, token_rows=130 * MIB)

    def most(summed: int) -> int:
        given = RankRun(
            [],
            replace(TWO, summed=summed),
            {0: [EMBEDDING, sublayer]},
            [Action(kind, 0, 0) for kind in actions],
            engine=True,
            summed=None,
            hidden=16 * MIB,
            turns=turns,
            random=False,
            pipeline=True,
        )
        return reserve(given, steps=1).allocated

    whole, in_place = most(2), most(4)
    if "W" in actions:  # beside what waits, and dx that was sent
        assert (whole - WORKSPACE, in_place - WORKSPACE) == ((20 + 16 + 400) * MIB, (20 + 16 + 130) * MIB)
    else:  # in place the peak_of moment is dx's making, beside x, the gradient that came and what was sent before
        assert (whole - WORKSPACE, in_place - WORKSPACE) == ((50 + 3 * 16 + 400) * MIB, (50 + 4 * 16) * MIB)
