"""Numbers that claims without published ones are planted with: some that they describe, and single ones that refute them."""

from __future__ import annotations

import itertools

__all__ = ["ABOUT_NOTHING", "PLANTED", "REVERSED"]

Numbers = dict[str, dict[str, dict[str, float]]]
Changed = list[tuple[str, str, str, float]]


def _by_setting(rate: float) -> dict[str, float]:
    """A rate that falls with the threshold and, a little, with the length."""
    found = {
        f"sink_rate_{threshold}_of_{length}": rate * (1.3 - threshold / 100) * (1.1 - length / 640)
        for threshold, length in itertools.product((20, 30, 40), (32, 48, 64))
    }
    return {**found, "change_with_length": 2.0}


FIRST = "baseline"
CONTENTS = ("content_random", "content_frequent", "content_rare", "content_telling")

PLANTED: Numbers = {
    "threshold_and_length": {
        "rate x1/4": _by_setting(3),
        "ALiBi": _by_setting(15),
        "baseline": _by_setting(25),
        "fixed_first": _by_setting(50),
    },
    "weak_content": {
        FIRST: {"sink_rate": 25, "content_natural": 0.8, **dict.fromkeys(CONTENTS, 0.8), "content_later": 0.05},
        "fixed_first": {"sink_rate": 30, "first_attention": 0.25},
        "the most frequent token first": {"sink_rate": 30, "first_attention": 0.25},
        "a trigger first": {"sink_rate": 30, "first_attention": 0.25},
    },
}

ALONG = "kept along the way"
PLANTED |= {
    "order_of_onset": {
        ALONG: {"sink_rate": 25, "onset_weight": 100, "onset_massive": 150, "onset_worth": 140},
    },
    "gradient_sinks": {
        ALONG: {
            "sink_rate": 25,
            "token_gradient_end": 40.3,
            "token_gradient_start": 1.5,
            "key_gradient_per_mass_before": 3,
            "key_gradient_end": 20,
            "key_gradient_per_mass_end": 0.5,
        }
    },
}

PLANTED |= {
    "objective_and_mechanism": {
        "baseline": {"carried_rate": 18},
        "sigmoid": {"carried_rate": 0},
        "gate, head-wise": {"carried_rate": 3},
        "prefix of 5": {"carried_rate": 20},
        "sigmoid, prefix of 5": {"carried_rate": 0},
        "gate, head-wise, prefix of 5": {"carried_rate": 3},
    },
}

FALSE = "rotary positions"
PLANTED["false_sinks_in_a_prompt"] = {
    FALSE: {
        "sink_rate": 20, "taken_by_text": 0.05, "taken_by_bos": 0.4, "taken_by_repeated": 0.3, "first_beside_text": 0.8,
        "first_beside_bos": 0.4, "first_beside_repeated": 0.5, "cost_of_bos": 0.1, "cost_of_repeated": 0.1,
    }
}  # fmt: skip

REVERSED: Changed = [
    ("threshold_and_length", "fixed_first", "sink_rate_40_of_32", 0),
    ("threshold_and_length", "rate x1/4", "sink_rate_20_of_32", 90),
    ("threshold_and_length", "ALiBi", "change_with_length", 15),
    *(("weak_content", label, "sink_rate", 1) for label in ("fixed_first", "the most frequent token first", "a trigger first")),
    ("weak_content", "a trigger first", "first_attention", 0.1),
    *(("weak_content", FIRST, content, 0.3) for content in CONTENTS),
    ("weak_content", FIRST, "content_later", 0.5),
]

REVERSED += [
    *(("order_of_onset", ALONG, f"onset_{curve}", 90) for curve in ("massive", "worth")),
    ("gradient_sinks", ALONG, "token_gradient_end", 1),
    ("gradient_sinks", ALONG, "key_gradient_end", 1.5),
    ("gradient_sinks", ALONG, "key_gradient_per_mass_end", 2),
    ("gradient_sinks", ALONG, "token_gradient_start", 38),
    ("gradient_sinks", ALONG, "key_gradient_per_mass_before", 1),
]

REVERSED += [
    ("objective_and_mechanism", "prefix of 5", "carried_rate", 1),
    *(("objective_and_mechanism", label, "carried_rate", 18) for label in ("sigmoid", "sigmoid, prefix of 5")),
    *(("objective_and_mechanism", f"gate, head-wise{tail}", "carried_rate", 30) for tail in ("", ", prefix of 5")),
]

REVERSED += [
    *(("false_sinks_in_a_prompt", FALSE, f"taken_by_{kind}", 0.06) for kind in ("bos", "repeated")),
    *(("false_sinks_in_a_prompt", FALSE, f"first_beside_{kind}", 0.8) for kind in ("bos", "repeated")),
    *(("false_sinks_in_a_prompt", FALSE, f"cost_of_{kind}", 0.0) for kind in ("bos", "repeated")),
]

ABOUT_NOTHING: Changed = [
    ("false_sinks_in_a_prompt", FALSE, "sink_rate", 0.5),
    ("objective_and_mechanism", "baseline", "carried_rate", 0.5),
    ("order_of_onset", ALONG, "sink_rate", 0.5),
    ("gradient_sinks", ALONG, "sink_rate", 0.5),
    ("threshold_and_length", "baseline", "sink_rate_30_of_64", 0.5),
    ("weak_content", FIRST, "sink_rate", 0.5),
]
