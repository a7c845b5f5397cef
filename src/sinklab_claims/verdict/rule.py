"""The verdict: one rule for every claim, from the effects of single seeds, part by part.

A part of a claim states a region in which an effect lies. If the 95 % interval of the effects of the seeds, which suits their
kind (:mod:`sinklab.jobs.estimate`), lies in the region, the part is reproduced. If it lies wholly outside, also after Holm's
correction over the parts of the claim, the part is not reproduced; or it is absent at this scale, where it shows less of what
is claimed (:meth:`Part.misses`) and a premise is weak (:data:`WEAK`). In all other cases, with fewer than three seeds, and
where more than a quarter of them have no number, it is inconclusive. Rates that are all 0, or all the whole, are shown.

A claim is reproduced if all m of its parts are, and holds in part if k of them are. With none, it is not reproduced if a part
is not, absent at this scale if a part is, and inconclusive otherwise. What it presupposes is judged like a part: where it does
not hold, the claim is not tested at this scale; where it is open, nothing follows for or against the claim. Secondary numbers,
such as a rate beside a mean weight, are judged by themselves and never counted.

What is proved is checked: it agrees with the proof if every seed shows it, and one that does not contradicts it; of a claim
with other parts too, these decide.

On checkpoints the rule is used twice: for each model over draws of texts, and over the models to which the claim applies,
each of which is one observation: the mean of its draws, and over the texts on which the same weights are read. A claim that
there are models which show something takes one; that one of many shows it is likelier by chance, so the interval of each
leaves out as much less (Bonferroni). Its numbers are those of the model that decides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from sinklab.jobs.estimate import LEAST_FOR_A_MEDIAN, SEEDS, Estimate, Method
from sinklab.results.metric import FRACTION, PERCENTAGE
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Numbers
from sinklab_claims.verdict.records import OF_A_PROOF, PartFound, Verdict

Effects = Mapping[int, float | None] | Mapping[str, float | None]
"""By seed, or by name of the model."""

MOST_LOST = 0.25
"""Share of the seeds without a number (a training that diverged) up to which the others, the lucky ones, speak for all."""

WEAK: Mapping[str, float] = {"percent": 15.0, "nats": 0.1}
"""Below what a premise is weak: percent of heads that sink, and nats that the sink is worth."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one part.

    Attributes:
        by_seed: seed to effect (of several steps to that of the one that decides), over models their names to it; ``None``
            where it could not be computed.
        mean: what the seeds that have one say together, in the unit of the part: the mean, of a ratio the geometric one, of a
            correlation the median; ``None`` without any.
        interval: 95 %, for all steps together where there are several; ``None`` with fewer than three seeds, or where they show
            no spread and are too few for an interval without.
        method: how the interval was taken; ``None`` without one.
        standardized: the mean over the standard deviation over seeds; ``None`` where that is 0 or unknown.
        model: of what is said of some of several models the one that decides: mean and interval are over its draws of texts,
            at the level with which those of all models hold together.
        secondary: whether it stands beside a part, and is not counted.
    """

    part: Part
    by_seed: Effects
    mean: float | None
    interval: tuple[float, float] | None
    method: Method | None
    standardized: float | None
    verdict: Verdict
    model: str = ""
    secondary: bool = False

    @property
    def undecided(self) -> bool:
        """Whether there are enough seeds, and they leave it open."""
        return len(self.by_seed) >= SEEDS and self.verdict == "inconclusive"

    @property
    def known(self) -> int:
        """Seeds that have a number."""
        return sum(value is not None for value in self.by_seed.values())

    def record(self) -> PartFound:
        """For ``run.json``."""
        part, effect = self.part, self.part.effect
        return PartFound(
            says=part.says,
            effect=effect.words,
            needs=sorted(effect.needs()),
            expected=part.region,
            more_than=part.more_than if math.isfinite(part.more_than) else None,
            less_than=part.less_than if math.isfinite(part.less_than) else None,
            unit=effect.unit,
            mean=self.mean,
            interval=self.interval,
            method=self.method,
            standardized=self.standardized,
            by_seed={str(seed): value for seed, value in self.by_seed.items()},
            verdict=self.verdict,
            steps=len(effect.steps),
            model=self.model,
            secondary=self.secondary,
        )


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What was found about a claim; ``reason`` says what of it does not hold, or why there is no verdict; else it is empty."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    presupposed: tuple[Finding, ...]
    reason: str = ""


def judge(parts: Sequence[Part], presupposes: Sequence[Part], numbers: Mapping[int, Numbers]) -> Conclusion:
    """The verdict about a claim, over trainings.

    Args:
        parts: what the claim says; at least one.
        presupposes: what must be so for the claim to be about anything.
        numbers: seed to its numbers.
    """
    return _judge(parts, presupposes, numbers, "not tested at this scale", "seed")


def judge_model(parts: Sequence[Part], presupposes: Sequence[Part], numbers: Mapping[int, Numbers]) -> Conclusion:
    """The verdict about a claim on one checkpoint, over draws of texts; in tables it stands under the name of the model."""
    return _judge(parts, presupposes, numbers, "not applicable", "draw")


def _judge(
    parts: Sequence[Part], presupposes: Sequence[Part], numbers: Mapping[int, Numbers], otherwise: Verdict, unit: str
) -> Conclusion:
    judged = functools.partial(judge_part, numbers=numbers, draws=unit == "draw")
    presupposed = tuple(map(judged, presupposes))
    rates = [judged(part.beside) for part in presupposes if part.beside is not None]
    weak = any(map(_is_weak, (*presupposed, *rates)))
    findings = _holm(parts, judged, weak=weak)
    beside = [judged(part.beside) for part in parts if part.beside is not None]
    findings += tuple(dataclasses.replace(finding, secondary=True) for finding in beside if finding.known)
    for finding in presupposed:
        outside = finding.mean is None or not finding.part.holds(finding.mean)
        if finding.verdict == "not reproduced" or (finding.known < SEEDS and outside):
            return Conclusion(otherwise, findings, presupposed, _presupposes(finding))
    for finding in presupposed:
        if finding.undecided:
            return Conclusion("inconclusive", findings, presupposed, f"{_presupposes(finding)}; {_open(finding, unit)}")
    return _together(findings, presupposed, unit)


def _is_weak(premise: Finding) -> bool:
    least = WEAK.get(premise.part.effect.unit, -math.inf)
    return premise.mean is not None and premise.part.more_than >= 0 and premise.mean < least


def _holm(parts: Sequence[Part], judged: Callable[..., Finding], *, weak: bool = False) -> tuple[Finding, ...]:
    """What was found about each part: outside only what is so after Holm's correction over those that are not proved.

    Holm (1979) by intervals: of m parts those that lie outside at 1 - 0.05/m, then of the m' left those at 1 - 0.05/m', …
    """
    findings = [judged(part) for part in parts]
    left = {index for index, part in enumerate(parts) if not part.proved}
    outside = {index for index in left if findings[index].verdict == "not reproduced"}
    while outside & left:
        level = 1 - 0.05 / len(left)
        refuted = {index for index in outside & left if judged(parts[index], level=level).verdict == "not reproduced"}
        if not refuted:
            break
        left -= refuted
    for index in outside:
        finding = findings[index]
        if index in left:
            findings[index] = dataclasses.replace(finding, verdict="inconclusive")
        elif weak and finding.interval is not None and finding.part.misses(*finding.interval):
            findings[index] = dataclasses.replace(finding, verdict="absent at this scale")
    return tuple(findings)


def _presupposes(finding: Finding) -> str:
    part = finding.part
    middle = "could not be measured" if finding.mean is None else f"is {finding.mean:.3g} {part.effect.unit}"
    return f"presupposes that {part.says}: {part.effect.words} {middle}, and would have to be {part.region}"


def judge_models(
    parts: Sequence[Part],
    by_model: Mapping[str, Conclusion],
    numbers: Mapping[str, Mapping[int, Numbers]],
    weights: Mapping[str, str] | None = None,
) -> Conclusion:
    """The verdict over models: each to which the claim applies is one observation, the middle of its draws of texts.

    Args:
        parts: what the claim says.
        by_model: name of a model to what :func:`judge_model` has found about it.
        numbers: name of each model to which the claim applies to the numbers that were judged, by seed of the draw.
        weights: name of each model to the identity of its weights; by default each has its own.
    """
    about = {
        name: found
        for name, found in by_model.items()
        if found.verdict != "not applicable" and not any(finding.undecided for finding in found.presupposed)
    }
    if all(found.verdict == "not applicable" for found in by_model.values()):
        reasons = {found.reason for found in by_model.values()}
        return Conclusion("not applicable", (), (), reasons.pop() if len(reasons) == 1 else "it applies to none of the models")
    if not about:
        named = ", ".join(name for name, found in by_model.items() if found.verdict != "not applicable")
        reason = f"it is open whether what it presupposes holds for {named}, and it applies to no other model"
        return Conclusion("inconclusive", (), (), reason)

    def judged(part: Part, level: float = 0.95) -> Finding:
        of_part = {name: found.findings[parts.index(part)] for name, found in about.items()}
        return _over_models(part, of_part, numbers, weights or {}, level)

    return _together(_holm(parts, judged), (), "model")


def _over_models(
    part: Part,
    by_model: Mapping[str, Finding],
    numbers: Mapping[str, Mapping[int, Numbers]],
    weights: Mapping[str, str],
    level: float,
) -> Finding:
    """Each model is one observation, or, where such models are said to exist, each may be the one."""
    means = _by_weights({name: finding.mean for name, finding in by_model.items()}, weights)
    if not part.of_some:
        return _judged(part, means, level=level)
    # Of twenty models at the bound, one shows it at 95 % in 40 % of cases, and at the level of all together in 2 %.
    each = 1 - (1 - level) / len(by_model)
    again = {name: judge_part(part, numbers[name], draws=True, level=each) for name in by_model}
    decides = _deciding(list(again.values()))
    model = next(name for name, finding in again.items() if finding is decides)
    verdict: Verdict = "reproduced" if decides.verdict == "reproduced" else "inconclusive"
    return dataclasses.replace(decides, by_seed=means, verdict=verdict, model=model)


def _deciding(findings: Sequence[Finding]) -> Finding:
    """Of several findings about one part, one of which must show it, the one that does so most, or comes nearest to it."""

    def inside(finding: Finding) -> float:
        mean, part = finding.mean, finding.part
        return -math.inf if mean is None else min(mean - part.more_than, part.less_than - mean)

    shown = [finding for finding in findings if finding.verdict == "reproduced"]
    left = [finding for finding in findings if finding.verdict == "inconclusive"]
    return max(shown or left or findings, key=inside)


def _by_weights(means: Mapping[str, float | None], weights: Mapping[str, str]) -> dict[str, float | None]:
    """One number for each set of weights, under its names: the mean over those that are known."""
    names: dict[str, list[str]] = {}
    for name in means:
        names.setdefault(weights.get(name, name), []).append(name)
    known = {", ".join(of): [value for name in of if (value := means[name]) is not None] for of in names.values()}
    return {name: statistics.fmean(values) if values else None for name, values in known.items()}


def _together(findings: tuple[Finding, ...], presupposed: tuple[Finding, ...], unit: str) -> Conclusion:
    """The verdict that those of all parts make; what is proved decides where there is nothing else, or where it fails."""
    counted = [finding for finding in findings if not finding.secondary]
    evidence = [finding for finding in counted if not finding.part.proved]
    if any(finding.verdict == "not reproduced" for finding in counted if finding.part.proved):
        return Conclusion("contradicts the proof", findings, presupposed)
    deciding = evidence or counted
    held = sum(finding.verdict == "reproduced" for finding in deciding)
    others = [finding for finding in deciding if finding.verdict != "reproduced"]
    if not others:
        return Conclusion("reproduced" if evidence else OF_A_PROOF["reproduced"], findings, presupposed)
    if held:
        reason = "; ".join(f"{finding.part.says!r}: {finding.verdict}" for finding in others)
        return Conclusion("in part", findings, presupposed, reason)
    for finding in sorted(others, key=lambda finding: finding.verdict != "not reproduced"):
        if finding.verdict != "inconclusive":
            return Conclusion(finding.verdict, findings, presupposed)
    return Conclusion("inconclusive", findings, presupposed, f"{others[0].part.says!r}: {_open(others[0], unit)}")


def judge_part(part: Part, numbers: Mapping[int, Numbers], *, draws: bool = False, level: float = 0.95) -> Finding:
    """The verdict about one part; see the top of this file for the rule.

    Args:
        draws: whether a seed is a draw of texts for one model. A number of a draw is a mean over many texts and heads, so draws
            that are all alike say that there is little to vary, where trainings that are all alike may be three of a kind.
        level: of the interval, for all steps together.
    """
    steps, findings = part.effect.steps, list[Finding]()
    for step in steps:
        # That one of several shows it is likelier by chance, so each interval leaves out as much less (Bonferroni).
        of_step = dataclasses.replace(part, effect=step)
        by_seed = {seed: step(of_seed) for seed, of_seed in numbers.items()}
        finding = _judged(of_step, by_seed, draws=draws, level=1 - (1 - level) / len(steps))
        findings.append(dataclasses.replace(finding, part=part))
    return _deciding(findings)


def _judged(part: Part, by_seed: Effects, *, draws: bool = False, level: float = 0.95) -> Finding:
    values = [value for value in by_seed.values() if value is not None]
    if len(values) < SEEDS:
        mean = statistics.fmean(values) if values else None
        return Finding(part, by_seed, mean, None, None, None, "inconclusive")
    if part.proved:
        estimate = Estimate(statistics.fmean(values), (min(values), max(values)), "range")
        verdict: Verdict = "reproduced" if all(map(part.holds, values)) else "not reproduced"
    else:
        # A rate that is 0 in every training is so because there is nothing, and not because there are few trainings.
        ends = part.effect.range if part.effect.range in (FRACTION, PERCENTAGE) and not part.effect.outcome else ()
        alike = min(values) == max(values) and (draws or values[0] in ends)
        estimate = Estimate(values[0], (values[0], values[0]), "range") if alike else part.effect.estimate(values, level)
        verdict = "inconclusive" if estimate.interval is None else _of_interval(part, *estimate.interval)
    if _many_lost(by_seed):
        verdict = "inconclusive"
    method = None if estimate.interval is None else estimate.method
    return Finding(part, by_seed, estimate.middle, estimate.interval, method, estimate.standardized, verdict)


def _many_lost(by_seed: Effects) -> bool:
    return sum(value is None for value in by_seed.values()) > MOST_LOST * len(by_seed)


def _of_interval(part: Part, low: float, high: float) -> Verdict:
    if part.more_than < low and high < part.less_than:
        return "reproduced"
    return "not reproduced" if high <= part.more_than or low >= part.less_than else "inconclusive"


def _open(finding: Finding, unit: str) -> str:
    """Why a part is inconclusive."""
    if finding.part.of_some and unit == "model":
        models = len(finding.by_seed)
        together = f"none of {models} models shows it by intervals that hold for all of them together"
        shows = "the model does not show it" if models == 1 else together
        return f"{shows}, which refutes nothing: the claim is that there are such models"
    known, lost = finding.known, len(finding.by_seed) - finding.known
    if known >= SEEDS and _many_lost(finding.by_seed):
        return f"{lost} of {len(finding.by_seed)} {unit}s have no number, and the others cannot speak for them"
    if known < SEEDS:
        without = f", {lost} of them without a number" if lost else ""
        seeds = f"1 {unit}" if len(finding.by_seed) == 1 else f"{len(finding.by_seed)} {unit}s"
        return f"{seeds}{without}; a verdict needs {SEEDS}"
    if finding.interval is None:
        return f"{known} {unit}s show no spread to take an interval from; {LEAST_FOR_A_MEDIAN} or more would do without"
    low, high = finding.interval
    if _of_interval(finding.part, low, high) == "not reproduced":
        return f"the interval over {unit}s, {low:.3g} to {high:.3g}, lies outside, but not at Holm's level over the parts"
    return f"the interval over {unit}s, {low:.3g} to {high:.3g}, reaches over the bound"
