"""The MoE half of a decoder layer in stages, so that tokens can travel between ranks and behind other work.

In: hidden states x [B, S, H] after attention. Out: hidden states after the experts, and what the router said.

    1  front      norm, router, shared experts       x -> residual [T, H], rows [T, H], ids, weights [T, K], logits [T, E]
    2  dispatch   tokens to the ranks of their experts                                   see `forebay.moe.dispatch`
    3  experts    this rank's experts on the R rows received, weighted and summed a row
    4  combine    the sums back to their tokens, 5 added to the residual in the same pass

(Attention belongs to stage 1 too; it comes before x.) Stages 1 and 3 are plain functions of tensors, which may be compiled or
run under saved-tensor hooks; stages 2 and 4 keep no tensors of their own, only the handle. Run one after the other by calling
a `MoeStages`, or interleaved with another microbatch's by `forebay.pipeline.overlap`.

`MoeStages` owns nothing: the exchange belongs to whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.moe.dispatch.exchange import Exchange
from forebay.moe.dispatch.ops import combine, dispatch


class Front(NamedTuple):
    """What stage 1 hands on: T = B * S tokens of this rank."""

    residual: Tensor
    """[T, H], x plus the shared experts' output: what the routed experts' output is added to."""
    rows: Tensor
    """[T, H], the normed hidden states."""
    ids: Tensor
    """[T, K] integer, in [0, E) over all ranks."""
    weights: Tensor
    """[T, K] floating."""
    logits: Tensor
    """[T, E], for losses on the router."""


@dataclass(frozen=True, eq=False)
class MoeStages:
    """The stages of one layer.

    Attributes:
        front: x [B, S, H] -> `Front`.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H]; see `forebay.moe.experts.experts`.
        exchange: how tokens travel.
    """

    front: Callable[[Tensor], Front]
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
    exchange: Exchange

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states [B, S, H], router logits [T, E], ids [T, K]): all stages in sequence."""
        residual, rows, ids, weights, logits = self.front(x)
        sent = dispatch(rows, ids, weights, self.exchange)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        y = combine(y_rows, sent.handle, residual)
        # No view to autograd, as the layer's own sum would be none: FSDP2 hooks layers' outputs, and warns of views.
        return torch.ops.aten._unsafe_view(y, x.shape), logits, ids
