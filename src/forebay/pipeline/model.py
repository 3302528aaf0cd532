"""Cuts a managed Hugging Face causal language model into prologue, layers and epilogue for an engine.

Input: a `*ForCausalLM` under `forebay.manage` with fused loss, or a part of one (`forebay.models.families.keep_part`).
Output: a `CutModel`, whose parts compute the model's forward with bitwise equal results. It owns the masks and rotary tables of
its layers (`forebay.pipeline.arguments`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.token_rows import add_token_rows
from forebay.managed import Managed
from forebay.memory.overrides import is_managed
from forebay.models.blocks import SublayerForward
from forebay.models.families import final_norm, stream_head
from forebay.models.fused_loss import head_loss, logits_scale
from forebay.models.linear_cross_entropy import linear_cross_entropy_into
from forebay.moe.dispatch import Front, TokenDispatcher
from forebay.pipeline.arguments import LayerArguments
from forebay.policy import refuse_containers


def adds_at_once(tokens: int, vocabulary: int, width: int) -> bool:
    """Whether the embedding's gradients are added to its fp32 sum as they are computed, instead of when they are reduced.

    They are if the gradients of all `tokens` of a step, of `width` bytes an element, would take more memory than the sum.
    """
    return tokens * width > 4 * vocabulary


@dataclass(frozen=True, eq=False)
class Microbatch:
    """ids and labels, [B, S] int64 on the device, labels already shifted; count: what the sum of losses is divided by; place: its
    number in the step where documents are apart, see `CutModel.write_arguments`."""

    ids: Tensor
    labels: Tensor
    count: Tensor | int
    place: int | None = None


class CutLayer:
    """A decoder layer, or one of its sublayers (see `only`), as a `forebay.pipeline.sublayer.Layer`.

    Attributes:
        dispatcher: moves the layer's tokens; None for a layer that runs whole, without experts.
        experts: stage 3 (see `forebay.moe.dispatch.MoeStages`), without the module's hooks; None for a layer that runs whole.
        back: stage 5; None for a layer that runs whole, or whose experts' sums are just added.
        experts_module: the module whose parameters stage 3 uses.
        regions: paths of the regions that one forward calls, in order.
    """

    def __init__(
        self, sublayers: SublayerForward, keywords: Callable[[], dict[str, Any]], hand_on: Callable[[list[Any]], None]
    ):
        self._sublayers = sublayers
        self._keywords = keywords
        self._hand_on = hand_on
        self._attends = self._feeds = True
        self.experts_module: Any = sublayers.experts
        stages = sublayers.stages
        self.dispatcher: TokenDispatcher | None = stages.dispatcher if stages else None
        # Both include the regions that management has installed around them by now.
        self.experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None = sublayers.mlp.experts
        self.back: Callable[..., Tensor] | None = sublayers.mlp.back
        calls = 1 if stages is None else 2 if self.back is None else 3
        self.regions = sublayers.attention.path, *[sublayers.mlp.path] * calls

    def check(self) -> None:
        """See `forebay.models.blocks.SublayerForward.check_block`."""
        self._sublayers.check_block()

    def only(self, attention: bool, mlp: bool) -> CutLayer:
        """The layer with the sublayers that are true. Attention alone is a single computation, as a dense layer."""
        if attention and mlp:
            return self
        part = copy(self)
        part._attends, part._feeds = attention, mlp
        part.regions = self.regions[:1] if attention else self.regions[1:]
        if attention:
            part.dispatcher = part.experts = part.back = None
        return part

    def stage1(self, x: Tensor) -> tuple[Any, ...]:
        """Attention, norm, router and shared experts; x is [B, S, H]. See `forebay.pipeline.sublayer.Layer.stage1`."""
        assert self._sublayers.mlp.front is not None, "a dense layer has no stages"
        x, given = self._attended(x)
        front: Front = self._sublayers.mlp.front(x, **given)
        self._sublayers.run_router_hooks(front.logits.detach(), front.ids)
        *tensors, held, rest = front
        return tuple(tensors) if self.back is None else (*tensors, *held, rest)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H], of a layer without experts."""
        x, given = self._attended(x)
        if self._feeds:
            x, *_ = self._sublayers.mlp.call(x, **given)
        return x

    def _attended(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The first sublayer's result, and what the second one is given besides it."""
        keywords, sublayers = self._keywords(), self._sublayers
        if self._attends:
            attended = sublayers.attend(x, **keywords)
            x, *passed = attended if sublayers.passed else (attended,)
            self._hand_on(passed)
        return x, sublayers.given(keywords)


class CutModel:
    """A causal language model as an engine runs it.

        prologue(microbatch) -> x            embedding and its factor; also selects the masks and rotary tables of the layers
        layers[i].stage1(x), .experts(...)   a layer's stages, or the whole of it
        epilogue(x, microbatch) -> loss      the sum of residual streams, final norm, the factor of the logits, head and loss

    One forward at a time; a backward needs no masks. Modules are called without their hooks: FSDP2's hooks would take the
    end of a module's backward for the end of the step's, and reshard.

    Args:
        dtype: dtype of hidden states; required where there is no embedding to tell.

    Attributes:
        layers: in forward order; of a part, the layers that it has.
        numbers: numbers of these layers in the whole model.
        embedding: the token embedding; None in a part without it.
        embedded: if set, collects the gradients of embedded tokens as (ids [B, S], gradient [B, S, H]), and autograd gives the
            embedding's weight none; see `spread`.
        embedded_sum: if set, [V, H] fp32: these gradients are added to it as they are computed, bitwise as by `spread`; see
            `padded`.
        head_sum: if set, [V, H] fp32: the epilogue adds the head's weight gradient to it, before the division by a
            microbatch's count, and autograd gives the weight none; see `linear_cross_entropy_into`.

    Raises:
        ValueError: the loss is not fused, not all layers are of a known family, or a placement names a module that
            contains sublayers, and never runs as one.
    """

    def __init__(self, model: Any, memory: Managed, dtype: torch.dtype | None = None):
        if model.lm_head is not None and not is_managed(model.lm_head):
            raise ValueError("cutting a model needs the fused loss: forebay.manage(model, loss='fused')")
        base = getattr(model, model.base_model_prefix)
        found = memory.sublayers.layers
        if len(found) != len(base.layers):
            raise ValueError(
                f"only {len(found)} of {len(base.layers)} decoder layers are of a family that Forebay knows: "
                "the model cannot be cut"
            )
        refuse_containers(memory.placements, memory.sublayers)
        self.head_sum: Tensor | None = None
        self.embedded: list[tuple[Tensor, Tensor]] | None = None
        self.embedded_sum: Tensor | None = None
        self._model, self._base = model, base
        self._norm, self._stream_head = final_norm(base), stream_head(base)
        self._scale = logits_scale(model)
        self._dtype = dtype
        # Trap: transformers' `get_input_embeddings` fails for a part of a model without an embedding.
        self.embedding: Any = None if base.embed_tokens is None else base.get_input_embeddings()
        self.numbers = [int(name) for name, _ in base.layers.named_children()]
        passes = len(found[0].passed) if found else 0
        self._arguments = arguments = LayerArguments(model, self.numbers, passes)
        self.layers = [CutLayer(part, partial(arguments.of, i), arguments.hand_on) for i, part in enumerate(found)]

    def layer(self, number: int, attention: bool = True, mlp: bool = True) -> CutLayer:
        """Layer `number` of the whole model, or one of its sublayers."""
        return self.layers[self.numbers.index(number)].only(attention, mlp)

    def check(self) -> None:
        """Call before a step. RuntimeError if it would skip something that was installed on a block since."""
        for layer in self.layers:
            layer.check()

    def prologue(self, microbatch: Microbatch) -> Tensor:
        """The embedded tokens, [B, S, H]."""
        take = self._take_embedded()
        if take is None:
            x = self.embedding.forward(microbatch.ids)
        else:
            anchor = torch.empty(0, device=microbatch.ids.device, requires_grad=True)
            x = _Embed.apply(anchor, self.embedding, microbatch.ids, take)
        self._select(microbatch, x.dtype)
        return self._arguments.entered(x)

    def enter(self, microbatch: Microbatch) -> None:
        """Select the masks and tables of this microbatch, before the layers of a part run forward."""
        assert self._dtype is not None, "a part needs the dtype of hidden states"
        self._select(microbatch, self._dtype)

    def write_arguments(self, place: int, positions: Tensor) -> None:
        """Make masks and tables of the microbatch `place` of a step, before the step.

        Args:
            positions: [B, S] int64, which restart at 0 in each document.
        """
        self._arguments.write(place, positions, self._dtype or self.embedding.weight.dtype)

    def hidden(self, microbatch: Microbatch) -> Tensor:
        """A meta tensor like this microbatch's hidden states, [B, S, H]."""
        width = self._model.config.get_text_config().hidden_size
        return torch.empty(*microbatch.ids.shape, width, dtype=self._dtype, device="meta")

    def spread(self, collected: list[tuple[Tensor, Tensor]], total: Tensor) -> Tensor:
        """Set `total` [V, H] to the embedding's gradient: each row the sum of its tokens' gradients, in the order of `collected`
        (see `embedded`) in fp32.

        Microbatch by microbatch: all at once would need three more tensors as large as the embedding.
        """
        total.zero_()
        for ids, gradient in collected:
            _add_rows(total, ids, gradient)
        return self.padded(total)

    def padded(self, total: Tensor) -> Tensor:
        """Zero the padding token's row of `total` [V, H], the embedding's gradient."""
        if self.embedding.padding_idx is not None:
            total[self.embedding.padding_idx].zero_()
        return total

    def _take_embedded(self) -> Callable[[Tensor, Tensor], None] | None:
        """Receives ids and gradients of embedded tokens; None leaves them to autograd."""
        if self.embedded_sum is not None:
            return partial(_add_rows, self.embedded_sum)
        collected = self.embedded
        return None if collected is None else lambda ids, gradient: collected.append((ids, gradient))

    def epilogue(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """The sum of the cross entropies over `count`, a scalar."""
        self._arguments.hand_on(())
        x = x if self._stream_head is None else getattr(self._base, self._stream_head)(x)
        hidden = self._scale(getattr(self._base, self._norm)(x))
        if self.head_sum is not None:
            rows, targets = hidden.reshape(-1, hidden.shape[-1]), microbatch.labels.reshape(-1)
            return linear_cross_entropy_into(rows, self.head.weight, targets, self.head_sum) / microbatch.count
        return head_loss(
            self.head.forward,
            hidden,
            microbatch.labels,
            shift_labels=microbatch.labels,
            num_items_in_batch=microbatch.count,
        )

    @property
    def head(self) -> Any:
        """The language-model head; None in a part without it."""
        return self._model.lm_head

    def _select(self, microbatch: Microbatch, dtype: torch.dtype) -> None:
        if microbatch.place is None:
            self._arguments.select(microbatch.ids, dtype)
        else:
            self._arguments.select_place(microbatch.place, microbatch.ids)


class _Embed(torch.autograd.Function):
    """Embeds tokens; its backward passes the gradient to `take`. `anchor` requires a gradient, so autograd calls it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embedding: Any, ids: Tensor, take: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.ids, ctx.take = ids, take
        return embedding.forward(ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.take(ctx.ids, grad)
        return None, None, None, None


def _add_rows(total: Tensor, ids: Tensor, gradient: Tensor) -> None:
    """Add gradient [B, S, H] to the rows of `total` [V, H] fp32 that ids [B, S] name."""
    add_token_rows(total, ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
