"""The processes of a run as torchrun started them: their groups, how layers and experts are laid over them, and what they tell
each other.

In: a valid `Config` and this process's `World`. Out: a `Mesh`, which owns the process groups until it is closed.

N processes hold the layers in `parallel.pp` groups of D = N / pp that share the batch, with expert groups of P = `parallel.ep`:

    rank = D * pp_rank + batch rank           neighbours share the batch: the stages of a pipeline may be machines apart
    batch rank = P * row + column

    data  [D]                                 the layers of a group are sharded over it, and each has its part of the batch
    grid  [D / P, P], dims ("fsdp", "ep")     a row shares the experts of a layer (neighbours: the same machine);
                                              a column holds the same experts, and shards their weights further
    pipeline  pp processes                    those of one batch rank: microbatches travel between them

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
        world: rank and size among all processes, and local rank.
        batch: the same among those that share the batch; its rank 0 is there once for each of the `pp` groups.
        device: this process's.
        ep: processes that share the experts of a layer.
        pp, pp_rank: groups of processes that hold different layers, and which of them this process is in.
        data: one-dimensional mesh over those that share the batch; None without a process group.
        store: through which the processes found each other; None if the group is somebody else's, or there is none.
        grid: two-dimensional mesh ("fsdp", "ep") over those that share the batch; None if `ep` is 1.
        pipeline: the processes that the layers of this one's microbatches are on; None if `pp` is 1.
    """

    def __init__(
        self, world: World, device: torch.device, pp: int, ep: int, timeout: timedelta, owns: bool, store: Any
    ):
        self.world, self.device, self.pp, self.ep = world, device, pp, ep
        sharing = world.size // pp
        self.batch = World(world.rank % sharing, sharing, world.local_rank)
        self.pp_rank = world.rank // sharing
        self._owns, self.store = owns, store
        self.data: DeviceMesh | None = None
        self.grid: DeviceMesh | None = None
        self.pipeline: dist.ProcessGroup | None = None
        if not dist.is_initialized() or (world.size == 1 and dist.get_world_size() > 1):
            return  # alone, whatever other processes there are
        group = dist.group.WORLD
        ranks = torch.arange(world.size).view(pp, sharing)
        if pp > 1:
            group = _own_of(ranks, timeout)
            self.pipeline = _own_of(ranks.t(), timeout)
        assert group is not None
        self.data = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
        if ep > 1:
            self.grid = _grid(ranks.view(pp, -1, ep), self.pp_rank, device.type, timeout)

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
            return cls(world, device, config.parallel.pp, config.parallel.ep, timeout, owns=False, store=None)
        if world.size == 1 and not needs_group(config):
            return cls(world, device, 1, 1, timeout, owns=False, store=None)
        store = _start_group(world, device, timeout)
        return cls(world, device, config.parallel.pp, config.parallel.ep, timeout, owns=True, store=store)

    @property
    def rank(self) -> int:
        """Of this process, among all: `batch.rank` is that among those that share the batch."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of all processes: `batch.size` is that of those that share the batch."""
        return self.world.size

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The processes that share the experts of a layer; None if `ep` is 1."""
        return None if self.grid is None else self.grid.get_group("ep")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes, in place. The host does not wait."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_batch(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes that share the batch and hold the same layers, in place. The host does not wait."""
        if self.batch.size > 1:
            assert self.data is not None
            dist.all_reduce(values, group=self.data.get_group())
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
        self.data = self.grid = self.pipeline = None
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


def _own_of(ranks: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Of groups [groups, members], all of which are made, this process's."""
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    return own


def _grid(ranks: torch.Tensor, pp_rank: int, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The grid of those that share the batch, of `ranks` [pp, rows, columns].

    Groups are made here and not by `init_device_mesh`, which would give them its own timeout.
    """
    column = _own_of(ranks.transpose(1, 2).flatten(0, 1), timeout)
    row = _own_of(ranks.flatten(0, 1), timeout)
    return DeviceMesh.from_group([column, row], device_type, mesh=ranks[pp_rank], mesh_dim_names=("fsdp", "ep"))
