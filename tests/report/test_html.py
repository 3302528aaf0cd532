"""Pages as text: every tag closed, nothing of a name or path run as markup, nothing fetched, and colors that can be read."""

import base64
import hashlib
import re
from html import escape
from importlib import resources
from pathlib import Path

import pytest

from forebay.policy import PLACEMENTS
from forebay.report.charts import PARTS
from forebay.report.html import Html, data, join, tag
from forebay.report.plan_page import plan_page
from forebay.report.run_files import read_run
from forebay.report.run_page import run_page
from tests.report.pages import NASTY, PageText, config, plan_of, write_folder

pytestmark = pytest.mark.usefixtures("shared_traces")


def test_pages_are_closed_escaped_and_fetch_nothing(tmp_path: Path) -> None:
    """Links lead within the page, to a file beside it, or are an empty icon; style has no url and imports nothing."""
    run = read_run(write_folder(tmp_path / "a run", config(tmp_path)))
    plan = plan_of(run.config, 2, 100 << 20)
    for text in (
        plan_page(plan, run.config, f"{NASTY}.toml"),
        run_page(run, plan, f"{NASTY}.json"),
        run_page(run, f"no {NASTY}.", None),
    ):
        page = PageText(text)
        assert page.wrong == []
        assert "<script>window" not in text and any(NASTY in section for section in page.sections.values())
        kinds = [kind for kind, _ in page.scripts]
        assert kinds.count(None) == 1 and set(kinds) <= {None, "application/json"}
        assert all(link.startswith(("#", "data:,", "%3Cscript")) for link in page.links), page.links
        assert "url(" not in text and "@import" not in text and not re.search(r"\b(?:fetch|import)\s*\(", text)
        (script,) = (script for kind, script in page.scripts if kind is None)
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
        assert escape(policy) in text


def test_markup() -> None:
    assert tag(
        "p", "a < b & c", Html("<b>d</b>"), None, ["e", 5], class_="x", aria_label='say "so"', hidden=True, id=None
    ) == ('<p class="x" aria-label="say &quot;so&quot;" hidden>a &lt; b &amp; c<b>d</b>e5</p>')
    assert tag("rect", x=0, y=0.0) == '<rect x="0" y="0.0"></rect>'
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert join("<", Html("<")) == "&lt;<"
    assert data({"a": "</script><!--"}) == '<script type="application/json">{"a":"\\u003c/script>\\u003c!--"}</script>'


def colors() -> dict[str, tuple[str, str]]:
    """Name to (light, dark)."""
    css = (resources.files("forebay.report") / "assets" / "page.css").read_text("utf-8")
    return {name: (a, b) for name, a, b in re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\)", css)}


def channels(color: str) -> list[int]:
    return [int(color[n : n + 2], 16) for n in (1, 3, 5)]


def luminance(color: list[float]) -> float:
    """WCAG 2.2, for sRGB from 0 to 255."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_can_be_read(theme: int) -> None:
    """Text 4.5 to 1, what is drawn 3 to 1, as WCAG 2.2 has them (1.4.3 and 1.4.11)."""
    assert contrast(channels("#767676"), channels("#ffffff")) == pytest.approx(4.54, abs=0.01)  # WCAG's own example
    of = {name: channels(pair[theme]) for name, pair in colors().items()}
    text = [("text", g) for g in ("ground", "raised", "good-ground", "bad-ground", "plain-ground")]
    text += [("soft", "ground"), ("soft", "raised"), ("link", "ground"), ("good", "ground"), ("bad", "ground")]
    text += [("good", "good-ground"), ("bad", "bad-ground")]
    boxes = ("forward", "backward", "input", "weights")
    text += [("ground", box) for box in boxes]
    assert [(a, b) for a, b in text if contrast(of[a], of[b]) < 4.5] == []
    faint = {b: [0.42 * x + 0.58 * y for x, y in zip(of[b], of["ground"], strict=True)] for b in boxes}  # page.css
    assert [b for b in boxes if contrast(of["text"], faint[b]) < 4.5] == []
    drawn = [*PARTS, *PLACEMENTS, *boxes, "mark", "series", "series-two", "series-three", "series-four"]
    assert [name for name in drawn if contrast(of[name], of["ground"]) < 3] == []
