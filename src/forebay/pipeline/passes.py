"""One microbatch in one run of layers: its forward and its backward, cut where its tokens travel.

In: layers, and the hidden states that enter them; later the gradient of those that left. Out: the latter, and the gradient of the
former. `StagePass.forward` and `.backward` are generators that stop after each computation, with the transfer behind it enqueued,
so that whoever drives them can let another microbatch compute meanwhile: `forebay.pipeline.overlap` without pipeline stages,
`forebay.pipeline.runtime` with them.

An MoE layer has four steps, two computations with a transfer behind each, and backward the same in reverse:

    forward    front, dispatch >    experts, combine >                front: attention, norm, router, shared experts
    backward   < combine', experts'    < dispatch', weights, front'   (x' is the gradient of x)

`weights` are the experts' weight gradients, which nobody waits for: they are made while dispatch' travels. A dense layer is one
computation; `forebay.pipeline.turns` counts on both. A microbatch's tensors hang on its pass and on the autograd graphs of its
stages, and on nothing else. `forebay.pipeline.execution` says how memory passes between the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from forebay.moe.dispatch.exchange import Exchange
from forebay.moe.weight_gradients import WeightGradients
from forebay.pipeline.execution import ExecutionContext, Pending, Segment, Wire, cut

Said = list[tuple[Tensor, Tensor]]
"""(logits [T, E], ids [T, K]) of each MoE layer."""


class Layer(Protocol):
    """What the engine runs of a decoder layer: the whole of a dense one, the stages of one with experts.

    Attributes:
        exchange: how tokens travel. None marks a dense layer, of which only `__call__` is used; of others it is not.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H].
    """

    exchange: Exchange | None
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None

    def stage1(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, H] -> residual [T, H], rows [T, H], ids [T, K], weights [T, K], logits [T, E]; T = B * S."""

    def __call__(self, x: Tensor) -> Tensor:
        """x -> x, both [B, S, H]."""


class StagePass:
    """One microbatch on its way through layers and back.

    Args:
        layers: in the order of the forward; at least one.
        context: of the engine.
        keeps_router: hold what the routers said for `take_said`.
        early_release: see `forebay.pipeline.overlap.OverlappedStep`.
        weights: the store that the layers' experts were given, if they were: makes their weight gradients a computation of their
            own.

    Attributes:
        output: after `forward`, the hidden states on their way.
        gradient: after `backward`, [that of the input].
    """

    output: Pending

    def __init__(
        self,
        layers: Sequence[Layer],
        context: ExecutionContext,
        keeps_router: bool,
        early_release: bool,
        weights: WeightGradients | None = None,
    ):
        self._todo, self._weights = list(layers), weights
        self._context, self._keeps_router, self._early_release = context, keeps_router, early_release
        self._layers: list[_DensePass | _MoePass] = []
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Through the layers. Stops after each computation; leaves `output`."""
        todo, self._todo = self._todo, []
        for layer in todo:
            self._layers.append(self._pass(layer))
            yield from self._layers[-1].forward(x)
            x = self._layers[-1].output
            del self._layers[-1].output
        self.output = x

    def take_said(self) -> Said:
        """What the routers said, of the MoE layers in their order; detached, and once."""
        return [layer.router.pop() for layer in self._moe_layers()]

    def begin_backward(self, dy: Tensor, d_logits: Sequence[Tensor | None] | None = None) -> None:
        """Take the gradient of the output, and those of the routers' logits; enqueues the first transfer.

        Args:
            dy: [B, S, H].
            d_logits: one for each of `take_said`; None gives them none.
        """
        if d_logits is not None:
            for layer, gradient in zip(self._moe_layers(), d_logits, strict=True):
                layer.d_logits = gradient
        self._layers[-1].begin_backward(dy)

    def backward(self) -> Iterator[None]:
        """From the last layer to the first; leaves `gradient`. Stops after each computation but the last: that is the caller's,
        who may have more to compute."""
        while True:
            layer = self._layers.pop()
            yield from layer.backward()
            if not self._layers:
                break
            self._layers[-1].begin_backward(layer.gradient.pop())
            del layer
            yield
        self.gradient = layer.gradient

    def _moe_layers(self) -> list[_MoePass]:
        return [layer for layer in self._layers if isinstance(layer, _MoePass)]

    def _pass(self, layer: Layer) -> _DensePass | _MoePass:
        if layer.exchange is None:
            return _DensePass(layer)
        wire = Wire(layer.exchange, self._context)
        return _MoePass(layer, wire, self._keeps_router, self._early_release, self._weights)


class _DensePass:
    """A layer without experts, one microbatch: one computation, no transfer."""

    output: Pending
    _whole: Segment

    def __init__(self, layer: Layer):
        self._layer = layer
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Leaves the layer's `output`."""
        self._whole, y = cut(self._layer, *x.take())
        self.output = Pending(y)
        del y
        yield

    def begin_backward(self, dy: Tensor) -> None:
        """Take the gradient of the output."""
        self._dy = [dy]

    def backward(self) -> Iterator[None]:
        """Leaves the input's `gradient`. The last stop is the caller's: the next layer's transfer comes before it."""
        self.gradient = self._whole.backward([self._dy.pop()])
        yield from ()


class _MoePass:
    """An MoE layer, one microbatch: what its stages leave for each other.

    Stages 2 and 4 keep no tensors of their own but the handle. Of the tensors at the boundaries of 1 and 3 those stay alive that
    autograd saved. From one stop to the next the pass holds only what still has a reader: the residual until it is combined, dy
    (its gradient) until stage 1 goes backward.
    """

    output: Pending
    _travelling: Pending
    _front: Segment
    _experts: Segment

    def __init__(
        self, layer: Layer, wire: Wire, keeps_router: bool, early_release: bool, weights: WeightGradients | None
    ):
        assert layer.experts is not None, "a layer with an exchange has experts"
        self._weights, self._later = weights, list[Callable[[], None]]()
        self._stage1, self._stage3, self._wire = layer.stage1, layer.experts, wire
        self._keeps_router, self._keeps_all = keeps_router, not early_release
        self._kept: list[Tensor | None] = []
        self._residual: list[Tensor] = []
        self._dy: list[Tensor] = []
        self.router: list[tuple[Tensor, Tensor]] = []
        self.d_logits: Tensor | None = None
        self.gradient: list[Tensor] = []

    def forward(self, x: Pending) -> Iterator[None]:
        """Leaves the layer's `output` on its way."""
        self._run_front(*x.take())
        yield
        self._run_experts(*self._travelling.take())
        yield

    def begin_backward(self, dy: Tensor) -> None:
        """Send the gradient of the output, [B, S, H], to where the experts are."""
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        self._dy.append(dy)
        self._travelling = self._wire.combine_backward(dy, self._handle, self._n_rows)

    def backward(self) -> Iterator[None]:
        """Leaves the input's `gradient`. The last stop is the caller's: the next layer's transfer comes before it."""
        self._run_experts_backward(list(self._travelling.take()))
        yield
        while self._later:
            self._later.pop(0)()
        yield
        self._run_front_backward(list(self._travelling.take()))

    def _run_front(self, x: Tensor) -> None:
        self._shape = x.shape
        self._front, (residual, rows, ids, weights, logits) = cut(self._stage1, x)
        self._travelling = self._wire.dispatch(rows, ids, weights)
        self._residual.append(residual)
        if self._keeps_router:
            self.router.append((logits, ids))
        self._keep(residual, rows, weights)

    def _run_experts(self, rows: Tensor, ids: Tensor, weights: Tensor, handle: list[Tensor]) -> None:
        self._handle, self._n_rows = handle, rows.shape[0]
        max_rows = self._wire.max_rows(handle, *ids.shape)
        self._experts, (y_rows,) = cut(self._stage3, rows, ids, weights, max_rows)
        self.output = self._wire.combine(y_rows, self._residual.pop(), handle, self._shape)
        self._keep(rows, weights, y_rows)

    def _run_experts_backward(self, grads: list[Tensor]) -> None:
        self._keep(*grads)
        if self._weights is None or self._weights.pending is not None:  # nothing to leave, or all is left for longer
            d_rows, d_weights = self._experts.backward(grads)
        else:
            with self._weights.collecting() as self._later:
                d_rows, d_weights = self._experts.backward(grads)
        self._travelling = self._wire.dispatch_backward(d_rows, d_weights, self._handle, self._dy[0].shape[0])
        self._keep(d_rows, d_weights)

    def _run_front_backward(self, grads: list[Any]) -> None:
        # The outputs of stage 1 in their order: residual, rows, ids, weights, logits.
        grads[:] = [self._dy.pop(), grads[0], None, grads[1], self.d_logits]
        self._keep(*grads)
        self.d_logits = None
        self.gradient = self._front.backward(grads)
        self._kept.clear()

    def _keep(self, *boundary: Tensor | None) -> None:
        if self._keeps_all:
            self._kept.extend(boundary)


def has_experts(layer: Layer) -> bool:
    """Whether a layer's tokens travel."""
    return layer.exchange is not None


def take_turns(order: Sequence[str], forward: Iterator[None], backward: Iterator[None]) -> None:
    """Let a forward and a backward compute in turn: "F" or "B" for each computation, from `forebay.pipeline.turns`."""
    for whose in order:
        next(forward if whose == "F" else backward, None)
