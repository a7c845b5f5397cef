"""The finding of an audit: one short sentence for every kind of model; and weights that make no sink of silent heads."""

from __future__ import annotations

import pytest
import torch
from tests.report.synthetic import a_place, sinks_found

from sinklab import from_weights
from sinklab.studies.audit.found import SinksFound, finding, place_and_token

LONG = "x" * 200
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
        found = SinksFound(**sinks_found(sinks, 12_345, **others) | {"null_mass": 0.52, "part": part})
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
