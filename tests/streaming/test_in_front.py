"""Learned tokens in front stay in a bounded cache, and the tokens of a prefix see each other both ways, as in training."""

from __future__ import annotations

import pytest
import torch
from tests.architectures.zoo import enliven, shape
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, gap, read, slow_logits, small, text

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.blocks import Blocks
from sinklab.policies.per_head import PerHead
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.strided import Strided
from sinklab.policies.window import Window
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.per_head import PerHeadCache
from sinklab.streaming.stream import Stream

FRONT, PREFIX, LENGTH = 3, 5, 40
KINDS = {
    "in front": {"operation": {"name": "sink_token", "count": FRONT}},
    "prefix": {"prefix": PREFIX, "operation": {"name": "softmax"}},
    "both": {"prefix": PREFIX, "operation": {"name": "sink_token", "count": FRONT}},
    "in front, no positions": {"operation": {"name": "sink_token", "count": FRONT}, "position": {"name": "no_position"}},
    "in front, alibi": {"operation": {"name": "sink_token", "count": FRONT}, "position": {"name": "alibi"}},
    "both, alibi": {
        "prefix": PREFIX,
        "operation": {"name": "sink_token", "count": FRONT},
        "position": {"name": "alibi"},
    },
}
GREEDY = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models():
    return {kind: build(fields) for kind, fields in KINDS.items()}


def build(fields) -> SinkLM:
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**shape(head_dim=8), **fields)).eval()
    enliven(model, seed=7)
    with torch.no_grad():  # of the size of other embeddings, so that a learned token that is lost shows
        if model.tokens_in_front:
            model.front_tokens.weight.copy_(
                torch.randn(model.front_tokens.weight.shape, generator=torch.Generator().manual_seed(1))
            )
    return model


def pieces_of(model, length=LENGTH) -> list[int]:
    """Token by token, as far as the prefix lets one."""
    first = max(1, model.config.prefix_length)
    return [first, *[1] * (length - first)]


@pytest.mark.parametrize("kind", KINDS)
def test_as_published(models, kind):
    """The slow rule keeps the learned tokens with the sinks; at once, in chunks and token by token it is the same."""
    model, tokens = models[kind], text(LENGTH)
    published = slow_logits(model, tokens, SINKS, WINDOW, front=model.tokens_in_front, first=max(1, model.config.prefix_length))
    assert gap(read(model, tokens, small(model), pieces=pieces_of(model)), published) < TOLERANCE
    assert gap(read(model, tokens, small(model)), published) < TOLERANCE
    assert gap(read(model, tokens, small(model), pieces=[19, 1, 1, 7, 12]), published) < TOLERANCE
    room = SINKS + WINDOW + 1 + model.tokens_in_front
    tight = small(model, chunk=4, rebase_at=room + 4)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 3 or tight.table.in_order
    # Without the learned tokens, or the prefix, it would be something else.
    if model.tokens_in_front:
        other = slow_logits(model, tokens, SINKS, WINDOW, front=0, first=max(1, model.config.prefix_length))
        assert gap(other, published) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_dense_before_it_is_full(models, kind):
    model, tokens = models[kind], text(SINKS + WINDOW + 1)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    assert gap(read(model, tokens, small(model)), dense) < TOLERANCE
    assert gap(read(model, tokens, small(model), pieces=pieces_of(model, SINKS + WINDOW + 1)), dense) < TOLERANCE


POLICIES = (
    SinkWindow(num_sinks=SINKS, window=WINDOW, positions="original"),
    Pinned(pinned=(1, 7), window=WINDOW, positions="original"),
    Strided(num_sinks=1, dense=4, span=12, stride=4),
    Window(window=WINDOW, positions="original"),
    Blocks(num_sinks=SINKS, block=4, blocks=3, positions="original"),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", ["in front", "prefix", "both"])
def test_original_positions_are_a_mask(models, kind, policy):
    """The model without a cache, under the mask that the policy is, the learned tokens seen by all."""
    model, tokens = models[kind], text(LENGTH)
    index = torch.arange(LENGTH)
    mask = policy.visible(index[:, None], index)
    inside = index < model.config.prefix_length
    mask |= inside[:, None] & inside
    with torch.no_grad():
        masked = model(input_ids=tokens, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    for pieces in (None, pieces_of(model), [11, 1, 28]):
        assert gap(read(model, tokens, PolicyCache(policy, model, chunk=6), pieces=pieces), masked) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_row_is_the_row_alone(models, kind):
    model, rows = models[kind], [text(length, rows=1, seed=length)[0] for length in (30, 21, 6)]
    tokens, mask = torch.zeros(3, 30, dtype=torch.long), torch.zeros(3, 30, dtype=torch.long)
    for row, ids in enumerate(rows):
        tokens[row, 30 - len(ids) :], mask[row, 30 - len(ids) :] = ids, 1
    more = text(9, rows=3, seed=5)
    if kind.endswith("alibi"):
        with pytest.raises(ConfigurationError, match="learned tokens in front and a bias that counts keys"):
            model(input_ids=tokens, attention_mask=mask, past_key_values=small(model), use_cache=True)
        return
    for chunk in (4, 128):
        cache = small(model, chunk=chunk)
        first = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        second = model(input_ids=more, past_key_values=cache, use_cache=True).logits
        for row, ids in enumerate(rows):
            alone = read(model, torch.cat((ids, more[row]))[None], small(model))[0]
            assert gap(first[row, 30 - len(ids) :], alone[: len(ids)]) < TOLERANCE
            assert gap(second[row], alone[len(ids) :]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_generate_and_stream(models, kind):
    """Greedy tokens are those of the slow rule; a second call reads what is new, whatever stands in front."""
    model, prompt, cache = models[kind], text(20), small()
    found = model.generate(prompt, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == found.shape[1] - 1
    settings = {"front": model.tokens_in_front, "first": max(1, model.config.prefix_length)}
    said = slow_logits(model, found[:, :-1], SINKS, WINDOW, **settings)[:, -15:].argmax(dim=-1)
    assert (said == found[:, -15:]).all()
    again = model.generate(torch.cat((found, text(4, seed=9)), dim=1), past_key_values=cache, **GREEDY)
    said = slow_logits(model, again[:, :-1], SINKS, WINDOW, **settings)[:, -15:].argmax(dim=-1)
    assert (said == again[:, -15:]).all()
    policy = SinkWindow(num_sinks=SINKS, window=WINDOW)
    source = Stream(model, policy=policy, stop_ids=(), chunk=3).feed(prompt[0])
    assert source.position == 20
    assert [token.id for token in source.generate(15)] == found[0, -15:].tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["both", "both, alibi"])
def test_taken_back_and_reset(models, kind):
    model, tokens, cache = models[kind], text(11), small(models[kind])
    read(model, tokens, cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 8
    more = text(20, seed=4)
    expected = read(model, torch.cat((tokens[:, :8], more), dim=1), small(model))[:, 8:]
    assert gap(read(model, more, cache), expected) < TOLERANCE
    cache.reset()
    assert cache.get_seq_length() == 0
    assert gap(read(model, tokens, cache), read(model, tokens, small(model))) == 0


def test_what_is_held(models):
    model, cache = models["in front"], small(models["in front"])
    read(model, text(30, rows=1), cache)
    described = cache.describe()
    learned = described[described["token"] < FRONT]
    assert learned["pinned"].all()
    assert learned["id"].isna().all()
    assert described["pinned"].sum() == FRONT + SINKS
    # In the cache: the learned tokens, the sinks and the window, one behind the other, next to the token to come.
    distances = sorted(described["distance"].dropna().astype(int))
    assert distances == list(range(1, FRONT + SINKS + WINDOW + 1))
    telemetry = cache.telemetry()
    assert telemetry.capacity == FRONT + SINKS + WINDOW + 1
    assert telemetry.evicted == (30 - SINKS - WINDOW - 1,)


def test_saved(models, tmp_path):
    model = models["both"]
    source = Stream(model, policy=SinkWindow(num_sinks=SINKS, window=WINDOW), stop_ids=()).feed(text(20)[0])
    source.generate(5)
    source.save(tmp_path / "state.safetensors")
    again = Stream.load(tmp_path / "state.safetensors", model)
    assert again.generate(20) == source.generate(20)


def test_refused(models):
    with pytest.raises(ConfigurationError, match="first 5 tokens of a text see each other both ways, and the cache is given 4"):
        read(models["prefix"], text(4), small(models["prefix"]))
    with pytest.raises(ConfigurationError, match=r"the first 5 tokens see each other both ways, and policy 1\+3 holds 5 with"):
        SinkCache(models["prefix"], num_sinks=1, window=3)
    SinkCache(models["prefix"], num_sinks=1, window=4)
    for kind, said in (("in front", "puts learned tokens in front"), ("prefix", "has a prefix of tokens")):
        with pytest.raises(UnsupportedModelError, match=f"{said}.*'per_head', under which heads hold tokens of their own"):
            PerHeadCache(PerHead(budgets=(((1, 9), (1, 4)),) * 2), models[kind])
    windowed = build({"window": 14, **KINDS["in front"]})
    with pytest.raises(UnsupportedModelError, match="layers that see 14 tokens; the policy holds 15"):
        small(windowed)
    tokens = text(LENGTH)
    policy = SinkWindow(num_sinks=SINKS, window=WINDOW - 1)
    expected = slow_logits(windowed, tokens, SINKS, WINDOW - 1, front=FRONT)
    assert gap(read(windowed, tokens, PolicyCache(policy, windowed)), expected) < TOLERANCE
