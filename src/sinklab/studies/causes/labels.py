"""Labels of heads from causal evidence alone: what a head says, where it rests, and whether it needs its sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, cast

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Part, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.results.intervals import CHANCE, fewest
from sinklab.sinks import Head, Sinks
from sinklab.sinks.finding import share_of_sink
from sinklab.studies.causes.effects import Edited, Effects
from sinklab.studies.causes.evidence import MINIMAL_EFFECT, Evidence, benjamini_hochberg, contrasts_of, evidence_of, least_texts
from sinklab.studies.causes.found import Effect, Label, Undecided
from sinklab.studies.causes.samples import Samples

__all__ = ["RULES", "HeadLabel", "label_heads", "mirrored", "overall", "require_texts", "switches_within", "texts_needed"]

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
SEARCHED = 2**20
"""Texts up to which is looked for a number that would decide."""
AT_REST, ELSEWHERE = "at rest", "elsewhere"
RESTS = 0.5
"""A majority of the row: with it on the sink a head rests at that position."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLabel(Generic[Edited]):
    """What one head is, or a group of heads that were edited at once, with everything that says so.

    Attributes:
        label: one of :data:`~sinklab.studies.causes.found.LABELS`.
        domains: domain to the label there.
        needs_sink: domain to ``yes``, ``no`` or ``undecided``; empty without a sink.
        effects: contrast to domain to mean, interval and p-value.
        undecided: domain in which the head is undecided to why, and how many texts of it would decide.
        within: domain to the label where the head rests, and elsewhere, if these were measured (:func:`switches_within`).
    """

    head: Edited
    label: Label
    domains: dict[str, str]
    needs_sink: dict[str, str]
    effects: dict[str, dict[str, Effect]]
    undecided: dict[str, Undecided]
    within: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def label_heads(
    effects: Effects[Edited], sinks: Sinks, *, level: float = 0.05, minimal_effect: float = MINIMAL_EFFECT
) -> list[HeadLabel[Edited]]:
    """A label for every head that was measured, or for every group, in every domain and over all of them.

    In one domain by :data:`RULES`, where *costs* is a rise of the mean loss over texts by more than the minimal effect and
    *costs nothing* is less than that, a gain included; docs/explain.md says what each label means. The label of a head is the
    one that it has in every domain; ``switch`` if it is semantic in some and dormant in all others; ``broadcast-switch`` if it
    is semantic in some and rests in all others, in some as a broadcast; ``broadcast`` if it rests in all and is a broadcast in
    some; ``mixed`` for other labels that differ; ``undecided`` if it is so in any domain. Beside it stands whether the head
    **needs its sink** (:data:`NEEDS`): hiding it, its share going to the other keys, costs more than giving that to none.

    **What is controlled.** Claims have one-sided p-values, a label in a domain the largest of its claims (an intersection-union
    test, valid however they correlate); Benjamini and Hochberg's procedure runs over all heads, domains and labels, and once
    more over the second axis. Of the labels given in domains a share of at most ``level`` is false in expectation; where all
    are false, the chance that any is given is at most ``level``. This rests on independent texts; for costs, on means over
    texts that are near normal or skewed to the right; for what costs nothing, on no text that costs more than
    ``minimal_effect / RARE`` or than what was seen (:class:`~sinklab.studies.causes.evidence.Evidence`).

    **A minimal effect that is taken from the same texts** (:func:`~sinklab.studies.causes.evidence.minimal_effect_of`) makes no
    claim false more often. That a mean is above ``m`` is claimed where its lower confidence bound is; if that lies below the
    mean, so does every ``m`` below it, by whatever it was chosen: the p-value rises with ``m``. Likewise from above for what
    costs nothing. The false discovery rate asks for one ``m`` for all draws of texts; rounded to one digit, it nearly is.

    Args:
        effects: of the variants of :func:`~sinklab.studies.causes.effects.make_variants`.
        level: false discovery rate, between 0 and 1.
        minimal_effect: above 0, in the unit of the loss.

    Raises:
        ConfigurationError: too few texts for the error rate (says how many it takes), or variants that are missing.
        MeasurementError: an effect that is not finite.
    """
    names = effects.domain_names
    rules = RULES_WITHOUT_SINK if sinks.main is None else RULES
    counts = dict(zip(names, (~np.isnan(effects.clean_loss)).sum(0).tolist(), strict=True))
    _require(counts, len(effects.heads), len(rules), level)
    evidence = [evidence_of(effects, number, minimal_effect) for number in range(len(names))]
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
        shown = {name: {domain: contrasts[number][name][index] for number, domain in enumerate(names)} for name in contrasts[0]}
        reasons = {name: decided.reason(index, number) for number, name in enumerate(names) if domains[name] == "undecided"}
        labels.append(HeadLabel(head, overall(domains), domains, needing, shown, reasons))
    return labels


class _Decided:
    """Hypotheses of one axis: p-values ``(heads, domains, hypotheses)``, which are decided, and the next critical p-value."""

    def __init__(self, evidence: Sequence[Mapping[str, Evidence]], rules: Mapping[str, Sequence[str]], level: float) -> None:
        self.evidence, self.rules = evidence, rules
        # All claims of a label hold: the largest of their p-values (an intersection-union test, Berger 1982).
        p = [[np.maximum.reduce([of[name].p for name in names]) for names in rules.values()] for of in evidence]
        self.p = np.stack([np.stack(of_domain, axis=1) for of_domain in p], axis=1)
        self.decided, self.critical = benjamini_hochberg(self.p, level)

    def rules_of(self, head: int, domain: int) -> list[str]:
        """The hypotheses that are decided for a head in a domain."""
        return [rule for rule, decided in zip(self.rules, self.decided[head, domain], strict=True) if decided]

    def of(self, head: int, domain: int) -> str:
        """The one that is decided, if it is one."""
        decided = self.rules_of(head, domain)
        return decided[0] if len(decided) == 1 else "undecided"

    def reason(self, head: int, domain: int) -> Undecided:
        """Why no label is given."""
        if decided := self.rules_of(head, domain):
            return Undecided(decided[0], [], None)  # the claims of several all hold, and a head has one label
        evidence = self.evidence[domain]
        texts = {rule: needed for rule in self.rules if (needed := self._needed(rule, head, domain, 0.5)) is not None}
        if texts:
            nearest = min(texts, key=lambda rule: texts[rule])
            not_shown = [name for name in self.rules[nearest] if evidence[name].p[head] > self.critical]
            return Undecided(nearest, not_shown, self._needed(nearest, head, domain, CHANCE))
        against = {rule: [name for name in names if not evidence[name].holds[head]] for rule, names in self.rules.items()}
        nearest = min(against, key=lambda rule: len(against[rule]))
        not_shown = against[nearest] or [max(self.rules[nearest], key=lambda name: float(evidence[name].p[head]))]
        return Undecided(nearest, not_shown, None)

    def _needed(self, rule: str, head: int, domain: int, chance: float) -> int | None:
        """Least number of texts at which all claims are decided, each with a chance; ``None`` if no number of them does."""
        claims = [self.evidence[domain][name] for name in self.rules[rule]]

        def decided(texts: int) -> bool:
            return all(float(claim.p_of_texts(texts, chance)[head]) <= self.critical for claim in claims)

        if not all(claim.holds[head] for claim in claims):
            return None
        return fewest(decided, claims[0].values.shape[1], SEARCHED)


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


def mirrored(labels: Sequence[HeadLabel], minimal_effect: float) -> dict[str, int]:
    """By domain, heads that would look semantic if gains were costs: all three edits help by more than the minimal effect.

    What a head with random weights says helps as often as it harms. A trained model of whose heads as many are semantic as are
    mirrored in the same domain is no better than that on these texts; one that does not know the texts of a domain may have
    mirrored heads there, and labels elsewhere that mean what they say.
    """
    names = [name for name in RULES["semantic"] if labels and name in labels[0].effects]
    return {
        domain: sum(all(label.effects[name][domain].high < -minimal_effect for name in names) for label in labels)
        for domain in (labels[0].domains if labels else {})
    }


def texts_needed(labels: Sequence[HeadLabel]) -> int | None:
    """Texts of each domain that would decide half of what is undecided only for want of texts; ``None`` if none is foretold.

    A head counts, once for every domain, if its means fulfil all claims of a label there.
    """
    needed = [reason.texts for label in labels for reason in label.undecided.values() if reason.texts is not None]
    return int(np.ceil(np.median(needed))) if needed else None


def require_texts(samples: Samples, sinks: Sinks, heads: int, *, level: float = 0.05) -> None:
    """Refuse before the work what :func:`label_heads` would refuse behind it.

    Args:
        heads: how many will be judged together, or groups.

    Raises:
        ConfigurationError: too few texts for the error rate; says how many are needed.
    """
    _require(samples.counts, heads, len(RULES_WITHOUT_SINK if sinks.main is None else RULES), level)


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


# --- switches within a text -------------------------------------------------------------------------------------------------


def switches_within(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    labels: Sequence[HeadLabel],
    measure: Callable[[Mapping[Head, Samples]], Mapping[Head, Effects]],
    *,
    level: float,
    minimal_effect: float,
    batch_size: int = 16,
) -> list[HeadLabel]:
    """The labels, those of some heads with what they are in each half of every domain: where they rest, and elsewhere.

    A head that is semantic elsewhere and dormant or a broadcast where it rests is a switch in that domain. Asked are heads that
    are not silent on every domain, with a tenth of their weight on the sink or more; none where the texts are too few for what
    they are asked twice. Every query is edited, and what changes at a position may come from another: what spreads makes a
    switch undecided rather than found. Heads whose queries are not the scored positions are left as they are.

    Args:
        measure: head to its samples in halves (:func:`split`), to the effects of its edits on each half; called once, if any.
        level: divided by the number of heads that are asked.
    """
    heads = _candidates(labels, sinks, samples, level)
    rests = _where_it_rests(model, samples, sinks, heads, batch_size=batch_size) if heads else []
    halves = {}
    for head, own_rests in zip(heads, rests, strict=True):
        if own_rests is None:
            continue
        parted = split(samples, own_rests.to(samples.domains.device))
        counts = parted.counts.values()
        if min(counts) >= least_texts(len(counts) * len(RULES), level / len(heads)):  # else it rests nowhere, or everywhere
            halves[head] = parted
    effects = measure(halves) if halves else {}
    new_labels = []
    for label in labels:
        if label.head in effects:
            (own,) = label_heads(effects[label.head], sinks, level=level / len(heads), minimal_effect=minimal_effect)
            label = _with_halves(label, own.domains)
        new_labels.append(label)
    return new_labels


def _candidates(labels: Sequence[HeadLabel], sinks: Sinks, samples: Samples, level: float) -> list[Head]:
    weights = dict(zip(sinks.heads, sinks.weights.tolist(), strict=True))
    heads = [
        label.head
        for label in labels
        if sinks.main is not None
        and weights[label.head] >= RESTS / 5
        and not {"dormant", "broadcast", "unneeded"} >= set(label.domains.values())
    ]
    needed = least_texts(2 * len(samples.domain_names) * len(RULES), level / max(1, len(heads)))
    return heads if min(samples.counts.values()) >= needed else []


@torch.no_grad()
def _where_it_rests(
    model: nn.Module, samples: Samples, sinks: Sinks, heads: Sequence[Head], *, batch_size: int
) -> list[Tensor | None]:
    """Of each head, at which positions more than half of its row is on the sink, boolean ``(samples, seq_len)``."""
    parts: list[list[Tensor | None]] = []
    for _, part in samples.parts(batch_size):
        watcher = _Shares(sinks)
        with attend(model, [watcher]):
            model(**lean_arguments(model, part.inputs))
        parts.append([watcher.at_scored(head, part) for head in heads])
    found: list[Tensor | None] = []
    for number in range(len(heads)):
        own = [rests for part in parts if (rests := part[number]) is not None]
        found.append(torch.cat(own) if len(own) == len(parts) else None)
    return found


class _Shares(Watcher):
    """Share of every row on the main sink, by module, float64 ``(batch, heads, q_len)``; and of which part the module is."""

    name, needs = "sink_shares", frozenset({"mass", "log_sum_exp"})

    def __init__(self, sinks: Sinks) -> None:
        self.sinks, self.shares, self.parts = sinks, dict[str, Tensor](), dict[str, Part]()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        share = share_of_sink(self.sinks, call, statistics)
        if share is not None and call.site.kind == "self":
            self.shares[call.site.module], self.parts[call.site.module] = share.double().cpu(), call.site.part

    def at_scored(self, head: Head, part: Samples) -> Tensor | None:
        """Whether a head rests at each position of ``domains``; ``None`` where its queries are other ones."""
        of, shares = self.parts[head.module], self.shares[head.module]
        tokens = part.inputs.get("decoder_input_ids" if of == "decoder" else "input_ids")
        front = 0 if tokens is None else max(0, shares.shape[2] - tokens.shape[1])
        rests = shares[:, head.head, front:] > RESTS
        return rests if of != "encoder" and rests.shape == part.domains.shape else None


def split(samples: Samples, rests: Tensor) -> Samples:
    """The samples with every domain in two: positions of ``(samples, seq_len)`` at which a head rests, and the others."""
    domains = torch.where(samples.domains >= 0, 2 * samples.domains + (~rests).long(), samples.domains)
    names = tuple(f"{name}, {half}" for name in samples.domain_names for half in (AT_REST, ELSEWHERE))
    return dataclasses.replace(samples, domains=domains, domain_names=names)


def _with_halves(label: HeadLabel, halves: Mapping[str, str]) -> HeadLabel:
    """A label with what its head is in each half of the domains."""
    domains, within = dict(label.domains), {}
    for domain in label.domains:
        own = {half: halves[f"{domain}, {half}"] for half in (AT_REST, ELSEWHERE)}
        within[domain] = own
        if own[ELSEWHERE] == "semantic" and own[AT_REST] in ("dormant", "broadcast"):
            domains[domain] = overall(own)
    return dataclasses.replace(label, label=overall(domains), domains=domains, within=within)
