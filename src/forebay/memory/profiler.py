"""Profiles the tensors that autograd saves for backward: bytes by region and by operation, weights apart from activations.

Input: a model and a step that returns a loss with its graph. Output: a `SavedProfile`, figures that keep no tensor alive. A
storage is counted once and whole, for the region and operation that saved it first: saving a view keeps the whole storage.
Storages that are gone at the step's end (a branch that does not lead to the loss) are not counted. On a GPU the total is what
the allocator holds for the graph, with three exceptions: storages that existed before, such as the batch, are counted; a loss
or logits that the caller keeps are not; nor are tensors that a custom function keeps as plain attributes.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forebay.policy import format_bytes

_BLOCK = 512  # bytes; the CUDA allocator's rounding
_NOT_IN_GRAPH = "(not in the loss's graph)"
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
    """All storages that one forward pass saved.

    Attributes:
        allocator_bytes: by how much the CUDA allocator's count rose in the step, whose loss is held. The first step also
            allocates workspaces. None on a CPU.
    """

    storages: tuple[SavedStorage, ...]
    allocator_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        """Bytes of saved storages that are not weights."""
        return sum(s.nbytes for s in self.storages if not s.is_weight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that were saved; the model holds them anyway."""
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
            lines.append(f"allocated in the step: {format_bytes(self.allocator_bytes)}")
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


class StorageNumbers:
    """Numbers storages in the order in which they are met. Keeps their identities (weak references), not their memory.

    Attributes:
        refs: the storages, by number.
        nbytes: their sizes, as the allocator rounds them.
    """

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.nbytes: list[int] = []
        self._numbers: dict[int, int] = {}  # address of the storage as an object -> number

    def number(self, tensor: Tensor) -> int:
        """The number of a plain tensor's storage."""
        ref = StorageWeakRef(tensor.untyped_storage())
        if ref.cdata not in self._numbers:
            self._numbers[ref.cdata] = len(self.refs)
            self.refs.append(ref)
            nbytes = tensor.untyped_storage().nbytes()
            self.nbytes.append(-(-nbytes // _BLOCK) * _BLOCK if tensor.is_cuda else nbytes)
        return self._numbers[ref.cdata]


class WeightStorages:
    """The storages of a model's parameters and buffers, by identity, which they keep while FSDP2 frees and refills them."""

    def __init__(self, model: nn.Module):
        self._storages: dict[int, StorageWeakRef] = {}
        self.add(model)

    def add(self, module: nn.Module) -> None:
        """Add those of `module` as they are now: FSDP2 swaps parameters for unsharded ones in a forward."""
        for tensor in (*module.parameters(), *module.buffers()):
            for part in plain_parts(tensor):
                ref = StorageWeakRef(part.untyped_storage())
                self._storages[ref.cdata] = ref

    def __contains__(self, storage: StorageWeakRef) -> bool:
        return storage.cdata in self._storages


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


class _ProfiledTensor(NamedTuple):
    """The graph owns this in place of a saved tensor while it is profiled."""

    numbers: tuple[int, ...]  # of its storages
    alias: Tensor


class Profiler:
    """Collects what one `run` saves; `region` names the region of what is saved inside it.

    Args:
        model: the module whose parameters are weights and whose modules are regions.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules = dict(model.named_modules())
        self._path = [""]
        self._storages = StorageNumbers()
        self._first: list[tuple[str, tuple[int, ...], str]] = []  # region, shape and dtype, by storage number
        self._weights = WeightStorages(model)
        self._operations: dict[int, str] = {}
        self._asked_operation: str | None = None

    @contextmanager
    def region(self, path: str) -> Iterator[None]:
        """Within, what is saved counts for `path`: a module's, or any other name."""
        self._enter(path)
        try:
            yield
        finally:
            self._path.pop()

    def _enter(self, path: str) -> None:
        if path in self._modules:
            self._weights.add(self._modules[path])
        self._path.append(path)

    def run(self, step: Callable[[], Any], regions: Iterable[str] | None = None) -> SavedProfile:
        """Profile one call of `step`.

        Args:
            step: runs a forward pass and returns its loss; no backward.
            regions: paths of modules to attribute to, the innermost that is running. Default: every module.

        Raises:
            ValueError: `step` returned no loss with a graph, or a region is not a module of the model.
            NotImplementedError: a sparse tensor was saved, whose bytes are not known here.
        """
        paths = list(self._modules) if regions is None else list(regions)
        unknown = [p for p in paths if p not in self._modules]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no module of {type(self._model).__name__}")
        before = _allocated()
        with ExitStack() as hooks:
            for path in paths:
                self._enter_on_forward(path, hooks)
            with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
                loss = step()
        after = _allocated()
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise ValueError(
                "the step to profile must return its loss, a tensor with a graph, without running backward"
            )
        self._name_operations(loss.grad_fn)
        return SavedProfile(tuple(self._alive()), after - before if loss.is_cuda else None)

    def _enter_on_forward(self, path: str, hooks: ExitStack) -> None:
        # While torch.compile traces a module these do nothing: what compiled code saves counts for its caller.
        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._enter(path)

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._path.pop()

        module = self._modules[path]
        hooks.callback(module.register_forward_pre_hook(before).remove)
        hooks.callback(module.register_forward_hook(after, always_call=True).remove)

    def _alive(self) -> Iterator[SavedStorage]:
        storages = zip(self._storages.refs, self._storages.nbytes, self._first, strict=True)
        for number, (ref, nbytes, (region, shape, dtype)) in enumerate(storages):
            if not ref.expired():
                operation = self._operations.get(number, _NOT_IN_GRAPH)
                yield SavedStorage(region, operation, shape, dtype, nbytes, ref in self._weights)

    def _pack(self, tensor: Tensor) -> _ProfiledTensor:
        # Trap: never the tensor itself. A node that owns its own output is a cycle that the garbage collector does not see.
        return _ProfiledTensor(tuple(self._number(part) for part in plain_parts(tensor)), tensor.detach())

    def _number(self, tensor: Tensor) -> int:
        number = self._storages.number(tensor)
        if number == len(self._first):
            self._first.append((self._path[-1], tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        return number

    def _unpack(self, packed: _ProfiledTensor) -> Tensor:
        if self._asked_operation is not None:
            for number in packed.numbers:
                self._operations.setdefault(number, self._asked_operation)
        return packed.alias

    def _name_operations(self, root: Any) -> None:
        """Ask each node of the graph for what it saved, which calls ``unpack``. This works for compiled code and custom functions
        too. Nodes are asked in the order in which they were made: if two saved one storage, the earlier is named."""
        seen, stack = {root}, [root]
        while stack:
            for following, _ in stack.pop().next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        for node in sorted(seen, key=lambda node: node._sequence_nr()):
            self._asked_operation = _operation(node.name())
            for name in dir(node):
                if name == "saved_tensors" or name.startswith("_saved_"):
                    # A node refuses to return a tensor that was modified since.
                    with suppress(RuntimeError):
                        getattr(node, name)
        self._asked_operation = None


def _operation(node: str) -> str:
    """``Mm`` of ``MmBackward0``, ``forebay::experts`` of the name that torch.library gives its autograd function."""
    name = node.removesuffix("Backward0").removesuffix("Backward")
    return _CUSTOM_OP.sub(r"\1::\2", name)


def _allocated() -> int:
    """Bytes on all GPUs: the current device need not be the model's."""
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
