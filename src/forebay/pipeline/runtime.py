"""A pipeline rank's step: carries out its plan, action by action.

In: the rank's stages, a `Plan` (`forebay.pipeline.schedule`), and a step's microbatches, the same on all ranks of a pipeline.
Out: the losses on the rank of the last stage, and gradients in the parameters' `.grad`.

    F            input (prologue, the neighbour's packet, or the stage before on this rank) -> layers -> packet, or loss
    B            gradient (a packet, the stage behind on this rank, or of the loss) -> layers -> packet, or prologue
    I, W         the same without the experts' weight gradients; then those
    OVERLAP_F_B  a forward and a backward take a computation each in turn, each one's transfers behind the other's computations
    SEND, RECV   see `forebay.pipeline.links`: a receive is made ready where the plan has it; what is to be sent is sent as soon
                 as it is made

The loss belongs to the last stage's forward, and so does its gradient: of the head nothing is kept but the gradient of its input.

`PipelineRuntime` owns the communication stream. What a microbatch leaves behind between actions (its `StagePass`, a packet that
waits for its turn) hangs on the `_Step` that lives as long as `run`, so an exception leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.moe.weight_gradients import WeightGradients
from forebay.pipeline.execution import ExecutionContext, Pending, Segment, cut
from forebay.pipeline.links import Links, Message, Packet
from forebay.pipeline.passes import Layer, Said, StagePass, has_experts, take_turns
from forebay.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OVERLAP,
    RECV_B,
    RECV_F,
    Action,
    Plan,
)
from forebay.pipeline.turns import turns


class Balance(Protocol):
    """A loss on the routers of all stages, which are on several ranks: what of it travels with the microbatch.

    Sums go forward with the hidden states; what the last stage has then is everything that a gradient needs, and goes back.
    """

    def sums(self, said: Said, before: Tensor | None) -> Tensor:
        """The sums of all MoE layers up to here: those `before` and this stage's. Fixed shape and dtype."""

    def like(self) -> tuple[Tensor, Tensor]:
        """On the meta device: what `sums` and `finish` return."""

    def finish(self, sums: Tensor, microbatch: int) -> Tensor:
        """On the last stage: note the loss; returns what `gradients` needs."""

    def gradients(self, said: Said, total: Tensor, loss_scale: float) -> list[Tensor | None]:
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
        plan: Plan,
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
        step = _Step(self, microbatches, like, loss_scale)
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


class _Step:
    """The state of one step."""

    def __init__(
        self, runtime: PipelineRuntime, microbatches: Sequence[Any], like: Callable[[Any], Tensor], loss_scale: float
    ):
        self._runtime, self._microbatches, self._like = runtime, microbatches, like
        self._loss_scale = loss_scale
        self._ranks = runtime.plan.ranks
        self._passes: dict[tuple[int, int], StagePass] = {}
        self._prologues: dict[tuple[int, int], Segment] = {}
        self._said: dict[tuple[int, int], Said] = {}
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
            self._together(forward, backward)
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

    def _together(self, forward: Action, backward: Action) -> None:
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
            said = passing.take_said()
            sums = (balance.sums(said, before),)
            self._said[here] = said
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
        for kept in (self._passes, self._prologues, self._said):
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
            d_logits = self._runtime.balance.gradients(self._said.pop(here), total[0], self._loss_scale)
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
