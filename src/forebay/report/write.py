"""Writes pages into files: ``forebay report`` and ``forebay plan --html``.

Input: a run's folder, or a plan. Output: one HTML file, and for a run that has one, its Perfetto trace beside it. A page
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
from forebay.report.read_run import RunFolder, read_run
from forebay.report.run_page import run_page
from forebay.report.sections import Planned, plan_run
from forebay.train.durable import replace_text

_PAGE = "report.html"


def checked(file: Path) -> Path:
    """`file`, if a page can be written to it.

    Raises:
        UsageError: the folder does not exist, or another file or folder is in the way.
        RunError: the existing file cannot be read.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name a file for the page, such as {file / _PAGE}")
    if not file.parent.is_dir():
        raise UsageError(f"{file} cannot be written: {file.parent} is not a folder; create it, or name another file")
    try:
        if file.exists() and not _is_page(file):
            raise UsageError(f"{file} exists and is not a page that Forebay wrote; name another file")
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    return file


def write_plan(plan: Planned, config: Config, name: str, file: Path, found: Search | None = None) -> None:
    """Write the page of a plan, and of the search that led to it.

    Raises:
        UsageError, RunError: see `checked`; or the file cannot be written.
    """
    _write(plan_page(plan, config, name, found), checked(file))


def write_run(folder: Path, file: Path | None = None) -> list[str]:
    """Write the page of a run, by default to ``report.html`` in its folder. Returns lines that name the written files.

    Raises:
        UsageError: not a run's folder, or see `checked`.
        RunError: a file of the run is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    file = checked(folder / _PAGE if file is None else file)
    try:
        plan: Planned | str = plan_run(run.config, run.processes)
    except UsageError as error:  # for example, the model's folder is not on this machine
        plan = f"{str(error).rstrip('.')}."
    trace = _trace_beside(run, file)
    _write(run_page(run, plan, None if trace is None else trace.name), file)
    return [f"page {file}"] if trace is None else [f"page {file}", f"trace {trace}"]


def _trace_beside(run: RunFolder, file: Path) -> Path | None:
    """The run's trace in the page's folder: the run's own file, or a copy named after the page."""
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
        replace_text(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error


def _is_page(file: Path) -> bool:
    begin = OPENS.encode()
    with file.open("rb") as opened:
        return opened.read(len(begin)) == begin
