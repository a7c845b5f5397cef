"""The causes of sinks on a page: the map of labels, intervals on one axis, read-outs, and what could not be had."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

import pytest
from synthetic import HOSTILE, write_audit

from sinklab.errors import InputError
from sinklab.report.causes import LABELS, causes_section, write_causes_report
from sinklab.results.table import write_json
from sinklab.studies.audit.page import write_report
from sinklab.studies.causes.labels import LABELS as GIVEN

CHROMIUM = os.environ.get("SINKLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def effect(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": 0.01}


def head(layer: int, number: int, label: str, redirect: float, hide: float, domain: str = "text") -> dict[str, Any]:
    return {
        "layer": layer,
        "head": number,
        "module": f"layers.{layer}",
        "label": label,
        "domains": {domain: label},
        "needs_sink": {domain: "yes"},
        "undecided": {} if label != "undecided" else {domain: {"nearest": "semantic", "why": "looks semantic", "texts": 90}},
        "sink_weight": 0.25 * (layer + number),
        "value_ratio": 0.5,
        "effects": {"redirect": {domain: effect(redirect, 0.005)}, "hide": {domain: effect(hide, 0.002)}},
        "divergence": {},
    }


def summary(**changes: Any) -> dict[str, Any]:
    heads = [head(0, 0, "semantic", 0.5, 0.0), head(0, 1, "dormant", 0.001, 0.09), head(1, 1, "undecided", -0.02, 0.01)]
    condition = {
        "first_token_at": 0, "at_place": [0.7, 0.6, 0.1], "at_first_token": [0.7, 0.6, 0.1], "tokens": [], "scored": 9,
        "strongest": [{"weight": 0.7, "head": "0.0", "token": 3, "position": 0}], "loss": None,
    }  # fmt: skip
    loss = {"mean": -0.25, "low": -0.5, "high": 0.0}
    return {
        "model": "small", "revision": "sha256-0", "operation": "softmax", "heads": heads,
        "counts": {"semantic": 1, "dormant": 1, "switch": 0, "broadcast": 0, "undecided": 1},
        "sink": {"place": 0}, "texts": 16, "texts_needed": 40, "domains": ["text"], "unit": "nats", "clean_loss": {"text": 2.0},
        "level": 0.05, "minimal_effect": 0.01, "budget": "fast", "variants": ["redirect", "hide"],
        "text": "The sink is position 0.",
        "read_outs": {
            "heads": {
                "0.0": {"concentration": 0.7, "outliers": 12.0, "need of the sink": 0.002},
                "0.1": {"concentration": 0.35, "outliers": 3.0, "need of the sink": -0.001},
                "1.1": {"concentration": 0.1, "outliers": None, "need of the sink": 0.0},
            },
            "layers": {},
            "correlations": [
                {"first": "concentration", "second": "outliers", "over": "heads", "rho": 0.5, "low": -0.25, "high": 0.75,
                 "items": 2, "reading": "no clear relation"},
            ],
        },
        "location": {
            "place": 0, "head": "0.0", "heads": ["0.0", "0.1", "1.1"], "left_out": {"moved": "too short"},
            "conditions": {"as it is": condition, "removed": {**condition, "first_token_at": None, "loss": loss}},
        },
        "key_bias": {"statement": "Zeroing changes the loss by -0.25 nats."}, "massive": None,
        "spread": {"refused": "no tokens"},
        **changes,
    }  # fmt: skip


def test_every_label_has_its_words():
    assert tuple(LABELS) == GIVEN
    assert len({letter for letter, _ in LABELS.values()}) == len(LABELS)


def test_map_of_labels():
    found = causes_section(summary())
    assert found["map"]["layers"] == [0, 1]
    letters = [[cell and cell["letter"] for cell in row["cells"]] for row in found["map"]["rows"]]
    assert letters == [["S", None], ["D", "·"]]
    assert found["map"]["rows"][0]["cells"][0]["words"] == "Layer 0, head 0: semantic"
    assert [(entry["label"], entry["count"]) for entry in found["legend"]][:3] == [
        ("semantic", 1),
        ("constant", 0),
        ("dormant", 1),
    ]


def test_intervals_lie_on_one_axis():
    (figure,) = causes_section(summary())["figures"]
    assert [row["name"] for row in figure["rows"]] == ["0.0", "0.1", "1.1"]
    assert [tick["text"] for tick in figure["ticks"]] == ["−0.01", "0", "0.01", "0.1"]
    by_value = {tick["text"]: float(tick["x"]) for tick in figure["ticks"]}
    assert by_value["−0.01"] < by_value["0"] == float(figure["zero"]) < by_value["0.01"] < by_value["0.1"]
    # asinh: the minimal effect lies as far to the left of 0 as to the right.
    assert by_value["0.01"] - by_value["0"] == pytest.approx(by_value["0"] - by_value["−0.01"], abs=0.011)  # two decimals
    assert figure["band"] == next(tick["x"] for tick in figure["ticks"] if tick["text"] == "0.01")  # gains cost nothing
    marks = [mark for row in figure["rows"] for mark in row["marks"]]
    assert all(2 <= float(mark["low"]) <= float(mark["x"]) <= float(mark["high"]) <= 98 for mark in marks)
    assert marks[0]["words"] == "all attention to the sink: 0.500 [0.495, 0.505]"
    assert figure["more"] == 0


def test_a_large_model_shows_its_decided_and_strongest_heads():
    heads = [head(layer, 0, "undecided", 0.001 * layer, 0.0) for layer in range(60)]
    heads[3] = head(3, 0, "dormant", 0.0, 0.02)
    found = causes_section(summary(heads=heads))
    (figure,) = found["figures"]
    assert len(figure["rows"]) == 40
    assert figure["more"] == 20
    # Of those without a label the twenty with the least effects are left out: all but the dormant one of the first 21.
    assert [row["name"] for row in figure["rows"]][:2] == ["3.0", "21.0"]
    assert len(found["rows"]) == 60


def test_two_domains_have_a_figure_each():
    heads = [head(0, 0, "switch", 0.5, 0.0)]
    heads[0]["domains"] = {"text": "semantic", "code": "dormant"}
    heads[0]["effects"]["redirect"]["code"] = effect(0.0, 0.001)
    found = causes_section(summary(heads=heads, domains=["text", "code"]))
    assert [figure["domain"] for figure in found["figures"]] == ["text", "code"]
    assert [figure["rows"][0]["label"] for figure in found["figures"]] == ["semantic", "dormant"]
    assert found["map"]["rows"][0]["cells"][0]["words"] == "Layer 0, head 0: switch (semantic on text, dormant on code)"
    assert found["rows"][0][1] == "semantic (text); dormant (code)"
    assert found["headings"][5:] == [
        "All attention to the sink, text", "Sink hidden, text", "All attention to the sink, code", "Sink hidden, code",
    ]  # fmt: skip
    assert found["rows"][0][-1] == "–"


def test_reasons_and_the_second_axis():
    found = causes_section(summary())
    assert [row[:3] for row in found["rows"]] == [
        ["0.0", "semantic", "yes"],
        ["0.1", "dormant", "yes"],
        ["1.1", "undecided", "yes"],
    ]
    assert found["reasons"] == ["1.1: looks semantic; 90 texts of text would decide"]
    older = summary()
    for one in older["heads"]:
        del one["needs_sink"], one["undecided"]
    assert [row[2] for row in causes_section(older)["rows"]] == ["–"] * 3
    assert causes_section(older)["reasons"] == []


def test_read_outs_location_and_statements():
    found = causes_section(summary())
    (name, bars) = found["read_outs"]["rows"][0]
    assert (name, [bar["width"] for bar in bars]) == ("0.0", ["70.0", "100.0", "100.0"])
    assert found["read_outs"]["rows"][1][1][2] == {"text": "−0.0010", "width": "50.0", "kind": "need", "below": True}
    assert found["read_outs"]["rows"][2][1][1] is None
    assert found["read_outs"]["relations"] == [
        "Attention on the sink and outliers: no clear relation (rank correlation +0.50 [−0.25, +0.75] over 2 heads)"
    ]
    assert found["location"]["rows"][1] == [
        "the first token taken away", "0.70", "gone", "0.70 at 0, head 0.0", "−0.250 [−0.500, +0.000]",
    ]  # fmt: skip
    assert found["location"]["left_out"] == ["The first token moved to a later position: too short"]
    assert found["statements"] == [
        ("Is what stands at the sink used?", "Zeroing changes the loss by −0.25 nats."),
        ("Does the sink keep changes from spreading?", "Not measured: no tokens"),
    ]


def test_what_is_missing_is_said():
    assert causes_section(None) is None
    assert causes_section({"refused": "no sink found"}) == {"missing": "Not examined in this audit: no sink found"}
    found = causes_section(summary(read_outs={"refused": "no sink"}, location=None))
    assert found["read_outs"] == {"missing": "Not measured: no sink"}
    assert found["location"] is None


def write_page(folder, **changes: Any):
    folder.mkdir()
    write_json(summary(**changes), folder / "summary.json")
    write_json({"run_id": "r", "kind": "causes", "config": {"texts": 16}}, folder / "run.json")
    return write_causes_report(folder)


def test_the_page_is_one_file_and_escapes(tmp_path):
    page = write_page(tmp_path / "a", model=HOSTILE, domains=["text"], text=HOSTILE).read_text(encoding="utf-8")
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in page
    assert page == write_page(tmp_path / "b", model=HOSTILE, domains=["text"], text=HOSTILE).read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert " style=" not in page  # the page's policy would drop it


def test_another_run_is_refused(tmp_path):
    write_json({"kind": "audit"}, tmp_path / "run.json")
    with pytest.raises(InputError, match=r"holds a run of kind 'audit', expected causes$"):
        write_causes_report(tmp_path)


def test_the_section_of_an_audit(tmp_path):
    page = write_report(write_audit(tmp_path / "a", layers=2, seq_len=16, summary={"causes": summary()}))
    text = page.read_text(encoding="utf-8")
    assert 'id="causes"' in text
    assert "What the sink is for" in text
    plain = write_report(write_audit(tmp_path / "b", layers=2, seq_len=16)).read_text(encoding="utf-8")
    assert 'id="causes"' not in plain


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; install it or set SINKLAB_CHROMIUM to its path")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path, scheme):
    from playwright.sync_api import sync_playwright

    path = write_page(tmp_path / "a")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 800})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator(".label-map td[class^=l-]").count() == 4
        assert page.locator(".effects svg g").count() == 6
        # Marks are drawn inside their row, in the colour of their series.
        box = page.locator(".effects svg").first.bounding_box()
        dot = page.locator(".effects circle").first.bounding_box()
        assert box["x"] <= dot["x"] <= box["x"] + box["width"]
        colours = page.eval_on_selector_all(".effects-row:first-child circle", "all => all.map(c => getComputedStyle(c).fill)")
        assert len(set(colours)) == 2
        assert said == []
        browser.close()
