"""Products of the experts on a Hopper GPU, by the optional package `quack-kernels` (`pip install "forebay[hopper]"`).

Its grouped GEMMs gather tokens while they load them, and apply the activation where a product leaves the registers: neither
gathered tokens nor the gradient of act are ever in memory. Input and output are those of `forebay.moe.experts_compute`, with one
difference: h and dh [R, 2I] alternate gate and up columns although the weights have two halves. All results are the same bits
every time, nothing waits for the device, and rows from offs[-1] on are neither read nor written.

`handles` says whether they can be used. Its first call in a process loads the kernels and runs each once. On a machine that has
not compiled them yet, it first compiles them in processes beside each other (4 to 10 s of a core each), and the package keeps the
result on disk. If that fails, it says why, once, and returns False for as long as the process lives.

    python -m forebay.kernels.hopper KERNEL      # compile one
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, next_power_of_2, on_16_bytes, use_triton

_VERSION = "0.3.11"
"""Also in pyproject.toml. The arguments of the package's GEMMs change between releases."""
_COMPILES_WITHIN = 600.0
"""Seconds for all kernels, on a machine with one busy core."""
_ARCHITECTURE: Mapping[str, str] = {"QUACK_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a"}
"""Environment of a process that compiles for a GPU it does not look at."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut into tiles. Two warp groups share a tile, or take turns at tiles of their own (`pingpong`)."""

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 2
    cluster_n: int = 1  # the kernels that gather need 1


# One choice for each kernel, the best on an H100 over Qwen3-30B-A3B, DeepSeek-V2-Lite and OLMoE at 16384 tokens, of 6 to 8 each.
# The mean of a kernel's time over the best of its shape: 1.02, 1.00, 1.01, 1.01 and 1.05.
GATED = Tiles(128, 256, False)
ACTIVATION = Tiles(128, 256, False)
INPUT = Tiles(128, 192, True)
GATE_UP_GRADIENT = Tiles(128, 256, False, cluster_m=1)
DOWN_GRADIENT = Tiles(128, 256, False)


def handles(gate_up: Tensor, down: Tensor) -> bool:
    """Whether these kernels are ready for experts of gate_up [E, 2I, H] and down [E, H, I], and for tokens of their dtype.

    Compiled code has the answer as a constant. While a CUDA graph is captured, kernels that were not loaded before are not ready.
    """
    index = gate_up.device.index
    if gate_up.device.type != "cuda" or index is None or not gate_up.dtype == down.dtype == torch.bfloat16:
        return False
    inner, hidden = gate_up.shape[1] // 2, gate_up.shape[2]
    # Rows are loaded in vectors of 16 bytes.
    fits = inner > 0 and hidden > 0 and inner % 8 == 0 and hidden % 8 == 0
    return fits and gate_up.is_contiguous() and down.is_contiguous() and _are_ready(index)


@torch.compiler.assume_constant_result
def _are_ready(index: int) -> bool:
    # The Triton kernel with which every use begins owns them, as it owns what Triton has compiled.
    owner = vars(_rows_kernel.fn)
    kernels: _Kernels = owner.get("hopper") or owner.setdefault("hopper", _Kernels())
    return kernels.are_ready(index)


def is_installed() -> bool:
    return importlib.util.find_spec("quack") is not None and importlib.util.find_spec("cutlass") is not None


class _Kernels:
    """What this process knows of the kernels on each device."""

    def __init__(self) -> None:
        self._ready: dict[int, bool] = {}
        self._lock = threading.Lock()

    def are_ready(self, index: int) -> bool:
        found = self._ready.get(index)
        if found is not None or torch.cuda.is_current_stream_capturing():
            return bool(found)
        with self._lock:
            if index not in self._ready:
                usable = torch.cuda.get_device_capability(index) == (9, 0) and is_installed()
                self._ready[index] = usable and self._prepare_in_a_thread(index)
            return self._ready[index]

    def _prepare_in_a_thread(self, index: int) -> bool:
        """A thread of its own has none of the caller's modes: fake tensors, autocast, a stream."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._prepare, index).result()

    def _prepare(self, index: int) -> bool:
        try:
            _check_version()
            _compile_all()
            with torch.cuda.device(index), torch.no_grad():
                for call in _tiny_calls("cuda").values():
                    call()
                torch.cuda.synchronize()
        except Exception as error:  # whatever is wrong with the package: training goes on without it
            _log.warning("the kernels for Hopper GPUs are not used, as %s: %s", type(error).__name__, error)
            return False
        return True


def _check_version() -> None:
    """RuntimeError unless the package is the release whose functions are called below, and can be imported."""
    found = importlib.metadata.version("quack-kernels")
    if found != _VERSION:
        raise RuntimeError(
            f"quack-kernels {found} is installed, and Forebay calls {_VERSION}: pip install 'forebay[hopper]'"
        )
    try:
        import quack.gemm  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"{error}; pip install 'forebay[hopper]' installs what is needed") from error


def _compile_all() -> None:
    """Compile what is not in the package's cache on disk, in a process for each kernel.

    Raises:
        RuntimeError: a process failed.
        subprocess.TimeoutExpired: a process took too long.
    """
    import fcntl

    from quack import cache_utils

    if not cache_utils.CACHE_ENABLED:
        return  # each kernel is compiled where it is called
    folder = Path(cache_utils.get_cache_path()) / cache_utils._compute_source_fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"forebay-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
    if done.exists():
        return
    # The processes of one machine start together: one of them compiles, and the others wait for it.
    with open(folder / "forebay.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _compile_in_processes(tuple(_tiny_calls("cpu")))
            done.touch()


def _compile_in_processes(kinds: tuple[str, ...]) -> None:
    # Warnings, because Python shows them without a configuration: the program stands still for seconds.
    _log.warning("compiling %d kernels for Hopper GPUs, once on this machine", len(kinds))
    started = time.monotonic()
    path = os.pathsep.join(folder for folder in (str(Path(__file__).parents[2]), *sys.path) if folder)
    environment = {**os.environ, **_ARCHITECTURE, "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "forebay.kernels.hopper", kind],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for kind in kinds
    ]  # fmt: skip
    try:
        for kind, process in zip(kinds, processes, strict=True):
            _, errors = process.communicate(timeout=max(1.0, started + _COMPILES_WITHIN - time.monotonic()))
            if process.returncode:
                last = errors.strip().splitlines()[-1:] or ["no message"]
                raise RuntimeError(f"{kind} does not compile: {last[0]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    _log.warning("compiled them in %.0f s", time.monotonic() - started)


class Rows(NamedTuple):
    """A routing as the kernels read it.

    tokens: [R] int32, the token of each row.
    bounds: [E + 1] int32, the first row of each expert, and the end.
    weights: [R] fp32, the routing weight of each row; empty if none were given.
    """

    tokens: Tensor
    bounds: Tensor
    weights: Tensor


@triton.jit
def _rows_kernel(
    order_ptr, offs_ptr, weights_ptr, tokens_ptr, bounds_ptr, row_weights_ptr,
    n_rows, n_experts, slots_per_token,
    HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n_rows
    slot = tl.load(order_ptr + rows, mask=mask, other=0)
    tl.store(tokens_ptr + rows, slot // slots_per_token, mask=mask)
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + slot, mask=mask, other=0.0)
        tl.store(row_weights_ptr + rows, weight.to(tl.float32), mask=mask)
    if tl.program_id(0) == 0:
        at = tl.arange(0, BOUNDS)
        end = tl.load(offs_ptr + at - 1, mask=(at > 0) & (at <= n_experts), other=0)
        tl.store(bounds_ptr + at, end, mask=at <= n_experts)


def rows_of(
    order: Tensor, offs: Tensor, slots_per_token: int, weights: Tensor | None = None, *, backend: Backend = "auto"
) -> Rows:
    """The rows of a routing (`forebay.moe.routing.route`), with the routing weights [T, K] of `weights`, if any."""
    n, experts = order.shape[0], offs.shape[0]
    if not use_triton(backend, order) or n == 0:
        bounds = torch.cat((offs.new_zeros(1), offs))
        flat = order.new_empty(0, dtype=torch.float32) if weights is None else weights.reshape(-1)[order.long()].float()
        return Rows(order // slots_per_token, bounds, flat)
    tokens, bounds = torch.empty_like(order), offs.new_empty(experts + 1)
    row_weights = torch.empty(0 if weights is None else n, dtype=torch.float32, device=order.device)
    # Trap: the GEMMs read `bounds` before they wait for the kernel in front of them. A plain kernel like this one ends first; one
    # that lets its successor start early (programmatic dependent launch) must not write them.
    launch(
        _rows_kernel, (cdiv(n, 1024),),
        order, offs, None if weights is None else weights.contiguous(), tokens, bounds, row_weights,
        n, experts, slots_per_token,
        HAS_WEIGHTS=weights is not None, BLOCK=1024, BOUNDS=next_power_of_2(experts + 1), num_warps=4,
    )  # fmt: skip
    return Rows(tokens, bounds, row_weights)


@triton.jit
def _slot_sums_kernel(partial_ptr, inverse_ptr, out_ptr, n_slots, width, BLOCK: tl.constexpr):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(inverse_ptr + slots, mask=slots < n_slots, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(width):
        total += tl.load(partial_ptr + row * width + i, mask=row >= 0, other=0.0)
    tl.store(out_ptr + slots, total, mask=slots < n_slots)


def slot_sums(partial: Tensor, inverse: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[T*K] fp32: the sum of each slot's row of partial [R, *] fp32; 0 for a slot without a row."""
    if not use_triton(backend, partial) or partial.shape[0] == 0:
        slots = inverse.reshape(-1)
        if partial.shape[0] == 0:
            return torch.zeros(slots.shape, dtype=torch.float32, device=inverse.device)
        return partial.sum(1)[slots.long().clamp(min=0)].masked_fill(slots < 0, 0.0)
    out = torch.empty(inverse.numel(), dtype=torch.float32, device=inverse.device)
    launch(
        _slot_sums_kernel, (cdiv(out.numel(), 512),),
        partial, inverse, out, out.numel(), partial.shape[1], BLOCK=512, num_warps=4,
    )  # fmt: skip
    return out


def gated_product(x: Tensor, rows: Rows, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(h [R, 2I] alternating, silu(gate) * up [R, I]) of h = gather(x) @ gate_up.T. The routing weights are not in them."""
    n, width = rows.tokens.shape[0], gate_up.shape[1]
    h, glu = x.new_empty((n, width)), x.new_empty((n, width // 2))
    if n == 0:
        return h, glu
    from quack.gemm_act import gemm_gated

    with torch.cuda.device_of(x):
        gemm_gated(
            on_16_bytes(x), on_16_bytes(gate_up), h, None, glu, None, "swiglu", *_cut(GATED),
            cu_seqlens_m=rows.bounds, A_idx=rows.tokens, concat_layout=("B",),
        )  # fmt: skip
    return h, glu


def activation_gradient(dy: Tensor, rows: Rows, down: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Write dh [R, 2I], alternating, over h, for da = gather(dy) @ down.

    The kernel has read a tile of h before it writes dh there, tiles do not overlap, and what it reads behind an expert's rows it
    does not use.

    Returns:
        act = w * silu(gate) * up [R, I], and partial sums [R, *] fp32 of the gradient of w (see `slot_sums`).
    """
    n, inner = h.shape[0], down.shape[2]
    act = h.new_empty((n, inner))
    partial = torch.empty((n, cdiv(inner, ACTIVATION.n)), dtype=torch.float32, device=h.device)
    if n == 0:
        return act, partial
    from quack.gemm_dact import gemm_dgated

    with torch.cuda.device_of(h):
        gemm_dgated(
            on_16_bytes(dy), on_16_bytes(down).mT, h, h, act, None, "swiglu", *_cut(ACTIVATION),
            colvec_scale=rows.weights, colvec_reduce=partial, cu_seqlens_m=rows.bounds, A_idx=rows.tokens,
        )  # fmt: skip
    return act, partial


def input_gradient(dh: Tensor, rows: Rows, gate_up: Tensor) -> Tensor:
    """[R, H]: dh @ gate_up of each row's expert, for dh [R, 2I] alternating."""
    out = dh.new_empty((dh.shape[0], gate_up.shape[2]))
    if out.shape[0] == 0:
        return out
    from quack.gemm import gemm

    with torch.cuda.device_of(dh):
        gemm(dh, on_16_bytes(gate_up).mT, out, None, None, *_cut(INPUT), cu_seqlens_m=rows.bounds, concat_layout=("B",))
    return out


def gate_up_gradient(x: Tensor, rows: Rows, dh: Tensor) -> Tensor:
    """[E, 2I, H]: dh.T @ gather(x) of each expert, for dh [R, 2I] alternating. An expert without rows gets zeros."""
    out = dh.new_empty((rows.bounds.shape[0] - 1, dh.shape[1], x.shape[1]))
    return _weight_gradient(x, rows, dh, out, out.mT, GATE_UP_GRADIENT, alternating=True)


def down_gradient(dy: Tensor, rows: Rows, act: Tensor) -> Tensor:
    """[E, H, I]: gather(dy).T @ act of each expert. An expert without rows gets zeros."""
    out = act.new_empty((rows.bounds.shape[0] - 1, dy.shape[1], act.shape[1]))
    return _weight_gradient(dy, rows, act, out, out, DOWN_GRADIENT, alternating=False)


def _weight_gradient(
    tokens: Tensor, rows: Rows, others: Tensor, out: Tensor, view: Tensor, tiles: Tiles, *, alternating: bool
) -> Tensor:
    """gather(tokens).T @ others of each expert to `view` [E, H, *] of `out`, which is returned."""
    if others.shape[0] == 0:
        return out.zero_()
    from quack.gemm import gemm

    with torch.cuda.device_of(others):
        gemm(
            on_16_bytes(tokens).t(), others.t(), view, None, None, *_cut(tiles), cu_seqlens_k=rows.bounds,
            A_idx=rows.tokens, concat_layout=("out",) if alternating else None,
        )  # fmt: skip
    return out


def _cut(tiles: Tiles) -> tuple[Any, ...]:
    return tiles.m, tiles.n, tiles.cluster_m, tiles.cluster_n, tiles.pingpong


def _tiny_calls(device: str) -> Mapping[str, Callable[[], Any]]:
    """A call of each kernel by name. None is compiled for certain sizes, so these stand for all."""
    tokens, hidden, inner, experts, n = 64, 256, 128, 4, 128

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=device)

    bounds = torch.arange(0, n + 1, n // experts, dtype=torch.int32, device=device)
    rows = Rows(
        torch.arange(n, dtype=torch.int32, device=device) // 2,
        bounds,
        torch.zeros(n, dtype=torch.float32, device=device),
    )
    x, gate_up, down = zeros(tokens, hidden), zeros(experts, 2 * inner, hidden), zeros(experts, hidden, inner)
    h, act = zeros(n, 2 * inner), zeros(n, inner)
    return {
        "gated_product": lambda: gated_product(x, rows, gate_up),
        "activation_gradient": lambda: activation_gradient(x, rows, down, h),
        "input_gradient": lambda: input_gradient(h, rows, gate_up),
        "gate_up_gradient": lambda: gate_up_gradient(x, rows, h),
        "down_gradient": lambda: down_gradient(x, rows, act),
    }


def main() -> None:
    """Compile one kernel into the package's cache."""
    os.environ.update(_ARCHITECTURE)
    from quack import cache_utils

    cache_utils.COMPILE_ONLY = True
    _tiny_calls("cpu")[sys.argv[1]]()


if __name__ == "__main__":
    main()
