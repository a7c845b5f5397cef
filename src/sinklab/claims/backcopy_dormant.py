"""Guo et al. 2024: the head that copies behind triggers sleeps on BOS everywhere else, and BOS has a drained value."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.registry import claims, operations
from sinklab.studies.backcopy.lab import run_backcopy
from sinklab.studies.backcopy.record import NUMBERS
from sinklab.studies.backcopy.training import SCALES, BackcopySettings
from sinklab_claims.contract.claim import Claim, Part, Scale
from sinklab_claims.contract.effect import Difference, Numbers, Value

__all__ = ["backcopy_dormant"]

HALF = 0.5
"""A majority of the weight: it decides whether a head is active or dormant."""

LEARNED = 0.1
"""Nats above the entropy of the language, at triggers, below which copying is learned."""

SETTINGS: Mapping[Scale, BackcopySettings] = {
    "tiny": BackcopySettings(width=32, length=32, steps=2000, evaluations=2),
    "small": BackcopySettings(evaluations=2),
    "60m": BackcopySettings(**SCALES["paper"], evaluations=2),
}
"""One layer with one head; the paper's own sizes under the name of the scale that is for GPUs."""

METRICS = tuple(
    NUMBERS[name]
    for name in (
        "trigger_excess",
        "other_excess",
        "bos_weight",
        "bos_weight_trigger",
        "previous_weight_trigger",
        "value_ratio",
        "knock_out_trigger_excess",
        "knock_out_other_excess",
    )
)


def measure(seed: int, scale: Scale) -> Numbers:
    """The one head of the model, trained on a chain counted from the installed Python source."""
    run = run_backcopy([operations.make("softmax")], [seed], SETTINGS[scale]).summary["runs"][0]
    return {"softmax": {metric.name: run[metric.name] for metric in METRICS if run[metric.name] is not None}}


@claims.register("backcopy_dormant")
def backcopy_dormant() -> Claim:
    """Active and dormant by weights; what the head is worth without it is recorded beside them."""
    return Claim(
        statement="On bigram-backcopy sequences the head copies behind triggers and is dormant elsewhere: its weight is on "
        "BOS, whose value is small.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835), section 2",
        published="One layer with one head: at triggers the weight is on the token before, elsewhere on BOS; the value of BOS "
        "is near 0.",
        presupposes=(Part("copying is learned", Value("trigger_excess", "softmax"), less_than=LEARNED),),
        parts=(
            Part("active at triggers", Value("previous_weight_trigger", "softmax"), more_than=HALF),
            Part("dormant elsewhere", Value("bos_weight", "softmax"), more_than=HALF),
            Part(
                "off BOS at triggers",
                Difference("bos_weight", "softmax", "softmax", other="bos_weight_trigger"),
                more_than=HALF,
            ),
            Part("the value of BOS is drained", Value("value_ratio", "softmax"), less_than=HALF),
        ),
        measure=measure,
        costs={"tiny": "minutes", "small": "minutes", "60m": "gpu"},
    )
