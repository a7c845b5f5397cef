"""What find_causes() found as entries of the summary and rows of the long table: heads, groups of them, sinks, effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import nn

from sinklab.errors import ConfigurationError
from sinklab.results.metric import VALUE_RATIO, Row
from sinklab.sinks import Head, Sinks, weigh_sinks
from sinklab.studies.causes.effects import LOSS_CHANGE, SINK_SHARE, Effects, HeadGroup, number
from sinklab.studies.causes.found import ExaminedGroup, ExaminedHead, FoundSink
from sinklab.studies.causes.labels import HeadLabel
from sinklab.studies.causes.request import ChosenHeads, Pair
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.screen import Screened

PROBE = "causes"
SINKS, OTHERS = ", sinks", ", others"
"""How the names of the groups of a layer end."""


# --- which heads ------------------------------------------------------------------------------------------------------------


def chosen_heads(chosen: ChosenHeads, heads: Sequence[Head]) -> tuple[list[Head], list[HeadGroup]]:
    """The heads of a model that are to be examined by themselves, and the groups; one that the model has not is refused."""
    known = {(head.layer, head.head): head for head in heads}

    def of(pairs: Sequence[Pair]) -> list[Head]:
        missing = [f"{layer}.{head}" for layer, head in pairs if (layer, head) not in known]
        if missing:
            counts, first, last = Counter(head.layer for head in heads), known[min(known)], known[max(known)]
            least, most = min(counts.values()), max(counts.values())
            raise ConfigurationError(
                f"`heads` {','.join(missing)}: there is no such head; the model has {len(counts)} layers of "
                f"{least if least == most else f'{least} to {most}'} heads, written layer.head from {first} ({first.module}) "
                f"to {last} ({last.module})"
            )
        return [known[pair] for pair in pairs]

    groups = [HeadGroup(tuple(of(group))) for group in chosen.groups]
    if chosen.layers:
        layers = list(dict.fromkeys(head.layer for head in heads))
        groups += [HeadGroup(tuple(head for head in heads if head.layer == layer), f"layer {layer}") for layer in layers]
    # Heads that were named and are all those of a layer are one group: of its place in the list, and of the layer's name.
    once = {frozenset(group.members): group for group in groups}
    return list(heads) if chosen.alone is None else of(chosen.alone), list(once.values())


def kinds_of_layers(heads: Sequence[Head], sinks: Sinks, threshold: float) -> list[HeadGroup]:
    """Of each attention module the heads that sink and those that do not."""
    weights = dict(zip(sinks.heads, sinks.weights.tolist(), strict=True))
    kinds: dict[tuple[str, str], list[Head]] = {}
    for head in heads:
        sinking = sinks.main is not None and weights[head] >= threshold
        name = f"layer {head.layer}" + (SINKS if sinking else OTHERS) * (sinks.main is not None)
        kinds.setdefault((head.module, name), []).append(head)
    return [HeadGroup(tuple(members), name) for (_, name), members in kinds.items()]


# --- entries ----------------------------------------------------------------------------------------------------------------


def sinks_by_domain(model: nn.Module, samples: Samples, sinks: Sinks, batch_size: int) -> dict[str, Sinks]:
    """What every head gives to the main sink on the texts of each domain alone."""
    if sinks.main is None or len(samples.domain_names) == 1:
        return dict.fromkeys(samples.domain_names, sinks)
    own = {}
    for name, rows in zip(samples.domain_names, samples.has.T, strict=True):
        inputs = {key: tensor[rows.to(tensor.device)] for key, tensor in samples.inputs.items()}
        own[name] = weigh_sinks(model, inputs, sinks, batch_size=batch_size)
    return own


def examined_heads(
    labels: Sequence[HeadLabel], sinks: Sinks, by_domain: Mapping[str, Sinks], estimates: Screened | None = None
) -> list[ExaminedHead]:
    """An entry for every head that has a label."""
    estimated = {} if estimates is None else estimates.means()
    found = []
    for label in labels:
        head, index = label.head, sinks.heads.index(label.head)
        found.append(
            ExaminedHead(
                layer=head.layer, head=head.head, module=head.module, label=label.label, domains=label.domains,
                needs_sink=label.needs_sink, undecided=label.undecided, effects=label.effects,
                sink_weight=number(sinks.weights[index]), value_ratio=number(sinks.value_ratio[index]),
                sink_weights={name: number(own.weights[index]) for name, own in by_domain.items()},
                estimates=estimated.get(str(head), {}),
            )
        )  # fmt: skip
    return found


def examined_groups(labels: Sequence[HeadLabel[HeadGroup]], alone: Sequence[ExaminedHead]) -> list[ExaminedGroup]:
    """An entry for every group that has a label, from those of all of its members."""
    entries = {(head.layer, head.head): head for head in alone}
    found = []
    for label in labels:
        own = [entries[head.layer, head.head] for head in label.head.members]
        found.append(
            ExaminedGroup(
                name=str(label.head), called=label.head.called, members=list(map(str, label.head.members)), label=label.label,
                domains=label.domains, needs_sink=label.needs_sink, undecided=label.undecided, effects=label.effects,
                sink_weight=_mean([head.sink_weight for head in own]), value_ratio=_mean([head.value_ratio for head in own]),
                sink_weights={name: _mean([head.sink_weights[name] for head in own]) for name in label.domains},
                alone=dict(Counter(head.label for head in own)),
            )
        )  # fmt: skip
    return found


def found_sink(sinks: Sinks) -> FoundSink:
    """Where the sink is and what every head gives to it."""
    heads = zip(sinks.heads, sinks.weights.tolist(), sinks.value_ratio.tolist(), strict=True)
    return FoundSink(
        place=sinks.main.place if sinks.main else None,
        name=sinks.main.name if sinks.main else "",
        tried=[{"place": place, "weight": weight} for place, weight in sinks.tried[:8]],
        secondary=sinks.secondary,
        heads={str(head): {"weight": number(weight), "value_ratio": number(ratio)} for head, weight, ratio in heads},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- rows -------------------------------------------------------------------------------------------------------------------


def effect_rows(effects: Effects) -> Iterator[Row]:
    """Means over texts of the changes of the loss, for every variant, head and domain."""
    counts = np.isfinite(effects.loss).sum(axis=2)
    means = np.nansum(effects.loss, axis=2) / np.maximum(counts, 1)
    for variant, index, domain in np.argwhere(counts > 0).tolist():
        head = effects.heads[index]
        yield {
            "probe": PROBE, "metric": LOSS_CHANGE.of(effects.unit), "intervention": effects.variants[variant],
            "module": head.module, "layer": head.layer, "head": head.head, "corpus": effects.domain_names[domain],
            "value": float(means[variant, index, domain]), "count": int(counts[variant, index, domain]),
        }  # fmt: skip


def head_rows(heads: Sequence[ExaminedHead]) -> Iterator[Row]:
    """Weight on the sink and length of its value, for every head."""
    for head in heads:
        for value, metric in ((head.sink_weight, SINK_SHARE), (head.value_ratio, VALUE_RATIO)):
            if value is not None:
                yield {
                    "probe": PROBE, "metric": metric, "module": head.module, "layer": head.layer, "head": head.head,
                    "value": value, "count": 1,
                }  # fmt: skip


def group_rows(effects: Effects[HeadGroup]) -> Iterator[Row]:
    """Means over texts of the changes of the loss, by group, edit and domain; the column ``module`` has the members."""
    for variant, group, domain in np.ndindex(len(effects.variants), len(effects.heads), len(effects.domain_names)):
        changes = effects.loss[variant, group, :, domain]
        changes = changes[np.isfinite(changes)]
        if not len(changes):
            continue
        yield {
            "probe": "causes_groups", "metric": LOSS_CHANGE.of(effects.unit), "intervention": effects.variants[variant],
            "module": "+".join(map(str, effects.heads[group].members)), "corpus": effects.domain_names[domain],
            "value": float(changes.mean()), "count": len(changes),
        }  # fmt: skip
