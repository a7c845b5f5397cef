"""Emergence: a softmax decoder of 1.5 million parameters on Python source, whose sink appears within minutes on two cores."""

from __future__ import annotations

from sinklab.models.architecture import Architecture
from sinklab.registry import recipes
from sinklab.training import config


@recipes.register("emergence")
def emergence() -> config.PretrainingConfig:
    """Six layers of two heads of 64, context 256, BOS in front of every row, 2,000 steps of 2,048 tokens at a high rate.

    What matters for a sink in so short a time: a token that starts every row, heads of 64, a large learning rate with weight
    decay, depth, and an initialisation that is not scaled down with depth; without BOS no sink appears in these steps,
    unless positions are learned and the first of them holds a random token.
    """
    return config.PretrainingConfig(
        name="emergence",
        model=Architecture(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=2,
            head_dim=64,
            max_position_embeddings=256,
            initialization="normal",
        ),
        data=config.DataConfig(corpus="python_source", vocab_size=2048, max_tokens=8_000_000, bos="rows"),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=5e-3, weight_decay=0.1),
        schedule=config.ScheduleConfig(name="cosine", warmup_steps=200, min_ratio=0.1),
        training=config.TrainingConfig(steps=2000, batch_size=8, snapshots=(500, 1000, 1500, 2000)),
        watch=config.WatchConfig(every=50, samples=32, seq_len=64, window=32),
    )
