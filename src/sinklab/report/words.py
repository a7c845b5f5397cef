"""Numbers in plain words: how a value is written, the verdict of an audit in one sentence, names of conditions and metrics."""

from __future__ import annotations

import math
from typing import Any

from sinklab.report.data import Audit

__all__ = [
    "DEFINITIONS",
    "condition_name",
    "display_token",
    "number",
    "percent",
    "position_name",
    "rest_sentence",
    "sink_positions",
    "verdict",
]

DEFINITIONS: dict[str, tuple[str, str, str]] = {
    "gu2024": (
        "Sink rate",
        "Share of samples × layers × heads whose mean attention to the key, over the queries that see it, exceeds the threshold.",
        "Gu et al. 2024, arXiv 2410.10781",
    ),
    "gu2024_null": (
        "Sink rate of the learned sink logit",
        "The same rule for the mass that a head gives to nothing through its learned sink logit.",
        "Gu et al. 2024, arXiv 2410.10781",
    ),
    "qiu2025_first_attention": (
        "First-token attention (F-Attn)",
        "Mean weight on the first token, over queries, heads and layers.",
        "Qiu et al. 2025, arXiv 2505.06708",
    ),
    "kaul2024_first_argmax": (
        "First token is the arg-max",
        "Share of queries × heads × layers whose largest weight is on the first token.",
        "Kaul et al. 2024, arXiv 2410.17174",
    ),
    "first_token_share": ("First-token share", "Share of all attention that goes to the first token.", ""),
    "first_four_share": (
        "First-four share",
        "Share of all attention that goes to the first four tokens.",
        "after Xiao et al. 2023, arXiv 2309.17453",
    ),
}
"""Metric of ``sink_rate`` to its title, its meaning and its paper; the run record's own texts take precedence."""

_FINITE_DIGITS = 3
NO_SINK_BELOW = 1.0
"""Percent: a rate below it is called no sink in the verdict. It is wording only; every number is shown."""


def number(value: Any, digits: int = _FINITE_DIGITS) -> str:
    """A value with ``digits`` significant digits, thousands grouped, an en dash for nothing."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        if value == 0:
            return "0"
        size = abs(value)
        if size >= 1e6 or size < 1e-3:
            return f"{value:.{digits - 1}e}"
        return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(size)))}f}".replace(",", "\u202f").replace("-", "\u2212")
    return str(value)


def percent(value: Any) -> str:
    """A percentage: ``31.2 %``, ``0.00 %``, ``0.04 %``."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return "–"
    value = float(value)
    return f"{value:.2f}\u202f%" if abs(value) < 1 else f"{value:.1f}\u202f%"


def display_token(token: str) -> str:
    """A token as one line of visible text; byte-level and SentencePiece space marks become spaces."""
    marks = {"Ġ": " ", "▁": " ", "Ċ": "↵", "\n": "↵", "\r": "␍", "ĉ": "⇥", "\t": "⇥"}
    return "".join(marks.get(letter, letter if letter.isprintable() else "�") for letter in token)


def position_name(position: int) -> str:
    """``position 0 (the first)`` or ``position 7``."""
    return "position 0, the first" if position == 0 else f"position {position}"


def condition_name(corpus: str | None, bos: Any) -> str:
    """A corpus and its BOS handling in words."""
    corpus = corpus or "corpus not recorded"
    name = {"random_tokens": "random tokens", "repeated_token": "one token repeated"}.get(corpus, f"natural text · {corpus}")
    if bos is None:
        return name
    return f"{name}, {'with' if bos else 'without'} BOS"


def sink_positions(audit: Audit) -> list[dict[str, Any]]:
    """``sink_positions`` of the summary, strongest first, incomplete entries left out."""
    entries = audit.summary.get("sink_positions")
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    whole = [entry for entry in entries if isinstance(entry.get("position"), int) and _is_number(entry.get("rate"))]
    return sorted(whole, key=lambda entry: (-entry["rate"], entry["position"]))


def verdict(audit: Audit) -> str:
    """What the audit found, in one sentence with its numbers."""
    threshold = f"{audit.threshold:g}"
    sinks = sink_positions(audit)
    rate = audit.summary.get("sink_rate_gu2024")
    cells = audit.numbers.num_cells
    if sinks and sinks[0]["rate"] >= NO_SINK_BELOW:
        top = sinks[0]
        token = f" ({quote(top['token'])})" if top.get("token") else ""
        text = (
            f"It has an attention sink at {position_name(top['position'])}{token}: {percent(top['rate'])} of all heads and "
            f"samples give it more than {threshold} of their attention on average."
        )
        others = len([sink for sink in sinks[1:] if sink["rate"] >= NO_SINK_BELOW])
        if others:
            text += f" {others} other position{'s' if others > 1 else ''} hold{'' if others > 1 else 's'} attention in this way too."
        return text
    if sinks or _is_number(rate):
        most = sinks[0]["rate"] if sinks else float(rate)  # type: ignore[arg-type]
        heads = f" in any of its {cells} heads" if cells and most == 0 else ""
        return (
            f"It has no attention sink{heads}: no position receives more than {threshold} of the attention on average in more "
            f"than {percent(most)} of heads and samples."
        )
    return "The sink rate was not measured, so nothing can be said about attention sinks."


def rest_sentence(audit: Audit) -> str:
    """What was measured, in one sentence."""
    config = audit.config
    parts = []
    if _is_number(config.get("samples")) and _is_number(config.get("seq_len")):
        parts.append(f"{number(config['samples'])} samples of {number(config['seq_len'])} tokens")
    if audit.numbers.main:
        parts.append(condition_name(*audit.numbers.main))
    for key in ("dtype",):
        if audit.run.get(key):
            parts.append(str(audit.run[key]))
    if _is_number(config.get("seed")):
        parts.append(f"seed {config['seed']}")
    return " · ".join(parts)


def quote(token: Any) -> str:
    """A token between quotation marks."""
    return f"“{display_token(str(token))}”"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
