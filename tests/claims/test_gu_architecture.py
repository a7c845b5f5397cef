"""Claims of Gu et al. 2024 about architecture, biases, operations and inputs: published numbers pass, reversed ones do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sinklab.claims._embedded import embedded_model
from sinklab.claims.repeated_token_laws import measure, of_checkpoint
from sinklab.errors import ConfigurationError, DoesNotApply
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import claims
from sinklab_claims.contract.claim import SCALES, Claim
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.reproduce.cells import base_called, base_config, configure
from sinklab_claims.verdict.rule import judge


def verdict(claim: Claim, numbers: dict[str, dict[str, float]]) -> str:
    """With the same numbers at forty seeds, so that intervals are points, and of counts narrow."""
    return judge(claim.parts, claim.presupposes, dict.fromkeys(range(40), numbers)).verdict


NAMES = [
    "position_schemes", "norm_placement", "massive_activations_need_a_sink", "feed_forward",
    "sink_moves_to_bias", "fixed_value_of_bias", "shared_biases",
    "sigmoid_has_no_sink", "softmax_scale", "hidden_key_value_norms",
    "inputs_by_position", "inputs_with_rotary_positions", "fine_tuning_keeps_the_sink",
]  # fmt: skip
"""The claims about architecture, biases, operations and inputs."""


def distinct(scale: str) -> set[str]:
    """Trainings that all the claims here need together, at one seed; a fine-tuned model is not its like without."""
    base = base_config(scale)
    return {
        f"{variant.after} {configure(base, variant).model_dump_json()}" for name in NAMES for variant in claims[name]().variants
    }


@pytest.mark.parametrize("scale", SCALES)
def test_claims_share_their_trainings(scale: str) -> None:
    """The baseline; 5 schemes, post-norm, 3 activations; 8 biases; 2 sigmoids, 2 scales; 1 tuned."""
    assert len(distinct(scale)) == 23


@pytest.mark.parametrize(
    ("scale", "base_name", "own"),
    [
        ("tiny", "no-bos", "learned positions"),
        ("small", "bos", "rotary positions"),
        ("small", "no-bos", "learned positions"),
        ("60m", "no-bos", "rotary positions"),
    ],
)
def test_one_position_scheme_is_the_scales_own(scale: str, base_name: str, own: str) -> None:
    base = base_config(scale, base_name)
    same = [c.label for c in claims["position_schemes"]().variants if configure(base, c) == base]
    assert same == ["baseline", own]


def test_fine_tuning_reads_other_text_more_gently() -> None:
    for scale in SCALES:
        base = base_config(scale)
        tuned = configure(base, claims["fine_tuning_keeps_the_sink"]().variants[1])
        assert tuned.data.corpus != base.data.corpus
        assert tuned.optimizer.learning_rate == pytest.approx(base.optimizer.learning_rate / 20)
        assert tuned.training.steps == base.training.steps / 4
        assert tuned.model == base.model


def test_the_first_text_of_a_fine_tuned_model_is_that_of_its_base() -> None:
    tuned = claims["fine_tuning_keeps_the_sink"]().variants[1]
    for scale, base in (("tiny", "bos"), ("tiny", "no-bos"), ("small", "bos"), ("small", "no-bos"), ("60m", "no-bos")):
        config = base_config(scale, base)
        assert base_called(configure(config, tuned).name).data == config.data
    with pytest.raises(ConfigurationError, match="no base of a scale is called 'other'"):
        base_called("other")


def test_post_norm_is_trained_at_a_rate_at_which_it_learns() -> None:
    (post,) = (variant for variant in claims["norm_placement"]().variants if variant.label == "post-norm")
    rates = {scale: configure(base_config(scale), post).optimizer.learning_rate for scale in SCALES}
    assert rates == {"tiny": 3e-3, "small": 3e-3, "medium": 1e-3, "60m": 4e-4, "1b": 4e-4}


def test_texts_of_an_embedded_model_are_drawn_by_the_seed() -> None:
    model = embedded_model("softmax", 0, "tiny")
    rows = model.rows(4, 16)
    assert (rows.shape, rows.dtype) == ((4, 16), torch.int64)
    assert (rows[:, 0] == model.loaded.tokenizer.bos_token_id).all()
    torch.testing.assert_close(embedded_model("softmax", 0, "tiny").rows(4, 16), rows)
    assert not torch.equal(embedded_model("softmax", 1, "tiny").rows(4, 16), rows)
    assert model.rows(1).shape == (1, model.context) == (1, 256)


def test_laws_hold_at_random_weights() -> None:
    claim = claims["repeated_token_laws"]()
    numbers = {seed: measure(seed, "tiny") for seed in range(3)}
    assert judge(claim.parts, claim.presupposes, numbers).verdict == "agrees with the proof"
    # The bounds are near enough to be broken by a wrong formula: half of the upper one is exceeded.
    assert all(found["rotary positions"]["over_bound"] > 0.5 for found in numbers.values())


def test_laws_are_refuted_by_single_numbers() -> None:
    claim = claims["repeated_token_laws"]()
    numbers = measure(0, "tiny")
    for label, metric, value in (
        ("no positions", "law_error", 1e-6),
        ("relative positions", "law_error", 1e-6),
        ("ALiBi", "law_error", 1e-6),
        ("rotary positions", "over_bound", 1.01),
        ("rotary positions", "under_bound", 1.01),
        ("learned positions", "law_error", 0.0),
    ):
        assert verdict(claim, {**numbers, label: {**numbers[label], metric: value}}) == "contradicts the proof"


def rotary(operation: str, **fields: Any) -> SinkLM:
    """A small model with random weights and rotary positions."""
    torch.manual_seed(0)
    return SinkLM(
        SinkLMConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            position={"name": "rotary"},
            operation={"name": operation},
            initialization="normal",
            **{"initializer_range": 0.1, **fields},
        )
    ).eval()


def checkpoint_of(model: torch.nn.Module) -> Checkpoint:
    """As much of a checkpoint as the laws look at."""
    loaded = SimpleNamespace(model=model, device=torch.device("cpu"))
    return cast(Checkpoint, SimpleNamespace(loaded=loaded, draw=0, text_ids=torch.arange(40)))


@pytest.mark.parametrize("operation", ["sigmoid", "softmax_plus_one", "relu", "elu_kernel"])
def test_the_bounds_are_not_about_weights_that_are_no_softmax(operation: str) -> None:
    assert of_checkpoint(checkpoint_of(rotary("softmax")))["rotary positions"]["bound_violation"] == 0
    with pytest.raises(DoesNotApply, match="not the softmax of products of queries and keys over the tokens"):
        of_checkpoint(checkpoint_of(rotary(operation)))


def test_the_bounds_are_not_about_windows_shorter_than_the_rows() -> None:
    model = rotary("softmax", window=16)
    with pytest.raises(DoesNotApply, match="sees all tokens before it and none behind it"):
        of_checkpoint(checkpoint_of(model))


def test_a_weight_that_float32_cannot_hold_is_not_below_its_bound() -> None:
    model = rotary("softmax", initializer_range=2.2)
    model.set_attn_implementation("eager")
    weights = torch.cat([model(torch.full((1, 64), token), output_attentions=True).attentions[0] for token in range(40)])
    assert bool((weights[..., torch.ones(64, 64).tril().bool()] == 0).any())  # with a score of a hundred less than the largest
    assert of_checkpoint(checkpoint_of(model))["rotary positions"]["bound_violation"] == 0
