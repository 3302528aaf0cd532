"""The walk over a rank's steps: its allocations, in the order of the run, played on a model of torch's caching allocator.

Input: a `RankRun`: the parts of a rank's stages (`forebay.estimate.parts`), its actions in a step, and its parameters
(`forebay.estimate.fsdp`). Output: a `Walked`: peak bytes of segments, and what is in use at the highest level. NCCL's buffers,
symmetric memory and the CUDA context are not the allocator's: see `forebay.estimate.state`. An `AllocatorRun` has what one step
leaves for the next, a `StepWalk` plays the forwards and backwards of one step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType

from forebay.estimate.allocator import ACTIVATIONS, GRADIENTS, OPTIMIZER, ROLES, TRANSIENT, Block, CachingAllocator
from forebay.estimate.expandable import ExpandableAllocator
from forebay.estimate.fsdp import DEFAULT, PersistentState, UnshardedLifecycle, lifecycle
from forebay.estimate.offloading import MEASURED_STEPS, OffloadManager, PartRun
from forebay.estimate.parts import Part
from forebay.estimate.rank_run import RankRun, StepLevel, Walked
from forebay.estimate.types import GPU_BLOCK, PAGE, AllocEvent, Mark
from forebay.pipeline.schedule import Action, drain, overlap

STEPS = 3
"""Steps to play. The second has the optimizer's moments beside it; the third may find the second's segments cut differently:
GPT-OSS on two H200s reserved 4.3 GiB more in its third step, as it does here. A fourth never needed more, and with expandable
segments no third one did."""
_MARGIN = 64  # the arena of `forebay.memory.page_store` has one page more for each so many
# Microbatches to walk without a pipeline: the first begins the gradients, the second finds them, the third repeats.
_MICROBATCHES = 3
WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on Hopper for each handle and stream (`CUBLAS_WORKSPACE_CONFIG`, torch's notes on CUDA): one of the
thread that runs forward, and without an engine one of autograd's."""
_TRANSFERS = "transfers"


def walk(run: RankRun, steps: int | None = None) -> Walked:
    """Play whole steps; by default those that the manager measures and `STEPS` more, one less with expandable segments."""
    return AllocatorRun(run).steps(steps if steps is not None else _measured(run) + STEPS - run.expandable)


def shortened(actions: Sequence[Action], engine: bool) -> Sequence[Action]:
    """Without an engine, only the first microbatches: later ones repeat the last of them."""
    return actions if engine else [a for a in actions if a.microbatch < _MICROBATCHES]


def _measured(run: RankRun) -> int:
    """Steps in which a manager measures."""
    if run.link is None and run.measured is None:
        return 0
    microbatches = len({action.microbatch for action in run.actions})
    return MEASURED_STEPS if run.interleaves else MEASURED_STEPS // max(1, microbatches)


class AllocatorRun:
    """A run so far: an allocator, and those who allocate from it from one step to the next.

    Attributes:
        weights: parameters and AdamW's moments.
        params: what a step unshards, and gradients.
        manager: of offloading; its plan.
        stream: on which the step computes.
        arena: of pages; None before the first step.
        has_tables: whether an engine has made what its layers share.
        levels, peak: the highest levels of this step, and of all.
    """

    def __init__(self, run: RankRun):
        self.allocator = (
            ExpandableAllocator() if run.expandable else CachingAllocator(GPU_BLOCK if run.sharing.gpu else 1)
        )
        self._run = run
        # A CUDA graph step has a stream of its own, from the first step on.
        self.stream = "graph" if run.graph else DEFAULT
        self.weights = PersistentState(self.allocator, run.groups, run.sharing)
        self.params = lifecycle(
            self.allocator, run.groups, run.sharing, self.stream,
            late=run.adding_tokens > 0 and not run.at_once, keep=run.graph, tied=run.adding_tokens > 0 and run.tied,
        )  # fmt: skip
        self._workspaces: list[Block] = []
        self.arena: Block | None = None
        self.has_tables = False
        self.manager = OffloadManager(self.allocator, self.stream, run)
        self.peak = StepLevel("", "", (0,) * len(ROLES))
        self.levels: list[StepLevel] = []
        self.note("", "initialization")

    def steps(self, number: int) -> Walked:
        """Play whole steps with their optimizer's. A CUDA graph step is captured after them. A replay takes no more memory,
        but the gathering before it does, from the graph's pool."""
        captured = self._run.graph and not self._run.fails
        for _ in range(number):
            self._step()
        if captured:
            self._step(captured=True)
        if captured and isinstance(self.params, UnshardedLifecycle):
            self.allocator.begin_graph()
            self.params.gather()
            self.allocator.end_graph()
            self.note("", "gathering of parameters")
        levels = self.levels
        if all(level.allocated < self.peak.allocated for level in levels):
            levels = [self.peak, *levels]
        before = self.manager.before + self.allocator.by_role[OPTIMIZER]
        return Walked(self.allocator.peak_reserved, self.peak, tuple(levels), before, self.manager.plan)

    def _step(self, captured: bool = False) -> None:
        self.levels = []
        self.gradients(captured)
        self.weights.optimize(self.params.is_late)
        self.note("", "optimizer")
        self.params.zero_grad()

    def gradients(self, captured: bool = False) -> None:
        """Play all forwards and backwards of a step. A captured one allocates from a pool of its own, beside what the steps
        before it left when the cache is emptied."""
        params, allocator = self.params, self.allocator
        unsharded = params if isinstance(params, UnshardedLifecycle) else None
        if unsharded:
            unsharded.gather()
        if captured:
            self.release_cache()
            allocator.begin_graph()
        self.note("", "gathering of parameters")
        step = StepWalk(self, self._run)
        params.begin_step()
        step.run()
        params.end_step()
        token_grads = step.end()
        if unsharded and captured:
            unsharded.hold()
        if unsharded:
            unsharded.reduce(token_grads, self._run.adding_tokens)
        if captured:
            allocator.end_graph()
        if unsharded:
            unsharded.finish()
        self.note("", "reduction")
        self._settle_arena(step.most_stashed)

    def _settle_arena(self, most: int) -> None:
        """The first step sizes the arena of pages, with a margin, outside of the graph's stream. Resizing it releases the CUDA
        graph."""
        if self.arena is None and most:
            pages = most // PAGE
            self.arena = self.allocator.malloc((pages + -(-pages // _MARGIN)) * PAGE, DEFAULT, ACTIVATIONS)
            if self._run.graph:
                self.release_cache()

    def note(self, action: str, where: str, live: Mapping[str, int] = MappingProxyType({})) -> None:
        """Record the highest level since the last call."""
        level = StepLevel(action, where, tuple(self.allocator.take_peak()), dict(live))
        self.levels.append(level)
        if level.allocated > self.peak.allocated:
            self.peak = level

    def workspace(self, number: int) -> None:
        """Allocate cuBLAS's workspace of a thread if it is not there."""
        if self._run.sharing.gpu and number >= len(self._workspaces):
            self._workspaces.append(self.allocator.malloc(WORKSPACE, self.stream))

    def release_cache(self) -> None:
        """Before a capture, and as a graph is released: cuBLAS's workspaces are made anew, in the graph's pool or outside."""
        self.allocator.clear(self._workspaces)
        self.allocator.empty_cache()


class StepWalk:
    """One step of a rank. `memory`: as earlier steps have left it."""

    def __init__(self, memory: AllocatorRun, run: RankRun):
        self._memory, self._run, self._allocator = memory, run, memory.allocator
        self._params, self._stream, self._manager = memory.params, memory.stream, memory.manager
        self._transfer_stream = _TRANSFERS if run.engine else memory.stream
        self._action = ""
        self._running: dict[str, str] = {}  # "forward" or "backward" to the part that runs
        self._live: dict[str, int] = {}  # see `StepLevel`
        self._part_runs: dict[tuple[int, int], list[PartRun]] = {}
        self._arrived: dict[tuple[str, int, int], Block] = {}
        self._sent: list[Block] = []
        self._token_grads: list[Block] = []
        # Of the forward that runs, for `Part.given` (none in an engine).
        self._given: list[Block] = []
        # What the base model's frame holds until all layers have run, such as masks and the first layer's input.
        self._model_inputs: list[Block] = []
        # What a layer's caller holds until it returns, in an engine until its front does.
        self._layer_inputs: list[Block] = []
        # Deferred weight gradients of split backwards: parts with the blocks that they wait with.
        self._deferred: dict[tuple[int, int], list[PartRun]] = {}
        self._paged = memory.arena is not None
        self.most_stashed = self._stashed = 0
        self._last = max((a.microbatch for action in run.actions for a in action.each), default=0)

    def run(self) -> None:
        if self._run.interleaves:
            self._begin_managed_step()
        for action in self._run.actions:
            self._action = str(action)
            match action.kind:
                case "OVERLAP_F_B":
                    self._overlap_fwd_bwd(*action.parts)
                case "F":
                    drain(self._forward(action.stage, action.microbatch))
                case "B" | "I":
                    drain(self._backward(action.stage, action.microbatch, action.kind == "I"))
                case "W":
                    for run in self._deferred.pop((action.stage, action.microbatch), ()):
                        self._make_weight_grads(run)
                    self._memory.note(self._action, "weight gradients")
                case "RECV_F" | "RECV_B" if not self._run.sharing.slot_bytes:
                    self._arrived[action.kind[-1], action.stage, action.microbatch] = self._malloc(self._run.hidden)

    def end(self) -> list[Block]:
        """Free what was sent. The gradients of embedded tokens remain. Without an engine the next step's forward plans."""
        self._allocator.clear(self._sent)
        if self._run.engine:
            self._plan_if_measured()
        return self._token_grads

    def _overlap_fwd_bwd(self, forward: Action, backward: Action) -> None:
        f = self._forward(forward.stage, forward.microbatch)
        b = self._backward(backward.stage, backward.microbatch, False)
        stages, pipeline = self._run.stages, self._run.sharing.pp > 1
        # For each layer, whether it runs by the stages of a MoE sublayer.
        f_layers, b_layers = (
            [part.staged for part in stages[action.stage] if part.mlp or part.alone] for action in (forward, backward)
        )
        overlap(f, b, f_layers, b_layers[::-1], stages[forward.stage][-1].path == "head" if pipeline else None)

    # --- forward --------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Yields after each of an engine's computations."""
        runs: list[PartRun] = []
        self._part_runs[stage, microbatch] = runs
        if not self._run.interleaves:
            self._begin_managed_step()
        measured = self._run.measured if self._manager.measures else None
        parts, engine = (measured or self._run.stages)[stage], self._run.engine
        x = self._arrived.pop(("F", stage, microbatch), None)
        if engine and parts[-1].path == "head":
            parts = parts[:-1]  # `_hand_on` runs it
        for nth, part in enumerate(parts):
            if x is None and part.path != "embedding":
                x = self._malloc(self._run.hidden)
            run = self._begin_part(part, x, microbatch == self._last)
            runs.append(run)
            if part.path == "head" and x is not None and not part.events.saves_x:
                self._model_inputs.append(x)
                run.x = x = None
            output = yield from self._part_forward(run)
            if run.x is not None and not self._keeps_input(part):
                first = nth == 1 and parts[0].path == "embedding" and not engine
                if part.attention:
                    (self._model_inputs if first else self._layer_inputs).append(run.x)
                    run.x = None
                else:
                    self._free_input(run)
            if part.balance and not self._run.router_loss:
                run.balance = self._malloc(part.balance, ACTIVATIONS)
            self._params.leave(part.place, part.mlp, False, run.in_last)
            self._end_part("forward")
            if part.alone or not part.attention:
                self._allocator.clear(self._layer_inputs)
            x = output
            if self._yields_after(part):
                yield  # after a dense layer
        self._allocator.clear(self._model_inputs)
        assert x is not None
        self._hand_on(stage, microbatch, x)

    def _begin_managed_step(self) -> None:
        """Without an engine FSDP2's hook of the whole model has gathered its parameters by then."""
        before = self._allocator.allocated
        if not self._run.engine:
            self._params.enter("embedding", False, False)
        gathered = self._allocator.allocated - before
        self._plan_if_measured()
        self._manager.begin_step(self._last == 0, gathered)

    def _plan_if_measured(self) -> None:
        if self._manager.end_measuring():
            self._allocator.empty_cache()  # before plans are tried

    @staticmethod
    def _keeps_input(part: Part) -> bool:
        return (part.events.saves_x or part.placement == "recompute") and not part.with_previous

    def _end_part(self, way: str) -> None:
        running = [f"{self._running[w]} {w}" for w in ("forward", "backward") if w in self._running]
        self._memory.note(self._action, " and ".join(running), self._live)
        path = self._running.pop(way)
        self._live[path] = self._live.get(path, 0) + (1 if way == "forward" else -1)

    def _part_forward(self, run: PartRun) -> Generator[None, None, Block]:
        events = run.part.events
        yield from self._play(run, events.forward_no_grad if run.part.placement == "recompute" else events.forward, "F")
        output = run.blocks.pop(events.output)
        self._place_saved(run)
        return output

    def _begin_part(self, part: Part, x: Block | None, in_last: bool) -> PartRun:
        shared = self._make_tables(part)
        self._running["forward"] = part.path
        self._params.enter(part.place, part.mlp, False)
        run = PartRun(part, x=x, shared=shared, in_last=in_last)
        if part.held and self._given:
            run.held = [self._given[place] for place in part.held]
            self._model_inputs = [block for block in self._model_inputs if block not in run.held]
        self._manager.begin_forward(run)
        return run

    def _make_tables(self, part: Part) -> list[Block]:
        """Make what this forward's layers share; returns what they save. The base model's frame holds the rest.

        An engine keeps what its first forward made, from hidden states of its own (`forebay.pipeline.model`).
        """
        engine, tables = self._run.engine, part.tables
        if not tables.events or (engine and self._memory.has_tables):
            return []
        frame = [self._malloc(self._run.hidden)] if engine else []
        run = PartRun(part)
        drain(self._play(run, tables.events, "F"))
        saved, given = ([run.blocks.pop(number) for number in numbers] for numbers in (tables.saved, tables.given))
        frame += run.blocks.values()
        for block in (*saved, *(given if engine else ())):
            self._allocator.set_role(block, ACTIVATIONS)
        if not engine:
            self._given = given
            self._model_inputs += [*frame, *given]
            return saved
        self._memory.has_tables = True
        self._allocator.free_all(frame)
        return []

    def _hand_on(self, stage: int, microbatch: int, x: Block) -> None:
        """The output of a stage's forward: the next stage's input, or the loss and its gradient."""
        head = self._run.stages[stage][-1]
        if not self._run.engine:
            self._arrived["B", stage, microbatch] = x
        elif head.path == "head":
            if self._run.router_loss:
                self._balance(self._run.router_loss, self._part_runs[stage, microbatch])
            self._arrived["B", stage, microbatch] = self._loss(head, x)
        else:
            self._send("F", stage + 1, microbatch, x)

    def _place_saved(self, run: PartRun) -> None:
        part, blocks = run.part, run.blocks
        if part.placement == "recompute":
            self._allocator.free_all(blocks.values())
            blocks.clear()
        elif part.stashed_x:
            self._allocator.free(blocks.pop(part.stashed_x[0]))
        held = [*blocks.values(), *([run.x] if run.x is not None and self._keeps_input(part) else [])]
        for block in held:
            self._allocator.set_role(block, ACTIVATIONS)
        self._manager.end_forward(run)

    # --- backward -------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int, split: bool) -> Iterator[None]:
        """Yields after each of an engine's computations."""
        runs = self._part_runs.pop((stage, microbatch))
        dy = self._arrived.pop(("B", stage, microbatch), None)
        if dy is None:
            dy = self._malloc(self._run.hidden)
        waiting: list[PartRun] = []
        while runs:
            run = runs.pop()
            part = run.part
            self._running["backward"] = part.path
            run.following = runs[-1] if runs else None
            self._manager.begin_backward(run)
            if part.path == "embedding" and self._run.adding_tokens:
                self._sum_token_grads(run, dy)
                self._end_part("backward")
                break
            if self._yields_after(part):
                yield  # before it gathers: other microbatches compute meanwhile
            self._params.enter(part.place, part.mlp, True)
            if part.with_previous:
                run.x = yield from self._recompute(runs[-1])
            dx = yield from self._part_backward(run, dy, split)
            if run.blocks:
                waiting.append(run)
            self._params.leave(part.place, part.mlp, True, run.in_last)
            self._end_part("backward")
            if dx is None:
                break
            dy = dx
        else:
            self._send("B", stage - 1, microbatch, dy)
        if waiting:
            self._deferred[stage, microbatch] = waiting

    def _sum_token_grads(self, run: PartRun, dy: Block) -> None:
        self._allocator.free_all(run.blocks.values())
        if self._run.at_once:
            self._allocator.free_all([self._malloc(self._run.adding_tokens), dy])
        else:
            self._token_grads.append(dy)
            self._allocator.set_role(dy, GRADIENTS)

    def _part_backward(self, run: PartRun, dy: Block, split: bool) -> Generator[None, None, Block | None]:
        """The gradient of its input. `split`: without the experts' weight gradients, for which `run` holds blocks then."""
        part, events, blocks = run.part, run.part.events, run.blocks
        if part.placement == "recompute" and not blocks:
            self._allocator.free((yield from self._recompute(run)))
            if events.at_once:  # then nothing is left that would unpack the checkpoint
                self._allocator.free_all(run.held)
                run.held = ()
        blocks[events.gradient] = dy
        if run.x is not None:
            blocks[events.x] = run.x
        now, later = part.split_backward
        if not split:
            now, later = part.without_expert_grads if self._run.sharing.adds_in_place else events.backward, ()
        yield from self._play(run, now, "B")
        waiting = {n: blocks.pop(n) for n, size in later if not size and n in blocks}
        dx = self._take_dx(run)
        for block in waiting.values():
            self._allocator.set_role(block, ACTIVATIONS)
        run.blocks = waiting
        self._allocator.free_all(block for block in (run.balance, *run.shared, *run.held) if block is not None)
        return dx

    def _make_weight_grads(self, run: PartRun) -> None:
        """Deferred ones. Gradients that are added to a sum as they are made need rows of tokens only."""
        part, blocks = run.part, run.blocks
        summed = part.expert_grads if self._run.sharing.adds_in_place else {}
        for number, size in part.split_backward[1]:
            if size and number not in blocks and number not in summed:
                blocks[number] = self._malloc(size)
            elif not size:
                self._let_go(run, number, True)
        self._allocator.free_all(blocks.values())

    def _take_dx(self, run: PartRun) -> Block | None:
        """The gradient of the input; all else that is left of a backward is freed."""
        dx = run.blocks.pop(run.part.events.dx, None)
        self._allocator.free_all(run.blocks.values())
        return dx

    def _recompute(self, run: PartRun) -> Generator[None, None, Block]:
        """Run a part's forward again; its output."""
        yield from self._play(run, run.part.events.forward, "again")
        return run.blocks.pop(run.part.events.output)

    def _balance(self, loss: Part, runs: Sequence[PartRun]) -> None:
        """The load-balancing loss, forward and backward. Layers hold the gradients of their logits until their backwards."""
        events, run = loss.events, PartRun(loss)
        drain(self._play(run, events.forward, "F"))
        run.blocks[events.gradient] = self._malloc(1)
        drain(self._play(run, events.backward, "B"))
        for number in (events.gradient, events.output):
            if (block := run.blocks.pop(number, None)) is not None:
                self._allocator.free(block)
        # Each is of some layers in a row, whose first one runs its backward last. The last layers' is made first.
        routers = [run for run in runs if run.part.balance]
        gradients = [block for _, block in sorted(run.blocks.items(), reverse=True)]
        for nth, gradient in enumerate(gradients):
            routers[nth * len(routers) // len(gradients)].balance = gradient
            self._allocator.set_role(gradient, ACTIVATIONS)

    def _loss(self, head: Part, x: Block) -> Block:
        """An engine's head, forward and backward at once: the gradient of its input."""
        events, run = head.events, PartRun(head)
        self._running["forward"] = head.path
        self._manager.record("F", run)
        self._params.enter("head", False, True)
        # The engine adds the head's weight gradient to a sum of its own.
        elsewhere = events.head_sum if self._run.adding_tokens else frozenset()
        forward, backward = ([e for e in given if e[0] not in elsewhere] for given in (events.forward, events.backward))
        drain(self._play(run, forward, "F"))
        if events.saves_x:
            run.blocks[events.x] = x
        else:
            self._allocator.free(x)
        drain(self._play(run, backward, "B"))
        dx = self._take_dx(run)
        assert dx is not None
        self._end_part("forward")
        return dx

    # --- pages ----------------------------------------------------------------------------------------------------

    def _take_pages(self, run: PartRun) -> None:
        """For x and h, before h is made. In the first step there is no arena: they have memory of their own."""
        if not self._paged:
            run.pages = self._malloc(run.part.pages, ACTIVATIONS)
        self._stashed += run.part.pages
        self.most_stashed = max(self.most_stashed, self._stashed)

    def _release_pages(self, run: PartRun) -> None:
        """After the experts' weight gradients."""
        if run.part.stashed_x:
            self._stashed -= run.part.pages
        if run.pages is not None:
            self._allocator.free(run.pages)

    # --- both -----------------------------------------------------------------------------------------------------

    def _play(self, run: PartRun, events: Sequence[AllocEvent], way: str) -> Iterator[None]:
        """Play events of a part; in an engine yields after each transfer.

        A computation of an engine's MoE layer ends at marks too if nothing is transferred. What the operation before such a mark
        read alone is freed first.

        Args:
            way: "F" for a forward, "again" for one that is repeated in backward, "B" for a backward.
        """
        part, blocks, engine = run.part, run.blocks, self._run.engine
        transfers, transferred = 0, part.events.transferred
        stop = {"F": Mark.EXPERTS_BEGIN, "B": Mark.EXPERTS_END}.get(way)
        stops = self._stops(events, stop) if engine and not transferred else []
        due: tuple[None, ...] = ()
        malloc = self._allocator.malloc
        for number, size in events:
            if due and size:
                self._end_front(way, run)
                yield from due
                due = ()
                if not stops:
                    self._manager.begin_second_call(run, way)
            if number >= 0 and size:
                if number not in blocks:  # else a freed one has handed its memory to it
                    blocks[number] = malloc(size, self._transfer_stream if number in transferred else self._stream)
            elif number >= 0:
                self._let_go(run, number, way == "B")
            elif size == stop:
                due = stops.pop(0) if stops else ()
            elif size != Mark.ALL_TO_ALL_END:
                self._mark(size, run, way, transfers)
            else:
                if engine:
                    self._end_front(way, run)
                    yield
                if way == "B" and transfers:  # the experts' weight gradients have been made
                    self._release_pages(run)
                    if engine:
                        yield
                if engine and transfers == (way == "B"):
                    self._manager.begin_second_call(run, way)
                if not transfers:
                    self._params.enter_experts(part.place, way == "B")
                transfers += 1
        if due:
            yield from due
            self._manager.begin_second_call(run, way)

    def _let_go(self, run: PartRun, number: int, backward: bool) -> None:
        """Nothing reads a storage any more: its memory goes to another, to the parameter whose gradient it is, or back."""
        events, block = run.part.events, run.blocks.pop(number, None)
        if block is None:
            return
        taker = (events.reused_in_backward if backward else events.reused).get(number)
        if taker is not None:
            run.blocks[taker] = block
            self._allocator.set_role(block, TRANSIENT)
            return
        weight = events.weight_grads.get(number) if backward else None
        if weight is None or not self._params.keeps(run.part.place, weight, block):
            self._allocator.free(block)

    def _end_front(self, way: str, run: PartRun) -> None:
        """An engine's computation has ended: the layer's input is held until its front returns, before its experts run."""
        if way == "F":
            self._end_stage(run)
            self._allocator.clear(self._layer_inputs)

    def _end_stage(self, run: PartRun) -> None:
        """The function of an engine's front returns, and frees the sublayer's input if nothing reads it after."""
        if run.part.events.front_x and not self._keeps_input(run.part):
            self._free_input(run)

    def _free_input(self, run: PartRun) -> None:
        if run.x is not None:
            self._allocator.free(run.x)
            run.x = None

    def _mark(self, mark: int, run: PartRun, way: str, transfers: int) -> None:
        if mark == Mark.MATMUL:
            # Autograd's thread has a workspace of its own; an engine's backwards have no such thread.
            self._memory.workspace(0 if self._run.engine or way == "F" else 1)
        elif mark == Mark.FINAL_NORM_END:
            self._allocator.clear(self._model_inputs)
        elif mark == Mark.PAGES and way == "F":
            self._take_pages(run)
        elif mark == Mark.PAGES and run.part.stashed_x:  # x is copied out of the pages; kernels read h there
            number, size = run.part.stashed_x
            run.blocks[number] = self._malloc(size)
        elif mark == Mark.ALL_TO_ALL_BEGIN and transfers:
            self._params.leave_experts(run.part.place, way == "B", run.in_last)
        elif mark == Mark.ALL_TO_ALL_BEGIN and way == "F" and self._run.engine:
            self._end_stage(run)

    @staticmethod
    def _stops(events: Sequence[AllocEvent], stop: Mark | None) -> list[tuple[None, ...]]:
        """At each mark `stop`, how often to yield. A backward has two stops: after the experts' input gradients, and after their
        weight gradients, even if there are none."""
        marks = events.count((-1, stop))
        return [(None,)] * (marks - 1) + [(None,) * (1 + (stop == Mark.EXPERTS_END and marks == 1))]

    def _yields_after(self, part: Part) -> bool:
        """A dense layer is a single computation; `_play` yields inside of a MoE layer, and after its transfers."""
        return self._run.engine and (part.mlp or part.alone) and not part.events.transferred

    def _send(self, kind: str, stage: int, microbatch: int, block: Block) -> None:
        """To a stage of this rank, or of another: the latter holds the block until the next is sent, if NCCL sends it."""
        if stage in self._run.stages:
            self._arrived[kind, stage, microbatch] = block
            return
        if self._run.sharing.slot_bytes:  # copied
            self._allocator.free(block)
            return
        self._allocator.free_all(self._sent)
        self._sent = [block]

    def _malloc(self, size: int, role: int = TRANSIENT) -> Block:
        return self._allocator.malloc(size, self._stream, role)
