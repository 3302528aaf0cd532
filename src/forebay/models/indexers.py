"""Scores of all positions by an indexer's heads, as one product of a sequence.

Input: a model whose attention chooses the positions that it attends to (DeepSeek-V3.2 and V4, GLM-5, HY-V4). transformers
multiplies q [B, S, H, D] by k [B, 1, D, T], in fp32. torch takes that for B * S products of H rows: 20.4 ms for 133 GFLOP on an
H200 (B 1, S and T 8064, H 8, D 128; benchmarks/results/sparse_attention.json). With several sequences it first copies k for every
position, 4 S D T bytes a sequence: 8.6 GB for 4096 tokens. Output: the same model, whose indexers multiply [B, S * H, D] by
[B, D, T]. Sums may have another order, so this is for compiled code, which rounds differently anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forebay.memory.overrides import ForwardFn, InnerForward, install
from forebay.models.families import forward_is_replaced, transformers_base
from forebay.models.structure import with_product


def install_indexers(model: nn.Module) -> Callable[[], None]:
    """Let the indexers of `model` multiply as one product a sequence, until the returned call undoes it."""
    undo = ExitStack()
    known: dict[type[nn.Module], Callable[..., Any] | None] = {}
    for module in model.modules():
        base = transformers_base(module)
        if base is None or forward_is_replaced(module):
            continue
        if base not in known:
            known[base] = with_product(base.forward)
        if (forward := known[base]) is not None:
            undo.callback(install(module, partial(_multiplied, forward), traceable=True))
    return undo.close


def _multiplied(forward: Callable[..., Any], _: InnerForward) -> ForwardFn:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, product, *args, **kwargs)

    return run


def product(q: Tensor, k: Tensor) -> Tensor:
    """``torch.matmul(q, k.unsqueeze(1))``, up to the order of sums: [B, S, H, D] by [B, D, T] is [B, S, H, T]."""
    if q.dim() != 4 or k.dim() != 3:
        return torch.matmul(q, k.unsqueeze(1))
    return torch.matmul(q.flatten(1, 2), k).unflatten(1, q.shape[1:3])
