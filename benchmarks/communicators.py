"""What an NCCL communicator takes of a GPU's memory, and how fast it is, by its number of channels.

Two processes make communicators of a given number of channels at most, and use each: memory is what the device has in use
beside torch's allocator, more than before; rates are bytes that a rank gets from the other one over the median of the calls.
`forebay/communicators.py` has the numbers of channels that follow from it, `forebay/estimate/state.py` the bytes.

    torchrun --nproc-per-node 2 benchmarks/communicators.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import median_ms, outside, write

from forebay.communicators import DEFAULT, options

MIB = 2**20
MESSAGE, SHARD = 16 * MIB, 64 * MIB  # bytes


def outside_mib() -> float:
    """MiB of the device that are not torch's allocator's."""
    torch.cuda.synchronize()
    return outside() / MIB


def median_seconds(call: Callable[[], Any], calls: int = 20) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    return median_ms(call, calls)[0] / 1e3


def group_of_two(channels: int) -> Any:
    return dist.new_group([0, 1], pg_options=options(channels, "nccl"))


def messages(channels: int, device: torch.device, rank: int) -> dict[str, Any]:
    """A group for each direction, as a pipeline has them: what rank 0 sends on the first it gets back on the second."""
    before = outside_mib()
    there, back = (group_of_two(channels) for _ in range(2))
    made = outside_mib()
    sent, got = (torch.randn(MESSAGE // 2, device=device).bfloat16() for _ in range(2))

    def one() -> None:
        work: Any = dist.irecv(got, 0, group=there) if rank else dist.isend(sent, 1, group=there)
        work.wait()

    def both() -> None:
        works: list[Any]
        if rank:
            works = [dist.irecv(got, 0, group=there), dist.isend(sent, 0, group=back)]
        else:
            works = [dist.isend(sent, 1, group=there), dist.irecv(got, 1, group=back)]
        for work in works:
            work.wait()

    got.fill_(float("nan"))
    seconds = median_seconds(one)
    sends = outside_mib()
    both_seconds = median_seconds(both)
    receives = outside_mib()
    assert not got.isnan().any()
    dist.destroy_process_group(there)
    dist.destroy_process_group(back)
    return {
        "channels": "NCCL's" if channels == DEFAULT else channels,
        "use": "messages of 16 MiB",
        "MiB of a group": (made - before) / 2,
        "MiB to send": sends - made,
        "MiB to receive": receives - sends,
        "GB/s": MESSAGE / seconds / 1e9,
        "GB/s, both ways at once": MESSAGE / both_seconds / 1e9,
    }


def collectives(channels: int, device: torch.device) -> dict[str, Any]:
    before = outside_mib()
    group = group_of_two(channels)
    made = outside_mib()
    shard = torch.randn(SHARD // 2, device=device).bfloat16()
    whole = torch.full((SHARD,), float("nan"), device=device, dtype=torch.bfloat16)
    gather = median_seconds(lambda: dist.all_gather_into_tensor(whole, shard, group=group))
    assert not whole.isnan().any()
    scatter = median_seconds(lambda: dist.reduce_scatter_tensor(shard, whole, group=group))
    used = outside_mib()
    dist.destroy_process_group(group)
    return {
        "channels": "NCCL's" if channels == DEFAULT else channels,
        "use": "collectives of 64 MiB a rank",
        "MiB of a group": made - before,
        "MiB with its first collective": used - made,
        "GB/s, all-gather": SHARD / gather / 1e9,
        "GB/s, reduce-scatter": SHARD / scatter / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--name", default="communicators")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    context = outside_mib()
    dist.init_process_group("nccl", device_id=device)
    made = outside_mib()
    dist.all_reduce(torch.ones(8, device=device))
    first = outside_mib()
    alone = dist.new_group([rank], use_local_synchronization=True)
    rows: list[dict[str, Any]] = [
        {"channels": "NCCL's", "use": "none", "MiB before NCCL": context},
        {
            "channels": "NCCL's",
            "use": "the first",
            "MiB of a group": made - context,
            "MiB with its first collective": first - made,
        },
        {"channels": "NCCL's", "use": "one process", "MiB of a group": outside_mib() - first},
    ]
    dist.destroy_process_group(alone)
    for channels in [*args.channels, DEFAULT]:
        rows += [messages(channels, device, rank), collectives(channels, device)]
    if rank == 0:
        write(args.name, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
