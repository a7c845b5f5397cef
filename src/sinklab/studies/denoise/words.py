"""What a denoising shows in words: rates, changes, places and the price of the strongest sink, as far as the numbers go."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from sinklab.models.positions import length_warning
from sinklab.results.naming import counted
from sinklab.results.summaries.denoise import DenoiseSummary, DenoisingStep, SinkCost
from sinklab.results.summaries.shared import Difference

__all__ = ["notes_on", "sentences"]

LEAST = 0.001
"""Nats per masked token that are printed, below which a difference is none, however sure it is."""


def sentences(summary: DenoiseSummary, threshold: float) -> str:
    """The finding, in a few sentences."""
    states = summary["by_step"]
    first, last = states[0], states[-1]
    if not any(state["sink_rate"] for state in states):
        return f"No head has a sink in any state: no key has more than {threshold:g} of a row on average."
    parts = [
        f"Of {counted(summary['heads'], 'head')}, {first['sink_rate']:.1f} % have a sink where {first['masked']:.0f} % of the "
        f"tokens are masked, and {last['sink_rate']:.1f} % in the whole text{_highest(states)}."
    ]
    moves, vanishes = summary["moves"], summary["vanishes"]
    if moves is None:
        parts.append("No head has a sink in two states that follow each other.")
    else:
        parts.append(
            f"Where a head has one before and after a step, it is on another position in {_percent(moves)} of the cases"
            + ("." if vanishes is None else f"; in {_percent(vanishes)} of the steps from a sink there is none after it.")
        )
    if (where := _where(states)) is not None:
        parts.append(where)
    if summary["cost"] is not None:
        parts.append(_price(summary["cost"]))
    return " ".join(parts)


def notes_on(model: PreTrainedModel, summary: DenoiseSummary, threshold: float) -> list[str]:
    """What a reader must know of these numbers, a sentence each."""
    length = summary["positions"]
    guess = math.log(model.get_input_embeddings().weight.shape[0])
    scored = {state["masked"]: state["loss"] for state in summary["by_step"] if state["loss"] is not None}
    lost = [masked for masked, loss in scored.items() if loss > guess]
    notes = [sentence for sentence in [length_warning(model, length)] if sentence]
    if 1 / length >= threshold:
        notes.append(
            f"A head that looks at all {length} keys alike gives each {1 / length:.3g} of its rows, which is no less than the "
            f"threshold of {threshold:g}: take longer texts or a higher one."
        )
    if lost and all(masked in lost for masked in scored if masked >= min(lost)):
        notes.append(
            f"With {min(lost):.0f} % of the tokens masked and more the loss is above that of a guess among all tokens, "
            f"{guess:.2f} nats: the model was not trained on texts with so many gaps, or not on such text."
        )
    elif lost:
        least, most = f"{min(lost):.0f}", f"{max(lost):.0f}"
        masked = least if least == most else f"{least} to {most}"
        notes.append(
            f"In {len(lost)} of {len(scored)} states with gaps, with {masked} % of the tokens masked, the loss is above that "
            f"of a guess among all tokens, {guess:.2f} nats, and in the others it is not: the gaps that are left there may be "
            "the hardest, or the model was not trained on such text."
        )
    return notes


def _highest(states: Sequence[DenoisingStep]) -> str:
    """Where it is highest, if that is neither at the start nor at the end."""
    highest = max(states, key=lambda state: state["sink_rate"])
    if highest["sink_rate"] <= max(states[0]["sink_rate"], states[-1]["sink_rate"]):
        return ""
    return f"; most, {highest['sink_rate']:.1f} %, where {highest['masked']:.0f} % are masked"


def _where(states: Sequence[DenoisingStep]) -> str | None:
    """On what sinks stand, over all states by their number of sinks."""
    having = [state for state in states if state["on_special"] is not None]
    number = sum(state["sinks"] for state in having)
    if not number:
        return None
    special, masked, text = (
        sum((state[name] or 0.0) * state["sinks"] for state in having) / number
        for name in ("on_special", "on_masked", "on_text")
    )
    return (
        f"Of the sinks {special:.0f} % stand on special tokens or the prompt, {masked:.0f} % on masked tokens, and "
        f"{text:.0f} % on text that was filled in."
    )


def _price(cost: SinkCost) -> str:
    """What hiding the strongest sink costs, and which costs more, where there are other keys of as much mass."""
    hidden, control, difference = cost["hidden"], cost["control"], cost["difference"]
    says = f"Hidden from every head, the strongest sink of a text costs {_nats(hidden)} per masked token, and "
    mass, control_mass = f"{cost['mass']:.3f}", f"{cost['control_mass']:.3f}"
    if float(control_mass) < float(mass):
        # With more than half of the mass on the sink, all other keys were hidden at once, which says nothing of a key like it.
        return (
            f"{says}other keys {_nats(control)}, which all together have less mass, {control_mass} of a row against {mass}: "
            "there are none to compare the sink with."
        )
    says += f"other keys of as much mass {_nats(control)}"
    if difference["low"] is None or difference["high"] is None:
        return f"{says}."
    if difference["low"] > -LEAST and difference["high"] < LEAST:
        return f"{says}: they differ by less than {LEAST:g} nats."
    if difference["high"] < 0:
        return f"{says}: the sink is worth less."
    if difference["low"] > 0:
        return f"{says}: the sink is worth more."
    return f"{says}: which of them costs more is open."


def _percent(share: Difference) -> str:
    if share["low"] is None or share["high"] is None:
        return f"{share['mean']:.1f} %"
    return f"{share['mean']:.1f} [{share['low']:.1f}, {share['high']:.1f}] %"


def _nats(value: Difference) -> str:
    if value["low"] is None or value["high"] is None:
        return f"{value['mean']:z.3f} nats"
    return f"{value['mean']:z.3f} [{value['low']:z.3f}, {value['high']:z.3f}] nats"
