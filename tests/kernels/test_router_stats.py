"""Counts of choices against a loop in Python, exactly, and sums of entropy against fp64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.router_stats import router_stats
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned


def assert_sums(sums: Tensor | None, logits: Tensor, ids: Tensor) -> None:
    """Against fp64. The entropy of a token is computed in fp32: exponentials and logarithms are exact to a few 1e-7, and sums of
    up to 512 terms of one sign to 1e-5. Where one expert has nearly all of the probability, the entropy is the logarithm of a
    number near 1, which is exact to 1e-6 and no better. Tokens are added in fp64."""
    live = (ids >= 0).any(1)
    p = logits[live].float().double().softmax(-1)
    wanted = torch.special.entr(p).sum()
    assert sums is not None and sums.dtype == torch.float64 and sums.shape == (2,)
    torch.testing.assert_close(sums[0], wanted, rtol=1e-5, atol=1e-6 * len(ids))
    assert sums[1] == live.sum()


def check(logits: Tensor, ids: Tensor, backend: Backend) -> None:
    experts = logits.shape[1]
    before = torch.arange(experts, device=DEVICE) * 2**33
    kept = before.clone()
    wanted = [2**33 * n for n in range(experts)]
    for expert in ids.reshape(-1).tolist():
        if expert >= 0:
            wanted[expert] += 1
    for counts in (before, None):
        got, sums = router_stats(logits, ids, counts, entropy=True, backend=backend)
        assert got.dtype == torch.int64 and got.is_contiguous() and not got.requires_grad
        assert (got if counts is not None else got + before).tolist() == wanted
        assert_sums(sums, logits.detach(), ids)
        alone, none = router_stats(logits, ids, counts, backend=backend)
        assert torch.equal(alone, got) and none is None
    assert torch.equal(before, kept)


def routed(tokens: int, choices: int, experts: int, sentinels: bool = True) -> tuple[Tensor, Tensor]:
    """With sentinels, one choice in four is none, and so are all choices of one token in four."""
    logits = 3 * torch.randn(tokens, experts, device=DEVICE)
    ids = torch.randint(0, experts, (tokens, choices), device=DEVICE)
    if sentinels:
        ids[torch.rand(tokens, choices, device=DEVICE) < 0.25] = -1
        ids[torch.rand(tokens, device=DEVICE) < 0.25] = -1
    return logits, ids


# A program counts 1024 slots, or measures 4096 logits of 32 experts or more: below one, one, and more.
@pytest.mark.parametrize(
    ("choices", "experts", "tokens"),
    [(1, 1, (1, 1024, 1025)), (1, 3, (1023, 1025)), (5, 96, (31, 32, 33, 129)), (8, 128, (32, 70, 129)), (4, 127, (65,)),
     (10, 512, (7, 8, 65)), (16, 512, (9,)), (16, 5, (64, 65)), (1, 300, (1, 9))],
)  # fmt: skip
@backends
def test_around_programs(choices: int, experts: int, tokens: tuple[int, ...], backend: Backend) -> None:
    for n in tokens:
        for sentinels in (False, True):
            check(*routed(n, choices, experts, sentinels), backend)


@backends
@pytest.mark.parametrize("shape", [(0, 4, 8), (0, 1, 1), (3, 0, 8)])
def test_nothing_is_chosen(shape: tuple[int, int, int], backend: Backend) -> None:
    check(*routed(*shape), backend)
    logits, ids = routed(40, 4, 8)
    check(logits, torch.full_like(ids, -1), backend)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_of_logits(dtype: torch.dtype, backend: Backend) -> None:
    logits, ids = routed(70, 4, 24)
    check(logits.to(dtype).requires_grad_(), ids, backend)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "turned": turned,
    "moved on": moved_on,
    "expanded": lambda t: t[:1].expand_as(t),
    "a choice of all": lambda t: t.expand(3, *t.shape)[1],
}


@backends
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, backend: Backend) -> None:
    logits, ids = routed(70, 3, 24)
    ids[0] = torch.tensor([23, 0, -1], device=DEVICE)
    check(LAYOUTS[layout](logits), LAYOUTS[layout](ids), backend)


@backends
def test_counts_of_any_layout(backend: Backend) -> None:
    logits, ids = routed(70, 3, 24)
    counts = torch.arange(24, device=DEVICE)
    got, _ = router_stats(logits, ids, strided(counts), backend=backend)
    assert torch.equal(got, router_stats(logits, ids, counts, backend=backend)[0])


@backends
def test_probabilities_of_zero_and_one(backend: Backend) -> None:
    logits, ids = routed(70, 2, 24, sentinels=False)
    logits[::2] *= 100  # nearly one expert alone
    logits[1::4, 3:] = -torch.inf  # as a router masks groups of experts
    logits[5], logits[6, :4] = 1e30, 1e30  # equal, and as large as they get
    check(logits, ids, backend)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of NaN
@backends
def test_logits_of_tokens_without_a_choice_are_not_counted(backend: Backend) -> None:
    logits, ids = routed(70, 2, 24, sentinels=False)
    ids[10:20], logits[10:20] = -1, torch.nan
    check(logits, ids, backend)
    ids[10, 1] = 0
    sums = router_stats(logits, ids, entropy=True, backend=backend)[1]
    assert sums is not None and sums[0].isnan() and sums[1] == 61


@backends
def test_example(backend: Backend) -> None:
    ids = torch.tensor([[1], [1], [-1]], device=DEVICE)
    counts, sums = router_stats(torch.zeros(3, 2, device=DEVICE), ids, entropy=True, backend=backend)
    assert counts.tolist() == [0, 2] and sums is not None and sums.tolist() == pytest.approx([2 * math.log(2), 2])


def test_runs_are_bitwise_equal() -> None:
    logits, ids = routed(700, 4, 24)
    runs = [router_stats(logits, ids, entropy=True, backend="triton") for _ in range(3)]
    for counts, sums in runs[1:]:
        assert sums is not None and torch.equal(counts, runs[0][0]) and torch.equal(sums, runs[0][1])


def test_refusals() -> None:
    logits, ids = routed(4, 2, 8)
    with pytest.raises(ValueError, match=r"got \[4, 8\] and \[3, 2\]"):
        router_stats(logits, ids[:3])
    with pytest.raises(ValueError, match=r"1 expert or more; got \[4, 0\]"):
        router_stats(logits[:, :0], ids)
    with pytest.raises(ValueError, match=r"counts must be \[8\], got \[7\]"):
        router_stats(logits, ids, torch.zeros(7, dtype=torch.int64, device=DEVICE))
    with pytest.raises(TypeError, match=r"counts must be torch\.int64, got torch\.float32"):
        router_stats(logits, ids, torch.zeros(8, device=DEVICE))
    with pytest.raises(TypeError, match=r"ids must be torch\.int64, got torch\.int32"):
        router_stats(logits, ids.int())
    with pytest.raises(TypeError, match="logits must be floating point"):
        router_stats(ids, ids)
    with pytest.raises(ValueError, match="ids must be on"):
        router_stats(logits, torch.empty_like(ids, device="meta"))


@pytest.mark.gpu
def test_of_the_size_of_a_real_layer() -> None:
    for tokens, choices, experts in (
        (10240, 5, 96),
        (32768, 6, 64),
        (16384, 8, 128),
        (16384, 10, 512),
        (40000, 16, 300),
    ):
        logits, ids = routed(tokens, choices, experts)
        got, sums = router_stats(logits, ids, entropy=True)
        wanted = torch.bincount(ids[ids >= 0], minlength=experts)
        assert torch.equal(got, wanted)
        assert_sums(sums, logits, ids)
        assert torch.equal(router_stats(logits, ids)[0], wanted)
        reference, of_reference = router_stats(logits, ids, entropy=True, backend="reference")
        assert torch.equal(reference, wanted)
        torch.testing.assert_close(sums, of_reference, rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Captured with counts and without, and replayed: nothing synchronizes, and counts begin anew in each replay."""
    logits, ids = routed(300, 4, 96)
    before = torch.arange(96, device="cuda")

    def run() -> tuple[Tensor, Tensor | None, Tensor]:
        counts, sums = router_stats(logits, ids, entropy=True)
        return counts, sums, router_stats(logits, ids, before)[0]

    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts, sums, more = run()
    for _ in range(2):
        fresh = routed(300, 4, 96)
        logits.copy_(fresh[0])
        ids.copy_(fresh[1])
        graph.replay()
        wanted = torch.bincount(ids[ids >= 0], minlength=96)
        assert torch.equal(counts, wanted) and torch.equal(more, wanted + before)
        assert_sums(sums, logits, ids)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    tokens, experts = 2**22 + 8, 512
    logits = torch.zeros(tokens, experts, dtype=torch.bfloat16, device="cuda")
    logits[-8:, 7] = 1000  # entropy 0
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device="cuda")
    ids[-8:] = 7
    counts, sums = router_stats(logits, ids, entropy=True)
    assert counts[0] == 2**22 and counts[7] == 8 and counts.sum() == tokens
    assert sums is not None and sums[1] == tokens
    torch.testing.assert_close(sums[0].item(), 2**22 * math.log(512), rtol=1e-6, atol=0)
