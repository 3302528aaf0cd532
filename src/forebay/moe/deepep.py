"""Token dispatcher on DeepEP's kernels, where the package `deep_ep` is installed: NVLink within a host, RDMA between hosts.

Input and output are those of `forebay.moe.dispatch.TokenDispatcher`. The code uses the interface of `deep_ep.Buffer` (DeepEP 1.2
and later; 2.x has it among its legacy interfaces) and has **not run on hardware**: the tests use a stand-in of that interface
over gloo. A `DeepEpDispatcher` owns a `Buffer` and its memory, and restores the settings that all buffers of a process share.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.moe.dispatch import Handle, TokenDispatcher, aligned, host_int

_NUM_SMS = 24  # multiprocessors for its kernels, as DeepEP's documentation has it for training
_RANKS_OF_A_HOST = 8  # DeepEP's own bound: more ranks are several hosts, which have other handles


class DeepEpDispatcher(TokenDispatcher):
    """Dispatch and combine by a `deep_ep.Buffer`.

        dispatch   Buffer.get_dispatch_layout, then Buffer.dispatch
        spread     Buffer.dispatch with the handle of the first
        collect    Buffer.combine, with narrow as its `topk_weights`

    The host waits for the counts once a layer, in dispatch; R is the exact number of rows. Within a host, rows are ordered and
    summed like those of `NcclDispatcher`, in fp32; between hosts DeepEP orders and rounds in its own way. Handle:

        counts [2] int64    on the CPU: rows and live slots received
        ...                 the tensors of DeepEP's handle, in its order; 6 within a host

    Its combine writes to the last tensor (queue heads of tokens that do not go to a rank), always the same values, so one
    handle serves combine and the gradient of dispatch.

    Args:
        group: the expert-parallel process group, one GPU for each rank. The constructor is collective.
        num_experts: E, a multiple of the group's size.
        hidden: H; a row must be a multiple of 16 bytes.
        dtype: of the rows; DeepEP's combine supports only bf16. Weights may be bf16, fp16 or fp32.

    Raises:
        ValueError: another dtype, rows of other sizes, a number of ranks for which DeepEP has no settings.
        RuntimeError: `deep_ep` is not installed, or has no `Buffer`.
        ImportError: `deep_ep` is broken; the message is its own.
        AssertionError: raised by DeepEP in an operation, if both deterministic algorithms and
            `torch.utils.deterministic.fill_uninitialized_memory` are on.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, hidden: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__(group.rank(), group.size(), num_experts)
        if dtype != torch.bfloat16:
            raise ValueError(f"the deepep dispatcher takes torch.bfloat16, not {dtype}; symmetric and nccl take others")
        if hidden < 1 or hidden % 8:
            raise ValueError(f"the deepep dispatcher takes rows of whole 16 bytes: hidden {hidden} is no multiple of 8")
        package = _package()
        self._hidden = hidden
        # int32 in some builds of DeepEP.
        self._id_dtype: torch.dtype = getattr(package, "topk_idx_t", torch.int64)
        self._settings = _settings(package.Buffer, self.size)
        row_bytes = hidden * dtype.itemsize
        self._buffer: Any = package.Buffer(
            group,
            max(s.get_nvl_buffer_size_hint(row_bytes, self.size) for s in self._settings),
            max(s.get_rdma_buffer_size_hint(row_bytes, self.size) for s in self._settings),
        )

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """ValueError for rows or weights that the dispatcher was not made for."""
        buffer = self._open()
        self._check_rows(x)
        if weights.dtype == torch.float64:
            raise ValueError(
                "the deepep dispatcher sends weights as fp32: they must be in bf16, fp16 or fp32, not fp64"
            )
        valid = (ids >= 0) & (ids < self.num_experts)
        ids = torch.where(valid, ids, -1).to(self._id_dtype).contiguous()
        to_rank, to_host, to_expert, goes, _ = buffer.get_dispatch_layout(ids, self.num_experts)
        rows, local_ids, row_weights, per_expert, handle, _ = buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_host,
            is_token_in_rank=goes,
            num_tokens_per_expert=to_expert,
            topk_idx=ids,
            topk_weights=weights.detach().float().contiguous(),
            config=self._settings[0],
        )
        # `per_expert` is a list: buffer.dispatch has waited for it.
        counts = torch.tensor([rows.shape[0], sum(per_expert)], device="cpu")
        return rows, local_ids.to(torch.int32), row_weights.to(weights.dtype), [counts, *handle]

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        buffer = self._open()
        self._check_rows(values)
        return buffer.dispatch(values.contiguous(), handle=tuple(handle[1:]), config=self._settings[0])[0]

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """An `init` that is not bf16 is added to the rounded sum."""
        buffer = self._open()
        self._check_rows(rows)
        # DeepEP adds `bias` first, in fp32.
        bias = init.contiguous() if init is not None and init.dtype == rows.dtype else None
        wide, thin, _ = buffer.combine(
            rows.contiguous(),
            tuple(handle[1:]),
            topk_weights=None if narrow is None else narrow.float().contiguous(),
            bias=bias,
            config=self._settings[1],
        )
        if init is not None and bias is None:
            wide = (init + wide.to(init.dtype)).to(rows.dtype)
        return wide, None if narrow is None else thin.to(narrow.dtype)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """The number of live slots, rounded up to `ALIGNMENT`."""
        return aligned(host_int(handle[0][1]))

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """RuntimeError for ranks of several hosts."""
        if self.size > _RANKS_OF_A_HOST:
            raise RuntimeError(
                f"the deepep dispatcher of {self.size} ranks cannot be traced, only run: several hosts have other handles"
            )
        received: Any = torch.library.get_ctx().new_dynamic_size()
        shapes = (
            (self.size, self.size),
            (self.size, _NUM_SMS // 2),
            (self.size, _NUM_SMS // 2),
            (received,),
            (tokens, self.size),
            (tokens, self.size),
        )
        handle = [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]
        handle[4] = handle[4].bool()
        return received, [torch.empty(2, dtype=torch.int64, device="cpu"), *handle]

    def close(self) -> None:
        """Free the buffer. Collective."""
        if self._buffer is not None:
            dist.barrier(self._buffer.group)
            self._buffer = None

    def _open(self) -> Any:
        if self._buffer is None:
            raise RuntimeError("this dispatcher is closed")
        return self._buffer

    def _check_rows(self, rows: Tensor) -> None:
        if rows.dtype != torch.bfloat16 or rows.shape[1] != self._hidden:
            raise ValueError(f"made for rows of {self._hidden} in torch.bfloat16, got {rows.shape[1]} in {rows.dtype}")


def _package() -> Any:
    try:
        package: Any = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise  # deep_ep is installed, and one of its own imports is missing
        raise RuntimeError(
            "the deepep dispatcher needs the package deep_ep, which is not installed; build it from "
            "https://github.com/deepseek-ai/DeepEP, or choose auto, nccl or symmetric"
        ) from error
    if getattr(package, "Buffer", None) is None:
        raise RuntimeError(
            f"deep_ep {getattr(package, '__version__', '')} has no Buffer; build it with its legacy interfaces, or choose "
            "auto, nccl or symmetric"
        )
    return package


def _settings(buffer: Any, ranks: int) -> tuple[Any, Any]:
    """DeepEP's settings for dispatch and combine; they read the number of multiprocessors from the class."""
    before = buffer.num_sms
    buffer.set_num_sms(_NUM_SMS)
    try:
        return buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks)
    except AssertionError as error:
        raise ValueError(f"deep_ep has no settings for {ranks} ranks ({error}); nccl and symmetric take any") from error
    finally:
        buffer.set_num_sms(before)
