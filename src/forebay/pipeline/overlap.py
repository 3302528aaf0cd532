"""Communication hidden without pipeline stages: the forward of one microbatch runs with the backward of the one before.

In: a model as a list of layers, with what comes before and after them, and the microbatches of a step. Out: their losses, and
gradients in the parameters' `.grad`, bitwise those of plain autograd, one microbatch after the other.

    F0 | F1 with B0 | F2 with B1 | ... | F(M-1) with B(M-2) | B(M-1)

An MoE layer has four steps, two computations with a transfer behind each, and backward the same in reverse:

    forward    front, dispatch >    experts, combine >       front: attention, norm, router, shared experts
    backward   < combine', experts'    < dispatch', front'   (x' is the gradient of x)

A dense layer is one computation. A paired phase lets both microbatches take one computation each in turn, the forward first;
docs/overlap.md draws it. Every transfer is enqueued right behind the computation that made its input, and waited for right
before the one that needs its result: the other microbatch's computation lies in between. The order follows from the list of
layers alone, so it is the same on every rank, and no rank waits for a transfer that another one has put behind.

The loss is part of the forward's last step and its gradient too: of the head nothing is kept but the gradient of its input, and
by then the other microbatch's activations are gone.

`OverlappedStep` owns the communication stream. A microbatch's tensors hang on the frame of `run` and on the autograd graphs of
its stages, so an exception leaves nothing behind. `forebay.pipeline.execution` says how memory passes between the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.moe.dispatch.exchange import Exchange
from forebay.pipeline.execution import ExecutionContext, Pending, Segment, Wire, cut

Routers = Callable[[list[tuple[Tensor, Tensor]]], Tensor]


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


class OverlappedStep:
    """Runs the microbatches of a step, each one's transfers behind another's computations.

    Args:
        layers: in the order of the forward; at least one.
        prologue: microbatch -> x [B, S, H], such as the embedding.
        epilogue: (x, microbatch) -> scalar loss: final norm, head and loss.
        device: where all of it runs.
        routers: the (logits [T, E], ids [T, K]) of all MoE layers of a microbatch -> a scalar that is added to its loss.
            Called once a microbatch, in their order, before the epilogue.
        early_release: drop tensors at stage boundaries after their last reader. False keeps them until their layer's
            backward is over, to measure what that is worth.

    Raises:
        ValueError: no layers.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        prologue: Callable[[Any], Tensor],
        epilogue: Callable[[Tensor, Any], Tensor],
        device: torch.device,
        *,
        routers: Routers | None = None,
        early_release: bool = True,
    ):
        if not layers:
            raise ValueError("there are no layers to run")
        self.layers, self.prologue, self.epilogue, self.routers = list(layers), prologue, epilogue, routers
        self.early_release = early_release
        self._context = ExecutionContext(device)

    def run(
        self,
        microbatches: Sequence[Any],
        *,
        loss_scale: float = 1.0,
        after_backward: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches; gradients are added to what `.grad` holds, in their order.

        Args:
            microbatches: whatever prologue and epilogue take; not looked into.
            loss_scale: gradients are those of this times the loss.
            after_backward: called with i when the backward of microbatch i has been enqueued, before any other begins.

        Returns:
            [M], the epilogue's losses, without the scale and without what `routers` adds.

        Raises:
            ValueError: no microbatches.
            RuntimeError: gradients are disabled.
        """
        if not microbatches:
            raise ValueError("there are no microbatches to run")
        if not torch.is_grad_enabled():
            raise RuntimeError("a step computes gradients: run it outside of torch.no_grad")
        self._context.enter()
        losses = []
        backward: Iterator[None] = iter(())
        try:
            for i, microbatch in enumerate(microbatches):
                passes = _Microbatch(self, self._context, microbatch)
                for _ in passes.forward(loss_scale):
                    next(backward, None)
                losses.append(passes.loss)
                backward = passes.backward(_bound(after_backward, i))
            for _ in backward:
                pass
        finally:
            self._context.leave()
        return torch.stack(losses)


def _bound(call: Callable[[int], None] | None, i: int) -> Callable[[], None]:
    return (lambda: call(i)) if call is not None else (lambda: None)


class _Microbatch:
    """One microbatch on its way through the layers and back.

    Both ways are generators that stop after each computation with the transfer behind it enqueued. They have the same number of
    stops: when the forward of one has made its last, the backward of the other is complete, and only the head is left.
    """

    loss: Tensor

    def __init__(self, step: OverlappedStep, context: ExecutionContext, microbatch: Any):
        self._step, self._context, self._microbatch = step, context, microbatch
        self._layers: list[_DensePass | _MoePass] = []

    def forward(self, loss_scale: float) -> Iterator[None]:
        """From the prologue to the loss and the gradient of its input, whose transfer is enqueued."""
        self._prologue, x = cut(lambda: self._step.prologue(self._microbatch))
        output = Pending(x)
        del x
        for layer in self._step.layers:
            self._layers.append(self._pass(layer))
            yield from self._layers[-1].forward(output)
            output = self._layers[-1].output
        self._router_gradients(loss_scale)
        self._layers[-1].begin_backward(self._epilogue(output, loss_scale))
        self._microbatch = None

    def backward(self, done: Callable[[], None]) -> Iterator[None]:
        """From the last layer to the prologue; `done` is called behind it, before the last stop."""
        while True:
            layer = self._layers.pop()
            yield from layer.backward()
            if not self._layers:
                break
            self._layers[-1].begin_backward(layer.gradient.pop())
            del layer
            yield
        self._prologue.backward([layer.gradient.pop()])
        del layer, self._prologue
        done()
        yield

    def _pass(self, layer: Layer) -> _DensePass | _MoePass:
        if layer.exchange is None:
            return _DensePass(layer)
        wire = Wire(layer.exchange, self._context)
        return _MoePass(layer, wire, self._step.routers is not None, self._step.early_release)

    def _epilogue(self, x: Pending, loss_scale: float) -> Tensor:
        """The gradient of x; nothing else of the head survives this call."""
        segment, (self.loss,) = cut(lambda t: self._step.epilogue(t, self._microbatch), *x.take())
        (dx,) = segment.backward([torch.full_like(self.loss, loss_scale)])
        return dx

    def _router_gradients(self, loss_scale: float) -> None:
        """Give each MoE layer the gradient of its logits."""
        if self._step.routers is None:
            return
        layers = [layer for layer in self._layers if isinstance(layer, _MoePass)]
        if not layers:
            return
        said = [layer.router.pop() for layer in layers]
        logits = [t.requires_grad_() for t, _ in said]
        auxiliary = self._step.routers(said)
        if auxiliary.requires_grad:
            auxiliary.backward(torch.full_like(auxiliary, loss_scale))
            for layer, t in zip(layers, logits, strict=True):
                layer.d_logits = t.grad


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

    def __init__(self, layer: Layer, wire: Wire, keeps_router: bool, early_release: bool):
        assert layer.experts is not None, "a layer with an exchange has experts"
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
