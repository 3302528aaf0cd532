"""The page of a run: the figures of a real run, statements on what is missing, and bad input in one sentence."""

import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from forebay.config import from_mapping
from forebay.errors import RunError, UsageError
from forebay.policy import format_bytes
from forebay.report.run_files import read_run
from forebay.report.run_page import run_page
from forebay.train.loop import train
from tests.conftest import Run
from tests.report.pages import ACTIONS, GIB, PageText, chart_data, config, plan_of, write_folder
from tests.train.common import MODEL

pytestmark = pytest.mark.usefixtures("shared_traces")


def test_a_real_run(tmp_path: Path, run: Run) -> None:
    """Four steps on this CPU, with all saved tensors kept, uncompiled."""
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    settings = {
        "model": {"family": "qwen3_moe", "config": MODEL},
        "data": {"source": "text", "path": f"{tmp_path}/a.txt", "cache": f"{tmp_path}/cache", "validation": 0.1},
        "train": {"steps": 4, "batch": 4, "microbatch": 2, "sequence": 16, "eval_every": 2},
        "memory": {"policy": {"model.layers.0.*": "recompute"}},
        "log": {"folder": str(tmp_path / "run"), "progress": "off", "profile": True, "health": 2},
        "device": {"type": "cpu"},
    }
    folder = train(from_mapping(settings), Console(file=io.StringIO()))
    for _ in range(2):  # its own page is replaced
        assert run("report", folder) == (0, f"page {folder / 'report.html'}\n", "")
    page = PageText((folder / "report.html").read_text("utf-8"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "seconds" in r]
    profile = json.loads((folder / "profile.json").read_text())
    head = page.sections[""]
    assert "All 4 steps are done" in head and f"{steps[-1]['cross_entropy_loss']:.3f} nats" in head
    assert format_bytes(max(s["peak_bytes"] for s in steps)) in head
    assert format_bytes(profile["activation_bytes"]) in page.sections["saved"]
    largest = profile["largest"][0]
    assert any(largest["region"] == row[0] and format_bytes(largest["nbytes"]) in row for row in page.rows["saved"])
    compared = {row[1]: row[2:] for row in page.rows["compared"]}
    assert compared["parameters"][2] == compared["optimizer"][2] == "exact"  # a CPU's plan is to the byte
    assert compared["saved by one microbatch without placements"][1] == format_bytes(profile["activation_bytes"])
    assert "a CPU does not count allocated memory" in page.sections["compared"]
    health = [r for r in records if "busy_seconds_by_process" in r][-1]
    assert health["step"] == 4 and "In step 4." in page.sections["health"]
    assert [row[:2] for row in page.rows["health"][1:]] == [
        [str(n), f"{health[f'expert_load_max_over_mean/layer_{n}']:.2f}"] for n in (0, 1)
    ]
    assert "parallel.pp is 1" in page.sections["pipeline"]
    assert "recompute" in page.sections["placements"]
    # Everything that modules save is in the table.
    by_module = [row for row in page.rows["saved"] if len(row) == 5 and row[3].endswith(" %")]
    assert sum(float(row[3].removesuffix(" %")) for row in by_module) == pytest.approx(100, abs=0.05 * len(by_module))
    experts = sum(size for path, size in profile["by_region"].items() if path.endswith("mlp.experts"))
    assert [row[1:3] for row in by_module if row[0] == "model.layers.*.mlp.experts"] == [["2", format_bytes(experts)]]


def test_a_folder_as_it_is_read(tmp_path: Path) -> None:
    """A complete one, and that of a run that is under way, whose last line may be half written."""
    by_start = partial(sorted, key=lambda record: (record.rank, record.start_ms))
    found = read_run(write_folder(tmp_path / "run", config(tmp_path)))
    assert by_start(found.actions) == by_start(ACTIONS)
    assert (found.peaks(), found.reserved()) == ({0: 3 * GIB, 1: 2 * GIB}, {0: 4 * GIB, 1: 4 * GIB})
    assert found.processes == 2 and found.on_gpu and found.trace == tmp_path / "run" / "pipeline.json"
    folder = write_folder(tmp_path / "under way", config(tmp_path), steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "cross_en')
    found = read_run(folder)
    assert [s["step"] for s in found.steps] == [1, 2, 3, 4, 5] and found.validations == [(4, 5.5)]


STEP = '{"step": 1, "cross_entropy_loss": 2.0, "seconds": 1, "tokens_per_second": 5%s}\n'
HEALTH = '{"step": 1, "busy_seconds_by_process": [1.5]%s}\n'
FOREIGN = '{"config": {"nothing": {}}, "versions": {}, "machine": {%s}}'
LOAD = ', "peak_bytes_by_process": [9], "expert_load_by_expert/layer_0": [3, 1]'


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("run.json", "{", RunError, "run.json is damaged: it is not JSON"),
        ("run.json", "[]", RunError, "run.json is damaged: it is not what"),
        ("run.json", "null", RunError, "run.json is damaged: it is not what"),
        ("run.json", '{"config": {}, "versions": {}, "machine": {}}', RunError, "run.json is damaged: it is not what"),
        ("run.json", FOREIGN % '"processes": null, "device": "CPU"', RunError, "run.json is damaged: it is not what"),
        (
            "run.json",
            FOREIGN % '"processes": 1, "device": "CPU"',
            UsageError,
            "run.json holds a configuration that is not valid here: the configuration has an unknown section",
        ),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', RunError, "metrics.jsonl is damaged in line 1"),
        ("metrics.jsonl", "7\n", RunError, "metrics.jsonl is damaged in line 1"),
        ("metrics.jsonl", STEP % "", RunError, "line 1: peak_bytes_by_rank is missing, or is not a list of numbers"),
        ("metrics.jsonl", STEP % ', "peak_bytes_by_rank": [null]', RunError, "line 1: peak_bytes_by_rank is missing"),
        (
            "metrics.jsonl",
            '{"step": null, "validation_loss": 1}\n',
            RunError,
            "line 1: step is missing, or is not a num",
        ),
        ("metrics.jsonl", HEALTH % "", RunError, "line 1: peak_bytes_by_process is missing, or is not a list"),
        ("metrics.jsonl", HEALTH % LOAD, RunError, "line 1: expert_load_max_over_mean/layer_0 is missing"),
        ("result.json", "7", RunError, "result.json is damaged"),
        ("result.json", '{"ranks": [{}]}', RunError, "result.json is damaged: it is not what"),
        ("pipeline.json", '{"traceEvents": [{}]}', RunError, "pipeline.json is damaged"),
        ("profile.json", "{", RunError, "profile.json is damaged"),
        ("profile.json", '{"activation_bytes": 1}', RunError, "profile.json is damaged: it is not what"),
        ("profile.json", '[{"rank": 0}]', RunError, "profile.json is damaged: it is not what"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str, error: type[Exception], message: str) -> None:
    folder = write_folder(tmp_path / "run", config(tmp_path))
    (folder / name).write_text(text)
    with pytest.raises(error, match=re.escape(message)):
        read_run(folder)


def test_a_run_on_gpus_and_its_plan(tmp_path: Path) -> None:
    settings = config(tmp_path, device={"type": "cuda"})
    folder = write_folder(tmp_path / "run", settings)
    plan = plan_of(settings, 2, None)
    most = plan.fit.fullest
    text = run_page(read_run(folder), plan, "pipeline.json")
    page = PageText(text)
    assert "4.00GiB" in page.sections[""] and "1 of 12 steps" in page.sections[""]
    reserved = format_bytes(most.total - most.other)
    of = "by a process of pipeline rank 0, the fullest of 2. Planned:"
    assert f"reserved at most {of} {reserved}" in page.sections[""]
    compared = {(row[0], row[1]): row[2:4] for row in page.rows["compared"]}
    for rank, peak in zip(plan.fit.ranks, ("3.00 GiB", "2.00 GiB"), strict=True):
        inside = format_bytes(rank.total - rank.other - rank.cached)  # what torch's allocator hands out
        assert compared[str(rank.rank), "peak allocated"] == [inside, peak]
        assert compared[str(rank.rank), "peak reserved"] == [format_bytes(rank.total - rank.other), "4.00 GiB"]
    assert most.other > 0 and "f-other" not in text.split("</style>")[1]  # none of it was measured
    assert "7.00 MiB moved, out at 51.2 GB/s, waited 0.5 ms" in page.sections["placements"]
    # Rank 0 computes 10 + 18 of 60 ms, rank 1 computes 10 + 20 + 8 + 6.
    assert "53.3 % idle" in page.sections["pipeline"] and "26.7 % idle" in page.sections["pipeline"]
    assert "pipeline.json" in page.sections["pipeline"]
    (peaks,) = [d for d in chart_data(text) if d["unit"] == " GiB" and not d["total"]]
    assert [s["values"] for s in peaks["series"]] == [[3.0] * 12, [2.0] * 12]


def test_a_trace_lies_beside_the_page(tmp_path: Path, run: Run) -> None:
    folder, page = write_folder(tmp_path / "run", config(tmp_path)), tmp_path / "pages" / "one.html"
    page.parent.mkdir()
    copy = page.with_name("one.pipeline.json")
    assert run("report", folder, "--out", page) == (0, f"page {page}\ntrace {copy}\n", "")
    assert copy.read_bytes() == (folder / "pipeline.json").read_bytes()
    assert 'href="one.pipeline.json"' in page.read_text()
    run("report", folder)
    assert 'href="pipeline.json"' in (folder / "report.html").read_text()


def test_missing_figures_are_stated(tmp_path: Path) -> None:
    """A run that stopped in its first step."""
    settings = config(tmp_path)
    folder = write_folder(tmp_path / "run", settings, steps=0)
    for name in ("metrics.jsonl", "result.json", "profile.json", "pipeline.json"):
        (folder / name).unlink()
    found = PageText(run_page(read_run(folder), "the model is not here.", None)).sections
    assert "None of its 12 steps is recorded" in found[""] and "NVIDIA H200" in found[""]
    assert "There is no plan of this run: the model is not here." in found["step"]
    assert (
        "No step of this run is recorded." in found["peaks"] and "No step of this run is recorded." in found["training"]
    )
    assert "This run has no profile.json; set log.profile = true" in found["saved"]
    assert "This run did not write its placements" in found["placements"]
    assert "No step was recorded: set log.timeline" in found["pipeline"]
    planned = PageText(run_page(read_run(folder), plan_of(settings, 2, None), None)).sections
    assert "This run has no figures to compare with the plan" in planned["compared"]
    assert "As planned: the run did not finish" in planned["placements"]


def test_a_run_of_one_step(tmp_path: Path) -> None:
    """One point is not a line; it is drawn all the same, for a rank's peak and for the loss."""
    text = run_page(read_run(write_folder(tmp_path / "run", config(tmp_path), steps=1)), "no plan.", None)
    assert text.count('class="dots s-one"') == 2 and "1 of 12 steps are done" in PageText(text).sections[""]


def test_a_model_that_is_not_here_and_a_name_with_markup(tmp_path: Path, run: Run) -> None:
    settings = config(tmp_path, model={"family": "", "path": str(tmp_path / "gone"), "config": {}})
    folder = write_folder(tmp_path / "<script>alert(1)<-script>&", settings)
    code, _, error = run("report", folder)
    text = (folder / "report.html").read_text()
    assert code == 0, error
    assert re.search(r"There is no plan of this run: .*gone", PageText(text).sections["step"])
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;-script&gt;&amp;" in text


def test_bad_input(tmp_path: Path, run: Run) -> None:
    empty, file = tmp_path / "empty", tmp_path / "a file"
    empty.mkdir()
    file.write_text("mine")
    folder = write_folder(tmp_path / "run", config(tmp_path))
    for arguments, message in (
        ((tmp_path / "gone",), "gone is not a folder; name one that `forebay train` wrote"),
        ((file,), "a file is not a folder"),
        ((empty,), "has no run.json, so it is not the folder of a run"),
        ((folder, "--out", tmp_path / "no" / "page.html"), "no is not a folder; create it, or name another file"),
        ((folder, "--out", empty), f"empty is a folder; name a file for the page, such as {empty / 'report.html'}"),
        ((folder, "--out", file), "a file exists and is not a page that Forebay wrote; name another file"),
        ((folder, "--out", folder / "run.json"), "run.json exists and is not a page"),
    ):
        code, out, error = run("report", *arguments)
        assert (code, out) == (2, "") and message in error and error.count("\n") == 1, error
    assert file.read_text() == "mine"
