"""Storages of rows in half their bytes, for the way to the host and back (`forebay.kernels.row_fp8`).

Input: a saved tensor, and the bytes of its storage. Output: whether the storage may be compressed, its compressed bytes, and the
storage's bytes again, rounded. A storage is coded whole, in the order of its memory: so every view of it comes back, whatever
its strides, as long as its dtype is the same.
"""

import torch

from forebay.kernels.row_fp8 import GROUP, decode_rows, encode_rows


def holds_rows(tensor: torch.Tensor) -> bool:
    """Whether the storage of a saved tensor is one of rows, which may be rounded.

    True for bf16 of two dimensions or more with at least 32 neighbors in memory. What backward needs to the bit is not: integers
    and boolean masks, random states, routing ids and weights (fewer choices), and whatever a bf16 model computes in fp32:
    log-sum-exp, the norms' statistics, the router's probabilities. A mask of 0 and -inf, or of 0 and the lowest number, comes
    back exactly.
    """
    if tensor.dtype is not torch.bfloat16 or tensor.dim() < 2 or tensor.untyped_storage().nbytes() % 2:
        return False
    return any(size >= GROUP and stride == 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def compress(storage_bytes: torch.Tensor) -> torch.Tensor:
    """Flat uint8, 33/64 as long as `storage_bytes` (flat uint8), rounded up."""
    return encode_rows(storage_bytes.view(torch.bfloat16).unsqueeze(0)).view(-1)


def expand(compressed: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The rounded bytes, flat uint8, of a storage of `nbytes`."""
    return decode_rows(compressed.unsqueeze(0), nbytes // 2).view(-1).view(torch.uint8)
