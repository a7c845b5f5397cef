"""Gu et al. 2024, the scale-up with softmax: a billion parameters, 40,000 steps of a million tokens; sink rate 45.1 %."""

from __future__ import annotations

from sinklab.recipes.gu2024_60m import gu2024_60m
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig


@recipes.register("gu2024_1b")
def gu2024_1b() -> PretrainingConfig:
    """The released 1B configuration (arXiv 2410.10781): 22 layers of 16 heads of 128, feed-forward 5,632; the rest as 60M."""
    config = gu2024_60m()
    config.name = "gu2024_1b"
    config.model = config.model.model_copy(
        update={"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16}
    )
    config.training.steps = 40_000
    config.training.micro_batch_size = 8
    return config
