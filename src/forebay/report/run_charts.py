"""What a run did: its loss and speed over its steps, and what each rank of the pipeline ran in one of them.

In: a `RunFolder`. Out: `Section`s. What the run did not leave is not shown, and the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from forebay.report.axes import Scale, scale
from forebay.report.charts import Box, Curve, curves, legend, ran
from forebay.report.markup import Html, join, tag
from forebay.report.page import Section, missing
from forebay.report.pipeline import COMPUTE, Ran, boxes_of, bubble
from forebay.report.run_folder import RunFolder

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
    by_rank: dict[int, list[Ran]] = {
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


def _boxes(records: Sequence[Ran]) -> list[Box]:
    found = []
    first = min((stage for r in records for _, stage, _ in boxes_of(r)), default=0)
    for record in records:
        parts = boxes_of(record)
        for n, (kind, stage, microbatch) in enumerate(parts):
            name = f"{_DOING.get(kind, kind)} of microbatch {microbatch}, stage {stage}"
            place = (n / len(parts), 1 / len(parts), stage != first)
            found.append(Box(kind, record.start_ms, record.end_ms, name, microbatch, *place))
    return found
