"""The page of a run: what came of it, what its memory was, planned and measured, and what each rank did.

In: a `RunFolder`, and what the planner says of its configuration, or why it says nothing. Out: HTML as text, for
`forebay.report.write`. The sections are in `run_memory.py`, `run_saved.py` and `run_charts.py`.
"""

from __future__ import annotations

import os
import statistics

from forebay.policy import format_bytes
from forebay.report.markup import Html, join, tag
from forebay.report.memory import hero, reserved_parts
from forebay.report.page import Verdict, page
from forebay.report.plan_page import about
from forebay.report.planned import Planned, parts_of
from forebay.report.run_charts import pipeline_section, training_section
from forebay.report.run_folder import RunFolder
from forebay.report.run_memory import RESIDENT, compared_section, peaks, peaks_section, reserved, step_section_of
from forebay.report.run_saved import placements_section, saved_section
from forebay.report.tables import big, percent, tiles


def run_page(run: RunFolder, planned: Planned | str, trace: str | None) -> str:
    """The page.

    Args:
        planned: the plan of the run's configuration, or the sentence that says why there is none.
        trace: the Perfetto trace's name beside the page; None if the run has none.
    """
    sections = [
        step_section_of(run, planned),
        peaks_section(run),
        compared_section(run, planned),
        saved_section(run),
        placements_section(run, planned),
        training_section(run),
        pipeline_section(run, trace),
        about(run.config, planned.fit.notes if isinstance(planned, Planned) else (), _versions(run)),
    ]
    return page("run", run.folder.resolve().name, _verdict(run), join(_hero(run, planned), _tiles(run)), sections)


def _verdict(run: RunFolder) -> Verdict:
    wanted = run.config.train.steps
    if not run.steps:
        return Verdict(
            "plain",
            "No step",
            f"None of its {wanted} steps is recorded: it was stopped, or failed, before the first one ended.",
        )
    first, last = run.steps[0], run.steps[-1]
    change = f"the loss went from {first['cross_entropy_loss']:.3f} to {last['cross_entropy_loss']:.3f} nats a token"
    if last["step"] >= wanted:
        return Verdict("good", "Finished", f"All {wanted:,} steps are done; {change}.")
    return Verdict("plain", "Not finished", f"{last['step']:,} of {wanted:,} steps are done; {change}.")


def _hero(run: RunFolder, planned: Planned | str) -> Html | None:
    taken = reserved(run) if run.on_gpu else {}
    measured = taken or peaks(run)
    word = "reserved" if taken else "allocated"
    most = max(measured, key=lambda rank: measured[rank]) if measured else 0
    of = f" of pipeline rank {most}, the fullest of {len(measured)}" if len(measured) > 1 else ""
    if isinstance(planned, Planned):
        if run.on_gpu and measured:
            parts = reserved_parts(planned.fit.fullest)
            parts |= {} if taken else {"cached": 0}
            said = sum(parts.values())
            off = percent(measured[most], said)
            what = f"{word} at most by a process{of}. Planned: {format_bytes(said)} ({off}), made of"
            return hero(parts, what, ("measured", measured[most]), measured[most])
        what = "planned for a process at the highest point of a step, made of"
        return hero(parts_of(planned.fit.fullest), what, None)
    if not measured:
        return None
    what = f"{word} at most by a process" if run.on_gpu else RESIDENT
    return tag("div", big(measured[most]), tag("p", f"{what}{of}", class_="made"), class_="hero")


def _tiles(run: RunFolder) -> Html:
    machine = run.machine.get("device", "device not recorded")
    found = [("processes", f"{run.processes}", f"{machine}")]
    if run.steps:
        steady = run.steps[1:] or run.steps
        speed = statistics.median(s["tokens_per_second"] for s in steady)
        found.append(("tokens a second", f"{speed:,.0f}", "median"))
        found.append(("seconds a step", f"{statistics.median(s['seconds'] for s in steady):.3f}", "median"))
        found.append(("last loss", f"{run.steps[-1]['cross_entropy_loss']:.4f}", "nats a token"))
        measured = max(peaks(run).values())
        found.append(("measured peak", format_bytes(measured), "allocated" if run.on_gpu else "resident"))
    if run.validations:
        found.append(("last validation loss", f"{run.validations[-1][1]:.4f}", "nats a token"))
    again = sum(bool(s.get("run_again")) for s in run.steps)
    if again:
        found.append(("steps run again", str(again), "over a capacity"))
    return tiles(found)


def _versions(run: RunFolder) -> Html:
    said = [f"{name} {version}" for name, version in run.versions.items()]
    return tag(
        "p", f"Run folder: {os.fspath(run.folder)}. Versions: {', '.join(said) or 'not recorded'}.", class_="lead"
    )
