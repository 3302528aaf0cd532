"""Process groups of a run, and collective calls on them.

`Mesh` owns the process groups that a valid `Config` asks for until it is closed. `on_all` calls a function on all processes and
raises the first error in all of them. Methods that communicate are called by all processes in the same order, and do nothing
where there is one process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forebay.communicators import DEFAULT, FEW, SINGLE, options
from forebay.config import Config, Parallel, check_world
from forebay.config import Device as DeviceSection
from forebay.errors import ForebayError, PeerLost, ReportedElsewhere, RunError, UsageError, first_line
from forebay.train.world import ALONE, World

T = TypeVar("T")
_ALL_FAILED = "forebay/all-failed"
# Keys that processes may differ in: what is where on a machine and how much it has, what only one process reads, and how data is
# named, as the tokens themselves are compared.
_OF_MACHINE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("path",),
        "data": ("source", "path", "field", "mixture", "tokenizer", "cache", "workers"),
        "memory": ("budget", "pages"),
        "log": ("folder", "tensorboard", "wandb", "prometheus", "progress"),
        "device": ("type", "threads"),
    }
)
_ASKING = 2.0  # seconds
# Seconds that communication may take to end after an error: less than others leave a process to report it (heartbeat.py).
_ABORTING = 2.0


def rank_and_size() -> tuple[int, int]:
    """Rank and size in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def on_all(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `call()` on all processes; returns the results (picklable) by rank. No process waits for one that failed.

    Args:
        group: carries the results; a group of all processes, such as one that only this thread uses.

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
    dist.all_gather_object(outcomes, outcome, group)
    for sender, (succeeded, value) in enumerate(outcomes):
        if not succeeded:
            raise value from (own if sender == rank else None)
    return [value for _, value in outcomes]


def on_main(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `call()` on process 0 only; returns its result, or raises its error, on all. `group`: as for `on_all`."""
    rank, _ = rank_and_size()
    return on_all(lambda: call() if rank == 0 else None, group)[0]  # type: ignore[return-value]


def _picklable(error: Exception, rank: int) -> Exception:
    """The error in a form that can be pickled and, for an OSError, names its process."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error} (process {rank} on {os.uname().nodename})")
    return RunError(str(error))


class Mesh:
    """The processes of a run as a mesh: replicas x pipeline stages x processes that share a stage. A context manager, made by
    `open`.

    N processes are R = `replicate` replicas of N / R. A replica holds the layers in `pp` groups of D = N / R / pp, with expert
    groups of P = `ep`::

        rank = N / R * replica + D * pp_rank + shard rank      replicas, then pipeline stages, may be machines apart
        shard rank = P * row + column
        batch rank = D * replica + shard rank                  each has a part of the batch

        data  [R, D], dims ("replicate", "shard")              layers of a stage: sharded inside a replica, the same across
        grid  [R, D / P, P], dims ("replicate", "fsdp", "ep")  a row shares the experts of a layer (neighbors: the same
                                                               machine); a column holds the same experts, sharded further
        pipeline  pp processes                                 of one batch rank, between which microbatches travel

    With one replica, both meshes lack the dimension "replicate". Without torchrun there is one process and no group, unless
    mixed precision needs one for FSDP2.

    Attributes:
        world: rank and size among all processes, and local rank.
        batch: rank and size among the processes that share the batch. Rank 0 exists once in each pipeline stage.
        replicate: number of replicas.
        pp, pp_rank: number of groups of a replica that hold different layers, and the group of this process.
        shards: D, the number of processes that the layers of a stage are sharded over.
        pipelines: the ranks of every pipeline, [R D, pp].
        data: None without a process group.
        store: rendezvous store; None without a group, and if somebody else made the group.
        grid: None if `ep` is 1.
        pipeline: None if `pp` is 1.
    """

    def __init__(self, world: World, device: torch.device, p: Parallel, timeout: timedelta, owns: bool, store: Any):
        self.world, self.device = world, device
        self.replicate, self.pp, self.ep = p.replicate, p.pp, p.ep
        self.shards = world.size // p.replicate // p.pp
        replica, within = divmod(world.rank, self.shards * p.pp)
        self.pp_rank, shard = divmod(within, self.shards)
        self.batch = World(self.shards * replica + shard, self.shards * p.replicate, world.local_rank)
        ranks = torch.arange(world.size).view(p.replicate, p.pp, self.shards)
        self.pipelines: list[list[int]] = ranks.transpose(1, 2).flatten(0, 1).tolist()
        self._owns, self.store = owns, store
        self.data: DeviceMesh | None = None
        self.grid: DeviceMesh | None = None
        self.pipeline: dist.ProcessGroup | None = None
        if not dist.is_initialized() or (world.size == 1 and dist.get_world_size() > 1):
            return  # this run has one process, though its process group may have more
        shared = dist.group.WORLD
        if p.pp * p.replicate > 1:
            shared = _own_group(ranks.flatten(0, 1).tolist(), timeout)
        if p.pp > 1:
            self.pipeline = _own_group(self.pipelines, timeout, FEW)
        across = _own_group(ranks.flatten(1).t().tolist(), timeout) if p.replicate > 1 else None
        stage = ranks[:, self.pp_rank]
        self.data = _mesh(stage, {"replicate": across, "shard": shared}, device.type)
        if p.ep > 1:
            rows = ranks.view(-1, self.shards // p.ep, p.ep)  # [R pp, D / P, P]
            column = _own_group(rows.transpose(1, 2).flatten(0, 1).tolist(), timeout)
            row = self._row_of_experts(rows.flatten(0, 1).tolist(), p.dispatch, timeout)
            groups = {"replicate": across, "fsdp": column, "ep": row}
            self.grid = _mesh(stage.reshape(p.replicate, -1, p.ep), groups, device.type)

    def _row_of_experts(self, rows: list[list[int]], dispatch: str, timeout: timedelta) -> dist.ProcessGroup:
        """The group of processes that share experts. Symmetric memory needs only addresses from it, the other dispatchers send
        tokens over it.

        Trap: where peers are reachable, "auto" takes "nccl" for rows whose bytes 16 does not divide, over these few channels.
        """
        if dispatch == "symmetric":
            return _own_group(rows, timeout, FEW)
        if dispatch == "auto" and "nccl" in dist.get_backend_config():
            from forebay.moe.backends import peers_are_reachable

            row = _own_group(rows, timeout, FEW)
            if self.all(peers_are_reachable(row)):
                return row
            dist.destroy_process_group(row)
        return _own_group(rows, timeout)

    @classmethod
    def open(cls, config: Config, world: World | None = None) -> Mesh:
        """Check `config` against the number of processes, and join them. An existing process group is used and not closed.

        Args:
            world: this process; None reads torchrun's environment.

        Raises:
            UsageError: the configuration does not fit the processes, CUDA is requested and missing, or there is no place to meet.
                Another process has another configuration: raised on process 0, and ReportedElsewhere on the others.
            PeerLost: the other processes do not answer. Torch may wait several times `parallel.timeout`.
        """
        world = World.of_environment() if world is None else world
        check_world(config, world.size)
        device = pick_device(config.device, world.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=config.parallel.timeout)
        starts = not dist.is_initialized() and (world.size > 1 or config.model.is_mixed)
        parts = config.parallel.pp * config.parallel.replicate  # then weights travel in other groups
        channels = SINGLE if world == ALONE else FEW if parts > 1 else DEFAULT
        try:
            store = _start_group(world, device, timeout, channels) if starts else None
            if starts and world.size > 1:
                _check_alike(config)  # before there are groups that the configuration asks for
            return cls(world, device, config.parallel, timeout, owns=starts, store=store)
        except RuntimeError as error:
            # No group could be made, or a collective failed (DistError too): `Heartbeat` does not watch yet.
            if not starts or world.size == 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            raise not_found(world, config.parallel.timeout, f": {first_line(error)}") from error

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

    @property
    def experts(self) -> DeviceMesh | None:
        """The processes that hold the same experts, as FSDP2 takes them; None if `ep` is 1."""
        if self.grid is None:
            return None
        return self.grid["replicate", "fsdp"] if self.replicate > 1 else self.grid["fsdp"]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes, in place. The host does not wait."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_batch(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes that share the batch and hold the same layers, in place. The host does not wait."""
        for dim in range(self.data.ndim if self.data is not None else 0):
            assert self.data is not None
            if self.data.size(dim) > 1:
                dist.all_reduce(values, group=self.data.get_group(dim))
        return values

    def max(self, *values: float) -> list[float]:
        """The maximum of each value over all processes, exact to 53 bits. The host waits for the device."""
        if self.size == 1:
            return list(values)
        block = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(block, dist.ReduceOp.MAX)
        return block.tolist()

    def gather(self, *values: float) -> list[list[float]]:
        """The values of each process, exact to 53 bits. The host waits for the device."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = own.new_empty(self.size, len(values))
        dist.all_gather(list(found.unbind()), own)
        return found.tolist()

    def of_pipeline(self, own: T) -> list[T]:
        """The objects of the ranks of this process's pipeline, in their order; only `own` without a pipeline."""
        if self.pipeline is None:
            return [own]
        found: list[Any] = [None] * self.pp
        dist.all_gather_object(found, own, group=self.pipeline)
        return found

    def all(self, condition: bool) -> bool:
        """Whether the condition holds on all processes. The host waits for the device."""
        (failed,) = self.max(not condition)
        return not failed

    def on_main(self, call: Callable[[], T]) -> T:
        """Call `call()` on the main process only; returns its result (picklable), or raises its error, on all."""
        return call() if self.size == 1 else on_main(call)

    def first_to_fail(self) -> bool:
        """Whether this is the first process that calls this: the one that reports why the run failed.

        Process 0 waits up to `_ASKING` seconds for the others to ask too: it may hold the store, which ends with it.
        """
        if self.size == 1:
            return True
        if self.store is None:
            return self.world.is_main
        try:
            before = self.store.add("forebay/failed", 1) - 1
            if before == self.size - 1:
                self.store.set(_ALL_FAILED, "")
            elif self.world.is_main:
                with suppress(RuntimeError):  # some go on, hang or died
                    self.store.wait([_ALL_FAILED], timedelta(seconds=_ASKING))
            return before == 0
        except RuntimeError:  # DistStoreError too: the process that held the store is gone, and cannot report anything
            return True

    def close(self, failed: bool = False) -> None:
        """Destroy the process group if it was made here. After a failure, do not wait for other processes."""
        self.data = self.grid = self.pipeline = None
        if not self._owns or not dist.is_initialized():
            return
        self._owns = False
        if not failed or self.device.type != "cuda":
            return dist.destroy_process_group()
        # Destroying a group waits for a stream that may wait for another process, which waits for this one: the error has to be
        # reported before the others end this process. What is left ends with it.
        ending = threading.Thread(target=_abort_all, daemon=True)
        ending.start()
        ending.join(_ABORTING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)


def _abort_all() -> None:
    group: Any = dist.group.WORLD
    group.abort()  # or destroying would wait for work that never ends
    dist.destroy_process_group()


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


def _start_group(world: World, device: torch.device, timeout: timedelta, channels: int) -> Any:
    """Create the default process group with at most `channels`; returns its store, which outlives a failure of the group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    limited = options(channels, backend, timeout)
    if world == ALONE:
        store: Any = dist.HashStore()
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound, pg_options=limited
        )
        return store
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        groups = dist.PrefixStore("groups", store)
        dist.init_process_group(
            backend, store=groups, rank=rank, world_size=size, timeout=timeout, device_id=bound, pg_options=limited
        )
    except ValueError as error:
        raise UsageError(
            f"{first_line(error)}; MASTER_ADDR and MASTER_PORT say where processes meet; torchrun sets both"
        ) from error
    except RuntimeError as error:  # DistError too
        if "EADDRINUSE" not in str(error):
            raise
        raise UsageError(
            f"another process of this machine listens at port {os.environ['MASTER_PORT']}, where the processes were to meet; "
            "choose another with torchrun's --master-port or --rdzv-endpoint"
        ) from error
    return store


def _check_alike(config: Config) -> None:
    """Raise an error on all processes if one was started with another configuration.

    Its part of a sum would be of another run, or the others would wait for it in vain.
    """
    own = {
        f"{section}.{name}": value
        for section, keys in config.to_dict().items()
        for name, value in keys.items()
        if name not in _OF_MACHINE.get(section, ())
    }
    first, *others = on_all(lambda: own)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                if dist.get_rank():
                    raise ReportedElsewhere(UsageError.exit_code)
                raise UsageError(
                    f"process {rank} was started with {name} = {other.get(name)!r}, and process 0 with {value!r}; "
                    "start all processes with the same configuration"
                )


def not_found(world: World, seconds: float, why: str = "") -> PeerLost:
    """The error of a process that waited so long for the others at the start."""
    return PeerLost(
        f"the {world.size} processes could not find each other within {seconds:.0f} s{why}; one of them died at the start, or "
        "was never started: start them all with torchrun"
    )


def _own_group(ranks: list[list[int]], timeout: timedelta, channels: int = DEFAULT) -> dist.ProcessGroup:
    """Create the process groups `ranks` [groups, members]; returns the one that this process is in."""
    limited = options(SINGLE if len(ranks[0]) == 1 else channels, dist.get_backend_config(), timeout)
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, pg_options=limited)
    return own


def _mesh(ranks: torch.Tensor, groups: Mapping[str, dist.ProcessGroup | None], device_type: str) -> DeviceMesh:
    """The mesh of `ranks`, with a dimension for each of `groups`; one without a group has size 1 and is left out.

    `init_device_mesh` would make the groups with a timeout of its own.
    """
    found = {name: group for name, group in groups.items() if group is not None}
    held = ranks.view(ranks.shape[-len(found) :]).contiguous()
    return DeviceMesh.from_group(list(found.values()), device_type, mesh=held, mesh_dim_names=tuple(found))
