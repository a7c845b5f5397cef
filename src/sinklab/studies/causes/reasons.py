"""Why a head is undecided: the label that comes nearest, what of it is not shown, and how many texts would show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sinklab.results.intervals import CHANCE, Interval, fewest
from sinklab.results.summaries.causes import Undecided
from sinklab.studies.causes.evidence import Evidence

__all__ = ["Reason", "reason_of"]

SEARCHED = 2**20
"""Texts up to which is looked for a number that would decide."""

EDITS = {
    "redirect": "sending all of its attention to the sink",
    "zero": "an output of 0",
    "resample": "its output of another text",
    "zero_value": "zeroing the sink's value",
    "hide": "hiding the sink",
    "hide - zero_value": "its sink's share on other keys, against the same share on none,",
}


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a head has no label in a domain.

    Attributes:
        nearest: the label that it may have: one whose claims all hold in the mean, or of which the fewest do not.
        why: in words.
        texts: of the domain, those measured among them, that decide for it with a chance of
            :data:`~sinklab.results.intervals.CHANCE`; ``None`` if no number does, or none can be foretold.
    """

    nearest: str
    why: str
    texts: int | None

    def to_dict(self) -> Undecided:
        """For JSON."""
        return {"nearest": self.nearest, "why": self.why, "texts": self.texts}


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A claim of a label, of one head of those that the evidence has, with the interval of its mean."""

    name: str
    evidence: Evidence
    interval: Interval
    head: int

    @property
    def holds(self) -> bool:
        """Whether the mean that is seen fulfils it."""
        return bool(self.evidence.holds[self.head])

    def p(self, texts: int | None = None, chance: float = 0.5) -> float:
        """Its p-value; of so many texts one that it has, or less, with a chance."""
        return float((self.evidence.p if texts is None else self.evidence.p_of_texts(texts, chance))[self.head])

    def __str__(self) -> str:
        """``an output of 0 costs +0.0042 [-0.0010, +0.0094]``."""
        edit, interval = EDITS[self.name.removesuffix(" costs nothing")], self.interval
        return f"{edit} costs {interval.mean:+z.4f} [{interval.low:+z.4f}, {interval.high:+z.4f}]"


def reason_of(rules: Mapping[str, Sequence[Claim]], critical: float, decided: Sequence[str]) -> Reason:
    """The reason of one head in one domain.

    Args:
        rules: label to its claims.
        critical: the p-value that would decide.
        decided: labels that are, where they are several.
    """
    if decided:
        return Reason(decided[0], f"the claims of {' and of '.join(decided)} all hold, and a head has one label", None)
    texts = {rule: needed for rule, claims in rules.items() if (needed := _needed(claims, critical, 0.5)) is not None}
    if texts:
        nearest = min(texts, key=lambda rule: texts[rule])
        foretold = _needed(rules[nearest], critical, CHANCE)
        not_shown = [str(claim) for claim in rules[nearest] if claim.p() > critical]
        measured = rules[nearest][0].evidence.values.shape[1]
        return Reason(nearest, f"looks {nearest}, which {measured} texts do not show: {'; '.join(not_shown)}", foretold)
    against = {rule: [claim for claim in claims if not claim.holds] for rule, claims in rules.items()}
    nearest = min(against, key=lambda rule: len(against[rule]))
    claims = against[nearest] or [max(rules[nearest], key=Claim.p)]
    return Reason(nearest, f"not {nearest}, which comes nearest: {'; '.join(map(str, claims))}", None)


def _needed(claims: Sequence[Claim], critical: float, chance: float) -> int | None:
    """Least number of texts at which all claims are decided, each with a chance; ``None`` if no number of them does."""

    def decided(texts: int) -> bool:
        return all(claim.p(texts, chance) <= critical for claim in claims)

    if not all(claim.holds for claim in claims):
        return None
    return fewest(decided, claims[0].evidence.values.shape[1], SEARCHED)
