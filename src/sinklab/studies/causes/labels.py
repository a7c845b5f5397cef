"""Labels of heads from causal evidence alone: what a head says, where it rests, and whether it needs its sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias, cast

import numpy as np

from sinklab.errors import ConfigurationError
from sinklab.sinks import Sinks
from sinklab.studies.causes.effects import Edited, Effects
from sinklab.studies.causes.evidence import MINIMAL_EFFECT, Evidence, benjamini_hochberg, contrasts_of, evidence_of, least_texts
from sinklab.studies.causes.found import Effect, Label, Undecided
from sinklab.studies.causes.samples import Samples

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
"""Contrasts that must all hold for a label in one domain (:func:`~sinklab.studies.causes.evidence.evidence_of`). The last three
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

    In one domain by :data:`RULES`: *costs* is a rise of the mean loss over texts by more than the minimal effect, *costs
    nothing* less than that. Over domains: the label that it has in all; ``switch`` if it is text-dependent in some and rests
    in all others; if it rests in all, the one that says most; ``mixed`` for others that differ; ``undecided`` if it is so in
    any. Beside it stands whether the head **needs its sink** (:data:`NEEDS`).

    **What is controlled.** A label's p-value in a domain is the largest of its claims' (an intersection-union test); Benjamini
    and Hochberg's procedure runs over all heads, domains and labels, once more over *slight* and once over the second axis: of
    the labels given in domains a share of at most ``level`` is false in expectation. This rests on independent texts; for
    costs, on means over texts that are near normal or skewed to the right; for what costs nothing, on no text that costs more
    than ``minimal_effect / RARE`` or than what was seen. A minimal effect from the same texts makes no claim false more often:
    a claim that a mean is above ``m`` is made where its lower confidence bound is, by whatever ``m`` was chosen.

    Args:
        effects: of the variants of :func:`~sinklab.studies.causes.effects.make_variants`.
        minimal_effect: above 0, in the unit of the loss.
        many: whether heads that cost less than an even share are *slight*, where no more is decided.

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


def mirrored(labels: Sequence[HeadLabel], minimal_effect: float) -> dict[str, int]:
    """By domain, heads that would look text-dependent if gains were costs: all three edits help by the minimal effect.

    What a head with random weights says helps as often as it harms: a model with as many text-dependent heads as mirrored ones
    is no better than that on these texts."""
    names = [name for name in RULES["text-dependent"] if any(name in label.effects for label in labels)]
    return {
        domain: sum(
            "zero" in names
            and all(
                domain in label.effects.get(name, {}) and label.effects[name][domain].high < -minimal_effect for name in names
            )
            for label in labels
        )
        for domain in (labels[0].domains if labels else {})
    }


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
