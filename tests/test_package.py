"""The wheel: what is in it, what it requires, and that an installation outside the checkout plans, trains and type-checks."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
import typing
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import FunctionType

import pytest

import forebay
from forebay.doctor import TESTED, rated

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "forebay"
USER_SCRIPT = """
from typing import assert_type
import forebay
from torch import nn

def train(model: nn.Module) -> None:
    with forebay.manage(model, "auto", budget="6GiB") as memory:
        assert_type(memory, forebay.Managed)
        assert_type(memory.placements, dict[str, str])
    forebay.manage(model, budge=1)
    forebay.mange(model)
"""
# torch and transformers are not read, which takes a minute; what comes from them is Any.
MYPY = """
[mypy]
strict = true
[mypy-torch.*,transformers.*]
follow_imports = skip
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip wheel .` builds it, but by the backend that is installed here, for want of a network."""
    pytest.importorskip("hatchling", reason="builds the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    call([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment outside the checkout that has the wheel, and this environment's packages after it.

    Folders named in a .pth file are searched, but their own .pth files are not read: an editable installation of the checkout
    is therefore not found.
    """
    folder = tmp_path_factory.mktemp("environment")
    call([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    bin = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", bin / "python", "--disable-pip-version-check", "install", "--quiet"]
    call([*pip, "--no-deps", "--no-index", wheel], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "packages_of_the_tests.pth").write_text("\n".join(here))
    return bin


def call(command: list[str | Path], folder: Path) -> str:
    """Standard output of a command that must succeed. Nothing of the checkout is on its path."""
    done = subprocess.run(command, check=False, cwd=folder, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> dict[str, set[str]]:
    """Extra ("" for none) to the distributions that it requires."""
    found: dict[str, set[str]] = {"": set()}
    for line in metadata(wheel).get_all("Requires-Dist", []):
        extra = re.search(r"extra == '(\w+)'", line)
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        found.setdefault(extra[1] if extra else "", set()).add(name[0].lower())
    return found


def third_party(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each imported module that is neither Python's nor ours, with the code of the except clauses around the import."""

    def walk(node: ast.AST, handlers: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, handlers) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, handlers
        elif isinstance(node, ast.Try):
            handlers = "\n".join(map(ast.unparse, node.handlers))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, handlers)

    ours = {*sys.stdlib_module_names, "forebay", "sitecustomize"}
    return ((module, handlers) for module, handlers in walk(tree, "") if module.split(".")[0] not in ours)


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    tracked = {p for p in SRC.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert names == {str(p.relative_to(SRC.parent)) for p in tracked}
    assert {"forebay/py.typed", "forebay/presets/quickstart.toml", "forebay/models/catalog.toml"} <= names
    assert metadata(wheel)["Version"] == forebay.__version__


def test_every_import_is_a_requirement_or_names_its_extra(wheel: Path) -> None:
    """A file that imports what only an extra brings says how to install it. Applications that load Forebay, such as Axolotl,
    are there already: the module of `integrations` with their name may import them, and what they bring."""
    required = requirements(wheel)
    extras = required.keys() - {"", "dev", "docs"}  # those two are for this repository
    assert {"data", "tensorboard", "trl"} <= extras
    unnamed = []
    for file in sorted(SRC.rglob("*.py")):
        advice: dict[str, str] = {}
        for module, handlers in third_party(ast.parse(file.read_text("utf-8"))):
            # torch's writer of event files needs the package of the same name
            package = "tensorboard" if module == "torch.utils.tensorboard" else module.split(".")[0]
            name = {"yaml": "pyyaml", "quack": "quack-kernels"}.get(package, package)
            advice[name] = advice.get(name, "") + handlers
        hosted = file.parent.name == "integrations" and file.stem in advice.keys() - required[""]
        for name in () if hosted else advice.keys() - required[""]:
            if not any(name in required[extra] and f"forebay[{extra}]" in advice[name] for extra in extras):
                unnamed.append(f"{file.relative_to(SRC)} imports {name}")
    assert unnamed == []


def test_an_installed_wheel_plans_and_trains(installed: Path, tmp_path: Path) -> None:
    """The command, and in one process, since an interpreter takes seconds to import all, what the command calls."""
    assert call([installed / "forebay", "--version"], tmp_path) == f"forebay {forebay.__version__}\n"
    settings = ("train.steps=2", "schedule.warmup=1", "train.eval_every=0", "checkpoint.every=0", "log.folder=run")
    train = ["train", "quickstart", *(f"--set={s}" for s in settings)]
    commands = [["plan", "quickstart"], train, ["report", "run"]]
    script = f"from forebay.cli import main, __file__ as file\nprint(file, [main(c) for c in {commands}])"
    printed = call([installed / "python", "-c", script], tmp_path)
    where, codes = printed.splitlines()[-1].split(" ", 1)
    assert Path(where).is_relative_to(installed.parent) and codes == "[0, 0, 0]"
    assert "a process of 1 at its peak" in printed
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_users_script_is_type_checked(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    (tmp_path / "mypy.ini").write_text(MYPY)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", installed / "python", "script.py"],
        check=False, cwd=tmp_path, env=_environment(), capture_output=True, text=True,
    )  # fmt: skip
    found = re.findall(r"^script\.py:(\d+): error: .*\[(.*)\]$", checked.stdout, re.MULTILINE)
    typos = [str(n) for n, line in enumerate(USER_SCRIPT.splitlines(), 1) if "budge=" in line or "mange" in line]
    assert found == [(typos[0], "call-arg"), (typos[1], "attr-defined")], checked.stdout + checked.stderr


def test_one_range_of_tested_releases() -> None:
    """The doctor's is the one that the requirements begin with, that CI's pinned releases lie in, and that the pages state."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = [r for group in (project["dependencies"], *project["optional-dependencies"].values()) for r in group]
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints-cpu.txt").read_text("utf-8"), re.MULTILINE))
    rows = [
        line.split("|") for line in (ROOT / "docs" / "api.md").read_text("utf-8").splitlines() if line.count("|") == 4
    ]
    stated = {row[1].strip().lower(): [cell.split()[0] for cell in row[2:4]] for row in rows if row[2].strip()}
    assert f"transformers=={TESTED['transformers'][1]}." in (ROOT / ".ci" / "run").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8").lower()
    for name, (oldest, newest) in TESTED.items():
        assert any(r.split(";")[0] == f"{name}>={oldest}" for r in required), name
        assert rated(name, pins[name]) == pins[name]
        if name in ("torch", "transformers", "triton"):
            assert stated[name] == [oldest, newest] and re.search(rf"{name} {re.escape(oldest)}\b", readme), name


def test_public_functions_have_complete_annotations() -> None:
    checked = 0
    for name in forebay.__all__:
        public = getattr(forebay, name)
        members = vars(public).items() if inspect.isclass(public) else [(name, public)]
        for member, value in members:
            function = (
                value.fget if isinstance(value, property) else inspect.unwrap(value) if callable(value) else value
            )
            if isinstance(function, FunctionType) and (member == "__init__" or not member.startswith("_")):
                parameters = [p for p in inspect.signature(function).parameters if p != "self"]
                hints = typing.get_type_hints(function)
                assert {*parameters} | ({"return"} - {member == "__init__" and "return"}) <= hints.keys(), (
                    name,
                    member,
                )
                checked += 1
    assert checked > 10
