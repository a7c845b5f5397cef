"""The figure of a denoising: rates by state, and where the attention of a few texts goes from masked to whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.results.file import write_image

if TYPE_CHECKING:
    from sinklab.studies.denoise.measurement import Followed

__all__ = ["NAME", "Figure"]

NAME = "denoising.png"

BLUE, ORANGE, GREY = "#4269d0", "#ff725c", "#8a8a8a"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Writes the figure into the folder that it is given.

    Args:
        followed: what was found.
        title: model and corpus.
        threshold: of a sink.
    """

    followed: Followed
    title: str
    threshold: float

    def __call__(self, folder: Path) -> None:
        from matplotlib.figure import Figure as Canvas

        states = self.followed.summary["by_step"]
        shares, masked = self.followed.shown
        canvas = Canvas(figsize=(11.0, 3.2 + 1.9 * ((len(shares) + 1) // 2)), layout="constrained", dpi=120)
        top, below = canvas.subfigures(2, 1, height_ratios=[3.0, 1.9 * ((len(shares) + 1) // 2)], squeeze=False)[:, 0]
        top.suptitle(self.title, fontsize=10)
        rates, turns = top.subplots(1, 2)
        steps = [state["step"] for state in states]
        rates.plot(steps, [state["sink_rate"] for state in states], color=BLUE, marker="o", markersize=3)
        rates.set_ylabel("heads with a sink (%)", fontsize=8)
        rates.set_ylim(bottom=0)
        for name, label, colour in (
            ("moves", "moves, of those that have one after it, too", ORANGE),
            ("vanishes", "vanishes", GREY),
        ):
            values = [float("nan") if (value := state[name]) is None else value for state in states]  # type: ignore[literal-required]
            turns.plot(steps, values, color=colour, marker="o", markersize=3, label=label)
        turns.set_ylabel("of the heads with a sink before a step (%)", fontsize=8)
        turns.set_ylim(-3, 103)
        turns.legend(fontsize=8, frameon=False)
        for panel in (rates, turns):
            panel.set_xlabel("steps taken", fontsize=8)
            panel.tick_params(labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
        panels = below.subplots(-(-len(shares) // 2), min(2, len(shares)), squeeze=False, sharex=True, sharey=True).flatten()
        for number, (panel, of_text, hidden) in enumerate(zip(panels, shares.numpy(), masked.numpy(), strict=False)):
            image = panel.imshow(
                of_text, aspect="auto", cmap="magma_r", vmin=0, vmax=max(2 * self.threshold, 0.05), origin="upper"
            )
            where = hidden.nonzero()
            panel.plot(where[1], where[0], ".", color=GREY, markersize=1.5)
            panel.set_title(f"text {number}", fontsize=8)
            panel.tick_params(labelsize=8)
        for panel in panels[len(shares) :]:
            panel.set_visible(False)
        below.supxlabel("position (grey dots: masked)", fontsize=8)
        below.supylabel("steps taken", fontsize=8)
        bar = below.colorbar(image, ax=list(panels))
        bar.set_label("largest share over heads", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        write_image(canvas, folder / NAME)
