"""The kernels for Hopper: Forebay's own against plain PyTorch, the package's against fp64, and when they are used."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.kernels import hopper
from forebay.kernels.launch import Backend
from forebay.moe.routing import Routing, route
from tests.kernels import fake_quack
from tests.kernels.common import DEVICE, backends


def routed(max_rows: int | None = None, device: str = DEVICE) -> tuple[Routing, Tensor]:
    """A routing of slots with sentinels and an expert without rows, and its weights."""
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (37, 3), device=device)
    ids[ids == 2] = 9
    return route(ids, 5, max_rows), torch.rand(37, 3, device=device)


@backends
@pytest.mark.parametrize("max_rows", [None, 100])
def test_rows_of_a_routing(max_rows: int | None, backend: Backend) -> None:
    (order, _, offs), weights = routed(max_rows)
    rows = hopper.rows_of(order, offs, 3, weights, backend=backend)
    assert torch.equal(rows.tokens, order // 3) and rows.tokens.dtype == torch.int32
    assert rows.bounds.tolist() == [0, *offs.tolist()] and rows.bounds.dtype == torch.int32
    assert torch.equal(rows.weights, weights.view(-1)[order.long()])
    alone = hopper.rows_of(order, offs, 3, backend=backend)
    assert torch.equal(alone.tokens, rows.tokens) and torch.equal(alone.bounds, rows.bounds)


@backends
def test_sums_of_slots_do_not_read_rows_of_sentinels(backend: Backend) -> None:
    (order, inverse, offs), _ = routed()
    partial = torch.rand(len(order), 4, device=DEVICE)
    partial[offs[-1] :] = torch.nan
    wanted = torch.where(inverse >= 0, partial.sum(1)[inverse.clamp(min=0)], 0.0).view(-1)
    torch.testing.assert_close(hopper.slot_sums(partial, inverse, backend=backend), wanted)


def stacks(
    inner: int = 16, hidden: int = 8, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0"
) -> list[Tensor]:
    return [torch.empty(s, dtype=dtype, device=device) for s in ((2, 2 * inner, hidden), (2, hidden, inner))]


def test_which_experts_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(hopper, "_are_ready", lambda index: asked.append(index) or True)
    with FakeTensorMode():
        assert hopper.handles(*stacks()) and asked == [0]
        if (
            torch.cuda.device_count() != 1
        ):  # of a device that is not there, torch makes fake tensors only where there is none
            assert hopper.handles(*stacks(device="cuda:1")) and asked.pop() == 1
        refused = [
            stacks(inner=20), stacks(hidden=12), stacks(inner=0), stacks(dtype=torch.float16), stacks(device="cpu"),
            stacks(device="meta"), [t.as_strided(t.shape, (256, 1, t.shape[1])) for t in stacks()],
        ]  # fmt: skip
        assert not any(hopper.handles(*pair) for pair in refused)
    assert asked == [0], "nothing is compiled for experts that are not handled"


def test_a_failure_is_said_once_and_ends_the_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("input_gradient does not compile: no ptxas")

    monkeypatch.setattr(hopper, "_check_version", broken)
    monkeypatch.setattr(hopper, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels = hopper._Kernels()
    with caplog.at_level(logging.WARNING):
        assert not kernels.are_ready(0) and not kernels.are_ready(0)
    (record,) = caplog.records
    assert "not used, as RuntimeError: input_gradient does not compile: no ptxas" in record.getMessage()


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    kernels = hopper._Kernels()

    def prepare(index: int) -> bool:
        prepared.append(index)
        return True

    monkeypatch.setattr(kernels, "_prepare", prepare)
    monkeypatch.setattr(hopper, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert not kernels.are_ready(0) and not prepared
    capturing = False
    assert kernels.are_ready(0) and prepared == [0]
    assert not kernels.are_ready(1), "a GPU that is no H100"
    capturing = True
    assert kernels.are_ready(0) and not kernels.are_ready(2) and prepared == [0]


def test_the_process_that_compiles_says_what_is_wrong() -> None:
    if hopper.is_installed():
        pytest.skip("the package is there")
    with pytest.raises(
        RuntimeError, match="down_gradient does not compile: ModuleNotFoundError: No module named 'quack'"
    ):
        hopper._compile_in_processes(("down_gradient",))


def test_every_kernel_has_a_tiny_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_quack.install(monkeypatch)
    tiny = hopper._tiny_calls("cpu")
    for call in tiny.values():
        call()
    assert list(tiny) == ["gated_product", "activation_gradient", "input_gradient", "gate_up_gradient", "down_gradient"]
    assert calls == ["gemm_gated", "gemm_dgated", "gemm", "gemm", "gemm"]


def results(
    routing: Routing, x: Tensor, dy: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> dict[str, Tensor]:
    """Of all five kernels, without rows of sentinels; h and dh as halves."""
    order, inverse, offs = routing
    rows = hopper.rows_of(order, offs, inverse.shape[1], weights)
    h, glu = hopper.gated_product(x, rows, gate_up)
    dh = h.clone()
    act, partial = hopper.activation_gradient(dy, rows, down, dh)
    live = int(offs[-1])
    found = {"h": fake_quack.halves(h), "glu": glu, "act": act, "dh": fake_quack.halves(dh)}
    found["dx_rows"] = hopper.input_gradient(dh, rows, gate_up)
    found = {name: t[:live] for name, t in found.items()}
    found["dw"] = hopper.slot_sums(partial, inverse)
    found["d_gate_up"] = hopper.gate_up_gradient(x, rows, dh)
    found["d_down"] = hopper.down_gradient(dy, rows, act)
    return found


needs_kernels = pytest.mark.skipif(not hopper.is_installed(), reason="needs quack-kernels")
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "one off a tile": (385, 1, 128, 64, 1),
    "widths of no tile": (97, 2, 264, 136, 8),
    "narrower than a tile": (257, 4, 128, 8, 16),
    "one token": (1, 1, 64, 64, 4),
    "many experts": (300, 8, 512, 320, 128),
}
"""Tokens, experts a token, hidden, width of an expert, experts."""


def _without(ids: Tensor, experts: int) -> Tensor:
    """Sentinels in the place of the second half of the experts."""
    return ids.masked_fill(ids >= max(1, experts // 2), experts + 3)


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize(
    "change", [None, _without, lambda ids, _: torch.full_like(ids, -1)], ids=["all", "half", "none"]
)
@pytest.mark.parametrize("max_rows", [None, 60])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_on_the_gpu_against_fp64_in_poisoned_memory(
    shape: tuple[int, ...],
    max_rows: int | None,
    change: Callable[[Tensor, int], Tensor] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, k, hidden, inner, experts = shape
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
    routing = route(ids if change is None else change(ids, experts), experts, max_rows)

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda") * scale).bfloat16()

    given = (randn(tokens, hidden), randn(tokens, hidden), torch.rand(tokens, k, device="cuda"))
    given = (*given, randn(experts, 2 * inner, hidden, scale=0.1), randn(experts, hidden, inner, scale=0.1))
    assert hopper.handles(*given[3:])
    blocks = [torch.full((2**s,), torch.nan, device="cuda") for s in range(8, 24) for _ in range(4)]
    del blocks
    got, again = results(routing, *given), results(routing, *given)
    with monkeypatch.context() as patch:
        fake_quack.install(patch)
        patch.setattr(fake_quack, "EXACT", torch.float64)
        wanted = results(routing, *given)
    for name, want in wanted.items():
        assert torch.equal(got[name], again[name]), name
        # dh, act and the rest come from the kernel's own h: one rounding more.
        error = (got[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
        assert error < 8e-3, f"{name}: {error}"
        assert torch.equal(got[name] == 0, want == 0) or want.any(), name
