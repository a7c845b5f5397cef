"""Xiao et al. 2023, section 3.1: without the sink it is the place for attention that is missed, and not what is said there."""

from __future__ import annotations

import torch

from sinklab.attention.intervention import Intervention
from sinklab.attention.session import attend
from sinklab.claims._architecture import has_sink
from sinklab.claims._embedded import embedded_model
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.zero_value import ZeroValue
from sinklab.jobs.checkpoint import Checkpoint
from sinklab.jobs.claim import BASELINE, Claim, Numbers, OnCheckpoint, Part, Ratio, Scale, Value
from sinklab.read_outs._attention import batches
from sinklab.registry import claims, read_outs
from sinklab.results.metric import Metric
from sinklab.training.windowed import token_losses

__all__ = ["METRICS", "mass_thrown_on_content", "measure", "of_checkpoint"]

HIDDEN, SILENT = "sink hidden", "value of the sink zeroed"
METRICS = (Metric("cost", "nats", "Next-token loss with something done to the first key of all heads, less that without."),)

TEXTS, SEQ_LEN = 32, 256

LEAST = 0.05
"""Nats per token: a cost below it is none, as in the other claims on eviction."""


@torch.no_grad()
def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """The sink of the model, and what two edits of its first key cost on the same texts.

    Hidden, a row hands its weight to the other keys. With a value of zero every other weight stays as it is and what the sink
    says is gone, which is the same as to hide the key and hand its weight to nothing.
    """
    model, rows = checkpoint.loaded.model, checkpoint.rows(TEXTS, SEQ_LEN)

    def loss(*edits: Intervention) -> float:
        with attend(model, (), edits):
            return torch.cat([token_losses(model, part) for part in batches(rows)]).double().mean().item()

    plain = loss()
    return {
        BASELINE: read_outs["sinks"](checkpoint),
        HIDDEN: {"cost": loss(HideKey(place=checkpoint.front)) - plain},
        SILENT: {"cost": loss(ZeroValue(place=checkpoint.front)) - plain},
    }


def measure(seed: int, scale: Scale) -> Numbers:
    """The same of the embedded softmax model."""
    return of_checkpoint(embedded_model("embedded:softmax", seed))


@claims.register("mass_thrown_on_content")
def mass_thrown_on_content() -> Claim:
    """The same key is taken out of the denominator, or out of the numerator alone."""
    return Claim(
        statement="Without its sink a model misses a place for its attention and not what is said there: hidden, the sink's "
        "weight falls on content and the loss rises; silenced, with all weights as they were, it costs less than half of that.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), section 3.1",
        published="No number: evicting the first tokens takes away most of the denominator of the softmax, which shifts all "
        "other weights.",
        presupposes=(has_sink(),),
        parts=(
            Part("the sink hidden, the loss rises", Value("cost", HIDDEN), more_than=LEAST),
            Part("silenced, it costs less than half", Ratio("cost", SILENT, HIDDEN), less_than=0.5),
        ),
        measure=measure,
        costs={"tiny": "seconds"},
        one_model={"tiny": "embedded:softmax"},
        evidence={
            "tiny": "one trained model, embedded:softmax; a seed is a draw of texts, so intervals are over texts, not trainings"
        },
        checkpoint=OnCheckpoint(measure=of_checkpoint, reads="context"),
    )
