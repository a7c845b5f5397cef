"""The summary of an audit: stable keys for programs, and a few sentences in plain words for people."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from torch import Tensor

from sinklab.models.loading import LoadedModel

__all__ = ["Condition", "summarize"]

SUMMARY_VERSION = 1
LISTED_POSITIONS = 8
LISTED_RATE = 1.0
"""Percent of (sample, layer, head) from which a position is listed as a sink."""


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
    """One corpus with or without BOS, and what was measured under it."""

    corpus: str
    bos: bool
    loss: float | None
    table: pd.DataFrame
    token_sha256: str


def summarize(
    loaded: LoadedModel,
    conditions: list[Condition],
    found: pd.DataFrame,
    tokens: Tensor,
    *,
    threshold: float,
    min_queries: int,
    normalized: bool,
    off_seam: list[str],
) -> dict[str, Any]:
    """Keys of ``summary.json``.

    Args:
        conditions: the first one is the main one.
        found: sinks of the main condition, sample by sample (:meth:`SinkLocations.found`).
        tokens: samples of the main condition, ``(samples, seq_len)``.
        normalized: whether rows of weights sum to one (with or without a share for nothing). If not, the rate of Gu et al. is
            taken on rows divided by their sum, where a head that is nearly silent can look like a sink; then a position counts
            as a sink only if some head also gives it that much weight as it is.

    Returns:
        ``model, operation, loss, sink_rate_gu2024, sink_positions, sink_tokens, sink_role, null_mass, definitions, conditions,
        text`` and what the run was made with; documented in docs/results.md.
    """
    main = conditions[0]
    heads = _num_heads(main.table)
    positions = _positions(loaded, main.table, found, tokens, heads, min_queries)
    rate = _rate(main.table, 0)
    null = _whole(main.table, "null_mass", "null_mass")
    by_weight = _heads_by_weight(main.table, threshold, tokens.shape[1] - min_queries)
    role = _role(rate, positions, main.table) if normalized or by_weight else "none"
    summary: dict[str, Any] = {
        "summary_version": SUMMARY_VERSION,
        "model": loaded.name,
        "revision": loaded.revision,
        "operation": loaded.operation,
        "loss": main.loss,
        "sink_rate_gu2024": rate,
        "sink_positions": positions,
        "sink_tokens": _by_token(loaded, found, tokens),
        "sink_role": role,
        "sink_heads": sum(1 for _, _, value in _heads_at(main.table, 0) if value >= 50.0),
        "sink_heads_by_weight": by_weight,
        "normalized": normalized,
        "num_heads": heads,
        "first_token_mean_weight": _mean_weight(main.table, 0),
        "null_mass": null,
        "definitions": _definitions(main.table),
        "conditions": [_condition(condition) for condition in conditions],
        "corpus": main.corpus,
        "bos": int(main.bos),
        "seq_len": int(tokens.shape[1]),
        "samples": int(tokens.shape[0]),
        "threshold": threshold,
        "off_seam_modules": off_seam,
    }
    summary["text"] = _sentences(summary)
    return summary


def _rows(table: pd.DataFrame, probe: str, metric: str, *, whole: bool) -> pd.DataFrame:
    chosen = table[(table["probe"] == probe) & (table["metric"] == metric)]
    return chosen[chosen["layer"].isna()] if whole else chosen[chosen["layer"].notna()]


def _rate(table: pd.DataFrame, position: int) -> float:
    rows = _rows(table, "sink_rate", "gu2024", whole=True)
    return float(rows.loc[rows["key_position"] == position, "value"].iloc[0])


def _whole(table: pd.DataFrame, probe: str, metric: str) -> float | None:
    """Mean over all observations; means of heads are weighted by their counts."""
    rows = _rows(table, probe, metric, whole=False)
    return float((rows["value"] * rows["count"]).sum() / rows["count"].sum()) if len(rows) else None


def _mean_weight(table: pd.DataFrame, position: int) -> float | None:
    rows = _rows(table, "attention_received", "mean_weight", whole=False)
    rows = rows[rows["key_position"] == position]
    return float((rows["value"] * rows["count"]).sum() / rows["count"].sum()) if len(rows) else None


def _num_heads(table: pd.DataFrame) -> int:
    rows = _rows(table, "sink_rate", "gu2024", whole=False)
    return len(rows[["module", "head"]].drop_duplicates())


def _heads_at(table: pd.DataFrame, position: int) -> list[tuple[int, int, float]]:
    rows = _rows(table, "sink_rate", "gu2024", whole=False)
    rows = rows[(rows["key_position"] == position) & (rows["value"] > 0)].sort_values("value", ascending=False)
    return [(int(r.layer), int(r.head), float(r.value)) for r in rows.itertuples()]


def _positions(
    loaded: LoadedModel, table: pd.DataFrame, found: pd.DataFrame, tokens: Tensor, heads: int, min_queries: int
) -> list[dict[str, Any]]:
    """Positions that enough queries see and at which some head sinks, strongest first."""
    rows = _rows(table, "sink_rate", "gu2024", whole=True)
    last = tokens.shape[1] - min_queries
    rows = rows[(rows["value"] >= LISTED_RATE) & (rows["key_position"] <= last)].sort_values("value", ascending=False)
    listed = []
    for row in rows.head(LISTED_POSITIONS).itertuples():
        position = int(row.key_position)
        at = found[found["position"] == position]
        ids = pd.Series([int(tokens[sample, position]) for sample in at["sample"]])
        common = ids.value_counts() if len(ids) else pd.Series(tokens[:, position].tolist()).value_counts()
        listed.append(
            {
                "position": position,
                "token": _text(loaded, int(common.index[0])),
                "token_share": float(common.iloc[0] / common.sum()),
                "rate": float(row.value),
                "mean_weight": _mean_weight(table, position),
                "heads": [[layer, head, value] for layer, head, value in _heads_at(table, position)],
            }
        )
    return listed


def _by_token(loaded: LoadedModel, found: pd.DataFrame, tokens: Tensor) -> list[dict[str, Any]]:
    """Tokens that play the sink, wherever they stand."""
    if not len(found):
        return []
    ids = pd.Series(
        [int(tokens[sample, position]) for sample, position in zip(found["sample"], found["position"], strict=True)]
    )
    counts = ids.value_counts()
    return [
        {
            "token": _text(loaded, int(token)),
            "share_of_sinks": float(count / len(found)),
            "positions": sorted({int(p) for p in found["position"][(ids == token).to_numpy()]})[:LISTED_POSITIONS],
        }
        for token, count in counts.head(LISTED_POSITIONS).items()
    ]


def _heads_by_weight(table: pd.DataFrame, threshold: float, last: int) -> int:
    """Heads whose mean weight, as it is, passes the threshold at some position that enough queries see."""
    rows = _rows(table, "attention_received", "mean_weight", whole=False)
    rows = rows[(rows["value"] > threshold) & (rows["key_position"] <= last)]
    return len(rows[["module", "head"]].drop_duplicates())


def _role(rate: float, positions: list[dict[str, Any]], table: pd.DataFrame) -> str:
    null_rate = _rows(table, "sink_rate", "gu2024_null", whole=True)
    if len(null_rate) and float(null_rate["value"].iloc[0]) > max(rate, 1.0):
        return "null score"
    if not positions or positions[0]["rate"] < 1.0:
        return "none"
    top = positions[0]
    place = "first position" if top["position"] == 0 else f"position {top['position']}"
    return f"{place}, token {top['token']!r}" if top["token_share"] > 0.5 else place


def _definitions(table: pd.DataFrame) -> dict[str, float]:
    rows = table[(table["probe"] == "sink_rate") & table["layer"].isna()]
    rows = rows[rows["key_position"].isna() | (rows["key_position"] == 0)]
    return {str(row.metric): float(row.value) for row in rows.itertuples()}


def _condition(condition: Condition) -> dict[str, Any]:
    rows = _rows(condition.table, "sink_rate", "gu2024", whole=True)
    length = int(rows["key_position"].max()) + 1
    rows = rows[rows["key_position"] <= length - max(1, length // 2)]
    top = rows.loc[rows["value"].idxmax()]
    return {
        "corpus": condition.corpus,
        "bos": int(condition.bos),
        "loss": condition.loss,
        "sink_rate_gu2024": _rate(condition.table, 0),
        "top_position": int(top["key_position"]),
        "top_rate": float(top["value"]),
    }


def _sentences(summary: dict[str, Any]) -> list[str]:
    rate, heads = summary["sink_rate_gu2024"], summary["num_heads"]
    sentences = [
        f"In {rate:.1f} % of the {summary['samples']} samples × {heads} heads the first position receives more than "
        f"{summary['threshold']:g} of the attention on average (Gu et al. 2024, {summary['seq_len']} tokens)."
    ]
    others = [entry for entry in summary["sink_positions"] if entry["position"] != 0 and entry["rate"] >= 1.0]
    if rate >= 1.0:
        entry = next(e for e in summary["sink_positions"] if e["position"] == 0)
        strong = summary["sink_heads"]
        sentences.append(
            f"The token there is {entry['token']!r}; {strong} of {heads} heads sink in at least half of the samples."
        )
    if summary["normalized"]:
        if rate < 1.0 and not others and summary["sink_role"] == "none":
            sentences.append("No position acts as a sink.")
    else:
        weight, loud = summary["first_token_mean_weight"], summary["sink_heads_by_weight"]
        sentences.append(
            f"The operation ({summary['operation']}) does not normalise, so the rate is taken on rows divided by their sum. As "
            f"they are, the weights on the first position are {weight:.3f} on average, and {loud} of {heads} heads give some "
            f"position more than {summary['threshold']:g}."
        )
        if not loud:
            silent = " What the rate shows are heads that attend to almost nothing." if rate >= 1.0 else ""
            sentences.append(f"No position acts as a sink.{silent}")
    for entry in others:
        sentences.append(f"Position {entry['position']} (mostly {entry['token']!r}) sinks in {entry['rate']:.1f} %.")
    if summary["null_mass"]:
        share = f"{100 * summary['null_mass']:.1f} %"
        sentences.append(f"Heads give {share} of their mass to nothing, as through a learned sink logit or a key bias.")
    for condition in summary["conditions"][1:]:
        where = f"{condition['corpus']} {'with' if condition['bos'] else 'without'} BOS"
        sentences.append(f"On {where} the rate at the first position is {condition['sink_rate_gu2024']:.1f} %.")
    return sentences


def _text(loaded: LoadedModel, token: int) -> str:
    return str(token) if loaded.tokenizer is None else str(loaded.tokenizer.decode([token]))
