"""Attention with sinks on fused kernels, for models that transformers can only run eagerly because of them (GPT-OSS).

A sink is one learned logit a head. It takes its share of each query's softmax and has no value. With lse, the log-sum-exp of a
query's scores,

    softmax([scores | sink])[:-1] @ v = flex_attention(q, k, v) * sigmoid(lse - sink)

Input: a model whose attention forwards pass ``s_aux=self.sinks`` to an attention interface. While `install_sinks` is in force,
its base model's forward makes a `MaskRequest` where it made a dense mask, and attention that is given a `BlockMask` runs
`sink_attention`; given anything else, it runs eagerly as before. The `BlockMasks` that is returned owns the masks. Uncompiled,
`flex_attention` materializes all scores, so this is for compiled sublayers.

Families that transformers does not run on `flex_attention` make masks of their own in attention, or have heads of two widths
(DeepSeek-V4, HY-V4, MiMo-V2). Their masks stay dense, and attention is that of `forebay.models.masked_attention`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    add_offsets_to_mask_function,
    and_masks,
    padding_mask_function,
    prepare_padding_mask,
)

from forebay.kernels.masked_attention import WIDEST
from forebay.memory.kv_cache import is_given_a_cache
from forebay.memory.overrides import ForwardFn, InnerForward, install
from forebay.models.families import forward_is_replaced, transformers_base
from forebay.models.masked_attention import under_dense_mask
from forebay.models.structure import sinks_of

NAME = "forebay_flex"
"""The entry of `request_mask` in transformers' table of masks."""
_DENSE_PAIRS = 1 << 28
"""Above so many pairs of a query and a key (16384 tokens of one sequence), compiled code makes a mask, without a byte for each
pair."""
_TRAINS_ON = ("cuda",)
"""Device types on which `flex_attention` has a backward."""


def sink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention interface of transformers.

    Autograd saves query, key, value, the output of `flex_attention` and lse, [B, Hq, S] in fp32; under compilation nothing else.

    Args:
        query: [B, Hq, S, D].
        key, value: [B, Hkv, S, D], with Hq a multiple of Hkv.
        attention_mask: which pairs count, a window included.
        scaling: of the scores; None for 1 / sqrt(D).
        s_aux: the sinks, [Hq].

    Returns:
        [B, S, Hq, D] in the dtype of `query` (under autocast, of autocast), and no weights.
    """
    assert s_aux is not None, "an attention with sinks passes them on"
    # Autocast casts projections only: rotary tables in fp32 leave values alone in its dtype.
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    out, aux = flex_attention(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    # In fp32: bf16 has 1/16 between neighbours of 8, a common lse. A query without keys has -inf, and nothing but its sink.
    share = torch.sigmoid(aux.lse - s_aux.float()[:, None])
    return (out * share[..., None]).to(dtype).transpose(1, 2), None


# --- masks ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MaskRequest:
    """The arguments that transformers gives a function that makes masks. Layers of a kind share one in a forward.

    Attributes:
        arguments: the keyword arguments of an entry in ``ALL_MASK_ATTENTION_FUNCTIONS``.
        made: the mask, after `BlockMasks.of`.
    """

    arguments: Mapping[str, Any]
    made: BlockMask | None = None


def request_mask(**arguments: Any) -> MaskRequest:
    """For ``ALL_MASK_ATTENTION_FUNCTIONS``: defers to `BlockMasks.of`, so that one model's masks have an owner."""
    return MaskRequest(arguments)


class BlockMasks:
    """The block masks of a model. A mask that depends on no data is made once for its pattern, lengths and device."""

    def __init__(self) -> None:
        self._made: dict[Hashable, BlockMask] = {}
        self._undo = ExitStack()
        self._warned = False

    def of(self, mask: Any) -> Any:
        """The block mask of a request; anything else as it is, with one warning for a dense mask."""
        if isinstance(mask, MaskRequest):
            if mask.made is None:
                mask.made = self._find(mask.arguments)
            return mask.made
        if isinstance(mask, Tensor) and not self._warned:
            self._warned = True
            warnings.warn(
                f"attention with sinks runs eagerly and saves all scores: its mask is a tensor of shape {tuple(mask.shape)}, "
                "not one that transformers makes: pass attention_mask=None, or [batch, tokens] for padding",
                stacklevel=2,
            )
        return mask

    def close(self) -> None:
        """Give the model its own attention and masks back. A second call does nothing."""
        self._undo.close()
        self._made.clear()

    # Trap: a mask made in inference mode could not be saved for the backward of a later step.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _find(self, asked: Mapping[str, Any]) -> BlockMask:
        function, padding, device = asked["mask_function"], asked.get("attention_mask"), torch.device(asked["device"])
        q, kv, q_offset, kv_offset = (asked[n] for n in ("q_length", "kv_length", "q_offset", "kv_offset"))
        padding = prepare_padding_mask(padding, kv, kv_offset)
        # Collators pass masks of ones. This waits for the device, as transformers' other masks do.
        if padding is not None and bool(padding.all()):
            padding = None
        pattern = None if padding is not None else _pattern(function)
        place = (pattern, q, kv, q_offset, kv_offset, device)
        if pattern is not None and place in self._made:
            return self._made[place]
        if padding is not None:
            function = and_masks(function, padding_mask_function(padding))
        if q_offset or kv_offset:
            function = add_offsets_to_mask_function(function, q_offset, kv_offset)
        batch = asked["batch_size"] if pattern is None else 1  # one for all sequences
        compiled = device.type == "cuda" and batch * q * kv > _DENSE_PAIRS
        made = create_block_mask(function, batch, None, q, kv, device, _compile=compiled)
        if pattern is not None:
            self._made[place] = made
        return made


def _pattern(function: Any) -> Hashable | None:
    """Equal for functions that compute the same of the same arguments; None if that depends on a tensor."""
    if not isinstance(function, FunctionType):
        return None
    found: list[Hashable] = [function.__code__]
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        for value in content if isinstance(content, tuple) else (content,):
            part = value if isinstance(value, int) else _pattern(value)
            if part is None:
                return None
            found.append(part)
    return tuple(found)


# --- in a model -------------------------------------------------------------------------------------------------------


def has_eager_sinks(attention: nn.Module) -> bool:
    """Whether `attention` passes sinks to its attention interface, and runs eagerly."""
    base = transformers_base(attention)
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    return base is not None and implementation == "eager" and sinks_of(base.forward) is not None


class DenseMasks:
    """In place of `BlockMasks` where attention is `masked_sink_attention`, whose masks are those that transformers makes.

    Attributes:
        layers_run_their_own: in the last call of the model, with a KV cache or to return attention weights. Their attention is
            the model's own then, also when checkpointing runs it again after the call.
    """

    def __init__(self) -> None:
        self.layers_run_their_own = False
        self._undo = ExitStack()

    def of(self, mask: Any) -> Any:
        """The mask."""
        return mask

    def close(self) -> None:
        """Give the model its own attention back. A second call does nothing."""
        self._undo.close()


def install_sinks(
    model: nn.Module, attentions: Sequence[nn.Module], fallbacks: list[str]
) -> BlockMasks | DenseMasks | None:
    """Run attention with sinks on `sink_attention` or `masked_sink_attention` until ``close`` of what is returned.

    Args:
        attentions: the mixers of the decoder layers of `model`. The model is left alone if none of them has sinks, if another
            attention implementation than eager was chosen, or without a GPU.
        fallbacks: gets the reason why a model with sinks is left alone.
    """
    found = [attention for attention in attentions if has_eager_sinks(attention)]
    configs = list({id(a.config): a.config for a in found}.values())
    bases = _bases(model, configs)
    devices = {p.device.type for attention in found for p in attention.parameters()}
    if not found or not devices.issubset(_TRAINS_ON):
        return None
    flex = all(base._supports_flex_attn for base in bases)
    why = _why_eager(found, attentions) if flex else _why_eager(found, found, WIDEST)
    if why is not None:
        fallbacks.append(f"attention runs eagerly and saves all scores: {why} (pass attention=None to silence this)")
        return None
    masks: BlockMasks | DenseMasks = BlockMasks() if flex else DenseMasks()
    forwards = {type(attention): _forward_of(attention, masks) for attention in found}
    for attention in found:
        forward = forwards[type(attention)]  # one for a class: compiled callers share a graph between layers
        masks._undo.callback(install(attention, lambda _, forward=forward: forward, traceable=True))  # type: ignore[misc]
    if isinstance(masks, BlockMasks):
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, request_mask)
    for base in bases:
        masks._undo.callback(install(base, _requesting(configs) if isinstance(masks, BlockMasks) else _watched(masks)))
    return masks


def _bases(model: nn.Module, configs: Sequence[Any]) -> list[Any]:
    """The base models that make the masks of attention with one of `configs`."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and any(m.config is c for c in configs)]
    return list({id(m.base_model): m.base_model for m in models}.values())


def _why_eager(found: Sequence[Any], attentions: Sequence[Any], widest: int | None = None) -> str | None:
    for attention in found:
        name = type(attention).__name__
        if forward_is_replaced(attention):
            return f"the forward of a {name} has been replaced"
        if getattr(attention, "attention_dropout", 0.0):
            return f"attention_dropout is {attention.attention_dropout}, which the fused kernels do not have"
        width = max(getattr(attention, name, 0) for name in ("head_dim", "qk_head_dim", "v_head_dim"))
        if widest is not None and width > widest:
            return f"heads have {width} numbers, and the kernels take up to {widest}"
    # They would be given masks that only `sink_attention` reads.
    others = [a for a in attentions if a not in found and any(getattr(a, "config", None) is f.config for f in found)]
    return f"the model also has a {type(others[0]).__name__} without sinks" if others else None


def _forward_of(attention: nn.Module, masks: BlockMasks | DenseMasks) -> ForwardFn:
    base = transformers_base(attention)
    attended = sinks_of(base.forward) if base is not None else None
    assert attended is not None, "checked by has_eager_sinks"

    def on_flex(self: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = any(isinstance(value, BlockMask) for value in (*args, *kwargs.values()))
        return attended(self, _sinks_on_flex if blocks else _as_it_is, *args, **kwargs)

    def under_dense_masks(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = masks.layers_run_their_own  # type: ignore[union-attr]
        return attended(self, _as_it_is if own else under_dense_mask, *args, **kwargs)

    return on_flex if isinstance(masks, BlockMasks) else under_dense_masks


def _as_it_is(eager: Callable[..., Any]) -> Callable[..., Any]:
    return eager


def _sinks_on_flex(_: Callable[..., Any]) -> Callable[..., Any]:
    return sink_attention


def _watched(masks: DenseMasks) -> Callable[[InnerForward], ForwardFn]:
    """Around a base model's forward: layers' own forwards are to call the model's own attention."""

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            masks.layers_run_their_own = _layers_run_their_own(self, args, kwargs)
            return inner(*args, **kwargs)

        return run

    return around


def _requesting(configs: Sequence[Any]) -> Callable[[InnerForward], ForwardFn]:
    """Around a base model's forward: masks are requests, unless the layers' own forwards will run."""

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _layers_run_their_own(self, args, kwargs):
                return inner(*args, **kwargs)
            with _implementation(configs, NAME):
                return inner(*args, **kwargs)

        return run

    return around


def _layers_run_their_own(base: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has a KV cache or asks for attention weights; see `forebay.models.blocks.SublayerForward`."""
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def wanted(name: str) -> bool:
        value = given.get(name)
        return bool(getattr(base.config, name, False) if value is None else value)

    return is_given_a_cache(given) or wanted("use_cache") or wanted("output_attentions")


@contextmanager
def _implementation(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Within, `configs` name another attention implementation, which transformers' functions for masks read."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own
