"""Sends the figures of a run to TensorBoard, Weights & Biases, or a file for Prometheus.

Input: figures by name. A name may end in ``/layer_3``; a list's name ends in ``_by_`` and what it is by. Output: events, a W&B
run, or a text file that node-exporter's textfile collector reads. Each logger owns its open files until `close`. None
waits for a device or a network; W&B sends from a process of its own.
"""

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forebay.config import Config, Log
from forebay.errors import RunError, UsageError, first_line
from forebay.train.durable import replace_text


class Logger(Protocol):
    """Receives the figures of steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Single figures."""

    def lists(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        """Figures of many processes or experts."""

    def close(self, failed: bool) -> None:
        """Write what is left. `failed` says whether the run ends by an error."""


def open_loggers(config: Config, folder: Path, after: int) -> list[Logger]:
    """The loggers that `config.log` names, for a run in `folder` that resumes after step `after`.

    Raises:
        UsageError: a package is not installed, or W&B does not start.
        RunError: the file for Prometheus cannot be written.
    """
    log, found = config.log, list[Logger]()
    if log.tensorboard:
        found.append(TensorBoard(folder / "tensorboard", after))
    if log.wandb:
        found.append(WeightsAndBiases(log.wandb, folder, config.to_dict()))
    if log.prometheus:
        found.append(Prometheus(log, folder.name))
    return found


class TensorBoard:
    """Scalars, and histograms of lists."""

    def __init__(self, folder: Path, after: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise UsageError(
                "log.tensorboard = true needs the package tensorboard: pip install 'forebay[tensorboard]'"
            ) from error
        self._events: Any = SummaryWriter(str(folder), purge_step=after + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def lists(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        for name, figures in lists.items():
            self._events.add_histogram(name, np.asarray(figures, dtype=np.float64), step)

    def close(self, failed: bool) -> None:
        self._events.close()


class WeightsAndBiases:
    """A W&B run for the run's folder; resuming the folder goes on with it. WANDB_MODE=offline writes below the folder only."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]):
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UsageError("log.wandb needs the package wandb: pip install 'forebay[wandb]'") from error
        self._histogram = wandb.Histogram
        name = folder / "wandb.id"
        try:
            if not name.is_file():
                replace_text(name, uuid.uuid4().hex[:16])
            self._run: Any = wandb.init(
                project=project,
                name=folder.name,
                id=name.read_text(encoding="utf-8"),
                dir=str(folder),
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except OSError as error:
            raise RunError(f"{name} cannot be written: {error.strerror}") from error
        except wandb.errors.Error as error:
            raise UsageError(
                f"log.wandb = {project!r}: Weights & Biases does not start: {first_line(error)}; log in with wandb login, or set "
                "WANDB_MODE=offline and send the run later with wandb sync"
            ) from error
        # A resumed run repeats steps; W&B's own step only goes up.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def lists(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        self._run.log({**{name: self._histogram(list(figures)) for name, figures in lists.items()}, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Prometheus:
    """The latest figures as a text file, replaced with every step: gauges with a label for the run.

    The name of a list gives a label: ``expert_load_by_expert/layer_3`` becomes ``forebay_expert_load{expert="17",layer="3"}``.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, log: Log, run: str):
        self._file, self._run = Path(log.prometheus).expanduser(), run
        self._latest: dict[str, float | Sequence[float]] = {}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            raise RunError(
                f"log.prometheus = {log.prometheus!r} cannot be written: {error.strerror}; name a file in the folder of "
                "node-exporter's textfile collector"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._latest.update(values, step=step)
        self._replace()

    def lists(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        self._latest.update(lists, step=step)
        self._replace()

    def close(self, failed: bool) -> None:
        self._latest["failed"] = int(failed)
        self._replace()

    def _replace(self) -> None:
        with suppress(OSError):  # a full disk of the monitor is no reason to end a run
            self._write()

    def _write(self) -> None:
        """Without a sync: only the last text counts, and only while the machine runs."""
        new = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        new.write_text(prometheus_text(self._latest, self._run), encoding="utf-8")
        new.replace(self._file)


def prometheus_text(figures: Mapping[str, float | Sequence[float]], run: str) -> str:
    """Gauges in the text format of Prometheus, grouped by name."""
    gauges: dict[str, list[str]] = {}
    for name, value in figures.items():
        base, _, place = name.partition("/")
        labels = {"run": run}
        if place:
            label, _, number = place.rpartition("_")
            labels[label] = number
        base, _, by = base.partition("_by_")
        lines = gauges.setdefault("forebay_" + re.sub(r"\W", "_", base), [])
        for index, figure in _indexed(value):
            shown = {**labels, by: str(index)} if by else labels
            lines.append(f"{{{','.join(f'{k}={_quoted(v)}' for k, v in sorted(shown.items()))}}} {float(figure)!r}")
    return "".join(
        f"# TYPE {name} gauge\n" + "".join(f"{name}{line}\n" for line in lines)
        for name, lines in sorted(gauges.items())
    )


def _indexed(value: float | Sequence[float]) -> Iterator[tuple[int, float]]:
    yield from enumerate(value) if isinstance(value, Sequence) else [(0, value)]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
