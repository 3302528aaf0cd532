"""What a rank reserves: its allocations, in the order of the run, given to torch's caching allocator on paper.

In: for each of the rank's stages its halves with the events of each (`forebay.estimate.types`) and their placements, what the
rank computes in a step, and its weights (`forebay.estimate.fsdp`). Out: a `Reserved`: bytes that the allocator has taken from
the driver at most, and bytes that were in use at most. Nothing is kept.

The way of it: parameters, the first step, the optimizer's moments at its end, a second step beside them, which has all that
lasts, and a third, which may find the second's segments cut otherwise than it left them: GPT-OSS on two H200s reserved 4.3 GiB
more in its third step, and so it does here. A fourth was never seen to need more. Of the microbatches of a process alone three
are run: the first begins the gradients, the second finds them, the third finds what the second left.

What is allocated besides, and where from:

    workspaces   cuBLAS takes 32 MiB on Hopper (`CUBLAS_WORKSPACE_CONFIG`, torch's notes on CUDA) for each handle and stream: one
                 of the thread that runs forward, one of autograd's
    streams      tokens travel on a stream of their own in engines: what comes is allocated there
    messages     hidden states that a pipeline receives, from where its plan makes them ready; those that it sent, until the next
    offload      while the manager measures, a half's tensors are free when the next half begins, and there again one half before
                 their backward; behind that they leave and come back as it plans (`forebay.estimate.walk`). Where placements
                 are only being chosen, two halves are on their way all the time
    stash        x and h of the experts lie in pages: in the first step of their own; at that step's end in an arena as large as
                 what waited at most
    graph        a captured step has a pool of its own, beside what the called ones left when it is emptied; its sums and the rows
                 of its embedding stay there. What gathers and reduces around a replay is allocated in that pool too

NCCL's buffers, symmetric memory and the CUDA context are not the allocator's: `forebay.estimate.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from forebay.estimate.allocator import Block, CachingAllocator
from forebay.estimate.fsdp import DEFAULT, ByModule, Group, ParamLifecycle, Persistent, Plain, Unsharded
from forebay.estimate.state import Sharing
from forebay.estimate.types import CAME, MULTIPLIES, NORMED, SENT, STASHED
from forebay.estimate.walk import MEASURED_STEPS, PAGE, Part, RankFit, may_leave
from forebay.memory.timeline import Key, Plan

WORKSPACE = 32 << 20
STEPS = 3
_MARGIN = 64  # pages of `forebay.memory.page_store`, for which its arena has one more than a step needs
_TRANSFERS = "transfers"
_MOST = 3  # microbatches of a process alone, behind which nothing is new


@dataclass(frozen=True)
class Rank:
    """What is laid.

    Attributes:
        stages: by number, parts in forward order.
        actions: of a step, all of a pipeline's, receives too.
        engine: an engine runs the stages (a pipeline, or overlap): tokens travel on a stream of their own.
        pipeline: it is a pipeline.
        summed: an engine that sums the vocabulary's gradients itself: bytes of the head's and of the spread rows of one
        microbatch. at_once: it adds these to their sum as they are made. tied: embedding and head are one. hidden: bytes of a
        microbatch's hidden states.
        graph: the step is captured.
        turns: in what order a forward and a backward compute that run together: `forebay.pipeline.schedule`.
        drawn: parameters are random.
        least: bytes below which nothing is offloaded.
        link: what the manager plans to offload, and when. Without it all of an offloaded half leaves, one half after the other.
    """

    groups: Sequence[Group]
    sharing: Sharing
    stages: Mapping[int, Sequence[Part]]
    actions: Sequence[Any]
    engine: bool
    summed: tuple[int, int] | None
    hidden: int
    turns: Callable[[Sequence[bool], Sequence[bool]], Sequence[str]]
    graph: bool = False
    drawn: bool = True
    pipeline: bool = False
    at_once: bool = False
    tied: bool = False
    least: int = 1 << 20
    link: Plan | None = None


@dataclass(frozen=True)
class Reserved:
    """Bytes at most, over all steps: of segments, and in use. `by_step`: segments behind each step."""

    reserved: int
    allocated: int
    by_step: tuple[int, ...]


def reserve(rank: Rank, steps: int | None = None, limit: int | None = None) -> Reserved:
    """Lay whole steps: `steps`, or `STEPS` behind those that a manager measures.

    Raises:
        forebay.estimate.allocator.OutOfMemory: they do not fit `limit`.
    """
    return AllocatorRun(rank, limit).steps(steps if steps is not None else STEPS + _measured(rank))


class AllocatorRun:
    """A run so far. `paper` is its allocator."""

    def __init__(self, rank: Rank, limit: int | None = None):
        self.paper = paper = CachingAllocator(limit)
        self._rank = rank
        self._stream = "graph" if rank.graph else DEFAULT  # a captured step has a stream of its own, from the first on
        self._weights = Persistent(paper, rank.groups, rank.sharing, rank.drawn)
        self._life = self._life_of(rank)
        self._workspaces: list[Block] = []
        self._arena: Block | None = None
        self._cycles = 0  # of a manager, so far

    def steps(self, number: int) -> Reserved:
        """Whole steps, each with its optimizer's."""
        by_step = []
        for n in range(number + 2 * self._rank.graph):
            if n > number:
                self._replay()
            else:
                self.gradients(captured=self._rank.graph and n == number)
            self._weights.optimize()
            self._life.zero_grad()
            by_step.append(self.paper.reserved)
        return Reserved(self.paper.peak_reserved, self.paper.peak_allocated, tuple(by_step))

    def gradients(self, captured: bool = False) -> None:
        """All forwards and backwards of a step; gradients are there then."""
        life, paper = self._life, self.paper
        if isinstance(life, Unsharded):
            life.gather()
        if captured:
            paper.empty_cache()
            paper.begin_graph("step")
        step = _ReservedStep(
            self._rank, paper, life, self._stream, self._workspace, self._cycles, self._arena is not None
        )
        life.begin_step()
        step.run()
        life.end_step()
        rows = step.end()
        self._cycles = step.cycles
        if isinstance(life, Unsharded):
            if captured:
                life.hold()
            life.reduce(rows, self._spread)
            if captured:
                paper.end_graph()
            life.finish()
        elif captured:
            paper.end_graph()
        self._settle_arena(step.most_stashed)

    def _replay(self) -> None:
        """A captured step once more. Its own memory is there, and free for what comes before and behind it."""
        life = self._life
        if isinstance(life, Unsharded):
            self.paper.begin_graph("step")
            life.gather()
            life.restore()
            life.reduce([], self._spread)
            self.paper.end_graph()
            life.finish()

    @property
    def _spread(self) -> int:
        return self._rank.summed[1] if self._rank.summed else 0

    def zero_grad(self) -> None:
        """Forget gradients, without an optimizer's step."""
        self._life.zero_grad()

    def _life_of(self, rank: Rank) -> ParamLifecycle:
        if rank.engine:
            return Unsharded(
                self.paper,
                rank.groups,
                rank.sharing,
                self._stream,
                late=rank.summed is not None and not rank.at_once,
                keep=rank.graph,
                twice=rank.summed is not None and rank.tied,
            )
        if not rank.sharing.sharded:
            return Plain(self.paper, rank.groups, rank.sharing)
        return ByModule(self.paper, rank.groups, rank.sharing, self._stream)

    def _workspace(self, number: int) -> None:
        if number >= len(self._workspaces):
            self._workspaces.append(self.paper.malloc(WORKSPACE, self._stream))

    def _settle_arena(self, most: int) -> None:
        """Pages are sized by the first step, at its end, with a margin."""
        if self._arena is None and most:
            pages = most // PAGE
            self._arena = self.paper.malloc((pages + -(-pages // _MARGIN)) * PAGE, self._stream)
            # Whoever has other pages than before gives up a graph that is not there yet, and empties the cache.
            if self._rank.graph:
                self.paper.empty_cache()


@dataclass(eq=False)
class _Ran:
    """A part of a microbatch that ran forward: its blocks by storage, its input, and whether they have left. `call`: number of
    the part's forwards in the manager's cycle before this one."""

    part: Part
    blocks: dict[int, Block]
    x: Block | None
    sizes: dict[int, int] = field(default_factory=dict)  # of what left
    balance: Block | None = None
    pages: Block | None = None
    call: int = 0


@dataclass
class _DeferredWeightGradients:
    """Of a split backward what the experts' weight gradients wait with: what the making of each takes for a moment, and the
    tensors that they will be made of."""

    making: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    @staticmethod
    def of(part: Part, in_place: bool) -> _DeferredWeightGradients:
        """`in_place`: what is made is added to a sum at once, and no more than rows of tokens are there beside it."""
        sizes = part.experts_gradients
        both = part.stash[0]  # x's rows and h; `later` is rows of x and of dy, h's gradient and half as much
        h = 2 * (2 * both - part.later) if both else 0
        pieces = (both - h, both - h, h, h // 2) if h > 0 else (part.later,)
        making = (part.token_rows,) * len(sizes) if in_place else tuple(sizes.values())
        return _DeferredWeightGradients(making, tuple(n for n in pieces if n > 0))


class _ReservedStep:
    """One step. `cycles`: of the manager, begun before it. `paged`: there is an arena of pages."""

    def __init__(
        self,
        rank: Rank,
        paper: CachingAllocator,
        life: ParamLifecycle,
        stream: Any,
        workspace: Any,
        cycles: int = 0,
        paged: bool = False,
    ):
        self._rank, self._paper, self._life, self._stream = rank, paper, life, stream
        self._side = _TRANSFERS if rank.engine else stream
        self._workspace = workspace
        self._ran: dict[tuple[int, int], list[_Ran]] = {}
        self._arrived: dict[tuple[str, int, int], Block] = {}
        self._sent: list[Block] = []
        self._leaving: list[_Ran] = []
        self._collected: list[Block] = []
        self._later: dict[tuple[int, int], list[_DeferredWeightGradients]] = {}
        self._paged = paged
        self.cycles = cycles + rank.engine
        self._calls: dict[str, int] = {}  # forwards of each part in the cycle
        self._managed: dict[Key, _Ran] = {}  # what the cycle's plan settles and fetches
        self._settles: dict[tuple[str, Key], list[Key]] = {}
        for key, moment in (rank.link.settle_at if rank.link is not None else {}).items():
            self._settles.setdefault(moment, []).append(key)
        self.most_stashed = self._stashed = 0
        self._last = max((a.microbatch for action in rank.actions for a in (action.parts or (action,))), default=0)

    def run(self) -> None:
        """All actions."""
        for action in self._rank.actions:
            match action.kind:
                case "OVERLAP_F_B":
                    self._overlap_fwd_bwd(*action.parts)
                case "F":
                    _drain(self._forward(action.stage, action.microbatch))
                case "B" | "I":
                    _drain(self._backward(action.stage, action.microbatch, action.kind == "I"))
                case "W":
                    for later in self._later.pop((action.stage, action.microbatch), ()):
                        for size in later.making:
                            self._paper.free(self._paper.malloc(size, self._stream))
                        self._free(later.blocks)
                case "RECV_F" | "RECV_B":
                    key = action.kind[-1], action.stage, action.microbatch
                    self._arrived[key] = self._paper.malloc(self._rank.hidden, self._stream)

    def end(self) -> list[Block]:
        """Behind the step. What is left of it: gradients of embedded tokens."""
        self._free(self._sent)
        return self._collected

    def _overlap_fwd_bwd(self, forward: Any, backward: Any) -> None:
        """As `forebay.pipeline` has it: the backward's first transfer is on its way before the forward computes. In a pipeline
        the head is a computation too, and what the forward leaves is waited for behind one computation more; else it comes
        last."""
        there = self._forward(forward.stage, forward.microbatch)
        back = self._backward(backward.stage, backward.microbatch, False)
        stages = self._rank.stages
        computing, returning = _travelling(stages[forward.stage]), _travelling(stages[backward.stage])[::-1]
        if self._rank.pipeline and stages[forward.stage][-1].path == "head":
            computing.append(False)
        order = list(self._rank.turns(computing, returning))
        if self._rank.pipeline:
            order.insert(len(order) - order[::-1].index("F"), "F")
        for whose in ["B", *order]:
            next(there if whose == "F" else back, None)
        _drain(there if self._rank.pipeline else back)
        _drain(back if self._rank.pipeline else there)

    # --- forward --------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Stops behind each of an engine's computations."""
        parts = self._rank.stages[stage]
        ran: list[_Ran] = []
        self._ran[stage, microbatch] = ran
        self._begin_step()
        x = self._arrived.pop(("F", stage, microbatch), None)
        given: list[Block] = []  # that a layer's caller holds until it returns
        embedded: list[Block] = []  # the model's own frame holds the first one's until all layers have run
        for nth, part in enumerate(parts):
            if part.path == "head" and self._rank.engine:
                break
            if x is None and part.path != "embedding":
                x = self._paper.malloc(self._rank.hidden, self._stream)
            if part.path != "embedding":
                self._workspace(0)  # rotary tables, which come before the layers, are products
            self._life.enter(part.place, part.mlp, False, microbatch == self._last)
            done = _Ran(part, {}, x, call=self._calls.get(part.path, 0))
            self._calls[part.path] = done.call + 1
            self._managed[part.path, done.call] = done
            self._moment("F", done)
            ran.append(done)
            again = part.placement == "recompute"
            if part.path == "head" and x is not None and not part.events.saves_x:
                embedded.append(x)
                done.x = x = None
            events = part.events.alone if again else part.events.forward
            told = {NORMED: partial(self._free_all, embedded), STASHED: partial(self._take_pages, done)}
            yield from self._play(done.blocks, events, part, told=told)
            output = done.blocks.pop(part.events.output)
            self._leave(done, again)
            if x is not None and not (part.events.saves_x or again):
                done.x = None
                if not part.path.endswith(".self_attn"):
                    self._paper.free(x)
                elif nth == 1 and parts[0].path == "embedding" and not self._rank.engine:
                    embedded.append(x)
                else:
                    given.append(x)
            if part.balance:
                done.balance = self._paper.malloc(part.balance, self._stream)
            self._life.leave(part.place, part.mlp, False, microbatch == self._last)
            if not part.path.endswith(".self_attn"):
                self._free(given)
                given = []
            x = output
            if self._rank.engine and part.mlp and not part.events.travelling:
                yield  # behind a dense layer
        self._free_all(embedded)
        assert x is not None
        if not self._rank.engine:
            self._arrived["B", stage, microbatch] = x  # the loss, and its gradient
        elif parts[-1].path == "head":
            self._arrived["B", stage, microbatch] = self._loss(parts[-1], x)
        else:
            self._send("F", stage + 1, microbatch, x)

    def _leave(self, done: _Ran, again: bool) -> None:
        """What becomes of what is saved."""
        part, blocks = done.part, done.blocks
        if again:
            self._free(blocks.values())
            blocks.clear()
        elif part.placement == "offload" and self._plan is None:
            self._leaving.append(done)
        elif part.stashed:
            self._paper.free(blocks.pop(part.stashed[0]))

    # --- what is offloaded ----------------------------------------------------------------------------------------

    @property
    def _plan(self) -> Plan | None:
        """The manager's, behind the cycles that it measures."""
        return self._rank.link if self.cycles > MEASURED_STEPS else None

    def _begin_step(self) -> None:
        """Of a process alone a forward begins one."""
        if not self._rank.engine:
            self.cycles += 1
            self._calls, self._managed = {}, {}

    def _moment(self, kind: str, done: _Ran, following: _Ran | None = None) -> None:
        """A half's forward or backward begins: what is due leaves or comes back. `following`: whose backward is the next."""
        if self._plan is None:
            staying = self._leaving[-1:] if self._rank.link is None else [done]
            for other in [other for other in self._leaving if all(other is not mine for mine in staying)]:
                self._leaving.remove(other)
                self._settle(other, None)
        else:
            name = kind, (done.part.path, done.call)
            for key in self._settles.get(name, ()):
                if key in self._managed:
                    self._settle(self._managed[key], self._plan.offload[key])
            for key in self._plan.fetch_at.get(name, ()):
                if key in self._managed:
                    self._take_back(self._managed[key])
        if kind == "B":
            self._take_back(done)
            if following is not None and self._plan is None:
                self._take_back(following)  # on its way

    def _settle(self, done: _Ran, chosen: frozenset[int] | None) -> None:
        """What of a half was offloaded is free: these of what it saves, or all."""
        events = done.part.events
        if chosen is None:
            leaving = [*done.blocks, events.x]
        else:
            items = may_leave(events, self._rank.hidden, self._rank.least)
            leaving = [number for at, (number, _) in enumerate(items) if at in chosen]
        for n in leaving:
            if n == events.x and done.x is not None and done.x.size >= self._rank.least:
                done.sizes[n] = done.x.size
                self._paper.free(done.x)
                done.x = None
            elif n in done.blocks and done.blocks[n].size >= self._rank.least:
                done.sizes[n] = done.blocks[n].size
                self._paper.free(done.blocks.pop(n))

    # --- backward -------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int, split: bool) -> Iterator[None]:
        """Stops behind each of an engine's computations."""
        ran = self._ran.pop((stage, microbatch))
        dy = self._arrived.pop(("B", stage, microbatch), None)
        if dy is None:
            dy = self._paper.malloc(self._rank.hidden, self._stream)
        later: list[_DeferredWeightGradients] = []
        while ran:
            done = ran.pop()
            part = done.part
            self._moment("B", done, ran[-1] if ran else None)
            if part.path == "embedding" and self._rank.summed is not None:
                self._free(done.blocks.values())
                if self._rank.at_once:
                    self._free([self._paper.malloc(self._rank.summed[1], self._stream), dy])
                else:
                    self._collected.append(dy)
                break
            self._life.enter(part.place, part.mlp, True, microbatch == self._last)
            waits = (
                _DeferredWeightGradients.of(part, self._rank.sharing.adds_in_place) if split and part.later else None
            )
            dx = yield from self._play_back(done, dy, waits)
            if waits is not None:
                waits.blocks = [self._paper.malloc(size, self._stream) for size in waits.sizes]
                later.append(waits)
            self._life.leave(part.place, part.mlp, True, microbatch == self._last)
            if dx is None:
                break
            dy = dx
        else:
            self._send("B", stage - 1, microbatch, dy)
        if later:
            self._later[stage, microbatch] = later

    def _play_back(
        self, done: _Ran, dy: Block, later: _DeferredWeightGradients | None = None
    ) -> Generator[None, None, Block | None]:
        part, events, blocks = done.part, done.part.events, done.blocks
        in_place = self._rank.sharing.adds_in_place and part.later
        elsewhere = part.experts_gradients if later is not None or in_place else ()
        backward = tuple(event for event in events.backward if event[0] not in elsewhere)
        if part.placement == "recompute" and not blocks:
            yield from self._play(blocks, events.forward, part, thread=1)
            self._paper.free(blocks.pop(events.output))
        blocks[events.gradient] = dy
        if done.x is not None:
            blocks[events.x] = done.x
        if self._rank.engine and part.mlp and not part.events.travelling:
            yield
        told = {CAME: partial(self._give_pages, done), STASHED: partial(self._bring, done)}
        yield from self._play(blocks, backward, part, frozenset(events.weights), 1, told)
        dx = blocks.pop(events.dx, None)
        self._free(block for block in blocks.values() if block is not dx)
        if done.balance is not None:
            self._paper.free(done.balance)
        return dx

    def _take_pages(self, done: _Ran) -> None:
        """For x and h of a half, before h is made. Without an arena they are in memory of their own."""
        if not self._paged:
            done.pages = self._paper.malloc(done.part.pages, self._stream)
        self._stashed += done.part.pages
        self.most_stashed = max(self.most_stashed, self._stashed)

    def _bring(self, done: _Ran) -> None:
        """x comes out of the pages; h is read there."""
        if done.part.stashed:
            number, size = done.part.stashed
            done.blocks[number] = self._paper.malloc(size, self._stream)

    def _give_pages(self, done: _Ran) -> None:
        """Behind the experts' weight gradients."""
        if done.part.stashed:
            self._stashed -= done.part.pages
        if done.pages is not None:
            self._paper.free(done.pages)

    def _take_back(self, done: _Ran) -> None:
        """What was offloaded is wanted."""
        if done in self._leaving:
            self._leaving.remove(done)
        for n, size in done.sizes.items():
            block = self._paper.malloc(size, self._stream)
            if n == done.part.events.x:
                done.x = block
            else:
                done.blocks[n] = block
        done.sizes = {}

    def _loss(self, head: Part, x: Block) -> Block:
        """An engine's head: forward and backward at once; the gradient of its input."""
        events = head.events
        blocks: dict[int, Block] = {}
        self._life.enter("head", False, True, False)
        skipped = frozenset(events.weights) if self._rank.summed else frozenset()
        bytes_ = self._rank.summed[0] if self._rank.summed else -1

        def without_sums(list_: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
            sums = {n for n, size in list_ if abs(size - bytes_) < 1024 or (n in skipped and size > bytes_ // 4)}
            return [event for event in list_ if event[0] not in sums]

        _drain(self._play(blocks, without_sums(events.forward), head))
        blocks[events.x] = x
        _drain(self._play(blocks, without_sums(events.backward), head, frozenset(events.weights), 1))
        dx = blocks.pop(events.dx)
        self._free(block for block in blocks.values() if block is not dx)
        return dx

    # --- both -----------------------------------------------------------------------------------------------------

    def _play(
        self,
        blocks: dict[int, Block],
        events: Sequence[tuple[int, int]],
        part: Part,
        weights: frozenset[int] = frozenset(),
        thread: int = 0,
        told: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Events, on blocks. In an engine stops where tokens were sent. `thread`: 1 for autograd's. `told`: what to call at a
        mark; at `CAME` when the experts' weight gradients are made."""
        malloc, free, travelling = self._paper.malloc, self._paper.free, part.events.travelling
        number_of_stops = 0
        for number, size in events:
            if number < 0:
                if size == MULTIPLIES:
                    self._workspace(thread)
                elif size in (NORMED, STASHED) and size in told:
                    told[size]()
                elif size == SENT and number_of_stops:
                    self._life.compute_experts(part.place, False)
                elif size == CAME:
                    if self._rank.engine:
                        yield
                    if weights and number_of_stops:  # behind the experts' backward, their weights' gradients
                        if CAME in told:
                            told[CAME]()
                        if self._rank.engine:
                            yield
                    if not number_of_stops:
                        self._life.compute_experts(part.place, True)
                    number_of_stops += 1
            elif size:
                blocks[number] = malloc(size, self._side if number in travelling else self._stream)
            elif number in blocks:
                block = blocks.pop(number)
                if number not in weights or not self._life.keeps(part.place, part.mlp, block):
                    free(block)

    def _send(self, kind: str, stage: int, microbatch: int, block: Block) -> None:
        """To a stage of this rank, or another's."""
        if stage in self._rank.stages:
            self._arrived[kind, stage, microbatch] = block
            return
        self._free(self._sent)
        self._sent = [block]

    def _free_all(self, blocks: list[Block]) -> None:
        self._free(blocks)
        blocks.clear()

    def _free(self, blocks: Any) -> None:
        for block in list(blocks):
            self._paper.free(block)


def with_reserved(fit: RankFit, found: Reserved) -> RankFit:
    """The rank as it was laid. What is in use at most is known better now: levels of halves add up what each needs at its
    highest, as if all of it came at once, and know nothing of what the link has yet to carry. So the difference is added to what
    comes and goes, or taken off it; and what the allocator holds beside is `cached`."""
    inside = fit.allocated - fit.other
    more = max(found.allocated - inside, -fit.transient)
    return replace(fit, transient=fit.transient + more, cached=max(0, found.reserved - (inside + more)))


def _measured(rank: Rank) -> int:
    """Steps in which a manager measures what it plans with. A pipeline's cycle is a step, else it is a microbatch."""
    if rank.link is None:
        return 0
    microbatches = len({action.microbatch for action in rank.actions})
    return MEASURED_STEPS if rank.engine else MEASURED_STEPS // max(1, microbatches)


def shortened(actions: Sequence[Any], engine: bool) -> Sequence[Any]:
    """Of a process alone, one microbatch after the other, the first few: those behind are as the last of them."""
    if len(actions) and not engine:
        return [a for a in actions if a.microbatch < _MOST]
    return actions


def _travelling(parts: Sequence[Part]) -> list[bool]:
    """Of a stage's layers, which have experts."""
    return [bool(part.events.travelling) for part in parts if part.mlp]


def _drain(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
