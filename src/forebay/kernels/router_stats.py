"""Statistics of a router's choices: how often each expert was chosen, and the entropy of the router's probabilities.

Input: ids [T, K], the experts that a router chose, -1 for no choice, and its logits x [T, E]. Output: counts [E] int64, and on
request sums [2] fp64: the entropy of the softmax of x in nats, summed over the tokens with a choice, and the number of these.

    odds = exp(x - max(x)),  total = sum(odds),  entropy = log(total) - sum(odds * (x - max(x))) / total

The entropy of a token is computed in fp32. Counts are exact, and both outputs are the same bits every time: atomics add integers
only. Nothing synchronizes with the host. The kernel reads 8TK bytes of ids, and x for the entropy (T = 10240, K = 5, E = 96 in
fp32: 0.4 MB and 3.9 MB). Example, two experts, ids = [[1], [1], [-1]], x = 0: counts = [0, 2], sums = [2 ln 2, 2].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, next_power_of_2, use_triton

# A program counts 1024 slots, 8 for each of its 128 threads, or reads 4096 logits, 32 for each thread. Not swept.
_SLOTS = 1024
_LOGITS = 4096
_WARPS = 4
_BINS = 32  # Triton's histogram has no fewer


@triton.jit
def _experts_of(ids_ptr, tokens, n_tokens, n_experts, n_choices, ids_row, ids_column, BLOCK_K: tl.constexpr):
    """The choices of `tokens`, [tokens, BLOCK_K]; -1 for none."""
    choices = tl.arange(0, BLOCK_K)[None, :]
    inside = (tokens < n_tokens)[:, None] & (choices < n_choices)
    ids = tl.load(ids_ptr + tokens[:, None] * ids_row + choices.to(tl.int64) * ids_column, mask=inside, other=-1)
    return tl.where((ids >= 0) & (ids < n_experts), ids, -1).to(tl.int32)


@triton.jit
def _count(ids, counts_ptr, n_experts, BLOCK_E: tl.constexpr):
    slots = tl.ravel(ids)
    counts = tl.histogram(slots, BLOCK_E, mask=slots >= 0)
    experts = tl.arange(0, BLOCK_E)
    tl.atomic_add(counts_ptr + experts, counts.to(tl.int64), mask=(experts < n_experts) & (counts > 0), sem="relaxed")


@triton.jit
def _measure(ids, logits_ptr, sums_ptr, rows, n_experts, logits_row, logits_column, BLOCK_E: tl.constexpr):
    experts = tl.arange(0, BLOCK_E)[None, :]
    at = rows[:, None] * logits_row + experts.to(tl.int64) * logits_column
    logits = tl.load(logits_ptr + at, mask=experts < n_experts, other=-float("inf")).to(tl.float32)
    logits -= tl.max(logits, 1)[:, None]
    odds = tl.exp(logits)
    total = tl.sum(odds, 1)
    # Where odds are 0 a logit may be -inf, and 0 * -inf is NaN.
    entropy = tl.log(total) - tl.sum(odds * tl.where(odds > 0, logits, 0.0), 1) / total
    counted = tl.max(ids, 1) >= 0
    tl.store(sums_ptr, tl.sum(tl.where(counted, entropy, 0.0).to(tl.float64), 0))
    tl.store(sums_ptr + 1, tl.sum(counted.to(tl.int32), 0).to(tl.float64))


@triton.jit
def _router_stats_kernel(
    logits_ptr, ids_ptr, counts_ptr, sums_ptr,
    n_tokens, n_experts, n_choices, n_counting, logits_row, logits_column, ids_row, ids_column,
    COUNT_T: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The first `n_counting` programs add the choices of COUNT_T tokens to counts, the others write a row of sums for BLOCK_T."""
    # A histogram passes BLOCK_E words of each warp through shared memory, be the slots few or many: it has tokens of its own.
    program = tl.program_id(0).to(tl.int64)
    if program < n_counting:
        tokens = program * COUNT_T + tl.arange(0, COUNT_T)
        ids = _experts_of(ids_ptr, tokens, n_tokens, n_experts, n_choices, ids_row, ids_column, BLOCK_K)
        _count(ids, counts_ptr, n_experts, BLOCK_E)
    elif ENTROPY:
        block = program - n_counting
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
        chosen = _experts_of(ids_ptr, rows, n_tokens, n_experts, n_choices, ids_row, ids_column, BLOCK_K)
        # Beyond the last token it is read again, and not counted: rows of -inf alone would become NaN.
        rows = tl.minimum(rows, n_tokens - 1)
        _measure(chosen, logits_ptr, sums_ptr + 2 * block, rows, n_experts, logits_row, logits_column, BLOCK_E)


def router_stats(
    logits: Tensor, ids: Tensor, counts: Tensor | None = None, *, entropy: bool = False, backend: Backend = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Count the choices of a router. No gradient flows, and no argument is written to.

    On a GPU three short launches: torch makes the tensor of counts, a kernel adds to it, and torch adds the sums of the kernel's
    programs. Without the entropy two.

    Args:
        logits: [T, E], any floating dtype and strides. Its values are not read without `entropy`.
        ids: [T, K] int64, in [-1, E), any strides.
        counts: [E] int64, to which the choices are added; None is zeros.
        entropy: whether to compute the sums.

    Returns:
        A new tensor of counts, and the sums or None.

    Raises:
        ValueError: a shape or device that does not fit.
        TypeError: a dtype that does not fit.
    """
    _check(logits, ids, counts)
    logits, ids = logits.detach(), ids.detach()
    (n_tokens, n_experts), n_choices = logits.shape, ids.shape[1]
    if counts is None:
        counts = torch.zeros(n_experts, dtype=torch.int64, device=ids.device)
    else:
        counts = counts.clone(memory_format=torch.contiguous_format)
    # Asked of ids: in fp64 too, logits are rounded to fp32 by both forms.
    if not use_triton(backend, ids) or ids.numel() == 0:
        _count_reference(counts, ids)
        return counts, _entropy_reference(logits, ids) if entropy else None
    block_k, block_e = next_power_of_2(n_choices), max(_BINS, next_power_of_2(n_experts))
    count_t, block_t = max(1, _SLOTS // block_k), max(1, _LOGITS // block_e)
    counting, measuring = cdiv(n_tokens, count_t), cdiv(n_tokens, block_t) if entropy else 0
    sums = torch.empty((measuring, 2), dtype=torch.float64, device=ids.device) if entropy else None
    launch(
        _router_stats_kernel, (counting + measuring,), logits, ids, counts, sums,
        n_tokens, n_experts, n_choices, counting, *logits.stride(), *ids.stride(),
        COUNT_T=count_t, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=block_k, ENTROPY=entropy, num_warps=_WARPS,
    )  # fmt: skip
    return counts, None if sums is None else sums.sum(0)


def _check(logits: Tensor, ids: Tensor, counts: Tensor | None) -> None:
    if logits.dim() != 2 or ids.dim() != 2 or logits.shape[0] != ids.shape[0] or not logits.shape[1]:
        raise ValueError(
            f"logits must be [T, E] and ids [T, K], for 1 expert or more; got {list(logits.shape)} and {list(ids.shape)}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    for name, tensor in (("ids", ids), ("counts", counts)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be torch.int64, got {tensor.dtype}")
        if tensor.device != logits.device:
            raise ValueError(f"{name} must be on {logits.device}, got a tensor on {tensor.device}")
    if counts is not None and counts.shape != logits.shape[1:]:
        raise ValueError(f"counts must be [{logits.shape[1]}], got {list(counts.shape)}")


def _count_reference(counts: Tensor, ids: Tensor) -> None:
    """`bincount` would synchronize with the device."""
    flat = ids.reshape(-1)
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))


def _entropy_reference(logits: Tensor, ids: Tensor) -> Tensor:
    tokens = (ids >= 0).any(1)
    entropy = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    return torch.stack([entropy.masked_fill(~tokens, 0.0).sum(dtype=torch.float64), tokens.sum().double()])
