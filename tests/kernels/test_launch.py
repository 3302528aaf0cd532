"""Arguments of every kernel as views (strided, expanded, with an offset), one at a time, against the plain form; refusals; and
which launches ask Triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from forebay.kernels.cross_entropy import cross_entropy_, scale
from forebay.kernels.grouped import add_rows_by_rows
from forebay.kernels.launch import launch, packed, use_triton
from forebay.kernels.permute import combine_rows, gather_rows, sort_slots
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from tests.kernels.common import DEVICE, moved_on, strided, turned

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {"strided": strided, "turned": turned, "offset": moved_on}


def expanded(t: Tensor) -> Tensor:
    """The first row again and again, in the memory of one."""
    return t[:1].expand(t.shape)


def close(got: Any, want: Any) -> None:
    """The interpreter cuts bf16 off where torch rounds; everything here is fp32, and sums in one order."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def integers(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


IDS = integers([[1, 0], [2, 1], [0, 2], [1, 1], [2, 7]], torch.int64)
ORDER, INVERSE, OFFS = sort_slots(IDS, 3, backend="reference")
ROW_EXPERT = torch.searchsorted(OFFS, torch.arange(10, device=DEVICE), right=True).int().clamp(max=2)


def _weight_sum(backend: Any, left: Tensor, right: Tensor, offs: Tensor, total: Tensor) -> Tensor:
    add_rows_by_rows(total, left, right, offs, backend=backend)
    return total


def _cross_entropy(backend: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy_(logits, targets, backend=backend), logits


def _swiglu(interleaved: bool) -> Callable[..., Any]:
    def call(
        backend: Any, h: Tensor, da: Tensor, w: Tensor, order: Tensor, offs: Tensor, bias: Tensor, e: Tensor
    ) -> Any:
        glu, rest = Glu("clamped_swiglu", interleaved), {"bias": bias, "row_expert": e, "backend": backend}
        act = swiglu_forward(h, w, order, offs, glu, **rest)
        dh, again, dw = swiglu_backward(h, da.clone(), w, order, offs, glu, **rest)
        live = offs[-1]  # other rows are not written
        return act[:live], dh[:live], again[:live], dw

    return call


def _swiglu_arguments() -> dict[str, Tensor]:
    return {
        "h": randn(10, 12), "da": randn(10, 6), "weights": randn(5, 2), "order": ORDER, "offs": OFFS, "bias": randn(3, 12),
        "row_expert": ROW_EXPERT,
    }  # fmt: skip


# Kernel: (call with a backend and the arguments, the arguments by name, those that cannot be expanded: written, or permutations).
KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Tensor]], set[str]]] = {
    "cross_entropy": (
        _cross_entropy,
        lambda: {"logits": randn(5, 11), "targets": integers([3, 0, -100, 10, 7], torch.int64)},
        {"logits"},
    ),
    "gather_rows": (
        lambda backend, x, order, offs: gather_rows(x, order, offs, 2, backend=backend)[: offs[-1]],
        lambda: {"x": randn(5, 24), "order": ORDER, "offs": OFFS},
        set(),
    ),
    "combine_rows": (
        lambda backend, rows, inverse, init: combine_rows(rows, inverse, init=init, backend=backend),
        lambda: {"rows": randn(10, 24), "inverse": INVERSE, "init": randn(5, 24)},
        set(),
    ),
    "sort_slots": (lambda backend, ids: sort_slots(ids, 3, backend=backend), lambda: {"ids": IDS}, set()),
    "scale": (
        lambda backend, x, factor: scale(x, factor, torch.float32, backend=backend),
        lambda: {"x": randn(5, 7), "factor": randn(1)},
        {"x"},
    ),
    "weight_sum": (
        _weight_sum,
        lambda: {"left": randn(10, 20), "right": randn(10, 17), "offs": OFFS, "total": randn(3, 20, 17)},
        {"total"},
    ),
    "swiglu": (_swiglu(False), _swiglu_arguments, {"order"}),
    "swiglu, interleaved": (_swiglu(True), _swiglu_arguments, {"order"}),
}
# Unless contiguous along the last dimension.
REFUSED = {("cross_entropy", "logits"), ("scale", "x"), ("weight_sum", "total")}


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_are_read_as_what_they_are(kernel: str) -> None:
    call, arguments, fixed = KERNELS[kernel]
    for name, value in arguments().items():
        for kind, view in [*VIEWS.items(), ("expanded", expanded)]:
            torch.manual_seed(1)
            plain = arguments()
            if kind == "expanded":
                plain[name] = expanded(plain[name]).contiguous()
            changed = {n: t.clone() for n, t in plain.items()}
            changed[name] = view(plain[name])
            if (kind == "expanded" and name in fixed) or (kind in ("strided", "turned") and (kernel, name) in REFUSED):
                if changed[name].is_contiguous():
                    continue  # order, where a row twice has no meaning
                if (kernel, name) in REFUSED:
                    with pytest.raises(ValueError, match=r"contiguous|overlap"):
                        call("triton", *changed.values())
                continue
            want = call("reference", *(t.clone() for t in plain.values()))
            close(call("triton", *changed.values()), want)
            assert value.shape == changed[name].shape, (name, kind)


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_shapes_dtypes_and_devices_are_refused_by_name(kernel: str) -> None:
    call, arguments, _ = KERNELS[kernel]
    for name in arguments():
        for wrong in (lambda t: t[None, None], lambda t: t.to(torch.complex64), lambda t: t.to("meta")):
            changed = arguments()
            changed[name] = wrong(changed[name])
            if kernel == "sort_slots" and changed[name].is_meta:
                continue  # its only tensor
            if name == "weights" and changed[name].dim() == 4:
                continue  # any shape, by slot
            if (kernel, name) in {("scale", "x"), ("scale", "factor")} and changed[name].dim() > 2:
                continue  # any shape
            with pytest.raises((ValueError, TypeError)):
                call("triton", *changed.values())


def test_logits_that_are_not_written_may_lie_on_each_other() -> None:
    same, targets = randn(1, 11).expand(4, 11), integers([1, 2, 3, 4], torch.int64)
    loss = cross_entropy_(same, targets, write_grad=False, backend="triton")
    close(loss, cross_entropy_(same, targets, write_grad=False, backend="reference"))


def test_errors_name_the_argument_and_what_is_valid() -> None:
    like = randn(3)
    two = [torch.int32, torch.int64]
    for tensor, shape, dtypes, error, message in (
        (like, [None, 4], [], ValueError, r"bias must be \[any, 4\], got \[3\]"),
        (like, [3], two, TypeError, r"bias must be torch\.int32 or torch\.int64, got torch\.float32"),
        (like.long(), [3], [], TypeError, r"bias must be floating point, got torch\.int64"),
        (like.to("meta"), [3], [], ValueError, f"bias must be on {like.device}, got a tensor on meta"),
    ):
        with pytest.raises(error, match=message):
            packed("bias", tensor, like, shape, dtypes)
    assert packed("bias", like, like, [3]) is like


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be 'auto', 'triton' or 'reference'"):
        use_triton("cuda", randn(3))  # type: ignore[arg-type]


class _Kernel:
    """A Triton kernel of another device: its launches, and those of what it compiles."""

    arg_names = ("x_ptr", "y_ptr", "n", "scale", "BLOCK", "WIDE")

    def __init__(self) -> None:
        self.fn = lambda: None
        self.launched: list[tuple[Any, ...]] = []
        self.relaunched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel]:
        def run(*args: Any, **constants: Any) -> CompiledKernel:
            self.launched.append((grid, *args))
            return compiled

        compiled = _Compiled(self.relaunched)
        return run


class _Compiled(CompiledKernel):
    def __init__(self, launched: list[tuple[Any, ...]]):
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self._launched.append((grid, *args))


def test_a_launch_like_an_earlier_one_goes_to_its_compiled_kernel() -> None:
    kernel = _Kernel()
    x, y = torch.zeros(64), torch.ones(64)
    launch(kernel, (3,), x, None, 7, 1.5, num_warps=4, WIDE=True, BLOCK=8)
    launch(kernel, (3,), y[4:], None, 7, 1.5, num_warps=4, WIDE=True, BLOCK=8)  # 16 bytes further on
    assert kernel.launched == [((3,), x, None, 7, 1.5)]
    assert kernel.relaunched == [((3, 1, 1), y.data_ptr() + 16, None, 7, 1.5, 8, True)]


@pytest.mark.parametrize(
    "other",
    [
        {"grid": (4,)},
        {"x": torch.zeros(64)[1:]},  # another alignment
        {"x": torch.zeros(64, dtype=torch.int32)},
        {"y": torch.zeros(64)},
        {"n": 1},
        {"n": 7.0},
        {"n": 16},
        {"n": 2**31},
        {"scale": 2.5},
        {"BLOCK": 16},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_a_launch_unlike_the_earlier_ones_asks_triton(other: dict[str, Any]) -> None:
    kernel = _Kernel()
    first: dict[str, Any] = {
        "grid": (3,),
        "x": torch.zeros(64),
        "y": None,
        "n": 7,
        "scale": 1.5,
        "BLOCK": 8,
        "num_warps": 4,
    }
    for call in (first, first | other):
        grid, x, y, n, scale, *_ = call.values()
        launch(kernel, grid, x, y, n, scale, BLOCK=call["BLOCK"], WIDE=False, num_warps=call["num_warps"])
    assert len(kernel.launched) == 2
    assert not kernel.relaunched


@pytest.mark.gpu
def test_launches_of_other_alignments_and_sizes_stay_exact() -> None:
    table = torch.randn(70, 64, device="cuda")
    for width in (64, 48, 33, 1, 64):
        for first in (0, 1, 4, 0):
            x = table[first:, :width]
            order = torch.randperm(x.shape[0], device="cuda", dtype=torch.int32)
            offs = integers([x.shape[0]])
            rows = gather_rows(x, order, offs, 1, backend="triton")
            assert torch.equal(rows, x[order.long()])


@pytest.mark.gpu
def test_a_repeated_launch_can_be_captured() -> None:
    x, offs = torch.randn(64, 64, device="cuda"), integers([64])
    order = torch.arange(63, -1, -1, device="cuda", dtype=torch.int32)
    for _ in range(2):
        gather_rows(x, order, offs, 1, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = gather_rows(x, order, offs, 1, backend="triton")
    x.normal_()
    graph.replay()
    assert torch.equal(rows, x.flip(0))
