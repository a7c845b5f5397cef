"""What a run found, in a sentence or two, whatever command made it: from ``run.json`` and ``summary.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.results.naming import counted

__all__ = ["finding_of"]

_SENTENCES = ("finding", "text", "recommendation", "sentence")
"""Keys of a summary under which a command says what it found, the most telling first."""


def finding_of(record: Mapping[str, object], summary: Mapping[str, object]) -> str:
    """What a run found, as the command that made it says it; empty where it says nothing in words.

    Args:
        record: ``run.json``.
        summary: ``summary.json``, or an empty mapping.
    """
    if record.get("kind") == "claim":
        reason = f" ({record['reason']})" if record.get("reason") else ""
        return f"{_capital(str(record.get('verdict')))}: {record.get('statement')}{reason}"
    if record.get("kind") == "pretrain":
        return _trained(record)
    for key in _SENTENCES:
        said = summary.get(key)
        if isinstance(said, list) and said:
            said = said[0]
        if isinstance(said, str) and said:
            return said
    # A command about several things says a sentence of each.
    lists = [value for value in summary.values() if isinstance(value, list)]
    said_of_each = [
        entry["sentence"] for entries in lists for entry in entries if isinstance(entry, dict) and "sentence" in entry
    ]
    return " ".join(map(str, said_of_each))


def _trained(record: Mapping[str, object]) -> str:
    """How a training went; of one that has not ended only its status."""
    status, result = str(record.get("status", "unfinished")), record.get("result")
    if not isinstance(result, dict):
        return f"{_capital(status)}: {record['error']}" if record.get("error") else f"{_capital(status)}."
    numbers = []
    if result.get("held_out_loss") is not None:
        numbers.append(f"{result['held_out_loss']:.3f} nats per held-out token")
    if result.get("sink_rate") is not None:
        numbers.append(f"{result['sink_rate']:.2f} % of heads and samples sink at position 0")
    divergence = record.get("divergence")
    steps = record.get("steps")
    after = counted(steps, "step") if isinstance(steps, int) else f"{steps} steps"
    ended = ": ".join([f"{_capital(status)} after {after}", *filter(None, [", ".join(numbers)])])
    why = divergence.get("reason") if isinstance(divergence, dict) else None
    said = f"{ended}. {_capital(str(why)).removesuffix('.')}." if why else f"{ended}."
    warning = record.get("warning") if result.get("sink_rate") is not None else None
    return f"{said} {warning}" if warning else said


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
