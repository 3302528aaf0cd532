"""The page of a run: its result, its memory, planned and measured, and what each rank did.

Input: the folder that ``forebay train`` wrote (`read_run`), and the plan of its configuration or the reason that
there is none. Output: HTML as text. A file that the run did not write has no figures, and the section says so.
Nothing is written.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import ActionRecord, bubble
from forebay.pipeline.schedule import COMPUTE
from forebay.policy import format_bytes
from forebay.report.charts import Box, Ceiling, Curve, Scale, bar, byte_scale, curves, legend, ran, scale
from forebay.report.html import Html, Section, Verdict, big, grouped, join, missing, page, percent, table, tag, tiles
from forebay.report.plan_page import about
from forebay.report.sections import Planned, hero, parts_of, placements_body, reserved_parts, step_section, the_map

# A run's folder, read: what is there, and nothing made up for what is not.
#
# In: the folder that ``forebay train`` wrote. Out: a `RunFolder` of plain figures; a file that the run did not leave is None or
# empty. Nothing is written.
#
#     run.json        configuration, versions, machine           needed: without it this is no run's folder
#     metrics.jsonl   a record a step; a last line that a kill cut off is left out
#     result.json     by pipeline rank: state, placements, what became of saved bytes
#     profile.json    what a forward pass saves: ``forebay profile --json``, or `log.profile`
#     pipeline.json   what each rank ran in one step (a Chrome trace, of `log.timeline`)

TRACE = "pipeline.json"


@dataclass(frozen=True)
class RunFolder:
    """What a run left.

    Attributes:
        config, versions: of the run.
        machine: see `forebay.train.run_outputs.machine`; empty for a run that did not write it.
        steps: a record a step that was done, see `forebay.train.metrics.StepRecord`.
        validations: (step, nats a token).
        ranks: see `forebay.train.run_outputs.held_by_rank`; empty unless the run came to its end.
        profile: of one process, or a list of one a pipeline rank; None if there is none.
        ran: of the watched step; empty if there is none.
    """

    folder: Path
    config: Config
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[tuple[int, float]]
    ranks: Sequence[Mapping[str, Any]]
    profile: Any
    ran: Sequence[ActionRecord]

    @property
    def processes(self) -> int:
        """Of the run; the fewest it can have had, where it did not write them."""
        p = self.config.parallel
        return int(self.machine.get("processes", p.pp * p.ep))

    @property
    def on_gpu(self) -> bool:
        """Whether memory was measured by the caching allocator."""
        return bool(self.machine) and self.machine["device"] != "CPU"

    @property
    def trace(self) -> Path | None:
        """The file that Perfetto opens."""
        return self.folder / TRACE if self.ran else None


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        UsageError: it is no run's folder.
        RunError: a file in it is damaged.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name one that `forebay train` wrote")
    about = _json(folder / "run.json")
    if about is None:
        raise UsageError(f"{folder} holds no run: it has no run.json; name a folder that `forebay train` wrote")
    try:
        config = from_mapping(about["config"], origin=str(folder / "run.json"))
        versions, machine = dict(about.get("versions", {})), dict(about.get("machine", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / 'run.json'} is damaged: it is not what `forebay train` writes") from error
    records = _lines(folder / "metrics.jsonl")
    result = _json(folder / "result.json") or {}
    trace = _json(folder / TRACE)
    try:
        return RunFolder(
            folder,
            config,
            versions,
            machine,
            [r for r in records if "cross_entropy_loss" in r],
            [(int(r["step"]), float(r["validation_loss"])) for r in records if "validation_loss" in r],
            result.get("ranks", []),
            _json(folder / "profile.json"),
            [] if trace is None else _ran(trace["traceEvents"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"a file in {folder} is damaged: {type(error).__name__}: {error}") from error


def _json(path: Path) -> Any:
    """A file's content; None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: it is no JSON ({error})") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text.endswith("\n")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError("not a step's record")
        except ValueError as error:
            if number == len(lines) and not whole:
                break
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
        found.append(record)
    return found


def _ran(events: Sequence[Mapping[str, Any]]) -> list[ActionRecord]:
    """The trace's actions as they were recorded. Memory is the counter that was written with each action's end."""
    counted: dict[int, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            counted.setdefault(event["pid"], []).append(int(event["args"]["bytes"]))
    nth = dict.fromkeys(counted, 0)
    found = []
    for event in (e for e in events if e["ph"] == "X"):
        rank, start = int(event["pid"]), event["ts"] / 1e3
        memory = counted[rank][nth[rank]]
        nth[rank] += 1
        found.append(ActionRecord(rank, event["cat"], event["name"], start, start + event["dur"] / 1e3, memory))
    return found


COLOURS = ("one", "two", "three", "four")
_DOING: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


def training_section(run: RunFolder) -> Section:
    title = "Loss and speed"
    if not run.steps:
        return Section("training", title, "", missing("No step of this run is recorded."))
    loss = [Curve("training", [(s["step"], s["cross_entropy_loss"]) for s in run.steps], "one")]
    if run.validations:
        loss.append(Curve("validation", run.validations, "two", dots=True))
    values = [value for curve in loss for _, value in curve.points]
    speed = [Curve("tokens a second", [(s["step"], s["tokens_per_second"]) for s in run.steps], "three")]
    fastest = max(value for _, value in speed[0].points)
    per = 1000 if fastest >= 20_000 else 1
    first, last = values[0], run.steps[-1]["cross_entropy_loss"]
    body = join(
        over_steps(
            "Loss",
            "nats a token",
            loss,
            scale(min(values), max(values)),
            f"Loss from {first:.3f} to {last:.3f} nats a token.",
            "",
            4,
            1.0,
        ),
        over_steps(
            "Speed",
            "thousand tokens a second" if per > 1 else "tokens a second",
            speed,
            scale(0.0, fastest, float(per)),
            f"Tokens a second, at most {fastest:,.0f}.",
            "",
            0,
            1.0,
        ),
    )
    return Section(
        "training",
        title,
        "Speed is of all processes together; a step's time has all of it, from forward to optimizer.",
        body,
    )


def over_steps(
    title: str, unit: str, found: Sequence[Curve], y: Scale, spoken: str, suffix: str, digits: int, per: float
) -> Html:
    """Curves over the steps of a run."""
    steps = [at for curve in found for at, _ in curve.points]
    low, high = min(steps), max(steps)
    nice = scale(low, high, count=6)
    x = Scale(
        1.0,
        "",
        low,
        high if high > low else low + 1,
        tuple(t for t in nice.ticks if low <= t <= high and t == int(t)) or (low,),
    )
    caption = tag("figcaption", tag("b", title), tag("span", unit))
    names = legend([(f"f-{c.colour}", c.name, "") for c in found]) if len(found) > 1 else None
    return tag("figure", caption, names, curves(found, x, y, "step", spoken, suffix, digits, per), class_="medium")


def pipeline_section(run: RunFolder, trace: str | None) -> Section:
    title = "Who ran what when"
    if not run.ran:
        why = (
            "There is no pipeline: parallel.pp is 1."
            if run.config.parallel.pp == 1
            else "No step was watched: set log.timeline to a step's number for the next run."
        )
        return Section("pipeline", title, "", missing(why))
    idle = bubble(run.ran)
    by_rank: dict[int, list[ActionRecord]] = {
        rank: [r for r in run.ran if r.rank == rank and r.kind in COMPUTE] for rank in idle
    }
    end = max(r.end_ms for r in run.ran)
    nice = scale(0.0, end, unit="ms", count=6)
    x = Scale(1.0, "milliseconds", 0.0, end, tuple(t for t in nice.ticks if t <= end))
    rows = [
        (f"rank {rank}", f"{share:.1%} idle".replace("%", " %"), _boxes(by_rank[rank])) for rank, share in idle.items()
    ]
    kinds = {box.kind for _, _, boxes in rows for box in boxes}
    names = legend([(f"f-{kind}", name, "") for kind, name in _DOING.items() if kind in kinds])
    opened = None
    if trace is not None:
        link = tag("a", trace, href=quote(trace))
        opened = tag(
            "p",
            "With transfers and memory, in the trace beside this page: ",
            link,
            ", which ui.perfetto.dev and chrome://tracing open.",
        )
    spoken = "Boxes of computation by rank over time: " + ", ".join(f"rank {r} idle {s:.1%}" for r, s in idle.items())
    lead = (
        f"Step {run.config.log.timeline} of the first pipeline, {run.config.parallel.schedule}; computation alone. "
        "Numbers are microbatches; fainter boxes are of a rank's second stage."
    )
    return Section("pipeline", title, lead, join(names, ran(rows, x, spoken), opened))


def _boxes(records: Sequence[ActionRecord]) -> list[Box]:
    found = []
    first = min((stage for r in records for _, stage, _ in r.parts()), default=0)
    for record in records:
        parts = record.parts()
        for n, (kind, stage, microbatch) in enumerate(parts):
            name = f"{_DOING.get(kind, kind)} of microbatch {microbatch}, stage {stage}"
            place = (n / len(parts), 1 / len(parts), stage != first)
            found.append(Box(kind, record.start_ms, record.end_ms, name, microbatch, *place))
    return found


# What memory a run needed, beside what was planned: over a step, step by step, and rank by rank.
#
# In: a `RunFolder` and the plan of its configuration, or the sentence that says why there is none. Out: `Section`s. A figure that
# the run did not leave is not shown, and the section says so.

RESIDENT = (
    "the largest resident size of a process, with Python and its libraries: a CPU does not count what is allocated"
)


def peaks(run: RunFolder) -> dict[int, int]:
    """By pipeline rank, the highest measured peak of all steps; of older runs, that of all ranks as rank 0's."""
    found: dict[int, int] = {}
    for step in run.steps:
        for rank, size in enumerate(step.get("peak_bytes_by_rank", [step["peak_bytes"]])):
            found[rank] = max(found.get(rank, 0), int(size))
    return found


def step_section_of(run: RunFolder, planned: Planned | str) -> Section:
    if not isinstance(planned, Planned):
        return Section("step", "Memory over a step", "", missing(f"There is no plan of this run: {planned}"))
    ceilings = {}
    if run.on_gpu:
        ceilings = {rank: [Ceiling("measured peak", size, "measured")] for rank, size in peaks(run).items()}
    inside: dict[int, dict[str, int]] = {}
    for record in run.ran:
        if record.kind in COMPUTE and record.memory_bytes:
            inside.setdefault(record.rank, {})[record.label] = record.memory_bytes
    lead = "As planned, while each half of the layers runs, forward and backward."
    if any(rank.cached for rank in planned.fit.ranks):
        lead += " It is what torch's allocator gives out; what it reserves for that is a line."
    if run.on_gpu and run.steps:
        lead += " The measured peak is the most that it had given out in any step."
    elif run.machine:
        lead += " Nothing was measured to lay over it: a CPU does not count what is allocated."
    if inside:
        lead += " Points are what was measured at the end of each action of the watched step."
    return step_section(planned, ceilings, inside, lead, outside=False)


def peaks_section(run: RunFolder) -> Section:
    title = "Measured peak, step by step"
    if not run.steps:
        return Section("peaks", title, "", missing("No step of this run is recorded."))
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for step in run.steps:
        for rank, size in enumerate(step.get("peak_bytes_by_rank", [step["peak_bytes"]])):
            by_rank.setdefault(rank, []).append((step["step"], size))
    shown = sorted(by_rank, key=lambda rank: -max(size for _, size in by_rank[rank]))[: len(COLOURS)]
    found = [Curve(f"rank {rank}", by_rank[rank], colour) for rank, colour in zip(sorted(shown), COLOURS, strict=False)]
    y = byte_scale(1.05 * max(size for points in by_rank.values() for _, size in points))
    spoken = f"Measured peak of {len(found)} ranks over {len(run.steps)} steps."
    lead = "What the caching allocator had given out at most, of each rank's fullest process."
    if not run.on_gpu:
        lead = f"{RESIDENT[0].upper()}{RESIDENT[1:]}. It only grows."
    if len(by_rank) > len(shown):
        lead += f" The {len(shown)} fullest of {len(by_rank)} ranks are shown."
    return Section("peaks", title, lead, over_steps("Peak", y.unit, found, y, spoken, f" {y.unit}", 2, y.per))


def compared_section(run: RunFolder, planned: Planned | str) -> Section:
    title = "Planned against measured"
    if not isinstance(planned, Planned):
        return Section("compared", title, "", missing(f"There is no plan of this run: {planned}"))
    rows: list[tuple[str, str, int, int]] = []  # rank, what, planned, measured
    measured, taken = peaks(run), reserved(run)
    for rank in planned.fit.ranks:
        for held in (h for h in run.ranks if h["rank"] == rank.rank):
            rows.append((str(rank.rank), "parameters", rank.parameters, held["parameter_bytes"]))
            rows.append((str(rank.rank), "optimizer", rank.optimizer, held["optimizer_bytes"]))
        if run.on_gpu and rank.rank in measured:
            rows.append((str(rank.rank), "peak allocated", rank.allocated - rank.other, measured[rank.rank]))
        if rank.rank in taken:
            rows.append((str(rank.rank), "peak reserved", rank.reserved, taken[rank.rank]))
    if isinstance(run.profile, Mapping) and len(planned.fit.ranks) == 1:
        saved = sum(h.saved for h in planned.fit.sublayers)
        rows.append(("0", "saved by one microbatch, all of it kept", saved, int(run.profile["activation_bytes"])))
    if not rows:
        return Section(
            "compared",
            title,
            "",
            missing("This run left nothing that a plan can be held against: it did not come to its end."),
        )
    heads = [("rank", ""), ("what", ""), ("planned", "n"), ("measured", "n"), ("planned over measured", "n")]
    lines = [(rank, what, format_bytes(p), format_bytes(m), percent(m, p)) for rank, what, p, m in rows]
    lead = "Saved bytes are planned without what layers share, such as rotary tables, and the batch itself."
    if not run.on_gpu:
        lead += " The peak is not compared: a CPU does not count what is allocated."
    else:
        lead += " Peaks are those of torch's allocator, without what lies outside of it: CUDA's context and NCCL."
    return Section("compared", title, lead, table("By rank, of its fullest process", heads, lines))


def reserved(run: RunFolder) -> dict[int, int]:
    """By pipeline rank, the most that the allocator had reserved in any step; nothing of a CPU, or of older runs."""
    found: dict[int, int] = {}
    for step in run.steps:
        for rank, size in enumerate(step.get("reserved_bytes_by_rank", [])):
            found[rank] = max(found.get(rank, 0), int(size))
    return found


# What a run saved for backward, what saved most of it, and where it waited.
#
# In: a `RunFolder` and the plan of its configuration, or the sentence that says why there is none. Out: `Section`s. A figure that
# the run did not leave is not shown, and the section says so.


def saved_section(run: RunFolder) -> Section:
    title = "What saves most"
    if run.profile is None:
        advice = "set log.profile = true for the next run, or write it with: forebay profile CONFIG --json"
        return Section("saved", title, "", missing(f"The run left no profile.json; {advice}."))
    if isinstance(run.profile, Mapping):
        return Section("saved", title, _whole(run.profile), _saved_by_forward(run.profile))
    lead = (
        "Measured in one step with the placements off, by rank of the pipeline and part of a layer; for one microbatch."
    )
    return Section("saved", title, lead, _saved_by_ranks(run.profile))


def _whole(profile: Mapping[str, Any]) -> str:
    return (
        f"One microbatch saves {format_bytes(profile['activation_bytes'])} for its backward, measured with the placements off; "
        f"{format_bytes(profile['weight_bytes'])} of weights, which are there anyway, are not among them."
    )


def _saved_by_forward(profile: Mapping[str, Any]) -> Html:
    regions = grouped(profile["by_region"])[:14]
    most = max((size for _, _, size in regions), default=1) or 1
    by_region = [
        (
            tag("code", path or "(outside)"),
            str(many),
            format_bytes(size),
            f"{100 * size / (profile['activation_bytes'] or 1):.1f} %",
            bar(size / most, "activations"),
        )
        for path, many, size in regions
    ]
    largest = profile["largest"]
    top = max((s["nbytes"] for s in largest), default=1) or 1
    tensors = [
        (
            tag("code", s["region"] or "(outside)"),
            tag("code", s["operation"]),
            f"{s['dtype']} [{', '.join(map(str, s['shape']))}]",
            format_bytes(s["nbytes"]),
            bar(s["nbytes"] / top, "activations"),
        )
        for s in largest
    ]
    heads = [("module", "path"), ("of them", "n"), ("saved", "n"), ("share", "n"), ("", "share")]
    of_tensor = [("module", "path"), ("operation", ""), ("tensor", ""), ("bytes", "n"), ("", "share")]
    return join(
        table("By module; those of all layers in one line", heads, by_region),
        table("The largest saved tensors", of_tensor, tensors),
    )


def _saved_by_ranks(profiles: Sequence[Mapping[str, Any]]) -> Html:
    found: dict[tuple[int, str], dict[int | None, int]] = {}
    for profile in profiles:
        for saved in profile["saved"]:
            layers = found.setdefault((profile["rank"], saved["part"]), {})
            layers[saved["layer"]] = max(layers.get(saved["layer"], 0), saved["bytes"])
    ordered = sorted(found.items(), key=lambda entry: (entry[0][0], -sum(entry[1].values())))
    most = max((sum(layers.values()) for layers in found.values()), default=1) or 1
    rows = [
        (
            str(rank),
            part,
            str(len(layers)),
            format_bytes(sum(layers.values())),
            bar(sum(layers.values()) / most, "activations"),
        )
        for (rank, part), layers in ordered
    ]
    heads = [("rank", ""), ("part of a layer", ""), ("of them", "n"), ("saved", "n"), ("", "share")]
    at_once = [
        (str(p["rank"]), format_bytes(p["peak_bytes"]), str(sum(p["peak_in_flight"].values()))) for p in profiles
    ]
    once = [("rank", ""), ("saved at once, at most", "n"), ("microbatches that held something then", "n")]
    return join(
        table("For one microbatch, the one that saved most", heads, rows),
        table("All microbatches in flight", once, at_once),
    )


def placements_section(run: RunFolder, planned: Planned | str) -> Section:
    lead = "Each layer's halves, and where what they save for backward waits. Freed is what the device need not hold."
    if not run.ranks:
        if isinstance(planned, Planned):
            lead += " As planned: the run did not come to its end, where it writes what became of them."
            return Section("placements", "Placements", lead, placements_body(planned.fit))
        return Section(
            "placements",
            "Placements",
            "",
            missing("This run did not leave its placements: it did not come to its end."),
        )
    chosen = {path: placement for rank in run.ranks for path, placement in rank["placements"].items()}
    rows = []
    for rank in run.ranks:
        for placement, size in rank["saved_bytes"].items():
            regions = sum(where == placement for where in rank["placements"].values())
            if regions or size:
                rows.append(
                    (
                        str(rank["rank"]),
                        placement,
                        str(regions),
                        format_bytes(size),
                        _copied(rank) if placement == "offload" else "",
                    )
                )
    heads = [("rank", ""), ("placement", ""), ("parts", "n"), ("bytes", "n"), ("copies", "")]
    of = "a step" if len(run.ranks) > 1 else "a microbatch"
    measured = table(f"Measured in the last backward of {of}; of what is recomputed, its inputs wait", heads, rows)
    body = join(placements_body(planned.fit) if isinstance(planned, Planned) else the_map(chosen), measured)
    return Section("placements", "Placements", lead, body)


def _copied(rank: Mapping[str, Any]) -> str:
    figures = [
        (rank["d2h_gbps"], "out at {:.1f} GB/s"),
        (rank["h2d_gbps"], "back at {:.1f} GB/s"),
        (rank["wait_ms"], "waited {:.1f} ms"),
    ]
    return ", ".join(
        [
            f"{format_bytes(rank['moved_bytes'])} moved",
            *(text.format(value) for value, text in figures if value is not None),
        ]
    )


# The page of a run: what came of it, what its memory was, planned and measured, and what each rank did.
#
# In: a `RunFolder`, and what the planner says of its configuration, or why it says nothing. Out: HTML as text, for
# `forebay.report.write`. The sections are in `run_memory.py`, `run_saved.py` and `run_charts.py`.


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
