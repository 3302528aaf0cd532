"""What an indexer of sparse attention (DeepSeek-V3.2, GLM-5) takes on a GPU: the choice of positions, and the product before it.

    python benchmarks/sparse_attention.py        results/sparse_attention.json

Microseconds a call, medians, of random numbers: `topk` by rows, columns and k, sorted and not; the product of all heads' scores
as transformers writes it and as `forebay.models.indexers.product` does, in fp32, by sequences, tokens (of queries and of keys),
heads and width; and `scatter`, which makes a mask of the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import median_ms, write

from forebay.models.indexers import product

CALLS = 20
TOPK = (
    (2048, 128, 8),
    (4096, 512, 128),
    (4096, 1024, 256),
    (6144, 1536, 512),
    (5632, 2816, 256),
    (5632, 2816, 1024),
    (4096, 4096, 512),
    (4096, 4096, 2048),
    (8064, 8064, 256),
    (8064, 8064, 1024),
    (8064, 8064, 2048),
    (16384, 4096, 1024),
)
PRODUCTS = ((1, 8064, 8, 128), (2, 2816, 4, 128), (4, 3072, 8, 128), (1, 4096, 32, 128))
MASKS = (2048, 4096, 8192)  # rows of 8064 positions, of which 1024 are chosen


def microseconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    return 1e3 * median_ms(call, CALLS)[0]


def topk(count: int, columns: int, k: int) -> dict[str, Any]:
    x = torch.randn(count, columns, device="cuda")
    orders = {"sorted us": True, "unsorted us": False}
    times = {name: microseconds(partial(x.topk, k, -1, sorted=is_sorted)) for name, is_sorted in orders.items()}
    return {"what": "topk", "shape": [count, columns, k], **times}


def products(b: int, s: int, h: int, d: int) -> dict[str, Any]:
    q, k = torch.randn(b, s, h, d, device="cuda"), torch.randn(b, s, d, device="cuda").mT
    of_each = microseconds(lambda: torch.matmul(q, k.unsqueeze(1)))
    return {"what": "product", "shape": [b, s, h, d], "us": of_each, "joined us": microseconds(partial(product, q, k))}


def masks(count: int) -> dict[str, Any]:
    chosen = torch.randint(0, 8064, (count, 1024), device="cuda")
    mask = torch.ones(count, 8064, dtype=torch.bool, device="cuda")
    return {
        "what": "scatter",
        "shape": [count, 8064, 1024],
        "us": microseconds(partial(mask.scatter, -1, chosen, False)),
    }


if __name__ == "__main__":
    found = [topk(*shape) for shape in TOPK] + [products(*shape) for shape in PRODUCTS] + [masks(n) for n in MASKS]
    write("sparse_attention", found)
