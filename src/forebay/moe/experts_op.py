"""`forebay::experts`: the experts of an MoE layer as one operation that saves the least it can.

In: tokens x [T, H], the router's choice (ids and weights [T, K]) and stacked expert weights,
checked and of one dtype (`forebay.moe.experts` does that). Out: y [T, H], and what backward needs,
which hangs on the autograd graph and nowhere else:

    x [T, H]         once a token, not once a row                         2H bytes a token (bf16)
    h [R, 2I]        the first grouped GEMM's output, before its bias     4KI
    order, inverse   int32 [R] and [T, K]; offs [E]; weights [T, K]       8K and the weights

R is T*K, or `max_rows` where most slots are sentinels.

The gathered rows and the activation are made again in backward. The down projection's output is
never needed, because the routing weight is applied before it: y_t = sum_k (w * glu(h)) @ down,
whose gradient in w is sum_i da_i * glu_i with da = dy @ down.T. With save_h=False h is made again
as well, bitwise the same: the same operands to the same kernel. Frozen tensors shrink this: x is
saved for gate_up's gradient or to make h again, h unless down_bias alone is trained, nothing when
nothing is.

    forward:  x_rows = gather(x)               backward:  dy_rows = gather(dy)
              h      = x_rows @ gate_up                   da = dy_rows @ down.T
              act    = w * glu(h + bias)                  dh, act, dw = swiglu_backward(h, da)
              y      = combine(act @ down)                d_down[e] = dy_rows.T @ act
                       + R @ down_bias                    dx = combine(dh @ gate_up.T)
                                                          d_gate_up[e] = x_rows.T @ dh

R [T, E] is the routing map: token t's weight for expert e.

d_down and d_gate_up may also be made later (`forebay.moe.wgrad` says what for): then `experts_backward` hands out
act and dh in their place, and `experts_weight_backward` makes them of those and of x and dy. Each gradient comes of the same
kernels on the same operands either way, and is bitwise the same. `add_weight_gradient` adds them to a wider sum instead, by a
kernel of its own.

Peak of the memory that comes and goes, for N = T*K rows of bf16: forward 2N(H + 3I) bytes, of
which 4NI are h. Backward 2N(H + 3I) while d_down is made, 2N(H + 2I) while dx and d_gate_up are
made, each beside the weight gradients that exist by then. T=16384, K=8, H=2048, I=768, E=128: 1088
MiB forward; backward 1088 + 384 and 896 + 1152 MiB, so that the second is the peak and making act
beside dh costs nothing. save_h=False adds nothing to it: dh is written over the h that was made
again.

`experts_forward` and `experts_backward` are the operations' bodies for who saves h and x elsewhere (`forebay.moe.wgrad`).

Deterministic, no atomics. On CUDA in bf16 there is no host synchronisation, and it can be captured
in a CUDA graph (`forebay.moe.experts_op` says which widths and dtypes fall back to a loop).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from forebay.kernels.grouped_wgrad import add_rows_by_rows
from forebay.kernels.paging import PageTable
from forebay.kernels.permute import combine_rows, gather_rows
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.moe.routing import Routing, route, routing_map, row_experts, slot_experts

# Grouped matrix products over rows sorted by expert: `F.grouped_mm`, and a loop where it refuses.
#
# In: rows [R, *] sorted by expert and `offs` [E] int32, the end row of each expert, on their device.
# Out: a new tensor that the caller owns. Rows from offs[-1] on are neither read nor written.
#
# `F.grouped_mm` runs bf16 on CUDA without touching the host (fp16 and fp32 read the offsets back).
# It wants operands whose strides and addresses are multiples of 16 bytes and knows no fp64; anything
# else goes through a loop of products, one an expert, that reads the offsets on the host: correct,
# slow, not capturable.

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_by_matrix(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """[R, N]: rows [R, M] of expert e times matrices[e], matrices [E, M, N] (views welcome).

    Rows from offs[-1] on are uninitialised.
    """
    if rows.shape[0] == 0:
        return rows.new_empty((0, matrices.shape[2]))
    if _grouped_mm_takes(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=offs.contiguous())
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(rows[start:end], matrices[e], out=out[start:end])
        start = end
    return out


def rows_by_rows(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """[E, M, N] contiguous: left[rows of e].T @ right[rows of e], left [R, M], right [R, N].

    An expert without rows gets exact zeros.
    """
    if left.shape[0] == 0:
        return left.new_zeros((offs.shape[0], left.shape[1], right.shape[1]))
    if _grouped_mm_takes(left, right):
        return F.grouped_mm(left.t(), right, offs=offs.contiguous())
    out = left.new_empty((offs.shape[0], left.shape[1], right.shape[1]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[e])
        start = end
    return out


def _grouped_mm_takes(a: Tensor, b: Tensor) -> bool:
    return a.dtype in _GROUPED_DTYPES and _aligned(a) and _aligned(b)


def _aligned(t: Tensor) -> bool:
    """One unit stride among the last two, every other stride and the address 16-byte multiples."""
    unit = [s for s in t.stride()[-2:] if s == 1]
    others = [s for i, s in enumerate(t.stride()) if s != 1 or i < t.dim() - 2]
    multiples = all(s * t.element_size() % 16 == 0 and s > 0 for s in others)
    return len(unit) == 1 and multiples and t.data_ptr() % 16 == 0


def experts_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    max_rows: int | None,
    pages_of: Callable[[Routing], PageTable | None] | None = None,
) -> tuple[Tensor, Tensor, Routing]:
    """(y, h, routing). Rows of h from offs[-1] on are uninitialised and never read.

    Args:
        pages_of: called once the routing is known; the activation's kernel then writes h's live rows to the pages it names.
    """
    glu = Glu(activation, interleaved, alpha, limit)
    num_experts = gate_up.shape[0]
    # An operation inside is not autocast again: backward makes h outside of any autocast region.
    with torch.autocast(x.device.type, enabled=False):
        routing = route(ids, num_experts, max_rows)
        order, inverse, offs = routing
        pages = pages_of(routing) if pages_of is not None else None
        row_expert = _row_experts(routing, gate_up_bias, down_bias)
        x_rows = gather_rows(x, order, offs, ids.shape[1])
        h = rows_by_matrix(x_rows, _matrix(gate_up, transposed), offs)
        del x_rows
        act = swiglu_forward(h, weights, order, offs, glu, bias=gate_up_bias, row_expert=row_expert, pages=pages)
        if pages is not None:
            h = x.new_empty(0)
        y_rows = rows_by_matrix(act, _matrix(down, transposed), offs)
        del act
        bias_sum = None
        if down_bias is not None and row_expert is not None:
            slot_expert = slot_experts(routing, row_expert, num_experts)
            weight_map = routing_map(weights, slot_expert, num_experts)
            bias_sum = weight_map.to(down_bias.dtype) @ down_bias
        y = combine_rows(y_rows, inverse, init=bias_sum)
    return y, h, routing


@torch.library.custom_op("forebay::experts", mutates_args=())
def experts_op(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    save_h: bool,
    max_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, h, order, inverse, offs), so that a checkpoint policy can keep all that backward reads.

    h is empty without save_h.
    """
    y, h, routing = experts_forward(
        x,
        ids,
        weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        interleaved,
        transposed,
        alpha,
        limit,
        max_rows,
    )
    return y, h if save_h else x.new_empty(0), *routing


@experts_op.register_fake
def _(
    x, ids, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit, save_h, max_rows,
):  # fmt: skip
    slots = ids.shape[0] * ids.shape[1]
    slots = slots if max_rows is None else torch.sym_min(slots, max_rows)
    width = gate_up.shape[2] if transposed else gate_up.shape[1]
    h = x.new_empty((slots, width)) if save_h else x.new_empty(0)
    order = ids.new_empty(slots, dtype=torch.int32)
    inverse = ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(gate_up.shape[0], dtype=torch.int32)
    return torch.empty_like(x), h, order, inverse, offs


def experts_backward(
    dy: Tensor,
    x: Tensor | Callable[[], Tensor] | None,
    h: Tensor | PageTable | None,
    order: Tensor,
    inverse: Tensor,
    offs: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    need_x: bool,
    need_weights: bool,
    need_gate_up: bool,
    need_down: bool,
    need_gate_up_bias: bool,
    need_down_bias: bool,
    defer_weight_gradients: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, weights, gate_up, down, gate_up_bias, down_bias), empty where not needed.

    x is None where it was not saved, h where it is to be made again; x may be what brings it when it is wanted, and h may
    lie in pages. Each tensor of T*K rows is dropped as soon as its last reader is done; the module docstring has the peak.

    With `defer_weight_gradients`, dh [R, 2I] and act [R, I] come in the places of gate_up's and down's gradients: what
    `experts_weight_backward_op` makes those of.
    """
    glu = Glu(activation, interleaved, alpha, limit)
    routing = Routing(order, inverse, offs)
    dx, d_gate_up, d_down, d_gate_up_bias = (dy.new_empty(0) for _ in range(4))
    need_dh = need_x or need_gate_up or need_gate_up_bias

    with torch.autocast(dy.device.type, enabled=False):
        dy = dy.contiguous()
        row_expert = _row_experts(routing, gate_up_bias, down_bias)
        dh, act, dw, dy_rows = _through_activation(
            dy, x, h, routing, weights, gate_up, down, gate_up_bias, row_expert, glu, transposed,
            need_dh, need_down, need_weights,
        )  # fmt: skip
        if need_down:
            assert act is not None and dy_rows is not None
            d_down = (
                act if defer_weight_gradients else _weight_gradient(dy_rows, act, offs, tokens_first=not transposed)
            )
        del dy_rows, act
        if need_x:
            dx = _x_gradient(dh, gate_up, routing, transposed)
        if need_gate_up_bias:
            assert dh is not None
            d_gate_up_bias = _sum_by_expert(dh, offs)
        if need_gate_up:
            assert x is not None and dh is not None, "x is saved wherever gate_up is trained"
            d_gate_up = (
                dh
                if defer_weight_gradients
                else _gathered_gradient(_now(x), dh, order, offs, inverse.shape[1], transposed)
            )
        del dh
        d_weights, d_down_bias = _routing_and_down_bias_gradients(
            dy, dw, routing, row_expert, weights, gate_up.shape[0], down_bias, need_weights, need_down_bias
        )
    return dx, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias


@torch.library.custom_op("forebay::experts_backward", mutates_args=())
def experts_backward_op(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    offs: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    need_x: bool,
    need_weights: bool,
    need_gate_up: bool,
    need_down: bool,
    need_gate_up_bias: bool,
    need_down_bias: bool,
    defer_weight_gradients: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`experts_backward`, h a tensor."""
    return experts_backward(
        dy, x, h, order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
        activation, interleaved, transposed, alpha, limit,
        need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias, defer_weight_gradients,
    )  # fmt: skip


@experts_backward_op.register_fake
def _(
    dy, x, h, order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit,
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias, defer_weight_gradients=False,
):  # fmt: skip
    def like(t, need):
        return t.new_empty(t.shape) if need else dy.new_empty(0)

    first, second = gate_up, down
    if defer_weight_gradients:
        rows, inner = order.shape[0], down.shape[1] if transposed else down.shape[2]
        first, second = dy.new_empty((rows, 2 * inner)), dy.new_empty((rows, inner))
    return (
        like(dy, need_x),
        like(weights, need_weights),
        like(first, need_gate_up),
        like(second, need_down),
        like(gate_up_bias, need_gate_up_bias),
        like(down_bias, need_down_bias),
    )


@torch.library.custom_op("forebay::experts_weight_backward", mutates_args=())
def experts_weight_backward_op(
    tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, tokens_first: bool
) -> Tensor:
    """The gradient of gate_up or down, of what `experts_backward` with `defer_weight_gradients` handed out.

    Args:
        tokens, rows: x [T, H] and dh [R, 2I] for gate_up, dy [T, H] and act [R, I] for down.
        tokens_first: for a parameter [E, H, *] (gate_up if transposed, down if not); else it is [E, *, H].
    """
    with torch.autocast(tokens.device.type, enabled=False):
        return _gathered_gradient(tokens.contiguous(), rows, order, offs, slots_per_token, tokens_first)


@experts_weight_backward_op.register_fake
def _(tokens, rows, order, offs, slots_per_token, tokens_first):
    sides = (tokens.shape[1], rows.shape[1]) if tokens_first else (rows.shape[1], tokens.shape[1])
    return rows.new_empty((offs.shape[0], *sides))


def add_weight_gradient(
    total: Tensor, tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, tokens_first: bool
) -> None:
    """Add to `total` what `experts_weight_backward_op` makes of the other arguments, and which is never there itself.

    Args:
        total: [E, M, N] of fp32, or fp64 for such operands; M is the tokens' last dimension and N the rows' if `tokens_first`,
            else the other way round. Nothing is rounded to the operands' dtype on the way.
        tokens, rows: see `experts_weight_backward_op`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    token_rows = gather_rows(tokens.contiguous(), order, offs, slots_per_token)
    left, right = (token_rows, rows) if tokens_first else (rows, token_rows)
    with torch.autocast(tokens.device.type, enabled=False):
        add_rows_by_rows(total, left, right, offs)


def save_for_backward(ctx, inputs, output, needs: Sequence[bool] | None = None) -> None:
    """Give an autograd context what backward needs: `ctx.needs`, `ctx.settings`, and the tensors of the module docstring.

    Args:
        needs: whether each of the first seven inputs wants a gradient; by default what autograd says.
    """
    x, _, weights, gate_up, down, gate_up_bias, down_bias, *settings, save_h, _ = inputs
    _, h, order, inverse, offs = output
    ctx.set_materialize_grads(False)
    # The caller cannot train through what the operation hands out to be kept.
    ctx.mark_non_differentiable(h, order, inverse, offs)
    need_x, _, need_weights, need_gate_up, need_down, need_gub, need_db = needs or ctx.needs_input_grad[:7]
    ctx.needs = (need_x, need_weights, need_gate_up, need_down, need_gub, need_db)
    ctx.settings = settings
    reads_h = need_x or need_weights or need_gate_up or need_down or need_gub
    saves_x = need_gate_up or (reads_h and not save_h)
    ctx.save_for_backward(
        x if saves_x else None,
        h if reads_h and save_h else None,
        order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
    )  # fmt: skip


def gradients(ctx, dy: Tensor | None, *_):
    """Those of `experts_op`'s arguments, all at once."""
    if dy is None:
        return (None,) * 14
    refuse_second_derivative()
    saved = ctx.saved_tensors
    grads = experts_backward_op(dy, *saved, *ctx.settings, *ctx.needs)
    dx, dw, *rest = (g if need else None for g, need in zip(grads, ctx.needs, strict=True))
    return (dx, None, dw, *rest, *(None,) * 7)


def refuse_second_derivative() -> None:
    """Called in the experts' backward.

    Raises:
        RuntimeError: the backward is itself to be differentiated (create_graph=True).
    """
    # While a backward is traced, gradients are enabled whatever it is for.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "Forebay's experts are differentiable once, so create_graph=True cannot run through them: leave the model on its own "
            "experts with forebay.manage(model, experts=None, loss=None), or experts_implementation='eager'"
        )


experts_op.register_autograd(gradients, setup_context=save_for_backward)


@register_flop_formula(torch.ops.forebay.experts)
def _experts_flop(
    x, ids, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit, save_h, max_rows, out_shape=None, **kwargs,
) -> int:  # fmt: skip
    """2 * R * 3IH: every row counted, sentinels' too, for shapes are all there is to see."""
    slots = ids[0] * ids[1]
    rows = slots if max_rows is None else min(slots, max_rows)
    return 2 * rows * (gate_up[1] * gate_up[2] + down[1] * down[2])


@register_flop_formula(torch.ops.forebay.experts_backward)
def _experts_backward_flop(
    dy, x, h, order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit,
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias,
    defer_weight_gradients=False, out_shape=None, **kwargs,
) -> int:  # fmt: skip
    """One product of a projection for each gradient that is asked for here, and one to make h again."""
    need_dh = need_x or need_gate_up or need_gate_up_bias
    need_da = need_dh or need_weights
    first = (h is None and (need_da or need_down)) + need_x + (need_gate_up and not defer_weight_gradients)
    second = need_da + (need_down and not defer_weight_gradients)
    return 2 * order[0] * (gate_up[1] * gate_up[2] * first + down[1] * down[2] * second)


@register_flop_formula(torch.ops.forebay.experts_weight_backward)
def _experts_weight_backward_flop(
    tokens, rows, order, offs, slots_per_token, tokens_first, out_shape=None, **kwargs
) -> int:
    """One product."""
    return 2 * rows[0] * rows[1] * tokens[1]


def _now(x: Tensor | Callable[[], Tensor]) -> Tensor:
    return x if isinstance(x, Tensor) else x()


def _through_activation(
    dy: Tensor,
    x: Tensor | Callable[[], Tensor] | None,
    h: Tensor | PageTable | None,
    routing: Routing,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    row_expert: Tensor | None,
    glu: Glu,
    transposed: bool,
    need_dh: bool,
    need_act: bool,
    need_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dh, act, dw, dy_rows), None where not needed; the gathered rows of dy are for down's gradient, beside act."""
    order, inverse, offs = routing
    need_da = need_dh or need_dw
    if not (need_da or need_act):
        return None, None, None, None
    made_again = h is None
    if h is None:
        assert x is not None, "x is saved wherever h is not"
        x_rows = gather_rows(_now(x), order, offs, inverse.shape[1])
        h = rows_by_matrix(x_rows, _matrix(gate_up, transposed), offs)
        del x_rows
    dy_rows = gather_rows(dy, order, offs, inverse.shape[1])
    if not need_da:
        assert isinstance(h, Tensor), "without a gradient through the activation h is not stashed"
        return (
            None,
            swiglu_forward(h, weights, order, offs, glu, bias=gate_up_bias, row_expert=row_expert),
            None,
            dy_rows,
        )
    da = rows_by_matrix(dy_rows, _matrix(down, not transposed), offs)
    kept = dy_rows if need_act else None
    del dy_rows
    # da is ours to write over, and h too if it was made here; a saved h is autograd's.
    dh, act, dw = swiglu_backward(
        h, da, weights, order, offs, glu, bias=gate_up_bias, row_expert=row_expert,
        need_dh=need_dh, need_act=need_act, need_dw=need_dw, over_h=made_again, over_da=True,
    )  # fmt: skip
    return dh, act, dw, kept


def _weight_gradient(token_rows: Tensor, rows: Tensor, offs: Tensor, tokens_first: bool) -> Tensor:
    """In the parameter's own layout: the order of the operands does it, no transpose."""
    left, right = (token_rows, rows) if tokens_first else (rows, token_rows)
    return rows_by_rows(left, right, offs)


def _gathered_gradient(
    tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, tokens_first: bool
) -> Tensor:
    """`_weight_gradient`, the tokens [T, H] gathered to rows first."""
    return _weight_gradient(gather_rows(tokens, order, offs, slots_per_token), rows, offs, tokens_first)


def _x_gradient(dh: Tensor | None, gate_up: Tensor, routing: Routing, transposed: bool) -> Tensor:
    assert dh is not None
    return combine_rows(rows_by_matrix(dh, _matrix(gate_up, not transposed), routing.offs), routing.inverse)


def _routing_and_down_bias_gradients(
    dy: Tensor,
    dw: Tensor | None,
    routing: Routing,
    row_expert: Tensor | None,
    weights: Tensor,
    num_experts: int,
    down_bias: Tensor | None,
    need_weights: bool,
    need_down_bias: bool,
) -> tuple[Tensor, Tensor]:
    """(d_weights, d_down_bias), empty where not needed; dw is the part of d_weights that came through the activation."""
    d_weights, d_down_bias = dy.new_empty(0), dy.new_empty(0)
    if down_bias is not None and (need_weights or need_down_bias):
        assert row_expert is not None
        slot_expert = slot_experts(routing, row_expert, num_experts)
        if need_down_bias:
            weight_map = routing_map(weights, slot_expert, num_experts)
            # Rows of an exchange that nobody filled: a weight of 0 does not silence what is no number.
            unread = (slot_expert == num_experts).all(1, keepdim=True)
            d_down_bias = weight_map.to(dy.dtype).t() @ dy.masked_fill(unread, 0)
        if need_weights:
            assert dw is not None
            # The spare last column is what the sentinels pick.
            by_expert = torch.nn.functional.pad(dy @ down_bias.t(), (0, 1))
            dw = dw + by_expert.gather(1, slot_expert).view(-1)
    if need_weights:
        assert dw is not None
        d_weights = dw.view(weights.shape).to(weights.dtype)
    return d_weights, d_down_bias


def _matrix(weight: Tensor, transposed: bool) -> Tensor:
    """A view [E, in, out] of a stack; `not transposed` gives the view for the gradient."""
    return weight if transposed else weight.transpose(-2, -1)


def _row_experts(routing: Routing, *biases: Tensor | None) -> Tensor | None:
    """The rows' experts, which only biases ask for."""
    if all(bias is None for bias in biases):
        return None
    return row_experts(routing.offs, routing.order.shape[0])


def _sum_by_expert(rows: Tensor, offs: Tensor) -> Tensor:
    """[E, N]: the sum of each expert's rows [R, N], in the accumulators of a grouped GEMM."""
    # 16 bytes of ones a row: the narrowest matrix whose stride F.grouped_mm takes.
    ones = rows.new_ones((rows.shape[0], 16 // rows.element_size()))
    return rows_by_rows(rows, ones, offs)[:, :, 0].contiguous()
