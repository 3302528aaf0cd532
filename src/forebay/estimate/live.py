"""What fake tensors would take: live bytes and their peak, and FLOPs, while a function runs under `FakeTensorMode`.

In: nothing; a `Live` is entered around code that makes fake tensors. Out: `now`, `peak` and `flops`. It counts each storage once,
from the operation that makes it until nobody holds it, through weak references: it keeps nothing alive.

An operation that is opaque to autograd (`forebay::experts`, its backward, `forebay::linear_cross_entropy`) has a fake
implementation that makes its results only. What its body needs besides, and in what order, `forebay.estimate.op_costs` knows;
of attention's backward too. Split-K buffers of a GEMM are in cuBLAS's workspace, which `forebay.estimate.reserved` counts.

All of it is noted in `log`, in the words of `forebay.estimate.types`: what is read, made and let go of, in order.

It also knows what each storage is made of: its *origins*, the storages that operations which a compiled sublayer would
recompute (`forebay.models.compile.recomputable_ops`) made it from. Origins are inputs, and results of GEMMs, attention, opaque
operations and reductions. Weights are none: they are held anyway.

FLOPs are those of `torch.utils.flop_counter`'s formulas: attention counts all pairs, those under the mask too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from forebay.estimate.op_costs import EAGER, GIVEN, Tally, WorkspaceStep, steps_of
from forebay.estimate.types import CAME, MULTIPLIES, SENT, Gone, Log, Mark, Op, highest
from forebay.models.compile import recomputable_ops

_KERNELS = frozenset(
    {"topk", "sort", "cumsum", "index_put", "index_put_", "embedding_dense_backward", "bincount", "_grouped_mm"}
)
"""Of aten's operations without FLOPs, those that Inductor calls as they are."""
_IN_PLACE = frozenset({"aten.scatter.src", "aten.scatter.value"})
"""Operations that autograd's formulas run in place on a result of their own, but not on subclasses of a tensor, such as fake
ones."""
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_TRAVELS = frozenset(f"forebay.{name}.default" for name in ("dispatch", "combine", "spread", "collect"))


class Live(TorchDispatchMode):
    """See the module docstring.

    Args:
        block: bytes to which the allocator rounds a storage; 512 on CUDA, 1 on a CPU.
        fused: see `Tally`.
        later: the experts' weight gradients are made behind all their other ones.

    Attributes:
        now, peak: bytes of storages that were made inside; set `peak` to `now` to begin anew.
        flops: of everything since it was last set to 0.
        tally: what the operations ask of a GPU.
        log: see `forebay.estimate.types`.
        travelling: numbers of storages that were made where tokens travel.
    """

    def __init__(self, block: int, later: bool = False, fused: bool = False):
        super().__init__()
        self.tally = Tally(fused, self.origins, self.origin_size)
        self.now = self.peak = self.flops = 0
        self.log: Log = []
        self.travelling: set[int] = set()
        self._block, self._later = block, later
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, frozenset[int]] = {}  # of live storages
        self._made: list[int] = []  # bytes of each origin; a storage's address is used again, its number here is not
        self._numbers: dict[int, int] = {}  # of live storages
        self._origin_numbers: list[int] = []
        self._count = 0
        self._again = recomputable_ops()
        self._fused = fused
        self._early: set[int] = set()  # storages of which the log says already that they are gone
        # Of the log's last operation where it is, the storage that it may be written to, and its result's.
        self._written: tuple[int, int, int] | None = None

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor that was made outside, and that outlives this."""
        key = tensor.untyped_storage()._cdata
        self._sizes[key], self._origins[key] = 0, frozenset()

    def enter(self, tensor: Tensor) -> None:
        """From here on a tensor is an input: made of nothing but itself."""
        key = tensor.untyped_storage()._cdata
        self._origins[key] = frozenset([len(self._made)])
        self._made.append(self.size(tensor))
        self._origin_numbers.append(self._numbers.get(key, -1))

    def number(self, tensor: Tensor) -> int:
        """Of its storage in `log`; -1 for one that is not counted."""
        return self._numbers.get(tensor.untyped_storage()._cdata, -1)

    def origin_number(self, origin: int) -> int:
        """Of an origin's storage."""
        return self._origin_numbers[origin]

    def origins(self, tensor: Tensor) -> frozenset[int]:
        """Numbers of what a live tensor is made of."""
        return self._origins.get(tensor.untyped_storage()._cdata, frozenset())

    def origin_size(self, number: int) -> int:
        """Bytes of an origin, also of one that is gone."""
        return self._made[number]

    def size(self, tensor: Tensor) -> int:
        """Bytes of a tensor's whole storage, rounded."""
        return self._rounded(tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        before, name = self.now, str(func)
        packet = getattr(func, "overloadpacket", None)
        again = packet in self._again
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        new = [self._add(leaf, sources if again else None) for leaf in results]
        reads = tuple(dict.fromkeys(n for source in sources if (n := self.number(source)) >= 0))
        eager = self._block > 1 and not self._fused
        steps = steps_of(name, args, kwargs, self._later) if eager or name not in EAGER else ()
        if name in _TRAVELS:
            self._note_travel(reads, new)
        elif steps:
            self._note_steps(reads, args, new, steps)
            self.peak = max(self.peak, before + self._highest(results, steps))
        elif any(new) or (results and not getattr(func, "is_view", False)):
            if name in _PRODUCTS:
                self.log.append(Mark(MULTIPLIES))
            made = tuple(filter(None, new))
            self._written = None
            if not self._fused and len(made) == 1 and self._is_in_place(name, sources):
                self._written = len(self.log), self.number(sources[0]), results[0].untyped_storage()._cdata
            self.log.append(Op(_is_fused(func, packet), reads, made))
        formula = flop_registry.get(packet)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        self.flops += flops
        self.tally.see(func, args, kwargs, out, flops)
        return out

    def _add(self, tensor: Tensor, sources: list[Tensor] | None) -> Made | None:
        """Count a storage, if it is new; `sources` are what it could be made of again."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return None
        self._sizes[key] = size = self.size(tensor)
        self._numbers[key] = number = self._count
        self._count += 1
        again = sources is not None and not _reduces(tensor, sources)
        if not again:
            self._origins[key] = frozenset([len(self._made)])
            self._made.append(size)
            self._origin_numbers.append(number)
        else:
            assert sources is not None
            self._origins[key] = frozenset().union(
                *(self._origins.get(s.untyped_storage()._cdata, ()) for s in sources)
            )
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key).atexit = False
        return number, size, again, frozenset(self._origin_numbers[o] for o in self._origins[key])

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        self._origins.pop(key, None)
        self.tally.forget(key)
        number = self._numbers.pop(key)
        if number in self._early:
            return
        if self._written is not None and number == self._written[1] and self._in_its_place(number):
            return
        self.log.append(Gone(number))

    def _in_its_place(self, number: int) -> bool:
        """Whether the last operation's result takes a storage that was let go of right behind it: then the two are one."""
        assert self._written is not None
        at, _, key = self._written
        self._written = None
        op = self.log[at]
        if not isinstance(op, Op) or any(not isinstance(entry, Gone) for entry in self.log[at + 1 :]):
            return False
        if key not in self._numbers or self._numbers[key] != op.made[0][0]:
            return False
        self._numbers[key] = number
        self.log[at] = Op(op.fused, op.reads, ())
        return True

    def _is_in_place(self, name: str, sources: list[Tensor]) -> bool:
        """Whether its result takes the place of what it reads first, if nobody else holds that. So the autograd engine adds up
        the gradients of what was read twice, but for subclasses of a tensor; and for views, which hold what they are a view of.
        An addition of a Python function is its own."""
        if name == "aten.add.Tensor" and len(sources) == 2 and sources[0].shape == sources[1].shape:
            node = torch._C._current_autograd_node()
            if sources[0]._is_view():
                return False
            return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)
        return name in _IN_PLACE

    def _note_travel(self, reads: tuple[int, ...], new: list[Made | None]) -> None:
        made = tuple(m for m in new if m is not None)
        self.travelling.update(m[0] for m in made)
        self.log += [Mark(SENT), Op(False, reads, made), Mark(CAME)]

    def _note_steps(
        self, reads: tuple[int, ...], args: Any, new: list[Made | None], steps: tuple[WorkspaceStep, ...]
    ) -> None:
        """An operation's own order: its results among what comes and goes, arguments that nobody needs any more too."""
        names: dict[str, int] = {}
        missing = {i for i, made in enumerate(new) if made is not None}
        self.log.append(Op(False, reads, ()))
        for key, size in steps:
            if isinstance(key, int):
                made = new[key] if key < len(new) else None
                if made is not None and key in missing:
                    missing.discard(key)
                    self.log.append(Op(False, reads, (made,)))
            elif size:
                names[key] = self._count
                self._count += 1
                self.log.append(Op(False, reads, ((names[key], self._rounded(size), False, frozenset()),)))
            elif key.startswith(GIVEN):
                number = self.number(args[int(key.removeprefix(GIVEN))])
                self._early.add(number)
                reads = tuple(n for n in reads if n != number)
                self.log.append(Gone(number))
            else:
                self.log.append(Gone(names.pop(key)))
        rest = tuple(made for i in sorted(missing) if (made := new[i]) is not None)
        if rest:
            self.log.append(Op(False, reads, rest))
        self.log += [Gone(n) for n in names.values()]

    def _highest(self, results: list[Tensor], steps: tuple[WorkspaceStep, ...]) -> int:
        numbers: dict[Any, int] = {}
        events = []
        for key, size in steps:
            number = numbers.setdefault(key, len(numbers))
            given = self.size(results[key]) if isinstance(key, int) and key < len(results) else self._rounded(size)
            if given or not isinstance(key, int):
                events.append((number, given))
        return highest(events, {})

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block


def _is_fused(func: Any, packet: Any) -> bool:
    """Whether Inductor makes it a part of a kernel with what it reads: all of aten but GEMMs, attention, sorts and scatters."""
    return func.namespace in ("aten", "prims") and packet not in flop_registry and packet.__name__ not in _KERNELS


Made = tuple[int, int, bool, frozenset[int]]


def _reduces(result: Tensor, sources: list[Tensor]) -> bool:
    """As torch's partitioner tells a reduction."""
    return 4 * result.numel() * result.element_size() < sum(s.numel() * s.element_size() for s in sources)
