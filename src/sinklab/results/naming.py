"""Naming: how many there are of a thing, and what a position is called that holds no token of the text."""

from __future__ import annotations

__all__ = ["counted", "front_name", "front_names", "front_warning"]


def counted(number: int, noun: str) -> str:
    """``1 text``, ``2,000 texts``: of a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
