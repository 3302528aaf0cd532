"""Runs a step: a pipeline rank's plan, action by action.

Input: stages, links and a plan, which may be that of a single rank (`forebay.pipeline.schedule.local_plan`); and the
microbatches of a step. Output: gradients in the parameters' `.grad`, and the losses where the last stage is. `StageBalance` and
`LocalBalance` are the routers' load-balancing loss where layers are on several ranks, and on one. `PipelineRuntime` owns its
communication stream. The state of a step hangs on the call that runs it, so an exception leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

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
    drain,
    overlap,
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
)


class Balance:
    """The routers' load-balancing loss of a step's microbatches.

    Args:
        coefficient: factor of the loss in gradients.
        device: where everything runs.

    Attributes:
        parts: what the loss and its gradients are divided by, such as the microbatches of a step; set it before one.
    """

    def __init__(self, coefficient: float, device: torch.device):
        self._coefficient, self._device = coefficient, device
        self.parts = 1
        self._losses: dict[int, Tensor] = {}  # by microbatch

    def like(self) -> tuple[Packet, Packet]:
        """Meta tensors like what goes forward with hidden states, and back with their gradients."""
        raise NotImplementedError

    def forward(self, router_outputs: RouterOutputs, before: Packet) -> tuple[Packet, Any]:
        """After the layers of a stage: what goes forward, with `before` of earlier stages in it; and what `gradients` needs."""
        raise NotImplementedError

    def finish(self, total: Packet, microbatch: int) -> Packet:
        """On the last stage, record the loss. Returns what goes back.

        Args:
            total: what `forward` returned there.
        """
        raise NotImplementedError

    def gradients(self, kept: Any, total: Packet) -> list[Tensor | None]:
        """The gradient of each layer's logits [T, E], in their dtype; None without one.

        Args:
            kept: what `forward` returned for `gradients`.
            total: what `finish` returned.
        """
        raise NotImplementedError

    def take_losses(self) -> Tensor:
        """The sum of the recorded losses, a scalar; 0 on ranks without the last stage. Forgets them."""
        losses, self._losses = self._losses, {}
        return torch.stack(list(losses.values())).sum() if losses else torch.zeros((), device=self._device)


class LocalBalance(Balance):
    """The loss where all layers are on this rank: by autograd, before the head, as its gradients wait for no other stage.

    Args:
        loss: router outputs of all MoE layers of a microbatch -> a scalar.
    """

    def __init__(self, loss: Callable[[RouterOutputs], Tensor], coefficient: float, device: torch.device):
        super().__init__(coefficient, device)
        self._loss = loss

    def like(self) -> tuple[Packet, Packet]:
        return (torch.empty((), device="meta"),), ()

    def forward(self, router_outputs: RouterOutputs, before: Packet) -> tuple[Packet, list[Tensor | None]]:
        if not router_outputs:
            return (torch.zeros((), device=self._device),), []
        logits = [t.requires_grad_() for t, _ in router_outputs]
        with torch.set_grad_enabled(self._coefficient != 0):
            loss = self._loss(router_outputs).float() / self.parts
            if self._coefficient:
                (self._coefficient * loss).backward()
        return (loss.detach(),), [t.grad for t in logits]

    def finish(self, total: Packet, microbatch: int) -> Packet:
        (self._losses[microbatch],) = total
        return ()

    def gradients(self, kept: list[Tensor | None], total: Packet) -> list[Tensor | None]:
        return kept


class StageBalance(Balance):
    """The loss where the MoE layers are on several pipeline ranks.

    The loss is that of `forebay.models.router.balance_loss`: E * sum over experts of (share of choices) * (mean probability),
    over the tokens of all layers. Choices have no gradient, so a stage's gradient needs of other stages only how often each
    expert was chosen and the number of tokens. Sums go forward with the hidden states; `finish` turns them into what goes back
    with the gradients.

    Args:
        experts: E, the number of experts of every MoE layer.
    """

    def __init__(self, experts: int, coefficient: float, device: torch.device):
        super().__init__(coefficient, device)
        self._experts = experts

    def like(self) -> tuple[Packet, Packet]:
        """[2E + 1] and [E + 1], fp32. Counts are exact up to 2^24."""
        sums, total = (torch.empty(n, device="meta") for n in (2 * self._experts + 1, self._experts + 1))
        return (sums,), (total,)

    @torch.no_grad()
    def forward(self, router_outputs: RouterOutputs, before: Packet) -> tuple[Packet, RouterOutputs]:
        """[2E + 1]: choices per expert, summed probability per expert, and tokens."""
        total = before[0] if before else torch.zeros(2 * self._experts + 1, device=self._device)
        for logits, ids in router_outputs:
            chosen = torch.zeros(self._experts, device=self._device)
            choices = (ids >= 0).float()
            chosen.scatter_add_(0, ids.reshape(-1).clamp(min=0).long(), choices.reshape(-1))
            tokens = choices.amax(1, keepdim=True)
            probability = (logits.softmax(-1).float() * tokens).sum(0)
            total = total + torch.cat([chosen, probability, tokens.sum().reshape(1)])
        return (total,), router_outputs

    def finish(self, total: Packet, microbatch: int) -> Packet:
        """[E + 1]: choices and tokens."""
        chosen, probability, rows = total[0].split([self._experts, self._experts, 1])
        rows = rows.clamp(min=1)  # without an MoE layer, avoid 0 / 0
        self._losses[microbatch] = torch.sum((chosen / rows) * (probability / rows)) * (
            self._experts * (1 / self.parts)
        )
        return (torch.cat([chosen, rows]),)

    def gradients(self, kept: RouterOutputs, total: Packet) -> list[Tensor | None]:
        if self._coefficient == 0:
            return [None] * len(kept)
        chosen, rows = total[0].split([self._experts, 1])
        factor = self._coefficient * (1 / self.parts) * self._experts
        per_probability = chosen / rows / rows * factor
        gradients: list[Tensor | None] = []
        for logits, ids in kept:
            leaf = logits.detach().requires_grad_()
            tokens = (ids >= 0).any(1, keepdim=True).float()
            with torch.enable_grad():
                (leaf.softmax(-1).float() * tokens).sum(0).backward(per_probability)
            gradients.append(leaf.grad)
        return gradients


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
        OVERLAP_F_B  a forward and a backward take turns, so that each one's transfers hide behind the other's computations. In
                     a plan of one stage, the head runs after the backward, when the other microbatch's activations are gone
        RECV         posts the receive, which copies do not need; SEND does nothing: packets are sent as soon as they are made

    Args:
        stages: this rank's stages by number.
        plan: the plan of all ranks.
        rank: this pipeline rank.
        links: to the neighbors; None if there are none.
        device: where everything runs.
        balance: the load-balancing loss of the routers, or None.
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
        balance: Balance | None = None,
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
    ) -> Tensor | None:
        """Run one step. Gradients are added to `.grad`.

        Args:
            microbatches: as many as the plan has, the same on all ranks; passed to prologue and epilogue.
            like: microbatch -> meta tensor of the shape and dtype of its hidden states.
            watcher: observes every action.

        Returns:
            [M] losses of the epilogue, or None on ranks without it.

        Raises:
            ValueError: the number of microbatches differs from the plan's.
        """
        if len(microbatches) != self.plan.microbatches:
            raise ValueError(f"the plan is for {self.plan.microbatches} microbatches, not {len(microbatches)}")
        step = _RuntimeStep(self, microbatches, like)
        self.context.enter()
        try:
            # Backwards on this thread: autograd's own thread of a GPU would be woken and waited for in each of a layer's three.
            with torch.autograd.set_multithreading_enabled(False):
                for action in self.plan.actions[self.rank]:
                    step.receive(action)
                    if watcher is not None:
                        watcher.began(action)
                    step.perform(action)
                    if watcher is not None:
                        watcher.ended(action)
            if self.links is not None:
                self.links.finish()
        except BaseException:
            if self.links is not None:
                self.links.reset()
            raise
        finally:
            self.context.leave()
        return torch.stack([step.losses[i] for i in sorted(step.losses)]) if step.losses else None


class _RuntimeStep:
    """The state of one step. Dictionaries with pairs as keys are by (stage, microbatch)."""

    def __init__(self, runtime: PipelineRuntime, microbatches: Sequence[Any], like: Callable[[Any], Tensor]):
        self._runtime, self._microbatches, self._like = runtime, microbatches, like
        self._ranks = runtime.plan.ranks
        self._passes: dict[tuple[int, int], StagePass] = {}
        self._prologues: dict[tuple[int, int], Segment] = {}
        self._kept: dict[tuple[int, int], Any] = {}  # of the router outputs, for `Balance.gradients`
        self._deferred_weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._packets: dict[Message, Packet] = {}  # inputs of this rank's stages, from links, stages here, or the loss
        self.losses: dict[int, Tensor] = {}

    def receive(self, action: Action) -> None:
        """Make the compute stream wait for what an action needs from other ranks."""
        last = len(self._ranks) - 1
        for part in action.each:
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
            drain(self._forward(action.stage, action.microbatch))
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            with self._deferring_weights(action):
                drain(self._backward(action.stage, action.microbatch))
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
        forwards = [has_experts(layer) for layer in ours.layers]
        backwards = [has_experts(layer) for layer in reversed(other.layers)]
        overlap(forth, back, forwards, backwards, None if ours is other else ours.epilogue is not None)

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
        before: Packet = ()
        if parts.prologue is not None:
            self._prologues[here], x = cut(partial(parts.prologue, data))
        else:
            x = self._packets.pop(Message("F", stage, microbatch))
            x, before = x[:1], x[1:]
        balance, runtime = self._runtime.balance, self._runtime
        entering = Pending(x)
        del x  # a frame that holds it would keep its memory for the whole forward
        passing = StagePass(parts.layers, runtime.context, balance is not None, runtime.weights)
        self._passes[here] = passing
        yield from passing.forward(entering)
        sums: Packet = ()
        if balance is not None:
            sums, self._kept[here] = balance.forward(passing.take_router_outputs(), before)
        output = passing.output
        del passing.output
        if not torch.is_grad_enabled():  # no backward follows
            for states in (self._passes, self._prologues, self._kept):
                states.pop(here, None)  # type: ignore[attr-defined]
        if parts.epilogue is None:
            self._hand_on(Message("F", stage + 1, microbatch), (*output.take(), *sums))
            return
        total = balance.finish(sums, microbatch) if balance is not None else ()
        if not torch.is_grad_enabled():
            self.losses[microbatch] = parts.epilogue(output.take()[0], data)
            return
        self.losses[microbatch], dx = _head(parts.epilogue, output, data)
        self._packets[Message("B", stage, microbatch)] = (dx, *total)

    def _backward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops when the first transfer is enqueued, and then after each computation of a layer."""
        here = (stage, microbatch)
        packet = self._packets.pop(Message("B", stage, microbatch))
        dy, total = [packet[0]], packet[1:]
        del packet
        passing = self._passes.pop(here)
        d_logits = None
        if self._runtime.balance is not None:
            d_logits = self._runtime.balance.gradients(self._kept.pop(here), total)
        passing.begin_backward(dy, d_logits)
        del dy, d_logits
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
            like += self._runtime.balance.like()[backward]
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


def _head(epilogue: Callable[[Tensor, Any], Tensor], x: Pending, data: Any) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of x. Nothing else of the head survives the call, so its memory is free for the backward."""
    segment, (loss,) = cut(lambda t: epilogue(t, data), *x.take())
    (dx,) = segment.backward([torch.ones_like(loss)])
    return loss, dx
