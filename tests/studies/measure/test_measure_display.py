"""What the terminal shows of a measurement: numbers that have a mean, and none of those that have not."""

from __future__ import annotations

from sinklab.results.run import Result
from sinklab.results.table import make_table
from sinklab.studies.measure.measure import display


def shown(rows):
    table, *_ = display(Result({}, make_table(rows), {"kind": "measure"}, None, display))
    return list(table.headings), table.rows


def test_parts_of_an_encoder_decoder_have_no_mean_in_common():
    """The first position of a target is none of its source: a decoder that sinks and an encoder that does not are two rows."""
    same = {"probe": "sink_rate", "metric": "gu2024", "unit": "percent", "key_position": 0, "count": 4}
    rows = [
        {**same, "part": part, "layer": 0, "head": head, "value": value}
        for part, values in (("encoder", (0.0, 0.0)), ("decoder", (100.0, 50.0)))
        for head, value in enumerate(values)
    ]
    header, lines = shown(rows)
    assert header == ["probe", "metric", "part", "of", "unit", "values", "mean", "min", "max"]
    assert lines == [
        ["sink_rate", "gu2024", "decoder", "position 0", "percent", 2, "75", "50", "100"],
        ["sink_rate", "gu2024", "encoder", "position 0", "percent", 2, "0", "0", "0"],
    ]


def test_what_is_given_for_other_positions_is_shown_for_these_and_a_channel_has_no_mean():
    same = {"probe": "massive_activation", "layer": 0, "count": 4}
    rows = [
        {**same, "metric": metric, "unit": unit, "key_position": position, "value": value + position}
        for metric, unit, value in (("massive_channel", "index", 3.0), ("massive_value", "norm", 0.5))
        for position in (7, 9)
    ]
    header, lines = shown(rows)
    assert "part" not in header
    assert lines == [
        ["massive_activation", "massive_channel", "some positions", "index", 2, "–", "10", "12"],
        ["massive_activation", "massive_value", "some positions", "norm", 2, "8.5", "7.5", "9.5"],
    ]


def test_the_largest_values_are_shown_where_the_first_position_is_one_of_the_least_of_them():
    """Of layer 1 the largest are at 14 and 0: the first position alone would hide what the layer has."""
    same = {"probe": "massive_activation", "metric": "massive_value", "unit": "norm", "count": 4}
    values = ((0, 3, 2.0), (0, 1, 1.0), (1, 14, 560.0), (1, 0, 8.0))
    rows = [{**same, "layer": layer, "key_position": position, "value": value} for layer, position, value in values]
    assert shown(rows)[1] == [["massive_activation", "massive_value", "some positions", "norm", 4, "142.8", "1", "560"]]
