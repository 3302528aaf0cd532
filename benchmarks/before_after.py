"""Compares two versions of Forebay on the work of `single_gpu.py`, taking turns on one GPU.

Each version runs in its own process and holds its own model under the same arm. The processes take turns, `--repeats`
times, so that both meet the same clocks and temperatures. A row has the median step time of each version over all its
turns, the ratio of the two, and the peaks over the base.

    python benchmarks/before_after.py OLD_SOURCE NEW_SOURCE [--name NAME]     # folders that hold the package `forebay`
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARMS = {
    "keep": {"policy": "keep"},
    "recompute": {"policy": "recompute"},
    "offload": {"policy": "offload"},
    "auto 3.8GiB": {"policy": "auto", "budget": "3.8GiB"},
    "auto 4.9GiB": {"policy": "auto", "budget": "4.9GiB"},
}


def worker(options: argparse.Namespace) -> None:
    """Read commands from standard input, one a line: an arm to prepare, or ``time``. Answer each with a line of JSON."""
    import single_gpu
    import torch
    from common import GIB, median_ms, settle_memory, until_settled

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be read as an answer
    state: dict[str, Any] = {}

    def step() -> None:
        ids = state["batches"].take()
        state["model"](input_ids=ids, labels=ids).loss.backward()

    for line in sys.stdin:
        command = line.strip()
        if command == "time":
            settle_memory()
            base = torch.cuda.memory_allocated()
            ms, times = median_ms(step, options.steps)
            peak = (torch.cuda.max_memory_allocated() - base) / GIB
            answer: dict[str, Any] = {"ms": ms, "times": times, "peak": peak}
        else:
            if "mem" in state:
                state["mem"].detach()
            state.clear()
            torch._dynamo.reset()
            settle_memory()
            import forebay

            state["model"] = single_gpu.build(options)
            state["batches"] = single_gpu.Batches(options.batch, options.sequence)
            state["mem"] = forebay.manage(state["model"], compile=True, **ARMS[command])
            until_settled(state["mem"], step)
            for _ in range(5):
                step()
            answer = {"loss": float(state["model"](input_ids=(i := state["batches"].take()), labels=i).loss.detach())}
        print(json.dumps(answer), file=answers, flush=True)


class Version:
    """The process of one version."""

    def __init__(self, source: str, options: argparse.Namespace):
        words = [sys.executable, __file__, source, source, "--worker", "--steps", str(options.steps)]
        words += [f"--{name}={getattr(options, name)}" for name in ("model", "layers", "batch", "sequence")]
        # A compile cache of its own: code that one version compiled must not run in the other.
        env = {**os.environ, "PYTHONPATH": source, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of a version ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--name", default="before_after")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="qwen3-moe", help="see single_gpu.py")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.worker:
        worker(options)
        return
    from common import write

    versions = {"before": Version(options.before, options), "after": Version(options.after, options)}
    rows = []
    for arm in options.arms:
        losses = {}
        for name, version in versions.items():
            version.tell(arm)
            # One after the other: offload and auto measure the GPU, so the other version must be idle.
            losses[name] = version.answer()["loss"]
        times: dict[str, list[float]] = {"before": [], "after": []}
        turns: dict[str, list[float]] = {"before": [], "after": []}
        peaks: dict[str, float] = {}
        for turn in range(options.repeats):
            for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                versions[name].tell("time")
                found = versions[name].answer()
                times[name] += found["times"]
                turns[name].append(found["ms"])
                peaks[name] = found["peak"]
        middle = {name: statistics.median(all_) for name, all_ in times.items()}
        rows.append(
            {
                "arm": arm,
                "before ms": middle["before"],
                "after ms": middle["after"],
                "after / before": middle["after"] / middle["before"],
                "turns before": turns["before"],
                "turns after": turns["after"],
                "peak before GiB": peaks["before"],
                "peak after GiB": peaks["after"],
                "loss equal": losses["before"] == losses["after"],
            }
        )
        print(rows[-1], flush=True)
        write(options.name, rows, repeats=options.repeats, steps=options.steps)
    for version in versions.values():
        version.close()


if __name__ == "__main__":
    main()
