"""Unique data: trained on few rows over and over, for the same number of steps, a model has no sink."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Ratio, Value
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "overfitting", "unique_data"]

METRICS = (
    Metric(
        "overfitting",
        "nats",
        "Last loss on the probe rows of the training, which are held-out text, less the least one: 0 while the model does not "
        "overfit.",
    ),
)


def few(share: float) -> Variant:
    """The variant with so large a share of the rows."""
    return Variant(f"{share:g} of the rows", {"data.unique_fraction": share})


FEW, FEWER, FEWEST = few(0.05), few(0.02), few(0.005)

OVERFITTED = 0.2
"""Nats by which the held-out loss may have risen again if a model is to count as one that does not overfit."""


def overfitting(trained: TrainedModel) -> dict[str, float]:
    """By how much the held-out loss has risen again."""
    table = trained.table
    losses = table[(table["probe"] == "sink_readout") & (table["metric"] == "loss")].sort_values("step")["value"].astype(float)
    return {"overfitting": float(losses.iloc[-1] - losses.min())}


@claims.register("unique_data")
def unique_data() -> Claim:
    """All rows, a twentieth, a fiftieth and a two-hundredth of them, with the same batches and steps.

    Little data also means overfitting: a model of the fewest rows may be worse than one that guesses. So the sink has to weaken
    with few rows that are not overfitted too, as the paper's control shows.
    """
    return Claim(
        statement="With too few unique data the sink does not emerge, and it is the amount that makes it so, not overfitting.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
        published="Of 5 billion down to 50 million unique tokens at the same steps, the sink rate is below 1 with 100 million "
        "and less, and 18.18 with all.",
        variants=(UNCHANGED, FEW, FEWER, FEWEST),
        bases=("no-bos", "bos"),
        read_outs=("sinks", overfitting),
        presupposes=(
            has_sink(),
            Part("a fiftieth of the rows is not overfitted", Value("overfitting", FEWER.label), less_than=OVERFITTED),
        ),
        parts=(
            Part(
                "a fiftieth of the rows, not overfitted, weakens it",
                Difference("sink_rate", FEWER.label, UNCHANGED.label),
                less_than=-SINK,
            ),
            Part("the fewest rows weaken it", Difference("sink_rate", FEWEST.label, UNCHANGED.label), less_than=-SINK),
            Part(
                "the fewest rows leave less than half of it",
                Ratio("sink_rate", FEWEST.label, UNCHANGED.label),
                less_than=0.5,
            ),
        ),
    )
