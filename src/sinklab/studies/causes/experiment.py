"""What experiments on the sink share: losses of texts under an edit, places, shares of rows, and rows of the long table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsFloat, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import Site
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention, Intervention, Place
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.effects import CLEAN
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.samples import Samples

LOSS_CHANGE = Metric("loss_change", "nats", "Mean over texts of the change of their mean loss under the intervention.")
SINK_SHARE = Metric(
    "sink_share",
    "fraction",
    "Mean share of a row on the sink, over the queries that see it and do not stand on it; the null mass is part of the whole.",
    range=FRACTION,
)

Edits = Callable[[int, int], Sequence[Intervention]]
"""The interventions for the samples ``start`` to ``stop``."""


def no_edits(start: int, stop: int) -> Sequence[Intervention]:
    """The model as it is."""
    return ()


def of_all(*interventions: HeadIntervention) -> Edits:
    """Interventions on the heads that they name, with rows by sample cut to the samples of a run."""
    return lambda start, stop: [intervention.of_samples(start, stop) for intervention in interventions]


# --- losses -----------------------------------------------------------------------------------------------------------------


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


# --- places -----------------------------------------------------------------------------------------------------------------


def known_place(sinks: Sinks, samples: Samples, what: str) -> Place:
    """The place of the main sink in some texts.

    Raises:
        ConfigurationError: there is none.
    """
    place = sinks.place_in(samples.inputs.get("input_ids"), samples.inputs.get("attention_mask"))
    if place is None:
        raise ConfigurationError(f"{what} needs a sink, and none was found; name a position, find_sinks(…, place=0)")
    return place


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
    for length, sink in zip(samples.lengths(sinks.length).tolist(), own, strict=True):
        allowed = [position for position in range(length) if position not in {sink, *sinks.secondary}]
        free = [position for position in allowed if position < max(2, length // share)] or allowed
        if not free:
            raise ConfigurationError(
                f"a text of {length:,} tokens has no position besides the sinks for a control; give longer texts"
            )
        drawn.append(free[int(torch.randint(len(free), (), generator=generator))])
    return torch.tensor(drawn)[:, None]


def most_frequent(ids: Tensor) -> int | None:
    """The id that occurs most often in ``(n,)``, -1 not counted; ``None`` where there is no other."""
    known = ids[ids >= 0]
    return int(known.mode().values) if len(known) else None


# --- numbers and rows -------------------------------------------------------------------------------------------------------


def heads_of(site: Site, count: int) -> list[Head]:
    """The heads of a module."""
    return [Head(site.layer, number, site.module) for number in range(count)]


def number(value: SupportsFloat) -> float | None:
    """A Python number for JSON, or ``None`` for what is not one."""
    converted = float(value)
    return converted if math.isfinite(converted) else None


def numbers(values: Iterable[SupportsFloat]) -> list[float | None]:
    """:func:`number` of each."""
    return [number(value) for value in values]


def head_rows(
    metric: Metric, heads: Iterable[Head], values: Iterable[float | None], **columns: Unpack[Coordinates]
) -> Iterator[Row]:
    """A row for every head that has the number."""
    for head, value in zip(heads, values, strict=True):
        if value is not None:
            cell: Coordinates = {"module": head.module, "layer": head.layer, "head": head.head}
            yield {**columns, **cell, "metric": metric, "value": value}


def interval_rows(metric: Metric, interval: Interval | None, **columns: Unpack[Coordinates]) -> Iterator[Row]:
    """The mean under the name of the metric, and the ends of its interval under the name with ``_low`` and ``_high``."""
    for bound, value in ({} if interval is None else interval.to_dict()).items():
        yield {**columns, "metric": metric if bound == "mean" else metric.bound(bound), "value": value}
