"""Quantisation in a figure: loss by scheme, the gap of each site, and what each cure leaves, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.results.file import write_image
from sinklab.results.summaries.quantize import QuantizeSummary, SchemeEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["quantize_figure", "scheme_name", "write_quantize_plot"]

COLOURS = {"gap": "#d55e00", "none": "#009e73", "not measurable": "#8c959f"}
"""Of Okabe and Ito, and grey."""

SITES = 24
"""Sites that are drawn, the most costly ones."""


def scheme_name(scheme: SchemeEntry) -> str:
    """``W8A8``, ``W8A8 per token``."""
    return f"{scheme['scheme'].upper()}{' per token' if scheme['per_token'] else ''}"


def write_quantize_plot(summary: QuantizeSummary, path: Path) -> None:
    """Draw ``summary.json`` of ``sinklab quantize`` to ``path``; the suffix decides the format."""
    write_image(quantize_figure(summary), path)


def quantize_figure(summary: QuantizeSummary) -> Figure:
    """Bars of schemes; and of sites and cures, where there is a gap to be carried and cured."""
    from matplotlib.figure import Figure

    sites = sorted(summary["sites"], key=lambda site: -site["gap"])[:SITES]
    cures = sorted(summary["cures"], key=lambda cure: -cure["left"]["mean"])
    base = next(entry for entry in summary["schemes"] if entry["scheme"] == summary["examined"] and not entry["per_token"])
    panels = [(len(summary["schemes"]), 1), *([(len(sites), 2), (len(cures) + 1, 3)] if sites else [])]
    rows = max(count for count, _ in panels)
    figure = Figure(figsize=(4.6 * len(panels), 1.4 + 0.26 * rows), layout="constrained", dpi=130)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    unit = summary["unit"]
    _bars(
        axes[0], [scheme_name(entry) for entry in summary["schemes"]],
        [(entry["gap"], entry["low"], entry["high"]) for entry in summary["schemes"]],
        [COLOURS[entry["verdict"]] for entry in summary["schemes"]],
    )  # fmt: skip
    axes[0].set_title(f"Gap by scheme, on {summary['clean_loss']['mean']:.3f} {unit}", fontsize=9)
    if sites:
        _bars(
            axes[1], [_short(entry["site"]) for entry in sites],
            [(entry["gap"], entry["low"], entry["high"]) for entry in sites],
            [COLOURS["gap" if entry["low"] > 0 else "not measurable"] for entry in sites],
        )  # fmt: skip
        axes[1].set_title("Gap of one site alone", fontsize=9)
        _bars(
            axes[2], ["no cure", *(cure["cure"] for cure in cures)],
            [(base["gap"], base["low"], base["high"])]
            + [(cure["left"]["mean"], cure["left"]["low"], cure["left"]["high"]) for cure in cures],
            [COLOURS["gap"]]
            + [_colour(cure["left"], summary["minimal_effect"]) for cure in cures],
        )  # fmt: skip
        axes[2].set_title(f"Gap that is left under {summary['examined'].upper()}", fontsize=9)
    for panel in axes:
        panel.set_xlabel(f"{unit} above the loss without quantisation", fontsize=8)
        panel.axvline(summary["minimal_effect"], color="#57606a", linewidth=0.6, linestyle=":")
        panel.tick_params(labelsize=7.5)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _colour(left: dict[str, float], minimal_effect: float) -> str:
    """Of what a cure leaves, as of a gap."""
    if left["high"] <= minimal_effect:
        return COLOURS["none"]
    return COLOURS["gap" if left["low"] > 0 else "not measurable"]


def _bars(axes: Axes, names: list[str], values: list[tuple[float, float, float]], colours: list[str]) -> None:
    positions = list(range(len(names)))
    means = [mean for mean, _, _ in values]
    errors = [[max(0.0, mean - low) for mean, low, _ in values], [max(0.0, high - mean) for mean, _, high in values]]
    axes.barh(positions, means, xerr=errors, color=colours, height=0.7, error_kw={"elinewidth": 0.8, "ecolor": "#24292f"})
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#24292f", linewidth=0.6)


def _short(name: str) -> str:
    """The last four parts of a qualified name."""
    return ".".join(name.split(".")[-4:])
