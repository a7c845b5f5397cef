"""The summary of an audit: stable keys for programs, and a few sentences in plain words for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from transformers import PreTrainedConfig

from sinklab.attention.call import Part
from sinklab.corpora._reading import Reading
from sinklab.corpora.samples import Samples
from sinklab.models.layer_kinds import attending_layers, layers_without_attention
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import HIDDEN_SHARE, LossKind, guess_warning, loss_kind
from sinklab.models.positions import length_warnings
from sinklab.report.words import condition_name, finding, of_heads, percent
from sinklab.results.intervals import LEAST_SHARE, LEVEL, MOST
from sinklab.results.naming import counted, front_warning, head_numbering, quote
from sinklab.sinks import Sink, Sinks

__all__ = ["Condition", "summarize"]

SUMMARY_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
    """One corpus with or without BOS, and what was measured under it.

    Attributes:
        sinks: of an encoder–decoder those of each part, else of all self-attention together (part "").
        candidates: likewise, of each attention module the positions up to the last one that half of the queries see.
        windowed: likewise, attention modules in which fewer than half of the queries see the first position, and all of them.
        longest: likewise, tokens of the longest sample in which half of the queries see it in each of these modules; ``None``
            where there are none.
    """

    corpus: str
    bos: bool
    loss: float | None
    table: pd.DataFrame
    token_sha256: str
    sinks: Mapping[Part, Sinks]
    candidates: Mapping[Part, Mapping[str, int]]
    windowed: Mapping[Part, tuple[int, int]]
    longest: Mapping[Part, int | None]


def summarize(
    loaded: LoadedModel,
    conditions: list[Condition],
    by_token: Mapping[Part, Sequence[dict[str, object]]],
    samples: Samples,
    *,
    threshold: float,
    reading: Reading | None,
    normalized: bool,
    off_seam: list[str],
    seed: int,
    samples_definition: str | None = None,
    tier: str | None = None,
    missing: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Keys of ``summary.json``.

    Args:
        conditions: the first one is the main one.
        by_token: of every part, tokens that play the sink under the main one (:meth:`~sinklab.sinks.SinkFinder.by_token`).
        samples: of the main condition.
        reading: how the tokenizer read them; ``None`` for samples that are no text.
        normalized: whether rows of weights sum to one (with or without a null mass).
        samples_definition: what source and target are, where samples are pairs.
        tier: where the weights come from, if not from the attention interface.
        missing: probes that this tier does not serve, each with what it reads.

    Returns:
        ``model, operation, loss, loss_kind, loss_definition, bits_per_byte, reading, warnings, sinks, sink_rate_gu2024,
        sink_positions, sink_tokens, sink_role, null_mass, definitions, conditions, finding, text`` and what the run was made
        with; documented in docs/reference.md#results.
    """
    main = conditions[0]
    kind = loss_kind(loaded.model)
    # A hidden token is guessed from both sides, and a target from its source: neither is a code of the text.
    per_byte = kind == "next token"
    warnings = (
        "" if reading is None else reading.warning,
        *length_warnings(loaded.model, samples, threshold),
        guess_warning(loaded.model, main.loss),
        front_warning(loaded.operation, next(iter(main.sinks.values())).front),
        f"{type(loaded.model).__name__} predicts hidden tokens, and its tokenizer has no mask token to hide them with: no loss."
        if kind == "masked token" and main.loss is None
        else "",
    )
    summary: dict[str, Any] = {
        "summary_version": SUMMARY_VERSION,
        "model": loaded.name,
        "revision": loaded.revision,
        "operation": loaded.operation,
        "loss": main.loss,
        "loss_kind": kind,
        "loss_definition": _loss_definition(loaded, kind, seed),
        "bits_per_byte": reading.bits_per_byte(main.loss) if reading and main.loss is not None and per_byte else None,
        "reading": None if reading is None else dataclasses.asdict(reading),
        "warnings": [warning for warning in warnings if warning],
        "samples_definition": samples_definition,
        "normalized": normalized,
        "corpus": main.corpus,
        "bos": int(main.bos),
        "bos_name": loaded.encoder.bos_name,
        "kind": samples.kind,
        "seq_len": main.sinks[next(iter(main.sinks))].seq_len if samples.tokens is None else samples.tokens.shape[1],
        "samples": len(samples),
        "threshold": threshold,
        "off_seam_modules": off_seam,
        "layers_without_attention": layers_without_attention(loaded.model.config),
        "tier": tier,
        "not_measured": dict(missing or {}),
    }
    parts = [_found(part, conditions, by_token[part], summary, loaded.model.config) for part in main.sinks]
    details = [sentence for part in parts for sentence in part.pop("details")]
    summary |= parts[0] | {"parts": []}
    if "part" in summary:
        summary.pop("part")
        summary |= {"parts": parts, "finding": " ".join(str(part["finding"]) for part in parts)}
    tiers = [_tier(tier, summary["not_measured"])] if tier else []
    summary["text"] = [summary["finding"], *tiers, *filter(None, [samples_definition]), *summary["warnings"], *details]
    return summary


def _found(
    part: Part,
    conditions: list[Condition],
    by_token: Sequence[dict[str, object]],
    settings: dict[str, Any],
    config: PreTrainedConfig,
) -> dict[str, Any]:
    """What was found of a part of an encoder–decoder, or of all self-attention: the keys of the summary about sinks."""
    main, sinks = conditions[0], conditions[0].sinks[part]
    table, strongest = _of_part(main.table, part), sinks.main
    facts: dict[str, Any] = {
        "sinks": sinks.to_dict(),
        "sink_rate_gu2024": _rate(table, 0),
        "sink_positions": [_position(sink) for sink in (*sinks.sinks, *sinks.silent) if sink.kind == "position"],
        "sink_tokens": list(by_token),
        "candidate_positions": max(main.candidates[part].values(), default=0),
        "candidates_by_module": dict(main.candidates[part]),
        "windowed_modules": main.windowed[part][0],
        "num_modules": main.windowed[part][1],
        "longest_sample": main.longest[part],
        "sink_role": "null score" if strongest is not None and strongest.kind == "null" else sinks.describe(),
        "sink_heads": (strongest.sinking or 0) if strongest else 0,
        "sink_heads_by_weight": sinks.heads_by_weight,
        "num_heads": len(sinks.heads),
        "first_token_mean_weight": _whole(table, "attention_received", "mean_weight", 0),
        "null_mass": _whole(table, "null_mass", "null_mass"),
        "definitions": _definitions(table),
        "conditions": [_condition(condition, part) for condition in conditions],
    }
    if part:
        facts["part"] = part
    known = settings | facts
    sentences = _details(known, sinks, config)
    name = part[:1].upper() + part[1:]
    return facts | {"finding": finding(known), "details": [f"{name}: {text}" for text in sentences] if part else sentences}


def _of_part(table: pd.DataFrame, part: Part) -> pd.DataFrame:
    return table[table["part"] == part] if part else table


def _loss_definition(loaded: LoadedModel, kind: LossKind | None, seed: int) -> str | None:
    """What the loss is taken of, in words; ``None`` for a model without one."""
    mask = getattr(loaded.tokenizer, "mask_token", None)
    definitions: dict[LossKind, str] = {
        "next token": "cross-entropy of the next token",
        "masked token": f"masked-LM loss, cross-entropy of {100 * HIDDEN_SHARE:g} % of the tokens of each sample, all hidden "
        f"by {mask}, seed {seed}; attention is measured on the samples as they are",
        "target token": "cross-entropy of the tokens of the target, given those before them and the source",
        "class": "cross-entropy of the class",
    }
    return None if kind is None else definitions[kind]


def _tier(tier: str, missing: Mapping[str, str]) -> str:
    """What numbers of the second tier rest on, and what it does not give."""
    absent = ", ".join(f"{name} ({words})" for name, words in missing.items())
    return (
        f"{tier[0].upper()}{tier[1:]} itself: its attention does not go through the attention interface of transformers. "
        "Proved: unchanged outputs, a tensor of weights for every attention module, rows that sum to one, causality; not that "
        f"these weights made the outputs. Not measured: {absent}; sections that edit attention or read values. In place of "
        "scores, maps show the logarithm of the weights."
    )


def _position(sink: Sink) -> dict[str, object]:
    token = None if sink.token is None else str(sink.token)
    return {
        "position": sink.position,
        "token": sink.called or (token if sink.text is None else sink.text),
        "token_share": sink.token_share,
        "rate": sink.rate,
        "mean_weight": sink.mass,
        "heads": [[head.layer, head.head, rate] for head, rate in sink.heads],
    }


def _rows(table: pd.DataFrame, probe: str, metric: str, *, whole: bool) -> pd.DataFrame:
    chosen = table[(table["probe"] == probe) & (table["metric"] == metric)]
    return chosen[chosen["layer"].isna()] if whole else chosen[chosen["layer"].notna()]


def _rate(table: pd.DataFrame, position: int) -> float:
    rows = _rows(table, "sink_rate", "gu2024", whole=True)
    return float(rows.loc[rows["key_position"] == position, "value"].iloc[0])


def _whole(table: pd.DataFrame, probe: str, metric: str, position: int | None = None) -> float | None:
    """Mean over all observations; means of heads are weighted by their counts."""
    rows = _rows(table, probe, metric, whole=False)
    rows = rows if position is None else rows[rows["key_position"] == position]
    return float((rows["value"] * rows["count"]).sum() / rows["count"].sum()) if len(rows) else None


def _definitions(table: pd.DataFrame) -> dict[str, float]:
    rows = table[(table["probe"] == "sink_rate") & table["layer"].isna()]
    rows = rows[rows["key_position"].isna() | (rows["key_position"] == 0)]
    return {str(row.metric): float(row.value) for row in rows.itertuples()}


def _condition(condition: Condition, part: Part) -> dict[str, object]:
    table, sinks = _of_part(condition.table, part), condition.sinks[part]
    rows = _rows(table, "sink_rate", "gu2024", whole=True)
    rows = rows[rows["key_position"] < max(condition.candidates[part].values(), default=0)]
    main = sinks.main
    # Under a window that is short for the samples no position is seen by half of the queries.
    top = None if rows.empty else rows.loc[rows["value"].idxmax()]
    return {
        "corpus": condition.corpus,
        "bos": int(condition.bos),
        "loss": condition.loss,
        "sink": sinks.describe(),
        "sink_rate": main.rate if main else None,
        "sink_rate_gu2024": _rate(table, 0),
        "top_position": None if top is None else int(top["key_position"]),
        "top_rate": None if top is None else float(top["value"]),
    }


def _details(summary: dict[str, Any], sinks: Sinks, config: PreTrainedConfig) -> list[str]:
    """Sentences with what the finding leaves out."""
    return [
        *_about_main(summary, sinks),
        *_about_rows(summary, sinks),
        *_about_others(sinks),
        *_about_null_mass(summary, sinks),
        *_about_conditions(summary),
        *_about_other_layers(summary, config),
    ]


def _about_main(summary: dict[str, Any], sinks: Sinks) -> Iterator[str]:
    main = sinks.main
    if main is None:
        return
    text = summary["kind"] in ("text", "pairs")
    # The parts of a model of pictures have positions of their own: places of the picture, and queries for what is in it.
    length = sinks.length if summary.get("part") and not text else summary["seq_len"]
    tokens = counted(length, "token" if text else "position")
    heads = f"{of_heads(summary['sink_heads'], summary['num_heads'], 'sinks', 'sink')} at {main.name}"
    if summary["samples"] == 1:
        yield f"{heads} in the one sample of {tokens}; one sample does not show in how many others they do."
    else:
        yield (
            f"{heads}: in more than {100 * LEAST_SHARE:g} % of samples like these {summary['samples']:,} of {tokens}, with "
            f"{100 * LEVEL:g} % confidence."
        )
    # The finding names the token of most samples.
    if main.kind == "position" and main.token is not None and (main.token_share or 0.0) <= MOST:
        yield "The token there differs from sample to sample."
    if text and main.kind != "null" and main.place != 0:
        yield f"Position 0 is the sink in {percent(summary['sink_rate_gu2024'])}."


def _about_other_layers(summary: dict[str, Any], config: PreTrainedConfig) -> Iterator[str]:
    """Which layers of a model have no attention weights that could be measured, and how heads are numbered then."""
    if others := summary["layers_without_attention"]:
        kinds = ", ".join(f"{count} of kind {kind}" for kind, count in others.items())
        yield f"Without attention weights: {counted(sum(others.values()), 'layer')} ({kinds})."
        if numbering := head_numbering(*attending_layers(config)):
            yield numbering


def _about_rows(summary: dict[str, Any], sinks: Sinks) -> Iterator[str]:
    """That the rates are of rows divided by their sum, where the rows of the operation do not sum to one."""
    if not summary["normalized"]:
        heads = of_heads(sinks.heads_by_weight, summary["num_heads"], "gives", "give")
        yield (
            f"The operation ({summary['operation']}) does not normalise, so rates are taken on rows divided by their sum. As "
            f"the weights are, {heads} some position more than {summary['threshold']:g}."
        )


def _about_others(sinks: Sinks) -> Iterator[str]:
    """Every sink but the main one."""
    for sink in sinks.sinks[1:]:
        token = f" ({_mostly(sink)})" if sink.kind == "position" and sink.token is not None else ""
        verb = "sink" if sink.kind == "group" else "sinks"
        yield f"{sink.name[0].upper()}{sink.name[1:]}{token} {verb} in {percent(sink.rate)}."


def _about_null_mass(summary: dict[str, Any], sinks: Sinks) -> Iterator[str]:
    """The mass that no key gets, unless the main sink is just that."""
    if summary["null_mass"] and (sinks.main is None or sinks.main.kind != "null"):
        share = percent(100 * summary["null_mass"])
        yield (
            f"Heads give {share} of their mass to no key (null mass: what a null score takes, or clipping and rectifying "
            "leave)."
        )


def _about_conditions(summary: dict[str, Any]) -> Iterator[str]:
    """The sink under every condition but the main one."""
    for condition in summary["conditions"][1:]:
        where = condition_name(condition["corpus"], condition["bos"], summary)
        where += "," if "," in where else ""
        if condition["sink_rate"] is None:
            yield f"On {where} there is no sink."
        else:
            yield f"On {where} the sink is {condition['sink']} ({percent(condition['sink_rate'])})."


def _mostly(sink: Sink) -> str:
    token = quote(sink.text) if sink.text is not None else f"number {sink.token}"
    if (sink.token_share or 0.0) <= MOST:
        return "another token from sample to sample"
    return token if sink.token_share == 1.0 else f"mostly {token}"
