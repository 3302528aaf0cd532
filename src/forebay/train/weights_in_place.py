"""Uses weights that no other process shares where they are stored: FSDP2's gathered weight is a view of the shard's memory.

Input: FSDP2's records (`FSDPParam`) of weights that no other process of the replica has a part of: experts under expert
parallelism, or all weights of one process. A weight in the compute dtype is the gathered weight itself. A large weight in fp32 is
split (`forebay.kernels.split_weights`): the first half of its memory is the weight rounded to bf16, the second half what rounding
took. So there is no copy in bf16, of 2 bytes a weight, and nothing is cast for a step; an update reads and writes the parts
(`forebay.kernels.split_adamw`). Between `lend` and `take_back` the shards of split weights hold no fp32 numbers. `WeightsInPlace`
owns the bits that rounding needs besides, an eighth of a byte a weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forebay.kernels.split_weights import BITS, join, split
from forebay.memory.storage import local
from forebay.train.fsdp_records import precision_of

LARGE = 1 << 23
"""Elements of the smallest weight that is split: an update launches a kernel for each."""
PIECE = 1 << 24
"""Elements that are split or joined at a time, outside of steps."""


class SplitWeight:
    """The memory of a weight of N elements in fp32, whole or split.

    Args:
        whole: [N] fp32, contiguous; N is a multiple of 16.

    Attributes:
        high: [N] bf16, the weight as it is computed with, while it is split.
    """

    def __init__(self, whole: Tensor):
        n = whole.numel()
        self._whole = whole
        self.high, self._low = whole.view(torch.bfloat16)[:n], whole.view(torch.int16)[n:]
        self._ties = torch.empty(n // BITS, dtype=torch.uint8, device=whole.device)

    def split(self) -> None:
        """Split the whole weight, in its memory, a quarter as much, and a piece.

        Raises:
            torch.OutOfMemoryError: nothing was changed.
        """
        half, piece, waiting = self._room()
        # What `high` and `low` of a piece overwrite was read: first the second half, whose `high` waits, then the first.
        for part in reversed(_parts(half, 2 * half)):
            self._split_part(part, waiting[part.start - half : part.stop - half], piece)
        for part in _parts(0, half):
            self._split_part(part, self.high[part], piece)
        self.high[half:].copy_(waiting)

    def join(self) -> None:
        """The inverse of `split`, with the same errors."""
        half, piece, waiting = self._room()
        waiting.copy_(self.high[half:])
        for part in reversed(_parts(0, half)):
            self._join_part(part, self.high[part], piece)
        for part in _parts(half, 2 * half):
            self._join_part(part, waiting[part.start - half : part.stop - half], piece)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """High, low and ties of the split weight."""
        return self.high, self._low, self._ties

    def _room(self) -> tuple[int, Tensor, Tensor]:
        """Half the number of elements, room for a piece in fp32, and for half of `high`: all memory that is needed, before
        anything changes, because a weight that is half split is lost."""
        half = self._whole.numel() // 2
        return half, self._whole.new_empty(min(PIECE, half)), self.high.new_empty(half)

    def _split_part(self, part: slice, high: Tensor, piece: Tensor) -> None:
        piece = piece[: high.numel()].copy_(self._whole[part])
        split(piece, high, self._low[part], self._ties_of(part))

    def _join_part(self, part: slice, high: Tensor, piece: Tensor) -> None:
        piece = piece[: high.numel()]
        join(high, self._low[part], self._ties_of(part), piece)
        self._whole[part].copy_(piece)

    def _ties_of(self, part: slice) -> Tensor:
        return self._ties[part.start // BITS : part.stop // BITS]


class WeightsInPlace:
    """Lends the memory of shards to the gathered weights of the same records.

    Args:
        groups: FSDP2's, of which it takes the records that `may_lend` allows.
    """

    def __init__(self, groups: Iterable[Any]):
        self._allowed = {id(r) for group in groups for r in group.fsdp_params if may_lend(r, group)}
        self._lent: dict[int, tuple[Any, list[Tensor], Tensor]] = {}  # by shard: the record, and what FSDP2 gathers to
        self._split: dict[int, SplitWeight] = {}  # by shard

    def has_all(self, group: Any) -> bool:
        """Whether all weights of a group can be lent: it has nothing to gather."""
        return all(id(record) in self._allowed for record in group.fsdp_params)

    def is_lent(self, record: Any) -> bool:
        """Whether a gathered weight is in the memory of its shard now."""
        return id(record.sharded_param) in self._lent

    def __bool__(self) -> bool:
        """Whether any weight is lent."""
        return bool(self._lent)

    @torch.no_grad()
    def lend(self, records: Iterable[Any]) -> None:
        """Split what is to be split among `records`, which were gathered before, and let gathered weights be views of shards.

        Raises:
            torch.OutOfMemoryError: those that were not reached are not lent.
        """
        for record in records:
            if id(record) not in self._allowed or self.is_lent(record):
                continue
            # A graph keeps gathered weights. These are kept anyway, and FSDP2's own memory is free until `take_back`.
            vars(record).pop("free_unsharded_param", None)
            record.free_unsharded_param()
            gathered, memory = local(record.unsharded_param).detach(), record._sharded_param_data
            if memory.dtype != gathered.dtype:
                memory = self._split_of(record.sharded_param, memory)
            self._lent[id(record.sharded_param)] = record, record.all_gather_outputs, gathered
            record.all_gather_outputs = []  # FSDP2 allocates and frees nothing
            _point(record.unsharded_param, memory.view(gathered.shape))

    @torch.no_grad()
    def take_back(self) -> None:
        """Join all split weights, and let FSDP2 gather to memory of its own again. Does nothing if nothing is lent. All modules
        are sharded: what FSDP2 gathered to is freed.

        Raises:
            torch.OutOfMemoryError: some weights are still lent.
        """
        for shard, (record, outputs, gathered) in list(self._lent.items()):
            if (weight := self._split.get(shard)) is not None:
                weight.join()
            del self._lent[shard]  # one by one: a weight that is joined twice is lost
            record.all_gather_outputs = outputs
            _point(record.unsharded_param, gathered)

    def close(self) -> None:
        """Take all weights back, and free what is held beside them."""
        self.take_back()
        self._split = {}

    def of(self, shard: Tensor) -> SplitWeight | None:
        """The memory of a shard whose weight is split now."""
        return self._split.get(id(shard)) if id(shard) in self._lent else None

    def _split_of(self, shard: Tensor, memory: Tensor) -> Tensor:
        """Split a weight, and return what is computed with."""
        weight = self._split.get(id(shard))
        # Kept until the end: made again, its bits might come from the memory of a CUDA graph, and a replay would overwrite them.
        if weight is None or weight.high.data_ptr() != memory.data_ptr():
            weight = self._split[id(shard)] = SplitWeight(memory)
        weight.split()
        return weight.high


def may_lend(record: Any, group: Any) -> bool:
    """Whether a gathered weight of an FSDP2 group can be in the memory of its shard."""
    shard = record.sharded_param
    computes = precision_of(record, group).param_dtype or shard.dtype
    return group.mesh_info.shard_mesh_size == 1 and (
        computes == shard.dtype or is_split(prod(local(shard).shape), shard.dtype, computes)
    )


def is_split(elements: int, dtype: torch.dtype, computes: torch.dtype) -> bool:
    """Whether a weight of `elements` of `dtype`, whole on a process that computes in another one, is split."""
    return (dtype, computes) == (torch.float32, torch.bfloat16) and elements >= LARGE and elements % (2 * BITS) == 0


def _parts(start: int, end: int) -> list[slice]:
    """Pieces of at most `PIECE` elements, in order. Their bounds are multiples of 8 from `start` on."""
    return [slice(at, min(at + PIECE, end)) for at in range(start, end, PIECE)]


def _point(parameter: Tensor, memory: Tensor) -> None:
    """Let a gathered parameter be `memory`, of the same shape and dtype."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = memory
    else:
        parameter.data = memory
