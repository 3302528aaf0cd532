"""Tells transformers which batches are not packed, where it would ask the device.

Input: a transformers model. Output: the same model, which in a forward without `position_ids` counts them up itself, so no
sequence begins inside a row. transformers looks for one in them all the same, whenever there is neither a mask nor a cache, and
the host waits for all that the device has to do. In a step of several microbatches that the host launches, the device then waits
for the first layers of each: six GLM-4.5-like layers in four microbatches of 2 x 6656 tokens took 249 ms (one H200), and now 195.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    position = names.index("position_ids")

    def around(inner: InnerForward) -> ForwardFn:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("position_ids") is not None or any(a is not None for a in args[position : position + 1]):
                return inner(*args, **kwargs)
            with _unpacked():
                return inner(*args, **kwargs)

        return run

    return install(model, around)


class _Answer:
    """In place of `find_packed_sequence_indices` while some thread is in such a forward: there, no sequence begins inside."""

    def __init__(self, asked: Callable[[Tensor], Tensor | None]):
        self.asked = asked
        self.threads: set[int] = set()

    def __call__(self, position_ids: Tensor) -> Tensor | None:
        return None if get_ident() in self.threads else self.asked(position_ids)


@contextmanager
def _unpacked() -> Iterator[None]:
    own, answer = get_ident(), masking_utils.find_packed_sequence_indices
    if not isinstance(answer, _Answer):
        # Another thread may do the same now: then one of the two asks the device.
        answer = _Answer(answer)
        masking_utils.find_packed_sequence_indices = answer  # type: ignore[assignment]
    again = own in answer.threads
    answer.threads.add(own)
    try:
        yield
    finally:
        if not again:
            answer.threads.discard(own)
        if not answer.threads and masking_utils.find_packed_sequence_indices is answer:
            masking_utils.find_packed_sequence_indices = answer.asked  # type: ignore[assignment]
