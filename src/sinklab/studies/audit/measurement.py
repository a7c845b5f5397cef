"""The measurement behind audit(): all probes under the main condition, the sink rate under the others, and the sections."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import PARTS, Part
from sinklab.attention.maps import AttentionMaps, called, token_text
from sinklab.attention.probe import OfPart, Probe
from sinklab.attention.session import Session
from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import corpus_record, read_samples
from sinklab.corpora.base import HELD, Corpus
from sinklab.corpora.samples import Kind, Samples
from sinklab.models.drawing import draw_samples
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import is_two_sided, loss_kind
from sinklab.models.media import reads_described
from sinklab.models.tokenizer import kind_of
from sinklab.probes._shared import SinkProbe
from sinklab.registry import probes as probe_registry
from sinklab.results.blocks import counted, front_names, names
from sinklab.results.metric import definitions
from sinklab.results.progress import PartOf, plan
from sinklab.results.run import Progress
from sinklab.results.sections import Context, sections, to_json
from sinklab.results.table import append
from sinklab.sinks import SinkFinder, Sinks, SinkWeights
from sinklab.studies.audit.found import bos_words
from sinklab.studies.audit.summary import Measured, summarize
from sinklab.studies.measure.probing import (
    check_identity,
    checks,
    labelled,
    make_probe,
    model_facts,
    not_measured,
    require_length,
    run_probes,
    uses_bos,
)

MAP_SAMPLES = 3
MAP_TILES = 64

GUESSED_FROM = 8
"""Samples on which the sink is looked for before all others are shown to the probes that are about it."""

LEAST_OTHERS, SHARE_OF_OTHERS = 10, 4
"""Samples of a condition besides the main one: at least, unless little is asked for, and one in so many of the main one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Audited:
    """What stands in ``summary.json``, in the table, in ``run.json`` besides the settings, and in ``maps.safetensors``."""

    summary: dict[str, Any]
    table: pd.DataFrame
    record: dict[str, Any]
    maps: tuple[dict[str, np.ndarray], dict[str, str]]


def measure_audit(
    loaded: LoadedModel,
    text: Corpus,
    *,
    seq_len: int,
    samples: int,
    threshold: float,
    seed: int,
    bos: str,
    batch_size: int | None,
    include: Mapping[str, bool],
    least_others: int = LEAST_OTHERS,
    run_id: str,
    progress: Progress,
    say: Callable[[str], None],
) -> Audited:
    """Measure what an audit reports; see :func:`~sinklab.studies.audit.audit.audit`.

    Once the main condition is measured, an interruption ends the rest, and what there is by then is reported.
    ``least_others`` are
    samples of every condition besides it; ``say`` is given the sink in a sentence as soon as it is known.
    """
    main_bos = uses_bos(loaded.encoder, bos)
    kind: Kind = "image" if "image" in text.kinds and reads_described(loaded.model) else kind_of(loaded.model)
    missing = not_measured(loaded.model)
    reading = read_samples(text, loaded.encoder, seq_len=seq_len, samples=samples, seed=seed, bos=main_bos)
    measuring = _Measuring(loaded, seq_len, samples, threshold, seed, batch_size, run_id, progress)
    first, *others = _plan(text, kind, main_bos, loaded.encoder.bos_token_id is not None)
    drawn = measuring.draw(*first, samples)
    chosen = {name: section for name, section in sections().items() if include.get(name, section.default)}
    fewer = min(samples, max(least_others, samples // SHARE_OF_OTHERS))
    costs = {measuring.stage(*first): float(len(drawn)), **{measuring.stage(*other): float(fewer) for other in others}}
    plan(progress, costs | {name: len(drawn) * section.cost for name, section in chosen.items() if section.cost})
    identity = check_identity(loaded.model, drawn)
    main = measuring.measure_main(*first, drawn, [name for name in probe_registry if name not in missing], say)
    conditions, tables, stopped, stopped_by = [main.condition], main.tables, "", None
    shown = drawn.take(slice(MAP_SAMPLES))
    maps = AttentionMaps(MAP_TILES, _longest(drawn) or 0)
    left = [measuring.stage(*other) for other in others]
    try:
        run_probes(loaded.model, shown, [maps], batch_size=MAP_SAMPLES, progress=progress, stage="attention maps")
        for source, with_bos in others:
            seen = measuring.measure(source, with_bos, measuring.draw(source, with_bos, fewer), ["sink_rate"])
            conditions.append(seen.condition)
            tables += seen.tables
            left.pop(0)
    except KeyboardInterrupt as signal:
        stopped, stopped_by = names([*left, *chosen]), _signal(signal)

    found = summarize(
        loaded, conditions, drawn, threshold=threshold, reading=reading, normalized=main.session.normalized,
        off_seam=main.session.off_seam, seed=seed, tier=main.session.tier, missing=missing,
    )  # fmt: skip
    summary: dict[str, Any] = to_json(found)
    context = Context(
        loaded=loaded, corpus=text, samples=drawn, sinks=next(iter(main.condition.sinks.values())), summary=summary,
        bos=main_bos, run_id=run_id, seed=seed, progress=progress,
    )  # fmt: skip
    for name, section in chosen.items():
        if stopped:
            break
        if drawn.kind in ("image", "audio") and section.text_only:
            summary[name] = {"refused": f"not for a model of {HELD[drawn.kind]}: {section.text_only}"}
            continue
        try:
            own = dataclasses.replace(context, progress=PartOf(progress, name))
            summary[name], table = section.measured(own)
        except KeyboardInterrupt as signal:
            stopped, stopped_by = names([other for other in chosen if other not in summary]), _signal(signal)
            break
        tables.append(table)
    if stopped:
        summary |= {"status": "stopped", "warnings": [*summary["warnings"], f"Stopped before its end: without {stopped}."]}
    record = {
        "model": model_facts(loaded, main.session),
        "corpus": corpus_record(text, reading),
        "token_sha256": drawn.sha256,
        "conditions": [{"corpus": c.corpus, "bos": int(c.bos), "token_sha256": c.token_sha256} for c in conditions],
        "definitions": definitions({probe.name: probe.metrics for probe in (*main.probes, *context.probes)}),
        "checks": checks(main.session, identity),
        "calls": dict(main.session.calls),
        **({} if stopped_by is None else {"stopped_by": stopped_by}),
    }
    return Audited(summary, append(tables), record, _maps(loaded, maps, shown))


def _signal(interrupt: KeyboardInterrupt) -> str:
    """What the process was sent; the command line raises a kind of its own for SIGTERM."""
    return "SIGINT" if type(interrupt) is KeyboardInterrupt else "SIGTERM"


@dataclasses.dataclass(frozen=True, eq=False)
class _Pass:
    """What was seen under one condition: its rows, first those about no sink."""

    condition: Measured
    tables: list[pd.DataFrame]
    session: Session
    probes: list[Probe]


@dataclasses.dataclass(frozen=True, eq=False)
class _Measuring:
    """Measures conditions, which share everything but the corpus and what stands in front."""

    loaded: LoadedModel
    seq_len: int
    samples: int
    threshold: float
    seed: int
    batch_size: int | None
    run_id: str
    progress: Progress

    def stage(self, source: Corpus, bos: bool) -> str:
        """A condition in words."""
        return f"{source.label}, {bos_words(bos, self.loaded.encoder.bos_name or '')}".rstrip(", ")

    def draw(self, source: Corpus, bos: bool, samples: int) -> Samples:
        """The samples of a condition."""
        drawn = draw_samples(self.loaded, source, seq_len=self.seq_len, samples=samples, seed=self.seed, bos=bos)
        require_length(self.loaded, drawn, self.seq_len)
        return drawn

    def measure(
        self, source: Corpus, bos: bool, drawn: Samples, names: Sequence[str], guessed: Mapping[Part, Sinks] | None = None
    ) -> _Pass:
        """Show the samples to the probes of these names and find the sink."""
        loaded, guesses = self.loaded, guessed or {}
        probes = [make_probe(name, self.threshold) for name in names]
        finders = {part: _finder(self.threshold, part, drawn) for part in self._parts}
        of_sink = {part: _about_sinks(probes, sinks) for part, sinks in guesses.items()}
        weights = {part: SinkWeights(sinks, part=part) for part, sinks in guesses.items()}
        apart = [probe for probe in probes if not isinstance(probe, SinkProbe)]
        next_tokens = loss_kind(loaded.model) == "next token" and drawn.kind == "text"  # a prompt is not worth a loss
        probed = run_probes(
            loaded.model,
            drawn,
            [*apart, *finders.values(), *(probe for some in of_sink.values() for probe in some), *weights.values()],
            batch_size=self.batch_size,
            loss=next_tokens or drawn.targets is not None or drawn.scored is not None,
            progress=self.progress,
            stage=self.stage(source, bos),
        )
        # Deformable attention, which has no weight for every key, leaves a part of some models unseen.
        finders = {part: finder for part, finder in finders.items() if not part or finder.windowed()[1]}
        sinks = {
            part: finder.sinks(decode=functools.partial(token_text, loaded.tokenizer), corpus=source.label, bos=int(bos))
            for part, finder in finders.items()
        }
        right = {
            part for part, sinks_there in sinks.items() if part in guesses and _place(guesses[part]) == _place(sinks_there)
        }
        for part in right:
            sinks[part] = _completed(weights[part], sinks[part])
            for probe in of_sink[part]:
                probe.about(sinks[part])  # the same place, and what is known of it now
        table = self._table(probed.session, source, bos)
        about = table["probe"].isin({probe.name for some in of_sink.values() for probe in some})
        tables = [table[~about], *([table[about]] if right else [])]
        for part in sinks if guessed is not None else ():
            if part not in right:
                session, sinks[part] = self._look_again(probes, sinks[part], part, drawn)
                tables.append(self._table(session, source, bos))
        condition = Measured(
            source.label, bos, probed.loss, probed.losses, tables[0], drawn.sha256, samples=len(drawn), sinks=sinks,
            candidates={part: finder.candidates_by_module for part, finder in finders.items()},
            windowed={part: finder.windowed() for part, finder in finders.items()},
            longest={part: finder.longest_sample for part, finder in finders.items()},
        )  # fmt: skip
        return _Pass(condition, tables, probed.session, probes)

    def measure_main(
        self, source: Corpus, bos: bool, drawn: Samples, names: Sequence[str], say: Callable[[str], None]
    ) -> _Pass:
        """The main condition: where the sink is, is known from a few samples, so that one pass over all of them is enough."""
        few = drawn.take(slice(GUESSED_FROM))
        finders = [_finder(self.threshold, part, few) for part in self._parts]
        run_probes(self.loaded.model, few, finders, batch_size=self.batch_size, progress=self.progress, stage="the sink")
        seen = {
            finder.part: finder.sinks(decode=functools.partial(token_text, self.loaded.tokenizer))
            for finder in finders
            if finder.windowed()[1]
        }
        for part, sinks in seen.items():
            where = "no sink"
            if sinks.main is not None:
                where = f"sink at {sinks.main.describe()}, {sinks.main.sinking or 0:,} of {len(sinks.heads):,} heads,"
            say(f"{f'{part}: ' if part else ''}{where} on the first {counted(len(few), 'sample')}")
        # Two parts would have rows of one probe, which nobody could tell apart.
        return self.measure(source, bos, drawn, names, seen if list(seen) == [""] else {})

    def _look_again(self, probes: Sequence[Probe], sinks: Sinks, part: Part, drawn: Samples) -> tuple[Session, Sinks]:
        """A second pass, where the sink of all samples is another than that of the first ones."""
        about, weights = _about_sinks(probes, sinks), SinkWeights(sinks, part=part)
        chosen: list[Probe] = [OfPart(probe, part) for probe in about] if part else [*about]
        session = run_probes(
            self.loaded.model, drawn, [*chosen, weights], batch_size=self.batch_size, progress=self.progress, stage="the sinks"
        ).session
        return session, _completed(weights, sinks)

    @property
    def _parts(self) -> tuple[Part, ...]:
        # A DETR has two sides too, though it is given pictures and no target.
        two_sided = is_two_sided(self.loaded.model) or Anatomy(self.loaded.model).encoder is not None
        return PARTS if two_sided else ("",)

    def _table(self, session: Session, source: Corpus, bos: bool) -> pd.DataFrame:
        return labelled(session, self.loaded, run_id=self.run_id, corpus=source.label, bos=int(bos), seed=self.seed)


def _finder(threshold: float, part: Part, samples: Samples) -> SinkFinder:
    """What finds the sinks of a part; positions of a decoder are not those that the samples have names for."""
    if part == "decoder":
        return SinkFinder(threshold, part=part)
    return SinkFinder(threshold, part=part, names=samples.names, together=samples.together)


def _about_sinks(probes: Sequence[Probe], sinks: Sinks) -> list[SinkProbe]:
    """Those of some probes that are about the sink, made anew for it."""
    return [copy.deepcopy(probe).about(sinks) for probe in probes if isinstance(probe, SinkProbe)]


def _completed(weights: SinkWeights, sinks: Sinks) -> Sinks:
    """The sinks with the numbers of all heads, from what was seen of the same place."""
    weights.given = sinks
    return weights.completed() if sinks.main else sinks


def _place(sinks: Sinks) -> object:
    return None if sinks.main is None else (sinks.main.place, sinks.main.anywhere)


def _plan(text: Corpus, kind: Kind, main_bos: bool, has_bos: bool) -> list[tuple[Corpus, bool]]:
    """The conditions: first the one that all probes see, then the ones that only the sink rate and the loss are taken under."""
    plan: list[tuple[Corpus, bool]] = [(text, main_bos)]
    if kind != "text":
        return [*plan, *((resolve_corpus(name), main_bos) for name in ("noise", "constant") if name != text.name)]
    if has_bos:
        plan.append((text, not main_bos))
    for name in ("random_tokens", "repeated_token"):
        if name == text.name:
            continue
        # Gu et al.'s propositions on repeated tokens speak of sequences without anything in front.
        for with_bos in dict.fromkeys((main_bos, False)) if name == "repeated_token" else (main_bos,):
            plan.append((resolve_corpus(name), with_bos))
    return plan


def write_maps(maps: tuple[dict[str, np.ndarray], dict[str, str]], folder: Path) -> None:
    """Write the attention maps of some samples into a folder, if there are any."""
    from safetensors.numpy import save_file

    if maps[0]:
        save_file(maps[0], folder / "maps.safetensors", metadata=maps[1])
        (folder / "maps.safetensors").chmod(0o644)  # safetensors makes files private


def _maps(loaded: LoadedModel, maps: AttentionMaps, shown: Samples) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    length, arrays = _longest(shown), maps.arrays()
    if length is None or not arrays:  # modules differ in their positions, or positions are of windows, which stand in the batch
        return {}, {}
    length += maps.front
    front, names = front_names(maps.front), [] if shown.names is None else [shown.names] * len(shown)

    def written(rows: Tensor) -> list[list[str]]:
        return [[token_text(loaded.tokenizer, token) for token in row] for row in rows.tolist()]

    texts = called(names, [] if shown.tokens is None else [front + row for row in written(shown.tokens)])
    metadata = {
        "tokens": json.dumps(texts, ensure_ascii=False),
        "modules": json.dumps(maps.modules),
        "seq_len": str(length),
        "tile": str(-(-length // MAP_TILES)),
    }
    target = shown.arguments.get("decoder_input_ids")
    if target is not None:
        metadata["targets"] = json.dumps(written(target), ensure_ascii=False)
    return arrays, metadata


def _longest(samples: Samples) -> int | None:
    """Tokens of the longer side of some texts; positions of a picture or of sound, where all modules have the same."""
    if samples.tokens is None:
        return None if any("window" in (name or "") for name in samples.names or ("window",)) else samples.positions
    sides = (samples.arguments.get(name) for name in ("input_ids", "decoder_input_ids"))
    return max(side.shape[1] for side in sides if side is not None)
