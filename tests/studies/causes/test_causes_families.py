"""find_causes() on families of models: every intervention runs, also where a layer stands for several."""

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
    # Eleven texts: 2^-11 is below 0.05 over 64 hypotheses, the eight labels of eight heads.
    found = find_causes(build(ZOO[family]), domains=["random_tokens"], texts=11, seq_len=10, sink=0, bos="none", batch_size=5)
    assert len(found.summary["heads"]) in (4, 8)
    assert set(found.record["measured"].values()) == {"replayed"}
    json.dumps([found.summary, found.record], allow_nan=False)
    changed = found.table[(found.table["metric"] == "loss_change") & (found.table["intervention"] == "zero")]
    assert (changed["value"] != 0).all()
    assert len(changed) == len(found.summary["heads"])


def test_heads_of_a_hybrid_are_said_to_be_of_its_layers_of_attention():
    """Of four layers the last one attends: its heads are those of layer 0, and 3.0 is refused by the module's name."""
    model = build(ZOO["qwen3_next"])
    quick = {"domains": ["random_tokens"], "texts": 10, "seq_len": 10, "sink": 0, "bos": "none"}
    found = find_causes(model, **quick)
    assert "Of 4 layers 1 has attention (3), and heads are numbered by it alone: 0.0 is the" in found.summary["notes"][0]
    with pytest.raises(ConfigurationError, match=r"written layer\.head from 0\.0 \(model\.layers\.3\.self_attn\) to 0\.3"):
        find_causes(model, heads=[(3, 0)], **quick)
