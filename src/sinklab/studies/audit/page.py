"""The page of an audit, and the output directory that it is made from: run record, what was found, numbers and maps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinklab.report.maps import (
    HEAD_NUMBERS,
    Maps,
    add_maps,
    bins_of,
    pack_unsigned,
    pool_positions,
    read_maps,
    round_list,
    round_matrix,
    rounded,
)
from sinklab.report.numbers import Numbers, layer_name
from sinklab.report.page import facts_of, json_text, render, require_kind, write_blocks_page, write_page
from sinklab.results.blocks import Bar, Cell, Grid, counted, number, percent
from sinklab.results.html import html
from sinklab.results.sections import from_json, sections
from sinklab.results.table import read_run
from sinklab.studies.audit.found import (
    AuditFound,
    Place,
    SinksFound,
    condition_name,
    conditions_grid,
    loss_unit,
    place_and_token,
    remarks,
    samples_of,
    section_blocks,
    sinks_grid,
)


@dataclasses.dataclass(frozen=True)
class View:
    """A model, or a part of an encoder–decoder: the sinks that were found, and the numbers of the table."""

    found: SinksFound
    numbers: Numbers

    @property
    def part(self) -> str:
        """Empty where the model has no parts."""
        return self.found.part

    def rate(self, name: str) -> float | None:
        """The whole model's number under one definition of a sink rate, in percent, whatever unit the table has."""
        value, rows = self.numbers.whole("sink_rate", name, position=0), self.numbers.rows("sink_rate", name)
        return None if value is None or rows is None else value if rows["unit"].iloc[0] == "percent" else 100 * value


@dataclasses.dataclass(frozen=True)
class Audit:
    """Everything a page is made from; ``views`` are the parts of an encoder–decoder, of another model one for the whole."""

    folder: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    found: AuditFound
    numbers: Numbers
    views: list[View]
    maps: Maps | None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        config: dict[str, Any] = self.run["config"]
        return config

    @property
    def num_positions(self) -> int:
        """Number of positions that the page must be able to show."""
        return max(self.numbers.max_position + 1, self.maps.seq_len if self.maps else 0)


def read_audit(folder: Path) -> Audit:
    """Read the output directory of an audit."""
    folder = Path(folder)
    run = read_run(folder)
    require_kind(run, folder, "audit")
    summary = read_run(folder, "summary.json")
    found = from_json(AuditFound, summary, folder / "summary.json")
    table, config = folder / "table.parquet", run["config"]
    numbers = Numbers(table, config)
    views = [View(part, Numbers(table, config, part.part)) for part in found.parts] or [View(found, numbers)]
    return Audit(folder, run, summary, found, numbers, views, read_maps(folder / "maps.safetensors"))


PAGE_BUDGET = 10_000_000
"""Bytes that a page stays below, also for 32 × 32 heads and 4,096 tokens."""

FRAME_BUDGET = 2 * 1024 * 1024
"""Bytes that the page of an audit stays below in a notebook, with 32 × 32 heads; larger models have no maps there."""

DEFINITIONS: dict[str, str] = {
    "gu2024": "Sink rate",
    "gu2024_null": "Sink rate of the null score",
    "qiu2025_first_attention": "First-token attention (F-Attn)",
    "kaul2024_first_argmax": "First token is the arg-max",
    "first_token_share": "First-token share",
    "first_four_share": "First-four share",
}
"""Metric of ``sink_rate`` to its heading."""


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from the files of a run, whole or not at all, and return its path.

    Args:
        folder: output directory of an audit, or of a study that an audit can include, such as ``sinklab origin``.

    Raises:
        InputError: the run is of another command; a file is missing or is not what its name says.
        ResultError: the summary, the table or the maps do not follow their schema.
    """
    folder = Path(folder)
    studies = {name: section for name, section in sections().items() if name != "certificate"}  # which is no command
    kind = require_kind(read_run(folder), folder, "audit", *studies)
    if kind in studies:
        return write_blocks_page(folder, studies[kind].title, studies[kind].lead, studies[kind].blocks)
    return write_page(render_report(read_audit(folder)), folder / "report.html")


def frame_report(folder: Path) -> str:
    """The page of an audit's folder as text, small enough for the output of a notebook's cell."""
    return render_report(read_audit(folder), FRAME_BUDGET)


def render_report(audit: Audit, budget: int = PAGE_BUDGET) -> str:
    """The page of one audit as text, below so many bytes if it can be: maps get what everything else leaves of them."""
    found = audit.found
    figures = layer_figures([(view.part, view) for view in audit.views])
    context = {
        "title": found.model,
        "operation": found.operation,
        "verdict": found.finding,
        "subtitle": _subtitle(audit),
        "cards": headline(audit),
        "remarks": remarks(found),
        "threshold": f"{found.threshold:g}",
        "sinks_grid": html([sinks_grid(found)]),
        "conditions": html([conditions_grid(found)]),
        "loss_definition": found.loss_definition,
        "skips_layers": any(view.numbers.skips_layers for view in audit.views),
        "studies": [(title, lead, html(blocks)) for title, lead, blocks in section_blocks(audit.summary)],
        "definitions": html([_definitions(audit)]),
        "checks": audit.run.get("checks") or {},
        "facts": facts_of(audit.run),
    }
    data, blobs = head_data(audit)
    data.update(page="report", figures=figures)
    if audit.maps is not None:
        without = len(render("audit.html.j2", context, data, blobs).encode())
        add_maps(data, blobs, audit.maps, budget - without - _map_overhead(audit.maps))
    return render("audit.html.j2", context, data, blobs)


def _subtitle(audit: Audit) -> str:
    """What was measured, in one line."""
    found, seed = audit.found, audit.config.get("seed")
    main = condition_name(found.corpus, found.bos, found)
    return " · ".join(filter(None, (samples_of(found), found.tier, main, str(audit.run.get("dtype", "")), f"seed {seed}")))


def _map_overhead(maps: Maps) -> int:
    """Bytes at most of what accompanies maps: tokens, ranges of the scores, the elements around the packed arrays."""
    samples, modules, heads = maps.ranges.shape[:3]
    return len(json_text({"tokens": maps.tokens}).encode()) + samples * modules * (heads * 32 + 80)


def _definitions(audit: Audit) -> Grid:
    """One checkpoint read under each published definition of a sink rate; one unit for all."""
    texts = {entry["metric"]: entry for entry in audit.run.get("definitions") or () if entry["probe"] == "sink_rate"}
    rows: list[list[Cell]] = [
        [
            f"{DEFINITIONS.get(name, name)}{', ' if view.part else ''}{view.part} ({name})",
            " ".join(str(texts.get(name, {}).get(key) or "") for key in ("text", "paper")),
            Bar(percent(value), value / 100),
        ]
        for view in audit.views
        for name in dict.fromkeys([*DEFINITIONS, *view.found.definitions])
        if (value := view.rate(name)) is not None
    ]
    return Grid(["Definition", "What it counts", "Value"], rows, text=2)


def head_data(audit: Audit) -> tuple[dict[str, Any], dict[str, str]]:
    """What the script needs for the sink map and the panel of a head, without the maps; and packed arrays by element id."""
    numbers, positions = audit.numbers, audit.num_positions
    candidates = candidates_of(audit)
    exact = {place.position for view in audit.views for place in _listed(view) if place.position is not None}
    bins = bins_of(positions, exact | set(candidates.tolist()))  # no group has a candidate and another position
    blobs: dict[str, str] = {}
    arrays: dict[str, dict[str, Any]] = {}
    shape = [len(numbers.grid), numbers.num_heads, len(bins)]
    rates = numbers.by_head_and_position("sink_rate", "gu2024", positions)
    received = numbers.by_head_and_position("attention_received", "mean_weight", positions)
    for name, values in (("rate", rates), ("received", received)):
        if values is not None:
            blobs[f"blob-{name}"], scale = pack_unsigned(pool_positions(values, bins))
            arrays[name] = {"shape": shape, "scale": scale}
    own = _own_sinks(audit, rates, received, candidates)
    data: dict[str, Any] = {
        "threshold": audit.found.threshold,
        "grid": [dataclasses.asdict(row) for row in numbers.grid],
        "heads": numbers.num_heads,
        "bins": bins,
        "arrays": arrays,
        "candidates": candidates.tolist(),
        "sinks": [_sink_data(audit, view, place) for view in audit.views for place in _listed(view)],
        "ownSink": own.tolist(),
        "headNumbers": _head_numbers(audit),
        "sample": audit.found.kind,
        "positionRate": _rate_lines(audit.views, positions, bins) or None,
        "maps": None,
        "tokens": [],
        "targets": [],
    }
    return data, blobs


def _listed(view: View) -> list[Place]:
    return [*view.found.sinks.sinks, *view.found.sinks.silent]


def _sink_data(audit: Audit, view: View, place: Place) -> dict[str, Any]:
    """A sink; one that is no position, or is of one part, has rates of its own for every head."""
    token = place.token_there or (place.called if place.kind == "position" and not view.part else "") or ""
    data: dict[str, Any] = {"kind": place.kind, "position": place.position, "token": token, "rate": rounded(place.rate)}
    if view.part:
        whose = view.part if view.part == "cross-attention" else f"the {view.part}"
        data |= {"kind": "group", "position": None, "name": f"{place.name} of {whose}"}
    elif place.kind != "position":
        data["name"] = place.name
    if view.part or place.kind != "position":
        data["rates"] = head_rates(audit.numbers, place, view.part)
    return data


def _rate_lines(views: Sequence[View], positions: int, bins: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """The sink rate against position, a line for each part."""
    return [
        {
            "name": view.part or "sink rate",
            "kind": f"audit{index}" if view.part else "sink",
            "y": round_list(pool_positions(profile, bins)),
        }
        for index, view in enumerate(views)
        if (profile := view.numbers.by_position("sink_rate", "gu2024", positions)) is not None
    ]


def _head_numbers(audit: Audit) -> list[dict[str, Any]]:
    """Those of :data:`HEAD_NUMBERS` that were measured, by head."""
    listed = []
    name = "the sink of its part" if audit.found.parts else audit.found.sink_name
    for label, probe, metric, unit, note in HEAD_NUMBERS:
        values = audit.numbers.by_head(probe, metric)
        if values is None:
            continue
        if unit == "unit":
            rows = audit.numbers.rows(probe, metric)
            unit = "" if rows is None or rows["unit"].iloc[0] == "fraction" else str(rows["unit"].iloc[0])
        if probe == "score_gap" or metric == "entropy_without_sink":
            note = f"{name}{'; ' if note else ''}{note}"
        listed.append({"label": label, "unit": unit, "note": note, "values": round_matrix(values)})
    return listed


def candidates_of(audit: Audit) -> NDArray[np.int64]:
    """Of each module, positions up to the last one that half of the queries see, ``(modules,)``: those that can be sinks."""
    known = {name: count for view in audit.views for name, count in view.found.candidates_by_module.items()}
    return np.array([known.get(row.module, audit.found.candidate_positions) for row in audit.numbers.grid], dtype=np.int64)


def _own_sinks(
    audit: Audit, rates: NDArray[np.float64] | None, received: NDArray[np.float64] | None, candidates: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Each head's own sink position; the model's strongest where the head has none. ``(modules, num_heads)``."""
    main = audit.found.main
    column = audit.found.column or 0
    own = np.full((len(audit.numbers.grid), audit.numbers.num_heads), column, dtype=np.int64)
    if rates is not None and rates.size:
        # The last keys are seen by a few queries only, their own among them: a high mean there is not a sink.
        counts = np.arange(rates.shape[-1]) < candidates[:, None, None]
        filled = np.where(counts, np.nan_to_num(rates), 0.0)
        if column >= filled.shape[-1]:
            return own
        together = np.asarray(audit.found.columns)
        if main is not None and main.kind == "group" and received is not None:
            own = together[np.nan_to_num(received[..., together]).argmax(axis=-1)]
            strongest = np.asarray(head_rates(audit.numbers, main))
        else:
            strongest = filled[..., column]
        own = np.where(filled.max(axis=-1) > strongest, filled.argmax(axis=-1), own)
    return own


def head_rates(numbers: Numbers, place: Place, part: str = "") -> list[list[float]]:
    """Rates of a sink that is no position, or is of one part of the model, ``(modules, num_heads)``."""
    rates = np.zeros((len(numbers.grid), numbers.num_heads))
    rows = {row.layer: column for column, row in enumerate(numbers.grid) if not part or row.part == part}
    for layer, head, _, rate in place.heads:
        rates[rows[layer], head] = rate
    return [[float(f"{value:.5g}") for value in row] for row in rates]


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
    if worth := found.front_worth:
        said = f"a token; ± {worth.half:.2f} on {counted(worth.samples, 'text')}"
        numbers.append((f"{found.bos_name} is worth", f"{worth.gain:.2f} nats".replace("-", "−"), said))
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
    elif null != 0 or audit.found.front_worth is None:
        yield "Null mass", None if null is None else percent(100 * null), "attention that goes to no key, mean over heads"
    if audit.found.parts:
        return
    note = f"{number(without)} without {audit.found.sink_name}" if without is not None else "mean over heads"
    yield "Entropy", None if entropy is None else f"{number(entropy)} nats", note


COLOURS = 6
"""Colours of audits, ``k-audit0`` on, in the style sheet; further audits have them again, with another dash."""

Series = tuple[str, str, str, str, str]
"""Name (``{}`` stands for that of the sink), probe, metric, at which positions, and how the line is drawn."""


def _positions(probe: str, metric: str) -> list[Series]:
    """The first position, the strongest sink where it is elsewhere, and the mean of the rest."""
    return [
        ("first position", probe, metric, "first", "sink"),
        ("strongest sink, {}", probe, metric, "sink", "other"),
        ("mean of the rest", probe, metric, "rest", "rest"),
    ]


FIGURES: list[tuple[str, str, str, bool, list[Series]]] = [
    ("Hidden state norm", "L2 norm", "A sink token's hidden state is usually far longer than the others.", True,
     _positions("hidden_norm", "hidden_norm")),
    ("Key norm", "L2 norm, mean over heads", "A sink's keys are usually short: the angle attracts, not the length.", False,
     _positions("key_norm", "key_norm")),
    ("Value norm", "L2 norm, mean over heads", "A sink's values are usually short: attending to it changes little.", False,
     _positions("value_norm", "value_norm")),
    ("Entropy of attention", "nats, mean over heads", "Low entropy may be the sink alone: compare with and without it.", False,
     [("all keys", "entropy", "entropy", "", "sink"), ("without {}", "entropy", "entropy_without_sink", "", "rest")]),
    ("Massive activations", "largest |value| / median", "Massive: above 100 and at least 1,000 × the median.", True,
     [("max / median", "massive_activation", "max_to_median", "", "sink")]),
    ("Largest activation", "absolute value", "The largest absolute coordinate of the layer's output.", True,
     [("layer output", "massive_activation", "max_abs", "", "sink"),
      ("attention output", "outliers", "max_inf_norm", "", "rest")]),
    ("Kurtosis", "fourth moment / variance²", "3 for a normal distribution; larger means outliers.", True,
     [("attention output", "outliers", "kurtosis", "", "sink"), ("layer output", "outliers", "layer_kurtosis", "", "rest")]),
    ("Null mass", "fraction, mean over heads", "Attention that goes to no key: a learned sink logit or key takes it.", False,
     [("null mass", "null_mass", "null_mass", "", "sink")]),
    ("Head output", "norm / residual norm", "Near 0: the head does almost nothing to the residual stream.", False,
     [("mean over heads", "head_output", "relative_norm", "", "sink")]),
]  # fmt: skip
"""Title, axis, how to read it, logarithmic or not, series."""


def look_of(index: int) -> dict[str, object]:
    """Colour and dash of an audit by its place, as the script takes them; the style sheet has four further dashes."""
    return {"kind": f"audit{index % COLOURS}", "round": index // COLOURS % 5}


def layer_figures(audits: Sequence[tuple[str, View]]) -> list[dict[str, object]]:
    """Figures over depth. One audit: every series. Several: one series each, the first of the figure.

    A figure without numbers has no series and is shown as "not measured".
    """
    figures = []
    for title, axis, caption, logarithmic, series in FIGURES:
        drawn: list[tuple[str, dict[str, object], dict[int, float]]]
        if len(audits) == 1:
            view = audits[0][1]
            drawn = [(one[0].format(view.found.sink_name), {"kind": one[-1]}, _by_layer(view, one)) for one in series]
        else:
            drawn = [(name, look_of(index), _by_layer(view, series[0])) for index, (name, view) in enumerate(audits)]
        lines = [(name, look, values) for name, look, values in drawn if values]
        layers = sorted({layer for _, _, values in lines for layer in values})
        every = [value for _, _, values in lines for value in values.values()]
        # A logarithmic axis has no place for 0, and within one decade a plain one is easier to read.
        wide = bool(every) and min(every) > 0 and max(every) > 10 * min(every)
        figures.append(
            {
                "title": title if len(audits) == 1 or len(series) == 1 else f"{title}, {series[0][0]}",
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


def _by_layer(view: View, series: Series) -> dict[int, float]:
    """The numbers of a series by layer; nothing where they were not measured, or the strongest sink is the first position."""
    _, probe, metric, where, _ = series
    columns, by_layer = view.found.columns, view.numbers.by_layer
    if where == "sink" and columns in ([], [0]):
        return {}
    sinks = [0] if where == "first" else columns or [0]
    return by_layer(probe, metric, {"first": "sink"}.get(where, where) or "none", sinks) or {}
