"""`masked_attention` against its definition in fp64, in both forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels import masked_attention as module
from forebay.kernels.masked_attention import WIDEST, masked_attention, masked_attention_backward
from tests.kernels.common import DEVICE, PRODUCT_DTYPES, backends, moved_on, strided, turned

# Errors in units of what the dtype rounds off, times the largest element. fp32 sums up to 600 products in another order.
ALLOWED = {torch.float32: 60, torch.float16: 6, torch.bfloat16: 6}
MASKED = torch.finfo(torch.bfloat16).min


@pytest.fixture(autouse=True)
def few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for a program that has nothing to do. So few share tiles among several, too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_MORE_JOBS", 4)


def drawn_mask(
    batch: int, length: int, keys: int, lowest: float = -math.inf, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A window of 5 among the first keys, and others at random."""
    q, k = torch.arange(length)[:, None], torch.arange(keys)
    seen = ((k <= q) & (k > q - 5)) | ((torch.rand(batch, length, keys) < 0.3) & (k >= length))
    return torch.zeros(batch, length, keys).masked_fill(~seen, lowest).to(DEVICE, dtype)


def drawn(
    batch: int, heads: tuple[int, int], length: int, keys: int, widths: tuple[int, int | None], dtype: torch.dtype
) -> list[Tensor | None]:
    """q, k, v and sinks."""
    q = torch.randn(batch, heads[0], length, widths[0], device=DEVICE)
    k = torch.randn(batch, heads[1], keys, widths[0], device=DEVICE)
    v = None if widths[1] is None else torch.randn(batch, heads[1], keys, widths[1], device=DEVICE).to(dtype)
    return [q.to(dtype), k.to(dtype), v, torch.randn(heads[0], device=DEVICE)]


def definition(q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """A softmax over the scores and the sink, of which only the scores have values."""
    v = k if v is None else v
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale + mask[:, None]
    lowest = max(torch.finfo(mask.dtype).min / 2, -98304)
    scores = scores.masked_fill((mask <= lowest)[:, None], -math.inf)
    sink = torch.full_like(scores[..., :1], -math.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None].expand_as(sink)
    # A weight of any size that is taken away again, so that a query without keys and sink has 0.
    scores = torch.cat([scores, sink], -1)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    return (weights[..., :-1] / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v).transpose(1, 2)


def check(
    given: list[Tensor | None],
    mask: Tensor,
    backend: str,
    placed: Callable[[Tensor], Tensor] = lambda t: t,
) -> None:
    """Outputs and gradients, and that a second call has their bits."""
    dtype, scale = given[0].dtype, given[0].shape[-1] ** -0.5  # type: ignore[union-attr]
    wide = [None if t is None else t.double().requires_grad_() for t in given]
    q, k, v, sinks = wide
    assert q is not None and k is not None
    out = definition(q, k, v, mask.double() if mask.dtype == torch.float64 else mask, sinks, scale)
    dy = torch.randn_like(out).to(dtype)
    wanted = [out, *torch.autograd.grad(out, [t for t in wide if t is not None], dy.double())]
    placed_given = [None if t is None else placed(t) for t in given]
    placed_mask, placed_dy = placed(mask), placed(dy)

    def run() -> list[Tensor]:
        out, lse = masked_attention(*placed_given[:3], placed_mask, placed_given[3], scale, backend=backend)  # type: ignore[arg-type, misc]
        found = masked_attention_backward(
            placed_dy, *placed_given[:3], placed_mask, placed_given[3], out, lse, scale, backend=backend
        )  # type: ignore[arg-type, misc, call-arg]
        return [out, *(t for t in found if t is not None)]

    first, second = run(), run()
    for found, again, exact, name in zip(
        first, second, wanted, ("out", "q", "k", "v", "sinks")[: len(wanted)], strict=False
    ):
        assert torch.equal(found, again), name
        assert found.shape == exact.shape, name
        error = (found.double() - exact.detach()).abs().max()
        limit = ALLOWED[dtype] * torch.finfo(dtype).eps * exact.detach().abs().max().clamp(min=1.0)
        assert error <= limit, f"{name}: {float(error):.2e}, allowed {float(limit):.2e}"


SHAPES: dict[str, tuple[Any, ...]] = {  # batch, heads, length, keys, widths
    "one of each": (1, (1, 1), 1, 1, (16, None)),
    "one key a group of heads": (2, (5, 1), 9, 12, (16, None)),
    "one off a tile": (1, (4, 2), 65, 129, (16, 16)),
    "two widths": (2, (4, 4), 33, 33, (24, 16)),
    "wider values": (1, (2, 2), 17, 20, (8, 40)),
    "more heads than a tile": (1, (70, 1), 5, 7, (16, None)),
    "a group that is no power of two": (1, (6, 2), 20, 70, (16, 12)),
    "odd widths": (1, (3, 1), 30, 41, (7, 5)),
}


@backends
@pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients(shape: str, dtype: torch.dtype, backend: str) -> None:
    batch, heads, length, keys, widths = SHAPES[shape]
    check(drawn(batch, heads, length, keys, widths, dtype), drawn_mask(batch, length, keys), backend)


@backends
@pytest.mark.parametrize("sinks", [True, False])
def test_queries_without_keys(sinks: bool, backend: str) -> None:
    given = drawn(2, (4, 1), 40, 50, (16, None), torch.float32)
    mask = drawn_mask(2, 40, 50, MASKED)
    mask[1, :21] = MASKED
    if not sinks:
        given[3] = None
    check(given, mask, backend)


@backends
@pytest.mark.parametrize(("lowest", "dtype"), [(-1e9, torch.float32), (-1e5, torch.float32), (-1e5, torch.bfloat16)])
def test_masks_that_are_low_but_finite(lowest: float, dtype: torch.dtype, backend: str) -> None:
    """Of a query without another key, too: lse in fp32 would not hold the sum of its weights beside -1e9."""
    given = drawn(1, (4, 1), 20, 30, (16, None), torch.float32)
    given[3] = None
    mask = drawn_mask(1, 20, 30, lowest, dtype)
    mask[0, :7] = lowest
    check(given, mask, backend)


@backends
def test_sinks_of_minus_infinity(backend: str) -> None:
    """Beside queries without keys, whose outputs and gradients are 0."""
    q, k, _, _ = drawn(1, (4, 1), 20, 30, (16, None), torch.float32)
    assert q is not None and k is not None
    mask = drawn_mask(1, 20, 30)
    mask[0, 3:9] = -math.inf
    sinks = torch.full((4,), -math.inf, device=DEVICE)
    out, lse = masked_attention(q, k, None, mask, sinks, 0.25, backend=backend)  # type: ignore[arg-type]
    without, _ = masked_attention(q, k, None, mask, None, 0.25, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(out, without) and not out[0, 3:9].any()
    dy = torch.randn_like(out)
    found = masked_attention_backward(dy, q, k, None, mask, sinks, out, lse, 0.25, backend=backend)  # type: ignore[arg-type]
    assert all(t.isfinite().all() for t in found if t is not None) and not found[3].any()  # type: ignore[union-attr]


@backends
@pytest.mark.parametrize("placed", [turned, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)])
def test_gradients_are_contiguous_as_the_ops_fake_says(placed: Callable[[Tensor], Tensor], backend: str) -> None:
    q, k, v, sinks = drawn(2, (4, 2), 20, 30, (16, 12), torch.float32)
    assert q is not None and k is not None and v is not None and sinks is not None
    q, k, v = placed(q), placed(k), placed(v)
    mask = drawn_mask(2, 20, 30)
    out, lse = masked_attention(q, k, v, mask, sinks, 0.25, backend=backend)  # type: ignore[arg-type]
    found = masked_attention_backward(torch.ones_like(out), q, k, v, mask, sinks, out, lse, 0.25, backend=backend)  # type: ignore[arg-type]
    assert out.is_contiguous() and lse.is_contiguous()
    assert all(t is not None and t.is_contiguous() for t in found)


@backends
def test_masks_of_numbers_and_of_several_dtypes(backend: str) -> None:
    given = drawn(1, (4, 1), 20, 30, (16, None), torch.float32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask = torch.randn(1, 20, 30, device=DEVICE).to(dtype) * 3
        mask = mask.masked_fill(drawn_mask(1, 20, 30) < 0, torch.finfo(dtype).min)
        check(given, mask, backend)


@backends
def test_one_mask_for_all_sequences(backend: str) -> None:
    given = drawn(3, (2, 2), 20, 30, (16, 16), torch.float32)
    check(given, drawn_mask(1, 20, 30), backend)
    check(given, drawn_mask(1, 20, 30).expand(3, -1, -1), backend)


@backends
@pytest.mark.parametrize("placed", [strided, turned, moved_on], ids=lambda f: f.__name__)
def test_layouts(placed: Callable[[Tensor], Tensor], backend: str) -> None:
    check(drawn(2, (4, 2), 20, 30, (16, 16), torch.float32), drawn_mask(2, 20, 30), backend, placed)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("placed", [lambda t: t, strided, turned], ids=["plain", "strided", "turned"])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 65), (64, 200), (3, 700)], ids=str)
def test_lists_of_tiles(
    sizes: tuple[int, int], placed: Callable[[Tensor], Tensor], of_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a loop over tiles; a program looks at few at once, at several, or at all."""
    length, keys = sizes
    mask = drawn_mask(2, length, keys, dtype=torch.bfloat16)
    mask[:, :, keys // 3 : keys // 3 * 2] = -1e5  # -99840 in bf16
    q, k = (torch.empty(2, heads, n, 16, device=DEVICE, dtype=torch.bfloat16) for heads, n in ((4, length), (1, keys)))
    made = module._Launch.of(module._keys_kernel if of_keys else module._forward_kernel, q, k, None, mask)
    left = mask.mT if of_keys else mask
    steps = (made.tiles.queries, made.tiles.keys)[:: -1 if of_keys else 1]
    tiles = [[t == 0 for t in row.split(steps[1], -1)] for row in left.split(steps[0], -2)]
    for at_once in (1, 4096, 1 << 20):
        monkeypatch.setattr(module, "_LOOKED_AT", at_once)
        counts, lists = made.tiles_with_keys(placed(mask), of_keys)
        for b in range(2):
            expected = [[n for n, tile in enumerate(row) if tile[b].any()] for row in tiles]
            assert counts[b].tolist() == [len(row) for row in expected]
            assert [list_[: len(row)].tolist() for list_, row in zip(lists[b], expected, strict=True)] == expected


@backends
@pytest.mark.parametrize("sizes", [(0, 4, 5), (1, 0, 5), (1, 4, 0)], ids=["no sequence", "no query", "no key"])
def test_nothing_to_attend(sizes: tuple[int, int, int], backend: str) -> None:
    batch, length, keys = sizes
    q, k, _, sinks = drawn(batch, (2, 1), length, keys, (16, None), torch.float32)
    mask = drawn_mask(batch, length, keys)
    out, lse = masked_attention(q, k, None, mask, sinks, 0.25, backend=backend)  # type: ignore[arg-type]
    assert not out.any() and out.shape == (batch, length, 2, 16)
    found = masked_attention_backward(torch.ones_like(out), q, k, None, mask, sinks, out, lse, 0.25, backend=backend)  # type: ignore[arg-type]
    assert not any(t.any() for t in found if t is not None)


def test_what_does_not_fit_is_refused() -> None:
    q, k, _, sinks = drawn(2, (4, 2), 8, 9, (16, None), torch.float32)
    mask = drawn_mask(2, 8, 9)
    assert q is not None and k is not None and sinks is not None
    for wrong, said in (
        ((q, k[:1], None, mask, sinks), r"k must be \[2, a divisor of 4, any, 16\], got \[1, 2, 9, 16\]"),
        ((q, k, k[:, :, :8], mask, sinks), r"v must be \[2, 2, 9, any\], got \[2, 2, 8, 16\]"),
        ((q, k, None, mask[:, :7], sinks), r"mask must be \[2 or 1, 8, 9\], got \[2, 7, 9\]"),
        ((q, k, None, mask, sinks[:3]), r"sinks must be \[4\], got \[3\]"),
        ((q, k, k.new_zeros(2, 2, 9, WIDEST + 1), mask, sinks), "heads are 513 wide; at most 512 fit"),
        ((q, k, k[..., :0], mask, sinks), r"heads of no width: \[2, 4, 8, 16\] and \[2, 2, 9, 0\]"),
        ((q, k[:, :0], None, mask, sinks), r"there are no heads, or heads of no width"),
    ):
        with pytest.raises(ValueError, match=said):
            masked_attention(*wrong, 1.0)
    with pytest.raises(TypeError, match="mask must be floating point"):
        masked_attention(q, k, None, mask > 0, sinks, 1.0)
    with pytest.raises(TypeError, match=r"k and v must be torch\.float32"):
        masked_attention(q, k.half(), None, mask, sinks, 1.0)


@pytest.mark.gpu
def test_widths_of_published_models() -> None:
    """DeepSeek-V4's heads, which share keys of 512, and MiMo-V2's of 192 and 128."""
    check(
        drawn(1, (64, 1), 300, 375, (512, None), torch.bfloat16),
        drawn_mask(1, 300, 375, dtype=torch.bfloat16),
        "triton",
    )
    check(
        drawn(2, (8, 8), 300, 300, (192, 128), torch.bfloat16), drawn_mask(1, 300, 300, dtype=torch.bfloat16), "triton"
    )
    check(drawn(1, (64, 1), 40, 50, (512, None), torch.float32), drawn_mask(1, 40, 50), "triton")


@pytest.mark.gpu
def test_more_scores_than_int32_holds() -> None:
    """A mask of 2^31 numbers and more, whose last rows are compared."""
    length, width = 46400, 16
    q, k = (torch.randn(1, h, length, width, device="cuda", dtype=torch.bfloat16) for h in (2, 1))
    mask = torch.full((1, length, length), MASKED, device="cuda", dtype=torch.bfloat16)
    mask[:, -70:, -100:] = 0
    sinks = torch.zeros(2, device="cuda")
    out, lse = masked_attention(q, k, None, mask, sinks, 0.25)
    dy = torch.randn_like(out)
    found = masked_attention_backward(dy, q, k, None, mask, sinks, out, lse, 0.25)
    few = [q[:, :, -70:], k[:, :, -100:], None, mask[:, -70:, -100:], sinks]
    few_out, few_lse = masked_attention(*few, 0.25, backend="reference")  # type: ignore[arg-type]
    wanted = masked_attention_backward(dy[:, -70:], *few, few_out, few_lse, 0.25, backend="reference")  # type: ignore[arg-type]
    assert not out[:, :-70].any() and not found[0][:, :, :-70].any() and not found[1][:, :, :-100].any()
    for a, b in ((out[:, -70:], few_out), (found[0][:, :, -70:], wanted[0]), (found[1][:, :, -100:], wanted[1])):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)
