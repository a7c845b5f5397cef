"""find_causes() on small models of the decoder families: every intervention and experiment runs, and the summary is JSON."""

from __future__ import annotations

import json

import pytest
from tests.architectures.zoo import ZOO, build

from sinklab import find_causes
from sinklab.errors import ConfigurationError

DECODERS = sorted(
    entry.id for entry in ZOO.values() if (entry.kind, entry.inputs, entry.refused) == ("decoder", "tokens", None)
)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("gpt2", "gpt_oss", "gemma2", "deepseek_v3") else pytest.param(name, marks=pytest.mark.slow)
        for name in DECODERS
    ],
)
def test_a_family(family):
    # Ten texts: 2^-10 is below 0.05 over 40 hypotheses, the five labels of eight heads.
    found = find_causes(
        build(ZOO[family]), domains=["random_tokens"], texts=10, seq_len=10, sink=0, bos="none", budget="full", batch_size=5
    )
    assert len(found.summary["heads"]) in (4, 8)
    assert all("refused" not in found.summary[name] for name in ("read_outs", "location", "key_bias", "massive", "spread"))
    assert set(found.record["measured"].values()) == {"replayed"}
    json.dumps([found.summary, found.record], allow_nan=False)
    changed = found.table[(found.table["metric"] == "divergence") & (found.table["intervention"] == "zero")]
    assert (changed["value"] > 0).all()
    assert len(changed) == len(found.summary["heads"])


def test_heads_of_a_hybrid_are_said_to_be_of_its_layers_of_attention():
    """Of four layers the last one attends: its heads are those of layer 0, and 3.0 is refused by the module's name."""
    model = build(ZOO["qwen3_next"])
    quick = {"domains": ["random_tokens"], "texts": 10, "seq_len": 10, "sink": 0, "bos": "none", "experiments": False}
    found = find_causes(model, **quick)
    assert "Of 4 layers 1 has attention (3), and heads are numbered by it alone: 0.0 is the" in found.summary["notes"][0]
    with pytest.raises(ConfigurationError, match=r"written layer\.head from 0\.0 \(model\.layers\.3\.self_attn\) to 0\.3"):
        find_causes(model, heads=[(3, 0)], **quick)


def test_there_are_families():
    assert len(DECODERS) >= 30
