"""Streamed token: one new token in every row of a stream, with the text that is complete with it."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, cast

from sinklab.errors import ConfigurationError

__all__ = ["StreamedToken"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StreamedToken:
    """One new token in every row that has not ended.

    Attributes:
        ids: token of each row; ``None`` in a row that had ended before.
        texts: characters that are complete with it, '' without a tokenizer; together the text of the row up to its stop
            string, special tokens left out.
        position: its index in the stream, prompt and padding counted.
        ended: whether each row has ended, with this token or before.
    """

    ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    position: int
    ended: tuple[bool, ...]

    @property
    def id(self) -> int:
        """The token of the only row."""
        return cast(int, self._only(self.ids))  # it has not ended before

    @property
    def text(self) -> str:
        """The text of the only row."""
        return self._only(self.texts)

    def _only(self, of_rows: tuple[T, ...]) -> T:
        if len(of_rows) > 1:
            raise ConfigurationError(f"this stream has {len(of_rows)} rows; ask for .ids and .texts")
        return of_rows[0]
