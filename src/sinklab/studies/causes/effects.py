"""Effects: what each edit of a head, or of a group, does to the loss, text by text; and the slow way to measure them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Self, SupportsFloat

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import NEAR, HeadIntervention, Intervention, keys_at, tokens_at
from sinklab.attention.operation import repeat_groups
from sinklab.attention.probe import Probe, Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.metric import FRACTION, Metric
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.samples import Samples

NAMED = 6
"""Heads that the name of a group lists; of more it says how many there are."""
CLEAN = "the loss of the unedited model"
"""What an error calls it."""


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """Heads that are edited at once; ``called`` is ``layer 3`` and the like, and empty for heads that somebody named."""

    members: tuple[Head, ...]
    called: str = ""

    def __str__(self) -> str:
        named = "+".join(map(str, self.members[:NAMED]))
        if len(self.members) > NAMED:
            named += f"+… ({len(self.members)} heads)"
        return f"{self.called}: {named}" if self.called else named


Edited = TypeVar("Edited", bound=Head | HeadGroup, default=Head)
"""What is edited at a time: a head, or several at once."""


def members_of(edited: Head | HeadGroup) -> tuple[Head, ...]:
    """The heads that are edited."""
    return edited.members if isinstance(edited, HeadGroup) else (edited,)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadEdit:
    """Interventions on one head or group at a time, whose ``heads`` are set to it; a name that no other variant has."""

    name: str
    interventions: tuple[HeadIntervention, ...]

    def on(self, head: Head | HeadGroup, start: int, stop: int) -> list[HeadIntervention]:
        """The interventions on one head, or on all of a group, for the samples ``start`` to ``stop``.

        Hidden from heads of several modules, a sink is spared by the queries near it: else another token takes its place.
        """
        heads = _heads_by_module(head)
        edits = self.of_all(start, stop)
        if len(heads) > 1:
            edits = [
                dataclasses.replace(edit, spare=NEAR)
                if isinstance(edit, HideKey) and not isinstance(edit.place, str) and not edit.spare
                else edit
                for edit in edits
            ]
        return [dataclasses.replace(edit, heads=heads) for edit in edits]

    def of_all(self, start: int, stop: int) -> list[HeadIntervention]:
        """The interventions on whatever heads a call has."""
        return [dataclasses.replace(intervention.of_samples(start, stop), heads=None) for intervention in self.interventions]

    def means(self, head: Head | HeadGroup, part: Samples, loss: Tensor) -> np.ndarray:
        """Its change of the loss ``(samples, seq_len)`` by domain, ``(samples, domains)``; refused where that is not finite."""
        return part.by_domain(loss, f"the change of the loss under {self.name!r} on head {head}").cpu().numpy()


@dataclasses.dataclass(frozen=True, eq=False)
class Effects(Generic[Edited]):
    """Changes that interventions make, relative to the unedited model on the same text.

    ``loss`` is float64 ``(variants, heads or groups, samples, domains)``: change of the mean loss over the scored positions of
    a domain, positive where the edit hurts, NaN where a sample has no such position and where it was not run. ``clean_loss``
    is float64 ``(samples, domains)``; ``record`` says how the heads of each attention module were measured."""

    variants: list[str]
    heads: list[Edited]
    domain_names: tuple[str, ...]
    loss: np.ndarray
    clean_loss: np.ndarray
    unit: str
    record: dict[str, str] = dataclasses.field(default_factory=dict)

    def of(self, variant: str) -> np.ndarray:
        """Change of the loss by one variant, ``(heads, samples, domains)``."""
        return np.asarray(self.loss[self.variants.index(variant)])


@torch.no_grad()
def one_by_one(
    model: nn.Module, samples: Samples, readout: Readout, variants: Sequence[HeadEdit], heads: Sequence[Edited], *,
    batch_size: int = 16, progress: Progress = silent,
) -> Effects[Edited]:  # fmt: skip
    """Run the whole model once for every variant, head or group, and batch; the definition that everything faster is tested
    against.

    Raises:
        MeasurementError: a loss at a scored position that is NaN or infinite.
    """
    shape = (len(variants), len(heads), len(samples), len(samples.domain_names))
    loss, clean_loss = np.full(shape, np.nan), np.full(shape[2:], np.nan)
    total, finished = len(variants) * len(heads) * len(samples.bounds(batch_size)), 0
    progress("effects", finished, total)
    for start, part in samples.parts(batch_size):
        stop = start + len(part)
        recorded = _HeadOutputs([head for head in heads if isinstance(head, HeadGroup)])
        with attend(model, [recorded], verify=False) if recorded.wanted else contextlib.nullcontext():
            clean = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
        own = readout.loss(clean, part)
        clean_loss[start:stop] = part.by_domain(own, CLEAN).cpu().numpy()
        for number, variant in enumerate(variants):
            for index, head in enumerate(heads):
                with attend(model, interventions=recorded.in_place(variant.on(head, start, stop), head), verify=False):
                    edited = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
                of_loss = readout.loss(edited, part) - own
                del edited  # logits of a large vocabulary, beside which the next ones would be made
                loss[number, index, start:stop] = variant.means(head, part, of_loss)
                finished += 1
                progress("effects", finished, total)
    return Effects([variant.name for variant in variants], list(heads), samples.domain_names, loss, clean_loss, readout.unit)


# --- groups of several layers ----------------------------------------------------------------------------------------------


class _HeadOutputs(Watcher):
    """Outputs of heads in one run of the unedited model, from which a group of several layers is resampled: in an edited run a
    later head says what follows from the edit of an earlier one."""

    name, needs = "head_outputs_of_groups", frozenset({"head_outputs"})

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        several = [by_module for group in groups if len(by_module := _heads_by_module(group)) > 1]
        keys = {key for by_module in several for key in by_module}
        self.wanted = {key: sorted({head for by_module in several for head in by_module.get(key, ())}) for key in keys}
        self._outputs: dict[int | str, list[Tensor]] = {}  # of every call of a module that runs several times

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        key = _key(self.wanted, call.site)
        if key is not None:
            assert call.head_outputs is not None  # asked for
            self._outputs.setdefault(key, []).append(call.head_outputs[:, :, self.wanted[key]])

    def in_place(self, interventions: Sequence[HeadIntervention], edited: Head | HeadGroup) -> list[HeadIntervention]:
        """The interventions for one run; a resampled head is given what was recorded, not what the edited run would say."""
        by_module = _heads_by_module(edited)
        if len(by_module) < 2:
            return list(interventions)
        return [
            _ResampleRecorded(
                heads=edit.heads, shift=edit.shift, outputs={key: self._of(key, by_module[key]) for key in by_module}
            )
            if isinstance(edit, ResampleHead)
            else edit
            for edit in interventions
        ]

    def _of(self, key: int | str, heads: Sequence[int]) -> Iterator[Tensor]:
        """Outputs of some heads of a module, call by call; an intervention is shown them in ascending order."""
        chosen = [self.wanted[key].index(head) for head in sorted(heads)]
        return (outputs[:, :, chosen] for outputs in self._outputs[key])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _ResampleRecorded(ResampleHead):
    """Resampling, in one run, from recorded outputs: by module, call after call ``(batch, q_len, num_heads, value_dim)``."""

    outputs: Mapping[int | str, Iterator[Tensor]]

    def given_by(self, call: AttentionCall) -> Tensor:
        key = _key(self.outputs, call.site)
        assert key is not None  # only modules whose heads are edited are shown
        return next(self.outputs[key])


def _heads_by_module(edited: Head | HeadGroup) -> dict[int | str, tuple[int, ...]]:
    """Numbers of the heads by qualified name of the module, or by its running number where the name is not known."""
    found: dict[int | str, tuple[int, ...]] = {}
    for head in members_of(edited):
        key = head.module or head.layer
        found[key] = (*found.get(key, ()), head.head)
    return found


def _key(known: Mapping[int | str, object], site: Site) -> int | str | None:
    """Under which name a module is known: its own, or, of self-attention, its running number."""
    if site.module in known:
        return site.module
    return site.layer if site.kind == "self" and site.layer in known else None


# --- the sink as a constant -------------------------------------------------------------------------------------------------


class _AtSink(Watcher):
    """Keys and values of the sink by module, ``(samples, heads, head_dim)`` and ``(samples, heads, value_dim)``."""

    name, needs = "keys_and_values_of_the_sink", frozenset[str]()

    def __init__(self, place: int) -> None:
        self.place = place
        self.keys: dict[str, list[Tensor]] = {}
        self.values: dict[str, list[Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        at = keys_at(call, self.place).to(call.keys.dtype)
        for kept, tensor in ((self.keys, call.keys), (self.values, call.values)):
            own = torch.einsum("bhkd,bk->bhd", tensor, at)
            kept.setdefault(call.site.module, []).append(repeat_groups(own[:, :, None], call.groups)[:, :, 0])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MeanSink(HeadIntervention):
    """The sink's key and value are replaced by their means over the other texts, for all queries but its own: what is left of
    it is a key–value bias. Keys are those behind rotary embedding, so the sink must stand at one position in all texts.

    Args:
        place: the position.
        keys, values: by module, ``(samples, heads, head_dim)`` and ``(samples, heads, value_dim)``.
    """

    name = "mean_sink"
    place: int
    keys: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    @classmethod
    @torch.no_grad()
    def over(cls, model: nn.Module, samples: Samples, place: int, *, batch_size: int = 16) -> Self:
        """With the means over all other samples, from one run of the model."""
        seen = _AtSink(place)
        with attend(model, [seen]):
            for _, part in samples.parts(batch_size):
                model(**lean_arguments(model, part.inputs))
        return cls(place=place, keys=_of_others(seen.keys), values=_of_others(seen.values))

    @property
    def is_constant(self) -> bool:
        """Whether the sink is the same in every text, as a first token is that always is BOS."""
        return all(
            bool((means - means[:1]).norm() <= 1e-5 * means.norm()) for of in (self.keys, self.values) for means in of.values()
        )

    def of_samples(self, start: int, stop: int) -> Self:
        def cut(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {module: means[start:stop] for module, means in of.items()}

        return dataclasses.replace(self, keys=cut(self.keys), values=cut(self.values))

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if call.site.module not in self.keys:
            return call
        chosen = keys_at(call, self.place)[:, None, :, None]
        heads = list(call.head_numbers)[:: call.groups]

        def replaced(tensor: Tensor, means: Mapping[str, Tensor]) -> Tensor:
            return torch.where(chosen, means[call.site.module][:, heads, None].to(tensor), tensor)

        return dataclasses.replace(call, keys=replaced(call.keys, self.keys), values=replaced(call.values, self.values))

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        assert call.head_outputs is not None
        own = tokens_at(call.query_positions, self.place, call.site.module)[:, None, :, None]
        return torch.where(own, call.head_outputs.transpose(1, 2).to(outputs), outputs)


def _of_others(of_batches: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Mean over all other samples, by module."""
    means = {}
    for module, parts in of_batches.items():
        all_of = torch.cat(list(parts)).double()
        means[module] = ((all_of.sum(0) - all_of) / max(1, len(all_of) - 1)).to(parts[0].dtype)
    return means


# --- variants ---------------------------------------------------------------------------------------------------------------


def make_variants(model: nn.Module, sinks: Sinks, samples: Samples, *, batch_size: int = 16) -> list[HeadEdit]:
    """All variants of a measurement, by the names that the rules of labels have.

    ``zero`` and ``resample`` (the output on the next text of the same domains); with a sink ``redirect`` (all mass to it),
    ``hide``, ``zero_value``, and ``mean_sink`` where it stands at one position of all texts and is not the same in all of
    them."""
    variants = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
    place = sinks.place_in(samples.inputs.get("input_ids"), samples.inputs.get("attention_mask"))
    if place is None:
        return variants
    variants += [
        HeadEdit("redirect", (Redirect(place=place),)),
        HeadEdit("hide", (HideKey(place=place),)),
        HeadEdit("zero_value", (ZeroValue(place=place),)),
    ]
    if isinstance(place, int) and len(samples) > 1:
        means = MeanSink.over(model, samples, place, batch_size=batch_size)
        variants += [] if means.is_constant else [HeadEdit("mean_sink", (means,))]
    return variants


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
