"""Experts on the kernels for Hopper: against today's on a CPU with the package's formulas, and with the package on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forebay.kernels import hopper
from forebay.moe import experts as experts_module
from forebay.moe.experts import experts
from forebay.moe.experts_op import NO_EDGE, NO_UPDATES
from forebay.moe.wgrad import WeightGradients, gate_up_edge
from tests.kernels import fake_quack
from tests.moe.test_experts import (
    IDS,
    TOLERANCE,
    WIDTH,
    Case,
    H,
    K,
    T,
    assert_close,
    assert_same_bits,
    check_never_waits_and_replays,
    gpu_case,
    make,
    poison_gpu_memory,
    truth_of,
)
from tests.moe.test_wgrad import at_once, collect, deferred, fresh, gradients

KERNELS = {"forward": ["gemm_gated"], "backward": ["gemm_dgated", "gemm", "gemm", "gemm"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The package's functions that are called, which run on this device; experts of bf16 are handled."""
    if hopper.is_installed() and torch.cuda.is_available():
        pytest.skip("the package is there")
    monkeypatch.setattr(hopper, "handles", lambda gate_up, down: gate_up.dtype == torch.bfloat16)
    return fake_quack.install(monkeypatch)


def bf16_case(ids: str = "sentinels", frozen: tuple[str, ...] = ()) -> tuple[Case, Tensor]:
    case = make(IDS[ids]()).to(torch.bfloat16)
    for name in frozen:
        case.tensors[name].requires_grad_(False)
    return case, torch.randn(case.ids.shape[0], H).bfloat16()


def unfused(case: Case, dy: Tensor, monkeypatch: pytest.MonkeyPatch, **more) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "handles", lambda gate_up, down: False)
        return at_once(case, dy, **more)


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize("ids", IDS)
def test_against_the_definition(calls: list[str], ids: str, save_h: bool) -> None:
    case, dy = bf16_case(ids)
    got = at_once(case, dy, save_h=save_h)
    again = ["gemm_gated"] if not save_h else []
    assert calls == [*KERNELS["forward"], *again, *KERNELS["backward"]]
    assert_close(got, truth_of(case, dy), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("save_h", [True, False])
@pytest.mark.parametrize(
    "frozen",
    [
        (),
        ("gate_up",),
        ("down",),
        ("x",),
        ("x", "gate_up"),
        ("x", "weights", "gate_up"),
        ("x", "gate_up", "down"),
        ("gate_up", "down"),
        ("weights",),
    ],
    ids=str,
)
def test_every_choice_of_what_is_trained(
    calls: list[str], frozen: tuple[str, ...], save_h: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, dy = bf16_case(frozen=frozen)
    got = at_once(case, dy, save_h=save_h)
    truth = {n: t for n, t in truth_of(case, dy).items() if n not in frozen}
    assert_close(got, truth, TOLERANCE[torch.bfloat16])
    kept, recomputed = at_once(case, dy), at_once(case, dy, save_h=False)
    assert_same_bits(kept, recomputed)
    later = deferred(case, dy, save_h=save_h)
    assert_same_bits(later, got)


@pytest.mark.parametrize("max_rows", [0, 8, 20, 200])
def test_with_fewer_rows_than_slots(calls: list[str], max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dy = bf16_case()
    case.ids[4:] = -1
    got = at_once(case, dy, max_rows=max_rows)
    assert_close(got, {n: t.double() for n, t in unfused(case, dy, monkeypatch, max_rows=max_rows).items()}, 2e-2)
    assert bool(calls) == (max_rows > 0)


def test_without_tokens(calls: list[str]) -> None:
    case, _ = bf16_case()
    case.ids = case.ids[:0]
    for name in ("x", "weights"):
        case.tensors[name] = case.tensors[name].detach()[:0].requires_grad_()
    got = at_once(case, torch.empty(0, H).bfloat16())
    assert not calls and not got["gate_up"].any() and not got["down"].any() and got["x"].shape == (0, H)


def test_sums_of_deferred_gradients(calls: list[str]) -> None:
    case, dy = bf16_case()
    want = at_once(case, dy)
    case, store = fresh(case), WeightGradients()
    before = {n: torch.randn(case.tensors[n].shape) for n in ("gate_up", "down")}
    sums = {n: t.clone() for n, t in before.items()}
    store.sums = lambda weight: lambda: next(t for n, t in sums.items() if case.tensors[n] is weight)
    for compute in collect(store, case.run(deferred=store), dy):
        compute()
    assert gradients(case).keys() == {"x", "weights"}
    for name, total in sums.items():
        torch.testing.assert_close(total - before[name], want[name].float(), atol=2e-3, rtol=2**-7)


@pytest.mark.parametrize("save_h", [True, False])
def test_compiled_to_the_same_bits(calls: list[str], save_h: bool) -> None:
    case, dy = bf16_case()
    eager = case.grads(dy, save_h=save_h)
    torch._dynamo.reset()
    case.run = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    count = len(calls)
    assert_same_bits(case.grads(dy, save_h=save_h), eager)
    assert len(calls) == 2 * count, "compiled code has the answer of `handles`"


def test_a_graph_that_is_kept_keeps_h(calls: list[str]) -> None:
    case, dy = bf16_case()
    y = case.run()
    y.backward(dy, retain_graph=True)
    first = gradients(case)
    for t in case.tensors.values():
        t.grad = None
    y.backward(dy)
    assert_same_bits(first, gradients(case))


@pytest.mark.parametrize("edge_fused", [False, True])
def test_an_edge_of_other_experts_is_not_used(
    calls: list[str], edge_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code has got its edge from outside, where the decision may have been another."""
    case, dy = bf16_case()
    want = at_once(case, dy)
    edge = gate_up_edge(case.tensors["gate_up"], T, T * K, K, False, edge_fused)
    assert_same_bits(case.grads(dy, edge=edge), want)
    monkeypatch.setattr(hopper, "handles", lambda gate_up, down: False)
    plain = at_once(case, dy)
    edge = gate_up_edge(case.tensors["gate_up"], T, T * K, K, False, edge_fused)
    assert_same_bits(case.grads(dy, edge=edge), plain)


def test_what_is_computed_without_them(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for gpt_oss, ranks in ((True, None), (False, {"gate_up": 4}), (False, {"down": 4})):
        case = make(gpt_oss=gpt_oss, ranks=ranks).to(torch.bfloat16)
        case.grads(torch.randn(T, H).bfloat16())
    case = make(width=32).to(torch.bfloat16)
    case.grads(torch.randn(T, H).bfloat16(), precision="fp8")
    plain = {name: t.transpose(1, 2).contiguous() for name, t in case.tensors.items() if name in ("gate_up", "down")}
    experts(case.tensors["x"], case.ids, case.tensors["weights"], **plain, transposed=True)
    assert not calls
    case.run()
    assert calls == KERNELS["forward"]


def test_flops_are_the_same(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> int:
        case, dy = bf16_case()
        with FlopCounterMode(display=False) as counter:
            case.grads(dy, save_h=False)
        return counter.get_total_flops()

    fused = counted()
    assert calls
    monkeypatch.setattr(hopper, "handles", lambda gate_up, down: False)
    assert counted() == fused > 0


def test_opcheck(calls: list[str]) -> None:
    case, dy = bf16_case("mixed")  # rows of sentinels are uninitialized in h, act and dh
    t = {n: v.detach() for n, v in case.tensors.items()}
    rest = (t["weights"], t["gate_up"], t["down"], None, None, "swiglu", False, False, 1.0, 0.0)
    for save_h, max_rows in (("exact", None), ("", 20)):
        arguments = (t["x"], case.ids, *rest, save_h, max_rows, *NO_UPDATES, *NO_EDGE, True)
        torch.library.opcheck(
            torch.ops.forebay.experts.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
    _, h, *routing = torch.ops.forebay.experts(t["x"], case.ids, *rest, "exact", None, *NO_UPDATES, *NO_EDGE, True)
    for kept, defers in ((h, False), (None, False), (h, True)):
        needs = (True, True, True, True, False, False)
        arguments = (dy, t["x"], kept, *routing, *rest, *needs, defers, *NO_UPDATES, *[False] * 4, True)
        torch.library.opcheck(torch.ops.forebay.experts_backward.default, arguments)
    order, _, offs = routing
    for tokens_first, width in ((True, WIDTH), (False, 2 * WIDTH)):
        arguments = (dy, torch.randn(order.shape[0], width).bfloat16(), order, offs, K, tokens_first, True)
        torch.library.opcheck(torch.ops.forebay.experts_weight_backward.default, arguments)


needs_kernels = pytest.mark.skipif(not hopper.is_installed(), reason="needs quack-kernels")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `handles` answered."""
    answers: list[bool] = []
    handles: Callable[[Tensor, Tensor], bool] = hopper.handles
    monkeypatch.setattr(experts_module.hopper, "handles", lambda *args: answers.append(handles(*args)) or answers[-1])
    return answers


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("tokens", [1, 7, 1024])
def test_on_the_gpu_against_fp64_and_the_same_bits_however_it_is_placed(tokens: int, noted: list[bool]) -> None:
    case, dy = gpu_case(gpt_oss=False, tokens=tokens)
    truth = {n: t.double() for n, t in case.to(torch.float64, "cpu").grads(dy.double().cpu()).items()}
    poison_gpu_memory()
    got = at_once(case, dy)
    assert noted[-1], "the kernels are not used"
    assert_close(got, truth, 2e-2)
    for more in ({}, {"save_h": False}):
        poison_gpu_memory()
        assert_same_bits(at_once(case, dy, **more), got)
        assert_same_bits(deferred(case, dy, **more), got)
    rows = case.ids.numel() + 100
    assert_same_bits(at_once(case, dy, max_rows=rows), got)


@pytest.mark.gpu
@needs_kernels
def test_on_the_gpu_sums_of_deferred_gradients(noted: list[bool]) -> None:
    case, dy = gpu_case(gpt_oss=False)
    sums = {n: torch.randn(case.tensors[n].shape, device="cuda") for n in ("gate_up", "down")}
    want, before = at_once(case, dy), {n: t.clone() for n, t in sums.items()}
    case, store = fresh(case), WeightGradients()
    store.sums = lambda weight: lambda: next(t for n, t in sums.items() if case.tensors[n] is weight)
    for compute in collect(store, case.run(deferred=store), dy):
        compute()
    assert noted[-1]
    for name, total in sums.items():
        error = (total - before[name] - want[name].float()).norm() / want[name].float().norm()
        assert error < 4e-3, f"{name}: {error}"


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("save_h", [False, True])
def test_on_the_gpu_a_graph_replays_with_other_ids(save_h: bool, noted: list[bool]) -> None:
    case, dy = gpu_case(gpt_oss=False)
    for _ in range(2):
        case.grads(dy, save_h=save_h)
    torch.cuda.synchronize()
    check_never_waits_and_replays(case, dy, save_h)
    assert all(noted)


@pytest.mark.gpu
@needs_kernels
def test_on_the_gpu_compiled_with_a_lower_peak(noted: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    case, dy = gpu_case(gpt_oss=False, tokens=16384)

    def peak() -> int:
        case.grads(dy)
        y = case.run()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, list(case.tensors.values()), dy)
        return torch.cuda.max_memory_allocated() - base

    eager, fused = case.grads(dy), peak()
    assert all(noted)
    run = case.run
    torch._dynamo.reset()
    case.run = torch.compile(run, fullgraph=True)
    assert_same_bits(case.grads(dy), eager)
    case.run = run
    monkeypatch.setattr(experts_module.hopper, "handles", lambda *args: False)
    plain = peak()
    # Of 2R(H + 3I) bytes, then 2R(H + 2I) and dx [T, H], the first have no dy_rows any more: 2RI - 2TH less, which is 3/4 of 2RI,
    # but for small tensors.
    assert fused <= plain - case.ids.numel() * 2 * 256 * 5 // 8, (fused, plain)
