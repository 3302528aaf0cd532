"""What parameters, gradients and the optimizer allocate during a step, in order and by stream.

In: `WeightShapes` and `Sharing` (`forebay.estimate.state`) and the layers of a rank. Out: one of three `ParamLifecycle`s, which
are told of a step's moments and allocate as torch does then. They own the blocks that they were given by the allocator, and
nothing else.

    Plain      no process group: a gradient is what backward made first, and lasts to the optimizer's step
    ByModule   FSDP2's hooks: a layer is gathered before it runs, and its gradients are summed or reduced behind its backward
    Gathered   whole weights for a step (`forebay.train.unsharded_step`): gathered before it, sums made then, reduced behind it

Of FSDP2 (`torch.distributed.fsdp._fully_shard`, torch 2.11 to 2.13), which matters because each stream has its own memory:

    gathering, in forward and backward       the shards in one piece, cast, and the buffer that they arrive in: on the stream
                                             "gather"; the parameters' whole tensors, copied out of it: on the compute stream.
                                             The buffer waits for the next gathering's copy out (forward), or is free at once
    gathering a step                         all of it on the compute stream
    one process                              no buffer: each parameter is cast, and copied
    reducing                                 the gradients in one piece: compute stream, until the next reducing; what comes of
                                             it, of which the shards' gradients are views: on the stream "reduce", to the step's
                                             end
    reducing a step                          the same on the compute stream, but that a weight in a group of its own is sent
                                             from where it is; the head's first, then the embedding's, whose sum is made then,
                                             in the memory of the head's, unless it is there from the begin

The optimizer makes both moments and a step count a parameter in its first step, in the order of the parameters: matrices, then
vectors. Random parameters are drawn whole, each made before the one drawn last is let go of; so are what FSDP2 casts them to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.estimate.allocator import SMALL, Block, CachingAllocator
from forebay.estimate.state import Sharing, WeightShapes, shard_lengths

GATHER = "gather"
REDUCE = "reduce"
DEFAULT = "default"


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together. Elements of each: of the rank's shard, of the whole that it computes with, and of
    the parameter that is drawn.

    Attributes:
        place: a layer's place among the rank's, or -1 for embedding, last norm and head.
        experts: of a MoE layer, in a group of their own.
        processes: that share it.
        names: what each is: "embedding", "head", or "".
        vectors: of each, whether it is one.
    """

    place: int
    experts: bool
    processes: int
    own: tuple[int, ...]
    whole: tuple[int, ...]
    drawn: tuple[int, ...]
    names: tuple[str, ...]
    vectors: tuple[bool, ...]


def groups_of(
    weights: WeightShapes, layers: Sequence[int], embedding: bool, head: bool, sharing: Sharing
) -> list[Group]:
    """In the order in which FSDP2 finds its modules: what no other group has, embedding, layers, head."""
    s = sharing
    ends = [("embedding", shape) for shape in (weights.embedding if embedding else ())]
    rest = [("", shape) for shape in (weights.head if head else ()) if len(shape) < 2]
    last = [("head", shape) for shape in (weights.head if head else ()) if len(shape) > 1]
    apart = s.pp > 1 and not weights.tied
    found = [_group(-1, False, s.data, rest if apart else [*ends, *rest, *last], s)]
    found += [_group(-1, False, s.data, ends, s)] if apart and ends else []
    for place, number in enumerate(layers):
        others, experts = weights.layers[number]
        mine = [("", (shape[0] // s.ep, *shape[1:])) for shape in experts]
        named = [("", shape) for shape in others]
        if s.sharded and s.ep > 1 and mine:
            found += [_group(place, False, s.data, named, s), _group(place, True, s.data // s.ep, mine, s)]
        else:
            found.append(_group(place, False, s.data, [*named, *mine], s))
    found += [_group(-1, False, s.data, last, s)] if apart and last else []
    return [group for group in found if group.own]


def _group(
    place: int, experts: bool, processes: int, parameters: Sequence[tuple[str, tuple[int, ...]]], s: Sharing
) -> Group:
    shapes = [shape for _, shape in parameters]
    whole = tuple(math.prod(shape) for shape in shapes)
    return Group(
        place,
        experts,
        processes,
        tuple(shard_lengths(shape, processes, experts) for shape in shapes) if s.sharded else whole,
        whole,
        tuple(n * s.ep if experts else n for n in whole),
        tuple(name for name, _ in parameters),
        tuple(len(shape) < 2 for shape in shapes),
    )


class ParamLifecycle(Protocol):
    """What a step tells its weights."""

    def begin_step(self) -> None:
        """Before the first forward."""

    def enter(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """A half of a layer, or an end ("embedding", "head"), begins. `last`: of the step's last microbatch."""

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """It is over."""

    def compute_experts(self, place: Any, begin: bool) -> None:
        """Where tokens travel: the experts' own computation begins, or is over."""

    def keeps(self, place: Any, mlp: bool, block: Block) -> bool:
        """A weight's gradient was made, and autograd lets go of it: whether it stays."""

    def end_step(self) -> None:
        """Behind the last backward."""

    def zero_grad(self) -> None:
        """Gradients are gone."""


class Persistent:
    """Parameters and moments.

    Args:
        drawn: parameters are random, and not read from a folder.
    """

    def __init__(self, paper: CachingAllocator, groups: Sequence[Group], sharing: Sharing, drawn: bool):
        self._paper, self._s = paper, sharing
        self._moments: list[Block] = []
        self._order = sorted(
            (
                (_rank_of(group, name), own, drawn, vector)
                for group in groups
                for name, own, drawn, vector in zip(group.names, group.own, group.drawn, group.vectors, strict=True)
            ),
            key=lambda parameter: parameter[0],
        )
        for size in self._sizes():
            paper.malloc(size, DEFAULT)
        last: Block | None = None
        for _, _, elements, _ in self._order if drawn else ():
            block = paper.malloc(sharing.parameter * elements, DEFAULT)
            if last is not None:
                paper.free(last)
            last = block
        if last is not None:
            paper.free(last)

    def optimize(self) -> None:
        """An optimizer's step."""
        s, first = self._s, not self._moments
        for vectors in (False, True):
            sizes = self._sizes(vectors)
            for size in sizes if first else ():
                steps = [4] if s.fused else []
                self._moments += [self._paper.malloc(n, DEFAULT) for n in (*steps, size, size)]
            if not s.fused:  # the root of the second moments, of all parameters at once
                for block in [self._paper.malloc(size, DEFAULT) for size in sizes]:
                    self._paper.free(block)

    def _sizes(self, vectors: bool | None = None) -> list[int]:
        return [self._s.parameter * own for _, own, _, vector in self._order if own and vectors in (None, vector)]


def _rank_of(group: Group, name: str = "") -> tuple[int, int]:
    """In which order a model has its parameters: embedding, layers, last norm, head."""
    return (1, group.place) if group.place >= 0 else ({"embedding": 0, "head": 3}.get(name, 2), 0)


class Plain:
    """See the module docstring."""

    def __init__(self, paper: CachingAllocator, groups: Sequence[Group], sharing: Sharing):
        self._paper = paper
        self._there: dict[Any, int] = {}
        self._held: list[Block] = []
        self._seen: dict[Any, int] = {}

    def begin_step(self) -> None:
        """Nothing."""

    def enter(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """Count its gradients from the first."""
        if backward:
            self._seen[place, mlp] = 0

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """Nothing."""

    def compute_experts(self, place: Any, begin: bool) -> None:
        """Nothing."""

    def keeps(self, place: Any, mlp: bool, block: Block) -> bool:
        """The first one of each weight."""
        self._seen[place, mlp] += 1
        if self._seen[place, mlp] <= self._there.get((place, mlp), 0):
            return False
        self._there[place, mlp] = self._seen[place, mlp]
        self._held.append(block)
        return True

    def end_step(self) -> None:
        """Nothing."""

    def zero_grad(self) -> None:
        """See `ParamLifecycle`."""
        for block in self._held:
            self._paper.free(block)
        self._held, self._there = [], {}


class _Sharded:
    """What both lives with FSDP2 share."""

    def __init__(self, paper: CachingAllocator, groups: Sequence[Group], sharing: Sharing, stream: Any):
        self._paper, self._s, self._stream = paper, sharing, stream
        self._reducing: Any = REDUCE
        self._groups = list(groups)
        self._whole: dict[int, list[Block]] = {}  # group's number -> its gathered parameters
        self._sums: dict[int, list[Block]] = {}
        self._shards: dict[int, list[Block]] = {}  # gradients
        self._sending: list[Block] = []

    def _gather(self, number: int, buffers: Any) -> list[Block]:
        """What is to be freed when the parameters have been copied out of it; for one process, nothing."""
        group, size = self._groups[number], self._s.compute
        if group.processes == 1:
            return []
        own = sum(group.own)
        cast = self._paper.malloc(size * own, buffers) if self._s.compute != self._s.parameter else None
        arriving = self._paper.malloc(size * own * group.processes, buffers)
        if cast is not None:
            self._paper.free(cast)
        return [arriving]

    def _copy_out(self, number: int) -> None:
        group, size, there = self._groups[number], self._s.compute, number in self._whole
        whole = self._whole.setdefault(number, [])
        cast: list[Block] = []
        for own in group.own:
            if group.processes == 1 and self._s.compute != self._s.parameter:
                cast.append(self._paper.malloc(size * own, self._stream))
                self._free(cast[:-1])
                del cast[:-1]
            if not there:
                whole.append(self._paper.malloc(size * own * group.processes or 1, self._stream))
        self._free(cast)

    def _reshard(self, number: int) -> None:
        self._free(self._whole.pop(number, ()))

    def _reduce(self, number: int) -> None:
        """Sums, or gradients, of a group to those of its shards."""
        group, s = self._groups[number], self._s
        sums = self._sums.pop(number, [])
        if not sums:
            return
        if group.processes == 1:
            # What a process has whole stays where it is, or is cast one by one: by the trainer, not by FSDP2.
            if s.summed != s.parameter:
                for i, own in enumerate(group.own):
                    cast = self._paper.malloc(s.parameter * own, DEFAULT)
                    self._let_go([sums[i]])
                    sums[i] = cast
            self._shards[number] = sums
            return
        own = sum(group.own)
        in_place = self._in_place(number)
        if not in_place:
            self._free(self._sending)
            self._sending = [self._paper.malloc(s.summed * own * group.processes, self._stream)]
            self._let_go(sums)
        reduced = self._paper.malloc(s.summed * own, self._reducing)
        if in_place:
            self._let_go(sums)
        if s.summed != s.parameter:
            cast = self._paper.malloc(s.parameter * own, self._reducing)
            self._paper.free(reduced)
            reduced = cast
        if number in self._shards:  # added to what other microbatches gave
            self._paper.free(reduced)
        else:
            self._shards[number] = [reduced]

    def _in_place(self, number: int) -> bool:
        """Whether a group's gradient is sent from where it is."""
        return False

    def _let_go(self, sums: Iterable[Block]) -> None:
        """Sums were reduced or copied."""
        self._free(sums)

    def compute_experts(self, place: Any, begin: bool) -> None:
        """They are there with their half."""

    def _reduced(self) -> None:
        self._free(self._sending)
        self._sending = []

    def zero_grad(self) -> None:
        """See `ParamLifecycle`. In the order of the parameters, a reduced group's with its last one."""
        found = []
        for number, blocks in self._shards.items():
            group = self._groups[number]
            names = group.names if len(blocks) == len(group.names) else ("head",) * len(blocks)
            found += [(_rank_of(group, name), block) for name, block in zip(names, blocks, strict=True)]
        self._let_go(block for _, block in sorted(found, key=lambda pair: pair[0]))
        self._shards = {}

    def _free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._paper.free(block)


class ByModule(_Sharded):
    """See the module docstring. With `reshard` layers and ends are given back behind their forward, and gathered again; the ends
    are one module's, the model's own."""

    def __init__(self, paper: CachingAllocator, groups: Sequence[Group], sharing: Sharing, stream: Any):
        super().__init__(paper, groups, sharing, stream)
        self._arriving: list[Block] = []  # that the next copy out frees
        self._fetched: dict[int, list[Block]] = {}
        self._gradients: dict[int, list[Block]] = {}
        self._ends = [n for n, group in enumerate(groups) if group.place < 0]
        self._layers: dict[Any, list[int]] = {}
        for n, group in enumerate(groups):
            self._layers.setdefault(group.place, []).append(n)
        # A layer's experts, in a group of their own, have gone forward before it has.
        layers = [n for n, group in enumerate(groups) if group.place >= 0]
        self._order = sorted(layers, key=lambda n: (groups[n].place, not groups[n].experts))

    def begin_step(self) -> None:
        """Nothing is gathered yet."""

    def enter(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """Gather what is not there."""
        wanted = self._wanted(place, mlp, backward)
        for n in wanted:
            if n in self._whole:
                continue
            arriving = self._fetched.pop(n) if n in self._fetched else self._gather(n, GATHER)
            if backward:
                self._copy_out(n)
                self._free(arriving)
                self._fetch_before(n)
            else:
                self._free(self._arriving)
                self._copy_out(n)
                self._arriving = arriving

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """Give back what is not needed, and sum or reduce gradients."""
        if place in ("embedding", "head"):
            if backward and place == "embedding":
                self._finish(self._ends, last)
            elif place == "head" and not backward:  # the model's forward is over
                self._free(self._arriving)
                self._arriving = []
                for n in self._ends if self._s.reshard else ():
                    self._reshard(n)
            return
        done = [n for n in self._layers[place] if self._groups[n].experts == mlp]
        if not backward:
            done = [n for n in self._layers[place] if mlp]  # a layer's own, behind its second half
            if self._s.reshard:
                for n in done:
                    self._reshard(n)
            return
        self._finish(done, last)

    def _finish(self, numbers: Sequence[int], last: bool) -> None:
        """Behind a group's backward."""
        s = self._s
        for n in numbers:
            group = self._groups[n]
            if s.reshard or last:
                self._reshard(n)
            gradients = _in_order(self._gradients.pop(n, []), [s.compute * whole for whole in group.whole])
            alone = group.processes == 1
            if n in self._sums:
                self._free(gradients)
            elif gradients and s.summed != s.compute and (alone or not (last or not s.sums)):
                self._sums[n] = []
                for block in gradients:
                    self._sums[n].append(self._paper.malloc(block.size * s.summed // s.compute, self._stream))
                    self._paper.free(block)
            elif gradients:
                self._sums[n] = gradients
            if (last or not s.sums) and not alone:
                self._reduce(n)

    def keeps(self, place: Any, mlp: bool, block: Block) -> bool:
        """Until the group's backward is over."""
        numbers = self._ends if place in ("embedding", "head") else self._layers[place]
        chosen = [n for n in numbers if self._groups[n].experts and mlp] or [n for n in numbers]
        number = chosen[0]
        if mlp and len(numbers) > 1 and block.size < self._s.compute * min(self._groups[number].whole):
            number = numbers[0]  # the router's and the shared experts' are their layer's
        self._gradients.setdefault(number, []).append(block)
        return True

    def end_step(self) -> None:
        """What is a process's own is handed over."""
        for n in list(self._sums):
            self._reduce(n)
        self._reduced()
        for n in list(self._whole):
            self._reshard(n)
        for blocks in (self._arriving, *self._fetched.values()):
            self._free(blocks)
        self._arriving, self._fetched = [], {}

    def _wanted(self, place: Any, mlp: bool, backward: bool) -> list[int]:
        if place in ("embedding", "head"):
            return self._ends
        numbers = self._layers[place]
        return [n for n in numbers if mlp or not self._groups[n].experts]

    def _fetch_before(self, number: int) -> None:
        """The group that went forward before this one, whose backward comes next."""
        at = self._order.index(number) if number in self._order else len(self._order)
        if at and (n := self._order[at - 1]) not in self._whole and n not in self._fetched:
            self._fetched[n] = self._gather(n, GATHER)


def _in_order(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Block]:
    """Blocks in the order of the sizes that they were asked for with; FSDP2 looks at gradients in the parameters' order."""
    left, found = list(blocks), []
    for size in sizes:
        fitting = [block for block in left if 0 <= block.size - size <= SMALL]
        if fitting:
            found.append(min(fitting, key=lambda block: block.size))
            left.remove(found[-1])
    return found + left


class Unsharded(_Sharded):
    """See the module docstring.

    A captured step's sums, and the rows that its embedding's sum is made of, are the graph's: `hold` them when it was captured,
    and `restore` them in the place of a step.

    Args:
        late: the embedding's sum is made when it is reduced.
        twice: the embedding is the head too, and of both there is a sum: the embedding's is added to the head's when it is made.
        keep: gathered memory stays between steps, as a captured step needs it.
    """

    def __init__(
        self,
        paper: CachingAllocator,
        groups: Sequence[Group],
        sharing: Sharing,
        stream: Any,
        late: bool,
        keep: bool,
        twice: bool = False,
    ):
        super().__init__(paper, groups, sharing, stream)
        self._late, self._keep, self._twice, self._reducing = late, keep, twice, stream
        self._beside: list[Block] = []  # the embedding's sum, until it is added to the head's
        self._brief = {g.place: n for n, g in enumerate(groups) if g.experts and sharing.reshard}
        self._graphs: dict[int, list[Block]] = {}
        self._embeds = late and bool(self._embedding())
        self._passed: Block | None = None  # the head's sum, when it was reduced and the embedding's is to be made
        first = {"head": 0, "embedding": 1}
        places = [min((first.get(name, 2) for name in group.names), default=2) for group in groups]
        self._reduced_in = sorted(range(len(groups)), key=places.__getitem__)

    def gather(self) -> None:
        """Before `begin_step`."""
        if not self._s.sharded:
            return
        for n in range(len(self._groups)):
            arriving = self._gather(n, self._stream)
            self._copy_out(n)
            self._free(arriving)

    def begin_step(self) -> None:
        """Zeros for all sums."""
        s = self._s
        for n, group in enumerate(self._groups):
            self._sums[n] = [
                self._paper.malloc(s.summed * whole, self._stream)
                for name, whole in zip(group.names, group.whole, strict=True)
                if not (name == "embedding" and self._late and not self._twice)
            ]
        if self._twice and not self._late:
            self._beside = [self._paper.malloc(s.summed * whole, self._stream) for whole in self._embedding()]

    def enter(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """The experts, if they were given back. Where tokens travel, other microbatches compute within a half: not before they
        have come."""
        if mlp and self._s.ep == 1:
            self.compute_experts(place, True)

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """Give them back."""
        if mlp and self._s.ep == 1:
            self.compute_experts(place, False)

    def compute_experts(self, place: Any, begin: bool) -> None:
        """See `ParamLifecycle`."""
        n = self._brief.get(place)
        if n is not None and begin and n not in self._whole:
            arriving = self._gather(n, self._stream)
            self._copy_out(n)
            self._free(arriving)
        elif n is not None and not begin:
            self._reshard(n)

    def keeps(self, place: Any, mlp: bool, block: Block) -> bool:
        """It was added to its sum."""
        return False

    def end_step(self) -> None:
        """All sums are there, but the embedding's if it is `late`."""
        self._free(self._beside)
        self._beside = []

    def hold(self) -> None:
        """The step was captured: what it left is the graph's from now on."""
        self._graphs = {n: list(blocks) for n, blocks in self._sums.items()}

    def restore(self) -> None:
        """A captured step was replayed."""
        self._sums = {n: list(blocks) for n, blocks in self._graphs.items()}

    def reduce(self, rows: list[Block], spread: int) -> None:
        """Behind `end_step`. `rows`: gradients of embedded tokens, of all microbatches; let go of when they have been spread, if
        they are no graph's. `spread`: bytes of those of one in fp32."""
        if not self._s.sharded:
            self._shards, self._sums = self._sums, {}
            return
        for n in self._reduced_in:
            group = self._groups[n]
            if "embedding" in group.names and self._late:
                self._sum_embedding(n, spread)
                if not self._graphs:
                    self._free(rows)
            if not (self._keep or self._in_place(n)):
                self._reshard(n)
            if group.processes > 1:
                if group.names == ("head",) and self._embeds:
                    (self._passed,) = self._sums[n]
                self._reduce(n)
            if self._in_place(n):  # FSDP2's turn comes behind it
                self._free(self._sending)
                self._sending = []
                if not self._keep:
                    self._reshard(n)
        self._reduced()

    def finish(self) -> None:
        """Behind `reduce`: what a process has to itself is handed over."""
        for n in list(self._sums):
            self._reduce(n)

    def _embedding(self) -> list[int]:
        """Elements of the embedding, if the rank has it."""
        pairs = [pair for group in self._groups for pair in zip(group.names, group.whole, strict=True)]
        return [whole for name, whole in pairs if name == "embedding"]

    def _sum_embedding(self, number: int, spread: int) -> None:
        for whole in self._embedding():
            total, self._passed = self._passed or self._paper.malloc(self._s.summed * whole, self._stream), None
            self._paper.free(self._paper.malloc(spread, self._stream))
            if self._twice:
                self._paper.free(total)
            else:
                self._sums[number].append(total)

    def _in_place(self, number: int) -> bool:
        """If it has one weight, in equal parts."""
        group = self._groups[number]
        return group.processes > 1 and len(group.own) == 1 and group.own[0] * group.processes == group.whole[0]

    def _let_go(self, sums: Iterable[Block]) -> None:
        """But what is a graph's, and the head's sum, whose memory the embedding's is made in."""
        graphs = [block for blocks in self._graphs.values() for block in blocks]
        self._free([b for b in sums if b is not self._passed and all(b is not other for other in graphs)])
