"""Effects: what each edit of a head, or of a group, does to the loss, text by text; and the slow way to measure them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.mean_head import MeanHead
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.rotate_head import RotateHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.samples import Samples

__all__ = ["Effects", "HeadEdit", "HeadGroup", "make_variants", "one_by_one"]

NAMED = 6
"""Heads that the name of a group lists; of more it says how many there are."""
CLEAN = "the loss of the unedited model"
"""What an error calls it."""

Budget: TypeAlias = Literal["fast", "full"]
TEXTS: dict[str, int] = {"fast": 64, "full": 384}
"""Texts of each domain, by budget. That something costs is shown by a few dozen; that it costs nothing by some 250 at the least
(:mod:`~sinklab.studies.causes.evidence`), and by more where effects vary."""
KEYS, ROTATED = 2, 4
"""Other keys, and rotated copies, of the full budget."""
EARLY = 4
"""Control keys are drawn from the first quarter of the positions, which three quarters of causal queries see."""


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """Heads that are edited at once, so that none of them can stand in for another.

    Args:
        members: one or more, each once.
        called: ``layer 3``, or the label that all of them have; empty for heads that somebody named.
    """

    members: tuple[Head, ...]
    called: str = ""

    def __str__(self) -> str:
        named = "+".join(map(str, self.members[:NAMED]))
        if len(self.members) > NAMED:
            named += f"+… ({len(self.members)} heads)"
        return f"{self.called}: {named}" if self.called else named


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
        heads = _heads_by_module(head)
        return [dataclasses.replace(intervention.of_samples(start, stop), heads=heads) for intervention in self.interventions]

    def means(self, head: Head | HeadGroup, part: Samples, loss: Tensor, divergence: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Its change of the loss and its divergence ``(samples, seq_len)``, by domain ``(samples, domains)``.

        Raises:
            MeasurementError: one that is NaN or infinite at a scored position.
        """
        under = f"under {self.name!r} on head {head}"
        of_loss = part.by_domain(loss, f"the change of the loss {under}")
        return of_loss.cpu().numpy(), part.by_domain(divergence, f"the divergence {under}").cpu().numpy()


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
        recorded = _HeadOutputs([head for head in heads if isinstance(head, HeadGroup)])
        with attend(model, [recorded], verify=False) if recorded.wanted else contextlib.nullcontext():
            clean = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
        own = readout.loss(clean, part)
        clean_loss[start:stop] = part.by_domain(own, CLEAN).cpu().numpy()
        for number, variant in enumerate(variants):
            for index, head in enumerate(heads):
                with attend(model, interventions=recorded.in_place(variant.on(head, start, stop), head), verify=False):
                    edited = readout.outputs(model(**lean_arguments(model, part.inputs, logits=True)), part)
                of_loss, of_outputs = readout.loss(edited, part) - own, readout.divergence(edited, clean)
                del edited  # logits of a large vocabulary, beside which the next ones would be made
                where = number, index, slice(start, stop)
                loss[where], divergence[where] = variant.means(head, part, of_loss, of_outputs)
                finished += 1
                progress("effects", finished, total)
    return Effects(
        [variant.name for variant in variants], list(heads), samples.domain_names, loss, divergence, clean_loss, readout.unit
    )


# --- groups of several layers ----------------------------------------------------------------------------------------------


class _HeadOutputs(Watcher):
    """Outputs of heads in one run of the unedited model, so that a group of several layers is resampled from them.

    A head of a later layer, in a run in which one of an earlier layer is resampled, says what follows from that; so the other
    text's own run is what it has to be taken from. Groups of one module have nothing edited before them and need no record.
    """

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
    for head in edited.members if isinstance(edited, HeadGroup) else (edited,):
        key = head.module or head.layer
        found[key] = (*found.get(key, ()), head.head)
    return found


def _key(known: Mapping[int | str, object], site: Site) -> int | str | None:
    """Under which name a module is known: its own, or, of self-attention, its running number."""
    if site.module in known:
        return site.module
    return site.layer if site.kind == "self" and site.layer in known else None


# --- variants ---------------------------------------------------------------------------------------------------------------


def make_variants(sinks: Sinks, samples: Samples, *, budget: Budget = "fast", seed: int = 0) -> list[HeadEdit]:
    """All variants of a measurement, by the names that the rules of labels have.

    - ``redirect``, ``hide``, ``zero_value``: with the sink; ``zero``: the whole head; ``resample``: its output of the next text
      of the same domains, where these have different lengths the next longer one of the batch. On these labels rest.
    - in a full budget also ``mean``; ``redirect control K``, all mass to another key, drawn for each text, neither the sink nor
      a secondary one; and ``rotated K``: the head's output, rotated by a random orthogonal matrix, one for all texts. Norms are
      kept, and all that the output says is lost (:class:`~sinklab.interventions.rotate_head.RotateHead`).

    Without a sink there are only ``zero``, ``resample``, and in a full budget ``mean`` and ``rotated K``.

    Args:
        seed: of keys and directions.

    Raises:
        ConfigurationError: no key left for controls.
    """
    variants = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
    place = sinks.place_in(samples.inputs.get("input_ids"), samples.inputs.get("attention_mask"))
    if place is not None:
        variants += [
            HeadEdit("redirect", (Redirect(place=place),)),
            HeadEdit("hide", (HideKey(place=place),)),
            HeadEdit("zero_value", (ZeroValue(place=place),)),
        ]
    if budget == "full":
        variants.append(HeadEdit("mean", (MeanHead(),)))
        seeds = range(seed * 1000, (seed + 1) * 1000)  # runs with other seeds have other directions
        variants += [HeadEdit(f"rotated {number}", (RotateHead(seed=seeds[number]),)) for number in range(ROTATED)]
        if place is not None:
            keys = _control_keys(sinks, place, samples, KEYS, seed)
            variants += [HeadEdit(f"redirect control {number}", (Redirect(place=key),)) for number, key in enumerate(keys)]
    return variants


def _control_keys(sinks: Sinks, place: int | Tensor | str, samples: Samples, number: int, seed: int) -> list[Tensor]:
    """Keys for controls, int64 ``(samples, 1)`` each, none behind the end of its text."""
    count = len(samples)
    own = torch.full((count, 1), -1) if isinstance(place, str) else torch.as_tensor(place).expand(count, 1)
    tokens = samples.lengths(sinks.length)
    # The longest text is as long as the model was found to see; learned tokens in front are in every text.
    sizes = (tokens + (sinks.length - tokens.max()).clamp_min(0)).clamp_max(sinks.length).tolist()
    generator, drawn, longest = torch.Generator().manual_seed(seed), [], max(sizes)
    for sink, size in zip(own[:, 0].tolist(), sizes, strict=True):
        early = max(size // EARLY, number + 1 + len(sinks.secondary))
        pool = [position for position in range(min(early, size)) if position not in {sink, *sinks.secondary}]
        if size < longest and len(pool) < number:
            pool = pool or [position for position in range(size) if position != sink]
            pool *= number
        if len(pool) < number:
            raise ConfigurationError(
                f"controls need {number} keys besides the sink, and texts of {sinks.length:,} tokens leave {len(pool)}; "
                "take longer texts"
            )
        drawn.append(torch.tensor(pool)[torch.randperm(len(pool), generator=generator)[:number]])
    return list(torch.stack(drawn).T[..., None])
