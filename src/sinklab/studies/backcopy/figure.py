"""The figure of the bigram-backcopy lab: loss above the floor and the metrics of extreme tokens over training, by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.results.file import write_image

__all__ = ["write_figure"]

COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#9c6b4e", "#9498a0")
LEAST_EXCESS = 1e-4
"""Nats; below it a logarithmic axis shows noise."""

CURVES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]] = {
    "excess loss at triggers (nats)": lambda point, head: _floored(point["trigger_excess"]),
    "excess loss elsewhere (nats)": lambda point, head: _floored(point["other_excess"]),
    "weight on BOS, no trigger": lambda point, head: head["bos_weight"],
    "weight of triggers on the token before": lambda point, head: head["previous_weight_trigger"],
    "value norm, BOS / others": lambda point, head: head["value_ratio"],
    "largest residual norm, BOS / others": lambda point, head: _largest(point),
}
"""By title of the panel, the number that it shows, from a point of a curve and the entry of the copying head there."""


def write_figure(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the runs: a colour for what was trained, thin lines for its seeds; numbers by head are those of the copying head.

    Args:
        runs: records of :func:`~sinklab.studies.backcopy.lab.run_backcopy`.
        path: its suffix decides the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 6.2), layout="constrained", dpi=120)
    panels = figure.subplots(2, 3).flatten()
    kinds = list(dict.fromkeys(_kind(run) for run in runs))
    for run in runs:
        style = _style(kinds.index(_kind(run)))
        steps = [point["step"] for point in run["curve"]]
        heads = [_copying(point, run) for point in run["curve"]]
        for panel, value_at in zip(panels, CURVES.values(), strict=True):
            values = [value_at(point, head) for point, head in zip(run["curve"], heads, strict=True)]
            panel.plot(steps, [float("nan") if value is None else value for value in values], **style)
    last_step = max(1, *(run["steps"] for run in runs))
    for panel, title in zip(panels, CURVES, strict=True):
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        _set_root_scale(panel, last_step)
    for panel in panels[3:]:
        panel.set_xlabel("step", fontsize=8)
    for number in (0, 1, 5):
        panels[number].set_yscale("log")
    for number in (2, 3):
        panels[number].set_ylim(-0.02, max(1.02, panels[number].get_ylim()[1]))
    panels[4].set_ylim(bottom=0)
    panels[4].axhline(1, color="0.7", linewidth=0.8)
    panels[5].axhline(1, color="0.7", linewidth=0.8)
    for number, name in enumerate(kinds):
        panels[0].plot([], [], label=name, **_style(number))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    write_image(figure, path)


def _set_root_scale(panel: Any, last_step: int) -> None:
    """Draw the root of the step: what happens happens early, and growth that goes on must be seen too."""
    panel.set_xscale("function", functions=(_root, _square))
    panel.set_xlim(0, last_step)
    panel.set_xticks(
        [last_step * (number / 4) ** 2 for number in range(5)], [f"{last_step * number**2 // 16:,}" for number in range(5)]
    )


def _kind(run: Mapping[str, Any]) -> str:
    layers = f"{run['layers']} layer{'s' if run['layers'] > 1 else ''}"
    out = "".join(
        f", no {name} in {', '.join(map(str, run[field]))}"
        for field, name in (("no_attention", "attention"), ("no_feed_forward", "feed-forward"))
        if run[field]
    )
    return f"{run['operation']}, {run['optimizer']}, {layers}{out}"


def _style(number: int) -> dict[str, object]:
    dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes, "linewidth": 1.1}


def _copying(point: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, Any]:
    layer, head = run["copy_head"]
    return next(entry for entry in point["by_head"] if (entry["layer"], entry["head"]) == (layer, head))


def _largest(point: Mapping[str, Any]) -> float | None:
    ratios = [entry["residual_ratio"] for entry in point["by_layer"] if entry["layer"] >= 0]
    return None if None in ratios else max(ratios)


def _floored(value: float | None) -> float | None:
    return None if value is None else max(value, LEAST_EXCESS)


def _root(steps: Any) -> Any:
    import numpy as np

    return np.sqrt(np.maximum(steps, 0))


def _square(roots: Any) -> Any:
    return roots**2
