"""Son et al. 2024: eight bits cost little where the first token, which makes the outliers, stays in full precision."""

from __future__ import annotations

import torch

from sinklab.corpora.samples import Samples
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.studies.quantize.twin import Scheme, Treatment, Twin
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.variants import Fields, of_paper

son = of_paper("son2024", "Son et al. 2024 (arXiv 2406.12016)")

PREFIX = "first token whole"

GAP = Metric("int8_gap", "nats", "Loss with weights and activations on grids of eight bits, less that without.")
SIZE = Metric("largest_activation", "number", "Largest size of an input of a linear map that is on a grid, while calibrating.")

CALIBRATION, TEXTS, LENGTH = 4, 8, 256

LEAST = 0.02
"""Nats: a difference below it is none."""


@torch.no_grad()
def eight_bits(checkpoint: Checkpoint) -> Numbers:
    """What W8A8 costs, one static grid for the inputs of each linear map, with the first token on it and in full precision.

    Losses are those of other texts than the grids are from, and leave out the first token, which nothing predicts.
    """
    texts = Samples.of_tokens(checkpoint.rows(CALIBRATION + TEXTS, LENGTH))
    first, others = texts.take(slice(0, CALIBRATION)), texts.take(slice(CALIBRATION, None))
    twin, place = Twin(checkpoint.loaded.model), checkpoint.front
    plain = twin.losses(others, None).double().nanmean()
    numbers = {}
    for label, whole in ((BASELINE, ()), (PREFIX, (place,))):
        ranges = twin.ranges(first, without=whole)
        gap = twin.losses(others, Treatment(scheme=Scheme(8, 8), ranges=ranges, positions=whole)).double().nanmean() - plain
        largest = max(float(torch.maximum(found.high.abs(), found.low.abs()).max()) for found in ranges.values())
        numbers[label] = {GAP.name: float(gap), SIZE.name: largest}
    return numbers


@claims.register("int8_gap_falls")
@son
def int8_gap_falls() -> Fields:
    """With the first token in full precision, as the cache of a prefix is, most of what eight bits cost is gone.

    The paper searches for a prefix that takes the outliers; here it is the token that has them, where it stands.
    """
    return dict(
        where="Tables 1 to 3",
        published="Perplexity and accuracy with one static grid for each tensor come near those without, "
        "for LLaMA, OPT and BLOOM.",
        costs={},
        presupposes=(Part("eight bits cost something", Value(GAP.name, BASELINE), more_than=LEAST),),
        parts=(
            Part("less than half of it is left", Ratio(GAP.name, PREFIX, BASELINE), less_than=0.5),
            Part("the largest activation falls to half", Ratio(SIZE.name, PREFIX, BASELINE), less_than=0.5),
        ),
        checkpoint=OnCheckpoint(measure=eight_bits, reads="context"),
    )
