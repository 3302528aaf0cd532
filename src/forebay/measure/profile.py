"""``forebay doctor --save-profile FILE``: a device profile of this machine, for ``forebay plan --device FILE``.

In: a path, and the processes that torchrun started, or this one alone. Out: a JSON file of `forebay.planner.device`. It takes
about half a minute. Alone, a process has no links to other GPUs to measure: those figures are the H200's then, and say so.
The processes of one machine measure links within a node; of several machines, those between nodes too.

`save_profile` owns the process group that it makes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forebay.measure import rates
from forebay.measure.rates import Sizes
from forebay.planner.device import BOTH_WAYS, DEFAULT, DeviceProfile, load, of_dict
from forebay.train.errors import RunError, UsageError
from forebay.train.world import World

_HOST = ("host_out", "host_back", "host_both")
_LINKS = ("all_to_all", "all_gather", "reduce_scatter")


def save_profile(path: Path) -> DeviceProfile | None:
    """Measure this process's GPU, and write the profile. Collective; None on all processes but the first, which writes.

    Raises:
        UsageError: there is no GPU, or `path` cannot be a file.
        RunError: the file cannot be written.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "--save-profile measures a GPU, and torch finds none here; run it on the machine that you plan for, "
            "or give forebay plan one of the profiles that come with Forebay"
        )
    check_path(path)
    world = World.of_environment()
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group("nccl", device_id=device)
    try:
        figures = measured(device, Sizes())
        if world.size > 1:
            figures |= measured_links(device, Sizes(), int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    finally:
        if world.size > 1:
            dist.destroy_process_group()
    if not world.is_main:
        return None
    name = torch.cuda.get_device_name(device)
    profile = complete(figures, path.stem, name, torch.cuda.device_count())
    try:
        path.write_text(json.dumps(profile.as_dict(), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return profile


def check_path(path: Path) -> None:
    """Refuse a path that no file can have, before anything is measured.

    Raises:
        UsageError: says why.
    """
    if path.is_dir():
        raise UsageError(f"--save-profile {path} is a folder; valid is the name of a file to write")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save-profile {path}: there is no folder {path.absolute().parent}")


def measured(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Figures of one device by name: values alone, as `forebay.planner.device` has them in a file."""
    ahead, back = rates.attention(device, sizes)
    out, home = rates.host_link(device, sizes)
    both = rates.host_both(device, sizes)
    found: dict[str, Any] = {
        "matmul_bf16": rates.products(device, sizes, torch.bfloat16),
        "matmul_fp32": rates.products(device, sizes, torch.float32),
        "grouped": rates.grouped(device, sizes, weights=False),
        "grouped_weights": rates.grouped(device, sizes, weights=True),
        "attention": ahead,
        "attention_backward": back,
        "bandwidth": rates.bandwidth(device, sizes),
        "host_out": out,
        "host_back": home,
        "host_both": both,
        "launch": rates.launch(device),
        "kernel": rates.kernel(device),
    }
    if device.type == "cuda":
        found["memory"] = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
    return found


def measured_links(device: torch.device, sizes: Sizes, on_node: int) -> dict[str, Any]:
    """Figures of the links between the processes of the default group, `on_node` of which share each machine.

    Collective.
    """
    found: dict[str, Any] = {}
    count = dist.get_world_size()
    group = None
    if 1 < on_node < count:
        group, _ = dist.new_subgroups(on_node)
    if on_node > 1:
        found |= _host_links(device, sizes, on_node)
        found |= dict(zip(_LINKS, rates.collectives(device, sizes, group), strict=True))
        if device.type == "cuda":
            found["contention"] = rates.contention(device, sizes, group)
    if on_node < count:
        between = rates.collectives(device, sizes, None)
        found |= {f"{name}_between": rate for name, rate in zip(_LINKS, between, strict=True)}
    return found


def _host_links(device: torch.device, sizes: Sizes, on_node: int) -> dict[str, Any]:
    """One process's alone (the first one writes), and the slowest one's while all copy. Both ways alone is reckoned."""
    dist.barrier()
    alone = rates.host_link(device, sizes) if dist.get_rank() % on_node == 0 else (1.0, 1.0)
    dist.barrier()
    slowest = torch.tensor(
        [*rates.host_link(device, sizes, dist.barrier), rates.host_both(device, sizes, dist.barrier)],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    together = slowest.tolist()
    first = (*alone, min(alone) * BOTH_WAYS)
    return {name: [[1.0, one], [float(on_node), all_]] for name, one, all_ in zip(_HOST, first, together, strict=True)}


def complete(figures: dict[str, Any], name: str, title: str, node: int) -> DeviceProfile:
    """A profile of measured figures, and of the H200's where there are none. What several GPUs of a host get of its memory at
    once is measured by several processes only: else as much less as the H200's get."""
    raw = load(DEFAULT).as_dict()
    for key in _HOST:
        if isinstance(figures.get(key), float):
            one = raw[key]["value"][0][1]
            figures = {**figures, key: [[gpus, figures[key] * rate / one] for gpus, rate in raw[key]["value"]]}
    for key in raw.keys() - {"name", "title", "node"}:
        if key in figures:
            raw[key] = {
                "value": figures[key],
                "source": "measured",
                "where": f"forebay doctor --save-profile, torch {torch.__version__}",
            }
        else:
            raw[key] |= {
                "source": "estimated",
                "where": "the H200's: it takes several processes (torchrun) to measure it",
            }
    raw |= {"name": name, "title": title, "node": max(1, node)}
    return of_dict(raw, "that was measured")
