"""What autograd saves: bytes by region and by operation, weights told from activations.

In: a model and a step that returns a loss with its graph. Out: a `SavedProfile`, plain figures that keep no tensor
alive. A storage is counted once, whole, under the region and operation that saved it first: saving a view keeps the
whole storage, and writing to a tensor between two saves makes no second one. What was saved in the step and let go of
before its end (a branch that does not lead to the loss) is not counted.

On a GPU the total is what the allocator holds for the graph (it rounds each block up to 512 bytes, as is done here).
Three kinds of memory tell the two apart: storages that somebody else holds anyway, such as the batch, are counted here
and were there before; a loss or logits kept by the caller are new but need not be saved; and tensors that a custom
function keeps as plain attributes are saved behind autograd's back.

How operations are found: ``pack`` numbers each saved tensor; afterwards the graph is walked and every node is asked for
what it saved, which calls ``unpack`` with those numbers. That works for compiled code and custom functions as well.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forebay.policy import format_bytes

_BLOCK = 512  # bytes; the CUDA allocator's rounding
_ELSEWHERE = "(not in the loss's graph)"
_CUSTOM_OP = re.compile(r"GeneratedBackwardFor_([^_]+)_(.+)_default")  # torch.library's name for its autograd function


@dataclass(frozen=True)
class SavedStorage:
    """One storage: where it was saved first, by which operation, the first view's shape, and its bytes."""

    region: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_weight: bool


@dataclass(frozen=True)
class SavedProfile:
    """All storages that one forward pass saved. Bytes."""

    storages: tuple[SavedStorage, ...]
    allocator_bytes: int | None = None
    """CUDA: by how much the allocator's count rose over the step, its loss held; a first step makes workspaces too."""

    @property
    def activation_bytes(self) -> int:
        """Saved bytes that are no weights."""
        return sum(s.nbytes for s in self.storages if not s.is_weight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that were saved; they cost nothing, as the model holds them anyway."""
        return sum(s.nbytes for s in self.storages if s.is_weight)

    @property
    def by_region(self) -> dict[str, int]:
        """Activation bytes by module path, largest first; "" is outside of every region."""
        return self._sums(lambda s: s.region)

    @property
    def by_op(self) -> dict[str, int]:
        """Activation bytes by autograd node, largest first."""
        return self._sums(lambda s: s.operation)

    def largest(self, count: int = 10) -> list[SavedStorage]:
        """The largest activations."""
        return sorted((s for s in self.storages if not s.is_weight), key=lambda s: -s.nbytes)[:count]

    def table(self) -> str:
        """Plain text: by region, by operation, and the largest tensors."""
        total = max(self.activation_bytes, 1)
        lines = [
            f"saved for backward: {format_bytes(self.activation_bytes)} of activations "
            f"({format_bytes(self.weight_bytes)} of weights, held anyway)"
        ]
        if self.allocator_bytes is not None:
            lines.append(f"the allocator gave out {format_bytes(self.allocator_bytes)}")
        for title, sums in (("by region", self.by_region), ("by operation", self.by_op)):
            lines += ["", title]
            lines += [
                f"  {format_bytes(n):>12}  {100 * n / total:5.1f} %  {name or '(outside)'}" for name, n in sums.items()
            ]
        lines += ["", "largest tensors"]
        lines += [
            f"  {format_bytes(s.nbytes):>12}  {s.dtype} {list(s.shape)}  {s.operation}  {s.region or '(outside)'}"
            for s in self.largest()
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(
            {
                "activation_bytes": self.activation_bytes,
                "weight_bytes": self.weight_bytes,
                "allocator_bytes": self.allocator_bytes,
                "by_region": self.by_region,
                "by_operation": self.by_op,
                "largest": [vars(s) for s in self.largest()],
            },
            indent=1,
        )

    def _sums(self, key: Callable[[SavedStorage], str]) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for storage in self.storages:
            if not storage.is_weight:
                sums[key(storage)] += storage.nbytes
        return dict(sums.most_common())


class _ProfiledTensor:
    """What the graph owns while it is profiled: the tensor's alias and the numbers of its storages."""

    __slots__ = ("numbers", "tensor")

    def __init__(self, numbers: tuple[int, ...], tensor: Tensor):
        self.numbers, self.tensor = numbers, tensor


@dataclass(frozen=True, eq=False)
class _Row:
    """A storage met by ``pack``. The weak reference keeps its identity from being used again, not its memory."""

    storage: StorageWeakRef
    region: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class WeightStorages:
    """The storages of a model's parameters and buffers. Known by identity, which they keep while FSDP2 frees and refills them."""

    def __init__(self, model: nn.Module):
        self._storages: dict[int, StorageWeakRef] = {}
        self.add(model)

    def add(self, module: nn.Module) -> None:
        """Those of `module` as they are now."""
        for tensor in (*module.parameters(), *module.buffers()):
            for part in plain_parts(tensor):
                weak = StorageWeakRef(part.untyped_storage())
                self._storages[weak.cdata] = weak

    def __contains__(self, storage: StorageWeakRef) -> bool:
        return storage.cdata in self._storages


class Profiler:
    """Collects during one `run`; `region` names the region for what is saved inside it."""

    def __init__(self, model: nn.Module):
        self._modules = dict(model.named_modules())
        self._path = [""]
        self._rows: list[_Row] = []
        self._numbers: dict[int, int] = {}  # a storage's address as an object -> its row
        self._weights = WeightStorages(model)
        self._operations: dict[int, str] = {}
        self._asking: str | None = None

    @contextmanager
    def region(self, path: str) -> Iterator[None]:
        """Within, what is saved counts for `path`, a module's or any other name."""
        if path in self._modules:  # FSDP2 swaps a module's parameters for gathered ones in its forward
            self._weights.add(self._modules[path])
        self._path.append(path)
        try:
            yield
        finally:
            self._path.pop()

    def run(self, step: Callable[[], Any]) -> SavedProfile:
        """Profile one call of `step`.

        Raises:
            ValueError: `step` returned nothing with a graph, so there is nothing to walk.
            NotImplementedError: a sparse tensor was saved, whose bytes are not known here.
        """
        before = _allocated()
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            loss = step()
        after = _allocated()
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise ValueError(
                "the step to profile must return its loss, a tensor with a graph, without running backward"
            )
        self._name_operations(loss.grad_fn)
        return SavedProfile(
            tuple(
                SavedStorage(
                    row.region,
                    self._operations.get(number, _ELSEWHERE),
                    row.shape,
                    row.dtype,
                    row.nbytes,
                    row.storage in self._weights,
                )
                for number, row in enumerate(self._rows)
                if not row.storage.expired()
            ),
            after - before if loss.is_cuda else None,
        )

    def _pack(self, tensor: Tensor) -> _ProfiledTensor:
        # A detached alias and never the tensor itself: a node that owns its own output is a cycle no collector breaks.
        return _ProfiledTensor(tuple(self._number(part) for part in plain_parts(tensor)), tensor.detach())

    def _number(self, tensor: Tensor) -> int:
        weak = StorageWeakRef(tensor.untyped_storage())
        if weak.cdata not in self._numbers:
            self._numbers[weak.cdata] = len(self._rows)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._rows.append(_Row(weak, self._path[-1], tuple(tensor.shape), dtype, allocated_bytes(tensor)))
        return self._numbers[weak.cdata]

    def _unpack(self, packed: _ProfiledTensor) -> Tensor:
        if self._asking is not None:
            for number in packed.numbers:
                self._operations.setdefault(number, self._asking)
        return packed.tensor

    def _name_operations(self, root: Any) -> None:
        """Ask every node of the graph for what it saved, in the order in which the nodes were made: of two that saved
        one storage, the earlier is named."""
        seen, stack = {root}, [root]
        while stack:
            for following, _ in stack.pop().next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        for node in sorted(seen, key=lambda node: node._sequence_nr()):
            self._asking = _operation(node.name())
            for name in dir(node):
                if name == "saved_tensors" or name.startswith("_saved_"):
                    # A node may hold a tensor that was written to since, which it refuses to give out.
                    with ExitStack() as quiet:
                        quiet.push(lambda kind, *_: kind is not None and issubclass(kind, RuntimeError))
                        getattr(node, name)
        self._asking = None


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's bytes: itself, or those inside a wrapper such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # torch 2.13's DTensor names its mesh too
                yield from plain_parts(part)
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        raise NotImplementedError(f"a saved tensor of layout {tensor.layout}: only strided ones can be profiled")


def allocated_bytes(tensor: Tensor) -> int:
    """Of a plain tensor's whole storage, as the allocator has it."""
    nbytes = tensor.untyped_storage().nbytes()
    return -(-nbytes // _BLOCK) * _BLOCK if tensor.is_cuda else nbytes


def _operation(node: str) -> str:
    """``Mm`` of ``MmBackward0``, ``forebay::experts`` of the name that torch.library gives its autograd function."""
    name = node.removesuffix("Backward0").removesuffix("Backward")
    return _CUSTOM_OP.sub(r"\1::\2", name)


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def profile_model(
    model: nn.Module,
    step: Callable[[], Any],
    regions: Iterable[str] | None = None,
    profiler: Profiler | None = None,
) -> SavedProfile:
    """Saved tensors of one call of `step`.

    Args:
        model: the module whose parameters are weights and whose modules are regions.
        step: runs a forward pass and returns its loss; no backward.
        regions: module paths to attribute to, the innermost that is running. Default: every module.
        profiler: one whose `region` the caller enters by other means as well.

    Raises:
        ValueError: `step` returned no loss with a graph, or a region is no module of the model.
    """
    profiler = profiler or Profiler(model)
    modules = dict(model.named_modules())
    paths = list(modules) if regions is None else list(regions)
    unknown = [p for p in paths if p not in modules]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no module of {type(model).__name__}")
    with ExitStack() as hooks:
        for path in paths:
            _enter_on_forward(modules[path], path, profiler, hooks)
        return profiler.run(step)


def _enter_on_forward(module: nn.Module, path: str, profiler: Profiler, hooks: ExitStack) -> None:
    running: list[ExitStack] = []

    # While torch.compile traces a module these do nothing: what compiled code saves counts for whoever calls it.
    def before(*_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = ExitStack()
        stack.enter_context(profiler.region(path))
        running.append(stack)

    def after(*_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running.pop().close()

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after, always_call=True).remove)
