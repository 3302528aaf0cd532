"""The processes of a run: who this one is, their groups, and what they tell each other.

`World` is this process's rank, read from torchrun's environment. `Mesh` owns the process groups of a valid `Config`
until it is closed. `together` runs a callable on all processes and raises the first error in all of them. `Heartbeat`
owns a thread that notices a dead process, so that the others end with its name. Methods that communicate are called
by all processes in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forebay.config import Config, check_world
from forebay.config import Device as DeviceSection
from forebay.errors import ForebayError, RunError, UsageError, first_line

# Which part of the work this process does.
#
# In: the environment that torchrun sets for each of its processes. Out: a small frozen object that the data and the trainer
# ask instead of assuming that they are alone. Knows nothing of torch, so that a wrong configuration is refused before it is
# imported; the process groups are `forebay.train.distributed`'s.


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes, all of which take a part of each batch; `local_rank` counts those of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on the one process that prints, writes metrics and exports."""
        return self.rank == 0

    @staticmethod
    def of_environment(environment: Mapping[str, str] | None = None) -> World:
        """This process as torchrun numbered it (RANK, WORLD_SIZE, LOCAL_RANK); alone if it did not.

        Raises:
            UsageError: only some of the three are set, or not to numbers.
        """
        given = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not any(name in given for name in names):
            return ALONE
        try:
            rank, size, local_rank = (int(given[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{', '.join(names)} must all be set to whole numbers, as torchrun does, or none of them: {error}"
            ) from error
        return World(rank, size, local_rank)


ALONE = World()
"""One process."""


# Work that all processes do and whose failure in one is everyone's failure, at the same place and with the same message.
#
# In: a callable. Out: what it returned in each process, or the error of the first process in which it raised, raised in all. So
# nobody waits in the next collective for a process that is not coming. Alone, the callable is simply called. Nothing is kept.

# The processes of a run as torchrun started them: their groups, how layers and experts are laid over them, and what they tell
# each other.
#
# In: a valid `Config` and this process's `World`. Out: a `Mesh`, which owns the process groups until it is closed.
#
# N processes hold the layers in `parallel.pp` groups of D = N / pp that share the batch, with expert groups of P = `parallel.ep`:
#
#     rank = D * pp_rank + batch rank           neighbours share the batch: the stages of a pipeline may be machines apart
#     batch rank = P * row + column
#
#     data  [D]                                 the layers of a group are sharded over it, and each has its part of the batch
#     grid  [D / P, P], dims ("fsdp", "ep")     a row shares the experts of a layer (neighbours: the same machine);
#                                               a column holds the same experts, and shards their weights further
#     pipeline  pp processes                    those of one batch rank: microbatches travel between them
#
# Without torchrun there is one process and no group, unless mixed precision asks for one (FSDP2 does that, and needs a group).
#
# Every method that communicates must be called by all processes in the same order. Each does nothing where there is one.

T = TypeVar("T")


def processes() -> tuple[int, int]:
    """(rank, size) in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def together(call: Callable[[], T]) -> list[T]:
    """Results of `call()` (picklable) of all processes, by rank.

    Raises:
        Exception: what it raised in the first process that it raised in; OSErrors keep their number and text.
    """
    rank, size = processes()
    if size == 1:
        return [call()]
    outcome: tuple[bool, Any]
    own: BaseException | None = None
    try:
        outcome = True, call()
    except Exception as error:
        own, outcome = error, (False, _portable(error, rank))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, outcome)
    for sender, (fine, value) in enumerate(found):
        if not fine:
            raise value from (own if sender == rank else None)
    return [value for _, value in found]


def on_main(call: Callable[[], T]) -> T:
    """What `call()` returned in process 0, which alone calls it, in all."""
    rank, _ = processes()
    return together(lambda: call() if rank == 0 else None)[0]  # type: ignore[return-value]


def _portable(error: Exception, rank: int) -> Exception:
    """An error that survives pickling and says where it came from."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error} (process {rank} on {os.uname().nodename})")
    return RunError(str(error))


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


# Knows which process of a run has died, so that the others can say it and end instead of waiting.
#
# In: the store through which the processes found each other. Out: a thread in each process that leaves a beat in the store once
# a period and reads the others'. A collective that waits for a dead process cannot be interrupted, and where it fails at once
# (gloo: "connection closed by peer") its message names nobody. So a process counts as lost when it
#
#     is silent for `patience` seconds                            it froze, or its machine or the network to it is gone
#     runs on this machine, and its process is no longer there    killed; known within a period
#     left with an error                                          it wrote its reason into the store
#
# and then every other process ends with exit code 1, one of them saying who was lost and how. Where a collective raises first,
# `who_is_gone` gives that sentence, and the process ends in its own way.
#
# Beats come from a thread: a long compilation or checkpoint does not silence a process, death and a stopped process do. Silence
# is measured by the watcher's own clock, which stands still while the watcher does: a machine that slept blames nobody.
# `Heartbeat` owns its thread and its connection.

_GRACE = 5.0
"""Periods that a loss must last before this process is ended for it, so that its own error, if it has one, comes first; and
beats that a process may miss before a failed collective is blamed on it."""


@dataclass
class _Other:
    """What is known of another process. Times are of the watcher's clock."""

    name: str  # host and process number
    place: str
    pid: int
    beat: int = -1
    heard: float = 0.0
    fate: str = ""  # how it was lost; "" while all is well
    since: float = 0.0
    finished: bool = False  # left without an error


class Heartbeat:
    """Beats for this process and listens to the others. A context manager: to leave it with an error is to fail for all.

    Args:
        store: of torch.distributed; a clone of it is used, so that waits of one thread do not hold up the other.
        rank, size: of this process, and how many there are.
        patience: seconds of silence after which a process counts as lost.
        advice: what the last message adds, such as which checkpoint is intact.
        period: seconds between beats.
        leave: ends this process; os._exit, as the main thread may be inside a collective.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        patience: float,
        advice: Callable[[], str],
        period: float = 1.0,
        leave: Callable[[int], Any] = os._exit,
    ):
        self._store, self._rank = store.clone(), rank
        self._store.set_timeout(timedelta(seconds=max(patience / 2, 4 * period)))
        self._patience, self._advice, self._period, self._leave = patience, advice, period, leave
        self._self = {"name": f"{os.uname().nodename}, pid {os.getpid()}", "place": _place(), "pid": os.getpid()}
        self._unheard = [r for r in range(size) if r != rank]
        self._others: dict[int, _Other] = {}
        self._clock = 0.0
        self._store_gone: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._period)
        if self._thread.is_alive() or self._store_gone is not None:
            return  # the store does not answer
        # Who ends because another one was lost is no loss of its own.
        why = first_line(error) if error is not None and not self._lost(_GRACE * self._period) else ""
        try:
            self._say(beat=0, left=True, why=why)
        except RuntimeError:
            return

    def who_is_gone(self) -> str:
        """A sentence that names the processes that were lost within the last seconds; "" if all are well. Takes some."""
        deadline = time.monotonic() + (_GRACE + 2) * self._period
        while time.monotonic() < deadline:
            lost = self._lost(_GRACE * self._period)
            if lost:
                return self._sentence(lost)
            time.sleep(self._period / 4)
        return self._sentence([])

    def _run(self) -> None:
        beat, before = 0, time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            self._clock += min(now - before, 2 * self._period)
            before, beat = now, beat + 1
            if self._store_gone is None:
                try:
                    self._say(beat=beat)
                    self._listen()
                except RuntimeError:  # DistError too: the process that holds the store died, or does not answer
                    self._store_gone = self._clock
            self._look()
            lost = [
                r for r in self._lost(self._patience) if self._clock - self._others[r].since > _GRACE * self._period
            ]
            if lost or (self._store_gone is not None and self._clock - self._store_gone > self._patience):
                self._end(lost)

    def _say(self, **what: Any) -> None:
        self._store.set(f"forebay/beat/{self._rank}", json.dumps({**self._self, **what}))

    def _listen(self) -> None:
        for rank in [r for r in self._unheard if self._store.check([f"forebay/beat/{r}"])]:
            self._unheard.remove(rank)
            self._others[rank] = _Other("", "", 0, heard=self._clock)
        ranks = [r for r, other in self._others.items() if not other.finished]
        if not ranks:
            return
        for rank, raw in zip(ranks, self._store.multi_get([f"forebay/beat/{r}" for r in ranks]), strict=True):
            said, other = json.loads(raw), self._others[rank]
            if said["beat"] == other.beat:
                continue
            other.name, other.place, other.pid = said["name"], said["place"], said["pid"]
            other.beat, other.heard = said["beat"], self._clock
            if said.get("left"):
                other.finished = not said["why"]
                self._lose(other, f"failed: {said['why']}" if said["why"] else "")

    def _look(self) -> None:
        """Processes of this machine that are no longer there."""
        for other in self._others.values():
            if not other.finished and other.place == self._self["place"] and _is_gone(other.pid):
                self._lose(other, "died")

    def _lose(self, other: _Other, fate: str) -> None:
        if fate and not other.fate:
            other.fate, other.since = fate, self._clock

    def _lost(self, patience: float) -> list[int]:
        """Processes that ended badly or were silent for so long, the first to go first."""
        others = list(self._others.items())  # the thread may add one meanwhile
        lost = {r: o.since for r, o in others if o.fate}
        silent = {r: o.heard for r, o in others if not (o.fate or o.finished)}
        if self._store_gone is None:  # else all are silent
            lost |= {r: heard for r, heard in silent.items() if self._clock - heard > patience}
        return sorted(lost, key=lambda r: (lost[r], r))

    def _sentence(self, lost: list[int]) -> str:
        if not lost:
            return "" if self._store_gone is None else "the process that the others found each other through is gone"
        others = {r: self._others[r] for r in lost}
        fates = {r: o.fate or f"has not answered for {self._clock - o.heard:.0f} s" for r, o in others.items()}
        return " and ".join(f"process {r} ({o.name}) {fates[r]}" for r, o in others.items())

    def _end(self, lost: list[int]) -> None:
        if self._over.is_set():
            return
        if self._speaks(lost):
            print(f"forebay: {self._sentence(lost)}; the run has ended; {self._advice()}", file=sys.stderr, flush=True)
        self._leave(1)

    def _speaks(self, lost: list[int]) -> bool:
        """Whether this process is the one that says it: the first of those that ask, or the lowest that may live."""
        try:
            if self._store_gone is None:
                return self._store.add("forebay/dead", 1) == 1
        except RuntimeError:
            pass
        # Without torchrun process 0 holds the store.
        return not [
            r for r, other in self._others.items() if 0 < r < self._rank and not other.finished and r not in lost
        ]


def _place() -> str:
    """What two processes share that see each other's process numbers: the booted machine and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown to {os.getpid()}"  # so that nobody looks for this process


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended: there is none, or its parent has not yet taken note."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
