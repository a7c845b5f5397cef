"""Sink rates: one small matrix read under every published definition, then padding, packing, windows and null mass."""

import pytest
import torch
from dense_oracle import call_from_weights, dense_statistics, dense_weights, make_call, show, values_of

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, SessionError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import operations

MODULE = "layers.0.self_attn"
#                        key 0  key 1  key 2  key 3
PINNED = torch.tensor([[1.00, 0.00, 0.00, 0.00],
                       [0.50, 0.50, 0.00, 0.00],
                       [0.10, 0.20, 0.70, 0.00],
                       [0.30, 0.40, 0.20, 0.10]], dtype=torch.float64)  # fmt: skip


def whole_model(probe: SinkRate) -> dict[tuple[str, int | None], float]:
    return {(metric, key): value for (metric, module, _, key), (value, _) in values_of(probe).items() if module is None}


def test_pinned_matrix_under_every_definition():
    found = whole_model(show(SinkRate(threshold=0.3), call_from_weights(PINNED)))
    # Gu: alpha_0 = (1 + .5 + .1 + .3)/4 = .475, alpha_1 = (.5 + .2 + .4)/3 = .367, alpha_2 = (.7 + .2)/2 = .45, alpha_3 = .1
    assert [found["gu2024", key] for key in range(4)] == [100.0, 100.0, 100.0, 0.0]
    # Qiu: mean of the first column over four queries = 1.9/4
    assert found["qiu2025_first_attention", None] == pytest.approx(0.475, abs=1e-6)
    # Kaul: the largest weight is on key 0 in row 0 and, by the tie, in row 1; not in rows 2 and 3: 2 of 4
    assert found["kaul2024_first_argmax", None] == 50.0
    # all weight on key 0 is 1.9, all weight is 4 (rows sum to one)
    assert found["first_token_share", None] == pytest.approx(0.475, abs=1e-6)
    # no query stands at position 4 or later
    assert ("first_four_share", None) not in found


def test_threshold_is_strict():
    # alpha_0 = (1 + .5 + 0 + .5)/4 = exactly .5
    weights = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]], dtype=torch.float64)
    assert whole_model(show(SinkRate(threshold=0.5), call_from_weights(weights)))["gu2024", 0] == 0.0
    assert whole_model(show(SinkRate(threshold=0.499), call_from_weights(weights)))["gu2024", 0] == 100.0


def test_indicator_comes_before_the_mean():
    # alpha_0 is (1 + .8)/2 = .9 in one document, (1 + 0)/2 = .5 in the other; their mean .7 is above .6; only one of them is.
    strong = torch.tensor([[1.0, 0.0], [0.8, 0.2]], dtype=torch.float64)
    weak = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = whole_model(show(SinkRate(threshold=0.6), call_from_weights(strong), call_from_weights(weak)))
    assert found["gu2024", 0] == 50.0


@pytest.mark.parametrize("window", [5, 10, 20])
def test_a_mean_as_large_as_the_threshold_is_not_above_it(window):
    model = SinkLM(SinkLMConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window=window))
    exact, below = SinkRate(threshold=1 / window), SinkRate(threshold=0.999 / window)
    with torch.no_grad(), attend(model.eval(), [exact, below]):
        model.layers[0].self_attn.q_proj.weight.zero_()  # rows are even, and from the width of the window on 1/window each
        model(torch.arange(64)[None] % 32)
    rates = whole_model(exact)
    assert {rates["gu2024", key] for key in range(window - 1, 64)} == {0.0}
    assert rates["gu2024", 0] == 100.0  # whose first query has nowhere else to look
    assert {whole_model(below)["gu2024", key] for key in range(64)} == {100.0}


def test_first_four_share_by_hand():
    # Six queries that spread evenly: query 4 gives 4/5 to the first four keys, query 5 gives 4/6; mean (4/5 + 4/6)/2.
    call = make_call(torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4))
    found = values_of(show(SinkRate(), call))
    value, count = found["first_four_share", MODULE, 0, None]
    assert value == pytest.approx((4 / 5 + 4 / 6) / 2, abs=1e-6)
    assert count == 2


def test_sigmoid_uses_the_proxy():
    # sigmoid(0) = .5 on every visible key; rows divided by their sum are 1, 1/2, 1/3: alpha_0 = 11/18 = .611, alpha_1 = 5/12.
    call = make_call(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), operation=operations["sigmoid"]())
    found = whole_model(show(SinkRate(threshold=0.5), call))
    assert [found["gu2024", key] for key in range(3)] == [100.0, 0.0, 0.0]
    assert found["qiu2025_first_attention", None] == pytest.approx(11 / 18, abs=1e-6)
    # weights themselves: three times .5 on key 0 of .5 * (1 + 2 + 3) in all
    assert found["first_token_share", None] == pytest.approx(0.5, abs=1e-6)
    # all weights of a row are equal, so every row ties and counts for the first token
    assert found["kaul2024_first_argmax", None] == 100.0


def test_learned_sink_logit_is_a_position_of_its_own():
    # Scores 0 and a sink logit ln 2 in head 0: null mass 2/3, 2/4, 2/5, mean .522; ln .1 in head 1: 1/11, 1/21, 1/31, mean .06.
    sinks = torch.log(torch.tensor([2.0, 0.1])).view(1, 2, 1)
    call = make_call(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), sink_scores=sinks)
    found = values_of(show(SinkRate(threshold=0.3), call))
    assert found["gu2024_null", MODULE, 0, None] == (100.0, 1)
    assert found["gu2024_null", MODULE, 1, None] == (0.0, 1)
    assert found["gu2024_null", None, None, None] == (50.0, 2)
    # mean weight on key 0 in head 0: (1/3 + 1/4 + 1/5)/3 = .261, not above .3 although the head concentrates elsewhere
    assert found["gu2024", MODULE, 0, 0] == (0.0, 1)
    # mass on real keys only: head 0 has 1/3 + 2/4 + 3/5 in all
    expected = (1 / 3 + 1 / 4 + 1 / 5) / (1 / 3 + 2 / 4 + 3 / 5)
    assert found["first_token_share", MODULE, 0, None][0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("operation", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("options", [{}, {"left": True}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_against_the_whole_matrix(operation, heads, kv_heads, options):
    torch.manual_seed(0)
    lengths = [[7], [3, 5]]
    queries, keys = torch.randn(2, heads, 9, 4) * 2, torch.randn(2, kv_heads, 9, 4) * 2
    call = make_call(queries, keys, lengths=lengths, operation=operations[operation](), **options)
    found = values_of(show(SinkRate(threshold=0.3), call))
    _, visible, weights = dense_weights(call)
    shares = weights if operation == "softmax" else weights / (weights.sum(-1, keepdim=True) + 1e-8)
    hits: dict[tuple[int, int], list[bool]] = {}
    first_share, first_is_largest, four = [], [], []
    for row, document in [(0, 0), (1, 0), (1, 1)]:
        inside = torch.nonzero(call.query_documents[row] == document)[:, 0]
        start = inside[0]
        for head in range(heads):
            block, seen = shares[row, head][inside][:, inside], visible[row, head][inside][:, inside]
            alphas = block.sum(0) / seen.sum(0)
            for position, alpha in enumerate(alphas.tolist()):
                hits.setdefault((head, position), []).append(alpha > 0.3)
            first_share += block[:, 0].tolist()
            plain = weights[row, head][inside]
            first_is_largest += (plain[:, start] >= plain.amax(-1) * (1 - 1e-5)).tolist()
            four += plain[:, start : start + 4].sum(-1)[4:].tolist()
    for (head, position), values in hits.items():
        assert found["gu2024", MODULE, head, position] == (100 * sum(values) / len(values), len(values))
    assert found["qiu2025_first_attention", None, None, None][0] == pytest.approx(sum(first_share) / len(first_share), abs=1e-6)
    assert found["kaul2024_first_argmax", None, None, None][0] == pytest.approx(
        100 * sum(first_is_largest) / len(first_is_largest)
    )
    assert found["first_four_share", None, None, None][0] == pytest.approx(sum(four) / len(four), abs=1e-6)


def test_a_document_that_goes_on_is_refused():
    call = make_call(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4), cached=3)
    with pytest.raises(SessionError, match=r"sink rates are of whole texts; .* after generate\(\) on all that it has returned"):
        SinkRate().update(call, dense_statistics(call))


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 30.0])
def test_threshold_outside_its_range(threshold):
    with pytest.raises(ConfigurationError, match=r"must be in \[0, 1\)"):
        SinkRate(threshold=threshold)
