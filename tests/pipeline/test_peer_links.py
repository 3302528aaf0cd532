"""Copies between pipeline ranks: every packet arrives, whatever the ranks' speeds, and all words are clear after a step.

Threads stand for ranks, and a word that is set twice or never is an error. The real memory is in `test_engines_gpu`.
"""

import random
import threading
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.config import SCHEDULES
from forebay.pipeline.p2p import Message, Packet, messages_of, neighbors
from forebay.pipeline.peer_links import (
    Channel,
    PeerLinks,
    _waiting,
    channels_of,
    packet_bytes,
    slots_and_words,
    slots_needed,
)
from forebay.pipeline.schedule import PipelinePlan, forward_plan, make_plan

PLANS = [*product(SCHEDULES, (2, 4), (8, 16))]


class Shared:
    """Slots and words of all ranks."""

    def __init__(self, ranks: int, slots: int, words: int):
        self.slots: list[list[Packet | None]] = [[None] * slots for _ in range(ranks)]
        self.words = [[0] * words for _ in range(ranks)]
        self.changed = threading.Condition()


class Boxes:
    """`Mailboxes` of one rank."""

    def __init__(self, shared: Shared, rank: int):
        self._shared, self._rank = shared, rank

    def put(self, rank: int, slot: int, packet: Packet) -> None:
        with self._shared.changed:
            assert self._shared.slots[rank][slot] is None, "a packet that nobody took is overwritten"
            self._shared.slots[rank][slot] = tuple(t.clone() for t in packet)

    def take(self, slot: int, like: Sequence[Tensor]) -> Packet:
        with self._shared.changed:
            packet = self._shared.slots[self._rank][slot]
            assert packet is not None
            self._shared.slots[self._rank][slot] = None
        assert [(t.shape, t.dtype) for t in packet] == [(t.shape, t.dtype) for t in like]
        return packet

    def set(self, rank: int, word: int) -> None:
        with self._shared.changed:
            assert not self._shared.words[rank][word], "a word is set twice"
            self._shared.words[rank][word] = 1
            self._shared.changed.notify_all()

    def records(self) -> bool:
        return False

    def wait(self, word: int) -> None:
        own = self._shared.words[self._rank]
        with self._shared.changed:
            assert self._shared.changed.wait_for(lambda: own[word], timeout=20), "nobody sets this word"
            own[word] = 0


def number_of(message: Message) -> Tensor:
    return torch.tensor([message.stage, message.microbatch, ord(message.kind)])


def run_steps(plan: PipelinePlan, slots: int, seed: int, steps: int = 3) -> Shared:
    """All ranks' actions, at random speeds; what arrives is compared."""
    pairs = neighbors(plan.ranks)
    shared = Shared(len(plan.actions), *slots_and_words(pairs, slots))
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        chance = random.Random(seed * 100 + rank)
        links = PeerLinks(rank, pairs, slots, Boxes(shared, rank))
        takes: dict[int, list[Any]] = {}
        makes: dict[int, list[Any]] = {}
        for message in messages_of(plan):
            if message.target == rank:
                takes.setdefault(message.taken, []).append(message)
            if message.source == rank:
                makes.setdefault(message.made, []).append(message)
        for _ in range(steps):
            for at in range(len(plan.actions[rank])):
                for m in takes.get(at, ()):
                    links.expect(m.message, m.source, [torch.empty(3, dtype=torch.int64, device="meta")])
                    assert torch.equal(*links.receive(m.message), number_of(m.message))
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 1e-3)
                for m in makes.get(at, ()):
                    links.send(m.message, m.target, (number_of(m.message),))
            links.finish()

    def noting(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=noting, args=(rank,), daemon=True) for rank in range(len(plan.actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return shared


@pytest.mark.parametrize(("name", "pp", "microbatches"), PLANS)
def test_packets_arrive_and_words_are_clear(name: str, pp: int, microbatches: int) -> None:
    """With the slots of a trainer, and with as few as the plan can run with."""
    plan = make_plan(name, pp, microbatches)
    evaluation = forward_plan(plan)
    fewest = max(slots_needed(p, early=False) for p in (plan, evaluation))
    enough = max(fewest, slots_needed(plan, early=True))
    assert enough <= 2 * pp + 2
    for of, slots, seed in ((plan, enough, 0), (plan, fewest, 1), (evaluation, enough, 2)):
        shared = run_steps(of, slots, seed)
        assert not any(any(words) for words in shared.words)
        assert all(slot is None for mine in shared.slots for slot in mine)


def test_slots_by_hand() -> None:
    """1F1B on 2 ranks: each packet is taken by the next action. A V's rank 0 runs two forwards before rank 1 has run both of its
    first one's."""
    assert slots_needed(make_plan("1f1b", 2, 8), early=True) == 1
    assert slots_needed(make_plan("dualpipev", 2, 8), early=True) == 2
    interleaved = make_plan("interleaved-1f1b", 2, 8)
    assert slots_needed(interleaved, early=False) == 2 and _waiting(interleaved, 1) is None


def test_no_step_follows_one_that_failed() -> None:
    shared = Shared(2, *slots_and_words([(0, 1), (1, 0)], 1))
    links = PeerLinks(0, [(0, 1), (1, 0)], 1, Boxes(shared, 0))
    links.send(Message("F", 1, 0), 1, (torch.ones(1),))
    links.reset()
    for call in (
        lambda: links.send(Message("F", 1, 0), 1, (torch.ones(1),)),
        lambda: links.expect(Message("B", 0, 0), 1, []),
    ):
        with pytest.raises(RuntimeError, match="a step of this pipeline failed"):
            call()


@pytest.mark.parametrize(("name", "pp", "microbatches"), PLANS)
def test_messages_are_taken_in_the_order_in_which_they_are_sent(name: str, pp: int, microbatches: int) -> None:
    plan = make_plan(name, pp, microbatches)
    for of in (plan, forward_plan(plan)):
        messages = list(messages_of(of))
        for channel in channels_of(neighbors(of.ranks)):
            mine = [m for m in messages if Channel(m.message.kind, m.source, m.target) == channel]
            assert sorted(mine, key=lambda m: m.made) == sorted(mine, key=lambda m: m.taken)


def test_slots_are_distinct_and_packets_begin_on_lines() -> None:
    pairs = neighbors((0, 1, 2, 1, 0))
    slots, words = slots_and_words(pairs, 3)
    assert (slots, words) == (4 * 3, 8 * 3)  # rank 1 gets both kinds from two ranks
    for rank in range(3):
        links = PeerLinks(rank, pairs, 3, Boxes(Shared(3, slots, words), rank))
        own = [links._words(c, n)[0] for c in links._numbers if c.target == rank for n in range(3)]
        own += [links._words(c, n)[1] for c in links._numbers if c.source == rank for n in range(3)]
        assert len(set(own)) == len(own) and max(own) < words
        assert links._words(channels_of(pairs)[0], 4) == links._words(channels_of(pairs)[0], 1)
    like = [torch.empty(3, 5, dtype=torch.bfloat16, device="meta"), torch.empty(65, device="meta")]
    assert packet_bytes(like) == 256 + 512
