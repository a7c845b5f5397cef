"""Prefix LM: where the first tokens see each other both ways, the sink is on exactly one of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.accumulate import filled
from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.claims._architecture import SINK, UNCHANGED, has_sink
from sinklab.jobs.claim import Claim, Part, Variant
from sinklab.jobs.effect import Value
from sinklab.jobs.trained import TrainedModel
from sinklab.registry import claims
from sinklab.results.intervals import just_above
from sinklab.results.metric import PERCENTAGE, Metric

__all__ = ["METRICS", "RowRates", "prefix_lm", "prefix_rates"]

PREFIX = Variant("prefix of 5", {"model.prefix": 5})

SAMPLES, SEQ_LEN, THRESHOLD = 32, 64, 0.3
"""Rows, tokens of a row and epsilon; the last two as in Gu et al."""

EACH = 90.0
"""Percent of the rows that count as each of them; in one of ten a few heads of a small model may look elsewhere."""

METRICS = (
    Metric(
        "prefix_largest",
        "percent",
        "Sink rate (gu2024) of single rows, over layers and heads: the largest among the tokens of the prefix; mean over rows.",
        range=PERCENTAGE,
    ),
    Metric("prefix_second", "percent", "The second largest of each row; mean over rows.", range=PERCENTAGE),
    Metric(
        "prefix_one",
        "percent",
        f"Share of the rows in which one token of the prefix has a rate above {SINK} and no other has a quarter of it.",
        range=PERCENTAGE,
    ),
)


class RowRates(Watcher):
    """Share of the heads of all layers whose mean weight on a key exceeds the threshold, for each row by itself."""

    name = "row_rates"
    needs: ClassVar[frozenset[str]] = frozenset({"columns"})

    def __init__(self, prefix: int) -> None:
        self.prefix = prefix
        self.hits: list[Tensor] = []
        """Of each call, ``(rows, heads, prefix)``, 0 or 1."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        share, count = filled(statistics, "column_share", "column_count")
        self.hits.append(((share / count)[..., : self.prefix] > just_above(THRESHOLD)).double().cpu())

    def rates(self) -> Tensor:
        """Percent, float64 ``(rows, prefix)``; all calls must have been of the same rows."""
        return 100 * torch.cat(self.hits, dim=1).mean(dim=1)


def prefix_rates(trained: TrainedModel) -> dict[str, float]:
    """Rates of the most and the second most attended token of the prefix, row by row: the position may differ by row.

    A model without a prefix of two or more has none.
    """
    prefix, model = trained.config.model.prefix, trained.loaded.model
    if prefix < 2:
        return {}
    watcher = RowRates(prefix)
    with torch.no_grad(), attend(model, (watcher,)):
        model(input_ids=trained.rows(min(SAMPLES, trained.config.data.held_out_rows), SEQ_LEN), use_cache=False)
    largest, second = watcher.rates().topk(2, dim=1).values.unbind(dim=1)
    one = 100 * ((largest > SINK) & (second < largest / 4)).double()
    return {name: float(of.mean()) for name, of in zip((m.name for m in METRICS), (largest, second, one), strict=True)}


@claims.register("prefix_lm")
def prefix_lm() -> Claim:
    """A prefix of five tokens that carry no loss; the rest is causal.

    Of models without BOS alone: a BOS would be one of the five, and the one that has the sink anyhow.
    """
    return Claim(
        statement="With a bidirectional prefix, each row has its sink on exactly one of the tokens of the prefix.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 6",
        published="With a prefix of 5, each row has a sink rate of 19 to 24 on one of the five tokens, and none on the others.",
        variants=(UNCHANGED, PREFIX),
        bases=("no-bos",),
        read_outs=("sinks", prefix_rates),
        presupposes=(has_sink(),),
        parts=(
            Part("a token of the prefix has a sink", Value("prefix_largest", PREFIX.label), more_than=SINK),
            Part("in each row exactly one token of it has", Value("prefix_one", PREFIX.label), more_than=EACH),
        ),
    )
