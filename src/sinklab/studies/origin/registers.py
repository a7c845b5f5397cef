"""Registers: what the neurons behind a spike write, moved to added tokens; where attention, spike and outputs go then."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.names import submodule
from sinklab.attention.session import attend
from sinklab.models.registers import Registers, add_registers
from sinklab.studies.origin.ablation import mean_losses, takes_loss
from sinklab.studies.origin.setting import OriginSetting
from sinklab.studies.origin.structure import hooked
from sinklab.studies.origin.tracing import PlaceWeights, largest_over_median
from sinklab.studies.origin.writers import Linear

__all__ = ["Moved", "measure_registers"]


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """What is seen of every sample with registers.

    Attributes:
        number: of registers.
        loss: float64 ``(samples,)``; NaN where none is taken.
        spikes: float64 ``(samples, blocks)``: largest over median size of what leaves each block, at the model's own tokens,
            other sinks and spikes left out of the largest.
        weights: on the place, by attention module, float64 ``(samples, heads)``.
        on_registers: the same, on all registers together.
        divergence, silenced: float64 ``(samples,)``: KL divergence in nats of the class probabilities from those of the model
            as it is, with registers, and with the neurons 0 at all tokens and no registers; NaN for outputs of another kind.
    """

    number: int
    loss: Tensor
    spikes: Tensor
    weights: dict[str, Tensor]
    on_registers: dict[str, Tensor]
    divergence: Tensor
    silenced: Tensor


class _OnRegisters(PlaceWeights):
    name = "register_weights"


@torch.no_grad()
def measure_registers(setting: OriginSetting, at: Tensor, writer: Linear, units: Sequence[int], number: int) -> Moved:
    """Run a model of pictures with and without registers.

    Args:
        at: boolean ``(samples, length)``: the tokens of the place.
        units: neurons of the writer that are moved.
        number: of registers.

    Raises:
        UnsupportedModelError: see :func:`~sinklab.models.registers.add_registers`.
    """
    model, blocks = setting.model, list(dict.fromkeys(block.module for block in setting.structure.blocks))
    losses, divergences, silenced, spikes = [], [], [], []
    seen: list[tuple[PlaceWeights, PlaceWeights]] = []
    taken = takes_loss(model, setting.samples)
    for start in range(0, len(setting.samples), setting.batch_size):
        rows = torch.arange(start, min(start + setting.batch_size, len(setting.samples)))
        batch = setting.samples.take(rows)
        clean = setting.forward(batch)
        with _silenced(model, writer, units):
            silenced.append(_divergence(clean, setting.forward(batch), len(rows)))
        with add_registers(model, {writer.path: list(units)}, number=number) as registers:
            setting.forward(batch)  # which says how many tokens stand in front
            watchers = _watchers(at[rows], registers)
            sizes: list[Tensor] = []
            masks = (at[rows], setting.others[rows], setting.real[rows])
            with _spikes(model, blocks, registers, masks, sizes), attend(model, watchers, verify=start == 0):
                output = setting.forward(batch)
        losses.append(mean_losses(output, batch) if taken else torch.full((len(rows),), float("nan"), dtype=torch.float64))
        divergences.append(_divergence(clean, output, len(rows)))
        spikes.append(torch.stack(sizes, 1))
        seen.append(watchers)
        setting.progress("registers", int(rows[-1]) + 1, len(setting.samples))

    def joined(which: int) -> dict[str, Tensor]:
        return {label: torch.cat([pair[which].weights[label] for pair in seen]) for label in seen[0][which].weights}

    return Moved(
        number, torch.cat(losses), torch.cat(spikes), joined(0), joined(1), torch.cat(divergences), torch.cat(silenced)
    )


def _watchers(at: Tensor, registers: Registers) -> tuple[PlaceWeights, PlaceWeights]:
    """Of the place and of the registers, over positions that have these."""
    front, behind = at[:, : registers.front], at[:, registers.front :]
    added = torch.ones(len(at), registers.number, dtype=torch.bool)
    place = torch.cat((front, ~added, behind), 1)
    there = torch.cat((torch.zeros_like(front), added, torch.zeros_like(behind)), 1)
    return PlaceWeights(place), _OnRegisters(there)


@contextlib.contextmanager
def _spikes(
    model: nn.Module, blocks: Sequence[str], registers: Registers, masks: tuple[Tensor, Tensor, Tensor], sizes: list[Tensor]
) -> Iterator[None]:
    """Largest over median size of what leaves each block, at the model's own tokens, one tensor ``(samples,)`` a block."""

    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        assert isinstance(hidden, Tensor)
        if hidden.shape[1] != masks[0].shape[1]:
            hidden = registers.left_out(hidden)
        sizes.append(largest_over_median(hidden, *masks)[0])

    def register(handles: list[RemovableHandle]) -> None:
        handles += [submodule(model, name).register_forward_hook(hook) for name in blocks]

    with hooked(register):
        yield


@contextlib.contextmanager
def _silenced(model: nn.Module, writer: Linear, units: Sequence[int]) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_fill(-1, torch.tensor(units, device=args[0].device), 0.0), *args[1:])

    with hooked(lambda handles: handles.append(submodule(model, writer.path).register_forward_pre_hook(hook))):
        yield


def _divergence(clean: object, changed: object, samples: int) -> Tensor:
    """KL divergence of each sample's class probabilities from those of the model as it is; NaN where there are no classes."""
    before, after = (getattr(output, "logits", None) for output in (clean, changed))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.ndim != 2:
        return torch.full((samples,), float("nan"), dtype=torch.float64)
    own, other = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1).cpu()
