"""Published numbers of claims: what a source reports for the very effect that a part of a claim is about."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources

__all__ = ["Published", "published_effect", "published_effects"]


@dataclasses.dataclass(frozen=True)
class Published:
    """A published number.

    Attributes:
        value: in the unit of the effect. Losses are differences of logarithms of perplexities, in nats.
        of: the model that it is of, or its size.
    """

    value: float
    of: str


@functools.cache
def published_effects() -> Mapping[str, Mapping[str, Published]]:
    """Claim to the words of an effect to its published number, of those effects for which the source has one.

    They stand in ``sinklab_claims/published.json`` and not in the claims, whose code is part of the hash that measurements are
    kept under: to add a number that others have published is no reason to measure anything again. Left out are numbers that
    are read off a drawing, unless the entry says so, that are of a similar quantity, and that the claim derives.
    """
    text = (resources.files("sinklab_claims") / "published.json").read_text(encoding="utf-8")
    return {
        claim: {effect: Published(value, entry["of"]) for effect, value in entry["effects"].items()}
        for claim, entry in json.loads(text).items()
    }


def published_effect(claim: str, effect: str) -> Published | None:
    """The published number for an effect of a claim, by its words (``effect`` of a part); ``None`` where there is none."""
    return published_effects().get(claim, {}).get(effect)
