"""The figures of a trace: its question (`Shape`), its answer (`ModelTrace`), and the allocation events of a part.

`PartEvents` is the order in which a part of a model allocates and frees, made from a log of operations on fake
tensors. Plain data: nothing is run or kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# In what order a part of a model allocates and frees: what is noted while it runs on paper, and what becomes of it.
#
# In: a log, written by `forebay.estimate.live` while a part runs forward and backward on fake tensors: operations with the
# storages that they read and make, and storages that are let go of. Out: a `PartEvents`: for forward and backward the order of
# allocations and frees of a real run, which `forebay.estimate.reserved` gives to an allocator. Storages are numbers; a number
# is never used again.
#
# Uncompiled, the log is that order. A compiled half makes fewer tensors and keeps fewer, so it is told what is *again*: results
# of operations that compiled code fuses into what reads them, and makes again in backward.
#
#     forward    an again-tensor has memory only if an operation that is not fused (a GEMM, attention, the experts) reads it,
#                or if it leaves the half; it is free behind its last reader
#     saved      what the tensors that autograd saved were made of: see `forebay.estimate.trace`
#     backward   an again-tensor of forward that an unfused operation reads is made in front of that one, and free behind its
#                last reader; what it is made from is free behind the last operation that reads it or anything fused from it
#
# A part's input, its output and the two gradients between it and its neighbours live longer than the part: their numbers are
# named, and whoever lays parts one behind the other knows when they begin and end.

Event = tuple[int, int]
"""(storage, bytes) where it is allocated, (storage, 0) where it is freed, (-1, index of a mark) where something is marked."""

SENT, CAME, MULTIPLIES, NORMED, STASHED = 0, 1, 2, 3, 4
"""Marks: in front of an operation of which tokens travel, and behind it; in front of a part's first matrix product, for which
cuBLAS has a workspace; behind the last norm, when a model's own forward is over; where pages are taken
(`forebay.estimate.walk`)."""


class Op(NamedTuple):
    """An operation. `fused`: compiled code would fuse it. `made`: of each new storage its number, bytes, whether it is again, and
    the numbers of what it was made of."""

    fused: bool
    reads: tuple[int, ...]
    made: tuple[tuple[int, int, bool, frozenset[int]], ...]


class Gone(NamedTuple):
    """A storage that nobody holds any more."""

    number: int


class Mark(NamedTuple):
    """See `SENT` and what follows it."""

    number: int


Log = list[Op | Gone | Mark]


@dataclass(frozen=True)
class PartEvents:
    """One microbatch in one part.

    Attributes:
        forward, backward: events; see `Event`. Of the four named storages, backward has frees at most.
        alone: forward where nothing is saved: recomputation's first time.
        x, output, gradient, dx: numbers of the input, the output, the output's gradient and the input's; -1 for none.
        saves_x: backward reads x.
        saved: numbers of what lasts from forward to backward, in the order in which it is saved; of a compiled half, in which it
            is made.
        weights: numbers of the weights' gradients, in the order in which they are made.
        travelling: numbers of what is allocated where tokens travel: on a stream of its own, if there is one.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    alone: tuple[Event, ...]
    x: int
    output: int
    gradient: int
    dx: int
    saves_x: bool
    weights: tuple[int, ...]
    travelling: frozenset[int]
    saved: tuple[int, ...] = ()


class Ends(NamedTuple):
    """Of a part's two logs, what the log does not say. `saved`: numbers of what autograd saved, in order; of a compiled half what
    that was made of."""

    x: int
    output: int
    gradient: int
    dx: int
    weights: tuple[int, ...]
    saved: tuple[int, ...]
    travelling: frozenset[int]


def part_events(forward: Log, backward: Log, ends: Ends, compiled: bool, dry: Log | None = None) -> PartEvents:
    """What a part's two logs come to. `dry`: the log of its forward run without a graph; where there is none, every storage is
    taken to be free behind its last reader."""
    if compiled:
        there, back = _compiled(forward, backward, ends)
        freed = {n for n, size in there if not size}
        # A compiled half hands out all that is saved when it is over: a checkpoint drops it then.
        alone = there + [(n, 0) for n, size in there if size and n >= 0 and n not in freed and n != ends.output]
    else:
        there, back = _as_it_is(forward), _as_it_is(backward)
        alone = _alone(dry, ends) if dry else list(_without_saving(forward, ends))
    there, back, alone = (_once(events) for events in (there, back, alone))
    frees = {n for n, size in (*there, *back) if not size}
    made = {n for n, size in (*there, *back) if size and n >= 0}
    there = [e for e in there if e[0] < 0 or e[1] or e[0] not in (ends.x, ends.output)]
    back = [e for e in back if e[0] < 0 or not e[1] or e[0] not in (ends.x, ends.output, ends.gradient)]
    # What nobody let go of while it was watched, such as what a router said.
    back += [(n, 0) for n in sorted(made - frees) if n != ends.output]
    back = [e for e in back if e[0] < 0 or e[1] or e[0] not in (ends.dx, ends.output)]
    return PartEvents(
        tuple(there),
        tuple(back),
        tuple(alone),
        ends.x,
        ends.output,
        ends.gradient,
        ends.dx,
        ends.x in ends.saved,
        ends.weights,
        ends.travelling,
        tuple(n for n in ends.saved if n >= 0),
    )


def _once(events: Iterable[Event]) -> list[Event]:
    """Of marks of matrix products the first alone."""
    found, seen = [], False
    for event in events:
        mark = event == (-1, MULTIPLIES)
        if not (mark and seen):
            found.append(event)
        seen = seen or mark
    return found


def highest(events: Iterable[Event], sizes: dict[int, int]) -> int:
    """How far live bytes rise above their begin. `sizes` of what is there is known before, and is filled in."""
    level = most = 0
    for number, size in events:
        if number < 0:
            continue
        if size:
            sizes[number] = size
            level += size
            most = max(most, level)
        else:
            level -= sizes.pop(number, 0)
    return most


def _as_it_is(log: Log) -> list[Event]:
    found: list[Event] = []
    for entry in log:
        if isinstance(entry, Op):
            found += [(n, size) for n, size, _, _ in entry.made]
        elif isinstance(entry, Gone):
            found.append((entry.number, 0))
        else:
            found.append((-1, entry.number))
    return found


def _alone(dry: Log, ends: Ends) -> list[Event]:
    """Its own numbers, but for the input's and the output's: that is the one which is made last and stays to the end."""
    events = _as_it_is(dry)
    made = [n for n, size in events if size and n >= 0]
    left = {n for n, size in events if not size and n >= 0}
    last = [entry.number for entry in dry if isinstance(entry, Gone)]
    stays = [n for n in made if n not in left] or last[-1:]
    output = stays[-1] if stays else -1
    rest = [(n, 0) for n in stays[:-1]]
    return [(ends.output if n == output else n, size) for n, size in events if n != output or size] + rest


def _without_saving(log: Log, ends: Ends) -> Iterator[Event]:
    """Forward, each storage but the output free behind its last reader."""
    last = _last_reads(log)
    left = {n for entry in log if isinstance(entry, Op) for n, *_ in entry.made}
    for at, entry in enumerate(log):
        if isinstance(entry, Mark):
            yield -1, entry.number
        elif isinstance(entry, Gone):
            if entry.number in left and entry.number != ends.output:
                left.discard(entry.number)
                yield entry.number, 0
        else:
            yield from ((n, size) for n, size, _, _ in entry.made)
            for n in dict.fromkeys((*entry.reads, *(m[0] for m in entry.made))):
                if n in left and n != ends.output and last.get(n, at) == at:
                    left.discard(n)
                    yield n, 0


def _compiled(forward: Log, backward: Log, ends: Ends) -> tuple[list[Event], list[Event]]:
    made = {n: (size, again, of) for entry in forward if isinstance(entry, Op) for n, size, again, of in entry.made}
    kept = {n for n in ends.saved if n in made}
    return _compiled_forward(forward, ends, kept), _compiled_backward(backward, ends, made, kept)


def _compiled_forward(log: Log, ends: Ends, kept: set[int]) -> list[Event]:
    read, last = _read_unfused(log), _last_reads(log)
    found: list[Event] = []
    here: dict[int, bool] = {}  # what has memory, and is not kept: whether it is again
    for at, entry in enumerate(log):
        if isinstance(entry, Mark):
            found.append((-1, entry.number))
            continue
        if isinstance(entry, Gone):
            if entry.number in here and not here[entry.number]:
                del here[entry.number]
                found.append((entry.number, 0))
            continue
        for n, size, again, _ in entry.made:
            if not again or n in read or n == ends.output or n in kept:
                found.append((n, size))
                if n != ends.output and n not in kept:
                    here[n] = again
        for n in entry.reads:
            if n in here and last[n] == at:
                del here[n]
                found.append((n, 0))
    return found + [(n, 0) for n in here]


def _compiled_backward(
    log: Log, ends: Ends, made: dict[int, tuple[int, bool, frozenset[int]]], kept: set[int]
) -> list[Event]:
    read, last = _read_unfused(log), _last_reads(log)
    results = {ends.dx, *ends.weights}
    end: dict[int, int] = dict.fromkeys((*kept, ends.x), -1)  # of what is saved, the last operation that needs it
    for n, at in last.items():
        for source in (n, *(made[n][2] if n in made else ())):
            if source in end:
                end[source] = max(end[source], at)
    ending: dict[int, list[int]] = {}
    for n, at in end.items():
        ending.setdefault(at, []).append(n)
    found: list[Event] = [(n, 0) for n in ending.get(-1, ()) if n in kept or n in ends.saved]
    here: set[int] = set()
    again_here: set[int] = set()
    for at, entry in enumerate(log):
        if isinstance(entry, Mark):
            found.append((-1, entry.number))
            continue
        if isinstance(entry, Gone):
            if entry.number in here or entry.number == ends.gradient:
                here.discard(entry.number)
                found.append((entry.number, 0))
            continue
        for n in entry.reads:
            if not entry.fused and n in made and n not in kept and n not in again_here:
                again_here.add(n)
                found.append((n, made[n][0]))
        for n, size, again, _ in entry.made:
            if not again or n in read or n in results:
                here.add(n)
                found.append((n, size))
        for n in dict.fromkeys(entry.reads):
            if n in again_here and last[n] == at:
                found.append((n, 0))
        found += [(n, 0) for n in ending.get(at, ()) if n in kept or n in ends.saved]
    return found


def _read_unfused(log: Log) -> set[int]:
    return {n for entry in log if isinstance(entry, Op) and not entry.fused for n in entry.reads}


def _last_reads(log: Sequence[Op | Gone | Mark]) -> dict[int, int]:
    return {n: at for at, entry in enumerate(log) if isinstance(entry, Op) for n in entry.reads}


GPU_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds (torch `c10/core/AllocatorConfig.h`, kMinBlockSize)."""


@dataclass(frozen=True)
class Shape:
    """What a rank runs a microbatch of.

    Attributes:
        sequence, microbatch: tokens of a sequence, sequences.
        experts, loss: "forebay" or "transformers"; "fused" or "transformers".
        stages: MoE halves are cut where tokens travel (expert parallelism, pipelines, overlap).
        ep, skew, capacity_factor: see `forebay.estimate.trace`.
        compiled: halves are compiled (`memory.compile`).
        balance: the router's load-balancing loss has a weight, so its graph is saved.
        block: see `forebay.estimate.live.Live`.
        gpu: attention as on a GPU; else as this CPU runs it, to compare with a run on it.
        later: the experts' weight gradients are made behind all others of their backward, as engines do.
    """

    sequence: int
    microbatch: int
    experts: str = "forebay"
    loss: str = "fused"
    stages: bool = False
    ep: int = 1
    skew: float = 1.0
    capacity_factor: float = 0.0
    compiled: bool = False
    balance: bool = False
    block: int = GPU_BLOCK
    gpu: bool = True
    later: bool = False


@dataclass(frozen=True)
class OpCost:
    """What one operation, or one fused run of operations, asks of a GPU; see `forebay.estimate.op_costs`.

    Attributes:
        kind: "gemm", and "gemm_odd" of matrices whose rows do not begin at 16 bytes; "grouped" and "grouped_weights", of experts
            and of their weights' gradients; "attention" and "attention_backward"; "pointwise", whatever only moves memory, and
            "walked", the same element by element; "exchange", an all-to-all.
        flops: that are really made: under a causal mask half of attention's pairs.
        bytes: read from and written to device memory; of an exchange those that leave the GPU.
        launches: kernels.
    """

    kind: str
    flops: int
    bytes: int
    launches: int = 1


@dataclass(frozen=True)
class PartTrace:
    """One microbatch in one part of a model. Bytes and FLOPs.

    Attributes:
        saved: for backward.
        inputs: of the part's input hidden states, which recomputing it keeps.
        forward: how far memory rises above forward's begin, its input held by others.
        backward: how far it rises above backward's begin, all that is saved held by others; the gradient that comes in is
            counted in.
        forward_flops, backward_flops: see `forebay.estimate.live`.
        light: `saved` and `backward` where experts make their first product again, or None.
        stash: bytes of the experts' x and h in buffers of the capacity, and of their rows that came.
            (0, 0) without expert parallelism.
        later: bytes that the experts' weight gradients need, if they are made later (`forebay.moe.wgrad`).
        forward_ops, backward_ops: what both ask of a GPU, in order.
        light_ops: `backward_ops` where experts make their first product again; empty where there is no such thing.
        token_rows: bytes of the rows of tokens that each of the experts' weight gradients is made of, for as long as it is made.
        events, light_events: in what order it allocates and frees; the second where experts make their first product again.
    """

    saved: int
    inputs: int
    forward: int
    backward: int
    forward_flops: int
    backward_flops: int
    light: tuple[int, int] | None = None
    stash: tuple[int, int] = (0, 0)
    later: int = 0
    token_rows: int = 0
    forward_ops: tuple[OpCost, ...] = ()
    backward_ops: tuple[OpCost, ...] = ()
    light_ops: tuple[OpCost, ...] = ()
    events: PartEvents | None = field(default=None, repr=False, compare=False)
    light_events: PartEvents | None = field(default=None, repr=False, compare=False)

    def recompute_experts(self) -> PartTrace:
        """The same where experts always make their first product again; itself where they cannot."""
        if self.light is None:
            return self
        saved, backward = self.light
        return replace(
            self, saved=saved, backward=backward, backward_ops=self.light_ops, events=self.light_events,
            light=None, light_ops=(), light_events=None,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerTrace:
    """A decoder layer: `mlp` is its MoE or dense half."""

    attention: PartTrace
    mlp: PartTrace
    is_moe: bool

    @property
    def saved(self) -> int:
        """Bytes, both halves."""
        return self.attention.saved + self.mlp.saved


@dataclass(frozen=True)
class ModelTrace:
    """By part. `layers` has one entry a layer, those of a kind the same object.

    Attributes:
        shared: bytes that the first layer of a stage saves for all of them, such as rotary tables.
        balance: bytes that the load-balancing loss saves for each MoE layer.
        kinds: number of different layers.
        head_gradient: bytes of the head's `saved` that are its weight's gradient.
    """

    embedding: PartTrace
    layers: tuple[LayerTrace, ...]
    head: PartTrace
    shared: int
    balance: int
    kinds: int
    head_gradient: int

    def recompute_experts(self, numbers: Container[int]) -> ModelTrace:
        """The same where the experts of layers `numbers` always make their first product again."""
        made: dict[int, LayerTrace] = {}  # by kind
        layers = []
        for number, layer in enumerate(self.layers):
            if number in numbers:
                layer = made.setdefault(id(layer), replace(layer, mlp=layer.mlp.recompute_experts()))
            layers.append(layer)
        return replace(self, layers=tuple(layers), kinds=len({id(layer) for layer in layers}))
