"""Which models see later tokens: what is said of them against what a change of the last token does to their outputs."""

import pytest
import torch
from transformers import PreTrainedModel

from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.session import attend
from sinklab.errors import SessionError
from sinklab.models.loading import wrap_model
from sinklab.models.losses import is_causal_lm, loss_kind
from sinklab.probes.attention_received import AttentionReceived
from sinklab.studies.measure.probing import looking_at
from sinklab_claims.contract.trained import kind_of

from .harness import assert_identical, forward
from .zoo import VOCAB, Entry, build, grouped, shape

XLM = {
    "vocab_size": VOCAB, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1, "max_position_embeddings": 64, "pad_index": 2
}  # fmt: skip
XLNET = {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
BOTH_WAYS = [
    ("XLMWithLMHeadModel", {**XLM, "causal": False}, "masked token"),
    ("FlaubertWithLMHeadModel", {**XLM, "causal": False}, "masked token"),
    ("XLNetLMHeadModel", {**XLNET, "attn_type": "bi"}, None),
    ("BigBirdForCausalLM", shape(is_decoder=False, attention_type="original_full"), "masked token"),
    ("MegatronBertForCausalLM", shape(is_decoder=False), "masked token"),
    ("RemBertForCausalLM", shape(is_decoder=False), "masked token"),
    ("RoFormerForCausalLM", shape(is_decoder=False), "masked token"),
    # On the interface: the field of a config, and what modules say of themselves, are not to be relied on.
    ("BertLMHeadModel", shape(is_decoder=False), "masked token"),
    ("LlamaForCausalLM", grouped(is_causal=False), None),
]
CAUSAL = [
    ("XLMWithLMHeadModel", {**XLM, "causal": True}),
    ("FlaubertWithLMHeadModel", {**XLM, "causal": True}),
    ("XLNetLMHeadModel", {**XLNET, "attn_type": "uni"}),
    ("BigBirdForCausalLM", shape(is_decoder=True, attention_type="original_full")),
    ("MegatronBertForCausalLM", shape(is_decoder=True)),
    ("RemBertForCausalLM", shape(is_decoder=True)),
    ("RoFormerForCausalLM", shape(is_decoder=True)),
    ("GPTJForCausalLM", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}),
    ("BertLMHeadModel", shape(is_decoder=True)),
    ("GPTNeoXForCausalLM", shape(is_decoder=False)),
    ("LlamaForCausalLM", grouped()),
]


def made(name: str, config: dict[str, object]) -> PreTrainedModel:
    return build(Entry(name, "decoder", name, config))


def named(case: tuple[object, ...]) -> str:
    field = next((f"{key}={case[1][key]}" for key in ("causal", "attn_type", "is_decoder", "is_causal") if key in case[1]), "")
    return f"{case[0]}-{field}"


def batch_of_words() -> torch.Tensor:
    return torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))


def change_of_earlier_outputs(model: PreTrainedModel) -> bool:
    """Whether outputs before the last token change with it."""
    tokens = batch_of_words()
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 5) % (VOCAB - 4) + 4
    one, two = (forward(model, {"input_ids": ids})[0] for ids in (tokens, other))
    assert not torch.equal(one[:, -1], two[:, -1])
    return not torch.equal(one[:, :-1], two[:, :-1])


@pytest.mark.parametrize("case", BOTH_WAYS, ids=named)
def test_what_sees_the_whole_text_is_no_decoder(case):
    name, config, loss = case
    model = made(name, config)
    assert change_of_earlier_outputs(model)
    assert looks_ahead(model)
    assert not is_causal_lm(model)
    assert loss_kind(model) == loss
    assert kind_of(wrap_model(model)) == "encoder"
    tokens = batch_of_words()
    with torch.no_grad(), looking_at(model, [AttentionReceived()]) as session:
        weights = model(input_ids=tokens, output_attentions=True).attentions
    for layer, own in enumerate(weights):
        rows = session.table().query(f"metric == 'mean_weight' and layer == {layer}")
        # Every key is seen by all nine queries.
        means = own.double().sum(2).mean(0) / 9
        assert rows["value"].to_numpy(float) == pytest.approx(means.flatten().numpy(), abs=1e-6)


@pytest.mark.parametrize("case", CAUSAL, ids=named)
def test_what_sees_no_later_token_is_a_decoder(case):
    name, config = case
    model = made(name, config)
    assert not change_of_earlier_outputs(model)
    assert not looks_ahead(model)
    assert loss_kind(model) == "next token"
    assert kind_of(wrap_model(model)) == "decoder"
    with torch.no_grad(), looking_at(model, [AttentionReceived()]) as session:
        model(input_ids=batch_of_words())
    rows = session.table().query("metric == 'mean_weight' and key_position == 8")
    assert set(rows["count"]) == {2}  # the last key is seen by the last query alone, of two samples


def test_asking_leaves_a_model_and_the_random_numbers_as_they_are():
    model = made("ReformerModelWithLMHead", {
        "vocab_size": VOCAB, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 48,
        "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["lsh", "local"], "is_decoder": True,
        "max_position_embeddings": 64, "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "num_buckets": 2,
    })  # fmt: skip
    model.train()
    before = torch.get_rng_state()
    looks_ahead(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    bert = made("BertLMHeadModel", shape(is_decoder=False))
    plain = forward(bert, {"input_ids": batch_of_words()})
    assert looks_ahead(bert)
    assert_identical(forward(bert, {"input_ids": batch_of_words()}), plain)


def test_a_model_is_not_asked_while_it_is_looked_at():
    model = made("BertLMHeadModel", shape(is_decoder=False))
    with attend(model):
        forward(model, {"input_ids": batch_of_words()})
        with pytest.raises(SessionError, match="already active"):
            looks_ahead(model)
    assert looks_ahead(model)


def test_block_sparse_attention_of_big_bird_stays_what_it_is():
    config = shape(attention_type="block_sparse", is_decoder=False, block_size=4, num_random_blocks=1)
    model = made("BigBirdForCausalLM", config)
    assert looks_ahead(model)
    assert model.bert.attention_type == "block_sparse"
