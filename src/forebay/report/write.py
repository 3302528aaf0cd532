"""Pages into files: what ``forebay report`` and ``forebay plan --html`` do.

In: a run's folder, or a plan. Out: one HTML file, and beside that of a run, where the run has one, its Perfetto trace. A page
that Forebay wrote before is replaced; any other file is left alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.estimate.search import Search
from forebay.report.html import OPENS
from forebay.report.plan_page import plan_page
from forebay.report.run_page import RunFolder, read_run, run_page
from forebay.report.sections import Planned, planned

_PAGE = "report.html"


def checked(file: Path) -> Path:
    """`file`, into which a page can be written.

    Raises:
        UsageError: the folder is not there, or something else is in the way.
        RunError: what is there cannot be read.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name a file for the page, such as {file / _PAGE}")
    if not file.parent.is_dir():
        raise UsageError(
            f"{file.parent} is no folder, so {file.name} cannot be written into it; make it first, or name another"
        )
    try:
        if file.exists() and not _is_ours(file):
            raise UsageError(f"{file} is there already and is no page that Forebay wrote; name another file")
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    return file


def write_plan(plan: Planned, config: Config, name: str, file: Path, found: Search | None = None) -> None:
    """The page of a plan, and of the search that led to it.

    Raises:
        UsageError, RunError: see `checked`; or the file cannot be written.
    """
    _write(plan_page(plan, config, name, found), checked(file))


def write_run(folder: Path, file: Path | None = None) -> list[str]:
    """The page of a run; by default ``report.html`` in its folder. Returns the lines that say what was written.

    Raises:
        UsageError: no run's folder, or see `checked`.
        RunError: a file of the run is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    file = checked(folder / _PAGE if file is None else file)
    try:
        plan: Planned | str = planned(run.config, run.processes)
    except UsageError as error:  # the model's folder is not on this machine, for one
        plan = f"{str(error).rstrip('.')}."
    trace = _beside(run, file)
    _write(run_page(run, plan, None if trace is None else trace.name), file)
    return [f"page {file}"] if trace is None else [f"page {file}", f"trace {trace}"]


def _beside(run: RunFolder, file: Path) -> Path | None:
    """The run's trace in the page's folder: the run's own, or a copy that has the page's name."""
    if run.trace is None or file.parent.resolve() == run.trace.parent.resolve():
        return run.trace
    copy = file.with_name(f"{file.stem}.pipeline.json")
    try:
        shutil.copyfile(run.trace, copy)
    except OSError as error:
        raise RunError(f"{copy} cannot be written: {error.strerror}") from error
    return copy


def _write(text: str, file: Path) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error


def _is_ours(file: Path) -> bool:
    begin = OPENS.encode()
    with file.open("rb") as opened:
        return opened.read(len(begin)) == begin
