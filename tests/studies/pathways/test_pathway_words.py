"""The paragraph and the table follow from the numbers, and the plot shows them."""

from __future__ import annotations

import pytest

from sinklab.studies.pathways.columns import COLUMNS
from sinklab.studies.pathways.figure import draw, write_figure
from sinklab.studies.pathways.judging import Summary, judged
from sinklab.studies.pathways.words import cell, markdown, paragraph

SOFTMAX = {
    "held_out_loss": 1.9,
    "sink_rate": 40.0,
    "hidden_ratio": 3.0,
    "window_gap": 0.5,
    "int8_gap": 0.01,
    "distortion": 0.51,
    "trigger_solved": 1.0,
    "fast_gap": 0.2,
    "fast_diverged": 0.0,
}
GATED = {
    **SOFTMAX,
    "sink_rate": 0.0,
    "hidden_ratio": 1.0,
    "window_gap": 0.0,
    "int8_gap": 0.001,
    "distortion": 0.001,
    "fast_gap": 0.01,
}
RELU = {**GATED, "held_out_loss": 2.0, "trigger_solved": 0.0, "fast_diverged": 1.0}


def rows(seeds=6, **found):
    numbers = {seed: {label: dict(values) for label, values in found.items()} for seed in range(seeds)}
    costs = {label: {"train_time_long": {"value": 1.5, "low": 1.4, "high": 1.7}} for label in found if label != "softmax"}
    return judged(list(found), numbers, costs)


def test_the_paragraph():
    text = paragraph(rows(softmax=SOFTMAX, gated=GATED, relu=RELU), {"sigmoid": "why"}, scale="tiny", seeds=3)
    for sentence in (
        "softmax reaches a loss of 1.900 nats with a sink rate of 40.0 %, and loses 0.500 nats in a window without sinks and "
        "0.0100 by 8 bits.",
        "Low-distortion is gated.",
        "Not low-distortion, with what fails in brackets: relu (loss).",
        "By the means, no other operation has both a lower loss and a lower distortion than gated;",
        "The trigger task is learned with every seed by softmax and gated.",
        "Not with every seed within the cap: relu.",
        "That sigmoid cannot do it is provable",
        "At four times the learning rate some runs diverge with relu.",
        "Four times the learning rate costs less than 0.02 nats with gated, and most, 0.200, with softmax.",
        "(loss < 0.02 nats, sink < 5 percent, activations < 2 ratio, window < 0.02 nats, int8 < 0.02 nats) were fixed before",
    ):
        assert sentence in text


def test_no_pathway_is_good():
    text = paragraph(rows(softmax=SOFTMAX, relu=RELU), {}, scale="tiny", seeds=3)
    assert "No pathway is low-distortion." in text
    assert "provable" not in text


def test_with_few_seeds_nothing_is_claimed():
    text = paragraph(rows(2, softmax=SOFTMAX, gated=GATED), {}, scale="small", seeds=2)
    assert "No pathway is shown to be low-distortion." in text
    assert "Undecided, with what is open in brackets: gated (loss, sink, activations, window, int8)." in text


def test_a_reference_without_numbers_is_said():
    text = paragraph(rows(softmax={}, gated=GATED), {}, scale="tiny", seeds=3)
    assert "softmax could not be measured in full, so that nothing is compared with it." in text
    assert "gated (loss)" in text


def test_cells():
    loss = next(column for column in COLUMNS if column.name == "held_out_loss")
    time = next(column for column in COLUMNS if column.name == "train_time")
    assert cell(Summary(1.5, 1.25, 1.75, 3), loss) == "1.500 ± 0.250"
    assert cell(Summary(1.5, None, None, 2), loss) == "1.500 (n = 2)"
    assert cell(Summary(1.0, 1.0, 1.0, 3), loss) == "1.000"
    assert cell(Summary(1.5, 1.25, 2.0, 1), time) == "1.50 (1.25–2.00)"
    assert cell(None, loss) == "–"


def test_the_table():
    text = markdown(rows(softmax=SOFTMAX, gated=GATED, relu=RELU))
    heading, _, softmax, gated, relu = text.splitlines()
    assert heading.startswith("| operation | low-distortion | loss (nats) | sink rate (percent) |")
    assert "kurtosis" not in heading, "nothing was measured for it"
    assert softmax.startswith("| `softmax` | reference: sink, activations, window | 1.900 | 40.0 |")
    assert gated.startswith("| `gated` | yes | 1.900 | 0.0 |")
    assert relu.startswith("| `relu` | no: loss | 2.000 |")
    assert gated.endswith("| 1.50 (1.40–1.70) |")


def test_the_plot_has_every_point_and_the_front(tmp_path):
    found = rows(softmax={**SOFTMAX, "held_out_loss": 1.8}, gated=GATED, relu=RELU)
    figure = draw(found, "title")
    axes = figure.axes[0]
    assert {text.get_text() for text in axes.texts} == {"softmax", "gated", "relu"}
    line = next(line for line in axes.lines if line.get_label() == "non-dominated")
    assert line.get_xydata().flatten().tolist() == pytest.approx([1.8, 0.51, 1.9, 0.001])
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] in (
        "not low-distortion",
        "low-distortion",
        "reference",
    )
    write_figure(found, "title", tmp_path / "deep" / "pareto.svg")
    assert (tmp_path / "deep" / "pareto.svg").read_text().startswith("<?xml")


def test_a_plot_of_nothing_is_empty():
    figure = draw(rows(softmax={}), "title")
    assert not figure.axes[0].texts
