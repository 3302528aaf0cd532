"""How many channels an NCCL communicator gets: its memory on the GPU, which no allocator of torch counts, grows with them.

By itself NCCL gives each communicator of a host with NVLink 32 channels. One takes 0.2 GiB then before its first message, and
0.4 GiB more with its first collective. A run with pipelines has seven of them, and most carry little. So each kind of group
gets the channels that its messages need: with two H200s this takes 1.69 GiB instead of 2.46 for expert parallelism, and 2.05
instead of 3.73 for a pipeline. Messages of 16 MiB travel at 35 GB/s with 1 or 2 channels, 68 with 4, 131 with 8, 243 with 16
and 286 with 32 (NCCL 2.28).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

DEFAULT = 32
"""What NCCL takes by itself. Groups over which weights, gradients or tokens travel stay so."""
FEW = 4
"""For groups that agree on things: norms, losses, addresses."""
PIPELINE = 16
"""For hidden states and their gradients between two ranks."""
SINGLE = 1
"""For groups of one process, which FSDP2 wants to have."""


def options(channels: int, backend: str, timeout: timedelta | None = None) -> Any:
    """`pg_options` of one process group with that many channels at most; None leaves the choice to the backend.

    Args:
        backend: as `torch.distributed` names it; only "nccl" has channels.
        timeout: of the group, the same as torch is given.
    """
    if channels == DEFAULT or backend != "nccl":
        return None
    chosen = dist.ProcessGroupNCCL.Options()
    chosen.config.max_ctas = channels
    if timeout is not None:
        chosen._timeout = timeout  # or torch warns that it overrides it
    return chosen
