"""Several processes of one machine, as ranks of a gloo group, for tests.

`run_ranks(fn, world, *args)` calls fn(rank, world, *args) in each and returns what each returned. fn is a module-level function
of the test file. An exception in a rank is raised here, with its traceback.
"""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, seconds: int = 200) -> list[Any]:
    """Results of fn(rank, world, *args) by rank. They must be picklable without shared memory: floats, lists, dicts."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(fn, rank, world, folder, results, args)) for rank in range(world)
        ]
        for p in processes:
            p.start()
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + seconds
        # Read while they run: a rank whose results fill the pipe would wait for a reader, and never end.
        while len(found) < world and time.monotonic() < deadline:
            if not results.empty():
                rank, ok, value = results.get()
                found[rank] = (ok, value)
            elif not any(p.is_alive() for p in processes):
                break
            else:
                time.sleep(0.02)
        for p in processes:
            p.join(10)
        alive = [p for p in processes if p.is_alive()]
        for p in alive:
            p.kill()
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(found.items()) if not ok]
    if failed or len(found) < world:
        missing = [r for r in range(world) if r not in found]
        raise AssertionError(
            "\n".join(failed) + (f"\nranks {missing} did not answer in {seconds} s" if missing else "")
        )
    return [found[rank][1] for rank in range(world)]


def _rank(fn: Callable[..., Any], rank: int, world: int, folder: str, results: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(rank), str(world), str(rank)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        try:
            results.put((rank, True, fn(rank, world, *args)))
        finally:
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
