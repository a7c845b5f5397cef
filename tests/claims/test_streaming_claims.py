"""Claims about bounded caches, sink tokens and outliers: published numbers pass, reversed ones fail; what they measure."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.claims.made_numbers import over_seeds
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from sinklab.claims import _streaming, cliff_at_the_cache_size, stable_over_long_texts
from sinklab.claims._first_tokens import first_tokens
from sinklab.claims._streaming import draw, keep
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import tasks
from sinklab.reproduction.cells import configure
from sinklab.reproduction.claim import BASELINE
from sinklab.reproduction.scales import base_config
from sinklab.reproduction.verdict import judge
from sinklab.reproduction.work import claim_called
from sinklab.streaming.perplexity import losses
from sinklab.training.windowed import token_losses


def ppl(*values):
    """Losses in nats of perplexities."""
    return [math.log(value) for value in values]


def by_sinks(*values):
    return dict(zip(("window_0", "window_1", "window_2", "window_4"), ppl(*values), strict=True))


PLAIN = {"held_out_loss": 2.89, **by_sinks(27.87, 18.49, 18.05, 18.05)}
LEARNED = {"held_out_loss": 2.89, **by_sinks(1235, 18.01, 18.01, 18.02)}
GATED = {"held_out_loss": math.log(15.55), "max_inf_norm": 8.7, "kurtosis": 18.9, "int8_gap": math.log(16.02 / 15.55)}
OPT = {"held_out_loss": math.log(15.84), "max_inf_norm": 340, "kurtosis": 1778, "int8_gap": math.log(21.18 / 15.84)}
BERT = {"held_out_loss": math.log(4.49), "max_inf_norm": 735, "kurtosis": 3076}
WINDOW, SINKS, ANEW, DENSE = ppl(5158.07, 5.40, 5.43, 5641)

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "window_fails_sinks_restore": {
        BASELINE: {"first_attention": 0.5, "window_0": WINDOW, "window_4": SINKS, "re_computation": ANEW}
    },
    "long_streams": {
        "dense": {"loss": DENSE},
        "no sinks": {"loss": WINDOW},
        "four sinks": {"loss": SINKS, "last_loss": SINKS},
        "re-computation": {"last_loss": ANEW},
    },
    "recomputation_equals_sinks": {
        "no sinks": {"loss": WINDOW},
        "four sinks": {"loss": SINKS},
        "re-computation": {"loss": ANEW},
    },
    # Llama-2-7B.
    "number_of_sinks": {
        f"{number} sinks": {"loss": loss}
        for number, loss in zip((0, 1, 2, 4, 8), ppl(3359.95, 11.88, 10.51, 9.59, 9.54), strict=True)
    },
    "cache_size_not_monotone": {
        label: {"loss": loss}
        for label, loss in zip(("an eighth", "a quarter", "half", "the whole"), ppl(9.73, 9.32, 9.08, 9.59), strict=True)
    },
    "line_breaks_as_sinks": {
        "no sinks": {"loss": WINDOW},
        "four first tokens": {"loss": SINKS},
        "four line breaks": {"loss": math.log(5.60)},
    },
    # Not published as numbers.
    "position_inside_the_cache": {
        "inside the cache": {"loss": 1.7, "loss_within": 1.7},
        "in the text": {"loss": 8.0, "loss_within": 1.7},
    },
    "stable_over_long_texts": {"early": {"loss": 1.7}, "late": {"loss": 1.7}},
    # A line 2,300 tokens back, with caches of 2,048 and 4,096; and one 4,600 back. Chance is 0 there, 0.1 here.
    "cliff_at_the_cache_size": {
        "smaller cache": {"held by both": 0.75, "held by the larger": 0.1, "held by none": 0.1},
        "larger cache": {"held by both": 0.77, "held by the larger": 0.62, "held by none": 0.1},
    },
    "learnable_sink": {"no BOS": PLAIN, "sink token, no BOS": LEARNED},
    "one_sink_is_too_few": {"no BOS": PLAIN, "sink token, no BOS": LEARNED},
    "zero_sink": {"no BOS": PLAIN, "zero sink, no BOS": {"held_out_loss": 2.89, **by_sinks(29214, 19.90, 18.27, 18.01)}},
    "gated_cuts_outliers": {BASELINE: OPT, "gated heads": GATED},
    "int8_gap_falls": {BASELINE: OPT, "gated heads": GATED},
    # BERT-base.
    "six_bit_gap_falls": {
        BASELINE: {"w6a8_gap": math.log(598 / 4.49), "w6a6_gap": math.log(42.8 / 4.49)},
        "gated heads": {"w6a8_gap": math.log(4.79 / 4.45), "w6a6_gap": math.log(5.90 / 4.45)},
    },
    "clipped_cuts_outliers": {
        BASELINE: BERT,
        "clipped softmax, gamma -3.2/T": {"held_out_loss": math.log(4.39), "max_inf_norm": 21.5, "kurtosis": 80},
    },
    "clipped_fails_on_decoders": {
        BASELINE: OPT,
        "clipped softmax, gamma -12/T": {
            "held_out_loss": math.log(16.29), "max_inf_norm": 63.2, "kurtosis": 19728, "int8_gap": math.log(37.20 / 16.29)
        },
    },
    "gamma_sweep": {
        BASELINE: BERT,
        "clipped softmax, gamma -0.64/T": {"max_inf_norm": 407},
        "clipped softmax, gamma -1.92/T": {"max_inf_norm": 38.9},
        "clipped softmax, gamma -3.2/T": {"max_inf_norm": 21.5},
    },
    # "No help"; not published as numbers.
    "stretching_up_does_not_help": {BASELINE: BERT, "stretched softmax, zeta 1.03": BERT},
}  # fmt: skip

REVERSED: list[tuple[str, str, str, float]] = [
    ("window_fails_sinks_restore", BASELINE, "window_0", SINKS),
    ("window_fails_sinks_restore", BASELINE, "re_computation", SINKS - 1),
    ("long_streams", "dense", "loss", SINKS),
    ("long_streams", "no sinks", "loss", SINKS),
    ("long_streams", "re-computation", "last_loss", SINKS - 1),
    ("recomputation_equals_sinks", "re-computation", "loss", WINDOW),
    ("recomputation_equals_sinks", "re-computation", "loss", SINKS - 1),
    ("number_of_sinks", "0 sinks", "loss", math.log(9.59)),
    ("number_of_sinks", "8 sinks", "loss", math.log(8)),
    ("cache_size_not_monotone", "the whole", "loss", math.log(9.08)),
    ("line_breaks_as_sinks", "four line breaks", "loss", WINDOW),
    ("position_inside_the_cache", "in the text", "loss", 1.7),
    ("position_inside_the_cache", "in the text", "loss_within", 2.0),
    ("stable_over_long_texts", "late", "loss", 2.0),
    ("cliff_at_the_cache_size", "larger cache", "held by the larger", 0.1),
    ("cliff_at_the_cache_size", "smaller cache", "held by the larger", 0.5),
    ("cliff_at_the_cache_size", "larger cache", "held by none", 0.5),
    ("learnable_sink", "sink token, no BOS", "window_0", math.log(18)),
    ("learnable_sink", "sink token, no BOS", "window_1", math.log(25.73)),
    ("learnable_sink", "sink token, no BOS", "held_out_loss", 3.0),
    ("one_sink_is_too_few", "no BOS", "window_1", math.log(18.05)),
    ("one_sink_is_too_few", "sink token, no BOS", "window_1", math.log(25.73)),
    ("zero_sink", "zero sink, no BOS", "window_0", math.log(18.01)),
    ("zero_sink", "zero sink, no BOS", "held_out_loss", 3.0),
    ("gated_cuts_outliers", "gated heads", "max_inf_norm", 340),
    ("gated_cuts_outliers", "gated heads", "kurtosis", 1778),
    ("gated_cuts_outliers", "gated heads", "held_out_loss", 3.0),
    ("int8_gap_falls", "gated heads", "int8_gap", 0.29),
    ("six_bit_gap_falls", "gated heads", "w6a8_gap", 5.0),
    ("six_bit_gap_falls", "gated heads", "w6a6_gap", 5.0),
    ("clipped_cuts_outliers", "clipped softmax, gamma -3.2/T", "max_inf_norm", 735),
    ("clipped_cuts_outliers", "clipped softmax, gamma -3.2/T", "kurtosis", 3076),
    ("clipped_cuts_outliers", "clipped softmax, gamma -3.2/T", "held_out_loss", 3.0),
    ("clipped_fails_on_decoders", "clipped softmax, gamma -12/T", "kurtosis", 80),
    ("clipped_fails_on_decoders", "clipped softmax, gamma -12/T", "held_out_loss", math.log(15.84)),
    ("clipped_fails_on_decoders", "clipped softmax, gamma -12/T", "int8_gap", 0.1),
    ("gamma_sweep", "clipped softmax, gamma -3.2/T", "max_inf_norm", 1000),
    ("stretching_up_does_not_help", "stretched softmax, zeta 1.03", "max_inf_norm", 21.5),
    ("stretching_up_does_not_help", "stretched softmax, zeta 1.03", "kurtosis", 80),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    claim = claim_called(name)
    judgement = judge(claim.parts, claim.presupposes, over_seeds(PUBLISHED[name]))
    assert judgement.verdict == "reproduced", judgement


@pytest.mark.parametrize(("name", "label", "metric", "value"), REVERSED)
def test_a_reversed_part_is_no_reproduction(name, label, metric, value):
    claim, published = claim_called(name), PUBLISHED[name]
    changed = published | {label: published[label] | {metric: value}}
    assert judge(claim.parts, claim.presupposes, over_seeds(changed)).verdict == "not reproduced"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_part_has_a_reversal(name):
    claim, reached = claim_called(name), set()
    for reversed_name, label, metric, value in REVERSED:
        if reversed_name == name:
            changed = PUBLISHED[name] | {label: PUBLISHED[name][label] | {metric: value}}
            findings = judge(claim.parts, claim.presupposes, over_seeds(changed)).findings
            reached |= {finding.part for finding in findings if finding.verdict == "not reproduced"}
    assert reached == set(claim.parts)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if claim_called(name).presupposes])
def test_without_what_it_presupposes_a_claim_is_not_tested(name):
    claim = claim_called(name)
    nothing = {label: dict.fromkeys(of, 0.0) for label, of in PUBLISHED[name].items()}
    assert judge(claim.parts, claim.presupposes, over_seeds(nothing)).verdict == "not tested at this scale"


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, scale) for name in PUBLISHED if claim_called(name).variants for scale in claim_called(name).costs],
)
def test_variants_are_configurations_at_every_scale(name, scale):
    claim, base = claim_called(name), base_config(scale)
    made = {variant.label: configure(base, variant).model_dump_json() for variant in claim.variants}
    assert len(set(made.values())) == len(made), "two variants are the same run"


def test_gamma_is_a_share_of_the_length():
    for scale, context in (("tiny", 64), ("small", 256), ("60m", 2048)):
        variant = claim_called("clipped_fails_on_decoders").variants[1]
        assert configure(base_config(scale), variant).model.operation["gamma"] == -12 / context


# --- texts that a trained model reads -----------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(_streaming, "NUMBER", {"tiny": 2})


def test_a_seed_is_a_draw_of_texts_that_start_with_bos(few):
    texts, again, others = draw(0, "tiny"), draw(0, "tiny"), draw(1, "tiny")
    assert (texts.rows.shape, texts.trained, texts.budget) == ((2, 1024), 256, 64)
    assert torch.equal(texts.rows, again.rows)
    assert not torch.equal(texts.rows, others.rows)
    assert set(texts.rows[:, 0].tolist()) == {texts.bos}


def test_recomputation_is_that_of_the_policy(few):
    texts = draw(0, "tiny")
    rows = texts.rows[:, -8 - texts.budget - 1 :]
    expected = losses(texts.loaded.model, rows, {"name": "recompute", "window": texts.budget}, first=texts.budget + 1)
    # Float32 losses of order 1 to 10 after the same products in another order.
    assert torch.allclose(texts.recomputed(with_bos=False)[:, -8:], expected, atol=1e-3)
    window = texts.rows[1, -texts.budget - 2 :].clone()
    window[0] = texts.bos
    with torch.no_grad():
        alone = token_losses(texts.loaded.model, window[None], after=texts.budget)
    assert texts.recomputed(with_bos=True)[1, -1].item() == pytest.approx(alone.item(), abs=1e-3)


def test_texts_are_read_in_parts_alike(few, monkeypatch):
    texts = draw(0, "tiny")
    whole = texts.losses(keep(4, 64))
    monkeypatch.setattr(_streaming, "TOKENS_AT_ONCE", 1024)
    assert whole.shape == (2, 512)
    assert torch.allclose(texts.losses(keep(4, 64)), whole, atol=1e-3)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A random model of another architecture, the one of the larger scales, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("neox")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=2048, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    _streaming.opened("embedded:softmax").encoder.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if claim_called(name).measure and "cliff" not in name])
def test_what_is_measured_is_what_is_judged(foreign, monkeypatch, name):
    monkeypatch.setattr(_streaming, "MODELS", {"1b": foreign})
    monkeypatch.setattr(_streaming, "NUMBER", {"1b": 4})
    claim = claim_called(name)
    numbers = claim.measure(0, "1b")
    for part in claim.parts + claim.presupposes:
        assert all(math.isfinite(numbers[label][metric]) for label, metric in part.effect.needs())


def test_early_and_late_are_the_same_tokens(monkeypatch):
    """With the token itself for its loss, and no two texts alike, the means agree only if the tokens do."""
    rows = torch.arange(10)[:, None] * 1000 + torch.arange(256)
    texts = SimpleNamespace(rows=rows, bos=0, budget=16)
    texts.losses = lambda policy, rows, first: rows[:, first:].float()
    monkeypatch.setattr(stable_over_long_texts, "draw", lambda seed, scale: texts)
    numbers = stable_over_long_texts.measure(0, "tiny")
    assert numbers["early"] == numbers["late"]


def test_no_line_lies_where_a_cache_holds_a_part_of_it():
    loaded = _streaming.opened("embedded:softmax")
    task = tasks.make({"name": "line_lookup", "back": cliff_at_the_cache_size.LINES, "shares": ()})
    found = {
        question.distance
        for sheet in task.sheets(loaded.encoder, budget=160, rows=1, seed=0, bos=True)
        for question in sheet.questions
        if question.start > 160
    }
    assert found == {72, 122, 147, 222, 272}
    for size in cliff_at_the_cache_size.CACHES.values():
        assert not any(size < distance <= size + 25 for distance in found)


# --- what is read from trained models -----------------------------------------------------------------------------------------


def trained_like(bos="none", **fields):
    """What the read-out asks of a trained model, with random weights and random rows of 64 tokens behind token 1."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = SinkLM(SinkLMConfig(**shape, max_position_embeddings=64, initializer_range=0.5, **fields)).eval()
    rows = torch.randint(2, 40, (128, 64), generator=torch.Generator().manual_seed(1))
    rows[:, 0] = 1
    return SimpleNamespace(
        config=SimpleNamespace(model=model.config, data=SimpleNamespace(bos=bos)),
        loaded=SimpleNamespace(model=model),
        rows=lambda samples, length: rows[:samples, :length],
    )


def test_a_window_in_one_layer_is_that_of_the_architecture_and_that_encoded_anew():
    """One layer's keys know their own token alone and rotary scores know distances, so it is the same whatever came before."""
    numbers = first_tokens(trained_like())
    windowed = trained_like(window=16)
    with torch.no_grad():
        expected = token_losses(windowed.loaded.model, windowed.rows(128, 64), after=16)[:, ::2]
    # Float32 losses of order 5, means of 3,072 of them in float64.
    assert numbers["window_0"] == pytest.approx(expected.double().mean().item(), abs=1e-5)
    assert numbers["re_computation"] == pytest.approx(numbers["window_0"], abs=1e-5)
    assert len({round(number, 6) for name, number in numbers.items() if name != "re_computation"}) == 4


def test_windows_encoded_anew_start_with_bos_where_rows_do():
    trained = trained_like(bos="rows")
    rows, total, count = trained.rows(128, 64), 0.0, 0
    with torch.no_grad():
        for target in range(17, 64, 2):
            window = torch.cat((rows[:, :1], rows[:, target - 15 : target + 1]), dim=1)
            total += token_losses(trained.loaded.model, window, after=15).double().sum().item()
            count += len(rows)
    assert first_tokens(trained)["re_computation"] == pytest.approx(total / count, abs=1e-5)


def test_learned_tokens_in_front_are_the_first_ones():
    """With the token in front alone kept, the model sees what its own kind with a window would see besides it."""
    trained = trained_like(operation={"name": "sink_token"})
    numbers = first_tokens(trained)
    without = trained_like()
    without.loaded.model.load_state_dict(trained.loaded.model.state_dict(), strict=False)
    assert numbers["window_0"] == pytest.approx(first_tokens(without)["window_0"], abs=1e-5)
    assert numbers["window_1"] != pytest.approx(numbers["window_0"], abs=1e-4)
