"""``forebay launch``: writes the job file of an engine, and hands it to the engine's own program.

Input: a `Job` and an engine. Output: text on standard output or a new file, and the engine's answer. Everything that can be
refused is refused before the file is written.
"""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from forebay.errors import RunError, UsageError
from forebay.launch import engines
from forebay.launch.job import Job


@dataclass(frozen=True)
class Engine:
    """How an engine takes a job."""

    write: Callable[[Job], str]  # makes the text of the job's file
    submit: tuple[str, ...]  # the command that takes the file


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "slurm": Engine(engines.slurm, ("sbatch",)),
        "kubernetes": Engine(engines.kubernetes, ("kubectl", "apply", "-f")),
        "skypilot": Engine(engines.skypilot, ("sky", "jobs", "launch", "--yes")),
        "ray": Engine(engines.ray, ("ray", "job", "submit", "--no-wait", "--", "python")),
    }
)


def launch(job: Job, on: str, out: Path | None = None, submit: bool = False, force: bool = False) -> None:
    """Write the job file of engine `on` and, with `submit`, submit it.

    Args:
        out: the file; None is standard output.
        force: overwrite the file.

    Raises:
        UsageError: an option that the engine does not have, a file that exists, or an engine that is not installed.
        RunError: the engine refused the job; the message is the engine's.
    """
    engine = ENGINES[on]
    _check(job, on, engine, out, submit, force)
    text = engine.write(job)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    command = [*engine.submit, str(out.absolute())]  # Ray starts a job in a folder of the head node's choice
    if not submit:
        print(f"wrote {out}; submit it with: {shlex.join(command)}")
        return
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode:
        said = _error(done.stderr.strip()) or f"exit code {done.returncode}"
        raise RunError(f"{engine.submit[0]} did not take {out}: {said}")


def _error(said: str) -> str:
    """The message to show: what a program said, or the exception alone if it ended with a Python traceback."""
    _, traceback, after = said.rpartition("Traceback (most recent call last):")
    return after.rpartition("\n  ")[2].partition("\n")[2] if traceback else said


def _check(job: Job, on: str, engine: Engine, out: Path | None, submit: bool, force: bool) -> None:
    if job.seconds and on in ("skypilot", "ray"):
        raise UsageError(f"--time-limit is for slurm and kubernetes; for {on} give --set train.time_limit=3h50m")
    if on == "slurm" and 0 < job.seconds < engines.SLURM_SHORTEST:
        raise UsageError(
            f"--time-limit of {job.seconds} s is too short: Slurm says {engines.SLURM_WARNING} s before the limit, or up to "
            f"a minute earlier, that it is near, and the run stops; give {engines.SLURM_SHORTEST} s or more"
        )
    if job.image and on == "ray":
        raise UsageError("--image is for slurm, kubernetes and skypilot; Ray's workers have the image of the cluster")
    if submit and out is None:
        raise UsageError("--submit submits a file, which also continues the run later; name it with --out FILE")
    if submit and on == "kubernetes" and not job.image:
        raise UsageError("--submit on kubernetes needs --image, a container image with Forebay")
    if submit and shutil.which(engine.submit[0]) is None:
        raise UsageError(
            f"--submit needs {on}'s program {engine.submit[0]!r}, which is not on the PATH; "
            "without --submit the file is written, and can be submitted elsewhere"
        )
    if out is not None and out.exists() and not force:
        raise UsageError(f"--out {out} exists; --force overwrites it")
