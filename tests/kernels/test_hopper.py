"""The kernels that Forebay adds to those of quack-kernels, against plain PyTorch; and when the package is used."""

import pytest
import torch
from torch import Tensor

from forebay.kernels import hopper
from forebay.moe.routing import route
from tests.kernels.common import DEVICE


def rows_for(max_rows: int | None = None) -> tuple[hopper.Rows, Tensor, Tensor, Tensor, Tensor]:
    """Rows, order, inverse, offs and weights of slots with sentinels and experts without rows."""
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (37, 3), device=DEVICE)
    ids[ids == 2] = 9
    weights = torch.rand(37, 3, device=DEVICE)
    order, inverse, offs = route(ids, 5, max_rows)
    return hopper.rows_of(order, offs, weights), order, inverse, offs, weights


@pytest.mark.parametrize("max_rows", [None, 100])
def test_rows_of_a_routing(max_rows: int | None) -> None:
    rows, order, _, offs, weights = rows_for(max_rows)
    assert torch.equal(rows.tokens, order // 3) and rows.tokens.dtype == torch.int32
    assert rows.bounds.tolist() == [0, *offs.tolist()] and rows.bounds.dtype == torch.int32
    assert torch.equal(rows.weights, weights.view(-1)[order.long()])


def test_sums_of_slots_do_not_read_rows_of_sentinels() -> None:
    _, order, inverse, offs, _ = rows_for()
    partial = torch.rand(len(order), 4, device=DEVICE)
    partial[offs[-1] :] = torch.nan
    wanted = torch.where(inverse >= 0, partial.sum(1)[inverse.clamp(min=0)], 0.0).view(-1)
    torch.testing.assert_close(hopper.slot_sums(partial, inverse), wanted)


@pytest.mark.parametrize("inner", [8, 136, 768])
def test_halves_over_alternating_columns(inner: int) -> None:
    rows, order, _, offs, _ = rows_for()
    live = int(offs[-1])
    gate, up, da = (torch.randn(len(order), inner, device=DEVICE).bfloat16() for _ in range(3))
    h = torch.stack((gate, up), 2).flatten(1)
    wanted_act, da_before, g, u = None, da.float(), gate.float().requires_grad_(), up.float().requires_grad_()
    glu = torch.nn.functional.silu(g) * u
    wanted_act = rows.weights[:, None] * glu
    wanted = torch.autograd.grad(wanted_act, (g, u), da_before)
    h[live:], da[live:] = torch.nan, torch.nan
    dh, act, partial = hopper.activation_gradient_halves(da, rows, h)
    assert dh is h and act is da
    # One bf16 rounding; Triton's interpreter truncates.
    torch.testing.assert_close(dh[:live].float(), torch.cat(wanted, 1)[:live], atol=1e-3, rtol=2**-7)
    torch.testing.assert_close(act[:live].float(), wanted_act[:live], atol=1e-3, rtol=2**-7)
    torch.testing.assert_close(partial[:live, 0], (da_before * glu).sum(1)[:live], atol=1e-4, rtol=1e-4)


def test_not_used_on_a_cpu_or_for_other_dtypes() -> None:
    stack = torch.empty(2, 16, 8, dtype=torch.bfloat16)
    assert not hopper.handles(torch.empty(4, 8, dtype=torch.bfloat16), stack)
    assert not hopper.handles(torch.empty(4, 8), stack)
