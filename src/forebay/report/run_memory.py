"""What memory a run needed, beside what was planned: over a step, step by step, and rank by rank.

In: a `RunFolder` and the plan of its configuration, or the sentence that says why there is none. Out: `Section`s. A figure that
the run did not leave is not shown, and the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from forebay.policy import format_bytes
from forebay.report.axes import byte_scale
from forebay.report.charts import Ceiling, Curve
from forebay.report.memory import step_section
from forebay.report.page import Section, missing
from forebay.report.pipeline import COMPUTE
from forebay.report.planned import Planned
from forebay.report.run_charts import COLOURS, over_steps
from forebay.report.run_folder import RunFolder
from forebay.report.tables import percent, table

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
        saved = sum(h.saved for h in planned.fit.halves)
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
