"""The Triton cross entropy against fp64 torch; in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import cross_entropy as kernel
from forebay.kernels.cross_entropy import cross_entropy_
from forebay.kernels.launch import Backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative: one rounding to nearest of the gradient's dtype, and fp32's sums in another order.
# Triton's interpreter truncates fp32 to bf16, which errs twice as far as a GPU does.
BF16 = 2**-8 if DEVICE == "cuda" else 2**-7
GRAD_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: BF16, torch.float16: 2**-11}

backends = pytest.mark.parametrize("backend", ["triton", "reference"])


def make(rows: int, vocab: int, dtype: torch.dtype, *, ignore: int = -100) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(rows, vocab) * 4).to(dtype).to(DEVICE)
    targets = torch.randint(vocab, (rows,))
    targets[1::3] = ignore
    return logits, targets.to(DEVICE)


def truth(logits: Tensor, targets: Tensor, *, ignore: int = -100) -> tuple[Tensor, Tensor]:
    x = logits.double().clone().requires_grad_()
    loss = F.cross_entropy(x, targets, ignore_index=ignore, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), grad


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_loss_and_gradient(backend: Backend, rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, targets = make(rows, vocab, dtype)
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(logits, targets, backend=backend)
    assert loss.dtype == torch.float32 and loss.shape == (rows,)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    tolerance = GRAD_TOLERANCE[dtype]
    torch.testing.assert_close(logits.double(), want_grad, rtol=tolerance, atol=1e-6)


@backends
def test_several_blocks_a_row(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running maximum moves between blocks, upwards and not, and the last block is partial."""
    monkeypatch.setattr(kernel, "_MAX_BLOCK", 1024)
    vocab = 5 * 1024 + 5
    logits, targets = make(4, vocab, torch.float32)
    logits[0] += torch.linspace(-40, 40, vocab, device=DEVICE)  # every block raises it
    logits[2] += torch.linspace(40, -40, vocab, device=DEVICE)  # only the first sets it
    logits[3, :1030] = float("-inf")  # a first block without a finite logit
    targets[0], targets[2], targets[3] = vocab - 1, 3, 3000
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(logits, targets, backend=backend)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), want_grad, rtol=1e-5, atol=1e-6)


@backends
def test_loss_only_leaves_the_logits(backend: Backend) -> None:
    logits, targets = make(5, 129, torch.bfloat16)
    before = logits.clone()
    want_loss, _ = truth(logits, targets)
    loss = cross_entropy_(logits, targets, write_grad=False, backend=backend)
    assert torch.equal(logits, before)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)


@backends
@pytest.mark.parametrize("ignore", [-100, -1, 0, 7, 2**40])
def test_ignore_index(backend: Backend, ignore: int) -> None:
    logits, targets = make(7, 33, torch.float32, ignore=ignore)
    want_loss, want_grad = truth(logits, targets, ignore=ignore)
    loss = cross_entropy_(logits, targets, ignore_index=ignore, backend=backend)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), want_grad, rtol=1e-5, atol=1e-6)
    assert loss[1] == 0 and not logits[1].any()


@backends
def test_ignored_row_of_nan_is_silent(backend: Backend) -> None:
    logits, targets = make(3, 50, torch.float32)
    logits[1] = float("nan")
    assert targets[1] == -100
    loss = cross_entropy_(logits, targets, backend=backend)
    assert loss[1] == 0 and not logits[1].any() and torch.isfinite(logits).all()


@backends
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_live_row_of_nan_is_loud(backend: Backend, poison: str) -> None:
    logits, targets = make(3, 50, torch.float32)
    logits[0, 9] = float(poison)
    loss = cross_entropy_(logits, targets, backend=backend)
    assert loss[0].isnan() and torch.isfinite(loss[1:]).all()
    assert logits[0].isnan().any() and torch.isfinite(logits[1:]).all()


@backends
@pytest.mark.parametrize("target", [50, -1, 2**40])
def test_target_out_of_range_is_nan(backend: Backend, target: int) -> None:
    logits, targets = make(3, 50, torch.float32)
    targets[0] = target
    loss = cross_entropy_(logits, targets, backend=backend)
    assert loss[0].isnan() and torch.isfinite(loss[1:]).all()
    assert logits[0].isnan().all() and torch.isfinite(logits[1:]).all()


@backends
def test_minus_infinity_is_probability_zero(backend: Backend) -> None:
    logits, targets = make(2, 50, torch.float32)
    targets[:] = 3
    logits[0, 10:] = float("-inf")
    logits[1, 3] = float("-inf")  # a target that cannot be: its loss is +inf, in torch as well
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(logits, targets, backend=backend)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), want_grad, rtol=1e-5, atol=1e-6)


@backends
def test_rows_apart_and_nothing_written_between(backend: Backend) -> None:
    """Rows of a wider buffer: what lies between them is neither read nor written."""
    logits, targets = make(4, 29, torch.float32)
    buffer = torch.full((4, 40), float("nan"), device=DEVICE)
    buffer[:, :29] = logits
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(buffer[:, :29], targets, backend=backend)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(buffer[:, :29].double(), want_grad, rtol=1e-5, atol=1e-6)
    assert buffer[:, 29:].isnan().all()


@backends
def test_large_logits_lose_no_digits(backend: Backend) -> None:
    """log(s) + m - x in fp32 would be off by 1e-3 here; log(s) - (x - m) is not."""
    logits = torch.tensor([[20000.0, 19999.5, 19998.0]], device=DEVICE)
    targets = torch.tensor([1], device=DEVICE)
    want_loss, _ = truth(logits, targets)
    torch.testing.assert_close(
        cross_entropy_(logits, targets, backend=backend).double(), want_loss, rtol=1e-6, atol=1e-6
    )


@backends
def test_refusals(backend: Backend) -> None:
    logits, targets = make(4, 8, torch.float32)
    with pytest.raises(ValueError, match=r"logits must be \[C, V\]"):
        cross_entropy_(logits[0], targets, backend=backend)
    with pytest.raises(ValueError, match="V >= 1"):
        cross_entropy_(logits[:, :0], targets, backend=backend)
    with pytest.raises(ValueError, match="contiguous along V"):
        cross_entropy_(logits.t().contiguous().t(), targets, backend=backend)
    with pytest.raises(ValueError, match=r"targets must be \[4\]"):
        cross_entropy_(logits, targets[:3], backend=backend)
    with pytest.raises(TypeError, match="int64"):
        cross_entropy_(logits, targets.int(), backend=backend)
    with pytest.raises(TypeError, match="floating point"):
        cross_entropy_(logits.long(), targets, backend=backend)


def test_triton_refuses_fp64_and_the_wrapper_does_not() -> None:
    logits, targets = make(5, 9, torch.float64)
    with pytest.raises(TypeError, match="fp64"):
        cross_entropy_(logits, targets, backend="triton")
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(logits, targets)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(logits, want_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32768, 50257, 151936, 201088])
def test_real_vocabularies_on_a_gpu(vocab: int) -> None:
    logits, targets = make(64, vocab, torch.bfloat16)
    want_loss, want_grad = truth(logits, targets)
    loss = cross_entropy_(logits, targets)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), want_grad, rtol=2**-8, atol=1e-7)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_a_gpu() -> None:
    rows, vocab = 33, 2**26 + 3
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.bfloat16)
    targets = torch.full((rows,), vocab - 1, device="cuda")
    logits[-1, -1] = 30.0
    loss = cross_entropy_(logits, targets)
    assert loss[-1] < 1e-4 and abs(loss[0].item() - 18.02) < 0.01
    assert logits[-1, -1] > -1e-4 and logits[-2, -1] == -1
