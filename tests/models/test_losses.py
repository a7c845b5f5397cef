"""What a loss is taken of: which tokens are hidden, which model has which loss, and what is refused."""

import math

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from sinklab.errors import ConfigurationError
from sinklab.models.losses import (
    IGNORED,
    ON_A_CPU,
    FewWords,
    cross_entropies,
    guess_warning,
    hide_tokens,
    loss_kind,
    without_logits,
)

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}


def test_hidden_tokens_are_the_targets_and_nothing_else_is():
    tokens = torch.arange(8 * 42).view(8, 42) % 20 + 5
    tokens[:, 0], tokens[:, -1] = 0, 1
    free = tokens > 4
    hidden, targets = hide_tokens(tokens, free, 3, seed=7)
    at = targets != IGNORED
    assert at.sum(1).tolist() == [6] * 8  # 15 % of 40
    assert bool((hidden[at] == 3).all())
    assert torch.equal(targets[at], tokens[at])
    assert torch.equal(hidden[~at], tokens[~at])
    assert not at[:, [0, -1]].any()
    assert torch.equal(hidden, hide_tokens(tokens, free, 3, seed=7)[0])
    assert not torch.equal(hidden, hide_tokens(tokens, free, 3, seed=8)[0])


def test_every_token_is_hidden_about_as_often_as_any_other():
    tokens = torch.full((4000, 10), 7)
    _, targets = hide_tokens(tokens, torch.ones_like(tokens, dtype=torch.bool), 3, share=0.3, seed=0)
    share = (targets != IGNORED).float().mean(0)
    assert torch.allclose(share, torch.tensor(0.3), atol=4.5 * (0.3 * 0.7 / 4000) ** 0.5)  # 4.5 standard errors, ten positions


def test_a_sample_with_few_free_tokens_gives_one_and_one_with_none_gives_none():
    tokens = torch.tensor([[0, 9, 1], [0, 1, 1]])
    hidden, targets = hide_tokens(tokens, tokens > 4, 3)
    assert hidden.tolist() == [[0, 3, 1], [0, 1, 1]]
    assert targets.tolist() == [[IGNORED, 9, IGNORED], [IGNORED] * 3]
    with pytest.raises(ConfigurationError, match="none that could be hidden"):
        hide_tokens(tokens[1:], tokens[1:] > 4, 3)
    with pytest.raises(ConfigurationError, match=r"above 0 and at most 1, got 0"):
        hide_tokens(tokens, tokens > 4, 3, share=0)


@pytest.mark.parametrize(
    ("cls", "config", "kind"),
    [
        ("BertForMaskedLM", transformers.BertConfig(**TINY), "masked token"),
        ("BertModel", transformers.BertConfig(**TINY), None),
        ("BertForSequenceClassification", transformers.BertConfig(**TINY), "class"),
        ("ElectraForPreTraining", transformers.ElectraConfig(**TINY, embedding_size=16), None),
        ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32), "next token"),
        (
            "T5ForConditionalGeneration",
            transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32),
            "target token",
        ),
        ("T5Model", transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32), None),
    ],
)
def test_which_loss_a_model_has(cls, config, kind):
    assert loss_kind(getattr(transformers, cls)(config)) == kind


def test_a_loss_above_that_of_a_guess_is_said():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    assert guess_warning(model, math.log(32) - 0.01) == guess_warning(model, None) == ""
    assert guess_warning(model, math.log(32) + 0.01).startswith(
        "A loss of 3.476 nats is above that of a guess among all 32 tokens, 3.466: the model was not trained on such text, or"
    )
    pictures = transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, image_size=8, patch_size=4))
    assert guess_warning(pictures, 99.0) == ""  # a class is no token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("most", [1, 40, 150, 300, 10**6])
def test_losses_are_taken_a_part_at_a_time(dtype, most, monkeypatch):
    """Of some samples, of some tokens of one, or of a single token: the same bits as of all at once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, 16, generator=generator).to(dtype)[:, :-1]  # as for next tokens: a part of each sample
    targets = torch.randint(16, (5, 7), generator=generator)
    targets[1, 2] = targets[4] = IGNORED
    monkeypatch.setattr("sinklab.models.losses.ON_A_CPU", most)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    whole = -wide.log_softmax(-1).gather(2, targets.clamp_min(0)[..., None])[..., 0].masked_fill(targets == IGNORED, 0.0)
    assert torch.equal(cross_entropies(logits, targets), whole)
    assert torch.equal(cross_entropies(wide.requires_grad_(), targets).detach(), whole)


def test_no_copy_of_all_logits_is_made():
    """Peak of what torch allocates while a loss is taken: less than one more set of logits."""
    logits, targets = torch.zeros(4, 64, 8192), torch.zeros(4, 64, dtype=torch.int64)  # 8 MiB in four samples of 2 MiB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        cross_entropies(logits, targets)
    sizes = [event.cpu_memory_usage for event in seen.events()]
    assert max(sizes) <= 2 * 4 * ON_A_CPU


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (5, 32), (2**9, 5)])
def test_losses_of_hidden_states_are_those_of_their_logits(rows, columns, monkeypatch):
    """A tile at a time, also by the few words that matter: those of the model as it is; a cap behind the head is noticed."""
    for name, value in {"MANY_WORDS": 2, "TILE": rows * columns, "COLUMNS": columns, "LEAST_SHARE": 0.1}.items():
        monkeypatch.setattr(f"sinklab.models.losses.{name}", value)
    settings = {**TINY, "initializer_range": 0.5}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(32))
    tokens, targets = torch.randint(2, 32, (2, 4, 9))
    targets[1, 3] = IGNORED
    with torch.no_grad():
        logits = model(tokens).logits
        with without_logits(model) as head:
            states = model(tokens).logits
        few, words = FewWords(head, states, targets), torch.zeros(36, dtype=torch.int64)
        for by in (head, few):  # some roundings of logits up to 16, whose unit in the last place is 1e-6
            assert torch.allclose(cross_entropies(states, targets, by), cross_entropies(logits, targets), rtol=0, atol=2e-5)
        head.log_sum_exp(states.flatten(0, 1), words)
    assert torch.equal(words.view(4, 9), logits.argmax(-1))
    assert 0 < len(few.few.weight) < 32
    with without_logits(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings, head_dim=8))) as none:
        assert none is None
