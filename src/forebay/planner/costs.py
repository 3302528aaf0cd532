"""What the operations of a trace ask of a GPU: FLOPs, bytes of device memory, kernels.

In: each operation as `forebay.planner.live.Live` sees it run on fake tensors. Out: `OpCost`s in order, taken by `Tally.take`. It
keeps addresses and sizes, never a tensor.

Products count their FLOPs by torch's formulas, and read and write each argument once. Attention with `is_causal` makes half of
the pairs that its formula counts. Grouped products have no formula in torch, experts and the fused loss are opaque: theirs
are here, from the docstrings of `forebay.moe.experts_op` and `forebay.loss`. An exchange sends what
`forebay.models.planned_exchange` says arrives, less the share that was there already.

Everything else only moves memory. Uncompiled, each such operation is a kernel that reads its arguments and writes its results:
"pointwise" where all of them are laid out alike, so that a thread moves 16 bytes at once; "walked" where it finds each element by
itself, for it joins, slices, transposes, repeats or sums over rows, or has operands of two dtypes (`_is_walked`). A product of
which a row does not begin at 16 bytes is "gemm_odd".

In a compiled half operations between two others that cannot be fused (products, attention, opaque ones, sorting) are one run: it
reads each tensor from outside once, and writes only what somebody outside reads. What backward reads of a forward's run was never
written: it is made again from what it was made of (`Live.origins`), which is what torch's partitioner saves. That is a
bound from below where Inductor cuts a run in several kernels, and from above where it makes cheap things twice.

Rows of experts are those that come, not those that buffers have room for: `live` is the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from forebay.planner.figures import OpCost

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


def _exchange(tally: Tally, tensor: Tensor, *_: Any) -> list[OpCost]:
    """Rows [R, H] that ranks send each other: of all that come to a rank, its own share does not travel."""
    rows = tally.received if tally.received is not None else tensor.shape[0]
    return [OpCost("exchange", 0, rows * tensor.shape[1] * tensor.element_size() * (tally.ranks - 1) // tally.ranks)]


_OPAQUE: Mapping[str, Callable[..., list[OpCost]]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "forebay.experts.default": _experts,
    "forebay.experts_backward.default": _experts_backward,
    "forebay.linear_cross_entropy.default": _cross_entropy,
    "forebay.dispatch.default": _exchange,
    "forebay.combine.default": _exchange,
    "forebay.spread.default": _exchange,
    "forebay.collect.default": _exchange,
}
