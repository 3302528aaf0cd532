"""What the operations of a trace ask of a GPU: FLOPs, bytes of device memory, kernels.

Input: each operation as `forebay.estimate.op_recorder` sees it run on fake tensors. Output: `OpCost`s in order, from
`Tally.take`. A `Tally` keeps addresses and sizes, never a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from forebay.estimate.types import MULTIPROCESSORS, OpCost
from forebay.models.compile import expands_latent

_NO_KERNEL = frozenset("empty empty_like empty_strided new_empty new_empty_strided lift_fresh lift_fresh_copy".split())
# Write their result, and read no tensor that they are given.
_FILLS = frozenset(
    "new_zeros new_ones new_full zeros_like ones_like full_like zeros ones full zero_ fill_ arange scalar_tensor".split()
)
# Read and write one element of a row; backward fills the others.
_LOSSES = frozenset("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward".split())
# Inductor does not fuse these with what is around them.
_NOT_FUSED = frozenset(
    "topk sort argsort cumsum bincount histc index_put index_put_ scatter_add scatter_add_ index_add index_add_ "
    "embedding_dense_backward multinomial searchsorted".split()
)
# Uncompiled kernels that never load vectors; `max` is one because it also returns indices.
_UNVECTORIZED = frozenset("repeat max min argmax argmin gather index".split())
_REDUCTIONS = frozenset("sum mean amax amin".split())
_CONVERSIONS = frozenset("_to_copy copy copy_ _softmax _log_softmax _softmax_backward_data".split())
_SOFTMAX, _SOFTMAX_BACKWARD, _ALIGNED = 1.25, 0.7, 0.56
"""Unvectorized loads, for each element read or written, that take as long as exponentials and reductions of uncompiled torch's
softmax, and the share of them where rows begin at multiples of 16 bytes. On an H100 rows of 1921 elements take backward 1.4 ms
for a product and 2.2 for 4.2 GB (run 10 of the eighteenth draw); on an H200 769 take 0.05 for 76 MB forward (run 13 of the
twenty-third)."""
_LONG, _LONG_SOFTMAX, _LONG_ALIGNED = (1024, 8192), 2.4, 0.7
"""The same for the forward of a softmax over rows that a block keeps in its registers, of more elements than the first and no
more than the second: 2.3 ms for 2.8 GB of 1921 on an H100, 0.93 for 1.9 of 3648 and 4.0 for 6.3 of 7040 on H200s."""
_ROW_IN_CACHE = 1 << 18
"""Bytes of a row of logits above which a logarithm of a softmax reads it from memory three times: 8.6 ms for 9.0 GB of rows of
149,888 in fp32 on an H200, at 4.16 TB/s (run 07 of the twenty-third draw)."""
_ROW_PASSES = frozenset("_softmax _log_softmax _softmax_backward_data max amax".split())
_ROW_PASS_BYTES = 9
"""Bytes an element by which a compiled pass over rows takes longer than its memory: exponentials, and a loop over each row. Of 7
passes on an H200: 0.37 to 0.53 ms for 105 MB of GPT-OSS's scores with a sink, forward and backward, 6.9 ms for 2.1 GB without."""
_ROUTE_KERNELS = 8
"""`forebay.moe.routing.route`, a sort in four kernels, takes as long as so many empty ones besides what it moves: 8 to 17
microseconds for 12,288 to 196,608 slots of up to 128 experts on an H200 (benchmarks/results/sort_slots.json)."""
_BIASES, _BIASES_BACKWARD = 80, 150
"""What the biases of GPT-OSS's experts add takes as long as so many empty kernels: 85 and 160 microseconds for 3072 tokens and 48
experts in run 13 of the twenty-third draw, small kernels that build a map of weights, and two products with it."""
_SPLIT = 1.3
"""Bytes that a run moves over those of one kernel, on average: Inductor splits it where reductions go over other dimensions, as
in a norm of heads before rotary positions. Measured on the layers of run 08 of the tenth blind draw: 0.7 to 1.9 by sublayer."""
_ROW_WAIT, _BLOCKS_WAIT, _TOPK_WAIT, _SORT_WAIT = 200, 6_700_000, 8_700_000, 3_000_000
"""Unvectorized loads that take as long as what threads of a reduced row wait for each other, the blocks that add rows, a wave of
`topk`, and the sort of its result. On an H200 0.25 ns (32,768 rows of 64 in 10 microseconds), 8 microseconds (9 to 30 for 2 to
21 MB), 11 (14 for 1024 rows, 46 for 16,384), in benchmarks/results/step_kernels.json and run 19 of the eleventh draw, and 4 (18
and 64 in all, for 3072 rows and 10,240, in runs 13 and 06 of the twenty-third)."""
_LONG_TOPK, _TOPK_ROW, _TOPK_ELEMENT, _LONG_SORT, _SORT_ELEMENT = 256, 20_000, 9, 64_000_000, 15
"""Columns above which a `topk` goes through its rows several times, and the loads that take as long as each row, each element,
the sort of more than 128 results a row, and each result that is sorted. Fitted to 11 of 512 to 8064 columns on an H200, in 0.13
to 1.5 ms: within 25 % (benchmarks/results/sparse_attention.json)."""
_FEW_ROWS, _SMALL_PRODUCT = 32, 1.75
"""Rows of a kernel's tile in many small products in fp32, and the time of a tile over its share of a large product: 20.4 ms for
8064 of 8 x 128 by 128 x 8064 on an H200, and 4.6 for 4096 of 32 x 128 by 128 x 4096 (the same file)."""
_BLOCKS = 32
"""Blocks that a multiprocessor holds at once."""
_LOGIT_PASSES = 3.35
"""Two reads and a write of each logit take as long as so many of a copy: 3.6 to 4.15 TB/s in runs of
benchmarks/results/step_kernels.json, and 3.75 in run 19 of the eleventh blind draw."""


class Tally:
    """Collects the costs of operations.

    Uncompiled, an operation that only moves memory is a kernel that reads its arguments and writes its results. Compiled,
    the operations between two that Inductor cannot fuse are one run: it reads each outside tensor once and writes only what
    something outside reads. A tensor that a forward run made and that only backward reads is never written: backward
    recomputes it from its origins, which is what torch's partitioner saves. Expansions of latents are computed again
    (`expands_latent`). What Inductor moves more, where it splits a run into several kernels, is counted on average (`_SPLIT`).

    Args:
        fused: the code is compiled; see `fuse`.
        origins, origin_sizes: see `forebay.estimate.op_recorder.OpRecorder`.

    Attributes:
        live: slots that arrive at the experts over slots that their buffers have.
        received: rows that arrive at this rank's experts; None if all experts are local.
        ranks: number of ranks that share the experts.
    """

    received: int | None

    def __init__(self, fused: bool, origins: Callable[[Tensor], frozenset[int]], origin_sizes: Sequence[int]):
        self.live, self.received, self.ranks = 1.0, None, 1
        self._fused, self._origins, self._origin_sizes = fused, origins, origin_sizes
        self._done: list[OpCost] = []
        # The open run: what it reads, the storages it made, its bytes, and whether it has a kernel.
        self._read: set[Any] = set()
        self._made: set[int] = set()
        self._bytes = self._kernels = 0
        self._passes: list[OpCost] = []  # over rows, of the open run
        # Bytes of storages that runs made and nothing outside has read, by address.
        self._unwritten: dict[int, int] = {}
        self._earlier: set[int] = set()  # those of them that were made before the last `take`
        self._expansions: dict[int, list[OpCost]] = {}  # costs of those that ran compiled, by their results' addresses

    def take(self, results: Iterable[Tensor] = ()) -> tuple[OpCost, ...]:
        """The costs since the last call; `results` are written to memory."""
        for tensor in results:
            self._write(tensor)
        self._close()
        done, self._done = tuple(self._done), []
        self._earlier = set(self._unwritten)
        return done

    def fuse(self, fused: bool) -> None:
        """From here on the code is compiled, or not."""
        self._close()
        self._fused = fused

    def rows(self, room: int) -> int:
        return room if self.received is None else min(room, self.received)

    def forget(self, key: int) -> None:
        """A storage was freed: its address may be used again."""
        self._unwritten.pop(key, None)
        self._expansions.pop(key, None)
        for keys in (self._made, self._earlier, self._read):
            keys.discard(key)

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = getattr(func, "overloadpacket", None)  # higher-order operators have none
        base = packet.__name__ if packet is not None else str(func)
        opaque = _OPAQUE.get(str(func))
        if opaque is not None:
            self._separate(args, kwargs, opaque(self, *args, **kwargs))
        elif base in _NO_KERNEL or getattr(func, "is_view", False):
            return
        elif packet in flop_registry:
            costs = (_attention if "attention" in base else _matmul)(func, args, kwargs, out)
            if self._fused:  # Inductor copies and pads operands whose rows are unaligned
                costs = [replace(cost, kind=cost.kind.replace("_unaligned", "")) for cost in costs]
            self._separate(args, kwargs, costs)
            if self._fused and is_expansion(func, args):
                self._expansions[address(out)] = costs
        else:
            self._moves(base, args, kwargs, out)

    def _moves(self, base: str, args: Any, kwargs: Any, out: Any) -> None:
        sources = tensors_in((args, {name: value for name, value in kwargs.items() if name != "out"}))
        results = tensors_in(out)
        addresses = {address(t) for t in sources}
        if all(address(t) in addresses for t in results) and not base.endswith("_"):
            return  # a view under another name, such as aten._unsafe_view
        if base in _FILLS or base in _LOSSES:
            sources = []
        if base == "embedding":  # reads the rows that are looked up, not the whole weight
            self._separate(args, kwargs, [OpCost("pointwise", 0, 2 * sum(map(_bytes, results)))])
        elif not self._fused or base in _NOT_FUSED:
            # An `out=` stands in for a kernel of Forebay's own, such as `forebay.kernels.cross_entropy.scale`.
            moved = sum(map(_bytes, (*sources, *results)))
            if self._fused or "out" in kwargs:
                cost = OpCost("pointwise", 0, moved)
            elif base in ("scatter", "scatter_"):  # backward writes in place into zeros; a fake tensor makes a copy
                cost = _element_by_element(_bytes(args[2]) + 2 * args[2].numel() * results[0].element_size(), results)
            elif base in ("cat", "stack"):
                cost = _joined(moved, args, results[0])
            elif _is_unvectorized(base, args, sources, results):
                cost = _element_by_element(moved, (*sources, *results))
            elif "softmax" in base:
                cost = _softmax(base, moved, results[0])
            else:
                cost = OpCost("pointwise", 0, moved * (2 if _widens(base, sources, results) else 1))
            if waits := _waits(base, args, sources, results):
                cost = replace(cost, loads=cost.loads + waits)
            self._separate(args, kwargs, [cost])
        else:
            self._kernels = 1
            if base in _ROW_PASSES:
                passed = _ROW_PASS_BYTES * sources[0].numel()
                loads = passed // 2 if _is_unaligned(sources[0]) else 0
                self._passes.append(OpCost("pointwise", 0, passed, 0, loads=loads))
            for tensor in sources:
                if address(tensor) not in self._made:
                    self._read_in_run(tensor)
            for tensor in results:
                self._made.add(address(tensor))
                self._unwritten[address(tensor)] = _bytes(tensor)

    def _read_in_run(self, tensor: Tensor) -> None:
        key = address(tensor)
        self._expand_again(key)
        if key in self._earlier:  # made in forward, and never written
            self._read_origins(tensor)
            return
        self._bytes += self._unwritten.pop(key, 0)
        source: Any = key
        if len(numbers := self._origins(tensor)) == 1:
            source = ("origin", *numbers)
        if source not in self._read:
            self._read.add(source)
            self._bytes += _bytes(tensor)

    def _expand_again(self, key: int) -> None:
        if torch._C._current_autograd_node() is not None:
            self._done += self._expansions.pop(key, ())

    def _read_origins(self, tensor: Tensor) -> None:
        for number in self._origins(tensor):
            if ("origin", number) not in self._read:
                self._read.add(("origin", number))
                self._bytes += self._origin_sizes[number]

    def _write(self, tensor: Tensor) -> None:
        """Something outside of runs reads the tensor."""
        key = address(tensor)
        self._expand_again(key)
        if key in self._unwritten:
            if key in self._earlier:
                self._kernels = 1
                self._read_origins(tensor)
                self._earlier.discard(key)
            self._bytes += self._unwritten.pop(key)

    def _separate(self, args: Any, kwargs: Any, costs: Iterable[OpCost]) -> None:
        """An operation of its own, which ends the open run."""
        for tensor in tensors_in((args, kwargs)):
            self._write(tensor)
        self._close()
        self._done.extend(costs)

    def _close(self) -> None:
        if self._kernels and self._bytes:
            self._done.append(OpCost("pointwise", 0, round(_SPLIT * self._bytes), self._kernels))
        self._done.extend(self._passes)
        self._read, self._made, self._passes = set(), set(), []
        self._bytes = self._kernels = 0


def is_expansion(func: Any, args: Any) -> bool:
    """Whether this is a forward's operation that compiled code runs again in backward; see `expands_latent`."""
    if func is not torch.ops.aten.mm.default or torch._C._current_autograd_node() is not None:
        return False
    return expands_latent(*args[1].shape)


def _matmul(func: Any, args: Any, kwargs: Any, out: Any) -> list[OpCost]:
    tensors = [*tensors_in((args, kwargs)), *tensors_in(out)]
    flops = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    kind, padding = "gemm_fp32" if tensors[0].dtype == torch.float32 else "gemm", 1.0
    if kind == "gemm" and any(map(_is_unaligned, tensors)):  # its kernel computes whole tiles
        kind = "gemm_unaligned"
        padding = math.prod(-(-n // _TILE) * _TILE / n for n in tensors_in(out)[0].shape[-2:] if n)
    elif kind == "gemm_fp32" and func is torch.ops.aten.bmm.default and 0 < (rows := args[0].shape[1]) <= _FEW_ROWS:
        padding = _SMALL_PRODUCT * _FEW_ROWS / rows
    return [OpCost(kind, flops, sum(map(_bytes, tensors)), padding=padding)]


def _attention(func: Any, args: Any, kwargs: Any, out: Any) -> list[OpCost]:
    """Not torch's formula, which counts all pairs, and in torch 2.11 fails for fewer heads of keys than of queries."""
    moved = sum(map(_bytes, (*tensors_in((args, kwargs)), *tensors_in(out))))
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    query, value, causal = named["query"], named["value"], bool(named.get("is_causal"))
    backward = "backward" in str(func)
    width, value_width = query.shape[-1], value.shape[-1]
    # Backward computes scores, and gradients of queries and keys; gradients of scores, and of values.
    columns = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2 * query.shape[:-1].numel() * value.shape[-2] * columns // (2 if causal else 1)
    padding = _attention_padding(query, value, causal, backward)
    cost = OpCost("attention_backward" if backward else "attention", flops, moved, padding=padding)
    if not backward:
        return [cost]
    # Without launches: the host calls one operation.
    return [cost, OpCost("pointwise", 0, around_attention(query, named["key"], value), 0)]


def around_attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Bytes of the kernels around cuDNN's attention backward: rows' sums of dO * O, and the query's gradient from fp32; with
    fewer heads of keys, the sums of their gradients. They take 1.3 times as long as a copy."""
    size, pairs = query.element_size(), query.shape[:-1].numel()
    moved = 2 * size * pairs * value.shape[-1] + (4 + size) * query.numel()
    if key.shape[1] < query.shape[1]:
        moved += size * (pairs * (key.shape[-1] + value.shape[-1]) + key.numel() + value.numel())
    return round(1.3 * moved)


_TILE = 128
"""Queries and keys of a tile of cuDNN's attention on Hopper; elements that unaligned GEMMs are padded to."""
_CLUSTER, _STAGE = 256, 64
"""Rows and columns of what two multiprocessors of a Hopper GPU compute together of an expert's product in `F.grouped_mm`, two
tiles of 128 x 256, and the elements of an inner sum that they add at a time: CUTLASS's tiles as torch 2.11 picks them, in the
kernels' names."""
_SMALL = 128
"""Rows, columns and elements of the same with small tiles (two of 64 x 128), which torch picks for results of up to so many rows
or columns an expert."""
_WIDTH = 64
"""Widths of heads are padded to multiples of it."""
_EXPONENTIALS = 200
"""Columns of a head that take as long as a pair's exponential: heads of 64 take 0.73 of the time of heads of 128, for which rates
are measured."""

_LAST, _MEASURED = 0.65, (1.08, 1.04)
"""Causal attention ends later than if all multiprocessors had equal work: by 0.65 of its longest tile's time, in a simulation of
blocks that are taken in turn. For the shape whose rates are measured (2 x 32 heads, 4096 tokens) that is a factor of 1.08, and
of 1.04 in backward, whose blocks are half as long."""
_NARROW, _GROWTH = 0.73, 1.65
"""cuDNN's backward takes as long for all columns of a tile, whatever the heads' own: heads of up to 64 take 0.73 of those of up
to 128, and wider ones grow with this power (192: 1.95), but with their columns where values have 128. With the tiles above, 14 of
18 shapes are within 8 %, two within 16, and two of 512 and 640 tokens take longer (benchmarks/results/captured_kernels.json)."""


def _attention_padding(query: Tensor, value: Tensor, causal: bool, backward: bool) -> float:
    """What attention takes in whole tiles and exponentials, over what its FLOPs would take with heads of 128.

    A multiprocessor takes 128 queries of a head (64 keys in backward), the shortest of each head first: the last one begins when
    most are done, and all wait for it (`_LAST`). Query is [B, H, S, D], value [B, H, T, V].
    """
    batch, heads, length, width = query.shape
    rows, keys = -(-length // _TILE), -(-value.shape[2] // _TILE)
    tiles = batch * heads * (rows * (rows + 1) / 2 if causal else rows * keys)
    pairs = batch * heads * length * value.shape[2] / (2 if causal else 1)
    longest = MULTIPROCESSORS * keys / (2 if backward else 1)
    taken = max(longest, tiles + _LAST * longest) / _MEASURED[backward]
    return _columns_padding(width, value.shape[3], backward) * taken * _TILE**2 / pairs


def _columns_padding(width: int, value_width: int, backward: bool) -> float:
    """The same for the columns of heads."""
    padded = [-(-n // _WIDTH) * _WIDTH for n in (width, value_width)]
    if not backward:
        return (sum(padded) + _EXPONENTIALS) * 256 / (256 + _EXPONENTIALS) / (width + value_width)
    widest = max(padded)
    longer = _NARROW if widest == _WIDTH else (widest / 128) ** _GROWTH
    if padded[1] == 128:
        longer = (3 * widest + 2 * 128) / 640
    return longer * 640 / (3 * width + 2 * value_width)


def _is_unaligned(matrix: Tensor) -> bool:
    """Whether rows (or columns) of a matrix do not begin at multiples of 16 bytes, so that they cannot be loaded in tiles."""
    if matrix.dim() < 2:
        return False
    long = [stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1 and stride != 1]
    return any(stride * matrix.element_size() % 16 for stride in long)


def _is_unvectorized(base: str, args: Any, sources: list[Tensor], results: list[Tensor]) -> bool:
    """Whether an uncompiled kernel loads one element at a time.

    torch's loops load 16 bytes a thread only if all operands of more than one element have the same dtype and the same dense
    layout. Conversions have a vectorized loop of their own.
    """
    if base in _UNVECTORIZED:
        return True
    if base in _REDUCTIONS:  # vectorized along rows, as in norms, but not over rows
        return _adds_rows(args, sources[0]) or not sources[0].is_contiguous()
    tensors = [t for t in (*sources, *results) if t.numel() > 1]
    if base not in _CONVERSIONS and len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
        return True
    return len({(t.shape, t.stride()) for t in tensors}) > 1 or any(_has_gaps(t) for t in tensors)


def _adds_rows(args: Any, source: Tensor) -> bool:
    """Whether a reduction leaves the last dimension."""
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return bool(dims) and all(dim % source.dim() != source.dim() - 1 for dim in dims)


def _waits(base: str, args: Any, sources: list[Tensor], results: list[Tensor]) -> int:
    """What threads of a kernel wait for each other, in loads of an unvectorized one: for each row that is reduced, where rows are
    added, and in each wave of a `topk`, whose blocks take a row each."""
    if base == "topk":
        columns, is_sorted = sources[0].shape[-1], len(args) < 5 or args[4]
        rows = sources[0].numel() // columns
        if columns > _LONG_TOPK:
            sort = _LONG_SORT * (results[0].shape[-1] > 128) + _SORT_ELEMENT * results[0].numel()
            return _TOPK_ROW * rows + _TOPK_ELEMENT * sources[0].numel() + is_sorted * sort
        return -(-rows // (_BLOCKS * MULTIPROCESSORS)) * (_TOPK_WAIT + is_sorted * _SORT_WAIT)
    if base not in _REDUCTIONS:
        return 0
    return _BLOCKS_WAIT if _adds_rows(args, sources[0]) else _ROW_WAIT * results[0].numel()


def _element_by_element(moved: int, tensors: Iterable[Tensor]) -> OpCost:
    """A kernel that reads and writes `moved` bytes, one element at a time. A wider element of two dtypes is converted as well,
    which takes as long as another load."""
    sizes = [t.element_size() for t in tensors if t.is_floating_point() and t.numel() > 1]
    return OpCost("pointwise", 0, moved, loads=moved // min(sizes, default=2))


def _joined(moved: int, args: Any, result: Tensor) -> OpCost:
    """Tensors beside each other. torch copies whole vectors if each part is contiguous and whole vectors long; else it divides
    for each element, which takes twice as long as a load: 1.4 and 2.2 ns for 1000 on an H100 (run 10 of the eighteenth draw)."""
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    inner = math.prod(result.shape[dim % result.dim() + 1 :]) * result.element_size()
    if all(part.is_contiguous() and part.shape[dim] * inner % 16 == 0 for part in parts if part.dim() == result.dim()):
        return OpCost("pointwise", 0, moved)
    cost = _element_by_element(moved, (result,))
    return replace(cost, loads=2 * cost.loads)


def _softmax(base: str, moved: int, result: Tensor) -> OpCost:
    """The backward of a softmax multiplies the gradient by the output first, in a kernel of its own."""
    if base == "_log_softmax" and result.shape[-1] * result.element_size() > _ROW_IN_CACHE:
        return OpCost("pointwise", 0, 2 * moved)
    is_backward = base == "_softmax_backward_data"
    factor, aligned = (_SOFTMAX_BACKWARD if is_backward else _SOFTMAX), _ALIGNED
    if base == "_softmax" and _LONG[0] < result.shape[-1] <= _LONG[1]:
        factor, aligned = _LONG_SOFTMAX, _LONG_ALIGNED
    loads = factor * (1.0 if _is_unaligned(result) else aligned) * (moved // result.element_size())
    return OpCost("pointwise", 0, (1 + is_backward) * moved, loads=round(loads))


def _widens(base: str, sources: list[Tensor], results: list[Tensor]) -> bool:
    """Whether it is uncompiled torch's conversion to a wider dtype, which takes twice as long as its bytes: it is not vectorized
    (bf16 to fp32 at 2.0 TB/s on an H200, fp32 to bf16 at 4.0)."""
    return base in ("_to_copy", "copy", "copy_") and results[0].element_size() > sources[-1].element_size()


def _has_gaps(tensor: Tensor) -> bool:
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        != tensor.numel()
    )


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results of an operation, in order. `tree_leaves` finds the same, but knows all kinds of
    containers, and takes a tenth of a trace."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage, which another storage may have after it."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """Bytes that a tensor refers to; a broadcast one refers to less than its elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _grouped(kind: str, rows: int, inner: int, outer: int, experts: int, size: int, given: int = 0) -> OpCost:
    """Rows of `inner` elements times the matrix [inner, outer] of their expert, or the gradient of those matrices.

    Rows are spread evenly, and tiles of one expert read its matrix from the cache. `given`: rows with those that a capacity
    leaves empty, by which torch picks its tiles.
    """
    matrices = size * experts * inner * outer
    moved = size * rows * (inner + outer) + matrices
    used = max(1, min(experts, rows))
    each = -(-max(1, rows) // used)
    if kind == "grouped_weights":
        # The kernel that adds to sums takes each expert's rows in tiles of `_TILE`.
        height, depth, padding, least = inner, each, -(-each // _TILE) * _TILE / each, inner
    else:
        height, depth, padding, least = each, inner, 1.0, max(rows, given) // experts
    small = min(least, outer) <= _SMALL
    side, stage = (_SMALL, _SMALL) if small else (_CLUSTER, _STAGE)
    tiles, depth = used * -(-height // side) * -(-outer // side), -(-depth // stage) * stage
    flops = 2 * rows * inner * outer
    return OpCost(kind, flops, moved, padding=padding, matrices=matrices, tiles=tiles, depth=depth, small=small)


def _moved(*elements: int, size: int, kernels: int = 1) -> OpCost:
    return OpCost("pointwise", 0, size * sum(elements), kernels)


def _gathered(rows: int, hidden: int, size: int) -> OpCost:
    """Each token is read once for each of its experts, about half of the times from the cache (benchmarks/results/experts.md)."""
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
    biases = 0 if rest[1] is None else _BIASES
    return [
        _moved(6 * ids.numel(), size=ids.element_size(), kernels=_ROUTE_KERNELS + biases),
        _gathered(rows, hidden, size),
        _grouped("grouped", rows, hidden, 2 * inner, experts, size, slots),
        _moved(3 * rows * inner, size=size),
        _grouped("grouped", rows, inner, hidden, experts, size, slots),
        _moved(rows * hidden, tokens * hidden, size=size),
    ]


def _experts_backward(tally: Tally, dy: Tensor, x: Any, h: Any, order: Tensor, *rest: Any, **_: Any) -> list[OpCost]:
    """gather dy, da = dy @ down.T, dh, act, dw, d_down, dx = combine(dh @ gate_up.T); before them h, if it was not saved."""
    gate_up, down, settings = rest[3], rest[4], rest[7:]
    transposed, needs = settings[2], settings[5:]
    need_x, _, _, need_down, _, _, deferred = needs[:7]
    slots, hidden, size = order.shape[0], dy.shape[1], dy.element_size()
    rows, tokens = int(slots * tally.live), tally.rows(dy.shape[0])
    inner = down.shape[1] if transposed else down.shape[2]
    experts = gate_up.shape[0]
    gather, combine = _gathered(rows, hidden, size), _moved(tokens * hidden, rows * hidden, size=size)
    costs = [] if rest[6] is None else [_moved(kernels=_BIASES_BACKWARD, size=size)]
    if h is None or not h.numel():
        costs += [gather, _grouped("grouped", rows, hidden, 2 * inner, experts, size, slots)]
    costs += [
        gather,
        _grouped("grouped", rows, hidden, inner, experts, size, slots),
        _moved(6 * rows * inner, size=size),  # reads h and da; writes dh and act
    ]
    if need_down and not deferred:
        costs.append(_grouped("grouped_weights", rows, hidden, inner, experts, size))
    if need_x:
        costs += [_grouped("grouped", rows, 2 * inner, hidden, experts, size, slots), combine]
    return costs


def _weight_backward(tally: Tally, tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, *_: Any) -> list[OpCost]:
    """Gather the tokens, and multiply them with the rows of each expert."""
    live, hidden, size = int(order.shape[0] * tally.live), tokens.shape[1], tokens.element_size()
    gather = _gathered(live, hidden, size)
    return [gather, _grouped("grouped_weights", live, hidden, rows.shape[1], offs.shape[0], size)]


def _cross_entropy(
    tally: Tally, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any
) -> list[OpCost]:
    """Logits, and the gradients of hidden states and weight, chunk by chunk. Besides its GEMMs each logit is read twice and
    written in place (`_LOGIT_PASSES`). Each chunk adds its gradient of the weight to an fp32 sum that the first one writes."""
    need_hidden, need_weight, _ = needs
    (tokens, width), vocabulary, size = hidden.shape, weight.shape[0], hidden.element_size()
    chunks = -(-tokens // max(chunk, 1))
    flops, inputs = 2 * tokens * width * vocabulary // chunks, size * tokens * (vocabulary + width) // chunks
    logits = _moved(round(_LOGIT_PASSES * tokens * vocabulary), size=size, kernels=3 * chunks)  # with the sum of losses
    product = OpCost("gemm", flops, inputs + size * vocabulary * width)
    sums = 4 * vocabulary * width * (2 * chunks - 1) // chunks
    weights = [OpCost("gemm_sum", flops, inputs + sums)] * bool(need_weight)
    return [*([product] * (1 + bool(need_hidden)) + weights) * chunks, logits]


def _grouped_mm(tally: Tally, left: Tensor, right: Tensor, offs: Tensor, *_: Any, **__: Any) -> list[OpCost]:
    """Rows [R, K] with matrices [E, K, N]; or [K, R] with rows [R, N], for the gradient of E matrices. torch has no FLOP
    formula."""
    weights, experts = left.dim() == right.dim() == 2, offs.numel()
    inner, rows = left.shape if weights else reversed(left.shape)
    kind = "grouped_weights" if weights else "grouped"
    return [_grouped(kind, rows, inner, right.shape[-1], experts, left.element_size())]


_FLEX_BLOCK = 128
"""Keys of a block that `flex_attention` skips or computes."""


def _window_pairs(q: Tensor, window: int | None) -> int:
    """Pairs of a query and a key that `flex_attention` computes under a causal mask, whose windows are whole blocks; q is
    [B, S, H, D]."""
    batch, length, heads, _ = q.shape
    half = length // 2
    keys = half if window is None else min(half, (-(-window // _FLEX_BLOCK) + 1) * _FLEX_BLOCK)
    return batch * heads * length * keys


def _window_attention(
    tally: Tally, q: Tensor, k: Tensor, v: Tensor, *_: Any, window_size_left: int | None = None, **__: Any
) -> list[OpCost]:
    """`forebay.models.sinks` on a GPU; see `forebay.estimate.fake_model`."""
    flops = 4 * _window_pairs(q, window_size_left) * q.shape[-1]
    return [OpCost("attention", flops, 2 * _bytes(q) + _bytes(k) + _bytes(v))]


def _window_attention_backward(
    tally: Tally, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, window_size_left: int | None = None, **__: Any
) -> list[OpCost]:
    """Scores and their gradients are computed twice, for dq and for dk and dv: 7 products of forward's 2."""
    flops = 14 * _window_pairs(q, window_size_left) * q.shape[-1]
    return [OpCost("attention_backward", flops, 4 * _bytes(q) + 2 * (_bytes(k) + _bytes(v)))]


_MASKED_KEYS = 64
"""Keys of a tile of `forebay.kernels.masked_attention`."""
_MASKED_SLOWER = 2.9
"""How many times as long as flash attention `forebay.kernels.masked_attention` takes for a FLOP: 1.8 to 8.1 on an H200 for seven
shapes, most of DeepSeek-V4 and MiMo-V2, the median of both directions (benchmarks/results/masked_attention.json)."""


def _masked_pairs(q: Tensor, k: Tensor, window: int) -> int:
    """Pairs that those kernels compute: tiles of keys that a window reaches, or half of as many keys as there are queries; and
    half of the others, which were made of tokens before."""
    batch, heads, length, _ = q.shape
    others = max(0, k.shape[2] - length)
    near = min(length // 2, window + _MASKED_KEYS) if window else length // 2
    return batch * heads * length * (near + others // 2)


def _masked_attention(
    tally: Tally, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sinks: Tensor | None, scale: float, window: int
) -> list[OpCost]:
    """`forebay.models.masked_attention`: two products."""
    values = k if v is None else v
    flops = 2 * _masked_pairs(q, k, window) * (q.shape[-1] + values.shape[-1])
    moved = 2 * _bytes(q) + _bytes(k) + _bytes(values) + _bytes(mask)
    found = OpCost("pointwise", 0, _bytes(mask), launches=3)
    return [found, OpCost("attention", flops, moved, padding=_MASKED_SLOWER)]


def _masked_attention_backward(
    tally: Tally, dy: Tensor, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, *rest: Any
) -> list[OpCost]:
    """Three products for queries, three for keys, and two for values, all of which make the scores again."""
    values, window = k if v is None else v, rest[-1]
    flops = 2 * _masked_pairs(q, k, window) * (5 * q.shape[-1] + 3 * values.shape[-1])
    moved = 4 * _bytes(q) + 2 * (_bytes(k) + _bytes(values)) + 3 * _bytes(mask)
    found = OpCost("pointwise", 0, 2 * _bytes(mask), launches=30)
    return [found, OpCost("attention_backward", flops, moved, launches=5, padding=_MASKED_SLOWER)]


def _all_to_all(tally: Tally, tensor: Tensor, *_: Any) -> list[OpCost]:
    """Rows [R, H] that ranks send each other; a rank's own share does not leave it."""
    rows = tally.received if tally.received is not None else tensor.shape[0]
    return [OpCost("all_to_all", 0, rows * tensor.shape[1] * tensor.element_size() * (tally.ranks - 1) // tally.ranks)]


_OPAQUE: Mapping[str, Callable[..., list[OpCost]]] = {
    "aten._flash_attention_backward.default": _window_attention_backward,
    "aten._flash_attention_forward.default": _window_attention,
    "aten._grouped_mm.default": _grouped_mm,
    "forebay.experts.default": _experts,
    "forebay.experts_backward.default": _experts_backward,
    "forebay.experts_weight_backward.default": _weight_backward,
    "forebay.masked_attention.default": _masked_attention,
    "forebay.masked_attention_backward.default": _masked_attention_backward,
    "forebay.linear_cross_entropy.default": _cross_entropy,
    "forebay.dispatch.default": _all_to_all,
    "forebay.combine.default": _all_to_all,
    "forebay.spread.default": _all_to_all,
    "forebay.collect.default": _all_to_all,
}
