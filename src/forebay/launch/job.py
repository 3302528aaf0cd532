"""What a job runs, whatever engine starts it: configuration, nodes, GPUs, time limit and image.

Input: the arguments of ``forebay launch``. Output: a `Job`, whose configuration and number of processes were checked, so
that an engine only writes text. Imports no torch.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.config import check_world, load, parse_duration
from forebay.errors import Preempted, UsageError

EXIT_PREEMPTED = Preempted.exit_code
PORT = 29500  # torchrun's own default


@dataclass(frozen=True)
class Job:
    """A run of ``forebay train`` on `nodes` machines.

    Attributes:
        name: letters, digits and hyphens, as Kubernetes allows for a name.
        source: absolute path of the configuration's TOML file, or the name of a preset.
        text: text of the TOML file; None for a preset, which every installation of Forebay has.
        overrides: ``section.key=value`` texts.
        processes: processes on each node.
        gpus: GPUs of each node, one a process; 0 if the configuration trains on CPUs.
        seconds: time limit; 0 is none.
        image: container image; "" is none.
        folder: absolute path of the directory in which the run starts. A relative `log.folder` is below it.
    """

    name: str
    source: str
    text: str | None
    overrides: tuple[str, ...]
    nodes: int
    processes: int
    gpus: int
    seconds: int
    image: str
    folder: Path

    def arguments(self, source: str = "", *first: str) -> list[str]:
        """Arguments of ``forebay`` that start the run, or continue it if there is a checkpoint.

        Args:
            source: where the processes find the configuration; default: `self.source`.
            first: overrides before those of the user, who can override them.
        """
        overrides = [part for text in (*first, *self.overrides) for part in ("--set", text)]
        return ["train", source or self.source, "--resume", "auto", *overrides]

    def command(self, indent: str, source: str = "", *first: str) -> str:
        """``-m forebay`` and `arguments` in shell syntax, with a line for each override."""
        lines = [shlex.join(["-m", "forebay", "train", source or self.source, "--resume", "auto"])]
        lines += [f"--set {shlex.quote(text)}" for text in (*first, *self.overrides)]
        return f" \\\n{indent}".join(lines)

    def summary(self, engine: str) -> str:
        """The first lines of every file, without comment signs."""
        what = f"{self.nodes} x {self.processes} {'processes with a GPU each' if self.gpus else 'processes on CPUs'}"
        return f"{Path(self.source).name} on {engine}: {what}. Written by `forebay launch`; lines to check say EDIT."


def describe(
    source: str, overrides: Sequence[str], nodes: int, gpus_per_node: int, time_limit: str = "", image: str = ""
) -> Job:
    """Check a job and describe it.

    Args:
        source: path of a TOML file, or the name of a preset.
        overrides: ``section.key=value`` texts.
        gpus_per_node: processes of each node, one a GPU, or on CPUs with ``device.type = "cpu"``.
        time_limit: such as ``3h50m``; "" is none.

    Raises:
        UsageError: a configuration that is not valid, or that does not fit the number of processes.
    """
    for option, number in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if number < 1:
            raise UsageError(f"{option} {number} is too small; it must be at least 1")
    for text in (source, image, str(Path.cwd()), *overrides):
        if not text.isprintable():
            raise UsageError(f"{text!r} cannot be written into a job file: it holds a control character")
    if image and image.split() != [image]:
        raise UsageError(f"--image {image!r} holds a space")
    config = load(source, overrides)
    check_world(config, nodes * gpus_per_node)
    try:
        seconds = int(parse_duration(time_limit)) if time_limit else 0
    except ValueError as error:
        raise UsageError(f"--time-limit: {error}") from error
    file = Path(source)
    named = file.is_file()
    # Letters beyond ASCII by their numbers: without them two files would share a name, and their runs a folder.
    stem = file.stem.lower().encode("ascii", "backslashreplace").decode()
    return Job(
        name=re.sub("[^a-z0-9]+", "-", f"forebay-{stem}")[:50].strip("-"),
        source=str(file.resolve()) if named else source,
        text=file.read_text("utf-8") if named else None,
        overrides=tuple(overrides),
        nodes=nodes,
        processes=gpus_per_node,
        gpus=0 if config.device.type == "cpu" else gpus_per_node,
        seconds=seconds,
        image=image,
        folder=Path.cwd(),
    )
