"""A managed Hugging Face causal language model, cut into what an engine runs: prologue, layers, epilogue.

In: a `*ForCausalLM` under `forebay.manage` (fused loss, halves of its decoder layers), or a part of one
(`forebay.models.families`). Out: a `CutModel`, whose parts are the model's forward and whose results are the same, bit for bit:

    prologue(microbatch) -> x            embedding; masks and rotary tables too, which the layers get from here
    layers[i].stage1(x), .experts(...)   a layer's stages, or the whole of a dense layer
    epilogue(x, microbatch) -> loss      final norm, head and loss

The model's own code makes the masks and tables: its base model runs once for each shape with stand-ins for its layers, which
note what they are given. So there is no modeling code here, and every family's peculiarities (sliding windows) are its own.

Modules are called around their hooks: FSDP2's would take the end of one's backward for the end of the step's, and reshard.

`CutModel` owns those masks and tables. One forward is under way at a time; backwards need none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forebay.managed import Managed
from forebay.memory.regions import is_managed
from forebay.models.blocks import SublayerForward
from forebay.models.families import all_layers
from forebay.models.fused_loss import head_loss, linear_cross_entropy_into
from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.dispatch_op import Front


def adds_at_once(tokens: int, vocabulary: int, width: int) -> bool:
    """Whether gradients of embedded tokens are added to the embedding's sum as they are made, and not when it is reduced: whether
    those of all `tokens` of a step, of `width` bytes an element, would take more than the sum, in fp32."""
    return tokens * width > 4 * vocabulary


@dataclass(frozen=True, eq=False)
class Microbatch:
    """ids, labels: [B, S] int64 on the device; labels are shifted already. count: what the sum of losses is divided by."""

    ids: Tensor
    labels: Tensor
    count: Tensor | int


class CutLayer:
    """One decoder layer.

    Attributes:
        dispatcher: how its tokens travel; None for a dense layer.
        experts: stage 3, see `forebay.moe.dispatch_op.MoeStages`, without the module's hooks; None for a dense layer.
        experts_module: whose parameters stage 3 uses.
        regions: paths of the regions that one forward of it calls, in order.
    """

    def __init__(self, sublayers: SublayerForward, keywords: Callable[[], dict[str, Any]]):
        self._sublayers = sublayers
        self._keywords = keywords
        self.experts_module: Any = sublayers.experts
        stages = sublayers.stages
        self.dispatcher: TokenDispatcher | None = stages.dispatcher if stages else None
        mlp = sublayers.mlp.path
        self.regions = (sublayers.attention.path, mlp) if stages is None else (sublayers.attention.path, mlp, mlp)
        # As it is now: the regions that management puts around it are there.
        self.experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None = sublayers.mlp.experts

    def stage1(self, x: Tensor) -> Front:
        """Attention, norm, router and shared experts; x is [B, S, H]."""
        assert self._sublayers.mlp.front is not None, "a dense layer has no stages"
        self._sublayers.check_block()
        front: Front = self._sublayers.mlp.front(self._sublayers.attend(x, **self._keywords()))
        self._sublayers.announce(front.logits.detach(), front.ids)
        return front

    def __call__(self, x: Tensor) -> Tensor:
        """The whole layer, [B, S, H] to the same, for one without stages."""
        return self._sublayers.mlp.call(self._sublayers.attend(x, **self._keywords()))[0]


class CutModel:
    """See the module docstring.

    The masks and tables of a shape are made once: nothing but the shape goes into them, and transformers waits for the device to
    find out.

    Args:
        dtype: of hidden states; needed where there is no embedding to tell.

    Attributes:
        layers: in forward order; of a part, those that it has.
        numbers: of these layers in the whole model.
        embedded: if set, gradients of embedded tokens are collected here as (ids [B, S], gradient [B, S, H]) and autograd gives
            the embedding's weight none; see `spread`.
        embedded_sum: if set, [V, H] fp32: they are added to it as they are made, with the same bits as `spread`; see `padded`.
        head_sum: if set, [V, H] fp32: the epilogue adds the head's weight gradient to it, before the division by a
            microbatch's count, and autograd gives the weight none; see `forebay.models.fused_loss.linear_cross_entropy_into`.

    Raises:
        ValueError: the loss is not fused, the model's layers are not all known, or a placement is for a whole layer, which is
            never called as one.
    """

    def __init__(self, model: Any, memory: Managed, dtype: torch.dtype | None = None):
        if model.lm_head is not None and not is_managed(model.lm_head):
            raise ValueError("cutting a model needs the fused loss: forebay.manage(model, loss='fused')")
        base = getattr(model, model.base_model_prefix)
        found = memory.sublayers.layers
        if len(found) != len(base.layers):
            raise ValueError(f"{len(found)} of {len(base.layers)} decoder layers are known: nothing to cut")
        for path, placement in memory.placements.items():
            if placement != "keep" and f"{path}.self_attn" in memory.sublayers:
                raise ValueError(
                    f"{placement!r} is asked for {path!r}, but the halves of a layer run by themselves here; "
                    f"name {path}.self_attn and {path}.mlp"
                )
        self.head_sum: Tensor | None = None
        self.embedded: list[tuple[Tensor, Tensor]] | None = None
        self.embedded_sum: Tensor | None = None
        self._model, self._base = model, base
        self._dtype = dtype
        # Asked of a whole model, not of a part: transformers has no answer for one that it took away.
        self._embedding = None if base.embed_tokens is None else base.get_input_embeddings()
        self.numbers = [int(name) for name, _ in base.layers.named_children()]
        self._given: list[dict[str, Any]] = []
        self._by_shape: dict[tuple[torch.Size, torch.dtype], list[dict[str, Any]]] = {}
        self.layers = [CutLayer(sublayers, self._keywords_of(i)) for i, sublayers in enumerate(found)]

    def prologue(self, microbatch: Microbatch) -> Tensor:
        """[B, S, H]: the embedded tokens."""
        take = self._take_embedded()
        if take is None:
            x = self.embedding.forward(microbatch.ids)
        else:
            anchor = torch.empty(0, device=microbatch.ids.device, requires_grad=True)
            x = _Embed.apply(anchor, self.embedding, microbatch.ids, take)
        self._choose(microbatch.ids, x.dtype)
        return x

    def enter(self, microbatch: Microbatch) -> None:
        """Before the layers of a part run forward: choose the masks and tables of this microbatch."""
        assert self._dtype is not None, "a part is told the dtype of hidden states"
        self._choose(microbatch.ids, self._dtype)

    def hidden(self, microbatch: Microbatch) -> Tensor:
        """On the meta device: a tensor of the shape and dtype of this microbatch's hidden states, [B, S, H]."""
        width = self._model.config.get_text_config().hidden_size
        return torch.empty(*microbatch.ids.shape, width, dtype=self._dtype, device="meta")

    def spread(self, collected: list[tuple[Tensor, Tensor]], total: Tensor) -> Tensor:
        """`total` [V, H], whatever it held: each row the sum of its tokens' gradients, in the order of `collected` (see
        `embedded`), in the dtype of `total`.

        One after the other: all of them at once would be three more tensors as large as the embedding.
        """
        total.zero_()
        for ids, gradient in collected:
            _add_rows(total, ids, gradient)
        return self.padded(total)

    def padded(self, total: Tensor) -> Tensor:
        """`total` [V, H], the embedding's gradient, of which a padding token gets none."""
        if self.embedding.padding_idx is not None:
            total[self.embedding.padding_idx] = 0
        return total

    def _take_embedded(self) -> Callable[[Tensor, Tensor], None] | None:
        """Where ids and gradients of embedded tokens go; None leaves them to autograd."""
        if self.embedded_sum is not None:
            return partial(_add_rows, self.embedded_sum)
        return None if self.embedded is None else partial(_collect, self.embedded)

    def epilogue(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """The sum of the cross entropies over `count`, a scalar."""
        hidden = self._base.norm(x)
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

    @property
    def embedding(self) -> Any:
        """The token embedding; None in a part without it."""
        return self._embedding

    def _choose(self, ids: Tensor, dtype: torch.dtype) -> None:
        shape = ids.shape, dtype
        if shape not in self._by_shape:
            self._by_shape[shape] = self._keywords_for(ids, dtype)
        self._given = self._by_shape[shape]

    def _keywords_for(self, ids: Tensor, dtype: torch.dtype) -> list[dict[str, Any]]:
        """What each layer is given besides hidden states, for tokens of this shape."""
        given: list[dict[str, Any]] = []
        width = self._model.config.get_text_config().hidden_size
        # Not the embedding's own: a part may have none.
        numbers = torch.Generator(ids.device).manual_seed(0)  # the run's own are left alone
        x = torch.rand(*ids.shape, width, dtype=dtype, device=ids.device, generator=numbers)

        def note(hidden_states: Tensor, keywords: dict[str, Any]) -> None:
            if not given and not torch.equal(hidden_states, x):
                raise ValueError(f"{type(self._base).__name__} does more to its tokens than to embed them")
            given.append(keywords)

        real = self._base.layers
        self._base.layers = nn.ModuleList(_StandIn(layer, note) for layer in all_layers(self._model))
        try:
            with torch.no_grad():
                self._base(inputs_embeds=x, use_cache=False)
        finally:
            self._base.layers = real
        return [given[number] for number in self.numbers]

    def _keywords_of(self, index: int) -> Callable[[], dict[str, Any]]:
        return lambda: self._given[index]


class _Embed(torch.autograd.Function):
    """Embeds tokens; backward only hands the gradient to `take`. `anchor` is what makes autograd call it."""

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


def _collect(collected: list[tuple[Tensor, Tensor]], ids: Tensor, gradient: Tensor) -> None:
    collected.append((ids, gradient))


def _add_rows(total: Tensor, ids: Tensor, gradient: Tensor) -> None:
    """Add gradient [B, S, H] to the rows of `total` [V, H] that ids [B, S] name, in its dtype.

    Not by index_add_, whose order on a GPU is another one each time. `unsafe` (the last argument): ids have been looked up, and
    asking for their range is two more passes.
    """
    rows = gradient.reshape(-1, gradient.shape[-1]).to(total.dtype)
    torch.ops.aten._index_put_impl_(total, [ids.reshape(-1)], rows, True, True)


class _StandIn(nn.Module):
    """Takes a layer's place while the base model makes masks and tables; hands the hidden states on as they are."""

    def __init__(self, layer: nn.Module, note: Callable[[Tensor, dict[str, Any]], None]):
        super().__init__()
        # Not as attributes of the module: the layer is not its child.
        self.__dict__["_layer"], self.__dict__["_note"] = layer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        self.__dict__["_note"](hidden_states, keywords)
        return hidden_states
