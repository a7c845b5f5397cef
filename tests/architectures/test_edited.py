"""Interventions on every family of the zoo: a hidden key has weight 0, rows still sum to one, and a zeroed head is zero."""

import pytest
import torch

from sinklab.attention.session import attend
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.zero_head import ZeroHead
from sinklab.registry import interventions

from .harness import Recorder, assert_identical, forward
from .zoo import MEASURED, Entry, batch_of, model_of

ROUNDING = 1e-5
"""float32: sums of up to some dozen weights, each within 1e-7 of a number below 1, recomputed from scores of size 20."""

OWN_CACHE = ("deepseek_v32", "bamba")
"""Families whose cached decoding differs from one pass by a tenth of the logits already when nothing is edited."""


@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: entry.id)
def test_a_hidden_key_has_no_weight_in_any_head(entry: Entry) -> None:
    model, batch, recorder = model_of(entry.id), batch_of(entry, padded=True), Recorder()
    before = forward(model, batch)
    with attend(model, [recorder], [HideKey(place=0)]):
        edited = forward(model, batch)
    assert len(recorder.records) == entry.calls
    hidden = 0
    for record in recorder.records:
        call, first = record.call, (record.call.key_positions == 0)[:, None, None]
        others = (record.visible & ~first).any(-1, keepdim=True)  # a query that sees nothing else is left as it is
        assert (record.weights[(first & others).expand_as(record.weights)] == 0).all(), record.site.module
        hidden += int((first & others).sum())
        assert record.statistics.row_mass is not None
        mass = record.statistics.row_mass
        if record.statistics.null_mass is not None:
            mass = mass + record.statistics.null_mass
        seen = (record.visible.any(-1) & call.counted[:, None]).expand_as(mass)
        assert (mass[seen] - 1).abs().max() < ROUNDING, record.site.module
    assert hidden > 0
    assert any(not torch.equal(one, other) for one, other in zip(edited, before, strict=True))
    assert_identical(forward(model, batch), before)


@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: entry.id)
def test_zeroed_heads_are_zero(entry: Entry) -> None:
    model, batch, recorder = model_of(entry.id), batch_of(entry), Recorder()
    before = forward(model, batch)
    with attend(model, [recorder], [ZeroHead()]):
        edited = forward(model, batch)
    for record in recorder.records:
        assert record.call.head_outputs is not None
        assert (record.call.head_outputs == 0).all(), record.site.module
    assert any(not torch.equal(one, other) for one, other in zip(edited, before, strict=True))
    assert_identical(forward(model, batch), before)


@pytest.mark.parametrize(
    "entry", [entry for entry in MEASURED if entry.kind == "decoder" and entry.id not in OWN_CACHE], ids=lambda entry: entry.id
)
def test_a_key_stays_hidden_when_decoding_with_a_cache(entry: Entry) -> None:
    """Sliding layers drop old keys, and positions must be those of the text all the same."""
    model, tokens = model_of(entry.id), batch_of(entry)["input_ids"]
    with torch.no_grad(), attend(model, interventions=[HideKey(place=(0, 4))]):
        whole = model(input_ids=tokens, use_cache=False).logits
        cache, pieces = None, []
        for piece in tokens.split([6, 1, 1, 2], dim=1):
            step = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            pieces.append(step.logits)
        # float32: two layers, each of a few thousand products, with scores of size 20.
        error = (torch.cat(pieces, dim=1) - whole).abs().max() / whole.abs().max()
    assert error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: entry.id)
def test_every_intervention_changes_something(entry: Entry) -> None:
    model, batch = model_of(entry.id), batch_of(entry, padded=True)
    before = forward(model, batch)
    for name in interventions:
        cls = interventions[name]
        with attend(model, interventions=[cls(**cls.example)]):
            edited = forward(model, batch)
        assert all(one.isfinite().all() for one in edited), name
        assert any(not torch.equal(one, other) for one, other in zip(edited, before, strict=True)), name
    assert_identical(forward(model, batch), before)
