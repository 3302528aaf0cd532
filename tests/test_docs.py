"""The documentation is true: its Python blocks run, its links lead somewhere, its make targets exist.

Checked are README.md, CONTRIBUTING.md and docs/*.md. Blocks that begin with ```python run in the order of the page and
in one namespace a page, as a reader would paste them, with the working directory empty. Left out are ```python gpu (it
runs only where there is a GPU) and every other language.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))) if p.exists()]

_FENCE = re.compile(r"^ {0,3}```(?P<info>[^`\n]*)\n(?P<code>.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_MAKE = re.compile(r"`make ([a-z][a-z-]*)")


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


def run(page: str, text: str, gpu: bool) -> int:
    """Execute the page's Python blocks; how many. Tracebacks show the page's own line numbers."""
    namespace: dict[str, object] = {"__name__": "__docs__"}
    wanted = [b for b in blocks(text) if b.info in (("python",), ("python", "gpu")) and (gpu or "gpu" not in b.info)]
    for block in wanted:
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
    return len(wanted)


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links without a file, and links to a heading of the page that has none."""
    prose = _FENCE.sub("", text)
    broken = []
    for match in _LINK.finditer(prose):
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


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text("utf-8"), gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_gpu_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text("utf-8"), gpu=torch.cuda.is_available())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    assert set(_MAKE.findall(page.read_text("utf-8"))) <= targets()


def test_a_readme_shows_python_that_is_run() -> None:
    infos = [block.info for block in blocks((ROOT / "README.md").read_text("utf-8"))]
    assert ("python",) in infos


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
```python
assert x == 1
```
"""
    assert run("page", page, gpu=False) == 2
    with pytest.raises(ZeroDivisionError) as caught:
        run("page", "one\n\n```python\n1 / 0\n```\n", gpu=False)
    assert caught.traceback[-1].lineno == 3  # counted from 0


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The title\n[a](missing.md) [b](page.md#the-title) [c](#nothing) [d](https://example.org/x)\n```text\n[e](e.md)\n```\n"
    )
    assert broken_links(page, page.read_text("utf-8")) == ["missing.md", "#nothing"]
