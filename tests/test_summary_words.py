"""The finding in JSON, on the terminal and on the page, for the kinds of model that are easily called by the wrong name."""

from __future__ import annotations

import types

import torch

from sinklab import from_weights
from sinklab.report.words import sink_column, sink_name, verdict
from sinklab.studies.denoise import words as denoise_words

AT_BOS = {"position": 0, "token": "<s>", "token_share": 1.0, "rate": 16.0, "mean_weight": 0.01, "heads": []}


def page(summary: dict) -> str:
    audit = types.SimpleNamespace(threshold=0.3, summary=summary, numbers=types.SimpleNamespace(num_cells=12))
    return verdict(audit)  # type: ignore[arg-type]


def test_a_learned_logit_is_no_position():
    summary = {"sink_role": "null score", "null_mass": 0.52, "sink_positions": [], "sink_rate_gu2024": 0.0}
    assert "rests on a null score (a learned sink logit, a key bias), which takes 52.0\u202f% of the mass" in page(summary)


def test_a_sink_beside_a_learned_logit_is_named():
    """The first position is not the only one that may be a sink where the null score is the strongest."""
    null = {"kind": "null", "name": "the null score", "position": None, "text": "sink logit", "rate": 60.0, "heads": []}
    place = {"kind": "position", "name": "position 2", "position": 2, "text": None, "rate": 40.0, "heads": []}
    summary = {"sink_role": "null score", "null_mass": 0.5, "sink_rate_gu2024": 0.0, "normalized": True}
    said = page(summary | {"sinks": {"sinks": [null, place], "silent": [], "followed": [], "weak": []}})
    assert said.endswith("in 0\u202f% of heads and samples. Another sink is position 2.")


def test_silent_heads_are_no_sink():
    summary = {
        "sink_role": "none",
        "null_mass": None,
        "normalized": False,
        "sink_heads_by_weight": 0,
        "sink_positions": [AT_BOS],
        "sink_rate_gu2024": 16.0,
    }
    assert page(summary).startswith("This model has no attention sink: no head gives any position more than 0.3")


def test_a_head_that_gives_much_to_other_keys_makes_no_sink_of_silent_ones():
    """Head 0 gives 0.9 to every key but the first; head 1 gives 0.002 to the first and 0.0001 to the others."""
    weights = torch.stack((torch.full((16, 16), 0.9), torch.full((16, 16), 1e-4))).tril()
    weights[0, :, 0], weights[1, :, 0] = 0.0, 2e-3
    found = from_weights(weights, row_sums="any").sinks
    assert (found.main, [sink.place for sink in found.silent], found.heads_by_weight) == (None, [0], 1)
    summary = {"sinks": found.to_dict(), "normalized": False, "sink_heads_by_weight": 1, "sink_positions": []}
    summary |= {"sink_role": "none", "null_mass": None, "num_heads": 2, "sink_rate_gu2024": 50.0}
    assert page(summary).startswith(
        "This model has no attention sink: no head that rests on the first position gives it more than 0.3 of weight on "
        "average. Only after dividing each row by its sum, however small, do 50.0\u202f% of heads and samples pass at the "
        "first position."
    )
    audit = types.SimpleNamespace(summary=summary)
    assert (sink_column(audit), sink_name(audit)) == (None, "position 0 (no sink was found)")  # type: ignore[arg-type]
    # Of the head that gives 0.9 to every key the first one is no sink, so that this makes none of the other head's.
    weights[0, :, 0] = 0.9
    again = from_weights(weights.tril(), row_sums="any").sinks
    assert (again.main, [sink.place for sink in again.silent], again.silent[0].sinking) == (None, [0], 1)
    # Beside a sink they are no further ones.
    place = {"position": 2, "name": "position 2", "rate": 50.0, "sinking": 1, "heads": [], "text": None, "kind": "position"}
    both = summary | {"sinks": {**found.to_dict(), "sinks": [place]}}
    assert "has an attention sink at position 2" in page(both)
    assert "other position" not in page(both)


def test_a_softmax_sink_is_a_sink():
    summary = {
        "sink_role": "first position, token “<s>”",
        "null_mass": 0.0,
        "normalized": True,
        "sink_positions": [AT_BOS],
        "sink_rate_gu2024": 16.0,
    }
    assert page(summary).startswith("This model has an attention sink at the first position")


def test_a_token_is_named_only_where_most_sinks_have_it():
    summary = {"sink_role": "position 0", "normalized": True, "sink_rate_gu2024": 16.0}
    for share, said in ((1.0, True), (0.6, True), (0.5, False), (None, True)):
        record = page(summary | {"sink_positions": [AT_BOS | {"token_share": share}]})
        assert ("“<s>”" in record) is said, share
    weak = {"kind": "position", "name": "position 0", "position": 0, "text": "the", "token_share": 0.1, "rate": 2.0}
    assert "“" not in page(summary | {"sinks": {"sinks": [], "silent": [], "weak": [weak]}})
    assert "“the”" in page(summary | {"sinks": {"sinks": [], "silent": [], "weak": [weak | {"token_share": 0.9}]}})


def test_a_window_is_named_whatever_else_is_said():
    """A rate at position 0 in modules with a window does not count, also beside a sink or the most frequent place."""
    token = {"kind": "token", "name": "“.” wherever it stands", "text": ".", "sinking": 1, "rate": 20.0, "value_ratio": 0.5}
    weak = {"kind": "position", "name": "position 12", "position": 12, "text": "m", "token_share": 0.9, "rate": 2.1}
    silent = {"sinks": [], "followed": [], "weak": []}
    summary = {"sink_role": "none", "normalized": True, "sink_rate_gu2024": 24.0, "windowed_modules": 1, "num_modules": 2}
    summary |= {"longest_sample": 32}
    said = "In 1 of its 2 attention modules, as where a window slides, fewer than half of the queries see the first position"
    sink = {"kind": "position", "name": "position 0", "position": 0, "text": "<s>", "token_share": 1.0, "rate": 50.0}
    at_first = {**silent, "sinks": [sink | {"sinking": 4, "heads": []}]}
    for found in ({**silent, "weak": [weak]}, {**silent, "followed": [token]}, silent, at_first):
        assert said in page(summary | {"sinks": {"silent": [], **found}})
        assert "window" not in page(summary | {"sinks": {"silent": [], **found}, "windowed_modules": 0})
    quiet = {"normalized": False, "sink_heads_by_weight": 0, "sink_positions": [AT_BOS]}
    assert said in page(summary | quiet)
    assert "Take samples of at most 32 tokens (--seq-len)." in page(summary | quiet).replace("`", "")
    assert "Take samples" not in page(summary | quiet | {"kind": "pictures"})  # whose size is the model's


def test_what_is_rounded_to_nothing_has_no_sign():
    """An interval from -0.0001 to 0.0002 is written as one from 0.000, and not from "-0.000"."""
    said = [
        denoise_words._nats({"mean": -1e-5, "low": None, "high": None}),
    ]
    assert said == [
        "0.000 nats",
    ]  # fmt: skip
