"""Labels of heads from causal evidence alone: semantic, dormant, switch, broadcast, or undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sinklab.errors import ConfigurationError
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.evidence import Contrast, Evidence, benjamini_hochberg, evidence_of, least_texts
from sinklab.studies.causes.samples import Samples

__all__ = ["LABELS", "MINIMAL_EFFECT", "RULES", "HeadLabel", "label_heads", "require_texts", "texts_needed"]

LABELS = ("semantic", "dormant", "switch", "broadcast", "undecided")

MINIMAL_EFFECT = 0.01
"""In nats; 1 % of perplexity. In the embedded softmax model, on Python text, changes that say nothing (another key hidden from
a head, the sink's value zeroed) move the loss by less than 0.006, while silencing one of its twelve heads costs 0.01 to 0.7;
and sixteen texts of 256 tokens are enough to tell effects of this size from none. Losses in other units need their own."""

RULES: dict[str, tuple[str, ...]] = {
    "semantic": ("redirect", "zero", "rotated"),
    "dormant": ("redirect is nothing", "zero_value costs nothing", "hide - control"),
    "broadcast": ("redirect is nothing", "zero_value", "rotated"),
}
"""Contrasts that must all hold for a label in one domain; see :func:`~sinklab.studies.causes.evidence.evidence_of`."""

RULES_WITHOUT_SINK: dict[str, tuple[str, ...]] = {"semantic": ("zero", "rotated")}

SEARCHED = 2**20
"""Texts up to which :func:`texts_needed` looks."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLabel:
    """What one head is, with everything that says so.

    Attributes:
        label: one of :data:`LABELS`.
        by_domain: domain to the label there; ``switch`` is none.
        p: domain to hypothesis to its p-value, not corrected.
        evidence: contrast to domain to mean, interval and p-value.
    """

    head: Head
    label: str
    by_domain: dict[str, str]
    p: dict[str, dict[str, float]]
    evidence: dict[str, dict[str, Contrast]]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        of_head: dict[str, object] = {"head": str(self.head), "label": self.label, "by_domain": self.by_domain, "p": self.p}
        return of_head | {"evidence": self.evidence_dict()}

    def evidence_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """The evidence for JSON: by contrast and domain."""
        return {
            name: {domain: contrast.to_dict() for domain, contrast in domains.items()}
            for name, domains in self.evidence.items()
        }


def label_heads(
    effects: Effects, sinks: Sinks, *, level: float = 0.05, minimal_effect: float = MINIMAL_EFFECT
) -> list[HeadLabel]:
    """A label for every head that was measured, in every domain and over all of them.

    In one domain, by what becomes of the mean loss over texts, where *nothing* is within the minimal effect of 0 and *costs* is
    above it (:data:`RULES`; :func:`~sinklab.studies.causes.evidence.evidence_of` has the contrasts):

    - ``semantic``: being silent costs in both ways, with all mass on the sink and with an output of 0; and the head as it
      is does better than rotated copies of itself, so that it matters what it says.
    - ``dormant``: being silent the way the model does it (all mass on the sink) is nothing, and losing the sink's value does
      not cost; but hiding the sink costs, more by the minimal effect than hiding another key. A no-op that depends on its sink.
    - ``broadcast``: all mass on the sink is nothing, losing the sink's value costs, and rotated copies do worse.

    Without a sink (``sinks.main`` is ``None``) there is ``semantic`` alone, judged by an output of 0. The label of a head is
    the one that it has in every domain, ``switch`` if it is semantic in some and dormant in all others, else ``undecided``.

    **Why rotated copies.** With random weights, too, silencing a head changes the loss by a definite amount, as often to the
    worse as to the better, and enough texts will show it. But there the real output is one draw among rotated ones, which gives
    a test that is exact up to the shape of a tail (:class:`~sinklab.studies.causes.evidence.Evidence`). A rotated *change* on
    top of the output would not do: at an optimum all changes of one size cost the same, exactly so for a squared
    error, and a head that solves its task could not be told from noise.

    **What is controlled.** Claims have one-sided p-values, a label in a domain the largest of its claims (an intersection-union
    test, valid however they correlate); Benjamini and Hochberg's procedure runs over all heads, domains and labels. Of
    the labels given in domains a share of at most ``level`` is false in expectation; where all are false, the chance that any
    is given is at most ``level``. This rests on independent texts, on means over texts that are near normal, and for rotated
    copies on the shape above. Labels of heads ask for all domains and are false more seldom. ``dormant`` claims sizes of
    effects and no meaning of a direction: weights that are random and have a sink may be dormant in truth.

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
    contrasts = [{name: contrast.contrasts() for name, contrast in evidence.items()} for evidence in judged.evidence]
    labels = []
    for index, head in enumerate(effects.heads):
        by_domain = {name: judged.label(index, number) for number, name in enumerate(names)}
        p = {name: dict(zip(judged.rules, judged.p[index, number].tolist(), strict=True)) for number, name in enumerate(names)}
        evidence = {
            contrast: {name: contrasts[number][contrast][index] for number, name in enumerate(names)}
            for contrast in contrasts[0]
        }
        labels.append(HeadLabel(head, _overall(by_domain), by_domain, p, evidence))
    return labels


def texts_needed(effects: Effects, sinks: Sinks, *, level: float = 0.05, minimal_effect: float = MINIMAL_EFFECT) -> int | None:
    """Texts of each domain that would decide half of what is undecided only for want of texts; ``None`` if nothing is.

    Means and spreads are taken to stay as they are. A head counts, once for every domain, if its means fulfil all claims of a
    label there, and rotated controls do not stand against it.
    """
    judged = _Judged(effects, sinks, level, minimal_effect)
    needed = []
    for index in range(len(effects.heads)):
        for number in range(len(effects.domain_names)):
            if judged.label(index, number) == "undecided":
                counts = [judged.needed(index, number, rule) for rule in judged.rules]
                needed += [min(texts for texts in counts if texts is not None)] if any(counts) else []
    return int(np.ceil(np.median(needed))) if needed else None


def require_texts(samples: Samples, sinks: Sinks, heads: Sequence[Head], *, level: float = 0.05) -> None:
    """Refuse before the work what :func:`label_heads` would refuse behind it.

    Raises:
        ConfigurationError: too few texts for the error rate; says how many are needed.
    """
    counts = {name: int((samples.domains == number).any(dim=1).sum()) for number, name in enumerate(samples.domain_names)}
    _require(counts, len(heads), len(RULES_WITHOUT_SINK if sinks.main is None else RULES), level)


class _Judged:
    """p-values of all hypotheses, and which of them are decided."""

    def __init__(self, effects: Effects, sinks: Sinks, level: float, minimal_effect: float) -> None:
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
        self.p = np.stack(
            [np.stack([_joint(evidence, rule) for rule in self.rules.values()], axis=1) for evidence in self.evidence], axis=1
        )
        self.decided, self.critical = benjamini_hochberg(self.p, level)

    def label(self, head: int, domain: int) -> str:
        """The one label that is decided for a head in a domain."""
        decided = [rule for index, rule in enumerate(self.rules) if self.decided[head, domain, index]]
        return decided[0] if len(decided) == 1 else "undecided"

    def needed(self, head: int, domain: int, rule: str) -> int | None:
        """Least number of texts at which a hypothesis would be decided; ``None`` if no number of them would do."""
        claims = [self.evidence[domain][name].of_head(head) for name in self.rules[rule]]

        def decided(texts: int) -> bool:
            return all(claim.p_of_texts(texts)[0] <= self.critical for claim in claims)

        low, high = claims[0].values.shape[1], SEARCHED
        if not decided(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if decided(middle) else (middle + 1, high)
        return low


def _joint(evidence: dict[str, Evidence], names: Sequence[str]) -> np.ndarray:
    """All claims of a label hold: the largest of their p-values (an intersection-union test, Berger 1982)."""
    return np.asarray(np.maximum.reduce([evidence[name].p for name in names]))


def _overall(by_domain: dict[str, str]) -> str:
    labels = set(by_domain.values())
    if len(labels) == 1:
        return labels.pop()
    return "switch" if labels == {"semantic", "dormant"} else "undecided"


def _require(counts: dict[str, int], heads: int, rules: int, level: float) -> None:
    hypotheses = heads * len(counts) * rules
    needed = least_texts(hypotheses, level)
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < needed:
        raise ConfigurationError(
            f"{counts[fewest]} texts of domain {fewest!r} are too few: {hypotheses} hypotheses ({heads} heads, {len(counts)} "
            f"domains, {rules} labels) at an error rate of {level:g} ask for p-values down to {level / hypotheses:.1e}, and so "
            f"many texts give {2.0 ** -counts[fewest]:.1e} at best; take {needed} texts or more, fewer heads, or a higher rate"
        )
