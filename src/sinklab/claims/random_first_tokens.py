"""Random first tokens: one random token in front strengthens the sink on it, two send it to the second."""

from __future__ import annotations

import numpy as np
import torch

from sinklab.claims._architecture import SINK
from sinklab.read_outs._attention import attention_numbers, first_rows
from sinklab.registry import claims
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Extreme
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "NO_BOS", "as_trained", "random_first_tokens"]

LEAST = 3.0
"""Points of difference that count as one; those published are 9 and 12."""

NO_BOS = Variant("no_bos", {"data.bos": "none", "data.random_positions": None})
"""What is compared with; nothing is changed where rows have no BOS anyway."""

ONE = Variant("random_first", {"data.bos": "none", "data.random_positions": (0, 1)})
TWO = Variant("random_first_two", {"data.bos": "none", "data.random_positions": (0, 2)})


METRICS = tuple(
    Metric(
        f"{name}_as_trained",
        "percent",
        f"{name} on held-out rows that hold random tokens where those of the training do.",
        range=PERCENTAGE,
    )
    for name in ("sink_rate", "sink_rate_1", "sink_rate_max")
)

UNSEEN = 2**20
"""Number of the first held-out row for the draw of its tokens, behind those of all training rows."""


def as_trained(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS`; without random tokens in the training, those of the rows as they are."""
    rows, random = first_rows(trained).clone(), trained.data.train.random
    if random is not None:
        drawn = torch.from_numpy(np.stack([random.draw(UNSEEN + row) for row in range(len(rows))]))
        rows[:, random.start : random.stop] = drawn.to(rows)
    numbers = attention_numbers(trained.loaded.model, rows, trained.front)
    return {metric.name: numbers[metric.name.removesuffix("_as_trained")] for metric in METRICS}


@claims.register("random_first_tokens")
def random_first_tokens() -> Claim:
    """Uniformly drawn tokens in place of the first, or the first two, of every row, of those too that sinks are measured on."""
    return Claim(
        statement="A random first token in every training row strengthens the sink; with two, it moves to the second.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
        published="Sink rate of the first token 18.18 with ordinary rows and 27.03 with one random token; 1.98 with two, and "
        "14.08 of the second token.",
        variants=(NO_BOS, ONE, TWO),
        bases=("no-bos",),
        read_outs=("sinks", as_trained),
        presupposes=(
            Part(
                "a sink forms without BOS",
                Extreme("sink_rate_max_as_trained", (NO_BOS.label, ONE.label, TWO.label)),
                more_than=SINK,
            ),
        ),
        parts=(
            Part("one strengthens it", Difference("sink_rate_as_trained", ONE.label, NO_BOS.label), more_than=LEAST),
            Part(
                "with two, the second token has more of it than the first",
                Difference("sink_rate_1_as_trained", TWO.label, TWO.label, other="sink_rate_as_trained"),
                more_than=LEAST,
            ),
        ),
    )
