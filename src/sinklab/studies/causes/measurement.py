"""The measurement behind find_causes(): sink, effects of all variants on every head, labels, experiments; resumed if killed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from sinklab.attention.placement import input_device
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus
from sinklab.errors import ConfigurationError, SinklabError
from sinklab.models.layer_kinds import attending_layers
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, loss_kind
from sinklab.models.positions import length_warning
from sinklab.results.metric import Row
from sinklab.results.naming import head_numbering
from sinklab.results.run import Progress, silent
from sinklab.results.store import Store
from sinklab.results.summaries.causes import CausesSummary
from sinklab.results.table import make_table
from sinklab.sinks import Sinks, find_sinks
from sinklab.sinks.value import SinkPlace
from sinklab.studies.causes.experiments import experiments
from sinklab.studies.causes.groups import chosen_heads, examined_groups, group_rows, groups_of_labels, most_groups
from sinklab.studies.causes.head_group import HeadGroup
from sinklab.studies.causes.labels import LABELS, label_heads, mirrored, require_texts, texts_needed
from sinklab.studies.causes.listing import by_domain, effect_rows, examined_heads, found_sink, head_rows
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.resumable import Resumable
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts, texts_of, usual_length
from sinklab.studies.causes.threshold import SILENCED, given, minimal_effect_of
from sinklab.studies.causes.variants import TEXTS, make_variants
from sinklab.studies.causes.within import candidates, switches_within
from sinklab.studies.causes.words import sentences

__all__ = ["Examined", "causes_section", "examine", "facts_of", "texts_of_budget"]


@dataclasses.dataclass(frozen=True)
class Examined:
    """What was found.

    Attributes:
        summary: for ``summary.json``.
        rows: of the long table.
        record: attention module to how its heads were measured, or why one by one.
    """

    summary: dict[str, Any]
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
    say: Callable[[str], None] | None = None,
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
    texts = _on_device(texts, input_device(model))
    samples = texts.samples
    sinks = _sinks_of(model, samples, request, sinks)
    heads, groups = chosen_heads(request.heads, sinks.heads)
    with _named("`texts`, `heads`, `level`"):
        require_texts(samples, sinks, heads, level=request.level)
        number = len(groups) + (most_groups(len(heads)) if request.together else 0)
        require_texts(samples, sinks, range(max(number, 1)), level=request.level)
    variants = make_variants(sinks, samples, budget=request.budget, seed=request.seed)
    identity = {**identity, "main_sink": sinks.describe(), "other_sinks": sinks.secondary}
    measured = Resumable(model, texts, request, variants, sinks, identity, store or Store(None), say, progress)
    effects = measured.of_heads(heads, groups)
    if isinstance(request.minimal_effect, str):
        minimal = minimal_effect_of(measured.of_groups([HeadGroup(tuple(sinks.heads))], SILENCED))
    else:
        minimal = given(request.minimal_effect, len(sinks.heads), effects.unit)
    least = minimal["value"]
    labels = label_heads(effects, sinks, level=request.level, minimal_effect=least)
    labels = switches_within(
        model, samples, sinks, labels, candidates(labels, sinks, samples, level=request.level), measured.of_halves,
        level=request.level, minimal_effect=least, batch_size=request.batch_size,
    )  # fmt: skip
    listed = examined_heads(labels, sinks, by_domain(model, samples, sinks, request.batch_size), effects)
    rows = [*effect_rows(effects), *head_rows(listed)]
    groups += groups_of_labels(labels, groups) if request.together else []
    together = []
    if groups:
        at_once = measured.of_groups(groups)
        judged = label_heads(at_once, sinks, level=request.level, minimal_effect=least)
        together = examined_groups(judged, at_once, listed, effects)
        rows += group_rows(at_once)
    summary: CausesSummary = {
        "heads": listed,
        "groups": together,
        "counts": {name: Counter(head["label"] for head in listed)[name] for name in LABELS},
        "sink": found_sink(sinks),
        "texts": len(samples),
        "texts_needed": texts_needed(labels),
        "mirrored": mirrored(labels, least),
        "domains": list(samples.domain_names),
        "loss_of": loss_kind(model),
        "unit": effects.unit,
        "clean_loss": dict(zip(samples.domain_names, np.nanmean(effects.clean_loss, axis=0).tolist(), strict=True)),
        "level": request.level,
        "minimal_effect": least,
        "minimal_effect_from": minimal,
        "budget": request.budget,
        "variants": effects.variants,
    }
    summary["text"] = " ".join(filter(None, (sentences(summary), *_warnings(model, samples, summary))))
    sections, section_rows = experiments(
        model, texts, sinks, effects, budget=request.budget if request.experiments else "none", threshold=request.threshold,
        minimal_effect=least, batch_size=request.batch_size, seed=request.seed, progress=progress,
    )  # fmt: skip
    return Examined({**summary, **sections}, [*rows, *section_rows], effects.record)


def _on_device(texts: Texts, device: torch.device) -> Texts:
    inputs = {name: tensor.to(device) for name, tensor in texts.samples.inputs.items()}
    return dataclasses.replace(texts, samples=dataclasses.replace(texts.samples, inputs=inputs))


def _sinks_of(model: nn.Module, samples: Samples, request: Request, known: Sinks | None) -> Sinks:
    """The sinks on these samples, the main one as it is requested, or that of sinks that are known.

    Raises:
        ConfigurationError: there is none to be found, or the model has no such place.
    """
    words: dict[str, Literal["find", "null"] | None] = {"auto": "find", "null": "null", "none": None}
    place: SinkPlace | Literal["find"] | None = request.sink if isinstance(request.sink, int) else words[request.sink]
    if known is not None:
        place = known.main
    with _named("`threshold`, `sink` as a position, null or none"):
        sinks = find_sinks(
            model,
            samples.inputs,
            threshold=request.threshold,
            place=place,
            groups=samples.groups(),
            batch_size=request.batch_size,
        )
        if place == "find":
            sinks.require()
    return sinks


def _warnings(model: nn.Module, samples: Samples, summary: CausesSummary) -> list[str]:
    """What a reader has to know beside the labels, a sentence each, or an empty text.

    How heads are numbered where not every layer has attention; losses above that of a guess; texts longer than in training.
    """
    losses = summary["clean_loss"] if summary["unit"] == "nats" else {}
    guesses = [guess_warning(model, loss, text=name) for name, loss in losses.items()]
    tokens = samples.inputs.get("input_ids")
    if tokens is None or not isinstance(model, PreTrainedModel):
        return guesses
    return [head_numbering(*attending_layers(model.config)), *guesses, length_warning(model, tokens.shape[1])]


def causes_section(
    loaded: LoadedModel,
    text: Corpus,
    summary: Mapping[str, Any],
    sinks: Sinks,
    *,
    run_id: str,
    seed: int,
    progress: Progress = silent,
) -> tuple[Mapping[str, object], pd.DataFrame]:
    """The causes as a section of an audit: the fast budget on texts of its corpus, with its threshold, seed and BOS.

    Args:
        summary: of the same audit.
        sinks: that it found.

    Returns:
        What ``summary.json`` has under ``causes``, ``{"refused": why}`` where they cannot be had; and rows of the long table.
    """
    request = Request(threshold=summary["threshold"], seed=seed)
    try:
        texts = texts_of_budget(loaded, [text], "fast", seed=seed, bos=bool(summary["bos"]))
        facts = facts_of(loaded.model, loaded)
        examined = examine(loaded.model, texts, request, identity=facts, sinks=sinks, progress=progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    return examined.summary, make_table(examined.rows, run_id=run_id, seed=seed, bos=int(summary["bos"]), **facts)


def texts_of_budget(
    loaded: LoadedModel,
    domains: Sequence[str | Corpus],
    budget: str,
    *,
    texts: int | None = None,
    seq_len: int | None = None,
    seed: int,
    bos: bool,
) -> Texts:
    """Texts of every domain, by default as many and as long as the budget says.

    A domain is called what its corpus is on tables and pages: by its registered name, or by the name of its file.

    Raises:
        SinklabError: see :func:`~sinklab.studies.causes.texts.texts_of`.
    """
    resolved_corpora = [resolve_corpus(domain) for domain in domains]
    labels = [
        corpus.name if domain == corpus.name else corpus.label for domain, corpus in zip(domains, resolved_corpora, strict=True)
    ]
    if len(set(labels)) < len(labels):  # files of one name in two folders
        labels = [domain if isinstance(domain, str) else domain.name for domain in domains]
    corpora = list(zip(labels, resolved_corpora, strict=True))
    count, length = TEXTS[budget] if texts is None else texts, usual_length(loaded) if seq_len is None else seq_len
    return texts_of(loaded, corpora, texts=count, seq_len=length, seed=seed, bos=bos)


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
