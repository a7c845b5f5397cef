"""What the terminal shows of ``sinklab audit``: the few numbers that answer the question, and where the page is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from sinklab.report.words import bos_words, finding, loss_unit, mostly, samples_of, token_there
from sinklab.results.blocks import Say
from sinklab.results.naming import counted, quote
from sinklab.results.run import Result
from sinklab.results.sections import sections

__all__ = ["display"]

LISTED = 5
"""Sink positions that the terminal shows; summary.json has more, the table all."""


def display(result: Result) -> Iterator[RenderableType]:
    """A line for each thing that was found."""
    summary = result.summary
    loss = summary["loss"]
    heading = {"image": "pictures", "audio": "sound"}.get(summary["kind"], "text")
    lines = {
        "model": f"{summary['model']} ({summary['operation']} attention, {_heads(summary)})",
        heading: f"{_named(summary, summary)}, {samples_of(summary)}",
        "tier": _tier(summary),
        "read as": _reading(summary.get("reading")),
        "loss": _no_loss(summary) if loss is None else f"{loss:.3f} {loss_unit(summary)}{_of_what(summary)}",
        "pairs": summary.get("samples_definition") or "",
        "sink rate": f"{_of_parts(summary, _rate)} (Gu et al. 2024, threshold {summary['threshold']:g})",
        "sinks": summary.get("finding") or finding(summary),
        "places": _of_parts(summary, _places),
        "elsewhere": _of_parts(summary, lambda part: _conditions(part, summary)),
        "warning": " ".join(summary.get("warnings", ())),
        "cache": (summary.get("cache") or {}).get("recommendation", ""),
        "forced": _forced(summary.get("certificate")),
        "causes": _causes(summary.get("causes")),
        "origin": _origin(summary.get("origin")),
        "report": "" if result.folder is None else str(result.folder / "report.html"),
    }
    for name, text in lines.items():
        if text:
            yield f"[bold]{name:<10}[/bold]{escape(text)}"


def _heads(summary: Mapping[str, Any]) -> str:
    """How many heads there are, of an encoder–decoder in each part."""
    parts = summary.get("parts")
    if parts:
        return f"heads: {_listed(parts, lambda part: part['num_heads'])}"
    others = sum(summary.get("layers_without_attention", {}).values())
    without = f"; {counted(others, 'layer')} without attention" if others else ""
    return counted(summary["num_heads"], "head") + without


def _of_parts(summary: Mapping[str, Any], words: Callable[[Mapping[str, Any]], object]) -> str:
    """Words about a model, or about each part of an encoder–decoder."""
    return _listed(summary["parts"], words) if summary.get("parts") else str(words(summary))


def _listed(parts: Sequence[Mapping[str, Any]], words: Callable[[Mapping[str, Any]], object]) -> str:
    said = ((part["part"], words(part)) for part in parts)
    return "; ".join(f"{part} {text}" for part, text in said if text != "")


def _conditions(part: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What was found under the other conditions."""
    between = ", " if summary.get("parts") else "; "
    return between.join(f"{_named(condition, summary)}: {_elsewhere(condition)}" for condition in part["conditions"][1:])


def _tier(summary: Mapping[str, Any]) -> str:
    """Where the weights come from and what is therefore missing; nothing for models on the attention interface."""
    missing = ", ".join(summary.get("not_measured") or ())
    return f"{summary['tier']}; not measured: {missing}" if summary.get("tier") else ""


def _forced(certificate: Mapping[str, Any] | None) -> str:
    """What the no-op certificate says, or why there is none though it was asked for."""
    if certificate is None:
        return ""
    return str(certificate["text"]) if "heads" in certificate else f"not certified: {certificate['refused']}"


def _causes(causes: Mapping[str, Any] | None) -> str:
    """What the heads do with the sink, or why it is not known though it was asked for."""
    first = next(iter(sections()["causes"].blocks(causes)), None) if causes else None
    return "" if not isinstance(first, Say) else f"not examined: {first.text}" if first.small else first.text


def _origin(origin: Mapping[str, Any] | None) -> str:
    """Where the sinks are born, or why it is not known though it was asked for."""
    if origin is None:
        return ""
    return str(origin["text"]) if "origins" in origin else f"not followed: {origin['refused']}"


def _reading(reading: Mapping[str, Any] | None) -> str:
    """What the tokenizer makes of the text; nothing where that is not known."""
    if reading is None:
        return ""
    return f"{reading['characters_per_token']:.2f} characters a token, {100 * reading['unknown_share']:.2g} % of tokens unknown"


def _no_loss(summary: Mapping[str, Any]) -> str:
    """Why there is no loss."""
    return "none: no sample has a class" if summary["loss_kind"] == "class" else "not defined for this model"


def _of_what(summary: Mapping[str, Any]) -> str:
    """Bits per byte of a next-token loss; what another loss is taken of."""
    bits = summary.get("bits_per_byte")
    if bits is not None:
        return f", {bits:.3f} bits per byte"
    return "" if summary["loss_kind"] == "next token" else f" ({summary['loss_definition']})"


def _named(condition: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """A corpus, with or without the tokens that samples begin with."""
    return f"{condition['corpus']} {bos_words(condition['bos'], summary['bos_name'])}".rstrip()


def _rate(summary: Mapping[str, Any]) -> str:
    """The rate of the strongest sink, where that is not position 0, and of position 0."""
    sinks = summary.get("sinks", {}).get("sinks", [])
    main = f"{sinks[0]['rate']:.2f} % at {sinks[0]['name']}, " if sinks and sinks[0]["position"] != 0 else ""
    return f"{main}{summary['sink_rate_gu2024']:.2f} % at position 0"


def _elsewhere(condition: Mapping[str, Any]) -> str:
    has_sink = condition["sink_rate"] is not None
    return f"{condition['sink']} {condition['sink_rate']:.2f} %" if has_sink else "no sink"


def _places(summary: Mapping[str, Any]) -> str:
    """Positions and tokens, strongest first, with their rates."""
    entries = [sink for name in ("sinks", "followed") for sink in summary.get("sinks", {}).get(name, [])]
    tokens = [{**sink, "position": None} for sink in entries if sink["kind"] in ("token", "group")]
    sinks = sorted([*summary["sink_positions"], *tokens], key=lambda sink: -sink["rate"])
    return ", ".join(_sink(sink) for sink in sinks[:LISTED])


def _sink(sink: Mapping[str, object]) -> str:
    if sink["position"] is None:
        return f"{sink['name']} {sink['rate']:.2f} %"
    token = f" {mostly(sink)}{quote(sink['token'])}" if token_there(sink) else ""
    return f"position {sink['position']}{token} {sink['rate']:.2f} %"
