"""Figure and page of claims: drawn from made-up results, which hold every verdict."""

from __future__ import annotations

import re

import pytest
from matplotlib.image import imread
from sinklab.report.claim_figure import VERDICT_COLOURS, draw_claim, write_claim_figure
from sinklab.report.claims_page import effect_words, write_claims_page
from tests.studies.reproduce.made_results import PARTS, write_claim

from sinklab.results.table import read_table
from sinklab_claims.verdict.rule import VERDICTS


def test_the_figure_has_the_numbers_the_interval_and_the_region(tmp_path):
    record = write_claim(tmp_path / "tiny" / "one")
    path = write_claim_figure(tmp_path / "tiny" / "one")
    assert imread(path).shape[1] == 1000
    table = read_table(tmp_path / "tiny" / "one" / "table.parquet")
    figure = draw_claim(record, table)
    assert len(figure.axes) == 2 * len(PARTS)
    numbers, effect = figure.axes[:2]
    assert [label.get_text() for label in numbers.get_yticklabels()] == ["baseline", "sigmoid <b>"]
    assert list(numbers.lines[0].get_xdata()) == [30.0, 31.0, 32.0]
    points, interval = (line.get_xdata() for line in effect.lines[-3:-1])
    assert list(points) == [-30.0, -30.5, -31.0]
    assert list(interval) == record["parts"][0]["interval"]
    (region,) = effect.patches
    assert region.get_x() + region.get_width() == -5
    assert {text.get_text() for text in figure.axes[4].texts} == {"no number"}
    words = [text.get_text() for text in figure.texts]
    assert "the sink is gone – reproduced" in words
    assert write_claim_figure(tmp_path / "tiny" / "one").read_bytes() == path.read_bytes()


def test_the_page_has_every_claim_with_its_verdict_in_words_and_nothing_from_outside(tmp_path):
    results = [
        (tmp_path / "tiny" / f"claim{number}", write_claim(tmp_path / "tiny" / f"claim{number}", verdict=verdict))
        for number, verdict in enumerate(VERDICTS)
    ]
    write_claim_figure(results[0][0])
    page = write_claims_page(results, tmp_path / "claims.html").read_text(encoding="utf-8")
    (counts,) = re.findall(r'<p class="verdict">(.*?)\.</p>', page)
    assert sorted(counts.split(", ")) == sorted(f"1 {verdict}" for verdict in VERDICTS)
    for number, verdict in enumerate(VERDICTS):
        assert f'href="#tiny-claim{number}"' in page
        assert page.count(f">{verdict}</") >= 2
    assert "Without softmax &lt;i&gt;no&lt;/i&gt; sink." in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert set(VERDICT_COLOURS) == set(VERDICTS)


def test_the_cell_of_a_model_has_the_effect_of_its_record(tmp_path):
    """That of the part which decides: of a claim that holds the weakest, which need not be the first."""
    plain = write_claim(tmp_path / "checkpoint" / "one", PARTS[:2])
    weakest = plain["parts"][1]
    model = {
        **{key: plain[key] for key in ("verdict", "reason", "parts", "presupposes")}, "name": "org/one", "revision": "1",
        "effect": weakest["mean"], "interval": weakest["interval"], "unit": weakest["unit"],
    }  # fmt: skip
    record = write_claim(tmp_path / "checkpoint" / "one", PARTS[:2], models=[model])
    page = write_claims_page([(tmp_path / "checkpoint" / "one", record)], tmp_path / "claims.html").read_text(encoding="utf-8")
    cells = re.findall(r'<td><span class="claim-verdict reproduced">reproduced</span>(.*?)</td>', page)
    assert [cell.strip() for cell in cells if cell.strip()] == [effect_words(weakest)]
    assert effect_words(weakest) != effect_words(plain["parts"][0])


@pytest.mark.parametrize(
    ("mean", "interval", "words"),
    [(None, None, "–"), (2.0, None, "2 points"), (25.14, [20.31, 29.97], "25.1 [20.3, 30] points")],
)
def test_effects_in_words(mean, interval, words):
    assert effect_words({"mean": mean, "interval": interval, "unit": "points"}).replace("30.0", "30") == words
