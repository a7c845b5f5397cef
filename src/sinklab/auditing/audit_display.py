"""What the terminal shows of ``sinklab audit``: the few numbers that answer the question, and where the page is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from sinklab.results.run import Result

__all__ = ["display"]

LISTED = 5
"""Sink positions that the terminal shows; summary.json has more, the table all."""


def display(result: Result) -> Iterator[RenderableType]:
    """A line for each thing that was found."""
    summary = result.summary
    loss = summary["loss"]
    lines = {
        "model": f"{summary['model']} ({summary['operation']} attention, {summary['num_heads']} heads)",
        "text": f"{summary['corpus']} {_bos(summary)}, {summary['samples']} samples of {summary['seq_len']} tokens",
        "loss": "not defined for this model" if loss is None else f"{loss:.3f} nats per token",
        "sink rate": f"{summary['sink_rate_gu2024']:.2f} % at position 0 (Gu et al. 2024, threshold {summary['threshold']:g})",
        "sinks": _sinks(summary),
        "elsewhere": "; ".join(
            f"{condition['corpus']} {_bos(condition)} {condition['sink_rate_gu2024']:.2f} %"
            for condition in summary["conditions"][1:]
        ),
        "cache": (summary.get("cache") or {}).get("recommendation", ""),
        "forced": _forced(summary.get("certificate")),
        "causes": _causes(summary.get("causes")),
        "report": "" if result.folder is None else str(result.folder / "report.html"),
    }
    for name, text in lines.items():
        if text:
            yield f"[bold]{name:<10}[/bold]{escape(text)}"


def _forced(certificate: Mapping[str, Any] | None) -> str:
    """What the no-op certificate says, or why there is none though it was asked for."""
    if certificate is None:
        return ""
    return str(certificate["text"]) if "heads" in certificate else f"not certified: {certificate['refused']}"


def _causes(causes: Mapping[str, Any] | None) -> str:
    """What the heads do with the sink, or why it is not known though it was asked for."""
    if causes is None:
        return ""
    return str(causes["text"]) if "heads" in causes else f"not examined: {causes['refused']}"


def _bos(condition: Mapping[str, Any]) -> str:
    return "with BOS" if condition["bos"] else "without BOS"


def _sinks(summary: Mapping[str, Any]) -> str:
    """Where the sinks are: positions, or the learned logit that takes their place."""
    listed = ", ".join(_sink(sink) for sink in summary["sink_positions"][:LISTED])
    if summary.get("sink_role") == "null score":
        return f"null score, {100 * summary['null_mass']:.1f} % of the mass" + (f"; {listed}" if listed else "")
    if summary.get("sink_role") == "none" and listed:
        return f"none by weight (after dividing each row by its sum: {listed})"
    return listed or "none"


def _sink(sink: Mapping[str, Any]) -> str:
    return f"position {sink['position']} {json.dumps(sink['token'], ensure_ascii=False)} {sink['rate']:.2f} %"
