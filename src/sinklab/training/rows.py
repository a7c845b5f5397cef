"""Rows of tokens, cut from a stream of documents by explicit rules and changed where an experiment asks for it.

What row ``i`` holds depends on the settings and on ``i`` alone: not on workers, processes, epochs or what was read before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sinklab.training.token_cache import TokenStream

__all__ = ["RandomPositions", "RowDataset", "kept_rows"]

KEPT, DRAWN = 0, 1
"""What a draw is for; keeps the draws of one seed apart."""


def kept_rows(total: int, fraction: float, seed: int) -> np.ndarray:
    """Numbers of a share of the rows, int64, ascending: the first ones of a permutation, so that a smaller share of the same
    seed is part of a larger one."""
    if fraction == 1.0:
        return np.arange(total, dtype=np.int64)
    order = np.random.default_rng((seed, KEPT)).permutation(total)
    return np.sort(order[: round(total * fraction)])


class RandomPositions(NamedTuple):
    """Positions ``start`` to ``stop - 1`` hold tokens drawn uniformly from ``ids`` (Gu et al. 2024, arXiv 2410.10781, 4).

    A draw depends on the seed and on the row's number in the stream: a row is the same in every epoch and in every subset.
    """

    start: int
    stop: int
    ids: np.ndarray
    seed: int

    def draw(self, number: int) -> np.ndarray:
        """The tokens of one row, ``(stop - start,)``."""
        generator = np.random.default_rng((self.seed, DRAWN, number))
        return self.ids[generator.integers(len(self.ids), size=self.stop - self.start)]


class RowDataset(Dataset):
    """Rows cut from a stream of documents, map-style.

    Row ``i`` is ``{"input_ids", "labels"}``, int64 ``(context,)``; with ``isolated`` also ``"position_ids"``, which begin at 0
    again where a document begins. Labels are the ids themselves, for a model that shifts them; with ``isolated`` the first
    token of a document that begins inside the row is -100, because nothing that it may see predicts it.

    Args:
        stream: the documents.
        numbers: which of the stream's rows, int64 ``(rows,)``; row ``n`` begins at token ``n × content``.
        context: tokens of a row.
        bos: id in front of every row, which then holds ``content = context - 1`` tokens of the stream; or ``None``.
        isolated: give position ids.
        random: positions that hold random tokens.
        fixed: position and id of a token that every row holds.
    """

    def __init__(
        self,
        stream: TokenStream,
        numbers: np.ndarray,
        *,
        context: int,
        bos: int | None = None,
        isolated: bool = False,
        random: RandomPositions | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        self.stream, self.numbers, self.context, self.bos = stream, numbers, context, bos
        self.isolated, self.random, self.fixed = isolated, random, fixed
        self.content = context - (bos is not None)
        self._tokens, self._starts = stream.tokens(), stream.starts()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = int(self.numbers[index])
        begin = number * self.content
        row = self._tokens[begin : begin + self.content].astype(np.int64)
        if self.bos is not None:
            row = np.concatenate(([self.bos], row))
        if self.random is not None:
            row[self.random.start : self.random.stop] = self.random.draw(number)
        if self.fixed is not None:
            position, token = self.fixed
            row[position] = token
        labels = row.copy()
        if not self.isolated:
            return {"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(labels)}
        inside = np.searchsorted(self._starts, (begin + 1, begin + self.content))
        starts = self._starts[slice(*inside)] - begin + (self.context - self.content)
        labels[starts] = -100
        first = np.zeros(self.context, dtype=np.int64)  # where the document of each token begins
        first[starts] = starts
        positions = np.arange(self.context) - np.maximum.accumulate(first)
        return {
            "input_ids": torch.from_numpy(row),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def leading(self, index: int, length: int, front: int | None, bos: int | None) -> Tensor:
        """The first tokens of a row's text behind ``front`` (or nothing), int64 ``(length,)``; only the fixed token is put in.

        A ``bos`` that the stream has at that place is left out, so that ``front`` is not doubled or smuggled in.
        """
        begin = int(self.numbers[index]) * self.content
        row = self._tokens[begin : begin + length + 1].astype(np.int64)
        row = row[int(row[0] == bos) :]
        row = (row if front is None else np.concatenate(([front], row)))[:length]
        if self.fixed is not None and self.fixed[0] < length:
            row[self.fixed[0]] = self.fixed[1]
        return torch.from_numpy(row)

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled with all that it maps.
        return {name: value for name, value in vars(self).items() if name not in ("_tokens", "_starts")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._tokens, self._starts = self.stream.tokens(), self.stream.starts()
