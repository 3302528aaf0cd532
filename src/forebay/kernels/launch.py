"""Helpers of the kernels' wrappers: argument checks, the choice of backend, launches, tile widths.

The backend "auto" is Triton for tensors on a CUDA device and plain PyTorch elsewhere. Tests name "triton" for CPU tensors (with
TRITON_INTERPRET=1) or "reference" for CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.testing
from torch import Tensor
from triton.compiler import CompiledKernel

Backend = Literal["auto", "triton", "reference"]
_ACHIEVED = 0.86  # share of the memory's nominal bandwidth: 4.22 of 4.92 TB/s (H200, copies of 2 GiB)


def use_triton(backend: Backend, tensor: Tensor) -> bool:
    """Whether the Triton form handles `tensor`.

    Raises:
        ValueError: an unknown backend.
        TypeError: "triton" for fp64, which the kernels would compute in fp32.
    """
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"backend must be 'auto', 'triton' or 'reference', got {backend!r}")
    if tensor.dtype == torch.float64:
        if backend == "triton":
            raise TypeError("the Triton kernels compute in fp32: fp64 needs backend='reference'")
        return False
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


INDICES = (torch.int32, torch.int64)


def packed(
    name: str, tensor: Tensor, like: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype] = ()
) -> Tensor:
    """`tensor` or a contiguous copy of it, checked.

    Args:
        like: a tensor on the required device.
        shape: the required shape; None for any length.
        dtypes: the valid dtypes; empty for any floating dtype.

    Raises:
        ValueError: another shape or device.
        TypeError: another dtype.
    """
    if not _has_shape(tensor, shape):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(tensor.shape)}")
    if not (tensor.dtype in dtypes if dtypes else tensor.is_floating_point()):
        valid = " or ".join(str(dtype) for dtype in dtypes) or "floating point"
        raise TypeError(f"{name} must be {valid}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got a tensor on {tensor.device}")
    return tensor.contiguous()


def on_16_bytes(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, contiguous from a multiple of 16 bytes on, as vectors of that size are loaded from it."""
    tensor = tensor.contiguous()
    if tensor.shape[0] < 2:
        tensor = tensor.view(-1).view(tensor.shape)  # contiguous with any stride, which not all take
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _has_shape(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    sizes = tensor.shape
    if sizes == tuple(shape):
        return True  # the loop takes the host several times as long, and one in `all` twice as long as this one
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):  # noqa: SIM110
        if wanted is not None and wanted != size:
            return False
    return True


def check_written(name: str, tensor: Tensor) -> None:
    """Check a tensor that a kernel writes to.

    Raises:
        ValueError: its elements overlap, as in an expanded tensor.
    """
    reach = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and tensor.numel():
            if stride < reach:
                raise ValueError(
                    f"{name} is written to, but its rows overlap: strides {tensor.stride()}, {list(tensor.shape)}"
                )
            reach += stride * (n - 1)


_MOST_LAUNCHES = 1024  # of one kernel: exact sizes, which differ from call to call, would fill the memory


def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | int | float | None, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the device of the tensors, where Triton itself takes the current one.

    Triton finds out in every launch which compiled kernel it needs, which takes the host longer than the launch. So launches that
    are alike go to the kernel that was compiled for the first of them. They are if device, grid, dtypes, all numbers and
    constants are equal, and each tensor's address modulo 16 bytes: Triton compiles other code for addresses it can divide by 16.

    Args:
        args: the kernel's first parameters; at least one is a tensor, and all tensors are on one device. What the kernel has
            to know of their shapes and strides is among the numbers.
        constants: its other parameters by name, and Triton's options.
    """
    # The kernel owns them, as it owns what Triton has compiled.
    launches: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = vars(kernel.fn).setdefault("launches", {})
    values: list[Any] = []
    key: list[Any] = [grid, *constants, *constants.values()]
    tensor = None
    for arg in args:
        if arg is None or arg.__class__ is int:
            key.append(arg)
            values.append(arg)
        elif isinstance(arg, Tensor):
            tensor, address = arg, arg.data_ptr()
            key += arg.dtype, address % 16
            values.append(address)
        else:
            key += arg.__class__, arg  # 7 == 7.0 and 1 == True, but other code
            values.append(arg)
    assert tensor is not None
    device = tensor.get_device()
    like = (device, *key)
    with torch.cuda._DeviceGuard(device):
        found = launches.get(like)  # once: another thread may clear them
        if found is not None:
            run, others = found
            run(*values, *others)
            return
        others = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):  # None from Triton's interpreter
            if len(launches) >= _MOST_LAUNCHES:
                launches.clear()
            launches[like] = compiled[(*grid, 1, 1)], others


def memory_rate(device: torch.device) -> float:
    """Achievable memory bandwidth of a GPU, read and write together, in bytes/s; infinite if it is unknown, as on a CPU."""
    if device.type != "cuda":
        return float("inf")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _ACHIEVED * 1e9 * triton.testing.get_dram_gbps(index) or float("inf")


def cdiv(n: int, size: int) -> int:
    """Blocks of `size` that cover `n`. Triton's own function costs the host 5 microseconds a call."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()


def column_block(width: int, largest: int) -> int:
    """The largest power of two, up to `largest`, whose blocks cover `width` columns with at most an eighth idle; at least 16.

    With largest 512: 768 -> 256 (512 would idle a quarter), 1408 -> 512 (8 % idle), 2880 -> 512 (6 %).
    """
    block = min(largest, max(16, next_power_of_2(width)))
    while block > 64 and cdiv(width, block) * block - width > width // 8:
        block //= 2
    return block
