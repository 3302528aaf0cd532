"""Deferred weight gradients of the experts, with which zero-bubble pipeline schedules fill their idle time.

    store = WeightGradients()
    y = experts(..., deferred=store)
    with store.collecting() as pending:
        y.backward(dy)              # input gradients, and those of routing weights and biases
    for compute in pending:
        compute()                   # gradients of gate_up and down

Input: a `WeightGradients` given to `forebay.moe.experts.experts`. Output: one callable for each experts call whose gate_up or
down is trained. The caller owns the list and a callable owns its operands; dropping a callable frees them, and its gradients
are never computed. A callable is called once. Gradients are bitwise those of experts without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forebay.moe.experts_compute import add_weight_gradient
from forebay.moe.experts_op import GateUpEdge, experts_weight_backward_op, undispatched

Sum = Callable[[], Tensor | None]
"""Returns the sum to which a weight's gradient is added, of the weight's shape; None to let autograd accumulate it."""


def no_sums(weight: Tensor) -> Sum:
    """Let autograd accumulate the gradient of every weight."""
    return lambda: None


class WeightGradients:
    """Decides when experts calls that were given this object compute their weight gradients.

    A backward pass within `collecting` appends one callable for each experts call; any other computes all gradients at once.

    Attributes:
        sums: takes gate_up or down as it was given to an experts call and returns its `Sum`. A deferred gradient is added to a
            wider sum without being stored or rounded (`add_weight_gradient`), and no hook of the parameter runs.
        pending: the list that `collecting` returned, None outside of it.
    """

    def __init__(self) -> None:
        self.sums: Callable[[Tensor], Sum] = no_sums
        self.pending: list[Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[type[WeightGradients], tuple[()]]:
        return WeightGradients, ()  # the weights of a copied model have other sums, and nothing is pending for it

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Backward passes within append to the list, in the order in which they reach the experts.

        Raises:
            RuntimeError: this store is collecting already.
        """
        if self.pending is not None:
            raise RuntimeError("these WeightGradients are collecting already; leave that `with` before the next one")
        pending: list[Callable[[], None]] = []
        self.pending = pending
        try:
            yield pending
        finally:
            self.pending = None


class WeightGradientOperands:
    """Operands of one weight gradient, released when it is computed.

    For T tokens and R rows in bf16, x and dh of gate_up take 2TH + 4RI bytes and dy and act of down take 2TH + 2RI. x is the
    saved tensor and dy the incoming gradient, not copies: changing them before the gradient is computed is an error.

    Args:
        name: of the first operand, for error messages.
        tokens: the first operand of `experts_weight_backward_op`, or a callable that loads it.
        others: the other operands.
    """

    def __init__(self, name: str, tokens: Tensor | Callable[[], Tensor], *others: Any):
        self._name, self._operands = name, (tokens, *others)
        self._version = tokens._version if isinstance(tokens, Tensor) else None

    def __call__(self) -> Tensor:
        gradient: Tensor = undispatched(experts_weight_backward_op, *self._take())
        return gradient

    def of_edge(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of a `GateUpEdge`, whose node computes this one."""
        x, dh, order, offs, *_ = self._take()
        return x, dh, order.view(torch.float32), offs.view(torch.float32)

    def add_to(self, total: Tensor) -> None:
        """Add the gradient to `total`; rounded first, as by autograd, if `total` has 16 bits."""
        if total.dtype.itemsize > 2:
            add_weight_gradient(total, *self._take())
        else:
            with torch.no_grad():
                total.add_(self())

    def _take(self) -> tuple[Any, ...]:
        (tokens, *others), self._operands = self._operands, ()
        if not isinstance(tokens, Tensor):
            return tokens(), *others
        # A leaf's `.grad` may be a view of dy, to which the next microbatch's gradient is added in place.
        if tokens._version != self._version:
            raise RuntimeError(
                f"the {self._name} that came into the experts changed before their weight gradients were made; "
                "write to that memory afterwards, or to a copy"
            )
        return tokens, *others


class WeightEdges:
    """Autograd edges to gate_up and down, separate from the node of the experts.

    Autograd runs every node after one that ran, with no gradient if it received none: the parameter's hooks would run in the
    first part of the backward, and nodes between parameter and experts would free what they saved. So the experts' node has no
    edges to gate_up and down; these have, and they are run on their own. The consequences: `torch.autograd.grad` cannot be asked
    for these gradients, a parameter that several calls of one graph share gets its gradients one by one (a computed weight that
    they share has nodes of its own, which the first call frees: its backward needs `retain_graph=True`), and DDP with
    `find_unused_parameters=True` takes these parameters for unused and raises "Expected to mark a variable ready only once".

    Weights of two leaves have an edge each: autograd adds down's gradient to its sum and frees it before gate_up's exists. Others
    have one together, as they may be views of one parameter, which gets its gradient once. Weights that both have a sum get their
    edges when these are run: a deferred gradient needs none.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, sums: Callable[[Tensor], Sum]):
        self._sums = sums(gate_up), sums(down)
        self._weights: tuple[Tensor, Tensor] | None = None
        self._edges: list[_Edge] = []
        if any(total() is None for total in self._sums):
            self._edges = _edges_to(gate_up, down)
        else:
            self._weights = gate_up, down  # gathered parameters, whose memory FSDP2 frees under any view

    def run(self, gate_up: Callable[[], Tensor] | None, down: Callable[[], Tensor] | None, *, keep_graph: bool) -> None:
        """Give autograd the gradients that the callables return; None for a frozen weight.

        Args:
            keep_graph: the nodes between parameter and experts keep what they saved, as this graph's backward may run again.
        """
        if self._weights is not None:
            with torch.enable_grad():
                self._edges, self._weights = _edges_to(*self._weights), None
        for indices, gradients, root in self._edges:
            given = [(gate_up, down)[index] for index in indices]
            if any(gradient is not None for gradient in given):
                gradients[:] = given
                torch.autograd.backward(root, root.detach(), retain_graph=keep_graph)

    def add_or_run(self, operands: Sequence[WeightGradientOperands | None], *, keep_graph: bool) -> None:
        """Add the gradients of gate_up and down to their sums, down first, and give autograd those without a sum."""
        remaining = list(operands)
        for index in (1, 0):
            weight = remaining[index]
            total = self._sums[index]() if weight is not None else None
            if weight is not None and total is not None:
                weight.add_to(total)
                remaining[index] = None
        if remaining != [None, None]:
            self.run(*remaining, keep_graph=keep_graph)


_Edge = tuple[tuple[int, ...], list[Callable[[], Tensor] | None], Tensor]
"""Which of gate_up and down it leads to, the list from which its node takes their gradients, and its root."""


def _edges_to(gate_up: Tensor, down: Tensor) -> list[_Edge]:
    edges: list[_Edge] = []
    first, second = _leaf_of(gate_up), _leaf_of(down)
    separate = first is not None and second is not None and first is not second
    # down first, as in a whole backward: its operands are free before gate_up's gradient is allocated.
    for indices in ((1,), (0,)) if separate else ((1, 0),):
        gradients: list[Callable[[], Tensor] | None] = []
        # Through an empty output: it holds the parameters' graph, but not their memory, which FSDP2 may free in between.
        root = _WeightEdgesNode.apply(gradients, *((gate_up, down)[index] for index in indices))
        edges.append((indices, gradients, root))
    return edges


def _leaf_of(weight: Tensor) -> Tensor | None:
    """The leaf that `weight` is or is computed from, by nodes of one input each (such as `DTensor.to_local`); None for others."""
    if weight.grad_fn is None:
        return weight
    node = weight.grad_fn
    while len(inputs := [function for function, _ in node.next_functions if function is not None]) == 1:
        (node,) = inputs
    leaf: Tensor | None = node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]
    return leaf


class _WeightEdgesNode(torch.autograd.Function):
    """Computes the gradients within the node.

    `torch.autograd.backward` would hold gradients that are passed to it, and autograd copies a gradient that is held elsewhere
    into `.grad` instead of keeping it.
    """

    @staticmethod
    def forward(ctx, gradients, *weights):
        ctx.gradients = gradients
        return torch.empty(0, device=weights[0].device)

    @staticmethod
    def backward(ctx, _):
        gradients = list(ctx.gradients)
        ctx.gradients.clear()
        return None, *(None if gradient is None else gradient() for gradient in gradients)


class DeferredWeightGradient:
    """Computes the deferred weight gradients of one experts call, once.

    Args:
        keep_graph: of `WeightEdges.run`, as in the backward that left them for later.
    """

    def __init__(self, edges: WeightEdges, operands: Sequence[WeightGradientOperands | None], keep_graph: bool):
        self._waiting: tuple[WeightEdges, Sequence[WeightGradientOperands | None], bool] | None
        self._waiting = edges, operands, keep_graph

    def __call__(self) -> None:
        if self._waiting is None:
            raise RuntimeError("these weight gradients have been made already; each callable is called once")
        (edges, operands, keep_graph), self._waiting = self._waiting, None
        edges.add_or_run(operands, keep_graph=keep_graph)


def gate_up_edge(
    gate_up: Tensor, tokens: int, rows: int, slots_per_token: int, transposed: bool, fused: bool
) -> GateUpEdge:
    """An autograd edge to gate_up whose node computes its gradient, after that of the experts has run.

    One node would return the gradients of gate_up and down together, [E, 2I, H] and [E, H, I]. With two, autograd adds down's to
    its sum and frees it before gate_up's exists, if down is a leaf or its nodes are younger than the edge's; compiled code is one
    node, so the edge is made outside of it. The operands reach this node as the gradients of what is returned here, so nothing
    but the graph holds them.

    Args:
        gate_up: [E, 2I, H], or [E, H, 2I] if `transposed`; requires a gradient.
        tokens, rows: T of the experts' tokens, and R of their rows (T*K, or `max_rows`).
        fused: whether those experts are computed by the kernels for Hopper (`forebay.moe.experts.fuses`).

    Returns:
        For one call of `forebay.moe.experts.experts`.
    """
    x, dh, order, offs = _GateUpGradient.apply(gate_up, tokens, rows, slots_per_token, transposed, fused)
    return GateUpEdge(x, dh, order, offs, fused)


class _GateUpGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, tokens, rows, slots_per_token, transposed, fused):
        ctx.set_materialize_grads(False)
        ctx.arguments = slots_per_token, transposed, fused
        hidden, width = gate_up.shape[1:] if transposed else gate_up.shape[:0:-1]
        shapes = (tokens, hidden), (rows, width), (rows,), (gate_up.shape[0],)
        dtypes = gate_up.dtype, gate_up.dtype, torch.float32, torch.float32
        # One element each; their values are never read.
        return tuple(gate_up.new_empty((), dtype=d).expand(s) for s, d in zip(shapes, dtypes, strict=True))

    @staticmethod
    def backward(ctx, x, dh, order, offs):
        if dh is None:
            return (None,) * 6
        operands = x, dh, order.view(torch.int32), offs.view(torch.int32)
        return undispatched(experts_weight_backward_op, *operands, *ctx.arguments), *(None,) * 5
