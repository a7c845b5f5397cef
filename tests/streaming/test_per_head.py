"""Budgets per head: each head holds its own, no more is stored, and outputs are those of a dense forward under its masks."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests.architectures.zoo import VOCAB, enliven, grouped
from torch import Tensor

from sinklab.attention import seam
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.per_head import PerHead
from sinklab.policies.sink_window import SinkWindow
from sinklab.probes.entropy import Entropy
from sinklab.results.head_map import HeadMap
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.per_head import PerHeadCache, verify_groups
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream
from sinklab.streaming.traits import fingerprint
from sinklab.testing.policies import _MaskedHeads

LENGTH = 44
BUDGETS = (((1, 4), (2, 13)), ((1, 4), (1, 7)))
POLICY = PerHead(budgets=BUDGETS)
TOLERANCE = 2e-4
"""float32 at positions below 50: angles are off by up to 3e-6, scores of size ten by up to 4e-5, logits by a few times that."""


def built(**changes):
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped(**changes)))
    enliven(made, seed=13)
    return made.eval()


@pytest.fixture(scope="module")
def model():
    return built()


def text(rows: int = 1, seed: int = 3) -> Tensor:
    return torch.randint(4, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, tokens, cache, pieces=(LENGTH,)) -> Tensor:
    parts = tokens.split(list(pieces), dim=1)
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)


@torch.no_grad()
def masked(model, tokens, policy) -> Tensor:
    """A dense forward over the whole text, with a mask for every head of every layer."""
    index = torch.arange(LENGTH)
    masks = [torch.stack([rule.visible(index[:, None], index) for rule in layer])[None] for layer in policy.rules]
    with seam.shadow(_MaskedHeads(model, masks, None)):
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_as_a_dense_forward_with_a_mask_for_every_head(backend):
    """At original positions the oracle is one mask; in-cache positions are in the contract of the policy."""
    model, dense, tokens = built(attn_implementation=backend), built(attn_implementation="sdpa"), text()
    policy = PerHead(budgets=BUDGETS, positions="original")
    expected = masked(dense, tokens, policy)
    for pieces in ([LENGTH], [1] * LENGTH, [13, 1, 1, 20, 9]):
        found = read(model, tokens, PerHeadCache(policy, model, chunk=7), pieces)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    swapped = PerHead(budgets=tuple(layer[::-1] for layer in BUDGETS), positions="original")
    assert float((masked(dense, tokens, swapped) - expected).abs().max()) > 0.05  # whose budget is whose shows


def test_equal_budgets_are_sinks_and_a_window(model):
    """To the bit: there is one group of all heads."""
    policy = PerHead(budgets=(((2, 9), (2, 9)), ((2, 9), (2, 9))))
    for pieces in ([LENGTH], [1] * LENGTH):
        uniform = read(model, text(), PolicyCache(SinkWindow(num_sinks=2, window=9), model), pieces)
        assert torch.equal(read(model, text(), PerHeadCache(policy, model), pieces), uniform)


def test_no_head_stores_more_than_its_budget(model):
    cache = PerHeadCache(POLICY, model)
    read(model, text(), cache, [1] * LENGTH)
    listed = cache.describe()
    assert listed[["num_sinks", "window"]].values.tolist() == [list(budget) for layer in BUDGETS for budget in layer]
    assert listed["held"].tolist() == [6, 16, 6, 9]
    stored = {(index, part.slots.keys.shape[2]) for index, layer in enumerate(cache.layers) for part in layer.parts}
    assert stored == {(0, 6), (0, 16), (1, 6), (1, 9)}
    uniform = PolicyCache(SinkWindow(num_sinks=1, window=4), model)
    read(model, text(), uniform)
    # A float32 key and value for every slot, and a copy of the key for every sink.
    size = model.config.hidden_size // model.config.num_attention_heads
    expected = 4 * size * sum(2 * (sinks + window + 1) + sinks for layer in BUDGETS for sinks, window in layer)
    assert cache.bytes_held() == expected == listed["bytes"].sum()
    assert uniform.bytes_held() == 4 * size * 4 * (2 * 6 + 1)
    figures = cache.telemetry()
    assert (figures.held, figures.capacity, figures.bytes) == ((16,), 16, expected)
    assert str(figures).startswith("per_head 2 × 1+4, 1 × 1+7, 1 × 2+13: 16 of 16 tokens held")


def test_padding(model):
    tokens, mask = text(rows=3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :17] = 0
    mask[2, 10:19] = 0
    mask[2, 40:] = 0
    for pieces in ([LENGTH], [1] * LENGTH, [13, 1, 1, 20, 9]):
        reader = open_reader(model, POLICY, chunk=7)
        parts = zip(tokens.split(pieces, dim=1), mask.split(pieces, dim=1), strict=True)
        found = torch.cat([reader.read(part, shown) for part, shown in parts], dim=1)
        for row in range(3):
            shown = mask[row].bool()
            alone = read(model, tokens[row : row + 1, shown], PerHeadCache(POLICY, model), [int(shown.sum())])
            torch.testing.assert_close(found[row, shown], alone[0], atol=TOLERANCE, rtol=0)


def test_positions_counted_anew(model):
    """The position of a query is the same for all heads, so it is counted from the oldest token that any head holds."""
    expected = read(model, text(), PerHeadCache(POLICY, model))
    for pieces in ([LENGTH], [1] * LENGTH):
        cache = PerHeadCache(POLICY, model, chunk=3, rebase_at=POLICY.reach + 4)
        torch.testing.assert_close(read(model, text(), cache, pieces), expected, atol=TOLERANCE, rtol=0)
        assert cache.table.rebases >= 2
        assert cache.table.highest_position < POLICY.reach + 4


def test_beams_and_going_back(model):
    tokens = text(rows=2)
    cache = PerHeadCache(POLICY, model)
    read(model, tokens[:, :30], cache, [30])
    cache.reorder_cache(torch.tensor([1, 1]))
    found = read(model, tokens[:, 30:], cache, [14])
    for row in range(2):
        whole = torch.cat((tokens[1:, :30], tokens[row : row + 1, 30:]), dim=1)
        alone = read(model, whole, PerHeadCache(POLICY, model))[0, 30:]
        torch.testing.assert_close(found[row], alone, atol=TOLERANCE, rtol=0)
    for kept, more in ((3, 2), (20, 10)):
        cache = PerHeadCache(POLICY, model)
        read(model, tokens[:, : kept + more], cache, [kept + more])
        if kept == 3:
            cache.crop(kept)
            again = read(model, tokens[:, kept:], cache, [LENGTH - kept])
            expected = read(model, tokens, PerHeadCache(POLICY, model))[:, kept:]
            torch.testing.assert_close(again, expected, atol=TOLERANCE, rtol=0)
        else:
            with pytest.raises(ConfigurationError, match="cannot go back to 20 tokens: 5 of the 6 that the policy held"):
                cache.crop(kept)


def test_generate_and_streams(model):
    tokens = text()
    made = model.generate(tokens, past_key_values=PerHeadCache(POLICY), max_new_tokens=6, do_sample=False)
    stream = Stream(model, policy={"name": "per_head", "budgets": BUDGETS}, stop_ids=()).feed(tokens)
    assert [token.id for token in stream.generate(6)] == made[0, LENGTH:].tolist()
    kept = Stream(model, policy=POLICY, keep=[5, 6, 7])
    assert [sinks for layer in kept.reader.policy.budgets for sinks, _ in layer] == [3, 3, 3, 3]
    beams = model.generate(tokens, past_key_values=PerHeadCache(POLICY, model), max_new_tokens=4, num_beams=2, do_sample=False)
    assert beams.shape == (1, LENGTH + 4)


@pytest.mark.parametrize("settings", [{}, {"chunk": 3, "rebase_at": POLICY.reach + 4}], ids=["", "positions counted anew"])
def test_saved_and_loaded(model, tmp_path, settings):
    tokens, cache = text(rows=2), PerHeadCache(POLICY, model, **settings)
    read(model, tokens[:, :30], cache, [30])
    assert bool(cache.table.rebases) == bool(settings)
    save_state(cache, tmp_path / "state")
    again = load_state(tmp_path / "state", model)
    assert again.policy == POLICY
    assert torch.equal(again.read(tokens[:, 30:]), read(model, tokens[:, 30:], cache, [14]))
    assert again.telemetry() == cache.telemetry()


def test_a_head_map_of_another_model(model, tmp_path):
    path = tmp_path / "heads.json"

    def written(**changes):
        of_model = {"name": "toy", "fingerprint": fingerprint(model, rounded=True), "source": "measured", "budgets": BUDGETS}
        path.write_text(HeadMap(**{**of_model, **changes}).model_dump_json())
        return {"name": "per_head", "heads": str(path)}

    assert open_reader(model, written()).policy.budgets == BUDGETS
    half = built().to(torch.bfloat16)
    assert open_reader(half, written()).policy.budgets == BUDGETS  # the same model
    with pytest.raises(ConfigurationError, match=r"for 1 layer of 2 key-value heads, and this LlamaForCausalLM has 2 layers"):
        open_reader(model, written(budgets=BUDGETS[:1]))
    with pytest.raises(ConfigurationError, match=r"the fingerprint 0123, and this LlamaForCausalLM has [0-9a-f]{16}: its w"):
        open_reader(model, written(fingerprint="0123"))
    path.write_text(json.dumps({"sinklab_heads": 1, "name": "toy", "fingerprint": "", "source": "", "budgets": [[[1]]]}))
    with pytest.raises(InputError, match=r"heads\.json is no head map: budgets\.0\.0\.1: field required"):
        PerHead(heads=str(path))
    path.write_text(json.dumps({"sinklab_heads": 2}))
    with pytest.raises(InputError, match=r"is no head map: sinklab_heads: input should be less than or equal to 1"):
        PerHead(heads=str(path))
    with pytest.raises(InputError, match=r"there is no head map .*nowhere"):
        PerHead(heads=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="leave one out"):
        PerHead(heads=str(path), budgets=BUDGETS)
    with pytest.raises(ConfigurationError, match="needs a budget for every head"):
        PerHead()
    with pytest.raises(ConfigurationError, match="window 0 must be 1 or more"):
        PerHead(budgets=(((1, 0),),))


def test_what_cannot_be_computed_by_groups(model):
    with pytest.raises(ConfigurationError, match="output_attentions cannot be had under policy 'per_head'"):
        model(input_ids=text(), past_key_values=PerHeadCache(POLICY, model), output_attentions=True)
    with pytest.raises(ConfigurationError, match="outside of its model's forward"):
        built()(input_ids=text(), past_key_values=PerHeadCache(POLICY, model))
    with (
        pytest.raises(UnsupportedModelError, match=r"an attend\(\) on this model is open"),
        torch.no_grad(),
        attend(model, probes=[Entropy(sink_position=0)]),
    ):
        model(input_ids=text(), past_key_values=PerHeadCache(POLICY, model))
    oss = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**grouped(), head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=None)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="has learned sink logits, and policy 'per_head' computes some heads"):
        verify_groups(oss)
    gated = SinkLM(SinkLMConfig(**grouped(head_dim=8), operation={"name": "gated"})).eval()
    with pytest.raises(UnsupportedModelError, match="has an operation with parameters of each head"):
        verify_groups(gated)
    biased = SinkLM(SinkLMConfig(**grouped(head_dim=8), position={"name": "alibi"})).eval()
    with pytest.raises(UnsupportedModelError, match="adds a bias that counts the keys between key and query"):
        PerHeadCache(POLICY, biased)
