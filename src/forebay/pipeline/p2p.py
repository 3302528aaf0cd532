"""What pipeline ranks send each other: hidden states forward and their gradients backward.

`DistLinks` sends and receives over a process group and owns its buffers. `answers` says which earlier messages the arrival of one
message confirms, so that buffers can be freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, PipelinePlan

# What pipeline ranks send each other: hidden states forward, their gradients backward.
#
# In: packets, short tuples of tensors, named by a `Message`. Out: the same packets on the rank that expects them. Sender and
# receiver know the shapes: they are those of a microbatch.
#
#     receiver   links.expect(message, source, like)       as early as the plan says
#     sender     links.send(message, target, packet)       right behind the computation that made it
#     receiver   packet = links.receive(message)           the compute stream waits, the host does not
#
# `DistLinks` goes through `torch.distributed`. NCCL pairs messages by their order, and one that waits holds up those behind it:
# so forward and backward have a group of their own in each direction between two ranks. gloo pairs by tags, and needs no more
# groups.
#
# Links own what is on its way. A packet that is sent is let go of once it has been read: at the next `send`, by asking the
# device. While a CUDA graph is captured there is nothing to ask: then, when a message arrives that shows it
# (`forebay.pipeline.p2p`).
#
# And what was given to NCCL while a graph is captured is not given out again before the capture ends: torch records its streams
# on every tensor that is sent or received (pytorch issue 132292), and asks them only then. A step's messages would all stay, 16
# MiB each at 4096 x 2048 in bf16. So in a capture they go through *boxes* that the links keep and use again: a sent packet is
# copied into them, a received one out of them.

Packet = tuple[Tensor, ...]


@dataclass(frozen=True)
class Message:
    """`kind` "F": what stage `stage - 1` gives to `stage`; "B": the gradient of what `stage` gave to `stage + 1`. So `stage` is
    always the one that receives."""

    kind: str
    stage: int
    microbatch: int


class Links(Protocol):
    """See the module docstring."""

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        """Make ready for a packet from pipeline rank `source`. `like`: tensors (on the meta device) of its shapes and dtypes."""

    def send(self, message: Message, target: int, packet: Packet) -> None:
        """To pipeline rank `target`; the tensors are not changed until it is over."""

    def receive(self, message: Message) -> Packet:
        """An expected packet, once; it belongs to the caller."""

    def finish(self) -> None:
        """Behind a step: let go of all that was sent. Nothing may be expected any more."""

    def reset(self) -> None:
        """After an error: forget everything, wait for nobody."""


class DistLinks:
    """Links through `torch.distributed`.

    Args:
        group: the pipeline's ranks.
        pairs: (source, target) of pipeline ranks that ever send to each other.
        device: of the tensors.
        pipelines: global ranks of every pipeline there is: all processes make the groups of all. Read for NCCL only.
        answers: received message -> sent ones that have arrived then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        pairs: Sequence[tuple[int, int]],
        device: torch.device,
        pipelines: Sequence[Sequence[int]],
        answers: Mapping[Message, Sequence[Message]] = MappingProxyType({}),
    ):
        self._answers = answers
        self._device = device
        self._rank = dist.get_rank(group)
        self._members = dist.get_process_group_ranks(group)
        self._channels: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._expected: dict[Message, tuple[list[Any], Packet]] = {}
        self._sent: dict[Message, tuple[list[Any], Packet]] = {}
        self._boxes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # of the capture under way, not in use
        for source, target in pairs:
            for kind in "FB":
                self._channels[kind, source, target] = self._channel(source, target, pipelines) or group

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        """See `Links`."""
        packet = tuple(self._box(t) if self._captured() else torch.empty_like(t, device=self._device) for t in like)
        group = self._channels[message.kind, source, self._rank]
        peer = self._members[source]
        works = [dist.irecv(t, peer, group=group, tag=_tag(message)) for t in packet]
        self._expected[message] = works, packet

    def send(self, message: Message, target: int, packet: Packet) -> None:
        """See `Links`."""
        group = self._channels[message.kind, self._rank, target]
        peer = self._members[target]
        if self._captured():
            packet = tuple(self._box(t).copy_(t) for t in packet)
        else:
            packet = tuple(t.contiguous() for t in packet)
            self._drop_what_is_over()
        self._sent[message] = [dist.isend(t, peer, group=group, tag=_tag(message)) for t in packet], packet

    def receive(self, message: Message) -> Packet:
        """See `Links`."""
        works, packet = self._expected.pop(message)
        for work in works:
            work.wait()
        if self._captured():
            for sent in self._answers.get(message, ()):
                self._let_go(sent)
            # The compute stream waits for each use of a box, and NCCL for the compute stream: it may be used again at once.
            taken = tuple(t.clone() for t in packet)
            self._put_back(packet)
            return taken
        return packet

    def finish(self) -> None:
        """See `Links`."""
        assert not self._expected, f"never received: {list(self._expected)}"
        for sent in list(self._sent):
            self._let_go(sent)
        self._boxes.clear()

    def reset(self) -> None:
        """See `Links`."""
        self._expected.clear()
        self._sent.clear()
        self._boxes.clear()

    def _captured(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _drop_what_is_over(self) -> None:
        while self._sent:
            oldest = next(iter(self._sent))
            if not all(work.is_completed() for work in self._sent[oldest][0]):
                return
            del self._sent[oldest]

    def _let_go(self, message: Message) -> None:
        """The compute stream waits until it has been read."""
        works, packet = self._sent.pop(message)
        for work in works:
            work.wait()
        if self._captured():
            self._put_back(packet)

    def _box(self, like: Tensor) -> Tensor:
        spare = self._boxes.get((like.shape, like.dtype))
        if spare:
            return spare.pop()
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def _put_back(self, packet: Packet) -> None:
        for box in packet:
            self._boxes.setdefault((box.shape, box.dtype), []).append(box)

    def _channel(self, source: int, target: int, pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        if self._device.type != "cuda":
            return None
        pairs = [[members[source], members[target]] for members in pipelines]
        own, _ = dist.new_subgroups_by_enumeration(pairs)
        return own


def _tag(message: Message) -> int:
    """gloo pairs messages by it: several stages of a rank may talk to the same peer. NCCL goes by order."""
    return 2 * message.stage + (message.kind == "B")


def neighbours(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) pairs of pipeline ranks that talk, where stage s is on `ranks[s]`."""
    pairs = {(a, b) for a, b in pairwise(ranks) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})


# What a message tells of others: one that arrives shows that its sender had received this and that before it made it.
#
# In: a `PipelinePlan`. Out: for each message that a rank receives, those that it sent and whose arrival is certain then. So
# what was sent is let go of in the order of the plan, and nobody has to ask the device: a step in a CUDA graph could not.
#
# A rank takes a message at the beginning of the action that needs it, and sends what an action made before the next one begins.


class _Sent(NamedTuple):
    message: Message
    source: int
    made: int
    """Number of the action that makes it, on `source`."""
    target: int
    taken: int
    """Number of the action that needs it, on `target`."""


def answers(plan: PipelinePlan, rank: int) -> Mapping[Message, list[Message]]:
    """Received message -> what `rank` sent and is known to have arrived, at the earliest such message."""
    messages = list(_messages(plan))
    received = sorted((m for m in messages if m.target == rank), key=lambda m: m.taken)
    known: dict[Message, list[Message]] = {}
    for own in messages:
        if own.source == rank:
            answer = next(
                (m for m in received if m.source == own.target and m.made >= own.taken and m.taken > own.made), None
            )
            if answer is not None:
                known.setdefault(answer.message, []).append(own.message)
    return known


def _messages(plan: PipelinePlan) -> Iterator[_Sent]:
    where: dict[tuple[str, int, int], int] = {}
    for actions in plan.actions:
        for number, action in enumerate(actions):
            for part in action.parts or (action,):
                if part.kind in (FORWARD, BACKWARD, BACKWARD_INPUT):
                    where["F" if part.kind == FORWARD else "B", part.stage, part.microbatch] = number
    last = len(plan.ranks) - 1
    for (kind, stage, microbatch), made in where.items():
        to = stage + 1 if kind == "F" else stage - 1
        if 0 <= to <= last and plan.ranks[to] != plan.ranks[stage] and (kind, to, microbatch) in where:
            message = Message(kind, to, microbatch)
            yield _Sent(message, plan.ranks[stage], made, plan.ranks[to], where[kind, to, microbatch])
