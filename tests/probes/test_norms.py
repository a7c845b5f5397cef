"""Norms of hidden states, keys and values: three tokens by hand, padding, packing, and each cached vector counted once."""

import pytest
import torch
from dense_oracle import assert_same, layer_output, make_call, show, show_layers, values_of

from sinklab.attention.call import Site, Statistics
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.value_norm import ValueNorm

MODULE = "layers.0.self_attn"


def test_hidden_norm_of_three_tokens_by_hand():
    hidden = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]])
    found = values_of(show_layers(HiddenNorm(), layer_output(hidden)))
    assert [found["hidden_norm", "layers.0", None, key] for key in range(3)] == [(5.0, 1), (1.0, 1), (2.0, 1)]
    # 5 against the mean of 1 and 2
    assert found["first_to_rest_ratio", "layers.0", None, None] == (pytest.approx(5 / 1.5), 1)


def test_hidden_norm_does_not_mind_the_layout():
    torch.manual_seed(0)
    first, second = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    alone = show_layers(HiddenNorm(), layer_output(first), layer_output(second))
    padded = torch.full((2, 6, 4), 99.0)
    padded[0, 3:], padded[1, 1:] = first[0], second[0]
    batch = show_layers(HiddenNorm(), layer_output(padded, lengths=[[3], [5]], left=True))
    packed = show_layers(HiddenNorm(), layer_output(torch.cat((first, second), 1), lengths=[[3, 5]]))
    halves = show_layers(HiddenNorm(), layer_output(first))
    halves.merge(show_layers(HiddenNorm(), layer_output(second)))
    steps = [layer_output(second[:, n : n + 1], start=n) for n in range(5)]
    cached = show_layers(HiddenNorm(), layer_output(first), *steps)
    for probe in (batch, packed, halves, cached):
        assert_same(values_of(probe), values_of(alone), rel=1e-6)


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
def test_padding_packing_and_merge(probe_class):
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 3)
    queries = torch.zeros(2, 2, 7, 4)
    alone = show(
        probe_class(),
        make_call(queries[:1, :, :4], keys[:1, :, 3:], values[:1, :, 3:]),
        make_call(queries[:1, :, :2], keys[1:, :, 2:4], values[1:, :, 2:4]),
    )
    alone.merge(show(probe_class(), make_call(queries[:1, :, :3], keys[1:, :, 4:], values[1:, :, 4:])))
    together = show(probe_class(), make_call(queries, keys, values, lengths=[[4], [2, 3]], left=True))
    assert_same(values_of(together), values_of(alone), rel=1e-6)


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
