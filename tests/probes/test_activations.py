"""Norms of keys, values and states, and how large single coordinates are, by hand and by torch."""

import pytest
import scipy.stats
import torch
from dense_oracle import assert_same, layer_output, make_call, places, show, show_layers, values_of

from sinklab.attention.call import LayerOutput, Site, Statistics
from sinklab.errors import ConfigurationError
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.massive_activation import MassiveActivation
from sinklab.probes.outliers import Outliers
from sinklab.probes.value_norm import ValueNorm
from sinklab.results.table import unpacked

LAYER = "layers.0"


def test_massive_activation_by_hand():
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
    expected = values_of(alone)
    assert expected["massive_count", LAYER, None, None] == (0.5, 2)
    for probe in (packed, batch):
        assert_same(values_of(probe), expected, rel=0.0)


def test_peaks_do_not_depend_on_the_order():
    torch.manual_seed(0)
    outputs = [layer_output(torch.randn(2, length, 6).round(decimals=1)) for length in (3, 7, 5)]  # rounded: ties do occur
    forwards, backwards = (show_layers(MassiveActivation(top=7), *order) for order in (outputs, reversed(outputs)))
    assert_same(values_of(backwards), values_of(forwards), rel=1e-12)


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


def test_outliers_by_hand():
    # Values 0 0 0 0 0 6: mean 1, deviations -1 (five times) and 5: variance 30/6 = 5, fourth moment 630/6 = 105, ratio 4.2.
    hidden = torch.tensor([[[0.0, 0.0], [6.0, 0.0], [0.0, 0.0]]])
    found = values_of(show_layers(Outliers(), layer_output(hidden)))
    assert found["layer_max_inf_norm", "layers.0", None, None] == (6.0, 1)
    assert found["layer_kurtosis", "layers.0", None, None] == (pytest.approx(4.2), 1)


def test_against_scipy_per_document_and_for_the_whole_model():
    torch.manual_seed(1)
    first, second = torch.randn(1, 4, 8) ** 3, torch.randn(1, 6, 8) ** 3 * 7
    probe = show_layers(
        Outliers(), *(layer_output(hidden * (1 + layer), layer=layer) for layer in (-1, 0, 1) for hidden in (first, second))
    )
    found = values_of(probe)
    kurtosis = sum(scipy.stats.kurtosis(hidden.double().flatten(), fisher=False) for hidden in (first, second)) / 2
    largest = float(first.abs().max() + second.abs().max()) / 2
    for layer in (0, 1):
        assert found["layer_kurtosis", f"layers.{layer}", None, None] == (pytest.approx(kurtosis, rel=1e-5), 2)
        assert found["layer_max_inf_norm", f"layers.{layer}", None, None] == (pytest.approx(largest * (1 + layer)), 2)
    assert found["layer_max_inf_norm", None, None, None][0] == pytest.approx(2 * largest)
    assert found["layer_kurtosis", None, None, None][0] == pytest.approx(kurtosis, rel=1e-5)


@pytest.mark.parametrize("offset", [100.0, 1000.0, 1e4])
def test_a_mean_far_from_zero_costs_no_digits(offset):
    torch.manual_seed(4)
    hidden = offset + 0.01 * torch.randn(1, 6, 40) ** 3
    # Of the numbers as float32 holds them; in float64 the deviations from their mean are good to 2^-53 · 1e6 each.
    kurtosis = scipy.stats.kurtosis(hidden.double().flatten(), fisher=False)
    found = values_of(show_layers(Outliers(), layer_output(hidden)))
    assert found["layer_kurtosis", "layers.0", None, None] == (pytest.approx(kurtosis, rel=1e-8), 1)


def test_a_constant_tensor_has_no_kurtosis():
    found = values_of(show_layers(Outliers(), layer_output(torch.full((1, 3, 4), 0.3))))
    assert {key[0] for key in found} == {"layer_max_inf_norm"}


def test_cross_attention_does_not_enter_the_whole_model():
    torch.manual_seed(3)
    loud, quiet = torch.randn(1, 4, 8) * 100, torch.randn(1, 4, 8)
    outputs = [
        LayerOutput(Site(name, 0, kind, part=part), "attention", hidden, *places([[4]], 4, left=False))
        for name, kind, part, hidden in (
            ("own", "self", "", quiet), ("across", "cross", "", loud), ("encoder.own", "self", "encoder", quiet),
            ("decoder.own", "self", "decoder", quiet * 2), ("decoder.across", "cross", "cross-attention", loud),
        )
    ]  # fmt: skip
    largest = float(quiet.abs().max())
    wholes = {}
    for row in unpacked(show_layers(Outliers(), *outputs[:2]).rows()):
        if "layer" not in row:
            wholes[row["metric"]] = (row["value"], row["count"], "part" in row)
    assert wholes["max_inf_norm"] == (pytest.approx(largest), 1, False)
    assert wholes["kurtosis"] == (pytest.approx(scipy.stats.kurtosis(quiet.double().flatten(), fisher=False)), 1, False)
    # Of an encoder-decoder one row a part.
    parts = [
        (row["part"], row["value"])
        for row in unpacked(show_layers(Outliers(), *outputs[2:]).rows())
        if "layer" not in row and row["metric"] == "max_inf_norm"
    ]
    assert parts == [
        ("encoder", pytest.approx(largest)),
        ("decoder", pytest.approx(2 * largest)),
        ("cross-attention", pytest.approx(float(loud.abs().max()))),
    ]


MODULE = "layers.0.self_attn"


def test_hidden_norm_of_three_tokens_by_hand():
    hidden = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]])
    found = values_of(show_layers(HiddenNorm(), layer_output(hidden)))
    assert [found["hidden_norm", "layers.0", None, key] for key in range(3)] == [(5.0, 1), (1.0, 1), (2.0, 1)]
    # 5 against the mean of 1 and 2
    assert found["first_to_rest_ratio", "layers.0", None, None] == (pytest.approx(5 / 1.5), 1)


def test_attention_outputs_are_not_hidden_states():
    assert not values_of(show_layers(HiddenNorm(), layer_output(torch.ones(1, 2, 2), kind="attention")))


@pytest.mark.parametrize("probe_class", [KeyNorm, ValueNorm])
def test_cache_norms_by_hand_per_key_value_head(probe_class):
    keys = torch.zeros(1, 2, 3, 2)
    keys[0, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0])
    keys[0, 1, :, 1] = torch.tensor([4.0, 5.0, 6.0])
    values = 10 * keys
    call = make_call(torch.zeros(1, 4, 3, 2), keys, values)  # two query heads for each key-value head
    found = values_of(show(probe_class(), call))
    factor, name = (1, "key_norm") if probe_class is KeyNorm else (10, "value_norm")
    assert found == {
        (name, MODULE, head, position): (factor * (3.0 * head + position + 1), 1) for head in range(2) for position in range(3)
    }


@pytest.mark.parametrize("probe_class", [KeyNorm, ValueNorm])
@pytest.mark.parametrize("sliding", [False, True])
def test_cached_vectors_are_counted_once(probe_class, sliding):
    torch.manual_seed(2)
    queries, keys, values = torch.zeros(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    expected = values_of(show(probe_class(), make_call(queries, keys, values)))
    probe = show(probe_class(), make_call(queries[:, :, :3], keys[:, :, :3], values[:, :, :3]))
    for n in range(3, 6):
        step = make_call(queries[:, :, : n + 1], keys[:, :, : n + 1], values[:, :, : n + 1], cached=n)
        if sliding:  # only the last two keys are still there, while the count of cached keys is absolute
            step.keys, step.values = step.keys[:, :, -2:], step.values[:, :, -2:]
            step.key_positions, step.key_documents = step.key_positions[:, -2:], step.key_documents[:, -2:]
        probe.update(step, Statistics())
    assert_same(values_of(probe), expected, rel=1e-6)


def test_cross_attention_brings_its_keys_once():
    call = make_call(torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2), site=Site("decoder.cross", 0, "cross"))
    again = make_call(torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2), cached=2, site=Site("decoder.cross", 0, "cross"))
    found = values_of(show(KeyNorm(), call, again))
    assert {count for _, count in found.values()} == {1}
