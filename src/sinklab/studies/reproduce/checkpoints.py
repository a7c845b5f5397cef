"""Claims on checkpoints: models as they are, each with texts of its own; a verdict for each model, and one over models."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.console import RenderableType

from sinklab.corpora import resolve_corpus
from sinklab.corpora._overlap import count_repeats
from sinklab.corpora._reading import read_samples
from sinklab.corpora.base import Corpus, hash_tokens
from sinklab.errors import ConfigurationError, DoesNotApply, InputError
from sinklab.jobs.checkpoint import Checkpoint, Kind, Reads, check_texts, kind_of, not_about, rows_read
from sinklab.jobs.claim import Claim, OnCheckpoint, Part
from sinklab.jobs.effect import Numbers
from sinklab.jobs.scale import CHECKPOINT
from sinklab.jobs.verdict import Conclusion, judge_model, judge_models
from sinklab.models.checkpoint import OwnCode
from sinklab.models.loading import LoadedModel, load_model
from sinklab.results.environment import environment
from sinklab.results.folder import FolderLock, require_no_less
from sinklab.results.metric import declared, extremes_of
from sinklab.results.run import Result, new_run_id
from sinklab.results.summaries.claims import ClaimOfModel
from sinklab.results.table import make_table, write_json, write_table
from sinklab.streaming.traits import fingerprint
from sinklab.studies.reproduce.display import display_models, display_parts
from sinklab.studies.reproduce.engine import answer, kept_of, undeclared
from sinklab.studies.reproduce.kept import ClaimAnswer, deciding_part
from sinklab.studies.reproduce.work import OfModel, claim_called, keeping, run_missing
from sinklab.training.process import default_cache

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Subject", "opened_subject", "parse_model", "reproduce_on"]

MOST_ALIKE = 0.2
"""Share of the rows of a draw that may be much like rows of another one, up to which draws count as independent."""

COST = "minutes"
"""Of a claim on a checkpoint of the size that a machine without a GPU runs."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that claims are measured on, and its text.

    Attributes:
        name: what results call it, such as a hub id.
        source: what it is loaded by.
        revision: identity of the weights.
        corpus: what the corpus is made by.
        text: name and identity of the corpus; empty for a model of images.
        config: fingerprint of the model.
        tokens: hash of rows of the text, as the model reads them.
        refused: what the claims may read to why they cannot; text of another length than the model has.
    """

    name: str
    source: str
    kind: Kind
    revision: str
    operation: str
    parameters: int
    corpus: str
    text: str
    config: str
    tokens: str = ""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def task(self, claim: str, seed: int, folder: Path) -> OfModel:
        """What is measured of it on a draw of texts."""
        return OfModel(
            folder, claim, seed, self.source, self.revision, self.operation, self.corpus, self.text, self.config, self.tokens
        )

    def not_about(self, how: OnCheckpoint) -> str:
        """Why a claim says nothing about it, as far as that is known before anything is measured."""
        return not_about(self.kind, how.about) or self.refused.get(how.reads, "")


def parse_model(text: str) -> tuple[str, str]:
    """Name and source of ``NAME=DIR``, of a directory, which is called by its own name and no path, or of a hub id.

    Raises:
        ConfigurationError: nothing on a side of the equals sign.
    """
    if os.path.isdir(text):
        return Path(text).resolve().name, text
    name, equals, source = text.partition("=")
    if not equals:
        return text, text
    if not name or not source:
        raise ConfigurationError(f"`models` {text!r}: expected a directory or a hub id, or NAME=DIR to call a directory NAME")
    return name, source


def reproduce_on(
    models: Sequence[str],
    names: Sequence[str],
    *,
    corpora: Sequence[str] = ("python_source",),
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("sinklab-claims"),
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: bool = True,
) -> list[Result]:
    """Measure claims on models as they are, or go on with it, and judge them: for each model, and over models.

    ``out`` gets ``checkpoint/CLAIM`` with ``table.parquet`` and ``run.json``, and ``measured/checkpoint`` with every number
    under the weights, the configuration, the text as the model reads it, and the code that it is of.

    Args:
        models: directories, hub ids, embedded models; ``NAME=DIR`` calls a directory NAME in results.
        names: claims, all of them with a ``checkpoint``.
        corpora: one for all models, or one for each.
        seeds: of draws of texts; three or more for a verdict about a model.
        say: gets warnings about texts.

    Raises:
        InputError: a model or a text that cannot be used, or that is too short; a result of a model on another text, which
            would be lost.
        ConfigurationError: a number of corpora that is neither one nor that of the models, one model twice, seeds twice.
        KeyboardInterrupt: what has been measured is kept.
    """
    _check_arguments(models, corpora, seeds, jobs)
    named_sources = _named_sources(models)
    out = out.expanduser().absolute()
    named_claims = {name: claim_called(name) for name in dict.fromkeys(names)}
    grid = {"seeds": seeds, "models": [name for name, _ in named_sources]}
    for name in named_claims:
        require_no_less(out / CHECKPOINT / name, kept_of(out / CHECKPOINT / name, "seeds", "models"), grid)
    texts = corpora if len(corpora) == len(models) else [corpora[0]] * len(models)
    subjects = [
        opened_subject(name, source, text, list(named_claims.values()), seeds, say)
        for (name, source), text in zip(named_sources, texts, strict=True)
    ]
    _require_different(subjects)
    for name in named_claims:
        _require_same_texts(out / CHECKPOINT / name, subjects)
    folder = out / "measured" / CHECKPOINT
    tasks = [
        subject.task(name, seed, folder)
        for subject in subjects
        for name, claim in named_claims.items()
        if not subject.not_about(_how(claim))
        for seed in seeds
    ]
    with keeping(out), contextlib.ExitStack() as locks:
        for name in sorted(named_claims):
            locks.enter_context(FolderLock(out / CHECKPOINT / name))
        workers = jobs or torch.cuda.device_count() or os.cpu_count() or 1
        errors = run_missing((), tasks, logs=out / "logs", cache=default_cache(), jobs=workers, progress=progress)
        return [_conclude(name, claim, subjects, seeds, out, errors) for name, claim in named_claims.items()]


def _check_arguments(models: Sequence[str], corpora: Sequence[str], seeds: Sequence[int], jobs: int | None) -> None:
    if not models:
        raise ConfigurationError("`models` are none; give directories or hub ids")
    if len(corpora) not in (1, len(models)):
        raise ConfigurationError(f"`corpora` are {len(corpora)} for {len(models)} models; give one for all, or one for each")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"`seeds` {list(seeds)}; expected one or more, and none twice")
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"`jobs` must be at least 1, got {jobs}")


def _named_sources(models: Sequence[str]) -> list[tuple[str, str]]:
    """Name and source of every model; no name twice."""
    named_sources = [parse_model(text) for text in models]
    if len({name for name, _ in named_sources}) < len(named_sources):
        raise ConfigurationError(f"`models` {', '.join(models)}: one of them is given twice; name directories by NAME=DIR")
    return named_sources


def _require_different(subjects: Sequence[Subject]) -> None:
    """Refuse one model on one text under two names: it would count as two models that agree.

    Raises:
        ConfigurationError: names the first.
    """
    named: dict[tuple[str, ...], str] = {}
    for subject in subjects:
        other = named.setdefault((subject.revision, subject.config, subject.text, subject.tokens), subject.name)
        if other != subject.name:
            raise ConfigurationError(
                f"`models` {other} and {subject.name} are one model on one text, which would count as two; give it once"
            )


def _require_same_texts(folder: Path, subjects: Sequence[Subject]) -> None:
    """Refuse to put what a model does on one text in the place of what it does on another."""
    earlier = kept_of(folder, "models", "texts")
    texts = dict(zip(earlier.get("models", ()), earlier.get("texts", ()), strict=True))
    for subject in subjects:
        if texts.get(subject.name, subject.text) != subject.text:
            raise InputError(
                f"{folder} holds the result of {subject.name} on {texts[subject.name]}, which one on {subject.text} would "
                "replace: choose another `out`, or name the model on this text by NAME=DIR"
            )


def opened_subject(
    name: str,
    source: str,
    corpus: str,
    wanted: Sequence[Claim],
    seeds: Sequence[int] = (0,),
    say: Callable[[str], None] = lambda text: None,
) -> Subject:
    """A model with its text, after both have been tried.

    Args:
        say: called with a sentence where the tokenizer cannot read the text, or draws of it are much alike.

    Raises:
        InputError: see :func:`reproduce_on`.
    """
    try:
        loaded = load_model(source)
    except OwnCode as error:
        raise OwnCode(
            error.name, "for claims; 'sinklab audit' does if you say so, or give a checkpoint of a family that transformers has"
        ) from None
    kind = kind_of(loaded)
    subject = Subject(
        name, source, kind, loaded.revision, loaded.operation, loaded.num_parameters, corpus,
        text="", config=fingerprint(loaded.model),
    )  # fmt: skip
    reads = {_how(claim).reads for claim in wanted if not not_about(kind, _how(claim).about)}
    if not reads:
        return subject
    text: Corpus = resolve_corpus(corpus)
    if loaded.tokenizer is None:
        raise InputError(f"{name} came without a tokenizer, and claims are measured on text; add the files of its tokenizer")
    checkpoint = Checkpoint(loaded, text)
    refused = _refused_reads(checkpoint, name, reads)
    reading = read_samples(text, loaded.encoder, seq_len=64, samples=32, seed=0, bos=checkpoint.bos is not None)
    if reading is not None and reading.warning:
        say(f"{name}: {reading.warning}")
    readable = sorted(reads - refused.keys())
    if warning := next(filter(None, (alike_draws(loaded, text, rows, seeds) for rows in readable)), ""):
        say(f"{name}: {warning}")
    # Rows of one length alone, or a claim would be measured anew beside others that read longer ones.
    tokens = hash_tokens(checkpoint.rows(32, 64).cpu()) if readable else ""
    return dataclasses.replace(subject, text=f"{text.label}, {text.identity.revision}", tokens=tokens, refused=refused)


def _refused_reads(checkpoint: Checkpoint, name: str, reads: Iterable[Reads]) -> dict[str, str]:
    """Rows that claims read to why the model ``name`` cannot read them: a text of another length than it has.

    Raises:
        InputError: a text that is too short for them.
    """
    refused: dict[str, str] = {}
    for rows in sorted(reads):
        try:
            check_texts(checkpoint, rows)
        except DoesNotApply as error:
            refused[rows] = str(error)
        except InputError as error:
            if "too short" not in str(error):
                raise
            raise InputError(f"{str(error).partition(';')[0]}; claims on {name} read as much: give a longer text") from None
    return refused


def alike_draws(loaded: LoadedModel, text: Corpus, reads: Reads, seeds: Sequence[int]) -> str:
    """A sentence where two draws of a text have many rows in common; empty otherwise, and for one seed."""
    if len(seeds) < 2:
        return ""
    first, second = (rows_read(Checkpoint(loaded, text, seed=seed), reads)[:, 1:].tolist() for seed in seeds[:2])
    half = len(first[0]) // 2
    count = count_repeats(first + second, half) - count_repeats(first, half)
    if count <= MOST_ALIKE * len(second):
        return ""
    return (
        f"{count} of {len(second)} rows of seed {seeds[1]} share half or more with one of seed {seeds[0]} or one before them, "
        "so that intervals over draws are about this text alone, and not about texts like it; give a longer text"
    )


def _how(claim: Claim) -> OnCheckpoint:
    assert claim.checkpoint is not None, "whoever asks has looked"
    return claim.checkpoint


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What there is of a claim on one model.

    Attributes:
        by_seed: the numbers of every seed, none of one that failed; no seed where the claim says nothing about the model.
        reason: why the claim says nothing about the model; empty where it does.
        seconds: that measuring took.
        failed: what went wrong, a message each.
    """

    by_seed: dict[int, Numbers]
    reason: str
    seconds: float
    failed: list[str]

    def conclusion(self, parts: Sequence[Part], presupposes: Sequence[Part]) -> Conclusion:
        """The verdict on the model."""
        if self.reason:
            return Conclusion("not applicable", (), (), self.reason)
        return judge_model(parts, presupposes, self.by_seed)


def _measured(subject: Subject, how: OnCheckpoint, tasks: Sequence[OfModel], errors: dict[str, str]) -> _Measured:
    """Collect the stored numbers of a claim on one model, and the errors of those that are missing."""
    if reason := subject.not_about(how):
        return _Measured({}, reason, 0.0, [])
    numbers: dict[int, Numbers] = {}
    seconds, failed = 0.0, []
    for task in tasks:
        entry = task.cached()
        if entry is None:
            numbers[task.seed] = {}
            if task.batch in errors:
                failed.append(f"{task.batch}: {errors[task.batch]}")
            continue
        reason = reason or entry.get("reason", "")
        numbers[task.seed] = {
            label: {metric: value for metric, value in values.items() if value is not None}
            for label, values in entry["numbers"].items()
        }
        seconds += entry["seconds"]
    return _Measured({} if reason else numbers, reason, seconds, failed)


def _conclude(
    name: str, claim: Claim, subjects: Sequence[Subject], seeds: Sequence[int], out: Path, errors: dict[str, str]
) -> Result:
    """Judge a claim by what there is, and write it down."""
    how = _how(claim)
    parts = how.parts or claim.parts
    presupposes = claim.presupposes if how.presupposes is None else how.presupposes
    store = out / "measured" / CHECKPOINT
    measured = {
        subject.name: _measured(subject, how, [subject.task(name, seed, store) for seed in seeds], errors)
        for subject in subjects
    }
    conclusions = {model: numbers.conclusion(parts, presupposes) for model, numbers in measured.items()}
    by_model = {model: numbers.by_seed for model, numbers in measured.items()}
    failed = [message for numbers in measured.values() for message in numbers.failed]
    judgement = judge_models(parts, conclusions, by_model, {subject.name: subject.revision for subject in subjects})
    models = [_of_model(subject, conclusions[subject.name]) for subject in subjects]
    folder, run_id = out / CHECKPOINT / name, new_run_id()
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "kind": "claim",
        "run_id": run_id,
        "claim": name,
        "statement": claim.statement,
        "source": claim.source,
        "reference": claim.reference,
        "published": claim.published,
        "scale": CHECKPOINT,
        "cost": COST,
        "seeds": list(seeds),
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "evidence": how.remark,
        "parts": [finding.to_dict() for finding in judgement.findings],
        "presupposes": [],
        "conditions": {},
        "models": models,
        "environment": environment(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(sum(numbers.seconds for numbers in measured.values()), 1),
        "errors": failed,
    }
    table = _table(subjects, by_model, run_id)
    write_table(table, folder / "table.parquet")
    write_json(record | {"extremes": extremes_of(table)}, folder / "run.json")
    summary = answer(name, claim.source, CHECKPOINT, judgement, seeds=seeds, folder=folder, errors=failed)
    return Result({**summary, "models": models}, table, record, folder, _display)


def _display(result: Result) -> Iterator[RenderableType]:
    row = cast(ClaimAnswer, result.summary)
    yield from display_models([row])
    yield from display_parts(row)


def _of_model(subject: Subject, conclusion: Conclusion) -> ClaimOfModel:
    parts = [finding.to_dict() for finding in conclusion.findings]
    deciding = deciding_part({"parts": parts, "verdict": conclusion.verdict})
    return {
        "name": subject.name,
        "revision": subject.revision,
        "kind": subject.kind,
        "operation": subject.operation,
        "parameters": subject.parameters,
        "text": subject.text,
        "verdict": conclusion.verdict,
        "reason": conclusion.reason,
        "effect": None if deciding is None else deciding["mean"],
        "interval": None if deciding is None else deciding["interval"],
        "unit": None if deciding is None else deciding["unit"],
        "parts": parts,
        "presupposes": [finding.to_dict() for finding in conclusion.presupposed],
    }


def _table(subjects: Sequence[Subject], numbers: dict[str, dict[int, Numbers]], run_id: str) -> pd.DataFrame:
    """One row is one number of one model on one draw; the label of the numbers is the intervention."""
    rows = [
        {
            "model": subject.name,
            "revision": subject.revision,
            "operation": subject.operation,
            "corpus": subject.text.partition(",")[0],
            "intervention": label,
            "metric": declared(metric) or undeclared(metric),
            "seed": seed,
            "value": value,
            "count": 1,
        }
        for subject in subjects
        for seed, by_label in numbers[subject.name].items()
        for label, values in by_label.items()
        for metric, value in values.items()
    ]
    return make_table(rows, run_id=run_id, probe="claim")
