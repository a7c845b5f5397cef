"""Feed-forward: the sink does not depend on the activation of the feed-forward layers."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Variant

__all__ = ["feed_forward"]

ACTIVATIONS = ("relu", "gelu", "geglu")


@claims.register("feed_forward")
def feed_forward() -> Claim:
    """Two plain activations and a gated one besides the baseline's SwiGLU, at the same width."""
    return Claim(
        statement="The sink appears with every activation of the feed-forward layers, gated or not.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rates: ReLU 16.90, GELU 14.76, Swish 17.89, ReGLU 13.88, GeGLU 17.86, SwiGLU 18.18.",
        variants=(UNCHANGED, *(Variant(name, {"model.feed_forward": name}) for name in ACTIVATIONS)),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=tuple(has_sink(name) for name in ACTIVATIONS),
    )
