"""What is shown of a fold: what it costs, where it fits, and what was left alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sinklab.results.blocks import Block, Curves, Facts, Grid, Heading, HeadMap, Say, counted, interval, number
from sinklab.results.sections import from_json
from sinklab.studies.fold.found import Folding

TITLE = "The sink, folded"
LEAD = (
    "The key on which heads rest is hidden, and each head has a score and a value for nothing in its place: constants of the "
    "model, fitted without training. The hidden states of the sink itself stay what they were."
)


def show(found: Folding) -> Iterator[Block]:
    """The finding, what stands in the place of the sinks and its loss, and the heads."""
    yield Say(found.text)
    if not found.heads:
        for note in found.notes:
            yield Say(note, small=True)
        return
    judged = found.loss is not None
    yield Grid(
        ["In the place of the sinks", "Score", "Value", "Loss", "Change, nats" if judged else "Change of the output", "Saved"],
        [
            [form.name, form.score, form.value, form.loss, interval(form.change), "yes" if form.chosen else ""]
            for form in found.forms
        ],
        text=3,
    )
    if found.silenced:
        yield Heading("Neurons that make it stand out", 3)
        yield Grid(
            ["Module", "Neurons", "Change without them, nats", "At the sinks themselves", "Silenced"],
            [
                [one.module, ", ".join(map(str, one.units)), interval(one.change), one.at_sinks, "yes" if one.kept else "no"]
                for one in found.silenced
            ],
            text=2,
        )
    if found.largest:
        yield Facts([("largest input of a linear map", ", ".join(f"{name} {number(v)}" for name, v in found.largest.items()))])
    yield Curves("Loss behind each token", found.curves, [float(place) for place in found.places], "token", "nats")
    cells, counts = dict[tuple[int, int], tuple[str, str, str]](), dict.fromkeys(("folded", "rests", "none"), 0)
    for head in found.heads:
        kind, letter = ("folded", "F") if head.folded else ("rests", "L") if head.rests else ("none", "·")
        counts[kind] += 1
        words = f"{head.layer}.{head.head}: R² {number(head.explained)}, weight {number(head.weight)} ± {number(head.error)}"
        cells[head.layer, head.head] = letter, kind, words
    legend = [
        ("folded", "F", counts["folded"], "constants in the place of its sink"),
        ("rests", "L", counts["rests"], "on a sink, and is left alone"),
        ("none", "·", counts["none"], "does not rest on one"),
    ]
    yield HeadMap("Which heads are folded", cells, legend)
    yield Grid(
        ["Head", "Folded", "R²", "Weight", "error", "Mean score", "Value, norm", "spread"],
        [
            [
                f"{head.layer}.{head.head}", "yes" if head.folded else "", head.explained, head.weight, head.error, head.score,
                head.value_norm, head.value_spread,
            ]
            for head in found.heads
        ],
        "Every head", folded=True, text=2,
    )  # fmt: skip
    for line in found.left_alone:
        yield Say(line)
    for note in found.notes:
        yield Say(note, small=True)
    yield Say(
        f"Constants from {counted(found.calibration, 'sample')} of {found.seq_len} tokens, judged on {found.samples} others: "
        f"change of the {'loss' if judged else 'output (distance over norm)'} with 95 % interval over samples. "
        "Score linear: in the query before rotation. R²: of the scores of the sinks. "
        "Weight: on the sinks, over the queries that see them; error: mean distance of the weight on nothing from it. Spread: "
        "root mean square distance of single samples' values from the constant one, as a share of its norm.", small=True,
    )  # fmt: skip


def blocks(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The blocks of a summary."""
    return show(from_json(Folding, summary, "summary.json"))


def write_page(folder: Path) -> Path:
    """``folder/report.html`` of a run of ``sinklab fold``, from its ``summary.json`` and ``run.json``."""
    from sinklab.report.page import write_blocks_page

    return write_blocks_page(folder, TITLE, LEAD, blocks)
