"""Guo et al. 2024: among several heads one is active at triggers and dormant elsewhere on bigram-backcopy."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.corpora.bigram_backcopy import TRIGGERS
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, VALUE_RATIO, Metric
from sinklab_claims.contract.claim import BASELINE, Part, Variant
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import TrainedModel
from sinklab_claims.variants import Fields, of_paper

guo = of_paper("guo2024", "Guo et al. 2024 (arXiv 2410.13835)")

HALF = 0.5
"""A majority of the weight: it decides whether a head is active or dormant."""

WHERE = {"at_trigger": "_trigger", "elsewhere": ""}

METRICS = (
    *(
        Metric(f"{key}_{where}", "weight", f"Mean weight of the copying head on {what}, of {queries}.", range=FRACTION)
        for key, what in (("previous", "the token before"), ("bos", "BOS"))
        for where, queries in zip(WHERE, ("queries that are triggers", "other queries"), strict=True)
    ),
    VALUE_RATIO,
)


class HeadNumbers(Watcher):
    """The numbers of one batch, sample by sample; made for one forward with :func:`~sinklab.attention.session.attend`.

    Queries count from the second character on: before it, the token before is BOS.

    Args:
        is_trigger: boolean ``(batch, length)``.
        front: learned tokens that the model puts in front of BOS.

    Attributes:
        heads: layer to the name of a number to float32 ``(batch, heads)``; nan where a sample has no such query.
    """

    name: ClassVar[str] = "backcopy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, is_trigger: Tensor, front: int = 0) -> None:
        self.is_trigger, self.front = is_trigger, front
        self.heads: dict[int, dict[str, Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        front = self.front
        weights = call.weights(front, call.q_len)[..., front:]  # (batch, heads, queries, keys)
        on_bos, on_previous = weights[..., 0], torch.zeros_like(weights[..., 0])
        on_previous[..., 1:] = weights.diagonal(-1, dim1=-2, dim2=-1)
        counted = torch.ones_like(self.is_trigger)
        counted[:, :2] = False
        triggers, others = (
            chosen[:, None].to(weights.dtype) for chosen in (self.is_trigger & counted, ~self.is_trigger & counted)
        )

        def mean(numbers: Tensor, chosen: Tensor) -> Tensor:
            return (numbers * chosen).sum(-1) / chosen.sum(-1)

        norms = call.values[:, :, front:].float().norm(dim=-1).repeat_interleave(call.groups, dim=1)
        self.heads[call.site.layer] = {
            "bos_weight": mean(on_bos, others),
            "bos_weight_trigger": mean(on_bos, triggers),
            "previous_weight": mean(on_previous, others),
            "previous_weight_trigger": mean(on_previous, triggers),
            "value_ratio": norms[..., 0] / norms[..., 1:].mean(-1),
        }


def copy_head(trained: TrainedModel) -> dict[str, float]:
    """Weights of the head that looks at the token before most at triggers, on held-out rows. :data:`METRICS`."""
    loaded, rows = trained.loaded, trained.rows(100)
    assert loaded.tokenizer is not None  # trained on characters
    triggers = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(trigger) for trigger in TRIGGERS], device=rows.device)
    probe = HeadNumbers(torch.isin(rows, triggers), trained.config.model.tokens_in_front)
    with torch.no_grad(), attend(loaded.model, [probe]):
        loaded.model(rows, use_cache=False)
    means = [
        {name: float(values[:, head].nanmean()) for name, values in numbers.items()}
        for numbers in probe.heads.values()
        for head in range(numbers["bos_weight"].shape[1])
    ]
    copies = max(means, key=lambda numbers: numbers["previous_weight_trigger"])
    names = {f"{key}_{where}": f"{key}_weight{of}" for key in ("previous", "bos") for where, of in WHERE.items()}
    return {**{name: copies[of] for name, of in names.items()}, "value_ratio": copies["value_ratio"]}


@claims.register("backcopy_dormant_among_heads")
@guo
def backcopy_dormant_among_heads() -> Fields:
    """Among several heads too, one copies behind triggers and is dormant elsewhere: its weight is on BOS, whose value is small.

    The baseline of the smallest scale, whose text is of this kind. ``results/tiny.json`` has the paper's own model and
    language, in which one head does it alone, with SGD too.
    """
    leaves = Difference("bos_elsewhere", BASELINE, BASELINE, "bos_at_trigger")
    return dict(
        where="sections 2 and 3",
        published="Shown for one layer with one head on such sequences, and for single heads of Llama 2 7B on text.",
        presupposes=(Part("a head copies", Value("previous_at_trigger", BASELINE), more_than=HALF),),
        parts=(
            Part("it is dormant elsewhere", Value("bos_elsewhere", BASELINE), more_than=HALF),
            Part("it leaves BOS at triggers", leaves, more_than=HALF),
            Part("the value of BOS is drained", Value("value_ratio", BASELINE), less_than=HALF),
        ),
        variants=(Variant(BASELINE),),
        read_outs=(copy_head,),
        costs={"tiny": "minutes"},
    )
