"""Process groups of a run, and collective calls on them.

`Mesh` owns the process groups that a valid `Config` asks for until it is closed. `on_all` calls a function on all processes and
raises the first error in all of them. Methods that communicate are called by all processes in the same order, and do nothing
where there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forebay.config import Config, check_world
from forebay.config import Device as DeviceSection
from forebay.errors import ForebayError, RunError, UsageError
from forebay.train.world import ALONE, World

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Rank and size in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def on_all(call: Callable[[], T]) -> list[T]:
    """Call `call()` on all processes; returns the results (picklable) by rank. No process waits for one that failed.

    Raises:
        Exception: the error of the first rank that failed, on all processes. An OSError keeps its number and text.
    """
    rank, size = rank_and_size()
    if size == 1:
        return [call()]
    outcome: tuple[bool, Any]
    own: BaseException | None = None
    try:
        outcome = True, call()
    except Exception as error:
        own, outcome = error, (False, _picklable(error, rank))
    outcomes: list[Any] = [None] * size
    dist.all_gather_object(outcomes, outcome)
    for sender, (succeeded, value) in enumerate(outcomes):
        if not succeeded:
            raise value from (own if sender == rank else None)
    return [value for _, value in outcomes]


def on_main(call: Callable[[], T]) -> T:
    """Call `call()` on process 0 only; returns its result, or raises its error, on all."""
    rank, _ = rank_and_size()
    return on_all(lambda: call() if rank == 0 else None)[0]  # type: ignore[return-value]


def _picklable(error: Exception, rank: int) -> Exception:
    """The error in a form that can be pickled and, for an OSError, names its process."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error} (process {rank} on {os.uname().nodename})")
    return RunError(str(error))


class Mesh:
    """The processes of a run as a mesh: pipeline stages x processes that share the batch. A context manager; made by `open`.

    N processes hold the layers in `pp` groups of D = N / pp that share the batch, with expert groups of P = `ep`::

        rank = D * pp_rank + batch rank           neighbors share the batch: pipeline stages may be machines apart
        batch rank = P * row + column

        data  [D]                                 the layers of a stage are sharded over it; each has a part of the batch
        grid  [D / P, P], dims ("fsdp", "ep")     a row shares the experts of a layer (neighbors: the same machine);
                                                  a column holds the same experts, and shards their weights further
        pipeline  pp processes                    those of one batch rank, between which microbatches travel

    Without torchrun there is one process and no group, unless mixed precision needs one for FSDP2.

    Attributes:
        world: rank and size among all processes, and local rank.
        batch: rank and size among the processes that share the batch. Rank 0 exists once in each pipeline stage.
        pp, pp_rank: number of groups that hold different layers, and the group of this process.
        data: None without a process group.
        store: rendezvous store; None without a group, and if somebody else made the group.
        grid: None if `ep` is 1.
        pipeline: None if `pp` is 1.
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
            return  # this run has one process, though its process group may have more
        group = dist.group.WORLD
        ranks = torch.arange(world.size).view(pp, sharing)
        if pp > 1:
            group = _own_group(ranks, timeout)
            self.pipeline = _own_group(ranks.t(), timeout)
        assert group is not None
        self.data = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
        if ep > 1:
            self.grid = _grid(ranks.view(pp, -1, ep), self.pp_rank, device.type, timeout)

    @classmethod
    def open(cls, config: Config, world: World | None = None) -> Mesh:
        """Check `config` against the number of processes, and join them. An existing process group is used and not closed.

        Args:
            world: this process; None reads torchrun's environment.

        Raises:
            UsageError: the configuration does not fit the processes, or CUDA is requested and missing.
            RunError: the other processes do not answer within `parallel.timeout`.
        """
        world = World.of_environment() if world is None else world
        check_world(config, world.size)
        device = pick_device(config.device, world.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=config.parallel.timeout)
        starts = not dist.is_initialized() and (world.size > 1 or needs_group(config))
        store = _start_group(world, device, timeout) if starts else None
        return cls(world, device, config.parallel.pp, config.parallel.ep, timeout, owns=starts, store=store)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
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
        """The maximum of each value over all processes, exact to 53 bits. The host waits for the device."""
        if self.size == 1:
            return list(values)
        block = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(block, dist.ReduceOp.MAX)
        return block.tolist()

    def all(self, condition: bool) -> bool:
        """Whether the condition holds on all processes. The host waits for the device."""
        (failed,) = self.max(not condition)
        return not failed

    def on_main(self, call: Callable[[], T]) -> T:
        """Call `call()` on the main process only; returns its result (picklable), or raises its error, on all."""
        return call() if self.size == 1 else on_main(call)

    def first_to_fail(self) -> bool:
        """Whether this is the first process that calls this: the one that reports why the run failed. Does not wait."""
        if self.size == 1:
            return True
        if self.store is None:
            return self.world.is_main
        try:
            return self.store.add("forebay/failed", 1) == 1
        except RuntimeError:  # DistStoreError too: the process that held the store is gone, and cannot report anything
            return True

    def close(self, failed: bool = False) -> None:
        """Destroy the process group if it was made here. After a failure, do not wait for other processes."""
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
    """Whether even one process needs a group: FSDP2's mixed precision does."""
    return bool(config.model.compute) and config.model.compute != config.model.dtype


def pick_device(section: DeviceSection, local_rank: int = 0) -> torch.device:
    """The configured device. With several processes on a machine, process `local_rank` gets the GPU of that number.

    Raises:
        UsageError: CUDA is requested and torch sees no GPU, or fewer GPUs than processes.
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
    """Create the default process group; returns its store, which outlives a failure of the group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if world == ALONE:
        store: Any = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
        return store
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        groups = dist.PrefixStore("groups", store)
        dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    except (ValueError, RuntimeError) as error:  # DistError is a RuntimeError
        raise RunError(
            f"the {world.size} processes could not find each other within {timeout.seconds} s: {error}; "
            "start them all with torchrun"
        ) from error
    return store


def _own_group(ranks: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Create the process groups `ranks` [groups, members]; returns the one that this process is in."""
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    return own


def _grid(ranks: torch.Tensor, pp_rank: int, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh of the processes that share the batch, out of `ranks` [pp, rows, columns]."""
    # `init_device_mesh` would make the groups with a timeout of its own.
    column = _own_group(ranks.transpose(1, 2).flatten(0, 1), timeout)
    row = _own_group(ranks.flatten(0, 1), timeout)
    return DeviceMesh.from_group([column, row], device_type, mesh=ranks[pp_rank], mesh_dim_names=("fsdp", "ep"))
