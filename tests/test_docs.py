"""The documentation is true: code runs, links lead somewhere, and every file, name, key, option and make target in it exists.

Checked are README.md, CONTRIBUTING.md, docs/ and benchmarks/README.md. Blocks that begin with ```python run in the order of
the page and in one namespace a page, with the working directory empty. ```python gpu runs only where there is a GPU, and
```python integration under the marker of that name, together with the page's other blocks; other languages do not run, but
what they name is checked. A ```console block is a `forebay` command and lines of its output.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import forebay
from forebay import cli
from forebay.config import Config, from_mapping
from forebay.managed import Managed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]
SECTIONS = {f.name: [k.name for k in dataclasses.fields(f.type)] for f in dataclasses.fields(Config)}  # type: ignore[arg-type]

_FENCE = re.compile(r"^ {0,3}```(?P<info>[^`\n]*)\n(?P<code>.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_MAKE = re.compile(r"`make ([a-z][a-z-]*)|^make ([a-z][a-z-]*)", re.MULTILINE)
_NAME = re.compile(r"\bforebay(?:\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"(?<![\w/.])(?:[\w.-]+/)+[\w-]+\.(?:py|md|json|jsonl|toml|svg|png)\b|`(\w+\.jsonl?)`")
_FOLDER = re.compile(r"`((?:src|tests|docs|benchmarks)(?:/[\w.-]+)*)/?`")
_KEY = re.compile(rf"(?<![\w./\"'])({'|'.join(SECTIONS)})\.([a-z_]+)\b(?!\()")
_COMMAND = re.compile(r"(?:^|`|\$ |-m )forebay ([a-z]+)\b([^`\n]*(?:\\\n[^\n`]*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: the words after the fence, the code, and the line on which the code begins."""

    info: tuple[str, ...]
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    return [
        Block(tuple(m["info"].split()), m["code"], text[: m.start("code")].count("\n") + 1)
        for m in _FENCE.finditer(text)
    ]


def run(page: str, text: str, *words: str) -> int:
    """Execute the page's ```python blocks, and those marked with one of `words`; how many. Tracebacks show the page's lines."""
    namespace: dict[str, object] = {"__name__": "__docs__"}
    wanted = [b for b in blocks(text) if b.info in (("python",), *(("python", word) for word in words))]
    for block in wanted:
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
    return len(wanted)


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links without a file, and links to a heading that the page does not have."""
    broken = []
    for match in _LINK.finditer(_FENCE.sub("", text)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page if not target else page.parent / target
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(match["target"])
    return broken


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, punctuation dropped, blanks to hyphens."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def wrong_names(text: str) -> list[str]:
    """Dotted names below `forebay` that neither import nor attribute access finds. A module whose own imports are not installed
    here is not looked into."""
    wrong = []
    for name in dict.fromkeys(_NAME.findall(text)):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ModuleNotFoundError):
            if not _lacks_a_package(name):
                wrong.append(name)
    return wrong


def _lacks_a_package(name: str) -> bool:
    """Whether a module on the way to `name` is there and imports a package that is not."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        try:
            importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            return (error.name or "").split(".")[0] != "forebay"
    return False


def wrong_files(text: str) -> list[str]:
    """Paths that exist neither in the repository nor in the source, nor (bare names) among the results."""
    homes = (ROOT, ROOT / "src" / "forebay", ROOT / "benchmarks" / "results", ROOT / "benchmarks")
    files = [m.group(1) or m.group(0) for m in _FILE.finditer(_LINK.sub("", text))]
    folders = [m.group(1) for m in _FOLDER.finditer(text)]
    written = ("run.json", "metrics.jsonl", "result.json", "profile.json", "config.json", "pipeline.json")  # by a run
    named = [f for f in dict.fromkeys([*files, *folders]) if f not in written and not f.startswith(("runs/", "build/"))]
    return [f for f in named if not any((home / f).exists() for home in homes)]


def wrong_keys(text: str) -> list[str]:
    """``section.key`` that the configuration does not have. In code, `memory` may be what `forebay.manage` returns."""
    wrong, managed = [], inspect.getsource(Managed)
    for section, key in dict.fromkeys(_KEY.findall(text)):
        known = key in SECTIONS[section] or (section, key) in (("model", "layers"), ("model", "safetensors"))
        if not known and not (section == "memory" and (hasattr(Managed, key) or f"self.{key}" in managed)):
            wrong.append(f"{section}.{key}")
    for block in blocks(text):
        if block.info == ("toml",):
            raw = tomllib.loads(block.code)
            wrong += [f"{s}.{k}" for s, keys in raw.items() for k in keys if k not in SECTIONS.get(s, ())]
            if "model" in raw:
                from_mapping(raw)
    return wrong


def wrong_options(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Options of ``forebay COMMAND`` lines that its help does not list. What follows ``--`` is a program's own."""
    wrong = []
    for command, rest in dict.fromkeys(_COMMAND.findall(text)):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        if ended.value.code:
            wrong.append(f"forebay {command}")
        given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition("#")[0].partition(" -- ")[0]))
        wrong += [f"forebay {command} {option}" for option in given - known]
    return wrong


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


@each_page
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text("utf-8"))


def _pages_with(word: str) -> pytest.MarkDecorator:
    found = [p for p in PAGES if any(b.info == ("python", word) for b in blocks(p.read_text("utf-8")))]
    return pytest.mark.parametrize("page", found, ids=lambda p: str(p.relative_to(ROOT)))


@pytest.mark.integration
@_pages_with("integration")
def test_integration_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text("utf-8"), "integration")


@pytest.mark.gpu
@_pages_with("gpu")
def test_gpu_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text("utf-8"), "gpu")


@each_page
def test_what_a_page_mentions_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text("utf-8")
    assert broken_links(page, text) == []
    assert wrong_names(text) == []
    assert wrong_files(text) == []
    assert wrong_keys(text) == []
    assert wrong_options(text, capsys) == []
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {a or b for a, b in _MAKE.findall(text)} <= targets


def test_the_source_and_the_log_name_pages_and_results_that_exist() -> None:
    """Comments and profiles cite docs/ and benchmarks/ as the evidence of a figure, docstrings modules and their members."""
    log = ROOT / "benchmarks" / "LOG.md"
    assert broken_links(log, log.read_text("utf-8")) == []
    cited = re.compile(r"\b(?:docs|benchmarks)/[\w./-]+\.(?:md|json|py)\b")
    for file in sorted((ROOT / "src").rglob("*")):
        if file.suffix in (".py", ".json", ".toml"):
            text = file.read_text("utf-8")
            assert [path for path in cited.findall(text) if not (ROOT / path).exists()] == [], file
            assert wrong_names(" ".join(re.findall(r"`forebay\.[\w.]+`", text))) == [], file


@pytest.mark.parametrize("page", ["README.md", "docs/estimator.md"])
def test_pages_show_output_that_is_real(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [b for b in blocks((ROOT / page).read_text("utf-8")) if b.info == ("console",)]
    command, *lines = block.code.splitlines()
    monkeypatch.setenv("COLUMNS", "160")
    assert command.startswith("$ forebay ") and cli.main(shlex.split(command)[2:]) in (0, None)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line != "..." and line not in printed] == []


def test_the_readme_is_short_and_shows_python() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert ("python",) in [block.info for block in blocks(text)] and len(text.splitlines()) <= 120


def test_every_page_is_in_the_navigation_and_on_the_first_page() -> None:
    pages = {page.name for page in DOCS.glob("*.md")}
    assert set(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]) == pages
    linked = {m["target"].partition("#")[0] for m in _LINK.finditer((DOCS / "index.md").read_text("utf-8"))}
    assert pages - linked == {"index.md"}


def test_the_api_page_lists_the_public_names_and_commands() -> None:
    page = (DOCS / "api.md").read_text("utf-8")
    names = re.findall(r"`forebay\.([A-Za-z]\w*)`", page.partition("## Python\n")[2].partition("\n\n`")[0])
    assert sorted(names) == sorted(forebay.__all__)
    members = re.findall(r"`(\w+)(?:\(\w*\))?`", page.partition("| `forebay.Managed` |")[2].partition("\n")[0])
    assert [m for m in members if m != "manage" and not hasattr(Managed, m)] == [] and len(members) > 5
    commands = re.findall(r"`forebay ([a-z]+)`", page.partition("## Command line\n")[2].partition("\n\n")[0])
    (parsers,) = [a.choices for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert sorted(commands) == sorted(parsers)


def test_every_configuration_key_is_on_its_page() -> None:
    spec = importlib.util.spec_from_file_location("config_reference", DOCS / "config_reference.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.on_page_markdown((DOCS / "config.md").read_text("utf-8"))
    assert hook.BEGIN not in page and hook.END not in page and "In a clone" not in page
    assert hook.on_page_markdown("another page") == "another page"
    for section, keys in SECTIONS.items():
        rows = page.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        assert [line.split("`")[1] for line in rows.splitlines() if line.startswith("| `")] == list(keys)
        assert [line for line in rows.splitlines() if line.endswith("|  |")] == []  # each has a meaning
    assert '| `offload` | string | `"fit"` | ' in page and 'One of `"fit"`, `"all"`.' in page


def test_blocks_of_a_page_share_a_namespace_and_report_their_line() -> None:
    page = """# A
```python
x = 1
```
```text
not python
```
```python gpu
raise SystemExit
```
```python integration
x = 2
```
```python
if x == 2:
    raise KeyError
```
"""
    assert run("page", page) == 2
    with pytest.raises(KeyError):
        run("page", page, "integration")
    with pytest.raises(ZeroDivisionError) as caught:
        run("page", "one\n\n```python\n1 / 0\n```\n")
    assert caught.traceback[-1].lineno == 3  # counted from 0


def test_what_is_wrong_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The title\n[a](missing.md) [b](page.md#the-title) [c](#nothing) [d](https://example.org/x)\n```text\n[e](e.md)\n```\n"
    )
    assert broken_links(page, page.read_text("utf-8")) == ["missing.md", "#nothing"]
    assert wrong_names("`forebay.manage` `forebay.memory.hooks.Nothing` `forebay.nothing.a`") == [
        "forebay.memory.hooks.Nothing", "forebay.nothing.a"
    ]  # fmt: skip
    assert wrong_files("`memory/hooks.py` `memory/nothing.py` `nothing.json` `tests/none`") == [
        "memory/nothing.py", "nothing.json", "tests/none"
    ]  # fmt: skip
    assert wrong_keys("`train.steps` `--set train.stepz=1`, memory.report()\n```toml\n[log]\nfolders = 1\n```\n") == [
        "train.stepz", "log.folders"
    ]  # fmt: skip
    assert wrong_options("forebay plan CONFIG --budget 1 --budge 2", capsys) == ["forebay plan --budge"]
