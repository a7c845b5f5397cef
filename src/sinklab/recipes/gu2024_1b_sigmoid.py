"""Gu et al. 2024, the scale-up without a sink: a billion parameters, unnormalised sigmoid; sink rate 2.5 % by their proxy."""

from __future__ import annotations

from sinklab.recipes.gu2024_1b import gu2024_1b
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig


@recipes.register("gu2024_1b_sigmoid")
def gu2024_1b_sigmoid() -> PretrainingConfig:
    """The run of ``gu2024_1b`` (arXiv 2410.10781) with ``sigmoid(q·k / sqrt(d))``: no bias, no division by the row sum."""
    config = gu2024_1b()
    config.name = "gu2024_1b_sigmoid"
    config.model.operation = {"name": "sigmoid"}
    return config
