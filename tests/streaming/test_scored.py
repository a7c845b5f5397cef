"""Scored caches: every head holds what its scores say, and the outputs are those of a dense forward that sees just that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from tests.architectures.zoo import VOCAB, enliven, grouped, shape
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.base import ScoredPolicy
from sinklab.policies.heavy_hitter import HeavyHitter
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.value_norm import ValueNorm
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.reader import open_reader
from sinklab.streaming.rotation import read_rotations
from sinklab.streaming.scored import ScoredCache

LENGTH = 30
POLICIES = (
    HeavyHitter(heavy=4, recent=3),
    HeavyHitter(heavy=5, recent=0, positions="original"),
    ValueNorm(num_sinks=2, large=3, recent=4, positions="original"),
    ValueNorm(num_sinks=0, large=3, recent=2),
    ValueNorm(num_sinks=1, large=3, recent=2, attended=True),
)

TOLERANCE = 1e-4
"""float32: sums of some tens of products of size up to ten, each rounded to 2**-24, through two layers. One token more or less
in a cache of eight moves these logits by more than 0.05."""


def llama(**changes):
    return enlivened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped(**changes))))


def enlivened(model):
    enliven(model, seed=11)
    return model.eval()


def sinklm(**changes):
    return enlivened(SinkLM(SinkLMConfig(**grouped(head_dim=8, **changes))))


@pytest.fixture(scope="module")
def model():
    return llama()


def text(length: int = LENGTH, rows: int = 1, seed: int = 3) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


class Slow:
    """A dense forward whose attention function plays the eviction out, head by head, over whole rows of the score matrix.

    Attributes:
        held: layer to boolean ``(batch, kv_heads, length, length)``: the keys that each query saw.
    """

    def __init__(self, policy, rotation):
        self.policy, self.held = policy, {}
        self.rotation = rotation if policy.positions == "in_cache" else None

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        batch, heads, length, _ = query.shape
        kv_heads = key.shape[1]
        policy, outputs = self.policy, torch.zeros_like(query)
        held = torch.zeros(batch, kv_heads, length, length, dtype=torch.bool)
        for row in range(batch):
            for head in range(kv_heads):
                mine: list[int] = []
                sums: dict[int, float] = {}
                for t in range(length):
                    if len(mine) == policy.num_slots:
                        up = [k for k in mine if k <= t - policy.protected and k not in policy.pinned]
                        mine.remove(min(up, key=lambda k: (sums[k], k)))
                    mine.append(t)
                    held[row, head, t, mine] = True
                    group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
                    keys = key[row, head, mine]
                    if self.rotation is not None:  # every key to its rank among those held, and the query behind them
                        lost = torch.tensor([t - k - (len(mine) - 1 - rank) for rank, k in enumerate(mine)])
                        keys = (keys[:, None] @ self.rotation.matrices(lost, keys.dtype))[:, 0]
                    weights = torch.softmax(query[row, group, t] @ keys.T * scaling, dim=-1)
                    outputs[row, group, t] = weights @ value[row, head, mine]
                    for k, weight in zip(mine, weights.sum(0).tolist(), strict=True):
                        norm = float(value[row, head, k].abs().sum())
                        if isinstance(policy, HeavyHitter):
                            sums[k] = sums.get(k, 0.0) + weight
                        elif policy.attended:
                            sums[k] = sums.get(k, 0.0) + weight * norm
                        else:
                            sums[k] = norm
        self.held[module.layer_idx] = held
        return outputs.transpose(1, 2), None


@torch.no_grad()
def slow_logits(model, tokens: Tensor, policy, monkeypatch) -> tuple[Tensor, Slow]:
    slow = Slow(policy, read_rotations(model).layers[0])
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", slow)
        patch.setattr(model.config, "_attn_implementation", "sdpa")
        return model(input_ids=tokens, use_cache=False).logits, slow


@torch.no_grad()
def read(model, tokens: Tensor, cache, pieces=(LENGTH,), **arguments) -> Tensor:
    parts = tokens.split(list(pieces), dim=1)
    return torch.cat([model(input_ids=part, past_key_values=cache, **arguments).logits for part in parts], dim=1)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_as_a_dense_forward_that_evicts(model, policy, monkeypatch):
    tokens = text(rows=2)
    expected, slow = slow_logits(model, tokens, policy, monkeypatch)
    cache = ScoredCache(policy, model)
    for t in range(LENGTH):
        found = read(model, tokens[:, t : t + 1], cache, [1])
        torch.testing.assert_close(found[:, 0], expected[:, t], atol=TOLERANCE, rtol=0)
        for index, layer in enumerate(cache.layers):
            assert (layer.tokens >= 0).sum(dim=2).unique().tolist() == [
                min(t + 1, policy.num_slots)
            ]  # never more, and all of it
            recent = torch.arange(max(0, t - policy.recent), t + 1)
            assert bool((layer.tokens[..., None] == recent).any(dim=2).all())
            listed = torch.nn.functional.one_hot(layer.tokens.clamp(min=0), LENGTH).bool() & (layer.tokens >= 0)[..., None]
            assert torch.equal(listed.any(dim=2), slow.held[index][:, :, t])
    whole = read(model, tokens, ScoredCache(policy, model))
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)


def test_the_tests_can_tell(model):
    """One token more in the cache shows, and heads do not hold the same."""
    more, fewer = (read(model, text(), ScoredCache(HeavyHitter(heavy=heavy, recent=3), model)) for heavy in (4, 5))
    assert float((more - fewer).abs().max()) > 0.05
    cache = ScoredCache(POLICIES[0], model)
    read(model, text(), cache)
    sets = {tuple(sorted(layer.tokens[0, head].tolist())) for layer in cache.layers for head in range(2)}
    assert len(sets) > 2


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.describe())
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_backends_and_pieces(model, policy, backend):
    tokens = text()
    expected = read(model, tokens, ScoredCache(policy, model), [1] * LENGTH)
    other = llama()
    other.set_attn_implementation(backend)
    torch.testing.assert_close(read(other, tokens, ScoredCache(policy, other), [7, 1, 22]), expected, atol=TOLERANCE, rtol=0)


def test_positions_counted_anew(model):
    policy, tokens = POLICIES[2], text()
    expected = read(model, tokens, ScoredCache(policy, model))
    cache = ScoredCache(policy, model, rebase_at=policy.num_slots + 1)
    # Angles are rounded anew at each of the moves, by 2**-24 of numbers of size 10.
    torch.testing.assert_close(read(model, tokens, cache), expected, atol=TOLERANCE, rtol=0)
    assert cache.table.rebases >= 2
    assert cache.telemetry().highest_position == policy.num_slots


def test_positions_in_the_cache_end(model):
    """They are ranks: never more than there are slots, so never counted anew, and the same however far the text has come."""
    policy, tokens = POLICIES[0], text()
    cache = ScoredCache(policy, model, rebase_at=policy.num_slots + 4)
    expected = read(model, tokens, cache)
    assert cache.telemetry().highest_position == policy.num_slots - 1
    cache.rebase()
    assert cache.table.rebases == 0
    cache.reset()
    read(model, tokens, cache)
    cache.table.seen += 10**9  # a far place in the text, where tokens are written at the last position, as these were
    for layer in cache.layers:
        layer.tokens += 10**9 * (layer.tokens >= policy.num_slots - 1)
    far = read(model, tokens, cache)
    cache.reset()
    read(model, tokens, cache)
    near = read(model, tokens, cache)
    assert torch.equal(far, near)
    assert not torch.equal(near, expected)


CHUNKED = {
    "sink logits": ({"operation": {"name": "sink_logit"}}, POLICIES[0]),
    "sigmoid": ({"operation": {"name": "sigmoid", "length_bias": True}}, POLICIES[0]),
    "a null with a value": ({"operation": {"name": "value_bias"}}, POLICIES[4]),
    "gates": ({"operation": {"name": "gated"}}, POLICIES[1]),
    "signed": ({"operation": {"name": "identity"}}, POLICIES[0]),
    "mapped": ({"operation": {"name": "elu_kernel"}}, POLICIES[0]),
    "qk norm": ({"operation": {"name": "qk_norm"}}, POLICIES[1]),
    "no rotation": ({"position": {"name": "no_position"}}, POLICIES[4]),
}


@pytest.mark.parametrize(("changes", "policy"), CHUNKED.values(), ids=CHUNKED)
def test_chunks_are_tokens_one_by_one(changes, policy):
    """Head outputs of a chunk are computed here, for whatever attention: they, and who is held, are those of single tokens."""
    model, tokens = sinklm(**changes), text(rows=2)
    caches = [ScoredCache(policy, model) for _ in range(3)]
    singly = read(model, tokens, caches[0], [1] * LENGTH)
    torch.testing.assert_close(read(model, tokens, caches[1]), singly, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(read(model, tokens, caches[2], [5, 9, 1, 15]), singly, atol=TOLERANCE, rtol=0)
    tables = [cache.describe().sort_values(["layer", "row", "head", "token"]) for cache in caches]
    for table in tables[1:]:
        assert table["token"].tolist() == tables[0]["token"].tolist()
        # Scores are sums of up to 30 weights of two heads, in another order.
        assert table["score"].tolist() == pytest.approx(tables[0]["score"].tolist(), abs=1e-4, rel=1e-4)


def test_chunks_of_a_capped_model():
    """Gemma 2 caps its scores; keys of half precision are widened here and in its own function alike."""
    changes = grouped(head_dim=8, attn_logit_softcapping=2.0, sliding_window=64)
    model = enlivened(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**changes)))
    model.set_attn_implementation("eager")
    for policy in POLICIES[:2]:
        singly = read(model, text(), ScoredCache(policy, model), [1] * LENGTH)
        torch.testing.assert_close(read(model, text(), ScoredCache(policy, model)), singly, atol=TOLERANCE, rtol=0)


def test_a_chunk_is_one_forward(model):
    """Prompts are not read token by token: a prompt as long as the cache is one forward, one beyond it is two."""
    layer_calls = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: layer_calls.append(args[0].shape[1]))
    cache = ScoredCache(POLICIES[0], model)
    read(model, text(20), cache, [20])
    read(model, text(20), cache, [20])
    caches = [ScoredCache(POLICIES[0], model, chunk=7), ScoredCache(ScoresOfKeys(), model)]
    for other in caches:
        read(model, text(20), other, [20])
    handle.remove()
    assert layer_calls == [8, 12, 20, 7, 1, 7, 5, *[1] * 20]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresOfKeys(ScoredPolicy):
    """A policy that does not say how its scores grow."""

    num_slots = 8
    protected = 3

    def score(self, previous, keys, values, weights):
        return keys.float().norm(dim=-1)


def test_no_weights_of_a_chunk(model):
    with pytest.raises(ConfigurationError, match="output_attentions cannot be had of 5 tokens at once"), torch.no_grad():
        model(input_ids=text(5), past_key_values=ScoredCache(POLICIES[0], model), output_attentions=True)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.describe())
@pytest.mark.parametrize("rebase_at", [None, 12])
def test_padding(model, policy, rebase_at):
    """Padding on the left, in between and on the right: every row is as if alone."""
    tokens, mask = text(rows=3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :11] = 0
    mask[2, 7:10] = 0
    mask[2, 26:] = 0
    cache = ScoredCache(policy, model, rebase_at=rebase_at)
    with torch.no_grad():
        first = model(input_ids=tokens[:, :14], attention_mask=mask[:, :14], past_key_values=cache).logits
        second = model(input_ids=tokens[:, 14:], attention_mask=mask, past_key_values=cache).logits
    found = torch.cat((first, second), dim=1)
    for row in range(3):
        shown = mask[row].bool()
        alone = read(model, tokens[row : row + 1, shown], ScoredCache(policy, model), [int(shown.sum())])
        torch.testing.assert_close(found[row, shown], alone[0], atol=TOLERANCE, rtol=0)
    assert cache.telemetry().seen == (30, 19, 23)


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[2]], ids=lambda policy: policy.describe())
def test_generate_is_the_loop(model, policy):
    prompt, cache = text(15), ScoredCache(policy)
    made = model.generate(prompt, past_key_values=cache, max_new_tokens=9, do_sample=False, eos_token_id=None)
    reader, token, tokens = open_reader(model, policy), prompt, []
    for _ in range(9):
        token = reader.read(token, keep=1)[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(token)
    assert made[:, 15:].tolist() == torch.cat(tokens, dim=1).tolist()
    assert reader.position == cache.get_seq_length() == 23
    # Two layers, two heads, 8 or 10 slots: 8 coordinates of keys and of values, score, token, and how many are newer.
    assert reader.bytes_held() == 4 * policy.num_slots * (8 * 4 + 8 * 4 + 4 + 8 + 8)


def test_beams_and_reset(model):
    policy, tokens = POLICIES[0], text(rows=3)
    cache = ScoredCache(policy, model)
    first = read(model, tokens, cache)
    cache.reset()
    assert torch.equal(read(model, tokens, cache), first)
    cache.reset()
    read(model, tokens[:, :20], cache, [20])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    found = read(model, tokens[order][:, 20:], cache, [10])
    torch.testing.assert_close(found, first[order][:, 20:], atol=TOLERANCE, rtol=0)
    cache.reset()
    assert torch.equal(read(model, tokens[:2], cache), read(model, tokens[:2], ScoredCache(policy, model)))


def test_weights_of_other_attention():
    """Sink logits take their share; a sigmoid's weights do not sum to one; soft caps count."""
    for model in (sinklm(operation={"name": "sink_logit"}), sinklm(operation={"name": "sigmoid"})):
        policy = HeavyHitter(heavy=20, recent=20)
        cache = ScoredCache(policy, model)
        seen = []
        original = ScoredCache.on_attention

        def noted(self, native, module, *args, original=original, seen=seen, **kwargs):
            before = self.table.waiting.scores.clone()
            layer = self.table.waiting
            result = original(self, native, module, *args, **kwargs)
            seen.append((layer.scores - before).sum(dim=2))
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScoredCache, "on_attention", noted)
            read(model, text(), cache, [1] * LENGTH)
        with torch.no_grad():
            attended = model(input_ids=text(), output_attentions=True, use_cache=False).attentions
        # A row of the dense weights is what each step added, as long as nothing leaves; grouped heads are summed.
        for t in range(LENGTH):
            for index in range(2):
                expected = attended[index][0, :, t].sum(dim=-1).unflatten(0, (2, 2)).sum(dim=1)
                torch.testing.assert_close(seen[2 * t + index][0], expected, atol=1e-5, rtol=0)


def test_describe(model):
    cache = ScoredCache(POLICIES[0], model)
    assert len(cache.describe()) == 0
    read(model, text(20, rows=2), cache, [20])
    table = cache.describe()
    assert len(table) == 2 * 2 * 2 * 8
    assert table.groupby(["layer", "row", "head"])["token"].nunique().unique().tolist() == [8]
    assert table["score"].min() > 0
    telemetry = cache.telemetry()
    assert (telemetry.held, telemetry.seen, telemetry.capacity) == ((8, 8), (20, 20), 8)


def test_refusals(model):
    with pytest.raises(ConfigurationError, match="ScoredCache takes a ScoredPolicy, and policy 'sink_window' is none"):
        ScoredCache(SinkWindow(), model)
    with pytest.raises(
        ConfigurationError, match="PolicyCache takes a SlotPolicy, and policy 'heavy_hitter' is none; open_reader"
    ):
        PolicyCache(HeavyHitter(), model)
    alibi = sinklm(position={"name": "alibi"})
    with pytest.raises(UnsupportedModelError, match=r"another for every head .* 'heavy_hitter' needs rotary positions or none"):
        open_reader(alibi, POLICIES[0])
    off_seam = transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    ).eval()
    with pytest.raises(
        UnsupportedModelError, match=r"Falcon.* in its own code, where its weights cannot be seen; policy 'heavy"
    ):
        open_reader(off_seam, POLICIES[0])
    found = open_reader(off_seam, POLICIES[3]).read(text())  # which needs none
    assert found.isfinite().all()
    cache = ScoredCache(POLICIES[0], model)
    read(model, text(20), cache, [20])
    with pytest.raises(
        ConfigurationError, match="cannot go back to 19 tokens: scores of policy 'heavy_hitter' have the tokens"
    ):
        cache.crop(-1)
    cache = ScoredCache(POLICIES[0], model)
    with pytest.raises(UnsupportedModelError, match=r"its attention was not seen.* an attend\(\) on this model"), attend(model):
        read(model, text(4), cache, [4])
    cache.reset()  # and nothing is left behind
    assert torch.equal(read(model, text(), cache), read(model, text(), ScoredCache(POLICIES[0], model)))


def test_shadow_ends_with_the_forward(model):
    """Also when the forward fails half-way."""
    from sinklab.attention import seam

    cache = ScoredCache(POLICIES[0], model)
    read(model, text(3), cache, [3])
    assert seam.active_observers() == ()

    def fail(module, args):
        raise RuntimeError("half-way")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        read(model, text(1), cache, [1])
    handle.remove()
    assert seam.active_observers() == ()
    with pytest.raises(ConfigurationError, match="a forward with this cache was interrupted"):
        read(model, text(1), cache, [1])


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (HeavyHitter, {"heavy": 0}, "heavy 0 must be 1 or more; policy 'window'"),
        (HeavyHitter, {"recent": -1}, "recent -1 must be 0 or more"),
        (ValueNorm, {"num_sinks": -1}, "num_sinks -1 must be 0 or more"),
        (ValueNorm, {"large": 0}, "large 0 must be 1 or more; policy 'sink_window'"),
        (ValueNorm, {"recent": -2}, "recent -2 must be 0 or more"),
    ],
)
def test_bad_settings(policy, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        policy(**settings)


def test_value_norm_drops_a_sink_that_is_not_pinned():
    """Values of token 0 are made small, as those of sinks are: without pinning it is the first to go."""
    model = llama()
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = 0.0
    tokens = torch.cat((torch.ones(1, 1, dtype=torch.long), text()), dim=1)
    for num_sinks, stays in ((0, False), (1, True)):
        cache = ScoredCache(ValueNorm(num_sinks=num_sinks, large=4, recent=2), model)
        read(model, tokens, cache, [LENGTH + 1])
        assert bool((cache.layers[0].tokens == 0).any(dim=2).all()) == stays


@torch.no_grad()
@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_of_equal_norms_the_oldest_goes(model, kinds):
    """Tokens that come again have equal values in the first layer, whose last digits depend on how many are read at once."""
    policy = ValueNorm(num_sinks=1, large=4, recent=3)
    tokens = 5 + torch.arange(150)[None] * 7 % kinds
    values = model.model.layers[0].self_attn.v_proj(model.model.layers[0].input_layernorm(model.get_input_embeddings()(tokens)))
    norms = values.unflatten(-1, (model.config.num_key_value_heads, -1))[0].double().abs().sum(-1)
    for head, of_head in enumerate(norms.T):
        held: list[int] = []
        for token in range(tokens.shape[1]):
            if len(held) == policy.num_slots:
                held.remove(min(held[1:-3], key=lambda index: (round(float(of_head[index]), 3), index)))
            held.append(token)
        for chunk, pieces in ((1, [150]), (7, [150]), (128, [150]), (128, [13, 40, 1, 96])):
            reader = open_reader(model, policy, chunk=chunk)
            for part in tokens.split(pieces, dim=1):
                reader.read(part)
            assert sorted(reader.cache.layers[0].tokens[0, head].tolist()) == held


def test_shape_is_of_many_heads():
    """One key-value head for each query head, too."""
    model = enlivened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape())))
    cache = ScoredCache(POLICIES[0], model)
    assert read(model, text(), cache).isfinite().all()
    assert cache.layers[0].tokens.shape == (1, 4, 8)
