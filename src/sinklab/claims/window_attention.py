"""Window attention: the sink is on the first token of the text while it is seen, and never on the first of the window."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import BASELINE, Changes, Claim, Part, Variant
from sinklab_claims.contract.effect import Value
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "ExcessOfOldest", "excess_weights", "window_attention"]

EXCESS = 0.05
"""Excess weight above which a token is said to have a sink, and below which it is said to have none."""

SAMPLES = 16

METRICS = (
    Metric(
        "excess_of_first",
        "fraction",
        "Weight on the first token of the text beyond an even share, (weight - 1/n) / (1 - 1/n) of the n keys that the query "
        "sees: mean over rows, layers, heads and the queries window/2 <= t < window, the last ones that see it; of a model "
        "without a window at those of a window of half its context.",
    ),
    Metric(
        "excess_inside",
        "fraction",
        "The same of the first token inside the window, t - window + 1: mean over the queries t >= window, which do not see "
        "the first of the text.",
    ),
)


def _half(context: int) -> int:
    return context // 2


def _large(config: PretrainingConfig) -> Changes:
    return {"model.window": _half(config.model.max_position_embeddings)}


def _small(config: PretrainingConfig) -> Changes:
    return {"model.window": config.model.max_position_embeddings // 16}


LARGE, SMALL = Variant("window of 1/2", _large), Variant("window of 1/16", _small)


class ExcessOfOldest(Watcher):
    """Excess weight on the oldest key that a query sees, by query: the first token of the text, or that of the window."""

    name = "excess"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, window: int) -> None:
        self.window = window
        self.by_query: list[Tensor] = []
        """Of each call, mean over rows and heads, ``(q_len,)``."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        parts = []
        for start, stop in call.blocks():
            weights = call.weights(start, stop)
            queries = torch.arange(start, stop, device=weights.device)
            oldest = (queries - self.window + 1).clamp(min=0)
            weight = weights.gather(3, oldest[None, None, :, None].expand(*weights.shape[:3], 1))[..., 0]
            even = 1 / (queries - oldest + 1)
            # A query that sees one key has all weight on it, which is no excess; its 0/0 is of no query that is asked for.
            parts.append(((weight - even) / (1 - even)).mean(dim=(0, 1)))
        self.by_query.append(torch.cat(parts).cpu())


def excess_weights(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of two windows; a model with a window of one token has none.

    The sink rate says nothing here: few queries see the first token of the text, and the first of them see little else.
    A model without a window has the first of the two, which says whether there is a sink for a window to keep so far away.
    """
    model, context = trained.loaded.model, trained.config.model.max_position_embeddings
    window = _half(context) if trained.config.model.window is None else trained.config.model.window
    if window < 2:
        return {}
    length = min(2 * window, context)
    watcher = ExcessOfOldest(window)
    with torch.no_grad(), attend(model, (watcher,)):
        for row in trained.rows(min(SAMPLES, trained.config.data.held_out_rows), length):
            model(input_ids=row[None], use_cache=False)
    mean = torch.stack(watcher.by_query).mean(dim=0)
    of_first = {"excess_of_first": float(mean[window // 2 : window].mean())}
    return of_first if trained.config.model.window is None else {**of_first, "excess_inside": float(mean[window:].mean())}


@claims.register("window_attention")
def window_attention() -> Claim:
    """Windows of a half and of a sixteenth of the context, in training and after it."""
    return Claim(
        statement="With a large window the sink is on the first token of the text and not on the first inside the window; a "
        "small window prevents it.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 6",
        published="With a context of 2,048 tokens, queries that see the first token of the text have their sink on it, later "
        "ones have none on the first inside the window, and windows below about 256 tokens have no clear sink.",
        variants=(UNCHANGED, LARGE, SMALL),
        bases=("no-bos", "bos"),
        read_outs=("sinks", excess_weights),
        presupposes=(
            has_sink(),
            Part(
                "without a window the first token has a sink at the queries of the large one",
                Value("excess_of_first", BASELINE),
                more_than=EXCESS,
            ),
        ),
        parts=(
            Part(
                "with a large window the first token of the text has a sink",
                Value("excess_of_first", LARGE.label),
                more_than=EXCESS,
            ),
            Part(
                "with a large window the first token inside it has none",
                Value("excess_inside", LARGE.label),
                less_than=EXCESS,
            ),
            Part(
                "with a small window the first token of the text has none",
                Value("excess_of_first", SMALL.label),
                less_than=EXCESS,
            ),
        ),
    )
