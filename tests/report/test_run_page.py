"""Reports of runs: the figures of a real run are on its page, what is missing is said, and bad input is one sentence."""

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from forebay import cli
from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.policy import format_bytes
from forebay.report.run_page import read_run, run_page
from forebay.report.sections import Planned
from forebay.train.loop import train
from tests.report.pages import GIB, RAN, config, plan_of, write_folder
from tests.train.conftest import MODEL

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return call


class Words(HTMLParser):
    """A page's text by the name of its section; tables as lists of rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}
        self.rows: dict[str, list[list[str]]] = {}
        self._at, self._cell, self._skip = "", False, False
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self._skip = name in ("style", "script", "title")
        if name == "section":
            self._at = str(dict(attributes)["id"])
            self.sections[self._at], self.rows[self._at] = "", []
        if name == "tr":
            self.rows[self._at].append([])
        if name in ("td", "th"):
            self.rows[self._at][-1].append("")
            self._cell = True

    def handle_endtag(self, name: str) -> None:
        self._skip = False
        if name in ("td", "th"):
            self._cell = False

    def handle_data(self, text: str) -> None:
        if self._skip:
            return
        self.sections[self._at] += text
        if self._cell:
            self.rows[self._at][-1][-1] += text


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run of four steps on this CPU, all of it kept, uncompiled."""
    base = tmp_path_factory.mktemp("real")
    (base / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    settings = from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": MODEL},
            "data": {"source": "text", "path": str(base / "a.txt"), "cache": str(base / "cache"), "validation": 0.1},
            "train": {"steps": 4, "batch": 4, "microbatch": 2, "sequence": 16, "eval_every": 2},
            "memory": {"policy": {"model.layers.0.*": "recompute"}},
            "log": {"folder": str(base / "run"), "progress": "off", "profile": True},
            "device": {"type": "cpu"},
        }
    )
    return train(settings, Console(file=io.StringIO())), settings


def test_a_real_run(done: tuple[Path, Config], run: Run) -> None:
    folder, _ = done
    code, out, error = run("report", folder)
    assert (code, out, error) == (0, f"page {folder / 'report.html'}\n", "")
    page = Words((folder / "report.html").read_text("utf-8"))
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
    assert compared["saved by one microbatch, all of it kept"][1] == format_bytes(profile["activation_bytes"])
    assert "a CPU does not count what is allocated" in page.sections["compared"]
    assert "parallel.pp is 1" in page.sections["pipeline"]
    assert "recompute" in page.sections["placements"]
    code, _, error = run("report", folder)  # its own page is replaced
    assert code == 0, error


def test_the_whole_of_what_modules_save_is_in_the_table(done: tuple[Path, Config]) -> None:
    folder, _ = done
    page = Words(run_page(read_run(folder), "no plan.", None))
    profile = json.loads((folder / "profile.json").read_text())
    by_module = [row for row in page.rows["saved"] if len(row) == 5 and row[3].endswith(" %")]
    assert sum(float(row[3].removesuffix(" %")) for row in by_module) == pytest.approx(100, abs=0.05 * len(by_module))
    experts = sum(size for path, size in profile["by_region"].items() if path.endswith("mlp.experts"))
    assert [row[1:3] for row in by_module if row[0] == "model.layers.*.mlp.experts"] == [["2", format_bytes(experts)]]


def test_a_run_on_gpus(tmp_path: Path) -> None:
    settings = config(tmp_path, device={"type": "cuda"})
    found = read_run(write_folder(tmp_path / "run", settings))
    plan = plan_of(settings, 2, None)
    text = run_page(found, plan, "pipeline.json")
    page = Words(text)
    assert "4.00GiB" in page.sections[""] and "1 over a capacity" in page.sections[""]
    assert (
        f"reserved at most by a process of pipeline rank 0, the fullest of 2. Planned: {_inside(plan)}"
        in page.sections[""]
    )
    inside = [format_bytes(r.total - r.other - r.cached) for r in plan.fit.ranks]  # what torch's allocator gives out
    peaks = [(row[0], *row[2:4]) for row in page.rows["compared"] if row[1] == "peak allocated"]
    assert peaks == [("0", inside[0], "3.00 GiB"), ("1", inside[1], "2.00 GiB")]
    reserved = [row[2:4] for row in page.rows["compared"] if row[1] == "peak reserved"]
    assert reserved == [[format_bytes(r.total - r.other), "4.00 GiB"] for r in plan.fit.ranks]
    assert plan.fit.fullest.other > 0 and "f-other" not in text.split("</style>")[1]  # none of it was measured
    assert "7.00 MiB moved, out at 51.2 GB/s, waited 0.5 ms" in page.sections["placements"]
    # Rank 0 computes 10 + 18 of 60 ms, rank 1 computes 10 + 20 + 8 + 6.
    assert "53.3 % idle" in page.sections["pipeline"] and "26.7 % idle" in page.sections["pipeline"]
    assert "pipeline.json" in page.sections["pipeline"]


def _inside(plan: Planned) -> str:
    return format_bytes(plan.fit.fullest.total - plan.fit.fullest.other)


def test_a_run_that_did_not_write_what_was_reserved(tmp_path: Path) -> None:
    """Of an older version: what is allocated is compared alone."""
    settings = config(tmp_path, device={"type": "cuda"})
    folder = write_folder(tmp_path / "run", settings)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("reserved_bytes_by_rank", None)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = plan_of(settings, 2, None)
    page = Words(run_page(read_run(folder), plan, None))
    most = plan.fit.fullest
    said = format_bytes(most.allocated - most.other)
    said = f"allocated at most by a process of pipeline rank 0, the fullest of 2. Planned: {said}"
    assert "3.00GiB" in page.sections[""] and said in page.sections[""]
    assert not [row for row in page.rows["compared"] if row[1] == "peak reserved"]


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    found = read_run(write_folder(tmp_path / "run", config(tmp_path)))
    assert sorted(found.ran, key=lambda r: (r.rank, r.start_ms)) == sorted(RAN, key=lambda r: (r.rank, r.start_ms))


def test_a_trace_lies_beside_the_page(tmp_path: Path, run: Run) -> None:
    folder = write_folder(tmp_path / "run", config(tmp_path))
    (tmp_path / "pages").mkdir()
    code, out, error = run("report", folder, "--out", tmp_path / "pages" / "one.html")
    copy = tmp_path / "pages" / "one.pipeline.json"
    assert (code, out) == (0, f"page {tmp_path / 'pages' / 'one.html'}\ntrace {copy}\n"), error
    assert copy.read_bytes() == (folder / "pipeline.json").read_bytes()
    assert 'href="one.pipeline.json"' in (tmp_path / "pages" / "one.html").read_text()
    run("report", folder)
    assert 'href="pipeline.json"' in (folder / "report.html").read_text()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """A run that was stopped in its first step, of a version that wrote less."""
    settings = config(tmp_path)
    folder = write_folder(tmp_path / "run", settings, steps=0)
    for name in ("metrics.jsonl", "result.json", "profile.json", "pipeline.json"):
        (folder / name).unlink()
    (folder / "run.json").write_text(json.dumps({"config": settings.to_dict(), "versions": {}}))
    said = Words(run_page(read_run(folder), "the model is not here.", None)).sections
    assert "None of its 12 steps is recorded" in said[""] and "device not recorded" in said[""]
    assert "There is no plan of this run: the model is not here." in said["step"]
    assert (
        "No step of this run is recorded." in said["peaks"] and "No step of this run is recorded." in said["training"]
    )
    assert "The run left no profile.json; set log.profile = true" in said["saved"]
    assert "This run did not leave its placements" in said["placements"]
    assert "No step was watched: set log.timeline" in said["pipeline"]
    planned = Words(run_page(read_run(folder), plan_of(settings, 2, None), None)).sections
    assert "This run left nothing that a plan can be held against" in planned["compared"]
    assert "As planned: the run did not come to its end" in planned["placements"]


def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    """Its last line may be half written; nothing of it is shown."""
    folder = write_folder(tmp_path / "run", config(tmp_path), steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "cross_en')
    found = read_run(folder)
    assert [s["step"] for s in found.steps] == [1, 2, 3, 4, 5] and found.validations == [(4, 5.5)]
    assert "5 of 12 steps are done" in Words(run_page(found, "no plan.", None)).sections[""]


def test_a_run_of_one_step(tmp_path: Path) -> None:
    """One point is no line; it is drawn all the same."""
    found = read_run(write_folder(tmp_path / "run", config(tmp_path), steps=1))
    assert run_page(found, "no plan.", None).count('class="dots s-one"') == 2  # of a rank's peak, and of the loss


def test_a_model_that_is_not_here(tmp_path: Path, run: Run) -> None:
    settings = config(tmp_path, model={"family": "", "path": str(tmp_path / "gone"), "config": {}})
    folder = write_folder(tmp_path / "run", settings)
    code, _, error = run("report", folder)
    assert code == 0, error
    assert re.search(
        r"There is no plan of this run: .*gone", Words((folder / "report.html").read_text()).sections["step"]
    )


def test_a_folder_whose_name_is_markup(tmp_path: Path, run: Run) -> None:
    name = "<script>alert(1)<-script>&"
    folder = write_folder(tmp_path / name, config(tmp_path))
    code, _, error = run("report", folder)
    text = (folder / "report.html").read_text()
    assert code == 0, error
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;-script&gt;&amp;" in text


def test_bad_input(tmp_path: Path, run: Run) -> None:
    empty, file = tmp_path / "empty", tmp_path / "a file"
    empty.mkdir()
    file.write_text("mine")
    folder = write_folder(tmp_path / "run", config(tmp_path))
    for arguments, code, said in (
        ((tmp_path / "gone",), 2, "gone is no folder; name one that `forebay train` wrote"),
        ((file,), 2, "a file is no folder"),
        ((empty,), 2, "holds no run: it has no run.json"),
        (
            (folder, "--out", tmp_path / "no" / "page.html"),
            2,
            "no is no folder, so page.html cannot be written into it",
        ),
        ((folder, "--out", empty), 2, f"empty is a folder; name a file for the page, such as {empty / 'report.html'}"),
        ((folder, "--out", file), 2, "a file is there already and is no page that Forebay wrote; name another file"),
        ((folder, "--out", folder / "run.json"), 2, "run.json is there already and is no page"),
    ):
        found, out, error = run("report", *arguments)
        assert (found, out) == (code, "") and said in error and error.count("\n") == 1, error
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text", "error", "said"),
    [
        ("run.json", "{", RunError, "run.json is damaged: it is no JSON"),
        ("run.json", "[]", RunError, "run.json is damaged: it is not what"),
        ("run.json", '{"config": {"nothing": {}}}', UsageError, "unknown section"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', RunError, "metrics.jsonl is damaged in line 1"),
        ("metrics.jsonl", "7\n", RunError, "metrics.jsonl is damaged in line 1"),
        ("result.json", "7", RunError, "is damaged"),
        ("pipeline.json", '{"traceEvents": [{}]}', RunError, "is damaged"),
        ("profile.json", "{", RunError, "profile.json is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str, error: type[Exception], said: str) -> None:
    folder = write_folder(tmp_path / "run", config(tmp_path))
    (folder / name).write_text(text)
    with pytest.raises(error, match=re.escape(said)):
        read_run(folder)


def test_peaks_are_those_of_all_steps(tmp_path: Path) -> None:
    """The chart's data has every step of both ranks."""
    found = read_run(write_folder(tmp_path / "run", config(tmp_path)))
    text = run_page(found, "no plan.", None)
    data = [json.loads(one) for one in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    (peaks,) = [d for d in data if d["unit"] == " GiB"]
    assert [s["values"] for s in peaks["series"]] == [[3.0] * 12, [2.0] * 12]
    assert max(s["peak_bytes"] for s in found.steps) == 3 * GIB
