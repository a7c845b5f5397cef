"""Figures over depth: what was measured layer by layer, as lines and as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.report.maps import Audit
from sinklab.report.numbers import layer_name
from sinklab.report.pack import rounded
from sinklab.report.words import (
    loss_unit,
    number,
    percent,
    silent_of,
    sink_column,
    sink_columns,
    sink_name,
    sinks_of,
    token_there,
)
from sinklab.results.intervals import LEAST_SHARE, LEVEL
from sinklab.results.naming import quote

__all__ = [
    "COLOURS",
    "LOOKS",
    "Card",
    "cards",
    "largest_by_layer",
    "layer_figures",
    "layer_table",
    "look_of",
    "mean_by_head",
    "part_cards",
    "share_of_sinking_heads",
]

COLOURS = 6
"""Colours of audits, ``k-audit0`` on, in the style sheet; further audits have them again, with another dash."""

LOOKS = 5 * COLOURS
"""Lines that can be told apart: the style sheet has four further dashes, ``r1`` to ``r4``."""

Source = tuple[str | Callable[[Audit], str], Callable[[Audit], dict[int, float] | None], str]
"""Series name, where its numbers come from, how its line is drawn."""

Line = tuple[str, dict[str, object], dict[int, float]]
"""A name, how it is drawn, and numbers by layer."""


def _positions(probe: str, metric: str) -> list[Source]:
    """The first position, the strongest sink where it is elsewhere, and the mean of the rest."""

    def sink(audit: Audit) -> dict[int, float] | None:
        columns = sink_columns(audit)
        return audit.numbers.by_layer(probe, metric, "sink", columns) if columns not in ([], [0]) else None

    return [
        ("first position", lambda audit: audit.numbers.by_layer(probe, metric, "sink", [0]), "sink"),
        (lambda audit: f"strongest sink, {sink_name(audit)}", sink, "other"),
        ("mean of the rest", lambda audit: audit.numbers.by_layer(probe, metric, "rest", sink_columns(audit) or [0]), "rest"),
    ]


def _plain(name: str | Callable[[Audit], str], probe: str, metric: str, kind: str = "sink") -> Source:
    return name, lambda audit: audit.numbers.by_layer(probe, metric), kind


FIGURES: list[tuple[str, str, str, bool, list[Source]]] = [
    ("Hidden state norm", "L2 norm", "A sink token's hidden state is usually far longer than the others.", True,
     _positions("hidden_norm", "hidden_norm")),
    ("Key norm", "L2 norm, mean over heads", "A sink's keys are usually short: the angle attracts, not the length.", False,
     _positions("key_norm", "key_norm")),
    ("Value norm", "L2 norm, mean over heads", "A sink's values are usually short: attending to it changes little.", False,
     _positions("value_norm", "value_norm")),
    ("Entropy of attention", "nats, mean over heads", "Low entropy may be the sink alone: compare with and without it.", False,
     [_plain("all keys", "entropy", "entropy"),
      _plain(lambda audit: f"without {sink_name(audit)}", "entropy", "entropy_without_sink", "rest")]),
    ("Massive activations", "largest |value| / median", "Massive: above 100 and at least 1,000 × the median.", True,
     [_plain("max / median", "massive_activation", "max_to_median")]),
    ("Largest activation", "absolute value", "The largest absolute coordinate of the layer's output.", True,
     [_plain("layer output", "massive_activation", "max_abs"), _plain("attention output", "outliers", "max_inf_norm", "rest")]),
    ("Kurtosis", "fourth moment / variance²", "3 for a normal distribution; larger means outliers.", True,
     [_plain("attention output", "outliers", "kurtosis"), _plain("layer output", "outliers", "layer_kurtosis", "rest")]),
    ("Null mass", "fraction, mean over heads", "Attention that goes to no key: a learned sink logit or key takes it.", False,
     [_plain("null mass", "null_mass", "null_mass")]),
    ("Head output", "norm / residual norm", "Near 0: the head does almost nothing to the residual stream.", False,
     [_plain("mean over heads", "head_output", "relative_norm")]),
]  # fmt: skip
"""Title, axis, how to read it, logarithmic or not, series."""


def look_of(index: int) -> dict[str, object]:
    """Colour and dash of an audit by its place, as the script takes them; empty where all looks are taken."""
    if index >= LOOKS:
        return {}
    return {"kind": f"audit{index % COLOURS}", "round": index // COLOURS}


def layer_figures(audits: Sequence[tuple[str, Audit]]) -> list[dict[str, object]]:
    """Figures over depth. One audit: every series. Several: one series each, the first of the figure; of more than
    :data:`LOOKS`, the first have one.

    A figure without numbers has no series and is shown as "not measured".
    """
    figures = []
    for title, axis, caption, logarithmic, sources in FIGURES:
        lines = _lines_of_one(audits[0][1], sources) if len(audits) == 1 else _lines_of_several(audits, sources[0])
        layers = sorted({layer for _, _, values in lines for layer in values})
        every = [value for _, _, values in lines for value in values.values()]
        # A logarithmic axis has no place for 0, and within one decade a plain one is easier to read.
        wide = bool(every) and min(every) > 0 and max(every) > 10 * min(every)
        figures.append(
            {
                "title": title if len(audits) == 1 or len(sources) == 1 else f"{title}, {sources[0][0]}",
                "axis": axis,
                "across": "layer",
                "caption": caption,
                "log": logarithmic and wide,
                "labels": ["in" if layer < 0 else str(layer) for layer in layers],
                "series": [
                    {"name": name, **look, "y": [rounded(values.get(layer)) for layer in layers]}
                    for name, look, values in lines
                ],
            }
        )
    return figures


def _lines_of_one(audit: Audit, sources: Sequence[Source]) -> list[Line]:
    """Every series of a figure that has numbers."""
    return [
        (label(audit) if callable(label) else label, {"kind": kind}, values)
        for label, source, kind in sources
        if (values := source(audit))
    ]


def _lines_of_several(audits: Sequence[tuple[str, Audit]], source: Source) -> list[Line]:
    """One series of every audit that has numbers and a look of its own."""
    _, read, _ = source
    return [(name, look_of(index), values) for index, (name, audit) in enumerate(audits[:LOOKS]) if (values := read(audit))]


def layer_table(figures: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The numbers behind per-layer figures as a table: headings, and one row per layer."""
    columns = [(figure, series) for figure in figures for series in figure["series"]]
    labels = sorted(
        {label for figure in figures for label in figure["labels"]}, key=lambda label: (label != "in", label.zfill(9))
    )
    headings = [
        f"{figure['title']}: {series['name']}" if len(figure["series"]) > 1 else figure["title"] for figure, series in columns
    ]
    rows = []
    for label in labels:
        row = ["embedding" if label == "in" else label]
        for figure, series in columns:
            at = figure["labels"].index(label) if label in figure["labels"] else None
            row.append("" if at is None else number(series["y"][at]))
        rows.append(row)
    return headings, rows


@dataclasses.dataclass(frozen=True)
class Card:
    """One number of the summary; ``value`` is ``None`` when it was not measured."""

    label: str
    value: str | None
    note: str


def share_of_sinking_heads(audit: Audit) -> tuple[int, int] | None:
    """Heads that sink at the strongest sink, and all heads.

    An audit that was made before heads were decided by an interval counts those that sink in at least half of the samples.
    """
    recorded, cells = audit.summary.get("sink_heads"), audit.numbers.num_cells
    if isinstance(audit.summary.get("sinks"), dict) and "weak" in audit.summary["sinks"] and isinstance(recorded, int):
        return recorded, cells
    rates = audit.numbers.by_head_and_position("sink_rate", "gu2024", audit.num_positions)
    sinks, column = sinks_of(audit.summary), sink_column(audit) or 0
    if rates is None or column >= rates.shape[-1]:
        return None
    elsewhere = sinks and sinks[0]["kind"] != "position"
    strong = sum(rate >= 50 for _, _, rate in sinks[0]["heads"]) if elsewhere else int((rates[..., column] >= 50).sum())
    return strong, int(np.isfinite(rates).any(axis=-1).sum())


def _where_they_sink(audit: Audit) -> str:
    if audit.summary.get("samples") == 1:
        return "in the one sample, which does not show in how many others"
    return f"in more than {100 * LEAST_SHARE:g} % of samples, with {100 * LEVEL:g} % confidence"


def mean_by_head(audit: Audit, probe: str, metric: str) -> float | None:
    """The whole model's number, or else the mean over all heads."""
    whole = audit.numbers.whole(probe, metric)
    if whole is not None:
        return whole
    values = audit.numbers.by_head(probe, metric)
    return None if values is None or np.isnan(values).all() else float(np.nanmean(values))


def largest_by_layer(audit: Audit, probe: str, metric: str) -> tuple[float, int] | None:
    """The largest per-layer number and its layer; the embedding output is left out."""
    values = {layer: value for layer, value in (audit.numbers.by_layer(probe, metric) or {}).items() if layer >= 0}
    if not values:
        return None
    layer = max(values, key=values.__getitem__)
    return values[layer], layer


def mass_card(audit: Audit, null: float | None) -> Card:
    """How much heads abstain: by a gate; else null mass; where that is not defined (rows need not sum to one), a row's mass."""
    gate = mean_by_head(audit, "null_mass", "output_gain")
    if gate is not None and not null:
        return Card("Gate", number(gate), "mean factor on a head's output; 0 is a head that says nothing")
    mass = mean_by_head(audit, "null_mass", "row_mass") if null is None else None
    if mass is None:
        return Card(
            "Null mass", None if null is None else percent(100 * null), "attention that goes to no key, mean over heads"
        )
    return Card("Mass of a row", number(mass), "sum of a query's weights, mean over heads; it need not be 1 here")


def _largest_named(parts: Sequence[tuple[str, Audit]], probe: str, metric: str) -> tuple[float, str] | None:
    """The largest per-layer number of all parts and the name of its layer, as maps have it."""
    entries = [(*largest, part) for part, view in parts if (largest := largest_by_layer(view, probe, metric)) is not None]
    if not entries:
        return None
    value, layer, part = max(entries, key=lambda entry: entry[0])
    return value, layer_name(part, layer)


def cards(audit: Audit, parts: Sequence[tuple[str, Audit]] = ()) -> list[Card]:
    """The summary cards, most important first; a card without a number says that it was not measured.

    Args:
        parts: of an encoder–decoder, in which layers have numbers of their own.
    """
    summary, threshold = audit.summary, f"{audit.threshold:g}"
    rate = summary.get("sink_rate_gu2024")
    heads = share_of_sinking_heads(audit)
    null, entropy = mean_by_head(audit, "null_mass", "null_mass"), mean_by_head(audit, "entropy", "entropy")
    without = mean_by_head(audit, "entropy", "entropy_without_sink")
    parts = parts or [("", audit)]
    massive = _largest_named(parts, "massive_activation", "max_to_median")
    ratio = _largest_named(parts, "hidden_norm", "first_to_rest_ratio")
    return [
        Card("Sink rate", None if rate is None else percent(rate), f"Gu et al., first position, threshold {threshold}"),
        _strongest_card(summary),
        Card(
            "Heads that sink",
            f"{number(heads[0])} of {number(heads[1])}" if heads else None,
            f"{_where_they_sink(audit)}, at {sink_name(audit)}",
        ),
        _loss_card(summary),
        mass_card(audit, null),
        Card(
            "Entropy",
            None if entropy is None else f"{number(entropy)} nats",
            f"{number(without)} without {sink_name(audit)}" if without is not None else "mean over heads",
        ),
        Card(
            "Largest activation",
            f"{number(massive[0])} ×" if massive else None,
            f"the median of its layer; layer {massive[1]}" if massive else "against the median of its layer",
        ),
        Card(
            "First hidden norm",
            f"{number(ratio[0])} ×" if ratio else None,
            f"the mean of the others; layer {ratio[1]}" if ratio else "against the mean of the other positions",
        ),
    ]


def _strongest_card(summary: Mapping[str, Any]) -> Card:
    """The strongest sink with its token, rate and role."""
    label = "Strongest sink"
    sinks = sinks_of(summary)
    if sinks:
        top, name = sinks[0], str(sinks[0]["name"])
        there = token_there(top)  # a position may be called by its token: [CLS]
        token = quote(there) if there and there not in name else ""
        # Of a sink that has a name and a token on the card, the role says the same again.
        role = summary.get("sink_role")
        role = str(role) if role and role not in ("null score", top.get("description")) else ""
        return Card(label, name[0].upper() + name[1:], " · ".join(filter(None, [token, percent(top["rate"]), role])))
    if silent_of(summary):
        return Card(label, "None", "by weight; rows divided by their sums pass the threshold")
    if isinstance(summary.get("sink_positions"), list):
        # Some may pass it: in a few samples, in layers with a window, or late, where few queries see them.
        return Card(label, "None", "no position passes the threshold often enough")
    return Card(label, None, "")


def _loss_card(summary: Mapping[str, Any]) -> Card:
    """The loss, and of a next-token loss the perplexity."""
    loss, unit = summary.get("loss"), loss_unit(summary)
    if not isinstance(loss, (int, float)):
        return Card("Loss", None, unit)
    has_perplexity = loss < 100 and summary.get("loss_kind", "next token") == "next token"
    return Card("Loss", number(float(loss), 4), f"{unit}; perplexity {number(math.exp(loss))}" if has_perplexity else unit)


def part_cards(parts: Sequence[tuple[str, Audit]], audit: Audit) -> list[Card]:
    """The cards of an encoder–decoder: about sinks a set for each part, and what is of the whole model once."""
    about = [
        dataclasses.replace(card, label=f"{part[0].upper()}{part[1:]}: {card.label[0].lower()}{card.label[1:]}")
        for part, view in parts
        for card in cards(view)[:SINK_CARDS]
    ]
    return [*about, *(card for card in cards(audit, parts)[SINK_CARDS:] if card.label != "Entropy")]


SINK_CARDS = 3
"""How many cards are about sinks; they come first."""
