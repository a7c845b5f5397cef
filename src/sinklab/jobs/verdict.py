"""The verdict: one rule for every claim, from the effects of single seeds to reproduced, not reproduced or inconclusive.

A part of a claim states a region in which an effect lies: above a bound, below one, or between two. The effect of every seed
gives a mean and Student's t interval. If the interval lies in the region, the part is reproduced; if the interval lies wholly
outside it, the part is not reproduced; in all other cases, and with fewer than three seeds, it is inconclusive. A claim is
reproduced if all of its parts are, and not reproduced if one part is not. That every part must hold needs no correction for
their number; that one part failing is enough makes "not reproduced" somewhat more likely by chance, which is the direction to
err in. What the claim presupposes (that there is a sink to remove) is judged by the mean: where it does not hold, the claim
is not tested at this scale.

On checkpoints the rule is used twice: for each model, whose effects are those of draws of texts, and over the models to which
the claim applies, whose effects are the means of their draws. The second verdict is about models; the first is about one. A
claim does not apply to a model for which what it presupposes does not hold.
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

__all__ = ["SEEDS", "VERDICTS", "Conclusion", "Finding", "Verdict", "judge", "judge_model", "judge_models", "judge_part"]

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not tested at this scale", "not applicable"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "not reproduced", "inconclusive", "not tested at this scale", "not applicable")

Effects = Mapping[int, float | None] | Mapping[str, float | None]
"""By seed, or by name of the model."""

SEEDS = 3
"""Fewest seeds with which anything but "inconclusive" is said."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one part.

    Attributes:
        by_seed: seed to effect, over models their names to it; ``None`` where it could not be computed.
        mean: over the seeds that have one, in the unit of the part; ``None`` without any.
        interval: 95 %, Student's t; ``None`` with fewer than three.
        standardized: the mean over the standard deviation over seeds; ``None`` where that is 0 or unknown.
    """

    part: Part
    by_seed: Effects
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
        if not _mean_inside(finding):
            return Conclusion("not tested at this scale", findings, presupposed, _presupposes(finding))
    return _together(findings, presupposed, "seed")


def judge_model(parts: Sequence[Part], presupposes: Sequence[Part], numbers: Mapping[int, Numbers]) -> Conclusion:
    """The verdict about a claim on one checkpoint, over draws of texts.

    Draws differ little, so what is presupposed can be judged like a part: where its interval reaches over the bound, nothing
    follows for or against the claim.

    Args:
        parts, presupposes: as in :func:`judge`.
        numbers: seed of the draw to its numbers.
    """
    findings = tuple(judge_part(part, numbers) for part in parts)
    presupposed = tuple(judge_part(part, numbers) for part in presupposes)
    for finding in presupposed:
        open_yet = finding.interval is not None and finding.verdict == "inconclusive"
        if not open_yet and not _mean_inside(finding):
            return Conclusion("not applicable", findings, presupposed, _presupposes(finding))
        if open_yet:
            low, high = finding.interval or (math.nan, math.nan)
            reason = f"{_presupposes(finding)}; the interval over draws of texts, {low:.3g} to {high:.3g}, reaches over that"
            return Conclusion("inconclusive", findings, presupposed, reason)
    return _together(findings, presupposed, "draw")


def _applies(found: Conclusion) -> bool:
    undecided = any(finding.interval is not None and finding.verdict == "inconclusive" for finding in found.presupposed)
    return found.verdict != "not applicable" and not undecided


def _mean_inside(finding: Finding) -> bool:
    return finding.mean is not None and finding.part.more_than < finding.mean < finding.part.less_than


def _presupposes(finding: Finding) -> str:
    part = finding.part
    found = "could not be measured" if finding.mean is None else f"is {finding.mean:.3g} {part.effect.unit}"
    return f"presupposes that {part.says}: {part.effect.words} {found}, and would have to be {part.region}"


def judge_models(parts: Sequence[Part], by_model: Mapping[str, Conclusion]) -> Conclusion:
    """The verdict over models: each to which the claim applies is one observation, the mean of its draws of texts.

    Args:
        parts: what the claim says.
        by_model: name of a model to what :func:`judge_model` has found about it.
    """
    about = {name: found for name, found in by_model.items() if _applies(found)}
    if all(found.verdict == "not applicable" for found in by_model.values()):
        reasons = {found.reason for found in by_model.values()}
        return Conclusion("not applicable", (), (), reasons.pop() if len(reasons) == 1 else "it applies to none of the models")
    findings = tuple(
        _judged(part, {name: found.findings[index].mean for name, found in about.items()}) for index, part in enumerate(parts)
    )
    return _together(findings, (), "model")


def _together(findings: tuple[Finding, ...], presupposed: tuple[Finding, ...], unit: str) -> Conclusion:
    """The verdict that those of all parts make."""
    verdicts = [finding.verdict for finding in findings]
    if all(verdict == "reproduced" for verdict in verdicts):
        return Conclusion("reproduced", findings, presupposed)
    if "not reproduced" in verdicts:
        return Conclusion("not reproduced", findings, presupposed)
    open_parts = [finding for finding in findings if finding.verdict == "inconclusive"]
    return Conclusion("inconclusive", findings, presupposed, _why(open_parts[0], unit))


def judge_part(part: Part, numbers: Mapping[int, Numbers]) -> Finding:
    """The verdict about one part; see the top of this file for the rule."""
    return _judged(part, {seed: part.effect(of_seed) for seed, of_seed in numbers.items()})


def _judged(part: Part, by_seed: Effects) -> Finding:
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


def _why(finding: Finding, unit: str) -> str:
    known = sum(value is not None for value in finding.by_seed.values())
    if known < SEEDS:
        lost = len(finding.by_seed) - known
        without = f", {lost} of them without a number" if lost else ""
        seeds = f"1 {unit}" if len(finding.by_seed) == 1 else f"{len(finding.by_seed)} {unit}s"
        return f"{finding.part.says!r}: {seeds}{without}; a verdict needs {SEEDS}"
    return f"{finding.part.says!r}: the interval over {unit}s reaches over the bound"
