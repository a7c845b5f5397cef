"""Numbers in plain words: how a value is written, the finding of an audit, names of conditions and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from sinklab.report.maps import Audit
from sinklab.results.blocks import number, percent
from sinklab.results.intervals import MOST
from sinklab.results.naming import counted, quote

__all__ = [
    "TITLES",
    "bos_words",
    "condition_name",
    "finding",
    "is_number",
    "loss_unit",
    "mostly",
    "named_rate",
    "number",
    "of_heads",
    "percent",
    "position_name",
    "reads_text",
    "rest_sentence",
    "samples_of",
    "silent_of",
    "sink_column",
    "sink_columns",
    "sink_name",
    "sink_positions",
    "sinks_of",
    "token_there",
    "unit_of",
    "verdict",
]

TITLES: dict[str, str] = {
    "gu2024": "Sink rate",
    "gu2024_null": "Sink rate of the null score",
    "qiu2025_first_attention": "First-token attention (F-Attn)",
    "kaul2024_first_argmax": "First token is the arg-max",
    "first_token_share": "First-token share",
    "first_four_share": "First-four share",
}
"""Metric of ``sink_rate`` to its heading."""


def position_name(position: int) -> str:
    """``the first position`` or ``position 7``."""
    return "the first position" if position == 0 else f"position {position}"


def condition_name(corpus: str | None, bos: object, summary: Mapping[str, Any]) -> str:
    """A corpus in words, and whether its samples begin with BOS, or what the model has for it, where there is such a thing."""
    corpus = corpus or "corpus not recorded"
    kind, bos_name = summary.get("kind", "text"), summary.get("bos_name")
    made_up = {"random_tokens": "random tokens", "repeated_token": "one token repeated"}
    made_up |= {"noise": "noise", "constant": "one grey" if kind == "image" else "one tone", "chirps": "synthetic chirps"}
    what = {"image": "pictures", "audio": "sound"}.get(kind, "natural text")
    name = made_up.get(corpus, f"{what} · {corpus}")
    words = "" if bos is None else bos_words(bos, bos_name)
    return f"{name}, {words}" if words else name


def bos_words(bos: object, bos_name: object = None) -> str:
    """``with BOS`` or ``without BOS``.

    Args:
        bos: whether samples begin with the token.
        bos_name: ``bos_name`` of ``summary.json``: what it is called, ``[CLS] and [SEP]``; empty where there is nothing to be
            with or without; BOS where that was not recorded.
    """
    name = bos_name if isinstance(bos_name, str) else "BOS"
    return f"{'with' if bos else 'without'} {name}" if name else ""


def loss_unit(summary: Mapping[str, Any]) -> str:
    """What the loss of an audit is counted in: ``nats per token``; of a masked-LM loss ``nats per hidden token``."""
    units = {"masked token": "nats per hidden token", "target token": "nats per target token", "class": "nats per sample"}
    return units.get(str(summary.get("loss_kind")), "nats per token")


def sink_positions(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``sink_positions`` of the summary, strongest first, incomplete entries left out."""
    entries = summary.get("sink_positions")
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    whole = [entry for entry in entries if isinstance(entry.get("position"), int) and is_number(entry.get("rate"))]
    return sorted(whole, key=lambda entry: (-entry["rate"], entry["position"]))


def sinks_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sinks, strongest first: ``kind, position, token, rate, name, heads``, heads as ``[layer, head, rate]``."""
    record = summary.get("sinks")
    if not isinstance(record, dict):
        return [] if _all_silent(summary) else _positions_as_sinks(summary)
    return [_with_heads(sink) for sink in record["sinks"]]


def silent_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Places that pass the threshold only because rows are divided by their sums, strongest first; as :func:`sinks_of`."""
    record = summary.get("sinks")
    if not isinstance(record, dict):
        return _positions_as_sinks(summary) if _all_silent(summary) else []
    return [_with_heads(sink) for sink in record["silent"]]


def _all_silent(summary: Mapping[str, Any]) -> bool:
    """Whether no head gives any position much weight, so that what passes does so because its rows are divided."""
    return summary.get("normalized") is False and summary.get("sink_heads_by_weight") == 0


def _positions_as_sinks(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of an audit made before sinks were recorded, which knew positions alone."""
    return [
        {"kind": "position", "name": f"position {sink['position']}", "heads": [], **sink} for sink in sink_positions(summary)
    ]


def _with_heads(sink: Mapping[str, Any]) -> dict[str, Any]:
    return {**sink, "token": sink["text"], "heads": [[layer, head, rate] for layer, head, _, rate in sink["heads"]]}


def followed_and_weak(summary: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tokens that heads look at wherever they stand, and places at which no head sinks often enough, strongest first."""
    record = summary.get("sinks")
    record = record if isinstance(record, dict) else {}
    return list(record.get("followed", ())), list(record.get("weak", ()))


def sink_column(audit: Audit) -> int | None:
    """The position of the strongest sink; ``None`` when that is no position, or there is no sink."""
    sinks = sinks_of(audit.summary)
    return int(sinks[0]["position"]) if sinks and sinks[0]["kind"] == "position" else None


def sink_columns(audit: Audit) -> list[int]:
    """Positions of the strongest sink: one, or those of a group; empty when that is no position, or there is no sink."""
    sinks, column = sinks_of(audit.summary), sink_column(audit)
    return [column] if column is not None else list(sinks[0].get("positions") or []) if sinks else []


def sink_name(audit: Audit) -> str:
    """What numbers about "the sink" are about: ``position 2``, ``the first “.”``; where none was found, position 0."""
    if audit.summary.get("parts"):
        return "the sink of its part"
    sinks = sinks_of(audit.summary)
    return str(sinks[0]["name"]) if sinks else "position 0 (no sink was found)"


def verdict(audit: Audit) -> str:
    """The finding of an audit as it was recorded; of one that was made before it was, as it is phrased now."""
    recorded = audit.summary.get("finding")
    known = {**audit.summary, "threshold": audit.threshold, "num_heads": audit.numbers.num_cells}
    return recorded if isinstance(recorded, str) else finding(known)


_SUBJECTS = {"encoder": "The encoder", "decoder": "The decoder", "cross-attention": "Cross-attention"}
"""Part of an encoder–decoder as the subject of a sentence."""


def finding(summary: Mapping[str, Any]) -> str:
    """What an audit found, in a sentence or two with its numbers: for page, comparison, terminal and ``summary.json``.

    Args:
        summary: keys of ``summary.json``, or of one of its ``parts``; of older audits some may be missing.
    """
    threshold = f"{summary['threshold']:g}"
    subject = _SUBJECTS.get(str(summary.get("part")), "This model")
    sinks = sinks_of(summary)
    rate = summary.get("sink_rate_gu2024")
    cells = summary.get("num_heads")
    null = summary.get("null_mass")
    if summary.get("sink_role") == "null score" and null is not None:
        return (
            f"{subject} rests on a null score (a learned sink logit, a key bias), which takes {percent(100 * null)} of the "
            f"mass of its heads; the first position gets more than {threshold} of the attention in {percent(rate)} of heads "
            f"and samples.{_further([_place(sink) for sink in sinks[1:]])}"
        )
    followed, weak = followed_and_weak(summary)
    silent = silent_of(summary)
    rest = "".join(f" {_followed(sink, cells)}" for sink in followed) + _windowed(summary)
    if sinks:
        # Gu et al.'s rate, which stands beside this one, counts what the few queries of a window give.
        return _at_places(subject, sinks, cells, threshold) + rest
    if silent:
        # Other heads may give that much, to this place too, of which they make no sink.
        place, quiet = _place(silent[0]), summary.get("sink_heads_by_weight") == 0
        heads = "no head gives any position" if quiet else f"no head that rests on {place} gives it"
        return (
            f"{subject} has no attention sink: {heads} more than {threshold} of weight on average. Only after dividing each "
            f"row by its sum, however small, do {percent(silent[0]['rate'])} of heads and samples pass at {place}.{rest}"
        )
    if followed:
        return f"{subject} has no attention sink that stays at a place.{rest}"
    if weak:
        token = f" ({mostly(weak[0])}{quote(weak[0]['text'])})" if token_there(weak[0]) else ""
        return (
            f"{subject} has no attention sink: no head gives the same place more than {threshold} of its attention in enough "
            f"samples. The most frequent is {_place(weak[0])}{token}, in {percent(weak[0]['rate'])} of all heads and samples."
            f"{_windowed(summary)}"
        )
    if summary.get("candidate_positions") == 0:
        return (
            f"{subject} shows no attention sink, and none could count: no position is seen by half of the queries of these "
            f"samples, as where every layer has a sliding window.{_shorter(summary)}"
        )
    if is_number(rate):
        heads = "in no head" if not cells or cells == 1 else f"in none of its {cells} heads"
        return (
            f"{subject} has no attention sink: {heads} does any position hold more than {threshold} of the attention often "
            f"enough to count; the first position does in {percent(rate)} of heads and samples.{_windowed(summary)}"
        )
    return "The sink rate was not measured, so nothing can be said about attention sinks."


def _at_places(subject: str, sinks: Sequence[dict[str, Any]], cells: Any, threshold: str) -> str:
    """Of sinks that stay at a place: the strongest one with its heads and rate, and how many others there are."""
    top = sinks[0]
    token = f", {mostly(top)}{quote(top['token'])}" if token_there(top) else ""
    heads = ""
    if is_number(top.get("sinking")) and cells:
        heads = f"{of_heads(top['sinking'], cells, 'sinks', 'sink')} there, and "
    it = "them together" if top["kind"] == "group" else "it"
    text = (
        f"{subject} has an attention sink at {_place(top)}{token}: {heads}{percent(top['rate'])} of all heads "
        f"and samples give {it} more than {threshold} of their attention on average."
    )
    named = [str(sink["name"]) for sink in sinks[1:] if sink["kind"] != "position" or sink.get("called")]
    others = len(sinks) - 1 - len(named)
    if others:
        text += " One other position is a sink too." if others == 1 else f" {others} other positions are sinks too."
    return text + _further(named)


def _further(names: Sequence[str]) -> str:
    """The sinks besides the strongest one."""
    return f" {'Another sink is' if len(names) == 1 else 'Other sinks are'} {_listed(names)}." if names else ""


def _windowed(summary: Mapping[str, Any]) -> str:
    """What keeps a rate at the first position from counting: modules with a window; nothing where there are none."""
    if not summary.get("windowed_modules"):
        return ""
    return (
        f" In {summary['windowed_modules']} of its {summary['num_modules']} attention modules, as where a window slides, fewer "
        f"than half of the queries see the first position, so that it cannot count there.{_shorter(summary)}"
    )


def _shorter(summary: Mapping[str, Any]) -> str:
    """In which samples the first position counts in every module; nothing where their length is not for a user to choose."""
    longest = summary.get("longest_sample")
    if not is_number(longest) or summary.get("kind", "text") not in ("text", "pairs"):
        return ""
    return f" Take samples of at most {counted(int(longest), 'token')} (`--seq-len`)."


def token_there(sink: Mapping[str, Any]) -> str | None:
    """The token that stands at the position of a sink, as text, where most of its sinks have that one.

    ``None`` of other sinks, and where tokens there differ from sample to sample: the commonest one would say nothing. Audits
    that did not record the share are taken at their word.
    """
    share = sink.get("token_share")
    text = sink.get("text") or sink.get("token")
    same = sink.get("kind", "position") == "position" and (share is None or share > MOST)
    return str(text) if text and same else None


def mostly(sink: Mapping[str, Any]) -> str:
    """What stands before the token of :func:`token_there`, where some of the sinks at the position are on other tokens."""
    share = sink.get("token_share")
    return "mostly " if is_number(share) and share < 1 else ""


def _followed(sink: Mapping[str, Any], cells: Any) -> str:
    """What heads that look at a token wherever it stands can be, and what the value says that stands there."""
    ratio = sink.get("value_ratio")
    value = f" Its value is {number(ratio, 2)} times as long as the mean of a text." if is_number(ratio) else ""
    return (
        f"{of_heads(sink['sinking'], cells, 'looks', 'look')} at {quote(sink['text'] or sink['token'])} wherever it stands "
        f"({percent(sink['rate'])} of all heads and samples): they may rest on it or read it, which weights do not say "
        f"(`sinklab causes` does).{value}"
    )


def _place(sink: dict[str, Any]) -> str:
    if sink["kind"] == "group":
        return f"{sink['name']} (positions {_listed(list(map(str, sink['positions'])))})"
    return position_name(sink["position"]) if sink["kind"] == "position" and not sink.get("called") else str(sink["name"])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def of_heads(some: int, heads: int, one: str, many: str) -> str:
    """How many heads do something, by its verb in the singular and the plural: "1 of 12 heads sinks", "2 of 12 heads sink"."""
    return f"{some:,} of {counted(heads, 'head')} {one if some == 1 else many}"


def reads_text(summary: Mapping[str, Any]) -> bool:
    """Whether an audit is of a model of texts; those made before there were others are."""
    return summary.get("kind", "text") in ("text", "pairs")


def unit_of(summary: Mapping[str, Any]) -> str:
    """What a sample is counted in, in the singular: token; position, where it is no text."""
    return "token" if reads_text(summary) else "position"


def samples_of(summary: Mapping[str, Any]) -> str:
    """How many samples an audit has, and of how many tokens or positions."""
    return f"{counted(summary['samples'], 'sample')} of {counted(summary['seq_len'], unit_of(summary))}"


def rest_sentence(audit: Audit) -> str:
    """What was measured, in one sentence."""
    config = audit.config
    parts = []
    if is_number(config.get("samples")) and is_number(config.get("seq_len")):
        parts.append(samples_of({**audit.summary, "samples": config["samples"], "seq_len": config["seq_len"]}))
    if isinstance(audit.summary.get("tier"), str):
        parts.append(audit.summary["tier"])
    if audit.numbers.main:
        parts.append(condition_name(*audit.numbers.main, audit.summary))
    if audit.run.get("dtype"):
        parts.append(str(audit.run["dtype"]))
    if is_number(config.get("seed")):
        parts.append(f"seed {config['seed']}")
    return " · ".join(parts)


def named_rate(audit: Audit, name: str) -> float | None:
    """The whole model's number under one definition of a sink rate, in percent, whatever unit the table has."""
    value = audit.numbers.whole("sink_rate", name, position=0)
    rows = audit.numbers.rows("sink_rate", name)
    entries = audit.run.get("definitions")
    declared = {entry.get("metric"): entry.get("unit") for entry in (entries if isinstance(entries, list) else [])}
    unit = (rows.unit if rows is not None else "") or declared.get(name, "")
    if value is None:
        values = audit.summary.get("definitions")
        value = values.get(name) if isinstance(values, dict) else None
    if not is_number(value):
        return None
    assert value is not None
    return float(value) if unit == "percent" else 100 * float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
