"""Emergence in the layers of Gu et al.: 59 million parameters, on Python source; a minute on one data-centre GPU."""

from __future__ import annotations

from sinklab.models.architecture import Architecture
from sinklab.recipes.emergence import emergence
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig


@recipes.register("emergence_medium")
def emergence_medium() -> PretrainingConfig:
    """The layers of ``gu2024_60m`` (ten, of eight heads of 96), trained as ``emergence``: context 512, BOS in front of rows.

    1,000 steps of 8,192 tokens, each read once. That is less than a thousandth of the paper's tokens: what this scale has is
    the paper's depth, heads and width on natural text, and not its training.
    """
    config = emergence()
    return config.model_copy(
        update={
            "name": "emergence_medium",
            "model": Architecture(
                hidden_size=768,
                intermediate_size=1536,
                num_hidden_layers=10,
                num_attention_heads=8,
                max_position_embeddings=512,
                initialization="normal",
            ),
            "data": config.data.model_copy(update={"vocab_size": 4096, "max_tokens": 10_000_000}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": 1e-3}),
            "schedule": config.schedule.model_copy(update={"warmup_steps": 100}),
            "training": config.training.model_copy(update={"steps": 1000, "batch_size": 16, "snapshots": (250, 500, 1000)}),
            "watch": config.watch.model_copy(update={"every": 100}),
        }
    )
