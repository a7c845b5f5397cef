"""The screen: what edits of every head would cost, to second order, from one forward and a few backward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import run_name
from sinklab.attention.host_arguments import lean_arguments
from sinklab.errors import MeasurementError
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head
from sinklab.studies.causes.effects import HeadEdit
from sinklab.studies.causes.engine import all_heads_edited
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.replay import Replay
from sinklab.studies.causes.samples import Samples

DRAWS = 2
"""Draws of the second order; beside the samples, over which it is a mean too, few are enough to rank heads."""


@dataclasses.dataclass(frozen=True, eq=False)
class Screened:
    """Estimates of what edits of single heads cost, never a verdict: ``loss`` is float64 ``(variants, heads, samples)``, the
    change of a sample's mean loss, to second order; NaN of heads whose outputs the model does not let be followed."""

    variants: list[str]
    heads: list[Head]
    loss: np.ndarray

    def means(self) -> dict[str, dict[str, float]]:
        """Mean over samples, by head and variant, of those that are known."""
        means = self.loss.mean(2)
        return {
            str(head): {
                name: float(means[row, index]) for row, name in enumerate(self.variants) if np.isfinite(means[row, index])
            }
            for index, head in enumerate(self.heads)
        }

    def worth(self, head: Head) -> float:
        """The largest mean change by any edit of a head, over the layers that an exact run of it takes; infinity where none is
        known, so that it is measured."""
        means = np.abs(self.loss[:, self.heads.index(head)].mean(1))
        behind = max(one.layer for one in self.heads) - head.layer + 1
        return float(means.max()) / behind if np.isfinite(means).all() else float("inf")


@torch.no_grad()
def screen(
    model: nn.Module, samples: Samples, readout: Readout, variants: Sequence[HeadEdit], heads: Sequence[Head], *,
    batch_size: int = 16, progress: Progress = silent,
) -> Screened:  # fmt: skip
    """Estimate the effect of every variant on every head, from the change of its output and gradients with respect to it.

    The first order is attribution patching (Nanda 2023; Syed et al. 2023, arXiv 2310.10348); in a trained model it is near 0
    for what a head says. So the second order is added: half the mean square of change times gradient of the likelihood of
    tokens drawn from the model, the divergence that the change makes while it is small (Fisher's information). A few texts are
    enough."""
    loss = np.full((len(variants), len(heads), len(samples)), np.nan)
    places = {(head.module, head.head): index for index, head in enumerate(heads)}
    replay, parts, done = Replay(model), list(samples.parts(batch_size)), 0
    progress("screen", 0, 1)
    for start, part in parts:
        recording = replay.record(part, {head.module for head in heads})
        generator = torch.Generator().manual_seed(start)
        of_loss, *of_draws = _gradients(model, part, readout, generator)
        scored = (part.domains >= 0).sum(1).clamp_min(1).double()[:, None]
        for name, call in recording.calls.items():
            if name in of_loss and call.head_outputs is not None and of_loss[name].shape == call.head_outputs.shape:
                for row, variant in enumerate(variants):
                    edited = all_heads_edited(call, variant.of_all(start, start + len(part)))
                    change = edited.double() - call.head_outputs.double()
                    first, *drawn = (_along(change, gradients[name]) for gradients in (of_loss, *of_draws))
                    second = torch.stack(drawn).square().mean(0) / (2 * scored)
                    for number, cost in enumerate((first + second).T.numpy()):
                        if (name, number) in places:
                            loss[row, places[name, number], start : start + len(part)] = cost
            done += 1
            progress("screen", done, len(recording.calls) * len(parts))
    return Screened([variant.name for variant in variants], list(heads), loss)


def _along(change: Tensor, gradient: Tensor) -> Tensor:
    """Change times gradient by sample and head, float64 ``(samples, heads)``."""
    return (change * gradient.double()).sum((1, 3)).cpu()


def _gradients(model: nn.Module, part: Samples, readout: Readout, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Gradients with respect to the head outputs of every run of an attention module: of every sample's mean loss, and of the
    sums of :data:`DRAWS` scores that are drawn; by name."""
    outputs: dict[str, Tensor] = {}
    names = {module: name for name, module in Anatomy(model).attention.items()}
    with torch.enable_grad():
        with seam.shadow(_Followed(names, outputs)):
            found = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
        scored = (part.domains >= 0).to(found.device)
        losses = readout.loss(found, part).masked_fill(~scored, 0.0).sum(1) / scored.sum(1).clamp_min(1)
        if not bool(losses.isfinite().all()):
            raise MeasurementError("the loss is not finite on the texts of the screen; run the model in float32")
        if not outputs or not found.requires_grad:
            return [{}] * (1 + DRAWS)
        gradients = [torch.autograd.grad(losses.sum(), list(outputs.values()), retain_graph=True, allow_unused=True)]
        for left in reversed(range(DRAWS)):
            drawn = readout.drawn(found, generator).masked_fill(~scored, 0.0).sum()
            gradients.append(torch.autograd.grad(drawn, list(outputs.values()), retain_graph=left > 0, allow_unused=True))
    return [{name: gradient for name, gradient in zip(outputs, own, strict=True) if gradient is not None} for own in gradients]


@dataclasses.dataclass(frozen=True, eq=False)
class _Followed(seam.Observer):
    """Adds to the head outputs of every call a zero whose gradient is theirs."""

    names: dict[nn.Module, str]
    outputs: dict[str, Tensor]

    def owns(self, module: nn.Module) -> bool:
        return module in self.names

    def on_attention(self, native: seam.Native, module: nn.Module, *args: object, **kwargs: object) -> seam.Attended:
        given, weights = native(module, *args, **kwargs)
        name, run = self.names[module], 0
        while run_name(name, run) in self.outputs:
            run += 1
        own = self.outputs[run_name(name, run)] = torch.zeros_like(given, requires_grad=True)
        return given + own, weights
