"""from_weights(): the same numbers and sinks as a session, one-line errors for arrays that cannot be; what measure prints."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tests.architectures.zoo import ZOO, batch_of, model_of

from sinklab import attend, from_weights, load_model
from sinklab.attention.session import table_of
from sinklab.errors import ConfigurationError, InputError
from sinklab.probes._shared import SinkProbe
from sinklab.probes.entropy import Entropy
from sinklab.registry import probes
from sinklab.results.run import Result
from sinklab.results.table import make_table
from sinklab.sinks import SinkFinder, SinkWeights
from sinklab.studies.measure.from_weights import TIER, measurable
from sinklab.studies.measure.measure import display
from sinklab.studies.measure.probing import make_probe

AT = ["probe", "metric", "module", "layer", "head", "key_position", "count", "unit", "version"]

FAMILIES = {
    "llama": {},
    "llama padded": {},
    "gpt2": {},
    "mistral": {"window": 4},
    "gemma2": {"window": [4, None]},
    "bert padded": {"causal": False},
    "gpt_oss": {"window": [4, None], "row_sums": "null_mass"},
}


def own_weights(family: str) -> tuple[torch.nn.Module, dict, tuple]:
    name, _, padded = family.partition(" ")
    model, batch = model_of(name), batch_of(ZOO[name], padded=bool(padded))
    with torch.no_grad():
        return model, batch, model(**batch, output_attentions=True).attentions


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_and_sinks_are_those_of_a_session(family):
    model, batch, weights = own_weights(family)
    found = from_weights(weights, tokens=batch["input_ids"], attention_mask=batch["attention_mask"], **FAMILIES[family])
    chosen = [probe for name in probes if measurable(probe := make_probe(name, 0.3))]
    finder = SinkFinder(0.3)
    with torch.no_grad():
        with attend(model, [*(probe for probe in chosen if not isinstance(probe, SinkProbe)), finder]):
            model(**batch)
        sinks = finder.sinks()
        heads = SinkWeights(sinks)
        with attend(model, [*(probe.about(sinks) for probe in chosen if isinstance(probe, SinkProbe)), heads]) as session:
            model(**batch)
    expected = table_of(chosen)
    modules = {site.module: f"layers.{site.layer}" for site in session.sites}
    expected["module"] = expected["module"].map(modules).astype("string")
    expected, rows = (table.sort_values(AT).reset_index(drop=True) for table in (expected, found.table))
    assert len(rows) > 200
    assert rows[AT].equals(expected[AT])
    assert (rows["tier"] == TIER).all()
    # Both are float32: a weight carries some 1e-7, a mean as much. The entropy of what the sink leaves divides by a rest of
    # 1e-3 at least, which makes 1e-4 of it, times a logarithm.
    loose = rows["metric"] == "entropy_without_sink"
    difference = (rows["value"] - expected["value"]).abs()
    assert difference[~loose].max() < 1e-6
    assert difference[loose].max() < 1e-3
    assert found.sinks.positions == sinks.positions
    assert [sink.rate for sink in found.sinks.sinks] == [sink.rate for sink in sinks.sinks]
    assert [sink.token for sink in found.sinks.sinks] == [sink.token for sink in sinks.sinks]
    assert all(sink.value_ratio is None for sink in found.sinks.sinks)  # no value is known
    if sinks.main:
        np.testing.assert_allclose(found.sinks.weights, heads.completed().weights, atol=1e-6)
        assert np.isnan(found.sinks.value_ratio).all()


def test_numbers_are_those_of_the_plain_definitions():
    random = np.random.default_rng(0)
    scores = random.normal(size=(2, 3, 4, 12, 12)) * 2 + np.where(np.arange(12) == 0, 3.0, 0.0)
    visible = np.tril(np.ones((12, 12), dtype=bool))
    raw = np.exp(np.where(visible, scores, -np.inf))
    weights = raw / raw.sum(-1, keepdims=True)
    found = from_weights(weights, tokens=[["<s>", *"abcdefghijk"]] * 3)
    assert repr(found).startswith("MeasuredWeights(2 layers, 3 samples, 4 heads, 12 queries, 12 keys; sink at position 0")
    table = found.table
    means = weights.sum(-2) / visible.sum(0)  # layers, samples, heads, keys
    received = table[(table["metric"] == "mean_weight")].pivot_table(
        index=["layer", "head"], columns="key_position", values="value"
    )
    np.testing.assert_allclose(received.to_numpy(float), means.mean(1).reshape(8, 12), atol=1e-12)
    rate = table[(table["metric"] == "gu2024") & table["layer"].isna()].set_index("key_position")["value"]
    np.testing.assert_allclose(rate.to_numpy(float), 100 * (means > 0.3).mean((0, 1, 2)), atol=1e-12)
    entropy = -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)
    rows = table[(table["metric"] == "entropy") & table["layer"].isna()]
    # The constant of 1e-8 of the proxy is no part of rows that sum to one.
    np.testing.assert_allclose(rows["value"].to_numpy(float), [entropy.mean()], atol=1e-12)
    main = found.sinks.main
    assert (main.position, main.text, main.token_share) == (0, "<s>", 1.0)
    np.testing.assert_allclose(found.sinks.weights, weights[..., 1:, 0].mean((1, 3)).reshape(8), atol=1e-12)


def test_every_layout_is_read_as_the_same_thing():
    weights = torch.softmax(torch.randn(2, 1, 3, 6, 6, generator=torch.manual_seed(0)), -1)
    expected = from_weights(weights, causal=False).table
    swapped = weights.numpy().astype(weights.numpy().dtype.newbyteorder())
    for same in (
        weights[:, 0],
        list(weights),
        tuple(weights[:, 0]),
        [None, *weights],
        weights.numpy(),
        list(weights.numpy()),
        swapped,
    ):
        assert from_weights(same, causal=False).table.equals(expected)
    one = from_weights(weights[0, 0], causal=False)
    assert one.table.equals(from_weights(weights[:1], causal=False).table)
    assert from_weights(weights[0, 0, 0].double(), causal=False).shape == (1, 1, 1, 6, 6)


@torch.no_grad()
def test_what_generate_returns_is_read_as_the_weights_of_its_ids():
    loaded = load_model("embedded:softmax", attn_implementation="eager")
    batch = loaded.tokenizer("import os\nimport sys\n", return_tensors="pt")
    asked = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
    output = loaded.model.generate(**batch, max_new_tokens=6, **asked)
    whole = from_weights(loaded.model(output.sequences[:, :-1], output_attentions=True).attentions).table
    found = from_weights(output.attentions).table
    assert list(found["metric"]) == list(whole["metric"])
    torch.testing.assert_close(torch.tensor(found["value"]), torch.tensor(whole["value"]), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        InputError, match=r"the forwards of layer 0 have [0-9]+, [0-9]+ … keys, and not one more for each token"
    ):
        from_weights(output.attentions[:1] * 2)  # as a cache returns it that holds no more than before


def test_layers_may_differ_in_heads_and_the_queries_be_the_last_ones():
    _, batch, weights = own_weights("llama")
    few = from_weights([weights[0], weights[1][:, :2]])
    assert few.table.query("metric == 'entropy' and layer == 1")["head"].tolist() == [0, 1]
    last = from_weights([layer[:, :, 6:] for layer in weights])
    assert last.shape == (2, 2, 4, 4, 10)
    means = weights[0][:, 0, 6:, 0].double().mean()
    row = last.table.query("metric == 'mean_weight' and layer == 0 and head == 0 and key_position == 0")
    assert float(row["value"].iloc[0]) == pytest.approx(float(means), abs=1e-7)
    assert int(row["count"].iloc[0]) == 8  # two samples of four queries
    assert len(batch["input_ids"]) == 2


def test_rows_of_any_sum_are_divided_by_it():
    weights = torch.rand(1, 2, 8, 8, generator=torch.manual_seed(0)).tril() * 0.05
    weights[:, 0, :, 0] = 0.2  # four times the others, and not enough by itself
    table = from_weights(weights, row_sums="any").table
    row = table.query("metric == 'gu2024' and key_position == 0 and head == 0")
    share = (weights[0, 0, :, 0] / (weights[0, 0].sum(-1) + 1e-8)).mean()
    assert float(row["value"].iloc[0]) == 100.0 * bool(share > 0.3) == 100.0
    assert "null_mass" not in set(table["metric"])


def softmax(*shape: int, causal: bool = True) -> torch.Tensor:
    scores = torch.randn(*shape, generator=torch.manual_seed(1))
    hidden = torch.ones(shape[-2:], dtype=torch.bool).triu(1) & causal
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def changed(weights: torch.Tensor, value: float, *index: int) -> torch.Tensor:
    weights = weights.clone()
    weights[index] = value
    return weights


BAD = {
    "one axis": (torch.rand(5), {}, r"`weights` has shape \(5,\); expected \(queries, keys\), \(heads, q, k\)"),
    "a list of flat arrays": ([torch.rand(5)], {}, r"entry 0 has shape \(5,\); expected \(queries, keys\)"),
    "nothing": (torch.rand(2, 0, 4, 4), {}, r"has shape \(2, 0, 4, 4\); expected .*none of these of length 0"),
    "no layers": ([], {}, r"a list of 0 entries and no array"),
    "not returned": ([None, None], {}, r"a list of 2 entries and no array.*attn_implementation='eager'"),
    "words": ("weights.npy", {}, r"`weights` is a str; expected a numpy array"),
    "lists of numbers": ([[0.5, 0.5]], {}, r"entry 0 is a list; expected a numpy array"),
    "integers": (np.ones((4, 4), dtype=np.int64), {}, r"`weights` is int64; expected floating-point.*: divide integers"),
    "eight bits": (torch.eye(4).to(torch.float8_e4m3fn), {}, r"float8_e4m3fn; expected floating-point .* of 16 bits or more"),
    "layers of other lengths": ([softmax(2, 5, 5), softmax(2, 6, 6)], {}, r"layer 1 is \(1, 2, 6, 6\) and layer 0 \("),
    "more queries than keys": (torch.rand(6, 4), {}, r"6 queries and 4 keys.*attend\(\)"),
    "cross-attention": (softmax(4, 6, causal=False), {"causal": False}, r"4 queries and 6 keys.*Cross-attention"),
    "NaN": (changed(softmax(3, 2, 6, 6), torch.nan, 1, 0, 3, 2), {}, r"layer 1, sample 0, head 0, query 3 gives nan to key 2"),
    "negative": (changed(softmax(6, 6), -0.5, 4, 1), {}, r"sample 0, head 0, query 4 gives -0\.5 to key 1, weights are 0"),
    "sum": (changed(softmax(2, 2, 6, 6), 0.0, 1, 1, 5, 5), {}, r"layer 1, sample 0, head 1, query 5 sums to 0\.\d+, and"),
    "more than one with a null": (softmax(2, 6, 6) * 1.5, {"row_sums": "null_mass"}, r"sums to 1\.5, and not to 1"),
    "the future": (softmax(2, 6, 6, causal=False), {}, r"query 0 gives 0\.\d+ to key 1, which comes later: give causal=False"),
    "no future": (softmax(2, 6, 6), {"causal": False}, r"layer 0 no query gives anything to a later key.*give causal=True"),
    "a window of which nothing is said": (
        torch.softmax(torch.zeros(8, 8).masked_fill(~torch.ones(8, 8).tril().triu(-2).bool(), -torch.inf), -1),
        {},
        r"no query gives anything to a key more than 2 away, and some have keys that are 7 away.*\(here 3, .*window=8 says so",
    ),
    "outside the window": (softmax(6, 6), {"window": 2}, r"query 2 gives 0\.\d+ to key 0, which it does not see"),
    "mask": (softmax(6, 6), {"attention_mask": np.ones((1, 5))}, r"`attention_mask` has shape \(1, 5\); expected .* \(1, 6\)"),
    "all padding": (softmax(6, 6), {"attention_mask": np.zeros((1, 6))}, r"every token is padding"),
    "tokens": (softmax(6, 6), {"tokens": [1, 2]}, r"`tokens` has shape \(2,\); expected \(keys,\) or .* \(1, 6\)"),
    "tokens of no kind": (softmax(6, 6), {"tokens": [0.5] * 6}, r"`tokens` is float64; expected ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_attention_weights_is_refused_in_a_line(case):
    weights, arguments, message = BAD[case]
    with pytest.raises(InputError, match=message) as error:
        from_weights(weights, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_sums": "two"}, r"`row_sums` 'two' must be one, null_mass or any"),
        ({"tolerance": -1.0}, r"`tolerance` -1\.0 must be in \[0, 1\)"),
        ({"threshold": 1.5}, r"threshold 1\.5 must be in"),
        ({"window": 0}, r"`window` is 0; expected 1 key or more"),
        ({"window": 4.0}, r"`window` is 4\.0; expected a whole number of keys"),
        ({"probes": "entropy"}, r"`probes` is 'entropy'; expected a list"),
        (
            {"probes": ["sink_rate:threshold=0.2", "entropy", {"name": "sink_rate", "threshold": 0.4}]},
            r"`probes` has 'sink_rate' 2 times; expected it once, since rows of a table have the name",
        ),
        ({"window": [1, 2]}, r"`window` has 2 numbers for 1 layer"),
        ({"probes": ["key_norm"]}, r"probe 'key_norm' reads queries, keys and values, which weights do not give"),
        ({"probes": ["hidden_norm"]}, r"probe 'hidden_norm' reads hidden states"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        from_weights(softmax(6, 6), **arguments)


def test_rounded_weights_pass_in_their_own_dtype_or_with_a_tolerance():
    half = softmax(2, 40, 40).to(torch.bfloat16)
    from_weights(half)
    with pytest.raises(InputError, match=r"sums to .* `tolerance` if the weights were rounded"):
        from_weights(half.float())
    from_weights(half.float(), tolerance=2**-7)


def test_a_two_sided_window_and_one_that_is_none():
    band = (torch.arange(8)[:, None] - torch.arange(8)).abs() < 3
    weights = torch.softmax(torch.randn(8, 8, generator=torch.manual_seed(0)).masked_fill(~band, -torch.inf), -1)
    table = from_weights(weights, causal=False, window=3).table
    counts = table.query("metric == 'mean_weight'")["count"]
    assert counts.tolist() == band.sum(0).tolist()
    assert from_weights(weights, causal=False, window=np.int64(3)).table.equals(table)
    diagonal = torch.eye(6)  # nobody looks back, and somebody may say that it could
    table = from_weights(diagonal, window=6).table
    assert table.query("metric == 'mean_weight'")["count"].tolist() == [6, 5, 4, 3, 2, 1]


def test_a_probe_that_names_a_position_is_about_it():
    """Position 0 is the sink; the weight on position 2, which is asked for, is 0.1 of every row that sees it."""
    weights = torch.zeros(2, 16, 16, dtype=torch.float64)
    weights[:, torch.arange(16), torch.arange(16)] = 0.3
    weights[:, :, 0] += 0.7
    weights[:, 3:, 0] -= 0.1
    weights[:, 3:, 2] = 0.1
    found = {}
    for asked in ("entropy", "entropy:sink_position=2", {"name": "entropy", "sink_position": 0}, Entropy(sink_position=2)):
        table = from_weights(weights, probes=[asked]).table
        rows = table[(table["metric"] == "sink_column_weight") & table["layer"].isna()]
        found[str(asked)[:24]] = (rows["sink"].item(), rows["value"].item())
    assert [place for place, _ in found.values()] == ["position 0", "position 2", "position 0", "position 2"]
    of_first, of_second = (0.7 * 16 + 0.3 - 0.1 * 13) / 16, (0.3 + 0.1 * 13) / 16
    assert [value for _, value in found.values()] == pytest.approx([of_first, of_second, of_first, of_second])
    with pytest.raises(ConfigurationError, match="probe 'entropy': sink_position 16 lies behind 16 positions"):
        from_weights(weights, probes=["entropy:sink_position=16"])


def test_a_window_in_which_an_even_share_passes_for_a_sink_is_said():
    """Of 16 queries the eight that see position 0 give it 1, 1/2, … 1/8 of their weight: 0.34 on average, without any sink."""
    rows = torch.ones(16, 16).tril().triu(-7)
    rows /= rows.sum(1, keepdim=True)
    with pytest.warns(UserWarning, match=r"from_weights: In a window of 8 tokens 8 of the 16 queries .* it 0\.34 of what they"):
        assert from_weights(rows, window=8).sinks.main is not None
    with pytest.warns(UserWarning, match="In a window of 8 tokens"):
        from_weights([rows, torch.ones(16, 16).tril() / torch.arange(1, 17)[:, None]], window=[8, None])
    wide = torch.ones(16, 16).tril().triu(-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_weights(wide / wide.sum(1, keepdim=True), window=10).sinks.main is None


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
