"""A run's folder as it is read: complete, under way, incomplete and damaged."""

import re
from pathlib import Path

import pytest

from forebay.errors import RunError, UsageError
from forebay.report.run_page import read_run
from tests.report.pages import ACTIONS, GIB, config, write_folder


def test_a_complete_folder(tmp_path: Path) -> None:
    found = read_run(write_folder(tmp_path / "run", config(tmp_path)))
    assert sorted(found.actions, key=lambda r: (r.rank, r.start_ms)) == sorted(
        ACTIONS, key=lambda r: (r.rank, r.start_ms)
    )
    assert (found.peaks(), found.reserved()) == ({0: 3 * GIB, 1: 2 * GIB}, {0: 4 * GIB, 1: 4 * GIB})
    assert found.processes == 2 and found.on_gpu and found.trace == tmp_path / "run" / "pipeline.json"


def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    """Its last line may be half written."""
    folder = write_folder(tmp_path / "run", config(tmp_path), steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "cross_en')
    found = read_run(folder)
    assert [s["step"] for s in found.steps] == [1, 2, 3, 4, 5] and found.validations == [(4, 5.5)]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("run.json", "{", RunError, "run.json is damaged: it is not JSON"),
        ("run.json", "[]", RunError, "run.json is damaged: it is not what"),
        ("run.json", '{"config": {"nothing": {}}}', UsageError, "unknown section"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', RunError, "metrics.jsonl is damaged in line 1"),
        ("metrics.jsonl", "7\n", RunError, "metrics.jsonl is damaged in line 1"),
        ("result.json", "7", RunError, "is damaged"),
        ("pipeline.json", '{"traceEvents": [{}]}', RunError, "is damaged"),
        ("profile.json", "{", RunError, "profile.json is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str, error: type[Exception], message: str) -> None:
    folder = write_folder(tmp_path / "run", config(tmp_path))
    (folder / name).write_text(text)
    with pytest.raises(error, match=re.escape(message)):
        read_run(folder)
