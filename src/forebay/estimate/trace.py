"""What each part of a model saves, needs and computes for one microbatch, without a device and without weights.

Input: a transformers `*ForCausalLM` on the meta device, and a `Shape`. Output: a `ModelTrace`: figures for the embedding, both
sublayers of every decoder layer, and the head with its loss. The model is used up: its layers run on fake tensors with Forebay's
experts, loss and, under expert parallelism, a planned token dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from forebay.estimate.live import Live
from forebay.estimate.types import (
    NORMED,
    Ends,
    LayerTrace,
    Log,
    Mark,
    ModelTrace,
    OpCost,
    PartEvents,
    PartTrace,
    Shape,
    highest,
    part_events,
)
from forebay.models.blocks import SublayerSlot, install_sublayers
from forebay.models.experts import register
from forebay.models.families import decoder_layers, moe_block, moe_blocks
from forebay.models.fused_loss import head_loss, install_fused_loss
from forebay.models.router import balance_loss
from forebay.moe.dispatch import Handle, TokenDispatcher, aligned

# An exchange on paper: how many rows a rank would receive, for a trace on fake tensors. Nothing travels.
#
# In: the shapes of expert parallelism, and how uneven the routing is. Out: an `TokenDispatcher` of rank 0 whose operations
# exist as fake implementations only. It owns nothing.
#
# T tokens of each of P ranks choose K of E experts, evenly and independently: a token comes to a rank with the probability that
# one of its K is among the rank's E / P. `skew` multiplies that for the rank that is looked at:
#
#     S = T K skew, live slots        at most P T min(K, E / P)
#     R = P T (1 - C(E - E/P, K) / C(E, K)) skew, rows                at most min(P T, S)
#
# both rounded up as the exchanges with exact sizes do. With a capacity (`forebay.moe.symmetric`) buffers have its sizes,
# whatever arrives.


class PlannedDispatcher(TokenDispatcher):
    """See the module docstring.

    Args:
        size, num_experts: P and E.
        tokens, slots_per_token: T and K.
        skew: load of this rank over an even one; at least 1.
        capacity_factor: of the symmetric exchange; 0 is exact sizes.

    Attributes:
        tokens: T.
        rows, slots: R and S, of buffers.
        live_rows, live_slots: those that really come; the same with exact sizes.

    Raises:
        ValueError: experts that the ranks do not divide, or a skew below 1.
    """

    def __init__(
        self,
        size: int,
        num_experts: int,
        tokens: int,
        slots_per_token: int,
        skew: float = 1.0,
        capacity_factor: float = 0.0,
    ):
        super().__init__(0, size, num_experts)
        if not skew >= 1:
            raise ValueError(f"a skew of {skew} is no load over an even one; valid is at least 1")
        self.tokens, everything = tokens, size * tokens
        most = everything * min(slots_per_token, self.local_experts)
        slots = min(most, math.ceil(tokens * slots_per_token * skew))
        missed = math.comb(num_experts - self.local_experts, slots_per_token) / math.comb(num_experts, slots_per_token)
        rows = min(everything, slots, math.ceil(everything * (1 - missed) * skew))
        self.live_rows, self.live_slots = aligned(rows), aligned(slots)
        self.rows, self.slots = self.live_rows, self.live_slots
        if capacity_factor:
            self.slots = aligned(min(most, math.ceil(capacity_factor * tokens * slots_per_token)))
            self.rows = min(everything, self.slots)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Not on paper."""
        raise self._unsent()

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """Not on paper."""
        raise self._unsent()

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Not on paper."""
        raise self._unsent()

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """S."""
        return self.slots

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int, Handle]:
        """R, and tensors of the sizes that the exchange over symmetric memory hands out; NCCL's differ by a few bytes."""
        sizes = (self.rows,), (tokens, self.size), (self.size + 1,)
        return self.rows, [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]

    def _unsent(self) -> RuntimeError:
        return RuntimeError("a planned exchange sends nothing: it is for traces on fake tensors")


# One run of a model's parts on fake tensors, each part watched by itself.
#
# In: a model whose parameters are fake, and a `Shape`. Out: a `PartTrace` for the embedding, every half and the head. `TraceRun`
# puts on the model what the run would (experts, fused loss, halves) and owns the graphs between `forward` and `backward`.

_Saved = tuple[int, frozenset[int], int]
"""Of a storage that autograd saved: bytes, origins, its number."""


@dataclass
class _TracedPart:
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


class TraceRun:
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
        self._open: dict[str, _TracedPart] = {}
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
        self._dispatcher = self._dispatcher_of(blocks)
        self._sublayers = install_sublayers(model, dispatcher=self._dispatcher)
        for slot in self._sublayers.values():
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

    def _dispatcher_of(self, blocks: list[Any]) -> PlannedDispatcher | None:
        if not blocks or not self.shape.stages:
            return None
        s, experts = self.shape, int(blocks[0].experts.num_experts)
        slots = self.model.config.get_text_config().num_experts_per_tok
        dispatcher = PlannedDispatcher(
            s.ep, experts, s.sequence * s.microbatch, slots, s.skew, s.capacity_factor if s.ep > 1 else 0.0
        )
        if s.ep > 1:
            tally = self._live.tally
            tally.live, tally.received, tally.ranks = (
                dispatcher.live_slots / dispatcher.slots,
                dispatcher.live_rows,
                s.ep,
            )
        for block in blocks if s.ep > 1 else ():
            for name, parameter in block.experts.named_parameters(recurse=False):
                own = torch.empty(experts // s.ep, *parameter.shape[1:], dtype=parameter.dtype)
                setattr(block.experts, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        return dispatcher

    def _know(self, tensor: Tensor) -> None:
        """It counts no more among what is saved."""
        reference = StorageWeakRef(tensor.untyped_storage())
        self._refs.append(reference)  # or its identity could be another's
        self._known.add(reference.cdata)

    def _watched(self, slot: SublayerSlot, call: Callable[..., Any]) -> Callable[..., Any]:
        """A half, cut off from what is before and after it."""

        def sublayer(x: Tensor, **keywords: Any) -> Any:
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

        return sublayer

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
        sublayer = (self.shape.compiled and path in self._sublayers) or path == "light"
        if self.shape.compiled:
            origins = frozenset().union(*(figures[1] for figures in still)) - self._counted
            self._counted |= origins
            held = min(eager, sum(map(live.origin_size, origins)))
            kept = tuple(sorted(map(live.origin_number, origins))) if sublayer else kept
        span = at, len(live.log)
        self._open[path] = _TracedPart(
            output,
            leaf,
            held,
            live.peak - begin,
            live.flops,
            span,
            kept,
            sublayer and self.shape.compiled,
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

    def _backward(self, part: _TracedPart) -> None:
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

    def _light(self, part: _TracedPart) -> tuple[int, int, PartEvents | None, tuple[OpCost, ...]]:
        assert part.again is not None
        again: _TracedPart = part.again()
        self._backward(again)
        return again.saved, again.backward, again.events, again.backward_ops

    def _run_light(self, slot: SublayerSlot, call: Callable[..., Any], x: Tensor) -> _TracedPart:
        assert slot.light_recompute is not None
        slot.light_recompute(True)
        try:
            self._part("light", x, lambda leaf: call(leaf)[0])
        finally:
            slot.light_recompute(False)
        return self._open.pop("light")

    def _rows_of(self, slot: SublayerSlot) -> tuple[tuple[int, int], int, int]:
        """`stash`, `later` and `token_rows` of a MoE half."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return (0, 0), 0, 0
        experts: Any = moe_block(slot.path, slot.module.mlp).experts  # type: ignore[union-attr, arg-type]
        hidden, size = self.model.config.get_text_config().hidden_size, experts.gate_up_proj.element_size()
        width = experts.gate_up_proj[0].numel() // hidden  # of h
        # Of one rank, rows are the tokens themselves.
        rows, slots = (
            (dispatcher.rows, dispatcher.slots) if dispatcher.size > 1 else (dispatcher.tokens, dispatcher.live_slots)
        )
        capacity = size * (rows * hidden + slots * width)
        came = size * (dispatcher.live_rows * hidden + dispatcher.live_slots * width)
        later = size * (2 * rows * hidden + slots * (width + width // 2))
        return ((capacity, came) if dispatcher.size > 1 else (0, 0)), later, size * slots * hidden

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


# What each part of a model saves, needs and computes for one microbatch, without a device and without weights.
#
# In: a transformers `*ForCausalLM` on the meta device with all its layers, and a `Shape`. Out: a `ModelTrace`: figures for the
# embedding, the two halves of every decoder layer, and the head with its loss. The model is used up: its layers are run as the
# run itself runs them, with its experts, its loss and (under expert parallelism) its stages, on fake tensors. Nothing is kept.
#
# How: of each *kind* of layer (its classes, the shapes of its parameters, its sliding window) at most two are run, and the last
# half of a kind gives the kind's figures: what layers share, such as rotary tables, the first one saves. Each half is a graph
# of its own, whose input is a leaf: forward is run and its memory watched (`forebay.estimate.live`), then backward. A figure of
# *saved* bytes is that of `forebay.memory.profiler`: distinct storages that autograd saved first in this part, without
# parameters and their views.
#
# Fake tensors are on the fake CPU: torch's CPU wheels abort where autograd meets a fake CUDA tensor. Two things would differ
# and are made those of a GPU. Storages are rounded to the caching allocator's 512 bytes; and `scaled_dot_product_attention` is
# one of the GPU's fused kernels, which keep no scores and give their output the layout of the queries.
#
# What is not the run's:
#
# * `memory.compile`: halves are traced uncompiled. Of what autograd saves then, compiled code saves what that was made of
# (inputs,
#   results of GEMMs, attention, the experts and reductions), which `forebay.estimate.live` notes: torch's partitioner cuts
#   there, or where fewer bytes cross, so that this bounds it. All that is made again is counted in backward's peak.
# * A weight gradient is counted in backward's peak beside the sum it is added to. With one microbatch it *is* that sum: the
# peak is
#   then too high by the gradients of one half.
# * Flash attention is traced as the fused kernel, which saves the same; GPT-OSS, which has no such kernel in torch, as "eager".


def trace_model(model: Any, shape: Shape) -> ModelTrace:
    """Trace `model`, which is on the meta device, in the dtype that is computed in, and not used again.

    Raises:
        ValueError: layers, experts or a loss of a kind that Forebay does not know, or experts that `ep` does not divide.
    """
    base = model.get_submodule(model.base_model_prefix)
    layers: list[Any] = [layer for _, layer in decoder_layers(model)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that Forebay knows")
    kinds = [_kind(layer) for layer in layers]
    numbers = sorted(n for k in set(kinds) for n in [i for i, kind in enumerate(kinds) if kind == k][:2])
    base.layers = _Chosen(layers[n] for n in numbers)
    model.config.use_cache = False
    with torch.enable_grad(), FakeTensorMode(), _FusedAttention() if shape.gpu else nullcontext():
        _make_fake(model)
        run = TraceRun(model.train(), base, shape)
        run.forward()
        run.backward()
    sublayers = _by_sublayer(run, numbers, layers, kinds)
    first = run.parts[f"{base_path(model)}.layers.0.self_attn"]
    return ModelTrace(
        run.parts["embedding"],
        tuple(sublayers[kind] for kind in kinds),
        run.parts["head"],
        first.saved - sublayers[kinds[numbers[0]]].attention.saved,
        run.balance,
        len(sublayers),
        run.head_gradient,
    )


def base_path(model: Any) -> str:
    """Module path of the base model."""
    return str(model.base_model_prefix)


class _Chosen(nn.ModuleList):
    """Some of a model's layers; a slice of it is all of them, for a base model takes as many as its configuration says."""

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


LayerKind = tuple[Any, Any]  # of the attention half, and of the other


def _kind(layer: Any) -> LayerKind:
    attention = type(layer.self_attn), getattr(layer.self_attn, "sliding_window", None), _shapes(layer.self_attn)
    return (type(layer), *attention), (type(layer.mlp), _shapes(layer.mlp))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _by_sublayer(
    run: TraceRun, numbers: list[int], layers: list[Any], kinds: list[LayerKind]
) -> dict[LayerKind, LayerTrace]:
    """Of each kind, its halves as the last layer that has them."""
    attention, mlp = {}, {}
    for place, number in enumerate(numbers):
        path = f"{base_path(run.model)}.layers.{place}"
        attention[kinds[number][0]] = run.parts[f"{path}.self_attn"]
        mlp[kinds[number][1]] = run.parts[f"{path}.mlp"]
    is_moe = {kind[1]: moe_block("mlp", layer.mlp) is not None for kind, layer in zip(kinds, layers, strict=True)}
    return {kind: LayerTrace(attention[kind[0]], mlp[kind[1]], is_moe[kind[1]]) for kind in set(kinds)}


def _make_fake(model: nn.Module) -> None:
    """Parameters and buffers as fake tensors of the same shapes and dtypes."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # one parameter may have two names
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _FusedAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` as a GPU's fused kernels save: flash, or cuDNN's for heads of two widths and for masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace that function, pass on every other."""
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Both kernels give their output the layout of the queries, and take fewer heads of keys than of queries."""
    aten = torch.ops.aten
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
