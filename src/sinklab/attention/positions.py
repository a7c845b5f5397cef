"""Where a query or key stands: position inside its document, and which document of its row; padding is -1."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinklab.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """int64 ``(batch, length)`` each: 0-based position inside the document, running number of the document; -1 for padding."""

    positions: Tensor
    documents: Tensor

    @staticmethod
    def plain(batch: int, length: int, device: torch.device, start: int = 0) -> Positions:
        """One document a row, no padding; kept, since every layer asks for the same."""
        return _plain(batch, length, device, start, torch.is_inference_mode_enabled())

    @staticmethod
    def counted(tokens: Tensor, start: int, length: int, device: torch.device) -> Positions:
        """Of ``length`` tokens from index ``start`` on, counted from the first real token of each row.

        Args:
            tokens: boolean ``(batch, total)``, false for padding.
        """
        tokens = tokens.to(device)
        counted = torch.where(tokens, torch.cumsum(tokens, dim=1) - 1, -1)[:, start : start + length]
        # A static cache is longer than what has been written to it; what is not written yet is not a token.
        counted = nn.functional.pad(counted, (0, length - counted.shape[1]), value=-1)
        return Positions(counted, torch.where(counted >= 0, 0, -1))

    def padded(self, number: int) -> Positions:
        """The same with so many more behind that are no tokens: they stand at no position of the first document."""
        if not number:
            return self
        return Positions(
            nn.functional.pad(self.positions, (0, number), value=-1), nn.functional.pad(self.documents, (0, number), value=0)
        )

    def without(self, tokens: Tensor) -> Positions:
        """The same with padding where ``tokens``, boolean ``(batch, length)``, is false."""
        return Positions(self.positions.masked_fill(~tokens, -1), self.documents.masked_fill(~tokens, -1))


def rows_of(arguments: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of the arguments of a forward; of the pictures among texts, one behind the other, those of the rows.

    Raises:
        InputError: some of the rows, where pictures have several sizes.
    """
    number = len(arguments.get("input_ids", next(iter(arguments.values()))))
    if torch.equal(rows, torch.arange(number)):
        return dict(arguments)
    if (sizes := arguments.get("image_grid_thw")) is not None and len(sizes.unique(dim=0)) > 1:
        raise InputError(f"pictures of several sizes go into one forward: {number} samples at once, or pictures of one size")
    taken = {name: tensor.unflatten(0, (number, -1))[rows.to(tensor.device)] for name, tensor in arguments.items()}
    return {name: tensor.flatten(0, 1) for name, tensor in taken.items()}


@functools.lru_cache(maxsize=8)
def _plain(batch: int, length: int, device: torch.device, start: int, inference: bool) -> Positions:
    row = torch.arange(start, start + length, device=device)
    return Positions(row.expand(batch, length), torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, length))


def by_position(values: Tensor, positions: Tensor) -> Tensor:
    """Sum over batch rows and documents of what sits at the same position; float64 ``(heads, last position + 1)``, on the CPU.

    Args:
        values: ``(batch, heads, length)``.
        positions: int64 ``(batch, length)``; -1 marks padding, which is left out whatever its value.
    """
    positions = positions.cpu()
    # To the CPU first: some devices have no float64.
    values = values.detach().cpu().double().masked_fill(positions[:, None] < 0, 0.0)
    size = int(positions.max()) + 1 if positions.numel() else 0
    sums = values.new_zeros(values.shape[1], max(size, 0))
    if size > 0:
        sums.index_add_(1, positions.clamp(min=0).flatten(), values.transpose(0, 1).flatten(1))
    return sums
