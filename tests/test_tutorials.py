"""The tutorials: every notebook runs offline from top to bottom, shows what it speaks of, and is kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
FRAMES = {
    "audit_a_checkpoint": 2,
    "replace_softmax": 2,
    "stream_for_ever": 0,
    "watch_a_sink_emerge": 1,
    "what_is_this_head_for": 2,
}
"""Tutorial to the pages that it shows in frames."""

WORDS = {
    "audit_a_checkpoint": "On this text 2 of 12 heads give position 0",
    "stream_for_ever": "125 of 125 tokens held",
    "what_is_this_head_for": "On this text 2 of 12 heads give position 0",
}
"""What must stand in the outputs of a tutorial, besides."""


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_there_are_five():
    assert [path.stem for path in TUTORIALS] == sorted(FRAMES)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path):
    for cell in cells(path):
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert path.stat().st_size < 16_000


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_speaks_of(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output["data"].get("text/html", "") for output in shown if "data" in output]
    assert sum("<iframe srcdoc='<!doctype html>" in page for page in pages) == FRAMES[path.stem]
    texts = "".join(output.get("text") or output["data"].get("text/plain", "") for output in shown)
    assert re.search(WORDS.get(path.stem, ""), texts)
    # Bars came and went: what is left of them is empty.
    assert "<progress" not in "".join(page for page in pages if "<iframe" not in page)


def test_a_bar_is_drawn_while_a_cell_runs():
    """In a kernel, with the messages that a notebook would be sent."""
    code = (
        "from sinklab.results.run import Run\n"
        "with Run('trial') as run:\n    run.progress('reading <b>', 1, 4)\n    run.progress('reading <b>', 4, 4)\n"
        "from sinklab.results.progress import on_screen\n"
        "with on_screen('a training') as screen:\n    screen.note('step 5/10')\n    screen.progress('training', 10, 10)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    drawn = []

    class Client(NotebookClient):
        def process_message(self, message, cell, number):
            drawn.append("".join(message["content"].get("data", {}).get("text/html", "")))
            return super().process_message(message, cell, number)

    Client(notebook, timeout=120).execute()
    assert any("reading &lt;b&gt;" in html and 'value="1.000"' in html for html in drawn)
    assert any("training" in html and "10 of 10" in html for html in drawn)
    outputs = notebook.cells[0].outputs
    assert [output["data"]["text/html"] for output in outputs if output["output_type"] == "display_data"] == ["", ""]
    assert "step 5/10\n" in [output["text"] for output in outputs if output["output_type"] == "stream"]
