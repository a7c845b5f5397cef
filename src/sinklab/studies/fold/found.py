"""What ``sinklab fold`` found: how well constants stand for the sinks, head by head, and what the fold costs in loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from sinklab.results.intervals import Interval
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row

EXPLAINED = Metric(
    "fold_explained",
    "fraction",
    "Share of the variance of the scores of the sinks, over the queries of held-out texts that see them, that a linear "
    "function of the query before rotation explains (R²).",
)
WEIGHT_ERROR = Metric(
    "fold_weight_error",
    "weight",
    "Mean over the same queries of the distance between the weight on the sinks and the weight on nothing that replaces it.",
    range=FRACTION,
)
SINK_WEIGHT = Metric("fold_sink_weight", "weight", "Mean over the same queries of the weight on the sinks.", range=FRACTION)
FOLD_LOSS = Metric(
    "fold_loss_change",
    "nats",
    "Mean over held-out texts of the change of their mean loss, behind the sinks, where these are hidden and what the row "
    "names stands in their place.",
)


@dataclass(frozen=True)
class FoldedHead:
    """One query head: whether its sinks are folded, how well that fits on held-out texts, and the constants.

    ``score`` is the mean of the scores of the sinks, ``value_norm`` the norm of the value that stands for them and
    ``value_spread`` how far values of single texts are from it, as a share of that norm.
    """

    module: str
    layer: int
    head: int
    rests: bool
    folded: bool
    explained: float
    error: float
    weight: float
    score: float
    value_norm: float
    value_spread: float


@dataclass(frozen=True)
class Form:
    """What stands in the place of the sinks, and what it changes; ``chosen`` is what is saved.

    Attributes:
        loss: nats; ``None`` where there is none: a model without a head, pictures without classes.
        change: of the loss, in nats; without one, of the output: the distance over its norm.
    """

    name: str
    score: str
    value: str
    loss: float | None
    change: Interval
    chosen: bool = False


@dataclass(frozen=True)
class Silenced:
    """Neurons whose write makes a sink stand out, set to zero for all tokens, and what the loss does; in place if ``kept``.

    Attributes:
        change: of the loss behind the sinks.
        at_sinks: of the loss of what the sinks themselves predict; ``None`` of a model that predicts no next token.
    """

    module: str
    units: list[int]
    change: Interval
    at_sinks: float | None
    kept: bool


@dataclass(frozen=True)
class Folding:
    """``summary.json`` of ``sinklab fold`` besides what the model is.

    Attributes:
        text: the finding.
        positions: that are folded; empty where there is nothing to fold.
        calibration, samples, seq_len: texts that the constants are made of, others that they are judged on, and their length.
        loss: of the model as it is on the latter.
        margin: change of the loss in nats up to which a fold is taken.
        left_alone: layers with a sink whose heads are not folded, with the reason.
        places: token behind which each stretch of the losses begins; ``curves``: of each form the mean loss there.
        largest: largest input of a linear map as it is, folded, and with neurons silenced.
        notes: sinks that are not folded, and what else limits the result.
    """

    text: str
    positions: list[int]
    calibration: int
    samples: int
    seq_len: int
    loss: float | None
    margin: float
    forms: list[Form]
    heads: list[FoldedHead]
    left_alone: list[str]
    silenced: list[Silenced]
    places: list[int]
    curves: dict[str, list[float]]
    largest: dict[str, float]
    notes: list[str]

    @property
    def chosen(self) -> Form | None:
        """The form that is saved."""
        return next((form for form in self.forms if form.chosen), None)


def fold_rows(found: Folding, samples: int) -> Iterator[Row]:
    """Rows of the long table."""
    common: Coordinates = {"probe": "fold", "count": samples}
    for head in found.heads:
        at: Coordinates = {**common, "module": head.module, "layer": head.layer, "head": head.head}
        for metric, value in ((EXPLAINED, head.explained), (WEIGHT_ERROR, head.error), (SINK_WEIGHT, head.weight)):
            yield {**at, "metric": metric, "value": value}
    changes: Sequence[tuple[str, Interval]] = [(form.name, form.change) for form in found.forms]
    changes = [*changes, *((f"{one.module} silenced", one.change) for one in found.silenced)]
    for name, change in changes:
        metrics = (FOLD_LOSS, *map(FOLD_LOSS.bound, ("low", "high")))
        for metric, value in zip(metrics, astuple(change), strict=True):
            yield {**common, "intervention": name, "metric": metric, "value": value}
