"""Communication hidden without pipeline stages: the forward of one microbatch runs with the backward of the one before.

In: a model as a list of layers, with what comes before and after them, and the microbatches of a step. Out: their losses, and
gradients in the parameters' `.grad`, bitwise those of plain autograd, one microbatch after the other.

    F0 | F1 with B0 | F2 with B1 | ... | F(M-1) with B(M-2) | B(M-1)

`forebay.pipeline.passes` says what a layer's computations and transfers are, `forebay.pipeline.turns` in what order two
microbatches take them; docs/overlap.md draws it. Every transfer is enqueued right behind the computation that made its input,
and waited for right before the one that needs its result: another computation lies in between. The order follows from the list
of layers alone, so it is the same on every rank, and no rank waits for a transfer that another one has put behind.

The loss is part of the forward's last step and its gradient too: of the head nothing is kept but the gradient of its input, and
by then the other microbatch's activations are gone.

`OverlappedStep` owns the communication stream. A microbatch's tensors hang on the frame of `run` and on the autograd graphs of
its stages, so an exception leaves nothing behind. `forebay.pipeline.execution` says how memory passes between the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.flags import Flags
from forebay.moe.weight_gradients import WeightGradients
from forebay.pipeline.execution import ExecutionContext, Pending, cut
from forebay.pipeline.passes import Layer, Said, StagePass, has_experts, take_turns
from forebay.pipeline.turns import turns

Routers = Callable[[Said], Tensor]


class OverlappedStep:
    """Runs the microbatches of a step, each one's transfers behind another's computations.

    Args:
        layers: in the order of the forward; at least one.
        prologue: microbatch -> x [B, S, H], such as the embedding.
        epilogue: (x, microbatch) -> scalar loss: final norm, head and loss.
        device: where all of it runs.
        routers: the (logits [T, E], ids [T, K]) of all MoE layers of a microbatch -> a scalar that is added to its loss.
            Called once a microbatch, in their order, before the epilogue.
        weights: the store that the layers' experts were given, if they were; see `forebay.pipeline.passes.StagePass`.
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
        weights: WeightGradients | None = None,
        early_release: bool = True,
    ):
        if not layers:
            raise ValueError("there are no layers to run")
        self.layers, self.prologue, self.epilogue, self.routers = list(layers), prologue, epilogue, routers
        self.early_release, self.weights = early_release, weights
        self._context = ExecutionContext(device)
        travelling = [has_experts(layer) for layer in self.layers]
        self._order = turns(travelling, travelling[::-1])

    @property
    def flags(self) -> Flags:
        """By which the compute stream waits for transfers in a CUDA graph."""
        return self._context.flags

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
                forward = passes.forward(loss_scale)
                take_turns(self._order, forward, backward)
                for rest in (backward, forward):  # the head comes when the other microbatch is gone
                    for _ in rest:
                        pass
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
    """One microbatch from the prologue to the loss and back.

    When the forward of one and the backward of the other have taken their turns, only the head is left.
    """

    loss: Tensor

    def __init__(self, step: OverlappedStep, context: ExecutionContext, microbatch: Any):
        self._step, self._microbatch = step, microbatch
        self._stage = StagePass(step.layers, context, step.routers is not None, step.early_release, step.weights)

    def forward(self, loss_scale: float) -> Iterator[None]:
        """From the prologue to the loss and the gradient of its input, whose transfer is enqueued."""
        self._prologue, x = cut(lambda: self._step.prologue(self._microbatch))
        entering = Pending(x)
        del x
        yield from self._stage.forward(entering)
        d_logits = self._router_gradients(loss_scale)
        output = self._stage.output
        del self._stage.output
        self._stage.begin_backward(self._epilogue(output, loss_scale), d_logits)
        self._microbatch = None

    def backward(self, done: Callable[[], None]) -> Iterator[None]:
        """From the last layer to the prologue; `done` is called behind it, before the last stop."""
        yield from self._stage.backward()
        self._prologue.backward([self._stage.gradient.pop()])
        del self._prologue
        done()
        yield

    def _epilogue(self, x: Pending, loss_scale: float) -> Tensor:
        """The gradient of x; nothing else of the head survives this call."""
        segment, (self.loss,) = cut(lambda t: self._step.epilogue(t, self._microbatch), *x.take())
        (dx,) = segment.backward([torch.full_like(self.loss, loss_scale)])
        return dx

    def _router_gradients(self, loss_scale: float) -> list[Tensor | None] | None:
        """The gradient of each MoE layer's logits."""
        if self._step.routers is None:
            return None
        said = self._stage.take_said()
        if not said:
            return None
        logits = [t.requires_grad_() for t, _ in said]
        auxiliary = self._step.routers(said)
        if not auxiliary.requires_grad:
            return None
        auxiliary.backward(torch.full_like(auxiliary, loss_scale))
        return [t.grad for t in logits]
