"""The section on the no-op certificate: rows, dots and words from a summary, and the page with, without and in spite of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import HOSTILE, write_audit
from test_browser import CHROMIUM, Visit, browser  # noqa: F401  a fixture

from sinklab.report.certificate import certificate_plot, certificate_rows, certificate_section
from sinklab.report.maps import read_audit
from sinklab.studies.audit.page import render_report, write_report


def entry(layer: int, head: int, gap: float, weight: float, needed: float | None, module: str | None = None) -> dict:
    return {
        "module": module or f"layers.{layer}", "layer": layer, "head": head, "least_output": 0.1, "gap": gap, "output": 0.4,
        "least_output_without_sink": 0.1 + gap, "sink_weight": weight, "needed_sink_weight": needed, "queries": 124,
        "needed_queries": 0 if needed is None else 100, "forced": min(weight, needed or 0) > 0.3,
    }  # fmt: skip


@pytest.fixture
def certificate() -> dict:
    heads = [
        entry(0, 0, 0.02, 0.05, 0.0),
        entry(0, 1, -1e-5, 0.1, None),
        entry(1, 0, 0.75, 0.9, 0.72),
        entry(1, 1, 0.1, 0.4, 0.05),
    ]
    return {
        "sink_position": 0, "delta": 0.2, "threshold": 0.3, "samples": 4, "normalized": True, "sink_heads": 2,
        "forced_heads": 1, "heads": heads, "text": "2 of 4 heads sink; 1 of them is forced to.",
    }  # fmt: skip


def test_rows_begin_with_the_largest_gap(certificate: dict) -> None:
    rows = certificate_rows(certificate)
    assert [row[0] for row in rows] == ["1.0", "1.1", "0.0", "0.1"]
    assert rows[0] == ["1.0", "0.900", "0.720", "0.100", "0.850", "0.750", "0.400", "100 of 124", "yes"]
    assert rows[3][2] == "–"  # no weights write so little
    assert all(len(row) == len(certificate_section(certificate)["headings"]) for row in rows)
    del certificate["heads"][0]["needed_queries"]  # as an older audit, which did not record it
    assert certificate_rows(certificate)[2][-2:] == ["–", "no"]


def test_a_dot_a_head(certificate: dict) -> None:
    plot = certificate_plot(certificate)
    assert plot is not None
    assert [(point["name"], point["x"], point["y"], point["kind"]) for point in plot["points"]] == [
        ("0.0", 0.05, 0.02, "rest"),
        ("0.1", 0.1, -1e-5, "rest"),
        ("1.0", 0.9, 0.75, "sink"),
        ("1.1", 0.4, 0.1, "rest"),
    ]
    assert plot["points"][1]["note"] == "needed weight – at 0 of 124 queries"


def test_modules_of_one_layer_are_told_apart(certificate: dict) -> None:
    certificate["heads"] = [entry(0, 0, 0.1, 0.1, 0.1, "encoder.0"), entry(0, 0, 0.2, 0.1, 0.1, "decoder.0")]
    assert [row[0] for row in certificate_rows(certificate)] == ["decoder.0.0", "encoder.0.0"]


def test_what_is_said_of_missing_sections(certificate: dict) -> None:
    assert certificate_section(None) is None
    assert certificate_section({"refused": "no way"}) == {"missing": "Not certified in this audit: no way"}
    assert certificate_section([]) == {"missing": "Not certified in this audit: no reason is recorded"}
    assert certificate_plot({"refused": "no way"}) is None
    section = certificate_section(certificate)
    assert section is not None
    assert section["headings"][2] == "Needed for 0.2"
    assert section["made"].startswith("The first 4 samples of the main condition")


class TestPage:
    def page(self, tmp_path: Path, summary: dict) -> str:
        return render_report(read_audit(write_audit(tmp_path / "a", layers=2, heads=2, seq_len=16, summary=summary)))

    def test_shows_the_sentence_the_table_and_the_dots(self, certificate: dict, tmp_path: Path) -> None:
        page = self.page(tmp_path, {"certificate": certificate})
        assert '<p class="advice">2 of 4 heads sink; 1 of them is forced to.</p>' in page
        assert '<th scope="row">1.0</th><td class="n">0.900</td><td class="n">0.720</td>' in page
        assert '"across":"measured weight on the sink"' in page

    def test_an_audit_without_it_has_no_section(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, {})
        assert 'id="certificate"' not in page
        assert '"certificate":' not in page

    def test_hostile_names_stay_text(self, certificate: dict, tmp_path: Path) -> None:
        certificate["text"] = certificate["heads"][0]["module"] = certificate["heads"][1]["module"] = HOSTILE
        assert HOSTILE not in self.page(tmp_path, {"certificate": certificate})
        assert HOSTILE not in self.page(tmp_path / "refused", {"certificate": {"refused": HOSTILE}})


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; see test_browser.py")
def test_the_dots_are_drawn_and_read_by_the_keyboard(browser, certificate: dict, tmp_path: Path) -> None:  # noqa: F811
    folder = write_audit(tmp_path / "a", layers=2, heads=2, seq_len=16, summary={"certificate": certificate})
    write_report(folder)
    visit = Visit(browser, folder / "report.html", color_scheme="dark")
    picture = visit.page.locator("#certificate-plot svg")
    assert picture.locator("circle").count() == 4
    assert sorted(picture.locator("text.name").all_text_contents()) == ["0.0", "0.1", "1.0", "1.1"]
    picture.focus()
    visit.page.keyboard.press("ArrowLeft")
    assert visit.page.text_content("#tip").splitlines() == [
        "head 1.0",
        "weight 0.900, gap 0.750",
        "needed weight 0.720 at 100 of 124 queries, forced",
    ]
    assert picture.locator("circle.k-sink").count() == 2  # its dot, and the larger one that is being read
    visit.check_quiet()
    visit.context.close()
