"""Gu et al. 2024, sections 3 to 7: what a sink is in a trained model: norms, inputs, the metric, roles, fine-tuning, a bias."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping

import torch

from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.errors import DoesNotApply
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import claims, read_outs
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab.results.progress import silent
from sinklab.results.table import unpacked
from sinklab.sinks import find_sinks
from sinklab.studies.fold.measurement import fold
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab_claims.barbero2025 import without_bos
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part, Times, Variant, base_called
from sinklab_claims.contract.effect import Difference, Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel, TrainedModel, gives
from sinklab_claims.numbers.attention import SAMPLES, look
from sinklab_claims.numbers.norms import norms_by_layer
from sinklab_claims.variants import (
    SINK,
    UNCHANGED,
    Fields,
    has_massive,
    has_no_sink,
    has_sink,
    of_paper,
    only_about,
    without_bos_in_front,
)

PAPER = "Gu et al. 2024 (arXiv 2410.10781)"
gu = of_paper("gu2024", PAPER)

# --- norms and angles ---------------------------------------------------------------------------------------------------------

SMALL = 0.8
"""A norm over the mean of others below which it is called small: a fifth less."""

PUBLISHED_NORMS = (
    "LLaMA3-8B: |h_1| 370 where others have 1 to 60; |k_1| 3 to 5 and 20; |v_1| below 1 and 2 to 5.7; cosine with queries 0.5 "
    "and -0.2 in the head shown."
)


def norms_of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """The numbers of the claim, and those of every layer by themselves."""
    return {BASELINE: {**read_outs["sinks"](checkpoint), **read_outs["norms"](checkpoint)}, **norms_by_layer(checkpoint)}


@claims.register("hidden_key_value_norms")
@gu
def hidden_key_value_norms() -> Fields:
    """The sink token has a large hidden state and a small key and value; queries are drawn by the angle.

    Keys, values and angles are those of the heads whose mean weight on the first token exceeds 0.3.
    """
    return dict(
        where="section 3.1",
        published=PUBLISHED_NORMS,
        costs={},
        checkpoint=OnCheckpoint(measure=norms_of_checkpoint, about="text"),
        presupposes=(has_sink(),),
        parts=(
            has_massive(),
            Part("its key is small", Value("key_ratio_sink", BASELINE), less_than=SMALL),
            Part("its value is small", Value("value_ratio_sink", BASELINE), less_than=SMALL),
            Part(
                "queries point to its key more than to others",
                Difference("cosine_first", BASELINE, BASELINE, "cosine_other"),
                more_than=0.2,
            ),
        ),
    )


# --- inputs -------------------------------------------------------------------------------------------------------------------

REPEATED = "sink_rate_repeated_no_bos"


KEEPS_HALF = Part(
    "random tokens, with nothing in front, keep most of the sink",
    Ratio("sink_rate_random_no_bos", BASELINE, BASELINE, "sink_rate"),
    more_than=0.5,
)


@claims.register("inputs_by_position")
@gu
def inputs_by_position() -> Fields:
    """With learned positions random tokens keep the sink, and so does one token repeated.

    Rows of both kinds have nothing in front: where the training had BOS, a sink that is at that token and not at its position
    is lost with it, and would be kept by any row that begins with it. ``repeated_token_laws`` says what one token repeated does
    without positions, with ALiBi and with relative ones, of which ``results/tiny-bos.json`` has trainings.
    """
    return dict(
        where="table 1 and section 3.3",
        published="GPT2-XL, which learns positions: natural 77.00, random 70.29, repeated 62.28; LLaMA3-8B 99.02, 91.23, 0.00.",
        costs={},
        bases=("no-bos",),
        read_outs=("sinks", "inputs"),
        checkpoint=OnCheckpoint(about="text", not_about=only_about("learned")),
        presupposes=(has_sink(),),
        parts=(KEEPS_HALF, has_sink(metric=REPEATED)),
    )


@claims.register("inputs_with_rotary_positions")
@gu
def inputs_with_rotary_positions() -> Fields:
    """With rotary positions random tokens keep the sink, and one token repeated loses it, both without BOS in front.

    Rows of both kinds have nothing in front, as in the paper. The models that it names read BOS in front of natural text.
    """
    return dict(
        where="table 1 and section 3.3",
        published="Natural, random, repeated: LLaMA2-7B 92.47, 90.13, 0.00; LLaMA3-8B 99.02, 91.23, 0.00; Mistral-7B 97.49, "
        "75.21, 0.00.",
        costs={},
        read_outs=("sinks", "inputs"),
        checkpoint=OnCheckpoint(
            not_about=only_about("rotary"),
            remark="Where BOS carries the sink, both kinds of rows lose it with BOS, and both have it behind BOS.",
        ),
        presupposes=(has_sink(),),
        parts=(KEEPS_HALF, has_no_sink(BASELINE, REPEATED)),
    )


# --- the metric ---------------------------------------------------------------------------------------------------------------

THRESHOLDS = (20, 30, 40)
"""Percent of a row. At 50, the fourth threshold of the paper's figure, models as small as ours are all near 0."""

LENGTHS = (32, 48, 64)
"""Tokens. In rows of 16 a head that attends evenly gives the first token 0.21, above the lowest threshold."""

CHANGE = 10.0
"""Points, about half of the rate of 18.18 that the paper's model of 60 million parameters has."""


def _name(threshold: int, length: int) -> str:
    return f"sink_rate_{threshold}_of_{length}"


_RATE = "Sink rate (gu2024) of the first token at a threshold of"

BY_SETTING = (
    *(
        Metric(_name(at, n), "percent", f"{_RATE} {at} % of a row, over rows of {n} tokens.", paper=PAPER, range=PERCENTAGE)
        for at, n in itertools.product(THRESHOLDS, LENGTHS)
    ),
    Metric(
        "change_with_length",
        "percent",
        "Largest of the sink rates at a threshold of 0.3 over rows of 32, 48 and 64 tokens, less the smallest.",
        range=PERCENTAGE,
    ),
)


@gives(*BY_SETTING)
def rates(trained: MeasuredModel) -> dict[str, float]:
    """Rates of the first token at every threshold and length; shorter rows are the beginnings of the longer ones."""
    numbers: dict[str, float] = {}
    for length in LENGTHS:
        probes = {threshold: SinkRate(threshold / 100) for threshold in THRESHOLDS}
        look(trained.loaded.model, trained.rows(SAMPLES, max(LENGTHS))[:, :length], tuple(probes.values()))
        numbers |= {_name(threshold, length): _rate_at(probe, trained.front) for threshold, probe in probes.items()}
    at_usual = [numbers[_name(30, length)] for length in LENGTHS]
    return {**numbers, "change_with_length": max(at_usual) - min(at_usual)}


def _rate_at(probe: SinkRate, place: int) -> float:
    """The rate of a place in percent, over all layers and heads."""
    return next(
        row["value"]
        for row in unpacked(probe.rows())
        if row["metric"] == "gu2024" and "layer" not in row and row.get("key_position") == place
    )


@claims.register("threshold_and_length")
@gu
def threshold_and_length() -> Fields:
    """At a threshold of 0.3 the sink rate changes little with the length of the rows, from 32 to 64 tokens.

    The rates at 0.2 and 0.4 stand beside it. ``results/tiny.json`` has four trainings, whose order no threshold and no length
    changes.
    """
    return dict(
        where="section 3.2",
        published="Curves of three large models at thresholds of 0.2 to 0.5 over lengths, no numbers: the rate falls with the "
        "length, faster at larger thresholds; 0.3 is chosen as strict and not very sensitive to the length.",
        costs={},
        bases=("no-bos",),
        read_outs=(rates,),
        presupposes=(Part("there is a sink with baseline", Value(_name(30, 64), BASELINE), more_than=SINK),),
        parts=(Part("the rate changes little with the length", Value("change_with_length", BASELINE), less_than=CHANGE),),
        checkpoint=OnCheckpoint(),
    )


# --- roles --------------------------------------------------------------------------------------------------------------------

SHARE = 0.05
"""Of a row, by which the moved token must exceed the first position."""


def moved(checkpoint: Checkpoint) -> Numbers:
    """Shares of the head that gives BOS most, with BOS where it was and a quarter into the row."""
    return {BASELINE: without_bos(checkpoint)}


@claims.register("sink_is_a_role")
@gu
def sink_is_a_role() -> Fields:
    """The sink is the token that stands first in every row of the training, wherever that is and whichever token it is: with
    BOS moved into the text it moves along.

    ``results/tiny.json`` has trainings with a token fixed at the second or third position.
    """
    follows = Part(
        "with BOS a quarter into the row the sink is there, and not at position 0",
        Difference("at_bos_moved", BASELINE, BASELINE, "at_first_moved"),
        more_than=SHARE,
    )
    return dict(
        where="section 5",
        published="With a token fixed at the second or third position, the sink rate there is 69 or 70 %, and 0 at the first.",
        costs={},
        bases=("no-bos",),
        parts=(follows,),
        presupposes=(Part("a head has its sink on BOS", Value("strongest", BASELINE), more_than=0.3),),
        checkpoint=OnCheckpoint(
            measure=moved,
            not_about=without_bos_in_front,
            remark="On a checkpoint BOS, which stood first in every row of its training, is moved in the texts that it reads.",
        ),
    )


# --- fine-tuning --------------------------------------------------------------------------------------------------------------

FIRST_TEXT = (
    Metric(
        "first_text_sink_rate",
        "percent",
        "Sink rate of the first token on held-out text of the first training, 64 tokens a row.",
        range=PERCENTAGE,
    ),
    Metric("first_text_loss", "nats", "Mean next-token loss on the same rows."),
)

MARGIN = 10.0
"""Points of the sink rate: the largest change that is published, of Mistral-7B, is 9.15."""


def tune(config: PretrainingConfig) -> Mapping[str, object]:
    """Python source, or made-up text for a model that has been trained on Python source."""
    corpus = "bigram_backcopy" if config.data.corpus == "python_source" else "python_source"
    return {
        "data.corpus": corpus,
        "optimizer.learning_rate": Times(0.05),
        "training.steps": Times(0.25),
        "schedule.warmup_steps": Times(0.25),
    }


@gives(*FIRST_TEXT)
def on_the_first_text(trained: TrainedModel) -> dict[str, float]:
    """Sink rate and loss on held-out text of the scale's own configuration, after whichever training."""
    first = base_called(trained.config.name)
    samples, length = min(100, first.data.held_out_rows), min(64, first.model.max_position_embeddings)
    rows = prepare_data(first, trained.cache).probe_rows(samples, length).to(trained.loaded.device)
    probe = SinkRate()
    with torch.no_grad(), attend(trained.loaded.model, (probe,)):
        loss = trained.loaded.model(input_ids=rows, labels=rows).loss
    return {"first_text_sink_rate": _rate_at(probe, 0), "first_text_loss": loss.item()}


@claims.register("fine_tuning_keeps_the_sink")
@gu
def fine_tuning_keeps_the_sink() -> Fields:
    """Fine-tuning does not change the sink much.

    A twentieth of the rate and a quarter of the steps; both models are measured on text of the first training. That the loss
    there has risen shows that the second training has changed something.
    """
    tuned = "fine-tuned"
    stays = Difference("first_text_sink_rate", tuned, BASELINE)
    changed = Part("fine-tuning changes the model", Difference("first_text_loss", tuned, BASELINE), more_than=0.02)
    return dict(
        where="table 1",
        published="Base and chat: Mistral-7B 97.49 and 88.34, LLaMA2-7B 92.47 and 92.88, LLaMA2-13B 91.69 and 90.94, LLaMA3-8B "
        "99.02 and 98.85.",
        variants=(UNCHANGED, Variant(tuned, tune, after=BASELINE)),
        bases=("bos", "no-bos"),
        read_outs=(on_the_first_text,),
        presupposes=(has_sink(metric="first_text_sink_rate"), changed),
        parts=(Part("the sink rate stays", stays, more_than=-MARGIN, less_than=MARGIN),),
    )


# --- a bias in its place ------------------------------------------------------------------------------------------------------

CONSTANTS, SILENT, NOTHING = "constants", "no value", "nothing"
"""What stands in the place of the sinks, as :mod:`sinklab.studies.fold.measurement` names it."""

IN_ITS_PLACE = (
    Metric("loss_change_folded", "nats", "Held-out loss behind the sinks with their keys hidden, less that with them."),
    Metric("folded_share", "fraction", "Of the heads that rest on a sink, those with constants in its place.", range=FRACTION),
)

FOLDED_TEXTS = 8
"""For the constants, and as many others to judge them by."""


def folded(checkpoint: Checkpoint) -> Numbers:
    """What the loss does with constants, with a value of 0 and with nothing in the place of the sinks, which are hidden.

    The layers that cost most are not left alone here, as ``sinklab fold`` leaves them, or the loss would stay by construction;
    heads of whose weight the fit misses too much are, and keep their sink in all three. Without a sink nothing is hidden.
    """
    if (operation := checkpoint.loaded.operation) != "softmax":
        raise DoesNotApply(f"a sink is folded into softmax attention, and this model has {operation}")
    model = copy.deepcopy(checkpoint.loaded.model)  # folding changes it
    texts = Samples.of_tokens(checkpoint.rows(2 * FOLDED_TEXTS, 256))
    first, others = texts.take(slice(0, FOLDED_TEXTS)), texts.take(slice(FOLDED_TEXTS, None))
    sinks = find_sinks(model, first.arguments)
    _, found, _ = fold(model, first, others, sinks, margin=math.inf, neurons=(), progress=silent)
    if not found.positions:
        return {NOTHING: {"loss_change_folded": 0.0}}
    numbers = {form.name: {"loss_change_folded": form.change.mean} for form in found.forms}
    resting = [head.folded for head in found.heads if head.rests]
    numbers[CONSTANTS]["folded_share"] = sum(resting) / len(resting)
    return numbers


@claims.register("sink_is_a_constant_bias")
@gu
def sink_is_a_constant_bias() -> Fields:
    """A sink is a constant key-value bias: with a score that is affine in the query before rotation and one value in its place
    the loss stays, and without the value it does not.

    The paper finds that sinks act as key biases, which need not say anything. The value is the correction: a trained model
    counts on what its sinks say (docs/fold.md, why it works).
    """
    cost = "loss_change_folded"
    return dict(
        where="abstract and table 4",
        published="Sinks act as key biases that may say nothing: a model that is trained with a key bias whose value is 0 has "
        "its sink there (73.34). Of a trained model whose sink is replaced no number is published.",
        costs={},
        presupposes=(Part("hidden, with nothing in its place, the sink is missed", Value(cost, NOTHING), more_than=0.1),),
        parts=(
            Part("with constants in its place the loss stays", Value(cost, CONSTANTS), more_than=-0.02, less_than=0.02),
            Part("most heads that rest on it have them", Value("folded_share", CONSTANTS), more_than=0.5),
            Part("without the value the loss is higher", Difference(cost, SILENT, CONSTANTS), more_than=0.05),
        ),
        checkpoint=OnCheckpoint(measure=folded, reads="context"),
    )
