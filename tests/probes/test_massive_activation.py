"""Massive activations: both conditions of the criterion by hand, where the peaks are, and no dependence on the layout."""

import pytest
import torch
from dense_oracle import assert_same, layer_output, show_layers, values_of

from sinklab.errors import ConfigurationError
from sinklab.probes.massive_activation import MassiveActivation

LAYER = "layers.0"


def test_three_tokens_by_hand():
    # Twelve values: |x| sorted .1 (ten times), 120, 2000; the median is .1, so both large ones are at least 1000 times it.
    hidden = torch.full((1, 3, 4), 0.1)
    hidden[0, 0, 2], hidden[0, 1, 3] = -2000.0, 120.0
    found = values_of(show_layers(MassiveActivation(top=2), layer_output(hidden)))
    assert found["massive_count", LAYER, None, None] == (2.0, 1)
    assert found["max_abs", LAYER, None, None] == (2000.0, 1)
    assert abs(found["max_to_median", LAYER, None, None][0] - 20000.0) < 0.01
    assert found["massive_value", LAYER, None, 0][0] == 2000.0
    assert found["massive_channel", LAYER, None, 0][0] == 2.0
    assert found["massive_value", LAYER, None, 1][0] == 120.0
    assert found["massive_channel", LAYER, None, 1][0] == 3.0
    assert ("massive_value", LAYER, None, 2) not in found


def count_of(hidden: torch.Tensor) -> float:
    return values_of(show_layers(MassiveActivation(), layer_output(hidden)))["massive_count", LAYER, None, None][0]


def test_both_conditions_are_needed():
    large = torch.ones(1, 3, 4)
    large[0, 0, 0] = 900.0  # above 100, only 900 times the median
    assert count_of(large) == 0
    relative = torch.full((1, 3, 4), 0.01)
    relative[0, 0, 0] = 99.0  # 9900 times the median, not above 100
    assert count_of(relative) == 0
    exactly = torch.full((1, 3, 4), 0.5)
    exactly[0, 0, 0] = 500.0  # exactly 1000 times the median counts
    assert count_of(exactly) == 1


def test_a_hidden_state_is_one_document():
    # The second document has its own median: 150 is massive beside .1, not beside 1.
    small, big = torch.full((1, 3, 4), 0.1), torch.full((1, 4, 4), 1.0)
    small[0, 1, 1] = big[0, 2, 1] = 150.0
    alone = show_layers(MassiveActivation(), layer_output(small), layer_output(big))
    packed = show_layers(MassiveActivation(), layer_output(torch.cat((small, big), 1), lengths=[[3, 4]]))
    padded = torch.full((2, 5, 4), 1e6)
    padded[0, 2:], padded[1, 1:] = small[0], big[0]
    batch = show_layers(MassiveActivation(), layer_output(padded, lengths=[[3], [4]], left=True))
    halves = show_layers(MassiveActivation(), layer_output(small))
    halves.merge(show_layers(MassiveActivation(), layer_output(big)))
    expected = values_of(alone)
    assert expected["massive_count", LAYER, None, None] == (0.5, 2)
    for probe in (packed, batch, halves):
        assert_same(values_of(probe), expected, rel=0.0)


def test_peaks_do_not_depend_on_the_order_of_merging():
    torch.manual_seed(0)
    outputs = [layer_output(torch.randn(2, length, 6).round(decimals=1)) for length in (3, 7, 5)]  # rounded: ties do occur
    forwards, backwards = MassiveActivation(top=7), MassiveActivation(top=7)
    for output in outputs:
        forwards.merge(show_layers(MassiveActivation(top=7), output))
    for output in reversed(outputs):
        backwards.merge(show_layers(MassiveActivation(top=7), output))
    whole = values_of(show_layers(MassiveActivation(top=7), *outputs))
    assert_same(values_of(forwards), whole, rel=1e-12)
    assert_same(values_of(backwards), whole, rel=1e-12)


def test_cached_decoding_keeps_the_peak():
    torch.manual_seed(1)
    hidden = torch.randn(1, 6, 4)
    whole = values_of(show_layers(MassiveActivation(top=6), layer_output(hidden)))
    steps = show_layers(MassiveActivation(top=6), *(layer_output(hidden[:, n : n + 1], start=n) for n in range(6)))
    found = values_of(steps)
    for key, (value, _) in whole.items():
        if key[0] in ("max_abs", "massive_value", "massive_channel"):
            assert found[key][0] == value


def test_a_number_of_positions_is_not_negative():
    with pytest.raises(ConfigurationError, match="top -2 must be 0 or more: it is a number of positions"):
        MassiveActivation(top=-2)
