"""Gu et al. 2024, objective and mechanism crossed: whether there is a sink is decided by how weights come about."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys
from sinklab.attention.probe import Watcher
from sinklab.claims._architecture import SIGMOID, SINK, UNCHANGED
from sinklab.claims._gates import HEAD_WISE
from sinklab.claims.prefix_lm import PREFIX
from sinklab.jobs.claim import Claim, Part, Variant
from sinklab.jobs.effect import Difference, Value
from sinklab.jobs.trained import TrainedModel
from sinklab.probes._accumulate import filled
from sinklab.read_outs._attention import THRESHOLD, first_rows, look
from sinklab.registry import claims
from sinklab.results.metric import Metric

__all__ = ["METRICS", "CarriedRate", "carried", "objective_and_mechanism"]

PROXY = 1e-8
"""Added to the sum of a row before dividing, as in the released code of Gu et al."""

TOKENS = 5
"""First tokens of which one may be the sink: as many as the prefix has."""

METRICS = (
    Metric(
        "carried_rate",
        "percent",
        "Share of (row, layer, head) in which one of the first five tokens has, over the queries that see it, a mean share of "
        "more than 0.3 of its rows and a mean weight of more than 0.3 too: the weight itself, not divided by the sum of its "
        "row, times the gate on the output of the head.",
    ),
)


class CarriedRate(Watcher):
    """Share of the heads of single rows that carry more than the threshold from one of the first tokens to their outputs.

    Args:
        front: learned tokens in front of every row.
    """

    name = "carried_rate"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.keys = tuple(range(front, front + TOKENS))
        self.hits: list[Tensor] = []
        """Of each call, ``(rows, heads)``, 0 or 1."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        weights = weights_of_keys(call, keys_of_document(call, *self.keys), statistics.log_sum_exp)
        (mass,) = filled(statistics, "row_mass")
        shares = weights if call.operation.normalized else weights / (mass[..., None] + PROXY)
        if call.gain is not None:
            weights = weights * call.gain.mean(-1, keepdim=True)
        start = self.keys[0]
        # A prefix is seen by all; a later key by the queries from its own on.
        seen = torch.stack(
            [((weights[..., at] > 0) | (call.query_positions >= start + at)[:, None]).sum(-1) for at in range(TOKENS)], -1
        )
        both = torch.minimum(weights.sum(2), shares.sum(2)) / seen.clamp_min(1)
        self.hits.append((both.amax(-1) > THRESHOLD).double().cpu())

    def rate(self) -> float:
        """Percent of all rows and heads."""
        return 100 * float(torch.cat([hits.flatten() for hits in self.hits]).mean())


def carried(trained: TrainedModel) -> dict[str, float]:
    """:data:`METRICS`, on 100 held-out rows of 64 tokens."""
    watcher = CarriedRate(trained.front)
    look(trained.loaded.model, first_rows(trained), (watcher,))
    return {"carried_rate": watcher.rate()}


def _with_prefix(variant: Variant) -> Variant:
    assert isinstance(variant.changes, dict), "the variants that are crossed change fields to values"
    return Variant(f"{variant.label}, {PREFIX.label}", {**variant.changes, "model.prefix": TOKENS})


CAUSAL = (UNCHANGED, SIGMOID, HEAD_WISE)
PREFIXED = (PREFIX, _with_prefix(SIGMOID), _with_prefix(HEAD_WISE))


def _has(variant: Variant) -> Part:
    return Part(f"there is a sink with {variant.label}", Value("carried_rate", variant.label), more_than=SINK)


@claims.register("objective_and_mechanism")
def objective_and_mechanism() -> Claim:
    """Two objectives by three mechanisms; the third objective, tokens that are hidden, no recipe trains.

    What is compared is the weight that a head carries to its output, which is defined alike for all three.
    """
    return Claim(
        statement="The mechanism decides and not the objective: as a causal and as a prefix language model alike, softmax has "
        "a sink, sigmoid has none, and with a gate on each head less is carried from it.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), sections 6 and 7",
        published="Softmax 18.18, with a prefix 19 to 24 on one of its tokens, sigmoid 0.44; not crossed. A gate on each head "
        "lowers the mean weight on the first token from 0.467 to 0.073 in Qiu et al. 2025 (arXiv 2505.06708).",
        variants=(*CAUSAL, *PREFIXED),
        bases=("no-bos", "bos"),
        read_outs=(carried,),
        presupposes=(_has(UNCHANGED),),
        parts=(
            _has(PREFIX),
            *(
                Part(f"there is no sink with {variant.label}", Value("carried_rate", variant.label), less_than=SINK)
                for variant in (SIGMOID, PREFIXED[1])
            ),
            *(
                Part(
                    f"less is carried with {gate.label} than with {softmax.label}",
                    Difference("carried_rate", gate.label, softmax.label),
                    less_than=-SINK,
                )
                for gate, softmax in ((HEAD_WISE, UNCHANGED), (PREFIXED[2], PREFIX))
            ),
        ),
    )
