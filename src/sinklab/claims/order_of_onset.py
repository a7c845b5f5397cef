"""Chen et al. 2026, order of onset: attention goes to the sink first, and massive activations come later."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.claims._architecture import has_sink
from sinklab.claims._snapshots import ALONG, along_the_way
from sinklab.probes.query_key_angle import QueryKeyAngle
from sinklab.read_outs._attention import first_rows, look
from sinklab.read_outs.norms import norms
from sinklab.read_outs.sinks import sinks
from sinklab.read_outs.window import window
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.results.table import unpacked
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Ratio
from sinklab_claims.contract.trained import MeasuredModel, TrainedModel

__all__ = ["LEAST", "METRICS", "half_way", "onsets", "order_of_onset"]

LATER = 1.1
"""Ratio of two steps above which one is later; models are kept at steps that lie 1.25 apart, and lines are drawn between."""

LEAST = {"angle": 0.1, "weight": 0.05, "value": 0.1, "key": 0.1, "hidden": 0.2, "massive": 1.0, "worth": 0.05}
"""Change from the first model to the last below which a curve has no onset: of a cosine, a share, four ratios, and nats."""

CURVES = {
    "angle": "the mean cosine of queries with the first key less that with later ones",
    "weight": "the mean share of a row on the first token, of all heads",
    "key": "the norm of the first key over that of later ones",
    "value": "the norm of the first value over that of later ones",
    "hidden": "the norm of the first token's hidden state over that of later ones",
    "massive": "the largest activation of a row over the median one (massive_ratio)",
    "worth": "what first tokens are worth beyond a window (sink_worth)",
}

METRICS = tuple(
    Metric(
        f"onset_{name}",
        "steps",
        f"Steps after which {what} has gone half of its way from the first model that is kept to the last, and stays beyond; "
        "absent where the way is short.",
        version=2,
    )
    for name, what in CURVES.items()
)


def half_way(curve: Mapping[int, float], least: float) -> float | None:
    """Step from which a curve is beyond half of its way from its first value to its last, on straight lines between.

    It counts when the curve comes to stay there: in warm-up activations jump past it and come back.

    Args:
        curve: step to value, of two steps or more.
        least: change from first to last below which there is no way to go.
    """
    steps = sorted(curve)
    start, end = curve[steps[0]], curve[steps[-1]]
    if abs(end - start) < least:
        return None
    gone = {step: (curve[step] - start) / (end - start) for step in steps}
    before = max(step for step in steps if gone[step] < 0.5)
    after = steps[steps.index(before) + 1]
    return before + (0.5 - gone[before]) / (gone[after] - gone[before]) * (after - before)


def _angle(model: MeasuredModel) -> float:
    """Mean cosine over all heads of queries with the first key, less that with later keys."""
    probe = QueryKeyAngle()
    look(model.loaded.model, first_rows(model), (probe,))
    rows = [row for row in unpacked(probe.rows()) if row["metric"] == "cosine"]
    means = []
    for of_first in (True, False):
        some = [
            (row["value"], row["count"])
            for row in rows
            if (row["key_position"] == model.front if of_first else row["key_position"] > model.front)
        ]
        means.append(sum(value * count for value, count in some) / sum(count for _, count in some))
    return means[0] - means[1]


def onsets(trained: TrainedModel) -> dict[str, float]:
    """When each curve of a training gets under way. :data:`METRICS`; nothing of a training that kept no models."""
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for model in along_the_way(trained):
        of_norms = norms(model)
        found = {
            "angle": _angle(model),
            "weight": sinks(model)["first_attention"],
            "key": of_norms["key_ratio"],
            "value": of_norms["value_ratio"],
            "hidden": of_norms["hidden_ratio"],
            "massive": of_norms["massive_ratio"],
            "worth": window(model)["sink_worth"],
        }
        for name, value in found.items():
            curves[name][model.step] = value
    begun = {name: half_way(curve, LEAST[name]) for name, curve in curves.items() if len(curve) > 1}
    return {f"onset_{name}": step for name, step in begun.items() if step is not None}


def _after(name: str, says: str) -> Part:
    label = ALONG.label
    return Part(says, Ratio(f"onset_{name}", label, label, other="onset_weight"), more_than=LATER)


@claims.register("order_of_onset")
def order_of_onset() -> Claim:
    """Seven curves of one training, each at half of its way; angle and norms of keys, values and hidden states are in no part.

    A curve that does not move has no onset, and a training without one says nothing of the order.
    """
    return Claim(
        statement="In training attention goes to the sink first; that activations become massive and that predictions come to "
        "need the sink follows.",
        source="chen2026",
        reference="Chen et al. 2026 (arXiv 2603.17771)",
        published="No steps: massive activations are read as an answer to the gradients that attention to the sink gathers "
        "there, and so come after it.",
        variants=(ALONG,),
        bases=("no-bos", "bos"),
        read_outs=("sinks", onsets),
        presupposes=(has_sink(ALONG.label),),
        parts=(
            _after("massive", "activations become massive later than attention goes to the sink"),
            _after("worth", "predictions come to need the sink later than attention goes to it"),
        ),
    )
