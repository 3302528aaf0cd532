"""What a message tells of others: one that arrives shows that its sender had received this and that before it made it.

In: a `Plan`. Out: for each message that a rank receives, those that it sent and whose arrival is certain then. So what was sent
is let go of in the order of the plan, and nobody has to ask the device: a step in a CUDA graph could not.

A rank takes a message at the beginning of the action that needs it, and sends what an action made before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forebay.pipeline.links import Message
from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Plan


class _Sent(NamedTuple):
    message: Message
    source: int
    made: int
    """Number of the action that makes it, on `source`."""
    target: int
    taken: int
    """Number of the action that needs it, on `target`."""


def answers(plan: Plan, rank: int) -> Mapping[Message, list[Message]]:
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


def _messages(plan: Plan) -> Iterator[_Sent]:
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
