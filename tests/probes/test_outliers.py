"""Outliers: infinity norm and kurtosis by hand, against scipy, per document, and grown token by token."""

import pytest
import scipy.stats
import torch
from dense_oracle import assert_same, layer_output, places, show_layers, values_of

from sinklab.attention.call import LayerOutput, Site
from sinklab.probes.outliers import Outliers
from sinklab.results.table import unpacked


def test_three_tokens_by_hand():
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


def test_layout_does_not_matter():
    torch.manual_seed(2)
    first, second = torch.randn(1, 3, 4) ** 3, torch.randn(1, 5, 4) ** 3
    alone = show_layers(Outliers(), layer_output(first), layer_output(second))
    packed = show_layers(Outliers(), layer_output(torch.cat((first, second), 1), lengths=[[3, 5]]))
    padded = torch.full((2, 6, 4), 1e6)
    padded[0, 3:], padded[1, 1:] = first[0], second[0]
    batch = show_layers(Outliers(), layer_output(padded, lengths=[[3], [5]], left=True))
    cached = show_layers(Outliers(), layer_output(first), *(layer_output(second[:, n : n + 1], start=n) for n in range(5)))
    halves = show_layers(Outliers(), layer_output(second))
    halves.merge(show_layers(Outliers(), layer_output(first)))
    for probe in (packed, batch, cached, halves):
        assert_same(values_of(probe), values_of(alone), rel=1e-9)


@pytest.mark.parametrize("offset", [100.0, 1000.0, 1e4])
def test_a_mean_far_from_zero_costs_no_digits(offset):
    torch.manual_seed(4)
    hidden = offset + 0.01 * torch.randn(1, 6, 40) ** 3
    # Of the numbers as float32 holds them; in float64 the deviations from their mean are good to 2^-53 · 1e6 each.
    kurtosis = scipy.stats.kurtosis(hidden.double().flatten(), fisher=False)
    cached = show_layers(Outliers(), *(layer_output(hidden[:, n : n + 1], start=n) for n in range(6)))
    for probe in (show_layers(Outliers(), layer_output(hidden)), cached):
        assert values_of(probe)["layer_kurtosis", "layers.0", None, None] == (pytest.approx(kurtosis, rel=1e-8), 1)


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
