"""Takes docs/report.png, the head of an audit's page and its first maps: ``python docs/picture.py build/demo-llm``.

What stands between them (four of the numbers, the findings as a list, the map of heads) is left out. Needs Chromium and the
packages of the tests.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).with_name("report.png")
WIDTH, SCALE, COLOURS = 1100, 1.3, 250
LEFT_OUT = (".sentences", "#map", "#theme", ".card:nth-child(n + 5)", ".readout")


def main(folder: Path) -> None:
    """Draw the picture of ``folder/report.html``."""
    chromium = os.environ.get("SINKLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1400}, device_scale_factor=SCALE, color_scheme="light")
        page.goto((folder / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready]")
        for selector in LEFT_OUT:
            page.eval_on_selector_all(selector, "all => all.forEach(element => { element.style.display = 'none' })")
        below = page.get_by_text("Attention received by each position").bounding_box()
        assert below is not None
        shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": below["y"] - 16}, full_page=True)
        browser.close()
    whole = Image.open(io.BytesIO(shot)).convert("RGB")
    # The most frequent colours would leave out those of the legends.
    picture = whole.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(OUT, optimize=True)
    print(f"{OUT.name}: {picture.width} × {picture.height}, {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo"))
