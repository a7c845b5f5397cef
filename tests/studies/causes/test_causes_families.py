"""find_causes() on families of models: every intervention runs, also where a layer stands for several."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests.architectures.zoo import ZOO, build
from torch import nn

from sinklab import find_causes
from sinklab.errors import ConfigurationError
from sinklab.studies.causes.readout import MaskedToken
from sinklab.studies.causes.samples import Samples, masked_samples

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
    assert "refused" not in found.summary["location"]
    assert set(found.record["measured"].values()) == {"replayed"}
    json.dumps([found.summary, found.record], allow_nan=False)
    changed = found.table[(found.table["metric"] == "loss_change") & (found.table["intervention"] == "zero")]
    assert (changed["value"] != 0).all()
    assert len(changed) == len(found.summary["heads"])


def test_heads_of_a_hybrid_are_said_to_be_of_its_layers_of_attention():
    """Of four layers the last one attends: its heads are those of layer 0, and 3.0 is refused by the module's name."""
    model = build(ZOO["qwen3_next"])
    quick = {"domains": ["random_tokens"], "texts": 10, "seq_len": 10, "sink": 0, "bos": "none", "experiments": False}
    found = find_causes(model, **quick)
    assert "Of 4 layers 1 has attention (3), and heads are numbered by it alone: 0.0 is the" in found.summary["notes"][0]
    with pytest.raises(ConfigurationError, match=r"written layer\.head from 0\.0 \(model\.layers\.3\.self_attn\) to 0\.3"):
        find_causes(model, heads=[(3, 0)], **quick)


LAYERS = 3
LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"


@pytest.fixture
def albert() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AlbertConfig(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4, embedding_size=16,
            num_hidden_layers=LAYERS, max_position_embeddings=64, initializer_range=0.3,
        )  # fmt: skip
        return transformers.AlbertForMaskedLM(config).eval()


def samples(count: int, length: int = 12) -> Samples:
    tokens = torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(1))
    return masked_samples([("all", tokens)], mask_token=2, share=0.4)


def test_labels_and_the_location_take_a_run_for_a_layer(albert):
    # Ten texts: 2^-10 is below 0.05 over 48 hypotheses, the eight labels of six heads.
    given, heads = samples(10), [(layer, head) for layer in range(LAYERS) for head in (1, 2)]
    found = find_causes(albert, samples=given, readout=MaskedToken(), heads=heads, sink=0, batch_size=5)
    runs = [f"{LAYER}.attention{suffix}" for suffix in ("", "#1", "#2")]
    assert [(head["layer"], head["head"], head["module"]) for head in found.summary["heads"]] == [
        (layer, head, run) for layer, run in enumerate(runs) for head in (1, 2)
    ]
    assert found.record["measured"] == dict.fromkeys(runs, "replayed")
    assert "refused" not in found.summary["location"]
    json.dumps(found.summary, allow_nan=False)
