"""Decoder layers of transformers models as two sublayers: attention or another mixer, and MoE or dense MLP.

Input: a model whose decoder layers `forebay.models.families.decoder_layers` finds. Output of `install_sublayers`: the same model,
whose layers run, with the norms, multipliers and branches that their family has,

    x2 = x + self_attn(input_layernorm(x))                                     attention sublayer
    x3, logits, ids = x2 + mlp(post_attention_layernorm(x2)), router outputs   MoE sublayer

through two `SublayerCallSite`s each, which a manager can wrap. `Sublayers` owns the call sites; its `uninstall`
removes everything.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from forebay.memory.kv_cache import CACHE_ARGUMENTS, is_given_a_cache
from forebay.memory.overrides import ForwardFn, InnerForward, LightRecompute, install, is_managed, is_patched
from forebay.models.compile import check_compiler, compile_sublayer
from forebay.models.families import LayerParts, MoeBlock, check_block, decoder_layers, innermost
from forebay.models.hf_experts import edge_of, light_recompute_of, quantized_weight, uses_forebay
from forebay.models.low_rank import is_adapted, run_experts, why_unsupported
from forebay.models.sinks import BlockMasks, DenseMasks
from forebay.moe.dispatch import Front, MoeStages, TokenDispatcher
from forebay.moe.experts_op import GateUpEdge

# Transformers checkpoints a layer in its `__call__`, which runs our forward, but from 5.23 on in its class's forward, which ours
# takes the place of.
_CHECKPOINTED_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)

# --- sublayers as functions -------------------------------------------------------------------------------------------
# A sublayer is a function of its layer and of tensors. It returns everything it makes, the router's outputs included, and
# writes nowhere, so it can be compiled, run under saved_tensors_hooks, or run again in backward. It looks the layer's
# modules up when it is called, so that adapters, shards and replacements installed later are used.

# Keywords that a model passes to its layers and that no attention reads. A compiled sublayer must not see them:
# num_items_in_batch differs each step and would recompile it.
_NOT_FOR_ATTENTION = CACHE_ARGUMENTS | frozenset(
    {
        "labels",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)

MoeOutput = tuple[Tensor, Tensor | None, Tensor | None]


def attention_sublayer(half: Callable[..., Any], layer: Any, x: Tensor, **kwargs: Any) -> Any:
    """x + self_attn(input_layernorm(x)); x and the result are [B, S, H], or [B, S, N, H] with N residual streams. For `half`,
    which may return more, see `Halves.attention`."""
    return half(layer, x, **kwargs)


def dense_sublayer(half: Callable[..., Tensor], layer: Any, x: Tensor, **given: Any) -> MoeOutput:
    """x + mlp(post_attention_layernorm(x)); x is [B, S, H]. There are no router outputs. For `half` see `Halves.feed_forward`."""
    return half(layer, x, **given), None, None


def moe_sublayer(
    half: Callable[..., MoeOutput],
    block: Callable[..., Any],
    layer: Any,
    x: Tensor,
    edge: GateUpEdge | None,
    **given: Any,
) -> MoeOutput:
    """x + experts(post_attention_layernorm(x)), shared experts included; x is [B, S, H], or [B, S, N, H].

    The MoE block is spelled out instead of called, so that the router's outputs leave a compiled graph.

    Args:
        half, given: see `Halves.moe`.
        block: see `RoutedForward.block`.
        edge: see `with_edge`.

    Returns:
        The sum like x, the router's logits [B * S, E] and its ids [B * S, K].
    """
    return half(layer, x, block, run_experts if edge is None else partial(run_experts, edge=edge), **given)


def with_edge(sublayer: Callable[..., MoeOutput], name: str, layer: Any, x: Tensor, **given: Any) -> MoeOutput:
    """`sublayer(layer, x, **given)`, compiled, whose backward leaves the gradient of gate_up to a node of its own.

    Args:
        name: of the layer's block.
    """
    return sublayer(layer, x, edge_of(innermost(getattr(layer, name).experts), math.prod(x.shape[:2])), **given)


def moe_front(half: Callable[..., Any], block: Callable[..., Any], layer: Any, x: Tensor) -> Front:
    """Stage 1 of `moe_sublayer` under expert parallelism: everything before dispatch; x is [B, S, H].

    Args:
        half: see `Halves.front`.
        block: see `RoutedForward.front`.
    """
    residual, routed = half(layer, x, block)
    return Front(residual.view(-1, x.shape[-1]), *routed)


def moe_cut_front(half: Callable[..., Any], block: Callable[..., Any], layer: Any, x: Tensor, **given: Any) -> Any:
    """Stage 1 of a block that does more with its experts' sums than to add them: (what stage 5 reads, routed).

    Args:
        half, block: the first functions of `Halves.stages` and `RoutedForward.stages`.
    """
    outer, (inner, routed) = half(layer, x, block, **given)
    return (outer, inner), routed


def moe_back(
    half: Callable[..., Tensor], block: Callable[..., Any], layer: Any, name: str, live: Any, sums: Tensor
) -> Tensor:
    """Stage 5 of such a block: hidden states of the experts' sums [T, H].

    Args:
        half, block: the second functions of `Halves.stages` and `RoutedForward.stages`.
        name: of the layer's block.
        live: of `moe_cut_front`.
    """
    outer, inner = live
    return half(layer, outer, block(getattr(layer, name), inner, sums))


class _Held(NamedTuple):
    """The index of a tensor in `Front.held`, in its place among other values."""

    place: int


def _front_of(cut_front: Callable[..., Any], x: Tensor, **given: Any) -> Front:
    """The result of `moe_cut_front`, with its tensors apart."""
    live, (rows, ids, weights, logits) = cut_front(x, **given)
    leaves, spec = tree_flatten(live)
    held = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    places = {key: _Held(place) for place, key in enumerate(held)}
    rest = spec, [places.get(id(leaf), leaf) for leaf in leaves]
    return Front(None, rows, ids, weights, logits, tuple(held.values()), rest)


def _back_of(back: Callable[..., Tensor], rest: Any, sums: Tensor, *held: Tensor) -> Tensor:
    """`moe_back` of what `_front_of` took apart."""
    spec, leaves = rest
    live = tree_unflatten([held[leaf.place] if isinstance(leaf, _Held) else leaf for leaf in leaves], spec)
    return back(live, sums)


def _plain_or_whole(
    kind: type[nn.Module],
    name: str,
    sublayer: Callable[..., Any],
    whole: Callable[..., Any],
    layer: Any,
    x: Tensor,
    **given: Any,
) -> MoeOutput:
    """`sublayer(x)`; a call of the layer's block if it is no plain one of class `kind` any more, or all modules are hooked."""
    plain = _is_plain(getattr(layer, name), kind) and not _has_any_global_hook()
    return sublayer(layer, x, **given) if plain else whole(layer, x, **given)


def _is_plain(block: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the block does nothing but what its class does: no module hooks, replaced forward, adapter or wrapper."""
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    return type(block) is kind and not any(hooks) and not is_patched(block) and not is_managed(block)


def _experts(
    layer: Any, name: str, direct: bool, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None
) -> Tensor:
    """Stage 3; unless `direct`, with the hooks of the experts module, in one of which FSDP2 unshards its parameters."""
    return run_experts(getattr(layer, name).experts, rows, ids, weights, direct=direct, max_rows=max_rows)


# --- sublayers in a model ---------------------------------------------------------------------------------------------


class SublayerCallSite:
    """The place in a layer's forward from which a sublayer is called.

    Attributes:
        path: module path of the sublayer's main module, such as `...self_attn` or `...mlp`.
        module: the decoder layer; all its parameters are weights of the sublayer.
        names: names in the layer of what the sublayer calls.
        call: the sublayer with all wrappers: `call(x, attention_mask=..., position_embeddings=..., ...) -> x2` for
            attention, or (x2, *passed); `call(x2, **given) -> (x3, logits | None, ids | None)` for the MLP; see `Halves`.
        calls: how often a wrapped sublayer was called; stages count one by one.
        light_recompute: see `light_recompute_of`; None for other sublayers.
        front, experts, back: stages 1, 3 and 5 of a MoE sublayer in stages, for an engine that runs them by themselves, each
            with all wrappers. Stage 3 skips the module hooks of the experts. See `MoeStages` for which have a stage 5.
        compiled: whether it, or its stages but the experts, are compiled.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        names: Sequence[str],
        call: Callable[..., Any],
        light_recompute: LightRecompute | None = None,
        front: Callable[..., Any] | None = None,
        experts: Callable[..., Any] | None = None,
        back: Callable[..., Any] | None = None,
        compiled: bool = False,
    ):
        self.path = path
        self.compiled = compiled
        self.module = module
        self.names = names
        self.calls = 0
        self.light_recompute = light_recompute
        self.dispatches = front is not None
        self.call, self.front, self.experts, self.back = self._bare = (call, front, experts, back)

    def called_modules(self) -> Sequence[nn.Module]:
        """See `forebay.memory.overrides.CallSite.called_modules`."""
        found = (getattr(self.module, name, None) for name in self.names)
        return [module for module in found if isinstance(module, nn.Module)]

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrapper(call)`` in the place of `call`, and of each stage."""
        self.call = self._counted(wrapper(self.call))
        if self.front is not None and self.experts is not None:
            self.front, self.experts = self._counted(wrapper(self.front)), self._counted(wrapper(self.experts))
        if self.back is not None:
            self.back = self._counted(wrapper(self.back))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return call(*args, **kwargs)

        return counted

    def restore(self) -> None:
        """Undo every `wrap`, and `light_recompute`."""
        self.call, self.front, self.experts, self.back = self._bare
        if self.light_recompute is not None:
            self.light_recompute(False)


class Sublayers(dict[str, SublayerCallSite]):
    """Call sites by path, in forward order. `layers` are the forwards of the decoder layers, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[SublayerForward] = []
        self._undo = ExitStack()

    def own_masks(self, masks: BlockMasks | DenseMasks) -> None:
        """Attention takes its masks from `masks`, which `uninstall` closes."""
        self._undo.callback(masks.close)
        for layer in self.layers:
            layer.masks = masks

    def add(self, layer: nn.Module, forward: SublayerForward) -> None:
        for site in forward.sites:
            self[site.path] = site
        self.layers.append(forward)
        self._undo.callback(install(layer, forward.around))

    def uninstall(self) -> None:
        """Give every layer its own forward back, also under a wrapper installed on top. A second call does nothing."""
        self._undo.close()
        for site in self.values():
            site.restore()
        self.layers = []


class SublayerForward:
    """The forward of one decoder layer: its two call sites, and what runs around them.

    The layer's original forward runs if attention weights are requested or a KV cache is given.

    Attributes:
        attention, mlp: the call sites.
        stages: the MoE sublayer in stages under expert parallelism, else None.
        masks: has the masks of attention with sinks that is not eager, else None.
    """

    masks: BlockMasks | DenseMasks | None = None

    def __init__(self, parts: LayerParts, attention: SublayerCallSite, mlp: SublayerCallSite, in_engine: bool):
        self.attention = attention
        self.mlp = mlp
        self.stages: MoeStages | None = mlp.call if isinstance(mlp.call, MoeStages) else None
        self._layer = parts.module
        self._parts = parts
        self._original: Callable[..., Any]  # set by `around`
        self._names = tuple(inspect.signature(type(parts.module).forward).parameters)[2:]
        self._block_class = type(self._block)
        self._in_engine = in_engine and parts.moe is not None
        self._warned = self._warned_of_hooks = False

    @property
    def sites(self) -> list[SublayerCallSite]:
        """The call sites of the sublayers that this part of a model has."""
        here = (self._parts.has_attention, self.attention), (self._parts.has_mlp, self.mlp)
        return [site for has, site in here if has]

    @property
    def mixer(self) -> nn.Module:
        """The attention, or what the family has in its place."""
        mixer: nn.Module = getattr(self._layer, self._parts.mixer)
        return mixer

    @property
    def _block(self) -> Any:
        return getattr(self._layer, self._parts.block)

    def around(self, inner: InnerForward) -> ForwardFn:
        """For `forebay.memory.overrides.install`: the sublayers in place of the layer's own forward."""
        self._original = inner
        return self._run

    def _run(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(self._names, args[1:], strict=False))
        hidden_states = args[0] if args else kwargs.pop("hidden_states")
        if self._wants_original(kwargs):
            return self._original(hidden_states, **kwargs)
        if _CHECKPOINTED_FORWARD and self._layer.gradient_checkpointing and self._layer.training:
            return self._layer._gradient_checkpointing_func(partial(self._both, **kwargs), hidden_states)
        return self._both(hidden_states, **kwargs)

    def _both(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended = self.attend(hidden_states, **kwargs)
        x2, *passed = attended if self.passed else (attended,)
        self.check_block()
        x3, logits, ids = self.mlp.call(x2, **self.given(kwargs))
        self.run_router_hooks(logits, ids)
        return (x3, *passed) if self.passed else x3

    @property
    def passed(self) -> tuple[str, ...]:
        """What the layer returns after hidden states, for the next one, and its first sublayer after its own; see `Halves`."""
        return self._parts.halves.passed

    def given(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """What the second sublayer is given of the keywords that a model gives its layers."""
        return self._parts.halves.arguments_of(keywords)

    def attend(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """The attention sublayer, [B, S, H] to [B, S, H], with the keywords that a model gives its layers; see `passed`."""
        if self.attention.compiled:
            _refuse_hooks(self.attention.path, self.mixer, forward_hooks_too=True)
        if self.masks is not None:
            attention_mask = self.masks.of(attention_mask)
        others = {k: v for k, v in kwargs.items() if k not in _NOT_FOR_ATTENTION}
        attended = self.attention.call(hidden_states, attention_mask=attention_mask, **others)
        if self._parts.halves.keeps_dtype:
            found = (attended[0] if self.passed else attended).dtype
            if found != hidden_states.dtype:
                raise RuntimeError(
                    f"{self.attention.path!r} made {found} of hidden states in {hidden_states.dtype}, and the second half of a "
                    f"{type(self._layer).__name__} would go on in that: run the model in one dtype"
                )
        return attended

    @property
    def experts(self) -> nn.Module | None:
        """The module that holds the experts' weights; None for a dense layer, or one that has its attention only."""
        return None if self._parts.moe is None or not self._parts.has_mlp else innermost(self._block.experts)

    def check_block(self) -> None:
        """Raise RuntimeError if a compiled sublayer, or an engine's with experts, would skip something installed on its block
        since; warn of hooks on all modules that it skips, and of adapters on the experts that need PEFT's own forward."""
        if not self._parts.has_mlp:
            return  # this part of a model does not run the block
        plain = _is_plain(self._block, self._block_class)
        if not plain and (self.mlp.compiled or self._in_engine):
            why = "a compiled sublayer" if self.mlp.compiled else "an engine's MoE sublayer (dispatcher=...)"
            raise RuntimeError(
                f"{self.mlp.path!r} is not the plain {self._block_class.__name__} any more that was managed (a module hook, a "
                f"replaced forward, an adapter or a wrapper such as FSDP2), which {why} does not run: put it on the router, "
                "the experts or the decoder layer instead"
                + (", or manage the model without compile" * self.mlp.compiled)
            )
        if (self.mlp.compiled or self._in_engine) and not self._warned_of_hooks and _has_any_global_hook():
            self._warned_of_hooks = True
            uncalled = (
                "MoE blocks of an engine (dispatcher=...)"
                if self._in_engine
                else "the modules inside compiled sublayers"
            )
            warnings.warn(
                f"hooks on all modules' calls (torch.nn.modules.module.register_module_forward_hook) do not see {uncalled}: "
                "Forebay runs what is in them without calling them",
                stacklevel=2,
            )
        if plain and self._parts.moe is not None:
            self._check_adapters(self._parts.moe, compiled=self.mlp.compiled and not self._in_engine)

    def _check_adapters(self, moe: MoeBlock, compiled: bool) -> None:
        experts, router = self._block.experts, getattr(self._block, moe.routing.router)
        forebays = uses_forebay(innermost(experts))
        if forebays and (quantized := quantized_weight(innermost(experts))):
            raise RuntimeError(
                f"{self.mlp.path!r}: {quantized}, which Forebay's experts cannot read: quantize before forebay.manage, or leave "
                "the model on its own experts (experts=None)"
            )
        why = why_unsupported(experts)
        if compiled and (why or is_adapted(router)):
            raise RuntimeError(
                f"{self.mlp.path!r} has adapters on parameters (PEFT's target_parameters) that change weights in each forward, "
                f"which compiled code cannot ({why or 'they are on the router'}): manage the model without compile, or put the "
                "adapters on modules (target_modules)"
            )
        if why and not self._warned and forebays:
            self._warned = True
            # No path in the text: Python shows equal warnings once.
            warnings.warn(
                f"adapters on experts run as PEFT runs them, which makes and saves all updated weights in each forward: {why}",
                stacklevel=2,
            )

    def run_router_hooks(self, logits: Tensor | None, ids: Tensor | None) -> None:
        """Run the router's forward hooks on its outputs, with empty arguments, where compiled code skipped them.

        Transformers' ``output_router_logits`` and `forebay.models.router.RouterStats` are such hooks.
        """
        moe = self._parts.moe
        if not self.mlp.compiled or moe is None:
            return
        path, router = moe.path, getattr(self._block, moe.routing.router)
        output = moe.routing.output(logits, ids)
        _refuse_hooks(f"{path}'s router", router, forward_hooks_too=False)
        for key, hook in tuple(router._forward_hooks.items()):
            arguments: tuple[Any, ...] = ((), {}) if key in router._forward_hooks_with_kwargs else ((),)
            if hook(router, *arguments, output) is not None:
                raise RuntimeError(
                    f"a forward hook on {path}'s router returned a value, which a compiled sublayer cannot use: manage the "
                    "model without compile"
                )

    def _wants_original(self, kwargs: dict[str, Any]) -> bool:
        layer = self._layer
        if is_given_a_cache(kwargs):
            if layer.training and torch.is_grad_enabled():
                warnings.warn(
                    "a KV cache in training: the layers run unmanaged and uncompiled; pass use_cache=False, and no cache of your "
                    "own, as PEFT's prefix tuning does",
                    stacklevel=2,
                )
            return True
        return bool(kwargs.get("output_attentions")) or "attentions" in collected_outputs()


def collected_outputs() -> Collection[str]:
    """Names of the outputs of modules inside that the transformers model that is running now was asked to collect."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get() or ()


def _refuse_hooks(what: str, module: nn.Module, forward_hooks_too: bool) -> None:
    """Raise RuntimeError on module hooks that a compiled sublayer would skip silently.

    Transformers' own forward hooks are fine: they only act on a model asked for attentions, which runs its original
    forward.
    """
    foreign = [
        *module._forward_pre_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]
    if forward_hooks_too and module._forward_hooks:
        foreign += [h for h in module._forward_hooks.values() if h.__module__ != "transformers.utils.output_capturing"]
    if foreign:
        raise RuntimeError(
            f"{what} has the module hook {foreign[0]!r}, which a compiled sublayer does not run: remove it, or manage the "
            "model without compile"
        )


def install_sublayers(model: nn.Module, compile: bool = False, dispatcher: TokenDispatcher | None = None) -> Sublayers:
    """Run every decoder layer of `model` as its two sublayers.

    Eager sublayers give bitwise the original's results. Compiled ones (one graph for all layers of a kind, see
    `forebay.models.compile`) round differently. On a GPU they choose cuDNN attention where it applies.

    Args:
        model: a transformers model, or any module that has supported decoder layers below it.
        compile: compile the sublayers. Shapes are static: another batch shape compiles once more.
        dispatcher: run the MoE sublayers in the stages of expert parallelism. The experts modules must hold this rank's
            experts. Only stages 1 and 5 are compiled then; the experts are called as modules.

    Raises:
        ValueError: no decoder layer, one that is not two sublayers, or one with a replaced forward; with `compile` or
            `dispatcher` also a MoE block that cannot be spelled out; with `dispatcher`, experts that are not Forebay's, are of
            another number, or are not called once between what comes before and after them.
        RuntimeError: `compile` without a compiler for the model's device.
    """
    layers = list(decoder_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers of transformers that are two sublayers, mixer and feed-forward"
        )
    for parts in layers if compile or dispatcher is not None else ():
        check_block(parts)
        if parts.moe is not None and dispatcher is not None and parts.has_mlp:
            _check_experts(parts.moe, dispatcher)
    if compile:
        check_compiler(next(model.parameters()).device.type)
    make = _Maker(compile, dispatcher)
    # All are made before the first is installed: making one may raise, and nothing would remove those of earlier layers.
    in_engine = dispatcher is not None
    forwards = [SublayerForward(parts, make.attention(parts), make.block(parts), in_engine) for parts in layers]
    sublayers = Sublayers()
    for parts, forward in zip(layers, forwards, strict=True):
        sublayers.add(parts.module, forward)
    return sublayers


class _Maker:
    """Makes the call sites of layers. Layers of a class have the same functions, so that compiled graphs serve all of them."""

    def __init__(self, compile: bool, dispatcher: TokenDispatcher | None):
        self._direct = compile
        self._dispatcher = dispatcher
        self._made: dict[tuple[object, ...], Any] = {}
        functions = (attention_sublayer, moe_sublayer, dense_sublayer, moe_front, moe_cut_front, moe_back)
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {f: f for f in functions}
        if compile:
            self._functions = {f: compile_sublayer(f, attention=f is attention_sublayer) for f in functions}

    def attention(self, parts: LayerParts) -> SublayerCallSite:
        half = self._once(parts.halves.attention, parts.mixer if self._direct else None)
        call = partial(self._functions[attention_sublayer], half, parts.module)
        return SublayerCallSite(parts.attention_path, parts.module, parts.halves.first, call, compiled=self._direct)

    def block(self, parts: LayerParts) -> SublayerCallSite:
        layer, moe = parts.module, parts.moe
        whole = partial(self._functions[dense_sublayer], self._once(parts.halves.feed_forward))
        site = partial(SublayerCallSite, parts.block_path, layer, parts.halves.second)
        if moe is None:
            return site(partial(whole, layer), compiled=self._direct)
        light_recompute = light_recompute_of(moe.experts)
        dispatcher = self._dispatcher
        if dispatcher is not None:
            front, back = self._around_experts(parts)
            experts = partial(_experts, layer, parts.block)
            stages = MoeStages(front, partial(experts, False), dispatcher, back)
            # An engine runs stage 3 without the module's hooks: FSDP2's would take the end of stage 3's backward for the end
            # of the step's, and reshard everything. Such an engine has unsharded the parameters itself.
            return site(stages, light_recompute, front, partial(experts, True), back, compiled=self._direct)
        function, routed = self._functions[moe_sublayer], self._once(moe.routing.block, self._direct)
        sublayer = partial(function, self._once(parts.halves.moe, parts.block), routed)
        if self._direct:
            return site(partial(with_edge, sublayer, parts.block, layer), light_recompute, compiled=True)
        plain = partial(sublayer, edge=None)  # in eager mode the experts make their own
        kind = type(getattr(layer, parts.block))
        return site(partial(_plain_or_whole, kind, parts.block, plain, whole, layer), light_recompute)

    def _around_experts(self, parts: LayerParts) -> tuple[Callable[..., Front], Callable[..., Tensor] | None]:
        """Stages 1 and 5; no stage 5 if the experts' sums are just added."""
        layer, made, found = parts.module, self._functions, parts.stages(self._direct, self._once)
        if found is None:
            raise ValueError(
                f"{parts.block_path!r} ({type(getattr(layer, parts.block)).__name__}) does not call its experts once between "
                "what comes before and after them: expert parallelism is not supported for it"
            )
        if found.back is None:
            return partial(made[moe_front], *found.front, layer), None
        front = partial(made[moe_cut_front], *found.front, layer)
        back = partial(made[moe_back], *found.back, layer, parts.block)
        return partial(_front_of, front), partial(_back_of, back)

    def _once(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """``make(*arguments)``, a method of a structure, called once."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(*arguments)
        return self._made[key]


def _check_experts(block: MoeBlock, dispatcher: TokenDispatcher) -> None:
    experts: Any = block.experts
    if light_recompute_of(experts) is None:
        raise ValueError(f"expert parallelism needs Forebay's experts (experts='forebay'), {block.path!r} has others")
    if experts.num_experts != dispatcher.num_experts:
        raise ValueError(
            f"{block.path!r} has {experts.num_experts} experts, the token dispatcher was made for {dispatcher.num_experts}"
        )
    weight = experts.gate_up_proj
    count = weight.shape[0]
    if isinstance(weight, DTensor) and dispatcher.size > 1:
        # Not the size of the local part, which FSDP2 shards further. FSDP2's mesh dimension comes before the experts'.
        count //= weight.device_mesh.shape[-1]
    if count != dispatcher.local_experts:
        raise ValueError(
            f"{block.path!r} holds {count} experts on rank {dispatcher.rank}, but {dispatcher.num_experts} experts on "
            f"{dispatcher.size} ranks are {dispatcher.local_experts} each: call keep_local_experts first"
        )
