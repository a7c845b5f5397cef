"""The measurement behind find_origin(): places, where their norm or pull comes from, what writes it, what goes without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.call import run_of
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError, SinklabError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.metric import Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.origin import OriginEdit, OriginFound, OriginHead, OriginSummary, OriginUnit, OriginWeight
from sinklab.results.summaries.shared import Difference
from sinklab.results.table import make_table
from sinklab.sinks import Sink, Sinks
from sinklab.studies.measure.probing import forward_arguments
from sinklab.studies.origin.ablation import MODES, Edit, Measured, Mode, new_values, read_columns, run_edits
from sinklab.studies.origin.decomposition import Decomposition, UnitShare, decompose
from sinklab.studies.origin.rows import origin_rows
from sinklab.studies.origin.structure import Block, Structure, Sublayer, find_structure
from sinklab.studies.origin.tracing import Birth, Growth, Place, birth_of, measure_growth, spike_places
from sinklab.studies.origin.words import sentences, verdict
from sinklab.studies.origin.writers import Weight, Writer, writer_of

__all__ = ["ROWS_AT_ONCE", "Located", "decoded", "locate_origins", "origin_section", "require_settings"]

PLACES = 8
"""Sinks that are followed at most, the strongest first."""

PULL_SAMPLES = 8
"""Samples on which every write of the model is taken away in turn, where the norm does not tell which one matters."""

LEAST_PULL = 0.1
"""Share of a sink's pull that one write must carry to be called its origin."""

HEADS = 8
"""Heads that are listed with their weight on the place, the strongest first."""

STRONG = 0.5
"""Share of the largest weight that a head behind the origin gives to the place, above which a head counts as one of its own."""

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
        summary: for ``summary.json``; docs/origin.md.
        rows: of the long table.
    """

    summary: OriginSummary
    rows: list[Row]


@dataclasses.dataclass(frozen=True, eq=False)
class _Setting:
    """What all steps share."""

    model: PreTrainedModel
    structure: Structure
    samples: Samples
    forward: Callable[[Samples], object]
    growth: Growth
    others: Tensor
    batch_size: int
    controls: int
    seed: int
    progress: Progress

    @property
    def real(self) -> Tensor:
        return self.growth.positions >= 0

    def block_of(self, label: str) -> int:
        """Number of the block that an attention module belongs to, from the label of its site."""
        name, call = run_of(label)
        for block in self.structure.blocks:
            if name.startswith(f"{block.module}.") and block.call == call:
                return block.number
        return -1


def locate_origins(
    model: PreTrainedModel,
    samples: Samples,
    sinks: Sinks,
    *,
    controls: int = 5,
    batch_size: int = ROWS_AT_ONCE,
    seed: int = 0,
    progress: Progress = silent,
) -> Located:
    """Find the origin of every sink, and of every spike that is no sink of its own.

    Args:
        samples: two or more, of any kind that the model reads.
        sinks: that were found on samples like these.
        controls: draws of random units for each edit.
        batch_size: samples a forward.
        seed: of the units drawn as controls and of the samples drawn from.

    Raises:
        ConfigurationError: fewer than two samples, or no draw of controls.
        InputError: samples with nothing but sinks and spikes.
        UnsupportedModelError: a model whose blocks cannot be followed; the message says why.
    """
    require_settings(len(samples), controls, batch_size)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder and a decoder, and an origin is followed along one residual stream; give "
            "the encoder by itself (model.get_encoder())"
        )

    def forward(batch: Samples) -> object:
        return model(**forward_arguments(model, batch, full_logits=True))

    structure = find_structure(model, lambda: forward(samples.take(slice(0, 2))))
    progress("norms by block", 0, 1)
    growth = measure_growth(model, structure, samples, forward, batch_size)
    followed = [sink for sink in sinks.sinks if sink.kind != "null"]
    spikes = spike_places(growth, followed, samples.names)
    everything = Place((*followed, *spikes)) if followed or spikes else None
    real = growth.positions >= 0
    others = real if everything is None else real & ~everything.mask(growth.positions, growth.tokens)
    if not bool(others.any(1).all()):
        assert everything is not None
        raise InputError(
            f"a sample of {int(real.sum(1).min())} positions has no token besides {everything.name} to compare with; give "
            "longer samples (`seq_len`)"
        )
    setting = _Setting(model, structure, samples, forward, growth, others, batch_size, controls, seed, progress)
    found, rows, loss = [], list[Row](), float("nan")
    for place, birth in _groups(setting, followed[:PLACES], spikes):
        entry, own, loss = _origin(setting, place, birth)
        found.append(entry)
        rows += own
    summary: OriginSummary = {
        "samples": len(samples),
        "positions": growth.positions.shape[1],
        "blocks": len(structure.blocks),
        "loss": _known(loss),
        "controls": controls,
        "seed": seed,
        "origins": found,
        "notes": _notes(sinks, followed, spikes, structure),
    }
    summary["text"] = sentences(summary)
    return Located(summary, rows)


def require_settings(samples: int, controls: int, batch_size: int | None) -> None:
    """Refuse numbers that no measurement can be made with, before a model is loaded.

    Raises:
        ConfigurationError: fewer than two samples, no draw of controls or too many, or no sample a forward.
    """
    if samples < 2:
        raise ConfigurationError(f"`samples` {samples}: an interval over samples needs two or more")
    if not 1 <= controls <= MOST_CONTROLS:
        raise ConfigurationError(f"`controls` {controls} must be 1 to {MOST_CONTROLS:,}: draws of random units")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")


def decoded(loaded: LoadedModel) -> Callable[[int], str] | None:
    """From ids to texts of tokens; ``None`` where the model has no tokenizer."""
    tokenizer = loaded.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


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


def _groups(setting: _Setting, sinks: Sequence[Sink], spikes: Sequence[Sink]) -> list[tuple[Place, Birth]]:
    """Sinks that jump at one write together, and spikes likewise; a sink that does not jump stands by itself."""
    groups: dict[tuple[object, ...], list[Sink]] = {}
    for spike, listed in ((False, sinks), (True, spikes)):
        for number, sink in enumerate(listed):
            birth = birth_of(setting.growth, _at(setting, Place((sink,))), setting.others)
            groups.setdefault((spike, birth.stage) if birth.jumps else (spike, "alone", number), []).append(sink)
    placed = []
    for key, members in groups.items():
        place = Place(tuple(members), spike=bool(key[0]))
        placed.append((place, birth_of(setting.growth, _at(setting, place), setting.others)))
    return placed


def _at(setting: _Setting, place: Place) -> Tensor:
    return place.mask(setting.growth.positions, setting.growth.tokens)


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


def _origin(setting: _Setting, place: Place, birth: Birth) -> tuple[OriginFound, list[Row], float]:
    """Everything about one place, its rows, and the loss of the model as it is."""
    at = _at(setting, place)
    clean = _run(setting, [Edit("as it is")], at, {}, f"{place.name}: as it is")[0]
    sublayer: Sublayer | None = None
    pull: tuple[float, Interval | None] | None = None
    by = "norm" if birth.jumps else "none"
    if birth.jumps:
        sublayer = setting.structure.sublayers[birth.stage - 1] if birth.stage else None
    if not place.spike and clean.pulls and not (birth.jumps and _is_ahead(setting, clean, birth)):
        sublayer, pull = _strongest_write(setting, at, clean, place)
        by = "none" if sublayer is None and pull[1] is not None else "pull"
    block = None if sublayer is None else setting.structure.blocks[sublayer.block]
    own = _own_heads(setting, clean, -1 if block is None else block.number)
    writer, split = None, None
    if sublayer is not None:
        heads = clean.weights.get(_label(sublayer, setting.structure.blocks[sublayer.block]))
        writer = writer_of(setting.model, sublayer, None if heads is None else heads.shape[1])
        split = decompose(
            setting.model, setting.structure, sublayer, writer, setting.samples, (at, setting.others), setting.forward,
            setting.batch_size, against_others=by == "pull",
        )  # fmt: skip
    edits = [] if split is None or sublayer is None else list(_edits(setting, at, sublayer, writer, split))
    writers = {} if sublayer is None else {sublayer.stage: writer}
    measured = _run(setting, [edit for _, edit, _ in edits], at, writers, f"{place.name}: edits") if edits else []
    spike_block = _spike_block(clean, 0 if block is None else block.number)
    outcomes = _outcomes([(on, edit, what) for on, edit, what in edits], measured, clean, own, spike_block)
    entry = _entry(setting, place, at, birth, by, sublayer, pull, split, writer, clean, own, spike_block, outcomes)
    entry["heads"] = _heads(clean, own, list(zip(edits, measured, strict=True)))
    entry["verdict"] = verdict(entry)
    return entry, list(origin_rows(entry, clean, len(setting.samples))), float(clean.loss.nanmean())


def _run(setting: _Setting, edits: Sequence[Edit], at: Tensor, writers: dict[int, Writer | None], stage: str) -> list[Measured]:
    return run_edits(
        setting.model, setting.structure, edits, writers, setting.samples, (at, setting.others, setting.real), setting.forward,
        setting.batch_size, progress=setting.progress, stage=stage,
    )  # fmt: skip


def _label(sublayer: Sublayer, block: Block) -> str:
    """What the session calls the attention module of a sublayer."""
    return f"{sublayer.attention}#{block.call}" if block.call else str(sublayer.attention)


_Heads = Mapping[str, Tensor]
"""Numbers of some heads, int64 ``(heads,)``, by the label of their attention module."""


def _own_heads(setting: _Setting, clean: Measured, block: int) -> _Heads:
    """The heads of the blocks behind one that give a place most; of all blocks where no attention comes behind it."""
    labels = [label for label in clean.weights if setting.block_of(label) > block] or list(clean.weights)
    weights = {label: clean.weights[label].nanmean(0).nan_to_num(0.0) for label in labels}
    most = max((float(values.max()) for values in weights.values()), default=0.0)
    heads = {label: torch.nonzero(values >= STRONG * most)[:, 0] for label, values in weights.items()}
    return {label: own for label, own in heads.items() if len(own)}


def _is_ahead(setting: _Setting, clean: Measured, birth: Birth) -> bool:
    """Whether at least half of the heads that give a place most read it behind the write at which its norm jumps."""
    block = -1 if not birth.stage else setting.structure.sublayers[birth.stage - 1].block
    heads = _own_heads(setting, clean, -1)
    behind = sum(len(own) for label, own in heads.items() if setting.block_of(label) > block)
    return 2 * behind >= sum(len(own) for own in heads.values())


def _over(values: Mapping[str, Tensor], heads: _Heads) -> Tensor:
    """Mean over some heads, ``(samples,)``; NaN without any."""
    chosen = [values[label][:, own] for label, own in heads.items()]
    return torch.cat(chosen, 1).nanmean(1) if chosen else torch.full((1,), float("nan"), dtype=torch.float64)


def _strongest_write(
    setting: _Setting, at: Tensor, clean: Measured, place: Place
) -> tuple[Sublayer | None, tuple[float, Interval | None]]:
    """The write without which the scores of the place fall most, over the heads that give it most; how far these scores stand
    above the others, and how much they fall (``None`` where nothing is written before these heads read)."""
    chosen = _own_heads(setting, clean, -1)
    few = dataclasses.replace(setting, samples=setting.samples.take(slice(0, PULL_SAMPLES)))
    number = len(few.samples)
    last = max(few.block_of(label) for label in chosen)
    sublayers = [sublayer for sublayer in setting.structure.sublayers if sublayer.block < last and sublayer.kind != "block"]
    edits = [Edit(f"write {sublayer.stage}", stage=sublayer.stage, mean_write=True) for sublayer in sublayers]
    before = _over(clean.pulls, chosen)[:number]
    if not edits:
        return None, (float(before.mean()), None)
    measured = run_edits(
        few.model, few.structure, edits, {}, few.samples, (at[:number], few.others[:number], few.real[:number]), few.forward,
        few.batch_size, progress=few.progress, stage=f"{place.name}: every write taken away",
    )  # fmt: skip
    lost = [before - _over(seen.pulls, chosen) for seen in measured]
    best = max(range(len(lost)), key=lambda index: float(lost[index].mean()))
    interval = mean_over_items(lost[best].numpy())
    mean = float(before.mean())
    enough = interval.low > 0 and interval.mean >= LEAST_PULL * mean
    return (sublayers[best] if enough else None), (mean, interval)


def _edits(
    setting: _Setting, at: Tensor, sublayer: Sublayer, writer: Writer | None, split: Decomposition
) -> Iterator[tuple[str, Edit, str]]:
    """What is edited (``units``, ``controls``, ``write``, ``channels``), the edit, and what it is in words."""
    generator = torch.Generator().manual_seed(setting.seed)
    others = setting.others
    if writer is not None and split.parts:
        found = [part.unit for part in split.parts]
        pool = torch.tensor([unit for unit in range(writer.units) if unit not in set(found)])
        enough = len(pool) >= len(found)
        draws = [pool[torch.randperm(len(pool), generator=generator)[: len(found)]] for _ in range(setting.controls)]
        groups = [found, *(draw.tolist() for draw in draws if enough)]
        columns = [writer.columns(group) for group in groups]
        clean = read_columns(
            setting.model, setting.structure, sublayer, writer, torch.cat(columns), setting.samples, at.shape[1],
            setting.forward, setting.batch_size,
        ).split([len(own) for own in columns], dim=2)  # fmt: skip
        for mode, what in MODES.items():
            for number, (own, values) in enumerate(zip(columns, clean, strict=True)):
                if number and mode not in CONTROLLED:
                    continue
                new = new_values(mode, values, at, others, generator)
                on = "controls" if number else "units"
                yield on, Edit(mode, stage=sublayer.stage, columns=own, values=new), what
    if sublayer.kind != "block":
        zero = torch.zeros(1, 1, 1)
        yield "write", Edit("zero", stage=sublayer.stage, write=zero), "the whole write of the sublayer 0 at the sink"
    if sum(channel.share for channel in split.channels) >= 0.5:
        channels = torch.tensor([channel.channel for channel in split.channels])
        for name, state in (("zero", torch.zeros(len(channels))), ("mean", torch.tensor([c.state for c in split.channels]))):
            what = f"the channels {'0' if name == 'zero' else 'at their mean over samples'} at the sink, behind the block"
            yield "channels", Edit(name, block=sublayer.block, channels=channels, state=state), what


def _spike_block(clean: Measured, block: int) -> int:
    """The index, in what was seen of the blocks, of the one behind the origin whose output has the largest spike."""
    behind = clean.spikes[:, block:].mean(0)
    return block + int(behind.argmax())


def _outcomes(
    edits: Sequence[tuple[str, Edit, str]], measured: Sequence[Measured], clean: Measured, own: _Heads, block: int
) -> list[OriginEdit]:
    """What every edit does; draws of random units are averaged before the interval is taken."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (on, edit, _) in enumerate(edits):
        kinds.setdefault((on, edit.name), []).append(number)
    uniform = _over(clean.uniform, own)
    excess = _over(clean.weights, own) - uniform
    before = clean.spikes[:, block]
    outcomes: list[OriginEdit] = []
    for (on, name), numbers in kinds.items():
        seen = [measured[number] for number in numbers]
        loss = torch.stack([one.loss for one in seen]).mean(0) - clean.loss
        weight = torch.stack([_over(one.weights, own) for one in seen]).mean(0)
        spike = torch.stack([one.spikes[:, block:].amax(1) for one in seen]).mean(0)
        outcomes.append({
            "edit": name,
            "on": on,
            "what": edits[numbers[0]][2],
            "loss": _difference(loss),
            "weight": _known(float(weight.nanmean())),
            "weight_kept": _difference((weight - uniform) / excess.nanmean()) if float(excess.nanmean()) > 0 else None,
            "spike": float(spike.mean()),
            "spike_kept": _interval(mean_over_items((spike / before.mean()).numpy())),
        })  # fmt: skip
    return outcomes


def _difference(values: Tensor) -> Difference | None:
    """Mean over samples with its interval; ``None`` where fewer than two samples have the number."""
    own = values[~values.isnan()]
    return _interval(mean_over_items(own.numpy())) if len(own) > 1 else None


def _interval(interval: Interval) -> Difference:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _entry(
    setting: _Setting, place: Place, at: Tensor, birth: Birth, by: str, sublayer: Sublayer | None,
    pull: tuple[float, Interval | None] | None, split: Decomposition | None, writer: Writer | None, clean: Measured,
    own: _Heads, spike_block: int, outcomes: list[OriginEdit],
) -> OriginFound:  # fmt: skip
    blocks = setting.structure.blocks
    embedded = by != "none" and sublayer is None
    by_block: list[float | None] = []
    for block in blocks:
        inside = [values for label, values in clean.weights.items() if setting.block_of(label) == block.number]
        by_block.append(_known(float(torch.cat(inside, 1).nanmean())) if inside else None)
    entry: OriginFound = {
        "place": place.name,
        "kind": "spike" if place.spike else "sink",
        "positions": place.positions,
        "description": " and ".join(sink.describe() for sink in place.sinks) if len(place.sinks) == 1 else place.name,
        "by": by,
        "stage": birth.stage if by == "norm" else None if sublayer is None else sublayer.stage,
        "block": None if sublayer is None else sublayer.block,
        "module": None if sublayer is None else blocks[sublayer.block].name,
        "sublayer": "embeddings" if embedded else None if sublayer is None else sublayer.kind,
        "before": birth.before,
        "after": birth.after,
        "peak": birth.peak,
        "pull": None if pull is None else pull[0],
        "pull_lost": None if pull is None or pull[1] is None else _interval(pull[1]),
        "norms": {"place": _by_block(setting, at), "others": _by_block(setting, setting.others)},
        "norm": None if split is None else split.norm,
        "rest": None if split is None else split.rest,
        "error": None if split is None else split.error,
        "against_others": split is not None and split.against_others,
        "not_split": "" if split is None else split.why,
        "channels": [] if split is None else [dataclasses.asdict(channel) for channel in split.channels],
        "unit_kind": None if writer is None else writer.kind,
        "num_units": None if writer is None else writer.units,
        "units": [] if split is None else [_unit(part) for part in split.parts],
        "weights": [],
        "weight": _known(float(_over(clean.weights, own).nanmean())),
        "uniform": _known(float(_over(clean.uniform, own).nanmean())),
        "weight_by_block": by_block,
        "spike": float(clean.spikes[:, spike_block].mean()),
        "edits": outcomes,
        "heads": [],
        "verdict": "",
    }
    if writer is not None and split is not None:
        entry["weights"] = [_weight(part.unit, weight) for part in split.parts for weight in writer.weights(part.unit)]
    return entry


def _by_block(setting: _Setting, mask: Tensor) -> list[float]:
    """Mean norm in front of each block at the tokens of a mask, ``(samples, seq_len)``."""
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


def _heads(clean: Measured, own: _Heads, measured: Sequence[tuple[tuple[str, Edit, str], Measured]]) -> list[OriginHead]:
    """The heads that give the place most, with their weight as it is and under every edit of units and of the write."""
    listed: list[OriginHead] = []
    for label, values in clean.weights.items():
        for head, weight in enumerate(values.nanmean(0).tolist()):
            edited = {
                f"{on} {edit.name}": _known(float(seen.weights[label][:, head].nanmean()))
                for (on, edit, _), seen in measured
                if on in ("units", "write")
            }
            listed.append({
                "layer": clean.layers[label],
                "head": head,
                "module": label,
                "own": label in own and head in own[label].tolist(),
                "weight": _known(weight),
                "uniform": _known(float(clean.uniform[label][:, head].nanmean())),
                "edited": edited,
            })  # fmt: skip
    return sorted(listed, key=lambda head: (not head["own"], -(head["weight"] or 0.0)))[
        : max(HEADS, sum(h["own"] for h in listed))
    ]
