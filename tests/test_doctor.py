"""The doctor answers on every machine, says what it turns on, and survives a check that breaks."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from forebay import doctor
from forebay.cli import main
from forebay.doctor import Finding, examine
from tests.conftest import Run
from tests.models.conftest import MOE_FAMILIES, MORE_FAMILIES

ROOT = Path(__file__).parents[1]

NAMES = (
    "torch",
    "transformers",
    "Triton",
    "C++ compiler",
    "cuDNN attention",
    "grouped_mm",
    "symmetric memory",
)


def found() -> dict[str, Finding]:
    return {f.name: f for f in examine().found if isinstance(f, Finding)}


def test_everything_is_looked_at() -> None:
    findings = found()
    assert {*NAMES, "pinned memory"} <= findings.keys()
    assert all(findings[name].enables for name in NAMES[2:])
    assert findings["torch"].value.startswith(torch.__version__)
    assert not any("the check failed" in f.value for f in findings.values())
    assert findings["grouped_mm"].has is True
    if not torch.cuda.is_available():
        assert "cpu" in findings["grouped_mm"].value and findings["GPU"].has is False
        assert "ordinary memory" in findings["pinned memory"].value


def test_a_release_outside_the_tested_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [doctor.rated("torch", v) for v in ("2.11.0+cu130", "2.13.9", "2.13.0a0+git")] == [
        "2.11.0+cu130", "2.13.9", "2.13.0a0+git"
    ]  # fmt: skip
    assert doctor.rated("torch", "2.9.1") == "2.9.1 (older than 2.11, the oldest tested)"
    monkeypatch.setattr("forebay.doctor.metadata.version", lambda _: "99.0.1")
    newer = {name: f for name, f in found().items() if "newer than" in f.value}
    assert newer.keys() == {"transformers", "peft", "trl", "accelerate", "Triton"} & {
        n for n, f in found().items() if f.has
    }
    assert newer["transformers"].value == "99.0.1 (newer than 5.24, the newest tested)"


def test_the_families_are_those_of_the_page_and_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """And those that the tests build run in full."""
    page, readme = ((ROOT / path).read_text("utf-8") for path in ("docs/models.md", "README.md"))
    release = ".".join(transformers.__version__.split(".")[:2])
    if f"## MoE families of transformers {release}\n" not in page:
        pytest.skip(f"the page is not of transformers {release}")
    assert main(["doctor", "--models"]) == 0
    printed = capsys.readouterr().out
    assert page.endswith(f"\n\n{printed}")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    full = {row[0]: row[5:] for row in rows if row[2:5] == ["yes"] * 3}
    assert not any(full.values())
    assert f"| {len(full)} MoE families of transformers, all with expert parallelism, such as " in readme
    assert {*MOE_FAMILIES, *MORE_FAMILIES} <= set(full)
    assert "its own experts" in next(row for row in rows if row[0] == "llama4")[5]
    assert f"gradient of {len(MOE_FAMILIES) + len(MORE_FAMILIES)} of these families" in page


@pytest.mark.gpu
def test_with_a_gpu() -> None:
    findings = found()
    assert findings["GPU 0"].value.startswith(torch.cuda.get_device_name(0))
    assert findings["Triton"].has is True
    assert "GB/s" in findings["pinned memory"].value
    out, back = (float(part.split()[-1]) for part in findings["pinned memory"].value.split(" GB/s")[:2])
    assert 1 < out < 1000 and 1 < back < 1000


def test_a_broken_check_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError("driver went away\nwith details")

    monkeypatch.setattr(doctor, "_triton", broken)
    findings = found()
    assert findings["Triton"].has is False and findings["Triton"].value == "the check failed: driver went away"
    assert "symmetric memory" in findings


def test_modules_without_a_package_hide_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a package's name, and a module that is used where it was built."""
    (tmp_path / "folder_of_this_name").mkdir()
    (tmp_path / "built_here").mkdir()
    (tmp_path / "built_here" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    folder, module = (doctor._package(name, "something") for name in ("folder_of_this_name", "built_here"))
    assert (folder.has, folder.value) == (False, "not installed")
    assert module.has is True and module.value.startswith("version unknown")


def test_no_compiler_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("forebay.models.compile.check_compiler", none)
    assert found()["C++ compiler"].has is False


def test_json_and_table(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    findings = json.loads(out)
    assert code == 0 and {"name", "has", "value", "enables"} == findings[0].keys()
    console = Console(width=200)
    with console.capture() as captured:
        console.print(examine().table())
    assert all(f["name"] in captured.get() for f in findings)
