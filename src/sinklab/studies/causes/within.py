"""A switch within a text: what a head is at the positions where it rests on its sink, and at all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Part, Statistics
from sinklab.attention.forward_arguments import lean_arguments
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.sinks import Head, Sinks
from sinklab.sinks.finding import share_of_sink
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.evidence import least_texts
from sinklab.studies.causes.labels import RULES, HeadLabel, label_heads, overall
from sinklab.studies.causes.samples import Samples

__all__ = ["AT_REST", "ELSEWHERE", "candidates", "switches_within", "where_it_rests"]

AT_REST, ELSEWHERE = "at rest", "elsewhere"
RESTS = 0.5
"""A majority of the row: with it on the sink a head rests at that position."""


def candidates(labels: Sequence[HeadLabel], sinks: Sinks, samples: Samples, *, level: float) -> list[Head]:
    """Heads that may be switches within a text: not silent on every domain, with a tenth of their weight on the sink or more.

    None where the texts are too few for what they are asked twice.
    """
    counts = [(samples.domains == number).any(1).sum() for number in range(len(samples.domain_names))]
    weights = dict(zip(sinks.heads, sinks.weights.tolist(), strict=True))
    heads = [
        label.head
        for label in labels
        if sinks.main is not None
        and weights[label.head] >= RESTS / 5
        and not {"dormant", "broadcast", "unneeded"} >= set(label.by_domain.values())
    ]
    needed = least_texts(2 * len(samples.domain_names) * len(RULES), level / max(1, len(heads)))
    return heads if min(counts) >= needed else []


@torch.no_grad()
def where_it_rests(
    model: nn.Module, samples: Samples, sinks: Sinks, heads: Sequence[Head], *, batch_size: int
) -> list[Tensor | None]:
    """Of each head, at which positions more than half of its row is on the sink, boolean ``(samples, seq_len)``.

    Learned tokens in front of the texts are left out. ``None`` for a head whose queries are not the positions that are scored:
    in an encoder, whose loss is of its decoder's positions, and where a sample has one loss for all of it.
    """
    parts: list[list[Tensor | None]] = []
    for _, part in samples.parts(batch_size):
        watcher = _Shares(sinks)
        with attend(model, [watcher]):
            model(**lean_arguments(model, part.inputs))
        parts.append([_at_scored(watcher, head, part) for head in heads])
    found: list[Tensor | None] = []
    for number in range(len(heads)):
        own = [rests for part in parts if (rests := part[number]) is not None]
        found.append(torch.cat(own) if len(own) == len(parts) else None)
    return found


def _at_scored(watcher: _Shares, head: Head, part: Samples) -> Tensor | None:
    """Whether a head rests at each position of ``domains``; ``None`` where its queries are other ones."""
    of, shares = watcher.parts[head.module], watcher.shares[head.module]
    tokens = part.inputs.get("decoder_input_ids" if of == "decoder" else "input_ids")
    front = 0 if tokens is None else max(0, shares.shape[2] - tokens.shape[1])
    rests = shares[:, head.head, front:] > RESTS
    return rests if of != "encoder" and rests.shape == part.domains.shape else None


def switches_within(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    labels: Sequence[HeadLabel],
    heads: Sequence[Head],
    measure: Callable[[Mapping[Head, Samples]], Mapping[Head, Effects]],
    *,
    level: float,
    minimal_effect: float,
    batch_size: int = 16,
) -> list[HeadLabel]:
    """The labels, those of some heads with what they are in each half of every domain: where they rest, and elsewhere.

    A head that is semantic elsewhere and dormant or a broadcast where it rests is a switch in that domain. Every query is
    edited, and what changes at a position may come from another: what spreads makes a switch undecided rather than found. Heads
    whose queries are not the scored positions are left as they are.

    Args:
        heads: of :func:`candidates`; each has ``level`` divided by their number.
        measure: head to its samples in halves (:func:`split`), to the effects of its edits on each half; called once, if any.
    """
    rests = where_it_rests(model, samples, sinks, heads, batch_size=batch_size) if heads else []
    halves = {}
    for head, own_rests in zip(heads, rests, strict=True):
        if own_rests is None:
            continue
        parted = split(samples, own_rests.to(samples.domains.device))
        counts = [int((parted.domains == number).any(1).sum()) for number in range(len(parted.domain_names))]
        if min(counts) >= least_texts(len(counts) * len(RULES), level / len(heads)):  # else it rests nowhere, or everywhere
            halves[head] = parted
    effects = measure(halves) if halves else {}
    new_labels = []
    for label in labels:
        if label.head not in effects:
            new_labels.append(label)
            continue
        (own,) = label_heads(effects[label.head], sinks, level=level / len(heads), minimal_effect=minimal_effect)
        new_labels.append(with_halves(label, own.by_domain))
    return new_labels


def split(samples: Samples, rests: Tensor) -> Samples:
    """The samples with every domain in two: positions of ``(samples, seq_len)`` at which a head rests, and the others."""
    domains = torch.where(samples.domains >= 0, 2 * samples.domains + (~rests).long(), samples.domains)
    names = tuple(f"{name}, {half}" for name in samples.domain_names for half in (AT_REST, ELSEWHERE))
    return dataclasses.replace(samples, domains=domains, domain_names=names)


def with_halves(label: HeadLabel, halves: Mapping[str, str]) -> HeadLabel:
    """A label with what its head is in each half of the domains."""
    by_domain, within = dict(label.by_domain), {}
    for domain in label.by_domain:
        own = {half: halves[f"{domain}, {half}"] for half in (AT_REST, ELSEWHERE)}
        within[domain] = own
        if own[ELSEWHERE] == "semantic" and own[AT_REST] in ("dormant", "broadcast"):
            by_domain[domain] = overall(own)
    return dataclasses.replace(label, label=overall(by_domain), by_domain=by_domain, within=within)


class _Shares(Watcher):
    """Share of every row on the main sink, by module, float64 ``(batch, heads, q_len)``; and of which part the module is."""

    name, needs = "sink_shares", frozenset({"mass", "log_sum_exp"})

    def __init__(self, sinks: Sinks) -> None:
        self.sinks, self.shares, self.parts = sinks, dict[str, Tensor](), dict[str, Part]()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        share = share_of_sink(self.sinks, call, statistics)
        if share is not None and call.site.kind == "self":
            self.shares[call.site.module], self.parts[call.site.module] = share.double().cpu(), call.site.part
