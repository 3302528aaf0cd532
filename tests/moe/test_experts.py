"""The experts operation: against a loop over slots in fp64, and what it saves, to the byte."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from forebay.kernels import grouped
from forebay.kernels.grouped import rows_by_matrix, rows_by_rows
from forebay.kernels.row_fp8 import decode_rows, encode_rows
from forebay.moe import experts_compute, wgrad
from forebay.moe.experts import experts
from forebay.moe.experts_op import NO_EDGE, NO_UPDATES, experts_weight_backward_op
from forebay.moe.low_rank import LowRank
from forebay.moe.wgrad import WeightGradients, gate_up_edge
from tests.helpers import saved_storages, storage_bytes

T, H, WIDTH, E, K = 13, 16, 24, 5, 3
SCALES = {"gate_up": 0.75, "down": 1.5}  # of the low-rank updates
FORWARD_FLOPS = 2 * T * K * 3 * H * WIDTH
H_FLOPS = 2 * T * K * 2 * H * WIDTH  # to recompute h


@dataclass
class Case:
    """Inputs of `experts` and its settings; the parameters that may be trained by name."""

    tensors: dict[str, Tensor]
    ids: Tensor
    settings: dict = field(default_factory=dict)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Case":
        tensors = {n: t.detach().to(device, dtype).requires_grad_() for n, t in self.tensors.items()}
        return Case(tensors, self.ids.to(device), self.settings)

    def run(self, **more) -> Tensor:
        t = self.tensors
        return experts(
            t["x"], self.ids, t["weights"], t["gate_up"], t["down"],
            gate_up_bias=t.get("gate_up_bias"), down_bias=t.get("down_bias"),
            **{f"{n}_update": LowRank(t[f"{n}_a"], t[f"{n}_b"], SCALES[n]) for n in SCALES if f"{n}_a" in t},
            **self.settings, **more,
        )  # fmt: skip

    def grads(self, dy: Tensor, **more) -> dict[str, Tensor]:
        """y and the gradient of every tensor that requires one."""
        y = self.run(**more)
        wanted = {n: t for n, t in self.tensors.items() if t.requires_grad}
        got = torch.autograd.grad(y, list(wanted.values()), dy)
        return {"y": y.detach(), **dict(zip(wanted, got, strict=True))}


def by_hand(case: Case) -> Tensor:
    """The definition, slot by slot, differentiable."""
    t, s = case.tensors, case.settings
    gate_up, down = t["gate_up"], t["down"]
    if s.get("transposed"):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if "gate_up_a" in t:
        gate_up = gate_up + SCALES["gate_up"] * t["gate_up_b"] @ t["gate_up_a"]
    if "down_a" in t:
        down = down + SCALES["down"] * t["down_b"] @ t["down_a"]
    tokens = []
    for token in range(case.ids.shape[0]):
        y = t["x"][token] * 0
        for k in range(case.ids.shape[1]):
            e = int(case.ids[token, k])
            if not 0 <= e < gate_up.shape[0]:
                continue
            h = gate_up[e] @ t["x"][token]
            if "gate_up_bias" in t:
                h = h + t["gate_up_bias"][e]
            gate, up = (h[::2], h[1::2]) if s.get("interleaved") else h.chunk(2)
            if "limit" in s:
                gate, up = gate.clamp(max=s["limit"]), up.clamp(-s["limit"], s["limit"])
            if s.get("activation") == "clamped_swiglu":
                act = gate * torch.sigmoid(s["alpha"] * gate) * (up + 1)
            else:
                act = torch.nn.functional.silu(gate) * up
            out = down[e] @ act
            if "down_bias" in t:
                out = out + t["down_bias"][e]
            y = y + t["weights"][token, k] * out
        tokens.append(y)
    return torch.stack(tokens)


def make(
    ids: Tensor | None = None,
    *,
    gpt_oss: bool = False,
    width: int = WIDTH,
    hidden: int = H,
    ranks: dict[str, int] | None = None,
) -> Case:
    """`ranks`: of the low-rank updates, by projection."""
    ids = torch.randint(0, E, (T, K)) if ids is None else ids
    shapes = {"gate_up": (E, 2 * width, hidden), "down": (E, hidden, width)}
    settings: dict = {}
    if gpt_oss:
        shapes = {n: (e, b, a) for n, (e, a, b) in shapes.items()}
        shapes |= {"gate_up_bias": (E, 2 * width), "down_bias": (E, hidden)}
        settings = {
            "activation": "clamped_swiglu", "interleaved": True, "transposed": True,
            "alpha": 1.702, "limit": 1.0,
        }  # fmt: skip
    shapes |= {"x": (ids.shape[0], hidden), "weights": tuple(ids.shape)}
    for name, rank in (ranks or {}).items():
        inputs, outputs = (hidden, 2 * width) if name == "gate_up" else (width, hidden)
        shapes |= {f"{name}_a": (E, rank, inputs), f"{name}_b": (E, outputs, rank)}
    tensors = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    for name in tensors.keys() - {"x", "weights", "gate_up_bias", "down_bias"}:
        tensors[name] *= 0.25  # rows of h and y near 1, on both sides of the clamp
    return Case(tensors, ids, settings)


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


IDS = {
    "mixed": lambda: torch.randint(0, E, (T, K)),
    "sentinels": lambda: torch.randint(-1, E + 1, (T, K)),
    "int32 ids": lambda: torch.randint(0, E, (T, K), dtype=torch.int32),
    "experts without tokens": lambda: torch.randint(1, 3, (T, K)),
    "all on one expert": lambda: torch.full((T, K), 2),
    "one token": lambda: torch.tensor([[4, 0, 2]]),
    "one slot": lambda: torch.tensor([[1]]),
    "all sentinels": lambda: torch.full((T, K), E),
}
RANKS = {
    "gate_up, 1": {"gate_up": 1},
    "down, 4": {"down": 4},
    "both, 16": {"gate_up": 16, "down": 16},
    "both, 3 and 5": {"gate_up": 3, "down": 5},
}
# Relative to the largest entry. fp64: sums of a few hundred terms. fp32: the same, 2**-24 each.
# bf16, fp16: h, act, da and dh are rounded once each on the way, 2**-9 and 2**-12 each (the inputs'
# rounding the truth shares), and a routing weight's gradient is a sum whose terms cancel.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 6e-3}


def assert_close(got: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == truth.keys()
    for name, want in truth.items():
        assert got[name].shape == want.shape, name
        error = (got[name].double().cpu() - want).abs().max() if want.numel() else torch.zeros(())
        scale = want.abs().max().clamp(min=1e-3) if want.numel() else torch.ones(())
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


def truth_of(case: Case, dy: Tensor) -> dict[str, Tensor]:
    """y and all gradients by the definition, in fp64."""
    exact = case.to(torch.float64)
    y, leaves = by_hand(exact), exact.tensors
    grads = torch.autograd.grad(y, list(leaves.values()), dy.double(), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_against_the_definition(ids, gpt_oss: bool, dtype: torch.dtype, poisoned: None) -> None:
    case = make(IDS[ids](), gpt_oss=gpt_oss).to(dtype)
    if gpt_oss and dtype in (torch.bfloat16, torch.float16):
        # A gate rounded to the other side of the clamp has another derivative than the truth's.
        case.settings["limit"] = 7.0
    dy = torch.randn(case.ids.shape[0], H).to(dtype)
    got = case.grads(dy)
    assert all(g.dtype == dtype for g in got.values())
    assert_close(got, truth_of(case, dy), TOLERANCE[dtype])
    assert_same_bits(got, case.grads(dy, save_h=False))
    for name in ("gate_up", "down"):
        assert got[name].is_contiguous()
        unused = [e for e in range(E) if not (case.ids == e).any()]
        assert (got[name][unused] == 0).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_activation_with_limits(interleaved: bool, poisoned: None) -> None:
    case = make()
    case.settings |= {"activation": "limited_swiglu", "interleaved": interleaved, "limit": 1.0}
    case, dy = case.to(torch.float32), torch.randn(case.ids.shape[0], H)
    got = case.grads(dy)
    assert_close(got, truth_of(case, dy), TOLERANCE[torch.float32])
    assert_same_bits(got, case.grads(dy, save_h=False))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("ids", ["sentinels", "experts without tokens", "all sentinels"])
def test_low_rank_updates(ids, gpt_oss: bool, ranks: str, poisoned: None) -> None:
    """Against weights that are updated before the product."""
    made = make(IDS[ids](), gpt_oss=gpt_oss, ranks=RANKS[ranks])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = made.to(dtype)
        if gpt_oss and dtype == torch.bfloat16:
            case.settings["limit"] = 7.0
        dy = torch.randn(case.ids.shape[0], H).to(dtype)
        got, truth = case.grads(dy), truth_of(case, dy)
        assert all(g.dtype == dtype and g.is_contiguous() for g in got.values())
        # bf16: in the truth the two terms of a sum are not rounded.
        assert_close(got, truth, TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 else 1))
        assert_same_bits(got, case.grads(dy, save_h=False))
        updates = {n: t for n, t in case.tensors.items() if n.endswith(("_a", "_b"))}
        for factor in (n for n in updates if (case.ids == 0).sum() == 0):
            assert (got[factor][0] == 0).all()
        if dtype == torch.bfloat16:  # PEFT's are fp32, and views with other strides
            for name, t in updates.items():
                case.tensors[name] = t.detach().float().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
            masters = case.grads(dy)
            assert all(masters[n].dtype == torch.float32 for n in updates)
            assert_close(masters, truth, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(WIDTH, H), (7, 9)])
@pytest.mark.parametrize("setting", [None, "interleaved", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_settings_and_widths_that_no_grouped_gemm_takes(
    dtype: torch.dtype, setting, width: int, hidden: int, gpt_oss: bool
) -> None:
    case = make(IDS["sentinels"](), gpt_oss=gpt_oss, width=width, hidden=hidden)
    case.settings |= {"limit": 7.0} if gpt_oss else {}
    if setting == "transposed" and not gpt_oss:
        case.tensors |= {n: case.tensors[n].transpose(1, 2).contiguous() for n in ("gate_up", "down")}
    if setting:
        case.settings[setting] = True
    case = case.to(dtype)
    dy = torch.randn(T, hidden).to(dtype)
    assert_close(case.grads(dy), truth_of(case, dy), TOLERANCE[dtype])


@pytest.mark.parametrize("missing", ["gate_up_bias", "down_bias"])
def test_one_bias_alone(missing: str, poisoned: None) -> None:
    case = make(IDS["sentinels"](), gpt_oss=True)
    del case.tensors[missing]
    case = case.to(torch.float64)
    dy = torch.randn(T, H, dtype=torch.float64)
    assert_close(case.grads(dy), truth_of(case, dy), TOLERANCE[torch.float64])


def test_no_tokens() -> None:
    case = make(torch.zeros((0, K), dtype=torch.int64), ranks={"gate_up": 3, "down": 4}).to(torch.float32)
    got = case.grads(torch.zeros(0, H))
    assert all((got[f"{name}_{factor}"] == 0).all() for name in SCALES for factor in "ab")
    assert got["y"].shape == (0, H) and got["weights"].shape == (0, K)
    assert (got["gate_up"] == 0).all() and got["gate_up"].shape == (E, 2 * WIDTH, H)


def test_gradients_that_autograd_expands_and_inputs_that_are_views() -> None:
    case = make().to(torch.float32)
    plain = case.grads(torch.ones(T, H))
    assert_same_bits(plain, case.grads(torch.ones(()).expand(T, H)))
    wide = torch.zeros(T, H + 4)
    wide[:, 2 : H + 2] = case.tensors["x"].detach()
    case.tensors["x"] = wide[:, 2 : H + 2].requires_grad_()
    case.tensors["weights"] = case.tensors["weights"].detach().t().contiguous().t().requires_grad_()
    assert_same_bits(plain, case.grads(torch.ones(T, H)))


def saved(case: Case, **more) -> tuple[int, list[torch.Size]]:
    """Bytes of the distinct storages that autograd keeps, parameters apart, and their shapes."""
    with saved_storages(*(t for n, t in case.tensors.items() if n not in ("x", "weights"))) as found:
        y = case.run(**more)
    assert y.shape == case.tensors["x"].shape
    return storage_bytes(found.values()), [t.shape for t in found.values()]


ROUTING = 8 * T * K + 4 * E


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("ranks", [None, {"gate_up": 16, "down": 16}])
def test_saves_exactly_the_residual(gpt_oss: bool, ranks: dict[str, int] | None) -> None:
    """Low-rank updates add nothing to it."""
    case = make(gpt_oss=gpt_oss, ranks=ranks).to(torch.bfloat16)
    assert saved(case)[0] == T * (2 * H + 4 * K * WIDTH) + ROUTING + 2 * T * K
    assert saved(case, save_h=False)[0] == T * 2 * H + ROUTING + 2 * T * K


def test_frozen_tensors_save_less() -> None:
    case, biased = make().to(torch.bfloat16), make(gpt_oss=True).to(torch.bfloat16)
    updated = make(ranks={"gate_up": 4, "down": 16}).to(torch.bfloat16)
    small, h, x = ROUTING + 2 * T * K, T * 4 * K * WIDTH, T * 2 * H
    for one, trained, wanted in (
        (case, ("x",), h + small),  # LoRA: x passes a gradient on, gate_up and down are frozen
        (case, ("weights",), h + small),
        (case, ("down",), h + small),
        (case, ("gate_up",), x + h + small),
        (case, (), 0),
        (updated, ("x", "gate_up_a"), x + h + small),
        (updated, ("gate_up_b",), x + h + small),
        (updated, ("x", "down_a", "down_b"), h + small),
        (updated, ("down_b",), h + small),
        (biased, ("down_bias",), small),
    ):
        for name, t in one.tensors.items():
            t.requires_grad_(name in trained)
        assert saved(one)[0] == wanted, trained
    for t in case.tensors.values():
        t.requires_grad_()
    with torch.no_grad():
        assert saved(case)[0] == 0


@pytest.mark.parametrize("ranks", [None, {"gate_up": 2, "down": 4}])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("save_h", [False, True])
def test_each_gradient_alone_is_what_it_is_among_all(gpt_oss: bool, save_h: bool, ranks: dict[str, int] | None) -> None:
    case = make(IDS["sentinels"](), gpt_oss=gpt_oss, ranks=ranks).to(torch.float32)
    dy = torch.randn(T, H)
    everything = case.grads(dy)
    for name in case.tensors:
        for other, t in case.tensors.items():
            t.requires_grad_(other == name)
        alone = case.grads(dy, save_h=save_h)
        assert alone.keys() == {"y", name}
        assert torch.equal(alone[name], everything[name]), name


def test_runs_are_bitwise_equal_and_a_graph_may_be_walked_twice() -> None:
    case = make(gpt_oss=True).to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    assert_same_bits(case.grads(dy), case.grads(dy))
    for save_h in (True, False):
        y = case.run(save_h=save_h)
        leaves = list(case.tensors.values())
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        second = torch.autograd.grad(y, leaves, dy)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [False, True])
def test_dh_is_written_over_h_and_downs_gradient_is_in_its_sum_before_gate_ups_is_made(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, saved_h, calls = make().to(torch.float32), set(), []
    dy, down = torch.randn(T, H), case.tensors["down"]
    wanted = case.grads(dy)

    def pack(t: Tensor) -> Tensor:
        if t.shape == (T * K, 2 * WIDTH):
            saved_h.add(t.data_ptr())
        return t

    def noting(x: Tensor, dh: Tensor, *rest) -> Tensor:
        calls.append((dh.data_ptr() in saved_h, torch.equal(down.grad, wanted["down"])))
        return experts_weight_backward_op(x, dh, *rest)

    monkeypatch.setattr(wgrad, "experts_weight_backward_op", noting)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = case.run()
    y.backward(dy, retain_graph=kept)
    assert len(saved_h) == 1
    assert calls == [(not kept, True)]
    assert torch.equal(case.tensors["gate_up"].grad, wanted["gate_up"])


def test_tokens_of_another_dtype_than_the_weights() -> None:
    case = make().to(torch.bfloat16)
    case.tensors["x"] = case.tensors["x"].detach().float().requires_grad_()
    case.tensors["weights"] = case.tensors["weights"].detach().float().requires_grad_()
    dy = torch.randn(T, H)
    got = case.grads(dy)
    assert got["y"].dtype == got["x"].dtype == got["weights"].dtype == torch.float32
    assert got["gate_up"].dtype == torch.bfloat16
    low = case.to(torch.bfloat16).grads(dy.bfloat16())
    for name in ("y", "x", "gate_up", "down"):
        assert torch.equal(got[name].bfloat16(), low[name]), name


def test_an_autocast_region_changes_nothing() -> None:
    """Widths that only the loop of torch.mm takes: an operation that autocast would touch."""
    case = make(gpt_oss=True, width=7, hidden=9).to(torch.float32)
    dy = torch.randn(T, 9)
    plain = case.grads(dy)
    for save_h in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = case.run(save_h=save_h)
        grads = torch.autograd.grad(y, list(case.tensors.values()), dy)
        assert_same_bits(plain, {"y": y.detach(), **dict(zip(case.tensors, grads, strict=True))})


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("save_h", [False, True])
@pytest.mark.parametrize("ranks", [None, {"gate_up": 4, "down": 16}])
def test_compiles_in_one_graph_and_saves_no_more(gpt_oss: bool, save_h: bool, ranks: dict[str, int] | None) -> None:
    case = make(gpt_oss=gpt_oss, ranks=ranks).to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    eager, saved_bytes = case.grads(dy, save_h=save_h), saved(case, save_h=save_h)[0]
    torch._dynamo.reset()
    case.run = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    assert_same_bits(case.grads(dy, save_h=save_h), eager)
    assert saved(case, save_h=save_h)[0] == saved_bytes


@pytest.mark.parametrize(("gpt_oss", "ranks"), [(True, {}), (False, {"gate_up": 4, "down": 3})])
def test_opcheck(gpt_oss: bool, ranks: dict[str, int]) -> None:
    case = make(gpt_oss=gpt_oss, ranks=ranks).to(torch.float32)
    t = case.tensors
    settings = (*case.settings.values(),) if gpt_oss else ("swiglu", False, False, 1.0, 0.0)
    rest = (t["weights"], t["gate_up"], t["down"], t.get("gate_up_bias"), t.get("down_bias"), *settings)
    updates = [v for n, s in SCALES.items() for v in (t.get(f"{n}_a"), t.get(f"{n}_b"), s)]
    edge = gate_up_edge(t["gate_up"], T, T * K, K, gpt_oss, False)
    frozen = (rest[0], rest[1].detach(), *rest[2:])
    # Not under AOTAutograd: a traced function that returns h returns it as the backward leaves it.
    eager = ("test_schema", "test_autograd_registration", "test_faketensor")
    for save_h, max_rows in (("exact", None), ("", None), ("exact", 20)):
        arguments = (t["x"], case.ids, *rest, save_h, max_rows, *updates, *NO_EDGE, False)
        torch.library.opcheck(torch.ops.forebay.experts.default, arguments, test_utils=eager)
    arguments = (t["x"], case.ids, *frozen, "exact", None, *updates, *edge.tensors, False)
    torch.library.opcheck(torch.ops.forebay.experts.default, arguments, test_utils=eager)
    x, dy = t["x"].detach(), torch.randn(T, H)
    rest = tuple(a.detach() if isinstance(a, Tensor) else a for a in rest)
    updates = [a.detach() if isinstance(a, Tensor) else a for a in updates]
    everything = (True,) * 4
    for max_rows in (None, 20):
        _, h, *routing = torch.ops.forebay.experts(x, case.ids, *rest, "exact", max_rows, *updates, *NO_EDGE, False)
        for kept, needs, deferred in (
            (h, everything, False),
            (None, everything, False),
            (h, everything, True),
            (h, (True, False, False, True), True),
            (h, (False, False, True, False), True),
        ):
            arguments = (dy, x, kept, *routing, *rest, *needs, gpt_oss, gpt_oss, deferred, *updates)
            arguments = (*arguments, *[bool(ranks)] * 3, bool(ranks) and needs[0], False)
            torch.library.opcheck(torch.ops.forebay.experts_backward.default, arguments)
    order, _, offs = routing
    for tokens_first in (True, False):
        arguments = (dy, torch.randn(order.shape[0], WIDTH), order, offs, K, tokens_first, False)
        torch.library.opcheck(torch.ops.forebay.experts_weight_backward.default, arguments)


def rounded_gradients(case: Case, dy: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """`case.grads(dy)` with h rounded as a whole before the plain kernel of the activation's backward reads it."""
    backward = experts_compute.swiglu_backward

    def rounding(h: Tensor, da: Tensor, *args, over_h: bool, **more):
        dh, act, dw = backward(decode_rows(encode_rows(h), h.shape[1]), da, *args, over_h=True, **more)
        return (h.copy_(dh) if over_h and dh is not None else dh), act, dw

    with monkeypatch.context() as patched:
        patched.setattr(experts_compute, "swiglu_backward", rounding)
        return case.grads(dy)


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("ids", ["mixed", "sentinels", "one slot", "all sentinels"])
def test_in_8_bits_gradients_are_those_of_rounded_rows(
    ids: str, gpt_oss: bool, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(IDS[ids](), gpt_oss=gpt_oss, width=64).to(torch.bfloat16)
    dy = torch.randn(case.ids.shape[0], H).bfloat16()
    exact, got = case.grads(dy), case.grads(dy, precision="fp8")
    assert_same_bits(got, rounded_gradients(case, dy, monkeypatch))
    assert torch.equal(got["y"], exact["y"])
    for name, gradient in got.items():
        # A gradient reads each number of h about once; e4m3's rounding has a standard deviation of 0.026.
        assert (gradient.double() - exact[name].double()).norm() <= 0.06 * exact[name].double().norm(), name
    if ids == "mixed":
        assert not torch.equal(got["x"], exact["x"])
    assert_same_bits(case.grads(dy, precision="fp8", save_h=False), exact)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 48)])
def test_what_cannot_be_in_8_bits_is_saved_to_the_bit(dtype: torch.dtype, width: int) -> None:
    case, dy = make(width=width).to(dtype), torch.randn(T, H).to(dtype)
    assert_same_bits(case.grads(dy, precision="fp8"), case.grads(dy))


@pytest.mark.parametrize("frozen", [("x", "weights", "gate_up"), ("gate_up", "down"), ("x", "weights")])
def test_in_8_bits_with_frozen_tensors(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Down alone is trained from an activation that is computed from h again, without its gradient."""
    dy = torch.randn(T, H).bfloat16()
    case = make(width=32).to(torch.bfloat16)
    every = case.grads(dy, precision="fp8")
    for name in frozen:
        case.tensors[name].requires_grad_(False)
    got = case.grads(dy, precision="fp8")
    assert_same_bits(got, {name: every[name] for name in got})


def test_in_8_bits_with_low_rank_updates_and_deferred_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    dy = torch.randn(T, H).bfloat16()
    case = make(width=32, ranks={"gate_up": 4, "down": 4}).to(torch.bfloat16)
    assert_same_bits(case.grads(dy, precision="fp8"), rounded_gradients(case, dy, monkeypatch))
    case = make(width=32).to(torch.bfloat16)
    truth = rounded_gradients(case, dy, monkeypatch)
    deferred = WeightGradients()
    y = case.run(precision="fp8", deferred=deferred)
    with deferred.collecting() as pending:
        y.backward(dy)
    for run in pending:
        run()
    gradients = {name: t.grad for name, t in case.tensors.items() if t.grad is not None}
    assert_same_bits(gradients, {name: truth[name] for name in case.tensors})


def test_bytes_in_8_bits() -> None:
    case = make(width=64).to(torch.bfloat16)
    exact, shapes = saved(case)
    rounded, rounded_shapes = saved(case, precision="fp8")
    n = T * K
    assert (n, 128) in shapes and (n, 132) in rounded_shapes
    assert exact - rounded == n * 256 - n * 132


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_in_8_bits_it_compiles_to_the_same(gpt_oss: bool) -> None:
    case = make(gpt_oss=gpt_oss, width=32).to(torch.bfloat16)
    dy = torch.randn(T, H).bfloat16()
    eager, saved_bytes = case.grads(dy, precision="fp8"), saved(case, precision="fp8")[0]
    torch._dynamo.reset()
    case.run = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    assert_same_bits(case.grads(dy, precision="fp8"), eager)
    assert saved(case, precision="fp8")[0] == saved_bytes
    t, settings = case.tensors, (*case.settings.values(),) if gpt_oss else ("swiglu", False, False, 1.0, 0.0)
    rest = (t["weights"], t["gate_up"], t["down"], t.get("gate_up_bias"), t.get("down_bias"), *settings)
    arguments = (t["x"], case.ids, *rest, "fp8", None, *NO_UPDATES, *NO_EDGE, False)
    # Not under AOTAutograd, as above.
    eager = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.forebay.experts.default, arguments, test_utils=eager)


def test_checkpointing_recomputes_it_unless_a_policy_names_it() -> None:
    case = make(gpt_oss=True, ranks={"gate_up": 4, "down": 8}).to(torch.bfloat16)
    inputs, outputs = 2 * T * K * (4 * H + 8 * WIDTH), 2 * T * K * (4 * 2 * WIDTH + 8 * H)  # of the low-rank factors
    dy = torch.randn(T, H).bfloat16()
    plain = case.grads(dy)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.forebay.experts.default])

    for kept, more in ((False, {}), (True, {"context_fn": contexts})):
        y = checkpoint(case.run, use_reentrant=False, **more)
        with FlopCounterMode(display=False) as counter:
            grads = torch.autograd.grad(y, list(case.tensors.values()), dy)
        assert_same_bits(plain, {"y": y.detach(), **dict(zip(case.tensors, grads, strict=True))})
        again = 0 if kept else FORWARD_FLOPS + inputs + outputs
        assert counter.get_total_flops() == again + 2 * FORWARD_FLOPS + 3 * inputs + 2 * outputs


@pytest.mark.parametrize("save_h", [False, True])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("room", [0, 5, T * K])
def test_a_bound_on_the_rows_changes_nothing_where_it_holds(
    room: int, gpt_oss: bool, save_h: bool, poisoned: None
) -> None:
    """Gradients included: a slot without a row is a sentinel, whose weight gets a zero."""
    case = make(IDS["sentinels"](), gpt_oss=gpt_oss).to(torch.float32)
    dy = torch.randn(T, H)
    live = (case.ids >= 0) & (case.ids < E)
    got = case.grads(dy, max_rows=int(live.sum()) + room, save_h=save_h)
    # Not bitwise: the CPU's sigmoid rounds the last elements of a tensor, which no vector takes, in another way.
    assert_close(got, {n: t.double() for n, t in case.grads(dy).items()}, TOLERANCE[torch.float32])
    assert (got["weights"][~live] == 0).all() and (got["weights"][live] != 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("live", [0, 1, T - 1])
def test_tokens_without_a_slot_are_never_read(live: int, gpt_oss: bool, dtype: torch.dtype, poisoned: None) -> None:
    """A dispatcher leaves unused rows uninitialized: inputs, weights and gradients."""
    ids = torch.randint(-1, E, (T, K))
    ids[live:] = -1
    case, dy = make(ids, gpt_oss=gpt_oss).to(dtype), torch.randn(T, H).to(dtype)
    rows = {n: t.detach()[:live] if n in ("x", "weights") else t for n, t in case.tensors.items()}
    want = Case(rows, ids[:live], case.settings).to(dtype).grads(dy[:live])
    for t in (case.tensors["x"].detach(), case.tensors["weights"].detach(), dy):
        t[live:] = torch.nan
    got = case.grads(dy, max_rows=live * K)
    assert_close(
        {n: t[:live] if n in ("x", "weights", "y") else t for n, t in got.items()},
        {n: t.double() for n, t in want.items()},
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 17])
def test_live_rows_beyond_the_bound_are_left_out(bound: int, gpt_oss: bool, poisoned: None) -> None:
    """The last ones in the order of experts, then of slots; as if their ids had been sentinels."""
    case = make(IDS["mixed"](), gpt_oss=gpt_oss).to(torch.float32)
    dy = torch.randn(T, H)
    kept = case.ids.view(-1).argsort(stable=True)[:bound]
    left_out = torch.ones(T * K, dtype=torch.bool).index_fill(0, kept, False).view(T, K)
    without = Case(case.tensors, case.ids.masked_fill(left_out, -1), case.settings)
    got = case.grads(dy, max_rows=bound)
    assert_close(got, {n: t.double() for n, t in without.grads(dy).items()}, TOLERANCE[torch.float32])
    assert (got["weights"][left_out] == 0).all() and (got["weights"][~left_out] != 0).all()


def test_a_bound_on_the_rows_saves_and_computes_no_more() -> None:
    rows = 20
    case = make().to(torch.bfloat16)
    kept = T * 2 * H + 4 * rows * WIDTH + 4 * rows + 4 * T * K + 4 * E + 2 * T * K
    assert saved(case, max_rows=rows)[0] == kept
    assert saved(case, max_rows=T * K + 1)[0] == saved(case)[0]
    with FlopCounterMode(display=False) as counter:
        y = case.run(max_rows=rows)
    assert counter.get_total_flops() == 2 * rows * 3 * H * WIDTH
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * rows * 3 * H * WIDTH


def test_refusals() -> None:
    case = make().to(torch.float32)
    t = case.tensors
    update = LowRank(torch.ones(E, 2, H), torch.ones(E, 2 * WIDTH, 2), 1.0)
    good = {"x": t["x"], "ids": case.ids, "weights": t["weights"], "gate_up": t["gate_up"], "down": t["down"]}
    for change, error, message in (
        ({"x": t["x"][:4]}, ValueError, "do not fit"),
        ({"gate_up": t["gate_up"][0]}, ValueError, "stacks"),
        ({"transposed": True}, ValueError, "transposed=True"),
        ({"down_bias": torch.zeros(E, 3)}, ValueError, "down_bias"),
        ({"down": t["down"].bfloat16()}, TypeError, "share a dtype"),
        ({"gate_up": t["gate_up"].to("meta")}, ValueError, r"on one device, got \['cpu', 'meta'\]"),
        ({"activation": "gelu"}, ValueError, "activation"),
        (
            {"down_update": LowRank(torch.ones(E, 2, H), torch.ones(E, H, 2), 1.0)},
            ValueError,
            r"down_update.*\[5, r, 24\]",
        ),
        ({"gate_up_update": update._replace(b=update.b.bfloat16())}, TypeError, "share a floating dtype"),
        ({"gate_up_update": update, "pages": mock.Mock()}, ValueError, "stash"),
        ({"gate_up_update": update, "deferred": WeightGradients()}, ValueError, "defer"),
    ):
        with pytest.raises(error, match=message):
            experts(**{**good, **change})


def test_the_loop_is_taken_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.nn.functional.grouped_mm

    def spy(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(grouped.F, "grouped_mm", spy)
    offs = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    for dtype, width, taken in [
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 4, False),
        (torch.float32, 4, True),
        (torch.float64, 8, False),
    ]:
        calls.clear()
        rows = torch.randn(10, width).to(dtype)
        rows_by_matrix(rows, torch.randn(4, width, width).to(dtype), offs)
        rows_by_rows(rows, rows, offs)
        assert len(calls) == 2 * taken
    calls.clear()
    rows_by_matrix(torch.ones(1, 1).expand(10, 8), torch.randn(4, 8, 8), offs)
    rows_by_matrix(torch.randn(81)[1:].view(10, 8), torch.randn(4, 8, 8), offs)
    assert not calls


def gpu_case(gpt_oss: bool, tokens: int = 1024, ranks: Sequence[int] = ()) -> tuple[Case, Tensor]:
    """bf16 on the GPU, low-rank updates of these `ranks`, 16 experts of which three get no token, 8 choices, some sentinels."""
    torch.manual_seed(0)
    hidden, width, num, k = 512, 256, 16, 8
    ids = torch.rand(tokens, num - 3).topk(k).indices + 3
    ids[::7, 0] = num
    shapes = {"gate_up": (num, 2 * width, hidden), "down": (num, hidden, width)}
    case = make(ids[:, :1], gpt_oss=gpt_oss)
    if gpt_oss:
        shapes = {n: (e, b, a) for n, (e, a, b) in shapes.items()}
        shapes |= {"gate_up_bias": (num, 2 * width), "down_bias": (num, hidden)}
        case.settings["limit"] = 7.0
    for r, name, inputs, outputs in zip(ranks, SCALES, (hidden, width), (2 * width, hidden), strict=False):
        shapes |= {f"{name}_a": (num, r, inputs), f"{name}_b": (num, outputs, r)}
    tensors = {n: torch.randn(s) * 0.05 for n, s in shapes.items()}
    tensors |= {"x": torch.randn(tokens, hidden), "weights": torch.rand(tokens, k)}
    dy = torch.randn(tokens, hidden).to("cuda", torch.bfloat16)
    return Case(tensors, ids, case.settings).to(torch.bfloat16, "cuda"), dy


def poison_gpu_memory() -> None:
    """Fill the blocks that the caching allocator returns next with NaN."""
    blocks = [torch.full((2**s,), torch.nan, device="cuda") for s in range(8, 26)]
    blocks += [torch.full((2**22,), torch.nan, device="cuda") for _ in range(32)]
    del blocks


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(), (16, 8), (1, 20)])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_on_the_gpu_against_fp64_and_with_poisoned_memory(gpt_oss: bool, ranks: tuple[int, ...]) -> None:
    case, dy = gpu_case(gpt_oss, ranks=ranks)
    # The loop of fp64 products on the CPU, checked against the definition above.
    truth = {n: t.double() for n, t in case.to(torch.float64, "cpu").grads(dy.double().cpu()).items()}
    poison_gpu_memory()
    got = case.grads(dy)
    assert not any(t.isnan().any() for t in got.values())
    assert_close(got, truth, TOLERANCE[torch.bfloat16])
    for name in ("gate_up", "down"):
        assert (got[name][:3] == 0).all() and got[name].is_contiguous()
    poison_gpu_memory()
    assert_same_bits(got, case.grads(dy))
    poison_gpu_memory()
    assert_same_bits(got, case.grads(dy, save_h=False))


def check_never_waits_and_replays(case: Case, dy: Tensor, save_h: bool) -> None:
    """A call that was made before waits for nothing, and its graph replays with other ids."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.grads(dy, save_h=save_h)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.grads(dy, save_h=save_h)
    for seed in (1, 2):
        torch.manual_seed(seed)
        case.ids.copy_(torch.rand(case.ids.shape[0], 16).topk(8).indices)
        graph.replay()
        assert_same_bits(captured, case.grads(dy, save_h=save_h))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(), (16, 4)])
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("save_h", [False, True])
def test_on_the_gpu_it_never_waits_and_can_be_captured(gpt_oss: bool, save_h: bool, ranks: tuple[int, ...]) -> None:
    case, dy = gpu_case(gpt_oss, ranks=ranks)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.grads(dy, save_h=save_h)
    torch.cuda.current_stream().wait_stream(side)
    check_never_waits_and_replays(case, dy, save_h)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(), (16, 16)])
@pytest.mark.parametrize("save_h", [False, True])
def test_on_the_gpu_the_peak_is_the_one_in_the_docstring(save_h: bool, ranks: tuple[int, ...]) -> None:
    case, dy = gpu_case(gpt_oss=False, tokens=16384, ranks=ranks)
    case.grads(dy, save_h=save_h)
    rows, hidden, width = case.ids.numel(), 512, 256
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    y = case.run(save_h=save_h)
    held = torch.cuda.memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, list(case.tensors.values()), dy)
    peak = torch.cuda.max_memory_allocated() - before
    parameters = 2 * 16 * 3 * hidden * width
    wanted = 2 * rows * (hidden + 3 * width) + parameters
    if not save_h:
        # h itself is made beside the gathered rows, and lives in dh's place afterwards.
        assert held < 2 * rows * width
    # The factors' gradients, and the factors as grouped GEMMs read them; `low` and `dlow`.
    wanted += sum(2 * t.nbytes for n, t in case.tensors.items() if n.endswith(("_a", "_b")))
    wanted += 4 * 2 * rows * max(ranks, default=0)
    small = 2**23  # dx, the routing weights' gradient, rounding of the allocator
    assert peak <= wanted + dy.nbytes + small


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 2048])
def test_experts_without_rows_get_zeros_out_of_poisoned_memory(rows: int) -> None:
    """F.grouped_mm leaves these outputs to a GEMM whose inner dimension is 0."""
    experts = 16
    counts = torch.full((experts,), rows // 4, dtype=torch.int32)
    counts[[0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15]] = 0
    offs = counts.cumsum(0).int().cuda()
    for sentinels in (0, 100):
        live = int(offs[-1])
        left = torch.randn(live + sentinels, 512, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(live + sentinels, 1024, device="cuda", dtype=torch.bfloat16)
        left[live:], right[live:] = torch.nan, torch.nan
        poison = torch.full((experts, 512, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
        del poison
        grad = rows_by_rows(left, right, offs)
        assert (grad[counts == 0] == 0).all()
        assert not grad.isnan().any()
    poison = torch.full((experts, 512, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison
    assert (rows_by_rows(left, right, torch.zeros_like(offs)) == 0).all()
