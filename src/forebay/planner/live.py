"""What fake tensors would take: live bytes and their peak, and FLOPs, while a function runs under `FakeTensorMode`.

In: nothing; a `Live` is entered around code that makes fake tensors. Out: `now`, `peak` and `flops`. It counts each storage once,
from the operation that makes it until nobody holds it, through weak references: it keeps nothing alive.

An operation that is opaque to autograd (`forebay::experts`, its backward, `forebay::linear_cross_entropy`) has a fake
implementation that makes its results only. What its body needs besides is counted by the formulas of `WORKSPACES`, which are
those of the operations' own docstrings. Memory that a library takes for one kernel (split-K buffers of a GEMM, attention's
backward in fp32) is not seen.

It also knows what each storage is made of: its *origins*, the storages that operations which a compiled half would make again
(`forebay.models.compile.made_again`) made it from. Origins are inputs, and results of GEMMs, attention, opaque operations and
reductions. Weights are none: they are held anyway.

FLOPs are those of `torch.utils.flop_counter`'s formulas: attention counts all pairs, those under the mask too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from forebay.models.compile import made_again
from forebay.planner.costs import Tally


class Live(TorchDispatchMode):
    """See the module docstring.

    Args:
        block: bytes to which the allocator rounds a storage; 512 on CUDA, 1 on a CPU.
        fused: see `Tally`.

    Attributes:
        now, peak: bytes of storages that were made inside; set `peak` to `now` to begin anew.
        flops: of everything since it was last set to 0.
        tally: what the operations ask of a GPU.
    """

    def __init__(self, block: int, fused: bool = False):
        super().__init__()
        self.tally = Tally(fused, self.origins, self.origin_size)
        self.now = self.peak = self.flops = 0
        self._block = block
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, frozenset[int]] = {}  # of live storages
        self._made: list[int] = []  # bytes of each origin; a storage's address is used again, its number here is not
        self._again = made_again()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor that was made outside, and that outlives this."""
        key = tensor.untyped_storage()._cdata
        self._sizes[key], self._origins[key] = 0, frozenset()

    def enter(self, tensor: Tensor) -> None:
        """From here on a tensor is an input: made of nothing but itself."""
        self._origins[tensor.untyped_storage()._cdata] = frozenset([len(self._made)])
        self._made.append(self.size(tensor))

    def origins(self, tensor: Tensor) -> frozenset[int]:
        """Numbers of what a live tensor is made of."""
        return self._origins.get(tensor.untyped_storage()._cdata, frozenset())

    def origin_size(self, number: int) -> int:
        """Bytes of an origin, also of one that is gone."""
        return self._made[number]

    def size(self, tensor: Tensor) -> int:
        """Bytes of a tensor's whole storage, rounded."""
        return -(-tensor.untyped_storage().nbytes() // self._block) * self._block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        before = self.now
        packet = getattr(func, "overloadpacket", None)
        new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(leaf.untyped_storage()._cdata not in self._sizes for leaf in new):
            sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for leaf in new:
                self._add(leaf, sources if packet in self._again else None)
        workspace = WORKSPACES.get(str(func))
        if workspace is not None:
            self.peak = max(self.peak, before + workspace(*args, **kwargs))
        formula = flop_registry.get(packet)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        self.flops += flops
        self.tally.see(func, args, kwargs, out, flops)
        return out

    def _add(self, tensor: Tensor, sources: list[Tensor] | None) -> None:
        """Count a storage; `sources` are what it could be made of again."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size = self.size(tensor)
        if sources is None or _reduces(tensor, sources):
            self._origins[key] = frozenset([len(self._made)])
            self._made.append(size)
        else:
            self._origins[key] = frozenset().union(
                *(self._origins.get(s.untyped_storage()._cdata, ()) for s in sources)
            )
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        self._origins.pop(key, None)
        self.tally.forget(key)


def _reduces(result: Tensor, sources: list[Tensor]) -> bool:
    """As torch's partitioner tells a reduction."""
    return 4 * result.numel() * result.element_size() < sum(s.numel() * s.element_size() for s in sources)


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **_: Any
) -> int:  # forebay::experts
    """2 N (H + 3 I) elements of two bytes, of which h and y stay: see `forebay.moe.experts_op`. h not saved is there as well."""
    rows, hidden, inner = _rows(x, ids, gate_up, down, rest)
    return x.element_size() * (rows * (hidden + 3 * inner))


def _experts_backward(dy: Tensor, x: Any, h: Any, order: Tensor, *rest: Any, **_: Any) -> int:
    """The larger of the two stages of `forebay.moe.experts_op`'s docstring, with the gradients that exist by then."""
    gate_up, down, settings = rest[3], rest[4], rest[7:]
    transposed, needs = settings[2], settings[5:]
    hidden = dy.shape[1]
    inner = down.shape[1] if transposed else down.shape[2]
    need_x, _, need_gate_up, need_down = needs[:4]
    later = len(needs) > 6 and bool(needs[6])
    n, e = order.shape[0], dy.element_size()
    d_down = (n * inner if later else down.numel()) * bool(need_down)
    d_gate_up = (2 * n * inner if later else gate_up.numel()) * bool(need_gate_up)
    dx = dy.numel() * bool(need_x)
    first = n * (hidden + 3 * inner) + d_down
    second = n * (hidden + 2 * inner) + d_down + dx + d_gate_up
    return e * max(first, second)


def _cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any
) -> int:
    """The results in fp32 (fp64), and one chunk of logits: see `forebay.loss`."""
    need_hidden, need_weight, _ = needs
    wide = 8 if hidden.dtype == torch.float64 else 4
    results = wide * (hidden.numel() * need_hidden + weight.numel() * need_weight)
    return results + min(chunk, hidden.shape[0]) * weight.shape[0] * hidden.element_size()


def _rows(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, rest: tuple[Any, ...]) -> tuple[int, int, int]:
    """(rows, hidden, inner) of a call of forebay::experts."""
    transposed, max_rows = rest[4], rest[8]
    slots = ids.shape[0] * ids.shape[1]
    rows = slots if max_rows is None else min(slots, max_rows)
    return rows, x.shape[1], down.shape[1] if transposed else down.shape[2]


WORKSPACES: Mapping[str, Callable[..., int]] = {
    "forebay.experts.default": _experts,
    "forebay.experts_backward.default": _experts_backward,
    "forebay.linear_cross_entropy.default": _cross_entropy,
}
