"""The text of one token, for sentences, tables and pages: what it decodes to, or how the vocabulary writes it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Decoder", "token_text"]


SPACE = "▁"
"""How SentencePiece writes a space."""


class Decoder(Protocol):
    """What makes text of token ids: a tokenizer of transformers."""

    def decode(self, token_ids: list[int], /) -> str | list[str]:
        """The text of some ids."""
        ...


def token_text(tokenizer: Decoder | None, token: int) -> str:
    """A token as text; its number without a tokenizer.

    Alone, the space in front of a word (``▁``) and a byte that is a space decode to nothing, since decoding takes away the
    space in front of a text: these are given as the vocabulary writes them. A word keeps the space in front of it, which
    tells it from the same letters inside of a word.
    """
    if tokenizer is None:
        return str(token)
    text, pieces = str(tokenizer.decode([token])), getattr(tokenizer, "convert_ids_to_tokens", None)
    if pieces is None:
        return text
    piece = str(pieces(token))
    return f" {text}" if text and piece.startswith(SPACE) and not text.startswith(" ") else text or piece
