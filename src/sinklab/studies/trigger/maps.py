"""Pictures of attention maps on the trigger task: the mean over sequences, and the standard deviation, head by head."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sinklab.results.file import write_image
from sinklab.studies.trigger.evaluation import TriggerNumbers

__all__ = ["write_maps"]


def write_maps(numbers: TriggerNumbers, caption: str, path: Path) -> None:
    """Draw the maps of one model: a row for every layer; mean of every head on the left, standard deviation on the right.

    Args:
        path: its suffix decides the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers, heads = numbers.mean.shape[:2]
    figure = Figure(figsize=(2.6 * 2 * heads + 0.6, 2.5 * layers + 0.5), layout="constrained", dpi=110)
    figure.suptitle(caption, fontsize=9)
    visible = np.tril(np.ones(numbers.mean.shape[2:], dtype=bool))
    for side, (name, maps) in enumerate((("mean", numbers.mean), ("std", numbers.std))):
        shown = maps.cpu().numpy()
        # Weights that are no probabilities may pass 1 or be negative; one scale for all heads, so that they can be compared.
        largest = max(1.0 if side == 0 else 0.0, float(np.nanmax(np.abs(shown), initial=0.05)))
        low = -largest if float(np.nanmin(shown, initial=0.0)) < 0 else 0.0
        axes = [
            [figure.add_subplot(layers, 2 * heads, 2 * heads * row + heads * side + column + 1) for column in range(heads)]
            for row in range(layers)
        ]
        for layer, row in enumerate(axes):
            for head, panel in enumerate(row):
                cells = np.where(visible, shown[layer, head], np.nan)
                image = panel.imshow(cells, cmap="RdBu" if low else "viridis", vmin=low, vmax=largest)
                panel.set_title(name if layers * heads == 1 else f"{name}, layer {layer} head {head}", fontsize=8)
                panel.tick_params(labelsize=6)
                for axis in (panel.xaxis, panel.yaxis):
                    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
                panel.set_xlabel("key", fontsize=7)
                panel.set_ylabel("query", fontsize=7)
        figure.colorbar(image, ax=[panel for row in axes for panel in row], fraction=0.05).ax.tick_params(labelsize=6)
    write_image(figure, path)
