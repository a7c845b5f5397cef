"""Number of heads: the sink appears with few heads as it does with many of the same size together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.jobs.claim import Claim, Variant
from sinklab.registry import claims
from sinklab.training.config import PretrainingConfig

__all__ = ["number_of_heads"]

LEAST = 4
"""Heads of a model in all of which a rate of sinks says something: steps of a quarter."""


@claims.register("number_of_heads")
def number_of_heads() -> Claim:
    """All heads of a layer together keep their size. The fewest are one in each layer, or four in all of a model of few layers.

    The paper's model with one head in each layer has ten of them; of two in all none could be idle.
    """
    return Claim(
        statement="The sink appears whatever the number of heads, with a single one in each layer too.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rates: 8 heads 18.18, 4 heads 10.68, 2 heads 12.95, 1 head 19.50.",
        variants=(UNCHANGED, Variant("fewest heads", fewest), Variant("2 heads", two), Variant("4 heads", four)),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(has_sink("fewest heads"), has_sink("2 heads"), has_sink("4 heads")),
    )


def fewest(config: PretrainingConfig) -> Mapping[str, object]:
    """One head as large as all of a layer together, or as many as give the model :data:`LEAST`."""
    return _heads(config, math.ceil(LEAST / config.model.num_hidden_layers))


def two(config: PretrainingConfig) -> Mapping[str, object]:
    """Two heads, half as large each."""
    return _heads(config, 2)


def four(config: PretrainingConfig) -> Mapping[str, object]:
    """Four heads, a quarter as large each."""
    return _heads(config, 4)


def _heads(config: PretrainingConfig, count: int) -> Mapping[str, object]:
    size = config.model.num_attention_heads * config.model.head_size
    return {"model.num_attention_heads": count, "model.head_dim": size // count}
