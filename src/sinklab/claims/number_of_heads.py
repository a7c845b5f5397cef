"""Number of heads: the sink appears with few heads as it does with many of the same size together."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.claims._architecture import UNCHANGED, has_learned, has_sink
from sinklab.registry import claims
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import Claim, Variant

__all__ = ["number_of_heads"]


@claims.register("number_of_heads")
def number_of_heads() -> Claim:
    """All heads of a layer together keep their size.

    The paper has a sink with one head in a layer too, in ten layers. That is not run: in a model of two layers none of its two
    heads could be idle.
    """
    return Claim(
        statement="The sink appears with four and with two heads in a layer as it does with eight.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rates: 8 heads 18.18, 4 heads 10.68, 2 heads 12.95, 1 head 19.50.",
        variants=(UNCHANGED, Variant("2 heads", two), Variant("4 heads", four)),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(), has_learned("2 heads"), has_learned("4 heads")),
        parts=(has_sink("2 heads"), has_sink("4 heads")),
    )


def two(config: PretrainingConfig) -> Mapping[str, object]:
    """Two heads, half as large each."""
    return _heads(config, 2)


def four(config: PretrainingConfig) -> Mapping[str, object]:
    """Four heads, a quarter as large each."""
    return _heads(config, 4)


def _heads(config: PretrainingConfig, count: int) -> Mapping[str, object]:
    size = config.model.num_attention_heads * config.model.head_size
    return {"model.num_attention_heads": count, "model.head_dim": size // count}
