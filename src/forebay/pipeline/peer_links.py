"""Messages between the pipeline ranks of one host: copies into each other's memory, for which no kernel waits.

NCCL receives by a kernel, and one that is posted early waits on multiprocessors that other kernels need: beside it a backward of
three layers took 19.8 ms for 15.0, with 4 channels as with 16 (H100, benchmarks/LOG.md). Here a sender's stream copies a packet
into a slot of the receiver and sets a word there, for which the receiver's stream waits (`forebay.kernels.flags`). Both are the
compute stream, so nothing has to be held for a transfer, and a CUDA graph gets no branch.

    sender      wait until the slot was taken, copy the packet into it, set `arrived`
    receiver    wait for `arrived` and clear it, copy the packet out, set `taken` at the sender

`PeerLinks` knows which slot and word a message has, `PeerMailboxes` owns the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.kernels.flags import StreamWords
from forebay.pipeline.p2p import Message, Packet, messages_of
from forebay.pipeline.schedule import PipelinePlan, forward_plan

_LINE = 256  # bytes at whose multiples tensors of a packet begin


class Mailboxes(Protocol):
    """The slots and words of all ranks. Operations run in the order in which they are enqueued."""

    def put(self, rank: int, slot: int, packet: Packet) -> None:
        """Copy a packet into a slot of `rank`."""

    def take(self, slot: int, like: Sequence[Tensor]) -> Packet:
        """A copy of the packet in a slot of this rank; `like`: meta tensors of its shapes and dtypes."""

    def set(self, rank: int, word: int) -> None:
        """Set a word of `rank`, after everything before."""

    def wait(self, word: int) -> None:
        """Wait until a word of this rank is set, and clear it; everything after waits too."""

    def records(self) -> bool:
        """Whether operations are recorded, in a CUDA graph, and not run."""


class Channel(NamedTuple):
    """One kind of message ("F" or "B") from one rank to another. Messages are taken in the order in which they are sent."""

    kind: str
    source: int
    target: int


class PeerLinks:
    """`forebay.pipeline.p2p.Links` through `Mailboxes`; the methods are documented there.

    After a step that failed, slots and words are in any state: other steps raise RuntimeError.

    Args:
        rank: this pipeline rank.
        pairs: (source, target) for all pipeline ranks that send to each other.
        slots: of each channel; see `slots_of`.
        boxes: with `slots_and_words` of each rank.
    """

    about = "copies into each other's memory"

    def __init__(self, rank: int, pairs: Sequence[tuple[int, int]], slots: int, boxes: Mailboxes):
        self._rank, self._slots, self._boxes = rank, slots, boxes
        arriving, leaving = (Counter[int]() for _ in range(2))
        self._numbers: dict[Channel, tuple[int, int]] = {}  # of a channel among those of its target, and of its source
        for channel in channels_of(pairs):
            self._numbers[channel] = arriving[channel.target], leaving[channel.source]
            arriving[channel.target] += 1
            leaving[channel.source] += 1
        self._first_taken, _ = slots_and_words(pairs, slots)  # words of `taken` come after those of `arrived`
        self._expected: dict[Message, tuple[int, Sequence[Tensor]]] = {}
        self._sent, self._received = (Counter[Channel]() for _ in range(2))  # in this step
        self._failed = False

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        self._check()
        self._expected[message] = source, like

    def send(self, message: Message, target: int, packet: Packet) -> None:
        self._check()
        channel = Channel(message.kind, self._rank, target)
        number = self._sent[channel]
        arrived, taken = self._words(channel, number)
        if number >= self._slots:
            self._boxes.wait(taken)
        self._boxes.put(target, arrived, packet)
        self._boxes.set(target, arrived)
        self._sent[channel] += 1

    def receive(self, message: Message) -> Packet:
        source, like = self._expected.pop(message)
        channel = Channel(message.kind, source, self._rank)
        arrived, taken = self._words(channel, self._received[channel])
        self._boxes.wait(arrived)
        packet = self._boxes.take(arrived, like)
        self._boxes.set(source, taken)
        self._received[channel] += 1
        return packet

    def finish(self) -> None:
        """Also waits until everything that was sent is taken: then all words are clear."""
        assert not self._expected, f"never received: {list(self._expected)}"
        for channel, sent in self._sent.items():
            for number in range(max(0, sent - self._slots), sent):
                self._boxes.wait(self._words(channel, number)[1])
        self._forget()

    def reset(self) -> None:
        self._failed = self._failed or not self._boxes.records()
        self._forget()

    def _forget(self) -> None:
        self._expected.clear()
        self._sent.clear()
        self._received.clear()

    def _check(self) -> None:
        if self._failed:
            raise RuntimeError("a step of this pipeline failed, and its ranks cannot go on: start the run again")

    def _words(self, channel: Channel, number: int) -> tuple[int, int]:
        """The two words of the n-th message of a channel: `arrived`, whose number is also that of the slot, and `taken`."""
        at_target, at_source = self._numbers[channel]
        slot = number % self._slots
        return at_target * self._slots + slot, self._first_taken + at_source * self._slots + slot


def channels_of(pairs: Sequence[tuple[int, int]]) -> list[Channel]:
    """Two for each pair of `forebay.pipeline.p2p.neighbors`."""
    return [Channel(kind, source, target) for source, target in pairs for kind in "FB"]


def slots_and_words(pairs: Sequence[tuple[int, int]], slots: int) -> tuple[int, int]:
    """How many slots and words each rank has, if each channel has `slots`."""
    most = max((Counter(channel.target for channel in channels_of(pairs))).values(), default=0)
    return most * slots, 2 * most * slots


def slots_of(plan: PipelinePlan) -> int:
    """How many slots each channel gets, for steps of a plan and for its forwards alone."""
    return max(slots_needed(plan, early=True), slots_needed(forward_plan(plan), early=False))


def slots_needed(plan: PipelinePlan, early: bool) -> int:
    """How many slots a channel needs so that ranks do not wait for each other for ever.

    Args:
        early: no sender has to wait either, if all actions take equally long.
    """
    if early:
        most = _waiting(plan, None)
        assert most is not None, "a plan ends if no sender waits"
        return max(1, most)
    return next(slots for slots in count(1) if _waiting(plan, slots) is not None)


def _waiting(plan: PipelinePlan, slots: int | None) -> int | None:
    """The most packets of a channel that wait to be taken, if all actions take equally long and a channel has so many slots; None
    if the ranks wait for ever."""
    takes: dict[tuple[int, int], list[tuple[Channel, int]]] = {}  # (rank, number of the action) -> messages by number
    makes: dict[tuple[int, int], list[tuple[Channel, int]]] = {}
    numbers = Counter[Channel]()
    for message in sorted(messages_of(plan), key=lambda m: m.made):
        channel = Channel(message.message.kind, message.source, message.target)
        takes.setdefault((message.target, message.taken), []).append((channel, numbers[channel]))
        makes.setdefault((message.source, message.made), []).append((channel, numbers[channel]))
        numbers[channel] += 1
    sent, taken, at, most = Counter[Channel](), Counter[Channel](), [0] * len(plan.actions), 0
    while any(place < len(actions) for place, actions in zip(at, plan.actions, strict=True)):
        able = []
        for rank, place in enumerate(at):
            here = rank, place
            arrived = all(sent[channel] > number for channel, number in takes.get(here, ()))
            # What an action takes frees a slot before it sends.
            fits = slots is None or all(number < slots + taken[channel] for channel, number in makes.get(here, ()))
            if place < len(plan.actions[rank]) and arrived and fits:
                able.append(here)
        if not able:
            return None
        for here in able:
            taken.update(channel for channel, _ in takes.get(here, ()))
        for here in able:
            sent.update(channel for channel, _ in makes.get(here, ()))
            at[here[0]] += 1
        most = max(most, *((sent - taken).values() or (0,)))
    return most


class PeerMailboxes:
    """`Mailboxes` in symmetric memory. The constructor is collective.

    Args:
        group: ranks of one host that reach each other's memory (`forebay.moe.backends.peers_are_reachable`).
        slots: of each rank.
        words: of each rank.
        slot_bytes: of the largest packet; see `packet_bytes`.
        device: of this rank.

    Raises:
        RuntimeError: memory that cannot be shared, or a driver without operations on words.
    """

    def __init__(self, group: dist.ProcessGroup, slots: int, words: int, slot_bytes: int, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric

        stream_words = StreamWords.of_driver()
        if stream_words is None:
            raise RuntimeError("CUDA's driver has no operations on words of memory (cuStreamWaitValue32)")
        self._stream_words = stream_words
        self._device, self._slot_bytes, self._first = device, slot_bytes, _lines(4 * words)
        self._group: Any = group
        self._base: Any = symmetric.empty(self._first + slots * slot_bytes, dtype=torch.uint8, device=device)
        self._words: Any = self._base[: 4 * words]
        self._words.zero_()
        torch.cuda.synchronize(device)  # before another rank can set a word
        self._shared: Any = symmetric.rendezvous(self._base, group)

    def put(self, rank: int, slot: int, packet: Packet) -> None:
        """See `Mailboxes`. A copy engine copies, not a kernel. ValueError for a packet that is larger than a slot."""
        if packet_bytes(packet) > self._slot_bytes:
            raise ValueError(f"a packet of {packet_bytes(packet)} bytes does not fit a slot of {self._slot_bytes}")
        at = self._first + slot * self._slot_bytes
        for tensor in packet:
            there = self._shared.get_buffer(rank, (tensor.nbytes,), torch.uint8, at)
            there.copy_(_bytes_of(tensor.contiguous()))
            at += _lines(tensor.nbytes)

    def take(self, slot: int, like: Sequence[Tensor]) -> Packet:
        at = self._first + slot * self._slot_bytes
        packet = tuple(torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in like)
        for tensor in packet:
            mine = _bytes_of(tensor)
            mine.copy_(self._base[at : at + len(mine)])
            at += _lines(len(mine))
        return packet

    def set(self, rank: int, word: int) -> None:
        self._write(self._shared.buffer_ptrs[rank], word, 1)

    def wait(self, word: int) -> None:
        self._stream_words.wait(torch.cuda.current_stream(self._device), self._base.data_ptr() + 4 * word)
        self._write(self._base.data_ptr(), word, 0)

    def records(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """See `forebay.kernels.flags.Flags`: a graph's words are the same as other steps'."""

    def open(self) -> None:
        """Set all words of this rank, so that its stream stops waiting. `clear` has to follow."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._words.fill_(1)

    def clear(self) -> None:
        """Clear the words after a step that was made to end; collective."""
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)  # no rank sets words of that step any more
        self._words.zero_()
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)

    def close(self) -> None:
        """Free the memory. No rank may have work left that uses it."""
        self._base = self._words = self._shared = None

    def _write(self, base: int, word: int, value: int) -> None:
        self._stream_words.write(torch.cuda.current_stream(self._device), base + 4 * word, value)


def packet_bytes(like: Sequence[Tensor]) -> int:
    """Bytes of a slot for packets of these shapes and dtypes."""
    return sum(_lines(t.nbytes) for t in like)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
