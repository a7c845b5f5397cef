"""Xiao et al. 2023, section 3.1: without the sink it is the place for attention that is missed, and not what is said there."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.accumulate import filled
from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys, weights_on_own_keys
from sinklab.attention.intervention import Intervention
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.claims._architecture import has_sink
from sinklab.claims._embedded import embedded_model
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.zero_value import ZeroValue
from sinklab.read_outs._attention import batches
from sinklab.registry import claims, read_outs
from sinklab.results.metric import Metric
from sinklab.training.windowed import token_losses
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part, Scale
from sinklab_claims.contract.effect import Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["METRICS", "Shares", "mass_thrown_on_content", "measure", "of_checkpoint"]

HIDDEN, SILENT, BARE = "sink hidden", "value of the sink zeroed", "sink hidden, its weight handed to nothing"

FIRST = 4
"""First tokens that may take the sink's place, as many as a bounded cache keeps."""

METRICS = (
    Metric("cost", "nats", "Next-token loss with something done to the first key of all heads, less that without."),
    Metric(
        "freed_to_first",
        "fraction",
        "Of the weight that the first key loses, the share that the other first tokens gain: those up to the fourth; mean over "
        "all heads and the queries behind them.",
    ),
    Metric("freed_to_own", "fraction", "Likewise the share that the key of the query's own token gains."),
    Metric("freed_to_content", "fraction", "Likewise the share that all other keys gain."),
)

TEXTS, SEQ_LEN = 32, 256

LEAST = 0.05
"""Nats per token: a cost below it is none, as in the other claims on eviction."""


class Shares(Watcher):
    """Weight on the first key, on those up to the fourth, on the query's own and on all, summed over heads and queries behind.

    Args:
        front: learned tokens in front of every row.
    """

    name = "shares"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.keys = tuple(range(front, front + FIRST))
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        behind = (call.query_positions > self.keys[-1])[:, None]
        firsts = weights_of_keys(call, keys_of_document(call, *self.keys), statistics.log_sum_exp)
        own = weights_on_own_keys(call, statistics.log_sum_exp)
        (mass,) = filled(statistics, "row_mass")
        groups = firsts[..., 0], firsts[..., 1:].sum(-1), own, mass
        self.sums += torch.stack([(group * behind).double().sum().cpu() for group in groups])


def _freed(before: Tensor, after: Tensor) -> dict[str, float]:
    """Where the weight of the first key goes, of sums of :class:`Shares`."""
    first, second, own, mass = (after - before).tolist()
    return {
        "freed_to_first": second / -first,
        "freed_to_own": own / -first,
        "freed_to_content": (mass - first - second - own) / -first,
    }


@torch.no_grad()
def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """The sink of the model, what three edits of its first key cost on the same texts, and where its weight goes.

    Hidden, a row hands its weight to the other keys. With a value of zero every other weight stays as it is and what the sink
    says is gone; to hide the key and hand its weight to nothing does the same by another way, but to the first token itself.
    """
    model, rows = checkpoint.loaded.model, checkpoint.rows(TEXTS, SEQ_LEN)

    def read(*edits: Intervention) -> tuple[float, Tensor]:
        shares = Shares(checkpoint.front)
        with attend(model, (shares,), edits):
            loss = torch.cat([token_losses(model, part) for part in batches(rows)]).double().mean().item()
        return loss, shares.sums

    plain, before = read()
    place = checkpoint.front
    hidden, after = read(HideKey(place=place))
    return {
        BASELINE: read_outs["sinks"](checkpoint),
        HIDDEN: {"cost": hidden - plain, **_freed(before, after)},
        SILENT: {"cost": read(ZeroValue(place=place))[0] - plain},
        BARE: {"cost": read(HideKey(place=place, renormalize=False))[0] - plain},
    }


def measure(seed: int, scale: Scale) -> Numbers:
    """The same of the embedded softmax model."""
    return of_checkpoint(embedded_model("softmax", seed, scale))


@claims.register("mass_thrown_on_content")
def mass_thrown_on_content() -> Claim:
    """The same key is taken out of the denominator, or out of the numerator alone."""
    return Claim(
        statement="Without its sink a model misses a place for its attention and not what is said there: hidden, the sink's "
        "weight falls on content and the loss rises; silenced, with all weights as they were, or with its weight handed to "
        "nothing, it costs less than half of that.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), section 3.1",
        published="No number: evicting the first tokens takes away most of the denominator of the softmax, which shifts all "
        "other weights.",
        presupposes=(has_sink(),),
        parts=(
            Part("the sink hidden, the loss rises", Value("cost", HIDDEN), more_than=LEAST),
            Part("most of its weight falls on content", Value("freed_to_content", HIDDEN), more_than=0.5),
            Part("silenced, it costs less than half", Ratio("cost", SILENT, HIDDEN), less_than=0.5),
            Part("its weight handed to nothing, it costs less than half", Ratio("cost", BARE, HIDDEN), less_than=0.5),
        ),
        measure=measure,
        natural_text=True,
        costs={"tiny": "seconds", "small": "seconds"},
        one_model={"tiny": "embedded:softmax"},
        evidence={
            "tiny": "one trained model, embedded:softmax; a seed is a draw of texts, so intervals are over texts, not "
            "trainings",
            "small": "trainings of 1.5 million parameters on Python source; each reads texts of its own",
        },
        checkpoint=OnCheckpoint(measure=of_checkpoint, reads="context"),
    )
