"""The page of a run: its result, its memory, planned and measured, and what each rank did.

Input: the folder that ``forebay train`` wrote. Only run.json is required; a section says so where the run did not write its
figures, or why the run cannot be planned here. Output: HTML as text (`run_page`); or a file, and for a run that has one, its
Perfetto trace beside it (`write_run`).
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import MEANING, ActionRecord, bubble
from forebay.pipeline.schedule import COMPUTE
from forebay.policy import format_bytes
from forebay.report.charts import Box, Ceiling, Curve, Scale, activity, bar, byte_scale, curves, legend, scale
from forebay.report.html import (
    PAGE,
    Html,
    Section,
    Verdict,
    big,
    checked,
    empty,
    grouped,
    join,
    page,
    percent,
    table,
    tag,
    tiles,
    write_page,
)
from forebay.report.plan_page import (
    PLACED,
    Planned,
    about,
    hero,
    layer_placements,
    parts_of,
    placements_body,
    plan_run,
    step_section,
    without_other,
)
from forebay.report.run_files import RunFolder, read_run
from forebay.train.metrics import copy_figures

_PROCESSES = 8  # the slowest ones that a page shows
_COLORS = ("one", "two", "three", "four")
_CPU = "a CPU does not count allocated memory"
_RESIDENT = f"the largest resident size of a process, with Python and its libraries: {_CPU}"


def write_run(folder: Path, file: Path | None = None) -> list[str]:
    """Write the page of a run, by default to ``report.html`` in its folder. Returns lines that name the written files.

    Raises:
        UsageError: not a run's folder, or see `checked`.
        RunError: a file of the run is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    file = checked(folder / PAGE if file is None else file)
    try:
        plan: Planned | str = plan_run(run.config, run.processes)
    except UsageError as error:  # for example, the model's folder is not on this machine
        plan = f"{str(error).rstrip('.')}."
    trace = _trace_beside(run, file)
    write_page(run_page(run, plan, None if trace is None else trace.name), file)
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


def run_page(run: RunFolder, planned: Planned | str, trace: str | None) -> str:
    """The page.

    Args:
        planned: the plan of the run's configuration, or the sentence that says why there is none.
        trace: the Perfetto trace's name beside the page; None if the run has none.
    """
    notes = planned.fit.notes if isinstance(planned, Planned) else ()
    sections = [
        _step_section(run, planned),
        _peaks_section(run),
        _compared_section(run, planned),
        _saved_section(run),
        _placements_section(run, planned),
        _training_section(run),
        _health_section(run),
        _pipeline_section(run, trace),
        about(run.config, notes, _versions(run)),
    ]
    return page("run", run.folder.resolve().name, _verdict(run), join(_hero(run, planned), _tiles(run)), sections)


def _verdict(run: RunFolder) -> Verdict:
    wanted = run.config.train.steps
    if not run.steps:
        sentence = f"None of its {wanted} steps is recorded: it stopped or failed before the first one ended."
        return Verdict("plain", "No step", sentence)
    first, last = run.steps[0], run.steps[-1]
    change = f"the loss went from {first['cross_entropy_loss']:.3f} to {last['cross_entropy_loss']:.3f} nats a token"
    if last["step"] >= wanted:
        return Verdict("good", "Finished", f"All {wanted:,} steps are done; {change}.")
    return Verdict("plain", "Not finished", f"{last['step']:,} of {wanted:,} steps are done; {change}.")


def _hero(run: RunFolder, planned: Planned | str) -> Html | None:
    measured = run.reserved() or run.peaks()
    most = max(measured, key=lambda rank: measured[rank]) if measured else 0
    of = f" of pipeline rank {most}, the fullest of {len(measured)}" if len(measured) > 1 else ""
    if isinstance(planned, Planned):
        if not (run.on_gpu and measured):
            what = "planned for a process at the peak of a step, made of"
            return hero(parts_of(planned.fit.fullest), what, None)
        parts = without_other(parts_of(planned.fit.fullest))
        total = sum(parts.values())
        what = f"reserved at most by a process{of}. Planned: {format_bytes(total)} ({percent(measured[most], total)}), made of"
        return hero(parts, what, ("measured", measured[most]), measured[most])
    if not measured:
        return None
    what = "reserved at most by a process" if run.on_gpu else _RESIDENT
    return tag("div", big(measured[most]), tag("p", f"{what}{of}", class_="made"), class_="hero")


def _tiles(run: RunFolder) -> Html:
    found = [("processes", f"{run.processes}", str(run.machine["device"]))]
    if run.steps:
        steady = run.steps[1:] or run.steps
        speed = statistics.median(s["tokens_per_second"] for s in steady)
        found.append(("tokens a second", f"{speed:,.0f}", "median"))
        found.append(("seconds a step", f"{statistics.median(s['seconds'] for s in steady):.3f}", "median"))
        found.append(("last loss", f"{run.steps[-1]['cross_entropy_loss']:.4f}", "nats a token"))
        peak = format_bytes(max(run.peaks().values()))
        found.append(("measured peak", peak, "allocated" if run.on_gpu else "resident"))
    if run.validations:
        found.append(("last validation loss", f"{run.validations[-1][1]:.4f}", "nats a token"))
    if retries := sum(bool(s.get("run_again")) for s in run.steps):
        found.append(("capacity retries", str(retries), f"of {len(run.steps)} steps"))
    return tiles(found)


def _versions(run: RunFolder) -> Html:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return tag("p", f"Run folder: {os.fspath(run.folder)}. Versions: {versions}.", class_="lead")


def _step_section(run: RunFolder, planned: Planned | str) -> Section:
    if not isinstance(planned, Planned):
        return empty("step", "Memory over a step", f"There is no plan of this run: {planned}")
    ceilings = {}
    if run.on_gpu:
        ceilings = {rank: [Ceiling("measured peak", size, "measured")] for rank, size in run.peaks().items()}
    measured: dict[int, dict[str, int]] = {}
    for record in run.actions:
        if record.kind in COMPUTE and record.memory_bytes:
            measured.setdefault(record.rank, {})[record.label] = record.memory_bytes
    lead = "As planned, while each sublayer runs forward and backward."
    if any(rank.cached for rank in planned.fit.ranks):
        lead += " The stack is the memory that torch's allocator hands out; the line is what it reserves for that."
    if run.on_gpu and run.steps:
        lead += " The measured peak is the most that it handed out in any step."
    if not run.on_gpu:
        lead += f" There is no measurement to compare: {_CPU}."
    if measured:
        lead += " Points are measured at the end of each action of the recorded step."
    return step_section(planned, ceilings, measured, lead, outside=False)


def _peaks_section(run: RunFolder) -> Section:
    title = "Measured peak by step"
    if not run.steps:
        return empty("peaks", title, "No step of this run is recorded.")
    points = run.peak_points()
    most = {rank: max(size for _, size in found) for rank, found in points.items()}
    shown = sorted(sorted(points, key=lambda rank: -most[rank])[: len(_COLORS)])
    found = [Curve(f"rank {rank}", points[rank], color) for rank, color in zip(shown, _COLORS, strict=False)]
    y = byte_scale(1.05 * max(most.values()))
    described = f"Measured peak of {len(found)} ranks over {len(run.steps)} steps."
    lead = "The most memory that the caching allocator handed out, for the fullest process of each rank."
    if not run.on_gpu:
        lead = f"{_RESIDENT[0].upper()}{_RESIDENT[1:]}. It only grows."
    if len(points) > len(shown):
        lead += f" The {len(shown)} fullest of {len(points)} ranks are shown."
    chart = curves(found, _step_axis(found), y, described, digits=2, unit=f" {y.unit}", per=y.per)
    return Section("peaks", title, lead, _figure("Peak", y.unit, found, chart))


def _step_axis(found: Sequence[Curve]) -> Scale:
    """A scale from the first step to the last, with ticks at whole numbers."""
    steps = [at for curve in found for at, _ in curve.points]
    low, high = min(steps), max(steps)
    ticks = tuple(t for t in scale(low, high, count=6).ticks if low <= t <= high and t == int(t))
    return Scale(1.0, "", low, high if high > low else low + 1, ticks or (low,))


def _figure(title: str, unit: str, found: Sequence[Curve], chart: Html) -> Html:
    caption = tag("figcaption", tag("b", title), tag("span", unit))
    names = legend([(f"f-{c.color}", c.name, "") for c in found]) if len(found) > 1 else None
    return tag("figure", caption, names, chart, class_="medium")


def _compared_section(run: RunFolder, planned: Planned | str) -> Section:
    title = "Planned and measured"
    if not isinstance(planned, Planned):
        return empty("compared", title, f"There is no plan of this run: {planned}")
    found = _compared(run, planned)
    if not found:
        return empty("compared", title, "This run has no figures to compare with the plan: it did not finish.")
    rows = [(rank, what, format_bytes(p), format_bytes(m), percent(m, p)) for rank, what, p, m in found]
    lead = "Planned saved bytes do not include what layers share, such as rotary tables, nor the batch itself."
    if run.on_gpu:
        lead += " Peaks are those of torch's allocator, without memory outside of it: CUDA's context and NCCL."
    else:
        lead += f" The peak is not compared: {_CPU}."
    heads = "rank|what|planned:n|measured:n|planned over measured:n"
    return Section("compared", title, lead, table("By rank, for its fullest process", heads, rows))


def _compared(run: RunFolder, planned: Planned) -> list[tuple[str, str, int, int]]:
    """(rank, what, planned, measured) of every figure that has both."""
    rows: list[tuple[str, str, int, int]] = []
    measured, taken = run.peaks(), run.reserved()
    for rank in planned.fit.ranks:
        name = str(rank.rank)
        for held in (h for h in run.ranks if h["rank"] == rank.rank):
            rows.append((name, "parameters", rank.parameters, held["parameter_bytes"]))
            rows.append((name, "optimizer", rank.optimizer, held["optimizer_bytes"]))
        if run.on_gpu and rank.rank in measured:
            rows.append((name, "peak allocated", rank.allocated - rank.other, measured[rank.rank]))
        if rank.rank in taken:
            rows.append((name, "peak reserved", rank.reserved, taken[rank.rank]))
    if isinstance(run.profile, Mapping) and len(planned.fit.ranks) == 1:
        saved = sum(h.saved for h in planned.fit.sublayers)
        rows.append(("0", "saved by one microbatch without placements", saved, int(run.profile["activation_bytes"])))
    return rows


def _saved_section(run: RunFolder) -> Section:
    title, profile = "Largest saved tensors", run.profile
    if profile is None:
        advice = "set log.profile = true for the next run, or write it with: forebay profile CONFIG --json"
        return empty("saved", title, f"This run has no profile.json; {advice}.")
    if isinstance(profile, Mapping):
        lead = (
            f"One microbatch saves {format_bytes(profile['activation_bytes'])} for its backward, measured without placements. "
            f"This does not include {format_bytes(profile['weight_bytes'])} of weights, which exist anyway."
        )
        return Section("saved", title, lead, join(_saved_by_module(profile), _saved_tensors(profile)))
    lead = "Measured in one step without placements, by pipeline rank and part of a layer, for one microbatch."
    return Section("saved", title, lead, _saved_by_ranks(profile))


def _saved_by_module(profile: Mapping[str, Any]) -> Html:
    modules = grouped(profile["by_region"])[:14]
    most = max((size for _, _, size in modules), default=1) or 1
    rows = []
    for path, many, size in modules:
        share = f"{100 * size / (profile['activation_bytes'] or 1):.1f} %"
        rows.append(
            [tag("code", path or "(outside)"), str(many), format_bytes(size), share, bar(size / most, "activations")]
        )
    return table(
        "By module; the same module of all layers in one row", "module:path|number:n|saved:n|share:n|:share", rows
    )


def _saved_tensors(profile: Mapping[str, Any]) -> Html:
    most = max((s["nbytes"] for s in profile["largest"]), default=1) or 1
    rows = []
    for s in profile["largest"]:
        shape = f"{s['dtype']} [{', '.join(map(str, s['shape']))}]"
        size = format_bytes(s["nbytes"]), bar(s["nbytes"] / most, "activations")
        rows.append([tag("code", s["region"] or "(outside)"), tag("code", s["operation"]), shape, *size])
    return table("The largest saved tensors", "module:path|operation|tensor|bytes:n|:share", rows)


def _saved_by_ranks(profiles: Sequence[Mapping[str, Any]]) -> Html:
    found: dict[tuple[int, str], dict[int | None, int]] = {}
    for profile in profiles:
        for saved in profile["saved"]:
            layers = found.setdefault((profile["rank"], saved["part"]), {})
            layers[saved["layer"]] = max(layers.get(saved["layer"], 0), saved["bytes"])
    sizes = {key: sum(layers.values()) for key, layers in found.items()}
    most = max(sizes.values(), default=1) or 1
    rows = []
    for (rank, part), size in sorted(sizes.items(), key=lambda entry: (entry[0][0], -entry[1])):
        number = str(len(found[rank, part]))
        rows.append([str(rank), part, number, format_bytes(size), bar(size / most, "activations")])
    peaks = [(str(p["rank"]), format_bytes(p["peak_bytes"]), str(sum(p["peak_in_flight"].values()))) for p in profiles]
    return join(
        table("For the microbatch that saved most", "rank|part of a layer|number:n|saved:n|:share", rows),
        table("All microbatches in flight", "rank|saved at the peak:n|microbatches in flight then:n", peaks),
    )


def _placements_section(run: RunFolder, planned: Planned | str) -> Section:
    title = "Placements"
    if not run.ranks:
        if not isinstance(planned, Planned):
            return empty("placements", title, "This run did not write its placements: it did not finish.")
        lead = f"{PLACED} As planned: the run did not finish, so it did not write what it saved."
        return Section("placements", title, lead, placements_body(planned.fit))
    chosen = {path: placement for rank in run.ranks for path, placement in rank["placements"].items()}
    cells = placements_body(planned.fit) if isinstance(planned, Planned) else layer_placements(chosen)
    return Section("placements", title, PLACED, join(cells, _placed(run.ranks)))


def _placed(ranks: Sequence[Mapping[str, Any]]) -> Html:
    rows = []
    for rank in ranks:
        for placement, size in rank["saved_bytes"].items():
            regions = sum(where == placement for where in rank["placements"].values())
            if regions or size:
                copies = ""
                if placement == "offload":
                    figures = copy_figures(rank["d2h_gbps"], rank["h2d_gbps"], rank["wait_ms"])
                    copies = ", ".join([f"{format_bytes(rank['moved_bytes'])} moved", *figures])
                rows.append((str(rank["rank"]), placement, str(regions), format_bytes(size), copies))
    of = "a step" if len(ranks) > 1 else "a microbatch"
    caption = f"Measured in the last backward of {of}; a recomputed part saves its input"
    return table(caption, "rank|placement|parts:n|bytes:n|copies", rows)


def _training_section(run: RunFolder) -> Section:
    title = "Loss and speed"
    if not run.steps:
        return empty("training", title, "No step of this run is recorded.")
    loss = [Curve("training", [(s["step"], s["cross_entropy_loss"]) for s in run.steps], "one")]
    if run.validations:
        loss.append(Curve("validation", run.validations, "two", dots=True))
    values = [value for curve in loss for _, value in curve.points]
    described = f"Loss from {values[0]:.3f} to {run.steps[-1]['cross_entropy_loss']:.3f} nats a token."
    drawn = curves(loss, _step_axis(loss), scale(min(values), max(values)), described, digits=4)
    speed = [Curve("tokens a second", [(s["step"], s["tokens_per_second"]) for s in run.steps], "three")]
    fastest = max(value for _, value in speed[0].points)
    per, unit = (1000.0, "thousand tokens a second") if fastest >= 20_000 else (1.0, "tokens a second")
    described = f"Tokens a second, at most {fastest:,.0f}."
    also_drawn = curves(speed, _step_axis(speed), scale(0.0, fastest, per), described, digits=0)
    body = join(_figure("Loss", "nats a token", loss, drawn), _figure("Speed", unit, speed, also_drawn))
    lead = "Speed is that of all processes together. The time of a step includes everything from forward to optimizer."
    return Section("training", title, lead, body)


def _health_section(run: RunFolder) -> Section:
    title = "Processes and experts"
    found = run.health
    if not found:
        return empty("health", title, "No step of this run has a record: they come every log.health steps.")
    tables = []
    busy, peaks = found["busy_seconds_by_process"], found["peak_bytes_by_process"]
    if len(busy) > 1:
        slowest = sorted(range(len(busy)), key=lambda n: -busy[n])[:_PROCESSES]
        rows = [(f"{n}", f"{busy[n]:.3f}", format_bytes(peaks[n])) for n in slowest]
        tables.append(table("The processes with the most busy time", "process|busy seconds:n|peak:n", rows))
    loads = {n.partition("/layer_")[2]: v for n, v in found.items() if n.startswith("expert_load_by_expert/")}
    layers = [
        (layer, f"{most:.2f}", str(load.count(0)), f"{found[f'router_entropy/layer_{layer}']:.3f}")
        for layer, load in loads.items()
        for most in [found[f"expert_load_max_over_mean/layer_{layer}"]]
    ]
    if layers:
        heads = "layer|largest load over the mean:n|unused experts:n|router entropy in nats:n"
        tables.append(table("Experts by layer", heads, layers))
    lead = f"In step {found['step']}. Busy time leaves out the waits for other processes where gradients begin and end."
    if loads:
        lead += f" Even routing over {len(next(iter(loads.values())))} experts has a load of 1.00 and an entropy of "
        lead += f"{math.log(len(next(iter(loads.values())))):.3f} nats."
    if not tables:
        return empty("health", title, "The run has one process and no experts.")
    return Section("health", title, lead, join(*tables))


def _pipeline_section(run: RunFolder, trace: str | None) -> Section:
    title = "Pipeline timeline"
    if not run.actions:
        why = "No step was recorded: set log.timeline to a step's number for the next run."
        if run.config.parallel.pp == 1:
            why = "There is no pipeline: parallel.pp is 1."
        return empty("pipeline", title, why)
    idle = bubble(run.actions)
    end = max(r.end_ms for r in run.actions)
    x = Scale(1.0, "milliseconds", 0.0, end, tuple(t for t in scale(0.0, end, count=6).ticks if t <= end))
    rows = []
    for rank, share in idle.items():
        boxes = _boxes([r for r in run.actions if r.rank == rank and r.kind in COMPUTE])
        rows.append((f"rank {rank}", f"{100 * share:.1f} % idle", boxes))
    kinds = {box.kind for _, _, boxes in rows for box in boxes}
    names = legend([(f"f-{kind}", name, "") for kind, name in MEANING.items() if kind in kinds])
    described = "Computation by rank over time: " + ", ".join(f"rank {r} idle {s:.1%}" for r, s in idle.items())
    lead = (
        f"Step {run.config.log.timeline} of the first pipeline, {run.config.parallel.schedule}; only computation is shown. "
        "Numbers are microbatches; fainter boxes are those of a rank's second stage."
    )
    return Section("pipeline", title, lead, join(names, activity(rows, x, described), _trace_link(trace)))


def _trace_link(trace: str | None) -> Html | None:
    if trace is None:
        return None
    link = tag("a", trace, href=quote(trace))
    what = "The trace beside this page also has transfers and memory: "
    return tag("p", what, link, ". Open it in ui.perfetto.dev or chrome://tracing.")


def _boxes(records: Sequence[ActionRecord]) -> list[Box]:
    found = []
    first = min((stage for r in records for _, stage, _ in r.parts()), default=0)
    for record in records:
        parts = record.parts()
        for n, (kind, stage, microbatch) in enumerate(parts):
            name = f"{MEANING.get(kind, kind)} of microbatch {microbatch}, stage {stage}"
            place = (n / len(parts), 1 / len(parts), stage != first)
            found.append(Box(kind, record.start_ms, record.end_ms, name, microbatch, *place))
    return found
