"""One run of a model's parts on fake tensors, each part watched by itself.

In: a model whose parameters are fake, and a `Shape`. Out: a `PartTrace` for the embedding, every half and the head. `Run` puts on
the model what the run would (experts, fused loss, halves) and owns the graphs between `forward` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from forebay.models.causal_lm import head_loss, install_fused_loss
from forebay.models.families import moe_block, moe_blocks
from forebay.models.halves import HalfSlot, install_halves
from forebay.models.hf_experts import register
from forebay.models.planned_exchange import PlannedExchange
from forebay.models.router import balance_loss
from forebay.planner.events import NORMED, Ends, Log, Mark, PartEvents, highest, part_events
from forebay.planner.figures import OpCost, PartTrace, Shape
from forebay.planner.live import Live

_Saved = tuple[int, frozenset[int], int]
"""Of a storage that autograd saved: bytes, origins, its number."""


@dataclass
class _Part:
    """A part that ran forward: its graph, and what is known of it so far. `log`: where its forward lies in the log; `kept`:
    numbers of what is saved, in order; `compiled`: it is a half, and halves are; `dry`: the log of its forward without a
    graph."""

    output: Tensor
    x: Tensor | None
    saved: int
    forward: int
    flops: int
    log: tuple[int, int]
    kept: tuple[int, ...]
    compiled: bool
    dry: Log
    backward: int = 0
    backward_flops: int = 0
    stash: tuple[int, int] = (0, 0)
    later: int = 0
    token_rows: int = 0
    again: Callable[[], Any] | None = None
    forward_ops: tuple[OpCost, ...] = ()
    backward_ops: tuple[OpCost, ...] = ()
    events: PartEvents | None = None


class Run:
    """One trace. Lives as long as `trace_model`.

    Attributes:
        parts: by module path, "embedding" or "head".
        balance, head_gradient: see `ModelTrace`.
    """

    def __init__(self, model: Any, base: Any, shape: Shape):
        self.model, self.base, self.shape = model, base, shape
        self.parts: dict[str, PartTrace] = {}
        self.balance = self.head_gradient = 0
        self._live = Live(shape.block, shape.later, shape.compiled)
        self._open: dict[str, _Part] = {}
        self._known: set[int] = set()
        self._refs: list[StorageWeakRef] = []
        self._inputs: set[int] = set()
        self._counted: set[int] = set()  # origins
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[int] = []  # of weights, of the part that runs backward: numbers in the log
        self._last: Tensor
        blocks = moe_blocks(model)
        if blocks and shape.experts == "forebay":
            model.set_experts_implementation(register())
        if shape.loss == "fused":
            install_fused_loss(model)
        self._exchange = self._exchange_of(blocks)
        self._halves = install_halves(model, exchange=self._exchange)
        for slot in self._halves.values():
            slot.wrap(partial(self._watched, slot))
        for parameter in model.parameters():
            self._know(parameter)
            self._live.ignore(parameter)
            # As soon as it is made it is added to a sum that is counted elsewhere.
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._let_go)
        for buffer in model.buffers():
            self._know(buffer)
            self._live.ignore(buffer)

    def forward(self) -> None:
        """All parts, in order; each graph is kept for `backward`."""
        size = self.shape.microbatch, self.shape.sequence
        ids, labels = (torch.empty(size, dtype=torch.int64) for _ in range(2))
        with self._live:
            self._share(ids)
            self._share(labels)
            x = self._part("embedding", None, lambda: self.base.embed_tokens(ids))
            self._last = x
            # The layers; and the last norm, which is run again with the head.
            self.base(inputs_embeds=x, use_cache=False)
            self._part("head", self._last, partial(self._head, labels=labels))
            if self.shape.balance and self._routed:
                self._part("balance", None, self._balance)
                self.balance = self._open["balance"].saved // len(self._routed)

    def backward(self) -> None:
        """Each part's backward, by itself."""
        with self._live:
            for path, part in reversed(list(self._open.items())):
                self._backward(part)
                light = self._light(part) if part.again is not None else None
                inputs = self._live.size(part.x) if part.x is not None else 0
                self.parts[path] = PartTrace(
                    part.saved, inputs, part.forward, part.backward, part.flops, part.backward_flops,
                    light[:2] if light is not None else None, part.stash, part.later, part.token_rows,
                    part.forward_ops, part.backward_ops, light[3] if light is not None else (),
                    part.events, light[2] if light is not None else None,
                )  # fmt: skip

    def _exchange_of(self, blocks: list[Any]) -> PlannedExchange | None:
        if not blocks or not self.shape.stages:
            return None
        s, experts = self.shape, int(blocks[0].experts.num_experts)
        slots = self.model.config.get_text_config().num_experts_per_tok
        exchange = PlannedExchange(
            s.ep, experts, s.sequence * s.microbatch, slots, s.skew, s.capacity_factor if s.ep > 1 else 0.0
        )
        if s.ep > 1:
            tally = self._live.tally
            tally.live, tally.received, tally.ranks = exchange.live_slots / exchange.slots, exchange.live_rows, s.ep
        for block in blocks if s.ep > 1 else ():
            for name, parameter in block.experts.named_parameters(recurse=False):
                own = torch.empty(experts // s.ep, *parameter.shape[1:], dtype=parameter.dtype)
                setattr(block.experts, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        return exchange

    def _know(self, tensor: Tensor) -> None:
        """It counts no more among what is saved."""
        reference = StorageWeakRef(tensor.untyped_storage())
        self._refs.append(reference)  # or its identity could be another's
        self._known.add(reference.cdata)

    def _watched(self, slot: HalfSlot, call: Callable[..., Any]) -> Callable[..., Any]:
        """A half, cut off from what is before and after it."""

        def half(x: Tensor, **keywords: Any) -> Any:
            found: list[Any] = []
            if "attention_mask" in keywords and self._unmasked(slot.module):
                keywords["attention_mask"] = None
            for shared in tree_leaves(keywords):
                if isinstance(shared, Tensor):
                    self._share(shared)

            def run(x: Tensor) -> Tensor:
                result = call(x, **keywords)
                found.append(result)
                return result[0] if isinstance(result, tuple) else result

            out = self._part(slot.path, x, run, found.clear)
            part, (result,) = self._open[slot.path], found
            found.clear()  # the graph is the part's alone
            if slot.path.endswith(".mlp") and slot.light_recompute is not None:
                part.again = partial(self._run_light, slot, call, x.detach())
                part.stash, part.later, part.token_rows = self._rows_of(slot)
            self._last = out
            if not isinstance(result, tuple):
                return out
            if result[1] is not None:
                self._routed.append((result[1].detach().requires_grad_(), result[2]))
            return out, *(t.detach() if t is not None else None for t in result[1:])

        return half

    def _unmasked(self, layer: Any) -> bool:
        """Whether a run gives a layer no mask: its sequences are whole, so the causal one is the kernel's. transformers cannot
        see that on fake tensors, and makes one."""
        window = getattr(layer.self_attn, "sliding_window", None) or self.shape.sequence
        return self.model.config._attn_implementation == "sdpa" and window >= self.shape.sequence

    def _part(
        self, path: str, x: Tensor | None, run: Callable[..., Tensor], forget: Callable[[], None] = lambda: None
    ) -> Tensor:
        """`forget` lets go of what `run` left beside its result."""
        live = self._live
        leaf = None if x is None else x.detach().requires_grad_()
        if leaf is not None:
            live.enter(leaf)
        dry: Log = [] if self.shape.compiled or leaf is None else self._without_graph(leaf, run, forget)
        live.peak, live.flops = live.now, 0
        live.tally.take()
        begin, at = live.now, len(live.log)
        saved: dict[StorageWeakRef, _Saved] = {}
        with saved_tensors_hooks(partial(self._pack, saved), lambda tensor: tensor):
            output = run() if leaf is None else run(leaf)
        still = [figures for reference, figures in saved.items() if not reference.expired()]  # that something holds
        eager = held = sum(figures[0] for figures in still)
        kept = tuple(dict.fromkeys(figures[2] for figures in still))
        half = (self.shape.compiled and path in self._halves) or path == "light"
        if self.shape.compiled:
            origins = frozenset().union(*(figures[1] for figures in still)) - self._counted
            self._counted |= origins
            held = min(eager, sum(map(live.origin_size, origins)))
            kept = tuple(sorted(map(live.origin_number, origins))) if half else kept
        span = at, len(live.log)
        self._open[path] = _Part(
            output,
            leaf,
            held,
            live.peak - begin,
            live.flops,
            span,
            kept,
            half and self.shape.compiled,
            dry,
            forward_ops=live.tally.take([output]),
        )
        return output.detach()

    def _without_graph(self, x: Tensor, run: Callable[..., Tensor], forget: Callable[[], None]) -> Log:
        """What a forward does that saves nothing, such as a recomputation's first."""
        at = len(self._live.log)
        with torch.no_grad():
            run(x)
        log = self._live.log[at:]
        forget()
        del self._live.log[at:]
        return log

    def _pack(self, saved: dict[StorageWeakRef, _Saved], tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._known:
            self._know(tensor)
            saved[reference] = self._live.size(tensor), self._live.origins(tensor), self._live.number(tensor)
        return tensor.detach()

    def _share(self, tensor: Tensor) -> None:
        """What all layers are given is an input to each, the same one."""
        key = tensor.untyped_storage()._cdata
        if key not in self._inputs:
            self._inputs.add(key)
            self._live.enter(tensor)

    def _backward(self, part: _Part) -> None:
        live = self._live
        output, part.output = part.output, part.output.new_empty(0)
        live.peak, live.flops = live.now, 0
        live.tally.take()
        begin, out, width = live.now, live.number(output), live.size(output)
        at, self._gradients = len(live.log), []
        gradient = torch.empty_like(output)
        given, dx = live.number(gradient), -1
        if output.requires_grad:
            # The output's memory is not held by what runs its backward, unless it is saved.
            root = _Root.apply(output, [gradient])
            del output, gradient
            root.backward()
            del root
        part.backward, part.backward_flops = live.peak - begin, live.flops
        results = [part.x.grad] if part.x is not None and part.x.grad is not None else []
        part.backward_ops = live.tally.take(results)
        results.clear()
        x = -1
        if part.x is not None:
            x, dx = live.number(part.x), -1 if part.x.grad is None else live.number(part.x.grad)
        log = live.log[at:]
        if part.x is not None:
            part.x.grad = None
        ends = Ends(x, out, given, dx, tuple(self._gradients), part.kept, frozenset(live.travelling))
        part.events = events = part_events(live.log[slice(*part.log)], log, ends, part.compiled, part.dry)
        if part.compiled:
            sizes = dict(e for e in events.forward if e[1] and e[0] >= 0)
            part.forward = highest(events.forward, {})
            part.backward = highest(((given, width), *events.backward), sizes)

    def _let_go(self, parameter: Tensor) -> None:
        """Of a weight's gradient."""
        if parameter.grad is not None:
            self._gradients.append(self._live.number(parameter.grad))
        parameter.grad = None

    def _light(self, part: _Part) -> tuple[int, int, PartEvents | None, tuple[OpCost, ...]]:
        assert part.again is not None
        again: _Part = part.again()
        self._backward(again)
        return again.saved, again.backward, again.events, again.backward_ops

    def _run_light(self, slot: HalfSlot, call: Callable[..., Any], x: Tensor) -> _Part:
        assert slot.light_recompute is not None
        slot.light_recompute(True)
        try:
            self._part("light", x, lambda leaf: call(leaf)[0])
        finally:
            slot.light_recompute(False)
        return self._open.pop("light")

    def _rows_of(self, slot: HalfSlot) -> tuple[tuple[int, int], int, int]:
        """`stash`, `later` and `token_rows` of a MoE half."""
        exchange = self._exchange
        if exchange is None:
            return (0, 0), 0, 0
        experts: Any = moe_block(slot.path, slot.module.mlp).experts  # type: ignore[union-attr, arg-type]
        hidden, size = self.model.config.get_text_config().hidden_size, experts.gate_up_proj.element_size()
        width = experts.gate_up_proj[0].numel() // hidden  # of h
        # Of one rank, rows are the tokens themselves.
        rows, slots = (exchange.rows, exchange.slots) if exchange.size > 1 else (exchange.tokens, exchange.live_slots)
        capacity = size * (rows * hidden + slots * width)
        came = size * (exchange.live_rows * hidden + exchange.live_slots * width)
        later = size * (2 * rows * hidden + slots * (width + width // 2))
        return ((capacity, came) if exchange.size > 1 else (0, 0)), later, size * slots * hidden

    def _head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden = self.base.norm(hidden)
        self._live.log.append(Mark(NORMED))
        head = self.model.lm_head
        if self.shape.loss == "fused":
            weight = head.weight
            self.head_gradient = 4 * weight.numel() if weight.requires_grad else 0
            return head_loss(head.forward, hidden, labels, shift_labels=labels, num_items_in_batch=labels.numel())
        return self.model.loss_function(
            logits=head(hidden),
            labels=labels,
            vocab_size=self.model.config.get_text_config().vocab_size,
            shift_labels=labels,
            num_items_in_batch=labels.numel(),
        )

    def _balance(self) -> Tensor:
        return balance_loss(self._routed)


class _Root(torch.autograd.Function):
    """Hands in the gradient of a part's output, which nobody has to hold for that."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.given.pop(), None
