"""What the operations of a trace need on a GPU: FLOPs, bytes of device memory, kernels, and workspaces.

Input: each operation as `forebay.estimate.live` sees it run on fake tensors. Output: `OpCost`s in order, and the tensors that the
bodies of opaque operations allocate. Addresses and sizes are kept, never a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forebay.estimate.types import OpCost

# What the operations of a trace ask of a GPU: FLOPs, bytes of device memory, kernels.
#
# In: each operation as `forebay.estimate.live.Live` sees it run on fake tensors. Out: `OpCost`s in order, taken by
# `Tally.take`. It keeps addresses and sizes, never a tensor.
#
# Products count their FLOPs by torch's formulas, and read and write each argument once. Attention with `is_causal` makes half
# of the pairs that its formula counts. Grouped products have no formula in torch, experts and the fused loss are opaque: theirs
# are here, from the docstrings of `forebay.moe.experts_op` and `forebay.models.linear_cross_entropy`. An exchange sends what
# `forebay.estimate.trace` says arrives, less the share that was there already.
#
# Everything else only moves memory. Uncompiled, each such operation is a kernel that reads its arguments and writes its
# results: "pointwise" where all of them are laid out alike, so that a thread moves 16 bytes at once; "walked" where it finds
# each element by itself, for it joins, slices, transposes, repeats or sums over rows, or has operands of two dtypes
# (`_is_walked`). A product of which a row does not begin at 16 bytes is "gemm_odd".
#
# In a compiled half operations between two others that cannot be fused (products, attention, opaque ones, sorting) are one run:
# it reads each tensor from outside once, and writes only what somebody outside reads. What backward reads of a forward's run
# was never written: it is made again from what it was made of (`Live.origins`), which is what torch's partitioner saves. That
# is a bound from below where Inductor cuts a run in several kernels, and from above where it makes cheap things twice.
#
# Rows of experts are those that come, not those that buffers have room for: `live` is the ratio of the two.

_FREE = frozenset("empty empty_like empty_strided new_empty new_empty_strided lift_fresh lift_fresh_copy".split())
# Not fused by Inductor into what is around them.
_ALONE = frozenset(
    "topk sort argsort cumsum bincount histc index_put index_put_ scatter_add scatter_add_ index_add index_add_ "
    "embedding_dense_backward multinomial searchsorted".split()
)
# Uncompiled, these find each element by itself whatever they are given: `max` notes where it was.
_WALKING = frozenset("cat stack repeat max min argmax argmin gather scatter index".split())
_REDUCES = frozenset("sum mean amax amin".split())
_CONVERTS = frozenset("_to_copy copy copy_ _softmax _log_softmax _softmax_backward_data".split())
# `forebay.moe.routing.route`, a sort and what is around it, takes as long as so many empty kernels: 0.08 ms, in
# benchmarks/results/experts.md.
_ROUTE_KERNELS = 20


class Tally:
    """See the module docstring.

    Args:
        fused: the code is compiled.
        origins: of a tensor: numbers of what it is made of, and whether it is one of those itself.
        origin_size: bytes of one, by number.

    Attributes:
        live: slots that come to experts over slots that their buffers have.
        received: rows that come to this rank's experts; None where all are there.
        ranks: that share the experts.
    """

    received: int | None

    def __init__(
        self,
        fused: bool,
        origins: Callable[[Tensor], frozenset[int]],
        origin_size: Callable[[int], int],
    ):
        self.live, self.received, self.ranks = 1.0, None, 1
        self._fused, self._origins, self._origin_size = fused, origins, origin_size
        self._done: list[OpCost] = []
        self._read: set[Any] = set()  # by the open run
        self._made: set[int] = set()  # by the open run
        self._bytes = self._kernels = 0  # of the open run
        self._unwritten: dict[int, int] = {}  # storages that runs made and nobody outside has read, by address: bytes
        self._old: set[int] = set()  # of those, made in an earlier part

    def take(self, results: Iterable[Tensor] = ()) -> tuple[OpCost, ...]:
        """What was seen since the last call; `results` are written to memory."""
        for tensor in results:
            self._write(tensor)
        self._close()
        done, self._done = tuple(self._done), []
        self._old = set(self._unwritten)
        return done

    def rows(self, room: int) -> int:
        """That come, where buffers have room for so many."""
        return room if self.received is None else min(room, self.received)

    def forget(self, key: int) -> None:
        """A storage is gone: its address may be another's."""
        self._unwritten.pop(key, None)
        self._made.discard(key)
        self._old.discard(key)
        self._read.discard(key)

    def see(self, func: Any, args: Any, kwargs: Any, out: Any, flops: int) -> None:
        """An operation that ran."""
        packet = getattr(func, "overloadpacket", None)  # higher-order operators have none
        base = packet.__name__ if packet is not None else str(func)
        opaque = _OPAQUE.get(str(func))
        if opaque is not None:
            self._alone(args, kwargs, opaque(self, *args, **kwargs))
        elif base in _FREE or getattr(func, "is_view", False):
            return
        elif flops:
            self._alone(args, kwargs, [_product(func, args, kwargs, out, flops)])
        else:
            self._moves(base, args, kwargs, out)

    def _moves(self, base: str, args: Any, kwargs: Any, out: Any) -> None:
        into = "out" in kwargs  # what stands in for a kernel of our own, such as `forebay.kernels.scale`
        sources = _tensors((args, {name: value for name, value in kwargs.items() if name != "out"}))
        results = _tensors(out)
        addresses = {_key(t) for t in sources}
        if all(_key(t) in addresses for t in results) and not base.endswith("_"):
            return  # views by another name, such as aten._unsafe_view
        if base == "embedding":  # of its weight the rows that are looked up
            self._alone(args, kwargs, [OpCost("pointwise", 0, 2 * sum(map(_bytes, results)))])
            return
        if not self._fused or base in _ALONE:
            walked = not self._fused and not into and _is_walked(base, args, sources, results)
            kind = "walked" if walked else "pointwise"
            self._alone(args, kwargs, [OpCost(kind, 0, sum(map(_bytes, (*sources, *results))))])
            return
        self._kernels = 1
        for tensor in sources:
            if _key(tensor) not in self._made:
                self._reads(tensor)
        for tensor in results:
            self._made.add(_key(tensor))
            self._unwritten[_key(tensor)] = _bytes(tensor)

    def _reads(self, tensor: Tensor) -> None:
        """The open run reads what others made."""
        key = _key(tensor)
        if key in self._old:  # a forward's, and never written
            self._read_origins(tensor)
            return
        self._bytes += self._unwritten.pop(key, 0)
        mine: Any = key
        if len(numbers := self._origins(tensor)) == 1:
            mine = ("origin", *numbers)
        if mine not in self._read:
            self._read.add(mine)
            self._bytes += _bytes(tensor)

    def _read_origins(self, tensor: Tensor) -> None:
        for number in self._origins(tensor):
            if ("origin", number) not in self._read:
                self._read.add(("origin", number))
                self._bytes += self._origin_size(number)

    def _write(self, tensor: Tensor) -> None:
        """Somebody outside of runs reads a tensor."""
        key = _key(tensor)
        if key in self._unwritten:
            if key in self._old:
                self._kernels = 1
                self._read_origins(tensor)
                self._old.discard(key)
            self._bytes += self._unwritten.pop(key)

    def _alone(self, args: Any, kwargs: Any, costs: Iterable[OpCost]) -> None:
        for tensor in _tensors((args, kwargs)):
            self._write(tensor)
        self._close()
        self._done.extend(costs)

    def _close(self) -> None:
        if self._kernels and self._bytes:
            self._done.append(OpCost("pointwise", 0, self._bytes, self._kernels))
        self._read, self._made = set(), set()
        self._bytes = self._kernels = 0


def _product(func: Any, args: Any, kwargs: Any, out: Any, flops: int) -> OpCost:
    name = str(func)
    moved = sum(map(_bytes, (*_tensors((args, kwargs)), *_tensors(out))))
    if "attention" in name:
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if named.get("is_causal"):
            flops //= 2
        return OpCost("attention_backward" if "backward" in name else "attention", flops, moved)
    odd = any(map(_is_odd, _tensors((args, kwargs)))) or any(map(_is_odd, _tensors(out)))
    return OpCost("gemm_odd" if odd else "gemm", flops, moved)


def _is_odd(matrix: Tensor) -> bool:
    """Whether rows (or columns) of a matrix begin elsewhere than at multiples of 16 bytes: they cannot be loaded in tiles."""
    if matrix.dim() < 2:
        return False
    long = [stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1 and stride != 1]
    return any(stride * matrix.element_size() % 16 for stride in long)


def _is_walked(base: str, args: Any, sources: list[Tensor], results: list[Tensor]) -> bool:
    """Whether an uncompiled kernel finds each element of its operands by itself.

    torch's loops move 16 bytes a thread only where operands of one dtype lie alike without gaps; a conversion alone has a loop of
    its own. Operands of one element do not count.
    """
    if base in _WALKING:
        return True
    if base in _REDUCES:  # along rows, as norms do, in wide loads; over them not
        dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        last = sources[0].dim() - 1
        over = bool(dims) and all(dim % (last + 1) != last for dim in dims)
        return over or not sources[0].is_contiguous()
    tensors = [t for t in (*sources, *results) if t.numel() > 1]
    if base not in _CONVERTS and len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
        return True
    return len({(t.shape, t.stride()) for t in tensors}) > 1 or any(_has_gaps(t) for t in tensors)


def _has_gaps(tensor: Tensor) -> bool:
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        != tensor.numel()
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """Of what a tensor shows: a broadcast one shows less than its elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _grouped(kind: str, rows: int, inner: int, outer: int, experts: int, size: int) -> OpCost:
    """Rows of `inner` elements times a matrix [inner, outer] of each of `experts`; or a gradient of those matrices."""
    return OpCost(kind, 2 * rows * inner * outer, size * (rows * (inner + outer) + experts * inner * outer))


def _moved(*elements: int, size: int, kernels: int = 1) -> OpCost:
    return OpCost("pointwise", 0, size * sum(elements), kernels)


def _gathered(rows: int, hidden: int, size: int) -> OpCost:
    """A row is read once for each of a token's experts, about half of them from the cache (benchmarks/results/experts.md)."""
    return OpCost("pointwise", 0, 3 * size * rows * hidden // 2)


def _experts(
    tally: Tally, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **_: Any
) -> list[OpCost]:
    """route, gather, h = rows @ gate_up, act = w glu(h), y_rows = act @ down, combine."""
    transposed, max_rows = rest[4], rest[8]
    slots = ids.numel() if max_rows is None else min(ids.numel(), max_rows)
    rows, hidden = int(slots * tally.live), x.shape[1]
    tokens, size = tally.rows(x.shape[0]), x.element_size()
    inner = down.shape[1] if transposed else down.shape[2]
    experts = gate_up.shape[0]
    return [
        _moved(6 * ids.numel(), size=ids.element_size(), kernels=_ROUTE_KERNELS),
        _gathered(rows, hidden, size),
        _grouped("grouped", rows, hidden, 2 * inner, experts, size),
        _moved(3 * rows * inner, size=size),
        _grouped("grouped", rows, inner, hidden, experts, size),
        _moved(rows * hidden, tokens * hidden, size=size),
    ]


def _experts_backward(tally: Tally, dy: Tensor, x: Any, h: Any, order: Tensor, *rest: Any, **_: Any) -> list[OpCost]:
    """gather dy, da = dy @ down.T, dh, act, dw, d_down, dx = combine(dh @ gate_up.T), gather x, d_gate_up; h made again first,
    where it was not saved."""
    gate_up, down, settings = rest[3], rest[4], rest[7:]
    transposed, needs = settings[2], settings[5:]
    need_x, _, need_gate_up, need_down = needs[:4]
    later = len(needs) > 6 and bool(needs[6])
    rows, hidden, size = int(order.shape[0] * tally.live), dy.shape[1], dy.element_size()
    tokens = tally.rows(dy.shape[0])
    inner = down.shape[1] if transposed else down.shape[2]
    experts = gate_up.shape[0]
    gather, combine = _gathered(rows, hidden, size), _moved(tokens * hidden, rows * hidden, size=size)
    costs = []
    if h is None or not h.numel():
        costs += [gather, _grouped("grouped", rows, hidden, 2 * inner, experts, size)]
    costs += [
        gather,
        _grouped("grouped", rows, hidden, inner, experts, size),
        _moved(6 * rows * inner, size=size),  # reads h and da; writes dh and act
    ]
    if need_down and not later:
        costs.append(_grouped("grouped_weights", rows, hidden, inner, experts, size))
    if need_x:
        costs += [_grouped("grouped", rows, 2 * inner, hidden, experts, size), combine]
    if need_gate_up and not later:
        costs += [gather, _grouped("grouped_weights", rows, hidden, 2 * inner, experts, size)]
    return costs


def _cross_entropy(
    tally: Tally, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any
) -> list[OpCost]:
    """Logits, and the gradients of hidden states and weight, chunk by chunk; beside its products each logit is read and written
    in place, and moved once more."""
    need_hidden, need_weight, _ = needs
    (tokens, width), vocabulary, size = hidden.shape, weight.shape[0], hidden.element_size()
    one = 2 * tokens * width * vocabulary
    chunks = -(-tokens // max(chunk, 1))
    logits = _moved(3 * tokens * vocabulary, size=size, kernels=chunks)
    product = OpCost(
        "gemm", one // chunks, size * (tokens * vocabulary + tokens * width + chunks * vocabulary * width) // chunks
    )
    return [*[product] * chunks * (1 + bool(need_hidden) + bool(need_weight)), logits]


def _grouped_mm(tally: Tally, left: Tensor, right: Tensor, offs: Tensor, *_: Any, **__: Any) -> list[OpCost]:
    """Rows [R, K] with matrices [E, K, N]; or [K, R] with rows [R, N], for the gradient of E matrices. torch has no formula
    for it."""
    flops = 2 * left.numel() * right.shape[-1]
    weights = left.dim() == right.dim() == 2
    results = left.shape[0] * right.shape[-1] * (offs.numel() if weights else 1)
    size = left.element_size()
    return [OpCost("grouped_weights" if weights else "grouped", flops, size * (left.numel() + right.numel() + results))]


def _all_to_all(tally: Tally, tensor: Tensor, *_: Any) -> list[OpCost]:
    """Rows [R, H] that ranks send each other: of all that come to a rank, its own share does not travel."""
    rows = tally.received if tally.received is not None else tensor.shape[0]
    return [OpCost("exchange", 0, rows * tensor.shape[1] * tensor.element_size() * (tally.ranks - 1) // tally.ranks)]


_OPAQUE: Mapping[str, Callable[..., list[OpCost]]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "forebay.experts.default": _experts,
    "forebay.experts_backward.default": _experts_backward,
    "forebay.linear_cross_entropy.default": _cross_entropy,
    "forebay.dispatch.default": _all_to_all,
    "forebay.combine.default": _all_to_all,
    "forebay.spread.default": _all_to_all,
    "forebay.collect.default": _all_to_all,
}


# What operations allocate that a trace sees as one: their bodies' tensors, in the order in which they come and go.
#
# In: the name of an operation and its arguments, fake tensors. Out: steps (name, bytes), bytes 0 where it is freed; a number
# instead of a name is one of the results, whose bytes are the result's own. Nothing is computed or kept.
#
#     forebay::experts, its backward     as `forebay.moe.experts_op` has them, with `forebay.kernels.permute`
#     forebay::linear_cross_entropy      one chunk of logits beside the results: `forebay.models.linear_cross_entropy`
#     attention's backward               what flash attention 2 allocates in torch (`flash_api.cpp`, mha_bwd), by size: the sum
#                                        of dO*O and dq in fp32, sequence rounded up to 128 and the head's width to 32, and for
#                                        grouped queries dk and dv of all query heads. In one piece: cuDNN's, which torch 2.11
#                                        takes on an H200 (seen in recorded histories of three models, equal to the byte)
#     softmax's backward                 the product of gradient and output, as large as the result, on a GPU (`SoftMax.cu`): of
#                                        eager attention, a whole tensor of scores
#     embedding's backward               of more than 3072 tokens on a GPU (`EmbeddingBackwardKernel.cu`): a row in fp32 for
#                                        each tenth token and for each different one, of which there may be as many as tokens
#     sums                               of many values to few on a GPU (`Reduce.cuh`): where a thread would add up 256 and
#                                        more, several blocks share an output, and each leaves its part in memory. A bias's
#                                        gradient of 2048 tokens and 2880 columns takes 45 MiB so, equal to a recorded history's
#
# A body that changes has to change here: tests compare with the real body's storages on a CPU.

WorkspaceStep = tuple[str | int, int]
GIVEN = "argument "
"""With an argument's number behind it, and 0 bytes: nobody needs it from here on."""
_CHUNK = 512  # slots that a program of sort_slots counts
_THREADS, _WARP, _MOST_VALUES = 512, 32, 256  # of a reduction's block, of a warp, and values that a thread adds up
_FEW_TOKENS, _ROWS_A_THREAD = 3072, 10  # of an embedding's backward
_MULTIPROCESSORS, _RESIDENT = 132, 2048  # of an H100 or H200, and threads of each


def steps_of(name: str, args: Any, kwargs: Any, later: bool) -> tuple[WorkspaceStep, ...]:
    """The steps of an operation; none for one that allocates its results alone. `later`: the experts' weight gradients are made
    by an operation of their own behind this one, and here are its steps as well."""
    body = _BODIES.get(name)
    return () if body is None else tuple(body(*args, **kwargs, later=later))


def _experts_workspace(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, later: bool
) -> list[WorkspaceStep]:
    """Results: y, h, order, inverse, offs."""
    down_bias, transposed, save_h, max_rows = rest[1], rest[4], rest[7], rest[8]
    (tokens, slots), e = ids.shape, x.element_size()
    slots *= tokens
    rows = slots if max_rows is None else min(slots, max_rows)
    hidden, inner = x.shape[1], down.shape[1] if transposed else down.shape[2]
    counts = 4 * (gate_up.shape[0] + 1) * -(-slots // _CHUNK)
    steps: list[WorkspaceStep] = [("counts", counts)]
    steps += [(2, 0)] if rows == slots else [("whole order", 4 * slots)]
    steps += [(3, 0), (4, 0), ("ends", counts), ("counts", 0), ("ends", 0)]
    steps += [] if rows == slots else [(2, 0), ("whole order", 0)]
    h: str | int = 1 if save_h else "h"
    steps += [("rows of x", e * rows * hidden), (h, 2 * e * rows * inner), ("rows of x", 0)]
    steps += [("activation", e * rows * inner), ("rows of y", e * rows * hidden), ("activation", 0)]
    if down_bias is not None:
        steps += [("map", 4 * tokens * gate_up.shape[0]), ("bias", e * tokens * hidden)]
    steps += [(0, 0), ("rows of y", 0)]
    steps += [("bias", 0), ("map", 0)] if down_bias is not None else []
    return steps + ([] if save_h else [("h", 0)])


def _experts_backward_workspace(
    dy: Tensor, x: Any, h: Any, order: Tensor, inverse: Any, offs: Any, *rest: Any, later: bool
) -> list[WorkspaceStep]:
    """Results: dx, d_weights, d_gate_up, d_down and the biases'."""
    weights, down, settings = rest[0], rest[2], rest[5:]
    transposed = settings[2]
    need_x, need_weights, need_gate_up, need_down, need_bias, _ = settings[5:11]
    hidden, inner = dy.shape[1], down.shape[1] if transposed else down.shape[2]
    n, e = order.shape[0], dy.element_size()
    rows, act, dh = e * n * hidden, e * n * inner, "dh"
    steps: list[WorkspaceStep] = []
    if h is None:  # dh is written over it
        steps += [("rows of x", rows), (dh, 2 * act), ("rows of x", 0)]
    steps += [("rows of dy", rows)]
    need_dh = need_x or need_gate_up or need_bias
    if need_dh or need_weights:
        steps += [("activation", act)]
        steps += [(dh, 2 * act)] if h is not None else []
        steps += [(1, 0)] if need_weights and weights.dtype == torch.float32 else [("dw", 4 * weights.numel())]
    elif need_down:
        steps += [("activation", act)]
    making_down: list[WorkspaceStep] = [(3, 0)] if need_down else []
    making_gate_up: list[WorkspaceStep] = (
        [("rows of x again", rows), (2, 0), ("rows of x again", 0)] if need_gate_up else []
    )
    steps += making_down if not later else []
    steps += [("rows of dy", 0)]
    made = {key for key, size in steps if size}
    free: list[WorkspaceStep] = [("activation", 0)] if "activation" in made else []
    steps += free if not later else []
    steps += [("rows of dx", rows), (0, 0), ("rows of dx", 0)] if need_x else []
    steps += making_gate_up if not later else []
    if later:
        gathered: list[WorkspaceStep] = [("rows of dy again", rows), *making_down, ("rows of dy again", 0)]
        # Its node is done with h before the weights' gradients are made.
        steps += [(f"{GIVEN}2", 0)] if h is not None else []
        steps += (gathered if need_down else []) + free + making_gate_up
    steps += [(dh, 0)] if dh in made else []
    steps += [(1, 0), ("dw", 0)] if "dw" in made else []
    return steps


def _cross_entropy_workspace(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any, *, later: bool
) -> list[WorkspaceStep]:
    """Results: the loss, and the gradients of hidden, weight and bias, in fp32 (fp64)."""
    rows = min(chunk, hidden.shape[0])
    logits = rows * weight.shape[0] * hidden.element_size()
    return [(0, 0), (1, 0), (2, 0), (3, 0), ("logits", logits), ("losses", 4 * rows), ("losses", 0), ("logits", 0)]


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, later: bool, **_: Any
) -> list[WorkspaceStep]:
    """Results: dq, dk, dv."""
    batch, heads, length, width = q.shape
    length = -(-length // 128) * 128
    size = 4 * batch * heads * length * (1 + -(-width // 32) * 32)
    if k.shape[1] != heads:
        size += sum(t.numel() // t.shape[1] * heads * t.element_size() for t in (k, v))
    return [(0, 0), (1, 0), (2, 0), ("workspace", size), ("workspace", 0)]


def _softmax_backward(grad: Tensor, output: Tensor, *rest: Any, later: bool, **_: Any) -> list[WorkspaceStep]:
    """Result: the gradient."""
    size = output.numel() * max(output.element_size(), grad.element_size())
    return [(0, 0), ("gradient times output", size), ("gradient times output", 0)]


def _sum(x: Tensor, dims: Any = None, *rest: Any, later: bool, **_: Any) -> list[WorkspaceStep]:
    """Result: the sums."""
    reduced = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    kept = [(x.stride(d), x.shape[d]) for d in range(x.dim()) if d not in reduced and x.shape[d] > 1]
    summed = [x.stride(d) for d in reduced if x.shape[d] > 1]
    outputs = math.prod(n for _, n in kept)
    if not summed or not outputs:
        return []
    across = bool(kept) and min(summed) > min(kept)[0]
    size = _split_sum(outputs, x.numel() // outputs, across, max(4, x.element_size()))
    return [(0, 0), ("parts", size), ("parts", 0)] if size else []


def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, *rest: Any, later: bool, **_: Any) -> list[WorkspaceStep]:
    """Result: the weight's gradient."""
    tokens = ids.numel()
    if tokens <= _FEW_TOKENS:
        return []
    width = -(-grad.shape[-1] // _WARP) * _WARP
    parts = 4 * width * (tokens // _ROWS_A_THREAD + min(tokens, rows))
    return [(0, 0), ("parts", parts), ("parts", 0)]


def _split_sum(outputs: int, inputs: int, across: bool, width: int) -> int:
    """Bytes that a reduction leaves between its blocks, of `width` bytes a value. `across`: what is summed does not lie side by
    side. The names are those of `Reduce.cuh`, `setReduceConfig`."""
    vector = next(v for v in (4, 2, 1) if outputs % v == 0) if across else 1
    threads = _THREADS // vector
    dim0, dim1 = (outputs // vector, inputs) if across else (inputs, outputs)
    dim0, dim1 = (min(1 << (n.bit_length() - 1), threads) for n in (dim0, dim1))
    block_width = min(dim0, _WARP)
    block_height = min(dim1, threads // block_width)
    block_width = min(dim0, threads // block_height)
    values = inputs if across else -(-inputs // block_width)
    step_output = block_width if across else 1
    if values < min(16 * block_height, _MOST_VALUES):
        return 0  # blocks are split between outputs
    values = -(-values // block_height)
    grid = -(-(outputs // vector) // step_output)
    target = _MULTIPROCESSORS * (_RESIDENT // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // _MOST_VALUES))
    return width * outputs * blocks * (block_width * vector if across else 1) if blocks > 1 else 0


_BODIES: Mapping[str, Callable[..., list[WorkspaceStep]]] = {
    "forebay.experts.default": _experts_workspace,
    "forebay.experts_backward.default": _experts_backward_workspace,
    "forebay.linear_cross_entropy.default": _cross_entropy_workspace,
    "aten._scaled_dot_product_flash_attention_backward.default": _attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
}

EAGER = frozenset(name for name in _BODIES if name.startswith(("aten._softmax", "aten.sum", "aten.embedding")))
"""Of these, what a GPU's kernels alone allocate, and compiled code does not call."""
