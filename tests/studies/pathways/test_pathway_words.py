"""Words and tables follow from the numbers, and the plot shows them."""

from __future__ import annotations

import pytest
from sinklab.studies.pathways.figure import draw, draw_panels, write_figure

from sinklab_claims.pathways.columns import COLUMNS, DECIDING, ON_NATURAL_TEXT, TABLES
from sinklab_claims.pathways.judging import AT_ONE_RATE, BOUNDS, Summary, judged
from sinklab_claims.pathways.runs import FACTORS, Choice
from sinklab_claims.pathways.show import all_tables, cell, deciding_table, definition, figure_title, in_words, page

SOFTMAX = {
    "held_out_loss": 1.9,
    "effective_sink_rate": 40.0,
    "sink_rate": 40.0,
    "hidden_ratio": 3.0,
    "window_gap": 0.5,
    "int8_gap": 0.01,
    "distortion": 0.51,
    "noise_gap": 0.3,
    "trigger_solved": 1.0,
    "tuning_gain": 0.0,
}
GATED = {
    **SOFTMAX,
    "effective_sink_rate": 0.0,
    "sink_rate": 0.0,
    "hidden_ratio": 1.0,
    "window_gap": 0.0,
    "int8_gap": 0.001,
    "distortion": 0.001,
    "tuning_gain": 0.01,
}
RELU = {**GATED, "held_out_loss": 2.0, "trigger_solved": 0.0, "noise_gap": 0.35, "tuning_gain": 0.18}
SIGMA = {**GATED, "held_out_loss": 1.87}

USUAL, AT_END, BROKEN = (2.3, 2.0, 1.9, 2.0, 2.3), (2.4, 2.3, 2.2, 2.1, 2.0), (2.0, 2.0, 1.95, None, None)


def chosen(losses):
    return Choice({factor: {1000: loss} for factor, loss in zip(FACTORS, losses, strict=True)}, (1000,))


def rows(seeds=6, rates=None, **found):
    numbers = {seed: {label: dict(values) for label, values in found.items()} for seed in range(seeds)}
    costs = {label: {"train_time_long": {"value": 1.5, "low": 1.4, "high": 1.7}} for label in found if label != "softmax"}
    choices = {label: chosen(losses) for label, losses in (rates or {}).items()}
    return judged(list(found), numbers, costs, choices)


def said(found, cannot=None, seeds=6):
    return in_words(found, cannot or {}, scale="tiny", base="no-bos", seeds=seeds)


def words(found, cannot=None, seeds=6):
    """All that is said."""
    found = said(found, cannot, seeds)
    return " ".join([found.paragraph, *found.statements.values()])


def test_the_words():
    rates = {"softmax": USUAL, "gated": BROKEN, "relu": AT_END}
    text = words(rows(rates=rates, softmax=SOFTMAX, gated=GATED, relu=RELU), {"sigmoid": "why"})
    for sentence in (
        "without BOS, over 6 seeds: softmax reaches a loss of 1.900 nats; 40.0 % of its heads sink. 8 bits cost it "
        "0.0100 nats, "
        "a window without sinks 0.500.",
        "Beside softmax's, the loss at the own rates is higher by 0.02 nats or more with relu; equivalent, within 0.02 "
        "nats, with "
        "gated. These are 2 comparisons, each by two tests at 5 %, not corrected for their number.",
        "A rate of its own, chosen on other seeds, gains relu 0.180 nats and softmax 0.000: one rate for all would "
        "misjudge relu.",
        "The best rate is the end of the range, so that one outside may be better, with relu (highest).",
        "Over the rates the loss varies least with gated (0.050 nats) and most with softmax (0.400).",
        "Some trainings of the selection diverged with gated.",
        "Not low-distortion (the failing bounds in brackets): relu (loss).",
        "By the means, no operation has both a lower loss and a lower distortion than gated.",
        "By means, and where more than 0.02 nats differ: replacing a tenth of the tokens costs softmax 0.300 nats, "
        "more with relu.",
        "The trigger task is learned with every seed by softmax and gated.",
        "Not with every seed within the limit of steps: relu.",
        "sigmoid provably cannot learn it",
        "An explicit way to do nothing that is low-distortion exists here: gated.",
        "The bounds and the margin were fixed before the runs.",
    ):
        assert sentence in text
    assert "Of the others" not in text
    assert "is lower by" not in text
    found = said(rows(rates=rates, softmax=SOFTMAX, gated=GATED, relu=RELU), {"sigmoid": "why"})
    assert found.paragraph.startswith("At the scale tiny (")
    assert "exists here: gated." in found.paragraph
    assert list(found.statements) == [
        "Loss",
        "Learning rates",
        "Bounds at the own rates",
        "Loss and distortion together",
        "Out of distribution",
        "Trigger task",
        "Time",
        "Limits",
    ]
    assert found.statements["Bounds at the own rates"].startswith("Inside all of them: gated. Not low-distortion")
    assert found.to_dict() == {"paragraph": found.paragraph, "statements": dict(found.statements)}


def test_no_pathway_is_good():
    text = words(rows(softmax=SOFTMAX, relu=RELU))
    assert "The one explicit way to do nothing is not low-distortion here." in text
    assert "None of the 2 explicit ways to do nothing is low" in words(rows(softmax=SOFTMAX, relu=RELU, softpick=RELU))
    assert "provable" not in text
    assert "end of the range" not in text


def test_what_has_no_explicit_way_does_not_answer_the_question():
    text = words(rows(softmax=SOFTMAX, relu=RELU, sigma_reparam=SIGMA))
    assert (
        "The one explicit way to do nothing is not low-distortion here. Of the others, sigma_reparam is low-distortion." in text
    )
    assert "is lower by 0.02 nats or more with sigma_reparam; higher by 0.02 nats or more with relu" in text
    again = {"sigmoid(normalize=True)": GATED}  # its rows sum to one again
    assert "explicit" not in words(rows(softmax=SOFTMAX, **again))


def test_where_softmax_has_no_distortion_nothing_is_said_to_replace_it():
    text = words(rows(softmax=GATED, gated=GATED, softpick=GATED, relu=RELU))
    assert (
        "At its own rate softmax itself is inside every bound and has no sink to replace, so that explicit ways to do nothing "
        "are not tested there. It says little that gated and softpick are inside too." in text
    )
    assert "exists here" not in text
    assert "says little" not in words(rows(softmax=GATED, relu=RELU))


AT_SCALE = {
    "softmax": {"scale_rate_loss": [1.9] * 6, "scale_rate_sink": [26.0, 25.0, 30.0, 27.0, 24.0, 24.0]},
    "gated": {"scale_rate_loss": [1.9, 1.91, 1.9, 1.89, 1.9, 1.9], "scale_rate_sink": [0.0, 0.0, 1.0, 0.5, 0.0, 0.0]},
    "relu": {"scale_rate_loss": [1.9] * 6, "scale_rate_sink": [0.0, 10.0, 4.0, 9.0, 1.0, 3.0]},
    "softpick": {"scale_rate_loss": [1.95, 1.96, 1.95, 1.94, 1.95, 1.95], "scale_rate_sink": [0.0, 0.0, 1.0, 0.5, 0.0, 0.0]},
}
"""Six seeds at the rate of the scale."""


def at_scale(windows, **found):
    numbers = {
        seed: {
            label: {
                **values,
                **{column: of_seeds[seed] for column, of_seeds in AT_SCALE[label].items()},
                "scale_rate_window": windows[label] * (1 + seed / 100),
            }
            for label, values in found.items()
        }
        for seed in range(6)
    }
    return judged(list(found), numbers, {})


def test_at_one_rate_for_all_a_sink_is_there_or_not_or_open_by_its_interval():
    windows = {"softmax": 0.5, "gated": 0.01, "relu": 0.01, "softpick": 0.4}
    text = words(at_scale(windows, softmax=SOFTMAX, gated=GATED, relu=RELU))
    assert (
        "At the rate of the scale for all, counting heads that have the first token as a sink: there is a sink with softmax "
        "(26.0 %); there is none with gated (0.2 %); it is undecided with relu (4.5 %)." in text
    )
    assert "rate of the scale for all" not in words(rows(softmax=SOFTMAX, gated=GATED))


def test_an_operation_that_diverged_at_the_one_rate_is_open_there_and_not_left_out():
    numbers = {
        seed: {
            "softmax": {**SOFTMAX, "scale_rate_window": 0.5, **{name: of[seed] for name, of in AT_SCALE["softmax"].items()}},
            "gated": {**GATED, "scale_rate_window": 0.01, **{name: of[seed] for name, of in AT_SCALE["gated"].items()}},
            "relu": RELU,
        }
        for seed in range(6)
    }
    found = judged(["softmax", "gated", "relu"], numbers, {})
    text = words(found)
    assert (
        "gated replaces it, with loss, sink and window inside the bounds. Undecided (the open bounds in brackets): "
        "relu (loss, sink, window)." in text
    )
    assert "there is none with gated (0.2 %); it is undecided with relu (not measured)." in text
    assert deciding_table(found).splitlines()[-1].split(" | ")[2] == "undecided: loss, sink, window"


def test_what_replaces_the_sink_of_softmax_at_one_rate():
    """Gated holds all three bounds, softpick fails the loss and the window, and of relu only the sink is open."""
    windows = {"softmax": 0.5, "gated": 0.01, "relu": 0.01, "softpick": 0.4}
    found = at_scale(windows, softmax=SOFTMAX, gated=GATED, relu=RELU, softpick=GATED)
    assert (
        "At one rate for all, that of the scale, softmax has a sink to replace: 26.0 % of heads sink, and a window without it "
        "costs 0.513 nats. gated replaces it, with loss, sink and window inside the bounds. Not replaced (the failing "
        "bounds in "
        "brackets): softpick (loss, window). Undecided (the open bounds in brackets): relu (sink)." in said(found).paragraph
    )
    assert "judged at one rate too was decided with results at that rate in view" in said(found).statements["Limits"]
    heading, _, softmax, gated, relu, softpick = deciding_table(found).splitlines()
    assert heading.startswith(
        "| operation | low-distortion | replaces the sink at ×1 | loss beside softmax (nats) | loss (nats) |"
    )
    answers = [line.split(" | ")[2] for line in (softmax, gated, relu, softpick)]
    assert answers == ["–", "yes", "undecided: sink", "no: loss, window"]
    assert [row.to_dict()["replacement"] for row in found] == [
        None,
        {"answer": "yes", "bounds": []},
        {"answer": "undecided", "bounds": ["sink"]},
        {"answer": "no", "bounds": ["loss", "window"]},
    ]
    none = said(at_scale({**windows, "gated": 0.3}, softmax=SOFTMAX, gated=GATED)).paragraph
    assert (
        "No operation is shown to replace it, with loss, sink and window inside the bounds. Not replaced (the failing "
        "bounds in "
        "brackets): gated (window)." in none
    )


def test_at_one_given_rate_the_bounds_themselves_say_what_replaces_the_sink():
    """No column of another rate is there, and nothing is said of own rates or of a search."""
    numbers = {seed: {"softmax": SOFTMAX, "gated": GATED, "relu": RELU} for seed in range(6)}
    found = judged(["softmax", "gated", "relu"], numbers, {}, one_rate=True)
    spoken = in_words(found, {}, scale="tiny", base="no-bos", seeds=6, rate=0.5)
    assert (
        "At one rate for all, 0.5 times that of the scale, softmax has a sink to replace: 40.0 % of heads sink, and a window "
        "without it costs 0.500 nats. gated replaces it, with loss, sink and window inside the bounds. Not replaced "
        "(the failing "
        "bounds in brackets): relu (loss). An explicit way" in spoken.paragraph
    )
    assert list(spoken.statements) == [
        "Loss",
        "Learning rates",
        "Sinks at one rate",
        "Bounds",
        "Loss and distortion together",
        "Out of distribution",
        "Trigger task",
        "Limits",
    ]
    assert "at one rate too" not in spoken.statements["Limits"], "it is the only rate"
    assert spoken.statements["Learning rates"] == (
        "All operations are trained at 0.5 times the rate of the scale, without a search for better ones. An operation inside "
        "the bounds is there untuned; one outside may be inside at a rate of its own."
    )
    assert spoken.statements["Loss"].startswith("Beside softmax's, the loss at 0.5 times the rate of the scale is higher")
    assert spoken.statements["Sinks at one rate"] == (
        "At 0.5 times the rate of the scale for all, counting heads that sink on the first token by weight times gate and by "
        "share: there is a sink with softmax (40.0 %); there is none with gated (0.0 %) and relu (0.0 %)."
    )
    assert "own rate" not in " ".join([spoken.paragraph, *spoken.statements.values()])
    assert deciding_table(found, 0.5).startswith("| operation | low-distortion | replaces the sink at ×0.5 |")
    assert "as many parameters as softmax's, 0.5 times the rate of the scale) is" in page(found, spoken, 0.5)
    assert figure_title("small", "no-bos", 3, 0.5) == (
        "Ways to do nothing, scale small, without BOS, learning rate ×0.5, 3 seeds, 95 % intervals"
    )


def test_on_natural_text_a_window_is_judged_by_what_the_first_tokens_give_back():
    """Every window costs the lost context, 0.16 nats here; what gated loses in it is that alone."""
    softmax = {**SOFTMAX, "window_gap": 0.3, "sink_worth": 0.14}
    gated, relu = ({**GATED, "window_gap": 0.16, "sink_worth": worth} for worth in (0.001, 0.05))
    numbers = {seed: {"softmax": softmax, "gated": gated, "relu": relu} for seed in range(6)}
    found = judged(["softmax", "gated", "relu"], numbers, {}, one_rate=True, natural=True)
    assert [row.answer for row in found] == ["no", "yes", "no"]
    assert found[2].named("not reproduced") == ["window"]
    assert [row.answer for row in judged(["softmax", "gated"], numbers, {}, one_rate=True)] == ["no", "no"]
    words_of_it = in_words(found, {}, scale="small", base="no-bos", seeds=6, rate=0.5)
    spoken = words_of_it.paragraph
    assert "40.0 % of its heads sink. 8 bits cost it 0.0100 nats; in a window its first four tokens give back 0.140." in spoken
    assert "has a sink to replace: 40.0 % of heads sink, which is worth 0.140 nats in a window. gated replaces it" in spoken
    assert "decided with results in view, since a window of natural text loses context" in words_of_it.statements["Limits"]
    assert "sink worth (nats) |" in deciding_table(found, 0.5, natural=True)
    assert "window gap" not in deciding_table(found, 0.5, natural=True)
    asked = definition(None, natural=True)
    assert (
        "- **window**: of the cost of a window of a quarter of the context, the first four tokens give back less than "
        "0.02 nats;" in asked
    )
    assert "without sinks costs" not in asked
    axes = draw(found, "title", natural=True).axes[0]
    assert axes.get_ylabel() == "distortion: worth of first tokens and loss by int8, nats"
    own = judged(
        ["softmax"],
        {0: {"softmax": {**softmax, "scale_rate_loss": 2.0, "scale_rate_sink": 30.0, "scale_rate_worth": 0.1}}},
        {},
        natural=True,
    )
    assert set(own[0].at_one_rate) == {"sink", "window"}


def test_at_one_given_rate_without_a_sink_there_is_nothing_to_replace():
    numbers = {seed: {"softmax": GATED, "gated": GATED} for seed in range(6)}
    found = judged(["softmax", "gated"], numbers, {}, one_rate=True)
    text = in_words(found, {}, scale="tiny", base="no-bos", seeds=6, rate=1.0).paragraph
    assert (
        "At the rate of the scale softmax itself is inside every bound and has no sink to replace, so that explicit ways to do "
        "nothing are not tested by this. It says little that gated is inside too." in text
    )


def test_where_softmax_loses_nothing_in_a_window_nothing_is_said_to_be_replaced():
    found = at_scale({"softmax": 0.01, "gated": 0.01}, softmax=SOFTMAX, gated=GATED)
    assert "there is a sink with softmax (26.0 %)" in words(found)
    assert "a sink to replace:" not in words(found)
    assert "replaces the sink" not in deciding_table(found)


def test_where_the_sink_of_softmax_is_open_nothing_is_put_down_to_the_operation_alone():
    rates = [0.5, 8.0, 3.0, 9.0, 1.0, 4.0]
    numbers = {
        seed: {
            "softmax": {**GATED, "effective_sink_rate": rates[seed], "sink_rate": rates[seed]},
            "relu": {**RELU, "effective_sink_rate": 40.0, "sink_rate": 40.0},
        }
        for seed in range(6)
    }
    text = words(judged(["softmax", "relu"], numbers, {}))
    assert "Whether softmax itself has a sink at its own rate is open" in text
    assert "is open, so that" not in words(rows(softmax=SOFTMAX, relu=RELU))
    found = judged(["softmax", "relu"], numbers, {}, one_rate=True)
    assert (
        "Whether softmax itself has a sink at 0.5 times the rate of the scale is open, so that it is not shown that there is "
        "one to replace." in in_words(found, {}, scale="tiny", base="bos", seeds=6, rate=0.5).paragraph
    )


def test_a_better_one_is_said():
    text = words(rows(softmax=SOFTMAX, softpick=SIGMA))
    assert "exists here: softpick. softpick has a lower loss too." in text


def test_with_few_seeds_nothing_is_claimed():
    text = words(rows(2, softmax=SOFTMAX, gated=GATED), seeds=2)
    assert "Whether an explicit way to do nothing is low-distortion is open here: shown of none, refuted of 0 of 1." in text
    assert "Undecided (the open bounds in brackets): gated (loss, sink, activations, window, int8)." in text
    assert "is undecided with gated." in text


def test_a_reference_without_numbers_is_said():
    text = words(rows(softmax={}, gated=GATED))
    assert "softmax could not be measured in full, so that nothing is compared with it." in text
    assert "gated (loss)" in text


def test_an_operation_without_a_rate_is_said():
    diverged = {"relu": (None,) * 5, "softmax": USUAL}
    assert "No learning rate could be chosen for relu." in words(rows(rates=diverged, softmax=SOFTMAX, relu={}))


def test_cells():
    loss = next(column for column in COLUMNS if column.name == "held_out_loss")
    time = next(column for column in COLUMNS if column.name == "train_time")
    assert cell(Summary(1.5, 1.25, 1.75, 3, "Student's t"), loss) == "1.500 ± 0.250"
    assert cell(Summary(1.5, 1.25, 1.75, 3, "Student's t of logarithms"), loss) == "1.500 (1.250 to 1.750)"
    assert cell(Summary(1.5, None, None, 2), loss) == "1.500 (n = 2)"
    assert cell(Summary(1.0, None, None, 3), loss) == "1.000"
    assert cell(Summary(1.0, 1.0, 1.0, 8, "exact, of the median"), loss) == "1.000"
    assert cell(Summary(1.5, 1.25, 2.0, 1), time) == "1.50 (1.25–2.00)"
    assert cell(None, loss) == "–"
    rate = next(column for column in COLUMNS if column.name == "chosen_factor")
    assert cell(Summary(0.25, None, None, 2), rate) == "0.25"


def test_the_tables():
    found = rows(rates={"softmax": USUAL, "relu": AT_END}, softmax=SOFTMAX, gated=GATED, relu=RELU)
    heading, _, softmax, gated, relu = deciding_table(found).splitlines()
    assert heading == (
        "| operation | low-distortion | loss beside softmax (nats) | loss (nats) | effective sink rate (percent) | "
        "first norm (ratio) | int8 gap (nats) | window gap (nats) |"
    )
    assert softmax == "| `softmax` | reference: sink, activations, window | – | 1.900 | 40.0 | 3.00 | 0.0100 | 0.500 |"
    assert gated.startswith("| `gated` | yes | equivalent: +0.000 (+0.000 to +0.000) | 1.900 | 0.0 |")
    assert relu.startswith("| `relu` | no: loss | worse: +0.100 (+0.100 to +0.100) | 2.000 |")
    text = all_tables(found)
    headings = [line for line in text.splitlines() if line.startswith("**")]
    assert headings[:2] == ["**Loss and learning rate**", "**Where the attention goes**"]
    assert "kurtosis" not in text, "nothing was measured for it"
    assert "| `relu` | 2.000 | 4 (highest tried) | 0.180 |" in text
    assert "| `gated` | 1.50 (1.40–1.70) |" in text
    whole = page(found, said(found))
    assert whole.index("**Loss.**") < whole.index("**Loss and learning rate**"), "words before numbers"
    assert "- **Time.** The time of a training step" in whole


def test_every_column_stands_in_one_table_and_all_that_decides_is_a_column():
    assert {column.about for column in COLUMNS} == set(TABLES)
    assert set(DECIDING) <= {column.name for column in COLUMNS}
    asked = {bound.column for bound in (*BOUNDS, *AT_ONE_RATE)}
    assert asked <= set(DECIDING)
    assert set(ON_NATURAL_TEXT) <= asked
    assert (
        {column.name for column in COLUMNS if column.natural} <= set(ON_NATURAL_TEXT.values()) <= {one.name for one in COLUMNS}
    )


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


def test_the_time_of_one_operation_is_said_once():
    text = words(rows(softmax=SOFTMAX, gated=GATED))
    assert "over that with softmax, is 1.50 with gated (median of this code, in turns on one machine)" in text


@pytest.mark.parametrize("distortions", [(0.011, 0.035), (0.001, 0.51), (0.02, 1.4)])
def test_the_axis_of_distortion_has_numbers_wherever_the_points_lie(distortions):
    """Powers of ten alone give the first of these a single one."""
    one, other = distortions
    figure = draw(rows(softmax={**SOFTMAX, "distortion": one}, gated={**GATED, "distortion": other}), "title")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    shown = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(shown) >= 3
    assert shown == [f"{float(text):g}" for text in shown], "nats as they are said in the text, no powers"


def test_two_bases_side_by_side():
    found = rows(softmax=SOFTMAX, gated=GATED)
    left, right = draw_panels([("no BOS", found), ("BOS", rows(softmax=SOFTMAX, relu=RELU))]).axes
    assert (left.get_title(), right.get_title()) == ("no BOS", "BOS")
    assert {text.get_text() for text in right.texts} == {"softmax", "relu"}
    assert left.get_xlim() == right.get_xlim()


def test_a_plot_of_nothing_is_empty():
    figure = draw(rows(softmax={}), "title")
    assert not figure.axes[0].texts


def test_what_rounds_to_zero_has_no_sign():
    nothing = {"false_sink_gap": -1e-5, "window_gap": -1e-5, "int8_gap": -1e-6, "sink_worth": -1e-5}
    found = rows(softmax={**SOFTMAX, **nothing}, gated={**GATED, **nothing, "held_out_loss": SOFTMAX["held_out_loss"] - 1e-5})
    text = page(found, said(found))
    assert "a false sink costs softmax 0.000 nats" in text
    assert "8 bits cost it 0.0000 nats, a window without sinks 0.000." in text
    assert "equivalent: +0.000" in text
    assert "-0.0" not in text.replace("-0.02", "")
