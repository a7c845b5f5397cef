"""Gu et al. 2024, the default run: 59 million parameters and embeddings, 20,000 steps of a million tokens; sink rate 18.2 %."""

from __future__ import annotations

from sinklab.models.architecture import Architecture
from sinklab.registry import recipes
from sinklab.training import config


@recipes.register("gu2024_60m")
def gu2024_60m() -> config.PretrainingConfig:
    """The released configuration of "When Attention Sink Emerges in Language Models" (arXiv 2410.10781).

    Ten layers of eight heads of 96, no BOS, EOS between documents; AdamW with decay on all parameters; after warm-up the rate
    is constant, as released (the paper says cosine). The text is the sample of the Pile that the authors used, five billion
    tokens, read about four times; any other ``data.corpus`` will do. For GPUs.
    """
    return config.PretrainingConfig(
        name="gu2024_60m",
        model=Architecture(
            hidden_size=768,
            intermediate_size=1536,
            num_hidden_layers=10,
            num_attention_heads=8,
            max_position_embeddings=2048,
            initialization="released",
            tie_word_embeddings=False,
        ),
        data=config.DataConfig(
            corpus="sail/regmix-data-sample", tokenizer="EleutherAI/gpt-neox-20b", bos="none", eos=True, seed=42
        ),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=4e-4, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=config.ScheduleConfig(name="constant", warmup_steps=100),
        training=config.TrainingConfig(
            steps=20_000,
            batch_size=512,
            micro_batch_size=32,
            vocab_multiple=256,  # 50,277 tokens in 50,432 rows
            evaluate_every=1000,
            save_every=1000,
            seed=42,
        ),
        watch=config.WatchConfig(every=200, samples=100, seq_len=64, threshold=0.3),
    )
