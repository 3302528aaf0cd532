"""How many channels an NCCL communicator gets: its memory on the GPU, which no allocator of torch counts, grows with them.

On a host with NVLink NCCL gives each communicator 32 channels. Such a communicator takes 0.2 GiB, and 0.4 GiB more after its
first collective. A run with pipelines has up to seven, four of them for messages where ranks do not copy
(`forebay.pipeline.peer_links`), and most carry little. So each kind of group gets the channels that its messages need: what a
process holds outside of torch's allocator falls from 2.46 to 1.69 GiB with EP 2, and from 3.73 to 2.05 with PP 2 and messages
through NCCL. Messages of 16 MiB travel at 35 GB/s with 1 or 2 channels, 68 with 4, 131 with 8, 239 with 16 and 281 with 32
(`benchmarks/results/communicators.json`, NCCL 2.28).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

DEFAULT = 32
"""NCCL's own choice, for groups that carry weights, gradients or tokens."""
FEW = 4
"""For groups that agree on things: norms, losses, addresses."""
PIPELINE = 16
"""For hidden states and their gradients, between two ranks of a pipeline."""
SINGLE = 1
"""For groups of one process, which FSDP2 wants to have."""


def options(channels: int, backends: str, timeout: timedelta | None = None) -> Any:
    """`pg_options` of one process group with that many channels at most; None leaves the choice to the backend.

    Args:
        backends: as `torch.distributed.get_backend_config` names them; only NCCL has channels.
        timeout: of the group, the same as torch is given.
    """
    if channels == DEFAULT or "nccl" not in backends:
        return None
    chosen = dist.ProcessGroupNCCL.Options()
    chosen.config.max_ctas = channels
    if timeout is not None:
        chosen._timeout = timeout  # or torch warns that it overrides it
    return chosen
