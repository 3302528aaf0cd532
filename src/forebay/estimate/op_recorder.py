"""Records what runs on fake tensors: costs, and the order of allocations and frees.

Input: an `OpRecorder` is entered around code that makes fake tensors. Output: `tally`, and a `log` for
`forebay.estimate.events`. A storage counts from the operation that makes it until no tensor refers to it;
the recorder holds weak references only. It also tracks the origins of each storage: the inputs and the results of
GEMMs, attention, opaque operations and reductions from which compiled code could recompute it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from forebay.estimate.op_costs import Tally, address, is_expansion, tensors_in
from forebay.estimate.types import Freed, Log, Mark, NewStorage, Op
from forebay.estimate.workspaces import EAGER_ONLY, GPU_ONLY, MARK, WorkspaceStep, workspace_steps
from forebay.models.compile import ASSEMBLING_OPS, recomputable_ops

_KERNELS = frozenset({"topk", "sort", "cumsum", "index_put_", "embedding_dense_backward", "bincount", "_grouped_mm"})
"""Operations of aten without a FLOP formula that Inductor calls as they are."""
_DECOMPOSED = frozenset({torch.ops.aten._softmax, torch.ops.aten.slice_backward})
"""Operations that torch decomposes before it compiles, into pointwise ones and reductions whose results are small. Eager
attention's probabilities come from the scores again; their gradient gets a column for GPT-OSS's sinks."""
_EMPTY = frozenset({torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided})
"""Operations whose results have no content. Autograd's backward of a copy calls the last."""
_IN_PLACE = frozenset({"aten.scatter.src", "aten.scatter.value"})
"""Autograd's formulas run these in place on a result of their own, but not on subclasses of a tensor such as fake tensors."""
_MATMULS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_EXPERTS, _LOSS = "forebay.experts.default", "forebay.linear_cross_entropy.default"
_EXPERTS_OPS = frozenset({_EXPERTS, "forebay.experts_backward.default", "forebay.experts_weight_backward.default"})
_TRANSFERS = frozenset(f"forebay.{name}.default" for name in ("dispatch", "combine", "spread", "collect"))


class OpRecorder(TorchDispatchMode):
    """See the module docstring.

    Workspaces of operations that are opaque to autograd, such as `forebay::experts`, come from `forebay.estimate.workspaces`.

    Args:
        block, deferred_weight_grads, stages: see `Shape`.
        fused: the code is compiled.

    Attributes:
        origin_sizes, origin_storages: bytes and storage of each origin, which may have been freed.
        transferred: storages that the token dispatcher made.
        assembled: storages that `ASSEMBLING_OPS` made, or copies in place. Inductor does not fuse these into what reads them.
        experts_inputs: of the experts that ran last between stages, storages that they read and that compiled code could
            recompute, with their bytes. They are results of compiled code, and the experts save them as they are.
        experts: of the last experts that ran, the numbers of their rows and of their first product; -1 if that is not saved.
        head_sum: number of the weight's gradient that the last fused loss made; -1 without one.
    """

    def __init__(self, block: int, deferred_weight_grads: bool = False, fused: bool = False, stages: bool = False):
        super().__init__()
        self.origin_sizes: list[int] = []
        self.origin_storages: list[int] = []
        self.tally = Tally(fused, self.origins, self.origin_sizes)
        self.log: Log = []
        self.transferred: set[int] = set()
        self.assembled: set[int] = set()
        self.experts, self.head_sum = (-1, -1), -1
        self.experts_inputs: dict[int, int] = {}
        self._block, self._deferred, self._fused, self._stages = block, deferred_weight_grads, fused, stages
        self._recomputable = recomputable_ops() | _DECOMPOSED
        self._count = 0
        # Of live storages, by address. An address is used again; numbers of storages and of origins are not.
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, frozenset[int]] = {}
        self._numbers: dict[int, int] = {}
        # By each storage that compiled code made empty: its operation's position in the log, and the storages copied into it.
        self._empty: dict[int, tuple[int, tuple[int, ...]]] = {}
        # The last operation that may write in place: its position in the log, the storage it overwrites, its result's address.
        self._overwrites: tuple[int, int, int] | None = None

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor that was made outside and outlives the recorder."""
        self._sizes[address(tensor)], self._origins[address(tensor)] = 0, frozenset()

    def mark_input(self, tensor: Tensor) -> None:
        """From here on the tensor is its own origin."""
        key = address(tensor)
        self._add_origin(key, self.size(tensor), self._numbers.get(key, -1))

    def number(self, tensor: Tensor) -> int:
        """The number of its storage in `log`; -1 for one that is not counted."""
        return self._numbers.get(address(tensor), -1)

    def origins(self, tensor: Tensor) -> frozenset[int]:
        return self._origins.get(address(tensor), frozenset())

    def size(self, tensor: Tensor) -> int:
        return self._rounded(tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # more than half of all calls, and none computes
            return out
        packet = getattr(func, "overloadpacket", None)
        self._record(func, packet, args, kwargs, out)
        self.tally.see(func, args, kwargs, out)
        return out

    def _record(self, func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        results = tensors_in(out)
        sources = tensors_in((args, kwargs))
        # Inductor generates no code for complex numbers, and torch's partitioner saves what is converted to one.
        is_real = not any(tensor.is_complex() for tensor in (*sources, *results))
        fused = _is_fused(func, packet) and is_real
        pads = fused and self._fused and self._block > 1
        again = self._fused and is_expansion(func, args)
        recomputable = packet in self._recomputable and is_real
        new = [self._add(leaf, sources if recomputable or again else None, pads, again) for leaf in results]
        made = tuple(filter(None, new))
        if name == _EXPERTS:
            self.experts = self.number(args[0]), self.number(results[1])
            made_before = [source for source in sources if self._is_recomputable(source)] if self._stages else []
            self.experts_inputs = {self.number(source): self.size(source) for source in made_before}
        elif name == _LOSS:
            self.head_sum = self.number(results[2])
        reads = tuple(dict.fromkeys(n for source in sources if (n := self.number(source)) >= 0))
        others = GPU_ONLY if self._block == 1 else EAGER_ONLY if self._fused else frozenset[str]()
        steps = workspace_steps(name, args, kwargs, self._deferred) if name not in others else ()
        marks = self._stages and name in _EXPERTS_OPS
        if marks:
            self.log.append(Mark.EXPERTS_BEGIN)
        if packet in ASSEMBLING_OPS:
            self.assembled.update(m.number for m in made)
        if name in _TRANSFERS:
            self.transferred.update(m.number for m in made)
            self.log += [Mark.ALL_TO_ALL_BEGIN, Op(False, reads, made), Mark.ALL_TO_ALL_END]
        elif steps:
            self._log_workspace(reads, new, steps)
        elif made or (results and not getattr(func, "is_view", False)):
            if name in _MATMULS:
                self.log.append(Mark.MATMUL)
            self._overwrites = None
            if not self._fused and len(made) == 1 and _may_overwrite(name, sources):
                self._overwrites = len(self.log), self.number(sources[0]), address(results[0])
            self.log.append(Op(fused, reads, made))
            if self._fused and made and packet in _EMPTY:
                self._empty[made[0].number] = len(self.log) - 1, ()
            elif self._fused and name == "aten.copy_.default":
                self._fill(sources)
        if marks:
            self.log.append(Mark.EXPERTS_END)

    def _fill(self, sources: list[Tensor]) -> None:
        """Log a copy into a storage that was made empty as the operation that makes it, from all that was copied so far.

        Compiled graphs are functional: DeepSeek's keys, which it assembles by copies, are recomputable like a result of
        `aten.cat`. What was read between two copies stays as the first one made it.
        """
        number, key = self.number(sources[0]), address(sources[0])
        if number not in self._empty:
            return
        at, copied = self._empty[number]
        made, copy = self.log[at], self.log[-1]
        assert isinstance(made, Op) and isinstance(copy, Op)
        if any(isinstance(entry, Op) and number in entry.reads for entry in self.log[at + 1 : -1]):
            return
        found = frozenset[int]().union(self._origins[key] if copied else (), *map(self.origins, sources[1:]))
        storage = NewStorage(number, self._sizes[key], True, frozenset(self.origin_storages[o] for o in found))
        copied = *copied, *(n for n in copy.reads if n != number)
        self.log[at], self.log[-1] = made._replace(made=()), Op(copy.fused, copied, (storage,))
        self._origins[key], self._empty[number] = found, (len(self.log) - 1, copied)
        self.assembled.add(number)

    def _add(self, tensor: Tensor, sources: list[Tensor] | None, pads: bool, again: bool) -> NewStorage | None:
        """Count a storage if it is new. `sources`: what compiled code could recompute it from; `again`: it does so always;
        `pads`: Inductor lays it out."""
        storage, key = tensor.untyped_storage(), address(tensor)
        if key in self._sizes:
            return None
        self._sizes[key] = size = self._rounded(_padded(tensor)) if pads else self.size(tensor)
        self._numbers[key] = number = self._count
        self._count += 1
        recomputable = sources is not None and (again or not _reduces(tensor, sources))
        if sources is None or not recomputable:
            self._add_origin(key, size, number)
        else:
            self._origins[key] = frozenset().union(*map(self.origins, sources))
        weakref.finalize(storage, self._drop, key).atexit = False
        origins = frozenset(self.origin_storages[o] for o in self._origins[key])
        return NewStorage(number, size, recomputable, origins)

    def _is_recomputable(self, tensor: Tensor) -> bool:
        """Whether it is counted and has other origins than itself."""
        number, origins = self.number(tensor), self.origins(tensor)
        return number >= 0 and number not in {self.origin_storages[o] for o in origins}

    def _add_origin(self, key: int, size: int, number: int) -> None:
        self._origins[key] = frozenset([len(self.origin_sizes)])
        self.origin_sizes.append(size)
        self.origin_storages.append(number)

    def _drop(self, key: int) -> None:
        del self._sizes[key]
        self._origins.pop(key, None)
        self.tally.forget(key)
        number = self._numbers.pop(key)
        if self._overwrites is not None and number == self._overwrites[1] and self._take_place_of(number):
            return
        self.log.append(Freed(number))

    def _take_place_of(self, number: int) -> bool:
        """If storage `number` is freed right after the last operation, that operation writes its result there: one storage."""
        assert self._overwrites is not None
        at, _, key = self._overwrites
        self._overwrites = None
        op = self.log[at]
        if not isinstance(op, Op) or any(not isinstance(entry, Freed) for entry in self.log[at + 1 :]):
            return False
        if key not in self._numbers or self._numbers[key] != op.made[0].number:
            return False
        self._numbers[key] = number
        self.log[at] = Op(op.fused, op.reads, ())
        return True

    def _log_workspace(
        self, reads: tuple[int, ...], new: list[NewStorage | None], steps: tuple[WorkspaceStep, ...]
    ) -> None:
        """Log an operation's own order: its workspaces and its results."""
        workspaces: dict[str, int] = {}
        unmade = {i: made for i, made in enumerate(new) if made is not None}
        self.log.append(Op(False, reads, ()))
        for key, size in steps:
            if isinstance(key, int):
                if (made := unmade.pop(key, None)) is not None:
                    self.log.append(Op(False, reads, (made,)))
            elif key == MARK:
                self.log.append(Mark(size))
            elif size:
                workspaces[key] = self._count
                self._count += 1
                new_storage = NewStorage(workspaces[key], self._rounded(size), False, frozenset())
                self.log.append(Op(False, reads, (new_storage,)))
            else:
                self.log.append(Freed(workspaces.pop(key)))
        if unmade:
            self.log.append(Op(False, reads, tuple(unmade.values())))
        self.log += [Freed(n) for n in workspaces.values()]
        self.log.append(Op(False, reads, ()))  # what it reads is held until it returns

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block


def _padded(tensor: Tensor) -> int:
    """Bytes of a tensor whose long strides are multiples of 128 bytes, as Inductor lays out its own results (`_pad_strides`)."""
    unit = max(1, inductor_config.padding_alignment_bytes // tensor.element_size())
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride > inductor_config.padding_stride_threshold:
            length = -(-length // unit) * unit
        length *= size
    return max(length * tensor.element_size(), tensor.untyped_storage().nbytes())


def _may_overwrite(name: str, sources: list[Tensor]) -> bool:
    """Whether a result takes the place of the first source if nothing else holds that.

    The autograd engine sums the gradients of a tensor that is read twice in place, but not those of tensor subclasses, nor of
    views, which hold their base. An addition inside a Python function is an ordinary one.
    """
    if name == "aten.add.Tensor" and len(sources) == 2 and sources[0].shape == sources[1].shape:
        node = torch._C._current_autograd_node()
        if sources[0]._is_view():
            return False
        return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)
    return name in _IN_PLACE


def _is_fused(func: Any, packet: Any) -> bool:
    """Whether Inductor fuses it with what it reads: all of aten but GEMMs, attention, sorts and scatters."""
    return func.namespace in ("aten", "prims") and packet not in flop_registry and packet.__name__ not in _KERNELS


def _reduces(result: Tensor, sources: list[Tensor]) -> bool:
    return 4 * result.numel() * result.element_size() < sum(s.numel() * s.element_size() for s in sources)
