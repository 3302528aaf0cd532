"""The arguments of decoder layers besides hidden states: masks, rotary tables, positions.

Input: a Hugging Face causal language model, or a part of one, and a microbatch's tokens. Output: for each layer what its model
would give it. The model's own code makes them: its base model runs with stand-ins for its layers, which record their arguments.
So no modeling code is repeated here, and details of a family such as sliding windows are its own. Where documents are joined,
they depend on the shape alone and are made once. Where documents are apart, each microbatch of a step has its own, and each
step writes them to the same memory, where a CUDA graph reads them. `LayerArguments` owns that memory, and what one layer hands to
the next besides hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from forebay.models.families import all_layers, final_norm, stream_head
from forebay.models.packing import documents_apart

_TOKENS = "input_ids"


@dataclass(frozen=True)
class _Passed:
    """Stands for what the layer before hands on: the `place`-th after its hidden states."""

    place: int


class LayerArguments:
    """The arguments of the layers of `model` that have these `numbers`.

    Args:
        passes: how many values each layer hands to the next one after its hidden states; see `forebay.models.structure.Halves`.
    """

    def __init__(self, model: Any, numbers: Sequence[int], passes: int = 0):
        self._model, self._numbers = model, numbers
        self._passed = [_Passed(place) for place in range(passes)]
        self._handed: Sequence[Any] = ()  # by the layer that ran last
        self._base = getattr(model, model.base_model_prefix)
        self._given: list[dict[str, Any]] = []
        # Only the shape and dtype go into masks and tables. transformers waits for the device to make them, so they are cached.
        self._by_shape: dict[tuple[torch.Size, torch.dtype], list[dict[str, Any]]] = {}
        self._by_place: dict[tuple[int, torch.Size], list[dict[str, Any]]] = {}
        self._norm, self._stream_head = final_norm(self._base), stream_head(self._base)
        self._factor, self.streams = 1.0, 0
        self._ids: Tensor | None = None

    def of(self, index: int) -> dict[str, Any]:
        """The keywords of a layer, by its index in `numbers`, for the selected tokens."""
        given = self._given[index]
        if not self._passed and _TOKENS not in given:
            return given
        handed = {k: self._handed[v.place] for k, v in given.items() if isinstance(v, _Passed)}
        tokens = {_TOKENS: self._ids} if _TOKENS in given else {}
        return {**given, **handed, **tokens}

    def hand_on(self, values: Sequence[Any]) -> None:
        """Keep what a layer returned after its hidden states, for the next one."""
        self._handed = values

    def entered(self, embedded: Tensor) -> Tensor:
        """The first layer's input: embedded tokens [B, S, H] times the factor that the family has before its first layer, such as
        Granite's; or a copy for each of its residual streams, [B, S, N, H]."""
        x = embedded if self._factor == 1 else embedded * self._factor
        return x.unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous() if self.streams else x

    def select(self, ids: Tensor, dtype: torch.dtype) -> None:
        """Select those for joined documents: ids [B, S], hidden states of `dtype`."""
        shape = ids.shape, dtype
        if shape not in self._by_shape:
            self._by_shape[shape] = self._made(ids, dtype, None)
        self._given, self._ids, self._handed = self._by_shape[shape], ids, ()

    def select_place(self, place: int, ids: Tensor) -> None:
        """Select those that `write` made last for the microbatch `place` of a step, whose tokens are ids [B, S]."""
        self._given, self._ids, self._handed = self._by_place[place, ids.shape], ids, ()

    def write(self, place: int, positions: Tensor, dtype: torch.dtype) -> None:
        """Make those of the microbatch `place` of a step. The host does not wait for the device, but for the first ones.

        Args:
            positions: [B, S] int64, which restart at 0 in each document.
            dtype: of hidden states.
        """
        held = self._by_place.get((place, positions.shape))
        made = self._made(positions, dtype, positions, checks=held is None)
        if held is None:
            own = {id(t): _bias(t, dtype).clone(memory_format=torch.contiguous_format) for t in _tensors(made)}
            self._by_place[place, positions.shape] = tree_map_only(Tensor, lambda t: own[id(t)], made)
            return
        # In place: a graph that was captured with these tensors reads them.
        for to, of in zip(_tensors(held), _tensors(made), strict=True):
            to.copy_(_bias(of, dtype))

    def _made(
        self, tokens: Tensor, dtype: torch.dtype, positions: Tensor | None, checks: bool = True
    ) -> list[dict[str, Any]]:
        """What the base model gives its layers.

        Args:
            tokens: [B, S] like the tokens.
            checks: find the factor of embedded tokens and the number of streams, and raise ValueError if the first layer's input
                is anything else. The host waits for the device.
        """
        size = *tokens.shape, self._model.config.get_text_config().hidden_size
        if not checks:
            return self._run(torch.zeros((), dtype=dtype, device=tokens.device).expand(size), positions)[1]
        # Random hidden states, because a part may have no embedding; from a generator of their own, to leave the run's alone.
        numbers = torch.Generator(tokens.device).manual_seed(0)
        x = torch.rand(size, dtype=dtype, device=tokens.device, generator=numbers)
        first, given = self._run(x, positions)
        self.streams = first.shape[2] if first.dim() > x.dim() else 0
        if not self.streams and not torch.equal(first, x):
            one = torch.ones(1, 1, size[-1], dtype=torch.float64, device=tokens.device)  # has every digit of the factor
            self._factor = float(self._run(one, None if positions is None else positions[:1, :1])[0][0, 0, 0])
        if not torch.equal(first, self.entered(x)):
            raise ValueError(f"{type(self._base).__name__} changes embedded tokens before its first layer")
        return given

    def _run(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, list[dict[str, Any]]]:
        """The first layer's input for embedded tokens x [B, S, H], and what the layers of these numbers are given beside it."""
        inputs: list[Tensor] = []
        given: list[dict[str, Any]] = []

        def note(hidden_states: Tensor, keywords: dict[str, Any]) -> None:
            inputs.append(hidden_states)
            given.append(keywords)

        last = [name for name in (self._norm, self._stream_head) if name is not None]
        held = {name: getattr(self._base, name) for name in ("layers", *last)}
        self._base.layers = nn.ModuleList(StandIn(layer, note, self._passed) for layer in all_layers(self._model))
        if positions is not None:
            for name in last:
                setattr(self._base, name, nn.Identity())  # their weights are sharded between steps
        # Replays of a graph need the same tensors in every step.
        try:
            with torch.no_grad(), nullcontext() if positions is None else documents_apart():
                self._base(inputs_embeds=x, position_ids=positions, use_cache=False)
        finally:
            for name, module in held.items():
                setattr(self._base, name, module)
        return inputs[0], [given[number] for number in self._numbers]


def _tensors(made: list[dict[str, Any]]) -> list[Tensor]:
    """The tensors in it, each once: layers share them."""
    return list({id(t): t for t in tree_leaves(made) if isinstance(t, Tensor)}.values())


def _bias(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, S, S] bool as what is added to scores; anything else as it is.

    torch's attention makes one of its own for each layer otherwise, and saves each for backward: 2 S^2 bytes a sequence in bf16.
    """
    if tensor.dtype != torch.bool or tensor.ndim != 4:
        return tensor
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device).masked_fill_(~tensor, float("-inf"))


class StandIn(nn.Module):
    """Takes a layer's place while the base model makes masks and tables; returns the hidden states unchanged.

    Args:
        note: is called with the hidden states and the other arguments.
        passed: returned after the hidden states.
    """

    def __init__(
        self,
        layer: nn.Module,
        note: Callable[[Tensor, dict[str, Any]], None] = lambda *_: None,
        passed: Sequence[Any] = (),
    ):
        super().__init__()
        # Not as module attributes: the layer must not become a child.
        self.__dict__.update(_layer=layer, _note=note, _passed=passed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        self.__dict__["_note"](hidden_states, keywords)
        passed = self.__dict__["_passed"]
        return (hidden_states, *passed) if passed else hidden_states
