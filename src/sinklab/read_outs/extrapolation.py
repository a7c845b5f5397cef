"""Extrapolation: what a trained model loses on tokens that lie further back in a text than any it was trained on."""

from __future__ import annotations

import torch

from sinklab.errors import InputError
from sinklab.read_outs._attention import batches
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.windowed import token_losses
from sinklab_claims.contract.trained import TrainedModel

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
        "with learned positions, which end there. Of documents that training kept apart the positions are those in them, and "
        "the number is absent where none is that long.",
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
    held_out = config.data.held_out_rows
    wanted = min(held_out, max(LEAST_ROWS, TOKENS // ((FACTOR - 1) * context)))
    data = prepare_data(_longer(config), trained.cache)
    try:
        rows = data.probe_text(wanted, FACTOR * context, front=trained.front).to(trained.loaded.device)
    except InputError:
        return {}  # no document is that long
    start = context - context // 4
    losses = torch.cat([token_losses(trained.loaded.model, part, after=start) for part in batches(rows)]).double()
    inside = context - start  # predicted from positions start … context - 1, all of which training has seen
    if rows.position_ids is None:
        return {"longer_gap": (losses[:, inside:].mean() - losses[:, :inside].mean()).item()}
    further, near = rows.scored(losses[:, inside:], after=context), rows.scored(losses, after=start)
    if not further.numel():
        return {}
    # Those from the last quarter on are those of the last quarter and those beyond it.
    of_quarter = (near.sum() - further.sum()) / (near.numel() - further.numel())
    return {"longer_gap": (further.mean() - of_quarter).item()}


def _longer(config: PretrainingConfig) -> PretrainingConfig:
    fields = config.model_dump()
    fields["model"]["max_position_embeddings"] *= FACTOR
    return PretrainingConfig.parse(fields)
