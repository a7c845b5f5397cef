"""What find_causes() found, as the entries of the summary and the rows of the long table: heads, groups, sinks, effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from sinklab.results.metric import VALUE_RATIO, Metric, Row
from sinklab.results.summaries.causes import ExaminedHead, FoundSink
from sinklab.sinks import Sinks, weigh_sinks
from sinklab.studies.causes.effects import Edited, Effects
from sinklab.studies.causes.finding import LOSS_CHANGE, SINK_SHARE, number
from sinklab.studies.causes.labels import HeadLabel
from sinklab.studies.causes.samples import Samples

__all__ = ["by_domain", "divergences", "effect_rows", "examined_heads", "found_sink", "head_rows"]

PROBE = "causes"
DIVERGENCE = Metric(
    "divergence", "nats", "Mean over texts of the divergence of the predictions under the intervention from the model's."
)


def by_domain(model: nn.Module, samples: Samples, sinks: Sinks, batch_size: int) -> dict[str, Sinks]:
    """What every head gives to the main sink on the texts of each domain alone."""
    if sinks.main is None or len(samples.domain_names) == 1:
        return dict.fromkeys(samples.domain_names, sinks)
    own = {}
    for index, name in enumerate(samples.domain_names):
        rows = (samples.domains == index).any(1)
        inputs = {key: tensor[rows.to(tensor.device)] for key, tensor in samples.inputs.items()}
        own[name] = weigh_sinks(model, inputs, sinks, batch_size=batch_size)
    return own


def examined_heads(
    labels: Sequence[HeadLabel], sinks: Sinks, own_sinks: Mapping[str, Sinks], effects: Effects
) -> list[ExaminedHead]:
    """An entry for every head that has a label.

    Args:
        own_sinks: of :func:`by_domain`.
    """
    return [_examined(label, sinks, own_sinks, effects) for label in labels]


def _examined(label: HeadLabel, sinks: Sinks, own_sinks: Mapping[str, Sinks], effects: Effects) -> ExaminedHead:
    index = sinks.heads.index(label.head)
    return {
        "layer": label.head.layer,
        "head": label.head.head,
        "module": label.head.module,
        "label": label.label,
        "domains": dict(label.by_domain),
        "within": label.within,
        "needs_sink": dict(label.needs_sink),
        "undecided": {domain: reason.to_dict() for domain, reason in label.reasons.items()},
        "sink_weight": number(sinks.weights[index]),
        "value_ratio": number(sinks.value_ratio[index]),
        "sink_weights": {name: number(own.weights[index]) for name, own in own_sinks.items()},
        "value_ratios": {name: number(own.value_ratio[index]) for name, own in own_sinks.items()},
        "effects": label.evidence_dict(),
        "divergence": divergences(effects, effects.heads.index(label.head)),
    }


def divergences(effects: Effects[Edited], row: int) -> dict[str, dict[str, float | None]]:
    """Mean divergence under each intervention and domain of the head, or the group, in a row of the effects."""
    return {
        name: dict(zip(effects.domain_names, map(number, np.nanmean(values[row], axis=0)), strict=True))
        for name, values in zip(effects.variants, effects.divergence, strict=True)
        if not name[-1].isdecimal()  # the numbered ones are controls
    }


def found_sink(sinks: Sinks) -> FoundSink:
    """Where the sink is and what every head gives to it, for JSON."""
    heads = zip(sinks.heads, sinks.weights.tolist(), sinks.value_ratio.tolist(), strict=True)
    return {
        "place": sinks.main.place if sinks.main else None,
        "name": sinks.main.name if sinks.main else "",
        "tried": [{"place": place, "weight": weight} for place, weight in sinks.tried[:8]],
        "secondary": sinks.secondary,
        "heads": {str(head): {"weight": number(weight), "value_ratio": number(ratio)} for head, weight, ratio in heads},
    }


def effect_rows(effects: Effects) -> list[Row]:
    """Means over texts of the changes of the loss and of the divergences, for every variant, head and domain."""
    rows: list[Row] = []
    for metric, values in ((LOSS_CHANGE.of(effects.unit), effects.loss), (DIVERGENCE.of(effects.unit), effects.divergence)):
        counts = np.isfinite(values).sum(axis=2)
        means = np.nansum(values, axis=2) / np.maximum(counts, 1)
        for variant, head_index, domain in np.argwhere(counts > 0).tolist():
            head = effects.heads[head_index]
            rows.append(
                {
                    "probe": PROBE, "metric": metric, "intervention": effects.variants[variant],
                    "module": head.module,
                    "layer": head.layer, "head": head.head, "corpus": effects.domain_names[domain],
                    "value": float(means[variant, head_index, domain]), "count": int(counts[variant, head_index, domain]),
                }
            )  # fmt: skip
    return rows


def head_rows(listed: Sequence[ExaminedHead]) -> list[Row]:
    """Weight on the sink and length of its value, for every head."""
    return [
        {
            "probe": PROBE, "metric": metric, "module": head["module"], "layer": head["layer"],
            "head": head["head"], "value": value, "count": 1,
        }
        for head in listed
        for value, metric in ((head["sink_weight"], SINK_SHARE), (head["value_ratio"], VALUE_RATIO))
        if value is not None
    ]  # fmt: skip
