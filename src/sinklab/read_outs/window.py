"""Window: what a trained model loses when queries see a window only, and how much of that the first tokens give back."""

from __future__ import annotations

import torch

from sinklab.read_outs._attention import LEAST_ROWS, TOKENS, batches
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.windowed import token_losses, windowed_losses
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "SINKS", "window"]

SINKS = 4
"""First tokens that are kept beside the window, as in StreamingLLM."""

METRICS = (
    Metric(
        "window_gap",
        "nats",
        "Mean next-token loss when every query sees the last quarter of the context and nothing else, less the loss of dense "
        "attention; over the tokens predicted from positions behind the first quarter; of documents that training kept apart, "
        "from positions in them, and absent where none is that long.",
    ),
    Metric(
        "window_sink_gap",
        "nats",
        f"The same when queries also see the first {SINKS} tokens and the learned tokens in front (Xiao et al. 2023, arXiv "
        "2309.17453).",
    ),
    Metric("sink_worth", "nats", "window_gap - window_sink_gap."),
)
"""Metrics. Positions stay those of the text: nothing is moved up, as a cache would."""


@read_outs.register("window")
@torch.no_grad()
def window(trained: MeasuredModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of the length of the training."""
    model, context = trained.loaded.model, trained.context
    size, visible = max(1, context // 4), range(trained.front + SINKS)
    dense, with_sinks, alone = [], [], []
    for part in batches(trained.text(max(LEAST_ROWS, TOKENS // context))):
        dense.append(part.scored(token_losses(model, part, after=size), after=size))
        losses = windowed_losses(model, part, size, visible)
        with_sinks.append(losses[0])
        alone.append(losses[1])
    if not any(part.numel() for part in dense):
        return {}
    losses_of = [torch.cat(parts).double().mean().item() for parts in (dense, with_sinks, alone)]
    numbers = {"window_gap": losses_of[2] - losses_of[0], "window_sink_gap": losses_of[1] - losses_of[0]}
    return numbers | {"sink_worth": numbers["window_gap"] - numbers["window_sink_gap"]}
