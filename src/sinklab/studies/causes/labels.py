"""Labels of heads from causal evidence alone: intervals, p-values of claims, the change that is nothing, and what follows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias, cast

import numpy as np

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, means_over_items
from sinklab.sinks import Sinks
from sinklab.studies.causes.effects import Edited, Effects, HeadGroup
from sinklab.studies.causes.found import Effect, Label, MinimalEffect, Undecided
from sinklab.studies.causes.samples import Samples

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


Rules: TypeAlias = dict[str, tuple[str, ...]]

RULES: Rules = {
    "text-dependent": ("redirect", "zero", "resample"),
    "constant": ("redirect", "zero", "resample costs nothing"),
    "dormant": ("redirect costs nothing", "zero_value costs nothing", "hide - zero_value"),
    "bias": ("redirect costs nothing", "zero_value", "mean_sink costs nothing"),
    "broadcast": ("redirect costs nothing", "zero_value", "mean_sink"),
    "unneeded": ("redirect costs nothing", "zero costs nothing", "zero_value costs nothing", "hide costs nothing"),
    "active": ("redirect", "zero"),
    "needs-sink": ("hide",),
    "slight": ("redirect is slight", "hide is slight"),
}
"""Contrasts that must all hold for a label in one domain (:func:`~sinklab.studies.causes.labels.evidence_of`). The last three
are what is known of a head of which no other label is; *slight* is asked of models of many heads alone."""

RULES_WITHOUT_SINK: Rules = {
    "text-dependent": ("zero", "resample"),
    "constant": ("zero", "resample costs nothing"),
    "unneeded": ("zero costs nothing",),
    "active": ("zero",),
    "slight": ("zero is slight",),
}

IN_PART = {"active": ("text-dependent", "constant"), "needs-sink": (), "slight": ()}
"""Labels of what is decided of a head, to those that say more of the same; any other label says more than they do."""

NEEDS: Rules = {"yes": ("hide", "hide - zero_value"), "no": ("hide - zero_value costs nothing",)}
"""The second axis, by what it is called: whether a head needs its sink as a place for its attention."""

RESTING = {"dormant", "bias", "broadcast"}


def rules_of(sinks: Sinks, variants: Sequence[str], *, many: bool = False) -> Rules:
    """The rules for a sink and the variants that are measured.

    A sink that is the same in all texts (BOS in front, a null score) has no mean to be replaced by: what it carries is a bias.
    Nor has one whose place differs from text to text, and what it carries counts as a broadcast."""
    rules = dict(RULES if sinks.main is not None else RULES_WITHOUT_SINK)
    if not many:
        del rules["slight"]
    if sinks.main is None or "mean_sink" in variants:
        return rules
    del rules["broadcast" if sinks.main.kind in ("position", "null") else "bias"]
    return {label: tuple(claim for claim in claims if not claim.startswith("mean_sink")) for label, claims in rules.items()}


def asked_for(effects: Effects[Edited], sinks: Sinks, *, level: float, minimal_effect: float) -> list[list[str]]:
    """For every head the edits that are missing for a label, or its need of the sink, of which nothing measured speaks
    against.

    What it says to cost is shown by itself at the level, and what it says to cost nothing does so in the mean. Choosing edits
    by the effects of others makes no label false more often: its p-value is 1 as long as a claim of it is not measured."""
    wanted: list[set[str]] = [set() for _ in effects.heads]
    rules = rules_of(sinks, effects.variants)
    for number in range(len(effects.domain_names)):
        evidence = evidence_of(effects, number, minimal_effect)
        measured = {name: ~np.isnan(one.values).all(1) for name, one in evidence.items()}
        for claims in (*rules.values(), *([NEEDS["yes"]] if sinks.main is not None else ())):
            shown = {name: measured[name] & (evidence[name].p <= level) for name in claims}
            costs = np.any([shown[name] for name in claims if evidence[name].above] or [np.zeros(len(wanted), bool)], axis=0)
            fits = [
                ~measured[name] | shown[name] | (costs & evidence[name].holds & (not evidence[name].above)) for name in claims
            ]
            for index in np.flatnonzero(np.all(fits, axis=0) & np.any([measured[name] for name in claims], axis=0)):
                wanted[index] |= {word for name in claims if not measured[name][index] for word in name.split()}
    there = np.isfinite(effects.loss).any((2, 3))
    return [
        [name for row, name in enumerate(effects.variants) if name in own and not there[row, index]]
        for index, own in enumerate(wanted)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLabel(Generic[Edited]):
    """What one head is, or a group that was edited at once: label overall and by domain, need of the sink by domain (empty
    without one), effects by contrast and domain, and of the domains in which it is undecided why."""

    head: Edited
    label: Label
    domains: dict[str, str]
    needs_sink: dict[str, str]
    effects: dict[str, dict[str, Effect]]
    undecided: dict[str, Undecided]


def label_heads(
    effects: Effects[Edited], sinks: Sinks, *, level: float = 0.05, minimal_effect: float = MINIMAL_EFFECT, many: bool = False
) -> list[HeadLabel[Edited]]:
    """A label for every head that was measured, or for every group, in every domain and over all of them.

    In one domain by :data:`RULES`: *costs* is a rise of the mean loss over texts by more than the minimal effect
    (``minimal_effect``, in the unit of the loss), *costs nothing* less than that. Over domains: the label that it has in all;
    ``switch`` if it is text-dependent in some and rests in all others; if it rests in all, the one that says most; ``mixed``
    for others that differ; ``undecided`` if it is so in any. Beside it stands whether the head **needs its sink**
    (:data:`NEEDS`). Of ``many`` heads those that cost less than an even share are *slight*.

    **What is controlled.** A label's p-value in a domain is the largest of its claims' (an intersection-union test); Benjamini
    and Hochberg's procedure runs over all heads, domains and labels, once more over *slight* and once over the second axis: of
    the labels given in domains a share of at most ``level`` is false in expectation. This rests on independent texts; for
    costs, on means over texts that are near normal or skewed to the right; for what costs nothing, on no text that costs more
    than ``minimal_effect / RARE`` or than what was seen. A minimal effect from the same texts makes no claim false more often:
    a claim that a mean is above ``m`` is made where its lower confidence bound is, by whatever ``m`` was chosen.

    Raises:
        ConfigurationError: too few texts for the error rate (says how many it takes), or variants that are missing.
        MeasurementError: an effect that is not finite.
    """
    names = effects.domain_names
    rules = rules_of(sinks, effects.variants, many=many)
    counts = dict(zip(names, (~np.isnan(effects.clean_loss)).sum(0).tolist(), strict=True))
    _require(counts, len(effects.heads), len(rules), level)
    evidence = [evidence_of(effects, number, minimal_effect, many=many) for number in range(len(names))]
    missing = [name for rule in rules.values() for name in rule if name not in evidence[0]]
    if missing:
        raise ConfigurationError(
            f"no evidence for {missing[0]!r}: measured were {', '.join(effects.variants)}; take those of make_variants()"
        )
    decided, needs = _Decided(evidence, rules, level), None if sinks.main is None else _Decided(evidence, NEEDS, level)
    contrasts = [contrasts_of(of_domain) for of_domain in evidence]
    labels = []
    for index, head in enumerate(effects.heads):
        domains = {name: decided.of(index, number) for number, name in enumerate(names)}
        needing = {} if needs is None else {name: needs.of(index, number) for number, name in enumerate(names)}
        measured = {
            name: {domain: effect for number, domain in enumerate(names) if (effect := contrasts[number][name][index])}
            for name in contrasts[0]
        }
        shown = {name: of_domains for name, of_domains in measured.items() if of_domains}
        open_in = [number for number, name in enumerate(names) if domains[name] == "undecided" or domains[name] in IN_PART]
        reasons = {names[number]: decided.reason(index, number) for number in open_in}
        if np.isnan(effects.loss[:, index]).all():
            domains, needing, reasons = dict.fromkeys(names, "not-run"), {}, {}
        labels.append(HeadLabel(head, overall(domains), domains, needing, shown, reasons))
    return labels


class _Decided:
    """Hypotheses of one axis: p-values ``(heads, domains, hypotheses)``, which are decided, and the next critical p-value."""

    def __init__(self, evidence: Sequence[Mapping[str, Evidence]], rules: Mapping[str, Sequence[str]], level: float) -> None:
        self.evidence, self.rules = evidence, rules
        # All claims of a label hold: the largest of their p-values (an intersection-union test, Berger 1982).
        p = [[np.maximum.reduce([of[name].p for name in names]) for names in rules.values()] for of in evidence]
        self.p = np.stack([np.stack(of_domain, axis=1) for of_domain in p], axis=1)
        # Slight heads are many: among the others they would pay for false labels that say more.
        slight = np.array([rule == "slight" for rule in rules])
        self.decided = np.zeros(self.p.shape, dtype=bool)
        self.decided[..., ~slight], self.critical = benjamini_hochberg(self.p[..., ~slight], level)
        if slight.any():
            self.decided[..., slight], _ = benjamini_hochberg(self.p[..., slight], level)

    def rules_of(self, head: int, domain: int) -> list[str]:
        """The hypotheses that are decided for a head in a domain, without those of which another says more."""
        decided = [rule for rule, decided in zip(self.rules, self.decided[head, domain], strict=True) if decided]
        if any(rule not in IN_PART for rule in decided):
            return [rule for rule in decided if rule not in IN_PART]
        return decided[:1]  # of what is known in part, what the head does before what it needs

    def of(self, head: int, domain: int) -> str:
        """The one that is decided, if it is one."""
        decided = self.rules_of(head, domain)
        return decided[0] if len(decided) == 1 else "undecided"

    def reason(self, head: int, domain: int) -> Undecided:
        """Why no whole label is given."""
        if len(decided := self.rules_of(head, domain)) > 1:
            return Undecided(decided[0], [])  # the claims of several all hold, and a head has one label
        evidence = self.evidence[domain]
        rules = [rule for rule in self.rules if rule not in IN_PART and (not decided or self._fits(rule, decided[0]))]
        rules = rules or [rule for rule in self.rules if rule not in IN_PART]
        against = {rule: sum(not evidence[name].holds[head] for name in self.rules[rule]) for rule in rules}
        p = dict(zip(self.rules, self.p[head, domain], strict=True))
        nearest = min(rules, key=lambda rule: (against[rule], p[rule]))
        return Undecided(nearest, [name for name in self.rules[nearest] if evidence[name].p[head] > self.critical])

    @staticmethod
    def _fits(rule: str, part: str) -> bool:
        return not IN_PART[part] or rule in IN_PART[part]


def overall(by_domain: Mapping[str, str]) -> Label:
    """The label of a head, from those that it has in every domain."""
    labels = set(by_domain.values())
    if len(labels) == 1:
        return cast(Label, labels.pop())
    if "undecided" in labels or labels & IN_PART.keys():
        return "undecided"
    if labels <= RESTING:
        return "broadcast" if "broadcast" in labels else "bias"
    return "switch" if "text-dependent" in labels and labels - {"text-dependent"} <= RESTING else "mixed"


def require_texts(samples: Samples, sinks: Sinks, heads: int, *, level: float = 0.05, many: bool = False) -> None:
    """Refuse before the work what :func:`label_heads` would refuse behind it: too few texts for so many heads, or groups."""
    _require(samples.counts, heads, len(rules_of(sinks, ["mean_sink"], many=many)), level)


def _require(counts: dict[str, int], heads: int, rules: int, level: float) -> None:
    hypotheses = heads * len(counts) * rules
    needed = least_texts(hypotheses, level)
    fewest_of = min(counts, key=lambda name: counts[name])
    if counts[fewest_of] < needed:
        raise ConfigurationError(
            f"{counts[fewest_of]} texts of domain {fewest_of!r} are too few: {hypotheses} hypotheses (heads {heads} × domains "
            f"{len(counts)} × labels {rules}) at an error rate of {level:g} ask for p-values down to {level / hypotheses:.1e}, "
            f"and so many texts give {2.0 ** -counts[fewest_of]:.1e} at best; take {needed} texts or more, fewer heads, or a "
            "higher rate"
        )
