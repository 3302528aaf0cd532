"""Rows in 8 bits an element: e4m3 numbers, and for each 32 neighbors of a row a power of two (as in MXFP8).

Input: rows [R, W] in bf16. Output: bytes [R, W + ceil(W / 32)], which the caller owns: a row's W numbers, then its
scales. A scale 2^(s - 127) is the byte s, the smallest with which the finite numbers of its group round to 416 at most. The two
codes above stand for what is not finite: 448 (0x7E, 0xFE) for infinity with its sign, 0x7F for NaN. Both come back as they were,
and leave their neighbors alone. With m the largest finite magnitude of its group, a finite x comes back with an error of at most

    max(|x| * 2^-4, m * 2^-17)

and finite. Numbers of four significant bits from m * 2^-13 on come back exactly, and so does the largest number of bf16. What
came back once comes back again unchanged. A number below 2^-126 may come back as zero.

Example, a row [1.1, -3.0, 500.0, -inf]: m = 500 >= 432, which would round to 448, so the scale is 2^1 = 2 (s = 128), the numbers
are 0.5625, -1.5, 256 and -448, and the row comes back as [1.125, -3.0, 512.0, -inf]. Encoding moves 3.03 bytes an element, and so
does decoding: for 65536 x 2048, 0.41 GB, 0.10 ms at 4 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, packed, use_triton

GROUP = 32
"""Elements of a row that share a scale."""
# A program's, on one warp. Swept on an H200 (16 to 256 groups, 1 to 8 warps): 0.031 ms to encode 16384 x 2048, 0.035 to decode
# them, floor 0.024. Rows of 2880, which begin at no multiple of 16 bytes: 0.22 and 0.18 ms for 65536, with 64 groups on four
# warps 0.32 and 0.24.
_GROUPS = 32
_ROUNDS_TO_448 = 0x58_0000  # mantissa of 432, and of 432 times any power of two, in fp32
_INFINITY = 0x7F80_0000  # in fp32; NaN is above
_MOST = torch.finfo(torch.bfloat16).max
_NATIVE_SINCE = (8, 9)  # compute capability from which GPUs convert to e4m3


@triton.jit
def finite_magnitude(x):
    """The bits of |x| as int32, which order as the magnitudes do; 0 where the fp32 number x is not finite."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(size < 0x7F800000, size, 0)


@triton.jit
def group_scale(largest):
    """The scales' bytes, from the largest `finite_magnitude` of each group."""
    # 432 is 1.6875 * 2^8.
    return tl.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) >= 0x580000).to(tl.int32), 1)


@triton.jit
def _one_over(scale):
    """1 / the scales, in fp32, of their bytes as int32."""
    return ((254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, scale, NATIVE: tl.constexpr):
    """The bytes, as int32, of fp32 numbers x divided by their scales (bytes as int32, of x's shape)."""
    x = x * _one_over(scale)
    if NATIVE:
        # The instruction makes 448 of an infinity, 0x7F of a NaN.
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        # To nearest, ties to even, in integers. Triton 3.6's interpreter rounds ties otherwise.
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7, not 127
        # Below 2^-6, numbers are multiples of 2^-9: what an fp32 number of 2^14 is rounded to.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size < 0x7F800000, code, tl.where(size == 0x7F800000, 0x7E, 0x7F))
        return code | ((bits >> 24) & 0x80)


@triton.jit
def pair_to_e4m3(low, high, scale, NATIVE: tl.constexpr):
    """Two results of `to_e4m3` with the same scale in one int16, that of `low` at the lower address."""
    if NATIVE:
        # Trap: two conversions whose bytes are put together. ptxas of CUDA 12.8 (Triton 3.6) makes one instruction of them for
        # sm_90, reads one of the two numbers again, and finds the stack pointer there. This instruction converts both.
        factor = _one_over(scale)
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low * factor, high * factor],
            dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (to_e4m3(low, scale, NATIVE) | (to_e4m3(high, scale, NATIVE) << 8)).to(tl.int16)


@triton.jit
def from_e4m3(number, scale):
    """The fp32 numbers of bytes and of their scales, both as int32 of one shape."""
    sign, code = (number & 0x80) << 24, number & 0x7F
    x = (sign | (code << 20)).to(tl.float32, bitcast=True)
    # 2^120: the exponent's bias is 7, not 127.
    x = x * 1329227995784915872903807060280344576.0 * (scale << 23).to(tl.float32, bitcast=True)
    x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)  # bf16 has no 2^128
    not_finite = sign | 0x7F800000 | ((code & 1) << 22)
    return tl.where(code < 0x7E, x, not_finite.to(tl.float32, bitcast=True))


@triton.jit
def _places(blocks, row_groups, width, row_bytes, GROUPS: tl.constexpr):
    """Offsets of this program's elements [GROUPS, 32] in the rows and in the compressed rows, and whether each exists; offsets of
    its scales [GROUPS], and whether each exists."""
    row = tl.program_id(0) // blocks  # one division a program: those of each group would take longer than the loads
    block = tl.program_id(0) - row * blocks
    groups = block.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    cols = (groups * 32)[:, None] + tl.arange(0, 32)[None, :]
    row = row.to(tl.int64)
    begin = row * row_bytes
    return row * width + cols, begin + cols, cols < width, begin + width + groups, groups < row_groups


@triton.jit
def _encode_kernel(x_ptr, out_ptr, blocks, row_groups, width, row_bytes, NATIVE: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS groups of a row, of `blocks` times as many."""
    at, out_at, inside, scales_at, exist = _places(blocks, row_groups, width, row_bytes, GROUPS)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scales = group_scale(tl.max(finite_magnitude(x), 1))
    tl.store(out_ptr + out_at, to_e4m3(x, scales[:, None], NATIVE).to(tl.uint8), mask=inside)
    tl.store(out_ptr + scales_at, scales.to(tl.uint8), mask=exist)


@triton.jit
def _decode_kernel(rows_ptr, out_ptr, blocks, row_groups, width, row_bytes, GROUPS: tl.constexpr):
    """GROUPS groups of a row, of `blocks` times as many."""
    at, rows_at, inside, scales_at, exist = _places(blocks, row_groups, width, row_bytes, GROUPS)
    numbers = tl.load(rows_ptr + rows_at, mask=inside, other=0).to(tl.int32)
    # Loaded as [GROUPS, 1], each thread would load a scale eight times.
    scales = tl.load(rows_ptr + scales_at, mask=exist, other=0).to(tl.int32)
    x = from_e4m3(numbers, scales[:, None])
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def encoded_width(width: int) -> int:
    """Bytes of an encoded row of `width` elements."""
    return width + -(-width // GROUP)


def converts_natively(device: torch.device) -> bool:
    """Whether the GPU has an instruction for `to_e4m3`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE_SINCE


def encode_rows(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[R, encoded_width(W)] uint8.

    Args:
        x: [R, W] bf16, any strides.

    Raises:
        ValueError: x of another number of dimensions. TypeError: of another dtype.
    """
    x = packed("x", x, x, [None, None], [torch.bfloat16])
    rows, width = x.shape
    out = torch.empty((rows, encoded_width(width)), dtype=torch.uint8, device=x.device)
    if out.numel() == 0:
        return out
    if not use_triton(backend, x):
        scale = _reference_scales(x)
        scaled = x.float() * _spread(_power_of_two(254 - scale), width)
        out[:, :width] = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        out[:, width:] = scale
        return out
    groups = out.shape[1] - width
    blocks = cdiv(groups, _GROUPS)
    launch(
        _encode_kernel, (rows * blocks,),
        x, out, blocks, groups, width, out.shape[1],
        NATIVE=converts_natively(x.device), GROUPS=_GROUPS, num_warps=1,
    )  # fmt: skip
    return out


def decode_rows(rows: Tensor, width: int, *, backend: Backend = "auto") -> Tensor:
    """[R, width] bf16: what `encode_rows` was given, in 4 significant bits.

    Args:
        rows: [R, encoded_width(width)] uint8, any strides.

    Raises:
        ValueError: rows of another width. TypeError: rows that are not uint8.
    """
    rows = packed("rows", rows, rows, [None, encoded_width(width)], [torch.uint8])
    out = torch.empty((rows.shape[0], width), dtype=torch.bfloat16, device=rows.device)
    if out.numel() == 0:
        return out
    if not use_triton(backend, rows):
        numbers = rows[:, :width].contiguous().view(torch.float8_e4m3fn).float()
        finite = (numbers * _spread(_power_of_two(rows[:, width:]), width)).clamp(-_MOST, _MOST)
        return out.copy_(torch.where(numbers.abs() == 448, numbers * torch.inf, finite))
    groups = rows.shape[1] - width
    blocks = cdiv(groups, _GROUPS)
    launch(
        _decode_kernel, (rows.shape[0] * blocks,),
        rows, out, blocks, groups, width, rows.shape[1], GROUPS=_GROUPS, num_warps=1,
    )  # fmt: skip
    return out


def _reference_scales(x: Tensor) -> Tensor:
    """The plain PyTorch form of `group_scale`: [R, ceil(W / 32)] int32."""
    rows, width = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -width % GROUP)).view(rows, -1, GROUP)
    bits = padded.contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = torch.where(bits < _INFINITY, bits, 0).amax(2)
    return ((largest >> 23) - 8 + ((largest & 0x7FFFFF) >= _ROUNDS_TO_448).int()).clamp(min=1)


def _power_of_two(biased: Tensor) -> Tensor:
    """2^(biased - 127) in fp32; 0 for 0."""
    return (biased.int() << 23).view(torch.float32)


def _spread(by_group: Tensor, width: int) -> Tensor:
    """[R, width]: each group's number for each of its elements."""
    return by_group.repeat_interleave(GROUP, 1)[:, :width]
