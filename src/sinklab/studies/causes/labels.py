"""Labels of heads from causal evidence alone: what a head says, where it rests, and whether it needs its sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, cast, get_args

import numpy as np

from sinklab.errors import ConfigurationError
from sinklab.results.summaries.causes import Effect, Label
from sinklab.sinks import Sinks
from sinklab.studies.causes.effects import Edited, Effects
from sinklab.studies.causes.evidence import Contrast, Evidence, benjamini_hochberg, contrasts_of, evidence_of, least_texts
from sinklab.studies.causes.reasons import Claim, Reason, reason_of
from sinklab.studies.causes.samples import Samples

__all__ = [
    "LABELS",
    "MINIMAL_EFFECT",
    "RULES",
    "HeadLabel",
    "label_heads",
    "mirrored",
    "overall",
    "require_texts",
    "texts_needed",
]

LABELS: tuple[Label, ...] = get_args(Label)

MINIMAL_EFFECT = 0.01
"""In nats; 1 % of perplexity. Models of many heads have a smaller one (:mod:`~sinklab.studies.causes.threshold`)."""

RULES: dict[str, tuple[str, ...]] = {
    "semantic": ("redirect", "zero", "resample"),
    "constant": ("redirect", "zero", "resample costs nothing"),
    "dormant": ("redirect costs nothing", "zero_value costs nothing", "hide - zero_value"),
    "broadcast": ("redirect costs nothing", "zero_value"),
    "unneeded": ("redirect costs nothing", "zero costs nothing", "zero_value costs nothing", "hide costs nothing"),
}
"""Contrasts that must all hold for a label in one domain; see :func:`~sinklab.studies.causes.evidence.evidence_of`."""

RULES_WITHOUT_SINK: dict[str, tuple[str, ...]] = {
    "semantic": ("zero", "resample"),
    "constant": ("zero", "resample costs nothing"),
    "unneeded": ("zero costs nothing",),
}

NEEDS: dict[str, tuple[str, ...]] = {"yes": ("hide", "hide - zero_value"), "no": ("hide - zero_value costs nothing",)}
"""The second axis, by what it is called: whether a head needs its sink as a place for its attention."""

RESTING = {"dormant", "broadcast"}


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLabel(Generic[Edited]):
    """What one head is, or a group of heads that were edited at once, with everything that says so.

    Attributes:
        label: one of :data:`LABELS`.
        by_domain: domain to the label there.
        needs_sink: domain to ``yes``, ``no`` or ``undecided``; empty without a sink.
        p: domain to hypothesis to its p-value, not corrected.
        evidence: contrast to domain to mean, interval and p-value.
        reasons: domain in which the head is undecided to why, and how many texts of it would decide.
        within: domain to the label where the head rests, and elsewhere, if these were measured
            (:mod:`~sinklab.studies.causes.within`).
    """

    head: Edited
    label: Label
    by_domain: dict[str, str]
    needs_sink: dict[str, str]
    p: dict[str, dict[str, float]]
    evidence: dict[str, dict[str, Contrast]]
    reasons: dict[str, Reason]
    within: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        of_head: dict[str, object] = {"head": str(self.head), "label": self.label, "by_domain": self.by_domain, "p": self.p}
        reasons = {domain: reason.to_dict() for domain, reason in self.reasons.items()}
        return of_head | {
            "needs_sink": self.needs_sink,
            "evidence": self.evidence_dict(),
            "undecided": reasons,
            "within": self.within,
        }

    def evidence_dict(self) -> dict[str, dict[str, Effect]]:
        """The evidence for JSON: by contrast and domain."""
        return {
            name: {domain: contrast.to_dict() for domain, contrast in domains.items()}
            for name, domains in self.evidence.items()
        }


def label_heads(
    effects: Effects[Edited], sinks: Sinks, *, level: float = 0.05, minimal_effect: float = MINIMAL_EFFECT
) -> list[HeadLabel[Edited]]:
    """A label for every head that was measured, or for every group, in every domain and over all of them.

    In one domain, by what becomes of the mean loss over texts, where *costs* is a rise by more than the minimal effect and
    *costs nothing* is less than that, a gain included (:data:`RULES`):

    - ``semantic``: being silent costs in both ways, with all mass on the sink and with an output of 0; and so does saying what
      the head says at the same position of another text.
    - ``constant``: being silent costs in both ways, and saying what it says on another text costs nothing.
    - ``dormant``: all mass on the sink costs nothing, nor does losing the sink's value; but without the sink, its share going
      to the other keys, the loss rises. A no-op that depends on its sink.
    - ``broadcast``: all mass on the sink costs nothing, and losing the sink's value does.
    - ``unneeded``: neither silence nor any loss of the sink costs.

    Without a sink (``sinks.main`` is ``None``) there are ``semantic``, ``constant`` and ``unneeded``, judged by an output of 0.
    The label of a head is the one that it has in every domain; ``switch`` if it is semantic in some and dormant in all others;
    ``broadcast-switch`` if it is semantic in some and rests in all others, in some as a broadcast; ``broadcast`` if it rests in
    all and is a broadcast in some; ``mixed`` for other labels that differ; and ``undecided`` if it is so in any domain.

    Beside the label stands whether the head **needs its sink** (:data:`NEEDS`): hiding the sink, whose share then goes to the
    other keys, costs more, by the minimal effect, than taking the same share away and giving it to none.

    **What is controlled.** Claims have one-sided p-values, a label in a domain the largest of its claims (an intersection-union
    test, valid however they correlate); Benjamini and Hochberg's procedure runs over all heads, domains and labels, and once
    more over the second axis. Of the labels given in domains a share of at most ``level`` is false in expectation; where all
    are false, the chance that any is given is at most ``level``. This rests on independent texts; for costs, on means over
    texts that are near normal or skewed to the right; for what costs nothing, on no text that costs more than
    ``minimal_effect / RARE`` or than what was seen (:class:`~sinklab.studies.causes.evidence.Evidence`). Labels are about
    this model and these texts: a head with random weights may be of use by luck (:func:`mirrored`).

    **A minimal effect that is taken from the same texts** (:mod:`~sinklab.studies.causes.threshold`) makes no claim false more
    often. That a mean is above ``m`` is claimed where its lower confidence bound is. If the bound lies below the mean, as it
    does in all but a share of cases, then every ``m`` below it lies below the mean too, by whatever it was chosen: the p-value
    rises with ``m``. Likewise from above for what costs nothing, as long as no text costs more than the test allows for. The
    false discovery rate asks for more, one ``m`` for all draws of texts; rounded to one digit, it is the same in nearly all.

    Args:
        effects: of the variants of :func:`~sinklab.studies.causes.variants.make_variants`.
        level: false discovery rate, between 0 and 1.
        minimal_effect: above 0, in the unit of the loss.

    Raises:
        ConfigurationError: too few texts for the error rate (says how many it takes), variants that are missing, or settings
            out of range.
        MeasurementError: an effect that is not finite.
    """
    judged = _Judged(effects, sinks, level, minimal_effect)
    names = effects.domain_names
    contrasts = [contrasts_of(evidence) for evidence in judged.evidence]
    labels = []
    for index, head in enumerate(effects.heads):
        by_domain = {name: judged.labels.of(index, number) for number, name in enumerate(names)}
        needs = {} if judged.needs is None else {name: judged.needs.of(index, number) for number, name in enumerate(names)}
        evidence = {
            contrast: {name: contrasts[number][contrast][index] for number, name in enumerate(names)}
            for contrast in contrasts[0]
        }
        reasons = {
            name: judged.reason(index, number, contrasts[number])
            for number, name in enumerate(names)
            if by_domain[name] == "undecided"
        }
        p = {name: judged.labels.p_of(index, number) for number, name in enumerate(names)}
        labels.append(HeadLabel(head, overall(by_domain), by_domain, needs, p, evidence, reasons))
    return labels


def mirrored(labels: Sequence[HeadLabel], minimal_effect: float) -> dict[str, int]:
    """By domain, heads that would look semantic if gains were costs: all three edits help by more than the minimal effect.

    What a head with random weights says helps as often as it harms. A trained model of whose heads as many are semantic as are
    mirrored in the same domain is no better than that on these texts; one that does not know the texts of a domain may have
    mirrored heads there, and labels elsewhere that mean what they say.
    """
    names = [name for name in RULES["semantic"] if labels and name in labels[0].evidence]
    return {
        domain: sum(all(label.evidence[name][domain].interval.high < -minimal_effect for name in names) for label in labels)
        for domain in (labels[0].by_domain if labels else {})
    }


def texts_needed(labels: Sequence[HeadLabel]) -> int | None:
    """Texts of each domain that would decide half of what is undecided only for want of texts; ``None`` if none is foretold.

    A head counts, once for every domain, if its means fulfil all claims of a label there.
    """
    needed = [reason.texts for label in labels for reason in label.reasons.values() if reason.texts is not None]
    return int(np.ceil(np.median(needed))) if needed else None


def require_texts(samples: Samples, sinks: Sinks, heads: Sequence[object], *, level: float = 0.05) -> None:
    """Refuse before the work what :func:`label_heads` would refuse behind it.

    Args:
        heads: that will be judged together, or groups.

    Raises:
        ConfigurationError: too few texts for the error rate; says how many are needed.
    """
    counts = {name: int((samples.domains == number).any(dim=1).sum()) for number, name in enumerate(samples.domain_names)}
    _require(counts, len(heads), len(RULES_WITHOUT_SINK if sinks.main is None else RULES), level)


class _Judged:
    """What is decided of all heads in all domains."""

    def __init__(self, effects: Effects[Edited], sinks: Sinks, level: float, minimal_effect: float) -> None:
        if not 0 < level < 1:
            raise ConfigurationError(f"level {level:g} must lie between 0 and 1: the share of labels that may be false")
        if not minimal_effect > 0:
            raise ConfigurationError(f"minimal effect {minimal_effect:g} must be above 0: no effect can be shown to be none")
        self.rules = RULES_WITHOUT_SINK if sinks.main is None else RULES
        texts = (~np.isnan(effects.clean_loss)).sum(0)
        counts = dict(zip(effects.domain_names, texts.tolist(), strict=True))
        _require(counts, len(effects.heads), len(self.rules), level)
        self.evidence = [evidence_of(effects, number, minimal_effect) for number in range(len(effects.domain_names))]
        missing = [name for rule in self.rules.values() for name in rule if name not in self.evidence[0]]
        if missing:
            raise ConfigurationError(
                f"no evidence for {missing[0]!r}: measured were {', '.join(effects.variants)}; take those of make_variants()"
            )
        self.labels = _Decided(self.evidence, self.rules, level)
        self.needs = None if sinks.main is None else _Decided(self.evidence, NEEDS, level)

    def reason(self, head: int, domain: int, contrasts: Mapping[str, Sequence[Contrast]]) -> Reason:
        """Why no label is given."""
        claims = {
            rule: [Claim(name, self.evidence[domain][name], contrasts[name][head].interval, head) for name in names]
            for rule, names in self.rules.items()
        }
        decided = [rule for index, rule in enumerate(self.rules) if self.labels.decided[head, domain, index]]
        return reason_of(claims, self.labels.critical, decided)


class _Decided:
    """Hypotheses of one axis: p-values ``(heads, domains, hypotheses)``, which are decided, and the next critical p-value."""

    def __init__(self, evidence: Sequence[Mapping[str, Evidence]], rules: Mapping[str, Sequence[str]], level: float) -> None:
        self.rules = list(rules)
        # All claims of a label hold: the largest of their p-values (an intersection-union test, Berger 1982).
        p = [[np.maximum.reduce([of[name].p for name in names]) for names in rules.values()] for of in evidence]
        self.p = np.stack([np.stack(of_domain, axis=1) for of_domain in p], axis=1)
        self.decided, self.critical = benjamini_hochberg(self.p, level)

    def of(self, head: int, domain: int) -> str:
        """The one hypothesis that is decided for a head in a domain."""
        decided = list(self._names(head, domain))
        return decided[0] if len(decided) == 1 else "undecided"

    def p_of(self, head: int, domain: int) -> dict[str, float]:
        """Hypothesis to its p-value."""
        return dict(zip(self.rules, self.p[head, domain].tolist(), strict=True))

    def _names(self, head: int, domain: int) -> Iterator[str]:
        return (rule for rule, decided in zip(self.rules, self.decided[head, domain], strict=True) if decided)


def overall(by_domain: Mapping[str, str]) -> Label:
    """The label of a head, from those that it has in every domain."""
    labels = set(by_domain.values())
    if len(labels) > 1:
        halves = {"switch": {"semantic", "dormant"}, "broadcast-switch": {"semantic", "broadcast"}}
        labels = {part for label in labels for part in halves.get(label, {label})}
    if len(labels) == 1 or "undecided" in labels:
        return cast(Label, labels.pop()) if len(labels) == 1 else "undecided"
    if labels == RESTING:
        return "broadcast"
    if "semantic" in labels and labels - {"semantic"} <= RESTING:
        return "switch" if "broadcast" not in labels else "broadcast-switch"
    return "mixed"


def _require(counts: dict[str, int], heads: int, rules: int, level: float) -> None:
    hypotheses = heads * len(counts) * rules
    needed = least_texts(hypotheses, level)
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < needed:
        factors = f"{heads} head{'s' * (heads > 1)}, {len(counts)} domain{'s' * (len(counts) > 1)}, {rules} labels"
        raise ConfigurationError(
            f"{counts[fewest]} texts of domain {fewest!r} are too few: {hypotheses} hypotheses ({factors}) at "
            f"an error rate of {level:g} ask for p-values down to {level / hypotheses:.1e}, and so "
            f"many texts give {2.0 ** -counts[fewest]:.1e} at best; take {needed} texts or more, fewer heads, or a higher rate"
        )
