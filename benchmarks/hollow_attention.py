"""Attention that allocates what torch's attention allocates and computes nothing, to find which lengths fit.

Memory depends on shapes only, and the products of attention grow with the square of the length: at 500,000 tokens a step of a 30B
model would take minutes. Within `hollow_attention`, cuDNN's and flash attention's operations return tensors of the right shapes
that hold a constant, and take for a moment the workspace that the real ones were seen to take. Nothing may be timed within.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OPS = {
    "cuda": ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"),
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
}
_PROBE = 8192  # tokens


@contextmanager
def hollow_attention(device: str, heads: int, kv_heads: int, width: int) -> Iterator[None]:
    """Within, attention computes nothing. `heads`, `kv_heads` and `width` (of a head) are those of the model, in bf16."""
    library = torch.library.Library("aten", "IMPL")
    for name in _OPS[device]:
        workspaces = _workspaces(name, heads, kv_heads, width) if device == "cuda" else (0.0, 0.0)
        for suffix, bytes_per_token in zip(("", "_backward"), workspaces, strict=True):
            operation = getattr(torch.ops.aten, name + suffix).default
            library.impl(name + suffix, _Hollow(operation, bytes_per_token), device.upper())
    try:
        yield
    finally:
        library._destroy()


class _Hollow:
    """Stands for `operation`: its results' shapes are those of its meta kernel."""

    def __init__(self, operation: Any, bytes_per_token: float):
        self._operation, self._bytes_per_token = operation, bytes_per_token

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shapes = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        results = self._operation(*shapes[0], **shapes[1])
        query = next(t for t in args if isinstance(t, Tensor))
        tokens = query.shape[0] * query.shape[2]
        workspace = torch.empty(int(tokens * self._bytes_per_token), dtype=torch.uint8, device=query.device)
        del workspace
        return tree_map_only(Tensor, lambda t: _filled(t, query.device), results)


def _filled(meta: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    return made.fill_(0.125) if made.is_floating_point() else made.zero_()


def _workspaces(name: str, heads: int, kv_heads: int, width: int) -> tuple[float, float]:
    """Bytes a token that the real operation takes beside its results, in forward and in backward."""
    q, k, v = (
        torch.randn(1, n, _PROBE, width, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)
    )
    forward, backward = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, f"{name}_backward").default
    more: tuple[Any, ...] = (None, True) if "cudnn" in name else ()
    found, results = _extra(lambda: forward(q, k, v, *more, 0.0, True))
    out, lse, cum_q, cum_k, most_q, most_k, seed, offset = results[:8]
    dy = torch.randn_like(out)
    if "cudnn" in name:
        rest: tuple[Any, ...] = (seed, offset, None, cum_q, cum_k, most_q, most_k, 0.0, True)
    else:
        rest = (cum_q, cum_k, most_q, most_k, 0.0, True, seed, offset)
    again, _ = _extra(lambda: backward(dy, q, k, v, out, lse, *rest))
    return found / _PROBE, again / _PROBE


def _extra(call: Any) -> tuple[int, Any]:
    """(bytes that were allocated at the same time beside the results, the results) of the second call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), results
