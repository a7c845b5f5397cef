"""Attention functions that take no mask: no forward gives them one, and the logits are the same; sdpa gets none at a token."""

import pytest
import torch
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    build_decoder,
    build_in_front,
    gap,
    read,
    slow_logits,
    small,
    text,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.errors import UnsupportedModelError
from sinklab.policies.blocks import Blocks
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.stream import Stream


class Flash:
    """Causal attention as flash attention has it: queries are the last of the keys, and there is no mask."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
        assert attention_mask is None
        self.lengths.append(query.shape[2])
        assert sliding_window is None or key.shape[2] <= sliding_window  # or it would hide the sinks
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        new, held = query.shape[2], key.shape[2]
        seen = torch.ones(new, held, dtype=torch.bool).tril(held - new)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch):
    function = Flash()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", function)
    return function


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_the_first_tokens_at_once_and_then_one_by_one(family, flash):
    model, tokens = build_decoder(family), text(40)
    published = slow_logits(model, tokens, SINKS, WINDOW)
    cache = small(model)
    model.config._attn_implementation = "flash_attention_2"
    assert gap(read(model, tokens, cache), published) < TOLERANCE
    assert set(flash.lengths) == {1, SINKS + WINDOW + 1}
    for pieces in ([1] * 40, [5, 20, 1, 14], [40]):
        cache.reset()
        assert gap(read(model, tokens, cache, pieces=pieces), published) < TOLERANCE
    tight = small(model, chunk=4, rebase_at=SINKS + WINDOW + 5)
    assert gap(read(model, tokens, tight), published) < TOLERANCE


@pytest.mark.parametrize(
    "policy", [Window(window=WINDOW), Pinned(pinned=(0, 7), window=WINDOW)], ids=lambda policy: policy.name
)
def test_other_policies(policy, flash):
    model, tokens = build_decoder("llama"), text(40)
    expected = read(model, tokens, PolicyCache(policy, model))
    cache = PolicyCache(policy, model)
    model.config._attn_implementation = "flash_attention_2"
    assert gap(read(model, tokens, cache), expected) < TOLERANCE


def test_streams_and_generates(flash):
    model, prompt = build_decoder("llama"), text(20, rows=1)
    policy = SinkWindow(num_sinks=SINKS, window=WINDOW)
    settings = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, past_key_values=small(model), **settings)
    source = Stream(model, policy=policy, stop_ids=())
    model.config._attn_implementation = "flash_attention_2"
    assert (model.generate(prompt, past_key_values=small(model), **settings) == found).all()
    assert [token.id for token in source.feed(prompt[0]).generate(15)] == found[0, -15:].tolist()
    assert flash.lengths


@torch.no_grad()
def test_what_needs_a_mask_is_refused(flash):
    model, tokens = build_decoder("llama"), text(9)
    caches = small(model), small(model, rollback=2), PolicyCache(Pinned(pinned=(0, 7), window=WINDOW), model)
    model.config._attn_implementation = "flash_attention_2"
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    with pytest.raises(UnsupportedModelError, match="takes no 4-D mask, which a padded batch needs"):
        model(input_ids=tokens, attention_mask=mask, past_key_values=caches[0], use_cache=True)
    with pytest.raises(UnsupportedModelError, match="takes no 4-D mask, which `rollback` needs"):
        read(model, tokens, caches[1])
    with pytest.raises(UnsupportedModelError, match=r"which policy \{0, 7\}\+9 needs while it holds no token in some slots"):
        read(model, tokens, caches[2], pieces=[3, 1, 5])  # the slot of token 7 is empty
    assert caches[2].get_seq_length() == 3
    model.config._attn_implementation = "eager"  # and it goes on as if the tokens had not been given
    rest, whole = read(model, tokens[:, 3:], caches[2]), read(model, tokens, PolicyCache(caches[2].policy, model))
    torch.testing.assert_close(rest, whole[:, 3:])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="takes no 4-D mask, which policy 'blocks' needs"):
        read(model, tokens, PolicyCache(Blocks(num_sinks=1, block=4), model))  # a block that has left is still in its slots
    own = build_in_front.__wrapped__("prefix")  # one of its own, which is changed
    cache = small(own)
    own.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="takes no 4-D mask, which a prefix needs"):
        read(own, tokens, cache)


@pytest.mark.parametrize(
    "policy", [SinkWindow(num_sinks=SINKS, window=WINDOW), Window(window=WINDOW)], ids=lambda policy: policy.name
)
def test_sdpa_gets_no_mask_at_a_token(policy, monkeypatch):
    masks = []

    def spy(module, query, key, value, attention_mask, **arguments):
        masks.append(attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spy)
    model = build_decoder("llama")
    read(model, text(40), PolicyCache(policy, model), pieces=[1] * 40)
    assert len(masks) >= 40 * model.config.num_hidden_layers
    assert all(mask is None for mask in masks[-40 * model.config.num_hidden_layers :])
