"""Signed operations: measured by how much they take of a value, whichever the sign; verified with the sign."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab.attention.session import attend
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.null_mass import NullMass
from sinklab.probes.sink_rate import SinkRate


@pytest.mark.parametrize("name", ["identity", "mlp_kernel"])
def test_weights_are_counted_without_their_sign(name):
    model = make_sinklm({"name": name}).eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad(), attend(model, [SinkRate(), AttentionReceived(), NullMass()], verify=True) as session:
        model(tokens)
    table = session.table()
    assert session.checks["calls_verified"] == 2
    assert not session.normalized
    fractions = table[table["metric"].isin(["first_token_share", "qiu2025_first_attention", "mean_weight", "row_mass"])]
    assert len(fractions) > 20
    assert (fractions["value"] >= 0).all()
    shares = table[table["metric"].isin(["first_token_share", "qiu2025_first_attention"])]
    assert (shares["value"] <= 1).all()
    # The first query sees one key, so its share is all of it, whatever the sign; the mean over 20 is at least 1/20.
    assert (shares[shares["metric"] == "qiu2025_first_attention"]["value"] >= 1 / 20 - 1e-6).all()
