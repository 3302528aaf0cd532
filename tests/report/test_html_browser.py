"""Pages in a real browser: nothing on the console, nothing fetched, nothing wider than the screen, charts that are there.

Slow (`make test-all`). Needs Chromium (`apt-get install chromium`, or Google Chrome) and the package playwright, which speaks its
DevTools protocol; without one of them these tests are skipped, and say so.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.report.plan_page import plan_page
from forebay.report.run_files import read_run
from forebay.report.run_page import run_page
from tests.report.pages import config, plan_of, write_folder

api = pytest.importorskip("playwright.sync_api", reason="pages are opened with playwright: pip install playwright")
FOUND = [p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")) if p]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="no Chromium on PATH: apt-get install chromium"),
]

LIMIT = 7 << 30  # of a plan whose placements are chosen: 0.4 GiB less than it takes with all of it kept
SIZES = [(1280, 900), (360, 740)]
# Text that is cut off by the page's edge, or written over other text of the same axis.
CROWDED = """() => {
  const wrong = [];
  const box = (e) => [e.textContent, e.getBoundingClientRect()];
  const boxes = (where, what) => [...where.querySelectorAll(what)].map(box).filter(([, b]) => b.width);
  for (const plot of document.querySelectorAll(".plot, .time")) {
    for (const what of [".x", ".y"]) {
      const found = boxes(plot, what);
      const cut = found.filter(([, b]) => plot.className === "plot" && (b.left < 0 || b.right > innerWidth));
      wrong.push(...cut.map(([text]) => text + " is cut off"));
      for (let i = 1; i < found.length; i++) {
        const [a, b] = [found[i - 1], found[i]];
        const apart = what === ".x" ? a[1].right <= b[1].left : b[1].bottom <= a[1].top;
        if (!apart) wrong.push(a[0] + " and " + b[0]);
      }
    }
  }
  return wrong;
}"""
EMPTY = """() => [".plot", ".plot svg", ".band", ".curve", ".lane", ".boxes rect", ".cells i", ".stack > i", ".legend i"]
  .flatMap((what) => [...document.querySelectorAll(what)])
  .filter((e) => { const b = e.getBoundingClientRect(); return !(b.width > 0 && (b.height > 0 || e.matches(".curve, .rule"))); })
  .map((e) => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        # A container has little shared memory, and root may not have the sandbox.
        opened = playwright.chromium.launch(executable_path=FOUND[0], args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan with a budget, one on GPUs whose placements were chosen, one of a process alone, runs on GPUs and not, and a run
    that left nothing."""
    base = tmp_path_factory.mktemp("browser")
    settings, gpu = config(base), config(base, device={"type": "cuda"})
    # Not lost beside CUDA's context.
    wide = {**settings.model.config, "hidden_size": 2048, "moe_intermediate_size": 2048}
    large = config(base, model={"config": wide}, train={"sequence": 4096}, device={"type": "cuda"})
    run = read_run(write_folder(base / "<script>window.hurt=1<-script>", settings))
    cpu = read_run(write_folder(base / "cpu", settings, steps=1, gpu=False))
    alone = config(base, parallel={"pp": 1}, train={"microbatch": 2}, log={"timeline": 0})
    empty = read_run(write_folder(base / "empty", alone, steps=0))
    texts = {
        "plan": plan_page(plan_of(settings, 2, 1 << 20), settings, '<script>window.hurt=1</script>"'),
        "chosen": plan_page(plan_of(large, 2, LIMIT, "h100", LIMIT), large, "gpu.toml"),
        "alone": plan_page(plan_of(alone, 1, None), alone, "alone.toml"),
        "run": run_page(run, plan_of(gpu, 2, None), "pipeline.json"),
        "cpu": run_page(cpu, plan_of(settings, 2, None), "pipeline.json"),
        "empty": run_page(empty, "no plan.", None),
    }
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


class Opened:
    """A page, and what its browser had to say."""

    def __init__(self, browser: Any, file: Path, size: tuple[int, int], scheme: str):
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(
            viewport=dict(zip(("width", "height"), size, strict=True)), color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("requestfailed", lambda request: self.said.append(f"failed: {request.url}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def style(self, of: str, name: str) -> str:
        return str(self.page.evaluate(f"getComputedStyle(document.querySelector({of!r})).getPropertyValue({name!r})"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}")
@pytest.mark.parametrize("name", ["plan", "chosen", "alone", "run", "cpu", "empty"])
def test_a_page(browser: Any, pages: dict[str, Path], name: str, size: tuple[int, int], scheme: str) -> None:
    with Opened(browser, pages[name], size, scheme) as opened:
        page = opened.page
        assert opened.said == []
        assert [url for url in opened.asked if not url.startswith("data:")] == [pages[name].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth") == size[0]
        assert page.evaluate(EMPTY) == []
        assert page.evaluate(CROWDED) == []
        assert page.evaluate("window.hurt") is None
        assert opened.style("body", "background-color") == (
            "rgb(18, 21, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
        )
        if name != "empty":
            assert page.locator(".plot .band").count() >= 4 and page.locator(".plot").count() >= 1
        if name == "chosen":
            assert page.get_by_text("Chosen by the planner").is_visible()
            assert page.locator(".ceiling.s-cached").count() == 2  # a line for each rank
        if name == "run":
            assert page.locator(".boxes rect").count() == 7  # six computations, one of them an overlap of two


def test_the_button(browser: Any, pages: dict[str, Path]) -> None:
    """Changes the colors, also from a keyboard, and is remembered; another color of the system is followed before."""
    with Opened(browser, pages["plan"], SIZES[0], "light") as opened:
        page, dark, light = opened.page, "rgb(18, 21, 26)", "rgb(255, 255, 255)"
        page.emulate_media(color_scheme="dark")
        assert opened.style("body", "background-color") == dark
        api.expect(page.locator("#theme")).to_have_text("Light")  # the page is told of it a moment later
        page.emulate_media(color_scheme="light")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "theme"
        page.keyboard.press("Enter")
        assert opened.style("body", "background-color") == dark
        page.reload()
        assert opened.style("body", "background-color") == dark and page.locator("#theme").inner_text() == "Light"
        page.locator("#theme").click()
        assert opened.style("body", "background-color") == light
        assert opened.said == []


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}")
def test_tips(browser: Any, pages: dict[str, Path], size: tuple[int, int]) -> None:
    """Of every chart, by mouse and by keyboard, from one end to the other; none makes the page wider."""
    with Opened(browser, pages["run"], size, "light") as opened:
        page = opened.page
        for n in range(page.locator(".plot[data-live]").count()):
            plot = page.locator(".plot[data-live]").nth(n)
            tip = plot.locator(".tip")
            assert not tip.is_visible()
            plot.focus()
            for key in ("ArrowRight", "Home", "End"):
                page.keyboard.press(key)
                assert tip.is_visible() and tip.inner_text().strip()
                assert plot.locator(".said").inner_text() != ""
                assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            page.keyboard.press("Home")
            for _ in range(plot.evaluate("e => JSON.parse(e.querySelector('script').textContent).x.length")):
                box = tip.bounding_box()
                assert box["x"] >= 0 and box["x"] + box["width"] <= size[0]
                page.keyboard.press("ArrowRight")
            page.keyboard.press("Escape")
            assert not tip.is_visible()
            plot.hover()
            assert tip.is_visible()
            page.mouse.move(0, 0)
            assert not tip.is_visible()
        assert opened.said == []


def test_a_tip_has_the_columns_figures(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["plan"], SIZES[0], "light") as opened:
        plot = opened.page.locator(".plot[data-live]").first
        plot.focus()
        opened.page.keyboard.press("Enter")  # to the highest point
        words = plot.locator(".tip").inner_text()
        peak = plot.locator(".tag").inner_text()
        assert f"total{peak}" in words.replace("\n", "")


def test_on_paper(browser: Any, pages: dict[str, Path]) -> None:
    """Light whatever the screen is, and without what only a screen can use."""
    with Opened(browser, pages["run"], SIZES[0], "dark") as opened:
        page = opened.page
        page.emulate_media(media="print")
        assert opened.style("body", "background-color") == "rgb(255, 255, 255)"
        assert not page.locator("#theme").is_visible() and not page.locator("nav").is_visible()
        assert len(page.pdf(format="A4")) > 10_000


def test_without_a_script(browser: Any, pages: dict[str, Path]) -> None:
    """Colors follow the system, and the charts are there."""
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(pages["run"].as_uri())
    assert page.locator(".band").first.bounding_box()["height"] > 0
    assert page.locator("h1").is_visible()
    context.close()
