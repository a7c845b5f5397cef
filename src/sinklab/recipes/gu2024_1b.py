"""Gu et al. 2024, the scale-up: a billion parameters, 40,000 steps of a million tokens; sink rate 45.1 % (sigmoid: 2.5 %)."""

from __future__ import annotations

from sinklab.recipes.gu2024_60m import gu2024_60m
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig


@recipes.register("gu2024_1b")
def gu2024_1b() -> PretrainingConfig:
    """The released 1B configuration (arXiv 2410.10781): 22 layers of 16 heads of 128, feed-forward 5,632; the rest as 60M.

    The run without a sink (2.5 % by the paper's proxy) is the same with ``--set model.operation.name=sigmoid``.
    """
    config = gu2024_60m()
    config.name = "gu2024_1b"
    config.model = config.model.model_copy(
        update={"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16}
    )
    config.training.steps = 40_000
    config.training.micro_batch_size = 8
    return config
