"""Point-to-point messages between pipeline ranks: hidden states forward and their gradients backward.

Input: packets, short tuples of tensors, each named by a `Message`; both sides know their shapes. Output: the same packets
on the rank that expects them. `DistLinks` sends and receives through `torch.distributed` and owns its buffers and what is
in transit. `confirmed_by` derives from a plan which sent messages the arrival of a message confirms, so that a step in a
CUDA graph can release them without asking the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.communicators import PIPELINE, options
from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, PipelinePlan

Packet = tuple[Tensor, ...]


@dataclass(frozen=True)
class Message:
    """`stage` is the receiver: kind "F" is the output of `stage - 1`, kind "B" the gradient of the output of `stage`."""

    kind: str
    stage: int
    microbatch: int


class Links(Protocol):
    """How the runtime sends and receives packets.

    A receiver calls `expect` as early as the plan says, a sender calls `send` right after the computation.
    """

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        """Post the receive of a packet from pipeline rank `source`. `like`: meta tensors of its shapes and dtypes."""

    def send(self, message: Message, target: int, packet: Packet) -> None:
        """Send to pipeline rank `target`. The tensors must not change until the transfer has finished."""

    def receive(self, message: Message) -> Packet:
        """Return an expected packet, once; it belongs to the caller. The compute stream waits for it, the host does not."""

    def finish(self) -> None:
        """End a step: release everything that was sent. No receive may be outstanding."""

    def reset(self) -> None:
        """After an error: drop everything without waiting."""

    @property
    def about(self) -> str:
        """How packets travel, for the person who starts the run."""


class DistLinks:
    """`Links` through `torch.distributed`; the methods are documented there.

    A sent packet is released once it has been read. `send` asks the device which packets those are. During CUDA graph
    capture it cannot ask: there, `confirmed_by` tells which packets an arriving message confirms.

    Args:
        group: the ranks of the pipeline.
        pairs: (source, target) for all pipeline ranks that send to each other.
        device: device of the tensors.
        pipelines: global ranks of every pipeline, because all processes create the groups of all. Read for NCCL only.
        confirmed_by: received message -> sent messages that have arrived by then.
        timeout: of the groups that it makes, on NCCL; None is torch's own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        pairs: Sequence[tuple[int, int]],
        device: torch.device,
        pipelines: Sequence[Sequence[int]],
        confirmed_by: Mapping[Message, Sequence[Message]] = MappingProxyType({}),
        timeout: timedelta | None = None,
    ):
        self._confirmed_by, self._timeout = confirmed_by, timeout
        self._device = device
        self._group = group
        self._rank = dist.get_rank(group)
        self._members = dist.get_process_group_ranks(group)
        self._channels: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._expected: dict[Message, tuple[list[Any], Packet]] = {}
        self._sent: dict[Message, tuple[list[Any], Packet]] = {}
        # Idle buffers of the capture under way. torch records NCCL's streams on every sent or received tensor (pytorch issue
        # 132292), and during capture it frees none of them before the capture ends: a step's messages would all stay, 16 MiB
        # each at 4096 x 2048 in bf16. So during capture packets are copied into and out of buffers that are reused.
        self._buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for source, target in pairs:
            for kind in "FB":
                self._channels[kind, source, target] = self._channel(source, target, pipelines) or group

    @property
    def about(self) -> str:
        return dist.get_backend_config(self._group)

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        packet = tuple(self._buffer(t) if self._capturing() else torch.empty_like(t, device=self._device) for t in like)
        group = self._channels[message.kind, source, self._rank]
        peer = self._members[source]
        works = [dist.irecv(t, peer, group=group, tag=_tag(message)) for t in packet]
        self._expected[message] = works, packet

    def send(self, message: Message, target: int, packet: Packet) -> None:
        group = self._channels[message.kind, self._rank, target]
        peer = self._members[target]
        if self._capturing():
            packet = tuple(self._buffer(t).copy_(t) for t in packet)
        else:
            packet = tuple(t.contiguous() for t in packet)
            self._release_completed()
        self._sent[message] = [dist.isend(t, peer, group=group, tag=_tag(message)) for t in packet], packet

    def receive(self, message: Message) -> Packet:
        works, packet = self._expected.pop(message)
        for work in works:
            work.wait()
        if not self._capturing():
            return packet
        for sent in self._confirmed_by.get(message, ()):
            self._release(sent)
        # A buffer may be reused at once: the compute stream waits for each use, and NCCL waits for the compute stream.
        copies = tuple(t.clone() for t in packet)
        self._put_back(packet)
        return copies

    def finish(self) -> None:
        assert not self._expected, f"never received: {list(self._expected)}"
        for sent in list(self._sent):
            self._release(sent)
        self._buffers.clear()

    def reset(self) -> None:
        self._expected.clear()
        self._sent.clear()
        self._buffers.clear()

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _release_completed(self) -> None:
        while self._sent:
            oldest = next(iter(self._sent))
            if not all(work.is_completed() for work in self._sent[oldest][0]):
                return
            del self._sent[oldest]

    def _release(self, message: Message) -> None:
        """Make the compute stream wait until a sent packet has been read, and drop it."""
        works, packet = self._sent.pop(message)
        for work in works:
            work.wait()
        if self._capturing():
            self._put_back(packet)

    def _buffer(self, like: Tensor) -> Tensor:
        idle = self._buffers.get((like.shape, like.dtype))
        if idle:
            return idle.pop()
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def _put_back(self, packet: Packet) -> None:
        for buffer in packet:
            self._buffers.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def _channel(self, source: int, target: int, pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """A group of its own for one kind of message in one direction, on NCCL.

        NCCL pairs messages by their order, and a message that waits holds up those after it. gloo pairs them by tags.
        """
        if self._device.type != "cuda":
            return None
        pairs = [[members[source], members[target]] for members in pipelines]
        limited = options(PIPELINE, dist.get_backend_config(), self._timeout)
        own, _ = dist.new_subgroups_by_enumeration(pairs, timeout=self._timeout, pg_options=limited)
        return own


def _tag(message: Message) -> int:
    """Pairs messages on gloo, where several stages of a rank may talk to the same peer. NCCL pairs them by order."""
    return 2 * message.stage + (message.kind == "B")


def neighbors(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) pairs of pipeline ranks that send to each other, where stage s is on `ranks[s]`."""
    pairs = {(a, b) for a, b in pairwise(ranks) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})


class Sent(NamedTuple):
    """A message between two ranks of a plan."""

    message: Message
    source: int
    made: int  # number of the action on `source` that makes it
    target: int
    taken: int  # number of the action on `target` that needs it


def confirmed_by(plan: PipelinePlan, rank: int) -> Mapping[Message, list[Message]]:
    """Received message -> the messages of `rank` that are certain to have arrived then, and at no earlier message.

    A rank takes a message at the beginning of the action that needs it, and sends what an action made before the next one
    begins. So a message confirms every message that its sender had taken when it made it.
    """
    messages = list(messages_of(plan))
    received = sorted((m for m in messages if m.target == rank), key=lambda m: m.taken)
    confirmed: dict[Message, list[Message]] = {}
    for own in messages:
        if own.source != rank:
            continue
        replies = (m for m in received if m.source == own.target and m.made >= own.taken and m.taken > own.made)
        if (reply := next(replies, None)) is not None:
            confirmed.setdefault(reply.message, []).append(own.message)
    return confirmed


def messages_of(plan: PipelinePlan) -> Iterator[Sent]:
    """Every message between two ranks of the plan."""
    places: dict[tuple[str, int, int], int] = {}  # number of the action that runs a forward or backward, on its rank
    for actions in plan.actions:
        for number, action in enumerate(actions):
            for part in action.each:
                if part.kind in (FORWARD, BACKWARD, BACKWARD_INPUT):
                    places["F" if part.kind == FORWARD else "B", part.stage, part.microbatch] = number
    last = len(plan.ranks) - 1
    for (kind, stage, microbatch), made in places.items():
        to = stage + 1 if kind == "F" else stage - 1
        if 0 <= to <= last and plan.ranks[to] != plan.ranks[stage] and (kind, to, microbatch) in places:
            message = Message(kind, to, microbatch)
            yield Sent(message, plan.ranks[stage], made, plan.ranks[to], places[kind, to, microbatch])
