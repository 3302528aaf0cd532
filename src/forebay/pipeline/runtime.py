"""Runs a step: a pipeline rank's plan action by action, or the microbatches of a single rank with overlap.

Input: stages, links and a plan (`PipelineRuntime`), or a model as a list of layers (`OverlappedStep`); and the microbatches
of a step. Output: gradients in the parameters' `.grad`, and the losses where the last stage is. `StageBalance` is the
routers' load-balancing loss when layers are on several ranks. The two runners own their communication stream. The state of
a step hangs on the call that runs it, so an exception leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.kernels.flags import Flags
from forebay.moe.wgrad import WeightGradients
from forebay.pipeline.p2p import Links, Message, Packet
from forebay.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OVERLAP,
    RECV_B,
    RECV_F,
    Action,
    PipelinePlan,
    turns,
)
from forebay.pipeline.sublayer import (
    ExecutionContext,
    Layer,
    Pending,
    RouterOutputs,
    Segment,
    StagePass,
    cut,
    has_experts,
    take_turns,
)


class StageBalance:
    """The routers' load-balancing loss where the MoE layers are on several pipeline ranks.

    The loss is that of `forebay.models.router.balance_loss`: E * sum over experts of (share of choices) * (mean probability),
    over the tokens of all layers. Choices have no gradient, so a stage's gradient needs of other stages only how often each
    expert was chosen and the number of tokens. Sums go forward with the hidden states; `finish` turns them into what
    `gradients` needs, which goes back with the gradients.

    Args:
        experts: E, the number of experts of every MoE layer.
        coefficient: factor of the loss in gradients.
        device: device of the sums.

    Attributes:
        scale: a further factor of the loss and its gradients, such as 1 / microbatches; set it before a step.
    """

    def __init__(self, experts: int, coefficient: float, device: torch.device):
        self._experts, self._coefficient, self._device = experts, coefficient, device
        self.scale = 1.0
        self._losses: dict[int, Tensor] = {}

    def like(self) -> tuple[Tensor, Tensor]:
        """Meta tensors like the results of `sums`, [2E + 1], and `finish`, [E + 1], fp32. Counts are exact up to 2^24."""
        return tuple(torch.empty(n, device="meta") for n in (2 * self._experts + 1, self._experts + 1))  # type: ignore[return-value]

    @torch.no_grad()
    def sums(self, router_outputs: RouterOutputs, before: Tensor | None) -> Tensor:
        """[2E + 1]: choices per expert, summed probability per expert, and tokens. `before` is that of earlier layers, added."""
        total = torch.zeros(2 * self._experts + 1, device=self._device) if before is None else before
        for logits, ids in router_outputs:
            chosen = torch.zeros(self._experts, device=self._device)
            choices = (ids >= 0).float()
            chosen.scatter_add_(0, ids.reshape(-1).clamp(min=0).long(), choices.reshape(-1))
            tokens = choices.amax(1, keepdim=True)
            probability = (logits.softmax(-1).float() * tokens).sum(0)
            total = total + torch.cat([chosen, probability, tokens.sum().reshape(1)])
        return total

    def finish(self, sums: Tensor, microbatch: int) -> Tensor:
        """On the last stage: record the loss. Returns [E + 1], choices and tokens, for `gradients`."""
        chosen, probability, rows = sums.split([self._experts, self._experts, 1])
        rows = rows.clamp(min=1)  # without an MoE layer, avoid 0 / 0
        self._losses[microbatch] = torch.sum((chosen / rows) * (probability / rows)) * (self._experts * self.scale)
        return torch.cat([chosen, rows])

    def gradients(self, router_outputs: RouterOutputs, total: Tensor) -> list[Tensor | None]:
        """The gradient of each layer's logits [T, E], in their dtype; None if the coefficient is 0."""
        if self._coefficient == 0:
            return [None] * len(router_outputs)
        chosen, rows = total.split([self._experts, 1])
        factor = self._coefficient * self.scale * self._experts
        per_probability = chosen / rows / rows * factor
        gradients: list[Tensor | None] = []
        for logits, ids in router_outputs:
            leaf = logits.detach().requires_grad_()
            tokens = (ids >= 0).any(1, keepdim=True).float()
            with torch.enable_grad():
                (leaf.softmax(-1).float() * tokens).sum(0).backward(per_probability)
            gradients.append(leaf.grad)
        return gradients

    def take_losses(self) -> Tensor:
        """The sum of the recorded losses times `scale`, a scalar; 0 on ranks without the last stage. Forgets them."""
        losses, self._losses = self._losses, {}
        return torch.stack(list(losses.values())).sum() if losses else torch.zeros((), device=self._device)


@dataclass(frozen=True)
class Stage:
    """A stage as the runtime runs it.

    Attributes:
        layers: at least one.
        prologue: microbatch -> x [B, S, H]; only for the first stage.
        epilogue: (x, microbatch) -> scalar loss; only for the last stage.
        enter: called with the microbatch before each forward, for example to select its masks.
    """

    layers: Sequence[Layer]
    prologue: Callable[[Any], Tensor] | None = None
    epilogue: Callable[[Tensor, Any], Tensor] | None = None
    enter: Callable[[Any], None] = lambda _: None


class Watcher(Protocol):
    """Observes the actions of a runtime, for example to draw them."""

    def began(self, action: Action) -> None:
        """Called before an action, after the wait for what it needs from other ranks."""

    def ended(self, action: Action) -> None:
        """Called when all of the action has been enqueued."""


class PipelineRuntime:
    """Runs the steps of one pipeline rank.

        F            prologue, packet of a neighbor, or previous stage on this rank -> layers -> packet, or loss and its gradient
        B            packet, next stage on this rank, or gradient of the loss -> layers -> packet, or prologue's backward
        I, W         B without the experts' weight gradients; then these
        OVERLAP_F_B  a forward and a backward take turns, so that each one's transfers hide behind the other's computations
        RECV         posts the receive; SEND does nothing, because packets are sent as soon as they are made

    Args:
        stages: this rank's stages by number.
        plan: the plan of all ranks.
        rank: this pipeline rank.
        links: to the neighbors; None if there are none.
        device: where everything runs.
        balance: the load-balancing loss of all stages' routers, or None.
        weights: the store of the experts: I actions defer their weight gradients to W, and a whole backward computes them while
            a transfer is under way.
        idle: called before the compute stream is made to wait for another rank.

    Raises:
        ValueError: `stages` differ from the plan's stages of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        plan: PipelinePlan,
        rank: int,
        links: Links | None,
        device: torch.device,
        *,
        balance: StageBalance | None = None,
        weights: WeightGradients | None = None,
        idle: Callable[[], None] = lambda: None,
    ):
        if tuple(sorted(stages)) != plan.stages(rank):
            raise ValueError(f"rank {rank} has stages {plan.stages(rank)} in this plan, not {tuple(sorted(stages))}")
        self.stages, self.plan, self.rank, self.links, self.device = stages, plan, rank, links, device
        self.balance, self.weights, self.idle = balance, weights, idle
        self.context = ExecutionContext(device)

    def run(
        self, microbatches: Sequence[Any], like: Callable[[Any], Tensor], *, watcher: Watcher | None = None
    ) -> tuple[Tensor | None, list[Action]]:
        """Run one step. Gradients are added to `.grad`.

        Args:
            microbatches: as many as the plan has, the same on all ranks; passed to prologue and epilogue.
            like: microbatch -> meta tensor of the shape and dtype of its hidden states.
            watcher: observes every action.

        Returns:
            [M] losses of the epilogue, or None on ranks without it; and the actions as they ran.

        Raises:
            ValueError: the number of microbatches differs from the plan's.
        """
        if len(microbatches) != self.plan.microbatches:
            raise ValueError(f"the plan is for {self.plan.microbatches} microbatches, not {len(microbatches)}")
        step = _RuntimeStep(self, microbatches, like)
        ran = []
        self.context.enter()
        try:
            for action in self.plan.actions[self.rank]:
                step.receive(action)
                if watcher is not None:
                    watcher.began(action)
                step.perform(action)
                if watcher is not None:
                    watcher.ended(action)
                ran.append(action)
            if self.links is not None:
                self.links.finish()
        except BaseException:
            if self.links is not None:
                self.links.reset()
            raise
        finally:
            self.context.leave()
        losses = torch.stack([step.losses[i] for i in sorted(step.losses)]) if step.losses else None
        return losses, ran


class _RuntimeStep:
    """The state of one step. Dictionaries with pairs as keys are by (stage, microbatch)."""

    def __init__(self, runtime: PipelineRuntime, microbatches: Sequence[Any], like: Callable[[Any], Tensor]):
        self._runtime, self._microbatches, self._like = runtime, microbatches, like
        self._ranks = runtime.plan.ranks
        self._passes: dict[tuple[int, int], StagePass] = {}
        self._prologues: dict[tuple[int, int], Segment] = {}
        self._router_outputs: dict[tuple[int, int], RouterOutputs] = {}
        self._deferred_weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._packets: dict[Message, Packet] = {}  # inputs of this rank's stages, from links, stages here, or the loss
        self.losses: dict[int, Tensor] = {}

    def receive(self, action: Action) -> None:
        """Make the compute stream wait for what an action needs from other ranks."""
        last = len(self._ranks) - 1
        for part in action.parts or (action,):
            if part.kind == FORWARD and part.stage > 0:
                self._receive_from(part.stage - 1, Message("F", part.stage, part.microbatch))
            elif part.kind in (BACKWARD, BACKWARD_INPUT) and part.stage < last:
                self._receive_from(part.stage + 1, Message("B", part.stage, part.microbatch))

    def perform(self, action: Action) -> None:
        """Enqueue all of an action."""
        if action.kind == OVERLAP:
            forward, backward = action.parts
            self._overlap_fwd_bwd(forward, backward)
        elif action.kind == FORWARD:
            _drain(self._forward(action.stage, action.microbatch))
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            with self._deferring_weights(action):
                _drain(self._backward(action.stage, action.microbatch))
        elif action.kind == BACKWARD_WEIGHT:
            for compute in self._deferred_weights.pop((action.stage, action.microbatch), ()):
                compute()
        elif action.kind in (RECV_F, RECV_B):
            self._expect(action)
        # SEND_F and SEND_B were enqueued as soon as their packets were made.

    def _overlap_fwd_bwd(self, forward: Action, backward: Action) -> None:
        ours, other = self._runtime.stages[forward.stage], self._runtime.stages[backward.stage]
        forth = self._forward(forward.stage, forward.microbatch)
        back = self._backward(backward.stage, backward.microbatch)
        next(back)  # the backward's first transfer goes first, so that the forward's first computation hides it
        computing = [has_experts(layer) for layer in ours.layers]
        # The head is a computation too, and as long as several layers.
        computing += [False] if ours.epilogue is not None else []
        order = turns(computing, [has_experts(layer) for layer in reversed(other.layers)])
        last = len(order) - order[::-1].index("F")
        # The forward's output is taken and sent on one computation later.
        take_turns([*order[: last + 1], "F", *order[last + 1 :]], forth, back)
        _drain(forth)
        _drain(back)

    @contextmanager
    def _deferring_weights(self, action: Action) -> Iterator[None]:
        if action.kind == BACKWARD or self._runtime.weights is None:
            yield
            return
        with self._runtime.weights.collecting() as deferred:
            self._deferred_weights[action.stage, action.microbatch] = deferred
            yield

    def _forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops after each computation of a layer."""
        parts, data = self._runtime.stages[stage], self._microbatches[microbatch]
        here = (stage, microbatch)
        parts.enter(data)
        before: Tensor | None = None
        if parts.prologue is not None:
            self._prologues[here], x = cut(partial(parts.prologue, data))
        else:
            x = self._packets.pop(Message("F", stage, microbatch))
            before = x[1] if len(x) > 1 else None
            x = x[:1]
        balance, runtime = self._runtime.balance, self._runtime
        entering = Pending(x)
        del x  # a frame that holds it would keep its memory for the whole forward
        passing = StagePass(parts.layers, runtime.context, balance is not None, runtime.weights)
        self._passes[here] = passing
        yield from passing.forward(entering)
        sums: tuple[Tensor, ...] = ()
        if balance is not None:
            router_outputs = passing.take_router_outputs()
            sums = (balance.sums(router_outputs, before),)
            self._router_outputs[here] = router_outputs
        output = passing.output.take()
        del passing.output
        if not torch.is_grad_enabled():  # no backward follows
            for states in (self._passes, self._prologues, self._router_outputs):
                states.pop(here, None)  # type: ignore[attr-defined]
        if parts.epilogue is None:
            self._hand_on(Message("F", stage + 1, microbatch), (*output, *sums))
            return
        total = (balance.finish(sums[0], microbatch),) if balance is not None else ()
        if not torch.is_grad_enabled():
            self.losses[microbatch] = parts.epilogue(output[0], data)
            return
        self.losses[microbatch], dx = _head(parts.epilogue, Pending(output), data)
        self._packets[Message("B", stage, microbatch)] = (dx, *total)

    def _backward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops when the first transfer is enqueued, and then after each computation of a layer."""
        here = (stage, microbatch)
        dy, *total = self._packets.pop(Message("B", stage, microbatch))
        passing = self._passes.pop(here)
        d_logits = None
        if self._runtime.balance is not None:
            d_logits = self._runtime.balance.gradients(self._router_outputs.pop(here), total[0])
        passing.begin_backward(dy, d_logits)
        del dy
        yield
        yield from passing.backward()
        dx = passing.gradient.pop()
        del passing
        prologue = self._prologues.pop(here, None)
        if prologue is not None:
            prologue.backward([dx])
        else:
            self._hand_on(Message("B", stage - 1, microbatch), (dx, *total))
        yield

    def _expect(self, action: Action) -> None:
        backward = action.kind == RECV_B
        message = Message("B" if backward else "F", action.stage, action.microbatch)
        source = self._ranks[action.stage + 1 if backward else action.stage - 1]
        like: list[Tensor] = [self._like(self._microbatches[action.microbatch])]
        if self._runtime.balance is not None:
            like.append(self._runtime.balance.like()[1 if backward else 0])
        assert self._runtime.links is not None
        self._runtime.links.expect(message, source, like)

    def _receive_from(self, stage: int, message: Message) -> None:
        if self._ranks[stage] != self._runtime.rank:
            assert self._runtime.links is not None
            self._runtime.idle()
            self._packets[message] = self._runtime.links.receive(message)

    def _hand_on(self, message: Message, packet: Packet) -> None:
        target = self._ranks[message.stage]
        if target == self._runtime.rank:
            self._packets[message] = packet
        else:
            assert self._runtime.links is not None
            self._runtime.links.send(message, target, packet)


def _drain(computations: Iterator[None]) -> None:
    for _ in computations:
        pass


def _head(epilogue: Callable[[Tensor, Any], Tensor], x: Pending, data: Any) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of x. Nothing else of the head survives the call, so its memory is free for the backward."""
    segment, (loss,) = cut(lambda t: epilogue(t, data), *x.take())
    (dx,) = segment.backward([torch.ones_like(loss)])
    return loss, dx


class OverlappedStep:
    """Runs the microbatches of a step without pipeline stages: each forward runs with the backward of the one before.

        F0 | F1 with B0 | F2 with B1 | ... | F(M-1) with B(M-2) | B(M-1)

    Losses and gradients are bitwise those of plain autograd, one microbatch after the other. The order of computations
    (`forebay.pipeline.schedule.turns`, drawn in docs/expert_parallel.md) follows from the list of layers alone. So it is the
    same on every rank, and no rank waits for a transfer that another one enqueues later.

    Args:
        layers: in forward order; at least one.
        prologue: microbatch -> x [B, S, H], such as the embedding.
        epilogue: (x, microbatch) -> scalar loss: final norm, head and loss.
        device: where everything runs.
        routers: (logits [T, E], ids [T, K]) of all MoE layers of a microbatch -> a scalar that is added to its loss. Called once
            per microbatch, in their order, before the epilogue.
        weights: the store of the experts; see `forebay.pipeline.sublayer.StagePass`.

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
        routers: Callable[[RouterOutputs], Tensor] | None = None,
        weights: WeightGradients | None = None,
    ):
        if not layers:
            raise ValueError("there are no layers to run")
        self.layers, self.prologue, self.epilogue, self.routers = list(layers), prologue, epilogue, routers
        self.weights = weights
        self._context = ExecutionContext(device)
        moe = [has_experts(layer) for layer in self.layers]
        self._order = turns(moe, moe[::-1])

    @property
    def flags(self) -> Flags:
        """Used by the compute stream to wait for transfers in a CUDA graph."""
        return self._context.flags

    def run(self, microbatches: Sequence[Any]) -> Tensor:
        """Run forward and backward of all microbatches. Gradients are added to `.grad` in their order.

        Args:
            microbatches: passed to prologue and epilogue.

        Returns:
            [M] losses of the epilogue, without what `routers` adds.

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
            for data in microbatches:
                microbatch = _OverlappedMicrobatch(self, self._context, data)
                forward = microbatch.forward()
                take_turns(self._order, forward, backward)
                _drain(backward)
                _drain(forward)  # the head runs when the other microbatch's activations are gone
                losses.append(microbatch.loss)
                backward = microbatch.backward()
            _drain(backward)
        finally:
            self._context.leave()
        return torch.stack(losses)


class _OverlappedMicrobatch:
    """One microbatch from the prologue to the loss and back."""

    loss: Tensor

    def __init__(self, step: OverlappedStep, context: ExecutionContext, data: Any):
        self._step, self._data = step, data
        self._stage = StagePass(step.layers, context, step.routers is not None, step.weights)

    def forward(self) -> Iterator[None]:
        """From the prologue to the loss and the gradient of its input, whose transfer is enqueued."""
        self._prologue, x = cut(partial(self._step.prologue, self._data))
        entering = Pending(x)
        del x  # a frame that holds it would keep its memory for the whole forward
        yield from self._stage.forward(entering)
        d_logits = self._router_gradients()
        output = self._stage.output
        del self._stage.output
        self.loss, dx = _head(self._step.epilogue, output, self._data)
        self._stage.begin_backward(dx, d_logits)
        self._data = None

    def backward(self) -> Iterator[None]:
        """From the last layer to the prologue."""
        yield from self._stage.backward()
        self._prologue.backward([self._stage.gradient.pop()])
        del self._prologue
        yield

    def _router_gradients(self) -> list[Tensor | None] | None:
        """The gradient of each MoE layer's logits."""
        if self._step.routers is None:
            return None
        router_outputs = self._stage.take_router_outputs()
        if not router_outputs:
            return None
        logits = [t.requires_grad_() for t, _ in router_outputs]
        auxiliary = self._step.routers(router_outputs)
        if not auxiliary.requires_grad:
            return None
        auxiliary.backward()
        return [t.grad for t in logits]
