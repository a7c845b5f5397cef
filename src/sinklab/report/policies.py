"""Cache policies in words, tables and curves: a section of the page, a plot for a file, and rows for the terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeGuard

from sinklab.report.words import number
from sinklab.results.file import write_image
from sinklab.results.intervals import LEAST_PARTS
from sinklab.results.naming import counted
from sinklab.results.summaries.cache import Comparison, PolicyEntry
from sinklab.results.summaries.shared import Difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "HEADINGS",
    "Curves",
    "is_comparison",
    "left_out_lines",
    "parts_of",
    "policy_curves",
    "policy_rows",
    "policy_section",
    "sampled_line",
    "size",
    "write_policy_plot",
]

HEADINGS = ["Policy", "Sinks", "Window", "Loss, nats", "Against window", "Against re-computation", "Tokens/s", "Held"]

_PLAIN = ("full", "window", "sink_window", "recompute")
"""Policies of which sinks and window say everything, unless their label goes on: ``…, original positions``; others are shown
with all their sizes."""

_COLOURS = {"sink": "#a8325f", "other": "#a06a10", "rest": "#4a6a86", "audit3": "#5b4aa8"}
_DASHES = {"sink": "-", "other": ":", "rest": "--", "audit3": "-."}


def policy_rows(comparison: Comparison) -> list[list[str]]:
    """One row a policy under :data:`HEADINGS`, in the order of the comparison.

    Args:
        comparison: ``summary.json`` of ``sinklab cache``, or the entry ``cache`` of that of an audit.
    """
    rows = []
    for entry in comparison["policies"]:
        sinks, window = entry.get("num_sinks"), entry.get("window")
        rows.append(
            [
                entry["policy"] if entry["policy"] in _PLAIN and "," not in entry["label"] else entry["label"],
                number(sinks),
                number(window),
                _with_half(entry["loss"], entry["loss_low"], entry["loss_high"]),
                _signed(entry.get("against_window")),
                _signed(entry.get("against_recompute")),
                number(round(entry["tokens_per_second"])),
                size(entry["bytes_held"]),
            ]
        )
    return rows


def left_out_lines(comparison: Comparison) -> list[str]:
    """Policies that could not be compared, one line a reason."""
    by_reason: dict[str, list[str]] = {}
    for entry in comparison.get("left_out") or []:
        by_reason.setdefault(str(entry["reason"]), []).append(str(entry["policy"]))
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items()]


def sampled_line(comparison: Comparison) -> str:
    """What to know of losses that are not those of all tokens, in a sentence; empty where there are none."""
    counts = {entry["policy"]: entry["scored_tokens"] for entry in comparison["policies"]}
    if counts.get("recompute", 0) in (0, max(counts.values())):
        return ""
    share = f"{number(counts['recompute'])} of {number(max(counts.values()))}"
    return (
        f"Re-computation is scored on {share} tokens; its loss is that of the window, and the mean difference on those tokens."
    )


def size(count: float) -> str:
    """Bytes in units of 1,024 with three digits: ``792 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{number(round(count) if unit == 'B' else float(f'{count:.3g}'))}\u202f{unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit takes every size")


class Curve(TypedDict):
    """One policy of the figure: loss by stretch of positions, null where none was scored."""

    name: str
    kind: str
    y: list[float | None]


class Curves(TypedDict):
    """A figure of curves, for the page's script."""

    title: str
    axis: str
    across: str
    caption: str
    labels: list[str]
    ranges: list[str]
    series: list[Curve]
    height: int
    zoom: bool


def policy_curves(comparison: Comparison) -> Curves | None:
    """Loss against position: dense, and in the recommended size a window without and with sinks and one computed anew.

    Of each there is one line. With sinks it is the recommended row, its kind of positions included; of a window with both kinds
    of positions it is the one in the cache, and of re-computation the one for every token, where there is one. What else a row
    is says its name.

    Returns:
        A figure for the page's script; ``None`` where there is nothing to draw.
    """
    entries = comparison["policies"]
    advised = comparison.get("recommended")
    sinks = 1 if advised is None else advised["num_sinks"] or 1
    elsewhere = advised is not None and bool(advised.get("pinned"))
    budget: int | None = max((entry["budget"] for entry in entries if entry["budget"]), default=None)
    if advised is not None:
        budget = advised["num_sinks"] + advised["window"]
    best: dict[str, tuple[tuple[float, ...], Curve]] = {}
    for entry in entries:
        if (drawn := _drawn(entry, budget, sinks, elsewhere=elsewhere)) is None:
            continue
        kind, label, rank = drawn
        values = [None if value is None else float(f"{value:.5g}") for value in entry["loss_by_position"]]
        if kind not in best or rank < best[kind][0]:
            best[kind] = rank, {"name": label, "kind": kind, "y": values}
    series = [best[kind][1] for kind in ("sink", "audit3", "other", "rest") if kind in best]
    if not series:
        return None
    return {
        "title": "Loss against position",
        "axis": f"nats per token, mean over {counted(comparison['documents'], 'text')}",
        "across": "position in the text, tokens",
        "caption": _caption(comparison),
        "labels": [str(start) for start, _ in comparison["positions"]],
        "ranges": [f"tokens {start}–{stop - 1}" for start, stop in comparison["positions"]],
        "series": series,
        "height": 260,
        "zoom": True,
    }


def _drawn(entry: PolicyEntry, budget: int | None, sinks: int, *, elsewhere: bool) -> tuple[str, str, tuple[float, ...]] | None:
    """Kind, label and rank of a policy, of which the lowest of each kind is drawn; ``None`` for one that is not drawn.

    Args:
        budget, sinks: of the recommended size.
        elsewhere: the recommended policy keeps other tokens than the first ones.
    """
    name, num_sinks, window = entry["policy"], entry.get("num_sinks") or 0, entry["window"]
    original, every = _original(entry), _every(entry)
    positions = ", original positions" if original else ""
    if name == "full":
        return "rest", "dense", (0,)
    if entry["budget"] != budget:
        return None
    if name == "window" or (name == "sink_window" and not num_sinks):
        return "other", f"window {window}{positions}", (original,)
    if name == "recompute":
        blocks = f", every {every} tokens" if every > 1 else ""
        return "audit3", f"window computed anew{blocks}{positions}", (every,)
    if elsewhere and name == "pinned" and num_sinks == sinks:
        return "sink", f"{_sinks(num_sinks)} where found + {window}{positions}", (original,)
    if not elsewhere and name == "sink_window" and num_sinks >= sinks:
        return "sink", f"{_sinks(num_sinks)} + {window}{positions}", (num_sinks != sinks, original)
    return None


def is_comparison(section: object) -> TypeGuard[Comparison]:
    """Whether the entry ``cache`` of an audit has a comparison, and not the reason why there is none."""
    return isinstance(section, dict) and "policies" in section


def policy_section(comparison: object) -> dict[str, object] | None:
    """What the template needs; ``None`` for an audit that knows of no policies (one made before there were any).

    ``comparison`` may be ``None`` (switched off), ``{"refused": why}``, or what :func:`policy_rows` takes.
    """
    if comparison is None:
        return {"missing": "Not measured in this audit: it was switched off."}
    if not is_comparison(comparison):
        refused = comparison.get("refused") if isinstance(comparison, dict) else None
        return {"missing": f"Not measured in this audit: {refused or 'no reason is recorded'}"}
    return {
        "missing": None,
        "recommendation": str(comparison["recommendation"]),
        "headings": HEADINGS,
        "rows": policy_rows(comparison),
        "made": _made(comparison),
        "left_out": left_out_lines(comparison),
    }


def write_policy_plot(comparison: Comparison, out: Path) -> None:
    """Draw :func:`policy_curves` to a file; its suffix decides the format."""
    curves = policy_curves(comparison)
    if curves is not None:
        write_image(_draw(comparison, curves), out)


def _draw(comparison: Comparison, curves: Curves) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), layout="constrained", dpi=130)
    axes = figure.add_subplot()
    middles = [(start + stop - 1) / 2 for start, stop in comparison["positions"]]
    for series in curves["series"]:
        values = [math.nan if value is None else value for value in series["y"]]
        axes.plot(middles, values, _DASHES[series["kind"]], color=_COLOURS[series["kind"]], label=series["name"], linewidth=1.8)
    trained = comparison.get("trained_length")
    if trained is not None and trained < comparison["tokens"]:
        axes.axvline(trained, color="#8c959f", linewidth=0.8)
        axes.text(trained, 1, " trained length", transform=axes.get_xaxis_transform(), fontsize=7, color="#59616b", va="top")
    axes.set_title(f"{comparison['model']}: loss under cache policies", fontsize=10)
    axes.set_xlabel("position in the text", fontsize=8)
    axes.set_ylabel("nats per token", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _original(entry: PolicyEntry) -> bool:
    """Whether what is kept stays at its positions in the text; older comparisons say so in the label alone."""
    return entry.get("settings", {}).get("positions", "") == "original" or "original positions" in entry["label"]


def _every(entry: PolicyEntry) -> int:
    """Tokens between two re-computations."""
    every = entry.get("settings", {}).get("every", 1)
    return every if isinstance(every, int) else 1


def _caption(comparison: Comparison) -> str:
    trained = comparison.get("trained_length")
    if trained is not None and trained < comparison["tokens"]:
        return (
            f"The model was trained on {number(trained)} tokens at once. The texts are the same for all, so bumps are theirs."
        )
    return "The texts are the same for all policies, so bumps are theirs."


def parts_of(comparison: Comparison) -> str:
    """What the intervals of a comparison are taken over."""
    if comparison["documents"] >= LEAST_PARTS:
        return "texts"
    return f"blocks of the text{'s' if comparison['documents'] > 1 else ''}, {LEAST_PARTS} or more in all"


def _made(comparison: Comparison) -> str:
    texts = f"{counted(comparison['documents'], 'text')} of {number(comparison['tokens'])} tokens of {comparison['corpus']}"
    return (
        f"{texts}. The loss is that of the tokens from {number(comparison['scored_from'])} on, with half of its 95 % interval "
        f"over {parts_of(comparison)}; differences are paired, with intervals of their own. Windows count the tokens before "
        "the query without the sinks; all bounded policies of one size hold equally many. Tokens per second are those of "
        f"single-token steps at the end of a text, one row, all policies in turn. {sampled_line(comparison)}"
    ).rstrip()


def _sinks(count: int) -> str:
    return "1 sink" if count == 1 else f"{count} sinks"


def _with_half(mean: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {(high - low) / 2:.2f}"


def _signed(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    text = f"{difference['mean']:+z.3f}"
    if difference["low"] is not None:
        text += f" [{difference['low']:z.3f}, {difference['high']:z.3f}]"
    return text.replace("-", "\u2212")
