"""Tiny: 20 steps of a two-layer model on Python source, seconds on one core; a smoke test."""

from __future__ import annotations

from sinklab.models.architecture import Architecture
from sinklab.registry import recipes
from sinklab.training import config


@recipes.register("tiny")
def tiny() -> config.PretrainingConfig:
    """Two layers of two heads, width 32, context 64, a vocabulary of 300, 20 steps of four rows, float32, not compiled."""
    return config.PretrainingConfig(
        name="tiny",
        model=Architecture(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
        ),
        data=config.DataConfig(vocab_size=300, max_tokens=50_000, held_out_rows=16),
        optimizer=config.OptimizerConfig(learning_rate=5e-3),
        schedule=config.ScheduleConfig(warmup_steps=4),
        training=config.TrainingConfig(
            steps=20, batch_size=4, dtype="float32", compile=False, log_every=5, evaluate_every=10, save_every=10
        ),
        watch=config.WatchConfig(every=10, samples=8, seq_len=32, window=16),
    )
