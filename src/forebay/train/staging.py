"""Copies of a training state in host memory: a checkpoint is written from them while training changes the state.

Input: dictionaries of tensors by name, of a few parts (model, optimizer, ...). Output: the same names with copies on the host.
Copies of CUDA tensors lie in page-locked memory, which `HostCopies` owns and uses again for the next copy: pinning takes 0.32 s
a GiB, copying 0.02 s. Copies of CPU tensors are ordinary memory, which is freed with them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forebay.memory.host_pool import HostBlock, HostPool
from forebay.memory.storage import local
from forebay.train.distributed import on_all

# Part of the available memory that copies may take: the system, data loading and the page cache need some too.
_SHARE = 0.9

State = Mapping[str, Mapping[str, Any]]
"""Tensors, DTensors and plain values by part and name."""


class HostCopies:
    """Page-locked memory for copies of a state, taken with the first copy and kept until `free`."""

    def __init__(self) -> None:
        self._pool = HostPool(pin=True)
        self._blocks: dict[str, HostBlock] = {}

    def copy(self, state: State) -> dict[str, dict[str, Any]] | None:
        """Copies of all tensors; the last copies are overwritten. The host waits for the device. Collective.

        Returns:
            None on all processes if one of them has no room for its copies; page-locked memory is free again then.
        """
        copied: dict[str, dict[str, Any]] = {}

        def copy_own() -> bool:
            try:
                copied.update(self._copy_all(state))
            except MemoryError:  # the limit on locked memory
                return False
            return True

        if _fits(self._missing_bytes(state)) and all(on_all(copy_own)):
            return copied
        self.free()
        return None

    def free(self) -> None:
        """Give page-locked memory back. Copies that are still held keep theirs."""
        self._blocks.clear()
        self._pool.close()

    def _missing_bytes(self, state: State) -> int:
        tensors = {f"{part}.{name}": local(value) for part, of in state.items() for name, value in of.items()}
        return sum(t.nbytes for name, t in tensors.items() if isinstance(t, torch.Tensor) and name not in self._blocks)

    @torch.no_grad()
    def _copy_all(self, state: State) -> dict[str, dict[str, Any]]:
        copied = {
            part: {name: self._copy(f"{part}.{name}", value) for name, value in of.items()}
            for part, of in state.items()
        }
        if self._blocks:
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            # The public constructor would move the copy to the mesh's device.
            return DTensor(self._copy(name, value.to_local()), value._spec, requires_grad=False)
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cuda" or value.numel() == 0:
            return value.detach().cpu().clone()
        block = self._blocks.get(name)
        if block is None or block.bytes_.numel() != value.nbytes:
            block = self._blocks[name] = self._pool.take(value.nbytes)
        copy = block.bytes_.view(value.dtype).view(value.shape)
        return copy.copy_(value, non_blocking=True)


def _fits(own: int) -> bool:
    """Whether the processes of each machine have room for their bytes. Memory that is not there ends a process, not a call."""
    needed: dict[str, int] = defaultdict(int)
    room: dict[str, list[int]] = defaultdict(list)
    for host, nbytes, available in on_all(lambda: (os.uname().nodename, own, available_bytes())):
        needed[host] += nbytes
        room[host].append(available)
    return all(needed[host] <= _SHARE * min(room[host]) for host in needed)


def available_bytes(root: Path = Path("/")) -> int:
    """Host memory that processes here can still take: of the machine, and of this container if it has a limit."""
    found = [_fields(root / "proc/meminfo")["MemAvailable"] << 10]
    group = root / "sys/fs/cgroup"
    for folder, limit, used in (
        (group, "memory.max", "memory.current"),
        (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such files, or the text "max"
            taken = int((folder / used).read_text()) - _cached_bytes(folder / "memory.stat")
            found.append(int((folder / limit).read_text()) - taken)
    return max(0, min(found))


def _cached_bytes(statistics: Path) -> int:
    """Bytes of a container that hold parts of files, such as of the last checkpoint: given back when memory is asked for."""
    fields = _fields(statistics)
    return fields.get("active_file", 0) + fields.get("inactive_file", 0)


def _fields(file: Path) -> dict[str, int]:
    """Numbers of a file with lines such as ``MemAvailable:  123 kB``."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
