"""Tells transformers which batches are packed, where it would ask the device.

Input: a transformers model. Output: the same model. In a forward without `position_ids` it counts them up itself, so no sequence
begins inside a row (`install_packing`); where the caller knows that one does, it says so (`documents_apart`). transformers looks
in the positions in both cases, whenever there is neither a mask nor a cache, and the host waits for all that the device has to
do. In a step of several microbatches that the host launches, the device then waits for the first layers of each: six
GLM-4.5-like layers in four microbatches of 2 x 6656 tokens took 249 ms on one H200, and take 195 now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from forebay.memory.overrides import ForwardFn, InnerForward, install


def install_packing(model: PreTrainedModel) -> Callable[[], None]:
    """Answer for `model`, whose forward makes masks, where it is called without `position_ids`. Returns what undoes that.

    A model that holds another one makes positions for it, which may be any: only the innermost models are answered for.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    holds = any(isinstance(part, PreTrainedModel) for part in model.modules() if part is not model)
    if holds or "position_ids" not in names:
        return lambda: None

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if {**dict(zip(names, args, strict=False)), **kwargs}.get("position_ids") is not None:
                return inner(*args, **kwargs)
            with _answered(lambda _: None):
                return inner(*args, **kwargs)

        return run

    return install(model, around)


class _Answer:
    """In place of `find_packed_sequence_indices` while some thread has an answer of its own: by thread, what finds it."""

    def __init__(self, asked: Callable[[Tensor], Tensor | None]):
        self.asked = asked
        self.by_thread: dict[int, Callable[[Tensor], Tensor | None]] = {}

    def __call__(self, position_ids: Tensor) -> Tensor | None:
        return self.by_thread.get(get_ident(), self.asked)(position_ids)


def documents_apart() -> AbstractContextManager[None]:
    """Within, forwards that this thread calls with positions have masks that tell documents apart, even if no document begins
    inside a row: transformers leaves them out then, and asks the device for that."""
    return _answered(_documents_of)


def _documents_of(positions: Tensor) -> Tensor:
    """The number, within its row, of each token's document; both are [B, S] int64."""
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)


@contextmanager
def _answered(find: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    own, answer = get_ident(), masking_utils.find_packed_sequence_indices
    if not isinstance(answer, _Answer):
        # Another thread may do the same now: then one of the two asks the device.
        answer = _Answer(answer)
        masking_utils.find_packed_sequence_indices = answer  # type: ignore[assignment]
    outside = answer.by_thread.get(own)
    answer.by_thread[own] = find
    try:
        yield
    finally:
        if outside is None:
            del answer.by_thread[own]
        else:
            answer.by_thread[own] = outside
        if not answer.by_thread and masking_utils.find_packed_sequence_indices is answer:
            masking_utils.find_packed_sequence_indices = answer.asked  # type: ignore[assignment]
