"""The finding of an audit: one short sentence for every kind of model; and weights that make no sink of silent heads."""

from __future__ import annotations

import pytest
import torch
from tests.report.synthetic import a_place, sinks_found

from sinklab import from_weights
from sinklab.studies.audit.found import SinksFound, finding, is_of_few, layers_words, place_and_token

LONG = "x" * 200
LAYERS = [10, 11, 33, 34, 66, 67, 98, 99]
NULL = a_place(None, kind="null", name="the null score")
FOLLOWED = a_place(None, kind="token", name="“.” wherever it stands", text=".", sinking=1)


@pytest.mark.parametrize(
    ("sinks", "others", "begins"),
    [
        ([a_place(0, text=LONG, sinking=2), a_place(3)], {}, "The sink is position 0, “xxx"),
        ([a_place(None, kind="group", name="the corner patches", positions=[1, 7])], {}, "The sink is the corner patches"),
        ([NULL], {}, "The sink is the null score, which takes 52.0\u202f%"),
        ([], {"silent": [a_place(0)]}, "There is no sink: position 0 passes 0.3 only where rows are divided"),
        ([], {"followed": [FOLLOWED]}, "There is no sink that stays at a place; 1 of 12,345 heads"),
        ([], {"weak": [a_place(5, rate=2.0)]}, "There is no sink: no head sinks at one place often enough"),
        ([], {}, "There is no sink: no position holds more than 0.3"),
    ],
)
def test_a_finding_is_one_short_sentence_on_the_place(sinks, others, begins):
    for part in ("", "cross-attention"):
        found = SinksFound(**sinks_found(sinks, 12_345, **others) | {"null_mass": 0.52, "part": part, "sink_layers": LAYERS})
        text = finding(found, 0.3)
        assert len(text) <= 160
        assert text.endswith(".")
        assert text.startswith(f"{part.capitalize()}: " if part else begins)


def test_a_token_is_named_only_where_most_sinks_have_it():
    for share, shown in ((1.0, "position 0, “<s>”"), (0.6, "position 0, mostly “<s>”"), (0.5, "position 0")):
        assert place_and_token(a_place(0, text="<s>", token_share=share)) == shown


def test_a_head_that_gives_much_to_other_keys_makes_no_sink_of_silent_ones():
    """Head 0 gives 0.9 to every key but the first; head 1 gives 0.002 to the first and 0.0001 to the others."""
    weights = torch.stack((torch.full((16, 16), 0.9), torch.full((16, 16), 1e-4))).tril()
    weights[0, :, 0], weights[1, :, 0] = 0.0, 2e-3
    found = from_weights(weights, row_sums="any").sinks
    assert (found.main, [sink.place for sink in found.silent], found.heads_by_weight) == (None, [0], 1)
    # Of the head that gives 0.9 to every key the first one is no sink, so that this makes none of the other head's.
    weights[0, :, 0] = 0.9
    again = from_weights(weights.tril(), row_sums="any").sinks
    assert (again.main, [sink.place for sink in again.silent], again.silent[0].sinking) == (None, [0], 1)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([4], "layer 4"),
        ([4, 5], "layers 4–5"),
        ([*range(3, 10), *range(12, 30)], "layers 3–9 and 12–29"),
        ([1, 3, 5, 7, 9], "5 layers from 1 to 9"),
    ],
)
def test_layers_are_said_by_their_runs(layers, words):
    assert layers_words(layers) == words


def test_one_head_in_270_is_no_other_sink_in_words():
    heads = [(1, 0, "m", 18.0)]
    main = a_place(0, rate=76.0, sinking=220)
    found = SinksFound(**sinks_found([main, a_place(7, sinking=1, heads=heads)], 270) | {"sink_layers": [3, 4, 5, 12]})
    assert finding(found, 0.3) == "The sink is position 0: 220 of 270 heads in layers 3–5 and 12, sink rate 76.0\u202f%."
    few = SinksFound(**sinks_found([main, a_place(7, sinking=1, heads=heads)], 12))
    assert (is_of_few(found.sinks.sinks[1], found), is_of_few(few.sinks.sinks[1], few)) == (True, False)
