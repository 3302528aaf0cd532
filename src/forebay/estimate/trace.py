"""What each part of a model saves, needs and computes for one microbatch, without a device and without weights.

Input: a transformers `*ForCausalLM` on the meta device, and a `Shape`. Output: a `ModelTrace`: figures for the embedding, both
sublayers of every decoder layer, and the head with its loss. One layer of each kind runs on fake tensors. Each part is a
graph of its own, whose forward and backward are recorded (`forebay.estimate.op_recorder`), with Forebay's experts, loss and,
under expert parallelism, a planned token dispatcher.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from forebay.errors import first_line
from forebay.estimate.events import cut_nearest, head_events, part_events, table_events
from forebay.estimate.fake_model import GpuFunctions, fuse_sinks, make_fake
from forebay.estimate.op_costs import address
from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.planned_dispatch import PlannedDispatcher
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import weight_name
from forebay.estimate.types import (
    PAGE,
    LayerTrace,
    Log,
    Mark,
    ModelTrace,
    Op,
    PartEvents,
    PartTrace,
    Shape,
    SharedTables,
    made_in,
)
from forebay.memory.overrides import ModuleCallSite
from forebay.models.blocks import SublayerCallSite, install_sublayers
from forebay.models.families import decoder_layers, final_norm, moe_blocks, stream_head
from forebay.models.fused_loss import head_loss, install_fused_loss, logits_scale
from forebay.models.hf_experts import cut_experts, register, round_saved_rows
from forebay.models.indexers import install_indexers
from forebay.models.router import balance_loss
from forebay.pipeline.arguments import StandIn


def trace_model(model: Any, shape: Shape, like: ModelTrace | None = None) -> ModelTrace:
    """Trace `model`, which is on the meta device, in the dtype of computation.

    `like` is a trace of the same model, with the same `Shape.without_experts`: only embedding and MoE sublayers run, and the rest
    is taken from it.

    Saved bytes are counted as `forebay.memory.profiler` does: distinct storages that autograd saves first in this part, without
    parameters and their views. With compiled sublayers, saved bytes are those of torch's partitioner, within 2 %. A weight
    gradient is counted in the peak of backward beside the sum it is added to; with one microbatch it is that sum, and the peak is
    too high by the gradients of one sublayer.

    Raises:
        ValueError: layers, experts or a loss that Forebay does not know, transformers' experts in another dtype than bfloat16, or
            `ep` does not divide the experts.
    """
    layers: list[Any] = list(model.get_submodule(model.base_model_prefix).layers)
    # The first trace has checked how the layers are built. To check again takes a tenth of the time of this one.
    names = [(p.mixer, p.block) for p in decoder_layers(model)] if like is None else [y.names for y in like.layers]
    kinds = [_kind(layer, *both) for layer, both in zip(layers, names, strict=True)]
    numbers = sorted({kinds.index(kind) for kind in kinds})
    routers = len(moe_blocks(model))
    handed: list[Any] = []
    model = _with_layers(model, numbers, handed)
    model.config.use_cache = False
    with torch.enable_grad(), FakeTensorMode(), GpuFunctions(shape.compiled) if shape.gpu else nullcontext():
        make_fake(model)
        masks_in_blocks = shape.flex and fuse_sinks(model)
        known = {} if like is None else _without_experts(like, numbers, model)
        run = TraceRun(model.train(), shape, known, routers, handed, masks_in_blocks)
        run.forward()
        run.backward()
    by_kind = {}
    for number in numbers:
        attention, mlp = (run.parts[f"{layers_path(model)}.{number}.{name}"] for name in names[number])
        by_kind[kinds[number]] = LayerTrace(attention, mlp, bool(moe_blocks(layers[number])), names[number])
    found: TraceRun | ModelTrace = run if like is None else like
    return ModelTrace(
        run.parts["embedding"],
        tuple(by_kind[kind] for kind in kinds),
        run.parts["head"],
        found.tables,
        found.balance,
        run.parts.get("balance") if like is None else like.router_loss,
    )


def _without_experts(trace: ModelTrace, numbers: list[int], model: Any) -> dict[str, PartTrace]:
    """The head, and of layers `numbers` attention and dense sublayers, by path."""
    found = {"head": trace.head}
    for number in numbers:
        layer = trace.layers[number]
        known = layer.sublayers[:1] if layer.is_moe else layer.sublayers
        found |= {f"{layers_path(model)}.{number}.{name}": part for name, part in known}
    return found


def layers_path(model: Any) -> str:
    return f"{model.base_model_prefix}.layers"


@contextmanager
def _masks_by_sizes() -> Iterator[None]:
    """Context in which transformers makes the masks of joined documents, and none where the kernel's own does. For fake tensors,
    which look traced, it would make all."""
    ignores = masking_utils._ignore_causal_mask_sdpa

    def decided(*args: Any) -> bool:
        with patch.object(masking_utils, "is_tracing", lambda _: False):
            return ignores(*args)

    with (
        patch.object(masking_utils, "_ignore_causal_mask_sdpa", decided),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
    ):
        yield


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Raises ValueError with the path of a part whose code fails, as kernels do that need a device, or values of tensors."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{path!r} does not run on tensors without a device and values ({why})") from error


def _with_layers(model: Any, numbers: list[int], handed: list[Any]) -> Any:
    """A copy, because a trace uses its model up, in which stand-ins pass on what the other layers get, and then `handed`."""
    base = model.get_submodule(model.base_model_prefix)
    every, base.layers = base.layers, nn.ModuleList(base.layers[n] for n in numbers)
    model, base.layers = copy.deepcopy(model), every
    base = model.get_submodule(model.base_model_prefix)
    here = dict(zip(numbers, base.layers, strict=True))
    base.layers = nn.ModuleList(
        here[n] if n in here else StandIn(layer, passed=handed) for n, layer in enumerate(every)
    )
    return model


def _kind(layer: Any, mixer: str, block: str) -> tuple[Any, ...]:
    """Equal for layers of which one stands for all."""
    attention, mlp = getattr(layer, mixer), getattr(layer, block)
    shapes = tuple((name, tuple(p.shape), p.dtype) for half in (attention, mlp) for name, p in half.named_parameters())
    types = tuple(type(m) for m in layer.modules())
    return types, mixer, block, getattr(attention, "sliding_window", None), shapes


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


_Saved = tuple[int, int, frozenset[int]]  # a storage's number, bytes and origins


class TraceRun:
    """One run of a model on fake tensors, part by part. It owns the graphs between `forward` and `backward`.

    Fake tensors are on the CPU, because torch's CPU wheels abort where autograd meets a fake CUDA tensor.

    Args:
        known: parts that need not run, by module path or "head".
        routers: of the whole model, of which `model` has some layers.
        handed: filled with what the layer that ran last returned after its hidden states.
        masks_in_blocks: layers get `BlockMask`s, which are not counted, where the model makes dense masks.

    Attributes:
        parts: by module path, "embedding", "head" or "balance".
        tables, balance: see `ModelTrace`.
    """

    def __init__(
        self,
        model: Any,
        shape: Shape,
        known: Mapping[str, PartTrace],
        routers: int,
        handed: list[Any],
        masks_in_blocks: bool,
    ):
        self.model, self.shape, self._handed, self._masks_in_blocks = model, shape, handed, masks_in_blocks
        self.base = model.get_submodule(model.base_model_prefix)
        self._routers = routers
        self.parts: dict[str, PartTrace] = dict(known)
        self.balance = 0
        self._shared: dict[int, int] = {}  # bytes of what the first layer saves for all of them, by number
        self._before_layers: Log | None = None  # what the base model made by the first one
        self._given: dict[int, int] = {}  # bytes of what layers get, by number, which none has saved yet
        self._arguments: dict[str, list[int]] = {}  # numbers of what a sublayer gets besides its input, by path
        self._recorder = OpRecorder(shape.block, shape.deferred_weight_grads, shape.compiled, shape.stages)
        self._open: dict[str, _TracedPart] = {}
        # Storages that do not count as saved, by address, which no other has while the reference is kept: parameters, buffers,
        # what an earlier part saved.
        self._known: dict[int, StorageWeakRef] = {}
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
        if shape.compiled:
            install_indexers(model)
        self._dispatcher = self._install_dispatcher(blocks)
        if shape.checkpointed_experts:
            for block in blocks:
                # As `forebay.memory.recompute` does, without its checks. The state of a generator is no fake tensor.
                ModuleCallSite(block.experts).wrap(
                    lambda forward: partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
                )
        self._sublayers = install_sublayers(model, dispatcher=self._dispatcher)
        for layer in self._sublayers.layers:
            layer.attention.wrap(partial(self._traced_sublayer, layer.attention, len(layer.passed)))
            layer.mlp.wrap(partial(self._traced_sublayer, layer.mlp, None))
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
            self._ids = ids
            x = self._part("embedding", None, lambda: self.base.embed_tokens(ids))
            self._last, self._embedded = x, len(self._recorder.log)
            with _masks_by_sizes():
                self.base(inputs_embeds=x, use_cache=False)  # its last norm runs again as a part of the head
            if "head" in self.parts:
                return
            self._part("head", self._last, partial(self._head, labels=labels))
            if self.shape.balance and self._routed:
                logits, ids = self._routed[-1]
                more = range(len(self._routed), self._routers)
                self._routed += [(torch.empty_like(logits).requires_grad_(), torch.empty_like(ids)) for _ in more]
                self._part("balance", None, lambda: balance_loss(self._routed))
                self.balance = self._open["balance"].trace.saved // len(self._routed)

    def backward(self) -> None:
        with self._recorder:
            for path, part in reversed(list(self._open.items())):
                self._backward(part)
                if path == "balance":
                    self.parts[path] = self._with_gradients(part.trace)
                    continue
                arguments = self._arguments.get(path, ())
                places = tuple(place for place, number in enumerate(self._given) if number in arguments)
                part.trace = self.parts[path] = replace(part.trace, given=places)
                if part.light is not None:
                    run = part.light()
                    self._backward(run)
                    own = run.trace
                    light = replace(part.trace, saved=own.saved, backward_ops=own.backward_ops, events=own.events)
                    self.parts[path] = replace(part.trace, light=light)

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
            cut_experts(block.experts, 0, s.ep)
        return dispatcher

    def _know(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = reference

    def _traced_sublayer(
        self, site: SublayerCallSite, passes: int | None, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A sublayer as a graph of its own, cut off from what is before and after it.

        Args:
            passes: how many values attention returns for the next layer; None for the other sublayer.
        """

        def sublayer(x: Tensor, **keywords: Any) -> Any:
            found: list[Any] = []
            if site.path in self.parts:
                self._last = torch.empty_like(x)
                absent = [None] * (2 if passes is None else passes)
                if passes is not None:
                    self._handed[:] = absent
                return (self._last, *absent) if absent else self._last
            if "input_ids" in keywords:
                keywords["input_ids"] = self._ids  # the base model was given embedded tokens
            if "attention_mask" in keywords and self._masks_in_blocks:
                keywords["attention_mask"] = None
            if self._before_layers is None:
                self._before_layers = self._recorder.log[self._embedded :]
            shared = [leaf for leaf in tree_leaves(keywords) if isinstance(leaf, Tensor)]
            for tensor in shared:
                if self._share(tensor):
                    self._given[self._recorder.number(tensor)] = self._recorder.size(tensor)
            self._arguments[site.path] = [self._recorder.number(tensor) for tensor in shared]

            def run(x: Tensor) -> Tensor:
                result = call(x, **keywords)
                found.append(result)
                return result[0] if isinstance(result, tuple) else result

            out = self._part(site.path, x, run, found.clear)
            part, (result,) = self._open[site.path], found
            found.clear()  # the part alone owns the graph
            if site.light_recompute is not None:
                if not self.shape.checkpointed_experts:
                    part.light = partial(self._run_light, site, partial(call, **keywords), x.detach())
                self._size_rows(part, site)
            self._last = out
            if not isinstance(result, tuple):
                return out
            others = [t.detach() if t is not None else None for t in result[1:]]
            if passes is not None:
                self._handed[:] = others
            elif result[1] is not None:
                self._routed.append((result[1].detach().requires_grad_(), result[2]))
            return out, *others

        return sublayer

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
            if not self.shape.compiled:
                no_grad = self._without_graph(path, leaf, run, forget)
        self._restart()
        at = len(recorder.log)
        saved: dict[StorageWeakRef, _Saved] = {}
        with saved_tensors_hooks(partial(self._pack, saved), lambda tensor: tensor), _named(path):
            output = run() if leaf is None else run(leaf)
        held = [storage for reference, storage in saved.items() if not reference.expired()]
        sizes = {number: size for number, size, _ in held}
        size = sum(size for _, size, _ in held)
        kept = tuple(sizes)
        compiled = self.shape.compiled and (path in self._sublayers or path == "light")
        log = slice(at, len(recorder.log))
        if self.shape.compiled:
            # Compiled code saves the origins instead. torch's partitioner cuts there, or where fewer bytes cross.
            origins = frozenset().union(*(origins for *_, origins in held)) - self._counted_origins
            self._counted_origins |= origins
            sizes = {recorder.origin_storages[o]: recorder.origin_sizes[o] for o in origins}
            if compiled:
                recorder.log[log], sizes = cut_nearest(recorder.log[log], kept, recorder.assembled, sizes)
                if recorder.experts_inputs:
                    sizes = {**sizes, **recorder.experts_inputs}
                kept = tuple(sorted(sizes))
            size = min(size, sum(sizes.values()))
        inputs = 0 if leaf is None else recorder.size(leaf)
        if path in self._sublayers:
            shared = self._saved_for_all(sizes, recorder.log[log], leaf)
            self._shared |= shared
            size = max(0, size - sum(shared.values()))
            kept = tuple(number for number in kept if number not in shared)
        trace = PartTrace(size, inputs, forward_ops=recorder.tally.take([output]))
        self._open[path] = _TracedPart(
            trace, output, leaf, log, kept, compiled, no_grad, recorder.experts, recorder.head_sum
        )
        return output.detach()

    def _saved_for_all(self, saved: Mapping[int, int], log: Log, x: Tensor | None) -> dict[int, int]:
        """The saved storages that this part neither makes nor gets as its input: all layers share these."""
        own = {-1, *made_in(log)} | ({self._recorder.number(x)} if x is not None else set())
        shared = {number: size for number, size in saved.items() if number not in own}
        for number in shared:
            self._given.pop(number, None)
        return shared

    def _restart(self) -> None:
        self._recorder.experts, self._recorder.head_sum = (-1, -1), -1
        self._recorder.experts_inputs = {}
        self._recorder.tally.take()

    def _without_graph(self, path: str, x: Tensor, run: Callable[..., Tensor], forget: Callable[[], None]) -> Log:
        log, at = self._recorder.log, len(self._recorder.log)
        with torch.no_grad(), _named(path):
            run(x)
        found = log[at:]
        forget()
        del log[at:]
        return found

    def _pack(self, saved: dict[StorageWeakRef, _Saved], tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._known:
            self._know(tensor)
            r = self._recorder
            saved[reference] = r.number(tensor), r.size(tensor), r.origins(tensor)
        return tensor.detach()

    @property
    def tables(self) -> SharedTables:
        held = self._shared | self._given
        # A GPU makes the masks of flex attention in compiled code, without temporaries: only what layers get is counted.
        log = [] if self._masks_in_blocks else self._before_layers or []
        return SharedTables(table_events(log, held), tuple(self._shared), tuple(self._given))

    def _share(self, tensor: Tensor) -> bool:
        """An argument of all layers is one input to all of them. Whether it is new."""
        key = address(tensor)
        if key not in self._inputs:
            self._inputs.add(key)
            self._recorder.mark_input(tensor)
            return True
        return False

    def _backward(self, part: _TracedPart) -> None:
        recorder = self._recorder
        output, part.output = part.output, part.output.new_empty(0)
        self._restart()
        gradient = torch.empty_like(output)
        out, given, at, self._weight_grads = recorder.number(output), recorder.number(gradient), len(recorder.log), {}
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
        forward = recorder.log[part.log]
        transferred = frozenset(recorder.transferred & made_in([*forward, *log]).keys())
        named = PartEvents(x, out, given, dx, self._weight_grads, part.kept, transferred, *part.experts)
        if self.shape.compiled and Mark.FINAL_NORM_BACKWARD in log:
            events = head_events(forward, log, named, *self._norm)
        else:
            events = part_events(forward, log, named, part.compiled, part.no_grad)
        at_once = part.compiled and Mark.EXPERTS_BEGIN not in forward
        events = replace(events, head_sum=_derived(part.head_sum, log), at_once=at_once)
        part.trace = replace(part.trace, backward_ops=ops, events=events)

    def _with_gradients(self, trace: PartTrace) -> PartTrace:
        """The balance loss, after whose backward the gradients of the logits are left; those of joined layers are one storage."""
        assert trace.events is not None
        left = {(self._recorder.number(t.grad), 0) for t, _ in self._routed if t.grad is not None}
        backward = tuple(event for event in trace.events.backward if event not in left)
        return replace(trace, events=replace(trace.events, backward=backward))

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
        """Fill in `stash` of a MoE sublayer's trace."""
        dispatcher = self._dispatcher
        if dispatcher is None or dispatcher.size == 1:
            return
        experts: Any = moe_blocks(site.module)[0].experts
        hidden, size = self.model.config.get_text_config().hidden_size, experts.gate_up_proj.element_size()
        width = experts.gate_up_proj[0].numel() // hidden  # of h
        capacity = size * (dispatcher.rows * hidden + dispatcher.slots * width)
        arrive = PAGE * sum(
            -(-rows // (PAGE // (size * wide)))  # a page has whole rows of one tensor
            for rows, wide in ((dispatcher.live_rows, hidden), (dispatcher.live_slots, width))
        )
        part.trace = replace(part.trace, stash=(capacity, arrive))

    def _head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        for name in (stream_head(self.base), final_norm(self.base)):
            hidden = hidden if name is None else getattr(self.base, name)(hidden)
        log = self._recorder.log
        log.append(Mark.FINAL_NORM_END)
        self._norm = self._recorder.number(hidden), -1

        def begins(gradient: Tensor) -> None:
            self._norm = self._norm[0], self._recorder.number(gradient)
            log.append(Mark.FINAL_NORM_BACKWARD)
            self._recorder.tally.fuse(True)

        if self.shape.compiled and hidden.requires_grad:  # `manage` compiles up to the norm, and not the loss
            hidden.register_hook(begins)
            self._recorder.tally.fuse(False)
        head = self.model.lm_head
        hidden = logits_scale(self.model)(hidden)
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
