"""Where the GPU's time of a step goes, and when it waits for the host: what a benchmark prints with ``--profile``."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

STEPS = 5


def print_profile(name: str, step: Callable[[], Any]) -> None:
    """Print kernels by GPU time, the GPU's gaps, and what may stop the host, of `STEPS` steps.

    Host steps as long as GPU steps mean that launching limits: many short gaps. A long gap is a wait; its line names the host's
    calls in it. Python's collections of garbage and the allocator's calls of the driver stop the host too.
    """
    pauses: list[float] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        pauses.append(-time.perf_counter() if phase == "start" else time.perf_counter())

    torch.cuda.synchronize()
    before, host = torch.cuda.memory_stats(), []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        gc.callbacks.append(collecting)  # here, because starting and reading a profile collect as well
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            host.append(round((time.perf_counter() - begin) * 1e3, 1))
        torch.cuda.synchronize()
        gc.callbacks.remove(collecting)
    print(
        f"{name}: host ms of each step {host}; {len(pauses) // 2} collections of garbage, {sum(pauses) * 1e3:.1f} ms in all"
    )
    after = torch.cuda.memory_stats()
    print(f"allocator: { {key: after[key] - before[key] for key in before if key.startswith('num_')} }")
    events = [e for e in profile.events() if not e.is_user_annotation]
    of_gpu = [e.device_type == torch.autograd.DeviceType.CUDA for e in events]
    print_gaps(
        [e for e, gpu in zip(events, of_gpu, strict=True) if not gpu],
        [e for e, gpu in zip(events, of_gpu, strict=True) if gpu],
    )
    for key in ("self_device_time_total", "self_cpu_time_total"):
        print(profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=80))


def print_gaps(host: list[Any], kernels: list[Any]) -> None:
    """Print the GPU's idle time and its ten longest gaps, with the host's calls that lie in them, longest first."""
    kernels = sorted(kernels, key=lambda e: e.time_range.start)
    first = end = kernels[0].time_range.start
    gaps = []
    for kernel in kernels:
        gaps.append((kernel.time_range.start - end, end, kernel.name))
        end = max(end, kernel.time_range.end)
    gaps = sorted((gap for gap in gaps if gap[0] > 0), reverse=True)
    idle, long = (sum(us for us, *_ in gaps if us > least) / 1e3 for least in (0, 20))
    print(f"GPU: {(end - first) / 1e3:.1f} ms, idle {idle:.1f}, of which in gaps over 20 us {long:.1f}")
    for us, start, name in gaps[:10]:
        inside = [e for e in host if start <= e.time_range.end and e.time_range.start <= start + us]
        inside = sorted(
            (e for e in inside if e.time_range.elapsed_us() < 2 * us), key=lambda e: -e.time_range.elapsed_us()
        )
        calls = list(dict.fromkeys(e.name for e in inside))[:5]
        print(f"  {us:.0f} us at {(start - first) / 1e3:.1f} ms, before {name[:60]}: {', '.join(calls)}")
