"""Attention with sinks under a dense mask, on one GPU: that of DeepSeek-V4 and MiMo-V2, and of plain heads, beside transformers'.

    python benchmarks/masked_attention.py        results/masked_attention.json

Each arm runs forward and backward of the attention interface alone, on random numbers in bf16: `eager` is transformers' function,
`compiled` the same under torch.compile, `forebay` the kernels. Milliseconds are medians; "after forward" is what autograd holds
beside the inputs, the peak counts from the same base.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from common import median_ms, write
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from forebay.models.masked_attention import under_dense_mask

CALLS = 10
# Heads of queries and of keys, their width, that of values (0: shared with the keys), tokens, compressed keys beside them, of how
# many tokens each is made, how many of them are chosen, window.
SHAPES: dict[str, tuple[int, ...]] = {
    "DeepSeek-V4, window": (64, 1, 512, 0, 4096, 0, 1, 0, 128),
    "DeepSeek-V4, compressed 4": (64, 1, 512, 0, 4096, 1024, 4, 512, 128),
    "DeepSeek-V4, compressed 128": (64, 1, 512, 0, 4096, 32, 128, 32, 128),
    "DeepSeek-V4, compressed 4, 8192": (64, 1, 512, 0, 8192, 2048, 4, 512, 128),
    "32 heads of 192 and 128": (32, 32, 192, 128, 4096, 0, 1, 0, 4096),
    "MiMo-V2, window": (64, 8, 192, 128, 4096, 0, 1, 0, 128),
    "MiMo-V2, full": (64, 4, 192, 128, 4096, 0, 1, 0, 4096),
}


def mask_of(length: int, more: int, each: int, chosen: int, window: int) -> Tensor:
    """[1, 1, S, S + more]: a causal window, and `chosen` of the compressed keys that lie behind a token, at random."""
    q, k = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    seen = (k <= q) & (k > q - window)
    if more:
        ready = torch.arange(more, device="cuda") < (q + 1) // each
        best = torch.rand(length, more, device="cuda").masked_fill(~ready, -1).topk(min(chosen, more), -1).indices
        taken = torch.zeros(length, more, dtype=torch.bool, device="cuda").scatter_(-1, best, True)
        seen = torch.cat([seen, taken & ready], -1)
    return torch.zeros(seen.shape, device="cuda").masked_fill(~seen, float("-inf")).bfloat16()[None, None]


def measured(attend: Callable[..., Any], given: list[Tensor], mask: Tensor, dy: Tensor) -> dict[str, float]:
    q, k, v, sinks = given
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=True)

    def forward() -> Tensor:
        return attend(module, q, k, k if v is None else v, mask, scaling=q.shape[-1] ** -0.5, s_aux=sinks)[0]

    def both() -> None:
        torch.autograd.grad(forward(), [t for t in given if t is not None], dy)

    for _ in range(3):
        both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    out = forward()
    held = torch.cuda.memory_allocated() - base
    torch.autograd.grad(out, [t for t in given if t is not None], dy)
    peak = torch.cuda.max_memory_allocated() - base
    del out
    with torch.no_grad():
        ahead = median_ms(forward, CALLS)[0]
    return {
        "forward ms": ahead,
        "forward and backward ms": median_ms(both, CALLS)[0],
        "after forward MiB": held / 2**20,
        "peak MiB": peak / 2**20,
    }


def rows() -> list[dict[str, Any]]:
    found = []
    for name, (heads, keys, width, v_width, length, more, each, chosen, window) in SHAPES.items():
        mask = mask_of(length, more, each, chosen, window)
        made = lambda n, t, d: torch.randn(1, n, t, d, device="cuda", dtype=torch.bfloat16).requires_grad_()  # noqa: E731
        k = made(keys, length + more, width)
        v = made(keys, length, v_width) if v_width else None
        given = [made(heads, length, width), k, v, torch.randn(heads, device="cuda").bfloat16().requires_grad_()]
        dy = torch.randn(1, length, heads, v_width or width, device="cuda", dtype=torch.bfloat16)
        arms = {
            "eager": eager_attention_forward,
            "compiled": torch.compile(eager_attention_forward, dynamic=False),
            "forebay": under_dense_mask(eager_attention_forward),
        }
        for arm, attend in arms.items():
            torch._dynamo.reset()
            found.append({"what": name, "arm": arm, **measured(attend, given, mask, dy)})
            print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    write("masked_attention", rows())
