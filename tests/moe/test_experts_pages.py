"""Experts with rows in pages: the same bits as saved rows, only live rows saved, and pages freed when autograd would."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from forebay.kernels.paging import HEAD, TAIL
from forebay.memory.page_store import PageStore
from forebay.moe.wgrad import WeightGradients
from tests.helpers import saved_storages
from tests.moe.test_experts import Case, E, H, K, assert_same_bits, make

C, LIVE = 24, 17  # rows that there is room for, and that came
SLOTS = 40


def received(live: int = LIVE, **more) -> Case:
    """Rows as a dispatcher returns them: the first ones live, each with one slot here or more; then unused rows."""
    ids = torch.where(torch.rand(C, K) < 0.4, torch.randint(0, E, (C, K)), -1)
    ids[:, 0] = torch.randint(0, E, (C,))
    ids[live:] = -1
    case = make(ids, **more)
    case.tensors["x"][live:] = float("nan")
    case.tensors["weights"][live:] = float("nan")
    return case


def gradients(case: Case, dtype: torch.dtype, frozen: tuple[str, ...] = (), **more) -> dict[str, Tensor]:
    case = case.to(dtype)
    for name in frozen:
        case.tensors[name].requires_grad_(False)
    y = case.run(max_rows=SLOTS, **more)
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).to(dtype))
    got = {n: t.grad for n, t in case.tensors.items() if t.grad is not None}
    return {"y": y.detach()[:LIVE], **{n: g[:LIVE] if n in ("x", "weights") else g for n, g in got.items()}}


def stores() -> list[PageStore]:
    """One whose first step counts, and one with an arena, of which some pages are on the host."""
    sized = PageStore("cpu", page_bytes=1024)
    sized.resize(3, 60)
    return [PageStore("cpu", page_bytes=1024), sized]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("save_h", [True, False])
def test_bits_are_those_of_kept_rows(dtype: torch.dtype, gpt_oss: bool, save_h: bool) -> None:
    case = received(gpt_oss=gpt_oss)
    kept = gradients(case, dtype, save_h=save_h)
    for store in stores():
        assert_same_bits(gradients(case, dtype, pages=store, save_h=save_h), kept)
        gc.collect()
        assert store.live_tickets == 0


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("save_h", [True, False])
def test_in_8_bits_pages_have_rows_of_33_bytes_for_64(gpt_oss: bool, save_h: bool) -> None:
    case = received(gpt_oss=gpt_oss, width=64, hidden=32)
    case.settings |= (
        {"limit": 7.0} if gpt_oss else {}
    )  # rounded to the other side of the clamp, a gate has another derivative
    kept = gradients(case, torch.bfloat16, save_h=save_h, precision="fp8")
    exact = gradients(case, torch.bfloat16)
    for store in stores():
        taken, take = [], store.take
        store.take = lambda wanted, taken=taken, take=take: (taken.extend(wanted), take(wanted))[1]  # type: ignore[method-assign]
        got = gradients(case, torch.bfloat16, pages=store, save_h=save_h, precision="fp8")
        assert [rows.row_bytes for rows in taken] == [132] * save_h + [33]
        for name in got:
            # x is read for gate_up's gradient alone, unless h is recomputed from it.
            if name == "y" or (save_h and name != "gate_up"):
                assert torch.equal(got[name], kept[name]), name
            assert (got[name].double() - exact[name].double()).norm() <= 0.08 * exact[name].double().norm(), name
        gc.collect()
        assert store.live_tickets == 0


@pytest.mark.parametrize("live", [0, 1, LIVE, C])
def test_any_number_of_rows(live: int) -> None:
    case = received(live)
    kept = gradients(case, torch.float32)
    for store in stores():
        assert_same_bits(gradients(case, torch.float32, pages=store), kept)


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize(
    "frozen", [("gate_up",), ("down",), ("gate_up", "down"), ("x", "weights"), ("x", "weights", "gate_up"), ("x",)]
)
def test_frozen_tensors(frozen: tuple[str, ...], save_h: bool) -> None:
    case = received()
    kept = gradients(case, torch.float32, frozen, save_h=save_h)
    for store in stores():
        assert_same_bits(gradients(case, torch.float32, frozen, pages=store, save_h=save_h), kept)


def test_no_pages_without_a_backward() -> None:
    store = stores()[1]
    with torch.no_grad():
        received().to(torch.float32).run(max_rows=SLOTS, pages=store)
    assert store.live_tickets == 0


def test_only_live_rows_take_pages() -> None:
    store = stores()[1]
    case = received().to(torch.float32)
    y = case.run(max_rows=SLOTS, pages=store)
    assert store.live_tickets == 1
    state = store.end_step()
    rows = int((case.ids >= 0).sum())
    h_pages = -(-rows // (1024 // (2 * case.tensors["down"].shape[2] * 4)))
    x_pages = -(-LIVE // (1024 // (H * 4)))
    assert state.bytes_out == (h_pages + x_pages) * 1024
    assert y.requires_grad


def test_nothing_of_capacity_is_saved() -> None:
    """No tensor that autograd saves has x's or h's bytes."""
    case = received().to(torch.float32)
    with saved_storages(*(t for n, t in case.tensors.items() if n != "x")) as saved:
        y = case.run(max_rows=SLOTS, pages=stores()[1])
    assert max(t.untyped_storage().nbytes() // t.itemsize for t in saved.values()) <= C * K
    assert y.requires_grad


def test_x_without_a_bound_on_the_rows_is_saved_by_autograd() -> None:
    """It is this rank's own tokens, which other modules save as well; only h takes pages."""
    store = stores()[1]
    case = make().to(torch.float32)
    kept = case.grads(torch.ones(len(case.ids), H))
    y = case.run(pages=store)
    rows = case.ids.numel()
    assert store.end_step().bytes_out == -(-rows // (1024 // (2 * case.tensors["down"].shape[2] * 4))) * 1024
    y.backward(torch.ones_like(y))
    assert_same_bits({"y": y.detach(), **{n: t.grad for n, t in case.tensors.items()}}, kept)  # type: ignore[misc]


def test_pages_are_free_after_backward_though_the_loss_is_held() -> None:
    store = stores()[1]
    loss = received().to(torch.float32).run(max_rows=SLOTS, pages=store)[:LIVE].sum()
    loss.backward(retain_graph=True)
    assert store.live_tickets == 1
    loss.backward()
    assert store.live_tickets == 0


class _WithoutGradient(torch.autograd.Function):
    """Passes y on; its backward gives y no gradient."""

    @staticmethod
    def forward(ctx, y):
        ctx.set_materialize_grads(False)
        return y.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_pages_are_free_though_y_gets_no_gradient_and_is_held() -> None:
    store = stores()[1]
    y = received().to(torch.float32).run(max_rows=SLOTS, pages=store)
    _WithoutGradient.apply(y).sum().backward()
    assert store.live_tickets == 0 and y.requires_grad


def test_a_held_loss_does_not_hold_the_arena() -> None:
    """The node must not own the store."""
    store = stores()[1]
    y = received().to(torch.float32).run(max_rows=SLOTS, pages=store)
    y[:LIVE].sum().backward()
    arena = weakref.ref(store)
    del store
    gc.collect()
    assert arena() is None and y.requires_grad


def test_a_dropped_graph_gives_its_pages_back() -> None:
    store = stores()[1]
    y = received().to(torch.float32).run(max_rows=SLOTS, pages=store)
    assert store.live_tickets == 1
    del y
    assert store.live_tickets == 0
    state = store._memory.free.state.tolist()  # type: ignore[union-attr]
    assert state[TAIL] - state[HEAD] == 63


@pytest.mark.parametrize("frozen", [(), ("gate_up",), ("x", "weights", "gate_up")])
@pytest.mark.parametrize("sized", [0, 1])
def test_deferred_weight_gradients(sized: int, frozen: tuple[str, ...]) -> None:
    """x stays in its pages until the second part, and the bits are those of one part."""
    case = received()
    kept = gradients(case, torch.float32, frozen)
    store, deferred = stores()[sized], WeightGradients()
    own = case.to(torch.float32)
    for name in frozen:
        own.tensors[name].requires_grad_(False)
    with deferred.collecting() as pending:
        y = own.run(max_rows=SLOTS, pages=store, deferred=deferred)
        torch.manual_seed(3)
        y.backward(torch.randn(y.shape))
    (compute,) = pending
    assert own.tensors["down"].grad is None
    pending.clear()
    assert store.live_tickets == (not frozen)  # x is read for gate_up's gradient
    compute()
    assert store.live_tickets == 0
    for name in set(kept) & {"gate_up", "down"}:
        assert torch.equal(own.tensors[name].grad, kept[name])  # type: ignore[arg-type]
