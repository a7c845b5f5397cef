"""Groups of heads: which ones, and what is found when the heads of a group are edited at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from sinklab.errors import ConfigurationError
from sinklab.results.intervals import means_over_items
from sinklab.results.metric import Row
from sinklab.results.summaries.causes import ExaminedGroup, ExaminedHead
from sinklab.results.summaries.shared import Difference
from sinklab.sinks import Head
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.finding import LOSS_CHANGE, bounds
from sinklab.studies.causes.head_group import HeadGroup
from sinklab.studies.causes.labels import LABELS, HeadLabel
from sinklab.studies.causes.listing import divergences
from sinklab.studies.causes.request import ChosenHeads, Pair

__all__ = ["EDITS", "chosen_heads", "examined_groups", "group_rows", "groups_of_labels", "most_groups"]

PROBE = "causes_groups"

EDITS = ("zero", "resample", "redirect", "hide", "zero_value")
"""What is done to a group: all that labels rest on, and no controls."""


def chosen_heads(chosen: ChosenHeads, heads: Sequence[Head]) -> tuple[list[Head], list[HeadGroup]]:
    """The heads of a model that are to be examined by themselves, and the groups.

    Raises:
        ConfigurationError: a head that the model has not.
    """
    known = {(head.layer, head.head): head for head in heads}

    def of(pairs: Iterable[Pair]) -> list[Head]:
        missing = [f"{layer}.{head}" for layer, head in pairs if (layer, head) not in known]
        if missing:
            counts, first, last = Counter(head.layer for head in heads), known[min(known)], known[max(known)]
            least, most = min(counts.values()), max(counts.values())
            raise ConfigurationError(
                f"`heads` {','.join(missing)}: there is no such head; the model has {len(counts)} layers of "
                f"{least if least == most else f'{least} to {most}'} heads, written layer.head from {_named(first)} to "
                f"{_named(last)}"
            )
        return [known[pair] for pair in pairs]

    groups = [HeadGroup(tuple(of(group))) for group in chosen.groups]
    if chosen.layers:
        layers = list(dict.fromkeys(head.layer for head in heads))
        groups += [HeadGroup(tuple(head for head in heads if head.layer == layer), f"layer {layer}") for layer in layers]
    # Heads that were named and are all those of a layer are one group: of its place in the list, and of the layer's name.
    once = {frozenset(group.members): group for group in groups}
    return list(heads) if chosen.alone is None else of(chosen.alone), list(once.values())


def _named(head: Head) -> str:
    """A head with its module, whose own number is another one where not every layer attends."""
    return f"{head} ({head.module})" if head.module else str(head)


def groups_of_labels(labels: Sequence[HeadLabel], known: Sequence[HeadGroup] = ()) -> list[HeadGroup]:
    """All heads of each label but *semantic*, where there are two or more; heads that seem to do little may share the work.

    Args:
        known: groups that are examined anyway, and not once more.
    """
    by_label: dict[str, list[Head]] = {}
    for label in labels:
        by_label.setdefault(label.label, []).append(label.head)
    there = {frozenset(group.members) for group in known}
    return [
        HeadGroup(tuple(heads), f"all {name}")
        for name, heads in by_label.items()
        if name != "semantic" and len(heads) > 1 and frozenset(heads) not in there
    ]


def most_groups(heads: int) -> int:
    """How many groups :func:`groups_of_labels` makes of so many heads at the most."""
    return min(heads // 2, len(LABELS) - 1)


def examined_groups(
    labels: Sequence[HeadLabel[HeadGroup]], effects: Effects[HeadGroup], alone: Sequence[ExaminedHead], of_heads: Effects
) -> list[ExaminedGroup]:
    """An entry for every group that has a label.

    Args:
        effects: of the groups.
        alone: the entries of all of their members.
        of_heads: effects on these, on the same texts.
    """
    entries = {(head["layer"], head["head"]): head for head in alone}
    found: list[ExaminedGroup] = []
    for row, label in enumerate(labels):
        group = label.head
        own = [entries[head.layer, head.head] for head in group.members]
        found.append(
            {
                "name": str(group),
                "called": group.called,
                "members": list(map(str, group.members)),
                "label": label.label,
                "domains": dict(label.by_domain),
                "needs_sink": dict(label.needs_sink),
                "undecided": {domain: reason.to_dict() for domain, reason in label.reasons.items()},
                "sink_weight": _mean([head["sink_weight"] for head in own]),
                "value_ratio": _mean([head["value_ratio"] for head in own]),
                "sink_weights": {
                    domain: _mean([head["sink_weights"].get(domain) for head in own]) for domain in effects.domain_names
                },
                "value_ratios": {
                    domain: _mean([head["value_ratios"].get(domain) for head in own]) for domain in effects.domain_names
                },
                "effects": label.evidence_dict(),
                "divergence": divergences(effects, row),
                "alone": dict(Counter(head["label"] for head in own)),
                "beyond_alone": _beyond_alone(effects, row, of_heads),
            }
        )
    return found


def _beyond_alone(effects: Effects[HeadGroup], row: int, of_heads: Effects) -> dict[str, dict[str, Difference]]:
    """By edit and domain, what the group costs on a text less the sum of what its members cost there, mean with its interval.

    Above 0 they stand in for each other; below 0 they do the same work one after the other.
    """
    members = [of_heads.heads.index(head) for head in effects.heads[row].members]
    beyond: dict[str, dict[str, Difference]] = {}
    for variant in effects.variants:
        more = effects.of(variant)[row] - of_heads.of(variant)[members].sum(0)
        beyond[variant] = {}
        for number, domain in enumerate(effects.domain_names):
            (interval,) = means_over_items(more[np.isfinite(more[:, number]), number][None])
            beyond[variant][domain] = bounds(interval)
    return beyond


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def group_rows(effects: Effects[HeadGroup]) -> list[Row]:
    """Means over texts of the changes of the loss, by group, edit and domain; the column ``module`` has the members."""
    rows: list[Row] = []
    for variant, group, domain in np.ndindex(len(effects.variants), len(effects.heads), len(effects.domain_names)):
        changes = effects.loss[variant, group, :, domain]
        changes = changes[np.isfinite(changes)]
        rows.append(
            {
                "probe": PROBE, "metric": LOSS_CHANGE.of(effects.unit), "intervention": effects.variants[variant],
                "module": "+".join(map(str, effects.heads[group].members)), "corpus": effects.domain_names[domain],
                "value": float(changes.mean()), "count": len(changes),
            }
        )  # fmt: skip
    return rows
