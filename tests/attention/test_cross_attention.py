"""Cross-attention under cached decoding: one sequence that grows, not a new one at every step."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.session import attend
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.sink_rate import SinkRate


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def cross_rows(session):
    table = session.table()
    rows = table[table["module"].str.contains("EncDecAttention").fillna(False)]
    return rows.set_index(["metric", "module", "head", "key_position"])[["value", "count"]].sort_index()


@pytest.mark.parametrize("probe", [AttentionReceived, KeyNorm])
def test_decoding_step_by_step_equals_one_pass(model, probe):
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(2, 50, (2, 9), generator=generator), torch.randint(2, 50, (2, 6), generator=generator)
    with torch.no_grad(), attend(model, [probe()]) as whole:
        model(input_ids=source, decoder_input_ids=target, use_cache=False)
    with torch.no_grad(), attend(model, [probe()]) as stepwise:
        output = model(input_ids=source, decoder_input_ids=target[:, :2], use_cache=True)
        encoded = (output.encoder_last_hidden_state,)
        for step in range(2, 6):
            output = model(
                encoder_outputs=encoded,
                decoder_input_ids=target[:, step : step + 1],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
    expected, found = cross_rows(whole), cross_rows(stepwise)
    assert len(expected)
    assert (expected["count"] == found["count"]).all()
    # The same sums in another order: float32, a dozen terms.
    torch.testing.assert_close(
        torch.tensor(found["value"].tolist()), torch.tensor(expected["value"].tolist()), rtol=1e-5, atol=1e-6
    )


def test_the_three_parts_are_kept_apart(model):
    """Of equal lengths and different paddings, where shapes say nothing; keys have the tokens of their own side."""
    from sinklab.attention.probe import Watcher

    seen = {}

    class Calls(Watcher):
        name, needs = "calls", frozenset()

        def update(self, call, statistics):
            seen[call.site.part] = [
                call.query_positions[0].tolist(),
                call.key_positions[0].tolist(),
                call.key_tokens[0].tolist(),
            ]

    source, target = torch.tensor([[7, 8, 9, 1, 0]]), torch.tensor([[0, 5, 6, 0, 0]])
    masks = torch.tensor([[1, 1, 1, 1, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad(), attend(model, [Calls(), SinkRate()]) as session:
        model(input_ids=source, attention_mask=masks[0], decoder_input_ids=target, decoder_attention_mask=masks[1])
    places = [0, 1, 2, 3, -1], [0, 1, 2, -1, -1]
    assert seen == {
        "encoder": [places[0], places[0], [7, 8, 9, 1, -1]],
        "decoder": [places[1], places[1], [0, 5, 6, -1, -1]],
        "cross-attention": [places[1], places[0], [7, 8, 9, 1, -1]],
    }
    table = session.table()
    assert table["part"].notna().all()
    whole = table.query("metric == 'gu2024' and layer.isna()")
    counts = whole.groupby("part")["count"].sum().to_dict()
    assert counts == {"encoder": 2 * 2 * 4, "decoder": 2 * 2 * 3, "cross-attention": 2 * 2 * 4}  # layers, heads, keys


def test_a_layer_is_a_block_and_no_sublayer_of_it(model):
    """Hidden states are those that the model itself gives, under the number of the self-attention before them."""
    assert list(Anatomy(model).layers) == [f"{side}.block.{number}" for side in ("encoder", "decoder") for number in range(2)]
    ids = torch.randint(2, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), attend(model, [HiddenNorm(), SinkRate()]) as session:
        output = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
    # The last state of each side has the final norm behind it, which a layer's output has not.
    states = [*output.encoder_hidden_states[:-1], None, *output.decoder_hidden_states[1:-1], None]
    table = session.table()
    norms = table[(table["metric"] == "hidden_norm") & (table["key_position"] == 4)].set_index("layer")
    assert list(norms.index) == [-1, 0, 1, 2, 3]
    for layer, state in zip(norms.index, states, strict=True):
        if state is not None:
            assert norms.loc[layer, "value"] == pytest.approx(float(state[:, 4].norm(dim=-1).mean()), rel=1e-5)
    attending = table[(table["metric"] == "gu2024") & table["module"].str.contains("SelfAttention").fillna(False)]
    for module, layer in attending[["module", "layer"]].drop_duplicates().itertuples(index=False):
        assert module.startswith(f"{norms.loc[layer, 'module']}.")
