"""What `forebay.kernels.hopper` calls of quack-kernels, in plain PyTorch: the formulas, layouts and rows that it counts on.

Products are computed in `EXACT` and rounded once, and rows beyond the last expert's are not written, as in the package.
"""

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

EXACT = torch.float32


def alternated(t: Tensor) -> Tensor:
    """Of a stack [E, M, N]: the two halves of the dimension that is not contiguous, one from each in turn."""
    dim = 2 if t.stride(1) == 1 else 1
    return torch.stack(t.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def halves(t: Tensor) -> Tensor:
    """[R, 2I] alternating as halves."""
    return torch.cat((t[:, ::2], t[:, 1::2]), 1)


def _experts(bounds: Tensor) -> list[tuple[int, slice]]:
    ends = bounds.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(itertools.pairwise(ends)) if a < b]


def _check(name: str, *tensors: Tensor) -> None:
    for t in tensors:
        assert t.data_ptr() % 16 == 0 and 1 in t.stride()[-2:], name


def gemm(
    a: Tensor, b: Tensor, d: Tensor, c: None, semaphore: None, *tiles: Any, cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, A_idx: Tensor | None = None, concat_layout: tuple[str, ...] | None = None,
) -> None:  # fmt: skip
    """d[rows of e] = a[rows of e] @ b[e].T, or d[e] = a[rows of e].T @ b[rows of e] for a and b given as [*, R]."""
    _check("gemm", a, b, d)
    if cu_seqlens_m is not None:
        assert A_idx is None and concat_layout == ("B",)
        b = alternated(b)
        for e, rows in _experts(cu_seqlens_m):
            d[rows] = (a[rows].to(EXACT) @ b[e].to(EXACT).T).to(d.dtype)
        return
    assert cu_seqlens_k is not None and A_idx is not None
    columns = a.t()[A_idx.long()]
    products = torch.zeros(d.shape, dtype=EXACT, device=d.device)
    for e, rows in _experts(cu_seqlens_k):
        products[e] = columns[rows].to(EXACT).T @ b.t()[rows].to(EXACT)
    if concat_layout is not None:
        assert concat_layout == ("out",) and d.stride(1) == 1
        products = torch.cat((products[..., ::2], products[..., 1::2]), 2)
    d.copy_(products)


def gemm_gated(
    a: Tensor, b: Tensor, h: Tensor, c: None, glu: Tensor, semaphore: None, activation: str, *tiles: Any,
    cu_seqlens_m: Tensor, A_idx: Tensor, concat_layout: tuple[str, ...],
) -> None:  # fmt: skip
    assert activation == "swiglu" and concat_layout == ("B",)
    _check("gemm_gated", a, b, h, glu)
    b = alternated(b)
    for e, rows in _experts(cu_seqlens_m):
        exact = a[A_idx[rows].long()].to(EXACT) @ b[e].to(EXACT).T
        h[rows] = exact.to(h.dtype)
        glu[rows] = (torch.nn.functional.silu(exact[:, ::2]) * exact[:, 1::2]).to(glu.dtype)


def gemm_dgated(
    a: Tensor, b: Tensor, dh: Tensor, h: Tensor, act: Tensor, semaphore: None, activation: str, *tiles: Any,
    colvec_scale: Tensor, colvec_reduce: Tensor, cu_seqlens_m: Tensor, A_idx: Tensor,
) -> None:  # fmt: skip
    assert activation == "swiglu" and colvec_reduce.shape[1] == -(-act.shape[1] // tiles[1])
    _check("gemm_dgated", a, b, dh, h, act)
    for e, rows in _experts(cu_seqlens_m):
        da = a[A_idx[rows].long()].to(EXACT) @ b[e].to(EXACT).T
        gate, up, w = h[rows, ::2].to(EXACT), h[rows, 1::2].to(EXACT), colvec_scale[rows, None].to(EXACT)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = w * da * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh[rows] = torch.stack((d_gate, w * da * silu), 2).flatten(1).to(dh.dtype)
        act[rows] = (w * silu * up).to(act.dtype)
        colvec_reduce[rows] = 0
        colvec_reduce[rows, 0] = (da * silu * up).sum(1).float()


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put these in the package's place until the test ends. The list gets the name of each call."""
    calls: list[str] = []
    quack = ModuleType("quack")
    monkeypatch.setitem(sys.modules, "quack", quack)
    for module, function in (("gemm", gemm), ("gemm_act", gemm_gated), ("gemm_dact", gemm_dgated)):

        def noting(*args: Any, function: Any = function, **more: Any) -> None:
            calls.append(function.__name__)
            function(*args, **more)

        made = ModuleType(f"quack.{module}")
        setattr(made, function.__name__, noting)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return calls
