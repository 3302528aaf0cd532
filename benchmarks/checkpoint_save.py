"""How long does a checkpoint stop training, and how much slower are steps while one is written?

Trains a preset and saves every few steps into a temporary folder, in the background. Steps are timed from call to return, which
waits for the device. A step counts as "while saving" if it begins after `Checkpoints.start` returned and before the checkpoint is
whole. The first save is left out, as it page-locks the memory of the copy; its call is a figure of its own.
One checkpoint is kept and another is written: quickstart-gpu's has 23 GB, so the disk needs 46 GB and the host 23 GB of memory.

    python benchmarks/checkpoint_save.py [--config quickstart] [--set train.batch=4] [--saves 4] [--between 8] [--folder /tmp]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write

from forebay.config import Config, load
from forebay.train.checkpoint import Checkpoints
from forebay.train.trainer import Trainer

_WARM = 3  # steps before the first that counts


def measure(config: Config, saves: int, between: int, folder: Path) -> dict[str, Any]:
    """One row: medians of seconds and milliseconds, and the bytes of a checkpoint.

    Args:
        saves: number of saves that count; one more is made before them.
        between: steps without a save after each.
    """
    number, plain, during = 0, list[float](), list[float]()
    called, committed = list[float](), list[float]()
    with Trainer(config) as trainer:

        def step() -> float:
            nonlocal number
            number += 1
            began = time.perf_counter()
            trainer.step(number)
            return time.perf_counter() - began

        for _ in range(_WARM):
            print(f"step {number + 1}: {step():.2f} s", flush=True)
        checkpoints = Checkpoints(folder, keep=1)
        for save in range(saves + 1):
            began, saving = time.perf_counter(), list[float]()
            checkpoints.start(number, trainer.model, trainer.optimizer, {}, background=True)
            called.append(time.perf_counter() - began)
            while checkpoints.is_writing:
                saving.append(step())
            saved = checkpoints.wait()
            if saved is None or saved.waited:
                raise SystemExit(f"nothing was saved in the background: {saved and saved.waited}")
            print(
                f"save {save}: called {called[-1]:.1f} s, committed after {saved.seconds:.1f} s, {len(saving)} steps",
                flush=True,
            )
            after = [step() for _ in range(between)]
            if save:
                committed.append(saved.seconds)
                during += saving
                plain += after
        checkpoints.close()
    size = sum(file.stat().st_size for file in saved.path.rglob("*") if file.is_file())
    without = statistics.median(plain)
    while_saving = statistics.median(during) if during else None
    return {
        "GB": size / 1e9,
        "first call, s": called[0],
        "call, s": statistics.median(called[1:]),
        "until committed, s": statistics.median(committed),
        "step, ms": 1e3 * without,
        "step while saving, ms": while_saving and 1e3 * while_saving,
        "ratio": while_saving and while_saving / without,
        "slowest step while saving, ms": during and 1e3 * max(during),
        "slowest step, ms": 1e3 * max(plain),
        "steps while saving": len(during),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart-gpu", help="a preset or a TOML file")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--between", type=int, default=8)
    parser.add_argument("--folder", help="where to make the temporary folder")
    given = parser.parse_args()
    steps = _WARM + (given.saves + 1) * (given.between + 1000)  # room for the steps while saving
    config = load(given.config, [*given.overrides, f"train.steps={steps}"])
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        row = measure(config, given.saves, given.between, Path(folder))
    write("checkpoint_save", [{"config": given.config, **row}])


if __name__ == "__main__":
    main()
