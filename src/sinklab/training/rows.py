"""Rows of text as a model reads them, with their documents, and losses over them under a window."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import on_seam_modules
from sinklab.errors import UnsupportedModelError
from sinklab.models.losses import cross_entropies
from sinklab.training.tokenizer import TokenStream

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


@dataclasses.dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of text as a model of their training reads them: whole, or as documents that do not see each other.

    Args:
        ids: int64 ``(rows, seq_len)``.
        position_ids: int64, same shape, which begin at 0 again where a document begins that sees only itself; ``None`` where
            every row is one text.
    """

    ids: Tensor
    position_ids: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor | TextRows) -> TextRows:
        """The rows themselves; of ids alone, each row one text."""
        return cls(rows) if isinstance(rows, Tensor) else rows

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with."""
        return {"input_ids": self.ids} | ({} if self.position_ids is None else {"position_ids": self.position_ids})

    @property
    def documents(self) -> int:
        """Texts, and parts of them, that do not see each other."""
        return len(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of them, row after row."""
        begins = torch.zeros_like(self.ids, dtype=torch.bool)
        begins[:, 0] = True
        if self.position_ids is not None:
            begins[:, 1:] = (torch.diff(self.position_ids, dim=1) != 1).to(begins.device)
        starts = begins.flatten().nonzero()[:, 0]
        return torch.diff(starts, append=starts.new_tensor([self.ids.numel()])).tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Self:
        return self._each(lambda tensor: tensor[part])

    def to(self, device: torch.device | str) -> Self:
        """The same rows on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def split(self, size: int) -> Iterator[Self]:
        """Parts of ``size`` rows; the last one may have fewer."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def with_ids(self, ids: Tensor) -> Self:
        """Other tokens in the same documents."""
        return dataclasses.replace(self, ids=ids)

    def scored(self, losses: Tensor, after: int = 0) -> Tensor:
        """The losses that count, of all that :func:`~sinklab.training.rows.token_losses` gives for the same ``after``.

        Of rows in documents, ``(tokens,)``: tokens of the document of the query that predicts them, which stands at position
        ``after`` of it or later; no other one is predicted in training, or is as far from the beginning of its document. Of
        rows that are one text, all.

        Args:
            losses: ``(rows, seq_len - 1 - after)``.
        """
        if self.position_ids is None:
            return losses
        positions = self.position_ids.to(losses.device)
        follows = torch.diff(positions, dim=1) == 1
        return losses[follows[:, after:] & (positions[:, after:-1] >= after)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        positions = None if self.position_ids is None else change(self.position_ids)
        return dataclasses.replace(self, ids=change(self.ids), position_ids=positions)


class RowDataset(Dataset):
    """Rows cut from a stream of documents, map-style.

    Row ``i`` is ``{"input_ids", "labels"}``, int64 ``(context,)``; with ``isolated`` also ``"position_ids"``, which begin at 0
    again where a document begins. Labels are the ids themselves, for a model that shifts them; with ``isolated`` the first
    token of a document that begins inside the row is -100, because nothing that it may see predicts it, and so are those of a
    prefix, of which rows then differ in how many they have.

    Args:
        stream: the documents.
        numbers: which of the stream's rows, int64 ``(rows,)``; row ``n`` begins at token ``n × content``.
        context: tokens of a row.
        bos: id in front of every row, which then holds ``content = context - 1`` tokens of the stream; or ``None``.
        isolated: give position ids.
        prefix: tokens at the beginning of each isolated document that are no targets.
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
        prefix: int = 0,
        random: RandomPositions | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        self.stream, self.numbers, self.context, self.bos = stream, numbers, context, bos
        self.isolated, self.prefix, self.random, self.fixed = isolated, prefix, random, fixed
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
        positions = self._positions(begin, self.context, self.context - self.content)
        labels[1:][positions[1:] == 0] = -100
        labels[positions < self.prefix] = -100
        return {
            "input_ids": torch.from_numpy(row),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def _positions(self, begin: int, length: int, front: int) -> np.ndarray:
        """Positions in its document of each token of a row, ``(length,)``."""
        inside = np.searchsorted(self._starts, (begin + 1, begin + length - front))
        starts = self._starts[slice(*inside)] - begin + front
        first = np.zeros(length, dtype=np.int64)  # where the document of each token begins
        first[starts] = starts
        return np.arange(length) - np.maximum.accumulate(first)

    def leading(self, index: int, length: int, front: int | None, bos: int | None) -> TextRows:
        """The first tokens of a row's text behind ``front`` (or nothing), one row; only the fixed token is put in.

        A ``bos`` that the stream has at that place is left out, so that ``front`` is not doubled or smuggled in.
        """
        begin = int(self.numbers[index]) * self.content
        row = self._tokens[begin : begin + length + 1].astype(np.int64)
        left_out = int(row[0] == bos)
        row = row[left_out:]
        row = (row if front is None else np.concatenate(([front], row)))[:length]
        if self.fixed is not None and self.fixed[0] < length:
            row[self.fixed[0]] = self.fixed[1]
        positions = self._positions(begin + left_out, length, int(front is not None)) if self.isolated else None
        return TextRows(torch.from_numpy(row)[None], None if positions is None else torch.from_numpy(positions)[None])

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled with all that it maps.
        return {name: value for name, value in vars(self).items() if name not in ("_tokens", "_starts")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._tokens, self._starts = self.stream.tokens(), self.stream.starts()


@contextlib.contextmanager
def limited_attention(
    model: nn.Module, window: int, kept: Sequence[int] = (), position_ids: Tensor | None = None
) -> Iterator[None]:
    """Hide from every query all keys but the last ``window`` (its own included) and those at positions ``kept``.

    Args:
        position_ids: ``(rows, seq_len)`` of the rows that are read, where positions are those in a document and not in a row.

    Holds for self-attention over whole sequences, in all layers, in addition to the model's own mask: what the model hides by
    itself stays hidden, kept positions outside a window of its own included.

    Raises:
        UnsupportedModelError: inside the block, a call with a cache, or one whose kernel takes no 4-D mask (flash, flex).
    """
    with seam.shadow(_Limit(model, window, kept, position_ids)):
        yield


class _Limit(seam.Observer):
    """Narrows the mask of every call before the model's own function gets it."""

    def __init__(self, model: nn.Module, window: int, positions: Sequence[int], position_ids: Tensor | None = None) -> None:
        self._owned = {id(module) for module in on_seam_modules(model).values()}
        self._window, self._kept, self._position_ids = window, list(positions), position_ids

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._owned

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:
        name = getattr(native, "__name__", type(native).__name__)
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{query.shape[2]} queries and {key.shape[2]} keys; a window is laid over self-attention without a cache only"
            )
        visible = self._visible(query.shape[2], query.device)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            mask = mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, torch.finfo(mask.dtype).min)
        elif mask is None and ("sdpa" in name or name.startswith("sinklab_")):
            # No mask means "the module says whether it is causal" to these two.
            mask = visible.tril() if getattr(module, "is_causal", True) else visible
        else:
            raise UnsupportedModelError(
                f'{type(module).__name__} runs {name}, which takes no 4-D mask; load the model with attn_implementation="sdpa"'
            )
        return native(module, query, key, value, mask, **kwargs)

    def _visible(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        visible = positions[:, None] - positions < self._window
        if self._position_ids is None:
            visible[:, [position for position in self._kept if position < length]] = True
            return visible[None, None]
        # Learned tokens in front have positions of their own, which those of the tokens come behind.
        front = length - self._position_ids.shape[1]
        of_keys = nn.functional.pad(self._position_ids.to(device) + front, (front, 0))
        of_keys[:, :front] = positions[:front]
        kept = torch.isin(of_keys, torch.tensor(self._kept, dtype=torch.int64, device=device))
        return (visible | kept[:, None])[:, None]


def token_losses(model: PreTrainedModel, rows: Tensor | TextRows, after: int = 0) -> Tensor:
    """Next-token loss in nats of every token behind position ``after``, ``(rows, seq_len - 1 - after)``, float32.

    Of rows in documents :meth:`TextRows.scored` says which of them count.

    Args:
        rows: int64 ``(rows, seq_len)``, or with the documents in them, on the model's device.
    """
    rows = TextRows.of(rows)
    wanted = rows.ids.shape[1] - after
    fewer = {"logits_to_keep": wanted} if after and "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(**rows.inputs, use_cache=False, **fewer).logits[:, -wanted:]
    # The last logits predict nothing; to take their loss of some token and drop it costs less than to copy all the others.
    targets = rows.ids[:, after:].roll(-1, dims=1)
    return cross_entropies(logits, targets)[:, :-1]


def windowed_losses(
    model: PreTrainedModel, rows: Tensor | TextRows, window: int, sinks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Losses of the tokens beyond the window with the sinks kept and with them hidden, ``(rows, seq_len - 1 - window)`` each.

    These are the tokens that are predicted from a position of at least ``window``, for which the first token of the row lies
    outside. Of rows in documents, ``(tokens,)`` each: those for which the first token of their document does.
    """
    losses, rows = [], TextRows.of(rows)
    for visible_sinks in (sinks, ()):
        with limited_attention(model, window, visible_sinks, rows.position_ids):
            losses.append(rows.scored(token_losses(model, rows, after=window), after=window))
    return losses[0], losses[1]
