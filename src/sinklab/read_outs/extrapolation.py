"""Extrapolation: what a trained model loses on tokens that lie further back in a text than any it was trained on."""

from __future__ import annotations

import torch

from sinklab.jobs.trained import TrainedModel
from sinklab.read_outs._attention import batches
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.windowed import token_losses

__all__ = ["FACTOR", "METRICS", "extrapolation"]

FACTOR = 4
"""Length of the rows over the context of the training."""

TOKENS, LEAST_ROWS = 16_384, 16
"""Tokens of held-out text beyond the context, and rows of it at least."""

BOUNDED = "learned"
"""Position scheme that has no positions beyond the context."""

METRICS = (
    Metric(
        "longer_gap",
        "nats",
        f"Mean next-token loss predicted from positions beyond the context of the training, in rows of {FACTOR} contexts, less "
        "that predicted from the last quarter of the context in the same rows (Press et al. 2022, arXiv 2108.12409); absent "
        "with learned positions, which end there.",
    ),
)


@read_outs.register("extrapolation")
@torch.no_grad()
def extrapolation(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows, with the token in front of training and nothing evicted or moved."""
    config = trained.config
    context = config.model.max_position_embeddings
    if config.model.position.get("name", "rotary") == BOUNDED:
        return {}
    rows = prepare_data(_longer(config), trained.cache).held_out
    rows = rows[: max(LEAST_ROWS, TOKENS // ((FACTOR - 1) * context))].to(trained.loaded.device)
    start = context - context // 4
    losses = torch.cat([token_losses(trained.loaded.model, part, after=start) for part in batches(rows)]).double()
    inside = context - start  # predicted from positions start … context - 1, all of which training has seen
    return {"longer_gap": (losses[:, inside:].mean() - losses[:, :inside].mean()).item()}


def _longer(config: PretrainingConfig) -> PretrainingConfig:
    fields = config.model_dump()
    fields["model"]["max_position_embeddings"] *= FACTOR
    return PretrainingConfig.parse(fields)
