"""Gu et al. 2024, sections 4 to 7: what of a training decides whether there is a sink."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from sinklab.registry import claims
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import BASELINE, Changes, Part, Times, Variant
from sinklab_claims.contract.effect import Best, Difference, Extreme, Slope, Value
from sinklab_claims.contract.trained import TrainedModel, gives
from sinklab_claims.numbers.attention import CARRYING, attention_numbers, first_rows
from sinklab_claims.variants import (
    ALIBI,
    FIXED,
    HEAD_WISE,
    LEARNED_POSITIONS,
    NO_POSITIONS,
    RATE_AT,
    RELATIVE_POSITIONS,
    ROTARY,
    SIGMOID,
    SINK,
    UNCHANGED,
    Fields,
    has_no_sink,
    has_sink,
    of_paper,
    operation,
    position,
)

gu = of_paper(
    "gu2024", "Gu et al. 2024 (arXiv 2410.10781)", bases=("no-bos", "bos"), read_outs=("sinks",), presupposes=(has_sink(),)
)

# --- optimisation -------------------------------------------------------------------------------------------------------------


@claims.register("emergence")
@gu
def emergence() -> Fields:
    """The sink is not there at initialisation: it emerges during training and grows with the steps.

    The first token's rate over one run: before the first step, when the learning rate has reached its height, at the end.
    Shares of the steps do not compare: warm-up is a two-hundredth of them in the paper, and a sixth at the smallest scale.
    """
    return dict(
        where="section 4",
        published="The sink appears between 1,000 and 2,000 of 20,000 steps and grows from there to a rate of 18.18.",
        variants=(UNCHANGED,),
        read_outs=("training",),
        parts=(
            # A percent is below what any model that has learned nothing shows.
            Part("there is none before the first step", Value("sink_rate_start", BASELINE), less_than=1.0),
            Part("there is one after the last step", Value("sink_rate_end", BASELINE), more_than=SINK),
            Part("it grows after warm-up", Difference("sink_rate_end", BASELINE, BASELINE, "sink_rate_warm"), more_than=SINK),
        ),
        presupposes=(),
    )


RATES = {f"rate x{name}": factor for name, factor in (("1/4", 0.25), ("1/2", 0.5))} | {BASELINE: 1.0, "rate x2": 2.0}
"""Label to the learning rate over that of the scale."""


def rate(label: str) -> Variant:
    """The variant of one of :data:`RATES`."""
    return UNCHANGED if label == BASELINE else Variant(label, {"optimizer.learning_rate": Times(RATES[label])})


@claims.register("learning_rate")
@gu
def learning_rate() -> Fields:
    """At the same number of steps, the sink grows with the learning rate.

    The four rates of the paper over its third; everything else, warm-up included, is the same. The line through all of them
    must rise by what counts as a sink over their whole range, as the paper's does six times over.
    """
    rates = tuple(RATES)
    grows = Slope("sink_rate", rates, at=tuple(RATES.values()))
    return dict(
        where="table 9",
        published="Sink rates after 20,000 steps: 2.90 at a rate of 1e-4, 11.21 at 2e-4, 18.18 at 4e-4, 32.23 at 8e-4.",
        variants=tuple(map(rate, RATES)),
        presupposes=(Part("one of the rates gives a sink", Extreme("sink_rate", rates), more_than=SINK),),
        parts=(Part("it grows with every doubling of the rate", grows, more_than=SINK / (len(RATES) - 1)),),
        evidence={
            "small": "The doubled rate learns worse in this recipe, and its models have hardly a sink; over the other three "
            "six seeds show no trend"
        },
    )


# --- data ---------------------------------------------------------------------------------------------------------------------


@claims.register("fixed_token")
@gu
def fixed_token() -> Fields:
    """A token fixed at the first, second or third position of every row has the sink there and nowhere else."""
    places = range(len(FIXED))
    return dict(
        where="section 5",
        published="Sink rates of the first three tokens: 74.11, 0, 0 with the first fixed; 0, 69.03, 0 with the second; 0, 0, "
        "69.64 with the third.",
        variants=FIXED,
        bases=("no-bos",),
        parts=(
            *(has_sink(FIXED[at].label, RATE_AT[at]) for at in places),
            *(has_no_sink(FIXED[at].label, RATE_AT[other]) for at in places for other in places if other != at),
        ),
        presupposes=(),
    )


NO_BOS = Variant("no_bos", {"data.bos": "none", "data.random_positions": None})
"""What is compared with; nothing is changed where rows have no BOS anyway."""

ONE = Variant("random_first", {"data.bos": "none", "data.random_positions": (0, 1)})
TWO = Variant("random_first_two", {"data.bos": "none", "data.random_positions": (0, 2)})

LEAST = 3.0
"""Points of difference that count as one; those published are 9 and 12."""

UNSEEN = 2**20
"""Number of the first held-out row for the draw of its tokens, behind those of all training rows."""

AS_TRAINED = tuple(
    Metric(
        f"{name}_as_trained",
        "percent",
        f"{name} on held-out rows that hold random tokens where those of the training do.",
        range=PERCENTAGE,
    )
    for name in ("sink_rate", "sink_rate_1", "sink_rate_max")
)


@gives(*AS_TRAINED)
def as_trained(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`AS_TRAINED`; without random tokens in the training, those of the rows as they are."""
    rows, random = first_rows(trained).clone(), trained.data.train.random
    if random is not None:
        drawn = torch.from_numpy(np.stack([random.draw(UNSEEN + row) for row in range(len(rows))]))
        rows[:, random.start : random.stop] = drawn.to(rows)
    numbers = attention_numbers(trained.loaded.model, rows, trained.front)
    return {metric.name: numbers[metric.name.removesuffix("_as_trained")] for metric in AS_TRAINED}


@claims.register("random_first_tokens")
@gu
def random_first_tokens() -> Fields:
    """A random first token in every training row strengthens the sink; with two, it moves to the second."""
    labels = (NO_BOS.label, ONE.label, TWO.label)
    moves = Difference("sink_rate_1_as_trained", TWO.label, TWO.label, "sink_rate_as_trained")
    return dict(
        where="section 5",
        published="Sink rate of the first token 18.18 with ordinary rows and 27.03 with one random token; 1.98 with two, and "
        "14.08 of the second token.",
        variants=(NO_BOS, ONE, TWO),
        bases=("no-bos",),
        read_outs=("sinks", as_trained),
        presupposes=(Part("a sink forms without BOS", Extreme("sink_rate_max_as_trained", labels), more_than=SINK),),
        parts=(
            Part("one strengthens it", Difference("sink_rate_as_trained", ONE.label, NO_BOS.label), more_than=LEAST),
            Part("with two, the second token has more of it than the first", moves, more_than=LEAST),
        ),
    )


# --- the loss -----------------------------------------------------------------------------------------------------------------

PREFIX = Variant("prefix of 5", {"model.prefix": CARRYING})


def _with_prefix(variant: Variant) -> Variant:
    assert isinstance(variant.changes, dict), "the variants that are crossed change fields to values"
    return Variant(f"{variant.label}, {PREFIX.label}", {**variant.changes, "model.prefix": CARRYING})


def _carries_less(gate: Variant, softmax: Variant) -> Part:
    says = f"less is carried with {gate.label} than with {softmax.label}"
    return Part(says, Difference("carried_rate", gate.label, softmax.label), less_than=-SINK)


@claims.register("objective_and_mechanism")
@gu
def objective_and_mechanism() -> Fields:
    """The mechanism decides and not the objective: as a causal and as a prefix language model alike, softmax has a sink,
    sigmoid has none, and with a gate on each head less is carried from it.

    Two objectives by three mechanisms; the third objective, tokens that are hidden, is that of ``masked_objective``. What is
    compared is the weight that a head carries to its output, which is defined alike for all three.
    """
    sigmoid, gate = _with_prefix(SIGMOID), _with_prefix(HEAD_WISE)
    rate_of = {of.label: Value("carried_rate", of.label) for of in (UNCHANGED, PREFIX, SIGMOID, sigmoid)}
    plain, prefix = (Part(f"there is a sink with {of}", rate_of[of], more_than=SINK) for of in (BASELINE, PREFIX.label))
    none = (Part(f"there is no sink with {of}", rate_of[of], less_than=SINK) for of in (SIGMOID.label, sigmoid.label))
    return dict(
        where="sections 6 and 7",
        published="Softmax 18.18, with a prefix 19 to 24 on one of its tokens, sigmoid 0.44; not crossed. A gate on each head "
        "lowers the mean weight on the first token from 0.467 to 0.073 in Qiu et al. 2025 (arXiv 2505.06708).",
        variants=(UNCHANGED, SIGMOID, HEAD_WISE, PREFIX, sigmoid, gate),
        read_outs=("carried",),
        presupposes=(plain,),
        parts=(prefix, *none, _carries_less(HEAD_WISE, UNCHANGED), _carries_less(gate, PREFIX)),
    )


# --- the architecture ---------------------------------------------------------------------------------------------------------


@claims.register("position_schemes")
@gu
def position_schemes() -> Fields:
    """The sink appears with every position scheme, and without positions.

    Six schemes; one of them is the scale's own, and its runs are those of the baseline. ``relative`` is the learned table that
    the paper describes; its release added the number of the bucket itself to the scores (``bucket_index``), to which the
    published 35.53 belongs.
    """
    schemes = (NO_POSITIONS, position("sinusoid", "sinusoid"), LEARNED_POSITIONS, RELATIVE_POSITIONS, ALIBI, ROTARY)
    return dict(
        where="table 3",
        published="Sink rates: none 20.35, sinusoid 32.73, learned 33.13, relative 35.53, ALiBi 20.78, rotary 18.18.",
        variants=(UNCHANGED, *schemes),
        parts=tuple(has_sink(scheme.label) for scheme in schemes),
    )


@claims.register("feed_forward")
@gu
def feed_forward() -> Fields:
    """The sink appears with every activation of the feed-forward layers, gated or not."""
    activations = ("relu", "gelu", "geglu")
    return dict(
        where="section 7",
        published="Sink rates: ReLU 16.90, GELU 14.76, Swish 17.89, ReGLU 13.88, GeGLU 17.86, SwiGLU 18.18.",
        variants=(UNCHANGED, *(Variant(name, {"model.feed_forward": name}) for name in activations)),
        parts=tuple(has_sink(name) for name in activations),
    )


# --- the operation ------------------------------------------------------------------------------------------------------------

SINK_TOKEN = operation("sink token", "sink_token")
KEY_VALUE_BIAS = operation("key-value bias", "key_value_bias")
KEY_BIAS = operation("key bias", "key_bias")
VALUE_BIAS = operation("value bias", "value_bias")
SHORT_VALUE = operation("key bias, value of length 5", "key_bias", value_norm=5.0)
LONG_VALUE = operation("key bias, value of length 20", "key_bias", value_norm=20.0)


@claims.register("sink_moves_to_bias")
@gu
def sink_moves_to_bias() -> Fields:
    """A sink token, a key-value bias or a key bias takes the sink from the first token; a value bias does not.

    Three places that can take surplus attention, and a value added to the output, which cannot. ``sink_rate`` is about the
    first token of the text, also where a learned token stands in front of it. The paper's models read no BOS; at the scales
    that have BOS in front of every row it is that first token, and a place of the same kind.
    """
    taking = (SINK_TOKEN, KEY_VALUE_BIAS, KEY_BIAS)
    return dict(
        where="table 4",
        published="Rates of the bias and of the first token: sink token 74.12 and 0.00, key-value bias 72.76 and 0.04, "
        "key bias 73.34 and 0.00; first token with a value bias 17.53, without any 18.18.",
        variants=(UNCHANGED, *taking, VALUE_BIAS),
        parts=(
            *(has_sink(variant.label, "sink_rate_star") for variant in taking),
            *(has_no_sink(variant.label) for variant in taking),
            has_sink(VALUE_BIAS.label),
        ),
    )


@claims.register("fixed_value_of_bias")
@gu
def fixed_value_of_bias() -> Fields:
    """A key bias takes the less of the sink the longer its fixed value is, and the first token gets it back.

    Lengths 0, 5 and 20 along the first coordinate (v' of the paper), fixed; the key alone is learned.
    """
    zero, short, long = KEY_BIAS.label, SHORT_VALUE.label, LONG_VALUE.label
    return dict(
        where="table 5",
        published="Rates of the bias and of the first token: length 0 73.34 and 0.00, 5 44.43 and 3.71, 20 1.51 and 25.88.",
        variants=(UNCHANGED, KEY_BIAS, SHORT_VALUE, LONG_VALUE),
        presupposes=(has_sink(), has_sink(zero, "sink_rate_star")),
        parts=(
            Part("a value takes from the bias", Difference("sink_rate_star", short, zero), less_than=-SINK),
            Part("a longer one takes more", Difference("sink_rate_star", long, short), less_than=-SINK),
            Part("the first token gets it back", Difference("sink_rate", long, zero), more_than=SINK),
        ),
    )


@claims.register("shared_biases")
@gu
def shared_biases() -> Fields:
    """A key bias that heads share takes the sink whole; a shared key-value bias leaves some on the first token."""
    key = operation("key bias, shared", "key_bias", shared=True)
    both = operation("key-value bias, shared", "key_value_bias", shared=True)
    keeps = "the first token keeps more when key and value are shared"
    return dict(
        where="section 7",
        published="Rates of the bias and of the first token: key bias shared 68.31 and 0.23, of each head 73.34 and 0.00; "
        "key-value bias shared 56.61 and 12.44, of each head 72.76 and 0.04.",
        variants=(UNCHANGED, KEY_VALUE_BIAS, key, both),
        presupposes=(has_sink(), has_sink(KEY_VALUE_BIAS.label, "sink_rate_star")),
        parts=(
            has_sink(key.label, "sink_rate_star"),
            has_no_sink(key.label),
            has_sink(both.label, "sink_rate_star"),
            Part(keeps, Difference("sink_rate", both.label, KEY_VALUE_BIAS.label), more_than=SINK),
        ),
    )


def _quiet(label: str) -> Variant:
    """Sigmoid whose outputs are 2/T of it at one of :data:`RATES`: rows of a full context start with a mass of one."""

    def changes(base: PretrainingConfig) -> Changes:
        quiet = {"name": "sigmoid", "scale": 2 / base.model.max_position_embeddings}
        return {"model.operation": quiet, "optimizer.learning_rate": Times(RATES[label])}

    return Variant("quiet sigmoid" if label == BASELINE else f"quiet sigmoid, {label}", changes)


@claims.register("sigmoid_has_no_sink")
@gu
def sigmoid_has_no_sink() -> Fields:
    """Sigmoid attention has no sink, has one when its rows are divided by their sum, and learns no worse at its own best rate.

    Without normalisation, the paper's rate is that of the rows divided by their sum, and says nothing of how small that is. Of
    weights that sum to a hundredth, a head may have most on the first token and write nothing of it; of weights of a half on
    every key, much of it and no more than of any other. So a head has a sink here if it does both.

    Without a bias every key starts with a half, so the outputs are T/2 times as large as those of softmax. The paper's 21
    billion tokens make up for it, and 4 million do not: the loss is compared with outputs times 2/T, a smaller start of W_O.
    """
    normalised = operation("sigmoid, normalised", "sigmoid", normalize=True)
    rates = ("rate x1/2", BASELINE)
    quiet = tuple(map(_quiet, rates))
    no_worse = Best("held_out_loss", tuple(variant.label for variant in quiet), rates)
    as_published = Difference("held_out_loss", SIGMOID.label, BASELINE)
    says = "as published, no bias, this few tokens: the loss is no worse"
    return dict(
        where="section 7",
        published="Sink rate and validation loss: softmax 18.18 and 3.73, sigmoid 0.44 and 3.70, normalised sigmoid 30.24 and "
        "3.74; a rate of the weights themselves is not published.",
        variants=(*map(rate, rates), SIGMOID, *quiet, normalised),
        read_outs=("sinks", "carried"),
        parts=(
            dataclasses.replace(has_no_sink(SIGMOID.label, "carried_rate"), beside=has_no_sink(SIGMOID.label).beside),
            has_sink(normalised.label),
            Part(
                "at each one's best rate the loss is no worse",
                no_worse,
                less_than=0.05,
                beside=Part(says, as_published, less_than=0.05),
            ),
        ),
    )
