"""Barbero et al. 2025: a model that was trained with BOS in front of every row loses its sink, and its footing, without it."""

from __future__ import annotations

import math

import torch

from sinklab.registry import claims
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab.sinks import find_sinks
from sinklab.studies.causes.location import location
from sinklab.studies.causes.samples import token_samples
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Ratio, Value
from sinklab_claims.contract.trained import MeasuredModel, gives, once
from sinklab_claims.numbers.attention import attention_numbers
from sinklab_claims.variants import Fields, has_no_sink, has_sink, of_paper, without_bos_in_front

barbero = of_paper("barbero2025", "Barbero et al. 2025 (arXiv 2504.02732)")

EDITS = {
    "without": "BOS is gone",
    "replaced": "a random token stands in the place of BOS",
    "moved": "BOS stands a quarter into the row",
}

WITHOUT_BOS = (
    Metric("strongest", "fraction", "Mean share of a row on BOS, of the head that gives it most.", range=FRACTION),
    *(
        Metric(f"at_first_{edit}", "fraction", f"Share of that head on position 0 where {what}.", range=FRACTION)
        for edit, what in EDITS.items()
    ),
    Metric("at_bos_moved", "fraction", f"Share of that head on BOS where {EDITS['moved']}.", range=FRACTION),
    Metric(
        "sink_rate_without", "percent", "sink_rate of the first token where BOS is gone, on the same texts.", range=PERCENTAGE
    ),
    *(Metric(f"loss_{edit}", "nats", f"Change of the loss where {what}.") for edit, what in EDITS.items()),
)


@gives(*WITHOUT_BOS)
@once
def without_bos(trained: MeasuredModel) -> dict[str, float]:
    """Weight on the first token, with BOS and without, of the head that gives BOS most; and what each edit costs."""
    model, rows = trained.loaded.model, trained.rows(64, seq_len=64)
    samples = token_samples([("held-out", rows)])
    sink = find_sinks(model, samples.inputs, place=trained.front)
    with torch.no_grad():
        located = location(model, samples, sink)
    head, by_name = located.heads.index(located.head), located.conditions
    numbers = {
        "sink_rate_without": attention_numbers(model, rows[:, 1:], trained.front)["sink_rate"],
        "strongest": by_name["as it is"].at_place[head],
        "at_first_without": by_name["removed"].at_place[head],
        "at_first_replaced": by_name["replaced"].at_place[head],
        "at_bos_moved": by_name["moved"].at_first_token[head],
        "at_first_moved": by_name["moved"].at_place[head],
    }
    for name, of in (("without", "removed"), ("replaced", "replaced"), ("moved", "moved")):
        change = by_name[of].loss
        assert change is not None, "only the texts as they are have no change"
        numbers[f"loss_{name}"] = change.mean
    return {name: math.nan if number is None else float(number) for name, number in numbers.items()}


@claims.register("bos_removed")
@barbero
def bos_removed() -> Fields:
    """Where training had BOS in front of every row, the sink is on BOS: without it the first token has no sink, and predictions
    are worse.

    Only where every row of the training begins with BOS, which the set-up of Gu et al. has not.
    """
    left = Ratio("at_first_without", BASELINE, BASELINE, "strongest")
    return dict(
        where="section 5",
        published="Gemma 7B without BOS: ARC-e 80.8 to 28.5, RULER at 4,096 tokens 82.6 to 0.",
        presupposes=(has_sink(),),
        parts=(
            Part("the first token has not half the weight that BOS had", left, less_than=0.5),
            has_no_sink(BASELINE, "sink_rate_without"),
            Part("the loss rises", Value("loss_without", BASELINE), more_than=0.02),
        ),
        costs={},
        checkpoint=OnCheckpoint(not_about=without_bos_in_front),
        read_outs=("sinks", without_bos),
    )
