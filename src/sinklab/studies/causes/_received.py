"""Attention received: mean shares of rows by position and by token, and where they are largest."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.intervention import Place
from sinklab.attention.probe import Watcher
from sinklab.sinks import Head
from sinklab.studies.causes._runs import heads_of, ids_by_position, most_frequent, row_shares
from sinklab.studies.causes.samples import Samples

__all__ = ["Module", "Received", "Strong", "Sums"]


@dataclasses.dataclass(frozen=True)
class Strong:
    """A key position, or a token wherever it stands, and the head that gives it most.

    Attributes:
        weight: mean share of a row, over texts and the queries that see the key and are not it.
        token: most frequent id at the position, or the id itself; ``None`` without ``input_ids``.
        position: ``None`` for a token wherever it stands.
    """

    weight: float
    head: Head
    token: int | None
    position: int | None


@dataclasses.dataclass(frozen=True)
class Module:
    """Of one attention module and batch, in float64: shares that keys get and how many queries gave them ``(batch, heads,
    kv_len)``, positions of the keys ``(batch, kv_len)``, the sum of the null mass ``(heads,)`` and its queries.
    """

    heads: list[Head]
    sums: Tensor
    counts: Tensor
    positions: Tensor
    null: Tensor
    queries: int


class Received(Watcher):
    """Shares of rows that each key of each sample gets, over the queries that see it and are not it."""

    name, needs = "received", frozenset[str]()

    def __init__(self) -> None:
        self.modules: list[Module] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        shape = (len(call.queries), call.num_heads, call.kv_len)
        sums, counts = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        null = torch.zeros(call.num_heads, dtype=torch.float64)
        for rows in row_shares(call):
            sums += rows.weights.masked_fill(~rows.seen, 0.0).sum(2).cpu()
            counts += rows.seen.sum(2).expand(shape).cpu()
            null += rows.null.masked_fill(~rows.counted[:, None], 0.0).sum((0, 2)).cpu()
        heads = heads_of(call.site, call.num_heads)
        self.modules.append(Module(heads, sums, counts, call.key_positions.cpu(), null, int(call.counted.sum())))


class Sums:
    """Sums over all batches by position and by token, each ``(heads, …)``.

    Attributes:
        front: learned tokens in front of the texts, which have positions and no ids.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, tokens = samples, samples.inputs.get("input_ids")
        self.ids = None if tokens is None else tokens.cpu()
        self.known = torch.zeros(0, dtype=torch.int64) if self.ids is None else self.ids.unique()
        self.heads: list[Head] = []
        self.front = 0
        self._at = [np.zeros((0, 0))] * 2
        self._of = [np.zeros((0, 0))] * 2
        self._null, self._queries = np.zeros(0), np.zeros(0)
        self._texts = 0

    def add(self, start: int, modules: list[Module]) -> None:
        """Add one batch."""
        self.heads = [head for module in modules for head in module.heads]
        size = max(int(module.positions.max()) for module in modules) + 1
        text_len = 0 if self.ids is None else self.ids.shape[1]
        # Modules of an encoder-decoder may be about other tokens than these; they are then shorter or longer by much.
        self.front = max(0, modules[0].sums.shape[2] - text_len) if text_len else 0
        for kind in (0, 1):
            at, of = [], []
            for module in modules:
                values = (module.sums, module.counts)[kind].masked_fill((module.positions < 0)[:, None], 0.0)
                at.append(_scattered(values, module.positions.clamp_min(0), size))
                of.append(np.zeros((len(module.heads), len(self.known))))
                if self.ids is not None and values.shape[2] == text_len + self.front:
                    own = torch.searchsorted(self.known, self.ids[start : start + len(values)].contiguous())
                    later = values[:, :, self.front :].masked_fill((module.positions[:, self.front :] <= 0)[:, None], 0.0)
                    of[-1] = _scattered(later, own, len(self.known))
            self._at[kind] = _plus(self._at[kind], np.concatenate(at))
            self._of[kind] = _plus(self._of[kind], np.concatenate(of))
        self._null = _plus(self._null, np.concatenate([module.null.numpy() for module in modules]))
        queries = np.concatenate([np.full(len(module.heads), float(module.queries)) for module in modules])
        self._queries = _plus(self._queries, queries)
        self._texts += len(modules[0].sums)

    def at(self, place: object) -> np.ndarray:
        """Mean share on positions, ``(heads,)``; NaN where no query sees them."""
        positions = [position for position in torch.as_tensor(place).flatten().tolist() if position < self._at[0].shape[1]]
        sums, counts = (values[:, positions].sum(1) for values in self._at)
        return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def null(self) -> np.ndarray:
        """Mean null mass, ``(heads,)``."""
        return np.asarray(self._null / self._queries)

    def _means(self) -> np.ndarray:
        """Mean share by head and position, 0 for positions that fewer than an eighth of a text's queries see."""
        sums, counts = self._at
        enough = counts >= max(1, self._texts * sums.shape[1] / 8)
        return np.asarray(np.where(enough, sums / np.maximum(counts, 1), 0.0))

    def positions_above(self, threshold: float, place: Place) -> list[int]:
        """Positions to which a head gives the threshold or more, the place left out."""
        excluded = set() if isinstance(place, str) else set(torch.as_tensor(place).flatten().tolist())
        return [position for position in (self._means().max(0) >= threshold).nonzero()[0].tolist() if position not in excluded]

    def strongest(self, top: int) -> list[Strong]:
        """Positions by the head that gives them most, in falling order."""
        means = self._means()
        best, strongest = means.max(0), []
        ids = ids_by_position(self.samples, self.front)
        for position in np.argsort(-best, kind="stable")[:top].tolist():
            if best[position] > 0:
                token = None if ids is None or position >= ids.shape[1] else most_frequent(ids[:, position])
                strongest.append(Strong(float(best[position]), self.heads[int(means[:, position].argmax())], token, position))
        return strongest

    def tokens(self, top: int) -> list[Strong]:
        """Tokens wherever they stand but at position 0, by the head that gives them most; of those that many queries see."""
        sums, counts = self._of
        if self.ids is None:
            return []
        enough = counts >= max(1, self._texts * self.ids.shape[1] / 8)
        means = np.where(enough, sums / np.maximum(counts, 1), 0.0)
        best = means.max(0)
        return [
            Strong(float(best[index]), self.heads[int(means[:, index].argmax())], int(self.known[index]), None)
            for index in np.argsort(-best, kind="stable")[:top].tolist()
            if best[index] > 0
        ]


def _scattered(values: Tensor, places: Tensor, size: int) -> np.ndarray:
    """Sums of ``(batch, heads, keys)`` by place of the key ``(batch, keys)``: ``(heads, size)``."""
    sums = values.new_zeros(values.shape[1], size)
    return np.asarray(sums.index_add_(1, places.flatten(), values.transpose(0, 1).flatten(1)).numpy())


def _plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Sum of arrays that may have grown along their last axis; an empty one counts as 0."""
    if not left.size:
        return right
    more = right.shape[-1] - left.shape[-1]
    if more:
        pads = [(0, 0)] * (left.ndim - 1)
        left, right = np.pad(left, [*pads, (0, max(more, 0))]), np.pad(right, [*pads, (0, max(-more, 0))])
    return np.asarray(left + right)
