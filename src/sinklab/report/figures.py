"""What a page shows of an audit: summary cards, per-head numbers, per-layer figures, and the data its script draws from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinklab.report.data import Audit
from sinklab.report.maps import Maps
from sinklab.report.pack import bins_of, pack_maps, pack_unsigned, pool_positions
from sinklab.report.words import loss_unit, number, percent, quote, sink_name, sink_positions, sinks_of

__all__ = [
    "Card",
    "add_maps",
    "cards",
    "head_data",
    "head_rates",
    "layer_figures",
    "layer_table",
    "round_matrix",
    "share_of_sinking_heads",
    "sink_column",
]


@dataclasses.dataclass(frozen=True)
class Card:
    """One number of the summary; ``value`` is ``None`` when it was not measured."""

    label: str
    value: str | None
    note: str


def sink_column(audit: Audit) -> int | None:
    """The position of the strongest sink; ``None`` when that is no position, or there is no sink."""
    sinks = sinks_of(audit.summary)
    return int(sinks[0]["position"]) if sinks and sinks[0]["kind"] == "position" else None


def sink_columns(audit: Audit) -> list[int]:
    """Positions of the strongest sink: one, or those of a group; empty when that is no position, or there is no sink."""
    sinks, column = sinks_of(audit.summary), sink_column(audit)
    return [column] if column is not None else list(sinks[0].get("positions") or []) if sinks else []


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
    """Null mass; where that is not defined (rows need not sum to one), the mass of a row."""
    mass = mean_by_head(audit, "null_mass", "row_mass") if null is None else None
    if mass is None:
        return Card(
            "Null mass", None if null is None else percent(100 * null), "attention that goes to no key, mean over heads"
        )
    return Card("Mass of a row", number(mass), "sum of a query's weights, mean over heads; it need not be 1 here")


def cards(audit: Audit) -> list[Card]:
    """The summary cards, most important first; a card without a number says that it was not measured."""
    summary, threshold = audit.summary, f"{audit.threshold:g}"
    rate = summary.get("sink_rate_gu2024")
    sinks = sinks_of(audit.summary)
    heads = share_of_sinking_heads(audit)
    loss = summary.get("loss")
    null, entropy = mean_by_head(audit, "null_mass", "null_mass"), mean_by_head(audit, "entropy", "entropy")
    without = mean_by_head(audit, "entropy", "entropy_without_sink")
    massive = largest_by_layer(audit, "massive_activation", "max_to_median")
    ratio = largest_by_layer(audit, "hidden_norm", "first_to_rest_ratio")
    role = summary.get("sink_role")
    strongest = Card("Strongest sink", None, "")
    if sinks and summary.get("normalized") is False and summary.get("sink_heads_by_weight") == 0:
        strongest = Card("Strongest sink", "None", "by weight; rows divided by their sums pass the threshold")
    elif sinks:
        top, name = sinks[0], str(sinks[0]["name"])
        token = f"{quote(top['token'])} · " if top.get("token") and top["kind"] == "position" else ""
        strongest = Card("Strongest sink", name[0].upper() + name[1:], f"{token}{percent(top['rate'])}")
    elif isinstance(summary.get("sink_positions"), list):
        strongest = Card("Strongest sink", "None", "no position passes the threshold")
    return [
        Card("Sink rate", None if rate is None else percent(rate), f"Gu et al., first position, threshold {threshold}"),
        dataclasses.replace(strongest, note=" · ".join(filter(None, [strongest.note, str(role) if role and sinks else ""]))),
        Card(
            "Heads that sink",
            f"{number(heads[0])} of {number(heads[1])}" if heads else None,
            f"more than 1 in 10 samples, with 95 % confidence, at {sink_name(audit)}",
        ),
        Card(
            "Loss",
            number(float(loss), 4) if isinstance(loss, (int, float)) else None,
            f"{loss_unit(summary)}; perplexity {number(math.exp(loss))}"
            if isinstance(loss, (int, float)) and loss < 100 and summary.get("loss_kind", "next token") == "next token"
            else loss_unit(summary),
        ),
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


def part_cards(parts: Sequence[tuple[str, Audit]], audit: Audit) -> list[Card]:
    """The cards of an encoder–decoder: about sinks a set for each part, and what is of the whole model once."""
    about = [
        dataclasses.replace(card, label=f"{part[0].upper()}{part[1:]}: {card.label[0].lower()}{card.label[1:]}")
        for part, view in parts
        for card in cards(view)[:SINK_CARDS]
    ]
    return [*about, *(card for card in cards(audit)[SINK_CARDS:] if card.label != "Entropy")]


SINK_CARDS = 3
"""How many cards are about sinks; they come first."""


Source = tuple[str | Callable[[Audit], str], Callable[[Audit], dict[int, float] | None], str]
"""Series name, where its numbers come from, how its line is drawn."""


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
    ("Massive activations", "largest |value| / median", "Massive: above 100 and at least 1\u202f000 × the median.", True,
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


def layer_figures(audits: Sequence[tuple[str, Audit]]) -> list[dict[str, object]]:
    """Figures over depth. One audit: every series. Several: one series each, the first of the figure.

    A figure without numbers has no series and is shown as "not measured".
    """
    figures = []
    for title, axis, caption, logarithmic, sources in FIGURES:
        lines: list[tuple[str, str, dict[int, float]]] = []
        for index, (name, audit) in enumerate(audits):
            for label, source, kind in sources if len(audits) == 1 else sources[:1]:
                values = source(audit)
                if values:
                    shown = label(audit) if callable(label) else label
                    lines.append((shown if len(audits) == 1 else name, kind if len(audits) == 1 else f"audit{index}", values))
        layers = sorted({layer for _, _, values in lines for layer in values})
        every = [value for _, _, values in lines for value in values.values()]
        # A logarithmic axis has no place for 0, and within one decade a plain one is easier to read.
        wide = bool(every) and min(every) > 0 and max(every) > 10 * min(every)
        figures.append(
            {
                "title": title if len(audits) == 1 or len(sources) == 1 else f"{title}, {sources[0][0]}",
                "axis": axis,
                "caption": caption,
                "log": logarithmic and wide,
                "labels": ["in" if layer < 0 else str(layer) for layer in layers],
                "series": [
                    {"name": name, "kind": kind, "y": [_short(values.get(layer)) for layer in layers]}
                    for name, kind, values in lines
                ],
            }
        )
    return figures


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


HEAD_NUMBERS: list[tuple[str, str, str, str, str]] = [
    ("Sink score", "score_gap", "sink_score", "", "before the softmax"),
    ("Other scores", "score_gap", "other_score", "", "mean, before the softmax"),
    ("Gap", "score_gap", "gap", "", "sink score minus the others"),
    ("Sink weight", "score_gap", "sink_weight", "", "after the softmax"),
    ("Entropy", "entropy", "entropy", "nats", "of a row of weights"),
    ("Entropy without sink", "entropy", "entropy_without_sink", "nats", "renormalised"),
    ("Null mass", "null_mass", "null_mass", "", "goes to no key"),
    ("Mass on keys", "null_mass", "row_mass", "", "sum of a row of weights"),
    ("Output / residual", "head_output", "relative_norm", "", "near 0: nearly a no-op"),
    ("Output norm", "head_output", "output_norm", "", "after the output projection"),
    ("First-token share", "sink_rate", "first_token_share", "unit", ""),
    ("Arg-max is first", "sink_rate", "kaul2024_first_argmax", "unit", "share of queries"),
]
"""Label, probe, metric, unit ("unit": the table's own), note."""


def head_data(audit: Audit, parts: Sequence[tuple[str, Audit]] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """What the script needs for the sink map and the panel of a head, without the maps; and packed arrays by element id."""
    numbers, positions = audit.numbers, audit.num_positions
    exact = frozenset(int(sink["position"]) for sink in sink_positions(audit.summary))
    bins = bins_of(positions, exact)
    blobs: dict[str, str] = {}
    arrays: dict[str, dict[str, Any]] = {}
    shape = [len(numbers.grid), numbers.num_heads, len(bins)]
    rates = numbers.by_head_and_position("sink_rate", "gu2024", positions)
    received = numbers.by_head_and_position("attention_received", "mean_weight", positions)
    for name, values in (("rate", rates), ("received", received)):
        if values is not None:
            blobs[f"blob-{name}"], scale = pack_unsigned(pool_positions(values, bins))
            arrays[name] = {"shape": shape, "scale": scale}
    own = _own_sinks(audit, rates, received)
    data: dict[str, Any] = {
        "threshold": audit.threshold,
        "grid": [dataclasses.asdict(row) for row in numbers.grid],
        "heads": numbers.num_heads,
        "bins": bins,
        "arrays": arrays,
        "lastCandidate": last_candidate(audit),
        "sinks": [
            {
                "kind": sink["kind"],
                "position": sink["position"],
                "token": str(sink.get("token") or (sink.get("called") if sink["kind"] == "position" else "") or ""),
                "rate": _short(float(sink["rate"])),
                **({} if sink["kind"] == "position" else {"name": sink["name"], "rates": head_rates(audit, sink["heads"])}),
            }
            for sink in sinks_of(audit.summary)
        ],
        "ownSink": own.tolist(),
        "headNumbers": [],
        "angle": _angle(audit, own),
        "sample": audit.summary.get("kind") or "text",
        "positionRate": None,
        "maps": None,
        "tokens": [],
        "targets": [],
    }
    if parts:
        data["sinks"] = [
            {
                "position": None,
                "name": f"{sink['name']} of the {part}" if part != "cross-attention" else f"{sink['name']} of {part}",
                "token": str(sink.get("token") or ""),
                "rate": _short(float(sink["rate"])),
                "rates": head_rates(audit, sink["heads"], part),
            }
            for part, view in parts
            for sink in sinks_of(view.summary)
        ]
    lines = [
        {
            "name": name or "sink rate",
            "kind": f"audit{index}" if name else "sink",
            "y": _round_list(pool_positions(profile, bins)),
        }
        for index, (name, view) in enumerate(parts or [("", audit)])
        if (profile := view.numbers.by_position("sink_rate", "gu2024", positions)) is not None
    ]
    data["positionRate"] = lines or None
    for label, probe, metric, unit, note in HEAD_NUMBERS:
        values = numbers.by_head(probe, metric)
        if values is not None:
            rows = numbers.rows(probe, metric)
            shown = (rows.unit if rows and rows.unit != "fraction" else "") if unit == "unit" else unit
            about = (
                f"{sink_name(audit)}{'; ' if note else ''}" if probe == "score_gap" or metric == "entropy_without_sink" else ""
            )
            data["headNumbers"].append({"label": label, "unit": shown, "note": about + note, "values": round_matrix(values)})
    return data, blobs


def add_maps(data: dict[str, Any], blobs: dict[str, str], maps: Maps, budget: int, *, scores: bool = True) -> None:
    """Add the attention maps, and the tokens unless they are there, to what :func:`head_data` gave.

    Args:
        data, blobs: changed in place.
        maps: what to add, as finely as the budget allows.
        budget: characters that the packed maps may take.
        scores: keep them; without, all that is kept of them is which tiles no query sees.
    """
    if not scores:
        maps = dataclasses.replace(maps, scores=np.where(maps.scores > 0, 255, 0).astype(np.uint8))
    packed = pack_maps(maps.weights, maps.scores, budget)
    if packed is None:
        return
    samples, modules, heads, rows, columns = packed.shape
    for sample, texts in enumerate(packed.texts):
        for module, text in enumerate(texts):
            blobs[f"blob-map-{sample}-{module}"] = text
    names = {name: index for index, name in enumerate(maps.modules)}
    by_name = [names.get(row["module"], -1) for row in data["grid"]]
    # Layers may be named by the layer and not by its attention; as long as both lists are complete, order decides.
    by_order = list(range(len(data["grid"]))) if len(data["grid"]) == modules else by_name
    data["maps"] = {
        "samples": samples,
        "heads": heads,
        "rows": rows,
        "columns": columns,
        "seqLen": maps.seq_len,
        # Tiles are of one size; the last may be smaller. Each was pooled in the file, and here again when space was short.
        "tile": -(-maps.seq_len // maps.weights.shape[-1]) * packed.plan.pool,
        "place": by_name if any(index >= 0 for index in by_name) else by_order,
        "ranges": [[round_matrix(module) for module in sample] for sample in maps.ranges[:samples].astype(float)]
        if scores
        else None,
        "reduced": _reduction(maps, samples, packed.plan.pool, packed.plan.score_bits if scores else 8),
    }
    data["tokens"] = data["tokens"] or maps.tokens[:samples]
    data["targets"] = data["targets"] or maps.targets[:samples]


def _reduction(maps: Maps, samples: int, pool: int, bits: int) -> str:
    parts = []
    if samples < maps.weights.shape[0]:
        parts.append(f"{samples} of {maps.weights.shape[0]} samples")
    if pool > 1:
        parts.append("tiles twice as wide" if pool == 2 else f"tiles {pool} times as wide")
    if bits < 8:
        parts.append(f"scores in {2**bits - 1} steps")
    return f"To keep this page small it shows {', '.join(parts)}." if parts else ""


def last_candidate(audit: Audit) -> int:
    """Positions below it are seen by at least a quarter of the queries."""
    candidates = audit.summary.get("candidate_positions")
    if isinstance(candidates, int) and candidates >= audit.num_positions:  # every query sees every key
        return audit.num_positions
    return max(1, math.ceil(0.75 * audit.num_positions))


def _own_sinks(audit: Audit, rates: NDArray[np.float64] | None, received: NDArray[np.float64] | None) -> NDArray[np.int64]:
    """Each head's own sink position; the model's strongest where the head has none. ``(modules, num_heads)``.

    Of a sink that is several positions together, it is the one that gets most of the head.
    """
    column = sink_column(audit) or 0
    own = np.full((len(audit.numbers.grid), audit.numbers.num_heads), column, dtype=np.int64)
    if rates is not None and rates.size:
        # The last keys are seen by a few queries only, their own among them: a high mean there is not a sink.
        filled = np.nan_to_num(rates[..., : last_candidate(audit)])
        if column >= filled.shape[-1]:
            return own
        together = np.asarray(sink_columns(audit))
        if sink_column(audit) is None and together.size and received is not None:
            own = together[np.nan_to_num(received[..., together]).argmax(axis=-1)]
            strongest = np.asarray(head_rates(audit, sinks_of(audit.summary)[0]["heads"]))
        else:
            strongest = filled[..., column]
        own = np.where(filled.max(axis=-1) > strongest, filled.argmax(axis=-1), own)
    return own


def head_rates(audit: Audit, heads: list[list[Any]], part: str = "") -> list[list[float]]:
    """Rates of a sink that is no position, or is of one part of the model, ``(modules, num_heads)``."""
    rates = np.zeros((len(audit.numbers.grid), audit.numbers.num_heads))
    rows = {row.layer: number for number, row in enumerate(audit.numbers.grid) if not part or row.part == part}
    for layer, head, rate in heads:
        rates[rows[layer], head] = rate
    return [[float(f"{value:.5g}") for value in row] for row in rates]


def _angle(audit: Audit, own: NDArray[np.int64]) -> dict[str, Any] | None:
    """Cosine and norm product of queries with the head's sink key and, as a mean, with the other keys."""
    result = {}
    for name, metric in (("cosine", "cosine"), ("product", "norm_product")):
        values = audit.numbers.by_head_and_position("query_key_angle", metric, audit.num_positions)
        if values is None:
            return None
        at = np.take_along_axis(values, own[..., None], axis=-1)
        others = values.copy()
        np.put_along_axis(others, own[..., None], np.nan, axis=-1)
        known = np.isfinite(others)
        with np.errstate(invalid="ignore"):
            rest = np.where(known.any(axis=-1), np.nansum(others, axis=-1) / known.sum(axis=-1), np.nan)
        result[f"{name}Sink"], result[f"{name}Rest"] = round_matrix(at[..., 0]), round_matrix(rest)
    return result


def round_matrix(values: NDArray[np.float64]) -> list[list[float | None]]:
    """Rows of numbers with five significant digits; ``None`` for NaN."""
    return [_round_list(row) for row in values]


def _round_list(values: NDArray[np.float64]) -> list[float | None]:
    return [_short(float(value)) for value in values]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
