"""The scales at which claims are run: one configuration each, from seconds on one core to the papers' own set-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sinklab.jobs.claim import Scale
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.recipes.emergence import emergence
from sinklab.recipes.gu2024_1b import gu2024_1b
from sinklab.recipes.gu2024_60m import gu2024_60m
from sinklab.training.config import PretrainingConfig

__all__ = ["DESCRIPTIONS", "base_config"]

BASES: Mapping[Scale, Callable[[], PretrainingConfig]] = {
    "tiny": backcopy_tiny,
    "small": emergence,
    "60m": gu2024_60m,
    "1b": gu2024_1b,
}

DESCRIPTIONS: Mapping[Scale, str] = {
    "tiny": "0.1 million parameters on the made-up bigram-backcopy language, 0.6 million tokens; seconds a run on one core",
    "small": "1.5 million parameters on Python source, 4 million tokens; minutes a run on one core",
    "60m": "59 million parameters and embeddings on the Pile, 21 billion tokens (Gu et al. 2024); GPUs",
    "1b": "a billion parameters on the Pile, 42 billion tokens (Gu et al. 2024); GPUs",
}


def base_config(scale: Scale) -> PretrainingConfig:
    """The configuration in which a variant changes something, anew."""
    config = BASES[scale]()
    return config.model_copy(update={"training": config.training.model_copy(update={"snapshots": ()})})
