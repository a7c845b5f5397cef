"""Losses of texts under an edit, and how much they change; metrics that several parts have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsFloat

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention, Intervention
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.metric import FRACTION, Metric
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
    """Run the model over the samples batch by batch under an edit; ``probes`` makes those of the samples ``start`` to
    ``stop``.

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


def number(value: SupportsFloat) -> float | None:
    """A Python number for JSON, or ``None`` for what is not one."""
    converted = float(value)
    return converted if math.isfinite(converted) else None
