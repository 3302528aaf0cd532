"""What a recomputation has to find as its forward found it: weights and buffers.

In: a region's forward and the modules that it calls. Out: `Repeatable.begin`, whose `Repetition.run` is called once in forward
and again in backward. A checkpoint saves neither weights nor buffers, so autograd does not see that the rerun reads others.
Weights that were written to or replaced since are an error, and so are buffers that the forward only reads, such as a router's
bias. Buffers that the forward itself writes, such as running statistics, are put back for the rerun, and have their present
values after it.

A `Repeatable` belongs to a region; a `Repetition` to one call, and the graph owns it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter

Key = tuple[int, str]  # of a module among `nn.Module.modules`, and a buffer's name


class Repeatable:
    """A region's forward that runs again.

    Args:
        reads: the modules whose weights and buffers `forward` reads, as they are when it is called.
    """

    def __init__(self, forward: Callable[..., Any], reads: Callable[[], Sequence[nn.Module]]):
        self.forward, self.reads = forward, reads
        self.written: set[Key] | None = None  # buffers that the forward writes; None before it has run once

    def begin(self) -> "Repetition":
        """Before a forward."""
        return Repetition(self)


class Repetition:
    """One forward and its reruns."""

    def __init__(self, whole: Repeatable):
        self._whole = whole
        self._regions = whole.reads()
        modules = [m for region in self._regions for m in region.modules()]
        self._weights = [(m, name, w) for m in modules for name, w in m._parameters.items() if w is not None]
        self._buffers = {(i, n): b for i, m in enumerate(modules) for n, b in m._buffers.items() if b is not None}
        # The first forward shows which ones are written: until then all are copied.
        known = whole.written
        self._copies = {key: b.clone() for key, b in self._buffers.items() if known is None or key in known}
        self._before = [b._version for b in self._buffers.values()]
        self._ran = False
        self._versions = self._now()  # a forward may run a backward within

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, and in backward its rerun.

        Raises:
            RuntimeError: in the rerun, weights or buffers that are not those of the forward.
        """
        if not self._ran:
            self._ran = True
            return self._whole.forward(*args, **kwargs)
        self._check()
        present = {key: self._buffers[key].clone() for key in self._copies}
        self._put(self._copies)
        try:
            return self._whole.forward(*args, **kwargs)
        finally:
            self._put(present)
            self._versions = self._now()  # adapters may write to weights in a forward

    def forward_over(self) -> None:
        """After the forward."""
        pairs = zip(self._buffers.items(), self._before, strict=True)
        written = {key for (key, buffer), version in pairs if buffer._version != version}
        if self._whole.written is None:
            # Trap: batch norm writes its statistics and raises no version. Values are compared once, which waits for the device.
            written |= {key for key, copy in self._copies.items() if not torch.equal(copy, self._buffers[key])}
        self._whole.written = written | (self._whole.written or set())
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._whole.written}
        self._versions = self._now()

    @property
    def _name(self) -> str:
        return " and ".join(type(region).__name__ for region in self._regions)

    def _now(self) -> list[int]:
        tensors = [*(w for _, _, w in self._weights), *self._buffers.values()]
        return [t._version for t in tensors]

    @torch.no_grad()
    def _put(self, values: dict[Key, Tensor]) -> None:
        for key, value in values.items():
            with _unsafe_preserve_version_counter(self._buffers[key]):
                self._buffers[key].copy_(value)

    def _check(self) -> None:
        now = self._now()
        for (owner, name, weight), then, version in zip(self._weights, self._versions, now, strict=False):
            # Trap: PEFT's target_parameters write frozen weights' own values to them in each forward.
            if version != then and weight.requires_grad:
                self._raise_written(type(owner).__name__, name, version, then)
            # FSDP puts gathered weights in the place of sharded ones and back, with the same values.
            if owner._parameters.get(name) is not weight and not getattr(owner, "_is_fsdp_managed_module", False):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__}, which a recomputed {self._name} reads, was "
                    "another one in its forward (torch.func.functional_call puts weights in a model for the time of its forward "
                    "only): run backward while they are there, or choose another placement than 'recompute'"
                )
        written, count = self._whole.written, len(self._weights)
        if written is None:
            return  # a backward within the first forward: it is not known yet what that writes
        for key, then, version in zip(self._buffers, self._versions[count:], now[count:], strict=True):
            if version != then and key not in written:
                self._raise_written("buffer", key[1], version, then)

    def _raise_written(self, owner: str, name: str, version: int, then: int) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} ({owner}), "
            f"which a recomputed {self._name} reads, is at version {version}; expected version {then} "
            "instead. Change weights and buffers (optimizer.step(), a router's bias) after backward"
        )
