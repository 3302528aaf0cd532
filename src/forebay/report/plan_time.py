"""How long a planned step is expected to take, and where its time goes.

In: a `StepTime`. Out: tiles for the head of the page, and a `Section`. Nothing is computed here but shares.
"""

from __future__ import annotations

from forebay.planner.steptime import StepTime
from forebay.report.charts import bar
from forebay.report.markup import Html, join
from forebay.report.page import Section
from forebay.report.tables import duration, table

_NOTHING = 1e-9  # seconds: what is left of a difference


def time_tiles(step: StepTime) -> list[tuple[str, str, str]]:
    """Name, figure and what stands behind it; see `forebay.report.tables.tiles`."""
    found = [
        ("expected step time", duration(step.seconds), _device(step)),
        ("tokens a second", f"{step.tokens_per_second:,.0f}", "of all processes"),
    ]
    if len(step.busy) > 1:
        low, high = (f"{100 * share:.0f}" for share in (min(step.bubble), max(step.bubble)))
        found.append(("bubble", f"{high} %" if low == high else f"{low} to {high} %", "by pipeline rank"))
    return found


def time_section(step: StepTime) -> Section:
    lead = (
        f"Expected {_device(step)}; --device names another GPU, or a file of forebay doctor --save-profile. "
        f"A step has {step.tokens:,} tokens."
    )
    if step.host:
        lead += f" The slowest host needs {duration(step.host)} to launch what the schedule runs."
    if step.limited_by_host:
        lead += " That is longer than it runs: memory.graph = true captures the launches."
    return Section("time", "Time of a step", lead, join(_where(step), _by_rank(step)))


def _device(step: StepTime) -> str:
    return f"on {step.device}" + ("" if step.measured else ", from data sheets")


def _where(step: StepTime) -> Html:
    """What a step is the sum of."""
    parts = [
        ("schedule on the device, from the first forward to the last backward", step.schedule),
        ("waiting for the host's launches", step.gradients - step.gather - step.reduce - step.schedule),
        ("gathering sharded weights", step.gather),
        ("reducing gradients", step.reduce),
        ("optimizer", step.optimizer),
        ("host, between steps", step.seconds - step.gradients - step.optimizer),
    ]
    rows = [
        (name, duration(seconds), f"{100 * seconds / step.seconds:.1f} %", bar(seconds / step.seconds, "F"))
        for name, seconds in parts
        if seconds > _NOTHING
    ]
    rows.append(("all of a step", duration(step.seconds), "100.0 %", join()))
    heads = [("part", "path"), ("time", "n"), ("share", "n"), ("", "share")]
    return table("Where the time goes, of the slowest rank", heads, rows, len(rows) - 1)


def _by_rank(step: StepTime) -> Html:
    rows = [
        (str(rank), duration(busy), duration(exposed), f"{100 * max(idle, 0.0):.1f} %", bar(max(idle, 0.0), "other"))
        for rank, (busy, exposed, idle) in enumerate(zip(step.busy, step.exposed, step.bubble, strict=True))
    ]
    heads = [("rank", ""), ("runs", "n"), ("of it, exchanges that nothing hides", "n"), ("bubble", "n"), ("", "share")]
    return table("What each pipeline rank runs of the schedule; the bubble is when it runs nothing", heads, rows)
