"""What the positions of a model of pictures or of sound are: class tokens, registers, patches with row and column, frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend

__all__ = ["REGISTERS", "Positions", "grid_of", "positions_of"]

REGISTERS = "_added_registers"
"""Attribute of a model: how many tokens :func:`~sinklab.models.registers.add_registers` has added to it."""


@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of self-attention.

    Attributes:
        names: of each; ``None`` where modules differ in how many they have, or the configuration does not account for them.
        grid: rows and columns of the patches, which come last; ``None`` where there are none, or windows of them.
    """

    names: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None


class _Lengths(Watcher):
    """How many rows a call has, and how many positions, for the self-attention of one sample."""

    name, needs = "lengths", frozenset({"mass"})

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self":
            self.seen.add((len(call.queries), call.q_len, call.kv_len))


@torch.no_grad()
def positions_of(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Positions:
    """The positions that a model gives its input, from its configuration, checked against what one sample shows.

    Args:
        arguments: of the forward, one sample.
    """
    lengths = _Lengths()
    with attend(model, [lengths]):
        model(**arguments)
    sizes = {(length, keys) for _, length, keys in lengths.seen}
    if len(sizes) != 1:
        return Positions()
    ((length, keys),) = sizes
    if length != keys:
        return Positions()
    if any(
        rows > 1 for rows, _, _ in lengths.seen
    ):  # the windows of a picture stand in the batch: a position is one inside its window
        edge = round(length**0.5)
        square = edge * edge == length
        inside = [f"({row}, {column})" for row in range(edge) for column in range(edge)] if square else range(length)
        return Positions(tuple(f"place {place} of a window" for place in inside))
    grid = grid_of(model, arguments)
    if grid is None:
        return Positions(tuple(f"frame {frame}" for frame in range(length)) if "pixel_values" not in arguments else None)
    front = _front(model, length - grid[0] * grid[1])
    return Positions() if front is None else Positions((*front, *_patches(*grid)), grid)


def grid_of(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns of patches; of spectrograms, frequencies and times."""
    config = model.config
    size = getattr(config, "patch_size", None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return None
    if "pixel_values" in arguments:
        height, width = arguments["pixel_values"].shape[-2:]
        return height // size[0], width // size[1]
    steps = getattr(config, "frequency_stride", None), getattr(config, "time_stride", None)
    values = arguments.get("input_values")
    if values is None or values.ndim != 3 or steps[0] is None or steps[1] is None:
        return None
    times, frequencies = values.shape[1:]
    return (frequencies - size[0]) // steps[0] + 1, (times - size[1]) // steps[1] + 1


def _front(model: PreTrainedModel, number: int) -> tuple[str, ...] | None:
    """Names of the tokens before the patches; ``None`` where the configuration does not account for their number."""
    registers = int(getattr(model.config, "num_register_tokens", 0) or 0) + int(getattr(model, REGISTERS, 0))
    own = {0: (), 1: ("[CLS]",), 2: ("[CLS]", "[DIST]")}.get(number - registers)
    return None if own is None else (*own, *(f"register {register}" for register in range(registers)))


def _patches(rows: int, columns: int) -> list[str]:
    """``patch (row, column)`` from the top left; those at the corners are called so."""
    ends = {0, rows - 1}, {0, columns - 1}
    corners = rows > 2 and columns > 2
    return [
        f"{'corner ' if corners and row in ends[0] and column in ends[1] else ''}patch ({row}, {column})"
        for row in range(rows)
        for column in range(columns)
    ]
