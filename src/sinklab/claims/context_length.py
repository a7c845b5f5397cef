"""Barbero et al. 2025: the longer the rows of the training, the stronger the sink."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, WEIGHT, has_learned, has_sink
from sinklab.read_outs._attention import attention_numbers
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Trend
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "context_length", "first_tokens"]

METRICS = (
    Metric("first_attention_of_16", "fraction", "first_attention over rows of 16 tokens.", range=FRACTION),
    Metric("sink_rate_of_16", "percent", "sink_rate over rows of 16 tokens.", range=PERCENTAGE),
)

READ = 16
"""Tokens of a row in the read-out, the same for all: over fewer keys each one gets more weight whatever was learned."""

FACTOR = 4


def _context(base: PretrainingConfig, factor: float) -> dict[str, object]:
    """Rows ``factor`` times as long, and as many fewer: the tokens of a step stay what they are."""
    context, micro = round(base.model.max_position_embeddings * factor), base.training.micro_batch_size
    seq_len = min(base.watch.seq_len, context)
    return {
        "model.max_position_embeddings": context,
        "training.batch_size": round(base.training.batch_size / factor),
        "training.micro_batch_size": None if micro is None else round(micro / factor),
        "watch.seq_len": seq_len,
        "watch.window": min(base.watch.window, seq_len // 4),
    }


SHORT = Variant("context / 4", lambda base: _context(base, 1 / FACTOR))
LONG = Variant("context x 4", lambda base: _context(base, FACTOR))


def first_tokens(trained: TrainedModel) -> dict[str, float]:
    """:data:`METRICS`, over rows of 16 tokens."""
    numbers = attention_numbers(trained.loaded.model, trained.rows(100, seq_len=READ), trained.config.model.tokens_in_front)
    return {f"{name}_of_16": numbers[name] for name in ("first_attention", "sink_rate")}


@claims.register("context_length")
def context_length() -> Claim:
    """A quarter of the scale's context, itself, and four times it, at equal tokens a step."""
    return Claim(
        statement="The longer the context of the training, at equal tokens, the stronger the sink.",
        source="barbero2025",
        reference="Barbero et al. 2025 (arXiv 2504.02732), section 4",
        published="Models of 120 million parameters trained on 5 billion tokens in contexts of 128 to 2,048: the sink grows "
        "with the context.",
        presupposes=(has_sink(), has_learned(SHORT.label), has_learned(LONG.label)),
        parts=(
            Part(
                "the weight on the first token grows with the context",
                Trend("first_attention_of_16", (SHORT.label, BASELINE, LONG.label)),
                more_than=0.5,  # one pair of three out of order leaves a half
            ),
            Part(
                "the longest has more than the shortest",
                Difference("first_attention_of_16", LONG.label, SHORT.label),
                more_than=0.05,
            ),
            Part(
                "the longest has more than the scale's",
                Difference("first_attention_of_16", LONG.label, BASELINE),
                more_than=WEIGHT,
            ),
        ),
        variants=(UNCHANGED, SHORT, LONG),
        read_outs=("sinks", first_tokens),
    )
