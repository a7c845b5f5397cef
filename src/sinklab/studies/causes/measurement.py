"""The measurement behind find_causes(): sink, effects of all variants on every head, labels, experiments; resumed if killed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from sinklab.attention.anatomy import attending_layers
from sinklab.attention.modules import input_device
from sinklab.errors import ConfigurationError, InputError, MeasurementError, SinklabError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, loss_kind
from sinklab.models.positions import length_warning
from sinklab.results.metric import Row
from sinklab.results.naming import head_numbering
from sinklab.results.record import to_json
from sinklab.results.run import Progress, silent
from sinklab.results.sections import Context
from sinklab.results.store import Store
from sinklab.results.table import make_table
from sinklab.sinks import Sinks, find_sinks
from sinklab.sinks.value import SinkPlace
from sinklab.studies.causes import entries, key_bias, location, massive, spread, three_metrics
from sinklab.studies.causes.effects import Effects, HeadGroup, make_variants
from sinklab.studies.causes.evidence import SILENCED, minimal_effect_of
from sinklab.studies.causes.found import LABELS, Causes, MinimalEffect, Refused
from sinklab.studies.causes.labels import label_heads, mirrored, require_texts, switches_within, texts_needed
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.resumable import Resumable
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts, texts_of_budget

__all__ = ["Examined", "causes_section", "examine", "facts_of"]

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "fast": ("read_outs", "location", "key_bias"),
    "full": ("read_outs", "location", "key_bias", "massive", "spread"),
}
"""What each budget has, by the key in the summary."""


@dataclasses.dataclass(frozen=True)
class Examined:
    """What was found; rows of the long table; and attention module to how its heads were measured, or why one by one."""

    found: Causes
    rows: list[Row]
    record: dict[str, str]


def examine(
    model: nn.Module,
    texts: Texts,
    request: Request,
    *,
    identity: Mapping[str, object],
    sinks: Sinks | None = None,
    store: Store | None = None,
    progress: Progress = silent,
) -> Examined:
    """Find the sink, measure every variant on every head, and label; then groups of heads at once.

    Args:
        sinks: where the sinks are, if that is known; found on these texts otherwise.
        identity: what the model is, besides its weights.
        store: of effects measured so far, an entry for a few attention modules.

    Raises:
        SinklabError: see :func:`~sinklab.studies.causes.causes.find_causes`.
    """
    level, size = request.level, request.batch_size
    texts = _on_device(texts, input_device(model))
    samples = texts.samples
    sinks = _sinks_of(model, samples, request, sinks)
    heads, groups = entries.chosen_heads(request.chosen, sinks.heads)
    with _named("`texts`, `heads`, `level`"):
        require_texts(samples, sinks, len(heads), level=level)
        count = len(groups) + (entries.most_groups(len(heads)) if request.together else 0)
        require_texts(samples, sinks, max(count, 1), level=level)
    variants = make_variants(sinks, samples, budget=request.budget, seed=request.seed)
    identity = {**identity, "main_sink": sinks.describe(), "other_sinks": sinks.secondary}
    measured = Resumable(model, texts, request, variants, identity, store or Store(None), progress)
    effects = measured.of_heads(heads)
    if isinstance(request.minimal_effect, str):
        minimal = minimal_effect_of(measured.of_groups([HeadGroup(tuple(sinks.heads))], SILENCED))
    else:
        minimal = MinimalEffect(request.minimal_effect, "given", len(sinks.heads), None, {})
    least = minimal.value
    labels = label_heads(effects, sinks, level=level, minimal_effect=least)
    labels = switches_within(
        model, samples, sinks, labels, measured.of_halves, level=level, minimal_effect=least, batch_size=size
    )
    listed = entries.examined_heads(model, samples, labels, sinks, effects, batch_size=size)
    rows = [*entries.effect_rows(effects), *entries.head_rows(listed)]
    groups += entries.groups_of_labels(labels, groups) if request.together else []
    together = []
    if groups:
        at_once = measured.of_groups(groups)
        judged = label_heads(at_once, sinks, level=level, minimal_effect=least)
        together = entries.examined_groups(judged, at_once, listed, effects)
        rows += entries.group_rows(at_once)
    clean_loss = dict(zip(samples.domain_names, np.nanmean(effects.clean_loss, axis=0).tolist(), strict=True))
    sections, section_rows = _experiments(model, texts, sinks, effects, request, least, progress)
    found = Causes(
        heads=listed, groups=together, counts={name: Counter(head.label for head in listed)[name] for name in LABELS},
        sink=entries.found_sink(sinks), texts=len(samples), texts_needed=texts_needed(labels), mirrored=mirrored(labels, least),
        domains=list(samples.domain_names), loss_of=loss_kind(model), unit=effects.unit, clean_loss=clean_loss, level=level,
        minimal_effect=least, minimal_effect_from=minimal, budget=request.budget, variants=effects.variants,
        notes=_notes(model, samples, clean_loss if effects.unit == "nats" else {}), **sections,
    )  # fmt: skip
    return Examined(found, [*rows, *section_rows], effects.record)


def _experiments(
    model: nn.Module, texts: Texts, sinks: Sinks, effects: Effects, request: Request, minimal_effect: float, progress: Progress
) -> tuple[dict[str, Any], list[Row]]:
    """Experiments on the sink as a whole: by name what each found, ``None`` where the budget leaves it out; and their rows."""
    samples, size = texts.samples, request.batch_size
    own: dict[str, Any] = {"readout": texts.readout, "batch_size": size, "seed": request.seed}
    least: dict[str, Any] = {"threshold": request.threshold, "minimal_effect": minimal_effect}
    runs: dict[str, tuple[Callable[[], Any], Callable[..., Iterator[Row]]]] = {
        "read_outs": (
            lambda: three_metrics.three_metrics(model, samples, sinks, effects, batch_size=size, **least), three_metrics.rows
        ),
        "location": (
            lambda: location.location(model, samples, sinks, threshold=request.threshold, **own), location.rows
        ),
        "key_bias": (
            lambda: key_bias.key_bias(model, samples, sinks, minimal_effect=minimal_effect, **own), key_bias.rows
        ),
        "massive": (lambda: massive.massive_activations(model, samples, sinks, **own), massive.rows),
        "spread": (lambda: spread.spread(model, samples, sinks, **own), spread.rows),
    }  # fmt: skip
    chosen = EXPERIMENTS[request.budget] if request.experiments else ()
    sections: dict[str, Any] = dict.fromkeys(runs)
    rows: list[Row] = []
    named = {str(head): head for head in sinks.heads}
    for done, name in enumerate(chosen, 1):
        run, rows_of = runs[name]
        try:
            sections[name] = run()
        except (ConfigurationError, InputError, MeasurementError, UnsupportedModelError) as error:
            sections[name] = Refused(str(error))
        else:
            rows += rows_of(sections[name], named)
        progress("experiments", done, len(chosen))
    return sections, rows


def _on_device(texts: Texts, device: torch.device) -> Texts:
    inputs = {name: tensor.to(device) for name, tensor in texts.samples.inputs.items()}
    return dataclasses.replace(texts, samples=dataclasses.replace(texts.samples, inputs=inputs))


def _sinks_of(model: nn.Module, samples: Samples, request: Request, known: Sinks | None) -> Sinks:
    """The sinks on these samples, the main one as it is requested, or that of sinks that are known."""
    words: dict[int | str, Literal["find", "null"] | None] = {"auto": "find", "null": "null", "none": None}
    place: SinkPlace | Literal["find"] | None = request.sink if isinstance(request.sink, int) else words[request.sink]
    if known is not None:
        place = known.main
    with _named("`threshold`, `sink` as a position, null or none"):
        sinks = find_sinks(
            model, samples.inputs, threshold=request.threshold, place=place, groups=samples.groups(),
            batch_size=request.batch_size,
        )  # fmt: skip
        if place == "find":
            sinks.require()
    return sinks


def _notes(model: nn.Module, samples: Samples, losses: Mapping[str, float]) -> list[str]:
    """How heads are numbered where not all layers attend; losses above that of a guess; texts longer than trained on."""
    notes = [guess_warning(model, loss, text=name) for name, loss in losses.items()]
    tokens = samples.inputs.get("input_ids")
    if tokens is not None and isinstance(model, PreTrainedModel):
        notes = [head_numbering(*attending_layers(model.config)), *notes, length_warning(model, tokens.shape[1])]
    return [note for note in notes if note]


def causes_section(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """The causes as a section of an audit: the fast budget on texts of its corpus, with its threshold, seed and BOS."""
    loaded: LoadedModel = context.loaded
    request = Request(threshold=context.summary["threshold"], seed=context.seed)
    try:
        texts = texts_of_budget(loaded, [context.corpus], "fast", seed=context.seed, bos=context.bos)
        facts = facts_of(loaded.model, loaded)
        examined = examine(loaded.model, texts, request, identity=facts, sinks=context.sinks, progress=context.progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(examined.rows, run_id=context.run_id, seed=context.seed, bos=int(context.bos), **facts)
    return to_json(examined.found), table


def facts_of(module: nn.Module, loaded: LoadedModel | None) -> dict[str, object]:
    """Columns of the table that say what was examined; a model that is not of transformers has its class alone."""
    if loaded is not None:
        return {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation}
    return {"model": type(module).__name__, "revision": None, "operation": None}


@contextlib.contextmanager
def _named(parameters: str) -> Iterator[None]:
    """Say by which parameters a setting that cannot be is changed."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (see {parameters})") from error
