"""The verdict: one rule for every claim, from the effects of single seeds to reproduced, not reproduced or inconclusive.

A part of a claim states a region in which an effect lies: above a bound, below one, or between two. The effect of every seed
gives a mean and Student's t interval. If the interval lies in the region, the part is reproduced; if the interval lies wholly
outside it, the part is not reproduced; in all other cases, and with fewer than three seeds, it is inconclusive. A claim is
reproduced if all of its parts are, and not reproduced if one part is not. That every part must hold needs no correction for
their number; that one part failing is enough makes "not reproduced" somewhat more likely by chance, which is the direction to
err in. What the claim presupposes (that there is a sink to remove) is judged by the mean: where it does not hold, the claim
is not tested at this scale.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from sinklab.jobs.claim import Numbers, Part
from sinklab.results.statistics import mean_interval
from sinklab.results.summaries import ClaimPart

__all__ = ["SEEDS", "VERDICTS", "Conclusion", "Finding", "Verdict", "judge", "judge_part"]

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not tested at this scale"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "not reproduced", "inconclusive", "not tested at this scale")

SEEDS = 3
"""Fewest seeds with which anything but "inconclusive" is said."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one part.

    Attributes:
        by_seed: seed to effect; ``None`` where it could not be computed.
        mean: over the seeds that have one, in the unit of the part; ``None`` without any.
        interval: 95 %, Student's t; ``None`` with fewer than three.
        standardized: the mean over the standard deviation over seeds; ``None`` where that is 0 or unknown.
    """

    part: Part
    by_seed: dict[int, float | None]
    mean: float | None
    interval: tuple[float, float] | None
    standardized: float | None
    verdict: Verdict

    def to_dict(self) -> ClaimPart:
        """For JSON."""
        return {
            "says": self.part.says,
            "effect": self.part.effect.words,
            "needs": sorted([variant, metric] for variant, metric in self.part.effect.needs()),
            "expected": self.part.region,
            "more_than": self.part.more_than if math.isfinite(self.part.more_than) else None,
            "less_than": self.part.less_than if math.isfinite(self.part.less_than) else None,
            "unit": self.part.effect.unit,
            "mean": self.mean,
            "interval": None if self.interval is None else list(self.interval),
            "standardized": self.standardized,
            "by_seed": {str(seed): value for seed, value in self.by_seed.items()},
            "verdict": self.verdict,
        }


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What was found about a claim; ``reason`` says why there is no verdict of its own, and is empty otherwise."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    presupposed: tuple[Finding, ...]
    reason: str = ""


def judge(parts: Sequence[Part], presupposes: Sequence[Part], numbers: Mapping[int, Numbers]) -> Conclusion:
    """The verdict about a claim.

    Args:
        parts: what the claim says; at least one.
        presupposes: what must be so for the claim to be about anything.
        numbers: seed to its numbers.
    """
    findings = tuple(judge_part(part, numbers) for part in parts)
    presupposed = tuple(judge_part(part, numbers) for part in presupposes)
    for finding in presupposed:
        part = finding.part
        if finding.mean is None or not part.more_than < finding.mean < part.less_than:
            found = "could not be measured" if finding.mean is None else f"is {finding.mean:.3g} {part.effect.unit}"
            reason = f"presupposes that {part.says}: {part.effect.words} {found}, and would have to be {part.region}"
            return Conclusion("not tested at this scale", findings, presupposed, reason)
    verdicts = [finding.verdict for finding in findings]
    if all(verdict == "reproduced" for verdict in verdicts):
        return Conclusion("reproduced", findings, presupposed)
    if "not reproduced" in verdicts:
        return Conclusion("not reproduced", findings, presupposed)
    open_parts = [finding for finding in findings if finding.verdict == "inconclusive"]
    return Conclusion("inconclusive", findings, presupposed, _why(open_parts[0]))


def judge_part(part: Part, numbers: Mapping[int, Numbers]) -> Finding:
    """The verdict about one part; see the top of this file for the rule."""
    by_seed = {seed: part.effect(of_seed) for seed, of_seed in numbers.items()}
    values = [value for value in by_seed.values() if value is not None]
    mean = statistics.fmean(values) if values else None
    if len(values) < SEEDS:
        return Finding(part, by_seed, mean, None, None, "inconclusive")
    middle, half = mean_interval(values)
    low, high = middle - half, middle + half
    spread = statistics.stdev(values)
    verdict: Verdict = "inconclusive"
    if part.more_than < low and high < part.less_than:
        verdict = "reproduced"
    elif high <= part.more_than or low >= part.less_than:
        verdict = "not reproduced"
    return Finding(part, by_seed, middle, (low, high), middle / spread if spread else None, verdict)


def _why(finding: Finding) -> str:
    known = sum(value is not None for value in finding.by_seed.values())
    if known < SEEDS:
        lost = len(finding.by_seed) - known
        without = f", {lost} of them without a number" if lost else ""
        seeds = "1 seed" if len(finding.by_seed) == 1 else f"{len(finding.by_seed)} seeds"
        return f"{finding.part.says!r}: {seeds}{without}; a verdict needs {SEEDS}"
    return f"{finding.part.says!r}: the interval over seeds reaches over the bound"
