"""What a run saved for backward, what saved most of it, and where it waited.

In: a `RunFolder` and the plan of its configuration, or the sentence that says why there is none. Out: `Section`s. A figure that
the run did not leave is not shown, and the section says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.policy import format_bytes
from forebay.report.charts import bar
from forebay.report.markup import Html, join, tag
from forebay.report.memory import placements_body, the_map
from forebay.report.page import Section, missing
from forebay.report.planned import Planned
from forebay.report.run_folder import RunFolder
from forebay.report.tables import grouped, table


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
