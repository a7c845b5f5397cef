"""Batches without rows, without tokens, and of nothing but padding: refused in one sentence, or no rows in the table."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab import attend
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import probes
from sinklab.sinks.finding import find_sinks
from sinklab.studies.measure.probing import run_probes

EMPTY = [torch.zeros(shape, dtype=torch.long) for shape in ((0, 5), (2, 0), (0, 0))]
PADDING = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}


@pytest.fixture(scope="module")
def model():
    return make_sinklm()


@pytest.mark.parametrize("tokens", EMPTY, ids=lambda tokens: str(tuple(tokens.shape)))
def test_no_tokens_are_refused(model, tokens):
    for ask in (model, lambda ids: find_sinks(model, ids), lambda ids: run_probes(model, ids, [])):
        with pytest.raises(InputError, match=r"of shape \(\d, \d\) holds? no token; give at least one"):
            ask(tokens)


def test_sinks_are_not_looked_for_in_padding(model):
    with pytest.raises(InputError, match=r"attention_mask of shape \(2, 5\) holds no token"):
        find_sinks(model, PADDING)


@pytest.mark.parametrize("name", probes.names())
def test_a_probe_that_saw_padding_alone_has_no_rows(model, name):
    with torch.no_grad(), attend(model, probes=[probes.make(name)]) as session:
        model(**PADDING)
    table = session.table()
    assert not len(table) or (table["count"] == 0).all() or not table["value"].notna().any(), table


def test_a_name_is_no_probe(model):
    refused = pytest.raises(ConfigurationError, match=r"make one of it with sinklab.registry.probes.make\('entropy'\)")
    with refused, attend(model, probes=["entropy"]):
        pass


def test_a_single_token_is_measured(model):
    with torch.no_grad(), attend(model, probes=[probes.make("sink_rate")]) as session:
        model(torch.zeros(1, 1, dtype=torch.long))
    assert (session.table().query("metric == 'gu2024'")["value"] == 100).all()
