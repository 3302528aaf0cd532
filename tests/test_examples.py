"""Each script in examples/ runs to its end without arguments, where the packages that it imports are installed."""

import ast
import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import on_processes

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OURS = ("forebay", "torch", "transformers")


def packages(source: str) -> set[str]:
    """Other packages that a script imports, itself or through ``forebay.integrations``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    roots = {name.removeprefix("forebay.integrations.").split(".")[0] for name in names}
    return roots - {*sys.stdlib_module_names, *OURS}


def _cases() -> list[object]:
    cases = []
    for path in EXAMPLES:
        needed = packages(path.read_text("utf-8"))
        missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
        marks = [pytest.mark.integration] if needed else []
        if missing:
            marks.append(pytest.mark.skipif(True, reason=f"not installed: {', '.join(missing)}"))
        cases.append(pytest.param(path, marks=marks, id=path.name))
    return cases


def _run(path: str, folder: str) -> None:
    os.chdir(folder)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("path", _cases())
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    codes, out, errors = on_processes(1, _run, str(path), str(tmp_path), seconds=250)
    assert codes == [0], errors
    assert out.strip(), "an example prints what it did"
