"""The causes of sinks as a section of an audit's page, and as a page of their own: what every head does with its sink."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from sinklab.report.causes_figure import SHOWN, effect_of, figure_of, interval, name_of
from sinklab.report.page import write_command_page
from sinklab.report.schema import require_causes
from sinklab.report.words import number
from sinklab.results.naming import counted
from sinklab.results.summaries.causes import CausesSummary, ExaminedGroup, ExaminedHead, Labelled

__all__ = ["LABELS", "causes_section", "write_causes_report"]

LABELS: dict[str, tuple[str, str]] = {
    "semantic": (
        "S",
        "silencing it costs loss, both with all of its attention on the sink and with an output of zero; so does replacing its "
        "output by that on another text",
    ),
    "constant": (
        "C",
        "silencing it costs loss, but replacing its output by that on another text costs nothing",
    ),
    "dormant": (
        "D",
        "sending all of its attention to the sink costs nothing, and neither does zeroing the sink's value; hiding the sink "
        "costs loss: the head rests there",
    ),
    "broadcast": (
        "B",
        "sending all of its attention to the sink costs nothing, but zeroing the sink's value costs loss",
    ),
    "unneeded": ("U", "neither silencing it nor removing its sink costs loss"),
    "switch": ("W", "semantic on some domains and dormant on all others"),
    "broadcast-switch": ("V", "semantic on some domains; on others it rests, and the sink's value is used"),
    "mixed": ("M", "its labels differ by domain in another way"),
    "undecided": ("·", "none of these is shown at the error rate asked for"),
}
"""Label to the letter in the map and its meaning in words."""


def write_causes_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from ``summary.json`` and ``run.json`` of ``sinklab causes --out``.

    Raises:
        InputError: a file is missing, or is of another command.
    """
    return write_command_page(folder, "causes", require_causes, causes_section)


def causes_section(causes: object) -> dict[str, object] | None:
    """What the template needs; ``None`` for an audit that was made without causes.

    Args:
        causes: the entry ``causes`` of an audit's ``summary.json``, or the whole one of ``sinklab causes``.
    """
    if causes is None:
        return None
    if not _are_causes(causes):
        refused = causes.get("refused") if isinstance(causes, dict) else None
        return {"missing": f"Not examined in this audit: {refused or 'no reason is recorded'}"}
    return {
        "missing": None,
        "text": str(causes["text"]),
        "legend": [
            {"label": label, "letter": letter, "meaning": meaning, "count": causes["counts"].get(label, 0)}
            for label, (letter, meaning) in LABELS.items()
        ],
        "map": _map(causes["heads"]),
        "figures": [figure_of(causes, domain) for domain in causes["domains"]],
        "headings": _headings(causes),
        "rows": [_row(head, causes) for head in causes["heads"]],
        "reasons": [line for head in causes["heads"] for line in _reasons(name_of(head), head, causes["domains"])],
        "groups": _groups(causes),
        "unit": causes["unit"],
        "made": _made(causes),
        "read_outs": _three_metrics(causes.get("read_outs"), causes["unit"]),
        "location": _location(causes.get("location"), causes["unit"]),
        "statements": _statements(causes),
    }


def _are_causes(section: object) -> TypeGuard[CausesSummary]:
    """Whether the entry of an audit has causes, and not the reason why there are none."""
    return isinstance(section, dict) and "heads" in section


METRICS = {
    "concentration": ("Attention on the sink", "share of the head's attention that goes to the sink, mean over queries"),
    "outliers": ("Outliers", "kurtosis of what the head writes: 3 for a normal distribution, more if a few numbers stand out"),
    "need of the sink": ("Loss without the sink", "change of the loss when the sink is hidden from the head"),
    "use of the head": ("Loss when silenced", "change of the loss when all of the head's attention goes to the sink"),
}
"""Metric to its heading and its meaning."""


def _three_metrics(section: object, unit: str) -> dict[str, object] | None:
    """Concentration, outliers and usefulness side by side, a row for each head, or each layer of a model with many."""
    if not isinstance(section, dict):
        return None
    if "heads" not in section:
        return {"missing": f"Not measured: {section.get('refused', 'no reason is recorded')}"}
    many = len(section["heads"]) > SHOWN
    rows = section["layers"] if many else section["heads"]
    names = [name for name in METRICS if any(row.get(name) is not None for row in rows.values())]
    most = {name: max((abs(row[name]) for row in rows.values() if row.get(name) is not None), default=0.0) for name in names}
    bars = [[_bar(name, row.get(name), most[name]) for name in names] for row in rows.values()]
    return {
        "missing": None,
        "what": "Layer" if many else "Head",
        "headings": [METRICS[name][0] for name in names],
        "meanings": [f"{METRICS[name][0]}: {METRICS[name][1]}." for name in names],
        "rows": list(zip(rows, bars, strict=True)),
        "unit": unit,
        "relations": [
            _relation(pair)
            for pair in section["correlations"]
            if pair["over"] == "heads" and pair["rho"] is not None and {pair["first"], pair["second"]} <= METRICS.keys()
        ],
    }


def _bar(name: str, value: float | None, most: float) -> dict[str, object] | None:
    """One number as a bar; of all but shares, the largest of the column is as wide as the cell."""
    if value is None:
        return None
    full = 1.0 if name == "concentration" else most or 1.0
    return {
        "text": number(value, 2) if name in ("concentration", "outliers") else _signed(value, 4),
        "width": f"{100 * abs(value) / full:.1f}",
        "kind": name.split()[0],
        "below": value < 0,
    }


def _relation(pair: Mapping[str, Any]) -> str:
    """How two metrics go together over heads."""
    rho = _signed(pair["rho"]) if pair["low"] is None else _bounds(pair, "rho")
    return (
        f"{METRICS[pair['first']][0]} and {_lower(METRICS[pair['second']][0])}: {pair['reading']} (rank correlation "
        f"{rho} over {counted(pair['items'], 'head')})"
    )


CONDITIONS = {
    "as it is": "nothing changed",
    "hidden": "the sink hidden from all heads",
    "removed": "the first token taken away",
    "duplicated": "the first token given twice",
    "replaced": "another token in its stead",
    "moved": "the first token moved to a later position",
    "random prefix": "random tokens put in front",
}
"""Condition to what was done."""


def _location(section: object, unit: str) -> dict[str, object] | None:
    """Where the attention of the strongest sink head goes under each condition."""
    if not isinstance(section, dict):
        return None
    if "conditions" not in section:
        return {"missing": f"Not measured: {section.get('refused', 'no reason is recorded')}"}
    index = section["heads"].index(section["head"])
    rows = []
    for name, condition in section["conditions"].items():
        top = condition["strongest"][0] if condition["strongest"] else None
        first = condition["first_token_at"]
        rows.append(
            [
                CONDITIONS.get(name, name),
                number(condition["at_place"][index], 2),
                "gone" if first is None else f"{number(condition['at_first_token'][index], 2)} at {first}",
                "–" if top is None else f"{number(top['weight'], 2)} at {top['position']}, head {top['head']}",
                "–" if condition["loss"] is None else _bounds(condition["loss"], places=3),
            ]
        )  # fmt: skip
    sink = "null score" if section["place"] == "null" else f"position {section['place']}"
    return {
        "missing": None,
        "headings": [
            "Change", f"On the {sink}" if section["place"] == "null" else f"On {sink}", "On the first token, where it now is",
            "Strongest of any head", f"Change of the loss, {unit}",
        ],
        "rows": rows,
        "head": section["head"],
        "follows": section.get("follows"),
        "left_out": [f"{CONDITIONS.get(name, name).capitalize()}: {why}" for name, why in section["left_out"].items()],
    }  # fmt: skip


STATEMENTS = {
    "key_bias": "Is what stands at the sink used?",
    "massive": "Massive activations",
    "spread": "Does the sink keep changes from spreading?",
}
"""Experiments that are reported in a sentence, and their headings."""


def _statements(causes: CausesSummary) -> list[tuple[str, str]]:
    sections = [(heading, causes.get(name)) for name, heading in STATEMENTS.items()]
    return [
        (heading, _minus(str(section.get("statement") or f"Not measured: {section.get('refused', 'no reason is recorded')}")))
        for heading, section in sections
        if isinstance(section, dict)
    ]


def _bounds(interval: Mapping[str, float | None], middle: str = "mean", places: int = 2) -> str:
    mean, low, high = (_signed(interval[end], places) for end in (middle, "low", "high"))
    return f"{mean} [{low}, {high}]"


def _signed(value: float | None, places: int = 2) -> str:
    return "–" if value is None else f"{value:+z.{places}f}".replace("-", "\u2212")


def _minus(words: str) -> str:
    """Hyphens before digits as minus signs."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\u2212", words)


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]


def _map(heads: Sequence[ExaminedHead]) -> dict[str, object]:
    """Layers across, heads down, a label in every cell; ``None`` for a head that was not examined."""
    layers = sorted({head["layer"] for head in heads})
    by_place = {(head["layer"], head["head"]): head for head in heads}
    rows = [
        {"head": row, "cells": [_cell(by_place.get((layer, row))) for layer in layers]}
        for row in range(1 + max(head["head"] for head in heads))
    ]
    return {"layers": layers, "rows": rows}


def _cell(head: ExaminedHead | None) -> dict[str, str] | None:
    if head is None:
        return None
    words = f"Layer {head['layer']}, head {head['head']}: {head['label']}"
    domains = ", ".join(f"{label} on {domain}" for domain, label in head["domains"].items())
    return {
        "label": head["label"],
        "letter": LABELS[head["label"]][0],
        "words": f"{words} ({domains})" if len(head["domains"]) > 1 else words,
    }


def _headings(causes: CausesSummary) -> list[str]:
    many = len(causes["domains"]) > 1
    effects = [f"{CONTRASTS[name]}{f', {domain}' if many else ''}" for domain in causes["domains"] for name in _named(causes)]
    of = [f", {domain}" for domain in causes["domains"]] if many and "sink_weights" in causes["heads"][0] else [""]
    sinks = [f"{name}{domain}" for domain in of for name in ("Weight on the sink", "Length of its value")]
    return ["Head", "Label", "Needs its sink", *sinks, *effects]


def _row(head: ExaminedHead, causes: CausesSummary) -> list[str]:
    return [name_of(head), *_cells(head, causes)]


def _cells(entry: Labelled, causes: CausesSummary) -> list[str]:
    """Label, need of the sink, numbers of the sink and effects of a head, or of a group."""
    effects = [effect_of(entry, name, domain) for domain in causes["domains"] for name in _named(causes)]
    label = (
        entry["label"]
        if len(set(entry["domains"].values())) < 2
        else "; ".join(f"{label} ({domain})" for domain, label in entry["domains"].items())
    )
    cells = [interval(effect, causes["minimal_effect"]) if effect else "–" for effect in effects]
    needs = dict.fromkeys(entry.get("needs_sink", {}).get(domain, "") for domain in causes["domains"])  # runs of older versions
    needing = (
        "; ".join(needs) if len(needs) < 2 else "; ".join(f"{word} ({name})" for name, word in entry["needs_sink"].items())
    )
    sinks = [number(entry["sink_weight"]), number(entry["value_ratio"])]
    if "sink_weights" in entry:
        own = (entry["sink_weights"], entry["value_ratios"])
        sinks = [number(values.get(domain)) for domain in causes["domains"] for values in own]
    return [label, needing or "–", *sinks, *cells]


def _groups(causes: CausesSummary) -> dict[str, object] | None:
    """The table of the heads that were edited at once."""
    groups = causes.get("groups", [])
    if not groups:
        return None
    many = len(causes["domains"]) > 1
    beyond = [f"Output zeroed, beyond the sum of each alone{f', {domain}' if many else ''}" for domain in causes["domains"]]
    heading, label, *others = _headings(causes)
    return {
        "headings": [f"{heading}s", label, "Each alone", *beyond, *others],
        "rows": [_group_row(group, causes) for group in groups],
        "reasons": [line for group in groups for line in _reasons(group["name"], group, causes["domains"])],
    }


def _group_row(group: ExaminedGroup, causes: CausesSummary) -> list[str]:
    label, *others = _cells(group, causes)
    alone = ", ".join(f"{count} {name}" for name, count in group["alone"].items())
    differences = [group["beyond_alone"]["zero"][domain] for domain in causes["domains"]]
    beyond = [_bounds({"mean": one["mean"], "low": one["low"], "high": one["high"]}, places=4) for one in differences]
    return [group["name"], label, alone, *beyond, *others]


def _reasons(name: str, entry: Labelled, domains: Sequence[str]) -> list[str]:
    """Why a head, or a group, is undecided, by domain."""
    return [
        f"{name}{f', {domain}' if len(domains) > 1 else ''}: {_minus(reason['why'])}"
        + ("" if reason["texts"] is None else f"; {reason['texts']:,} texts of {domain} would decide")
        for domain, reason in entry.get("undecided", {}).items()  # runs of older versions have none
    ]


CONTRASTS = {
    "redirect": "All attention to the sink",
    "hide": "Sink hidden",
    "zero_value": "Its value zeroed",
    "zero": "Output zeroed",
    "resample": "Output of another text",
    "hide - zero_value": "Share of the sink on other keys, less on none",
    "rotated": "Random outputs of its size",
    "redirect control - redirect": "All to another key, less the sink",
}
"""Interventions and contrasts of the table, with their headings; summary.json has all, with p-values."""


def _named(causes: CausesSummary) -> list[str]:
    """Those that some head has an effect of."""
    return [name for name in CONTRASTS if any(name in head["effects"] for head in causes["heads"])]


def _made(causes: CausesSummary) -> str:
    unit, least = causes["unit"], f"{causes['minimal_effect']:g}"
    domains = ", ".join(causes["domains"]) + (" together" if len(causes["domains"]) > 1 else "")
    return (
        f"{counted(causes['texts'], 'text')} of {domains}. Numbers are changes of the loss of a text, in "
        f"{unit}, mean over texts with a 95 % interval; above 0 the intervention hurts. Every claim is tested over all heads "
        f"together so that at most {100 * causes['level']:g} % of the labels given are expected to be false (Benjamini and "
        f"Hochberg 1995). Effects below {least} {unit}, gains among them, count as nothing."
        + (f" {_minus(rule['text'])}" if (rule := causes.get("minimal_effect_from")) else "")
    )
