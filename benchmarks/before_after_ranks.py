"""Compares two versions of Forebay on several GPUs: steps of the trainer, the two versions taking turns.

Each version runs as its own `torchrun` group on the same GPUs and holds its own trainer of the same configuration. The groups
take turns, `--turns` times, so that both meet the same clocks and temperatures; a waiting group waits on the host. A row has
the median wall time of a step on the slowest rank over all turns, the ratio of the two, and whether the losses of the untimed
steps are equal bit for bit (cuDNN's attention adds up in any order, so they need not be). The arms are those of `paging_ep.py`
(8 layers of Qwen3-30B-A3B, EP over all ranks) and of `pipeline.py` (8 layers of DeepSeek-V2-Lite, PP 2), with the routers' own
choices.

    python benchmarks/before_after_ranks.py OLD_SOURCE NEW_SOURCE --ranks 2    # folders that hold the package `forebay`
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EP: dict[str, Any] = {"overlap": True, "reshard": False, "gradients": "compute", "dispatch": "symmetric"}
STASH = {"*.mlp.experts": "stash"}
# "even", because versions differ in what they think layers cost.
PIPE = {"pp": 2, "reshard": False, "partition": "even"}
# Arm -> model, batch, memory, parallel.
ARMS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "EP, capacity": ("qwen3-30b-a3b", 32, {}, {**EP, "capacity_factor": 2.0}),
    "EP, stash": ("qwen3-30b-a3b", 32, {"policy": STASH}, {**EP, "capacity_factor": 2.0}),
    "EP, stash, graph": ("qwen3-30b-a3b", 32, {"policy": STASH, "graph": True}, {**EP, "capacity_factor": 2.0}),
    "dualpipev": ("deepseek-v2-lite", 32, {}, PIPE),
    "dualpipev, graph": ("deepseek-v2-lite", 32, {"graph": True}, PIPE),
    "dualpipev, offload": ("deepseek-v2-lite", 32, {"policy": "offload"}, PIPE),
}


def first(*names: str) -> Any:
    """The first module of `names` that this version of Forebay has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(names)}")


def configuration(arm: str, world: int, layers: int) -> Any:
    model, batch, memory, parallel = ARMS[arm]
    config = {"num_hidden_layers": layers}
    sections = {
        "model": {"family": model, "config": config, "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 1000, "batch": batch, "microbatch": 1, "sequence": 4096},
        "memory": {"compile": True, **memory},
        "parallel": {"ep": world // parallel.get("pp", 1), **parallel},
        "log": {"folder": tempfile.mkdtemp()},
    }
    from common import by_host

    return first("forebay.config", "forebay.train.config").from_mapping(by_host(sections), origin=__file__)


def worker(options: argparse.Namespace) -> None:
    """One rank of one version. Rank 0 reads commands (an arm to prepare, ``time``, ``end``) and answers, a line each."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    host: Any = dist.new_group(
        backend="gloo"
    )  # waits on the host: a waiting NCCL kernel would hold the other version's GPU
    rank, world = dist.get_rank(), dist.get_world_size()
    commands = open(options.folder / "commands") if rank == 0 else None  # noqa: SIM115
    answers = open(options.folder / "answers", "w") if rank == 0 else None  # noqa: SIM115
    mesh: Any = None
    trainer: Any = None
    number = 0

    def steps(count: int) -> tuple[list[float], list[float]]:
        nonlocal number
        seconds, losses = [], []
        for _ in range(count):
            torch.cuda.synchronize()
            dist.barrier(host)
            started = time.perf_counter()
            number += 1
            record = trainer.step(number)
            torch.cuda.synchronize()
            mine = [time.perf_counter() - started]
            every: list[Any] = [None] * world
            dist.all_gather_object(every, mine, group=host)
            seconds.append(max(m[0] for m in every))
            losses.append(record.cross_entropy_loss)
        return seconds, losses

    while True:
        told = [commands.readline().strip() if commands is not None else ""]
        dist.broadcast_object_list(told, src=0, group=host)
        command = told[0]
        if command == "time":
            seconds, losses = steps(options.steps)
            answer = {"seconds": seconds, "losses": losses, "peak": torch.cuda.max_memory_reserved()}
        else:
            if trainer is not None:
                trainer.__exit__(None, None, None)
                mesh.__exit__(None, None, None)
                trainer = mesh = None
                torch._dynamo.reset()
                gc.collect()  # a trainer is in cycles with its hooks, and the next one needs its memory
                torch.cuda.empty_cache()
            if command in ("", "end"):
                break
            config, number = configuration(command, world, options.layers), 0
            mesh = first("forebay.train.distributed", "forebay.train.mesh").Mesh.open(config).__enter__()
            trainer = first("forebay.train.trainer").Trainer(config, mesh).__enter__()
            answer = {"losses": steps(options.warm)[1]}
        if answers is not None:
            print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


class Group:
    """The `torchrun` group of one version."""

    def __init__(self, source: str, port: int, options: argparse.Namespace):
        self.folder = Path(tempfile.mkdtemp())
        for name in ("commands", "answers"):
            os.mkfifo(self.folder / name)
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={options.ranks}",
            f"--master-port={port}",
        ]
        words = [__file__, source, source, f"--folder={self.folder}", "--worker"]
        words += [f"--{name}={getattr(options, name)}" for name in ("steps", "warm", "layers")]
        # A compile cache of its own: code that one version compiled must not run in the other.
        env = {**os.environ, "PYTHONPATH": source, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
        self.process = subprocess.Popen([*run, *words], env=env)
        self._commands = open(self.folder / "commands", "w")  # noqa: SIM115
        self._answers = open(self.folder / "answers")  # noqa: SIM115

    def tell(self, command: str) -> None:
        print(command, file=self._commands, flush=True)

    def answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError("a version ended; its error is above")
        return json.loads(line)


def compare(arm: str, groups: dict[str, Group], turns: int) -> dict[str, Any]:
    losses: dict[str, list[float]] = {}
    for group in groups.values():
        group.tell(arm)
        if "offload" in arm:  # its first steps measure the GPU, which the other version must leave alone
            losses[str(len(losses))] = group.answer()["losses"]
    if not losses:
        losses = {name: group.answer()["losses"] for name, group in groups.items()}
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    peaks: dict[str, float] = {}
    for turn in range(turns):
        for name in list(groups) if turn % 2 == 0 else list(groups)[::-1]:
            groups[name].tell("time")
            found = groups[name].answer()
            seconds[name] += found["seconds"]
            peaks[name] = found["peak"] / (1 << 30)
    before, after = (statistics.median(seconds[name]) for name in ("before", "after"))
    first_losses, second_losses = losses.values()
    return {
        "arm": arm,
        "before s": before,
        "after s": after,
        "after / before": after / before,
        "fastest before, after s": f"{min(seconds['before']):.4f}, {min(seconds['after']):.4f}",
        "reserved before, after GiB": f"{peaks['before']:.2f}, {peaks['after']:.2f}",
        "losses equal": first_losses == second_losses,
        "steps before s": seconds["before"],
        "steps after s": seconds["after"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--name", default="before_after_ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="a turn")
    parser.add_argument(
        "--warm", type=int, default=8, help="untimed; a graph is captured in the 4th, offload tries for 40"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    from common import write

    sources = {"before": options.before, "after": options.after}
    groups = {name: Group(source, 29600 + i, options) for i, (name, source) in enumerate(sources.items())}
    rows = []
    for arm in options.arms:
        rows.append(compare(arm, groups, options.turns))
        write(options.name, rows, ranks=options.ranks, turns=options.turns, steps=options.steps)
    for group in groups.values():
        group.tell("end")
        group.process.wait()


if __name__ == "__main__":
    main()
