"""Log-probabilities under a frozen head against `log_softmax` in fp64, with a gradient of its own for each token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models import linear_cross_entropy as module
from forebay.models.linear_cross_entropy import linear_log_probs
from tests.kernels.common import DEVICE

WIDTH, VOCABULARY = 16, 97


def make(tokens: int, dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = torch.randn(tokens, WIDTH, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, device=DEVICE).to(dtype)
    extra = torch.randn(VOCABULARY, device=DEVICE).to(dtype) if bias else None
    return hidden, weight, extra, torch.randint(VOCABULARY, (tokens,), device=DEVICE)


# Gradients: a chunk's logits are overwritten by their gradient in the dtype of hidden.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 6e-2)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_values_and_gradients(
    tokens: int, bias: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * VOCABULARY * dtype.itemsize)  # the last of five chunks is shorter
    hidden, weight, extra, targets = make(tokens, dtype, bias)
    found = linear_log_probs(hidden, weight, targets, bias=extra)
    x = hidden.detach().double().requires_grad_()
    want = F.linear(x, weight.double(), None if extra is None else extra.double()).log_softmax(-1)
    picked = want.gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.log_probs.double(), picked, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy.double(), -(want.exp() * want).sum(-1), rtol=tolerance, atol=tolerance)
    if dtype is not torch.bfloat16:  # whose logits have ties
        assert torch.equal(found.is_top1, want.argmax(-1) == targets)
    upstream = torch.randn(tokens, device=DEVICE, dtype=found.log_probs.dtype)
    (got,) = torch.autograd.grad(found.log_probs, hidden, upstream)
    (wanted,) = torch.autograd.grad(picked, x, upstream.double())
    assert got.dtype == dtype
    found.entropy.add_(found.log_probs.detach())  # neither is a view of the other
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=4 * tolerance)


def test_autocast_casts_as_linear_does() -> None:
    hidden, weight, _, targets = make(9, torch.float32, False)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = linear_log_probs(hidden, weight, targets)
        want = F.linear(hidden, weight).float().log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.log_probs, want, rtol=1e-2, atol=1e-2)
    found.log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


def test_refusals() -> None:
    hidden, weight, _, targets = make(3, torch.float32, False)
    with pytest.raises(ValueError, match="needs it"):
        linear_log_probs(hidden, weight.clone().requires_grad_(), targets)
    found = linear_log_probs(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="gradient of the entropy"):
        (found.log_probs + found.entropy).sum().backward()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(linear_log_probs(hidden, weight, targets).log_probs.sum(), hidden, create_graph=True)
    with torch.no_grad():
        assert not linear_log_probs(hidden, weight, targets).log_probs.requires_grad
