"""Deferred weight gradients: the same bits as at once, nothing too early, and nothing held afterwards."""

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from forebay.models.families import moe_blocks
from forebay.models.hf_experts import register
from forebay.moe import experts as experts_module
from forebay.moe import experts_op, wgrad
from forebay.moe.experts import experts
from forebay.moe.wgrad import WeightGradients
from forebay.train.fsdp_records import end_backward
from tests.helpers import no_collector
from tests.models.conftest import EXPERTS, HIDDEN, build_tiny
from tests.moe.test_experts import (
    FORWARD_FLOPS,
    H_FLOPS,
    IDS,
    TOLERANCE,
    WIDTH,
    Case,
    E,
    H,
    K,
    T,
    assert_same_bits,
    gpu_case,
    make,
    poison_gpu_memory,
)

STACKS = ("gate_up", "down")


def gradients(case: Case) -> dict[str, Tensor]:
    """The gradients there are, by name."""
    return {n: t.grad.clone() for n, t in case.tensors.items() if t.grad is not None}


def of_stacks(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: found[n] for n in STACKS}


def fresh(case: Case) -> Case:
    """The same numbers, no gradients."""
    tensors = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in case.tensors.items()}
    return Case(tensors, case.ids, case.settings)


def at_once(case: Case, dy: Tensor, **more) -> dict[str, Tensor]:
    case = fresh(case)
    y = case.run(**more)
    y.backward(dy)
    return {"y": y.detach(), **gradients(case)}


def collect(store: WeightGradients, y: Tensor, dy: Tensor) -> list[Callable[[], None]]:
    with store.collecting() as pending:
        y.backward(dy)
    return pending


def deferred(case: Case, dy: Tensor, **more) -> dict[str, Tensor]:
    """All gradients. Those of the first part are checked to be complete, and no others, before the second."""
    case, store = fresh(case), WeightGradients()
    y = case.run(deferred=store, **more)
    pending = collect(store, y, dy)
    wanted = {n for n, t in case.tensors.items() if t.requires_grad}
    assert gradients(case).keys() == wanted.difference(STACKS)
    assert len(pending) == bool(wanted.intersection(STACKS))
    early = gradients(case)
    for compute in pending:
        compute()
    got = gradients(case)
    assert got.keys() == wanted
    assert_same_bits(early, {n: got[n] for n in early})
    return {"y": y.detach(), **got}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_deferred_is_at_once(ids: str, gpt_oss: bool, save_h: bool, dtype: torch.dtype) -> None:
    case = make(IDS[ids](), gpt_oss=gpt_oss).to(dtype)
    dy = torch.randn(case.ids.shape[0], H).to(dtype)
    whole = at_once(case, dy, save_h=save_h)
    assert_same_bits(deferred(case, dy, save_h=save_h), whole)
    assert_same_bits(at_once(case, dy, save_h=save_h, deferred=WeightGradients()), whole)


class Seen(TorchDispatchMode):
    """The operations of Forebay that reach the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names |= {func.__name__} if func.namespace == "forebay" else set()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("save_h", [True, False])
def test_operations_go_around_the_dispatcher_unless_something_watches_them(save_h: bool) -> None:
    case, dy = make(IDS["sentinels"]()).to(torch.float32), torch.randn(T, H)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        unwatched = deferred(case, dy, save_h=save_h)
    assert not [event.key for event in profiler.key_averages() if event.key.startswith("forebay::")]
    with Seen() as seen:
        watched = deferred(case, dy, save_h=save_h)
    assert seen.names == {"experts.default", "experts_backward.default", "experts_weight_backward.default"}
    assert_same_bits(watched, unwatched)


def test_without_the_dispatcher_an_h_that_was_written_over_is_of_another_version() -> None:
    case = make(IDS["sentinels"]()).to(torch.float32)
    y = case.run(deferred=WeightGradients())
    h = y.grad_fn.saved_tensors[1]
    before = h._version
    y.sum().backward()
    assert h._version > before


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize(
    "odd", ["transposed", "interleaved", "bound 0", "bound 5", "bound 30", "expanded dy", "no tokens"]
)
def test_other_settings_and_shapes(odd: str, save_h: bool) -> None:
    """Widths of 7 and 9 fit no grouped GEMM."""
    ids = torch.zeros((0, K), dtype=torch.int64) if odd == "no tokens" else IDS["sentinels"]()
    narrow = odd == "expanded dy"
    case = make(ids, gpt_oss="bound" in odd, **({"width": 7, "hidden": 9} if narrow else {}))
    if odd == "transposed":
        case.tensors |= {n: case.tensors[n].transpose(1, 2).contiguous() for n in STACKS}
    if odd in ("transposed", "interleaved"):
        case.settings[odd] = True
    case = case.to(torch.float32)
    dy = torch.ones(()).expand(T, 9) if narrow else torch.randn(len(ids), H)
    more = {"save_h": save_h, "max_rows": int(odd.split()[1]) if "bound" in odd else None}
    assert_same_bits(deferred(case, dy, **more), at_once(case, dy, **more))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("summed", [("gate_up", "down"), ("down",), ("gate_up",)])
def test_sums_get_what_autograd_would_have_been_given(
    summed: tuple[str, ...], gpt_oss: bool, dtype: torch.dtype
) -> None:
    case = fresh(make(IDS["sentinels"](), gpt_oss=gpt_oss, width=72, hidden=136).to(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums = {n: torch.randn(case.tensors[n].shape, dtype=wide) for n in summed}
    dy = torch.randn(T, 136).to(dtype)
    want, before = at_once(case, dy), {n: t.clone() for n, t in sums.items()}

    def sum_of(weight: Tensor) -> Callable[[], Tensor | None]:
        return lambda: next((t for n, t in sums.items() if case.tensors[n] is weight), None)

    store = WeightGradients()
    store.sums = sum_of
    for compute in collect(store, case.run(deferred=store), dy):
        compute()
    got = gradients(case)
    assert got.keys() == want.keys() - {"y", *summed}
    assert_same_bits(got, {n: want[n] for n in got})
    for name, total in sums.items():
        # A gradient is rounded to dtype; what is added is not.
        error = (total - before[name] - want[name].to(wide)).abs().max()
        assert error <= TOLERANCE[dtype] * want[name].abs().max().to(wide), name


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("summed", [STACKS, ("down",)])
def test_a_backward_that_defers_nothing_leaves_sums_alone(summed: tuple[str, ...], computed: bool) -> None:
    case = fresh(make(IDS["sentinels"]()).to(torch.float32))
    dy = torch.randn(T, H)
    want = at_once(case, dy)
    leaves = dict(case.tensors)
    if computed:
        case.tensors |= {n: leaves[n] * 1 for n in STACKS}
    sums = {n: torch.zeros_like(leaves[n]) for n in summed}
    store = WeightGradients()
    store.sums = lambda weight: lambda: next((t for n, t in sums.items() if case.tensors[n] is weight), None)
    case.run(deferred=store).backward(dy)
    assert_same_bits(
        {n: t.grad for n, t in leaves.items() if t.grad is not None}, {n: t for n, t in want.items() if n != "y"}
    )
    assert not any(total.any() for total in sums.values())


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_frozen_tensors(gpt_oss: bool, save_h: bool) -> None:
    """`deferred` checks that nothing is appended where neither gate_up nor down is trained."""
    case = make(gpt_oss=gpt_oss).to(torch.float32)
    dy = torch.randn(T, H)
    for trained in itertools.chain.from_iterable(itertools.combinations(case.tensors, n) for n in (1, 2, 4)):
        for name, t in case.tensors.items():
            t.requires_grad_(name in trained)
        assert_same_bits(deferred(case, dy, save_h=save_h), at_once(case, dy, save_h=save_h))


def test_without_gradients_there_is_nothing_to_defer() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    with torch.no_grad():
        assert torch.equal(case.run(deferred=store), case.run())
    assert not case.run(deferred=store).isnan().any() and store.pending is None


def test_microbatches_whose_second_parts_run_out_of_order() -> None:
    case, store = make(gpt_oss=True).to(torch.float32), WeightGradients()
    batches = [fresh(case) for _ in range(3)]
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        batch.ids = torch.randint(0, E, (T, K))
        batch.tensors |= {n: torch.randn(batch.tensors[n].shape, requires_grad=True) for n in ("x", "weights")}
    dys = torch.randn(3, T, H).unbind()
    found = []
    for order, given in (((2, 0, 1), None), ((0, 1, 2), store)):
        for name in (n for n in case.tensors if n not in ("x", "weights")):
            shared = case.tensors[name].detach().clone().requires_grad_()
            for batch in batches:
                batch.tensors[name] = shared
        ys = [batch.run(deferred=given) for batch in batches]
        pending = {i: collect(store, ys[i], dys[i]) for i in order}
        assert all(len(computes) == (given is not None) for computes in pending.values())
        for compute in (compute for i in (2, 0, 1) for compute in pending[i]):
            compute()
        found.append(of_stacks(gradients(batches[0])))
    assert_same_bits(*found)


def test_several_calls_in_one_backward_append_in_its_order() -> None:
    first, second, store = make().to(torch.float32), make().to(torch.float32), WeightGradients()
    first.tensors["x"] = torch.randn(T, H, requires_grad=True)
    second.tensors["x"] = first.run(deferred=store)
    pending = collect(store, second.run(deferred=store), torch.ones(T, H))
    assert len(pending) == 2
    pending[0]()
    assert second.tensors["down"].grad is not None and first.tensors["down"].grad is None
    pending[1]()
    assert first.tensors["down"].grad is not None


def test_hooks_run_once_with_the_gradient_and_not_before() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy)
    log: list[tuple[str, Tensor | None]] = []
    nodes = []  # a node dies with its last graph, and its hooks with it
    for t in (case.tensors[n] for n in STACKS):
        t.register_hook(lambda grad: log.append(("gradient", grad)))
        t.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", p.grad)))
        nodes.append(t.view_as(t).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_: log.append(("node", None)))
    (compute,) = collect(store, case.run(deferred=store), dy)
    assert log == []
    compute()
    assert sorted(kind for kind, _ in log) == ["accumulated"] * 2 + ["gradient"] * 2 + ["node"] * 2
    for kind in ("gradient", "accumulated"):
        found = {grad.shape: grad for k, grad in log if k == kind and grad is not None}
        assert all(torch.equal(found[whole[name].shape], whole[name]) for name in STACKS)


@pytest.mark.parametrize("defer", [True, False])
def test_what_was_computed_becomes_grad_without_a_copy(defer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = set()

    def noting(op: Callable) -> Callable:
        def call(*args, **kwargs):
            made = op(*args, **kwargs)
            addresses.update(t.data_ptr() for t in (made if isinstance(made, tuple) else (made,)))
            return made

        return call

    for module, name in ((wgrad, "experts_weight_backward_op"), (experts_module, "experts_backward_op")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    case, store = make().to(torch.float32), WeightGradients()
    y = case.run(deferred=store)
    if defer:
        collect(store, y, torch.ones(T, H)).pop()()
    else:
        y.sum().backward()
    assert all(case.tensors[n].grad.data_ptr() in addresses for n in STACKS)


def test_the_bytes_of_the_operands() -> None:
    rows = 20
    for trained, wanted in {
        ("x", "gate_up", "down"): 2 * 2 * T * H + 6 * rows * WIDTH + 4 * rows + 4 * E,
        ("x", "gate_up"): 2 * T * H + 4 * rows * WIDTH + 4 * rows + 4 * E,
        ("x", "down"): 2 * T * H + 2 * rows * WIDTH + 4 * rows + 4 * E,
    }.items():
        for save_h in (True, False):
            case, store = make().to(torch.bfloat16), WeightGradients()
            for name, t in case.tensors.items():
                t.requires_grad_(name in trained)
            y = case.run(deferred=store, max_rows=rows, save_h=save_h)
            (compute,) = collect(store, y, torch.randn(T, H).bfloat16())
            operands = [t for left in compute._waiting[1] if left is not None for t in left._operands]
            storages = {t.untyped_storage() for t in operands if isinstance(t, Tensor)}
            assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == wanted
            if "gate_up" in trained:
                assert case.tensors["x"].data_ptr() in {s.data_ptr() for s in storages}


@pytest.mark.parametrize("ending", ["called", "dropped", "raised"])
def test_nothing_is_held_afterwards(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refs: list[weakref.ref] = []

    def noting(*args, **kwargs):
        made = experts_op.experts_backward_op(*args, **kwargs)
        refs.extend(weakref.ref(t) for t in (args[0], args[2], made[3]))  # dh is written over h
        return made

    monkeypatch.setattr(experts_module, "experts_backward_op", noting)
    case, store = make().to(torch.float32), WeightGradients()
    with no_collector():
        y = case.run(deferred=store)
        try:
            with store.collecting() as pending:
                (y * 1).backward(torch.randn(T, H))
                if ending == "raised":
                    raise KeyError
        except KeyError:
            pass
        assert store.pending is None
        dy, dh, act = refs
        assert dy() is not None and dh() is not None and act() is not None
        compute = pending.pop()
        if ending == "called":
            compute()
            assert compute._waiting is None
        else:
            del compute
        assert dy() is None and dh() is None and act() is None


def test_operands_of_down_are_free_before_gate_up_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[weakref.ref] = []
    widths: list[int] = []

    def noting(tokens, act_or_dh, *rest):
        assert all(ref() is None for ref in rows)
        rows.append(weakref.ref(act_or_dh))
        widths.append(act_or_dh.shape[1])
        return experts_op.experts_weight_backward_op(tokens, act_or_dh, *rest)

    monkeypatch.setattr(wgrad, "experts_weight_backward_op", noting)
    case, store = make().to(torch.float32), WeightGradients()
    with no_collector():
        collect(store, case.run(deferred=store), torch.ones(T, H)).pop()()
    assert widths == [WIDTH, 2 * WIDTH]


@pytest.mark.parametrize("defer", [True, False])
def test_a_kept_graph_is_walked_twice_though_its_weights_are_computed(defer: bool) -> None:
    case, store, ones = make().to(torch.float32), WeightGradients(), torch.ones(T, H)
    found = []
    for given in (None, store):
        one = fresh(case)
        leaf = one.tensors["down"]
        one.tensors["down"] = leaf * 1.0  # saves the factor
        y = one.run(deferred=given)
        for keep in (True, False):
            if given is not None and defer:
                with store.collecting() as pending:
                    y.backward(ones, retain_graph=keep)
                pending[0]()
            else:
                y.backward(ones, retain_graph=keep)
        found.append({"down": leaf.grad, "gate_up": one.tensors["gate_up"].grad})
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            one.tensors["down"].sum().backward()
    assert_same_bits(*found)


def test_misuse() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    y = case.run(deferred=store)
    with store.collecting() as pending:
        y.sum().backward()
        with pytest.raises(RuntimeError, match="collecting already"), store.collecting():
            pass
        assert store.pending is pending
    pending[0]()
    kept = gradients(case)
    with pytest.raises(RuntimeError, match="called once"):
        pending[0]()
    assert_same_bits(gradients(case), kept)


def test_a_graph_may_be_walked_twice() -> None:
    case, store, ones = make().to(torch.float32), WeightGradients(), torch.ones(T, H)
    y = case.run(deferred=store)
    with store.collecting() as pending:
        y.backward(ones, retain_graph=True)
        y.backward(2 * ones)
    assert len(pending) == 2
    pending[1]()
    assert torch.equal(case.tensors["down"].grad, at_once(case, 2 * ones)["down"])
    with torch.no_grad():
        pending[0]()
    other = fresh(case)
    for dy in (2 * ones, ones):
        other.run().backward(dy)
    assert_same_bits(of_stacks(gradients(case)), of_stacks(gradients(other)))


def test_gradients_asked_of_autograd_grad() -> None:
    """As torch's own split backward asks: the stage's inputs first."""
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy)
    y = case.run(deferred=store)
    with store.collecting() as pending:
        dx, dw = torch.autograd.grad(y, [case.tensors["x"], case.tensors["weights"]], dy)
    pending[0]()
    assert_same_bits({"y": whole["y"], "x": dx, "weights": dw, **gradients(case)}, whole)
    with store.collecting(), pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(case.run(deferred=store), [case.tensors["down"]], dy)


@pytest.mark.parametrize("save_h", [True, False])
def test_under_hooks_that_move_what_is_saved(save_h: bool) -> None:
    case = make(gpt_oss=True).to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    whole = at_once(case, dy, save_h=save_h)
    packed: list[weakref.ref] = []

    def pack(t: Tensor) -> tuple[Tensor, torch.dtype]:
        moved = t.detach().double()
        packed.append(weakref.ref(moved))
        return moved, t.dtype

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0].to(saved[1])):
        assert_same_bits(deferred(case, dy, save_h=save_h), whole)
        assert_same_bits(at_once(case, dy, save_h=save_h, deferred=WeightGradients()), whole)
    assert packed and all(ref() is None for ref in packed)


@pytest.mark.parametrize("save_h", [True, False])
def test_under_checkpointing(save_h: bool) -> None:
    case = make(gpt_oss=True).to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    whole = at_once(case, dy, save_h=save_h)

    def keeping():
        return create_selective_checkpoint_contexts([torch.ops.forebay.experts.default])

    for kept, more in ((False, {}), (True, {"context_fn": keeping})):
        for collects in (True, False):
            store, one = WeightGradients(), fresh(case)
            y = checkpoint(one.run, use_reentrant=False, deferred=store, save_h=save_h, **more)
            with FlopCounterMode(display=False) as counter:
                if collects:
                    (compute,) = collect(store, y, dy)
                    compute()
                else:
                    y.backward(dy)
            assert_same_bits(whole, {"y": y.detach(), **gradients(one)})
            again = 0 if save_h else H_FLOPS
            assert counter.get_total_flops() == (2 if kept else 3) * FORWARD_FLOPS + again


@pytest.mark.parametrize("save_h", [True, False])
def test_flops_of_the_two_parts(save_h: bool) -> None:
    again = 0 if save_h else H_FLOPS
    case, store = make().to(torch.float32), WeightGradients()
    y = case.run(deferred=store, save_h=save_h)
    with store.collecting() as pending:
        for run, wanted in ((y.sum().backward, FORWARD_FLOPS + again), (lambda: pending[0](), FORWARD_FLOPS)):
            with FlopCounterMode(display=False) as counter:
                run()
            assert counter.get_total_flops() == wanted
    for frozen, part in (("gate_up", 1), ("down", 2)):
        one = fresh(case)
        one.tensors[frozen].requires_grad_(False)
        (compute,) = collect(store, one.run(deferred=store), torch.ones(T, H))
        with FlopCounterMode(display=False) as counter:
            compute()
        assert counter.get_total_flops() == part * FORWARD_FLOPS // 3


@pytest.mark.parametrize("through_view", [False, True])
def test_a_gradient_that_is_also_another_tensors(through_view: bool) -> None:
    """The residual's gradient is dy itself. Autograd sees that it is held, unless it is a view."""
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy * 2)
    leaf = torch.zeros((1, T, H) if through_view else (T, H), requires_grad=True)
    residual = leaf.view(T, H) if through_view else leaf
    (compute,) = collect(store, (residual + case.run(deferred=store)).mul(2), dy)
    (leaf * 3).sum().backward()
    if through_view:
        with pytest.raises(RuntimeError, match="gradient that came into the experts changed"):
            compute()
        assert all(case.tensors[n].grad is None for n in STACKS)
    else:
        compute()
        assert_same_bits(of_stacks(gradients(case)), of_stacks(whole))


def test_tokens_that_are_written_to_before_the_second_part() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    (compute,) = collect(store, case.run(deferred=store), torch.ones(T, H))
    with torch.no_grad():
        case.tensors["x"].zero_()
        case.tensors["gate_up"].zero_()  # parameters may change: they are not read again
    with pytest.raises(RuntimeError, match="tokens that came into"):
        compute()


def test_an_operation_between_parameter_and_experts() -> None:
    """Its backward runs in the second part, with what it saved: here a product, and a cast."""
    case = make().to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    found = []
    for given in (None, WeightGradients()):
        torch.manual_seed(0)
        left, right = torch.randn(E, 2 * WIDTH, 2, requires_grad=True), torch.randn(E, 2, H, requires_grad=True)
        one = fresh(case)
        one.tensors["gate_up"] = (left @ right).bfloat16()
        y = one.run(deferred=given)
        if given is None:
            y.backward(dy)
        else:
            (compute,) = collect(given, y, dy)
            assert left.grad is None
            compute()
        found.append({"left": left.grad, "right": right.grad, "down": one.tensors["down"].grad})
    assert_same_bits(*found)


def test_views_of_one_flat_parameter_reach_it_once() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy)
    flat = torch.cat([case.tensors[n].detach().flatten() for n in STACKS]).requires_grad_()
    arrived = []
    flat.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad))
    for name, part in zip(STACKS, flat.split([case.tensors[n].numel() for n in STACKS]), strict=True):
        case.tensors[name] = part.view(case.tensors[name].shape)
    (compute,) = collect(store, case.run(deferred=store), dy)
    assert not arrived
    compute()
    assert len(arrived) == 1
    assert torch.equal(flat.grad, torch.cat([whole[n].flatten() for n in STACKS]))


def test_compiled_code_leaves_the_call_to_python() -> None:
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy)
    torch._dynamo.reset()
    y = torch.compile(lambda: case.run(deferred=store) * 1.0, backend="aot_eager")()
    (compute,) = collect(store, y, dy)
    assert case.tensors["down"].grad is None
    compute()
    assert_same_bits({"y": y.detach(), **gradients(case)}, whole)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run in eager mode"):
        torch.compile(lambda: case.run(deferred=store), backend="aot_eager", fullgraph=True)()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_distributed_parameters(mesh: DeviceMesh) -> None:
    """Expert parallelism passes `DTensor.to_local`; the gradient arrives as a DTensor."""
    case, store = make().to(torch.float32), WeightGradients()
    dy = torch.randn(T, H)
    whole = at_once(case, dy)
    parameters = {n: nn.Parameter(distribute_tensor(case.tensors[n].detach(), mesh, [Shard(0)])) for n in STACKS}
    arrived = []
    for p in parameters.values():
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad))
    case.tensors |= {n: p.to_local() for n, p in parameters.items()}
    (compute,) = collect(store, case.run(deferred=store), dy)
    assert not arrived and all(p.grad is None for p in parameters.values())
    compute()
    assert len(arrived) == 2
    for name, p in parameters.items():
        assert isinstance(p.grad, DTensor) and p.grad.placements != (Replicate(),)
        assert torch.equal(p.grad.to_local(), whole[name])


@pytest.mark.parametrize("distributed", [False, True])
def test_the_gradient_of_down_arrives_before_that_of_gate_up_is_made(
    distributed: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, store, said = make().to(torch.float32), WeightGradients(), list[str]()

    def computes(*operands: object) -> Tensor:
        said.append("computes")
        return compute_one(*operands)

    compute_one = wgrad.experts_weight_backward_op
    monkeypatch.setattr(wgrad, "experts_weight_backward_op", computes)
    for name in STACKS:
        parameter = case.tensors[name]
        if distributed:
            parameter = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            case.tensors[name] = parameter.to_local()
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: said.append(name))
    (compute,) = collect(store, case.run(deferred=store), torch.randn(T, H))
    compute()
    assert said == ["computes", "down", "computes", "gate_up"]


def test_without_a_store_too_the_gradient_of_a_distributed_down_arrives_first(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = build_tiny("qwen3_moe"), list[str]()
    model.set_experts_implementation(register())
    module = moe_blocks(model)[0].experts

    def computes(*operands: object) -> Tensor:
        said.append("computes")
        return compute_one(*operands)

    compute_one = wgrad.experts_weight_backward_op
    monkeypatch.setattr(wgrad, "experts_weight_backward_op", computes)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        getattr(module, name).register_post_accumulate_grad_hook(lambda _, name=name: said.append(name))
    x = torch.randn(T, HIDDEN, requires_grad=True)
    for max_rows in (None, 2 * T):
        module(x, torch.randint(0, EXPERTS, (T, K)), torch.rand(T, K), max_rows=max_rows).sum().backward()
        assert said == ["down_proj", "computes", "gate_up_proj"]
        said.clear()
    with pytest.raises(ValueError, match=r"x \[T, H\], ids and weights \[T, K\] do not fit"):
        module(x, torch.zeros(T, dtype=torch.int64), torch.rand(T, K))


class _Module(nn.Module):
    def __init__(self, case: Case, store: WeightGradients | None):
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(case.tensors[n].detach().clone()) for n in STACKS)
        self.ids, self.store = case.ids, store

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return experts(x, self.ids, weights, self.gate_up, self.down, deferred=self.store)


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_that_fsdp2_frees_in_between(mesh: DeviceMesh, reshard: bool) -> None:
    """Two microbatches without reduction, the second parts after both; then FSDP2 reduces what arrived."""
    case, store = make().to(torch.float32), WeightGradients()
    dys = torch.randn(2, T, H).unbind()
    x, weights = case.tensors["x"].detach(), case.tensors["weights"].detach()
    plain = _Module(case, None)
    for dy in dys:
        plain(x.clone().requires_grad_(), weights).backward(dy)
    module = _Module(case, store)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(reshard)
    computes = [collect(store, module(x.clone().requires_grad_(), weights), dy).pop() for dy in dys]
    for compute in computes:
        compute()
    module.set_requires_gradient_sync(True)
    module.set_reshard_after_backward(True)
    # What FSDP2 does at the end of a backward pass, which came before the second parts here.
    group = fully_shard.state(module)._fsdp_param_group
    if not reshard:
        group.post_backward()
        end_backward(module)
        for name in STACKS:
            assert torch.equal(getattr(module, name).grad.full_tensor(), getattr(plain, name).grad)
    else:
        for p in group.fsdp_params:
            name = "gate_up" if p._unsharded_param.shape[1] == 2 * WIDTH else "down"
            assert torch.equal(p._unsharded_param.grad, getattr(plain, name).grad)


def test_a_transformers_module_names_its_store() -> None:
    model = build_tiny("qwen3_moe")
    model.set_experts_implementation(register())
    module = moe_blocks(model)[0].experts
    inputs = torch.randn(T, HIDDEN, requires_grad=True), torch.randint(0, EXPERTS, (T, K)), torch.rand(T, K)
    module(*inputs).sum().backward()
    whole = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()

    keys = list(module.state_dict())
    module.forebay_weight_gradients = store = WeightGradients()
    assert "forebay_weight_gradients" in module.__dict__ and list(module.state_dict()) == keys
    twin = copy.deepcopy(module)
    assert isinstance(twin.forebay_weight_gradients, WeightGradients) and twin.forebay_weight_gradients is not store
    store.sums = lambda weight: lambda: torch.empty(0)
    assert all(other(store).sums is WeightGradients().sums for other in (copy.deepcopy, copy.copy))
    assert pickle.loads(pickle.dumps(store)).sums is WeightGradients().sums
    store.sums = WeightGradients().sums
    with store.collecting() as pending:
        module(*inputs).sum().backward()
        twin(*inputs).sum().backward()
    assert len(pending) == 1 and module.down_proj.grad is None
    pending[0]()
    for one in (module, twin):
        assert_same_bits({n: p.grad for n, p in one.named_parameters()}, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_on_the_gpu_deferred_is_at_once_and_never_waits(gpt_oss: bool, save_h: bool) -> None:
    case, dy = gpu_case(gpt_oss)
    whole = at_once(case, dy, save_h=save_h)
    poison_gpu_memory()
    assert_same_bits(deferred(case, dy, save_h=save_h), whole)
    assert_same_bits(at_once(case, dy, save_h=save_h, deferred=WeightGradients()), whole)
    store = WeightGradients()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = case.run(deferred=store, save_h=save_h)
        collect(store, y, dy).pop()()
        case.run(deferred=store, save_h=save_h).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("save_h", [True, False])
def test_on_the_gpu_the_peaks_of_both_parts(save_h: bool) -> None:
    case, dy = gpu_case(gpt_oss=False, tokens=16384)
    rows, hidden, width, store = case.ids.numel(), 512, 256, WeightGradients()
    case.tensors["x"].requires_grad_(True)

    def step() -> Callable[[], None]:
        return collect(store, case.run(deferred=store, save_h=save_h), dy).pop()

    step()()  # whatever is allocated once
    for t in case.tensors.values():
        t.grad = None
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    small = 2**23  # the routing, dx, the routing weights' gradient, rounding of the allocator

    y = case.run(deferred=store, save_h=save_h)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with store.collecting() as pending:
        y.backward(dy)
    assert torch.cuda.max_memory_allocated() - before <= 2 * rows * (hidden + 3 * width) + dy.nbytes + small
    del y
    held = torch.cuda.memory_allocated() - base - case.tensors["x"].nbytes  # dx, which is x's size
    assert held <= 6 * rows * width + small
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    parameters = 2 * 16 * 3 * hidden * width
    pending.pop()()
    assert torch.cuda.max_memory_allocated() - before <= 2 * rows * hidden + parameters + small
    assert torch.cuda.memory_allocated() - base <= parameters + case.tensors["x"].nbytes + small
