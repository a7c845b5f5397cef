"""Inputs: whether the sink of a trained model needs language: its rate on random tokens and on one token repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.read_outs._attention import SAMPLES, SEQ_LEN, attention_numbers
from sinklab.registry import read_outs
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "inputs"]

_TEXTS = {
    "random": "rows of tokens drawn uniformly from those that occur in the held-out text",
    "repeated": "rows of one such token repeated",
}
_FRONTS = {"": "as in training, with its token in front if it has one", "_no_bos": "without a token in front"}

METRICS = tuple(
    Metric(f"{metric}_{text}{front}", unit, f"{metric} on {of_text}, {of_front}.", range=extent)
    for metric, unit, extent in (("sink_rate", "percent", PERCENTAGE), ("first_attention", "fraction", FRACTION))
    for text, of_text in _TEXTS.items()
    for front, of_front in _FRONTS.items()
)
"""Metrics (Gu et al. 2024, arXiv 2410.10781, table 1); ``sink_rate`` as in the read-out ``sinks``.

The first token is the one at position 0: the token in front where there is one."""


@read_outs.register("inputs")
def inputs(trained: MeasuredModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on 100 rows of 64 tokens that are drawn once for all models of a vocabulary.

    A fixed token of the training (``data.fixed_position``) stands where it stood. Special tokens are not drawn.
    """
    model, front, bos = trained.loaded.model, trained.front, trained.bos
    length = min(SEQ_LEN, trained.context)
    numbers: dict[str, float] = {}
    for text, rows in _drawn(trained, length).items():
        if trained.fixed is not None and trained.fixed[0] < length:
            rows[:, trained.fixed[0]] = trained.fixed[1]
        by_condition = {"_no_bos": attention_numbers(model, rows, front)}
        by_condition[""] = by_condition["_no_bos"]
        if bos is not None:
            rows[:, 0] = bos
            by_condition[""] = attention_numbers(model, rows, front)
        for suffix, of_rows in by_condition.items():
            numbers |= {f"{metric}_{text}{suffix}": of_rows[metric] for metric in ("sink_rate", "first_attention")}
    return numbers


def _drawn(trained: MeasuredModel, length: int) -> dict[str, Tensor]:
    """Rows of random tokens and of one token repeated, int64 ``(SAMPLES, length)`` each, on the model's device."""
    ids, generator = trained.text_ids, torch.Generator().manual_seed(trained.draw)
    random = ids[torch.randint(len(ids), (SAMPLES, length), generator=generator)]
    repeated = ids[torch.randint(len(ids), (SAMPLES, 1), generator=generator)].repeat(1, length)
    device = trained.loaded.device
    return {"random": random.to(device), "repeated": repeated.to(device)}
