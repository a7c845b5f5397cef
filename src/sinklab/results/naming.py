"""Naming: how many there are of a thing, how a token is quoted, and what a position is called that holds none of the text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "display_token", "front_name", "front_names", "front_warning", "head_numbering", "quote", "size"]


def counted(number: int, noun: str) -> str:
    """``1 text``, ``2,000 texts``: of a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def display_token(token: str) -> str:
    """A token as one line of visible text; byte-level and SentencePiece space marks become spaces."""
    marks = {"Ġ": " ", "▁": " ", "Ċ": "↵", "\n": "↵", "\r": "\\r", "ĉ": "⇥", "\t": "⇥"}
    return "".join(marks.get(letter, letter if letter.isprintable() else "�") for letter in token)


def quote(token: object) -> str:
    """A token between quotation marks, as every sentence, table and page has it."""
    return f"“{display_token(str(token))}”"


def front_name(position: int, count: int) -> str:
    """One of the ``count`` learned tokens that a model puts in front of every text, by its position below ``count``."""
    return "the learned token in front" if count == 1 else f"learned token {position + 1} of {count} in front"


def front_names(count: int) -> list[str]:
    """All of them."""
    return [front_name(position, count) for position in range(count)]


def front_warning(operation: str, count: int) -> str:
    """A sentence where position 0, whose sink rate is shown, holds a learned token and no token of the text; else empty."""
    if not count:
        return ""
    return (
        f"With {operation} position 0 is that of a learned token, whose sink rate this is: the text begins at position {count}."
    )


def head_numbering(attending: Sequence[int], total: int, noun: str = "layer") -> str:
    """How heads are numbered where only some layers have attention, a sentence; empty where all have it, or none.

    Args:
        attending: numbers of the layers with attention, among all, in their order.
        total: how many layers there are.
        noun: what they are called.
    """
    if not 0 < len(attending) < total:
        return ""
    listed = ", ".join(map(str, attending[:6])) + (", …" if len(attending) > 6 else "")
    have, these = ("has", "it alone") if len(attending) == 1 else ("have", "these")
    return (
        f"Of {counted(total, noun)} {len(attending)} {have} attention ({listed}), and heads are numbered by {these}: 0.0 is "
        f"the first head of {noun} {attending[0]}."
    )


def size(count: float) -> str:
    """Bytes in units of 1,024 with three digits: ``792 KiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1000:
            count, unit = count / 1024, larger
    return f"{round(count):,}\u202fB" if unit == "B" else f"{float(f'{count:.3g}'):,g}\u202f{unit}"
