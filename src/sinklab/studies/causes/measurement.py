"""The measurement behind find_causes(): sink, effects of all variants on every head, labels, experiments; resumed if killed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import nn

from sinklab.attention.placement import input_device
from sinklab.attention.ranks import ranks_of
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus
from sinklab.errors import ConfigurationError, SinklabError, UnsupportedModelError
from sinklab.models.loading import LoadedModel, hash_weights
from sinklab.registry import operations
from sinklab.results.metric import VALUE_RATIO, Metric, Row
from sinklab.results.run import Progress, silent
from sinklab.results.sources import digest_of
from sinklab.results.store import Store
from sinklab.results.summaries import CausesSummary, ExaminedHead, FoundSink
from sinklab.results.table import make_table
from sinklab.results.voice import duration
from sinklab.sinks import Head, Sinks, find_sinks
from sinklab.sinks.value import SinkPlace
from sinklab.studies.causes.effects import Effects, HeadEdit
from sinklab.studies.causes.engine import estimate, measure_effects
from sinklab.studies.causes.experiments import estimate_experiments, experiments
from sinklab.studies.causes.finding import LOSS_CHANGE, SINK_SHARE, number
from sinklab.studies.causes.labels import LABELS, HeadLabel, label_heads, mirrored, require_texts, texts_needed
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts, texts_of, usual_length
from sinklab.studies.causes.variants import TEXTS, make_variants
from sinklab.studies.causes.within import candidates, switches_within
from sinklab.studies.causes.words import sentences
from sinklab.studies.measure.probing import classes_of

__all__ = ["Examined", "Request", "causes_section", "examine", "facts_of", "texts_of_budget"]

PROBE = "causes"
DIVERGENCE = Metric(
    "divergence", "nats", "Mean over texts of the divergence of the predictions under the intervention from the model's."
)

PIECES = 12
"""Into about how many pieces the work of a long run is cut: what a killed one loses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of a run, as :func:`~sinklab.studies.causes.causes.find_causes` takes them."""

    heads: tuple[tuple[int, int], ...] | None = None
    sink: int | Literal["auto", "null", "none"] = "auto"
    budget: Literal["fast", "full"] = "fast"
    level: float = 0.05
    minimal_effect: float = 0.01
    threshold: float = 0.3
    seed: int = 0
    batch_size: int = 16
    experiments: bool = True

    def check(self) -> None:
        """Raise on what no model could be asked.

        Raises:
            ConfigurationError: says which setting.
        """
        if (
            isinstance(self.sink, bool)
            or (isinstance(self.sink, int) and self.sink < 0)
            or (isinstance(self.sink, str) and self.sink not in ("auto", "null", "none"))
        ):
            raise ConfigurationError(f"`sink` {self.sink} must be auto, a position from 0, null or none")
        if self.budget not in ("fast", "full"):
            raise ConfigurationError(f"`budget` {self.budget!r} must be fast or full")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"`level` {self.level:g} must lie between 0 and 1: the share of labels that may be false")
        if self.minimal_effect <= 0:
            raise ConfigurationError(
                f"`minimal_effect` {self.minimal_effect:g} must be above 0: no effect can be shown to be none"
            )
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"`threshold` {self.threshold:g} must lie between 0 and 1")
        if self.batch_size < 2:
            raise ConfigurationError(
                f"`batch_size` must be at least 2, got {self.batch_size}: a head is given its output of another text of the "
                "batch"
            )
        if self.heads is not None and not self.heads:
            raise ConfigurationError("`heads` names no head; leave it out for all of them")

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        heads = "all" if self.heads is None else [f"{layer}.{head}" for layer, head in self.heads]
        return {**dataclasses.asdict(self), "heads": heads}


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
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> Examined:
    """Find the sink, measure every variant on every head, and label.

    Args:
        sinks: where the sinks are, if that is known; found on these texts otherwise.
        identity: what the model is, besides its weights.
        store: of effects measured so far, an entry for a few attention modules.

    Raises:
        SinklabError: see :func:`~sinklab.studies.causes.causes.find_causes`.
    """
    if ranks_of(model) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is tensor-parallel, and causes replays its heads from weights that one process does not "
            "have; load it in one process, with `device_map` if it is large"
        )
    device = input_device(model)
    inputs = {name: tensor.to(device) for name, tensor in texts.samples.inputs.items()}
    texts = dataclasses.replace(texts, samples=dataclasses.replace(texts.samples, inputs=inputs))
    samples = texts.samples
    words: dict[str, Literal["find", "null"] | None] = {"auto": "find", "null": "null", "none": None}
    place: SinkPlace | Literal["find"] | None = request.sink if isinstance(request.sink, int) else words[request.sink]
    if sinks is not None:
        place = sinks.main
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
    heads = _chosen(sinks.heads, request)
    with _named("`texts`, `heads`, `level`"):
        require_texts(samples, sinks, heads, level=request.level)
    variants = make_variants(sinks, samples, budget=request.budget, seed=request.seed)
    identity = {**identity, "main_sink": sinks.describe(), "other_sinks": sinks.secondary}
    effects = _effects(model, texts, request, variants, heads, sinks, identity, store or Store(None), say, progress)
    labels = label_heads(effects, sinks, level=request.level, minimal_effect=request.minimal_effect)
    labels = switches_within(
        model, samples, texts.readout, sinks, variants, labels, candidates(labels, sinks, samples, level=request.level),
        level=request.level, minimal_effect=request.minimal_effect, batch_size=request.batch_size, progress=progress,
    )  # fmt: skip
    own_sinks = _by_domain(model, samples, sinks, request.batch_size)
    listed = [_head(label, sinks, own_sinks, effects) for label in labels]
    summary: CausesSummary = {
        "heads": listed,
        "counts": {name: Counter(head["label"] for head in listed)[name] for name in LABELS},
        "sink": _record(sinks),
        "texts": len(samples),
        "texts_needed": texts_needed(labels),
        "mirrored": mirrored(labels, request.minimal_effect),
        "domains": list(samples.domain_names),
        "unit": effects.unit,
        "clean_loss": dict(zip(samples.domain_names, np.nanmean(effects.clean_loss, axis=0).tolist(), strict=True)),
        "level": request.level,
        "minimal_effect": request.minimal_effect,
        "budget": request.budget,
        "variants": effects.variants,
    }
    summary["text"] = sentences(summary)
    also, rows = experiments(
        model, texts, sinks, effects, budget=request.budget if request.experiments else "none", threshold=request.threshold,
        minimal_effect=request.minimal_effect, batch_size=request.batch_size, seed=request.seed, progress=progress,
    )  # fmt: skip
    return Examined({**summary, **also}, [*_effect_rows(effects), *_head_rows(listed), *rows], effects.record)


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

    Raises:
        SinklabError: see :func:`~sinklab.studies.causes.texts.texts_of`.
    """
    corpora = [(domain if isinstance(domain, str) else domain.name, resolve_corpus(domain)) for domain in domains]
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


def _chosen(heads: Sequence[Head], request: Request) -> list[Head]:
    if request.heads is None:
        return list(heads)
    known = {(head.layer, head.head): head for head in heads}
    missing = [f"{layer}.{head}" for layer, head in request.heads if (layer, head) not in known]
    if missing:
        counts = Counter(head.layer for head in heads)
        sizes = (
            f"{min(counts.values())}" if len(set(counts.values())) == 1 else f"{min(counts.values())} to {max(counts.values())}"
        )
        raise ConfigurationError(
            f"`heads` {','.join(missing)}: there is no such head; the model has {len(counts)} layers of {sizes} heads, "
            f"written layer.head from 0.0 to {max(known)[0]}.{max(known)[1]}"
        )
    return [known[pair] for pair in dict.fromkeys(request.heads)]


def _effects(
    model: nn.Module,
    texts: Texts,
    request: Request,
    variants: Sequence[HeadEdit],
    heads: Sequence[Head],
    sinks: Sinks,
    identity: Mapping[str, object],
    store: Store,
    say: Callable[[str], None],
    progress: Progress,
) -> Effects:
    """Effects of all heads, a few modules at a time if what is measured is to be stored."""
    modules = list(dict.fromkeys(head.module for head in heads))
    size = len(modules) if store.folder is None else max(1, len(modules) // PIECES)
    pieces = [set(modules[start : start + size]) for start in range(0, len(modules), size)]
    groups = [[head for head in heads if head.module in piece] for piece in pieces]
    settings, sources = _store_key(model, texts, request, variants, identity) if store.folder is not None else ({}, "")
    keys = [(f"layer-{group[0].layer}", {**settings, "heads": list(map(str, group))}, sources) for group in groups]
    stored = [store.get(*key) for key in keys]
    missing = [group for group, saved in zip(groups, stored, strict=True) if saved is None]
    if missing:
        waiting = [head for group in missing for head in group]
        seconds = estimate(model, texts.samples, texts.readout, variants, waiting, batch_size=request.batch_size)
        also = ""
        if request.experiments:
            seconds += estimate_experiments(
                model, texts, sinks, budget=request.budget, threshold=request.threshold, batch_size=request.batch_size
            )
            also = " and the experiments on the sink"
        there = len(heads) - len(waiting)
        rest = f"; {there} of {len(heads)} heads are there from an earlier run" if there else ""
        what = f"{len(waiting)} heads × {len(variants)} interventions × {len(texts.samples)} texts"
        say(f"{what}{also} take {duration(seconds)}{rest}")
    parts: list[Effects] = []
    done = 0
    for group, key, saved in zip(groups, keys, stored, strict=True):
        if saved is None:

            def shown(stage: str, part: int, total: int, done: int = done, share: int = len(group)) -> None:
                progress(stage, round(100 * (done + share * part / total)), 100 * len(heads))

            part = measure_effects(
                model, texts.samples, texts.readout, variants, group, batch_size=request.batch_size, progress=shown
            )
            arrays = {"loss": part.loss, "divergence": part.divergence, "clean_loss": part.clean_loss}
            store.put(*key, part.record, arrays)
        else:
            names = [variant.name for variant in variants]
            part = Effects(
                names, group, texts.samples.domain_names, unit=texts.readout.unit, record=saved.record, **saved.arrays
            )
        parts.append(part)
        done += len(group)
    record = {module: how for part in parts for module, how in part.record.items()}
    return Effects(
        parts[0].variants, [head for group in groups for head in group], parts[0].domain_names,
        np.concatenate([part.loss for part in parts], axis=1), np.concatenate([part.divergence for part in parts], axis=1),
        parts[0].clean_loss, parts[0].unit, record,
    )  # fmt: skip


def _store_key(
    model: nn.Module, texts: Texts, request: Request, variants: Sequence[HeadEdit], identity: Mapping[str, object]
) -> tuple[dict[str, object], str]:
    """What effects depend on besides the heads: the settings, and the digest of the code."""
    digest = hashlib.sha256()
    samples = texts.samples
    for tensor in (*samples.inputs.values(), samples.domains, *(() if samples.targets is None else (samples.targets,))):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    settings = {
        **identity,
        **{name: value for name, value in request.to_dict().items() if name in ("sink", "budget", "threshold", "seed")},
        "weights": hash_weights(model),
        "variants": [variant.name for variant in variants],
        "readout": type(texts.readout).__qualname__,
        "samples": digest.hexdigest(),
    }
    operation = [operations[str(identity["operation"])]] if identity["operation"] in operations else []
    return settings, digest_of(measure_effects, make_variants, find_sinks, type(texts.readout), *operation, *classes_of(model))


def _by_domain(model: nn.Module, samples: Samples, sinks: Sinks, batch_size: int) -> dict[str, Sinks]:
    """What every head gives to the main sink on the texts of each domain alone."""
    if sinks.main is None or len(samples.domain_names) == 1:
        return dict.fromkeys(samples.domain_names, sinks)
    own = {}
    for index, name in enumerate(samples.domain_names):
        rows = (samples.domains == index).any(1)
        inputs = {key: tensor[rows.to(tensor.device)] for key, tensor in samples.inputs.items()}
        own[name] = find_sinks(model, inputs, place=sinks.main, batch_size=batch_size)
    return own


def _head(label: HeadLabel, sinks: Sinks, own_sinks: Mapping[str, Sinks], effects: Effects) -> ExaminedHead:
    index = sinks.heads.index(label.head)
    row = effects.heads.index(label.head)
    return {
        "layer": label.head.layer,
        "head": label.head.head,
        "module": label.head.module,
        "label": label.label,
        "domains": dict(label.by_domain),
        "within": label.within,
        "needs_sink": dict(label.needs_sink),
        "undecided": {domain: reason.to_dict() for domain, reason in label.reasons.items()},
        "sink_weight": number(sinks.weights[index]),
        "value_ratio": number(sinks.value_ratio[index]),
        "sink_weights": {name: number(own.weights[index]) for name, own in own_sinks.items()},
        "value_ratios": {name: number(own.value_ratio[index]) for name, own in own_sinks.items()},
        "effects": label.evidence_dict(),
        "divergence": {
            name: dict(zip(effects.domain_names, map(number, np.nanmean(values[row], axis=0)), strict=True))
            for name, values in zip(effects.variants, effects.divergence, strict=True)
            if not name[-1].isdecimal()  # the numbered ones are controls
        },
    }


def _record(sinks: Sinks) -> FoundSink:
    """Where the sink is and what every head gives to it, for JSON."""
    heads = zip(sinks.heads, sinks.weights.tolist(), sinks.value_ratio.tolist(), strict=True)
    return {
        "place": sinks.main.place if sinks.main else None,
        "name": sinks.main.name if sinks.main else "",
        "tried": [{"place": place, "weight": weight} for place, weight in sinks.tried[:8]],
        "secondary": sinks.secondary,
        "heads": {str(head): {"weight": number(weight), "value_ratio": number(ratio)} for head, weight, ratio in heads},
    }


def _effect_rows(effects: Effects) -> list[Row]:
    """Means over texts of the changes of the loss and of the divergences, for every variant, head and domain."""
    rows: list[Row] = []
    for metric, values in ((LOSS_CHANGE.of(effects.unit), effects.loss), (DIVERGENCE.of(effects.unit), effects.divergence)):
        counts = np.isfinite(values).sum(axis=2)
        means = np.nansum(values, axis=2) / np.maximum(counts, 1)
        for variant, head_index, domain in np.argwhere(counts > 0).tolist():
            head = effects.heads[head_index]
            rows.append(
                {
                    "probe": PROBE, "metric": metric, "intervention": effects.variants[variant],
                    "module": head.module,
                    "layer": head.layer, "head": head.head, "corpus": effects.domain_names[domain],
                    "value": float(means[variant, head_index, domain]), "count": int(counts[variant, head_index, domain]),
                }
            )  # fmt: skip
    return rows


def _head_rows(listed: Sequence[ExaminedHead]) -> list[Row]:
    """Weight on the sink and length of its value, for every head."""
    return [
        {
            "probe": PROBE, "metric": metric, "module": head["module"], "layer": head["layer"],
            "head": head["head"], "value": value, "count": 1,
        }
        for head in listed
        for value, metric in ((head["sink_weight"], SINK_SHARE), (head["value_ratio"], VALUE_RATIO))
        if value is not None
    ]  # fmt: skip
