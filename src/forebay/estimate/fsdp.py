"""What parameters, gradients and the optimizer allocate during a step, in order and by stream.

Input: `WeightShapes` and `Sharing` (`forebay.estimate.state`), and the layers of a rank. Output: `ParamGroup`s, and a
`ParamLifecycle` that is called at the events of a step and allocates as torch does then. Facts about FSDP2 are those of
`torch.distributed.fsdp._fully_shard`, torch 2.11 to 2.13. A lifecycle owns the blocks that it allocates, and the
gradients that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from forebay.estimate.allocator import GRADIENTS, OPTIMIZER, PARAMETERS, Block, CachingAllocator
from forebay.estimate.state import Sharing, Weight, WeightShapes, shard_length
from forebay.kernels.split_weights import BITS
from forebay.pipeline.partition import StageLayer
from forebay.train.parallel import CAST_BYTES, GATHER_BYTES, even_dimension, parts_within
from forebay.train.weights_in_place import PIECE

GATHER = "gather"
REDUCE = "reduce"
ALL_REDUCE = "all-reduce"
DEFAULT = "default"
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes, DistributedDataParallel's own default


class GroupParam(NamedTuple):
    """A parameter of a group. Sizes are elements: of the rank's shard, of what the rank computes with, and of the parameter that
    is initialized.

    Attributes:
        kind: "embedding", "head", or "".
        vector: it has one dimension.
        lent: the rank computes with it in its shard's memory.
        split: that is split; see `forebay.train.weights_in_place`.
    """

    name: str
    kind: str
    own: int
    whole: int
    drawn: int
    vector: bool = False
    frozen: bool = False
    lent: bool = False
    split: bool = False


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that FSDP2 gathers together.

    Attributes:
        place: a layer's number, or -1 for embedding, last norm and head.
        experts: they are the experts of a MoE layer, in a group of their own.
        processes: of a replica that share it.
        by_rows: each parameter is sharded along its first dimension, or by nobody.
    """

    place: int
    experts: bool
    processes: int
    params: tuple[GroupParam, ...]
    by_rows: bool = True

    @property
    def own(self) -> int:
        return sum(p.own for p in self.params)

    @property
    def trained(self) -> int:
        """Elements of the rank's shard that have gradients."""
        return sum(p.own for p in self.params if not p.frozen)

    @property
    def kinds(self) -> list[str]:
        return [p.kind for p in self.params]


def param_groups(
    weights: WeightShapes, layers: Sequence[StageLayer], embedding: bool, head: bool, sharing: Sharing
) -> list[ParamGroup]:
    """The groups in the order in which FSDP2 finds its modules: what no other group has, embedding, layers, head."""
    s = sharing
    first = [(w, "embedding") for w in weights.embedding] if embedding else []
    norm = [(w, "") for w in weights.head if not w.name.startswith("lm_head.")] if head else []
    last = [(w, "head") for w in weights.head if w.name.startswith("lm_head.")] if head else []
    if s.pp > 1 and not weights.tied:
        found = [_group(-1, norm, s), _group(-1, first, s)]
    else:
        found, last = [_group(-1, [*first, *norm, *last], s)], []
    for layer in layers:
        number, every = layer.number, [(w, "") for w in weights.of(layer)]
        others, experts = ([one for one in every if one[0].experts == apart] for apart in (False, True))
        if s.apart and experts:
            found += [_group(number, others, s), _group(number, experts, s)]
        else:
            found.append(_group(number, every, s))
    found.append(_group(-1, last, s))
    return [group for group in found if group.params]


def _group(place: int, weights: Sequence[tuple[Weight, str]], s: Sharing) -> ParamGroup:
    """`weights`: each with its `kind`."""
    experts = s.apart and all(w.experts for w, _ in weights)
    processes = s.data // s.ep if experts else s.data
    params, by_rows = [], True
    for w, kind in weights:
        shape = (w.shape[0] // s.ep, *w.shape[1:]) if w.experts else w.shape
        whole = math.prod(shape)
        own = shard_length(shape, processes, experts) if s.sharded else whole
        by_rows &= not (experts and even_dimension(shape, processes))
        drawn, places = w.elements if experts else whole, (s.lends(whole, processes), s.splits(whole, processes))
        params.append(GroupParam(w.name, kind, own, whole, drawn, len(shape) < 2, w.frozen, *places))
    return ParamGroup(place, experts, processes, tuple(params), by_rows)


def least_bytes(groups: Sequence[ParamGroup], sharing: Sharing, microbatches: int) -> int:
    """Bytes that every step holds at once before its last forward: parameters, both moments, and an engine's gathered
    parameters and sums of gradients, without the embedding's, which may come later; without an engine the shards' gradients of
    earlier microbatches."""
    s = sharing
    found = 3 * s.parameter * sum(group.own for group in groups)
    if microbatches > 1 and not s.engine:
        found += min(s.parameter, s.summed) * sum(group.trained for group in groups)
    if s.engine and s.sharded:
        gathered = (g for g in groups if not (g.experts and s.gathers_experts))
        found += s.compute * sum(p.own * g.processes for g in gathered for p in g.params if not p.lent)
        found += sum(p.own for g in groups for p in g.params if p.split) // BITS
        found += s.summed * sum(p.whole for group in groups for p in group.params if p.kind != "embedding")
    return found


class ParamLifecycle:
    """The events of a step that parameters and gradients react to; by default they do nothing.

    A `place` is a layer's number, "embedding" or "head"; `mlp` tells a layer's second sublayer; `last` tells the step's last
    microbatch.
    """

    def begin_step(self) -> None:
        """Before the first forward."""

    def enter(self, place: Any, mlp: bool, backward: bool) -> None:
        """A sublayer, embedding or head begins."""

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        """It ends."""

    def enter_experts(self, place: Any, backward: bool) -> None:
        """The experts' own computation begins, between the transfers of the token dispatcher."""

    def leave_experts(self, place: Any, backward: bool, last: bool) -> None:
        """It ends."""

    def keeps(self, place: Any, name: str, block: Block) -> bool:
        """Autograd releases the gradient of weight `name`: whether it stays allocated. If not, it was added to a sum."""
        return False

    def is_late(self, number: int) -> bool:
        """Whether the gradients of a group keep the dtype of their sums until the update casts them."""
        return False

    def end_step(self) -> None:
        """After the last backward."""

    def zero_grad(self) -> None:
        """Free the gradients."""


class PersistentState:
    """Parameters and moments, in the order of the parameters.

    The optimizer makes both moments and a step count for each parameter in its first step: matrices, then vectors. It casts
    gradients in parts (`forebay.train.parallel.ShardedAdamW`). If parameters are initialized, not loaded, each is whole before
    the one before it is freed; so are the tensors that FSDP2 casts.
    """

    def __init__(self, allocator: CachingAllocator, groups: Sequence[ParamGroup], sharing: Sharing):
        self._allocator, self._s = allocator, sharing
        self._moments: list[Block] = []
        every = [(_model_order(group, p.kind), p, n) for n, group in enumerate(groups) for p in group.params]
        ordered = [(p, number) for _, p, number in sorted(every, key=itemgetter(0))]
        for p, _ in ordered:
            if p.own:
                allocator.malloc(self._element(p) * p.own, DEFAULT, PARAMETERS)
        last: list[Block] = []
        for p, _ in ordered if sharing.random else ():
            block = allocator.malloc(self._element(p) * p.drawn, DEFAULT)
            allocator.free_all(last)
            last = [block]
        allocator.free_all(last)
        self._trained = [(p, number) for p, number in ordered if p.own and not p.frozen]  # and the group of each
        for size in bucket_bytes([sharing.parameter * p.own for p, _ in self._trained]) if sharing.ddp else ():
            allocator.malloc(size, DEFAULT, GRADIENTS)

    def optimize(self, is_late: Callable[[int], bool]) -> None:
        """An update. `is_late`: that of the lifecycle."""
        s, first = self._s, not self._moments
        for vectors in (False, True):
            late = self._sizes(vectors, is_late, True)
            casts = [[late[n] for n in part] for part in parts_within(late, CAST_BYTES)]
            for sizes, cast in ((self._sizes(vectors, is_late, False), False), *((part, True) for part in casts)):
                for size in sizes if first else ():
                    steps = [4] if s.fused else []
                    self._moments += [self._allocator.malloc(n, DEFAULT, OPTIMIZER) for n in (*steps, size, size)]
                held = [self._allocator.malloc(size, DEFAULT, GRADIENTS) for size in sizes if cast]
                # The root of the second moments, of all parameters at once.
                held += [self._allocator.malloc(size, DEFAULT) for size in sizes if not s.fused]
                self._allocator.free_all(reversed(held))  # a list drops its last first
        for size in [s.parameter * p.own for p, _ in self._trained if p.split] if first else ():
            self._moments += [self._allocator.malloc(n, DEFAULT, OPTIMIZER) for n in (4, size, size)]

    def _sizes(self, vectors: bool, is_late: Callable[[int], bool], late: bool) -> list[int]:
        """Bytes of the trained shards that are not split, of groups for which `is_late` is `late`."""
        trained = [(p, n) for p, n in self._trained if not p.split and p.vector == vectors]
        return [self._s.parameter * p.own for p, n in trained if is_late(n) == late]

    def _element(self, param: GroupParam) -> int:
        return self._s.frozen if param.frozen else self._s.parameter


def bucket_bytes(gradients: Sequence[int]) -> list[int]:
    """Bytes of the buckets through which DistributedDataParallel reduces gradients of so many bytes, in the order of the
    parameters (torch 2.11, `compute_bucket_assignment_by_size`): the gradient that reaches a bucket's limit is its last. It lives
    as long as the model, besides the gradients."""
    found, open_ = list[int](), 0
    for size in gradients:
        open_ += size
        if open_ >= (_FIRST_BUCKET if not found else _BUCKET):
            found.append(open_)
            open_ = 0
    return [*found, open_] if open_ else found


def _model_order(group: ParamGroup, kind: str) -> tuple[int, int]:
    """A key for the order of a model's parameters: embedding, layers, last norm, head."""
    return (1, group.place) if group.place >= 0 else ({"embedding": 0, "head": 3}.get(kind, 2), 0)


class PlainLifecycle(ParamLifecycle):
    """Without a process group: a gradient is what the first backward makes, and lasts until `zero_grad`."""

    def __init__(self, allocator: CachingAllocator):
        self._allocator = allocator
        self._held: dict[tuple[Any, str], Block] = {}

    def keeps(self, place: Any, name: str, block: Block) -> bool:
        key = (-1 if place in ("embedding", "head") else place), name  # a tied weight is both
        if key in self._held:
            return False
        self._held[key] = block
        self._allocator.set_role(block, GRADIENTS)
        return True

    def zero_grad(self) -> None:
        self._allocator.free_all(self._held.values())
        self._held = {}


class _Sharded(ParamLifecycle):
    """What both lifecycles with FSDP2 share. Group numbers index `groups`."""

    def __init__(self, allocator: CachingAllocator, groups: Sequence[ParamGroup], sharing: Sharing, stream: Any):
        self._allocator, self._s, self._stream = allocator, sharing, stream
        self._reducing: Any = REDUCE
        self._groups = list(groups)
        self._whole: dict[int, list[Block]] = {}  # unsharded parameters, by group
        self._sums: dict[int, list[Block]] = {}
        self._shards: dict[int, list[Block]] = {}  # gradients of shards
        self._sending: list[Block] = []
        self._partial: dict[int, Block] = {}  # sums of earlier microbatches, to be all-reduced
        self._all_reduced: list[Block] = []  # that FSDP2 keeps until the end of the backward

    def _gather(self, number: int, buffers: Any) -> list[Block]:
        """Cast the shards and gather them into a buffer, which is to be freed after `_copy_out`; a single process has none."""
        group, size = self._groups[number], self._s.compute
        if group.processes == 1:
            return []
        own = group.own
        wide = group.trained if self._s.compute != self._s.parameter else 0
        wide += own - group.trained if self._s.compute != self._s.frozen else 0
        cast = [self._allocator.malloc(size * wide, buffers)] if wide else []
        arriving = [self._allocator.malloc(size * own * group.processes, buffers)]
        self._allocator.free_all(cast)
        return arriving

    def _copy_out(self, number: int) -> None:
        group, size, there = self._groups[number], self._s.compute, number in self._whole
        whole = self._whole.setdefault(number, [])
        cast: list[Block] = []
        for own in (p.own for p in group.params):
            if group.processes == 1 and self._s.compute != self._s.parameter:
                cast.append(self._allocator.malloc(size * own, self._stream))
                self._allocator.free_all(cast[:-1])
                cast = cast[-1:]
            if not there:
                whole.append(self._allocator.malloc(size * own * group.processes or 1, self._stream))
        self._allocator.free_all(cast)

    def _reshard(self, number: int) -> None:
        self._allocator.free_all(self._whole.pop(number, ()))

    def _reduce(self, number: int, last: bool = True) -> None:
        group, s = self._groups[number], self._s
        sums = self._sums.pop(number, [])
        if not sums:
            return
        if self._stays(group):
            self._shards[number] = sums
            return
        # `foreach_reduce` names the last gradient in a loop over them, and so holds it until it returns.
        held = sums[-1:] if group.processes > 1 else []
        if not self._needs_no_copy(number):
            self._allocator.free_all(self._sending)
            self._sending = [self._allocator.malloc(s.summed * group.trained * group.processes, self._stream)]
            if s.gpu:  # `chunk_cat` lists its blocks of threads: eight bytes for 2 KiB of a process's part
                self._allocator.free(self._allocator.malloc(s.summed * group.trained // 256, self._stream))
            self._free_sums(reversed(sums[: len(sums) - len(held)]))  # a list drops its last first
        self._reduce_shards(number, last)
        self._free_sums(held)

    def _reduce_shards(self, number: int, last: bool) -> None:
        """Allocate what the shards' gradients become, and free what is temporary."""
        group, s = self._groups[number], self._s
        own = group.trained
        reduced = self._allocator.malloc(s.summed * own, self._reducing, GRADIENTS)
        if group.processes == 1:  # a temporary, divided by 1
            self._allocator.free(self._allocator.malloc(s.summed * own, self._reducing))
        if s.replicate > 1 and not last:
            if number in self._partial:  # added to it
                self._allocator.free(reduced)
            else:
                self._partial[number] = reduced
            return
        if s.summed != s.parameter and not self._needs_no_copy(number):  # else the update casts it
            reduced = self._cast(reduced, s.parameter * own)
        if number in self._partial:
            self._allocator.free(self._partial.pop(number))
        if number in self._shards:  # added to those of earlier microbatches
            self._allocator.free(reduced)
        else:
            self._shards[number] = [reduced]

    def _cast(self, reduced: Block, size: int) -> Block:
        """A block for the shards' gradients in the dtype of the parameters."""
        cast = self._allocator.malloc(size, self._reducing, GRADIENTS)
        self._allocator.free(reduced)
        return cast

    def _stays(self, group: ParamGroup) -> bool:
        """Whether the sums become the gradients where they are."""
        return group.processes == 1

    def is_late(self, number: int) -> bool:
        return self._s.summed != self._s.parameter and (
            self._stays(self._groups[number]) or self._needs_no_copy(number)
        )

    def _needs_no_copy(self, number: int) -> bool:
        """Whether a group's gradient is sent from where it was summed."""
        return False

    def _free_sums(self, sums: Iterable[Block]) -> None:
        self._allocator.free_all(sums)

    def _reduced(self) -> None:
        self._allocator.free_all((*self._sending, *self._all_reduced))
        self._sending, self._all_reduced = [], []

    def zero_grad(self) -> None:
        """Free the gradients in the order of the parameters, a reduced group's with its last one."""
        found = []
        for number, blocks in self._shards.items():
            group = self._groups[number]
            kinds = group.kinds if len(blocks) == len(group.params) else ["head"] * len(blocks)
            found += [(_model_order(group, kind), block) for kind, block in zip(kinds, blocks, strict=True)]
        self._free_sums(block for _, block in sorted(found, key=lambda pair: pair[0]))
        self._shards = {}


class FsdpLifecycle(_Sharded):
    """FSDP2's hooks: a layer is gathered before it runs, and its gradients are summed or reduced after its backward.

    Gathers allocate the cast shards and the buffer on the stream `GATHER`, and the unsharded parameters on the compute
    stream. The buffer is freed by the next gather's copy out (forward), or at once (backward). Reductions copy the
    gradients into one buffer on the compute stream, freed by the next reduction; the shards' gradients are views of the
    result, on the stream `REDUCE`. Replicas all-reduce it in place, once a step; if it is cast, the shards' gradients are on the
    stream `ALL_REDUCE`, and FSDP2 keeps what was cast until the end of the backward. With `reshard`, layers are resharded
    after their forward and gathered again. Embedding, last norm and head belong to one module, the model itself.
    """

    def __init__(self, allocator: CachingAllocator, groups: Sequence[ParamGroup], sharing: Sharing, stream: Any):
        super().__init__(allocator, groups, sharing, stream)
        self._arriving: list[Block] = []  # freed by the next copy out
        self._prefetched: dict[int, list[Block]] = {}
        self._gradients: dict[int, list[tuple[str, Block]]] = {}
        self._layers: dict[Any, list[int]] = {"embedding": [], "head": []}  # without their experts
        self._experts: dict[Any, list[int]] = {}
        for n, group in enumerate(groups):
            for place in (group.place,) if group.place >= 0 else ("embedding", "head"):
                (self._experts if group.experts else self._layers).setdefault(place, []).append(n)
        # A layer's experts, in a group of their own, end their forward before the layer does.
        layers = [n for n, group in enumerate(groups) if group.place >= 0]
        self._order = sorted(layers, key=lambda n: (groups[n].place, not groups[n].experts))

    def enter(self, place: Any, mlp: bool, backward: bool) -> None:
        self._unshard(self._layers[place], backward)

    def enter_experts(self, place: Any, backward: bool) -> None:
        self._unshard(self._experts.get(place, ()), backward)

    def leave_experts(self, place: Any, backward: bool, last: bool) -> None:
        """The experts' module has hooks of its own, and the token dispatcher is around them."""
        experts = self._experts.get(place, ())
        if backward:
            self._finish(experts, last)
        elif self._s.reshard:
            for n in experts:
                self._reshard(n)

    def _unshard(self, numbers: Sequence[int], backward: bool) -> None:
        for n in numbers:
            if n in self._whole:
                continue
            arriving = self._prefetched.pop(n) if n in self._prefetched else self._gather(n, GATHER)
            self._copy_out(n)
            if backward:
                self._allocator.free_all(arriving)
                self._prefetch(n)
            else:
                self._allocator.free_all(self._arriving)  # a variable of `wait_for_unshard` holds it so long
                self._arriving = arriving

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        if place in ("embedding", "head"):
            if backward and place == "embedding":
                self._finish(self._layers[place], last)
            elif place == "head" and not backward:  # the model's forward ends
                self._allocator.clear(self._arriving)
                for n in self._layers[place] if self._s.reshard else ():
                    self._reshard(n)
        elif backward and not mlp:
            self._finish(self._layers[place], last)
        elif not backward and mlp and self._s.reshard:
            for n in self._layers[place]:
                self._reshard(n)

    def _finish(self, numbers: Sequence[int], last: bool) -> None:
        s = self._s
        for n in numbers:
            group = self._groups[n]
            if s.reshard or last:
                self._reshard(n)
            # FSDP2 goes through gradients in the order of the parameters.
            found = dict(self._gradients.pop(n, []))
            gradients = {p: found[p.name] for p in group.params if p.name in found}
            alone = self._stays(group)
            if n in self._sums:
                self._allocator.free_all(gradients.values())
            elif gradients and s.summed != s.compute and (alone or not (last or not s.sums)):
                self._sums[n] = []
                for p, block in gradients.items():
                    self._sums[n].append(self._allocator.malloc(s.summed * p.whole, self._stream, GRADIENTS))
                    self._allocator.free(block)
            elif gradients:
                self._sums[n] = [*gradients.values()]
            if (last or not s.sums) and not alone:
                self._reduce(n, last)

    def keeps(self, place: Any, name: str, block: Block) -> bool:
        groups = chain(self._layers[place], self._experts.get(place, ()))
        number = next(n for n in groups if any(p.name == name for p in self._groups[n].params))
        if number in self._sums and self._s.summed == self._s.compute:
            return False  # autograd adds it to the earlier one, which is in the same dtype, as soon as it is made
        self._gradients.setdefault(number, []).append((name, block))
        self._allocator.set_role(block, GRADIENTS)
        return True

    def end_step(self) -> None:
        """Hand over gradients that are not reduced, in the order of the modules, and reshard."""
        for n in sorted(self._sums):
            self._reduce(n)
        self._reduced()
        for n in list(self._whole):
            self._reshard(n)
        self._allocator.free_all(chain(self._arriving, *self._prefetched.values()))
        self._arriving, self._prefetched = [], {}

    def _stays(self, group: ParamGroup) -> bool:
        return group.processes == 1 and self._s.replicate == 1

    def _cast(self, reduced: Block, size: int) -> Block:
        if self._s.replicate == 1:
            return super()._cast(reduced, size)
        self._all_reduced.append(reduced)
        return self._allocator.malloc(size, ALL_REDUCE, GRADIENTS)

    def _prefetch(self, number: int) -> None:
        at = self._order.index(number) if number in self._order else len(self._order)
        if at and (n := self._order[at - 1]) not in self._whole and n not in self._prefetched:
            self._prefetched[n] = self._gather(n, GATHER)


class UnshardedLifecycle(_Sharded):
    """Parameters gathered once for a step (`forebay.train.unsharded_step`), sums made then, reduced after it.

    Everything is on the compute stream. The head's gradient is reduced first, then the embedding's. A single weight in equal
    shards is sent without a copy. The sums of a CUDA graph step, and the rows that its embedding's sum is made of, belong to the
    graph: `hold` them after the capture.

    Args:
        late: the embedding's sum is made when it is reduced, in the memory of the head's.
        keep: unsharded parameters stay allocated between steps, as a CUDA graph needs them.
        tied: embedding and head are one parameter with two sums; the embedding's is added to the head's when it is made.
    """

    def __init__(
        self,
        allocator: CachingAllocator,
        groups: Sequence[ParamGroup],
        sharing: Sharing,
        stream: Any,
        late: bool,
        keep: bool,
        tied: bool = False,
    ):
        super().__init__(allocator, groups, sharing, stream)
        self._late, self._keep, self._tied, self._reducing = late, keep, tied, stream
        self._embedding_sum: list[Block] = []  # until it is added to the head's
        self._expert_groups = {
            g.place: n
            for n, g in enumerate(groups)
            if g.experts and sharing.gathers_experts and not all(p.lent for p in g.params)
        }
        self._made = False  # FSDP2 has made all gathered parameters
        self._graph_sums: list[Block] = []
        self._reuses_head = late and bool(self._embedding())
        self._head_sum: Block | None = None  # after its reduction, for the embedding's sum
        first = {"head": 0, "embedding": 1}
        places = [min((first.get(kind, 2) for kind in group.kinds), default=2) for group in groups]
        self._reduced_in = sorted(range(len(groups)), key=places.__getitem__)

    def gather(self) -> None:
        """Gather all parameters but the resharded experts', which FSDP2 makes once, before `begin_step`."""
        resharded = self._expert_groups.values()
        if self._made:
            self._gather_all_of([n for n in range(len(self._groups)) if n not in resharded])
            return
        for n in range(len(self._groups)):
            self._gather_alone(n)
            self._lend(n)
            if n in resharded:
                self._reshard(n)
        self._made = True

    def _gather_alone(self, number: int) -> None:
        arriving = self._gather(number, self._stream)
        self._copy_out(number)
        self._allocator.free_all(arriving)

    def _lend(self, number: int) -> None:
        """Free what weights in place were gathered to, and split them (`forebay.train.weights_in_place.SplitWeight`)."""
        params, whole = self._groups[number].params, self._whole[number]
        self._whole[number] = [block for p, block in zip(params, whole, strict=True) if not p.lent]
        for p, block in zip(params, whole, strict=True):
            if p.lent:
                self._allocator.free(block)
            if p.split:
                self._allocator.malloc(p.own // BITS, self._stream, PARAMETERS)
                half = p.own // 2
                piece = self._allocator.malloc(self._s.parameter * min(half, PIECE), self._stream)
                waiting = self._allocator.malloc(self._s.compute * half, self._stream)
                self._allocator.free_all((piece, waiting))

    def _gather_all_of(self, numbers: Sequence[int]) -> None:
        """As `forebay.train.unsharded_step` does after the first time."""
        together: dict[bool, list[int]] = {}
        for n in numbers:
            group = self._groups[n]
            if not group.by_rows:
                self._gather_alone(n)
                continue
            sizes = [self._s.compute * p.own * group.processes or 1 for p in group.params if not p.lent]
            if n not in self._whole:
                self._whole[n] = [self._allocator.malloc(size, self._stream) for size in sizes]
            if group.processes > 1:
                together.setdefault(group.experts and self._s.ep > 1, []).extend(sizes)
        for sizes in together.values():
            for part in parts_within(sizes, GATHER_BYTES):
                if len(part) > 1:
                    self._allocator.free(self._allocator.malloc(sum(sizes[n] for n in part), self._stream))

    def begin_step(self) -> None:
        s = self._s
        for n, group in enumerate(self._groups):
            self._sums[n] = [
                self._allocator.malloc(s.summed * p.whole, self._stream, GRADIENTS)
                for p in group.params
                if not (p.kind == "embedding" and self._late and not self._tied)
            ]
        if self._tied and not self._late:
            self._embedding_sum = [
                self._allocator.malloc(s.summed * whole, self._stream, GRADIENTS) for whole in self._embedding()
            ]

    def enter(self, place: Any, mlp: bool, backward: bool) -> None:
        """Gather the experts, if they are resharded. Under expert parallelism `enter_experts` does, because other microbatches
        compute inside a sublayer."""
        if mlp and self._s.ep == 1:
            self.enter_experts(place, backward)

    def leave(self, place: Any, mlp: bool, backward: bool, last: bool) -> None:
        if mlp and self._s.ep == 1:
            self.leave_experts(place, backward, last)

    def enter_experts(self, place: Any, backward: bool) -> None:
        n = self._expert_groups.get(place)
        if n is not None and n not in self._whole:
            self._gather_all_of([n])

    def leave_experts(self, place: Any, backward: bool, last: bool) -> None:
        if (n := self._expert_groups.get(place)) is not None:
            self._reshard(n)

    def end_step(self) -> None:
        """All sums are complete, except the embedding's if it is `late`."""
        self._allocator.clear(self._embedding_sum)

    def hold(self) -> None:
        """After the capture: the sums belong to the graph."""
        self._graph_sums = [block for blocks in self._sums.values() for block in blocks]

    def reduce(self, rows: list[Block], spread: int) -> None:
        """After `end_step`.

        Args:
            rows: gradients of the embedded tokens of all microbatches; freed when they are summed, unless a graph owns them.
            spread: bytes that it takes for a moment to add those of one microbatch.
        """
        for n in self._reduced_in:
            group = self._groups[n]
            if "embedding" in group.kinds and self._late:
                self._sum_embedding(n, spread)
                if not self._graph_sums:
                    self._allocator.free_all(rows)
            if not (self._keep or self._needs_no_copy(n)):
                self._reshard(n)
            if group.processes > 1:
                if group.kinds == ["head"] and self._reuses_head:
                    (self._head_sum,) = self._sums[n]
                self._reduce(n)
            if self._needs_no_copy(n):  # resharded after it was sent
                self._allocator.clear(self._sending)
                if not self._keep:
                    self._reshard(n)
        self._reduced()

    def finish(self) -> None:
        """After `reduce`: hand over gradients that are not reduced."""
        for n in list(self._sums):
            self._reduce(n)

    def _embedding(self) -> list[int]:
        return [p.whole for group in self._groups for p in group.params if p.kind == "embedding"]

    def _sum_embedding(self, number: int, spread: int) -> None:
        for whole in self._embedding():
            total = self._head_sum or self._allocator.malloc(self._s.summed * whole, self._stream, GRADIENTS)
            self._head_sum = None
            self._allocator.free(self._allocator.malloc(spread, self._stream))
            if self._tied:
                self._allocator.free(total)
            else:
                self._sums[number].insert(0, total)  # a group's first parameter

    def _needs_no_copy(self, number: int) -> bool:
        group = self._groups[number]
        return group.processes > 1 and len(group.params) == 1 and group.own * group.processes == group.params[0].whole

    def _free_sums(self, sums: Iterable[Block]) -> None:
        """Free sums, except a graph's, and the head's if the embedding's sum reuses its memory."""
        kept = [*self._graph_sums, self._head_sum]
        self._allocator.free_all([block for block in sums if all(block is not other for other in kept)])


def lifecycle(
    allocator: CachingAllocator, groups: Sequence[ParamGroup], sharing: Sharing, stream: Any, **unsharded: bool
) -> ParamLifecycle:
    """The lifecycle of a run. `unsharded`: what an `UnshardedLifecycle` is told besides."""
    if not sharing.sharded:
        return PlainLifecycle(allocator)
    if sharing.engine:
        return UnshardedLifecycle(allocator, groups, sharing, stream, **unsharded)
    return FsdpLifecycle(allocator, groups, sharing, stream)
