"""The gated activation: Triton against the plain form, the plain form against autograd in fp64, pages against tensors."""

import pytest
import torch

from forebay.kernels.paging import Arena, PageTable, restore
from forebay.kernels.row_fp8 import decode_rows, encode_rows, encoded_width
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from tests.kernels.common import DEVICE, backends

SWIGLU = Glu()
INTERLEAVED = Glu(interleaved=True)
CLAMPED = Glu("clamped_swiglu", True, 1.702, 1.0)
LIMITED = Glu("limited_swiglu", limit=0.7)
GLUS = [
    SWIGLU,
    INTERLEAVED,
    CLAMPED,
    Glu("clamped_swiglu", False, 1.3, 0.7),
    LIMITED,
    Glu("limited_swiglu", True, limit=1.0),
]
# One rounding of the same fp32 numbers; exp differs by a few ulp, so a bf16 result may fall on the
# other side of a rounding boundary: one ulp of the dtype.
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
RTOL = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make(rows, inner, live, dtype, experts=3, bias=False, weights_dtype=torch.float32):
    """Inputs of R rows, `live` of them real; the sentinels' h and da are NaN."""
    h = torch.randn(rows, 2 * inner, device=DEVICE).to(dtype)
    da = torch.randn(rows, inner, device=DEVICE).to(dtype)
    h[live:], da[live:] = torch.nan, torch.nan
    weights = torch.rand(rows, device=DEVICE).to(weights_dtype)
    order = torch.randperm(rows, device=DEVICE).int()
    ends = [*sorted(torch.randint(0, live + 1, (experts - 1,)).tolist()), live]
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    extra = {}
    if bias:
        extra["bias"] = torch.randn(experts, 2 * inner, device=DEVICE).to(dtype)
        at = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        extra["row_expert"] = torch.searchsorted(offs, at, right=True).int()
    return h, da, weights, order, offs, extra


def assert_equal(got, wanted, live: int) -> None:
    """Of matrices, whose other rows nobody reads, the `live` rows."""
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a[:live], b[:live]) if a.dim() == 2 else torch.equal(a, b)


def close(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(a, b, atol=scale * ATOL[b.dtype], rtol=scale * RTOL[b.dtype])


def compare(h, da, weights, order, offs, extra, glu) -> None:
    live = int(offs[-1])
    both = [
        (
            swiglu_forward(h, weights, order, offs, glu, backend=b, **extra),
            *swiglu_backward(h, da.clone(), weights, order, offs, glu, backend=b, **extra),
        )
        for b in ("triton", "reference")
    ]
    for got, wanted in list(zip(*both, strict=True))[:3]:
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert not got[:live].isnan().any() and got[live:].isnan().all(), "sentinels' rows are not written"
        close(got[:live], wanted[:live])
    # dw is a sum over I in another order: a few fp32 roundings of the largest term each.
    torch.testing.assert_close(both[0][3], both[1][3], atol=1e-4, rtol=1e-5)
    assert (both[0][3][order[live:].long()] == 0).all()
    # Forward and backward must round the same activation, or recomputation changes the gradient.
    assert torch.equal(both[0][0][:live], both[0][2][:live])


@pytest.mark.parametrize("glu", GLUS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_is_the_reference(glu: Glu, dtype: torch.dtype, poisoned: None) -> None:
    compare(*make(19, 24, 15, dtype), glu)
    compare(*make(19, 24, 19, dtype, bias=True, weights_dtype=torch.bfloat16), glu)


# Tiles are 1024 elements: 2 x 512 for I >= 449, 4 x 256 for 256, 64 x 16 for the narrowest.
@pytest.mark.parametrize(
    ("rows", "inner", "live"),
    [(0, 8, 0), (1, 8, 1), (1, 8, 0), (63, 8, 62), (64, 8, 64), (65, 8, 64), (3, 256, 3), (4, 256, 4), (5, 256, 5),
     (9, 257, 8), (3, 255, 3), (3, 512, 2), (2, 513, 2), (17, 1, 16), (5, 300, 2), (4, 176, 4)],
)  # fmt: skip
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED], ids=str)
def test_shapes_around_a_tile(rows: int, inner: int, live: int, glu: Glu, poisoned: None) -> None:
    compare(*make(rows, inner, live, torch.float32, bias=True), glu)


def test_pairs_that_start_on_an_odd_element(poisoned: None) -> None:
    """They cannot be read as words where they lie."""
    h, da, weights, order, offs, extra = make(9, 24, 8, torch.bfloat16, bias=True)
    wanted = swiglu_backward(h, da.clone(), weights, order, offs, CLAMPED, backend="triton", **extra)
    odd = [torch.cat((t.new_zeros(1), t.view(-1)))[1:].view(t.shape) for t in (h, extra["bias"])]
    assert all(t.storage_offset() == 1 for t in odd)
    extra["bias"] = odd[1]
    got = swiglu_backward(odd[0], da.clone(), weights, order, offs, CLAMPED, backend="triton", **extra)
    assert_equal(got, wanted, 8)
    with pytest.raises(ValueError, match="even offset"):
        swiglu_backward(odd[0], da, weights, order, offs, CLAMPED, over_h=True, **extra)


def test_a_single_row_of_wider_rows(poisoned: None) -> None:
    """It is contiguous, and its stride may be odd."""

    def narrowed(t: torch.Tensor) -> torch.Tensor:
        wide = t.new_zeros(1, t.shape[1] + 5)
        wide[:, : t.shape[1]] = t
        return wide[:, : t.shape[1]]

    h, da, weights, order, offs, extra = make(1, 32, 1, torch.bfloat16, experts=1, bias=True)
    small = encode_rows(h, backend="reference")
    for glu in GLUS:
        for saved in (h, small):
            wanted = swiglu_backward(saved, da.clone(), weights, order, offs, glu, backend="triton", **extra)
            odd = {**extra, "bias": narrowed(extra["bias"])}
            got = swiglu_backward(narrowed(saved), da.clone(), weights, order, offs, glu, backend="triton", **odd)
            assert_equal(got, wanted, 1)


@pytest.mark.parametrize("glu", GLUS, ids=str)
@backends
def test_written_over_its_inputs_gives_the_same_bits(glu: Glu, backend, poisoned: None) -> None:
    h, da, *rest, extra = make(33, 72, 30, torch.bfloat16, bias=True)
    wanted = swiglu_backward(h, da.clone(), *rest, glu, backend=backend, **extra)
    over_h, over_da = h.clone(), da.clone()
    got = swiglu_backward(over_h, over_da, *rest, glu, over_h=True, backend=backend, **extra)
    assert_equal(got, wanted, 30)
    assert got[0] is over_h and got[1] is over_da


def test_only_what_is_needed_is_made() -> None:
    h, da, *rest, _ = make(9, 24, 8, torch.float32)
    wanted = swiglu_backward(h, da.clone(), *rest, SWIGLU, backend="triton")
    for needs in [(True, False, False), (False, True, False), (False, False, True)]:
        names = dict(zip(("need_dh", "need_act", "need_dw"), needs, strict=True))
        got = swiglu_backward(h, da.clone(), *rest, SWIGLU, **names, backend="triton")
        for need, a, b in zip(needs, got, wanted, strict=True):
            if need:
                assert_equal([a], [b], 8)
            else:
                assert a is None


@pytest.mark.parametrize("glu", GLUS, ids=str)
def test_reference_is_what_autograd_says(glu: Glu) -> None:
    """In fp64, against the definition written with torch.clamp and torch.sigmoid."""
    h, da, weights, order, offs, extra = make(11, 6, 11, torch.float64, bias=True)
    h, weights = h.requires_grad_(), weights.double().requires_grad_()
    x = h + extra["bias"][extra["row_expert"].long()]
    gate, up = (x[:, ::2], x[:, 1::2]) if glu.interleaved else x.chunk(2, dim=1)
    if glu.kind == "swiglu":
        y = torch.nn.functional.silu(gate) * up
    else:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
        clamped = glu.kind == "clamped_swiglu"
        y = gate * torch.sigmoid(glu.alpha * gate) * (up + 1) if clamped else torch.nn.functional.silu(gate) * up
    y = y * weights[order.long()].unsqueeze(1)
    dh, dw = torch.autograd.grad(y, (h, weights), da)
    args = (h.detach(), weights.detach(), order, offs, glu)
    torch.testing.assert_close(swiglu_forward(*args, **extra), y.detach())
    got = swiglu_backward(args[0], da.clone(), *args[1:], **extra)
    for a, b in zip(got, (dh, y.detach(), dw), strict=True):
        torch.testing.assert_close(a, b)


def test_a_nan_in_a_live_row_stays_visible() -> None:
    h, _, weights, order, offs, _ = make(4, 24, 4, torch.float32)
    h[1, 0], h[2, 1] = torch.nan, torch.nan
    for glu in (SWIGLU, CLAMPED, LIMITED):
        for backend in ("triton", "reference"):
            act = swiglu_forward(h, weights, order, offs, glu, backend=backend)
            assert act[1].isnan().any() and act[2].isnan().any()
            assert not act[[0, 3]].isnan().any()


def paged(h: torch.Tensor, offs: torch.Tensor, device_share: float = 0.5, page_bytes: int = 512) -> PageTable:
    """Room for h's live rows on poisoned pages in any order, a share of them on the device; a few more pages lie about."""
    row_bytes = h.shape[1] * h.element_size()
    page_rows = page_bytes // row_bytes
    entries, needed = -(-h.shape[0] // page_rows), -(-int(offs[-1]) // page_rows)
    n_pages = entries + 3
    on_device = int(device_share * n_pages)
    device = torch.full((on_device * page_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    host = torch.full(((n_pages - on_device) * page_bytes,), 0xFF, dtype=torch.uint8)
    if DEVICE == "cuda" and host.numel():
        host = host.pin_memory()
    pages = torch.randperm(n_pages)[:entries].int()
    pages[needed:] = -1
    return PageTable(Arena(device, host, page_bytes), pages.to(DEVICE), offs[-1:], h.shape[0], row_bytes)


def compare_paged(h, da, weights, order, offs, extra, glu, backend, **where) -> None:
    """Through pages and without: the same bits, and h as it was. Rows that are aligned in pages only are shared among a GPU's
    threads otherwise, and so are the sums of dw."""
    live, pages, rest = int(offs[-1]), paged(h, offs, **where), {"backend": backend, **extra}
    act = swiglu_forward(h, weights, order, offs, glu, saved=pages, **rest)
    assert_equal([act], [swiglu_forward(h, weights, order, offs, glu, **rest)], live)
    saved = torch.full(h.shape, torch.nan, dtype=h.dtype, device=DEVICE)
    restore([pages], [saved], backend=backend)
    assert torch.equal(saved[:live], h[:live]) and saved[live:].isnan().all()
    *wanted, dw = swiglu_backward(h, da.clone(), weights, order, offs, glu, **rest)
    *got, paged_dw = swiglu_backward(pages, da.clone(), weights, order, offs, glu, **rest)
    assert_equal(got, wanted, live)
    if DEVICE == "cuda" and da.shape[1] % 8:
        torch.testing.assert_close(paged_dw, dw, atol=1e-4, rtol=1e-5)
    else:
        assert torch.equal(paged_dw, dw)


@backends
@pytest.mark.parametrize("glu", GLUS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_through_pages_the_same_bits(glu: Glu, dtype: torch.dtype, backend, poisoned: None) -> None:
    compare_paged(*make(19, 24, 15, dtype), glu, backend)
    compare_paged(*make(19, 24, 19, dtype, bias=True, weights_dtype=torch.bfloat16), glu, backend)


@backends
@pytest.mark.parametrize("glu", GLUS, ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "live"), [(0, 32, 0), (1, 32, 1), (5, 32, 0), (35, 32, 34), (9, 96, 8), (5, 544, 5), (3, 64, 3)]
)
def test_in_8_bits_h_is_what_its_rows_are_rounded_to(
    glu: Glu, rows: int, inner: int, live: int, backend, poisoned: None
) -> None:
    h, da, weights, order, offs, extra = make(rows, inner, live, torch.bfloat16, bias=rows % 2 == 1)
    h *= 2.0 ** torch.randint(-12, 12, h.shape, device=DEVICE)
    h[:, 40:] *= 2.0**-20  # columns of a row need scales of their own
    rest = {"backend": backend, **extra}
    width = encoded_width(2 * inner)
    small = torch.full((rows, width), 0xFF, dtype=torch.uint8, device=DEVICE)
    act = swiglu_forward(h, weights, order, offs, glu, saved=small, **rest)
    assert_equal([act], [swiglu_forward(h, weights, order, offs, glu, **rest)], live)  # that of h itself
    assert torch.equal(small[:live], encode_rows(h[:live], backend="reference"))
    rounded = decode_rows(small, 2 * inner, backend="reference")
    wanted = swiglu_backward(rounded, da.clone(), weights, order, offs, glu, **rest)
    assert_equal(swiglu_backward(small, da.clone(), weights, order, offs, glu, **rest), wanted, live)
    pages = paged(small, offs, page_bytes=4096)
    assert_equal([swiglu_forward(h, weights, order, offs, glu, saved=pages, **rest)], [act], live)
    assert_equal(swiglu_backward(pages, da.clone(), weights, order, offs, glu, **rest), wanted, live)
    h[::2, 1::7], h[1::2, ::9] = torch.inf, -torch.inf
    swiglu_forward(h, weights, order, offs, glu, saved=small, **rest)
    assert torch.equal(small[:live], encode_rows(h[:live], backend="reference"))


# Pages of 512 bytes hold 2 rows of 64 columns, 1 of 65, 64 of one pair in bf16; of 2816-byte rows a page of 8192 holds 2.
@pytest.mark.parametrize(
    ("rows", "inner", "live", "page_bytes", "device_share"),
    [(0, 8, 0, 512, 0.5), (1, 8, 0, 512, 1.0), (1, 8, 1, 512, 0.0), (129, 1, 128, 512, 0.5), (65, 8, 65, 512, 0.5),
     (64, 8, 33, 512, 0.0), (9, 64, 5, 512, 1.0), (9, 65, 8, 512, 0.5), (7, 33, 7, 512, 0.5), (5, 704, 5, 8192, 0.5),
     (3, 515, 2, 8192, 0.5)],
)  # fmt: skip
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED], ids=str)
def test_shapes_around_a_page(rows, inner, live, page_bytes, device_share, glu: Glu, poisoned: None) -> None:
    inputs = make(rows, inner, live, torch.bfloat16, bias=True)
    compare_paged(*inputs, glu, "triton", page_bytes=page_bytes, device_share=device_share)


def test_pages_of_fp64_and_of_h_that_is_not_contiguous(poisoned: None) -> None:
    h, da, weights, order, offs, extra = make(11, 6, 9, torch.float64)
    compare_paged(h, da, weights, order, offs, extra, SWIGLU, "reference")
    h, da, weights, order, offs, extra = make(9, 24, 8, torch.bfloat16)
    wide = torch.cat((h.new_zeros(1), h.view(-1)))[1:].view(h.shape)
    for strided in (h.t().contiguous().t(), wide):
        compare_paged(strided, da, weights, order, offs, extra, CLAMPED, "triton")


@backends
def test_where_pages_were_short_h_is_zeros(backend, poisoned: None) -> None:
    for glu in (SWIGLU, CLAMPED):
        h, da, weights, order, offs, extra = make(19, 24, 15, torch.bfloat16, bias=True)
        pages = paged(h, offs)
        pages = pages._replace(pages=torch.full_like(pages.pages, -1))
        before = pages.arena.device.clone(), pages.arena.host.clone()
        act = swiglu_forward(h, weights, order, offs, glu, saved=pages, backend=backend, **extra)
        assert_equal([act], [swiglu_forward(h, weights, order, offs, glu, backend=backend, **extra)], 15)
        assert torch.equal(pages.arena.device, before[0]) and torch.equal(pages.arena.host, before[1])
        got = swiglu_backward(pages, da.clone(), weights, order, offs, glu, backend=backend, **extra)
        zeros = torch.zeros_like(h)
        wanted = swiglu_backward(zeros, da.clone(), weights, order, offs, glu, backend=backend, **extra)
        assert_equal(got, wanted, 15)


def test_refusals() -> None:
    h, da, *rest, _ = make(4, 8, 4, torch.float32)
    weights, order, offs = rest
    pages = paged(h, offs)
    for call, message in (
        (lambda: swiglu_forward(h[:, :15], *rest, SWIGLU), "2I"),
        (lambda: swiglu_forward(h, weights[:3], order, offs, SWIGLU), "at least 4 weights"),
        (lambda: swiglu_forward(h, weights, order[:3], offs, SWIGLU), r"order \[4\]"),
        (lambda: swiglu_forward(h, *rest, SWIGLU, bias=h[:3]), "row_expert"),
        (lambda: swiglu_backward(h.t().contiguous().t(), da, *rest, SWIGLU, over_h=True), "contiguous"),
        (lambda: swiglu_backward(pages, da, *rest, SWIGLU, over_h=True), "over_h needs a tensor"),
        (lambda: swiglu_forward(h.bfloat16(), *rest, SWIGLU, saved=pages), "4 rows of 32 bytes"),
        (lambda: swiglu_backward(pages, da.bfloat16(), *rest, SWIGLU), "got 4 of 64"),
        (lambda: swiglu_forward(h.bfloat16(), *rest, SWIGLU, saved=torch.zeros(4, 17).byte()), "I a multiple of 32"),
        (lambda: swiglu_forward(h, *rest, SWIGLU, saved=torch.zeros(4, 16)), r"contiguous uint8 \[4, 17\]"),
        (lambda: swiglu_backward(torch.zeros(4, 17).byte(), da, *rest, SWIGLU, over_h=True), "over_h needs a tensor"),
        (lambda: swiglu_forward(h, *rest, SWIGLU, saved=torch.zeros(69).byte()[1:].view(4, 17)), "an even offset"),
        (lambda: Glu("gelu"), "activation"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="fp64"):
        swiglu_forward(h.double(), *rest, SWIGLU, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED], ids=str)
def test_more_elements_than_int32_counts(glu: Glu) -> None:
    """h has 2**31 + 2**21 elements: the last rows are wrong if any offset is 32-bit."""
    inner = 1024
    rows = 2**20 + 2**10
    h = torch.zeros(rows, 2 * inner, dtype=torch.bfloat16, device="cuda")
    da = torch.zeros(rows, inner, dtype=torch.bfloat16, device="cuda")
    h[-64:].normal_()
    da[-64:].normal_()
    weights = torch.rand(rows, device="cuda")
    order = torch.arange(rows, device="cuda", dtype=torch.int32)
    offs = torch.tensor([rows], device="cuda", dtype=torch.int32)
    act = swiglu_forward(h, weights, order, offs, glu)
    got = swiglu_backward(h, da.clone(), weights, order, offs, glu)
    small = (h[-64:], da[-64:], weights[-64:], order[:64], torch.full_like(offs, 64))
    wanted = swiglu_backward(*small, glu, backend="reference")
    close(act[-64:], wanted[1])
    close(got[0][-64:], wanted[0])
    close(got[1][-64:], wanted[1])
    torch.testing.assert_close(got[2][-64:], wanted[2], atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("glu", [SWIGLU, CLAMPED], ids=str)
def test_pages_with_more_elements_than_int32_counts(glu: Glu) -> None:
    """2**31 + 2**21 elements, pages in reverse: the first rows' offsets are the largest."""
    inner, page_bytes = 1024, 1 << 18
    rows = 2**20 + 2**10
    h = torch.randint(-(2**14), 2**14, (rows, 2 * inner), dtype=torch.int16, device="cuda").view(torch.bfloat16)
    weights = torch.rand(rows, device="cuda")
    order = torch.arange(rows, device="cuda", dtype=torch.int32)
    offs = torch.tensor([rows - 1], device="cuda", dtype=torch.int32)
    n_pages = -(-rows // (page_bytes // (4 * inner)))
    arena = Arena(
        torch.empty(n_pages * page_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(0, dtype=torch.uint8),
        page_bytes,
    )
    numbers = torch.arange(n_pages - 1, -1, -1, dtype=torch.int32, device="cuda")
    pages = PageTable(arena, numbers, offs, rows, 4 * inner)
    swiglu_forward(h, weights, order, offs, glu, saved=pages)
    saved = torch.zeros_like(h)
    restore([pages], [saved])
    assert torch.equal(saved[:-1].view(torch.int16), h[:-1].view(torch.int16)) and (saved[-1] == 0).all()
    del saved
    da = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    wanted = swiglu_backward(h, da.clone(), weights, order, offs, glu)
    del h
    got = swiglu_backward(pages, da.clone(), weights, order, offs, glu)
    assert_equal([t.nan_to_num_() for t in got], [t.nan_to_num_() for t in wanted], rows - 1)
