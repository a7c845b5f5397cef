"""The contract of claims: a statement with its citation, variants that can be run, and parts that can come out either way."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable

from sinklab.errors import ConfigurationError
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.testing._checks import Checks, first_line
from sinklab_claims.contract.claim import BASELINE, COSTS, SCALES, Claim, Part
from sinklab_claims.contract.effect import Difference, Extreme, Numbers, Ratio, Rise, Slope, Trend, Value
from sinklab_claims.reproduce.store import make_cells
from sinklab_claims.verdict.rule import judge_part

ALWAYS = {"diverged", "held_out_loss", "steps"}
"""Numbers that every trained model has without a read-out."""


MANY = 40
"""Seeds with numbers made up: enough for an interval of counts, which is as wide as 3 over their number."""


def check_claim(claim: Claim | Callable[[], Claim]) -> None:
    """Check that a claim keeps the contract of :class:`~sinklab_claims.contract.claim.Claim`, without training anything.

    It says its statement in a sentence and cites a paper; its variants are configurations at every scale at which it has a
    cost; every number that a part needs is produced; and every part is reproduced by numbers made up to lie in its region,
    and not reproduced by numbers outside.

    Args:
        claim: a claim, or the function that returns it.

    Raises:
        ContractError: with the name of the check, what was expected and what was found.
    """
    check = Checks(f"claim {getattr(claim, 'name', getattr(claim, '__name__', 'of no name'))!r}")
    made = claim if isinstance(claim, Claim) else claim()
    check.require(isinstance(made, Claim), "type", "a Claim", type(made).__name__)
    _words(check, made)
    _configurations(check, made)
    produced = _produced(check, made)
    for part in (*made.parts, *made.presupposes):
        _either_way(check, part)
    _on_checkpoint(check, made, produced)


def _words(check: Checks, claim: Claim) -> None:
    for name in ("statement", "published"):
        text = getattr(claim, name)
        sentence = bool(re.fullmatch(r"\S.*[.!?]", text, flags=re.DOTALL))
        check.require(sentence, name, "a sentence that ends with a full stop", repr(text))

    check.require(bool(re.fullmatch(r"[a-z]+\d{4}", claim.source)), "source", "a name such as gu2024", claim.source)
    known = set(claim.costs) <= set(SCALES) and set(claim.costs.values()) <= set(COSTS)
    check.require(known, "costs", f"scales of {', '.join(SCALES)} with {', '.join(COSTS)}", dict(claim.costs))
    check.require(set(claim.evidence) <= set(claim.costs), "evidence", "scales at which it is run", list(claim.evidence))


def _configurations(check: Checks, claim: Claim) -> None:
    for scale in claim.costs:
        for base in claim.bases:
            try:
                make_cells(claim.variants, scale, (0,), base)
            except ConfigurationError as error:
                check.require(False, "variants", f"valid configurations at scale {scale}, base {base}", first_line(error))


def _produced(check: Checks, claim: Claim) -> set[str] | None:
    """What is measured cannot be known without measuring; of trained models the read-outs say what they give."""
    trained = {variant.label for variant in claim.variants}
    produced: set[str] | None = set(ALWAYS)
    for read_out in claim.read_outs:
        if isinstance(read_out, str):
            check.require(read_out in read_outs, "read_outs", f"names of {', '.join(read_outs)}", read_out)
        function = read_outs[read_out] if isinstance(read_out, str) else read_out
        metrics: tuple[Metric, ...] | None = getattr(function, "metrics", None)
        if metrics is None:
            metrics = getattr(sys.modules[function.__module__], "METRICS", None)
        produced = None if produced is None or metrics is None else produced | {metric.name for metric in metrics}
    for part in (*claim.parts, *claim.presupposes):
        for variant, metric in sorted(part.effect.needs()):
            known = variant in trained or claim.measure is not None or not trained
            check.require(known, "variants", f"{part.says!r} to speak of {', '.join(sorted(trained))}", variant)
            if variant in trained and produced is not None:
                names = ", ".join(sorted(produced))
                check.require(metric in produced, "metrics", f"{part.says!r} to need one of {names}", metric)
    return produced


def _on_checkpoint(check: Checks, claim: Claim, produced: set[str] | None) -> None:
    """A checkpoint gives what the read-outs give, and nothing that training alone knows."""
    how = claim.checkpoint
    if how is None:
        return
    for part in (*(how.parts or claim.parts), *claim.presupposes):
        _either_way(check, part)
        for label, metric in sorted(part.effect.needs()) if how.measure is None else ():
            known = label == BASELINE and metric not in ALWAYS and (produced is None or metric in produced)
            check.require(known, "checkpoint", f"{part.says!r} to need numbers of its read-outs", f"{metric} of {label}")


def _either_way(check: Checks, part: Part) -> None:
    for inside, verdict in ((True, "reproduced"), (False, "not reproduced")):
        numbers = _numbers(part, inside)
        if numbers is None:
            where = f"a correlation {'in' if inside else 'out'}side of {part.region}"
            check.require(not isinstance(part.effect, Trend), "verdict", f"{part.says!r} to allow {where}", "none from -1 to 1")
            continue  # an effect of another kind than those of sinklab
        outcome = judge_part(part, dict.fromkeys(range(MANY), numbers))
        where = f"{part.says!r} {verdict} by an effect {'in' if inside else 'out'}side of {part.region}"
        check.require(outcome.verdict == verdict, "verdict", where, f"{outcome.verdict} with {outcome.mean}")
    for gone in part.effect.needs():
        fewer = {
            label: {metric: 1.0 for other, metric in part.effect.needs() if other == label and (other, metric) != gone}
            for label, _ in part.effect.needs()
        }
        found_without = part.effect(fewer)
        check.require(found_without is None, "needs", f"{part.says!r} to have no effect without {gone}", found_without)


def _numbers(part: Part, inside: bool) -> Numbers | None:
    """Numbers whose effect lies in the region of a part, or outside of it; ``None`` where that is not known how."""
    effect, target = part.effect, _target(part, inside)
    count, values = len(effect.pairs), list[float]()
    if isinstance(effect, Trend):
        slope = next((slope for slope in (1.0, -1.0, 0.0) if part.holds(slope) == inside), None)
        values = [] if slope is None else [slope * at for at in range(count)]
    elif isinstance(effect, Value | Extreme):
        values = [target] * count
    elif isinstance(effect, Difference | Ratio):
        values = [target, 1.0 if isinstance(effect, Ratio) else 0.0]
    elif isinstance(effect, Rise):
        values = [target * at for at in range(count)]
    elif isinstance(effect, Slope):
        values = [target * math.log2(at) for at in effect.at]
    numbers: dict[str, dict[str, float]] = {}
    for (label, metric), value in reversed(list(zip(effect.pairs, values, strict=False))):
        numbers.setdefault(label, {})[metric] = value
    return numbers or None


def _target(part: Part, inside: bool) -> float:
    low, high = part.more_than, part.less_than
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2 if inside else high + (high - low)
    bound, way = (low, 1.0) if math.isfinite(low) else (high, -1.0)
    return bound + way * (1.0 if inside else -1.0) * max(abs(bound), 1.0)
