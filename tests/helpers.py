"""What tests ask of stores, pools, dispatchers and autograd beyond their own interface; busy streams, TOML, releases."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def used_bytes(pool: Any) -> int:
    """Bytes of all blocks that are out."""
    holes = sum(size for slab in pool._slabs for _, size in slab.holes)
    return pool.reserved_bytes - holes - sum(block.length for block in free_blocks(pool))


def free_blocks(pool: Any) -> list[Any]:
    """The blocks that came back and are no holes yet."""
    pool._collect_returned()
    return [block for blocks in pool._free.values() for block in blocks]


def sent(store: Any, source: torch.Tensor) -> Any:
    """A ticket of `HostStore` for `source`, its copy out enqueued, with the current stream as compute stream."""
    ticket = store.new_ticket(source, store.lanes.compute_stream())
    store.send([ticket])
    return ticket


@contextmanager
def saved_storages(*apart: torch.Tensor) -> Iterator[dict[int, torch.Tensor]]:
    """By the storage's address, a tensor of each storage that autograd saves within, but for the storages of `apart`. The tensors
    live as long as the dictionary, so that no address is used twice."""
    known = {t.untyped_storage().data_ptr() for t in apart}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            found.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors that share no storage."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def toml_table(values: Mapping[str, object]) -> str:
    """An inline table of numbers."""
    return "{" + ", ".join(f"{key} = {value}" for key, value in values.items()) + "}"


def count_handles(dispatcher: Any) -> Callable[[], int]:
    """Counts the handles of all dispatches from now on that are alive anywhere. With None as dispatcher there are none."""
    made: list[StorageWeakRef] = []
    if dispatcher is None:
        return lambda: 0
    dispatch = dispatcher.dispatch

    def counted(*args: Any) -> Any:
        results = dispatch(*args)
        made.extend(StorageWeakRef(t.untyped_storage()) for t in results[3][:1])
        return results

    dispatcher.dispatch = counted
    return lambda: sum(not ref.expired() for ref in made)


def delayed(lane: Any, cycles: int) -> Callable[[], None]:
    """A function that keeps `lane` busy for `cycles` GPU clock ticks: tests use it to provoke races."""

    def sleep() -> None:
        if lane is not None:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(cycles)

    return sleep


def fill_free_parts() -> list[torch.Tensor]:
    """Tensors in all free parts of segments that something else is in: the next block gets a segment of its own, which
    ``torch.cuda.empty_cache()`` gives back. Hold them as long as that matters."""
    torch.cuda.empty_cache()
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["segment_type"] == "large" and block["state"] == "inactive"
    ]
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(free, reverse=True)]


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed within is freed because nothing refers to it: cycles are not collected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
