"""The report: one self-contained HTML file made from the output directory of an audit; it needs no network to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinklab.report.certificate import certificate_plot, certificate_section
from sinklab.report.head_data import add_maps, head_data
from sinklab.report.maps import Audit, Maps, picture_data, read_audit
from sinklab.report.page import facts_of, json_text, render, write_blocks_page, write_page
from sinklab.report.schema import require_kind
from sinklab.report.words import (
    TITLES,
    bos_words,
    condition_name,
    loss_unit,
    named_rate,
    number,
    rest_sentence,
    silent_of,
    sinks_of,
    token_there,
    verdict,
)
from sinklab.results.html import html
from sinklab.results.requirements import require_path
from sinklab.results.sections import sections
from sinklab.results.table import read_run
from sinklab.studies.audit.figures import cards, layer_figures, layer_table, part_cards

__all__ = ["FRAME_BUDGET", "PAGE_BUDGET", "frame_report", "render_report", "write_report"]

PAGE_BUDGET = 10_000_000
"""Bytes that a page stays below, also for 32 × 32 heads and 4,096 tokens."""

FRAME_BUDGET = 2 * 1024 * 1024
"""Bytes that the page of an audit stays below in a notebook, with 32 × 32 heads; larger models have no maps there."""

_RESERVE = 300_000
"""Bytes kept free for the template, the style, the script and what surrounds the packed arrays."""


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from ``table.parquet``, ``run.json``, ``summary.json`` and ``maps.safetensors``.

    The file is written whole or not at all; the same input gives the same bytes. What was not measured, and maps that were not
    recorded, are said to be missing.

    Args:
        folder: output directory of an audit, or of a study that an audit can include, such as ``sinklab causes``.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: ``folder`` is no path.
        InputError: the run is of another command; a file is missing or is not what its name says.
        ResultError: the summary, the table or the maps do not follow their schema.
    """
    require_path("`folder`", folder)
    folder = Path(folder)
    studies = sections()
    kind = require_kind(read_run(folder), folder, "audit", *studies)
    if kind in studies:
        return write_blocks_page(folder, studies[kind].title, studies[kind].lead, studies[kind].blocks)
    return write_page(render_report(read_audit(folder)), folder / "report.html")


def frame_report(folder: Path) -> str:
    """The page of an audit's folder as text, small enough for the output of a notebook's cell."""
    return render_report(read_audit(folder), FRAME_BUDGET)


def render_report(audit: Audit, budget: int = PAGE_BUDGET) -> str:
    """The page of one audit as text.

    Args:
        budget: bytes that it stays below if it can; maps get what everything else leaves of them.
    """
    finding, parts = verdict(audit), audit.parts
    studies = [
        (section, html(section.blocks(audit.summary[name])))
        for name, section in sections().items()
        if audit.summary.get(name) is not None
    ]
    context = {
        "title": audit.model,
        "operation": audit.operation,
        "verdict": finding,
        "subtitle": rest_sentence(audit),
        "sentences": [str(text) for text in audit.summary.get("text") or [] if text != finding],
        "cards": part_cards(parts, audit) if parts else cards(audit),
        "threshold": f"{audit.threshold:g}",
        "sinks": [row for part, view in parts or [("", audit)] for row in _sinks(view, part, audit)],
        "sinks_known": isinstance(audit.summary.get("sink_positions"), list),
        "conditions": [row for part, view in parts or [("", audit)] for row in _conditions(view, part)],
        "without": bos_words(False, audit.summary.get("bos_name")),
        "loss_definition": audit.summary.get("loss_definition"),
        "loss_unit": loss_unit(audit.summary),
        "sample": audit.summary.get("kind") or "text",
        "certificate": certificate_section(audit.summary.get("certificate")),
        "studies": studies,
        "definitions": [row for part, view in parts or [("", audit)] for row in _definitions(view, part)],
        "metrics": _metrics(audit),
        "checks": _checks(audit.run.get("checks")),
        "facts": facts_of(audit.run),
    }
    figures = layer_figures(audit.by_part)
    context["layer_headings"], context["layer_rows"] = layer_table(figures)
    context["skips_layers"] = any(view.numbers.skips_layers for _, view in audit.by_part)
    data, blobs = head_data(audit, parts)
    context["pictures"] = data["pictures"] = picture_data(audit.folder)
    data.update(page="report", figures=figures)
    if "certificate" in audit.summary:
        data["certificate"] = certificate_plot(audit.summary["certificate"])
    if audit.maps is not None:
        spent = len(json_text(data).encode()) + sum(map(len, blobs.values())) + _map_overhead(audit.maps) + _RESERVE
        spent += sum(len(body.encode()) for _, body in studies)  # a megabyte for the causes of a thousand heads
        add_maps(data, blobs, audit.maps, budget - spent)
    return render("template.html.j2", context, data, blobs)


def _map_overhead(maps: Maps) -> int:
    """Bytes at most of what accompanies maps: tokens, ranges of the scores, the elements around the packed arrays."""
    samples, modules, heads = maps.ranges.shape[:3]
    return len(json_text({"tokens": maps.tokens}).encode()) + samples * modules * (heads * 32 + 80)


def _sinks(audit: Audit, part: str, whole: Audit) -> list[dict[str, Any]]:
    """The sinks of an audit, or of a part of the whole one; heads are named by the grid of the whole one."""
    grid = [(column, row) for column, row in enumerate(whole.numbers.grid) if not part or row.part == part]
    columns = {row.layer: column for column, row in reversed(grid)}
    labels = {row.layer: row.label if part else row.layer for _, row in grid}
    result = []
    silent = silent_of(audit.summary)
    for sink in (*sinks_of(audit.summary), *silent):
        heads = [entry for entry in sink.get("heads") or [] if isinstance(entry, (list, tuple)) and len(entry) == 3]
        result.append(
            {
                "place": f"{part}: {sink['name']}" if part else sink["name"] if sink["position"] is None else sink["position"],
                "silent": sink in silent,
                "token": (token_there(sink) if sink["kind"] == "position" else sink.get("token"))
                or (sink.get("called") if sink["kind"] == "position" else None),
                "rate": sink["rate"],
                "heads": [
                    {"layer": labels.get(layer, layer), "head": head, "rate": rate, "column": columns.get(layer)}
                    for layer, head, rate in heads[:12]
                ],
                "more": max(0, len(heads) - 12),
            }
        )
    return result


def _conditions(audit: Audit, part: str = "") -> list[dict[str, Any]]:
    result = []
    for entry in audit.summary.get("conditions") or []:
        if isinstance(entry, dict):
            before = f"{part} · " if part else ""
            name = before + condition_name(entry.get("corpus"), entry.get("bos"), audit.summary)
            keys = ("loss", "sink_rate_gu2024", "top_position", "top_rate")
            shown = {key: entry.get(key) for key in keys}
            kind = audit.summary.get("kind", "text")
            if kind != "text" and entry.get("sink_rate") is not None:
                # Several patches may be one sink, of which no single one is the strongest.
                shown |= {"top_position": entry["sink"], "top_rate": entry["sink_rate"]}
            elif kind in ("image", "audio"):  # their column is headed "Sink", and there is none
                shown |= {"top_position": "none", "top_rate": None}
            result.append({"name": name, **shown})
    return result


def _definitions(audit: Audit, part: str = "") -> list[dict[str, object]]:
    """One checkpoint read under each published definition of a sink rate."""
    texts = {entry["metric"]: entry for entry in _metrics(audit) if entry["probe"] == "sink_rate"}
    named = audit.summary.get("definitions")
    result = []
    for name in dict.fromkeys([*TITLES, *(named if isinstance(named, dict) else {})]):
        value = named_rate(audit, name)
        if value is None:
            continue
        entry = {"text": "", "paper": "", **texts.get(name, {})}
        # One unit for all: a fraction is shown as the percentage it is.
        result.append(
            {
                "name": name,
                "title": TITLES.get(name, name) + (f", {part}" if part else ""),
                "text": entry["text"],
                "paper": entry["paper"],
                "percent": value,
            }
        )
    return result


def _metrics(audit: Audit) -> list[dict[str, str]]:
    entries = audit.run.get("definitions")
    keys = ("probe", "metric", "version", "text", "paper", "unit")
    return [
        {key: str(entry.get(key) if entry.get(key) is not None else "") for key in keys}
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
    ]


def _checks(checks: object) -> list[dict[str, object]]:
    """The self-checks of the audit, whether they are recorded as names, as a mapping or as records."""
    if isinstance(checks, dict):
        checks = [{"name": name, **(value if isinstance(value, dict) else {"detail": value})} for name, value in checks.items()]
    result = []
    for check in checks if isinstance(checks, list) else []:
        record = check if isinstance(check, dict) else {"name": check}
        passed = record.get("passed", record.get("ok"))
        detail = record.get("detail", record.get("value", ""))
        if isinstance(detail, bool):
            passed, detail = detail if passed is None else passed, ""
        name = record.get("name") or record.get("check") or "check"
        result.append({"name": str(name), "passed": passed, "detail": number(detail) if detail is not None else ""})
    return result
