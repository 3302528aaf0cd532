"""A managed Hugging Face causal language model, cut into what an engine runs: prologue, layers, epilogue.

In: a `*ForCausalLM` under `forebay.manage` (fused loss, halves of its decoder layers). Out: a `CutModel`, whose parts are together
the model's forward and whose results are the same, bit for bit:

    prologue(microbatch) -> x            embedding; masks and rotary tables too, which the layers get from here
    layers[i].stage1(x), .experts(...)   a layer's stages, or the whole of a dense layer
    epilogue(x, microbatch) -> loss      final norm, head and loss

The model's own code makes the masks and tables: its base model runs once with stand-ins for its layers, which note what
they are given. So there is no modeling code here, and every family's peculiarities (sliding windows) are its own.

`CutModel` owns nothing but the keywords of the latest forward. One forward is under way at a time; backwards need none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forebay.loss import linear_cross_entropy_into
from forebay.models.causal_lm import head_loss
from forebay.models.halves import TwoHalves
from forebay.models.manage import Managed
from forebay.moe.dispatch.exchange import Exchange
from forebay.moe.layer import Front


@dataclass(frozen=True, eq=False)
class Microbatch:
    """ids, labels: [B, S] int64 on the device; labels are shifted already. count: what the sum of losses is divided by."""

    ids: Tensor
    labels: Tensor
    count: Tensor | int


class CutLayer:
    """One decoder layer.

    Attributes:
        exchange: how its tokens travel; None for a dense layer.
        experts: stage 3, see `forebay.moe.layer.MoeStages`; None for a dense layer.
    """

    def __init__(self, halves: TwoHalves, keywords: Callable[[], dict[str, Any]]):
        self._halves = halves
        self._keywords = keywords
        stages = halves.stages
        self.exchange: Exchange | None = stages.exchange if stages else None
        self.experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None = None
        if stages is not None:
            # Without the module's hooks: FSDP2's would take the end of this stage's backward for the end of the step's,
            # and reshard everything. Whoever runs a cut model has gathered its parameters.
            module: Any = halves.experts
            self.experts = lambda rows, ids, weights, max_rows: module.forward(rows, ids, weights, max_rows=max_rows)

    def stage1(self, x: Tensor) -> Front:
        """Attention, norm, router and shared experts; x is [B, S, H]."""
        assert self._halves.stages is not None, "a dense layer has no stages"
        front = self._halves.stages.front(self._halves.attend(x, **self._keywords()))
        self._halves.announce(front.logits.detach(), front.ids)
        return front

    def __call__(self, x: Tensor) -> Tensor:
        """The whole layer, [B, S, H] to the same, for one without stages."""
        return self._halves.mlp.call(self._halves.attend(x, **self._keywords()))[0]


class CutModel:
    """See the module docstring.

    Attributes:
        layers: in forward order.
        head_sum: if set, [V, H] fp32: the epilogue adds the head's weight gradient to it, before the division by a
            microbatch's count, and autograd gives the weight none; see `forebay.loss.linear_cross_entropy_into`.

    Raises:
        ValueError: the loss is not fused, or the model's layers are not all known.
    """

    def __init__(self, model: Any, memory: Managed):
        if "forward" not in vars(model.lm_head):
            raise ValueError("cutting a model needs the fused loss: forebay.manage(model, loss='fused')")
        base = getattr(model, model.base_model_prefix)
        found = memory.halves.layers
        if len(found) != len(base.layers):
            raise ValueError(f"{len(found)} of {len(base.layers)} decoder layers are known: nothing to cut")
        self.head_sum: Tensor | None = None
        self._model, self._base = model, base
        self._given: list[dict[str, Any]] = []
        self._stand_ins = nn.ModuleList(_StandIn(layer, self._note) for layer in base.layers)
        self.layers = [CutLayer(halves, self._keywords_of(i)) for i, halves in enumerate(found)]

    def prologue(self, microbatch: Microbatch) -> Tensor:
        """[B, S, H]: the embedded tokens."""
        self._given = []
        real = self._base.layers
        self._base.layers = self._stand_ins
        try:
            self._base(input_ids=microbatch.ids, use_cache=False)
        finally:
            self._base.layers = real
        return self._given[0].pop("hidden_states")

    def epilogue(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """The sum of the cross entropies over `count`, a scalar."""
        if self.head_sum is not None:
            hidden = self._base.norm(x)
            rows, targets = hidden.reshape(-1, hidden.shape[-1]), microbatch.labels.reshape(-1)
            return linear_cross_entropy_into(rows, self.head.weight, targets, self.head_sum) / microbatch.count
        return head_loss(
            self._model.lm_head,
            self._base.norm(x),
            microbatch.labels,
            shift_labels=microbatch.labels,
            num_items_in_batch=microbatch.count,
        )

    @property
    def head(self) -> Any:
        """The language-model head."""
        return self._model.lm_head

    def _note(self, hidden_states: Tensor, keywords: dict[str, Any]) -> None:
        first = {} if self._given else {"hidden_states": hidden_states}
        self._given.append({**keywords, **first})

    def _keywords_of(self, index: int) -> Callable[[], dict[str, Any]]:
        return lambda: self._given[index]


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
