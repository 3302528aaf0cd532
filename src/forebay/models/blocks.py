"""Hugging Face decoder layers as two sublayers, attention and MoE (or dense MLP), on Forebay's experts.

Input: a model whose decoder layers are of a class in `forebay.models.families.LAYERS`. Output: the same model, whose
layers' `forward` calls the two sublayers; each is a slot that a manager can wrap. `register` offers Forebay's experts
to transformers, and `cut_experts` leaves each rank its own experts. Modules are looked up when they are called.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from forebay.memory.regions import (
    ForwardFn,
    InnerForward,
    drop_setting,
    install,
    is_managed,
    is_patched,
    put_setting,
    setting,
)
from forebay.memory.storage import local
from forebay.models.compile import check_compiler, compile_sublayer
from forebay.models.families import LAYERS, MoeBlock, decoder_layers, innermost, moe_block, moe_blocks
from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.dispatch_op import Front, MoeStages
from forebay.moe.experts import experts

# Gives each rank of an expert-parallel group its own experts.
#
# In: a model with all experts, the same on every rank, and an exchange. Out: the same model, whose experts modules hold E/P
# experts as plain parameters, to be managed with `forebay.manage(model, dispatcher=...)`. The trainer shards with DTensors
# instead (`forebay.train.parallel`), so that its checkpoints know the whole.


def keep_local_experts(model: nn.Module, dispatcher: TokenDispatcher) -> None:
    """Cut every experts module of `model` down to the experts of `dispatcher.rank`. The others' memory is freed.

    Gradients of a loss that is a sum over all ranks' tokens are then complete for the experts; those of all other
    parameters are this rank's share and have to be summed over ranks.

    Raises:
        ValueError: the model has no MoE blocks, or a parameter's first dimension is not the exchange's number of experts.
    """
    blocks = moe_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no MoE block that Forebay knows")
    for block in blocks:
        for name, parameter in block.experts.named_parameters(recurse=False):
            if parameter.shape[0] != dispatcher.num_experts:
                raise ValueError(
                    f"{block.path}.experts.{name} is {tuple(parameter.shape)}; its first dimension should be the "
                    f"{dispatcher.num_experts} experts of the exchange"
                )
        cut_experts(block.experts, dispatcher.rank, dispatcher.size)


def cut_experts(
    experts: nn.Module, rank: int, size: int, stored: Callable[[torch.Tensor], torch.Tensor] = lambda own: own
) -> None:
    """Replace each parameter [E, ...] of an experts module by rank's [E / size, ...] of it.

    Args:
        stored: what becomes the parameter, given the rank's own part; such as a DTensor of the whole.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        held = parameter.shape[0] // size
        own = parameter.detach()[rank * held : (rank + 1) * held].clone()
        setattr(experts, name, nn.Parameter(stored(own), requires_grad=parameter.requires_grad))


# Hugging Face's experts modules on `forebay.moe.experts`.
#
# Two ways in. `install_experts(model)` puts `experts_forward` around the forward of each experts module, until it is taken off
# again; copies and pickles of the model have their own experts. `register()` adds "forebay" to transformers' table of experts
# implementations; a model takes it for good by `model.set_experts_implementation("forebay")` or
# `from_pretrained(experts_implementation=...)`. Tokens, ids and weights come from the model's own router; parameters stay where
# they are in the module and keep their names and layouts.
#
# What a module says of itself is read at each call: `is_transposed`, `is_concatenated`, `has_bias`, `has_gate`, `num_experts`,
# `act_fn`, `alpha` and `limit`. Three settings (see `forebay.memory.regions.setting`; an attribute of that name counts too)
# change how it saves: `forebay_save_h` (bool, default True): False makes h again in backward instead of saving it.
# `forebay_weight_gradients` (a `forebay.moe.wgrad.WeightGradients`, default None) may leave the weight gradients for later.
# `forebay_pages` (a `forebay.moe.experts_autograd.Pages`, default None) is where the rows wait for backward.

NAME = "forebay"
_INSTALLED = "forebay_experts"


def register() -> str:
    """Make "forebay" known to transformers and return that name. A second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def install_experts(model: nn.Module) -> Callable[[], None]:
    """Forebay's experts in every MoE block of `model`, until the returned call takes them off. A second call of it does nothing.

    Left alone: experts that run Forebay's by their configuration, those whose forward somebody replaced, and modules that are no
    experts of transformers.
    """
    undo: list[Callable[[], None]] = []
    for block in moe_blocks(model):
        experts = block.experts
        if hasattr(type(experts), "_apply_gate") and not uses_forebay(experts) and not is_patched(experts):
            put_setting(experts, _INSTALLED, True)
            undo.append(partial(drop_setting, experts, _INSTALLED))
            undo.append(install(experts, lambda _: _run_experts, traceable=True))

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def uses_forebay(experts: nn.Module) -> bool:
    """Whether this experts module computes with `experts_forward`."""
    if setting(experts, _INSTALLED, False):
        return True
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def _run_experts(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    # The operation has no rule for torch.func; the module's own experts do.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        own: Tensor = type(self).forward(self, *args, **kwargs)
        return own
    return experts_forward(self, *args, **kwargs)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, max_rows: int | None = None
) -> Tensor:
    """Forward of a transformers experts module: tokens [T, H] and routing [T, K] in, [T, H] out.

    Parameters that are DTensors (expert parallelism) stand for their local part: ids count this rank's experts from 0.

    Args:
        max_rows: see `forebay.moe.experts.experts`.

    Raises:
        ValueError: the module computes something else than silu or GPT-OSS's gated activation.
    """
    kind = activation_of(self)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        local(self.gate_up_proj),
        local(self.down_proj),
        gate_up_bias=local(self.gate_up_proj_bias) if self.has_bias else None,
        down_bias=local(self.down_proj_bias) if self.has_bias else None,
        activation=kind,
        interleaved=not self.is_concatenated,
        transposed=self.is_transposed,
        alpha=float(self.alpha) if kind == "clamped_swiglu" else 1.0,
        limit=float(self.limit) if kind == "clamped_swiglu" else 0.0,
        save_h=setting(self, "forebay_save_h", True),
        max_rows=max_rows,
        deferred=setting(self, "forebay_weight_gradients", None),
        pages=setting(self, "forebay_pages", None),
    )


def activation_of(module: Any) -> str:
    """ "swiglu" or "clamped_swiglu".

    Raises:
        ValueError: any other activation, with the module's class and what would be right for it.
    """
    name = type(module).__name__
    advice = 'leave this model on its own experts (experts=None, or experts_implementation="eager")'
    if not module.has_gate:
        raise ValueError(f"{name} has no gate projection: {advice}")
    # A module that gates in its own way overrides `_apply_gate`. Only GPT-OSS's is known here; the
    # attributes `alpha` and `limit` are no proof, other families use them with other formulas.
    if type(module)._apply_gate is not _default_apply_gate:
        # Whose way it is, is what counts: FSDP2 makes a subclass on the fly.
        owner = next(kind for kind in type(module).__mro__ if "_apply_gate" in vars(kind))
        if owner.__name__ == "GptOssExperts" and not module.is_concatenated:
            return "clamped_swiglu"
        raise ValueError(f"{name} has a gated activation of its own: {advice}")
    if not isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        raise ValueError(f"{name} uses {module.act_fn}, not silu: {advice}")
    return "swiglu"


# Hugging Face decoder layers as two halves: attention, and MoE (or dense MLP).
#
# In: a model whose decoder layers are of a class in `families.LAYERS`. Out: the same model, in whose layers' place runs
#
#     x2 = x + self_attn(input_layernorm(x))                                     attention half
#     x3, logits, ids = x2 + mlp(post_attention_layernorm(x2)), router outputs   MoE half
#
# through two `SublayerSlot`s. A half is a function of its layer and of tensors: it returns all it makes, the router's outputs
# included, and writes nowhere, so it may be compiled, run under `saved_tensors_hooks`, or run again in backward. It finds the
# layer's modules when it is called, so adapters, shards and replacements that come later are used. What is done *with* the
# router's outputs (its forward hooks: transformers' `output_router_logits`, `forebay.models.router.RouterStats`) happens
# outside a compiled half, once per forward.
#
# The slots are owned by `Sublayers`, which lives as long as its owner keeps it; `uninstall()` takes everything off again. A layer
# runs its original forward when it is asked for attention weights or given a KV cache.
#
# Under expert parallelism a MoE half is a `forebay.moe.dispatch_op.MoeStages`: the same parts, cut where tokens travel.
#
# The MoE blocks are spelled out here (router, experts, shared experts) instead of calling the block's own forward: that is how
# the router's outputs get out of a compiled graph. A block that is not its class's own any more (module hooks, a replaced
# forward, FSDP2 on the block, an adapter around it) is called itself, and its half returns no router outputs; compiled halves and
# stages cannot do that, and refuse it by name.

# Keywords that a model hands down to its layers and that no attention reads. A compiled half must
# not see them: num_items_in_batch differs each step and would compile it anew.
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

MoeOutput = tuple[Tensor, Tensor | None, Tensor | None]


def attention_sublayer(layer: Any, direct: bool, x: Tensor, **kwargs: Any) -> Tensor:
    """x + self_attn(input_layernorm(x)) of a decoder layer; x and the result are [B, S, H].

    `direct` goes around the module hooks of `self_attn`, which a compiled half must not run.
    """
    attention = layer.self_attn.forward if direct else layer.self_attn
    return x + attention(hidden_states=layer.input_layernorm(x), **kwargs)[0]


def dense_sublayer(layer: Any, x: Tensor) -> MoeOutput:
    """x + mlp(post_attention_layernorm(x)) of a decoder layer; x is [B, S, H]."""
    return x + layer.mlp(layer.post_attention_layernorm(x)), None, None


def moe_sublayer(layer: Any, names: tuple[str, str | None], direct: bool, x: Tensor) -> MoeOutput:
    """x + experts(post_attention_layernorm(x)) of a decoder layer, shared experts included.

    Args:
        names: see `forebay.models.families.MoeBlock`.

    Returns:
        The sum [B, S, H], the router's logits [B * S, E] and its ids [B * S, K].
    """
    normed = layer.post_attention_layernorm(x)
    route, shared = _route_and_shared(layer.mlp, names, direct)
    # As in the blocks' own forwards: where there are shared experts, the router gets the unflattened
    # tensor, before the experts' view is made. In another order, gradients would be added in another.
    if shared is None:
        rows = normed.view(-1, normed.shape[-1])
        logits, weights, ids = route(rows)
    else:
        logits, weights, ids = route(normed)
        rows = normed.view(-1, normed.shape[-1])
    y = layer.mlp.experts(rows, ids, weights).view(normed.shape)
    if shared is not None:
        y = y + shared(normed)
    return x + y, logits, ids


def moe_front(layer: Any, names: tuple[str, str | None], direct: bool, x: Tensor) -> Front:
    """The first stage of `moe_sublayer` under expert parallelism: all that comes before tokens travel; x is [B, S, H]."""
    normed = layer.post_attention_layernorm(x)
    route, shared = _route_and_shared(layer.mlp, names, direct)
    rows = normed.view(-1, normed.shape[-1])
    logits, weights, ids = route(rows if shared is None else normed)
    residual = x if shared is None else x + shared(normed)
    return Front(residual.view(-1, x.shape[-1]), rows, ids, weights, logits)


def _route_and_shared(block: Any, names: tuple[str, str | None], direct: bool) -> tuple[Any, Any]:
    router = getattr(block, names[0])
    return router.forward if direct else router, None if names[1] is None else getattr(block, names[1])


def _whole_if_changed(kind: type[nn.Module], sublayer: Callable[..., Any], layer: Any, x: Tensor) -> MoeOutput:
    """`sublayer(x)`, or, if the layer's block is no plain one of class `kind` any more, a call of the block."""
    return sublayer(x) if _is_plain(layer.mlp, kind) else dense_sublayer(layer, x)


def _is_plain(block: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether spelling the block out leaves nothing of it out."""
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    return type(block) is kind and not any(hooks) and not is_patched(block) and not is_managed(block)


class SublayerSlot:
    """Where a half is called from its layer's forward.

    Attributes:
        path: module path of the half's main module, `...self_attn` or `...mlp`.
        module: the decoder layer, all of whose parameters are weights to the half.
        call: the half as it is called now: `call(x, attention_mask=..., position_embeddings=...,
            ...) -> x2` for attention, `call(x2) -> (x3, logits | None, ids | None)` for the MLP.
        calls: how often a wrapped half was called, stages counted one by one.
        light_recompute: for a MoE half whose experts are Forebay's: makes them save less (True) or
            normally (False); None otherwise.
        front, experts: of a MoE half in stages, stages 1 and 3 for an engine that runs them by themselves; a wrapper
            around the half is around each of them too. Stage 3 is without the experts module's hooks.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        call: Callable[..., Any],
        light_recompute: Callable[[bool], None] | None = None,
    ):
        self.path = path
        self.module = module
        self.call = call
        self.calls = 0
        self.light_recompute = light_recompute
        self.front: Callable[..., Any] | None = None
        self.experts: Callable[..., Any] | None = None
        self._bare: tuple[Any, Any, Any] = (call, None, None)

    def called_modules(self) -> Sequence[nn.Module]:
        """See `forebay.memory.regions.Slot.called_modules`."""
        attends = self.path.endswith("self_attn")
        names = ("self_attn", "input_layernorm") if attends else ("mlp", "post_attention_layernorm")
        return [getattr(self.module, name) for name in names]

    def cut(self, front: Callable[..., Any], experts: Callable[..., Any]) -> None:
        """Give the half its stages. Once, before any `wrap`."""
        self.front, self.experts = front, experts
        self._bare = (self.call, front, experts)

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `wrapper(call)` in the place of `call`."""
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


class Sublayers(dict[str, SublayerSlot]):
    """Slots by path, in the order in which a forward pass meets them, and the layers they sit in."""

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[SublayerForward] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def layers(self) -> list[SublayerForward]:
        """The layers' forwards, in order."""
        return list(self._layers)

    def uninstall(self) -> None:
        """Give every layer its own forward back, also under a wrapper that somebody put on top. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        for slot in self.values():
            slot.restore()
        self._layers = []

    def add(self, layer: nn.Module, ours: SublayerForward) -> None:
        for slot in (ours.attention, ours.mlp):
            self[slot.path] = slot
        self._layers.append(ours)
        self._undo.append(install(layer, ours.around))


class SublayerForward:
    """The forward of one decoder layer: its two slots, and what has to happen around them.

    Attributes:
        attention, mlp: the slots.
        stages: the MoE half in stages under expert parallelism, else None.
    """

    def __init__(
        self, layer: nn.Module, attention: SublayerSlot, mlp: SublayerSlot, block: MoeBlock | None, compiled: bool
    ):
        self.attention = attention
        self.mlp = mlp
        self.stages: MoeStages | None = mlp.call if isinstance(mlp.call, MoeStages) else None
        self._layer: Any = layer
        self._original: Callable[..., Any] = partial(type(layer).forward, layer)
        self._names = tuple(inspect.signature(type(layer).forward).parameters)[2:]
        self._block = block
        self._kind: type[nn.Module] = type(layer.mlp)  # type: ignore[assignment]
        self._compiled = compiled

    def around(self, below: InnerForward) -> ForwardFn:
        """For `forebay.memory.regions.install`: the halves, in place of the layer's own forward."""
        self._original = below
        return self._run

    def _run(self, _: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.update(zip(self._names, args[1:], strict=False))
        hidden_states = args[0] if args else kwargs.pop("hidden_states")
        if self._wants_original(kwargs):
            original: Tensor = self._original(hidden_states, **kwargs)
            return original
        x2 = self.attend(hidden_states, **kwargs)
        self.check_block()
        x3, logits, ids = self.mlp.call(x2)
        self.announce(logits, ids)
        return x3

    def attend(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """The attention half, [B, S, H] to the same, with the keywords that a model gives its layers."""
        if self._compiled:
            _refuse_hooks(self.attention.path, self._layer.self_attn, after=False)
        others = {k: v for k, v in kwargs.items() if k not in _NOT_FOR_ATTENTION}
        return self.attention.call(hidden_states, attention_mask=attention_mask, **others)

    @property
    def experts(self) -> nn.Module | None:
        """The experts module of an MoE layer: the one that holds the weights."""
        return None if self._block is None else innermost(self._layer.mlp.experts)

    def check_block(self) -> None:
        """Raise RuntimeError where the half would leave out what somebody put on the MoE or dense block since."""
        if (self._compiled or self.stages is not None) and not _is_plain(self._layer.mlp, self._kind):
            why = "a compiled half" if self._compiled else "a MoE half in stages (exchange=...)"
            raise RuntimeError(
                f"{self.mlp.path!r} is not the plain {self._kind.__name__} any more that was managed (a module hook, a replaced "
                f"forward, an adapter or a wrapper such as FSDP2), which {why} does not run: put it on the router, the experts "
                "or the decoder layer instead" + (", or manage the model without compile" if self._compiled else "")
            )

        if self._compiled and self._block is not None and self.stages is None:
            parts = [getattr(self._layer.mlp, name) for name in ("experts", self._block.names[0])]
            if any(type(part).__name__ == "ParamWrapper" for part in parts):
                raise RuntimeError(
                    f"{self.mlp.path!r} has adapters on parameters (PEFT's target_parameters), which write to the weights in "
                    "each forward and so cannot run in compiled code: manage the model without compile, or put the adapters on "
                    "modules (target_modules)"
                )

    def announce(self, logits: Tensor | None, ids: Tensor | None) -> None:
        """Run the router's forward hooks on what it returned, where the half itself cannot: in compiled code."""
        if self._compiled and self._block is not None:
            _run_hooks(self._block.path, getattr(self._layer.mlp, self._block.names[0]), (logits, None, ids))

    def _wants_original(self, kwargs: dict[str, Any]) -> bool:
        layer = self._layer
        if kwargs.get("past_key_values") is not None:
            if layer.training and torch.is_grad_enabled():
                warnings.warn(
                    "a KV cache in training: the layers run unmanaged and uncompiled; pass use_cache=False",
                    stacklevel=2,
                )
            return True
        return bool(kwargs.get("output_attentions")) or "attentions" in _collected()


def install_sublayers(model: nn.Module, compile: bool = False, dispatcher: TokenDispatcher | None = None) -> Sublayers:
    """Run every decoder layer of `model` as its two halves.

    Eager halves give bitwise the original's results. Compiled ones (one graph for all layers of a
    kind; see `forebay.models.compile`) round differently. On a GPU they choose cuDNN attention
    where it applies.

    Args:
        model: a transformers model, or any module that has supported decoder layers below it.
        compile: compile the halves. Shapes are static: another batch shape compiles once more.
        dispatcher: run the MoE halves of expert parallelism, whose experts modules hold this rank's experts. What comes
            before the tokens travel is compiled then; the experts are called as modules, between dispatch and combine.

    Raises:
        ValueError: naming the class and the supported ones, if there is no supported layer, a decoder layer of an unknown
            class, or one with an overridden forward; with `compile` or an exchange also for an MLP of such kinds; with an
            exchange if experts are not Forebay's or of another number than its own.
        RuntimeError: `compile` without a compiler for the model's device.
    """
    found = list(decoder_layers(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that Forebay knows; supported are {', '.join(LAYERS)}"
        )
    strict = compile or dispatcher is not None
    parts = [_block_of(f"{path}.mlp", layer.mlp, strict) for path, layer in found]
    if dispatcher is not None:
        for block in parts:
            if block is not None:
                _check_experts(block, dispatcher)
    attend: Callable[..., Any] = attention_sublayer
    mix: Callable[..., Any] = moe_sublayer
    plain: Callable[..., Any] = dense_sublayer
    front: Callable[..., Any] = moe_front
    if compile:
        check_compiler(next(model.parameters()).device.type)
        attend = compile_sublayer(attend, attention=True)
        mix, plain, front = compile_sublayer(mix), compile_sublayer(plain), compile_sublayer(front)
    sublayers = Sublayers()
    for (path, layer), block in zip(found, parts, strict=True):
        attention = SublayerSlot(f"{path}.self_attn", layer, partial(attend, layer, compile))
        if block is None:
            mlp = SublayerSlot(f"{path}.mlp", layer, partial(plain, layer))
        else:
            sublayer: Callable[..., Any] = partial(mix, layer, block.names, compile)
            if dispatcher is not None:
                sublayer = MoeStages(partial(front, layer, block.names, compile), partial(_experts, layer), dispatcher)
            elif not compile:
                sublayer = partial(_whole_if_changed, type(layer.mlp), sublayer, layer)
            mlp = SublayerSlot(f"{path}.mlp", layer, sublayer, light_recompute_of(block.experts))
            if isinstance(sublayer, MoeStages):
                # Without the module's hooks: FSDP2's would take the end of stage 3's backward for the end of the step's, and
                # reshard everything. Whoever runs stages by themselves has gathered their parameters.
                mlp.cut(sublayer.front, partial(_unhooked_experts, layer))
        sublayers.add(layer, SublayerForward(layer, attention, mlp, block, compile))
    return sublayers


def _block_of(path: str, mlp: nn.Module, strict: bool) -> MoeBlock | None:
    """The parts of a MoE block; None for one that is called as it is: dense, or, unless `strict`, not known."""
    try:
        return moe_block(path, mlp)
    except ValueError:
        if strict:
            raise
        return None


def _experts(layer: Any, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
    """Stage 3: a call of the experts module, hooks and all (FSDP2 gathers the experts' parameters in one)."""
    y: Tensor = layer.mlp.experts(rows, ids, weights, max_rows=max_rows)
    return y


def _unhooked_experts(layer: Any, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
    y: Tensor = layer.mlp.experts.forward(rows, ids, weights, max_rows=max_rows)
    return y


def _check_experts(block: MoeBlock, dispatcher: TokenDispatcher) -> None:
    experts: Any = block.experts
    if light_recompute_of(experts) is None:
        raise ValueError(f"expert parallelism needs Forebay's experts (experts='forebay'), {block.path!r} has others")
    if experts.num_experts != dispatcher.num_experts:
        raise ValueError(
            f"{block.path!r} has {experts.num_experts} experts, the exchange was made for {dispatcher.num_experts}"
        )
    weight = experts.gate_up_proj
    held = weight.shape[0]
    if isinstance(weight, DTensor) and dispatcher.size > 1:
        # Not the local part: until FSDP2 gathers it, that is a piece. Its own mesh dimension comes before the experts'.
        held //= weight.device_mesh.shape[-1]
    if held != dispatcher.local_experts:
        raise ValueError(
            f"{block.path!r} holds {held} experts on rank {dispatcher.rank}, but {dispatcher.num_experts} experts on "
            f"{dispatcher.size} ranks are {dispatcher.local_experts} each: give each rank its own before"
        )


def _collected() -> dict[str, Any]:
    """What the transformers model that is running now was asked to collect, such as attentions."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get() or {}


def light_recompute_of(experts: nn.Module) -> Callable[[bool], None] | None:
    """Switches `save_h` of Forebay's experts; None if the experts are someone else's."""
    held = innermost(experts)
    if not uses_forebay(held):
        return None

    def switch(on: bool) -> None:
        # Only the exception is a setting, so that switching back leaves the module as it was.
        if on:
            put_setting(held, "forebay_save_h", False)
        else:
            drop_setting(held, "forebay_save_h")

    return switch


def _run_hooks(path: str, router: nn.Module, output: tuple[Tensor | None, None, Tensor | None]) -> None:
    """What a compiled half left out: the router's forward hooks, with empty arguments."""
    _refuse_hooks(f"{path}'s router", router, after=True)
    for key, hook in tuple(router._forward_hooks.items()):
        arguments: tuple[Any, ...] = ((), {}) if key in router._forward_hooks_with_kwargs else ((),)
        if hook(router, *arguments, output) is not None:
            raise RuntimeError(
                f"a forward hook on {path}'s router returned a value: a compiled half cannot "
                "take it back in; manage the model without compile"
            )


def _refuse_hooks(what: str, module: nn.Module, after: bool) -> None:
    """Raise on module hooks that a compiled half would leave out silently.

    Forward hooks are fine where they are run afterwards (`after`), and transformers' own ones,
    which only act on a model asked for attentions: that one runs its original forward.
    """
    foreign = list(module._forward_pre_hooks.values())
    if not after:
        foreign += [h for h in module._forward_hooks.values() if h.__module__ != "transformers.utils.output_capturing"]
    if foreign:
        raise RuntimeError(
            f"{what} has the module hook {foreign[0]!r}, which a compiled half does not run: remove "
            "it, or manage the model without compile"
        )
