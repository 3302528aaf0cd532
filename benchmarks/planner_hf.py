"""A blind test of `forebay plan --trainer hf`: transformers' `Trainer` as it is, and with `forebay.manage`, on one or two GPUs.

    python benchmarks/planner_hf.py draw benchmarks/results/planner_hf_1.json --seed 1    # plans, without a GPU; commit them
    python benchmarks/planner_hf.py run benchmarks/results/planner_hf_1.json              # on GPUs; needs accelerate and peft
    python benchmarks/planner_hf.py show benchmarks/results/planner_hf_1.json

A seed draws a published model with fewer layers and experts, the Trainer's arguments, arguments of `forebay.manage`, and whether
segments of torch's allocator grow; with ``--gpus 2`` also FSDP2 or DistributedDataParallel. `run` trains a few steps of each on
random weights and tokens: a process for each arm and GPU, and all have imported their modules before the first begins.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from common import GIB, environment, environment_of_rank, markdown, results_folder
from planner import percent
from planner_measure import PORTS, Memory, Workers, end, pack, split, work

import forebay
from forebay.config import Config, from_mapping
from forebay.errors import UsageError
from forebay.estimate.device import DEFAULT, load
from forebay.estimate.hf_trainer import managed_sections, plan_trainer, read_arguments
from forebay.models.catalog import PUBLISHED
from forebay.train.hf_io import configuration

ARMS = {"as it is": "as_it_is", "Forebay": "with_forebay"}
STEPS, WARM = 7, 3
LEAST, MOST, PARAMETERS = 4 * GIB, 120 * GIB, 4.5e9
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Run:
    """Arguments of `forebay plan SOURCE --trainer hf --gpus GPUS`: texts for ``--hf`` and ``--set``."""

    name: str
    source: str
    hf: tuple[str, ...]
    overrides: tuple[str, ...]
    gpus: int = 1

    def configuration(self) -> Config:
        return from_mapping(managed_sections(self.source, self.overrides))


# --- draw ---------------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, number: int, gpus: int = 1) -> Run:
    source = rng.choice(sorted(PUBLISHED))
    config = PUBLISHED[source].config
    key = next(k for k in _EXPERTS if k in config)
    experts = rng.choice([n for n in (8, 16, 32, 64, 128) if n <= config[key]])
    layers, lora = rng.randint(1, 8), rng.random() < 0.3
    hf = {
        "per_device_train_batch_size": rng.choice((1, 1, 2, 4, 8)),
        "gradient_accumulation_steps": rng.choice((1, 1, 2, 3)),
        "max_length": 64 * rng.randint(8, 96),
        "bf16": rng.choice(("true", "true", "false")),
        "dtype": "bfloat16",
        "gradient_checkpointing": rng.choice(("true", "false")),
        "optim": rng.choice(("adamw_torch_fused", "adamw_torch_fused", "adamw_torch")),
        "max_grad_norm": rng.choice((1.0, 1.0, 0.0)),
    }
    if lora:
        hf |= {"lora_r": rng.choice((8, 16, 64)), "lora_target_modules": "q_proj,v_proj"}
    if gpus > 1:
        hf |= {"fsdp": rng.choice(("true", "true", "false"))}
        each = {"gradient_accumulation_kwargs": {"sync_each_batch": rng.random() < 0.3}}
        hf |= {"accelerator_config": json.dumps(each)}
        if hf["fsdp"] == "true":
            hf |= {"fsdp_config": json.dumps({"reshard_after_forward": rng.random() < 0.7})}
            hf |= {"bf16": "true"} if lora else {}  # anything else is not counted by plans
    memory = {
        "policy": rng.choice(("keep", "keep", "recompute", "offload")),
        "compile": rng.choice(("true", "true", "false")),
    }
    overrides = [f"model.config.num_hidden_layers={layers}", f"model.config.{key}={experts}"]
    if isinstance(config.get("n_group"), int):
        overrides += ["model.config.n_group=1", "model.config.topk_group=1"]
    overrides += [f"memory.{name}={value}" for name, value in memory.items()]
    overrides += ["device.expandable_segments=true"] * (rng.random() < 0.5)
    words = "lora" if lora else "checkpointed" if hf["gradient_checkpointing"] == "true" else "kept"
    if gpus > 1:
        words += f"-{'fsdp' if hf['fsdp'] == 'true' else 'ddp'}{gpus}"
    name = f"{number:02}-{source}-{layers}L-{hf['per_device_train_batch_size']}x{hf['max_length']}-{words}"
    return Run(name, source, tuple(f"{k}={v}" for k, v in hf.items()), tuple(overrides), gpus)


def planned(run: Run) -> dict[str, dict[str, Any]]:
    """By arm: parameters, bytes reserved and allocated, and seconds of a step."""
    both = plan_trainer(run.source, run.hf, run.overrides, run.gpus, None, load(DEFAULT)).as_dict()
    plans = {}
    for arm, key in ARMS.items():
        fit = both[key]
        (rank,) = fit["ranks"]
        plans[arm] = {
            "parameters": fit["parameters"],
            "reserved": rank["total"] - rank["other"],
            "allocated": rank["total"] - rank["other"] - rank["cached"],
            "seconds": fit["step"]["seconds"],
        }
    return plans


def draw(file: Path, seed: int, number: int, gpus: int) -> None:
    rng, runs, vain = random.Random(seed), list[dict[str, Any]](), list[str]()
    while len(runs) < number:
        run = drawn(rng, len(runs), gpus)
        try:
            plans = planned(run)
        except UsageError as error:
            vain.append(f"{run.name}: {error}")
            continue
        sizes = [plan["reserved"] for plan in plans.values()]
        if min(sizes) < LEAST or max(sizes) > MOST or plans["Forebay"]["parameters"] > PARAMETERS:
            vain.append(f"{run.name}: too small or too large")
            continue
        runs.append(asdict(run) | {"planned": plans})
        print(run.name, {arm: f"{p['reserved'] / GIB:.2f} GiB" for arm, p in plans.items()}, flush=True)
    content = {"seed": seed, "drawn in vain": vain, "environment": environment(), "runs": runs}
    file.write_text(json.dumps(content, indent=1) + "\n")


# --- run ----------------------------------------------------------------------------------------------------------------


def measured(run: Run, arm: str) -> dict[str, Any]:
    """Peaks of the whole life of a Trainer, and its times."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    gpu = torch.cuda.is_available()
    memory = Memory() if gpu else None
    given, config = read_arguments(run.hf), run.configuration()
    declared, times = configuration(config.model, 0), list[float]()
    with torch.device("cuda" if gpu else "cpu"):
        attention = {"attn_implementation": given.attn_implementation} if given.attn_implementation else {}
        model = AutoModelForCausalLM.from_config(declared, dtype=getattr(torch, given.dtype), **attention)
    if given.fsdp and gpu:  # accelerate moves and shards a model that from_pretrained left on the CPU
        model, memory = model.cpu(), Memory()
    if given.lora_r:
        import peft

        adapters = peft.LoraConfig(
            r=given.lora_r, target_modules=list(given.lora_target_modules), task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapters)
    ours = arm == "Forebay"
    if ours:
        chosen = config.memory
        managed = forebay.manage(model, chosen.policy, compile=chosen.compile and gpu, offload=chosen.offload)

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    sequences = given.per_device_train_batch_size * given.gradient_accumulation_steps * STEPS * run.gpus
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": given.sync_each_batch}}
    sharded = {"reshard_after_forward": given.reshard_after_forward} if given.fsdp else None
    tokens = torch.randint(declared.vocab_size, (sequences, given.max_length))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, bf16=given.bf16, optim=given.optim, max_grad_norm=given.max_grad_norm, use_cpu=not gpu,
        per_device_train_batch_size=given.per_device_train_batch_size,
        gradient_accumulation_steps=given.gradient_accumulation_steps,
        gradient_checkpointing=given.gradient_checkpointing and not ours, accelerator_config=each,
        fsdp=given.fsdp or None, fsdp_config=sharded,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model, arguments, train_dataset=data, callbacks=[Times()]).train()
    seconds = [after - before for before, after in pairwise(times)][WARM - 1 :]
    row: dict[str, Any] = {"seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}
    if ours:
        row["report"] = {"planned": managed.report().planned_bytes, "moved": managed.report().moved_bytes}
    if memory is not None:
        allocated, reserved = memory.saw()
        row |= {"allocated": allocated, "reserved": reserved, "outside": memory.outside(), **memory.counts()}
    return row


def worker(parts: Path) -> None:
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    work(parts, lambda job: measured(Run(**job["run"]), job["arm"]))


def run(file: Path, deadline: float) -> None:
    """Run every arm of every run that has no row yet, one on each GPU, or pair of GPUs, at a time."""
    out, ends, ports = results_folder() / measured_of(file).name, time.monotonic() + deadline, count(PORTS)
    there = {(row["name"], row["arm"]) for row in read(measured_of(file))}
    given = [Run(**{k: v for k, v in r.items() if k != "planned"}) for r in json.loads(file.read_text())["runs"]]
    todo = deque((r, arm) for r in given for arm in ARMS if (r.name, arm) not in there)
    (size,) = {r.gpus for r in given}
    busy: dict[tuple[int, ...], tuple[list[subprocess.Popen[str]], Run, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(size * len(todo), Path(folder), __file__)
        try:
            workers.wait(ends)
            while (todo or busy) and time.monotonic() < ends:
                for gpus in split(max(torch.cuda.device_count(), size), size):
                    if gpus in busy and (row := answer(workers, busy[gpus][0])) is not None:
                        processes, one, arm = busy.pop(gpus)
                        end(processes)
                        row = {"name": one.name, "arm": arm, **row}
                        with out.open("a") as rows_file:
                            rows_file.write(json.dumps(row) + "\n")
                        print(one.name, arm, row.get("error", f"{row.get('reserved', 0) / GIB:.2f} GiB"), flush=True)
                    if gpus not in busy and todo:
                        one, arm = todo.popleft()
                        busy[gpus] = begin(workers, one, arm, gpus, next(ports)), one, arm
                time.sleep(0.05)
            pack(out.with_suffix(".tar.gz"), Path(folder))
        finally:
            for processes, *_ in busy.values():
                end(processes)
            workers.close()
    out.with_suffix(".environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


def begin(workers: Workers, one: Run, arm: str, gpus: tuple[int, ...], port: int) -> list[subprocess.Popen[str]]:
    """One arm of a run on `gpus`: its processes, by rank."""
    shared = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        # Read when CUDA starts.
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{one.configuration().device.expandable_segments}",
    }
    ranks = [shared | environment_of_rank(rank, len(gpus), port) for rank in range(len(gpus))]
    return [workers.begin({"run": asdict(one), "arm": arm, "environment": named}) for named in ranks]


def answer(workers: Workers, processes: list[subprocess.Popen[str]]) -> dict[str, Any] | None:
    """The row of the rank that reserved most, once all have ended, or an error as soon as one has it."""
    gone = [process.poll() is not None for process in processes]  # before rows are read: a process writes, then ends
    rows = [workers.row(process) for process in processes]
    failed = next((row for row in rows if row is not None and "error" in row), None)
    if failed is None and any(row is None and over for row, over in zip(rows, gone, strict=True)):
        failed = {"error": "it ended"}
    if failed is not None or not all(gone):
        return failed
    return max((row for row in rows if row is not None), key=lambda row: row.get("reserved", 0))


def measured_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}_measured.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# --- show ---------------------------------------------------------------------------------------------------------------


def show(file: Path) -> None:
    plans = {run["name"]: run["planned"] for run in json.loads(file.read_text())["runs"]}
    lines, ratios = list[dict[str, Any]](), dict[str, dict[str, float]]()
    for row in read(measured_of(file)):
        plan, line = plans[row["name"]][row["arm"]], {"run": row["name"], "arm": row["arm"]}
        if "error" in row:
            lines.append(line | {"error": row["error"][:80]})
            continue
        seconds = statistics.median(row["seconds"])
        ratios.setdefault(row["name"], {})[row["arm"]] = seconds
        for key, got, unit in (
            ("reserved", row["reserved"], GIB),
            ("allocated", row["allocated"], GIB),
            ("seconds", seconds, 1),
        ):
            line |= {f"{key} planned": plan[key] / unit, key: got / unit, f"{key} %": percent(plan[key], got)}
        lines.append(line)
    print(markdown(lines))
    for arm in ARMS:
        for key in ("reserved %", "allocated %", "seconds %"):
            errors = [line[key] for line in lines if line["arm"] == arm and key in line]
            if errors:
                mean = statistics.mean(map(abs, errors))
                print(f"{arm}, {key}: {len(errors)} runs, mean {mean:.2f}, {min(errors):+.1f} to {max(errors):+.1f}")
    both = {name: arms for name, arms in ratios.items() if len(arms) == len(ARMS)}
    found = [arms["Forebay"] / arms["as it is"] for arms in both.values()]
    said = [plans[name]["Forebay"]["seconds"] / plans[name]["as it is"]["seconds"] for name in both]
    print(
        "time with Forebay over that without:",
        " ".join(f"{g:.2f}({s:.2f})" for g, s in zip(found, said, strict=True)),
        "measured (planned)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("draw", "run", "show", "worker"))
    parser.add_argument("file", type=Path, help="of plans; for a worker, which `run` starts, the folder of rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=1, help="of each run that is drawn")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which runs are killed")
    options = parser.parse_args()
    if options.action == "worker":
        worker(options.file)
    elif options.action == "draw":
        draw(options.file, options.seed, options.number, options.gpus)
    elif options.action == "run":
        run(options.file, options.deadline)
    else:
        show(options.file)


if __name__ == "__main__":
    main()
