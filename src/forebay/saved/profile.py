"""What autograd saves: bytes by region and by operation, weights told from activations.

In: a model and a step that returns a loss with its graph. Out: a `SavedProfile`, plain figures that keep no tensor
alive. A storage is counted once, whole, under the region and operation that saved it first: saving a view keeps the
whole storage. On a GPU the total is what the allocator holds for the graph (it rounds each block up to 512 bytes, as is
done here), except for storages that somebody else would hold anyway, such as the batch; those are counted too.

How operations are found: ``pack`` numbers each saved tensor; afterwards the graph is walked and every node is asked for
what it saved, which calls ``unpack`` with those numbers. That works for compiled code and custom functions as well.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from forebay.saved.identify import Identity, weight_storages

_BLOCK = 512  # bytes; the CUDA allocator's rounding


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
        lines = [f"saved for backward: {_mib(self.activation_bytes)} of activations ({_mib(self.weight_bytes)} of weights, held anyway)"]
        for title, sums in (("by region", self.by_region), ("by operation", self.by_op)):
            lines += ["", title]
            lines += [f"  {_mib(n):>14}  {100 * n / total:5.1f} %  {name or '(outside)'}" for name, n in sums.items()]
        lines += ["", "largest tensors"]
        lines += [f"  {_mib(s.nbytes):>14}  {s.dtype} {list(s.shape)}  {s.operation}  {s.region}" for s in self.largest()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(
            {
                "activation_bytes": self.activation_bytes,
                "weight_bytes": self.weight_bytes,
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


class _Packed:
    """What the graph owns while it is profiled: the tensor's alias and its number."""

    __slots__ = ("number", "tensor")

    def __init__(self, number: int, tensor: Tensor):
        self.number, self.tensor = number, tensor


class Profiler:
    """Collects while `recording`; `region` names the region for what is saved inside it."""

    def __init__(self, model: nn.Module):
        self._weights = weight_storages([model])
        self._path = [""]
        self._rows: list[tuple[str, tuple[int, ...], str, int, bool]] = []
        self._numbers: dict[tuple[int, int], tuple[Identity, int]] = {}
        self._operations: dict[int, str] = {}
        self._asking: str | None = None

    @contextmanager
    def region(self, path: str) -> Iterator[None]:
        self._path.append(path)
        try:
            yield
        finally:
            self._path.pop()

    def run(self, step: Callable[[], Any]) -> SavedProfile:
        """Profile one call of `step`.

        Raises:
            ValueError: `step` returned nothing with a graph, so there is nothing to walk.
        """
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            loss = step()
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise ValueError("the step to profile must return its loss, a tensor with a graph, without running backward")
        self._name_operations(loss.grad_fn)
        return SavedProfile(
            tuple(
                SavedStorage(region, self._operations.get(i, "(released)"), shape, dtype, nbytes, weight)
                for i, (region, shape, dtype, nbytes, weight) in enumerate(self._rows)
            )
        )

    def _pack(self, tensor: Tensor) -> _Packed:
        identity = Identity(tensor)
        known = self._numbers.get(identity.key)
        if known is None or known[0].expired:
            storage = tensor.untyped_storage()
            known = identity, len(self._rows)
            self._numbers[identity.key] = known
            nbytes = -(-storage.nbytes() // _BLOCK) * _BLOCK if tensor.is_cuda else storage.nbytes()
            weight = storage.data_ptr() in self._weights and nbytes > 0
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._rows.append((self._path[-1], tuple(tensor.shape), dtype, nbytes, weight))
        return _Packed(known[1], tensor.detach())

    def _unpack(self, packed: _Packed) -> Tensor:
        if self._asking is not None:
            self._operations.setdefault(packed.number, self._asking)
        return packed.tensor

    def _name_operations(self, root: Any) -> None:
        """Ask every node of the graph for what it saved. Nodes saved their inputs in forward order, so the walk goes from
        the first node to the last: of two nodes that saved one storage the earlier one is named."""
        order, seen, stack = [], {root}, [root]
        while stack:
            node = stack.pop()
            order.append(node)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        for node in reversed(order):
            self._asking = node.name().removesuffix("Backward0").removesuffix("Backward")
            for name in dir(node):
                if name == "saved_tensors" or name.startswith("_saved_"):
                    # A node may hold a tensor that was written to since, which it refuses to give out.
                    with ExitStack() as quiet:
                        quiet.push(lambda kind, *_: kind is not None and issubclass(kind, RuntimeError))
                        getattr(node, name)
        self._asking = None


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

    def before(*_: Any) -> None:
        stack = ExitStack()
        stack.enter_context(profiler.region(path))
        running.append(stack)

    def after(*_: Any) -> None:
        running.pop().close()

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after, always_call=True).remove)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.2f} MiB"
