"""A model on fake tensors, whose attention and dtypes are those of a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forebay.models.families import transformers_base
from forebay.models.masked_attention import under_dense_mask
from forebay.models.sinks import has_eager_sinks
from forebay.models.structure import sinks_of


def make_fake(model: nn.Module) -> None:
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


class GpuFunctions(TorchFunctionMode):
    """Runs `scaled_dot_product_attention` as a GPU does: flash, or cuDNN's kernel for heads of two widths and for masks. Under
    autocast, functions return fp32 that do so on a GPU and not on a CPU (torch's lists of autocast, "fp32_set_opt_dtype").

    `compiled`: dropout that drops nothing copies, as in torch's decomposition (`torch._decomp.decompositions.dropout`)."""

    def __init__(self, compiled: bool):
        super().__init__()
        self._compiled = compiled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        autocast = torch.is_autocast_enabled("cpu")
        if func in _WIDE and autocast and args[0].is_floating_point() and kwargs.get("dtype") is None:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        if func is nn.functional.dropout and self._compiled:
            return _compiled_dropout(*args, **kwargs)
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


def _compiled_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return nn.functional.dropout(x, p, training, inplace) if training and p else x.clone()


def fuse_sinks(model: Any) -> bool:
    """Replace attention with sinks that transformers runs eagerly; see `forebay.models.sinks`.

    Returns:
        Whether layers get block masks, which are not counted, in place of dense ones.
    """
    flex: bool = model._supports_flex_attn
    for module in model.modules():
        base = transformers_base(module)
        if base is not None and has_eager_sinks(module) and (attended := sinks_of(base.forward)) is not None:
            choose = (lambda _: _sink_attention) if flex else under_dense_mask
            module.forward = partial(attended, module, choose)
    return flex


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
