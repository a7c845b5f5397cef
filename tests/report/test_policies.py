"""The section on cache policies: rows, curves and words from a summary, and the page with, without and in spite of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from synthetic import HOSTILE, write_audit
from test_browser import CHROMIUM, Visit, browser  # noqa: F401  a fixture

from sinklab.report.maps import read_audit
from sinklab.report.policies import (
    HEADINGS,
    left_out_lines,
    parts_of,
    policy_curves,
    policy_rows,
    policy_section,
    size,
    write_policy_plot,
)
from sinklab.studies.audit.page import render_report, write_report


def entry(policy: str, sinks: int | None, window: int | None, budget: int | None, loss: float, **more: object) -> dict:
    return {
        "policy": policy,
        "label": f"{policy} {sinks}+{window}",
        "num_sinks": sinks,
        "window": window,
        "held": 65,
        "budget": budget,
        "loss": loss,
        "loss_low": loss - 0.25,
        "loss_high": loss + 0.25,
        "scored_tokens": 3072,
        "against_window": None,
        "against_recompute": None,
        "against_full": None,
        "tokens_per_second": 1234.4,
        "bytes_held": 402432,
        "loss_by_position": [loss, loss + 0.123456789, None],
        **more,
    }


@pytest.fixture
def comparison() -> dict:
    difference = {"mean": -0.17, "low": -0.2, "high": -0.14}
    return {
        "model": "embedded:softmax",
        "corpus": "python_source",
        "documents": 4,
        "tokens": 1024,
        "scored_from": 256,
        "trained_length": 256,
        "positions": [[1, 342], [342, 683], [683, 1024]],
        "policies": [
            entry("full", None, None, None, 4.1),
            entry("window", 0, 32, 32, 2.5),
            entry("window", 0, 64, 64, 2.2),
            entry("sink_window", 1, 63, 64, 2.03, against_window=difference),
            entry("sink_window", 4, 60, 64, 2.04),
            entry("recompute", None, 64, 64, 2.1, scored_tokens=96),
            entry("strided", 1, None, 64, 3.0),
        ],
        "left_out": [
            {"policy": "pinned", "label": "pinned", "reason": "none found"},
            {"policy": "odd", "label": "odd 1", "reason": "no size"},
            {"policy": "odd", "label": "odd 2", "reason": "no size"},
        ],
        "recommended": {"num_sinks": 1, "window": 63},
        "recommendation": "Keep 1 sink and a window of 63 tokens.",
    }


def test_rows(comparison: dict) -> None:
    rows = policy_rows(comparison)
    assert all(len(row) == len(HEADINGS) for row in rows)
    assert rows[0] == ["full", "–", "–", "4.100 ± 0.25", "–", "–", "1,234", "393\u202fKiB"]
    assert rows[3] == ["sink_window", "1", "63", "2.030 ± 0.25", "−0.170 [−0.200, −0.140]", "–", "1,234", "393\u202fKiB"]
    assert rows[6][0] == "strided 1+None"  # what its sizes are is for the policy to say


def test_rows_of_one_size_with_both_kinds_of_positions_have_names_of_their_own(comparison: dict) -> None:
    label = "sink_window 1+63, original positions"
    comparison["policies"].append(entry("sink_window", 1, 63, 64, 2.2, label=label))
    assert [row[0] for row in policy_rows(comparison) if row[1:3] == ["1", "63"]] == ["sink_window", label]


def test_a_loss_without_an_interval(comparison: dict) -> None:
    comparison["policies"] = [entry("full", None, None, None, 4.1, loss_low=None, loss_high=None)]
    assert policy_rows(comparison)[0][3] == "4.100"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0\u202fB"), (999, "999\u202fB"), (402432, "393\u202fKiB"), (5 * 2**30, "5\u202fGiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_curves_are_those_of_the_recommended_size(comparison: dict) -> None:
    curves = policy_curves(comparison)
    assert curves is not None
    assert [(series["name"], series["kind"]) for series in curves["series"]] == [
        ("1 sink + 63", "sink"),
        ("window computed anew", "audit3"),
        ("window 64", "other"),
        ("dense", "rest"),
    ]
    assert curves["series"][0]["y"] == [2.03, 2.1535, None]
    assert curves["labels"] == ["1", "342", "683"]
    comparison["recommended"] = {"num_sinks": 0, "window": 32}
    assert [series["name"] for series in policy_curves(comparison)["series"]] == ["window 32", "dense"]
    comparison["policies"] = []
    assert policy_curves(comparison) is None


def test_the_recommended_row_is_drawn_and_one_line_of_a_kind(comparison: dict) -> None:
    """Whatever else was measured in the same bytes, and in whatever order."""
    comparison["recommended"] = {"num_sinks": 2, "window": 62}
    others = [
        entry("recompute", None, 64, 64, 9.0, settings={"positions": "in_cache", "every": 8}),
        entry("window", 0, 64, 64, 9.0, settings={"positions": "original"}),
        entry("sink_window", 4, 60, 64, 9.0, settings={"positions": "original"}, label="sink_window 4+60, original positions"),
        entry("sink_window", 2, 62, 64, 9.0, settings={"positions": "original"}, label="sink_window 2+62, original positions"),
    ]
    recommended = entry("sink_window", 2, 62, 64, 2.0, settings={"positions": "in_cache"})
    measured = comparison["policies"]
    comparison["policies"] = [*others, *measured, recommended]
    drawn = [(line["name"], line["y"][0]) for line in policy_curves(comparison)["series"]]
    assert drawn == [("2 sinks + 62", 2.0), ("window computed anew", 2.1), ("window 64", 2.2), ("dense", 4.1)]
    # Where nothing better was measured, the name says what is drawn.
    comparison["policies"] = others[:3]
    assert [line["name"] for line in policy_curves(comparison)["series"]] == [
        "4 sinks + 60, original positions",
        "window computed anew, every 8 tokens",
        "window 64, original positions",
    ]


def test_sinks_that_stand_elsewhere_are_drawn_where_they_are_recommended(comparison: dict) -> None:
    comparison["policies"].append(entry("pinned", 1, 63, 64, 1.5, label="pinned {7}+63"))
    names = [line["name"] for line in policy_curves(comparison)["series"]]
    assert names == ["1 sink + 63", "window computed anew", "window 64", "dense"]
    comparison["recommended"] = {"num_sinks": 1, "window": 63, "pinned": [7]}
    drawn = [(line["name"], line["y"][0]) for line in policy_curves(comparison)["series"]]
    assert drawn == [("1 sink where found + 63", 1.5), ("window computed anew", 2.1), ("window 64", 2.2), ("dense", 4.1)]


def test_policies_left_out_for_one_reason_share_a_line(comparison: dict) -> None:
    assert left_out_lines(comparison) == ["pinned: none found", "odd: no size"]


def test_what_is_said_of_missing_sections(comparison: dict) -> None:
    assert policy_section(None) == {"missing": "Not measured in this audit: it was switched off."}
    assert policy_section({"refused": "no room"}) == {"missing": "Not measured in this audit: no room"}
    section = policy_section(comparison)
    assert section["missing"] is None
    assert "4 texts of 1,024 tokens of python_source." in section["made"]
    assert "Re-computation is scored on 96 of 3,072 tokens; its loss is that of the window, and" in section["made"]


@pytest.mark.parametrize("recommended", [{"num_sinks": 1, "window": 63}, None])
def test_the_plot(comparison: dict, tmp_path: Path, recommended: dict | None) -> None:
    comparison["recommended"] = recommended
    write_policy_plot(comparison, tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text(encoding="utf-8")
    assert "<svg" in text
    assert text.count("stroke-dasharray: ") or text.count("stroke-dasharray=")


class TestPage:
    def page(self, tmp_path: Path, summary: dict) -> str:
        return render_report(read_audit(write_audit(tmp_path / "a", layers=2, heads=2, seq_len=16, summary=summary)))

    def test_shows_the_recommendation_the_table_and_the_data_of_the_curves(self, comparison: dict, tmp_path: Path) -> None:
        page = self.page(tmp_path, {"cache": comparison})
        assert '<p class="advice">Keep 1 sink and a window of 63 tokens.</p>' in page
        assert '<th scope="row">sink_window</th><td class="n">1</td><td class="n">63</td>' in page
        assert '"title":"Loss against position"' in page
        assert "Left out: odd: no size" in page

    def test_says_why_there_is_nothing(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, {"cache": {"refused": f"the text {HOSTILE} is too short"}})
        assert "Not measured in this audit: the text &lt;/script&gt;" in page
        assert HOSTILE not in page

    def test_an_audit_from_before_there_were_policies_has_no_section(self, tmp_path: Path) -> None:
        assert "Which cache policy" not in self.page(tmp_path, {})

    def test_hostile_names_stay_text(self, comparison: dict, tmp_path: Path) -> None:
        hostile = copy.deepcopy(comparison)
        hostile["corpus"] = hostile["recommendation"] = hostile["policies"][0]["label"] = HOSTILE
        hostile["policies"][0]["policy"] = HOSTILE
        assert HOSTILE not in self.page(tmp_path, {"cache": hostile})


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; see test_browser.py")
def test_the_curves_are_drawn_and_read_by_the_keyboard(browser, comparison: dict, tmp_path: Path) -> None:  # noqa: F811
    folder = write_audit(tmp_path / "a", layers=2, heads=2, seq_len=16, summary={"cache": comparison})
    write_report(folder)
    visit = Visit(browser, folder / "report.html", color_scheme="dark")
    picture = visit.page.locator("#policy-curves svg")
    assert picture.locator("path.line").count() == 4
    picture.focus()
    visit.page.keyboard.press("ArrowRight")
    said = visit.page.text_content("#tip").splitlines()
    assert said[:2] == ["tokens 1–341", "1 sink + 63: 2.03"]
    # The axis does not begin at 0: losses of some nats would all lie at its top.
    ticks = picture.locator("text[text-anchor=end]").all_text_contents()
    assert min(map(float, ticks)) >= 2
    visit.check_quiet()
    visit.context.close()


def test_intervals_over_blocks_are_called_so(comparison):
    """Fewer than eight texts are cut into blocks, of which intervals are taken."""
    said = {documents: parts_of({**comparison, "documents": documents}) for documents in (1, 4, 8)}
    assert said == {1: "blocks of the text, 8 or more in all", 4: "blocks of the texts, 8 or more in all", 8: "texts"}
