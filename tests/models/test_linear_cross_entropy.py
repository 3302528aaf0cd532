"""`linear_cross_entropy` and `linear_log_probs` against torch on the logits of all tokens, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.models import linear_cross_entropy as module
from forebay.models.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_into, linear_log_probs
from tests.kernels.common import DEVICE

T, H, V = 37, 8, 50


def make(
    tokens: int = T, dtype: torch.dtype = torch.float64, ignore: int = -100, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, bias, targets)."""
    hidden = torch.randn(tokens, H, dtype=dtype, device=device).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype, device=device).requires_grad_()
    bias = torch.randn(V, dtype=dtype, device=device).requires_grad_()
    targets = torch.randint(V, (tokens,), device=device)
    targets[1::4] = ignore
    return hidden, weight, bias, targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, **options)


def assert_close(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...], factor: float = 1, **tolerance: Any) -> None:
    """Losses and gradients are close."""
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(loss * factor, inputs) for loss in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("chunk", [1, 5, T - 1, T, T + 1, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients(chunk: int | None, reduction: str, with_bias: bool) -> None:
    hidden, weight, bias, targets = make()
    options: dict[str, Any] = {"bias": bias if with_bias else None, "reduction": reduction}
    got = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk, **options)
    assert got.dtype == torch.float64 and got.shape == ()
    # A factor that is no power of two: the upstream gradient must reach every input.
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    assert_close(got, reference(hidden, weight, targets, **options), inputs, 0.3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_targets_at_all(tokens: int, reduction: str) -> None:
    """NaN mean and zero sum as in torch, and zero gradients, never NaN."""
    hidden, weight, bias, targets = make(tokens)
    targets.fill_(-100)
    want = reference(hidden, weight, targets, bias, reduction=reduction)
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction, chunk_tokens=2)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert not any(grad.any() or grad.isnan().any() for grad in torch.autograd.grad(got, (hidden, weight, bias)))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_costs_nothing(frozen: int) -> None:
    hidden, weight, bias, targets = make()
    inputs = [hidden, weight, bias]
    want = reference(hidden, weight, targets, bias)
    live = tuple(t for i, t in enumerate(inputs) if i != frozen)
    kept: list[Tensor] = []
    inputs[frozen].requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        got = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=8)
    assert_close(got, want, live)
    # Kept for backward: one tensor for each live input, none of the frozen one's shape.
    assert sorted(t.shape for t in kept if t.dim() and t.numel()) == sorted(t.shape for t in live)


def test_backward_runs_more_than_once_but_not_twice_differentiated() -> None:
    hidden, weight, _, targets = make()
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    thrice = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for a, b, c in zip(once, thrice, again, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(a * 3, b)


class _Sink(torch.autograd.Function):
    """As DDP with ``find_unused_parameters`` has one around all outputs of a model."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def test_a_loss_that_is_not_trained_on_has_no_gradients() -> None:
    """Not zeros, which weight decay goes with, and which are NaN where the loss is."""
    hidden, weight, bias, targets = make()
    for loss in (linear_cross_entropy(hidden, weight, targets, bias=bias), reference(hidden, weight, targets, bias)):
        _, other = _Sink.apply(loss, hidden * 2)
        other.sum().backward()
        assert weight.grad is None and bias.grad is None and torch.equal(hidden.grad, torch.full_like(hidden, 2))
        hidden.grad = None


def test_without_gradients_only_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    plain = module.cross_entropy_

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(kwargs["write_grad"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, "cross_entropy_", spy)
    hidden, weight, _, targets = make()
    with torch.no_grad():
        got = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(got, reference(hidden, weight, targets).detach())
    assert not got.requires_grad
    detached = linear_cross_entropy(hidden.detach(), weight.detach(), targets)
    assert torch.equal(got, detached) and asked == [False, False]


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_operation_makes_the_logits_of_all_tokens(dtype: torch.dtype) -> None:
    tokens, width, vocab, chunk = 64, 4, 96, 8
    hidden, weight = torch.randn(tokens, width).to(dtype), torch.randn(vocab, width).to(dtype)
    targets = torch.randint(vocab, (tokens,))
    with LargestAllocation() as full:
        reference(hidden, weight, targets)
    assert full.numel == tokens * vocab  # the measure sees it where it is
    with LargestAllocation() as chunked:
        # Inside the custom op, which a dispatch mode sees as one operation.
        module._walk_chunks(hidden, weight, None, targets, -100, chunk, [True, True, False])
    assert chunked.numel == chunk * vocab


def test_pick_chunk() -> None:
    pick = module._pick_chunk
    wide = torch.empty(16384, 2048, dtype=torch.bfloat16, device="meta")
    assert pick(wide, vocab=32768, d_weight=True) == 4096  # 256 MiB exactly
    assert pick(wide, vocab=151936, d_weight=True) == 2048  # H tokens: as large as the weight
    assert pick(wide, vocab=151936, d_weight=False) == 768  # below 883, three tiles of 256
    assert pick(wide[:100], vocab=151936, d_weight=True) == 100
    assert pick(wide[:0], vocab=151936, d_weight=True) == 1
    assert pick(wide[:1100], vocab=2**18, d_weight=False) == 512  # 3 chunks, not 2 and a rest
    assert pick(wide, vocab=2**24, d_weight=False) == 8  # too few for tiles: even chunks


_GPU_SIZES = (5000, 256, 4099)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("device", "sizes", "chunk"),
    [
        ("cpu", (512, 32, 256), 48),
        pytest.param("cuda", _GPU_SIZES, 512, marks=pytest.mark.gpu),
        pytest.param("cuda", _GPU_SIZES, None, marks=pytest.mark.gpu),
    ],
)
def test_low_precision_errs_no_more_than_torch(
    dtype: torch.dtype, device: str, sizes: tuple[int, int, int], chunk: int | None
) -> None:
    """Against fp64 of the same inputs; torch's path is bf16 logits, fp32 loss, one whole GEMM."""
    tokens, width, vocab = sizes
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * 0.3).to(dtype).requires_grad_()
    # Zipf's law: some targets come hundreds of times, most rarely, as in text.
    frequency = 1 / torch.arange(1, vocab + 1, device=device)
    targets = torch.multinomial(frequency, tokens, replacement=True)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = reference(exact[0], exact[1], targets)
    theirs = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
    assert ours.dtype == torch.float32
    assert abs(ours - truth) <= abs(theirs - truth) + 1e-6 * truth
    grads = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs))
    for got, torchs, want in zip(*grads, torch.autograd.grad(truth, exact), strict=True):
        assert got.dtype == dtype
        error, bound = (g.double().sub(want).norm() for g in (got, torchs))
        assert error <= bound * 1.02


def test_fp16_gradients_of_rare_tokens_survive() -> None:
    """A mean over many tokens, scaled up again upstream as a gradient scaler does."""
    tokens, vocab, scale = 4096, 64, 2.0**16
    hidden = torch.randn(tokens, H).half().requires_grad_()
    weight = torch.zeros(vocab, H).half().requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (want,) = torch.autograd.grad(reference(exact[0], exact[1], targets) * scale, exact[1])
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1024)
    (got,) = torch.autograd.grad(loss * scale, weight)
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-2)


def test_autocast_casts_as_linear_does() -> None:
    hidden, weight, bias, targets = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)
        got = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=8)
    assert_close(got, want, (hidden, weight, bias), rtol=0.02, atol=0.002)


def test_compiles_without_a_graph_break() -> None:
    hidden, weight, bias, targets = make(dtype=torch.float32)

    def step(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h * 2, w, targets, bias=b, chunk_tokens=8)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = (hidden, weight, bias)
    assert_close(compiled(*inputs), step(*inputs), inputs, rtol=0, atol=0)
    needs = ([True, True, True], [True, False, False], [False, False, False])
    for needed in needs:  # the custom op is well formed
        tensors = [t.detach() for t in (*inputs, targets)]
        torch.library.opcheck(module._sum_and_grads, (*tensors, -100, 8, needed))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "reduction", lambda h, w, t, b: ((h, w, t), {"reduction": "none"})),
        (ValueError, "chunk_tokens must be at least 1", lambda h, w, t, b: ((h, w, t), {"chunk_tokens": 0})),
        (ValueError, r"hidden must be \[T, H\]", lambda h, w, t, b: ((h.unsqueeze(0), w, t), {})),
        (ValueError, r"weight must be \[V, 8\]", lambda h, w, t, b: ((h, w.t(), t), {})),
        (ValueError, r"targets must be \[37\]", lambda h, w, t, b: ((h, w, t[:-1]), {})),
        (ValueError, r"bias must be \[50\]", lambda h, w, t, b: ((h, w, t), {"bias": b[:-1]})),
        (TypeError, "chunk_tokens must be an integer", lambda h, w, t, b: ((h, w, t), {"chunk_tokens": 1.5})),
        (TypeError, "ignore_index must be an integer", lambda h, w, t, b: ((h, w, t), {"ignore_index": None})),
        (TypeError, "targets must be a torch.Tensor, got list", lambda h, w, t, b: ((h, w, t.tolist()), {})),
        (TypeError, "bias must be a torch.Tensor, got list", lambda h, w, t, b: ((h, w, t), {"bias": [0.0]})),
        (TypeError, "targets must be int64", lambda h, w, t, b: ((h, w, t.int()), {})),
        (TypeError, "weight is", lambda h, w, t, b: ((h, w.float(), t), {})),
        (TypeError, "floating point", lambda h, w, t, b: ((h.detach().long(), w.detach().long(), t), {})),
        (ValueError, "targets is on meta", lambda h, w, t, b: ((h, w, t.to("meta")), {})),
    ],
)
def test_refusals(error: type[Exception], message: str, change: Any) -> None:
    hidden, weight, bias, targets = make()
    args, options = change(hidden, weight, targets, bias)
    with pytest.raises(error, match=message):
        linear_cross_entropy(*args, **options)


def test_weight_gradient_into_a_sum() -> None:
    """Microbatches into one sum: autograd's gradients, but for the order of sums; the weight itself gets none."""
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    total = torch.zeros_like(weight)
    wanted = torch.zeros_like(weight)
    for tokens in (5, 0, 7):
        hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(0, 37, (tokens,))
        targets[:1] = -100
        loss = linear_cross_entropy_into(hidden, weight, targets, total) / 3
        loss.backward()
        expected = linear_cross_entropy(hidden, weight, targets, reduction="sum") / 3
        d_hidden, d_weight = torch.autograd.grad(expected, (hidden, weight))
        wanted += d_weight
        assert torch.equal(loss, expected)
        torch.testing.assert_close(hidden.grad, d_hidden)
    assert weight.grad is None
    torch.testing.assert_close(total / 3, wanted)
    for bad in (torch.zeros(8, 37), torch.zeros(37, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="weight_sum"):
            linear_cross_entropy_into(torch.randn(3, 8), torch.randn(37, 8), torch.zeros(3, dtype=torch.int64), bad)


@pytest.mark.gpu
def test_fp32_and_bias_on_a_gpu_without_host_synchronization() -> None:
    hidden, weight, bias, targets = make(dtype=torch.float32, device="cuda")
    linear_cross_entropy(hidden, weight, targets, bias=bias).backward()
    hidden.grad = weight.grad = bias.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=8)
        got.backward(retain_graph=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(got, reference(hidden, weight, targets, bias), (hidden, weight, bias), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu() -> None:
    """Forward's peak is one chunk and the fp32 gradients; backward's these and the bf16 ones."""
    tokens, width, vocab = 16384, 1024, 65536
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")
    linear_cross_entropy(hidden, weight, targets).backward()  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, targets)
    gradients = 4 * (tokens + vocab) * width
    slack = 2**23
    assert torch.cuda.max_memory_allocated() - base <= 2**28 + gradients + slack
    assert torch.cuda.memory_allocated() - base <= gradients + slack
    loss.backward()
    assert torch.cuda.max_memory_allocated() - base <= 2**28 + gradients * 3 // 2 + slack


# --- log-probabilities of tokens --------------------------------------------------------------------------------------


def frozen(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(hidden, weight, bias, targets) of a frozen head; every target counts."""
    hidden, weight, bias, _ = make(tokens, dtype, device=DEVICE)
    return hidden, weight.detach(), bias.detach(), torch.randint(V, (tokens,), device=DEVICE)


# Gradients: a chunk's logits are overwritten by their gradient in the dtype of hidden.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 6e-2)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_log_probabilities_and_gradients(
    tokens: int, bias: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * V * dtype.itemsize)  # the last of five chunks is shorter
    hidden, weight, extra, targets = frozen(tokens, dtype)
    extra = extra if bias else None
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


def test_autocast_casts_before_log_probabilities() -> None:
    hidden, weight, _, targets = frozen(9, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = linear_log_probs(hidden, weight, targets)
        want = F.linear(hidden, weight).float().log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.log_probs, want, rtol=1e-2, atol=1e-2)
    found.log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


def test_log_probabilities_refuse_what_they_cannot_differentiate() -> None:
    hidden, weight, _, targets = frozen(3, torch.float32)
    with pytest.raises(ValueError, match="needs it"):
        linear_log_probs(hidden, weight.clone().requires_grad_(), targets)
    found = linear_log_probs(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="gradient of the entropy"):
        (found.log_probs + found.entropy).sum().backward()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(linear_log_probs(hidden, weight, targets).log_probs.sum(), hidden, create_graph=True)
    with torch.no_grad():
        assert not linear_log_probs(hidden, weight, targets).log_probs.requires_grad
