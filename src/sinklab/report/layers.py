"""Figures over depth: what was measured layer by layer, as lines and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sinklab.report.audit_folder import Audit
from sinklab.report.pack import rounded
from sinklab.report.words import number, sink_columns, sink_name

__all__ = ["COLOURS", "LOOKS", "layer_figures", "layer_table", "look_of"]

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
