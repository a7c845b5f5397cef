"""Guo et al. 2024: heads that are active at triggers and dormant elsewhere, and what Adam has to do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from sinklab.attention.session import attend
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, VALUE_RATIO, Metric
from sinklab_claims.backcopy import PAPER, HeadNumbers, Settings, numbers_of
from sinklab_claims.contract.claim import BASELINE, Part, Scale, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Value
from sinklab_claims.contract.trained import TrainedModel
from sinklab_claims.variants import Fields, of_paper

__all__ = ["copy_head"]

guo = of_paper("guo2024", "Guo et al. 2024 (arXiv 2410.13835)")

HALF = 0.5
"""A majority of the weight: it decides whether a head is active or dormant."""

LEARNED = 0.1
"""Nats above the entropy of the language, at triggers, below which copying is learned."""

SETTINGS: Mapping[Scale, Settings] = {"tiny": Settings(width=32, length=32, steps=2000), "small": Settings(), "60m": PAPER}
"""One layer with one head; the paper's own sizes under the name of the scale that is for GPUs."""


def measure(seed: int, scale: Scale) -> Numbers:
    """The one head of the model, trained on a chain counted from the installed Python source."""
    return {"softmax": numbers_of(SETTINGS[scale], seed)}


@claims.register("backcopy_dormant")
@guo
def backcopy_dormant() -> Fields:
    """On bigram-backcopy sequences the head copies behind triggers and is dormant elsewhere: its weight is on BOS, whose value
    is small."""
    return dict(
        where="section 2",
        published="One layer with one head: at triggers the weight is on the token before, elsewhere on BOS; the value of BOS "
        "is near 0.",
        presupposes=(Part("copying is learned", Value("trigger_excess", "softmax"), less_than=LEARNED),),
        parts=(
            Part("active at triggers", Value("previous_weight_trigger", "softmax"), more_than=HALF),
            Part("dormant elsewhere", Value("bos_weight", "softmax"), more_than=HALF),
            Part("off BOS at triggers", Difference("bos_weight", "softmax", "softmax", "bos_weight_trigger"), more_than=HALF),
            Part("the value of BOS is drained", Value("value_ratio", "softmax"), less_than=HALF),
        ),
        measure=measure,
        costs={"tiny": "minutes", "small": "minutes", "60m": "gpu"},
    )


# --- several heads and layers -------------------------------------------------------------------------------------------------

WHERE = {"at_trigger": "_trigger", "elsewhere": ""}

METRICS = (
    *(
        Metric(f"{key}_{where}", "weight", f"Mean weight of the copying head on {what}, of {queries}.", range=FRACTION)
        for key, what in (("previous", "the token before"), ("bos", "BOS"))
        for where, queries in zip(WHERE, ("queries that are triggers", "other queries"), strict=True)
    ),
    VALUE_RATIO,
)

TRIGGERS = "!?#"
"""Those of the corpus ``bigram_backcopy``."""


def copy_head(trained: TrainedModel) -> dict[str, float]:
    """Weights of the head that looks at the token before most at triggers, on held-out rows. :data:`METRICS`."""
    loaded, rows = trained.loaded, trained.rows(100)
    assert loaded.tokenizer is not None  # trained on characters
    triggers = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(trigger) for trigger in TRIGGERS], device=rows.device)
    probe = HeadNumbers(torch.isin(rows, triggers), trained.config.model.tokens_in_front)
    with torch.no_grad(), attend(loaded.model, [probe]):
        loaded.model(rows, use_cache=False)
    means = [
        {name: float(values[:, head].nanmean()) for name, values in numbers.items()}
        for numbers in probe.heads.values()
        for head in range(numbers["bos_weight"].shape[1])
    ]
    copies = max(means, key=lambda numbers: numbers["previous_weight_trigger"])
    names = {f"{key}_{where}": f"{key}_weight{of}" for key in ("previous", "bos") for where, of in WHERE.items()}
    return {**{name: copies[of] for name, of in names.items()}, "value_ratio": copies["value_ratio"]}


@claims.register("backcopy_dormant_among_heads")
@guo
def backcopy_dormant_among_heads() -> Fields:
    """Among several heads too, one copies behind triggers and is dormant elsewhere: its weight is on BOS, whose value is small.

    The baseline of the smallest scale, whose text is of this kind; ``backcopy_dormant`` has the paper's model.
    """
    leaves = Difference("bos_elsewhere", BASELINE, BASELINE, "bos_at_trigger")
    return dict(
        where="sections 2 and 3",
        published="Shown for one layer with one head on such sequences, and for single heads of Llama 2 7B on text.",
        presupposes=(Part("a head copies", Value("previous_at_trigger", BASELINE), more_than=HALF),),
        parts=(
            Part("it is dormant elsewhere", Value("bos_elsewhere", BASELINE), more_than=HALF),
            Part("it leaves BOS at triggers", leaves, more_than=HALF),
            Part("the value of BOS is drained", Value("value_ratio", BASELINE), less_than=HALF),
        ),
        variants=(Variant(BASELINE),),
        read_outs=(copy_head,),
        costs={"tiny": "minutes"},
    )


# --- SGD in the place of Adam -------------------------------------------------------------------------------------------------

ADAM, SGD = "adamw", "sgd"

LAYERS = 3
"""Those of the models in which the paper swaps the optimiser."""

SINK = 0.3
"""Mean weight on BOS from which a head has its sink there: the threshold of Gu et al. 2024; even weights have 0.1."""


def adam_and_sgd(seed: int, scale: Scale) -> Numbers:
    """The head that copies of a model trained by each from the same initial weights."""
    settings = dataclasses.replace(SETTINGS[scale], layers=LAYERS)
    return {by: numbers_of(dataclasses.replace(settings, optimizer=by), seed) for by in (ADAM, SGD)}


@claims.register("sgd_keeps_the_sink")
@guo
def sgd_keeps_the_sink() -> Fields:
    """Trained by SGD instead of Adam, a model that has learned the task has its sink too.

    The paper's own task and depth, on which SGD learns what Adam learns; of the head that copies, off triggers.
    """
    with_adam, with_sgd = (
        Part(f"there is a sink with {by}", Value("bos_weight", by, FRACTION), more_than=SINK) for by in (ADAM, SGD)
    )
    learn = (Part(f"copying is learned by {by}", Value("trigger_excess", by), less_than=LEARNED) for by in (ADAM, SGD))
    return dict(
        published="From Adam to SGD residual peaks vanish and sinks stay, in models of three layers on bigram-backcopy.",
        presupposes=(*learn, with_adam),
        parts=(with_sgd,),
        measure=adam_and_sgd,
        costs={"tiny": "minutes", "small": "hours", "60m": "gpu"},
    )
