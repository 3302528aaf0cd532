"""What each part of a model saves, needs and computes for one microbatch, without a device and without weights.

Input: a transformers `*ForCausalLM` on the meta device, and a `Shape`. Output: a `ModelTrace`: figures for the embedding, both
sublayers of every decoder layer, and the head with its loss. The model is used up: at most two layers of each kind run on fake
tensors, with Forebay's experts, loss and, under expert parallelism, a planned token dispatcher. Each part is a graph of its
own, whose forward and backward are recorded (`forebay.estimate.op_recorder`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from forebay.estimate.events import NamedStorages, cut_nearest, head_events, part_events
from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import weight_name
from forebay.estimate.types import (
    FINAL_NORM_BACKWARD,
    FINAL_NORM_END,
    PAGE,
    Freed,
    LayerTrace,
    Log,
    Mark,
    ModelTrace,
    Op,
    PartTrace,
    Shape,
)
from forebay.memory.overrides import ModuleCallSite
from forebay.models.blocks import SublayerCallSite, install_sublayers
from forebay.models.families import decoder_layers, moe_blocks, transformers_base
from forebay.models.fused_loss import head_loss, install_fused_loss
from forebay.models.hf_experts import register, round_saved_rows
from forebay.models.router import balance_loss
from forebay.models.sinks import has_eager_sinks
from forebay.models.structure import sinks_of
from forebay.moe.dispatch import Handle, TokenDispatcher, aligned


class PlannedDispatcher(TokenDispatcher):
    """The token dispatcher of rank 0 on fake tensors: how many rows the rank would receive. It transfers nothing.

    T tokens of each of P ranks choose K of E experts, evenly and independently. A token reaches a rank with the probability
    that one of its K experts is among the rank's E / P, p; `skew` multiplies that:

        S = T K skew, live slots                                    at most P T min(K, E / P)
        R = P T p skew, live rows       at most min(P T, S)         p = 1 - C(E - E/P, K) / C(E, K) without groups of experts

    both rounded up as the dispatchers with exact sizes do. With a capacity, buffers have the sizes of
    `forebay.moe.symmetric`, whatever arrives.

    Args:
        size, tokens: P and T.
        routing: has E and K.
        skew: load of this rank over an even one; at least 1.
        capacity_factor: of the symmetric dispatcher; 0 means exact sizes.

    Attributes:
        tokens: T.
        rows, slots: of buffers; R and S with exact sizes.
        live_rows, live_slots: R and S.

    Raises:
        ValueError: the ranks do not divide the experts, or the skew is below 1.
    """

    def __init__(
        self,
        size: int,
        routing: EvenRouting,
        tokens: int,
        skew: float = 1.0,
        capacity_factor: float = 0.0,
    ):
        super().__init__(0, size, routing.experts)
        if not skew >= 1:
            raise ValueError(f"a skew of {skew} is not a load over an even one; valid is at least 1")
        self.tokens, everything = tokens, size * tokens
        most = everything * min(routing.slots, self.local_experts)
        slots = min(most, math.ceil(tokens * routing.slots * skew))
        rows = min(everything, slots, math.ceil(everything * routing.reached(self.local_experts) * skew))
        self.live_rows, self.live_slots = aligned(rows), aligned(slots)
        self.rows, self.slots = self.live_rows, self.live_slots
        if capacity_factor:
            self.slots = aligned(min(most, math.ceil(capacity_factor * tokens * routing.slots)))
            self.rows = min(everything, self.slots)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        raise self._unsent()

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        raise self._unsent()

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise self._unsent()

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        return self.slots

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int, Handle]:
        """R, and tensors of the sizes that the symmetric dispatcher returns; NCCL's differ by a few bytes."""
        sizes = (self.rows,), (tokens, self.size), (self.size + 1,)
        return self.rows, [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]

    def _unsent(self) -> RuntimeError:
        return RuntimeError("a planned token dispatcher transfers nothing: it is for traces on fake tensors")


@dataclass
class _TracedPart:
    """A part whose forward ran: its graph, and its figures so far.

    Attributes:
        log: position of its forward in the log.
        kept: storages that are saved, in order.
        no_grad: log of its forward without a graph.
        experts, head_sum: see `OpRecorder`.
        light: runs its forward with light recomputation of the experts.
    """

    trace: PartTrace
    output: Tensor
    x: Tensor | None
    log: slice
    kept: tuple[int, ...]
    compiled: bool
    no_grad: Log
    experts: tuple[int, int]
    head_sum: int
    light: Callable[[], _TracedPart] | None = None

    def with_light(self, light: PartTrace) -> PartTrace:
        return replace(self.trace, light=light.saved, light_ops=light.backward_ops, light_events=light.events)


@dataclass(frozen=True)
class _SavedStorage:
    size: int
    origins: frozenset[int]
    number: int


class TraceRun:
    """One run of a model on fake tensors, part by part. It owns the graphs between `forward` and `backward`.

    Fake tensors are on the CPU, because torch's CPU wheels abort where autograd meets a fake CUDA tensor.

    Args:
        known: parts that need not run, by module path or "head".
        forward_only: paths of sublayers of which only the forward runs, for what the parts after them share with them.

    Attributes:
        parts: by module path, "embedding" or "head"; none of `forward_only`.
        shared, balance, given, unused: see `ModelTrace`.
    """

    def __init__(
        self,
        model: Any,
        base: Any,
        shape: Shape,
        known: Mapping[str, PartTrace] = MappingProxyType({}),
        forward_only: frozenset[str] = frozenset(),
    ):
        self.model, self.base, self.shape = model, base, shape
        self._forward_only = forward_only
        self.parts: dict[str, PartTrace] = dict(known)
        self.balance = self.shared = self.unused = 0
        self._given: dict[int, int] = {}  # bytes of what layers get, by number, which none has saved yet
        # By the base model for eager attention, tables included; of them to layers.
        self._masks_made = self._bytes_given = 0
        self._recorder = OpRecorder(shape.block, shape.deferred_weight_grads, shape.compiled, shape.stages)
        self._open: dict[str, _TracedPart] = {}
        self._known: set[int] = (
            set()
        )  # storages that do not count as saved: parameters, buffers, what an earlier part saved
        self._refs: list[StorageWeakRef] = []  # of `_known`, so that their addresses are not used again
        self._inputs: set[int] = set()
        self._counted_origins: set[int] = set()
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._weight_grads: dict[int, str] = {}  # of the part whose backward runs
        self._norm = -1, -1  # the last norm's result and its gradient
        self._last: Tensor
        blocks = moe_blocks(model)
        if blocks and shape.experts == "forebay":
            model.set_experts_implementation(register())
            if shape.rounds:
                round_saved_rows(model)
        elif blocks and model.config._experts_implementation == "grouped_mm" and model.dtype != torch.bfloat16:
            # torch runs that product in other dtypes, but knows the shape of its result in bfloat16 only.
            raise ValueError(
                f"transformers' experts are counted in bfloat16 only, not in {str(model.dtype).removeprefix('torch.')}; valid "
                "are model.compute = 'bfloat16' and model.experts = 'forebay'"
            )
        if shape.loss == "fused":
            install_fused_loss(model)
        self._dispatcher = self._install_dispatcher(blocks)
        if shape.checkpointed_experts:
            for block in blocks:
                # As `forebay.memory.recompute` does, without its checks. The state of a generator is no fake tensor.
                ModuleCallSite(block.experts).wrap(
                    lambda forward: partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
                )
        self._sublayers = install_sublayers(model, dispatcher=self._dispatcher)
        for site in self._sublayers.values():
            site.wrap(partial(self._traced_sublayer, site))
        for tensor in (*model.parameters(), *model.buffers()):
            self._know(tensor)
            self._recorder.ignore(tensor)
        self._names = {id(p): weight_name(name) for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._drop_weight_grad)

    def forward(self) -> None:
        size = self.shape.microbatch, self.shape.sequence
        ids, labels = (torch.empty(size, dtype=torch.int64) for _ in range(2))
        with self._recorder:
            self._share(ids)
            self._share(labels)
            x = self._part("embedding", None, lambda: self.base.embed_tokens(ids))
            self._last, self._embedded = x, len(self._recorder.log)
            self.base(inputs_embeds=x, use_cache=False)  # its last norm runs again as a part of the head
            self.unused = max(0, self._masks_made - self._bytes_given)
            if "head" in self.parts:
                return
            self._part("head", self._last, partial(self._head, labels=labels))
            if self.shape.balance and self._routed:
                self._part("balance", None, lambda: balance_loss(self._routed))
                self.balance = self._open["balance"].trace.saved // len(self._routed)

    def backward(self) -> None:
        with self._recorder:
            for path, part in reversed(list(self._open.items())):
                if path in self._forward_only:
                    continue
                self._backward(part)
                self.parts[path] = part.trace
                if part.light is not None:
                    light = part.light()
                    self._backward(light)
                    self.parts[path] = part.with_light(light.trace)

    def _install_dispatcher(self, blocks: list[Any]) -> PlannedDispatcher | None:
        """Cut the experts to those of one rank, and plan what arrives there."""
        if not blocks or not self.shape.stages:
            return None
        s, routing = self.shape, EvenRouting.of(self.model.config)
        dispatcher = PlannedDispatcher(
            s.ep, routing, s.sequence * s.microbatch, s.skew, s.capacity_factor if s.ep > 1 else 0.0
        )
        if s.ep == 1:
            return dispatcher
        tally = self._recorder.tally
        tally.live, tally.received, tally.ranks = dispatcher.live_slots / dispatcher.slots, dispatcher.live_rows, s.ep
        for block in blocks:
            for name, parameter in block.experts.named_parameters(recurse=False):
                own = torch.empty(routing.experts // s.ep, *parameter.shape[1:], dtype=parameter.dtype)
                setattr(block.experts, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        return dispatcher

    def _know(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._refs.append(reference)
        self._known.add(reference.cdata)

    def _traced_sublayer(self, site: SublayerCallSite, call: Callable[..., Any]) -> Callable[..., Any]:
        """A sublayer as a graph of its own, cut off from what is before and after it."""

        def sublayer(x: Tensor, **keywords: Any) -> Any:
            found: list[Any] = []
            if site.path in self.parts:
                self._last = torch.empty_like(x)
                return self._last if site.path.endswith(".self_attn") else (self._last, None, None)
            if "attention_mask" in keywords and self._needs_no_mask(site.module):
                keywords["attention_mask"] = None
            if keywords.get("attention_mask") is not None and self.model.config._attn_implementation == "eager":
                self._masks_made = self._masks_made or _live_bytes(self._recorder.log[self._embedded :])
            for shared in tree_leaves(keywords):
                if isinstance(shared, Tensor):
                    self._give(shared)

            def run(x: Tensor) -> Tensor:
                result = call(x, **keywords)
                found.append(result)
                return result[0] if isinstance(result, tuple) else result

            out = self._part(site.path, x, run, found.clear)
            part, (result,) = self._open[site.path], found
            found.clear()  # the part alone owns the graph
            if site.path.endswith(".mlp") and site.light_recompute is not None:
                if not self.shape.checkpointed_experts:
                    part.light = partial(self._run_light, site, call, x.detach())
                self._size_rows(part, site)
            self._last = out
            if not isinstance(result, tuple):
                return out
            if result[1] is not None:
                self._routed.append((result[1].detach().requires_grad_(), result[2]))
            return out, *(t.detach() if t is not None else None for t in result[1:])

        return sublayer

    def _needs_no_mask(self, layer: Any) -> bool:
        """Sequences are whole, so the kernel's causal mask does. transformers cannot tell that from fake tensors, and
        makes one."""
        window = getattr(layer.self_attn, "sliding_window", None) or self.shape.sequence
        if self.shape.flex:
            return True
        return self.model.config._attn_implementation == "sdpa" and window >= self.shape.sequence

    def _part(
        self, path: str, x: Tensor | None, run: Callable[..., Tensor], forget: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Run a part's forward. `forget` drops what `run` leaves besides its result."""
        recorder = self._recorder
        if self.shape.autocast:  # entered for each part, or a copy that a forward without a graph casts would be reused
            run = torch.autocast("cpu", torch.bfloat16)(run)
        leaf = None if x is None else x.detach().requires_grad_()
        no_grad: Log = []
        if leaf is not None:
            recorder.mark_input(leaf)
            if not self.shape.compiled and path not in self._forward_only:
                no_grad = self._without_graph(leaf, run, forget)
        self._restart()
        at = len(recorder.log)
        saved: dict[StorageWeakRef, _SavedStorage] = {}
        with saved_tensors_hooks(partial(self._pack, saved), lambda tensor: tensor):
            output = run() if leaf is None else run(leaf)
        held = [storage for reference, storage in saved.items() if not reference.expired()]
        sizes = {storage.number: storage.size for storage in held}
        size = sum(storage.size for storage in held)
        kept = tuple(dict.fromkeys(storage.number for storage in held))
        compiled = self.shape.compiled and (path in self._sublayers or path == "light")
        log = slice(at, len(recorder.log))
        if self.shape.compiled:
            # Compiled code saves the origins instead. torch's partitioner cuts there, or where fewer bytes cross.
            origins = frozenset().union(*(storage.origins for storage in held)) - self._counted_origins
            self._counted_origins |= origins
            sizes = {recorder.origin_storage(o): recorder.origin_size(o) for o in origins}
            if compiled:
                recorder.log[log], sizes = cut_nearest(recorder.log[log], kept, recorder.assembled, sizes)
                if recorder.experts_inputs:
                    sizes = {**sizes, **recorder.experts_inputs}
                kept = tuple(sorted(sizes))
            size = min(size, sum(sizes.values()))
        inputs = 0 if leaf is None else recorder.size(leaf)
        if path in self._sublayers:
            shared = self._shared_bytes(sizes, recorder.log[log], leaf)
            self.shared += shared
            size = max(0, size - shared)
        trace = PartTrace(size, inputs, forward_ops=recorder.tally.take([output]))
        self._open[path] = _TracedPart(
            trace, output, leaf, log, kept, compiled, no_grad, recorder.experts, recorder.head_sum
        )
        return output.detach()

    def _shared_bytes(self, saved: Mapping[int, int], log: Log, x: Tensor | None) -> int:
        """Bytes of the saved storages that this part neither makes nor gets as its input: all layers share these."""
        own = {m.number for entry in log if isinstance(entry, Op) for m in entry.made}
        own |= {-1} if x is None else {-1, self._recorder.number(x)}
        shared = {number: size for number, size in saved.items() if number not in own}
        for number in shared:
            self._given.pop(number, None)
        return sum(shared.values())

    def _restart(self) -> None:
        self._recorder.experts, self._recorder.head_sum = (-1, -1), -1
        self._recorder.experts_inputs = {}
        self._recorder.tally.take()

    def _without_graph(self, x: Tensor, run: Callable[..., Tensor], forget: Callable[[], None]) -> Log:
        log, at = self._recorder.log, len(self._recorder.log)
        with torch.no_grad():
            run(x)
        found = log[at:]
        forget()
        del log[at:]
        return found

    def _pack(self, saved: dict[StorageWeakRef, _SavedStorage], tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._known:
            self._know(tensor)
            r = self._recorder
            saved[reference] = _SavedStorage(r.size(tensor), r.origins(tensor), r.number(tensor))
        return tensor.detach()

    def _give(self, tensor: Tensor) -> None:
        if self._share(tensor):
            size = self._recorder.size(tensor)
            self._given[self._recorder.number(tensor)] = size
            self._bytes_given += size

    @property
    def given(self) -> tuple[int, ...]:
        return tuple(self._given.values())

    def _share(self, tensor: Tensor) -> bool:
        """An argument of all layers is one input to all of them. Whether it is new."""
        key = tensor.untyped_storage()._cdata
        if key not in self._inputs:
            self._inputs.add(key)
            self._recorder.mark_input(tensor)
            return True
        return False

    def _backward(self, part: _TracedPart) -> None:
        recorder = self._recorder
        output, part.output = part.output, part.output.new_empty(0)
        self._restart()
        out, at, self._weight_grads = recorder.number(output), len(recorder.log), {}
        gradient = torch.empty_like(output)
        given = recorder.number(gradient)
        if output.requires_grad:
            # Nothing may hold the output during its backward, unless it is saved.
            root = _Root.apply(output, [gradient])
            del output, gradient
            root.backward()
            del root
        x = dx = -1
        grads: list[Tensor] = []
        if part.x is not None:
            x = recorder.number(part.x)
            grads = [part.x.grad] if part.x.grad is not None else []
        ops = recorder.tally.take(grads)
        if grads:
            dx = recorder.number(grads.pop())
        log = recorder.log[at:]
        if part.x is not None:
            part.x.grad = None
        own = {m.number for entry in (*recorder.log[part.log], *log) if isinstance(entry, Op) for m in entry.made}
        transferred = frozenset(recorder.transferred & own)
        named = NamedStorages(x, out, given, dx, self._weight_grads, part.kept, transferred, *part.experts)
        forward = recorder.log[part.log]
        if self.shape.compiled and Mark(FINAL_NORM_BACKWARD) in log:
            events = head_events(forward, log, named, *self._norm)
        else:
            events = part_events(forward, log, named, part.compiled, part.no_grad, self.shape.stages)
        events = replace(events, head_sum=_derived(part.head_sum, log))
        part.trace = replace(part.trace, backward_ops=ops, events=events)

    def _drop_weight_grad(self, parameter: Tensor) -> None:
        """The sum that it is added to is counted elsewhere."""
        if parameter.grad is not None:
            self._weight_grads[self._recorder.number(parameter.grad)] = self._names[id(parameter)]
        parameter.grad = None

    def _run_light(self, site: SublayerCallSite, call: Callable[..., Any], x: Tensor) -> _TracedPart:
        assert site.light_recompute is not None
        site.light_recompute(True)
        try:
            self._part("light", x, lambda leaf: call(leaf)[0])
        finally:
            site.light_recompute(False)
        return self._open.pop("light")

    def _size_rows(self, part: _TracedPart, site: SublayerCallSite) -> None:
        """Fill in `stash`, `deferred` and `token_rows` of a MoE sublayer's trace."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        experts: Any = moe_blocks(site.module)[0].experts
        hidden, size = self.model.config.get_text_config().hidden_size, experts.gate_up_proj.element_size()
        width = experts.gate_up_proj[0].numel() // hidden  # of h
        shared = dispatcher.size > 1
        rows = dispatcher.rows if shared else dispatcher.tokens  # on one rank, rows are the tokens themselves
        slots = dispatcher.slots if shared else dispatcher.live_slots
        capacity = size * (rows * hidden + slots * width)
        arrive = PAGE * sum(
            -(-rows // (PAGE // (size * wide)))  # a page has whole rows of one tensor
            for rows, wide in ((dispatcher.live_rows, hidden), (dispatcher.live_slots, width))
        )
        part.trace = replace(
            part.trace,
            stash=(capacity, arrive) if shared else (0, 0),
            # The rows of x and of dy, the gradient of h, and the activation.
            deferred=tuple(size * n for n in (rows * hidden, rows * hidden, slots * width, slots * (width // 2))),
            token_rows=size * slots * hidden,
        )

    def _head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden = self.base.norm(hidden)
        log = self._recorder.log
        log.append(Mark(FINAL_NORM_END))
        self._norm = self._recorder.number(hidden), -1

        def begins(gradient: Tensor) -> None:
            self._norm = self._norm[0], self._recorder.number(gradient)
            log.append(Mark(FINAL_NORM_BACKWARD))

        if self.shape.compiled and hidden.requires_grad:  # `manage` compiles the norm, and not the loss
            hidden.register_hook(begins)
        head = self.model.lm_head
        if self.shape.loss == "fused":
            return head_loss(head.forward, hidden, labels, shift_labels=labels, num_items_in_batch=labels.numel())
        logits = head(hidden)  # the model's output has them until the trainer has the loss
        return self.model.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=self.model.config.get_text_config().vocab_size,
            shift_labels=labels,
            num_items_in_batch=labels.numel(),
        )


def _live_bytes(log: Log) -> int:
    """Bytes of what a log makes and does not free."""
    made = {m.number: m.size for entry in log if isinstance(entry, Op) for m in entry.made}
    return sum(made.values()) - sum(made.get(entry.number, 0) for entry in log if isinstance(entry, Freed))


def _derived(number: int, log: Log) -> frozenset[int]:
    """The storage, and all that the operations of a log make from it."""
    found = {number} if number >= 0 else set()
    for entry in log:
        if isinstance(entry, Op) and found.intersection(entry.reads):
            found.update(m.number for m in entry.made)
    return frozenset(found)


class _Root(torch.autograd.Function):
    """Passes on the gradient of a part's output so that no caller holds it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.given.pop(), None


def trace_model(model: Any, shape: Shape, like: ModelTrace | None = None) -> ModelTrace:
    """Trace `model`, which is on the meta device, in the dtype of computation.

    `like` is a trace of the same model, with the same `Shape.without_experts`: only embedding and MoE sublayers run, and the rest
    is taken from it.

    Saved bytes are counted as `forebay.memory.profiler` does: distinct storages that autograd saves first in this part, without
    parameters and their views. With compiled sublayers, saved bytes are an upper bound. A weight gradient is counted in the peak
    of backward beside the sum it is added to; with one microbatch it is that sum, and the peak is too high by the gradients of
    one sublayer.

    Raises:
        ValueError: layers, experts or a loss that Forebay does not know, transformers' experts in another dtype than bfloat16, or
            `ep` does not divide the experts.
    """
    base = model.get_submodule(model.base_model_prefix)
    layers: list[Any] = [parts.module for parts in decoder_layers(model)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that Forebay knows")
    kinds = [_kind(layer) for layer in layers]
    several = 2 if like is None else 1  # what layers share, the first one saves
    numbers = sorted(n for k in set(kinds) for n in [i for i, kind in enumerate(kinds) if kind == k][:several])
    last, shares = _last_of_kinds(base_path(model), [kinds[n] for n in numbers])
    every, base.layers = base.layers, _Chosen(layers[n] for n in numbers)
    model, base.layers = copy.deepcopy(model), every  # a trace uses its model up
    model.config.use_cache = False
    with torch.enable_grad(), FakeTensorMode(), _GpuFunctions() if shape.gpu else nullcontext():
        _make_fake(model)
        if shape.flex:
            _fuse_sinks(model)
        known = {} if like is None else _without_experts(like, numbers, model)
        run = TraceRun(model.train(), model.get_submodule(model.base_model_prefix), shape, known, shares)
        run.forward()
        run.backward()
    sublayers = {kind: _layer_trace(run, last, kind, layers[kinds.index(kind)]) for kind in set(kinds)}
    found: TraceRun | ModelTrace = run if like is None else like
    return ModelTrace(
        run.parts["embedding"],
        tuple(sublayers[kind] for kind in kinds),
        run.parts["head"],
        found.shared,
        found.balance,
        found.given,
        found.unused,
    )


def _without_experts(trace: ModelTrace, numbers: list[int], model: Any) -> dict[str, PartTrace]:
    """The head, attention and dense sublayers of a trace, by the path that layer `numbers[n]` has as the n-th."""
    found = {"head": trace.head}
    for place, number in enumerate(numbers):
        layer, path = trace.layers[number], f"{base_path(model)}.layers.{place}"
        found[f"{path}.self_attn"] = layer.attention
        if not layer.is_moe:
            found[f"{path}.mlp"] = layer.mlp
    return found


def base_path(model: Any) -> str:
    return str(model.base_model_prefix)


class _Chosen(nn.ModuleList):
    """Some layers of a model. Any slice is all of them: a base model slices as many as its configuration says."""

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


_NAMES = "self_attn", "mlp"
LayerKind = tuple[Any, Any]  # of the attention sublayer, and of the MoE or dense one


def _kind(layer: Any) -> LayerKind:
    attention = type(layer.self_attn), getattr(layer.self_attn, "sliding_window", None), _shapes(layer.self_attn)
    return (type(layer), *attention), (type(layer.mlp), _shapes(layer.mlp))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _last_of_kinds(base: str, kinds: list[LayerKind]) -> tuple[dict[Any, str], frozenset[str]]:
    """Paths of the last sublayer of each kind in a model of layers of these kinds, and paths of the others.

    What layers share, such as rotary tables, the first one saves, so the last one has the figures of its kind.
    """
    both = [
        (f"{base}.layers.{n}.{name}", (name, k))
        for n, kind in enumerate(kinds)
        for name, k in zip(_NAMES, kind, strict=True)
    ]
    last = {kind: path for path, kind in both}
    return last, frozenset(path for path, _ in both).difference(last.values())


def _layer_trace(run: TraceRun, last: Mapping[Any, str], kind: LayerKind, layer: Any) -> LayerTrace:
    attention, mlp = (run.parts[last[both]] for both in zip(_NAMES, kind, strict=True))
    return LayerTrace(attention, mlp, bool(moe_blocks(layer)))


def _make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake tensors of the same shapes and dtypes."""
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


_WIDE = frozenset({torch.sum, Tensor.sum, torch.softmax, Tensor.softmax, torch.cumsum, Tensor.cumsum})


class _GpuFunctions(TorchFunctionMode):
    """Runs `scaled_dot_product_attention` as a GPU does: flash, or cuDNN's kernel for heads of two widths and for masks. Under
    autocast, functions return fp32 that do so on a GPU and not on a CPU (torch's lists of autocast, "fp32_set_opt_dtype")."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        autocast = torch.is_autocast_enabled("cpu")
        if func in _WIDE and autocast and args[0].is_floating_point() and kwargs.get("dtype") is None:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if autocast:
            args = tuple(x.to(torch.bfloat16) if isinstance(x, Tensor) else x for x in args)
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
    """Both kernels save no scores, return the layout of the queries, and take fewer heads of keys than of queries."""
    aten = torch.ops.aten
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _fuse_sinks(model: nn.Module) -> None:
    for module in model.modules():
        base = transformers_base(module)
        if base is not None and has_eager_sinks(module) and (flex := sinks_of(base.forward)) is not None:
            module.forward = partial(flex, module, _sink_attention)  # type: ignore[method-assign]


def _sink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`forebay.models.sinks.sink_attention`. A flash kernel with a window stands in for `flex_attention`, which saves the same
    and which no dispatch mode sees; `forebay.estimate.op_costs` counts it as flex."""
    assert s_aux is not None
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else query.dtype
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
    length, left = q.shape[1], None if sliding_window is None else sliding_window - 1
    out, lse, *_rest = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, True, False, scale=scaling, window_size_left=left
    )
    share = torch.sigmoid(lse - s_aux.float()[:, None]).transpose(1, 2)
    return (out * share[..., None]).to(dtype), None
