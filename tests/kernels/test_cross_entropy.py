"""The Triton cross entropy and the scaling of its gradients against fp64 torch; in the interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import cross_entropy as kernel
from forebay.kernels.cross_entropy import cross_entropy_, scale
from forebay.kernels.launch import Backend
from tests.kernels.common import DEVICE, backends

NAN, INF = float("nan"), float("inf")
# Relative: one rounding to nearest of the gradient's dtype, and fp32's sums in another order.
# Triton's interpreter truncates fp32 to bf16, which errs twice as far as a GPU does.
GRAD_TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7,
    torch.float16: 2**-11,
    torch.float64: 1e-12,
}


def make(rows: int, vocab: int, dtype: torch.dtype = torch.float32, ignore: int = -100) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(rows, vocab, dtype=torch.float64) * 4).to(dtype).to(DEVICE)
    targets = torch.randint(vocab, (rows,))
    targets[1::3] = ignore
    return logits, targets.to(DEVICE)


def check(
    logits: Tensor,
    targets: Tensor,
    backend: Backend = "auto",
    ignore: int = -100,
    tolerance: float = 0.0,
    atol: float = 1e-6,
) -> Tensor:
    """Compare loss and gradient with torch in fp64; returns the loss."""
    x = logits.double().clone().requires_grad_()
    want = F.cross_entropy(x, targets, ignore_index=ignore, reduction="none")
    (want_grad,) = torch.autograd.grad(want.sum(), x)
    log_p = x.detach().log_softmax(-1)
    counted = targets != ignore
    entropy = torch.full(targets.shape, NAN, dtype=torch.promote_types(logits.dtype, torch.float32), device=DEVICE)
    top1 = torch.ones_like(targets, dtype=torch.bool)
    # As torch has it for a clean tensor: NaN logits are only in rows that do not count.
    is_top1 = (x.nan_to_num().argmax(-1) == targets) & counted
    stats = (entropy, top1)
    loss = cross_entropy_(logits, targets, ignore_index=ignore, stats=stats, backend=backend)
    want_entropy = -(log_p.exp() * log_p.masked_fill(log_p == -INF, 0)).sum(-1).masked_fill(~counted, 0)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=2e-5)
    assert torch.equal(top1, is_top1)
    loss_tolerance = 1e-7 if logits.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss.double(), want.detach(), rtol=loss_tolerance, atol=loss_tolerance)
    rtol = tolerance or GRAD_TOLERANCE[logits.dtype]
    torch.testing.assert_close(logits.double(), want_grad, rtol=rtol, atol=atol)
    return loss


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_loss_and_gradient(backend: Backend, rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, targets = make(rows, vocab, dtype)
    before = logits.clone()
    loss_only = cross_entropy_(logits, targets, write_grad=False, backend=backend)
    assert torch.equal(logits, before)
    loss = check(logits, targets, backend)
    assert loss.dtype == torch.float32 and loss.shape == (rows,) and torch.equal(loss, loss_only)


@backends
def test_several_blocks_a_row(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running maximum moves between blocks, upwards and not, and the last block is partial."""
    monkeypatch.setattr(kernel, "_MAX_BLOCK", 1024)
    vocab = 5 * 1024 + 5
    logits, targets = make(4, vocab)
    logits[0] += torch.linspace(-40, 40, vocab, device=DEVICE)  # every block raises it
    logits[2] += torch.linspace(40, -40, vocab, device=DEVICE)  # only the first sets it
    logits[3, :1030] = -INF  # a first block without a finite logit
    targets[0], targets[2], targets[3] = vocab - 1, 3, 3000
    check(logits, targets, backend, tolerance=1e-5)


@backends
@pytest.mark.parametrize("ignore", [-100, -1, 0, 7, 2**40])
def test_ignored_rows_are_zero_even_if_they_are_nan(backend: Backend, ignore: int) -> None:
    logits, targets = make(7, 33, ignore=ignore)
    loss = check(logits, targets, backend, ignore)
    assert loss[1] == 0 and not logits[1].any()
    logits[1] = NAN
    loss = cross_entropy_(logits, targets, ignore_index=ignore, backend=backend)
    assert loss[1] == 0 and not logits[1].any() and torch.isfinite(logits).all()


@backends
@pytest.mark.parametrize("bad", [NAN, INF, 50, -1, 2**40])
def test_bad_logits_and_targets_give_nan_in_their_row_alone(backend: Backend, bad: float) -> None:
    logits, targets = make(3, 50)
    if isinstance(bad, float):
        logits[0, 9] = bad
    else:
        targets[0] = bad
    loss = cross_entropy_(logits, targets, backend=backend)
    assert loss[0].isnan() and torch.isfinite(loss[1:]).all() and torch.isfinite(logits[1:]).all()
    assert logits[0].isnan().any() if isinstance(bad, float) else logits[0].isnan().all()


@backends
def test_minus_infinity_is_probability_zero(backend: Backend) -> None:
    logits, targets = make(2, 50)
    targets[:] = 3
    logits[0, 10:] = -INF
    logits[1, 3] = -INF  # an impossible target: its loss is +inf, in torch as well
    check(logits, targets, backend)


@backends
def test_rows_apart_and_nothing_written_between(backend: Backend) -> None:
    logits, targets = make(4, 29)
    buffer = torch.full((4, 40), NAN, device=DEVICE)
    buffer[:, :29] = logits
    check(buffer[:, :29], targets, backend)
    assert buffer[:, 29:].isnan().all()


@backends
def test_large_logits_lose_no_digits(backend: Backend) -> None:
    """log(s) + m - x in fp32 would be off by 1e-3 here; log(s) - (x - m) is not."""
    logits = torch.tensor([[20000.0, 19999.5, 19998.0]], device=DEVICE)
    targets = torch.tensor([1], device=DEVICE)
    want = F.cross_entropy(logits.double(), targets, reduction="none")
    loss = cross_entropy_(logits, targets, write_grad=False, backend=backend)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    logits, targets = make(4, 8)
    for bad_logits, error, message in (
        (logits[0], ValueError, r"logits must be \[C, V\]"),
        (logits[:, :0], ValueError, "V >= 1"),
        (logits.long(), TypeError, "floating point"),
    ):
        with pytest.raises(error, match=message):
            cross_entropy_(bad_logits, targets)


def test_triton_refuses_fp64_and_the_wrapper_does_not() -> None:
    logits, targets = make(5, 9, torch.float64)
    with pytest.raises(TypeError, match="fp64"):
        cross_entropy_(logits, targets, backend="triton")
    assert check(logits, targets, atol=1e-12).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32768, 50257, 151936, 201088])
def test_real_vocabularies_on_a_gpu(vocab: int) -> None:
    check(*make(64, vocab, torch.bfloat16), atol=1e-7)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_a_gpu() -> None:
    rows, vocab = 33, 2**26 + 3
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.bfloat16)
    targets = torch.full((rows,), vocab - 1, device="cuda")
    logits[-1, -1] = 30.0
    loss = cross_entropy_(logits, targets)
    assert loss[-1] < 1e-4 and abs(loss[0].item() - 18.02) < 0.01
    assert logits[-1, -1] > -1e-4 and logits[-2, -1] == -1


# --- scaling ------------------------------------------------------------------------------------------------------------

# One rounding to nearest; Triton's interpreter truncates fp32 to bf16, which errs twice as far.
ROUNDING = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}


@backends
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (4095,), (4096,), (4097,)], ids=str)
def test_scaling_rounds_once(backend: Backend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, factor = torch.randn(shape, device=DEVICE), torch.tensor([1 / 3], device=DEVICE)
    before = x.clone()
    out = scale(x, factor, dtype, backend=backend)
    assert out.dtype == dtype and out.shape == x.shape and torch.equal(x, before)
    want = x.double() * factor.double().reshape(())
    torch.testing.assert_close(out.double(), want, rtol=ROUNDING[dtype], atol=1e-7)
    assert torch.equal(scale(x, torch.ones_like(factor), x.dtype, backend=backend), x)


@backends
def test_scaling_passes_nan_and_infinity(backend: Backend) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device=DEVICE)
    out = scale(x, torch.full((1,), 2.0, device=DEVICE), torch.bfloat16, backend=backend)
    torch.testing.assert_close(out.float(), 2 * x, equal_nan=True)


def test_scaling_fp64_takes_the_plain_form() -> None:
    x, factor = torch.randn(5, device=DEVICE).double(), torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    assert torch.equal(scale(x, factor, torch.float64), x * 0.3)


@pytest.mark.gpu
def test_scaling_with_offsets_past_two_to_the_31_on_a_gpu() -> None:
    n = 2**31 + 5
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-1] = 3.0
    out = scale(x, torch.full((1,), 2.0, device="cuda", dtype=torch.bfloat16), torch.bfloat16)
    assert out[-1] == 6.0 and out[5] == 0.0
