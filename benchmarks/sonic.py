"""SonicMoE's experts (packages sonic-moe and quack-kernels), for the benchmarks that compare with them.

Tiles are the packages' default ones, because their search takes minutes a shape. The kernels of a first call take about 90 s
to compile; `compile_ahead` does it in processes beside the benchmark, and quack-kernels keeps the results on disk.

    python benchmarks/sonic.py T K H I E      # compile for this shape, time the first call
"""

import functools
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, int, int, int, int]
"""Tokens T, experts a token K, hidden H, width of an expert I, experts E."""


def is_installed() -> bool:
    return importlib.util.find_spec("sonicmoe") is not None and importlib.util.find_spec("quack") is not None


def compile_ahead(shapes: Iterable[Shape]) -> list[subprocess.Popen[bytes]]:
    """Start a process a shape that compiles what `experts` needs. Wait for them (`wait`) before the first call."""
    return [subprocess.Popen([sys.executable, __file__, *map(str, shape)]) for shape in shapes]


def wait(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> str:
    """Wait for them, and end those that take longer. Returns what went wrong, "" if nothing did."""
    until, problems = time.monotonic() + seconds, []
    for process in processes:
        try:
            if process.wait(max(0.0, until - time.monotonic())):
                problems.append(f"exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problems.append(f"not ready after {seconds:.0f} s")
    return "; ".join(problems)


def _load() -> tuple[Callable[..., Any], Any]:
    """SonicMoE's function and its activations, with default tiles."""
    import quack.gemm_interface as gemms
    import sonicmoe.functional
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import backward, forward, moe_general_routing_inputs

    for module in (sonicmoe.functional, forward, backward):
        for name in ("gemm", "gemm_gated", "gemm_dgated"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(getattr(gemms, name), tuned=False))
    return moe_general_routing_inputs, ActivationType


def install_in_transformers() -> None:
    """Give transformers the installed package for ``experts_implementation="sonicmoe"``; it would ask the hub for the kernel."""
    from transformers.integrations import sonicmoe

    function, activations = _load()
    sonicmoe._SONICMOE = sonicmoe.SonicMoE(activation_type_enum=activations, moe_general_routing_inputs=function)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Callable[[], Tensor]:
    """A call without arguments of SonicMoE's experts.

    Args:
        x: [T, H]; ids, weights: [T, K]; gate_up: [E, 2I, H]; down: [E, H, I]. The call returns [T, H].
    """
    function, activations = _load()
    tokens = torch.arange(len(x), device=x.device).unsqueeze(1).expand_as(ids).reshape(-1).int()
    flat = ids.reshape(-1).int()

    def call() -> Tensor:
        stacks = gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        return function(
            x, weights.reshape(-1), tokens, flat, *stacks, E=len(gate_up), stream_id=None,
            activation_type=activations.SWIGLU, is_inference_mode_enabled=False, concat_layout=True,
        )[0]  # fmt: skip

    return call


def inputs(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """x, ids, weights, gate_up and down with gradients, and the gradient of the output, all random."""
    tokens, k, hidden, inner, num = shape

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * scale

    x, ids = randn(tokens, hidden), torch.rand(tokens, num, device="cuda").topk(k).indices
    weights = torch.rand(tokens, k, device="cuda")
    given = [x, ids, weights, randn(num, 2 * inner, hidden, scale=0.02), randn(num, hidden, inner, scale=0.02)]
    return [t if t is ids else t.requires_grad_() for t in given], randn(tokens, hidden)


def main() -> None:
    started = time.perf_counter()
    shape: Any = tuple(map(int, sys.argv[1:6]))
    given, dy = inputs(shape)
    experts(*given)().backward(dy)
    torch.cuda.synchronize()
    print(f"SonicMoE's kernels for {shape}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
