"""Evidence: what was measured over texts, as intervals and one-sided p-values of claims; and the change that is nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, means_over_items
from sinklab.studies.causes.effects import Edited, Effects, HeadGroup
from sinklab.studies.causes.found import Effect, MinimalEffect

MINIMAL_EFFECT = 0.01
"""In nats; 1 % of perplexity. Models of many heads have a smaller one (:func:`minimal_effect_of`)."""
SHARE = 1 / 20
"""Of what one head would be worth if all were worth the same."""
LEAST_WORTH = 0.1
"""Nats that all attention must be worth for a smaller minimal effect: what luck gives heads with random weights is less."""
MANY = 64
"""Heads up to which each is asked whether it does its share; of more, whether it does a twentieth of its layer's."""
SILENCED = ("zero", "resample")
"""How the worth of attention is taken: every output is 0; every output is that of another text."""
RARE = 0.02
"""Share of texts: what an edit costs in fewer texts than these is not looked for. A claim that it costs nothing allows for a
cost of ``minimal effect / RARE`` in a text, fifty times the minimal effect, and for as much as was seen where that is more.
With the same allowance a claim that it costs less than an even share, twenty times the minimal effect, takes some ten texts."""

BETS = ((1.0, 0.7), (0.5, 0.1), (0.2, 0.1), (0.05, 0.1))
"""Stakes of the test that a mean lies below a bound, as shares of the largest, and how the first unit is split among them. The
largest gains most where effects hardly vary, the smaller ones where they do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """One contrast of all heads in one domain: a claim that the mean over texts is above ``bound``, or below it.

    Attributes:
        values: float64 ``(heads, texts)``; NaN where a head was not measured, and its p-value is 1 where it never was.
        most: what a text may cost, by assumption, for a claim that it costs less: ``bound / RARE``, or more where more was
            seen.
    """

    values: np.ndarray
    bound: float
    above: bool = True
    most: float | None = None

    @functools.cached_property
    def p(self) -> np.ndarray:
        """One-sided p-values of the claim, float64 ``(heads,)``."""
        found = np.ones(len(self.values))
        for rows, values in self._parts:
            if self.above:
                found[rows] = _p_above(values.mean(1), values.std(1, ddof=1), values.shape[1], self.bound)
            else:
                found[rows] = _p_below(values, self.bound, self.bound / RARE if self.most is None else self.most)
        return found

    @functools.cached_property
    def holds(self) -> np.ndarray:
        """Whether the mean that is seen lies on the claim's side of the bound, boolean ``(heads,)``."""
        found = np.zeros(len(self.values), dtype=bool)
        for rows, values in self._parts:
            found[rows] = values.mean(1) > self.bound if self.above else values.mean(1) < self.bound
        return found

    @functools.cached_property
    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows of heads that were measured on as many texts, two or more, with these values."""
        there = ~np.isnan(self.values)
        counts = there.sum(1)
        parts = []
        for count in np.unique(counts[counts > 1]).tolist():
            rows = np.flatnonzero(counts == count)
            parts.append((rows, self.values[rows][there[rows]].reshape(len(rows), count)))
        return parts


COSTS = ("redirect", "hide", "zero", "zero_value", "mean_sink", "resample")
"""Edits of which it is asked whether they cost."""


def evidence_of(effects: Effects[Edited], domain: int, minimal_effect: float, *, many: bool = False) -> dict[str, Evidence]:
    """Every contrast of one domain, as far as its variants were measured, by name.

    ``redirect`` and so on: the effect is above the minimal effect; ``redirect costs nothing``: it is below (an edit that helps
    costs nothing either); ``redirect is slight``, of ``many`` heads: it is below an even share, ``minimal_effect / SHARE``;
    ``hide - zero_value``: hiding the sink, so that its share goes to the other keys, costs more than giving the same share to
    none.

    Raises:
        ConfigurationError: fewer than two texts have scored positions in the domain.
        MeasurementError: an effect that is not finite.
    """
    name = effects.domain_names[domain]
    texts = ~np.isnan(effects.clean_loss[:, domain])
    if texts.sum() < 2:
        scored = "1 text has" if texts.sum() else "no text has"
        raise ConfigurationError(f"domain {name!r}: {scored} scored positions, and intervals need two")
    broken = np.argwhere(np.isinf(effects.loss[:, :, texts, domain]))
    if len(broken):
        variant, head = effects.variants[broken[0][0]], effects.heads[broken[0][1]]
        raise MeasurementError(
            f"domain {name!r}: the loss is not finite under {variant!r} on head {head} ({len(broken)} such effects in all); "
            "run the model in float32, or leave the head out"
        )
    changes = {name: effects.of(name)[:, texts, domain] for name in COSTS if name in effects.variants}
    if "hide" in changes and "zero_value" in changes:
        changes["hide - zero_value"] = changes["hide"] - changes["zero_value"]
    contrasts: dict[str, Evidence] = {}
    for name, values in changes.items():
        contrasts[name] = Evidence(values, minimal_effect)
        contrasts[f"{name} costs nothing"] = nothing = Evidence(values, minimal_effect, above=False)
        if many:
            slight = dataclasses.replace(nothing, bound=minimal_effect / SHARE, most=minimal_effect / RARE)
            contrasts[f"{name} is slight"] = slight
    return contrasts


def contrasts_of(evidence: Mapping[str, Evidence]) -> dict[str, list[Effect | None]]:
    """Means with their intervals, and the p-values, one for every head that was measured, by name; texts are resampled once
    for all that were measured on as many."""
    found: dict[str, list[Effect | None]] = {name: [None] * len(one.values) for name, one in evidence.items()}
    of_count: dict[int, list[tuple[str, int, np.ndarray]]] = {}
    for name, one in evidence.items():
        if one.above:  # a claim that it costs and one that it does not share their values
            for rows, values in one._parts:
                rows_of = of_count.setdefault(values.shape[1], [])
                rows_of += [(name, int(row), own) for row, own in zip(rows, values, strict=True)]
    for cells in of_count.values():
        intervals = means_over_items(np.stack([own for _, _, own in cells]))
        for (name, row, _), interval in zip(cells, intervals, strict=True):
            for claim in (name, f"{name} costs nothing", f"{name} is slight"):
                if claim in evidence:
                    found[claim][row] = Effect(**interval.to_dict(), p=float(evidence[claim].p[row]))
    return found


# --- tests ------------------------------------------------------------------------------------------------------------------


def benjamini_hochberg(p: np.ndarray, level: float) -> tuple[np.ndarray, float]:
    """Which hypotheses are decided at a false discovery rate (boolean, as ``p``), and the largest p-value that one more could
    have.

    Benjamini and Hochberg 1995; the rate holds under independence and positive dependence, such as that of heads on the same
    texts."""
    import scipy.stats

    decided = scipy.stats.false_discovery_control(p.ravel()).reshape(p.shape) <= level
    return decided, level * min(int(decided.sum()) + 1, p.size) / p.size


def least_texts(hypotheses: int, level: float) -> int:
    """Texts from which on one head alone can be decided: ``2^-n <= level / hypotheses``."""
    return max(2, int(np.ceil(np.log2(hypotheses / level))))


def _p_above(mean: np.ndarray, spread: np.ndarray, texts: int, bound: float) -> np.ndarray:
    """p-values of a mean being above a bound: Student's t, and never less than ``2^-texts`` (the sign test), since no number
    of decimals makes a few texts say more. Where costs are skewed to the right, Student's t errs against this claim."""
    import scipy.special  # and not scipy.stats: the same function without checks that cost twenty times as much

    distance, error = mean - bound, spread / np.sqrt(texts)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        t = np.where(error > 0, distance / error, np.where(distance > 0, np.inf, -np.inf))
    return np.maximum(scipy.special.stdtr(texts - 1, -t), 2.0**-texts)


def _p_below(values: np.ndarray, bound: float, most: float) -> np.ndarray:
    """p-values of a mean being below a bound, for effects ``(heads, texts)`` that may be nothing in most texts, large in a
    few.

    Bets against a mean of the bound or more: with a stake ``s`` a text of cost ``x`` multiplies what one has by ``1 + s (m -
    x)``, ``m`` being the bound, where ``s`` is at most ``1 / (c - m)`` and no text costs more than ``c``, here ``most`` or the
    largest cost that was seen. No stake gains in expectation then, and the chance of ever having ``1/p`` is at most ``p``, for
    every distribution of costs up to ``c`` (Waudby-Smith and Ramdas 2024, arXiv 2010.09686). Student's t would not do: where a
    head is active in one text of fifty, sixteen others have a mean of 0 and no spread. Here they give ``(1 - m/c)^n``, 5 % at
    about ``3 c / m`` texts (the rule of three)."""
    largest = np.maximum(values.max(1), most)[:, None]
    gains = []
    with np.errstate(divide="ignore"):
        for share, unit in BETS:
            left = np.maximum(1 + share / (largest - bound) * (bound - values), 0.0)
            gains.append(np.log(unit) + np.log(left).mean(1) * values.shape[1])
    return np.asarray(np.exp(-np.maximum(np.logaddexp.reduce(gains), 0.0)))


def minimal_effect_of(effects: Effects[HeadGroup]) -> MinimalEffect:
    """The minimal effect for a model, from the effects of :data:`SILENCED` on one group, that of all heads.

    A twentieth of a head's fair share of what attention is worth, of a layer's where there are more than :data:`MANY` heads,
    rounded to one digit so that nearly all draws of texts give the same; in nats at most :data:`MINIMAL_EFFECT`. Worth is the
    lesser of the two costs, since with random weights an output of 0 hurts half of the time; of several domains the largest
    counts. Both intervals must lie above 0, and in nats the worth must be :data:`LEAST_WORTH`; or the minimal effect is
    :data:`MINIMAL_EFFECT`."""
    (everything,) = effects.heads
    heads, unit = len(everything.members), effects.unit
    shares = heads if heads <= MANY else len({head.module for head in everything.members})
    worth: dict[str, dict[str, Interval]] = {}
    for number, domain in enumerate(effects.domain_names):
        costs = np.stack([effects.of(variant)[0, :, number] for variant in SILENCED])
        costs = costs[:, np.isfinite(costs).all(0)]
        if costs.shape[1] > 1:
            worth[domain] = dict(zip(SILENCED, means_over_items(costs), strict=True))
    least = LEAST_WORTH if unit == "nats" else 0.0
    lesser = {
        domain: min(costs.values(), key=lambda cost: cost.mean)
        for domain, costs in worth.items()
        if min(cost.low for cost in costs.values()) > 0 and min(cost.mean for cost in costs.values()) >= least
    }
    best = max(lesser, key=lambda name: lesser[name].mean, default=None)
    value = MINIMAL_EFFECT
    if best is not None:
        value = float(f"{SHARE * lesser[best].mean / shares:.0e}")
        value = min(value, MINIMAL_EFFECT) if unit == "nats" else value
    return MinimalEffect(value, "auto", shares, best, worth, "heads" if heads <= MANY else "layers")
