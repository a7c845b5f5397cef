"""Published numbers of every claim, single numbers that refute it, and numbers at which it is about nothing."""

from __future__ import annotations

import math

from tests.claims import planted_numbers

__all__ = ["ABOUT_NOTHING", "PUBLISHED", "REVERSED"]

BASE = BASELINE = "baseline"
RATE, STAR, WEIGHT, LOSS = "sink_rate", "sink_rate_star", "first_attention", "held_out_loss"


def rates(**by_label: float) -> dict[str, dict[str, float]]:
    return {label.replace("_", " "): {RATE: rate} for label, rate in by_label.items()}


def both(star: float, rate: float) -> dict[str, float]:
    return {STAR: star, RATE: rate}


WITHOUT = {"baseline": both(0, 18.18)}

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "position_schemes": {
        "baseline": {RATE: 18.18},
        "no positions": {RATE: 20.35},
        "sinusoid": {RATE: 32.73},
        "learned positions": {RATE: 33.13},
        "relative positions": {RATE: 35.53},
        "ALiBi": {RATE: 20.78},
        "rotary positions": {RATE: 18.18},
    },
    "norm_placement": {"baseline": {RATE: 18.18, "held_out_loss": 3.73}, "post-norm": {RATE: 13.54, "held_out_loss": 3.73}},
    # Not published as numbers: 20 is the size of |h_1| over the others at a billion parameters.
    "massive_before_post_norm": {
        "baseline": {"hidden_ratio": 20, "held_out_loss": 3.73},
        "post-norm": {RATE: 13.54, "norm_input_ratio": 20, "hidden_ratio": 1, "held_out_loss": 3.73},
    },
    "massive_activations_need_a_sink": {
        "baseline": {"hidden_ratio": 23.3},
        "key bias": {"hidden_ratio": 1},
        "key-value bias": {"hidden_ratio": 1},
        "sigmoid": {"hidden_ratio": 1.5},
        "value bias": {"hidden_ratio": 20},
        "key bias, value of length 20": {"hidden_ratio": 20},
    },
    "feed_forward": rates(baseline=18.18, relu=16.90, gelu=14.76, geglu=17.86),
    "number_of_heads": {
        "baseline": {RATE: 18.18, LOSS: 3.73},
        "4 heads": {RATE: 10.68, LOSS: 3.74},
        "2 heads": {RATE: 12.95, LOSS: 3.76},
    },
    "sink_moves_to_bias": {
        **WITHOUT,
        "sink token": both(74.12, 0.00),
        "key-value bias": both(72.76, 0.04),
        "key bias": both(73.34, 0.00),
        "value bias": both(0, 17.53),
    },
    "fixed_value_of_bias": {
        **WITHOUT,
        "key bias": both(73.34, 0.00),
        "key bias, value of length 5": both(44.43, 3.71),
        "key bias, value of length 20": both(1.51, 25.88),
    },
    "learnable_coordinates": {
        **WITHOUT,
        "key bias": both(73.34, 0.00),
        "key bias, 1 coordinate": both(32.18, 4.74),
        "key bias, 8 coordinates": both(31.39, 4.54),
    },
    "shared_biases": {
        **WITHOUT,
        "key-value bias": both(72.76, 0.04),
        "key-value bias, shared": both(56.61, 12.44),
        "key bias, shared": both(68.31, 0.23),
    },
    "sigmoid_has_no_sink": {
        "baseline": {RATE: 18.18, "held_out_loss": 3.73},
        "sigmoid": {RATE: 0.44, "carried_rate": 0, "held_out_loss": 3.70},
        "sigmoid, normalised": {RATE: 30.24, "held_out_loss": 3.74},
    },
    "other_kernels": {
        "baseline": {RATE: 18.18},
        "elu": {RATE: 0.80},
        "identity": {RATE: 0.00},
        "MLP kernel": {RATE: 0.74},
        "elu kernel, normalised": {RATE: 53.65},
    },
    "operations_that_fail": {
        "elu, normalised": {"diverged": 1},
        "elu kernel": {"diverged": 1},
        "identity, normalised": {"diverged": 1},
        "softmax over the 2-norm": {"diverged": 1},
    },
    # Of mean weights nothing is published; rates are 18.18, 3.59 and 29.10.
    "softmax_scale": {
        "baseline": {RATE: 18.18, WEIGHT: 0.25},
        "rows sum to 0.1": {WEIGHT: 0.1},
        "rows sum to 2": {WEIGHT: 0.35},
    },
    # LLaMA3-8B, but the rate of the baseline, which only has to be one.
    "hidden_key_value_norms": {
        "baseline": {
            RATE: 99.02,
            "hidden_ratio": 370 / 60,
            "key_ratio_sink": 5 / 20,
            "value_ratio_sink": 1 / 2,
            "cosine_first": 0.5,
            "cosine_other": -0.2,
        }
    },
    # GPT2-XL; by the propositions a repeated token has no sink in the others.
    "inputs_by_position": {
        "learned positions": {RATE: 77.00, "sink_rate_random_no_bos": 70.29, "sink_rate_repeated_no_bos": 62.28},
        "no positions": {RATE: 20.35, "sink_rate_repeated_no_bos": 0},
        "ALiBi": {RATE: 20.78, "sink_rate_repeated_no_bos": 0},
        "relative positions": {RATE: 35.53, "sink_rate_repeated_no_bos": 0},
    },
    "inputs_with_rotary_positions": {
        "rotary positions": {RATE: 97.49, "sink_rate_random_no_bos": 75.21, "sink_rate_repeated_no_bos": 0},  # Mistral-7B
    },
    # The largest published change, Mistral-7B, with losses of our own making.
    "fine_tuning_keeps_the_sink": {
        "baseline": {"first_text_sink_rate": 97.49, "first_text_loss": 1.0},
        "fine-tuned": {"first_text_sink_rate": 88.34, "first_text_loss": 1.1},
    },
    # Published in words, "barely changed", with losses of our own making.
    "gates_in_a_trained_model": {
        "baseline": {"sink_rate": 30, "effective_first": 0.3},
        "gate, element-wise": {"effective_first": 0.05},
        "trained on": {"sink_rate": 30, "first_attention": 0.3, "effective_first": 0.3, "held_out_loss": 2.9},
        "trained on, gate, element-wise": {"first_attention": 0.3, "effective_first": 0.3, "held_out_loss": 2.9},
        "trained on, gate, head-wise": {"first_attention": 0.3, "effective_first": 0.3, "held_out_loss": 2.9},
    },
}

_REVERSED: dict[str, tuple[tuple[str, str, float], ...]] = {
    "position_schemes": (("no positions", RATE, 0), ("ALiBi", RATE, 1)),
    "norm_placement": (("post-norm", RATE, 0),),
    "massive_before_post_norm": (("post-norm", "norm_input_ratio", 1), ("post-norm", "hidden_ratio", 20)),
    "massive_activations_need_a_sink": (
        *((label, "hidden_ratio", 20) for label in ("key bias", "key-value bias", "sigmoid")),
        *((label, "hidden_ratio", 1) for label in ("value bias", "key bias, value of length 20")),
    ),
    "feed_forward": tuple((label, RATE, 0) for label in ("relu", "gelu", "geglu")),
    "number_of_heads": tuple((label, RATE, 0) for label in ("2 heads", "4 heads")),
    "sink_moves_to_bias": (
        *((label, RATE, 18) for label in ("sink token", "key-value bias", "key bias")),
        *((label, STAR, 0) for label in ("sink token", "key-value bias", "key bias")),
        ("value bias", RATE, 0),
    ),
    "fixed_value_of_bias": (
        ("key bias, value of length 5", STAR, 80),
        ("key bias, value of length 20", STAR, 50),
        ("key bias, value of length 20", RATE, 0),
    ),
    "learnable_coordinates": (
        ("key bias, 1 coordinate", STAR, 0),
        ("key bias, 8 coordinates", RATE, 18),
        ("key bias, 1 coordinate", STAR, 90),
    ),
    "shared_biases": (
        ("key bias, shared", STAR, 0),
        ("key bias, shared", RATE, 18),
        ("key-value bias, shared", STAR, 0),
        ("key-value bias, shared", RATE, 0),
    ),
    "sigmoid_has_no_sink": (
        ("sigmoid", RATE, 18),
        ("sigmoid", "carried_rate", 18),
        ("sigmoid, normalised", RATE, 0),
        ("sigmoid", "held_out_loss", 4.0),
    ),
    "other_kernels": (
        *((label, RATE, 18) for label in ("elu", "identity", "MLP kernel")),
        ("elu kernel, normalised", RATE, 0),
    ),
    "operations_that_fail": (("elu kernel", "diverged", 0),),
    "softmax_scale": (("rows sum to 0.1", WEIGHT, 0.35), ("rows sum to 2", WEIGHT, 0.1)),
    "hidden_key_value_norms": (
        ("baseline", "hidden_ratio", 1),
        ("baseline", "key_ratio_sink", 2),
        ("baseline", "value_ratio_sink", 2),
        ("baseline", "cosine_first", -0.5),
    ),
    "inputs_by_position": (
        ("learned positions", "sink_rate_random_no_bos", 0),
        ("learned positions", "sink_rate_repeated_no_bos", 0),
        *((label, "sink_rate_repeated_no_bos", 60) for label in ("no positions", "ALiBi", "relative positions")),
    ),
    "inputs_with_rotary_positions": (
        ("rotary positions", "sink_rate_random_no_bos", 0),
        ("rotary positions", "sink_rate_repeated_no_bos", 60),
    ),
    "fine_tuning_keeps_the_sink": (
        ("fine-tuned", "first_text_sink_rate", 50),
        ("fine-tuned", "first_text_sink_rate", 120),
    ),
    "gates_in_a_trained_model": (
        ("trained on, gate, element-wise", "first_attention", 0.05),
        ("trained on, gate, element-wise", "effective_first", 0.05),
        ("trained on, gate, element-wise", "held_out_loss", 2.85),
        ("trained on, gate, head-wise", "first_attention", 0.07),
        ("trained on, gate, head-wise", "effective_first", 0.07),
        ("trained on, gate, head-wise", "held_out_loss", 2.85),
    ),
}
"""Claim to the single numbers (variant, metric, value) each of which refutes it."""

_NEEDED: dict[str, tuple[tuple[str, str], ...]] = {
    **{name: (("baseline", RATE),) for name in PUBLISHED if PUBLISHED[name].get(BASE, {}).get(RATE)},
    "massive_before_post_norm": (("baseline", "hidden_ratio"), ("post-norm", RATE)),
    "massive_activations_need_a_sink": (("baseline", "hidden_ratio"),),
    "fixed_value_of_bias": (("baseline", RATE), ("key bias", STAR)),
    "learnable_coordinates": (("baseline", RATE), ("key bias", STAR)),
    "shared_biases": (("baseline", RATE), ("key-value bias", STAR)),
    "inputs_by_position": tuple(
        (label, RATE) for label in ("learned positions", "no positions", "ALiBi", "relative positions")
    ),
    "inputs_with_rotary_positions": (("rotary positions", RATE),),
    "fine_tuning_keeps_the_sink": (("baseline", "first_text_sink_rate"),),
    "gates_in_a_trained_model": (("baseline", RATE), ("trained on", RATE)),
}
"""Claim to the sinks that must be there for it to be about anything."""


REVERSED: list[tuple[str, str, str, float]] = [(name, *row) for name, rows in _REVERSED.items() for row in rows]
"""Claim, variant, metric and the value with which the claim is refuted."""

ABOUT_NOTHING: list[tuple[str, str, str, float]] = [(name, *row, 0.1) for name, rows in _NEEDED.items() for row in rows]
"""Claim, variant, metric and the value at which what the claim presupposes does not hold."""
ABOUT_NOTHING += [
    ("fine_tuning_keeps_the_sink", "fine-tuned", "first_text_loss", 1.0),
    ("gates_in_a_trained_model", "gate, element-wise", "effective_first", 0.25),
    ("window_attention", "baseline", "excess_of_first", 0.02),
]

PUBLISHED |= {
    # The rate at the end of warm-up, after 100 steps, is not published; the sink appears ten times as late.
    "emergence": {"baseline": {"sink_rate_start": 0, "sink_rate_warm": 0, "sink_rate_end": 18.18}},
    "learning_rate": {
        "rate x1/4": {RATE: 2.90},
        "rate x1/2": {RATE: 11.21},
        "baseline": {RATE: 18.18},
        "rate x2": {RATE: 32.23},
    },
    "equal_learning_rate_times_steps": {
        "rate x2, steps x1/2": {RATE: 23.44, "held_out_loss": 3.79},
        "baseline": {RATE: 18.18},
        "rate x1/2, steps x2": {RATE: 16.81, "held_out_loss": 3.68},
    },
    # Of mean weights nothing is published; rates are 17.19, 18.18 and 16.19.
    "batch_size": {"batch x1/2": {WEIGHT: 0.25}, "baseline": {RATE: 18.18, WEIGHT: 0.25}, "batch x2": {WEIGHT: 0.24}},
    # 500, 200 and 50 million tokens of 5 billion: the rate of the last is published, the others are of our own making.
    "unique_data": {
        "baseline": {RATE: 18.18},
        "0.05 of the rows": {RATE: 15},
        "0.02 of the rows": {RATE: 8, "overfitting": 0.0},
        "0.005 of the rows": {RATE: 0.9, "overfitting": 2.0},
    },
    "fixed_token": {
        "fixed_first": {RATE: 74.11, "sink_rate_1": 0, "sink_rate_2": 0},
        "fixed_second": {RATE: 0, "sink_rate_1": 69.03, "sink_rate_2": 0},
        "fixed_third": {RATE: 0, "sink_rate_1": 0, "sink_rate_2": 69.64},
    },
    "random_first_tokens": {
        "no_bos": {"sink_rate_as_trained": 18.18, "sink_rate_max_as_trained": 18.18},
        "random_first": {"sink_rate_as_trained": 27.03, "sink_rate_max_as_trained": 27.03},
        "random_first_two": {"sink_rate_as_trained": 1.98, "sink_rate_1_as_trained": 14.08, "sink_rate_max_as_trained": 14.08},
    },
    "weight_decay": {"decay 0": {RATE: 15.20}, "baseline": {RATE: 18.18}, "decay 1": {RATE: 37.71}, "decay 10": {RATE: 0.01}},
    "prefix_lm": {"baseline": {RATE: 18.18}, "prefix of 5": {"prefix_largest": 21, "prefix_second": 0, "prefix_one": 100}},
    # Not published as numbers.
    "window_attention": {
        "baseline": {RATE: 18.18, "excess_of_first": 0.2},
        "window of 1/2": {"excess_of_first": 0.2, "excess_inside": 0.0},
        "window of 1/16": {"excess_of_first": 0.0},
    },
}

REVERSED += [
    ("emergence", "baseline", "sink_rate_start", 18),
    ("emergence", "baseline", "sink_rate_end", 3),
    ("emergence", "baseline", "sink_rate_warm", 18),
    ("learning_rate", "rate x1/4", RATE, 40),
    ("learning_rate", "rate x2", RATE, 0),
    ("equal_learning_rate_times_steps", "rate x1/2, steps x2", RATE, 25),
    ("equal_learning_rate_times_steps", "rate x1/2, steps x2", "held_out_loss", 3.9),
    ("batch_size", "batch x1/2", WEIGHT, 0.4),
    ("batch_size", "batch x2", WEIGHT, 0.1),
    ("unique_data", "0.005 of the rows", RATE, 18),
    ("unique_data", "0.02 of the rows", RATE, 17),
    ("unique_data", "0.005 of the rows", RATE, 10),  # weaker, and still more than half
    ("fixed_token", "fixed_first", RATE, 0),
    ("fixed_token", "fixed_second", "sink_rate_1", 0),
    ("fixed_token", "fixed_third", "sink_rate_2", 0),
    ("fixed_token", "fixed_first", "sink_rate_1", 20),
    ("fixed_token", "fixed_first", "sink_rate_2", 20),
    ("fixed_token", "fixed_second", RATE, 20),
    ("fixed_token", "fixed_second", "sink_rate_2", 20),
    ("fixed_token", "fixed_third", RATE, 20),
    ("fixed_token", "fixed_third", "sink_rate_1", 20),
    ("random_first_tokens", "random_first", "sink_rate_as_trained", 10),
    ("random_first_tokens", "random_first_two", "sink_rate_as_trained", 20),
    ("weight_decay", "decay 0", RATE, 40),
    ("weight_decay", "decay 10", RATE, 40),
    ("prefix_lm", "prefix of 5", "prefix_largest", 1),
    ("prefix_lm", "prefix of 5", "prefix_one", 20),  # a row has its sink on several tokens, or on none
    ("window_attention", "window of 1/2", "excess_of_first", 0),
    ("window_attention", "window of 1/2", "excess_inside", 0.2),
    ("window_attention", "window of 1/16", "excess_of_first", 0.2),
]


def ppl(*values):
    """Losses in nats of perplexities."""
    return [math.log(value) for value in values]


def by_sinks(*values):
    return dict(zip(("window_0", "window_1", "window_2", "window_4"), ppl(*values), strict=True))


def left(zero, one, four):
    return math.log(one / four) / math.log(zero / four)


PLAIN = {"held_out_loss": 2.89, **by_sinks(27.87, 18.49, 18.05, 18.05), "left_by_one": left(27.87, 18.49, 18.05)}
LEARNED = {"held_out_loss": 2.89, **by_sinks(1235, 18.01, 18.01, 18.02), "left_by_one": left(1235, 18.01, 18.02)}
GATED = {"held_out_loss": math.log(15.55), "max_inf_norm": 8.7, "kurtosis": 18.9, "int8_gap": math.log(16.02 / 15.55)}
OPT = {"held_out_loss": math.log(15.84), "max_inf_norm": 340, "kurtosis": 1778, "int8_gap": math.log(21.18 / 15.84)}
BERT = {"held_out_loss": math.log(4.49), "max_inf_norm": 735, "kurtosis": 3076}
WINDOW, SINKS, ANEW, DENSE = ppl(5158.07, 5.40, 5.43, 5641)

PUBLISHED |= {
    # No number is published; these are those of the embedded model, nearly.
    "mass_thrown_on_content": {
        BASELINE: {RATE: 18.0}, "sink hidden": {"cost": 0.19, "freed_to_content": 0.8},
        "value of the sink zeroed": {"cost": 0.005}, "sink hidden, its weight handed to nothing": {"cost": 0.005},
    },
    "window_fails_sinks_restore": {
        BASELINE: {"first_attention": 0.5, "window_0": WINDOW, "window_4": SINKS, "re_computation": ANEW}
    },
    "long_streams": {
        "dense": {"loss": DENSE},
        "no sinks": {"loss": WINDOW},
        "four sinks": {"loss": SINKS, "last_loss": SINKS},
        "re-computation, begun as texts are": {"last_loss": ANEW},
    },
    "recomputation_equals_sinks": {BASELINE: {"window_0": WINDOW, "window_4": SINKS, "re_computation": ANEW}},
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
        "four first tokens": {"loss": SINKS, "begins_alike": 0},
        "four line breaks": {"loss": math.log(5.60)},
    },
    # Not published as numbers.
    "position_inside_the_cache": {
        "inside the cache": {"loss": 1.7, "loss_within": 1.7},
        "in the text": {"loss": 8.0, "loss_within": 1.7},
    },
    "stable_over_long_texts": {
        "text by itself": {"loss": 1.7}, "late, four sinks": {"loss": 1.7}, "late, no sinks": {"loss": 8.0}
    },
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
        BASELINE: {"w6a8_gap": math.log(598 / 4.49), "w6a6_gap": math.log(42.8 / 4.49), "kurtosis": 3076},
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

REVERSED += [
    ("mass_thrown_on_content", "sink hidden", "cost", 0.0),
    ("mass_thrown_on_content", "value of the sink zeroed", "cost", 0.15),
    ("mass_thrown_on_content", "sink hidden, its weight handed to nothing", "cost", 0.15),
    ("mass_thrown_on_content", "sink hidden", "freed_to_content", 0.2),
    ("window_fails_sinks_restore", BASELINE, "window_0", SINKS),
    ("window_fails_sinks_restore", BASELINE, "re_computation", SINKS - 1),
    ("long_streams", "dense", "loss", SINKS),
    ("long_streams", "no sinks", "loss", SINKS),
    ("long_streams", "re-computation, begun as texts are", "last_loss", SINKS - 1),
    ("recomputation_equals_sinks", BASELINE, "re_computation", WINDOW),
    ("recomputation_equals_sinks", BASELINE, "re_computation", SINKS - 1),
    ("number_of_sinks", "0 sinks", "loss", math.log(9.59)),
    ("number_of_sinks", "8 sinks", "loss", math.log(8)),
    ("cache_size_not_monotone", "the whole", "loss", math.log(9.08)),  # a large one that is as good as the next smaller
    ("line_breaks_as_sinks", "four line breaks", "loss", WINDOW),
    ("position_inside_the_cache", "in the text", "loss", 1.7),
    ("position_inside_the_cache", "in the text", "loss_within", 2.0),
    ("stable_over_long_texts", "late, four sinks", "loss", 2.0),
    ("stable_over_long_texts", "late, no sinks", "loss", 1.7),
    ("cliff_at_the_cache_size", "larger cache", "held by the larger", 0.1),
    ("cliff_at_the_cache_size", "smaller cache", "held by the larger", 0.5),
    ("cliff_at_the_cache_size", "larger cache", "held by none", 0.5),
    ("learnable_sink", "sink token, no BOS", "window_0", math.log(18)),
    ("learnable_sink", "sink token, no BOS", "left_by_one", left(1262, 25.73, 18.05)),
    ("learnable_sink", "sink token, no BOS", "held_out_loss", 3.0),
    ("one_sink_is_too_few", "no BOS", "left_by_one", 0.0),
    ("one_sink_is_too_few", "sink token, no BOS", "left_by_one", left(1262, 25.73, 18.05)),
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

SOLVED = {"max_error": 0.004}

PUBLISHED |= {
    "trigger_softmax_single": {
        "softmax to 0.1": {"bos_weight_min": 0.99},
        "softmax to 0.03": {"bos_weight_min": 0.995},
        "softmax": {"bos_weight_min": 0.9986} | SOLVED,
    },
    "trigger_softmax_deep": {"softmax": {"head_bos_weight_largest": 0.999} | SOLVED},
    "trigger_relu": {
        "solution": {"max_error": 0.0, "bos_weight_largest": 0.0},
        "one head": {"head_bos_weight_largest": 0.0} | SOLVED,
        "several heads": {"head_bos_weight_largest": 0.0032} | SOLVED,
    },
    "entropy_bound": {
        "rows of scores": {"largest_violation": 0.0, "largest_gap_of_worst_row": 0.0},
        "baseline": {"largest_violation": 0.0},
    },
    # Drawn and not tabulated: entropies next to 0 with losses that do not come down, against entropies that stay up.
    "entropy_collapse": {
        "baseline": {"least_loss": 2.0, "least_entropy": 2.0},
        "rate x16": {"least_loss": 3.0, "least_entropy": 0.1},
    },
    "collapse_is_unstable": {"baseline": {"least_loss": 2.0}, "rate x4": {"least_loss": 3.0, "least_entropy": 0.1}},
    "sigma_reparam_prevents": {
        "baseline": {"least_loss": 2.0},
        "rate x16": {"least_loss": 3.0, "least_entropy": 0.1},
        "rate x16, sigma_reparam": {"least_loss": 2.0, "least_entropy": 2.0},
    },
    "sink_is_a_role": {
        "fixed_second": {RATE: 0, "sink_rate_1": 69.03},
        "fixed_third": {RATE: 0, "sink_rate_2": 69.64},
        "another token fixed_second": {RATE: 0, "sink_rate_1": 69.03},
    },
    "bos_removed": {
        "baseline": {RATE: 50, "strongest": 0.8, "at_first_without": 0.05, "loss_without": 1.0} | {"sink_rate_without": 0.0}
    },
    "sinks_and_outliers_part": {
        "baseline": {RATE: 46.0, WEIGHT: 0.333, "massive_ratio": 3818},
        "sandwich norm": {RATE: 44.7, "massive_ratio": 520},
        "softmax plus one": {WEIGHT: 0.022, "massive_ratio": 3000},
    },
    "gate_positions": {
        "baseline": {RATE: 46, WEIGHT: 0.467},
        "gate, element-wise": {WEIGHT: 0.048},
        "gate, head-wise": {WEIGHT: 0.073},
        "gate, shared by heads": {WEIGHT: 0.301},
        "gate, input-independent": {WEIGHT: 0.364},
        "gate, at least a half": {WEIGHT: 0.451},
    },
    "softpick_table": {
        "softpick": {RATE: 0.0},
        "gate, element-wise": {RATE: 2.0},
        "sink logit": {RATE: 8.78},
        "softmax plus one": {RATE: 16.36},
        "baseline": {RATE: 34.89},
    },
    # Of residual norms and context lengths only figures are published.
    "adam_against_sgd": {
        "adamw": {"residual_peak_inside": 20, "trigger_excess": 0.01},
        "sgd": {"residual_peak_inside": 1.2, "trigger_excess": 0.01},
    },
    "masked_objective": {"masked": {"strongest_place": 0.6, "gain_by_context": 3.0}},
    "sgd_keeps_the_sink": {
        "adamw": {"bos_weight": 0.9, "trigger_excess": 0.01},
        "sgd": {"bos_weight": 0.9, "trigger_excess": 0.01},
    },
    "context_length": {
        "context / 4": {"first_attention_of_16": 0.1, LOSS: 3.1},
        "baseline": {RATE: 20, "first_attention_of_16": 0.2, LOSS: 3.0},
        "context x 4": {"first_attention_of_16": 0.4, LOSS: 3.0},
    },
    "backcopy_dormant": {
        "softmax": {
            "trigger_excess": 0.01,
            "previous_weight_trigger": 0.99,
            "bos_weight": 0.99,
            "bos_weight_trigger": 0.0,
            "value_ratio": 0.1,
        }
    },
    "backcopy_dormant_among_heads": {
        "baseline": {"previous_at_trigger": 0.9, "bos_elsewhere": 0.9, "bos_at_trigger": 0.0, "value_ratio": 0.1}
    },
    "massive_mean_against_zero": {"baseline": {"massive": 4, "deviation": 0.05, "zero": 5.0, "mean": 0.001}},
}

REVERSED += [
    ("trigger_softmax_single", "softmax", "bos_weight_min", 0.16),
    ("trigger_softmax_single", "softmax", "bos_weight_min", 0.9),
    ("trigger_softmax_deep", "softmax", "head_bos_weight_largest", 0.16),
    ("trigger_relu", "solution", "max_error", 0.03),
    ("trigger_relu", "solution", "bos_weight_largest", 0.01),
    ("trigger_relu", "one head", "head_bos_weight_largest", 0.99),
    ("trigger_relu", "several heads", "head_bos_weight_largest", 0.16),
    ("entropy_bound", "rows of scores", "largest_violation", 0.001),
    ("entropy_bound", "rows of scores", "largest_gap_of_worst_row", 0.001),
    ("entropy_bound", "baseline", "largest_violation", 0.001),
    ("entropy_collapse", "rate x16", "least_entropy", 2.0),
    ("collapse_is_unstable", "rate x4", "least_loss", 2.0),
    ("sigma_reparam_prevents", "rate x16, sigma_reparam", "least_loss", 3.0),
    ("sigma_reparam_prevents", "rate x16, sigma_reparam", "least_entropy", 0.1),
    ("sink_is_a_role", "fixed_second", RATE, 69),
    ("sink_is_a_role", "fixed_third", "sink_rate_2", 0),
    ("sink_is_a_role", "another token fixed_second", "sink_rate_1", 0),
    ("bos_removed", "baseline", "at_first_without", 0.7),
    ("bos_removed", "baseline", "loss_without", 0.0),
    ("bos_removed", "baseline", "sink_rate_without", 20.0),
    ("sinks_and_outliers_part", "sandwich norm", RATE, 0),
    ("sinks_and_outliers_part", "sandwich norm", "massive_ratio", 3800),
    ("sinks_and_outliers_part", "softmax plus one", WEIGHT, 0.3),
    ("sinks_and_outliers_part", "softmax plus one", "massive_ratio", 100),
    ("gate_positions", "gate, element-wise", WEIGHT, 0.4),
    ("gate_positions", "gate, head-wise", WEIGHT, 0.4),
    ("gate_positions", "gate, shared by heads", WEIGHT, 0.05),
    ("gate_positions", "gate, input-independent", WEIGHT, 0.05),
    ("gate_positions", "gate, at least a half", WEIGHT, 0.05),
    ("softpick_table", "softpick", RATE, 20),
    ("softpick_table", "softmax plus one", RATE, 34),
    ("adam_against_sgd", "sgd", "residual_peak_inside", 20),
    ("sgd_keeps_the_sink", "sgd", "bos_weight", 0.1),  # even weights
    ("masked_objective", "masked", "strongest_place", 0.02),
    ("context_length", "context x 4", "first_attention_of_16", 0.05),
    ("context_length", "context x 4", "first_attention_of_16", 0.19),
    ("context_length", "context / 4", "first_attention_of_16", 0.21),
    ("backcopy_dormant", "softmax", "previous_weight_trigger", 0.1),
    ("backcopy_dormant", "softmax", "bos_weight", 0.1),
    ("backcopy_dormant", "softmax", "bos_weight_trigger", 0.9),
    ("backcopy_dormant", "softmax", "value_ratio", 1.0),
    ("backcopy_dormant_among_heads", "baseline", "bos_elsewhere", 0.1),
    ("backcopy_dormant_among_heads", "baseline", "bos_at_trigger", 0.9),
    ("backcopy_dormant_among_heads", "baseline", "value_ratio", 1.0),
    ("massive_mean_against_zero", "baseline", "zero", 0.0),
    ("massive_mean_against_zero", "baseline", "mean", 5.0),
]

ABOUT_NOTHING += [
    ("norm_placement", "post-norm", "held_out_loss", 5.0),  # untrained
    ("massive_before_post_norm", "post-norm", "held_out_loss", 5.0),
    ("line_breaks_as_sinks", "four first tokens", "begins_alike", 1.0),
    ("recomputation_equals_sinks", BASELINE, "window_0", SINKS),
    ("zero_sink", "no BOS", "window_0", math.log(18.05)),
    ("six_bit_gap_falls", BASELINE, "kurtosis", 10.6),  # that of the smallest scale
    ("int8_gap_falls", BASELINE, "kurtosis", 10.6),
    ("gated_cuts_outliers", BASELINE, "kurtosis", 10.6),
    ("clipped_cuts_outliers", BASELINE, "kurtosis", 10.6),
    ("clipped_fails_on_decoders", BASELINE, "kurtosis", 10.6),
    ("gamma_sweep", BASELINE, "kurtosis", 10.6),
    ("stretching_up_does_not_help", BASELINE, "kurtosis", 10.6),
    ("trigger_softmax_single", "softmax", "max_error", 0.5),
    ("trigger_softmax_deep", "softmax", "max_error", 0.5),
    ("trigger_relu", "several heads", "max_error", 0.5),
    ("entropy_collapse", "rate x16", "least_loss", 2.0),
    ("sigma_reparam_prevents", "rate x16", "least_loss", 2.0),
    ("collapse_is_unstable", "rate x4", "least_entropy", 2.0),
    ("bos_removed", "baseline", RATE, 0.0),
    ("mass_thrown_on_content", "baseline", RATE, 0.0),
    ("sinks_and_outliers_part", "baseline", "massive_ratio", 10.0),
    ("gate_positions", "baseline", RATE, 0.0),
    ("softpick_table", "baseline", RATE, 0.0),
    ("adam_against_sgd", "adamw", "residual_peak_inside", 1.0),
    ("adam_against_sgd", "sgd", "trigger_excess", 3.0),
    ("sgd_keeps_the_sink", "sgd", "trigger_excess", 3.0),
    ("masked_objective", "masked", "gain_by_context", 0.1),  # untrained
    ("sgd_keeps_the_sink", "adamw", "bos_weight", 0.1),
    ("context_length", "baseline", RATE, 0.0),
    ("context_length", "context x 4", LOSS, 4.0),
    ("context_length", "context / 4", LOSS, 4.0),
    ("backcopy_dormant", "softmax", "trigger_excess", 2.0),
    ("backcopy_dormant_among_heads", "baseline", "previous_at_trigger", 0.1),
    ("massive_mean_against_zero", "baseline", "massive", 0.0),
    ("massive_mean_against_zero", "baseline", "deviation", 0.0),
]

# Models of 1.5 million parameters, with numbers of LLaMA3-8B and of a billion parameters.
_SOFTMAX, _SIGMOID = "embedded:softmax", "embedded:sigmoid"
PUBLISHED |= {
    "norms_of_a_deeper_model": {_SOFTMAX: PUBLISHED["hidden_key_value_norms"][BASE]},
    "sigmoid_in_a_deeper_model": {
        _SOFTMAX: {RATE: 45.11, "hidden_ratio": 23.3},
        _SIGMOID: {RATE: 2.46, "hidden_ratio": 1.5},
    },
}
REVERSED += [("norms_of_a_deeper_model", _SOFTMAX, *row) for _, *row in _REVERSED["hidden_key_value_norms"]]  # type: ignore[misc]
REVERSED += [
    ("sigmoid_in_a_deeper_model", _SOFTMAX, "hidden_ratio", 1.0),
    ("sigmoid_in_a_deeper_model", _SIGMOID, RATE, 45.0),
    ("sigmoid_in_a_deeper_model", _SIGMOID, "hidden_ratio", 23.0),
]
ABOUT_NOTHING += [("sigmoid_in_a_deeper_model", _SOFTMAX, RATE, 0.0)]

PUBLISHED |= planted_numbers.PLANTED
REVERSED += planted_numbers.REVERSED
ABOUT_NOTHING += planted_numbers.ABOUT_NOTHING
