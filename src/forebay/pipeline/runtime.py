"""Runs a step: a pipeline rank's plan action by action, or the microbatches of a single rank with overlap.

Input: stages, links and a plan (`PipelineRuntime`), or a model and its microbatches (`OverlappedStep`). Output:
gradients on the parameters, and losses. `StageBalance` is the routers' load-balancing loss when layers are on several
ranks. The autograd graphs of a step are owned by its segments; an exception leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

# The routers' load-balancing loss where layers are on several ranks.
#
# In: what a stage's routers said, and the sums of the stages before. Out: the sums that go on with the hidden states; on the
# last stage the loss; and on each stage the gradient of its logits, from what the last stage sends back with the gradient.
#
# The loss is that of `forebay.models.router.balance_loss`, E * sum over experts of (share of choices) * (mean probability),
# whose shares and means are over the tokens of all layers. Choices have no gradient, so all that a stage needs of the others is
# how often each expert was chosen, E numbers, and for how many tokens.
#
# `StageBalance` keeps the losses of a step until they are taken.


class StageBalance:
    """See the module docstring; an implementation of `forebay.pipeline.runtime.Balance`.

    Args:
        experts: E, of every MoE layer.
        coefficient: the loss is multiplied by it, for gradients.
        device: of the sums.

    Attributes:
        scale: by which the loss is multiplied too, such as one over the number of microbatches; set before a step.
    """

    def __init__(self, experts: int, coefficient: float, device: torch.device):
        self._experts, self._coefficient, self._device = experts, coefficient, device
        self.scale = 1.0
        self._losses: dict[int, Tensor] = {}

    def like(self) -> tuple[Tensor, Tensor]:
        """Shapes and dtypes of what travels: [2E + 1] and [E + 1], fp32. (Counts are exact up to 2^24.)"""
        return tuple(torch.empty(n, device="meta") for n in (2 * self._experts + 1, self._experts + 1))  # type: ignore[return-value]

    @torch.no_grad()
    def sums(self, router_outputs: RouterOutputs, before: Tensor | None) -> Tensor:
        """[2E + 1]: choices of each expert, sums of its probability, and tokens; over all layers so far."""
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
        """Note the loss; [E + 1] of choices and tokens is what `gradients` needs."""
        chosen, probability, rows = sums.split([self._experts, self._experts, 1])
        rows = rows.clamp(min=1)  # no MoE layer at all: nothing is divided by nothing
        self._losses[microbatch] = torch.sum((chosen / rows) * (probability / rows)) * (self._experts * self.scale)
        return torch.cat([chosen, rows])

    def gradients(self, router_outputs: RouterOutputs, total: Tensor, loss_scale: float) -> list[Tensor | None]:
        """Of each layer's logits [T, E], in their dtype."""
        if self._coefficient == 0:
            return [None] * len(router_outputs)
        chosen, rows = total.split([self._experts, 1])
        factor = self._coefficient * self.scale * self._experts * loss_scale
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
        """The sum of the step's losses, times `scale`, a scalar: zero on ranks without the last stage."""
        losses, self._losses = self._losses, {}
        return torch.stack(list(losses.values())).sum() if losses else torch.zeros((), device=self._device)


# A pipeline rank's step: carries out its plan, action by action.
#
# In: the rank's stages, a `PipelinePlan` (`forebay.pipeline.schedule`), and a step's microbatches, the same on all ranks of a
# pipeline. Out: the losses on the rank of the last stage, and gradients in the parameters' `.grad`.
#
#     F            input (prologue, the neighbour's packet, or the stage before on this rank) -> layers -> packet, or loss
#     B            gradient (a packet, the stage behind on this rank, or of the loss) -> layers -> packet, or prologue
#     I, W         the same without the experts' weight gradients; then those
#     OVERLAP_F_B  a forward and a backward take a computation each in turn, each one's transfers behind the other's
#                  computations
#     SEND, RECV   see `forebay.pipeline.p2p`: a receive is made ready where the plan has it; what is to be sent is sent as soon
#                  as it is made
#
# The loss belongs to the last stage's forward, and so does its gradient: of the head nothing is kept but the gradient of its
# input.
#
# `PipelineRuntime` owns the communication stream. What a microbatch leaves behind between actions (its `StagePass`, a packet
# that waits for its turn) hangs on the `_RuntimeStep` that lives as long as `run`, so an exception leaves nothing.


class Balance(Protocol):
    """A loss on the routers of all stages, which are on several ranks: what of it travels with the microbatch.

    Sums go forward with the hidden states; what the last stage has then is everything that a gradient needs, and goes back.
    """

    def sums(self, router_outputs: RouterOutputs, before: Tensor | None) -> Tensor:
        """The sums of all MoE layers up to here: those `before` and this stage's. Fixed shape and dtype."""

    def like(self) -> tuple[Tensor, Tensor]:
        """On the meta device: what `sums` and `finish` return."""

    def finish(self, sums: Tensor, microbatch: int) -> Tensor:
        """On the last stage: note the loss; returns what `gradients` needs."""

    def gradients(self, router_outputs: RouterOutputs, total: Tensor, loss_scale: float) -> list[Tensor | None]:
        """Of each layer's logits."""


@dataclass(frozen=True)
class Stage:
    """What the engine runs of a stage.

    Attributes:
        layers: at least one.
        prologue: microbatch -> x [B, S, H]; of the first stage only.
        epilogue: (x, microbatch) -> scalar loss; of the last stage only.
        enter: called with the microbatch before each forward, such as to choose its masks.
    """

    layers: Sequence[Layer]
    prologue: Callable[[Any], Tensor] | None = None
    epilogue: Callable[[Tensor, Any], Tensor] | None = None
    enter: Callable[[Any], None] = lambda _: None


class Watcher(Protocol):
    """Is told what the runtime does, such as to draw a picture of it."""

    def began(self, action: Action) -> None:
        """Before an action; what it needs of other ranks has been waited for."""

    def ended(self, action: Action) -> None:
        """All of it has been enqueued."""


class PipelineRuntime:
    """Runs the steps of one pipeline rank.

    Args:
        stages: this rank's, by number.
        plan: for all ranks.
        rank: this pipeline rank.
        links: to its neighbours; None where there are none.
        device: where all of it runs.
        balance: a loss over all stages' routers, or None.
        weights: the store that the experts were given: I actions leave their weight gradients there for W, and in a whole
            backward they are made while a transfer is under way.
        idle: called before the compute stream is made to wait for another rank.
        early_release: drop tensors at stage boundaries behind their last reader; False keeps them until their layer's backward is
            over, to measure what that is worth.

    Raises:
        ValueError: stages that are not the plan's for this rank.
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
        early_release: bool = True,
    ):
        if tuple(sorted(stages)) != plan.stages(rank):
            raise ValueError(f"rank {rank} has stages {plan.stages(rank)} in this plan, not {tuple(sorted(stages))}")
        self.stages, self.plan, self.rank, self.links, self.device = stages, plan, rank, links, device
        self.balance, self.weights, self.early_release = balance, weights, early_release
        self.idle = idle
        self.context = ExecutionContext(device)

    def run(
        self,
        microbatches: Sequence[Any],
        like: Callable[[Any], Tensor],
        *,
        loss_scale: float = 1.0,
        watcher: Watcher | None = None,
    ) -> tuple[Tensor | None, list[Action]]:
        """One step: gradients are added to what `.grad` holds.

        Args:
            microbatches: as many as the plan has; whatever prologue and epilogue take.
            like: microbatch -> a tensor on the meta device, of the shape and dtype of its hidden states.
            loss_scale: gradients are those of this times the loss.
            watcher: is told of every action.

        Returns:
            [M] losses of the epilogue, or None on ranks that do not have it; and the actions as they ran.

        Raises:
            ValueError: another number of microbatches than the plan's.
        """
        if len(microbatches) != self.plan.microbatches:
            raise ValueError(f"the plan is for {self.plan.microbatches} microbatches, not {len(microbatches)}")
        step = _RuntimeStep(self, microbatches, like, loss_scale)
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
    """The state of one step."""

    def __init__(
        self, runtime: PipelineRuntime, microbatches: Sequence[Any], like: Callable[[Any], Tensor], loss_scale: float
    ):
        self._runtime, self._microbatches, self._like = runtime, microbatches, like
        self._loss_scale = loss_scale
        self._ranks = runtime.plan.ranks
        self._passes: dict[tuple[int, int], StagePass] = {}
        self._prologues: dict[tuple[int, int], Segment] = {}
        self._router_outputs: dict[tuple[int, int], RouterOutputs] = {}
        # Packets that a stage of this rank will take next, from wherever: a neighbour, the stage beside it, the loss.
        self._here: dict[Message, Packet] = {}
        self._weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.losses: dict[int, Tensor] = {}

    def receive(self, action: Action) -> None:
        """Make the compute stream wait for what an action needs of other ranks."""
        for part in action.parts or (action,):
            last = len(self._ranks) - 1
            if part.kind == FORWARD and part.stage > 0:
                self._fetch(Message("F", part.stage, part.microbatch), part.stage - 1)
            elif part.kind in (BACKWARD, BACKWARD_INPUT) and part.stage < last:
                self._fetch(Message("B", part.stage, part.microbatch), part.stage + 1)

    def perform(self, action: Action) -> None:
        """Enqueue all of an action."""
        if action.kind == OVERLAP:
            forward, backward = action.parts
            self._overlap_fwd_bwd(forward, backward)
        elif action.kind == FORWARD:
            _drain(self._forward(action.stage, action.microbatch))
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            with self._collecting(action):
                _drain(self._backward(action.stage, action.microbatch))
        elif action.kind == BACKWARD_WEIGHT:
            for make in self._weights.pop((action.stage, action.microbatch), ()):
                make()
        elif action.kind in (RECV_F, RECV_B):
            self._expect(action)
        # SEND_F and SEND_B: on their way since they were made.

    def _overlap_fwd_bwd(self, forward: Action, backward: Action) -> None:
        """The backward's first transfer is enqueued before the forward's first computation, which hides it."""
        stages = self._runtime.stages
        forth, back = (
            self._forward(forward.stage, forward.microbatch),
            self._backward(backward.stage, backward.microbatch),
        )
        next(back)
        # The head is a computation too, and as long as several layers.
        computing = [has_experts(layer) for layer in stages[forward.stage].layers]
        computing += [False] if stages[forward.stage].epilogue is not None else []
        returning = [has_experts(layer) for layer in reversed(stages[backward.stage].layers)]
        order = turns(computing, returning)
        last = len(order) - order[::-1].index("F")
        # What the forward leaves is waited for behind one computation more, and sent on.
        take_turns([*order[: last + 1], "F", *order[last + 1 :]], forth, back)
        _drain(forth)
        _drain(back)

    @contextmanager
    def _collecting(self, action: Action) -> Iterator[None]:
        if action.kind == BACKWARD or self._runtime.weights is None:
            yield
            return
        with self._runtime.weights.collecting() as left:
            self._weights[action.stage, action.microbatch] = left
            yield

    def _forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops after each computation of a layer."""
        parts, data = self._runtime.stages[stage], self._microbatches[microbatch]
        here = (stage, microbatch)
        parts.enter(data)
        before: Tensor | None = None
        if parts.prologue is not None:
            self._prologues[here], x = cut(lambda: parts.prologue(data))  # type: ignore[misc]
        else:
            x = self._here.pop(Message("F", stage, microbatch))
            before = x[1] if len(x) > 1 else None
            x = x[:1]
        balance, runtime = self._runtime.balance, self._runtime
        entering = Pending(x)
        del x
        passing = StagePass(parts.layers, runtime.context, balance is not None, runtime.early_release, runtime.weights)
        self._passes[here] = passing
        yield from passing.forward(entering)
        sums: tuple[Tensor, ...] = ()
        if balance is not None:
            router_outputs = passing.take_router_outputs()
            sums = (balance.sums(router_outputs, before),)
            self._router_outputs[here] = router_outputs
        output = passing.output.take()
        del passing.output
        if not torch.is_grad_enabled():
            self._forget(here)
        if parts.epilogue is None:
            self._give(Message("F", stage + 1, microbatch), (*output, *sums))
            return
        total = (balance.finish(sums[0], microbatch),) if balance is not None else ()
        if not torch.is_grad_enabled():
            self.losses[microbatch] = parts.epilogue(output[0], data)
            return
        gradient = self._loss(parts.epilogue, output, data, microbatch)
        self._here[Message("B", stage, microbatch)] = (gradient, *total)

    def _forget(self, here: tuple[int, int]) -> None:
        """No backward comes."""
        for kept in (self._passes, self._prologues, self._router_outputs):
            kept.pop(here, None)  # type: ignore[attr-defined]

    def _loss(self, epilogue: Callable[[Tensor, Any], Tensor], output: Packet, data: Any, microbatch: int) -> Tensor:
        """The gradient of the last hidden states; nothing else of the head survives this call."""
        segment, (loss,) = cut(lambda t: epilogue(t, data), *output)
        self.losses[microbatch] = loss
        (dx,) = segment.backward([torch.full_like(loss, self._loss_scale)])
        return dx

    def _backward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops when the first transfer is enqueued, and then after each computation of a layer."""
        here = (stage, microbatch)
        dy, *total = self._here.pop(Message("B", stage, microbatch))
        passing = self._passes.pop(here)
        d_logits = None
        if self._runtime.balance is not None:
            d_logits = self._runtime.balance.gradients(self._router_outputs.pop(here), total[0], self._loss_scale)
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
            self._give(Message("B", stage - 1, microbatch), (dx, *total))
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

    def _fetch(self, message: Message, maker: int) -> None:
        if self._ranks[maker] != self._runtime.rank:
            assert self._runtime.links is not None
            self._runtime.idle()
            self._here[message] = self._runtime.links.receive(message)

    def _give(self, message: Message, packet: Packet) -> None:
        target = self._ranks[message.stage]
        if target == self._runtime.rank:
            self._here[message] = packet
        else:
            assert self._runtime.links is not None
            self._runtime.links.send(message, target, packet)


def _drain(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


# Communication hidden without pipeline stages: the forward of one microbatch runs with the backward of the one before.
#
# In: a model as a list of layers, with what comes before and after them, and the microbatches of a step. Out: their losses, and
# gradients in the parameters' `.grad`, bitwise those of plain autograd, one microbatch after the other.
#
#     F0 | F1 with B0 | F2 with B1 | ... | F(M-1) with B(M-2) | B(M-1)
#
# `forebay.pipeline.sublayer` says what a layer's computations and transfers are, `forebay.pipeline.schedule` in what order two
# microbatches take them (docs/expert_parallel.md). Each transfer is enqueued right behind the computation that made its input,
# and waited for right before the one that needs its result: another computation lies in between. The order follows from the list
# of layers alone, so it is the same on every rank, and no rank waits for a transfer that another one has put behind.
#
# The loss is part of the forward's last step and its gradient too: of the head nothing is kept but the gradient of its input, and
# by then the other microbatch's activations are gone.
#
# `OverlappedStep` owns the communication stream. A microbatch's tensors hang on the frame of `run` and on the autograd graphs of
# its stages, so an exception leaves nothing behind. `forebay.pipeline.sublayer` says how memory passes between the streams.

Routers = Callable[[RouterOutputs], Tensor]


class OverlappedStep:
    """Runs the microbatches of a step, each one's transfers behind another's computations.

    Args:
        layers: in the order of the forward; at least one.
        prologue: microbatch -> x [B, S, H], such as the embedding.
        epilogue: (x, microbatch) -> scalar loss: final norm, head and loss.
        device: where all of it runs.
        routers: the (logits [T, E], ids [T, K]) of all MoE layers of a microbatch -> a scalar that is added to its loss.
            Called once a microbatch, in their order, before the epilogue.
        weights: the store that the layers' experts were given, if they were; see `forebay.pipeline.sublayer.StagePass`.
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
        router_outputs = self._stage.take_router_outputs()
        if not router_outputs:
            return None
        logits = [t.requires_grad_() for t, _ in router_outputs]
        auxiliary = self._step.routers(router_outputs)
        if not auxiliary.requires_grad:
            return None
        auxiliary.backward(torch.full_like(auxiliary, loss_scale))
        return [t.grad for t in logits]
