"""Massive before post-norm: where norms follow the residual sums, the first token is large before them and not after."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinklab.claims._architecture import MASSIVE, POST_NORM, UNCHANGED, has_learned, has_massive, has_no_massive, has_sink
from sinklab.models.norms import Norm
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Value
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "massive_before_post_norm", "norm_inputs"]

METRICS = (
    Metric(
        "norm_input_ratio",
        "ratio",
        "Mean over rows of the L2 norm of the first token over the mean of the others, in what enters a norm of a block; "
        "largest over these norms.",
    ),
)
"""Number of :func:`norm_inputs`: unit and definition."""


@claims.register("massive_before_post_norm")
def massive_before_post_norm() -> Claim:
    """It presupposes massive activations under pre-norm, and a sink under post-norm."""
    return Claim(
        statement="Under post-norm massive activations appear before the norms, and not after them.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Massive activations exist before the post-norm; no number is given.",
        variants=(UNCHANGED, POST_NORM),
        bases=("no-bos", "bos"),
        read_outs=("sinks", "norms", norm_inputs),
        presupposes=(has_massive(), has_learned(POST_NORM.label), has_sink(POST_NORM.label)),
        parts=(
            Part("it is massive before the norms", Value("norm_input_ratio", POST_NORM.label), more_than=MASSIVE),
            has_no_massive(POST_NORM.label),
        ),
    )


def norm_inputs(trained: TrainedModel) -> Mapping[str, float]:
    """How large the first token is in what enters the norms, on 100 held-out rows."""
    ratios: list[float] = []

    def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        lengths = arguments[0].float().norm(dim=-1)
        ratios.append((lengths[:, 0] / lengths[:, 1:].mean(dim=1)).mean().item())

    model = trained.loaded.model
    handles = [
        module.register_forward_pre_hook(look)
        for block in model.layers
        for module in block.modules()
        if isinstance(module, Norm)
    ]
    try:
        with torch.no_grad():
            model(trained.rows())
    finally:
        for handle in handles:
            handle.remove()
    return {"norm_input_ratio": max(ratios)}
