"""What low distortion means, fixed before any result, and what was found about each operation; no torch.

An operation is *low-distortion* if, in a model trained with it instead of softmax on the same data for as many steps and with
as many parameters, giving heads a way to do nothing costs no loss and leaves nothing behind that makes the model harder to use.
These are the five :data:`BOUNDS`, each judged over seeds as a part of a claim is: all must hold, and one that fails is enough
for "no". It *replaces the sink* if those on loss, sink and window hold where softmax at its rate is outside of the last two;
where softmax has no sink, there is none to replace. Of natural text the bound on the window is on what the first four tokens
give back of its loss, since there a window loses context too, whatever the operation.

Beside that, the *loss* is compared with that of softmax in both directions, by differences at the same seed, with a margin of
0.02 nats (one percent of the loss at the smallest scale, and what eight seeds can tell). Two one-sided tests at 5 % each are an
interval of 90 % (Schuirmann 1987, doi 10.1007/BF01068419): inside the margins the losses are "equivalent", wholly beyond them
the operation is "better" or "worse", and otherwise it is "undecided". The tests are not corrected for their number.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sinklab.jobs.estimate import SEEDS, estimate_mean
from sinklab.results.blocks import Block, Facts, Grid, Say, interval
from sinklab.results.sections import to_json
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.verdict.rule import MOST_LOST, judge_part

REFERENCE = "softmax"
"""Label of the operation against which all others are judged; it has no way to do nothing but a sink."""

MARGIN = 0.02
"""Nats of loss that are a difference; see the top of this file."""

ON_NATURAL_TEXT = {"window_gap": "sink_worth"}
"""Metric of a bound to the one in its place where the text is natural."""

COLUMNS = {
    "held_out_loss": "loss (nats)",
    "carried_rate": "sink (percent)",
    "hidden_ratio": "first norm (ratio)",
    "window_gap": "window gap (nats)",
    "sink_worth": "sink worth (nats)",
    "int8_gap": "int8 gap (nats)",
}
"""Metrics that are shown, and their headings."""

SINK, WINDOW = "sink", "window"


class Bound(NamedTuple):
    """One of the things that low distortion asks for, of a metric of a model."""

    metric: str
    less_than: float
    says: str
    over_softmax: bool = False


BOUNDS: Mapping[str, Bound] = {
    "loss": Bound("held_out_loss", 0.02, "held-out loss less than 0.02 nats above softmax's at the same seed", True),
    # Gu et al. 2024 have 0.4 to 0.8 % of heads without a sink and 18 % with one, and norms of 1.0 to 1.5 and of 20.
    SINK: Bound(
        "carried_rate", 5.0, "fewer than 5 % of heads sink on a first token, by weight times gate and by share of a row"
    ),
    "activations": Bound("hidden_ratio", 2.0, "the first hidden state is less than 2 times as long as others"),
    WINDOW: Bound(
        "window_gap",
        0.02,
        "a window of a quarter of the context without sinks costs less than 0.02 nats; of natural text: the first four tokens "
        "give back less than 0.02 nats of what it costs",
    ),
    "int8": Bound("int8_gap", 0.02, "8-bit weights and activations cost less than 0.02 nats"),
}

Numbers = Mapping[int, Mapping[str, Mapping[str, float]]]
"""Seed to label to metric to number."""


def beside(label: str, numbers: Numbers) -> dict[str, Any]:
    """The two one-sided tests of the loss of one operation against that of softmax with the same seed.

    Returns:
        ``answer``: equivalent, better, worse or undecided; ``mean`` in nats with its interval of 90 % from ``low`` to ``high``
        by Student's t, ``None`` where there is none.
    """
    difference = Difference("held_out_loss", label, REFERENCE)
    values = [own for of_seed in numbers.values() if (own := difference(of_seed)) is not None]
    if len(values) < SEEDS:
        return {"answer": "undecided", "mean": statistics.fmean(values) if values else None, "low": None, "high": None}
    found, lost = estimate_mean(values, 0.90), len(numbers) - len(values)
    low, high = found.interval or (None, None)
    answer = "undecided"
    if low is not None and high is not None and lost <= MOST_LOST * len(numbers):  # the lucky ones do not speak for all
        if low > -MARGIN and high < MARGIN:
            answer = "equivalent"
        elif high <= -MARGIN or low >= MARGIN:
            answer = "better" if high <= -MARGIN else "worse"
    return {"answer": answer, "mean": found.middle, "low": low, "high": high}


def judged(
    labels: Sequence[str], numbers: Numbers, rates: Mapping[str, float | None], *, natural: bool
) -> list[dict[str, Any]]:
    """What was found about each operation, as plain JSON.

    Args:
        labels: softmax first.
        numbers: of the seeds of the evaluation.
        rates: label to its learning rate over that of the scale; ``None`` where none was found.
        natural: whether the text is natural, so that a window loses context, too.

    Returns:
        ``label``, ``rate``, ``low_distortion`` and ``replaces_the_sink`` (answer and the bounds that fail or are open; of the
        latter ``None`` where softmax has no sink), ``beside_softmax``, and ``bounds`` and ``numbers`` as parts of a claim.
    """
    rows, sink_of_softmax = list[dict[str, Any]](), False
    for label in labels:
        bounds = {name: to_json(judge_part(_part(name, label, natural), numbers).record()) for name in _asked(label)}
        if label == REFERENCE:
            sink_of_softmax = all(bounds[name]["verdict"] == "not reproduced" for name in (SINK, WINDOW))
        replaces = {name: bound for name, bound in bounds.items() if name in ("loss", SINK, WINDOW)}
        rows.append(
            {
                "label": label,
                "rate": rates.get(label),
                "low_distortion": _together(bounds),
                "replaces_the_sink": _together(replaces) if sink_of_softmax and label != REFERENCE else None,
                "beside_softmax": None if label == REFERENCE else beside(label, numbers),
                "bounds": bounds,
                "numbers": {name: of for name in COLUMNS if (of := _summary(name, label, numbers)) is not None},
            }
        )
    return rows


def _asked(label: str) -> list[str]:
    """Names of the bounds; softmax is not compared with itself."""
    return [name for name, bound in BOUNDS.items() if not (bound.over_softmax and label == REFERENCE)]


def _part(name: str, label: str, natural: bool) -> Part:
    bound = BOUNDS[name]
    metric = ON_NATURAL_TEXT.get(bound.metric, bound.metric) if natural else bound.metric
    effect = Difference(metric, label, REFERENCE) if bound.over_softmax else Value(metric, label)
    return Part(name, effect, less_than=bound.less_than)


def _together(bounds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Yes if all hold, no if one fails, and undecided otherwise; and those that fail or are open."""
    for answer, verdict in (("no", "not reproduced"), ("undecided", "inconclusive")):
        if named := [name for name, bound in bounds.items() if bound["verdict"] == verdict]:
            return {"answer": answer, "bounds": named}
    return {"answer": "yes", "bounds": []}


def _summary(metric: str, label: str, numbers: Numbers) -> dict[str, Any] | None:
    """Mean (of a ratio the geometric one) and 95 % interval over the seeds that have a number; ``None`` without any."""
    values = [of[label][metric] for of in numbers.values() if metric in of.get(label, {})]
    if len(values) < SEEDS:
        return {"mean": statistics.fmean(values), "low": None, "high": None, "count": len(values)} if values else None
    found = Value(metric, label).estimate(values)
    low, high = found.interval or (None, None)
    return {"mean": found.middle, "low": low, "high": high, "count": len(values)}


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The answers with the numbers on which they rest, in one table."""
    rows = summary["rows"]
    inside = [row["label"] for row in rows if row["low_distortion"]["answer"] == "yes" and row["label"] != REFERENCE]
    yield Say(f"Low-distortion: {', '.join(inside) or 'none'}, of {len(rows) - 1} operations beside softmax.")
    shown = [name for name in COLUMNS if any(name in row["numbers"] for row in rows)]
    headings = ["operation", "rate", "low-distortion", "replaces the sink", "loss beside softmax (nats)"]
    cells = [
        [
            row["label"],
            "–" if row["rate"] is None else f"×{row['rate']:g}",
            "reference" if row["label"] == REFERENCE else _answer(row["low_distortion"]),
            _answer(row["replaces_the_sink"]),
            _difference(row["beside_softmax"]),
            *(interval(row["numbers"].get(name), 3, sign="") for name in shown),
        ]
        for row in rows
    ]
    yield Grid([*headings, *(COLUMNS[name] for name in shown)], cells, text=len(headings))
    yield Facts([(name, bound.says) for name, bound in BOUNDS.items()])
    yield Say("A bound holds if the 95 % interval over seeds lies inside, and fails if it lies outside.", small=True)


def _answer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    return f"{found['answer']}: {', '.join(found['bounds'])}" if found["bounds"] else str(found["answer"])


def _difference(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{found['answer']}: {interval(found, 3)}"
