"""The origin of sinks in sentences: where each is born, what writes it, and whether spike and sink go together or part."""

from __future__ import annotations

from collections.abc import Sequence

from sinklab.report.words import number
from sinklab.results.summaries.origin import OriginEdit, OriginFound, OriginHead, OriginSummary
from sinklab.results.summaries.shared import Difference

__all__ = ["sentences", "verdict"]

JUMP = 2.0
"""Times the norm of other tokens from which on a norm has jumped, as in tracing.py, which this file cannot import (torch)."""

GONE, STAYS = 0.25, 0.5
"""Share of a spike, or of a sink's weight above a uniform one, up to which it is gone, and from which on it stays."""

LISTED = 6
"""Heads that a sentence names at most."""

_SUBLAYERS = {"attention": "attention", "cross-attention": "cross-attention", "mlp": "MLP", "block": "whole"}
_LEAVES = {"gone": "leaves no spike", "weakened": "leaves a smaller spike", "stays": "leaves the spike"}
_CHANGES = {"zero": "silenced", "mean": "at the mean of other positions", "resampled": "resampled"}


def sentences(summary: OriginSummary) -> str:
    """All that was found, in plain words."""
    return " ".join([*(origin["verdict"] for origin in summary["origins"]), *summary["notes"]])


def verdict(origin: OriginFound) -> str:
    """Where one place is born, what writes it, and what goes when that is taken away."""
    return " ".join(
        text for text in (_birth(origin), _writers(origin), _parting(origin), _cost(origin), _moved(origin)) if text
    )


def grade(kept: float) -> str:
    """``gone``, ``weakened`` or ``stays``, by the share that is left."""
    return "gone" if kept <= GONE else "stays" if kept >= STAYS else "weakened"


def _open(kept: Difference) -> bool:
    """Whether the interval of what is left reaches from gone to stays."""
    return kept["low"] is not None and kept["high"] is not None and kept["low"] <= GONE and kept["high"] >= STAYS


def _birth(origin: OriginFound) -> str:
    what = f"The {'spike' if origin['kind'] == 'spike' else 'sink'} at {origin['description']}"
    if origin["kind"] == "spike" and origin["weight"] is not None:
        peak = max((weight for weight in origin["weight_by_block"] if weight is not None), default=0.0)
        what += f" ({_each(origin)}{number(peak, 2)} of the attention in the block that gives most)"
    if origin["by"] == "norm" and origin["sublayer"] == "embeddings":
        return f"{what} is there before the first block: its embedding has {_times(origin['after'])} the norm of other tokens."
    if origin["by"] == "norm":
        return (
            f"{what} is born in block {origin['block']}, in its {_sublayer(origin)}: the norm there goes from "
            f"{_times(origin['before'])} to {_times(origin['after'])} that of other tokens."
        )
    late = origin["peak"] >= JUMP
    norm = f"its norm is never more than {_times(origin['peak'])} that of other tokens"
    if late:
        norm = f"it grows to {_times(origin['peak'])} that of other tokens only behind the heads that look at it"
    jump = "no jump of its norm where it matters" if late else "no jump of its norm"
    if origin["by"] == "pull" and origin["pull_lost"] is None:
        return (
            f"{what} has {jump} ({norm}); the heads that give it most are in the first block, so its pull is "
            "there before anything is written: in its embedding."
        )
    if origin["by"] == "pull":
        assert origin["pull"] is not None
        assert origin["pull_lost"] is not None
        return (
            f"{what} has {jump} ({norm}); its pull comes from block {origin['block']}, from its "
            f"{_sublayer(origin)}: with that write replaced by the mean of other tokens, the scores of its key fall from "
            f"{number(origin['pull'], 2)} above the others by {_bounds(origin['pull_lost'], 2)}."
        )
    lost = "" if origin["pull_lost"] is None else f" (the most that one carries is {_bounds(origin['pull_lost'], 2)})"
    return f"{what} has {jump} ({norm}), and no single write carries its pull{lost}: its origin is not one place."


def _each(origin: OriginFound) -> str:
    return "together " if len(origin["positions"]) > 1 else ""


def _writers(origin: OriginFound) -> str:
    if origin["norm"] is None:
        return ""
    if origin["not_split"]:
        return f"Its write of norm {number(origin['norm'])} is not split into units: {origin['not_split']}."
    units = origin["units"]
    if not units:
        return ""
    written = sum(unit["along"] for unit in units)
    names = _listed([unit["name"] for unit in units])
    more = " of the difference from other tokens" if origin["against_others"] else ""
    verb = "writes" if len(units) == 1 else "write"
    text = f"{names[0].upper()}{names[1:]} {verb} {number(written)} of {number(origin['norm'])}{more} there"
    if written < 0.5 * origin["norm"]:
        text += f" ({origin['num_units']} {origin['unit_kind']}s share the rest: the write is spread)"
    first = origin["channels"][0]
    if first["share"] >= 0.5:
        inside = sum(unit["in_channel"] for unit in units)
        text += f", {number(inside)} of {number(first['value'])} in channel {int(first['channel'])}"
    return f"{text}."


def _parting(origin: OriginFound) -> str:
    """Whether spike and sink go together: the sentence that the experiment is for; of a place without a spike, whether the
    sink goes, and of one that is no sink, whether the spike does."""
    edit = _edit(origin, "units", "zero")
    if edit is None:
        return ""
    if origin["kind"] == "spike" or edit["weight_kept"] is None or edit["weight"] is None or origin["weight"] is None:
        return _of_spike(origin, edit) if origin["spiked"] else ""
    weights = (
        f"weight {number(origin['weight'], 2)} to {number(edit['weight'], 2)}, {_percents(edit['weight_kept'])} of what exceeds"
        " uniform attention is kept"
    )
    if not origin["spiked"]:
        return _of_sink(origin, edit["weight_kept"], weights)
    return _of_spike_and_sink(origin, edit, edit["weight_kept"], weights)


def _of_spike(origin: OriginFound, edit: OriginEdit) -> str:
    """Whether the spike goes, of a place that is no sink."""
    spike, spikes, looks = grade(edit["spike_kept"]["mean"]), _spikes(origin, edit), _attention_there(origin, edit)
    if _open(edit["spike_kept"]):
        return (
            f"{_silenced(origin, 'change')} the spike ({spikes}, {_percents(edit['spike_kept'])} kept){looks}; these samples "
            "leave open whether it goes."
        )
    if spike == "gone":
        return f"{_silenced(origin, 'take')} the spike away ({spikes}){looks}."
    return f"{_silenced(origin, 'leave')} {'the' if spike == 'stays' else 'a smaller'} spike ({spikes}){looks}."


def _of_sink(origin: OriginFound, kept: Difference, weights: str) -> str:
    """Whether the sink goes, of a place without a spike."""
    sink, takes = grade(kept["mean"]), _silenced(origin, "take")
    if _open(kept):
        return f"{_silenced(origin, 'change')} the sink ({weights}); these samples leave open whether it goes."
    if (by_head := _differing(origin, takes)) is not None:
        return f"{by_head[0]}; {by_head[1]}."
    if sink == "stays":
        return f"{_silenced(origin, 'leave')} the sink as it is ({weights})."
    return f"{takes} {'' if sink == 'gone' else 'part of '}the sink away ({weights})."


def _of_spike_and_sink(origin: OriginFound, edit: OriginEdit, kept: Difference, weights: str) -> str:
    """Whether they go together, of a place that has both."""
    spike, sink = grade(edit["spike_kept"]["mean"]), grade(kept["mean"])
    spikes, takes = _spikes(origin, edit), _silenced(origin, "take")
    if _open(edit["spike_kept"]) or _open(kept):
        return (
            f"{_silenced(origin, 'change')} the spike ({spikes}, {_percents(edit['spike_kept'])} kept) and the sink "
            f"({weights}); these samples leave open which of them goes."
        )
    if (by_head := _differing(origin, takes)) is not None:
        joined = f" and the spike too ({spikes})" if spike == "gone" else f"; the spike {_left(spike)} ({spikes})"
        return f"{by_head[0]}{joined}; {by_head[1]}."
    if spike == "gone" and sink == "stays":
        return f"Spike and sink separate. {takes} the spike away ({spikes}), and the sink stays ({weights})."
    if spike == "gone" and sink == "gone":
        return f"Spike and sink go together. {takes} both away: the spike ({spikes}) and the sink ({weights})."
    if spike == "gone":
        return f"{takes} the spike away ({spikes}), and the sink is weakened ({weights})."
    if sink == "gone":
        return f"Spike and sink separate. {takes} the sink away ({weights}), and the spike {_left(spike)} ({spikes})."
    if sink == "weakened":
        return f"{takes} part of the sink away ({weights}); the spike {_left(spike)} ({spikes})."
    return f"{_silenced(origin, 'leave')} the sink as it is ({weights}); the spike {_left(spike)} ({spikes})."


def _silenced(origin: OriginFound, verb: str) -> str:
    """The beginning of a sentence on the units: what they do when they are silenced."""
    return f"Silenced, it {verb}s" if len(origin["units"]) == 1 else f"Silenced, they {verb}"


def _spikes(origin: OriginFound, edit: OriginEdit) -> str:
    return f"{number(origin['spike'])} to {number(edit['spike'])} times the median"


def _attention_there(origin: OriginFound, edit: OriginEdit) -> str:
    """What becomes of the attention to a spike, which is no sink that could go or stay."""
    if origin["kind"] != "spike" or edit["weight"] is None or origin["weight"] is None:
        return ""
    before, after = number(origin["weight"], 2), number(edit["weight"], 2)
    return f", and the weight of the heads that look there most goes from {before} to {after}"


def _differing(origin: OriginFound, takes: str) -> tuple[str, str] | None:
    """Which heads lose the sink, and which keep it, where they differ.

    Args:
        takes: the beginning of the sentence, up to "takes".
    """
    lost, kept, left_open = _by_head(origin)
    if not lost or not kept:
        return None
    others = len(kept) if left_open else "the other"
    rest = f"{others} head keeps" if len(kept) == 1 else f"{others} heads keep"
    gaining = any((head["edited"]["units zero"] or 0) > (head["weight"] or 0) for head in kept)
    more = f" or {'looks' if len(kept) == 1 else 'look'} there more" if gaining else ""
    heads = f"{len(lost)} of the {len(lost + kept + left_open)} heads that look there most"
    return (
        f"{takes} the sink of {heads} away (weight {_changes(lost)})",
        f"{rest} part of it or all{more} (weight {_changes(kept)}){_not_shown(left_open)}",
    )


def _not_shown(heads: Sequence[OriginHead]) -> str:
    """Of which heads the samples do not show whether the sink goes."""
    return f"; of {len(heads)} these samples leave it open (weight {_changes(heads)})" if heads else ""


def _by_head(origin: OriginFound) -> tuple[list[OriginHead], list[OriginHead], list[OriginHead]]:
    """The heads of a place that lose it with the units silenced, by what exceeds uniform attention, those that do not, and
    those whose interval reaches from the one to the other."""
    lost, kept, left_open = list[OriginHead](), list[OriginHead](), list[OriginHead]()
    for head in origin["heads"]:
        weight, uniform, edited = head["weight"], head["uniform"], head["edited"].get("units zero")
        if head["own"] and weight is not None and uniform is not None and edited is not None and weight > uniform:
            by_mean = lost if grade((edited - uniform) / (weight - uniform)) == "gone" else kept
            (left_open if head["kept"] is not None and _open(head["kept"]) else by_mean).append(head)
    return lost, kept, left_open


def _changes(heads: Sequence[OriginHead]) -> str:
    """By head, the first few."""
    return ", ".join(f"{head['layer']}.{head['head']}: {_change(head)}" for head in heads[:LISTED])


def _change(head: OriginHead) -> str:
    return f"{number(head['weight'], 2)} to {number(head['edited']['units zero'], 2)}"


def _left(spike: str) -> str:
    return "stays" if spike == "stays" else "is smaller"


def _cost(origin: OriginFound) -> str:
    """What the edits of units cost beside those of random ones."""
    edit, control = _edit(origin, "units", "zero"), _edit(origin, "controls", "zero")
    if edit is None or edit["loss"] is None:
        return ""
    text = f"The loss changes by {_bounds(edit['loss'])}"
    if control is not None and control["loss"] is not None:
        text += f", with as many random {origin['unit_kind']}s of the same layer by {_bounds(control['loss'])}"
    others = [
        f"{_CHANGES[name]} by {_bounds(other['loss'])}"
        for name in ("mean", "resampled")
        if (other := _edit(origin, "units", name)) is not None and other["loss"] is not None
    ]
    text += f"; {' and '.join(others)}" if others else ""
    whole = _edit(origin, "write", "zero")
    if whole is not None and whole["loss"] is not None:
        weight = "" if whole["weight"] is None else f", and the weight goes to {number(whole['weight'], 2)}"
        text += f". With the whole write there at 0 it changes by {_bounds(whole['loss'])}{weight}"
    zero, mean = _edit(origin, "channels", "zero"), _edit(origin, "channels", "mean")
    if zero is not None and mean is not None and zero["loss"] is not None and mean["loss"] is not None:
        channels = [str(int(channel["channel"])) for channel in origin["channels"]]
        name = f"channel {channels[0]}" if len(channels) == 1 else f"channels {_listed(channels)}"
        there = f"With {name} 0 at the {origin['kind']}"
        text += f". {there} it changes by {_bounds(zero['loss'])}, at the mean by {_bounds(mean['loss'])}"
    return f"{text}."


def _moved(origin: OriginFound) -> str:
    """What registers take over, beside what silencing costs."""
    registers, edit = origin.get("registers"), _edit(origin, "registers", "moved")
    if registers is None or edit is None:
        return ""
    one, it = registers["number"] == 1, "it" if len(origin["units"]) == 1 else "them"
    added = "an added token (a register)" if one else f"{registers['number']} added tokens (registers)"
    spike_kept = edit["spike_kept"]
    leaves = "leaves open on these samples whether a spike stays" if _open(spike_kept) else _LEAVES[grade(spike_kept["mean"])]
    what = f"hat {'it writes' if it == 'it' else 'they write'}"
    text = (
        f"Moved to {added}, w{what} {leaves} in the picture "
        f"({number(edit['spike'])} times the median, {number(origin['spike'])} as the model is)"
        if origin["spiked"]
        else f"W{what} is moved to {added}"
    )
    if edit["weight"] is not None and registers["weight"] is not None:
        text += (
            f"; the {'register takes' if one else 'registers take'} {number(registers['weight'], 2)} of the attention of these "
            f"heads, and the place keeps {number(edit['weight'], 2)} of {number(origin['weight'], 2)}"
        )
    if edit["loss"] is not None:
        text += f"; the loss changes by {_bounds(edit['loss'])}"
    if registers["divergence"] is not None and registers["silenced"] is not None:
        text += (
            f". The KL divergence from the classes of the model as it is is {_positive(registers['divergence'])} nats, and "
            f"{_positive(registers['silenced'])} with {it} silenced"
        )
    return f"{text}."


def _edit(origin: OriginFound, on: str, name: str) -> OriginEdit | None:
    return next((edit for edit in origin["edits"] if (edit["on"], edit["edit"]) == (on, name)), None)


def _sublayer(origin: OriginFound) -> str:
    return _SUBLAYERS[str(origin["sublayer"])]


def _times(value: float) -> str:
    return f"{number(value)} times"


def _percents(interval: Difference) -> str:
    ends = "" if interval["low"] is None else f" [{100 * interval['low']:z.0f}, {100 * (interval['high'] or 0.0):z.0f}]"
    return f"{100 * interval['mean']:z.0f}{ends} %".replace("-", "\u2212")


def _bounds(interval: Difference, places: int = 4) -> str:
    low, high = interval["low"], interval["high"]
    ends = "" if low is None or high is None else f" [{low:+z.{places}f}, {high:+z.{places}f}]"
    return f"{interval['mean']:+z.{places}f}{ends}".replace("-", "\u2212")


def _positive(interval: Difference) -> str:
    ends = "" if interval["low"] is None else f" [{max(interval['low'], 0.0):.4f}, {interval['high']:.4f}]"
    return f"{interval['mean']:.4f}{ends}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
