"""Schemes: how many bits weights and activations have, as they are written: w8a8, w4a16."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from sinklab.errors import ConfigurationError

__all__ = ["WHOLE_BITS", "Scheme", "parse_schemes"]

WHOLE_BITS = 16
"""In a scheme: left as floating-point numbers, which deployed models hold in 16 bits."""

BITS = (*range(2, 9), WHOLE_BITS)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Bits of weights and of activations, 2 to 8, or 16 for numbers that stay as they are."""

    weights: int
    activations: int

    @property
    def name(self) -> str:
        """As it is typed."""
        return f"w{self.weights}a{self.activations}"

    @property
    def label(self) -> str:
        """As it is printed: ``W8A8``."""
        return self.name.upper()


def parse_schemes(names: Sequence[str]) -> list[Scheme]:
    """The schemes, each once, in their order.

    Raises:
        ConfigurationError: none, one that does not exist, or one that quantises nothing.
    """
    schemes: dict[str, Scheme] = {}
    for name in names:
        match = re.fullmatch(r"w(\d{1,2})a(\d{1,2})", name.strip().lower())
        scheme = Scheme(int(match[1]), int(match[2])) if match else Scheme(0, 0)
        if not {scheme.weights, scheme.activations} <= set(BITS):
            raise ConfigurationError(
                f"`schemes` {name!r}: there is no such scheme; expected w and a with 2 to 8 bits each, or 16 for numbers that "
                "stay as they are, such as w8a8, w8a16 or w4a16"
            )
        if scheme.weights == scheme.activations == WHOLE_BITS:
            raise ConfigurationError(f"`schemes` {name!r} quantises nothing; give weights or activations fewer bits")
        schemes[scheme.name] = scheme
    if not schemes:
        raise ConfigurationError("`schemes` is empty; name at least one, such as w8a8")
    return list(schemes.values())
