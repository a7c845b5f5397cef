"""Claims on checkpoints: models as they are, each with texts of its own; a verdict for each model, and one over models."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import count_repeats, read_samples
from sinklab.corpora.base import Corpus, hash_tokens
from sinklab.errors import ConfigurationError, DoesNotApply, InputError
from sinklab.models.checkpoint import OwnCode
from sinklab.models.loading import LoadedModel, load_model
from sinklab.results.folder import FolderLock, require_no_less
from sinklab.results.progress import Progress, silent
from sinklab.results.run import Result, new_run_id
from sinklab.streaming.traits import fingerprint
from sinklab.training.process import default_cache
from sinklab_claims.contract.claim import CHECKPOINT, Claim, OnCheckpoint
from sinklab_claims.contract.effect import Numbers
from sinklab_claims.contract.trained import STREAMED, Checkpoint, Kind, Reads, kind_of, not_about, rows_read
from sinklab_claims.reproduce.claims import claim_called
from sinklab_claims.reproduce.on_trainings import about, kept_of, table_of, written
from sinklab_claims.reproduce.store import Task, keeping, run_missing
from sinklab_claims.verdict.records import ClaimFound, ModelFound, effect_of
from sinklab_claims.verdict.rule import Conclusion, judge_model, judge_models

MOST_ALIKE = 0.2
"""Share of the rows of a draw that may be much like rows of another one, up to which draws count as independent."""

COST = "minutes"
"""Of a claim on a checkpoint of the size that a machine without a GPU runs."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that claims are measured on, and its text.

    Attributes:
        name: what results call it, such as a hub id; ``source`` is what it is loaded by.
        revision, config: identity of its weights, and its fingerprint.
        corpus, text: what the corpus is made by; its name and identity, empty for a model of images.
        tokens: a hash of rows as the model reads them.
        refused: what the claims may read to why they cannot; text of another length than the model has.
        length: tokens of long texts that were asked for.
    """

    name: str
    source: str
    kind: Kind
    revision: str
    operation: str
    parameters: int
    corpus: str
    config: str
    text: str = ""
    tokens: str = ""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    length: int = STREAMED

    def task(self, claim: str, seed: int, out: Path) -> Task:
        """What is measured of it on a draw of texts; one process does all claims of a model and a draw."""
        read = {"weights": self.revision, "config": self.config, "text": self.text, "tokens": self.tokens}
        batch = f"{Path(self.source).name} {self.revision[-8:]} seed {seed}"
        folder = out / "measured" / CHECKPOINT
        return Task(folder, claim, {"seed": seed, **read}, batch, model=self.source, corpus=self.corpus, length=self.length)

    def not_about(self, how: OnCheckpoint) -> str:
        """Why a claim says nothing about it, as far as that is known before anything is measured."""
        return not_about(self.kind, how.about) or self.refused.get(how.reads, "")


def parse_model(text: str) -> tuple[str, str]:
    """Name and source of ``NAME=DIR``, of a directory, which is called by its own name and no path, or of a hub id."""
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
    length: int | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("sinklab-claims"),
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> list[Result]:
    """Measure claims on models as they are, or go on with it, and judge them: for each model, and over models.

    ``out`` gets ``checkpoint/CLAIM`` with ``table.parquet`` and ``run.json``, and ``measured/checkpoint`` with every number
    under the weights, the configuration, the text as the model reads it, and the code that it is of.

    Args:
        models: directories, hub ids, embedded models; ``NAME=DIR`` calls a directory NAME in results.
        names: claims, all of them with a ``checkpoint``.
        corpora: one for all models, or one for each.
        length: tokens of a text that claims about caches read; a number of its own by default.
        seeds: of draws of texts; three or more for a verdict about a model.
        say: gets warnings about texts.
        progress: called with models that are opened, and with what is measured.

    Raises:
        InputError: a model or a text that cannot be used, or that is too short; a result that would be lost.
        ConfigurationError: a number of corpora that is neither one nor that of the models, one model twice, seeds twice.
        KeyboardInterrupt: what has been measured is kept.
    """
    named_sources = _named_sources(models, corpora, seeds)
    out = out.expanduser().absolute()
    named_claims = {name: claim_called(name) for name in dict.fromkeys(names)}
    grid = {"seeds": seeds, "models": [name for name, _ in named_sources]}
    for name in named_claims:
        earlier = kept_of(out / CHECKPOINT / name)
        require_no_less(out / CHECKPOINT / name, {"seeds": earlier["seeds"], "models": earlier["models"]}, grid)
    texts = corpora if len(corpora) == len(models) else [corpora[0]] * len(models)
    subjects = []
    for number, ((name, source), text) in enumerate(zip(named_sources, texts, strict=True)):
        progress("models and texts", number, len(models))
        subjects.append(opened_subject(name, source, text, list(named_claims.values()), seeds, say, length))
    progress("models and texts", len(models), len(models))
    for name in named_claims:
        _require_same_texts(out / CHECKPOINT / name, subjects)
    tasks = [
        subject.task(name, seed, out)
        for subject in subjects
        for name, claim in named_claims.items()
        if not subject.not_about(_how(claim))
        for seed in seeds
    ]
    with keeping(out), contextlib.ExitStack() as locks:
        for name in sorted(named_claims):
            locks.enter_context(FolderLock(out / CHECKPOINT / name))
        errors = run_missing(tasks, logs=out / "logs", cache=default_cache(), jobs=jobs, progress=progress)
        return [_conclude(name, claim, subjects, seeds, out, errors) for name, claim in named_claims.items()]


def _named_sources(models: Sequence[str], corpora: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, str]]:
    """Name and source of every model; no name twice, and as many texts as go with them."""
    if not models:
        raise ConfigurationError("`models` are none; give directories or hub ids")
    if len(corpora) not in (1, len(models)):
        raise ConfigurationError(f"`corpora` are {len(corpora)} for {len(models)} models; give one for all, or one for each")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"`seeds` {list(seeds)}; expected one or more, and none twice")
    named_sources = [parse_model(text) for text in models]
    if len({name for name, _ in named_sources}) < len(named_sources):
        raise ConfigurationError(f"`models` {', '.join(models)}: one of them is given twice; name directories by NAME=DIR")
    return named_sources


def _require_same_texts(folder: Path, subjects: Sequence[Subject]) -> None:
    """Refuse to put what a model does on one text in the place of what it does on another."""
    earlier = kept_of(folder)
    texts = dict(zip(earlier["models"], earlier["texts"], strict=True))
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
    length: int | None = None,
) -> Subject:
    """A model with its text, after both have been tried; ``say`` hears where the tokenizer cannot read the text, or draws of it
    are much alike. Raises as :func:`reproduce_on`."""
    try:
        loaded = load_model(source)
    except OwnCode as error:
        raise OwnCode(
            error.name, "for claims; 'sinklab audit' does if you say so, or give a checkpoint of a family that transformers has"
        ) from None
    kind, identity = kind_of(loaded), (loaded.revision, loaded.operation, loaded.num_parameters)
    subject = Subject(name, source, kind, *identity, corpus, config=fingerprint(loaded.model))
    reads = {_how(claim).reads for claim in wanted if not not_about(kind, _how(claim).about)}
    if not reads:
        return subject
    text: Corpus = resolve_corpus(corpus)
    if loaded.tokenizer is None:
        raise InputError(f"{name} came without a tokenizer, and claims are measured on text; add the files of its tokenizer")
    checkpoint = Checkpoint(loaded, text, streamed=length or STREAMED)
    refused: dict[str, str] = {}
    for rows in sorted(reads):
        try:
            rows_read(checkpoint, rows)
        except DoesNotApply as error:
            refused[rows] = str(error)
        except InputError as error:
            if "too short" not in str(error):
                raise
            raise InputError(f"{str(error).partition(';')[0]}; claims on {name} read as much: give a longer text") from None
    reading = read_samples(text, loaded.encoder, seq_len=64, samples=32, seed=0, bos=checkpoint.bos is not None)
    if reading is not None and reading.warning:
        say(f"{name}: {reading.warning}")
    readable = sorted(reads - refused.keys())
    if warning := next(filter(None, (alike_draws(loaded, text, rows, seeds) for rows in readable)), ""):
        say(f"{name}: {warning}")
    named = f"{text.label}, {text.identity.revision}" + (f", {length:,} tokens" if length else "")
    # Rows of one length alone, or a claim would be measured anew beside others that read longer ones.
    tokens = hash_tokens(checkpoint.rows(32, 64).cpu()) if readable else ""
    return dataclasses.replace(subject, text=named, tokens=tokens, refused=refused, length=checkpoint.streamed)


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


def _conclude(
    name: str, claim: Claim, subjects: Sequence[Subject], seeds: Sequence[int], out: Path, errors: Mapping[str, str]
) -> Result:
    """Judge a claim by what there is, and write it down."""
    how, run_id, took, failed = _how(claim), new_run_id(), 0.0, list[str]()
    parts = how.parts or claim.parts
    by_model: dict[str, dict[int, Numbers]] = {}
    conclusions: dict[str, Conclusion] = {}
    for subject in subjects:
        reason, numbers = subject.not_about(how), dict[int, Numbers]()
        for task in [] if reason else [subject.task(name, seed, out) for seed in seeds]:
            entry = task.cached()
            if entry is None:
                failed += [f"{task.batch}: {errors[task.batch]}"] if task.batch in errors else []
                entry = {"numbers": {}, "seconds": 0.0}
            reason, took = reason or entry.get("reason", ""), took + entry["seconds"]
            numbers[task.seed] = {
                label: {metric: value for metric, value in of.items() if value is not None}
                for label, of in entry["numbers"].items()
            }
        by_model[subject.name] = {} if reason else numbers
        none = Conclusion("not applicable", (), (), reason)
        conclusions[subject.name] = none if reason else judge_model(parts, claim.presupposes, numbers)
    judgement = judge_models(parts, conclusions, by_model, {subject.name: subject.revision for subject in subjects})
    found = ClaimFound(
        **about(name, claim, judgement, run_id),
        scale=CHECKPOINT,
        cost=COST,
        seeds=list(seeds),
        evidence=how.remark,
        presupposes=[],
        models=[_of_model(subject, conclusions[subject.name], by_model[subject.name]) for subject in subjects],
        seconds=round(took, 1),
        errors=failed,
    )
    # The label of the numbers is the intervention.
    rows = (
        (
            {
                **{"model": subject.name, "revision": subject.revision, "operation": subject.operation},
                **{"corpus": subject.text.partition(",")[0], "intervention": label},
            },
            seed,
            values,
        )
        for subject in subjects
        for seed, by_label in by_model[subject.name].items()
        for label, values in by_label.items()
    )
    return written(found, table_of(rows, run_id), out / CHECKPOINT / name)


def _of_model(subject: Subject, conclusion: Conclusion, numbers: Mapping[int, Numbers]) -> ModelFound:
    parts = [finding.record() for finding in conclusion.findings]
    of_subject = ("name", "revision", "kind", "operation", "parameters", "text")
    return ModelFound(
        **{name: getattr(subject, name) for name in of_subject},
        verdict=conclusion.verdict,
        reason=conclusion.reason,
        **effect_of(parts, conclusion.verdict),
        parts=parts,
        presupposes=[finding.record() for finding in conclusion.presupposed],
        numbers=_means(numbers),
    )


def _means(numbers: Mapping[int, Numbers]) -> dict[str, dict[str, float]]:
    """Of every number the mean over the draws that have it, to six digits."""
    values: dict[str, dict[str, list[float]]] = {}
    for by_label in numbers.values():
        for label, of in by_label.items():
            for metric, value in of.items():
                values.setdefault(label, {}).setdefault(metric, []).append(value)
    return {
        label: {metric: float(f"{statistics.fmean(known):.6g}") for metric, known in of.items()} for label, of in values.items()
    }
