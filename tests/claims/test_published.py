"""A dozen claims by hand: published numbers reproduce them.

That any part of any claim can come out either way is the contract (:func:`sinklab_claims.testing.check_claim`).
"""

from __future__ import annotations

import itertools
import math

import pytest

from sinklab.registry import claims
from sinklab_claims.contract.claim import base_config
from sinklab_claims.reproduce.store import claim_called, configure, resolved_changes
from sinklab_claims.verdict.records import PLAIN, published_effects
from sinklab_claims.verdict.rule import judge

RATE, STAR, LOSS = "sink_rate", "sink_rate_star", "held_out_loss"
WINDOW, SINKS, ANEW = (math.log(perplexity) for perplexity in (5158.07, 5.40, 5.43))


def _by_setting(rate: float) -> dict[str, float]:
    """A rate that falls with the threshold and, a little, with the length; the paper shows curves."""
    found = {
        f"sink_rate_{threshold}_of_{length}": rate * (1.3 - threshold / 100) * (1.1 - length / 640)
        for threshold, length in itertools.product((20, 30, 40), (32, 48, 64))
    }
    return {**found, "change_with_length": 2.0}


PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "sink_moves_to_bias": {
        "baseline": {STAR: 0, RATE: 18.18},
        "sink token": {STAR: 74.12, RATE: 0.00},
        "key-value bias": {STAR: 72.76, RATE: 0.04},
        "key bias": {STAR: 73.34, RATE: 0.00},
        "value bias": {STAR: 0, RATE: 17.53},
    },
    "sigmoid_has_no_sink": {
        "baseline": {RATE: 18.18, LOSS: 3.73},
        "sigmoid": {RATE: 0.44, "carried_rate": 0, LOSS: 3.70},
        "sigmoid, normalised": {RATE: 30.24, LOSS: 3.74},
    },
    "learning_rate": {
        "rate x1/4": {RATE: 2.90},
        "rate x1/2": {RATE: 11.21},
        "baseline": {RATE: 18.18},
        "rate x2": {RATE: 32.23},
    },
    # The rate at the end of warm-up, after 100 steps, is not published; the sink appears ten times as late.
    "emergence": {"baseline": {"sink_rate_start": 0, "sink_rate_warm": 0, "sink_rate_end": 18.18}},
    # LLaMA3-8B.
    "hidden_key_value_norms": {
        "baseline": {
            **{RATE: 99.02, "hidden_ratio": 370 / 60, "key_ratio_sink": 5 / 20, "value_ratio_sink": 1 / 2},
            **{"cosine_first": 0.5, "cosine_other": -0.2},
        }
    },
    "threshold_and_length": {
        "rate x1/4": _by_setting(3),
        "ALiBi": _by_setting(15),
        "baseline": _by_setting(25),
        "fixed_first": _by_setting(50),
    },
    # Llama-2-13B and Llama-2-7B.
    "window_fails_sinks_restore": {
        "baseline": {"first_attention": 0.5, "window_0": WINDOW, "window_4": SINKS, "re_computation": ANEW}
    },
    "cache_size_not_monotone": {
        label: {"loss": math.log(perplexity)}
        for label, perplexity in {"an eighth": 9.73, "a quarter": 9.32, "half": 9.08, "the whole": 9.59}.items()
    },
    "gate_positions": {
        "baseline": {RATE: 46, "first_attention": 0.467},
        "gate, element-wise": {"first_attention": 0.048},
        "gate, head-wise": {"first_attention": 0.073},
        "gate, shared by heads": {"first_attention": 0.301},
        "gate, input-independent": {"first_attention": 0.364},
        "gate, at least a half": {"first_attention": 0.451},
    },
    "softpick_table": {
        "softpick": {RATE: 0.0},
        "gate, element-wise": {RATE: 2.0},
        "sink logit": {RATE: 8.78},
        "softmax plus one": {RATE: 16.36},
        "baseline": {RATE: 34.89},
    },
    # OPT-125m.
    "int8_gap_falls": {
        "baseline": {"int8_gap": math.log(21.18 / 15.84), "kurtosis": 1778},
        "gated heads": {"int8_gap": math.log(16.02 / 15.55)},
    },
    "trigger_relu": {
        "solution": {"max_error": 0.0, "bos_weight_largest": 0.0},
        "one head": {"head_bos_weight_largest": 0.0, "max_error": 0.004},
        "several heads": {"head_bos_weight_largest": 0.0032, "max_error": 0.004},
    },
}
"""Claim to variant to metric to the number of the source, or where it gives none to one that it describes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    """At forty seeds that differ by a hundred-thousandth."""
    claim, published = claim_called(name), PUBLISHED[name]
    seeds = {
        seed: {label: {metric: value * (1 - seed / 100_000) for metric, value in of.items()} for label, of in published.items()}
        for seed in range(40)
    }
    verdict = judge(claim.parts, claim.presupposes, seeds).verdict
    assert PLAIN.get(verdict, verdict) == "reproduced"


SAME_RUNS = ("position_schemes", "inputs_by_position", "inputs_with_rotary_positions")
"""Claims in which a variant may be the scale's own configuration."""


@pytest.mark.parametrize("name", claims.names())
def test_no_two_variants_are_the_same_run(name):
    claim = claim_called(name)
    for scale in claim.costs:
        base = base_config(scale)
        made = {(variant.after, configure(base, variant).model_dump_json()) for variant in claim.variants}
        assert name in SAME_RUNS or len(made) == len(claim.variants)
        assert all(resolved_changes(base, variant) == {} for variant in claim.variants if variant.label == "baseline")


# --- the published numbers that stand beside effects ------------------------------------------------------------------------


@pytest.mark.parametrize("name", published_effects())
def test_a_published_number_is_the_effect_of_a_part(name):
    claim = claim_called(name)
    parts = {part.effect.words: part for part in (*claim.parts, *claim.presupposes)}
    assert set(published_effects()[name]) <= set(parts), f"bring published.json to the words of {name}"
    for effect, published in published_effects()[name].items() if name in PUBLISHED else ():
        assert published == pytest.approx(parts[effect].effect(PUBLISHED[name]), rel=6e-4, abs=1e-9)  # four digits
