"""Effects: what each intervention on each head, or group, does to the loss, text by text; and the slow way to measure them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch
from torch import nn
from typing_extensions import TypeVar

from sinklab.attention.forward_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.session import attend
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head
from sinklab.studies.causes.head_group import HeadGroup, heads_by_module
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.said import Said
from sinklab.studies.causes.samples import Samples

__all__ = ["CLEAN", "Edited", "Effects", "HeadEdit", "one_by_one"]

CLEAN = "the loss of the unedited model"
"""What an error calls it."""

Edited = TypeVar("Edited", bound=Head | HeadGroup, default=Head)
"""What is edited at a time: a head, or several at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadEdit:
    """Something that is done to one head, or one group of heads, at a time.

    Args:
        name: unique among the variants of a measurement: ``redirect``, ``hide``, ``rotated 3``.
        interventions: in order; their ``heads`` are set to the heads in question.
    """

    name: str
    interventions: tuple[HeadIntervention, ...]

    def on(self, head: Head | HeadGroup, start: int, stop: int) -> list[HeadIntervention]:
        """The interventions on one head, or on all of a group, for the samples ``start`` to ``stop``."""
        heads = heads_by_module(head)
        return [dataclasses.replace(intervention.of_samples(start, stop), heads=heads) for intervention in self.interventions]

    def loss_on(self, head: Head | HeadGroup) -> str:
        """What an error calls the change of the loss."""
        return f"the change of the loss under {self.name!r} on head {head}"

    def divergence_on(self, head: Head | HeadGroup) -> str:
        """What an error calls the divergence."""
        return f"the divergence under {self.name!r} on head {head}"


@dataclasses.dataclass(frozen=True, eq=False)
class Effects(Generic[Edited]):
    """Changes that interventions make, relative to the unedited model on the same text.

    Attributes:
        variants: names.
        heads: in the order of the second axis; or groups of them.
        domain_names: in the order of the last axis.
        loss: float64 ``(variants, heads, samples, domains)``: change of the mean loss over the scored positions of a domain;
            positive where the intervention hurts, NaN where the sample has no such position.
        divergence: same shape: mean distance of the outputs from those of the unedited model, from 0.
        clean_loss: float64 ``(samples, domains)``.
        unit: of all of these.
        record: qualified name of an attention module to how its heads were measured; empty for :func:`one_by_one`.
    """

    variants: list[str]
    heads: list[Edited]
    domain_names: tuple[str, ...]
    loss: np.ndarray
    divergence: np.ndarray
    clean_loss: np.ndarray
    unit: str
    record: dict[str, str] = dataclasses.field(default_factory=dict)

    def of(self, variant: str) -> np.ndarray:
        """Change of the loss by one variant, ``(heads, samples, domains)``."""
        return np.asarray(self.loss[self.variants.index(variant)])


@torch.no_grad()
def one_by_one(
    model: nn.Module,
    samples: Samples,
    readout: Readout,
    variants: Sequence[HeadEdit],
    heads: Sequence[Edited],
    *,
    batch_size: int = 16,
    progress: Progress = silent,
) -> Effects[Edited]:
    """Run the whole model once for every variant, head and batch; the definition that everything faster is tested against.

    Args:
        heads: all of them, or some; or groups, whose members are edited at once.
        batch_size: samples a forward.

    Raises:
        MeasurementError: a loss or a divergence at a scored position that is NaN or infinite.
    """
    shape = (len(variants), len(heads), len(samples), len(samples.domain_names))
    loss, divergence = np.full(shape, np.nan), np.full(shape, np.nan)
    clean_loss = np.full(shape[2:], np.nan)
    total, finished = len(variants) * len(heads) * len(samples.bounds(batch_size)), 0
    for start, part in samples.parts(batch_size):
        stop = start + len(part)
        said = Said([head for head in heads if isinstance(head, HeadGroup)])
        with attend(model, [said], verify=False) if said.wanted else contextlib.nullcontext():
            clean = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
        own = readout.loss(clean, part)
        clean_loss[start:stop] = part.by_domain(own, CLEAN).cpu().numpy()
        for number, variant in enumerate(variants):
            for index, head in enumerate(heads):
                with attend(model, interventions=said.in_place(variant.on(head, start, stop), head), verify=False):
                    edited = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
                of_loss, of_outputs = readout.loss(edited, part) - own, readout.divergence(edited, clean)
                del edited  # logits of a large vocabulary, beside which the next ones would be made
                loss[number, index, start:stop] = part.by_domain(of_loss, variant.loss_on(head)).cpu().numpy()
                divergence[number, index, start:stop] = part.by_domain(of_outputs, variant.divergence_on(head)).cpu().numpy()
                finished += 1
                progress("effects", finished, total)
    return Effects(
        [variant.name for variant in variants], list(heads), samples.domain_names, loss, divergence, clean_loss, readout.unit
    )
