"""The measurement behind find_origin(): places, where their norm or pull comes from, what writes it, what goes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.token_text import token_text
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError, SinklabError, UnsupportedModelError
from sinklab.models.lengths import length_warnings
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, is_two_sided
from sinklab.models.registers import require_pictures
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.metric import Row
from sinklab.results.naming import head_numbering
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.origin import OriginFound, OriginSummary
from sinklab.results.table import make_table
from sinklab.sinks import Sink, Sinks
from sinklab.studies.measure.probing import forward_arguments
from sinklab.studies.origin.ablation import MODES, Edit, Measured, Mode, clean_losses, new_values, read_columns, run_edits
from sinklab.studies.origin.decomposition import Decomposition, decompose
from sinklab.studies.origin.entry import PlacedEdit, TracedPlace, entry_of, known
from sinklab.studies.origin.registers import measure_registers
from sinklab.studies.origin.rows import origin_rows
from sinklab.studies.origin.setting import OriginSetting, mean_over, own_heads
from sinklab.studies.origin.structure import Block, Structure, Sublayer, find_structure
from sinklab.studies.origin.tracing import Birth, Growth, Place, birth_of, measure_growth, spike_places
from sinklab.studies.origin.words import sentences
from sinklab.studies.origin.writers import Linear, Writer, writer_of

__all__ = ["ROWS_AT_ONCE", "Located", "decoded", "locate_origins", "origin_section", "require_settings"]

PLACES = 8
"""Sinks that are followed at most, the strongest first."""

PULL_SAMPLES = 8
"""Samples on which every write of the model is taken away in turn, where the norm does not tell which one matters."""

LEAST_PULL = 0.1
"""Share of a sink's pull that one write must carry to be called its origin."""

CONTROLLED: tuple[Mode, ...] = ("zero", "mean", "resampled")
"""Edits that are also made on random units."""

ROWS_AT_ONCE = 64
"""Samples a forward, those under different edits counted."""

MOST_CONTROLS = 1000

IN_AUDIT = 32
"""Samples of an audit that its section on origins is measured on."""


@dataclasses.dataclass(frozen=True)
class Located:
    """What was found.

    Attributes:
        summary: for ``summary.json``; docs/explain.md#where-a-sink-is-born.
        rows: of the long table.
    """

    summary: OriginSummary
    rows: list[Row]


def locate_origins(
    model: PreTrainedModel,
    samples: Samples,
    sinks: Sinks,
    *,
    controls: int = 5,
    registers: int = 0,
    batch_size: int = ROWS_AT_ONCE,
    seed: int = 0,
    progress: Progress = silent,
) -> Located:
    """Find the origin of every sink, and of every spike that is no sink of its own.

    Args:
        samples: two or more, of any kind that the model reads.
        sinks: that were found on samples like these.
        controls: draws of random units for each edit.
        registers: tokens that are added to a model of pictures, to move to them what neurons write; 0 for none.
        batch_size: samples a forward.
        seed: of the units drawn as controls and of the samples drawn from.

    Raises:
        ConfigurationError: fewer than two samples, no draw of controls, or a negative number of registers.
        InputError: samples with nothing but sinks and spikes.
        UnsupportedModelError: a model whose blocks cannot be followed, or that can have no registers; the message says why.
    """
    require_settings(len(samples), controls, batch_size, registers)
    if registers:
        require_pictures(model)
    if is_two_sided(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder and a decoder, and an origin is followed along one residual stream; give "
            "the encoder by itself (model.get_encoder())"
        )

    def forward(batch: Samples) -> object:
        return model(**forward_arguments(model, batch, full_logits=True))

    structure = find_structure(model, lambda: forward(samples.take(slice(0, 2))))
    progress("norms by block", 0, 1)
    growth = measure_growth(model, structure, samples, forward, batch_size)
    listed = [sink for sink in sinks.sinks if sink.kind != "null"]
    rare = {sink.name: count for sink in listed if (count := _having(growth, sink)) < 2}
    followed = [sink for sink in listed if sink.name not in rare]
    spikes = spike_places(growth, followed, samples.names)
    others = _other_tokens(growth, (*followed, *spikes))
    setting = OriginSetting(model, structure, samples, forward, growth, others, batch_size, controls, seed, progress, registers)
    origins, rows, loss = [], list[Row](), torch.full((1,), float("nan"))
    partly: dict[str, int] = {}
    for place, birth in _groups(setting, followed[:PLACES], spikes):
        if (having := int(setting.tokens_at(place).any(1).sum())) < len(samples):
            partly[place.name] = having
        origin, own, loss = _origin(setting, place, birth)
        origins.append(origin)
        rows += own
    if origins and len(loss) < len(samples):  # samples that lack the place have a loss, too
        loss = clean_losses(model, samples, forward, batch_size)
    mean_loss = known(float(loss.nanmean()))
    summary: OriginSummary = {
        "samples": len(samples),
        "positions": growth.positions.shape[1],
        "blocks": len(structure.blocks),
        "loss": mean_loss,
        "controls": controls,
        "seed": seed,
        "origins": origins,
        "notes": [
            *_notes(sinks, followed, spikes, structure),
            *_numbering(origins),
            *_counts(rare, partly, len(samples)),
            *filter(None, [guess_warning(model, mean_loss), *length_warnings(model, samples, None)]),
            *(_without_registers(origins) if registers else []),
        ],
    }
    summary["text"] = sentences(summary)
    return Located(summary, rows)


def _other_tokens(growth: Growth, sinks: Sequence[Sink]) -> Tensor:
    """Boolean ``(samples, length)``: the tokens that are no sink and no spike.

    Raises:
        InputError: a sample without such a token.
    """
    real = growth.positions >= 0
    if not sinks:
        return real
    everything = Place(tuple(sinks))
    others = real & ~everything.mask(growth.positions, growth.tokens)
    if not bool(others.any(1).all()):
        raise InputError(
            f"a sample of {int(real.sum(1).min())} positions has no token besides {everything.name} to compare with; give "
            "longer samples (`seq_len`)"
        )
    return others


def require_settings(samples: int, controls: int, batch_size: int | None, registers: int = 0) -> None:
    """Refuse numbers that no measurement can be made with, before a model is loaded.

    Raises:
        ConfigurationError: fewer than two samples, no draw of controls or too many, no sample a forward, or a negative number
            of registers.
    """
    if samples < 2:
        raise ConfigurationError(f"`samples` {samples}: an interval over samples needs two or more")
    if not 1 <= controls <= MOST_CONTROLS:
        raise ConfigurationError(f"`controls` {controls} must be 1 to {MOST_CONTROLS:,}: draws of random units")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")
    if registers < 0:
        raise ConfigurationError(f"`registers` {registers} must be 0 or more: tokens that are added")


def decoded(loaded: LoadedModel) -> Callable[[int], str] | None:
    """From ids to texts of tokens; ``None`` where the model has no tokenizer."""
    tokenizer = loaded.tokenizer
    return None if tokenizer is None else lambda token: token_text(tokenizer, token)


def origin_section(
    loaded: LoadedModel, samples: Samples, sinks: Sinks, *, run_id: str, corpus: str, bos: int, seed: int, progress: Progress
) -> tuple[Mapping[str, object], pd.DataFrame]:
    """The origins as a section of an audit, on the first samples of its main condition and with the sinks that it found.

    Returns:
        What ``summary.json`` has under ``origin``, ``{"refused": why}`` where it cannot be had; and rows of the long table.
    """
    facts = {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation}
    try:
        located = locate_origins(loaded.model, samples.take(slice(0, IN_AUDIT)), sinks, seed=seed, progress=progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(located.rows, run_id=run_id, corpus=corpus, bos=bos, seed=seed, **facts)
    return {**located.summary}, table


def _groups(setting: OriginSetting, sinks: Sequence[Sink], spikes: Sequence[Sink]) -> list[tuple[Place, Birth]]:
    """Sinks that jump at one write together, and spikes likewise; a sink that does not jump stands by itself."""
    groups: dict[tuple[object, ...], list[Sink]] = {}
    for spike, listed in ((False, sinks), (True, spikes)):
        for number, sink in enumerate(listed):
            birth = birth_of(setting.growth, setting.tokens_at(Place((sink,))), setting.others)
            groups.setdefault((spike, birth.stage) if birth.jumps else (spike, "alone", number), []).append(sink)
    placed = []
    for key, members in groups.items():
        place = Place(tuple(members), spike=bool(key[0]))
        placed.append((place, birth_of(setting.growth, setting.tokens_at(place), setting.others)))
    return placed


def _having(growth: Growth, sink: Sink) -> int:
    """In how many samples a sink has a token."""
    return int(Place((sink,)).mask(growth.positions, growth.tokens).any(1).sum())


def _counts(rare: Mapping[str, int], partly: Mapping[str, int], samples: int) -> list[str]:
    """Which places not all samples have, a sentence each.

    Args:
        rare, partly: how many have them: fewer than two, or more.
    """
    return [
        *(
            f"Of {samples} samples {count} has {name}, and an interval needs two: it is not followed."
            for name, count in rare.items()
        ),
        *(
            f"Of {samples} samples {count} have {name}; its numbers are those of these samples."
            for name, count in partly.items()
        ),
    ]


def _notes(sinks: Sinks, followed: Sequence[Sink], spikes: Sequence[Sink], structure: Structure) -> list[str]:
    """What is not followed, and why, a sentence each."""
    notes = []
    if any(sink.kind == "null" for sink in sinks.sinks):
        notes.append(
            "The null score is a number that the attention itself has learned: no token carries it, and no write makes it."
        )
    if len(followed) > PLACES:
        notes.append(f"{len(followed) - PLACES} weaker sinks are not followed.")
    if not followed and not spikes:
        notes.append("There is no sink at a token and no token whose norm stands out, so there is no origin to look for.")
    if structure.unsplit:
        listed = ", ".join(structure.unsplit[:3]) + (", …" if len(structure.unsplit) > 3 else "")
        notes.append(
            f"{len(structure.unsplit)} of {len(structure.blocks)} blocks ({listed}) return something else than what entered "
            "plus what their modules write: such a block is taken as a whole, and not split."
        )
    return notes


def _without_registers(origins: Sequence[OriginFound]) -> list[str]:
    """Places for which nothing is moved to the registers that were asked for, a sentence each."""
    return [
        f"What makes {origin['place']} stand out is not traced to neurons of one write, so nothing is moved to registers."
        for origin in origins
        if "registers" not in origin
    ]


def _numbering(origins: Sequence[OriginFound]) -> list[str]:
    """How heads are numbered where not every block has attention, a sentence; blocks are numbered among all."""
    if not origins:
        return []
    blocks = origins[0]["weight_by_block"]
    attending = [block for block, weight in enumerate(blocks) if weight is not None]
    return list(filter(None, [head_numbering(attending, len(blocks), "block")]))


def _origin(setting: OriginSetting, place: Place, birth: Birth) -> tuple[OriginFound, list[Row], Tensor]:
    """Everything about one place in the samples that have it, its rows, and the losses of the model as it is there."""
    at = setting.tokens_at(place)
    if not bool(at.any(1).all()):  # a token that samples lack
        setting, at = setting.having(at.any(1)), at[at.any(1)]
    clean = _run(setting, [Edit("as it is")], at, {}, f"{place.name}: as it is")[0]
    sublayer, pull, by = _write_behind(setting, at, clean, place, birth)
    block = -1 if sublayer is None else setting.structure.blocks[sublayer.block].number
    own = own_heads(setting, clean, block)
    writer, split = None, None
    edits: list[PlacedEdit] = []
    measured: list[Measured] = []
    if sublayer is not None:
        writer, split = _split(setting, at, clean, sublayer, against_others=by == "pull")
        edits = list(_edits(setting, at, sublayer, writer, split))
        if edits:
            measured = _run(setting, [placed.edit for placed in edits], at, {sublayer.stage: writer}, f"{place.name}: edits")
    spike_block = _spike_block(clean, max(block, 0))
    traced = TracedPlace(
        place=place, at=at, birth=birth, by=by, sublayer=sublayer, pull=pull, writer=writer, split=split, clean=clean, own=own,
        spike_block=spike_block, edits=edits, measured=measured,
    )  # fmt: skip
    if setting.registers and split is not None and split.parts and isinstance(writer, Linear) and writer.kind == "neuron":
        units = [part.unit for part in split.parts]
        traced = dataclasses.replace(traced, moved=measure_registers(setting, at, writer, units, setting.registers))
    entry = entry_of(setting, traced)
    return entry, list(origin_rows(entry, clean, len(setting.samples))), clean.loss


def _write_behind(
    setting: OriginSetting, at: Tensor, clean: Measured, place: Place, birth: Birth
) -> tuple[Sublayer | None, tuple[float, Interval | None] | None, Literal["norm", "pull", "none"]]:
    """``sublayer``, ``pull`` and ``by`` of :class:`TracedPlace`: the write at which the norm jumps, or that the pull is of.

    A sink whose norm does not jump, or whose heads read it before it does, is followed by its pull.
    """
    if not place.spike and clean.pulls and not (birth.jumps and _is_ahead(setting, clean, birth)):
        sublayer, pull = _strongest_write(setting, at, clean, place)
        return sublayer, pull, "none" if sublayer is None and pull[1] is not None else "pull"
    if not birth.jumps:
        return None, None, "none"
    return (setting.structure.sublayers[birth.stage - 1] if birth.stage else None), None, "norm"


def _split(
    setting: OriginSetting, at: Tensor, clean: Measured, sublayer: Sublayer, *, against_others: bool
) -> tuple[Writer | None, Decomposition]:
    """The writer of a write, and the write as a sum over its units."""
    heads = clean.weights.get(_label(sublayer, setting.structure.blocks[sublayer.block]))
    writer = writer_of(setting.model, sublayer, None if heads is None else heads.shape[1])
    split = decompose(
        setting.model, setting.structure, sublayer, writer, setting.samples, (at, setting.others), setting.forward,
        setting.batch_size, against_others=against_others,
    )  # fmt: skip
    return writer, split


def _run(
    setting: OriginSetting, edits: Sequence[Edit], at: Tensor, writers: dict[int, Writer | None], stage: str
) -> list[Measured]:
    return run_edits(
        setting.model, setting.structure, edits, writers, setting.samples, (at, setting.others, setting.real), setting.forward,
        setting.batch_size, progress=setting.progress, stage=stage,
    )  # fmt: skip


def _label(sublayer: Sublayer, block: Block) -> str:
    """What the session calls the attention module of a sublayer."""
    return f"{sublayer.attention}#{block.call}" if block.call else str(sublayer.attention)


def _is_ahead(setting: OriginSetting, clean: Measured, birth: Birth) -> bool:
    """Whether at least half of the heads that give a place most read it behind the write at which its norm jumps."""
    block = -1 if not birth.stage else setting.structure.sublayers[birth.stage - 1].block
    heads = own_heads(setting, clean, -1)
    behind = sum(len(own) for label, own in heads.items() if setting.block_of(label) > block)
    return 2 * behind >= sum(len(own) for own in heads.values())


def _strongest_write(
    setting: OriginSetting, at: Tensor, clean: Measured, place: Place
) -> tuple[Sublayer | None, tuple[float, Interval | None]]:
    """The write without which the scores of the place fall most, over the heads that give it most; how far these scores stand
    above the others, and how much they fall (``None`` where nothing is written before these heads read, or fewer than two
    samples have the place)."""
    chosen = own_heads(setting, clean, -1)
    pulls = mean_over(clean.pulls, chosen)
    rows = (~pulls.isnan()).nonzero()[:PULL_SAMPLES, 0]  # a sink that is a token is not in every sample
    few = dataclasses.replace(setting, samples=setting.samples.take(rows))
    last = max(few.block_of(label) for label in chosen)
    sublayers = [sublayer for sublayer in setting.structure.sublayers if sublayer.block < last and sublayer.kind != "block"]
    edits = [Edit(f"write {sublayer.stage}", stage=sublayer.stage, mean_write=True) for sublayer in sublayers]
    before = pulls[rows]
    mean = float(before.mean())
    if not edits or len(rows) < 2:
        return None, (mean, None)
    measured = run_edits(
        few.model, few.structure, edits, {}, few.samples, (at[rows], few.others[rows], few.real[rows]), few.forward,
        few.batch_size, progress=few.progress, stage=f"{place.name}: every write taken away",
    )  # fmt: skip
    best, interval, enough = _most_lost([before - mean_over(seen.pulls, chosen) for seen in measured], mean)
    return (sublayers[best] if enough else None), (mean, interval)


def _most_lost(lost: Sequence[Tensor], pull: float) -> tuple[int, Interval, bool]:
    """Number of the write without which most is lost, how much, and whether that makes it the origin of the pull.

    The most of many is larger than 0 by chance, so the interval is at the level with which those of all writes hold together
    (Bonferroni): of 24 writes whose losses scatter round 0 by a fifth of the pull, one would pass at 95 % in 27 % of cases.

    Args:
        lost: for each write one number a sample.
    """
    best = max(range(len(lost)), key=lambda index: float(lost[index].mean()))
    interval = mean_over_items(lost[best].numpy(), level=1 - 0.05 / len(lost))
    return best, interval, interval.low > 0 and interval.mean >= LEAST_PULL * pull


def _edits(
    setting: OriginSetting, at: Tensor, sublayer: Sublayer, writer: Writer | None, split: Decomposition
) -> Iterator[PlacedEdit]:
    """Edits of the units of a write, of as many random ones, of the whole write and of its channels."""
    if writer is not None and split.parts:
        yield from _edits_of_units(setting, at, sublayer, writer, [part.unit for part in split.parts])
    if sublayer.kind != "block":
        zero = torch.zeros(1, 1, 1)
        whole = Edit("zero", stage=sublayer.stage, write=zero)
        yield PlacedEdit("write", whole, "the whole write of the sublayer 0 at the place")
    if sum(channel.share for channel in split.channels) >= 0.5:
        channels = torch.tensor([channel.channel for channel in split.channels])
        for name, state in (("zero", torch.zeros(len(channels))), ("mean", torch.tensor([c.state for c in split.channels]))):
            what = f"the channels {'0' if name == 'zero' else 'at their mean over samples'} at the place, behind the block"
            yield PlacedEdit("channels", Edit(name, block=sublayer.block, channels=channels, state=state), what)


def _edits_of_units(
    setting: OriginSetting, at: Tensor, sublayer: Sublayer, writer: Writer, units: list[int]
) -> Iterator[PlacedEdit]:
    """Edits of the units, and of as many random ones where the writer has so many besides."""
    generator = torch.Generator().manual_seed(setting.seed)
    pool = torch.tensor([unit for unit in range(writer.units) if unit not in set(units)])
    draws = [pool[torch.randperm(len(pool), generator=generator)[: len(units)]] for _ in range(setting.controls)]
    enough = len(pool) >= len(units)
    columns = [writer.columns(group) for group in (units, *(draw.tolist() for draw in draws if enough))]
    clean = read_columns(
        setting.model, setting.structure, sublayer, writer, torch.cat(columns), setting.samples, at.shape[1],
        setting.forward, setting.batch_size,
    ).split([len(own) for own in columns], dim=2)  # fmt: skip
    for mode, what in MODES.items():
        for number, (own, values) in enumerate(zip(columns, clean, strict=True)):
            if number and mode not in CONTROLLED:
                continue
            new = new_values(mode, values, at, setting.others, generator)
            yield PlacedEdit("controls" if number else "units", Edit(mode, stage=sublayer.stage, columns=own, values=new), what)


def _spike_block(clean: Measured, block: int) -> int:
    """The index, in what was seen of the blocks, of the one behind the origin whose output has the largest spike."""
    behind = clean.spikes[:, block:].mean(0)
    return block + int(behind.argmax())
