"""Three metrics side by side: rank correlations by hand, and models in which the metrics must part.

None of these models is trained: heads are cut off, norms placed and maps scaled by hand, so that what must follow is known.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import kurtosis, spearmanr
from tests.studies.causes.planted import by_name, sinks_of, small_lm, words

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.redirect import Redirect
from sinklab.results.record import to_json
from sinklab.results.table import make_table
from sinklab.studies.causes.effects import Effects, HeadEdit, one_by_one
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.three_metrics import LEAST_ITEMS, _correlations, _resampled, rows, three_metrics
from sinklab.testing import tiny_models


def measured(model, samples, place=0):
    sink = sinks_of(model, samples, place=place)
    variants = [HeadEdit("hide", (HideKey(place=place),)), HeadEdit("redirect", (Redirect(place=place),))]
    return sink, one_by_one(model, samples, NextToken(), variants, sink.heads)


def columns(items):
    """Metric to its numbers, of all heads or layers."""
    return {name: np.array([item[name] for item in items.values()], dtype=float) for name in next(iter(items.values()))}


def invented(sink, loss):
    """Effects with numbers of our own: ``loss`` has one for every head, the same in every text."""
    loss = np.broadcast_to(np.asarray(loss)[None, :, None, None], (1, len(sink.heads), 4, 1))
    return Effects(["hide"], sink.heads, ("words",), loss, loss, np.ones((4, 1)), "nats")


def test_resamples_are_those_of_arrays_drawn_one_by_one():
    first, second = np.array([1.0, 4.0, 4.0, 2.0, 9.0]), np.array([3.0, 1.0, 7.0, 7.0, 8.0])
    counts = np.random.default_rng(0).multinomial(5, np.full(5, 0.2), size=2000)[:50]
    drawn = [np.repeat(np.arange(5), count) for count in counts]
    plain = [
        spearmanr(first[items], second[items]).statistic if np.ptp(first[items]) and np.ptp(second[items]) else np.nan
        for items in drawn
    ]
    assert np.allclose(_resampled(first, second)[:50], plain, rtol=0, atol=1e-12, equal_nan=True)


def test_correlations_of_numbers_that_go_with_the_weights_and_against_them():
    model, samples = small_lm(num_hidden_layers=4), words()
    sink = sinks_of(model, samples, place=0)
    for sign, reading in ((1, "together"), (-1, "opposed")):
        found = three_metrics(model, samples, sink, invented(sink, sign * sink.weights))
        (one,) = (
            c for c in found.correlations if (c.first, c.second, c.over) == ("concentration", "need of the sink", "heads")
        )
        assert (one.rho, one.low, one.high) == pytest.approx((sign, sign, sign))
        assert one.reading == reading
        assert one.items == 8


def test_few_heads_and_layers_have_no_interval():
    """Three numbers are in the order of three others by chance in a sixth of cases, and so is each of their resamples."""
    model, samples = small_lm(), words()
    sink = sinks_of(model, samples, place=0)
    found = three_metrics(model, samples, sink, invented(sink, sink.weights))
    ordered = [c for c in found.correlations if (c.first, c.second) == ("concentration", "need of the sink")]
    assert [(c.over, c.items) for c in ordered] == [("heads", 6), ("layers", 3)]
    assert {c.reading for c in ordered} == {"too few to tell"}
    assert [c.rho for c in ordered] == pytest.approx([1.0, 1.0])
    assert [(c.low, c.high) for c in ordered] == [(None, None)] * 2
    assert "low_concentration_need_of_the_sink_over_heads" not in set(make_table(rows(found, by_name(sink)))["metric"])


def test_intervals_leave_out_0_about_as_often_as_they_say():
    """Of eight unrelated pairs, 2,000 resamples: in 3 to 4 % of draws; of three it would be in 34."""
    generator, wrong = np.random.default_rng(0), 0
    for _ in range(150):
        first, second = generator.normal(size=(2, LEAST_ITEMS))
        (one,) = _correlations({"concentration": first, "need of the sink": second}, "heads")
        wrong += one.reading != "no clear relation"
    assert wrong <= 15  # at 5 % sixteen or more of 150 have a chance of 0.004, and at 34 % fifteen or fewer of 1e-11


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbers_are_those_of_their_definitions(name):
    model, samples = tiny_models()[name], words()
    sink, effects = measured(model, samples)
    found = three_metrics(model, samples, sink, effects, batch_size=3)
    assert np.array_equal(columns(found.heads)["concentration"], sink.weights)
    assert np.allclose(columns(found.heads)["need of the sink"], effects.of("hide").mean((1, 2)), rtol=0, atol=1e-12)
    assert np.allclose(columns(found.heads)["use of the head"], effects.of("redirect").mean((1, 2)), rtol=0, atol=1e-12)
    seen = {}

    class Spy(Watcher):
        name, needs = "spy", frozenset({"hidden_states", "head_outputs"})

        def update(self, call, statistics):
            seen[call.site.layer] = call

        def update_layer(self, output):
            seen["hidden", output.site.layer] = output.hidden_states

    with torch.no_grad(), attend(model, [Spy()]):
        model(**samples.inputs)
    for index, head in enumerate(sink.heads):
        call = seen[head.layer]
        map_ = call.projection[:, 8 * head.head : 8 * head.head + 8]
        written = call.head_outputs[:, :, head.head] @ map_.T
        expected = np.mean([kurtosis(text.flatten().numpy(), fisher=False) for text in written])
        assert columns(found.heads)["outliers"][index] == pytest.approx(expected, rel=1e-9)
    for layer in (0, 1):
        hidden = seen["hidden", layer].abs().flatten(1)
        # torch's median of an even number is the lower one of the two, here as in the probe of massive activations.
        assert columns(found.layers)["outliers"][layer] == pytest.approx(
            float((hidden.amax(1) / hidden.median(1).values).mean())
        )
    assert list(found.layers) == ["0", "1"]


def test_a_head_that_is_not_read_keeps_its_sink_and_has_no_use():
    """Concentration without usefulness: what a gate on the values at zero, or a cut output map, would leave."""
    model, samples = small_lm(), words()
    with torch.no_grad():
        # Queries that all agree with the key of position 0 give head 1 of layer 1 its sink; its output map is cut off.
        model.layers[1].self_attn.o_proj.weight[:, 16:] = 0.0
    sink, effects = measured(model, samples)
    found = three_metrics(model, samples, sink, effects, threshold=0.05, minimal_effect=1e-6)
    index = [str(head) for head in found.heads].index("1.1")
    assert columns(found.heads)["concentration"][index] > 0.05
    assert columns(found.heads)["need of the sink"][index] == 0 == columns(found.heads)["use of the head"][index]
    assert np.isnan(columns(found.heads)["outliers"][index])  # it writes zeros, whose kurtosis is not defined
    assert list(found.heads)[index] in found.quiet
    assert np.isfinite(columns(found.heads)["concentration"]).all()


def test_heads_in_which_concentration_and_need_part_are_those_whose_interval_says_so():
    """All give position 0 less than 0.9 and more than 0: by one threshold all have their sink there, by the other none."""
    model, samples = small_lm(), words()
    sink = sinks_of(model, samples, place=0)
    means = np.array([0.0, 0.005, 0.02, 0.5, -0.3, 0.5])
    scatter = np.array([0.0, 0.1, 0.1, 0.0, 0.001, 2.0])
    loss = means[:, None] + scatter[:, None] * np.array([-1.0, 1.0, -1.0, 1.0])
    effects = Effects(["hide"], sink.heads, ("words",), loss[None, :, :, None], loss[None, :, :, None], np.ones((4, 1)), "nats")
    quiet = three_metrics(model, samples, sink, effects, threshold=1e-9)
    assert (quiet.quiet, quiet.needy) == (["0.0", "2.0"], [])
    needy = three_metrics(model, samples, sink, effects, threshold=0.999)
    assert (needy.quiet, needy.needy) == ([], ["1.1"])


def test_norms_at_the_ends_of_sublayers_bound_outliers_and_leave_the_weights():
    """Scaling one row of the last feed-forward map: an outlier in a pre-norm model, and next to none with sandwich norms."""
    peaks = {}
    for placement in ("pre", "sandwich"):
        model, samples = small_lm(norm_placement=placement), words()
        before = sinks_of(model, samples, place=0)
        with torch.no_grad():
            model.layers[-1].mlp.down_proj.weight[3] *= 1e4
        sink, effects = measured(model, samples)
        found = three_metrics(model, samples, sink, effects)
        # No attention reads what the last layer writes.
        assert np.allclose(columns(found.heads)["concentration"], before.weights, rtol=0, atol=1e-12)
        peaks[placement] = columns(found.layers)["outliers"][-1]
    # RMSNorm of 32 numbers gives none above sqrt(32) = 5.7, whatever went in; the stream without it is of the same size.
    assert peaks["pre"] > 1000
    assert peaks["sandwich"] < 20


def test_softmax_plus_one_moves_the_concentration_to_nothing_and_leaves_the_outliers():
    samples, found = words(), {}
    for name in ("softmax", "softmax_plus_one"):
        model = small_lm(operation={"name": name})
        with torch.no_grad():
            for layer in model.layers:
                layer.self_attn.q_proj.weight *= 1e-3  # scores near 0: nothing gets as much as a key
            model.layers[-1].mlp.down_proj.weight[3] *= 1e4
        sink, effects = measured(model, samples, place="null" if name == "softmax_plus_one" else 0)
        found[name] = three_metrics(model, samples, sink, effects)
    # One key more in every row: 1 / (t + 2) for query t = 0 … 13, against 1 / (t + 1) on position 0 for t = 1 … 13.
    expected = {"softmax": np.mean(1 / np.arange(2, 15)), "softmax_plus_one": np.mean(1 / np.arange(2, 16))}
    for name, one in found.items():
        assert np.allclose(columns(one.heads)["concentration"], expected[name], rtol=0, atol=0.02), name
        assert columns(one.layers)["outliers"][-1] > 1000, name


def test_the_table_and_the_record():
    model, samples = small_lm(), words()
    sink, effects = measured(model, samples)
    found = three_metrics(model, samples, sink, effects)
    table = make_table(rows(found, by_name(sink)))
    assert {"concentration", "need_of_the_sink", "layer_kurtosis", "rho_concentration_outliers_over_heads"} <= set(
        table["metric"]
    )
    record = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert set(record["heads"]["0.0"]) == {"concentration", "outliers", "need of the sink", "use of the head"}
    # Pairs of different kinds: 5 over heads, and 8 over layers, where there are two kinds of outliers.
    assert sum(one["over"] == "heads" for one in record["correlations"]) == 5
    assert len(record["correlations"]) == 13
    assert record["correlations"][0]["reading"] == "too few to tell"


def test_what_cannot_be_is_refused():
    model, samples = small_lm(), words()
    sink, effects = measured(model, samples)
    other = Effects(
        ["zero"], effects.heads, effects.domain_names, effects.loss[:1], effects.divergence[:1], effects.clean_loss, "nats"
    )
    with pytest.raises(ConfigurationError, match="the effect of 'hide' or 'redirect', and the effects have zero"):
        three_metrics(model, samples, sink, other)
    with pytest.raises(ConfigurationError, match="needs a sink, and none was found"):
        three_metrics(model, samples, sinks_of(model, samples, place=None), effects)
