"""Headline: the few numbers of a measurement that trackers get, each under one name, and the metric that it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sinklab.results.metric import Metric, declared

__all__ = ["HEADLINE", "headline_metrics", "tracked"]

HEADLINE: dict[str, tuple[str, str, Literal["value", "key_position"]]] = {
    "sink_rate": ("gu2024", "at position 0", "value"),
    "sink_rate_max": ("sink_position_rate", "of the strongest sink", "value"),
    "sink_position": ("sink_position_rate", "of the strongest sink", "key_position"),
    "first_token_attention": ("qiu2025_first_attention", "", "value"),
    "attention_entropy": ("entropy", "", "value"),
    "probe_loss": ("loss", "on the probe rows", "value"),
    "sink_loss_gap": ("sink_loss_gap", "", "value"),
}
"""Name to the metric in the table, of the whole model, which of its rows, and the column; in the order of logging."""


def tracked(name: str) -> str:
    """How TensorBoard, trackio and wandb show a name: ``Trainer`` puts all that is logged in training below ``train``."""
    return f"train/{name}"


def headline_metrics() -> Iterator[tuple[str, Metric, str, str]]:
    """Every name with its metric, which of its rows, and the unit of what is logged."""
    for name, (metric, which, column) in HEADLINE.items():
        found = declared(metric)
        assert found is not None, f"{metric} is declared by no probe"
        yield name, found, which, found.unit if column == "value" else "position"
