"""What fold_sinks() finds and shows: how well constants stand for the sinks, head by head, and what the fold costs in loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from sinklab.results.blocks import Block, Curves, Facts, Grid, Heading, Say, counted, interval, number
from sinklab.results.intervals import Interval
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.results.sections import from_json

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
        positions: that are folded; empty where there is nothing to fold.
        calibration, samples, seq_len: texts that the constants are made of, others that they are judged on, and their length.
        loss: of the model as it is on the latter; ``margin`` in nats up to which a fold is taken.
        left_alone: layers with a sink whose heads are not folded, with the reason.
        places: token behind which each stretch of the losses begins; ``curves``: of each form the mean loss there.
        largest: largest input of a linear map as it is, folded, and with neurons silenced.
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


TITLE = "The sink, folded"
LEAD = (
    "The key on which heads rest is hidden, and each head has a score and a value for nothing in its place: constants of the "
    "model, fitted without training. The hidden states of the sink itself stay what they were."
)


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The finding, what stands in the place of the sinks and its loss, and the heads."""
    found = from_json(Folding, summary, "summary.json")
    yield Say(found.text)
    if not found.heads:
        for note in found.notes:
            yield Say(note, small=True)
        return
    judged = found.loss is not None
    yield Grid(
        ["In the place of the sinks", "Score", "Value", "Loss", "Change, nats" if judged else "Change of the output", "Saved"],
        [
            [form.name, form.score, form.value, form.loss, interval(form.change), "yes" if form.chosen else ""]
            for form in found.forms
        ],
        text=3,
    )
    if found.silenced:
        yield Heading("Neurons that make it stand out", 3)
        yield Grid(
            ["Module", "Neurons", "Change without them, nats", "At the sinks themselves", "Silenced"],
            [
                [one.module, ", ".join(map(str, one.units)), interval(one.change), one.at_sinks, "yes" if one.kept else "no"]
                for one in found.silenced
            ],
            text=2,
        )
    if found.largest:
        yield Facts([("largest input of a linear map", ", ".join(f"{name} {number(v)}" for name, v in found.largest.items()))])
    yield Curves("Loss behind each token", found.curves, [float(place) for place in found.places], "token", "nats")
    yes = {True: "yes", False: ""}
    yield Grid(
        ["Head", "Rests", "Folded", "R²", "Weight", "error", "Mean score", "Value, norm", "spread"],
        [
            [
                f"{head.layer}.{head.head}", yes[head.rests], yes[head.folded], head.explained, head.weight, head.error,
                head.score, head.value_norm, head.value_spread,
            ]
            for head in found.heads
        ],
        "Every head", folded=True, text=3,
    )  # fmt: skip
    for line in found.left_alone:
        yield Say(line)
    for note in found.notes:
        yield Say(note, small=True)
    yield Say(
        f"Constants from {counted(found.calibration, 'sample')} of {found.seq_len} tokens, judged on {found.samples} others: "
        f"change of the {'loss' if judged else 'output (distance over norm)'} with 95 % interval over samples. "
        "Score linear: in the query before rotation. R²: of the scores of the sinks. "
        "Weight: on the sinks, over the queries that see them; error: mean distance of the weight on nothing from it. Spread: "
        "root mean square distance of single samples' values from the constant one, as a share of its norm.", small=True,
    )  # fmt: skip
