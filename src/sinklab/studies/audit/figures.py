"""What the page of an audit says of a whole model in one number each, and layer by layer in figures and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sinklab.report.numbers import layer_name
from sinklab.report.pack import rounded
from sinklab.results.blocks import Grid, number, percent
from sinklab.studies.audit.folder import Audit, View
from sinklab.studies.audit.found import loss_unit, place_and_token

__all__ = ["LOOKS", "headline", "layer_figures", "layer_table", "look_of"]

Number = tuple[str, str | None, str]
"""What it is, the number (``None`` where it was not measured), and a note."""


def headline(audit: Audit) -> list[Number]:
    """The numbers of the whole model, most important first; about sinks those of each part of an encoder–decoder."""
    found, threshold = audit.found, f"{audit.found.threshold:g}"
    numbers: list[Number] = []
    for view in audit.views:
        part, main = f"{view.part}: " if view.part else "", view.found.main
        there = "None" if main is None else place_and_token(main)
        rates = "" if main is None else f"sink rate {percent(main.rate)}"
        at = f"at {view.found.sink_name}"
        numbers += [
            (f"{part}Strongest sink", there[:1].upper() + there[1:], rates),
            (f"{part}Heads that sink", f"{view.found.sink_heads:,} of {view.found.num_heads:,}", at),
            (f"{part}Sink rate", percent(view.found.sink_rate_gu2024), f"Gu et al., first position, threshold {threshold}"),
        ]
        if not found.normalized:
            numbers.append((f"{part}Heads by weight", number(view.found.sink_heads_by_weight), f"above {threshold} as it is"))
    unit = loss_unit(found)
    if found.loss is not None and found.loss_kind == "next token" and found.loss < 100:
        unit += f"; perplexity {number(math.exp(found.loss))}"
    if found.bits_per_byte is not None:
        unit += f"; {number(found.bits_per_byte)} bits per byte"
    numbers.append(("Loss", None if found.loss is None else number(found.loss, 4), unit))
    numbers += _of_attention(audit)
    for name, probe, metric, against in (
        ("Largest activation", "massive_activation", "max_to_median", "the median of its layer"),
        ("First hidden norm", "hidden_norm", "first_to_rest_ratio", "the mean of the others"),
    ):
        of_parts = [(*most, view.part) for view in audit.views if (most := view.numbers.largest_by_layer(probe, metric))]
        value, layer, part = max(of_parts, key=lambda entry: entry[0], default=(None, 0, ""))
        where = f"{against}; layer {layer_name(part, layer)}" if value is not None else against
        numbers.append((name, None if value is None else f"{number(value)} ×", where))
    return numbers


def _of_attention(audit: Audit) -> Iterator[Number]:
    """How much heads abstain (by a gate, by null mass, or the mass of a row where that need not be 1), and the entropy."""
    null, gate, mass, entropy, without = (
        audit.numbers.mean_of_heads(probe, metric)
        for probe, metric in (
            ("null_mass", "null_mass"), ("null_mass", "output_gain"), ("null_mass", "row_mass"),
            ("entropy", "entropy"), ("entropy", "entropy_without_sink"),
        )
    )  # fmt: skip
    if gate is not None and not null:
        yield "Gate", number(gate), "mean factor on a head's output; 0 is a head that says nothing"
    elif null is None and mass is not None:
        yield "Mass of a row", number(mass), "sum of a query's weights, mean over heads; it need not be 1 here"
    else:
        yield "Null mass", None if null is None else percent(100 * null), "attention that goes to no key, mean over heads"
    if audit.found.parts:
        return
    note = f"{number(without)} without {audit.found.sink_name}" if without is not None else "mean over heads"
    yield "Entropy", None if entropy is None else f"{number(entropy)} nats", note


COLOURS = 6
"""Colours of audits, ``k-audit0`` on, in the style sheet; further audits have them again, with another dash."""

LOOKS = 5 * COLOURS
"""Lines that can be told apart: the style sheet has four further dashes, ``r1`` to ``r4``."""

Source = tuple[str | Callable[[View], str], Callable[[View], dict[int, float] | None], str]
"""Series name, where its numbers come from, how its line is drawn."""

Line = tuple[str, dict[str, object], dict[int, float]]
"""A name, how it is drawn, and numbers by layer."""


def _positions(probe: str, metric: str) -> list[Source]:
    """The first position, the strongest sink where it is elsewhere, and the mean of the rest."""

    def sink(view: View) -> dict[int, float] | None:
        columns = view.found.columns
        return view.numbers.by_layer(probe, metric, "sink", columns) if columns not in ([], [0]) else None

    return [
        ("first position", lambda view: view.numbers.by_layer(probe, metric, "sink", [0]), "sink"),
        (lambda view: f"strongest sink, {view.found.sink_name}", sink, "other"),
        ("mean of the rest", lambda view: view.numbers.by_layer(probe, metric, "rest", view.found.columns or [0]), "rest"),
    ]


def _plain(name: str | Callable[[View], str], probe: str, metric: str, kind: str = "sink") -> Source:
    return name, lambda view: view.numbers.by_layer(probe, metric), kind


FIGURES: list[tuple[str, str, str, bool, list[Source]]] = [
    ("Hidden state norm", "L2 norm", "A sink token's hidden state is usually far longer than the others.", True,
     _positions("hidden_norm", "hidden_norm")),
    ("Key norm", "L2 norm, mean over heads", "A sink's keys are usually short: the angle attracts, not the length.", False,
     _positions("key_norm", "key_norm")),
    ("Value norm", "L2 norm, mean over heads", "A sink's values are usually short: attending to it changes little.", False,
     _positions("value_norm", "value_norm")),
    ("Entropy of attention", "nats, mean over heads", "Low entropy may be the sink alone: compare with and without it.", False,
     [_plain("all keys", "entropy", "entropy"),
      _plain(lambda view: f"without {view.found.sink_name}", "entropy", "entropy_without_sink", "rest")]),
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


def layer_figures(audits: Sequence[tuple[str, View]]) -> list[dict[str, object]]:
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


def _lines_of_one(view: View, sources: Sequence[Source]) -> list[Line]:
    """Every series of a figure that has numbers."""
    return [
        (label(view) if callable(label) else label, {"kind": kind}, values)
        for label, source, kind in sources
        if (values := source(view))
    ]


def _lines_of_several(audits: Sequence[tuple[str, View]], source: Source) -> list[Line]:
    """One series of every audit that has numbers and a look of its own."""
    _, read, _ = source
    return [(name, look_of(index), values) for index, (name, view) in enumerate(audits[:LOOKS]) if (values := read(view))]


def layer_table(figures: Sequence[dict[str, Any]]) -> Grid:
    """The numbers behind per-layer figures as a table, one row per layer."""
    columns = [(figure, series) for figure in figures for series in figure["series"]]
    labels = sorted(
        {label for figure in figures for label in figure["labels"]}, key=lambda label: (label != "in", label.zfill(9))
    )
    headings = [
        f"{figure['title']}: {series['name']}" if len(figure["series"]) > 1 else figure["title"] for figure, series in columns
    ]
    rows = [
        [
            "embedding" if label == "in" else label,
            *(series["y"][figure["labels"].index(label)] if label in figure["labels"] else "" for figure, series in columns),
        ]
        for label in labels
    ]
    return Grid(["Layer", *headings], rows, title="The numbers behind these figures", folded=True)
