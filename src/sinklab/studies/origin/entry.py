"""From what was measured of one place to its entry in the summary: origin, norms, what each edit does, heads behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sinklab.results.intervals import Interval, function_over_items, mean_over_items
from sinklab.results.summaries.origin import OriginEdit, OriginFound, OriginHead, OriginRegisters, OriginUnit, OriginWeight
from sinklab.results.summaries.shared import Difference
from sinklab.studies.origin.ablation import Edit, Measured
from sinklab.studies.origin.decomposition import Decomposition, UnitShare
from sinklab.studies.origin.registers import Moved
from sinklab.studies.origin.setting import HeadsByModule, OriginSetting, mean_over
from sinklab.studies.origin.structure import Sublayer
from sinklab.studies.origin.tracing import Birth, Place
from sinklab.studies.origin.words import verdict
from sinklab.studies.origin.writers import Weight, Writer

__all__ = ["PlacedEdit", "TracedPlace", "entry_of", "known"]

HEADS = 8
"""Heads that are listed with their weight on the place, the strongest first."""


@dataclasses.dataclass(frozen=True)
class PlacedEdit:
    """An edit, what it is made on (``units``, ``controls``, ``write``, ``channels``), and what it is in words."""

    on: str
    edit: Edit
    what: str


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPlace:
    """What was measured of one place.

    Attributes:
        at: boolean ``(samples, length)``: its tokens.
        by: whether the origin is where its norm jumps, or the write that its pull is lost without.
        sublayer: the origin; ``None`` for the embeddings, or where none was found.
        pull: how far the scores of the place stand above the others, and how much of that goes with the write (``None`` where
            nothing is written before the heads read); ``None`` where it was not measured.
        split: the write as a sum over units of its writer.
        clean: the model as it is.
        own: the heads behind the origin that give the place most.
        spike_block: index, in what was seen of the blocks, of the one behind the origin with the largest spike.
        edits, measured: what was edited, and what was seen under it.
        moved: what was seen with registers; ``None`` where none were asked for, or no neurons write there.
    """

    place: Place
    at: Tensor
    birth: Birth
    by: Literal["norm", "pull", "none"]
    sublayer: Sublayer | None
    pull: tuple[float, Interval | None] | None
    writer: Writer | None
    split: Decomposition | None
    clean: Measured
    own: HeadsByModule
    spike_block: int
    edits: Sequence[PlacedEdit]
    measured: Sequence[Measured]
    moved: Moved | None = None


def entry_of(setting: OriginSetting, traced: TracedPlace) -> OriginFound:
    """The entry of one place in the summary, with its verdict."""
    place, birth, clean, own = traced.place, traced.birth, traced.clean, traced.own
    writer, split = traced.writer, traced.split
    stage, block, module, sublayer = _where(setting, traced)
    pull, pull_lost = (None, None) if traced.pull is None else traced.pull
    entry: OriginFound = {
        "place": place.name,
        "kind": "spike" if place.spike else "sink",
        "positions": place.positions,
        "description": place.sinks[0].describe() if len(place.sinks) == 1 else place.name,
        "by": traced.by,
        "stage": stage,
        "block": block,
        "module": module,
        "sublayer": sublayer,
        "before": birth.before,
        "after": birth.after,
        "peak": birth.peak,
        "pull": pull,
        "pull_lost": None if pull_lost is None else _interval(pull_lost),
        "norms": {"place": _norms(setting, traced.at), "others": _norms(setting, setting.others)},
        "norm": None,
        "rest": None,
        "error": None,
        "against_others": False,
        "not_split": "",
        "channels": [],
        "unit_kind": None if writer is None else writer.kind,
        "num_units": None if writer is None else writer.units,
        "units": [],
        "weights": [],
        "weight": known(float(mean_over(clean.weights, own).nanmean())),
        "uniform": known(float(mean_over(clean.uniform, own).nanmean())),
        "weight_by_block": _by_block(setting, clean),
        "spike": float(clean.spikes[:, traced.spike_block].mean()),
        "spiked": birth.jumps and 2 * int(clean.spiked[:, traced.spike_block].sum()) >= len(clean.spiked),
        "edits": _outcomes(traced),
        "heads": _heads(traced),
        "verdict": "",
    }
    if split is not None:
        entry |= {
            "norm": split.norm,
            "rest": split.rest,
            "error": split.error,
            "against_others": split.against_others,
            "not_split": split.why,
            "channels": [dataclasses.asdict(channel) for channel in split.channels],
            "units": [_unit(part) for part in split.parts],
        }
    if writer is not None and split is not None:
        entry["weights"] = [_weight(part.unit, weight) for part in split.parts for weight in writer.weights(part.unit)]
    if traced.moved is not None:
        entry["registers"] = _registers(traced.moved, own)
    entry["verdict"] = verdict(entry)
    return entry


def _where(setting: OriginSetting, traced: TracedPlace) -> tuple[int | None, int | None, str | None, str | None]:
    """Stage, block, its module and kind of the sublayer that the place comes from; ``None`` for what there is none of."""
    sublayer = traced.sublayer
    if sublayer is None:
        return traced.birth.stage if traced.by == "norm" else None, None, None, None if traced.by == "none" else "embeddings"
    stage = traced.birth.stage if traced.by == "norm" else sublayer.stage
    return stage, sublayer.block, setting.structure.blocks[sublayer.block].name, sublayer.kind


def _by_block(setting: OriginSetting, clean: Measured) -> list[float | None]:
    """Mean weight that the heads of each block give the place; ``None`` for a block without any."""
    weights: list[float | None] = []
    for block in setting.structure.blocks:
        inside = [values for label, values in clean.weights.items() if setting.block_of(label) == block.number]
        weights.append(known(float(torch.cat(inside, 1).nanmean())) if inside else None)
    return weights


def known(value: float) -> float | None:
    """A number for JSON, or ``None`` for NaN and infinity."""
    return value if math.isfinite(value) else None


def _outcomes(traced: TracedPlace) -> list[OriginEdit]:
    """What every edit does; draws of random units are averaged before the interval is taken."""
    clean, own, block = traced.clean, traced.own, traced.spike_block
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, placed in enumerate(traced.edits):
        kinds.setdefault((placed.on, placed.edit.name), []).append(number)
    uniform = mean_over(clean.uniform, own)
    as_it_is = mean_over(clean.weights, own)
    before = clean.spikes[:, block]
    outcomes: list[OriginEdit] = []
    under: list[tuple[str, str, str, Sequence[Measured | Moved]]] = [
        (on, name, traced.edits[numbers[0]].what, [traced.measured[number] for number in numbers])
        for (on, name), numbers in kinds.items()
    ]
    if traced.moved is not None:
        what = "the largest activation of all tokens at every register, and 0 at every patch"
        under.append(("registers", "moved", what, [traced.moved]))
    for on, name, what, runs in under:
        loss = torch.stack([run.loss for run in runs]).mean(0) - clean.loss
        weight = torch.stack([mean_over(run.weights, own) for run in runs]).mean(0)
        spike = torch.stack([run.spikes[:, block:].amax(1) for run in runs]).mean(0)
        outcomes.append({
            "edit": name,
            "on": on,
            "what": what,
            "loss": _difference(loss),
            "weight": known(float(weight.nanmean())),
            "weight_kept": _kept(weight, as_it_is, uniform),
            "spike": float(spike.mean()),
            "spike_kept": _share(spike, before),
        })  # fmt: skip
    return outcomes


def _registers(moved: Moved, own: HeadsByModule) -> OriginRegisters:
    return {
        "number": moved.number,
        "weight": known(float(mean_over(moved.on_registers, own).nanmean())),
        "divergence": _difference(moved.divergence),
        "silenced": _difference(moved.silenced),
    }


def _heads(traced: TracedPlace) -> list[OriginHead]:
    """The heads that give the place most, with their weight as it is and under every edit of units and of the write."""
    clean, own = traced.clean, traced.own
    edits = zip(traced.edits, traced.measured, strict=True)
    silenced = next((seen for placed, seen in edits if (placed.on, placed.edit.name) == ("units", "zero")), None)
    listed: list[OriginHead] = []
    for label, values in clean.weights.items():
        for head, weight in enumerate(values.nanmean(0).tolist()):
            edited = {
                f"{placed.on} {placed.edit.name}": known(float(seen.weights[label][:, head].nanmean()))
                for placed, seen in zip(traced.edits, traced.measured, strict=True)
                if placed.on in ("units", "write")
            }
            behind = label in own and head in own[label].tolist()
            listed.append({
                "layer": clean.layers[label],
                "head": head,
                "module": label,
                "own": behind,
                "weight": known(weight),
                "uniform": known(float(clean.uniform[label][:, head].nanmean())),
                "edited": edited,
                "kept": None if silenced is None or not behind else _kept(
                    silenced.weights[label][:, head], values[:, head], clean.uniform[label][:, head]
                ),
            })  # fmt: skip
    return sorted(listed, key=lambda head: (not head["own"], -(head["weight"] or 0.0)))[
        : max(HEADS, sum(h["own"] for h in listed))
    ]


def _norms(setting: OriginSetting, mask: Tensor) -> list[float]:
    """Mean norm of what enters the first block and what leaves every block, at the tokens of a mask ``(samples, length)``."""
    norms: list[float] = setting.growth.means(mask, blocks=True).nanmean(0).tolist()
    return norms


def _weight(unit: int, weight: Weight) -> OriginWeight:
    return {
        "unit": unit, "parameter": weight.parameter, "part": weight.part, "role": weight.role, "norm": weight.norm,
        "times_median": weight.times_median, "channel": weight.channel, "value": weight.value, "rank": weight.rank,
    }  # fmt: skip


def _unit(part: UnitShare) -> OriginUnit:
    return {
        "unit": part.unit, "name": part.name, "along": part.along, "size": part.size, "in_channel": part.in_channel,
    }  # fmt: skip


def _difference(values: Tensor) -> Difference | None:
    """Mean over samples with its interval; ``None`` where fewer than two samples have the number."""
    own = values[~values.isnan()]
    return _interval(mean_over_items(own.numpy())) if len(own) > 1 else None


def _share(edited: Tensor, clean: Tensor) -> Difference:
    """Mean under an edit over that of the same samples as they are, with its interval over samples.

    Both means are of the same samples, so these are drawn together: what leaves every sample as it is keeps exactly 1.
    """
    return _interval(function_over_items(torch.stack([edited, clean]).numpy(), lambda means: means[0] / means[1]))


def _kept(edited: Tensor, clean: Tensor, uniform: Tensor) -> Difference | None:
    """Share of the weight above a uniform one that an edit leaves; ``None`` with fewer than two samples, or nothing above."""
    left, excess = edited - uniform, clean - uniform
    known_in = ~(left.isnan() | excess.isnan())
    enough = int(known_in.sum()) > 1 and float(excess[known_in].mean()) > 0
    return _share(left[known_in], excess[known_in]) if enough else None


def _interval(interval: Interval) -> Difference:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
