"""Settings of torch's CUDA allocator during a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def expandable_segments(wanted: bool, device: torch.device) -> Iterator[None]:
    """Context in which torch's CUDA allocator extends its segments instead of allocating new ones, if `wanted`.

    Free pieces of many segments rarely fit the next request; those of one that grows are neighbors. 48 drawn runs reserve
    4 % less, up to 22, by their plans (benchmarks/LOG.md). Nothing happens on a CPU, or if `PYTORCH_ALLOC_CONF` chooses
    segments or another allocator. One at a time: afterwards segments do not grow, as by default, and what is cached is released.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not wanted or device.type != "cuda" or "expandable_segments" in given or "backend" in given:
        yield
        return
    _set(given, True)
    try:
        yield
    finally:
        _set(given, False)
    torch.cuda.empty_cache()  # free parts of segments that grew would serve nobody; it waits for the device: not after an error


def _set(given: str, expandable: bool) -> None:
    # Trap: torch resets some of the settings that a call does not name (AcceleratorAllocatorConfig::parseArgs), so the given ones
    # come along.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (given, f"expandable_segments:{expandable}"))))
