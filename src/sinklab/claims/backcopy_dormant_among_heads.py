"""Guo et al. 2024, in a model of several heads and layers: the head that copies behind triggers sleeps on BOS elsewhere."""

from __future__ import annotations

import torch

from sinklab.attention.session import attend
from sinklab.claims._architecture import UNCHANGED
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, VALUE_RATIO, Metric
from sinklab.studies.backcopy.evaluation import HeadNumbers
from sinklab_claims.contract.claim import BASELINE, Claim, Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "backcopy_dormant_among_heads", "copy_head"]

METRICS = (
    Metric(
        "previous_at_trigger",
        "weight",
        "Mean weight of the copying head on the token before, of queries that are triggers.",
        range=FRACTION,
    ),
    Metric(
        "previous_elsewhere", "weight", "Mean weight of the copying head on the token before, of other queries.", range=FRACTION
    ),
    Metric("bos_at_trigger", "weight", "Mean weight of the copying head on BOS, of queries that are triggers.", range=FRACTION),
    Metric("bos_elsewhere", "weight", "Mean weight of the copying head on BOS, of other queries.", range=FRACTION),
    VALUE_RATIO,
)

TRIGGERS = "!?#"
"""Those of the corpus ``bigram_backcopy``."""

HALF = 0.5
"""A majority of the weight: it decides whether a head is active or dormant."""


def copy_head(trained: TrainedModel) -> dict[str, float]:
    """Weights of the head that looks at the token before most at triggers, on held-out rows. :data:`METRICS`."""
    loaded, rows = trained.loaded, trained.rows(100)
    assert loaded.tokenizer is not None  # trained on characters
    triggers = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(trigger) for trigger in TRIGGERS], device=rows.device)
    probe = HeadNumbers(torch.isin(rows, triggers), trained.config.model.tokens_in_front)
    with torch.no_grad(), attend(loaded.model, [probe]):
        loaded.model(rows, use_cache=False)
    means = {
        (layer, head): {name: float(values[:, head].nanmean()) for name, values in numbers.items()}
        for layer, numbers in probe.heads.items()
        for head in range(numbers["bos_weight"].shape[1])
    }
    copies = max(means.values(), key=lambda numbers: numbers["previous_weight_trigger"])
    return {
        "previous_at_trigger": copies["previous_weight_trigger"],
        "previous_elsewhere": copies["previous_weight"],
        "bos_at_trigger": copies["bos_weight_trigger"],
        "bos_elsewhere": copies["bos_weight"],
        "value_ratio": copies["value_ratio"],
    }


@claims.register("backcopy_dormant_among_heads")
def backcopy_dormant_among_heads() -> Claim:
    """The baseline of the smallest scale, whose text is of this kind; ``backcopy_dormant`` has the paper's model."""
    return Claim(
        statement="Among several heads too, one copies behind triggers and is dormant elsewhere: its weight is on BOS, "
        "whose value is small.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835), sections 2 and 3",
        published="Shown for one layer with one head on such sequences, and for single heads of Llama 2 7B on text.",
        presupposes=(Part("a head copies", Value("previous_at_trigger", BASELINE), more_than=HALF),),
        parts=(
            Part("it is dormant elsewhere", Value("bos_elsewhere", BASELINE), more_than=HALF),
            Part(
                "it leaves BOS at triggers",
                Difference("bos_elsewhere", BASELINE, BASELINE, other="bos_at_trigger"),
                more_than=HALF,
            ),
            Part("the value of BOS is drained", Value("value_ratio", BASELINE), less_than=HALF),
        ),
        variants=(UNCHANGED,),
        read_outs=(copy_head,),
        costs={"tiny": "minutes"},
    )
