"""Runs: the loss of every text under an edit, and where attention goes meanwhile; what the experiments on causes share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.forward_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention, Intervention, Place
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.effects import CLEAN
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.samples import Samples

__all__ = [
    "Batch",
    "Edits",
    "RowShares",
    "change",
    "heads_of",
    "ids_by_position",
    "known_place",
    "lengths",
    "most_frequent",
    "no_edits",
    "of_all",
    "place_of",
    "random_places",
    "row_shares",
    "runs",
    "text_losses",
]

Edits = Callable[[int, int], Sequence[Intervention]]
"""The interventions for the samples ``start`` to ``stop``."""


def no_edits(start: int, stop: int) -> Sequence[Intervention]:
    """The model as it is."""
    return ()


def of_all(*interventions: HeadIntervention) -> Edits:
    """Interventions on the heads that they name, with rows by sample cut to the samples of a run."""
    return lambda start, stop: [intervention.of_samples(start, stop) for intervention in interventions]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch: the numbers of its samples, and the losses float64 ``(samples, seq_len)``, NaN where nothing is scored."""

    start: int
    stop: int
    losses: Tensor
    probes: Sequence[Probe]


@torch.no_grad()
def runs(
    model: nn.Module,
    samples: Samples,
    readout: Readout,
    edits: Edits = no_edits,
    *,
    probes: Callable[[int, int], Sequence[Probe]] = lambda start, stop: (),
    batch_size: int = 16,
) -> Iterator[Batch]:
    """Run the model over the samples batch by batch under an edit.

    Args:
        probes: makes those of the samples ``start`` to ``stop``; they see what the model goes on with.

    Raises:
        MeasurementError: a loss at a scored position that is NaN or infinite.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be 1 or more, got {batch_size}")
    for start, part in samples.parts(batch_size):
        stop, own = start + len(part), list(probes(start, start + len(part)))
        interventions = edits(start, stop)
        with attend(model, own, interventions, verify=not interventions):
            outputs = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
        losses = readout.loss(outputs, part).double().cpu()
        del outputs  # logits of a large vocabulary, beside which the next ones would be made
        edited = " and ".join(repr(intervention.name) for intervention in interventions)
        part.require_finite(losses, f"the loss under {edited}" if edited else CLEAN)
        yield Batch(start, stop, losses.masked_fill(part.domains.cpu() < 0, math.nan), own)


def text_losses(
    model: nn.Module, samples: Samples, readout: Readout, edits: Edits = no_edits, *, batch_size: int = 16
) -> np.ndarray:
    """Mean loss over the scored positions of each text, of all domains together: float64 ``(samples,)``."""
    return np.concatenate(
        [run.losses.nanmean(1).numpy() for run in runs(model, samples, readout, edits, batch_size=batch_size)]
    )


def change(edited: np.ndarray, clean: np.ndarray, what: str) -> Interval:
    """Mean over texts of a paired difference ``(samples,)``, with its interval; texts without scored positions are left out.

    Raises:
        ConfigurationError: fewer than two texts.
        MeasurementError: an infinite difference.
    """
    differences = np.asarray(edited, dtype=np.float64) - np.asarray(clean, dtype=np.float64)
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2:
        raise ConfigurationError(f"{what}: an interval over texts needs two texts or more with a loss, got {len(differences)}")
    if not np.isfinite(differences).all():
        infinite = int(np.isinf(differences).sum())
        raise MeasurementError(f"{what}: {infinite} of {len(differences)} texts change by infinity; run the model in float32")
    return mean_over_items(differences)


def known_place(sinks: Sinks, samples: Samples, what: str) -> Place:
    """The place of the main sink in some texts.

    Raises:
        ConfigurationError: there is none.
    """
    place = sinks.place_in(samples.inputs.get("input_ids"), samples.inputs.get("attention_mask"))
    if place is None:
        raise ConfigurationError(f"{what} needs a sink, and none was found; name a position, find_sinks(…, place=0)")
    return place


def lengths(samples: Samples, otherwise: int) -> Tensor:
    """Tokens of each text, int64 ``(samples,)``: by the attention mask where one is given, and without tokens as said."""
    mask, tokens = samples.inputs.get("attention_mask"), samples.inputs.get("input_ids")
    if mask is not None and mask.ndim == 2:
        return mask.sum(1).long().cpu()
    return torch.full((len(samples),), otherwise if tokens is None else tokens.shape[1])


def ids_by_position(samples: Samples, front: int) -> Tensor | None:
    """Token ids int64 ``(samples, front + seq_len)`` by position, padding left out and -1 where there is none.

    Args:
        front: learned tokens in front of the texts, which have positions and no ids.
    """
    tokens, mask = samples.inputs.get("input_ids"), samples.inputs.get("attention_mask")
    if tokens is None:
        return None
    ids = tokens.cpu()
    if mask is not None and mask.ndim == 2:
        padding = mask.cpu() == 0
        ids = ids.masked_fill(padding, -1).gather(1, padding.int().argsort(dim=1, stable=True))
    return torch.nn.functional.pad(ids, (front, 0), value=-1)


def most_frequent(ids: Tensor) -> int | None:
    """The id that occurs most often in ``(n,)``, -1 not counted; ``None`` where there is no other."""
    known = ids[ids >= 0]
    return int(known.mode().values) if len(known) else None


def place_of(place: Place, start: int, stop: int) -> Place:
    """The place in the samples ``start`` to ``stop`` alone."""
    return place[start:stop] if isinstance(place, Tensor) and place.ndim == 2 else place


def random_places(samples: Samples, place: Place, sinks: Sinks, generator: torch.Generator, *, share: int = 2) -> Tensor:
    """One position a text, int64 ``(samples, 1)``, not the sink nor a secondary one, and early enough for most queries.

    Args:
        place: of the main sink, as :func:`known_place` gives it.
        share: 2 for positions from the first half of a text, 4 from the first quarter; where all of these are sinks, the whole
            text is drawn from.

    Raises:
        ConfigurationError: a text too short to have one.
    """
    drawn = []
    own = place[:, 0].tolist() if isinstance(place, Tensor) else [place] * len(samples)
    for length, sink in zip(lengths(samples, sinks.length).tolist(), own, strict=True):
        allowed = [position for position in range(length) if position not in {sink, *sinks.secondary}]
        free = [position for position in allowed if position < max(2, length // share)] or allowed
        if not free:
            raise ConfigurationError(
                f"a text of {length:,} tokens has no position besides the sinks for a control; give longer texts"
            )
        drawn.append(free[int(torch.randint(len(free), (), generator=generator))])
    return torch.tensor(drawn)[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class RowShares:
    """The rows of a block of queries as shares of their whole mass, the null mass included.

    Attributes:
        weights: float64 ``(batch, heads, block, kv_len)``; rows of zeros, which some operations have, stay zeros.
        null: float64 ``(batch, heads, block)``.
        counted: boolean ``(batch, block)``: queries that are tokens and not padding.
        seen: boolean ``(batch or 1, heads or 1, block, kv_len)``: keys that such a query sees and does not stand on.
    """

    weights: Tensor
    null: Tensor
    counted: Tensor
    seen: Tensor


def row_shares(call: AttentionCall) -> Iterator[RowShares]:
    """All rows of a call, a block of queries at a time."""
    for start, stop in call.blocks():
        scores = call.scores(start, stop)
        weights, mass = call.weights(start, stop, scores).double(), call.null_mass(start, stop, scores).double()
        whole = (weights.sum(-1) + mass).clamp_min(1e-8)
        counted = call.counted[:, start:stop]
        itself = (call.query_positions[:, start:stop, None] == call.key_positions[:, None]) & (
            call.query_documents[:, start:stop, None] == call.key_documents[:, None]
        )
        seen = call.visible.block(start, stop, 0, call.kv_len) & (counted[..., None] & ~itself)[:, None]
        yield RowShares(weights / whole[..., None], mass / whole, counted, seen)


def heads_of(site: Site, count: int) -> list[Head]:
    """The heads of a module."""
    return [Head(site.layer, number, site.module) for number in range(count)]
