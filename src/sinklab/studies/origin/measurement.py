"""The measurement behind find_origin(): places, where their norm comes from, what writes it, what goes without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, SinklabError, UnsupportedModelError
from sinklab.models.losses import MANY_WORDS, guess_warning, is_two_sided, without_logits
from sinklab.models.positions import length_warnings
from sinklab.results.blocks import head_numbering
from sinklab.results.intervals import Interval, function_over_items, mean_over_items
from sinklab.results.metric import Row
from sinklab.results.progress import Progress, plan, silent
from sinklab.results.sections import Context, to_json
from sinklab.results.table import make_table
from sinklab.sinks import Sink, Sinks
from sinklab.studies.measure.probing import forward_arguments, sample_losses
from sinklab.studies.origin.ablation import (
    MODES,
    Decomposition,
    Edit,
    Measured,
    Writer,
    decompose,
    new_values,
    read_columns,
    run_edits,
    writer_of,
)
from sinklab.studies.origin.found import Death, Edited, HeadWeight, Norms, Origin, Origins, finding, origin_rows, story
from sinklab.studies.origin.structure import Structure, Sublayer, find_structure
from sinklab.studies.origin.tracing import (
    Birth,
    HeadsByModule,
    OriginSetting,
    Place,
    births_of,
    mean_over,
    measure_growth,
    own_heads,
    spike_places,
)

PLACES = 8
"""Sinks that are followed at most, the strongest first."""

HEADS = 8
"""Heads that are listed with their weight on the place, the strongest first."""

EVERY_SECOND = f"Above a vocabulary of {MANY_WORDS:,} tokens losses are those of every second prediction."

ROWS_AT_ONCE = 64
"""Samples a forward, those under different edits counted."""

MOST_CONTROLS = 1000

IN_AUDIT = 16
"""Samples of an audit that its section on origins is measured on."""


def locate_origins(
    model: PreTrainedModel,
    samples: Samples,
    sinks: Sinks,
    *,
    controls: int = 5,
    batch_size: int = ROWS_AT_ONCE,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Origins, list[Row]]:
    """Find every birth of every sink, and of every spike that is no sink of its own; with the rows of the long table.

    Args:
        samples: two or more, of any kind that the model reads; sinks were found on samples like these.
        controls: draws of random units for each edit; every sample is edited with one of them.
        seed: of the units drawn as controls and of the samples drawn from.

    Raises:
        ConfigurationError: fewer than two samples, or no draw of controls.
        InputError: samples with nothing but sinks and spikes.
        UnsupportedModelError: a model whose blocks cannot be followed; the message says why.
    """
    require_settings(len(samples), controls, batch_size)
    if is_two_sided(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder and a decoder, and an origin is followed along one residual stream; give "
            "the encoder by itself (model.get_encoder())"
        )
    progress("norms by block", 0, 1)
    few = samples.take(slice(0, 2))
    structure = find_structure(model, lambda: model(**forward_arguments(model, few, full_logits=False)))
    growth, total = measure_growth(model, structure, samples, batch_size), len(samples)
    progress("norms by block", 1, 1)
    everywhere = OriginSetting(model, structure, samples, growth, growth.positions >= 0, batch_size, controls, seed, progress)
    having = {sink.name: int(everywhere.tokens_at(Place((sink,))).any(1).sum()) for sink in sinks.sinks if sink.kind != "null"}
    followed = [sink for sink in sinks.sinks if having.get(sink.name, 0) > 1]
    spikes = spike_places(growth, followed, samples.names)
    setting = everywhere.without(Place((*followed, *spikes)))
    origins, rows, loss, partly = list[Origin](), list[Row](), torch.full((1,), float("nan")), list[str]()
    groups = _groups(setting, followed[:PLACES], spikes)
    plan(progress, {stage: cost * total for place, births in groups for stage, cost in _stages(place, len(births)).items()})
    for place, births in groups:
        if (count := int(setting.tokens_at(place).any(1).sum())) < total:
            partly.append(f"Of {total} samples {count} have {place.name}; its numbers are those of these samples.")
        born, own, loss = _origins(setting, place, births)
        origins += born
        rows += own
    if origins and len(loss) < total and not loss.isnan().all():  # samples that lack the place have a loss, too
        loss = sample_losses(model, samples.scored or samples).double().nanmean(1)
    mean_loss = _known(loss.nanmean())
    with without_logits(model) as head:
        halved = [EVERY_SECOND] if origins and head is not None and samples.targets is None else []
    rare = [
        f"Of {total} samples {count} has {name}, and an interval needs two: it is not followed."
        for name, count in having.items()
        if count < 2
    ]
    notes = [
        *_notes(sinks, followed, spikes, structure),
        *(_numbering(structure) if origins else []),
        *rare,
        *partly,
        *halved,
        *filter(None, [guess_warning(model, mean_loss), *length_warnings(model, samples, None)]),
    ]
    text = (story(origins[: origins[0].births]) or origins[0].verdict) if origins else notes[0]
    found = Origins(total, growth.positions.shape[1], len(structure.blocks), mean_loss, controls, seed, origins, notes, text)
    return found, rows


def birth_neurons(model: PreTrainedModel, samples: Samples, sinks: Sinks) -> list[tuple[str, list[int]]]:
    """Of every birth of a sink at a fixed position that neurons write: the linear map that they write by, and their numbers;
    without edits, so in the time of some forwards."""
    few, found = samples.take(slice(0, 2)), list[tuple[str, list[int]]]()
    structure = find_structure(model, lambda: model(**forward_arguments(model, few, full_logits=False)))
    growth = measure_growth(model, structure, samples, ROWS_AT_ONCE)
    everywhere = OriginSetting(model, structure, samples, growth, growth.positions >= 0, ROWS_AT_ONCE, 1, 0, silent)
    followed = [sink for sink in sinks.sinks if sink.kind in ("position", "group")]
    setting = everywhere.without(Place(tuple(followed)))
    for place, births in _groups(setting, followed[:PLACES], []):
        at = setting.tokens_at(place)
        for birth in births:
            sublayer = structure.sublayers[birth.stage - 1] if birth.jumps and birth.stage else None
            if sublayer is None or sublayer.kind != "mlp" or (writer := writer_of(model, sublayer, None)) is None:
                continue
            found.append((writer.path, [one.unit for one in decompose(setting, sublayer, writer, at).units]))
    return found


def origin_section(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """The origins as a section of an audit, on the first samples of its main condition and with the sinks that it found."""
    loaded, samples = context.loaded, context.samples.take(slice(0, IN_AUDIT))
    try:
        found, rows = locate_origins(loaded.model, samples, context.sinks, seed=context.seed, progress=context.progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(
        rows, run_id=context.run_id, corpus=context.corpus.label, bos=int(context.bos), seed=context.seed, model=loaded.name,
        revision=loaded.revision, operation=loaded.operation,
    )  # fmt: skip
    return to_json(found), table


def require_settings(samples: int, controls: int, batch_size: int | None) -> None:
    """Refuse numbers that no measurement can be made with, before a model is loaded."""
    if samples < 2:
        raise ConfigurationError(f"`samples` {samples}: an interval over samples needs two or more")
    if not 1 <= controls <= MOST_CONTROLS:
        raise ConfigurationError(f"`controls` {controls} must be 1 to {MOST_CONTROLS:,}: draws of random units")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")


def _groups(setting: OriginSetting, sinks: Sequence[Sink], spikes: Sequence[Sink]) -> list[tuple[Place, list[Birth]]]:
    """Sinks that jump at the same writes together, and spikes likewise; a sink that does not jump stands by itself."""

    def born(place: Place) -> list[Birth]:
        return births_of(setting.growth, setting.tokens_at(place), setting.others)

    groups: dict[tuple[object, ...], list[Sink]] = {}
    for spike, listed in ((False, sinks), (True, spikes)):
        for number, sink in enumerate(listed):
            births = born(Place((sink,)))
            stages = tuple(birth.stage for birth in births)
            groups.setdefault((spike, stages) if births[0].jumps else (spike, "alone", number), []).append(sink)
    places = [Place(tuple(members), spike=bool(key[0])) for key, members in groups.items()]
    return [(place, born(place)) for place in places]


def _stages(place: Place, births: int) -> dict[str, float]:
    """What is said of the progress at a place, in order: of the model as it is, then of each birth; and forwards a sample."""
    which = [f" of birth {number} of {births}" if births > 1 else "" for number in range(1, births + 1)]
    return {f"{place.name}: as it is": 1.0, **{f"{place.name}: edits{one}": 8.0 for one in which}}


def _notes(sinks: Sinks, followed: Sequence[Sink], spikes: Sequence[Sink], structure: Structure) -> Iterator[str]:
    """What is not followed, and why, a sentence each."""
    if any(sink.kind == "null" for sink in sinks.sinks):
        yield "The null score is a number that the attention itself has learned: no token carries it, and no write makes it."
    if len(followed) > PLACES:
        yield f"{len(followed) - PLACES} weaker sinks are not followed."
    if not followed and not spikes:
        yield "There is no sink at a token and no token whose norm stands out, so there is no origin to look for."
    if unsplit := structure.unsplit:
        listed = ", ".join(unsplit[:3]) + (", …" if len(unsplit) > 3 else "")
        yield (
            f"{len(unsplit)} of {len(structure.blocks)} blocks ({listed}) return something else than what entered plus what "
            "their modules write: such a block is taken as a whole, and not split."
        )


def _numbering(structure: Structure) -> list[str]:
    """How heads are numbered where not every block has attention; blocks are numbered among all."""
    blocks = structure.blocks
    attending = [block.number for block in blocks if not block.split or any(one.attention for one in block.sublayers)]
    return list(filter(None, [head_numbering(attending, len(blocks), "block")]))


def _origins(setting: OriginSetting, place: Place, births: Sequence[Birth]) -> tuple[list[Origin], list[Row], Tensor]:
    """Everything about the births of a place in the samples that have it, its rows, and the losses of the model as it is."""
    at = setting.tokens_at(place)
    if not bool(at.any(1).all()):  # a token that samples lack
        rows = torch.nonzero(at.any(1))[:, 0]
        setting, at = setting.having(rows), at[rows]
    clean = run_edits(setting, [Edit("as it is")], at, next(iter(_stages(place, 1))))[0]
    # A sink whose heads read it in front of the jump is not born there; of a spike nobody asks who reads it.
    jumps = births[0].jumps and (place.spike or _is_ahead(setting, clean, births[0]))
    origins = list[Origin]()
    for number, birth in enumerate(births if jumps else births[:1]):
        sublayer = setting.structure.sublayers[birth.stage - 1] if jumps and birth.stage else None
        origin = _birth(setting, place, at, clean, birth, sublayer, (number + 1, len(births) if jumps else 1))
        if not jumps:
            origin = dataclasses.replace(origin, by="none", stage=None, sublayer=None)
        origins.append(dataclasses.replace(origin, verdict=finding(origin)))
    every_head = [
        (label, clean.layers[label], head, weight)
        for label, values in clean.weights.items()
        for head, weight in enumerate(values.nanmean(0).tolist())
    ]
    return origins, [row for one in origins for row in origin_rows(one, every_head, len(setting.samples))], clean.loss


def _birth(
    setting: OriginSetting, place: Place, at: Tensor, clean: Measured, birth: Birth, sublayer: Sublayer | None,
    number: tuple[int, int],
) -> Origin:  # fmt: skip
    """One birth of a place: what writes it, which heads look at it, and what goes without it."""
    block = None if sublayer is None else setting.structure.blocks[sublayer.block]
    behind = 0 if block is None else block.number
    last = len(setting.structure.blocks) - 1
    if birth.until is not None:
        last = setting.structure.sublayers[birth.until - 1].block
    own = own_heads(setting, clean.weights, -1 if block is None else block.number, last)
    # The block behind the origin with the largest spike; the block of the next birth leaves that one.
    blocks = slice(behind, last + (birth.until is None))
    spike_block = behind + int(clean.spikes[:, blocks].mean(0).argmax())
    split, edits, measured = Decomposition(), list[Edit](), list[Measured]()
    if sublayer is not None and block is not None:
        heads = clean.weights.get(f"{sublayer.attention}#{block.call}" if block.call else str(sublayer.attention))
        writer = writer_of(setting.model, sublayer, None if heads is None else heads.shape[1])
        split = decompose(setting, sublayer, writer, at)
        edits = list(_edits(setting, at, sublayer, writer, split))
        if edits:
            measured = run_edits(setting, edits, at, list(_stages(place, number[1]))[number[0]], clean)
    return Origin(
        place=place.name,
        kind="spike" if place.spike else "sink",
        positions=place.positions,
        description=place.sinks[0].describe() if len(place.sinks) == 1 else place.name,
        birth=number[0],
        births=number[1],
        by="norm",
        stage=sublayer.stage if sublayer is not None else birth.stage,
        block=None if sublayer is None else sublayer.block,
        module=None if block is None else block.name,
        sublayer=sublayer.kind if sublayer is not None else "embeddings",
        last=None if birth.until is None else last,
        death=_death(setting, at, birth),
        before=birth.before,
        after=birth.after,
        peak=birth.peak,
        norms=Norms(*(setting.growth.means(mask, blocks=True).nanmean(0).tolist() for mask in (at, setting.others))),
        **vars(split),
        weight=_known(mean_over(clean.weights, own).nanmean()),
        uniform=_known(mean_over(clean.uniform, own).nanmean()),
        spike=float(clean.spikes[:, spike_block].mean()),
        spiked=birth.jumps and 2 * int(clean.spiked[:, spike_block].sum()) >= len(clean.spiked),
        edits=list(_outcomes(clean, own, slice(spike_block, blocks.stop), edits, measured)),
        heads=_heads(clean, own, edits, measured),
    )


def _death(setting: OriginSetting, at: Tensor, birth: Birth) -> Death | None:
    """The write that takes half of the norm away again."""
    if birth.death is None:
        return None
    sublayer, norms = setting.structure.sublayers[birth.death - 1], setting.growth.means(at).nanmean(0)
    return Death(sublayer.block, sublayer.kind, float(norms[birth.death - 1]), float(norms[birth.death]))


def _is_ahead(setting: OriginSetting, clean: Measured, birth: Birth) -> bool:
    """Whether at least half of the heads that give a place most read it behind the write at which its norm jumps."""
    block = -1 if not birth.stage else setting.structure.sublayers[birth.stage - 1].block
    heads = own_heads(setting, clean.weights, -1)
    behind = sum(len(own) for label, own in heads.items() if setting.block_of(label) > block)
    return 2 * behind >= sum(len(own) for own in heads.values())


def _edits(
    setting: OriginSetting, at: Tensor, sublayer: Sublayer, writer: Writer | None, split: Decomposition
) -> Iterator[Edit]:
    """Edits of the units of a write, of as many random ones, of the whole write and of its channels."""
    if writer is not None and split.units:
        yield from _edits_of_units(setting, at, sublayer, writer, [one.unit for one in split.units])
    if sublayer.kind != "block":
        what = "the whole write of the sublayer 0 at the place"
        yield Edit("zero", "write", what, stage=sublayer.stage, write=True)
    if sum(channel.share for channel in split.channels) >= 0.5:
        channels = torch.tensor([channel.channel for channel in split.channels])
        means = torch.tensor([channel.state for channel in split.channels])
        for name, said, state in (("zero", "0", torch.zeros(len(channels))), ("mean", "at their mean over samples", means)):
            what = f"the channels {said} at the place, behind the block"
            yield Edit(name, "channels", what, block=sublayer.block, channels=channels, state=state)


def _edits_of_units(setting: OriginSetting, at: Tensor, sublayer: Sublayer, writer: Writer, units: list[int]) -> Iterator[Edit]:
    """Edits of the units, and of as many random ones where the writer has so many besides: every sample under one draw."""
    generator, rows = torch.Generator().manual_seed(setting.seed), torch.arange(len(setting.samples))
    pool = torch.tensor([unit for unit in range(writer.units) if unit not in set(units)])
    draws = [
        pool[torch.randperm(len(pool), generator=generator)[: len(units)]] for _ in range(min(setting.controls, len(rows)))
    ]
    drawn = [draw.tolist() for draw in draws if len(draw) == len(units)]
    columns = [writer.columns(group) for group in (units, *drawn)]
    clean = read_columns(setting, sublayer, torch.cat(columns)).split([len(own) for own in columns], dim=2)
    for mode, what in MODES.items():
        new = [new_values(mode, values, at, setting.others) for values in clean]
        yield Edit(mode, "units", what, stage=sublayer.stage, columns=columns[0], values=new[0])
        if drawn and mode == "zero":  # random units that do nothing when silenced do nothing at a mean
            own, mine = rows % len(drawn), torch.stack(columns[1:])
            values = torch.stack(new[1:])[own, rows]
            yield Edit(mode, "controls", what, stage=sublayer.stage, columns=mine[own], values=values)


def _outcomes(
    clean: Measured, own: HeadsByModule, blocks: slice, edits: Sequence[Edit], measured: Sequence[Measured]
) -> Iterator[Edited]:
    """What every edit does."""
    uniform, as_it_is = mean_over(clean.uniform, own), mean_over(clean.weights, own)
    for edit, run in zip(edits, measured, strict=True):
        weight, spike = mean_over(run.weights, own), run.spikes[:, blocks].amax(1)
        yield Edited(
            edit.name, edit.on, edit.what,
            loss=_interval(run.loss - clean.loss),
            weight=_known(weight.nanmean()),
            weight_kept=_kept(weight, as_it_is, uniform),
            spike=float(spike.mean()),
            spike_kept=_share(spike, clean.spikes[:, blocks.start]),
        )  # fmt: skip


def _heads(clean: Measured, own: HeadsByModule, edits: Sequence[Edit], measured: Sequence[Measured]) -> list[HeadWeight]:
    """The heads that give the place most, with their weight as it is and under every edit of units and of the write."""
    under = {
        f"{edit.on} {edit.name}": seen for edit, seen in zip(edits, measured, strict=True) if edit.on in ("units", "write")
    }
    silenced = under.get("units zero")
    listed: list[HeadWeight] = []
    for label, values in clean.weights.items():
        behind, uniform, means = set(own[label].tolist() if label in own else []), clean.uniform[label], values.nanmean(0)
        for head in range(values.shape[1]):
            kept = None
            if silenced is not None and head in behind:
                kept = _kept(silenced.weights[label][:, head], values[:, head], uniform[:, head])
            listed.append(
                HeadWeight(
                    clean.layers[label], head, label, head in behind, _known(means[head]),
                    _known(uniform[:, head].nanmean()),
                    {name: _known(seen.weights[label][:, head].nanmean()) for name, seen in under.items()}, kept,
                )
            )  # fmt: skip
    listed.sort(key=lambda head: (not head.own, -(head.weight or 0.0)))
    return listed[: max(HEADS, sum(head.own for head in listed))]


def _known(value: Tensor) -> float | None:
    """A number for JSON, or ``None`` for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _interval(values: Tensor) -> Interval | None:
    """Mean over samples with its interval; ``None`` where fewer than two samples have the number."""
    own = values[~values.isnan()]
    return mean_over_items(own.numpy()) if len(own) > 1 else None


def _share(edited: Tensor, clean: Tensor) -> Interval:
    """Mean under an edit over that of the same samples as they are, with its interval over samples."""
    return function_over_items(torch.stack([edited, clean]).numpy(), lambda means: means[0] / means[1])


def _kept(edited: Tensor, clean: Tensor, uniform: Tensor) -> Interval | None:
    """Share of the weight above a uniform one that an edit leaves; ``None`` with fewer than two samples, or nothing above."""
    left, excess = edited - uniform, clean - uniform
    known = ~(left.isnan() | excess.isnan())
    enough = int(known.sum()) > 1 and float(excess[known].mean()) > 0
    return _share(left[known], excess[known]) if enough else None
