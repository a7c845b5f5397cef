"""What the script of a page draws from: the sink map, the numbers of every head, and the attention maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinklab.report.maps import Audit, Maps
from sinklab.report.pack import bins_of, pack_maps, pack_unsigned, pool_positions, round_list, round_matrix, rounded
from sinklab.report.words import silent_of, sink_column, sink_columns, sink_name, sink_positions, sinks_of, token_there

__all__ = ["HEAD_NUMBERS", "add_maps", "candidates_of", "head_data", "head_rates"]

HEAD_NUMBERS: list[tuple[str, str, str, str, str]] = [
    ("Sink score", "score_gap", "sink_score", "", "before the softmax"),
    ("Other scores", "score_gap", "other_score", "", "mean, before the softmax"),
    ("Gap", "score_gap", "gap", "", "sink score minus the others"),
    ("Sink weight", "score_gap", "sink_weight", "", "after the softmax"),
    ("Entropy", "entropy", "entropy", "nats", "of a row of weights"),
    ("Entropy without sink", "entropy", "entropy_without_sink", "nats", "renormalised"),
    ("Null mass", "null_mass", "null_mass", "", "goes to no key"),
    ("Mass on keys", "null_mass", "row_mass", "", "sum of a row of weights"),
    ("Gate", "null_mass", "output_gain", "", "mean factor on the head's output"),
    ("Output / residual", "head_output", "relative_norm", "", "near 0: nearly a no-op"),
    ("Output norm", "head_output", "output_norm", "", "after the output projection"),
    ("First-token share", "sink_rate", "first_token_share", "unit", ""),
    ("Arg-max is first", "sink_rate", "kaul2024_first_argmax", "unit", "share of queries"),
]
"""Label, probe, metric, unit ("unit": the table's own), note."""


def head_data(audit: Audit, parts: Sequence[tuple[str, Audit]] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """What the script needs for the sink map and the panel of a head, without the maps; and packed arrays by element id."""
    numbers, positions = audit.numbers, audit.num_positions
    candidates = candidates_of(audit, parts)
    exact = {int(sink["position"]) for sink in sink_positions(audit.summary)}
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
        "threshold": audit.threshold,
        "grid": [dataclasses.asdict(row) for row in numbers.grid],
        "heads": numbers.num_heads,
        "bins": bins,
        "arrays": arrays,
        "candidates": candidates.tolist(),
        "sinks": _sinks_of_parts(audit, parts) if parts else _sinks(audit),
        "ownSink": own.tolist(),
        "headNumbers": _head_numbers(audit),
        "angle": _angle(audit, own),
        "sample": audit.summary.get("kind") or "text",
        "positionRate": _rate_lines(parts or [("", audit)], positions, bins) or None,
        "maps": None,
        "tokens": [],
        "targets": [],
    }
    return data, blobs


def _sinks(audit: Audit) -> list[dict[str, Any]]:
    """The sinks of a model without parts; those that are no positions have rates of their own for every head."""
    return [
        {
            "kind": sink["kind"],
            "position": sink["position"],
            "token": str(_own_token(sink) or (sink.get("called") if sink["kind"] == "position" else "") or ""),
            "rate": rounded(float(sink["rate"])),
            **({} if sink["kind"] == "position" else {"name": sink["name"], "rates": head_rates(audit, sink["heads"])}),
        }
        for sink in (*sinks_of(audit.summary), *silent_of(audit.summary))
    ]


def _sinks_of_parts(audit: Audit, parts: Sequence[tuple[str, Audit]]) -> list[dict[str, Any]]:
    return [
        {
            "position": None,
            "name": f"{sink['name']} of the {part}" if part != "cross-attention" else f"{sink['name']} of {part}",
            "token": str(_own_token(sink) or ""),
            "rate": rounded(float(sink["rate"])),
            "rates": head_rates(audit, sink["heads"], part),
        }
        for part, view in parts
        for sink in (*sinks_of(view.summary), *silent_of(view.summary))
    ]


def _rate_lines(parts: Sequence[tuple[str, Audit]], positions: int, bins: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """The sink rate against position, a line for each part."""
    return [
        {
            "name": name or "sink rate",
            "kind": f"audit{index}" if name else "sink",
            "y": round_list(pool_positions(profile, bins)),
        }
        for index, (name, view) in enumerate(parts)
        if (profile := view.numbers.by_position("sink_rate", "gu2024", positions)) is not None
    ]


def _head_numbers(audit: Audit) -> list[dict[str, Any]]:
    """Those of :data:`HEAD_NUMBERS` that were measured, by head."""
    listed = []
    for label, probe, metric, unit, note in HEAD_NUMBERS:
        values = audit.numbers.by_head(probe, metric)
        if values is None:
            continue
        if unit == "unit":
            rows = audit.numbers.rows(probe, metric)
            unit = rows.unit if rows and rows.unit != "fraction" else ""
        if probe == "score_gap" or metric == "entropy_without_sink":
            note = f"{sink_name(audit)}{'; ' if note else ''}{note}"
        listed.append({"label": label, "unit": unit, "note": note, "values": round_matrix(values)})
    return listed


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


def candidates_of(audit: Audit, parts: Sequence[tuple[str, Audit]] = ()) -> NDArray[np.int64]:
    """Of each module, the positions up to the last one that half of the queries see, so that it can be a sink. ``(modules,)``.

    Audits that were made before this was recorded of modules have one number for all; the oldest have none, and are taken for
    causal ones.
    """
    everywhere = audit.summary.get("candidate_positions", audit.num_positions // 2 + 1)
    known = {
        module: count
        for view in (audit, *(view for _, view in parts))
        for module, count in (view.summary.get("candidates_by_module") or {}).items()
    }
    return np.array([known.get(row.module, everywhere) for row in audit.numbers.grid], dtype=np.int64)


def _own_sinks(
    audit: Audit,
    rates: NDArray[np.float64] | None,
    received: NDArray[np.float64] | None,
    candidates: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Each head's own sink position; the model's strongest where the head has none. ``(modules, num_heads)``.

    Of a sink that is several positions together, it is the one that gets most of the head.

    Args:
        candidates: of :func:`candidates_of`.
    """
    column = sink_column(audit) or 0
    own = np.full((len(audit.numbers.grid), audit.numbers.num_heads), column, dtype=np.int64)
    if rates is not None and rates.size:
        # The last keys are seen by a few queries only, their own among them: a high mean there is not a sink.
        counts = np.arange(rates.shape[-1]) < candidates[:, None, None]
        filled = np.where(counts, np.nan_to_num(rates), 0.0)
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


def _own_token(sink: dict[str, Any]) -> object:
    """The token that a sink is; of a position, the one that most of its sinks have."""
    return token_there(sink) if sink["kind"] == "position" else sink.get("token")


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
