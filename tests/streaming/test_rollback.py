"""Taking tokens back: exactly, as far as what left the window since is held; assisted decoding says what decoding says."""

import random

import pytest
import torch
import transformers
from tests.architectures.zoo import VOCAB
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    build_decoder,
    build_in_front,
    decoder,
    gap,
    one_by_one,
    read,
    slow_logits,
    text,
)

from sinklab.errors import ConfigurationError
from sinklab.policies.blocks import Blocks
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.state import load_state, save_state

BACK = 5
POLICIES = (
    SinkWindow(num_sinks=SINKS, window=WINDOW),
    SinkWindow(num_sinks=SINKS, window=WINDOW, positions="original"),
    Pinned(pinned=(0, 7), window=WINDOW),
    Window(window=WINDOW),
)
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def small(model=None, **settings) -> SinkCache:
    return SinkCache(model, num_sinks=SINKS, window=WINDOW, rollback=BACK, **settings)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_oss"])
def test_what_is_held_besides_is_seen_by_nobody(family):
    model, tokens = decoder(family, "eager"), text(40)
    published = slow_logits(model, tokens, SINKS, WINDOW)
    assert gap(one_by_one(model, tokens, small(model)), published) < TOLERANCE
    assert gap(read(model, tokens, small(model), pieces=[19, 1, 1, 7, 12]), published) < TOLERANCE
    tight = small(model, chunk=5, rebase_at=SINKS + WINDOW + BACK + 6)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 2


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_taken_back_is_as_if_it_had_never_been(policy):
    """Tokens come in calls of any size and up to five leave again, also across a change of positions."""
    model, chance = decoder("llama"), random.Random(0)
    for rebase_at in (None, policy.num_slots + BACK + 9):
        cache, kept, logits = (
            PolicyCache(policy, model, rollback=BACK, rebase_at=rebase_at, chunk=8),
            text(0),
            torch.empty(2, 0, VOCAB),
        )
        for turn in range(24):
            more = text(chance.choice((1, 1, 2, 6, 13)), seed=turn)
            logits = torch.cat((logits, read(model, more, cache)), dim=1)
            kept = torch.cat((kept, more), dim=1)
            back = chance.randrange(min(BACK, more.shape[1]) + 1)  # as candidates that were wrong
            cache.crop(-back)
            kept, logits = (held[:, : held.shape[1] - back] for held in (kept, logits))
            assert cache.get_seq_length() == kept.shape[1]
        assert gap(logits, read(model, kept, PolicyCache(policy, model))) < TOLERANCE
        assert rebase_at is None or cache.table.rebases >= 2


def test_beyond_what_is_held():
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(30), cache)
    with pytest.raises(ConfigurationError, match=r"cannot go back to 24 tokens: 1 of the 12 .* with a `rollback` of as many"):
        cache.crop(-6)
    cache.crop(-5)
    with pytest.raises(ConfigurationError, match="cannot go back to 24 tokens"):
        cache.crop(-1)  # those that would be needed went before the five
    read(model, text(6), cache)
    cache.crop(-5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SinkCache(rollback=-1), "`rollback` -1 must be 0 or more"),
        (lambda: SinkCache(rollback=3, quantized="int8"), "`rollback` takes tokens back, and what `quantized` 'int8'"),
        (
            lambda: PolicyCache(Blocks(num_sinks=1, block=4, blocks=3), decoder("llama"), rollback=2),
            "policy 'blocks' has none; use sink_window, pinned or window",
        ),
    ],
)
def test_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def padded(tokens: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row alone with padding in front, as of ``pad_to_multiple_of``, and its mask."""
    return torch.nn.functional.pad(tokens, (columns, 0)), torch.nn.functional.pad(torch.ones_like(tokens), (columns, 0))


@pytest.mark.parametrize("back", [1, 3, BACK])
def test_taken_back_of_a_row_with_padding_in_front(back):
    """Padding is counted in columns and is no token."""
    model, length = decoder("llama", "eager"), 30
    tokens, mask = padded(text(length, rows=1), 3)
    cache = small(model)
    read(model, tokens, cache, attention_mask=mask)
    cache.crop(-back)
    assert cache.get_seq_length() == length + 3 - back
    assert cache.telemetry().seen == (length - back,)
    whole = torch.cat((text(length, rows=1)[:, : length - back], text(6, rows=1, seed=4)), dim=1)
    expected = read(model, whole, SinkCache(model, num_sinks=SINKS, window=WINDOW))
    assert gap(read(model, whole[:, -6:], cache), expected[:, -6:]) < TOLERANCE


def test_taken_back_of_a_row_with_padding_behind():
    model, cache = decoder("llama"), small(decoder("llama"))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    read(model, text(8, rows=1), cache, attention_mask=mask)
    with pytest.raises(ConfigurationError, match="cannot go back to 6 columns: there is padding behind them"):
        cache.crop(-2)
    cache.crop(-8)
    assert gap(read(model, text(9, rows=1), cache), read(model, text(9, rows=1))) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gptj", "codegen"])
@pytest.mark.parametrize("keep", [0, 1, SINKS])
def test_back_to_the_sinks_once_positions_were_counted_anew(family, keep):
    """No position is below 0, where tables of some models have none, or that of their last."""
    model, tokens = decoder(family, "eager"), text(50)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=5, rebase_at=20)
    read(model, tokens, cache)
    assert cache.table.rebases >= 1
    cache.crop(keep - 50)
    assert bool((cache.describe()["position"] >= 0).all())
    whole = torch.cat((tokens[:, :keep], text(30, seed=4)), dim=1)
    assert gap(read(model, whole[:, keep:], cache), slow_logits(model, whole, SINKS, WINDOW)[:, keep:]) < TOLERANCE


# --- assisted decoding -------------------------------------------------------------------------------------------------------


def prompt() -> torch.Tensor:
    """Longer than the cache, and with repetitions, in which a look-up finds candidates."""
    return torch.cat((text(9, rows=1), text(4, rows=1, seed=1), text(9, rows=1)), dim=1)


@pytest.mark.parametrize("kind", ["look-up", "same", "other"])
@pytest.mark.parametrize("family", ["llama", "in front"])
def test_assisted_decoding_says_what_decoding_says(family, kind):
    """Candidates from the text, from the model with all keys, of which most are right, and from another model: few are."""
    model = decoder("llama") if family == "llama" else build_in_front("in front")
    assistant = decoder("llama") if kind == "same" else build_decoder("llama", num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = BACK
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    extra = {"prompt_lookup_num_tokens": BACK} if kind == "look-up" else {"assistant_model": assistant}
    expected = model.generate(prompt(), past_key_values=SinkCache(num_sinks=SINKS, window=WINDOW), **GREEDY)
    cache, forwards, back = small(), [], []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    crop, cache.crop = cache.crop, lambda count: (back.append(int(count)), crop(count))
    try:
        found = model.generate(prompt(), past_key_values=cache, **GREEDY, **extra)
    except RuntimeError as error:  # of the assistant, once all its candidates were right; so it is with growing caches
        if "tensor of 0 elements" not in str(error):
            raise
        pytest.skip(f"the assistant of transformers {transformers.__version__} is given no token: {error}")
    finally:
        hook.remove()
    assert (found == expected).all()
    assert min(back) < 0  # some candidates were wrong
    assert cache.get_seq_length() == found.shape[1] - 1
    if family == "llama" and kind != "other":
        assert len(forwards) < 40 or kind == "same"  # and some were right (the assistant's forwards are counted too)


def test_candidates_that_are_more_than_can_be_taken_back():
    model = decoder("llama")
    with pytest.raises(ConfigurationError, match=r"cannot go back .*`rollback`"):
        model.generate(prompt(), past_key_values=small(), prompt_lookup_num_tokens=BACK + 6, **GREEDY)


# --- saved -------------------------------------------------------------------------------------------------------------------


def test_a_state_has_what_can_be_taken_back(tmp_path):
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(30), cache)
    save_state(cache, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model).cache
    assert again.rollback == BACK
    for one in (cache, again):
        one.crop(-BACK)
    assert gap(read(model, text(9, seed=2), cache), read(model, text(9, seed=2), again)) == 0
