"""Hugging Face decoder layers as two sublayers: attention, and MoE (or dense MLP).

Input: a model whose decoder layers are of a class in `forebay.models.families.LAYERS`. Output of `install_sublayers`: the
same model, whose layers run

    x2 = x + self_attn(input_layernorm(x))                                     attention sublayer
    x3, logits, ids = x2 + mlp(post_attention_layernorm(x2)), router outputs   MoE sublayer

through two `SublayerCallSite`s each, which a manager can wrap. `Sublayers` owns the call sites; its `uninstall`
removes everything.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from forebay.memory.overrides import ForwardFn, InnerForward, install, is_managed, is_patched
from forebay.models.compile import check_compiler, compile_sublayer
from forebay.models.families import LAYERS, MoeBlock, decoder_layers, innermost, moe_block
from forebay.models.hf_experts import light_recompute_of, uses_forebay
from forebay.models.low_rank import is_adapted, run_experts, why_unsupported
from forebay.moe.dispatch import Front, MoeStages, TokenDispatcher

# Transformers checkpoints a layer in its `__call__`, which runs our forward, but from 5.23 on in its class's forward, which ours
# takes the place of.
_CHECKPOINTED_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)

# --- sublayers as functions -------------------------------------------------------------------------------------------
# A sublayer is a function of its layer and of tensors. It returns everything it makes, the router's outputs included, and
# writes nowhere, so it can be compiled, run under saved_tensors_hooks, or run again in backward. It looks the layer's
# modules up when it is called, so that adapters, shards and replacements installed later are used.

# Keywords that a model passes to its layers and that no attention reads. A compiled sublayer must not see them:
# num_items_in_batch differs each step and would recompile it.
_NOT_FOR_ATTENTION = frozenset(
    {
        "labels",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)

_Functions = Mapping[Callable[..., Any], Callable[..., Any]]
"""A sublayer's function -> itself, or compiled."""
MoeOutput = tuple[Tensor, Tensor | None, Tensor | None]


def attention_sublayer(layer: Any, direct: bool, x: Tensor, **kwargs: Any) -> Tensor:
    """x + self_attn(input_layernorm(x)); x and the result are [B, S, H]. `direct` skips the module hooks of `self_attn`."""
    attention = layer.self_attn.forward if direct else layer.self_attn
    return x + attention(hidden_states=layer.input_layernorm(x), **kwargs)[0]


def dense_sublayer(layer: Any, x: Tensor) -> MoeOutput:
    """x + mlp(post_attention_layernorm(x)); x is [B, S, H]. There are no router outputs."""
    return x + layer.mlp(layer.post_attention_layernorm(x)), None, None


def moe_sublayer(layer: Any, names: tuple[str, str | None], direct: bool, x: Tensor) -> MoeOutput:
    """x + experts(post_attention_layernorm(x)), shared experts included; x is [B, S, H].

    The MoE block is spelled out instead of called, so that the router's outputs leave a compiled graph.

    Args:
        names: see `forebay.models.families.MoeBlock`.
        direct: skip the module hooks of the router.

    Returns:
        The sum [B, S, H], the router's logits [B * S, E] and its ids [B * S, K].
    """
    normed = layer.post_attention_layernorm(x)
    route, shared = _route_and_shared(layer.mlp, names, direct)
    # The order of the blocks' own forwards: with shared experts, the router gets the unflattened tensor before the
    # experts' view is made. In another order gradients would be added in another order.
    if shared is None:
        rows = normed.view(-1, normed.shape[-1])
        logits, weights, ids = route(rows)
    else:
        logits, weights, ids = route(normed)
        rows = normed.view(-1, normed.shape[-1])
    y = run_experts(layer.mlp.experts, rows, ids, weights).view(normed.shape)
    if shared is not None:
        y = y + shared(normed)
    return x + y, logits, ids


def moe_front(layer: Any, names: tuple[str, str | None], direct: bool, x: Tensor) -> Front:
    """Stage 1 of `moe_sublayer` under expert parallelism: everything before dispatch; x is [B, S, H]."""
    normed = layer.post_attention_layernorm(x)
    route, shared = _route_and_shared(layer.mlp, names, direct)
    rows = normed.view(-1, normed.shape[-1])
    logits, weights, ids = route(rows if shared is None else normed)
    residual = x if shared is None else x + shared(normed)
    return Front(residual.view(-1, x.shape[-1]), rows, ids, weights, logits)


def _route_and_shared(block: Any, names: tuple[str, str | None], direct: bool) -> tuple[Any, Any]:
    router = getattr(block, names[0])
    return router.forward if direct else router, None if names[1] is None else getattr(block, names[1])


def _plain_or_whole(kind: type[nn.Module], sublayer: Callable[..., Any], layer: Any, x: Tensor) -> MoeOutput:
    """`sublayer(x)`, or a call of the layer's block if it is no longer a plain one of class `kind`."""
    return sublayer(x) if _is_plain(layer.mlp, kind) else dense_sublayer(layer, x)


def _is_plain(block: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the block does nothing but what its class does: no module hooks, replaced forward, adapter or wrapper."""
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    return type(block) is kind and not any(hooks) and not is_patched(block) and not is_managed(block)


def _experts(layer: Any, direct: bool, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
    """Stage 3; unless `direct`, with the hooks of the experts module, in one of which FSDP2 unshards its parameters."""
    return run_experts(layer.mlp.experts, rows, ids, weights, direct=direct, max_rows=max_rows)


# --- sublayers in a model ---------------------------------------------------------------------------------------------


class SublayerCallSite:
    """The place in a layer's forward from which a sublayer is called.

    Attributes:
        path: module path of the sublayer's main module, `...self_attn` or `...mlp`.
        module: the decoder layer; all its parameters are weights of the sublayer.
        call: the sublayer with all wrappers: `call(x, attention_mask=..., position_embeddings=..., ...) -> x2` for
            attention, `call(x2) -> (x3, logits | None, ids | None)` for the MLP.
        calls: how often a wrapped sublayer was called; stages count one by one.
        light_recompute: see `light_recompute_of`; None for other sublayers.
        front, experts: stages 1 and 3 of a MoE sublayer in stages, for an engine that runs them by themselves, each with
            all wrappers. Stage 3 skips the module hooks of the experts.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        call: Callable[..., Any],
        light_recompute: Callable[[bool], None] | None = None,
        front: Callable[..., Any] | None = None,
        experts: Callable[..., Any] | None = None,
    ):
        self.path = path
        self.module = module
        self.calls = 0
        self.light_recompute = light_recompute
        self.call, self.front, self.experts = self._bare = (call, front, experts)

    def called_modules(self) -> Sequence[nn.Module]:
        """See `forebay.memory.overrides.CallSite.called_modules`."""
        is_attention = self.path.endswith("self_attn")
        names = ("self_attn", "input_layernorm") if is_attention else ("mlp", "post_attention_layernorm")
        return [getattr(self.module, name) for name in names]

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrapper(call)`` in the place of `call`, and of each stage."""
        self.call = self._counted(wrapper(self.call))
        if self.front is not None and self.experts is not None:
            self.front, self.experts = self._counted(wrapper(self.front)), self._counted(wrapper(self.experts))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return call(*args, **kwargs)

        return counted

    def restore(self) -> None:
        """Undo every `wrap`, and `light_recompute`."""
        self.call, self.front, self.experts = self._bare
        if self.light_recompute is not None:
            self.light_recompute(False)


class Sublayers(dict[str, SublayerCallSite]):
    """Call sites by path, in forward order. `layers` are the forwards of the decoder layers, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[SublayerForward] = []
        self._undo = ExitStack()

    def add(self, layer: nn.Module, forward: SublayerForward) -> None:
        for site in (forward.attention, forward.mlp):
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
    """

    def __init__(
        self,
        layer: nn.Module,
        attention: SublayerCallSite,
        mlp: SublayerCallSite,
        block: MoeBlock | None,
        compiled: bool,
    ):
        self.attention = attention
        self.mlp = mlp
        self.stages: MoeStages | None = mlp.call if isinstance(mlp.call, MoeStages) else None
        self._layer: Any = layer
        self._original: Callable[..., Any]  # set by `around`
        self._names = tuple(inspect.signature(type(layer).forward).parameters)[2:]
        self._block = block
        self._block_class: type[nn.Module] = type(layer.mlp)  # type: ignore[assignment]
        self._compiled = compiled
        self._warned = False

    def around(self, inner: InnerForward) -> ForwardFn:
        """For `forebay.memory.overrides.install`: the sublayers in place of the layer's own forward."""
        self._original = inner
        return self._run

    def _run(self, _: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.update(zip(self._names, args[1:], strict=False))
        hidden_states = args[0] if args else kwargs.pop("hidden_states")
        if self._wants_original(kwargs):
            original: Tensor = self._original(hidden_states, **kwargs)
            return original
        if _CHECKPOINTED_FORWARD and self._layer.gradient_checkpointing and self._layer.training:
            checkpointed: Tensor = self._layer._gradient_checkpointing_func(
                partial(self._both, **kwargs), hidden_states
            )
            return checkpointed
        return self._both(hidden_states, **kwargs)

    def _both(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x2 = self.attend(hidden_states, **kwargs)
        self.check_block()
        x3, logits, ids = self.mlp.call(x2)
        self.run_router_hooks(logits, ids)
        return x3

    def attend(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """The attention sublayer, [B, S, H] to [B, S, H], with the keywords that a model gives its layers."""
        if self._compiled:
            _refuse_hooks(self.attention.path, self._layer.self_attn, forward_hooks_too=True)
        others = {k: v for k, v in kwargs.items() if k not in _NOT_FOR_ATTENTION}
        return self.attention.call(hidden_states, attention_mask=attention_mask, **others)

    @property
    def experts(self) -> nn.Module | None:
        """The module that holds the experts' weights; None for a dense layer."""
        return None if self._block is None else innermost(self._layer.mlp.experts)

    def check_block(self) -> None:
        """Raise RuntimeError if a compiled or staged sublayer would skip something installed on its block since; warn of adapters
        on the experts that need PEFT's own forward."""
        staged = self.stages is not None
        plain = _is_plain(self._layer.mlp, self._block_class)
        if not plain and (self._compiled or staged):
            why = "a compiled sublayer" if self._compiled else "a MoE sublayer in stages (dispatcher=...)"
            raise RuntimeError(
                f"{self.mlp.path!r} is not the plain {self._block_class.__name__} any more that was managed (a module hook, a "
                f"replaced forward, an adapter or a wrapper such as FSDP2), which {why} does not run: put it on the router, "
                "the experts or the decoder layer instead" + (", or manage the model without compile" * self._compiled)
            )
        if plain and self._block is not None:
            self._check_adapters(self._block, compiled=self._compiled and not staged)

    def _check_adapters(self, block: MoeBlock, compiled: bool) -> None:
        experts, router = self._layer.mlp.experts, getattr(self._layer.mlp, block.names[0])
        why = why_unsupported(experts)
        if compiled and (why or is_adapted(router)):
            raise RuntimeError(
                f"{self.mlp.path!r} has adapters on parameters (PEFT's target_parameters) that change weights in each forward, "
                f"which compiled code cannot ({why or 'they are on the router'}): manage the model without compile, or put the "
                "adapters on modules (target_modules)"
            )
        if why and not self._warned and uses_forebay(innermost(experts)):
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
        if not self._compiled or self._block is None:
            return
        path, router = self._block.path, getattr(self._layer.mlp, self._block.names[0])
        _refuse_hooks(f"{path}'s router", router, forward_hooks_too=False)
        for key, hook in tuple(router._forward_hooks.items()):
            arguments: tuple[Any, ...] = ((), {}) if key in router._forward_hooks_with_kwargs else ((),)
            if hook(router, *arguments, (logits, None, ids)) is not None:
                raise RuntimeError(
                    f"a forward hook on {path}'s router returned a value, which a compiled sublayer cannot use: manage the "
                    "model without compile"
                )

    def _wants_original(self, kwargs: dict[str, Any]) -> bool:
        layer = self._layer
        if kwargs.get("past_key_values") is not None:
            if layer.training and torch.is_grad_enabled():
                warnings.warn(
                    "a KV cache in training: the layers run unmanaged and uncompiled; pass use_cache=False",
                    stacklevel=2,
                )
            return True
        from transformers.utils.output_capturing import _active_collector

        # What the transformers model that is running now was asked to collect.
        collected = _active_collector.get() or {}
        return bool(kwargs.get("output_attentions")) or "attentions" in collected


def _refuse_hooks(what: str, module: nn.Module, forward_hooks_too: bool) -> None:
    """Raise RuntimeError on module hooks that a compiled sublayer would skip silently.

    Transformers' own forward hooks are fine: they only act on a model asked for attentions, which runs its original
    forward.
    """
    foreign = list(module._forward_pre_hooks.values())
    if forward_hooks_too:
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
            experts. Only stage 1 is compiled then; the experts are called as modules.

    Raises:
        ValueError: no supported layer, an unsupported decoder layer, or one with a replaced forward; with `compile` or
            `dispatcher` also an unsupported MLP; with `dispatcher`, experts that are not Forebay's or of another number.
        RuntimeError: `compile` without a compiler for the model's device.
    """
    layers = list(decoder_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that Forebay knows; supported are {', '.join(LAYERS)}"
        )
    strict = compile or dispatcher is not None
    blocks = [_block_of(f"{path}.mlp", layer.mlp, strict) for path, layer in layers]
    if dispatcher is not None:
        for block in blocks:
            if block is not None:
                _check_experts(block, dispatcher)
    functions: _Functions = {f: f for f in (attention_sublayer, moe_sublayer, dense_sublayer, moe_front)}
    if compile:
        check_compiler(next(model.parameters()).device.type)
        functions = {f: compile_sublayer(f, attention=f is attention_sublayer) for f in functions}
    sublayers = Sublayers()
    for (path, layer), block in zip(layers, blocks, strict=True):
        attention = SublayerCallSite(f"{path}.self_attn", layer, partial(functions[attention_sublayer], layer, compile))
        mlp = _mlp_site(f"{path}.mlp", layer, block, functions, compile, dispatcher)
        sublayers.add(layer, SublayerForward(layer, attention, mlp, block, compile))
    return sublayers


def _mlp_site(
    path: str,
    layer: Any,
    block: MoeBlock | None,
    functions: _Functions,
    compile: bool,
    dispatcher: TokenDispatcher | None,
) -> SublayerCallSite:
    if block is None:
        return SublayerCallSite(path, layer, partial(functions[dense_sublayer], layer))
    light_recompute = light_recompute_of(block.experts)
    if dispatcher is not None:
        front = partial(functions[moe_front], layer, block.names, compile)
        stages = MoeStages(front, partial(_experts, layer, False), dispatcher)
        # An engine runs stage 3 without the module's hooks: FSDP2's would take the end of stage 3's backward for the end
        # of the step's, and reshard everything. Such an engine has unsharded the parameters itself.
        return SublayerCallSite(path, layer, stages, light_recompute, front, partial(_experts, layer, True))
    sublayer = partial(functions[moe_sublayer], layer, block.names, compile)
    if not compile:
        sublayer = partial(_plain_or_whole, type(layer.mlp), sublayer, layer)
    return SublayerCallSite(path, layer, sublayer, light_recompute)


def _block_of(path: str, mlp: nn.Module, strict: bool) -> MoeBlock | None:
    """The parts of a MoE block; None for one that is called as it is: dense, or, unless `strict`, unsupported."""
    try:
        return moe_block(path, mlp)
    except ValueError:
        if strict:
            raise
        return None


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
