"""Backcopy tiny: a decoder of 136,000 parameters on the bigram-backcopy language, whose sink appears in seconds on one core."""

from __future__ import annotations

from sinklab.models.architecture import Architecture
from sinklab.registry import recipes
from sinklab.training import config


@recipes.register("backcopy_tiny")
def backcopy_tiny() -> config.PretrainingConfig:
    """Two layers of eight heads of 16, width 64, context 64, 600 steps of 1,024 characters; learned positions as in GPT-2.

    The language (Guo et al. 2024, arXiv 2410.13835) asks heads to copy behind triggers and to keep still elsewhere. What makes
    the sink come in so short a time and with every seed: learned positions, BOS in front of every row, a high learning rate
    and an initialisation that is not scaled down with depth. With rotary positions heads can look at the character before at
    every query, and let the feed-forward layer drop what they find; the sink is half as strong then.
    """
    return config.PretrainingConfig(
        name="backcopy_tiny",
        model=Architecture(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=8,
            head_dim=16,
            max_position_embeddings=64,
            position={"name": "learned"},
            initialization="normal",
        ),
        data=config.DataConfig(
            corpus="bigram_backcopy", vocab_size=258, max_tokens=2_000_000, bos="rows", eos=False, held_out_rows=128
        ),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=1e-2, weight_decay=0.1),
        schedule=config.ScheduleConfig(name="cosine", warmup_steps=100, min_ratio=0.1),
        training=config.TrainingConfig(
            steps=600, batch_size=16, compile=False, log_every=50, evaluate_every=300, save_every=600, keep=1
        ),
        watch=config.WatchConfig(every=100, samples=32, seq_len=64, window=16),
    )
