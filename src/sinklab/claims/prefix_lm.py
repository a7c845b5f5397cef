"""Prefix LM: where the first tokens see each other both ways, the sink is on exactly one of them."""

from __future__ import annotations

import statistics

import torch

from sinklab.attention.session import attend
from sinklab.claims._architecture import SINK, UNCHANGED, has_sink
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import claims
from sinklab.reproduction.claim import Claim, Condition
from sinklab.reproduction.effects import Ratio, Value
from sinklab.reproduction.trained import Trained
from sinklab.reproduction.verdict import Part
from sinklab.results.table import unpacked

__all__ = ["METRICS", "prefix_lm", "prefix_rates"]

PREFIX = Condition("prefix of 5", {"model.prefix": 5})

SAMPLES, SEQ_LEN = 64, 64

METRICS: dict[str, tuple[str, str]] = {
    "prefix_largest": (
        "percent",
        "Sink rate (gu2024) of single rows, over layers and heads: the largest among the tokens of the prefix; mean over rows.",
    ),
    "prefix_second": ("percent", "The second largest of each row; mean over rows."),
}
"""Metric to unit and definition."""


def prefix_rates(trained: Trained) -> dict[str, float]:
    """Rates of the most and the second most attended token of the prefix, row by row: the position may differ by row.

    A model without a prefix has none.
    """
    prefix, model = trained.config.model.prefix, trained.loaded.model
    if not prefix:
        return {}
    pairs = []
    for row in trained.rows(min(SAMPLES, trained.config.data.held_out_rows), SEQ_LEN):
        probe = SinkRate()
        with torch.no_grad(), attend(model, (probe,)):
            model(input_ids=row[None], use_cache=False)
        whole = [found for found in unpacked(probe.rows()) if found["metric"] == "gu2024" and "layer" not in found]
        rates = sorted((found["value"] for found in whole if found["key_position"] < prefix), reverse=True)
        pairs.append((rates[0], rates[1]))
    largest, second = zip(*pairs, strict=True)
    return {"prefix_largest": statistics.fmean(largest), "prefix_second": statistics.fmean(second)}


@claims.register("prefix_lm")
def prefix_lm() -> Claim:
    """A prefix of five tokens that carry no loss; the rest is causal.

    BOS stays where the scale has it. It is then one of the five, and the one that other models of the scale use.
    """
    return Claim(
        statement="With a bidirectional prefix, each row has its sink on exactly one of the tokens of the prefix.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 6",
        published="With a prefix of 5, each row has a sink rate of 19 to 24 on one of the five tokens, and none on the others.",
        conditions=(UNCHANGED, PREFIX),
        read_outs=("sinks", prefix_rates),
        presupposes=(has_sink(),),
        parts=(
            Part("a token of the prefix has a sink", Value("prefix_largest", PREFIX.label), "percent", more_than=SINK),
            Part(
                "no other token of the prefix has a quarter of it",
                Ratio("prefix_second", PREFIX.label, PREFIX.label, other="prefix_largest"),
                "ratio",
                less_than=0.25,
            ),
        ),
    )
