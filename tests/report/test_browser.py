"""The pages in a real browser, offline: they draw, every control works, and hostile text stays text."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import HOSTILE, write_audit

from sinklab.report.heads import Received, Shown, head_view
from sinklab.report.maps import Maps
from sinklab.studies.audit.compare import Comparison
from sinklab.studies.audit.page import PAGE_BUDGET, read_audit, write_report

CHROMIUM = os.environ.get("SINKLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no Chromium found; install it (Debian: apt-get install chromium) or set SINKLAB_CHROMIUM to its path",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


class Visit:
    """A page that was opened, with everything it said and asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900}, **context)
        # A minute, because a machine may be busy; nothing waits so long unless it fails.
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)
        self.path = path

    def check_quiet(self) -> None:
        """Nothing on the console, no dialog, no request but the file itself."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:")] == [self.path.as_uri()]

    def pixels(self, selector: str) -> list[int]:
        """The colours of a canvas, red green blue alpha."""
        # Read from a copy: reading a canvas itself makes the browser warn on the console.
        return self.page.eval_on_selector(
            selector,
            """c => { const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
                copy.drawImage(c, 0, 0); return Array.from(copy.getImageData(0, 0, c.width, c.height).data); }""",
        )

    def shown(self, sample: int, layer: int, head: int) -> None:
        """Wait until this map is drawn."""
        self.page.wait_for_selector(f"#panel[data-shown='{sample}-{layer}-{head}']", timeout=60_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_audit(tmp_path_factory.mktemp("browser") / "a", layers=4, heads=3, seq_len=32)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def opened(browser: Any, folder: Path) -> Visit:
    return Visit(browser, folder / "report.html", color_scheme="light")


@pytest.fixture
def visit(opened: Visit) -> Iterator[Visit]:
    """One page for all tests that only use its controls: opening it anew is most of their time."""
    opened.page.mouse.move(0, 0)
    opened.page.keyboard.press("Escape")
    opened.page.evaluate("document.getElementById('sample-0').click()")
    yield opened
    opened.check_quiet()


WEIGHTS = ".map-figure:nth-of-type(2) .map-box canvas"
SCORES = ".map-figure:nth-of-type(1) .map-box canvas"


def cell(visit: Visit, layer: int, head: int) -> Any:
    return visit.page.locator(f".cell[data-row='{layer}'][data-head='{head}']")


def test_draws_everything(visit: Visit, folder: Path) -> None:
    page = visit.page
    assert page.text_content("#verdict") == read_audit(folder).found.finding
    assert page.locator(".cell").count() == 12
    assert page.locator("#figures .figure svg").count() == 9
    assert page.locator(".missing").count() == 0
    assert page.locator("#profile svg").count() == 1
    assert len(visit.pixels(WEIGHTS)) == 32 * 32 * 4
    # Below the diagonal there is a colour; above it the tiles are hidden and nothing is painted.
    alpha = visit.pixels(SCORES)[3::4]
    assert [alpha[32 * row + column] for row, column in ((0, 0), (31, 0), (31, 31), (0, 1), (30, 31))] == [255, 255, 255, 0, 0]


def test_heads_in_the_frame_of_a_notebook(browser: Any, tmp_path: Path) -> None:
    """Tokens on both sides, a value under the pointer, the theme of what is around, and a frame as high as its page."""
    generator = np.random.default_rng(0)
    weights = np.tril(generator.dirichlet(np.ones(12), (1, 2, 3, 12)))
    weights[..., 0] = np.where(np.arange(12) > 0, 0.75, 1.0)
    codes = np.round(255 * np.sqrt(weights)).astype(np.uint8)
    seen = np.broadcast_to(np.arange(12, 0, -1, dtype=np.float32), (1, 2, 12))
    names, tokens = ["m0", "m1"], [f"t{i}<b>" for i in range(12)]
    scores = np.broadcast_to(np.tril(np.ones((12, 12), dtype=np.uint8)), weights.shape)
    maps = Maps(codes, scores, np.zeros((1, 2, 3, 2), dtype=np.float32), [tokens], names, 12)
    received = (weights.sum(-2) / np.arange(12, 0, -1)).astype(np.float32)
    known = Received(names, received, seen, np.full((1, 2), 12, np.float32), np.zeros((1, 2, 3), dtype=np.float32))
    sites = [(0, "m0", ""), (1, "m1", "")]
    view = head_view(sites, about=Shown(model="<i>toy"), operation="softmax", received=known, maps=maps)
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><html data-ready><body style='background: rgb(17, 17, 17)'>{view._repr_html_()}</body></html>"
    )
    visit = Visit(browser, path, color_scheme="light")
    frame = visit.page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for()
    assert frame.locator("html").get_attribute("data-theme") == "dark"
    assert frame.locator("h1").inner_text().startswith("<i>toy")
    assert frame.locator(".written .ticks-y span").all_inner_texts() == tokens
    assert frame.locator(".written .ticks-x span").count() == 12
    frame.locator(".cell[data-row='1'][data-head='2']").click()
    frame.locator("#panel[data-shown='0-1-2']").wait_for()
    box = frame.locator(".map-box")
    box.hover(position={"x": 2, "y": box.bounding_box()["height"] - 2})
    # The weight is kept in 256 steps of its root: 0.75 is off by less than its half step at slope 2·√0.75.
    assert re.fullmatch(r"query 11 t11<b> → key 0 t0<b> · weight 0\.7[45]\d?", frame.locator("#readout").inner_text())
    assert frame.locator("#strip span").all_inner_texts() == tokens
    page_height = visit.page.frames[1].evaluate("document.body.scrollHeight")
    assert abs(visit.page.locator("iframe").bounding_box()["height"] - page_height) <= 48
    assert visit.said == []


def test_click_opens_a_head(visit: Visit) -> None:
    cell(visit, 0, 2).click()
    visit.shown(0, 0, 2)
    assert visit.page.text_content("#panel-title") == "Layer 0, head 2"
    before = visit.pixels(WEIGHTS)
    cell(visit, 3, 0).click()
    visit.shown(0, 3, 0)
    assert visit.page.text_content("#panel-title") == "Layer 3, head 0"
    assert visit.pixels(WEIGHTS) != before
    assert visit.page.locator(".cell[aria-selected='true']").count() == 1
    assert visit.page.evaluate("location.hash") == "#layer-3-head-0"


def test_keyboard_walks_the_map_and_opens_a_head(visit: Visit) -> None:
    page = visit.page
    cell(visit, 0, 0).click()
    visit.shown(0, 0, 0)
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    focused = "[document.activeElement.dataset.row, document.activeElement.dataset.head]"
    assert page.evaluate(focused) == ["1", "1"]
    assert page.text_content("#panel-title") == "Layer 0, head 0"
    assert "Layer 1, head 1" in page.text_content("#tip")
    page.keyboard.press("Enter")
    visit.shown(0, 1, 1)
    assert page.text_content("#panel-title") == "Layer 1, head 1"
    # The edge holds, Home and End jump, and the map is one stop of the Tab key.
    for key in ("End", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate(focused) == ["3", "0"]
    assert page.locator(".cell[tabindex='0']").count() == 1
    page.keyboard.press("Space")
    visit.shown(0, 3, 0)


def test_samples_are_chosen(visit: Visit) -> None:
    cell(visit, 3, 1).click()
    visit.shown(0, 3, 1)
    first, text = visit.pixels(WEIGHTS), visit.page.text_content("#strip")
    visit.page.locator("#samples label").nth(1).click()
    visit.shown(1, 3, 1)
    assert visit.pixels(WEIGHTS) != first
    assert visit.page.text_content("#strip") != text
    visit.page.keyboard.press("ArrowRight")
    visit.shown(2, 3, 1)


def test_pointing_at_a_map_reads_tokens_and_values(visit: Visit, folder: Path) -> None:
    maps = read_audit(folder).maps
    assert maps is not None
    cell(visit, 3, 1).click()
    visit.shown(0, 3, 1)

    def point(query: int, key: int) -> None:
        box = visit.page.locator(".map-box").nth(1)
        side = box.bounding_box()["width"] / 32
        box.hover(position={"x": (key + 0.5) * side, "y": (query + 0.5) * side})

    point(20, 0)
    weight = (int(maps.weights[0, 3, 1, 20, 0]) / 255) ** 2
    low, high = maps.ranges[0, 3, 1]
    score = low + (int(maps.scores[0, 3, 1, 20, 0]) - 1) / 254 * (high - low)
    words = visit.page.text_content("#readout").replace("\u2212", "-").split()
    assert words[:2] == ["query", "20"]
    assert visit.page.locator("#readout code").all_text_contents()[1] == "<s>"
    values = [float(words[words.index(name) + 1]) for name in ("weight", "score")]
    assert values == pytest.approx([weight, float(score)], rel=5e-3)  # three significant digits are shown
    # The query's own token and its key are marked in the text.
    assert visit.page.locator("#strip .on").count() == 2
    # A hidden key says so.
    point(4, 25)
    assert "does not see this key" in visit.page.text_content("#readout")


def test_pointing_at_a_token_shows_where_it_looks(visit: Visit) -> None:
    visit.page.locator("#strip span").nth(20).hover()
    assert "where query 20 looks" in visit.page.text_content(".strip-head")
    assert visit.page.text_content("#readout").startswith("query 20")


def test_hostile_text_is_inert_and_visible(browser: Any, tmp_path: Path) -> None:
    path = write_report(write_audit(tmp_path / "a", layers=2, seq_len=16, hostile=True, summary={"text": [HOSTILE]}))
    visit = Visit(browser, path)
    assert HOSTILE in visit.page.text_content("#strip")
    assert HOSTILE[:16] in visit.page.text_content("#verdict")  # a finding takes as much of a token as there is room for
    assert HOSTILE in visit.page.text_content("h1")
    visit.page.locator("#strip span").nth(3).hover()
    assert visit.page.locator("#readout code").first.text_content() == HOSTILE
    assert visit.page.locator("img").count() == 0
    assert visit.page.locator("script").count() == visit.path.read_text(encoding="utf-8").count("<script")
    visit.check_quiet()
    visit.context.close()


def test_the_policy_stops_what_escaping_would_miss(browser: Any, folder: Path, tmp_path: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    path = tmp_path / "injected.html"
    path.write_text(text.replace("</main>", "<script>window.injected = 1</script></main>"), encoding="utf-8")
    visit = Visit(browser, path)
    assert visit.page.evaluate("window.injected") is None
    assert any("Content Security Policy" in message for message in visit.said)
    refused = visit.page.evaluate("fetch('https://127.0.0.1:9/').then(() => 'sent', (error) => error.name)")
    assert refused == "TypeError"
    assert all(not url.startswith("http") for url in visit.asked)
    visit.context.close()


def test_missing_parts_are_said(browser: Any, tmp_path: Path) -> None:
    omit = {"sink_rate", "attention_received", "hidden_norm"}
    visit = Visit(browser, write_report(write_audit(tmp_path / "a", layers=2, seq_len=16, omit=omit, maps=False)))
    for selector, words in (
        ("#grid-tools", "The sink rate was not measured per head"),
        ("#panel", "No attention maps were recorded"),
        ("#curve", "Not measured in this audit"),
        ("#profile", "was not measured per position"),
    ):
        assert words in visit.page.text_content(selector), selector
    assert visit.page.locator("#figures .missing").count() == 1
    visit.check_quiet()
    visit.context.close()


def test_32_by_32_heads(browser: Any, tmp_path: Path) -> None:
    path = write_report(
        write_audit(tmp_path / "a", layers=32, heads=32, kv_heads=8, seq_len=4096, tiles=16, samples=1, position_rows=64)
    )
    assert path.stat().st_size < PAGE_BUDGET
    visit = Visit(browser, path)
    assert visit.page.locator(".cell").count() == 1024
    cell(visit, 31, 17).click()
    visit.shown(0, 31, 17)
    assert "each tile is the largest of 256 × 256" in visit.page.text_content("#map-words")
    assert visit.page.locator("#strip span").count() == 4096
    assert max(visit.pixels(WEIGHTS)[3::4]) == 255
    visit.check_quiet()
    visit.context.close()


def test_comparison(browser: Any, folder: Path, tmp_path: Path) -> None:
    other = write_audit(tmp_path / "b", model="embedded:sigmoid", operation="sigmoid", layers=6, heads=2, sink_position=None)
    visit = Visit(browser, Comparison([folder, other]).write(tmp_path / "compare.html"))
    assert visit.page.locator(".cell").count() == 12 + 12
    assert visit.page.locator("#figures svg").count() == 9
    assert "embedded:sigmoid: There is no sink" in visit.page.text_content("#verdict")
    visit.page.click("#theme")
    visit.check_quiet()
    visit.context.close()
