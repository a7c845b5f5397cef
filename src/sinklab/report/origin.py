"""The origin of sinks as a section of an audit's page, and as a page of its own: norms by block, what writes them, edits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeGuard

from sinklab.report.page import write_command_page
from sinklab.report.schema import require_origin
from sinklab.report.words import number
from sinklab.results.naming import counted
from sinklab.results.summaries.origin import OriginFound, OriginSummary
from sinklab.results.summaries.shared import Difference

__all__ = ["COUNTED_HEADS", "HEADINGS", "edit_rows", "heads_line", "origin_section", "origin_title", "write_origin_report"]

HEADINGS = ["Edit", "Loss", "Weight on it", "Share kept", "Spike", "Share kept of it"]
"""Of the table of edits."""

COUNTED_HEADS = "the heads behind the origin that give the place at least half as much as the strongest of them"
"""Over which heads a weight is a mean; of all blocks where no attention is behind the origin."""

_ON = {
    "units": "{units}",
    "controls": "random {units}",
    "write": "the whole write",
    "channels": "the channels",
    "registers": "{units} to registers",
}
_LEFT, _RIGHT, _TOP, _BOTTOM, _TICKS = 44.0, 412.0, 10.0, 176.0, 12


def write_origin_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from ``summary.json`` and ``run.json`` of ``sinklab origin --out``.

    Raises:
        InputError: a file is missing, or is of another command.
    """
    return write_command_page(folder, "origin", require_origin, origin_section)


def _from(loss: object) -> str:
    """What a change of the loss is a change from, where it is known; audits of earlier versions do not say it."""
    return f" from {loss:.3f} of the model as it is" if isinstance(loss, float) else ""


def origin_section(origin: object) -> dict[str, object] | None:
    """What the template needs; ``None`` for an audit that was made without it.

    Args:
        origin: the entry ``origin`` of an audit's ``summary.json``, or the whole one of ``sinklab origin``.
    """
    if origin is None:
        return None
    if not _is_found(origin):
        refused = origin.get("refused") if isinstance(origin, dict) else None
        return {"missing": f"Not examined in this audit: {refused or 'no reason is recorded'}"}
    return {
        "missing": None,
        "headings": HEADINGS,
        "places": [_place(found) for found in origin["origins"]],
        "notes": origin["notes"],
        "made": (
            f"{counted(origin['samples'], 'sample')}. Loss: change in nats{_from(origin.get('loss'))}, mean over samples with "
            f"95 % interval; weight: mean over {COUNTED_HEADS}; spike: largest "
            "over median size of a state, “–” of a place whose norm does not stand out or where the largest does not stand. "
            "Share kept: of the weight above that of uniform attention, and of the spike. Random units are as "
            f"many of the same sublayer, mean of {counted(origin['controls'], 'draw')}."
        ),
    }


def _is_found(section: object) -> TypeGuard[OriginSummary]:
    """Whether the entry of an audit has origins, and not the reason why there are none."""
    return isinstance(section, dict) and "origins" in section


def origin_title(origin: OriginFound) -> str:
    """Heading of one place."""
    return f"{'Spike' if origin['kind'] == 'spike' else 'Sink'} at {origin['place']}"


def heads_line(origin: OriginFound) -> str:
    """How many heads the weight on a place is a mean over, and which; empty where there is none."""
    own = sum(head["own"] for head in origin["heads"])
    return f"Weight on it: mean over {COUNTED_HEADS} ({counted(own, 'head')})." if own else ""


def edit_rows(origin: OriginFound) -> list[list[str]]:
    """The table of edits, the model as it is first."""
    kind = "units" if origin["unit_kind"] is None else f"{origin['unit_kind']}s"
    names = [unit["name"] for unit in origin["units"]]
    units = names[0] if len(names) == 1 else f"{len(names)} {kind}"
    drawn = f"{len(names)} {kind}" if len(names) != 1 else str(origin["unit_kind"])
    spiked = origin.get("spiked", True)  # audits of earlier versions do not say it
    rows = [["as it is", "", number(origin["weight"], 2), "", number(origin["spike"]) if spiked else "–", ""]]
    for edit in origin["edits"]:
        what = _ON[edit["on"]].format(units=drawn if edit["on"] == "controls" else units)
        rows.append([
            f"{what}: {edit['edit']}",
            _bounds(edit["loss"], "+z.4f"),
            number(edit["weight"], 2),
            _bounds(edit["weight_kept"], "z.2f"),
            number(edit["spike"]) if spiked else "–",
            _bounds(edit["spike_kept"] if spiked else None, "z.2f"),
        ])  # fmt: skip
    return rows


def _bounds(interval: Difference | None, form: str) -> str:
    if interval is None:
        return "–"
    low, high = interval["low"], interval["high"]
    text = f"{interval['mean']:{form}}" + ("" if low is None or high is None else f" [{low:{form}}, {high:{form}}]")
    return text.replace("-", "\u2212")


def _place(origin: OriginFound) -> dict[str, object]:
    return {
        "title": origin_title(origin),
        "place": origin["place"],
        "verdict": origin["verdict"],
        "norms": _norms(origin),
        "bars": _bars(origin),
        "parts": _parts(origin),
        "edits": edit_rows(origin) if origin["edits"] else [],
        "heads_line": heads_line(origin),
        "heads": [
            [
                f"{head['layer']}.{head['head']}", number(head["weight"], 2), number(head["uniform"], 2),
                number(head["edited"].get("units zero"), 2), number(head["edited"].get("write zero"), 2),
            ]
            for head in origin["heads"]
        ],
        "weights": [
            [
                f"{weight['parameter']}{weight['part']}", weight["role"], number(weight["norm"]),
                number(weight["times_median"]), f"{number(weight['value'])} at {weight['channel']}", number(weight["rank"]),
            ]
            for weight in origin["weights"]
        ],
    }  # fmt: skip


def _norms(origin: OriginFound) -> dict[str, object]:
    """Two lines over the blocks on a logarithmic axis, in coordinates of a picture of 420 by 200."""
    values = {kind: origin["norms"]["place" if kind == "place" else "others"] for kind in ("others", "place")}
    known = [value for line in values.values() for value in line if value > 0 and math.isfinite(value)]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)) + 1e-9)
    high = max(high, low + 1)
    count = len(values["place"])

    def x(index: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (index + 0.5) / count, 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (math.log10(max(value, 10.0**low)) - low) / (high - low), 1)

    step = max(1, math.ceil(count / _TICKS))
    return {
        "across": [{"x": x(index), "text": "in" if index == 0 else str(index - 1)} for index in range(0, count, step)],
        "up": [{"y": y(10.0**power), "text": f"{10.0**power:g}"} for power in range(low, high + 1)],
        "born": None if origin["block"] is None else x(origin["block"] + 1),
        "words": f"{number(values['place'][-1])} at {origin['place']} and {number(values['others'][-1])} elsewhere at the end",
        "lines": [
            {
                "kind": kind,
                "points": " ".join(f"{x(index)},{y(value)}" for index, value in enumerate(line)),
                "dots": [
                    {"x": x(index), "y": y(value), "words": f"{'in' if not index else f'block {index - 1}'}: {number(value)}"}
                    for index, value in enumerate(line)
                ],
            }
            for kind, line in values.items()
        ],
    }


def _bars(origin: OriginFound) -> list[dict[str, object]]:
    """Units, all others together, and what is from no unit; they sum to the norm of the write."""
    if not origin["units"] or origin["norm"] is None or origin["rest"] is None:
        return []
    units = sum(unit["along"] for unit in origin["units"])
    entries = [(unit["name"], unit["along"], "concentration") for unit in origin["units"]]
    entries.append(("all others", origin["norm"] - units - origin["rest"], "use"))
    if origin["rest"]:
        entries.append(("bias and other parts", origin["rest"], "use"))
    most = max(abs(value) for _, value, _ in entries) or 1.0
    return [
        {"name": name, "kind": kind, "text": number(value), "width": f"{100 * abs(value) / most:.1f}", "below": value < 0}
        for name, value, kind in entries
    ]


def _parts(origin: OriginFound) -> str:
    if origin["norm"] is None:
        return ""
    what = "the difference of the mean write from that at other tokens" if origin["against_others"] else "the mean write there"
    return f"The parts sum to {number(origin['norm'])}, the L2 norm of {what}; a hollow bar is below 0."
