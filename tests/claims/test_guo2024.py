"""Heads that copy behind triggers, against plain loops and whole maps."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from sinklab.attention.session import attend
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab_claims import guo2024
from sinklab_claims.guo2024 import HeadNumbers

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
POSITIONS = {"max_position_embeddings": 64, "position": {"name": "learned"}, "initializer_range": 0.3}


@torch.no_grad()
def test_numbers_of_heads_are_those_of_plain_loops():
    torch.manual_seed(1)
    model, tokens = SinkLM(SinkLMConfig(**SHAPE, **POSITIONS)).eval(), torch.randint(1, 10, (5, 12))
    tokens[:, 0] = 0
    triggers = tokens > 6
    probe = HeadNumbers(triggers)
    with attend(model, [probe]):
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    layer, head, inner = 1, 1, model.layers[1].self_attn
    normed = model.layers[1].input_layernorm(states[1])
    queries, keys, values = (
        linear(normed).unflatten(-1, (2, 8))[:, :, head] for linear in (inner.q_proj, inner.k_proj, inner.v_proj)
    )
    scores = queries @ keys.mT / math.sqrt(8)
    for row in range(len(tokens)):
        found = {"bos_weight": [], "bos_weight_trigger": [], "previous_weight": [], "previous_weight_trigger": []}
        for query in range(2, tokens.shape[1]):
            weights = torch.softmax(scores[row, query, : query + 1], -1)
            trigger = "_trigger" if triggers[row, query] else ""
            found[f"bos_weight{trigger}"].append(float(weights[0]))
            found[f"previous_weight{trigger}"].append(float(weights[query - 1]))
        for name, numbers in found.items():
            expected = sum(numbers) / len(numbers) if numbers else math.nan
            # float32 sums of a dozen weights up to 1.
            assert float(probe.heads[layer][name][row, head]) == pytest.approx(expected, abs=1e-5, nan_ok=True)
    norms = values.norm(dim=-1)
    torch.testing.assert_close(probe.heads[layer]["value_ratio"][:, head], norms[:, 0] / norms[:, 1:].mean(1))


def test_copy_head_is_the_one_of_the_maps():
    torch.manual_seed(0)
    model, rows = SinkLM(SinkLMConfig(**SHAPE, **POSITIONS)).eval(), torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: 1 + guo2024.TRIGGERS.index(token))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(model(rows, output_attentions=True, use_cache=False).attentions, 1)  # (rows, layers, heads, q, k)
    model.set_attn_implementation("sdpa")
    triggers = ((rows >= 1) & (rows <= 3))[:, 2:]
    previous = maps.diagonal(-1, -2, -1)[..., 1:] * triggers[:, None, None]
    by_row = previous.sum(-1) / triggers.sum(-1)[:, None, None]
    trained = SimpleNamespace(
        config=SimpleNamespace(model=model.config.architecture),
        loaded=SimpleNamespace(model=model, tokenizer=tokenizer),
        rows=lambda samples: rows,
    )
    numbers = guo2024.copy_head(trained)
    assert numbers["previous_at_trigger"] == pytest.approx(by_row.nanmean(0).max().item(), rel=1e-5)
    assert numbers.keys() == {metric.name for metric in guo2024.METRICS}
