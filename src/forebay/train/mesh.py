"""The processes of a run as torchrun started them: their groups, how experts are laid over them, and what they tell each other.

In: a valid `Config` and this process's `World`. Out: a `Mesh`, which owns the process groups until it is closed.

N processes, expert groups of P = `parallel.ep`; rank = P * row + column:

    grid  [N / P, P], dims ("fsdp", "ep")     a row shares the experts of a layer (neighbours: the same machine);
                                              a column holds the same experts, and shards their weights further
    data  [N]                                 everything else is sharded over all, and each has its part of the batch

Without torchrun there is one process and no group, unless mixed precision asks for one (FSDP2 does that, and needs a group).

Every method that communicates must be called by all processes in the same order. Each does nothing where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forebay.train.config import Config, check_world
from forebay.train.config import Device as DeviceSection
from forebay.train.errors import RunError, UsageError
from forebay.train.together import on_main
from forebay.train.world import ALONE, World

T = TypeVar("T")


class Mesh:
    """Who this process is among the others. A context manager that closes itself. Made by `open`.

    Attributes:
        world: rank, size and local rank.
        device: this process's.
        ep: processes that share the experts of a layer.
        data: one-dimensional mesh over all processes; None without a process group.
        store: through which the processes found each other; None if the group is somebody else's, or there is none.
        grid: two-dimensional mesh ("fsdp", "ep") over all processes; None if `ep` is 1.
    """

    def __init__(self, world: World, device: torch.device, ep: int, timeout: timedelta, owns: bool, store: Any):
        self.world, self.device, self.ep = world, device, ep
        self._owns, self.store = owns, store
        self.data: DeviceMesh | None = None
        self.grid: DeviceMesh | None = None
        if not dist.is_initialized() or (world.size == 1 and dist.get_world_size() > 1):
            return  # alone, whatever other processes there are
        everyone = dist.group.WORLD
        assert everyone is not None
        self.data = DeviceMesh.from_group(everyone, device.type, mesh_dim_names=("data",))
        if ep > 1:
            self.grid = _grid(world.size, ep, device.type, timeout)

    @classmethod
    def open(cls, config: Config, world: World | None = None) -> Mesh:
        """Find the other processes, after a look whether `config` fits their number.

        Where a process group is there already it is used, and left to its owner.

        Args:
            world: this process; None is what torchrun says.

        Raises:
            UsageError: the configuration does not fit the processes, or CUDA is asked for and missing.
            RunError: the others do not answer within `parallel.timeout`.
        """
        world = World.of_environment() if world is None else world
        check_world(config, world.size)
        device = pick_device(config.device, world.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=config.parallel.timeout)
        if dist.is_initialized():
            return cls(world, device, config.parallel.ep, timeout, owns=False, store=None)
        if world.size == 1 and not needs_group(config):
            return cls(world, device, 1, timeout, owns=False, store=None)
        store = _start_group(world, device, timeout)
        return cls(world, device, config.parallel.ep, timeout, owns=True, store=store)

    @property
    def rank(self) -> int:
        """Of this process, among all."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The processes that share the experts of a layer; None if `ep` is 1."""
        return None if self.grid is None else self.grid.get_group("ep")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over processes, in place. The host does not wait."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, *values: float) -> list[float]:
        """The largest of each over processes, exact to 53 bits. Waits for the device."""
        if self.size == 1:
            return list(values)
        block = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(block, dist.ReduceOp.MAX)
        return block.tolist()

    def on_main(self, call: Callable[[], T]) -> T:
        """What `call()` returned on the main process (picklable), on every one; what it raised there is raised everywhere."""
        return call() if self.size == 1 else on_main(call)

    def speaks_first(self) -> bool:
        """Whether this process is the first one that asked: the one that says why the run failed. Never waits for others."""
        if self.size == 1:
            return True
        if self.store is None:
            return self.world.is_main
        try:
            return self.store.add("forebay/failed", 1) == 1
        except RuntimeError:  # DistStoreError too: the process that held the store is gone, and cannot say it
            return True

    def close(self, failed: bool = False) -> None:
        """Take the process group down if it was made here. After a failure nobody is waited for."""
        self.data = self.grid = None
        if not self._owns or not dist.is_initialized():
            return
        self._owns = False
        if failed and self.device.type == "cuda":
            dist.group.WORLD.abort()  # type: ignore[union-attr]  # or destroying would wait for work that never ends
        dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def needs_group(config: Config) -> bool:
    """Whether even one process needs a group: parameters are of another dtype than what is computed in."""
    return bool(config.model.compute) and config.model.compute != config.model.dtype


def pick_device(section: DeviceSection, local_rank: int = 0) -> torch.device:
    """The device that is asked for; process `local_rank` of a machine has the GPU of that number.

    Raises:
        UsageError: CUDA is asked for and torch sees none, or fewer GPUs than processes.
    """
    if section.type == "cpu" or (section.type == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = (
            f"is built for CUDA {torch.version.cuda} but sees no GPU" if torch.version.cuda else "is built without CUDA"
        )
        raise UsageError(
            f"device.type = 'cuda', but torch {torch.__version__} {built}; valid here are 'cpu' and 'auto'"
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"process {local_rank} of this machine has no GPU of its own: torch sees {count}; "
            f"start at most {count} with --nproc-per-node, or set device.type = 'cpu'"
        )
    return torch.device("cuda", local_rank if local_rank else torch.cuda.current_device())


def _start_group(world: World, device: torch.device, timeout: timedelta) -> Any:
    """The default process group; its store, which outlives a failure of the group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if world == ALONE:
        store: Any = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
        return store
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=bound,
        )
    except (ValueError, RuntimeError) as error:  # DistError is a RuntimeError
        raise RunError(
            f"the {world.size} processes could not find each other within {timeout.seconds} s: {error}; "
            "start them all with torchrun"
        ) from error
    return store


def _grid(size: int, ep: int, device_type: str, timeout: timedelta) -> DeviceMesh:
    """Groups made here and not by `init_device_mesh`, which would give them its own timeout."""
    ranks = torch.arange(size).view(-1, ep)
    columns, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist(), timeout=timeout)
    rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    return DeviceMesh.from_group([columns, rows], device_type, mesh=ranks, mesh_dim_names=("fsdp", "ep"))
