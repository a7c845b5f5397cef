"""find_causes(): what the sink of a model is for, head by head, from what happens when it is taken away."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from sinklab.auditing.causes_measure import Asked, examine
from sinklab.auditing.causes_samples import Texts, texts_of, usual_length
from sinklab.auditing.measure import Progress, opened, uses_bos
from sinklab.auditing.output import check_free, environment, new_run_id, whole_folder
from sinklab.causes.readout import Readout
from sinklab.causes.samples import Samples
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus
from sinklab.errors import ConfigurationError, SinklabError
from sinklab.models.loading import LoadedModel
from sinklab.results.table import make_table, write_json, write_table
from sinklab.sinks import Sinks

__all__ = ["CausesResult", "causes_section", "find_causes"]

TEXTS = {"fast": 16, "full": 64}
"""Texts of each domain, by budget."""


@dataclasses.dataclass(frozen=True)
class CausesResult:
    """What :func:`find_causes` gives: summary (docs/causes.md), long table, run record, and the directory, if any."""

    summary: dict[str, Any]
    table: pd.DataFrame
    run: dict[str, Any]
    folder: Path | None


def find_causes(
    model: str | LoadedModel | PreTrainedModel | nn.Module,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    sink: int | Literal["auto", "null", "none"] = "auto",
    domains: Sequence[str | Corpus] = ("python_source",),
    texts: int | None = None,
    seq_len: int | None = None,
    budget: Literal["fast", "full"] = "fast",
    level: float = 0.05,
    minimal_effect: float = 0.01,
    threshold: float = 0.3,
    samples: Samples | None = None,
    readout: Readout | None = None,
    seed: int = 0,
    bos: str = "auto",
    batch_size: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> CausesResult:
    """Label every head by what interventions on it do to the loss: semantic, dormant, switch, broadcast or undecided.

    Args:
        model: a name for :func:`sinklab.load_model`, or a model in memory; with ``samples`` any module.
        heads: pairs of layer and head, both from 0; all heads by default.
        sink: where the mass is parked: ``auto`` finds it, a position of the document, ``null`` for the null score (a sink
            logit, a key bias), ``none`` for a model without a sink, whose heads are judged by zeroing alone.
        domains: corpora, each a domain of its own: a registered name, the path of a text file, or a corpus.
        texts: of each domain; 16 in a fast run, 64 in a full one.
        seq_len: tokens of a text; 256, or what the model was trained on if that is less.
        budget: ``fast``, or ``full`` for more texts, more controls, replacement by means and by other texts, and all
            experiments.
        level: false discovery rate over all heads and hypotheses (Benjamini and Hochberg).
        minimal_effect: change of the loss, in its unit, below which a head is said to cost nothing.
        threshold: mean weight of a head on a key from which on the key counts as its sink.
        samples, readout: inputs of your own and what is read off the outputs, instead of ``domains``: for encoders, vision
            models and anything that does not read tokens.
        batch_size: samples a forward pass.
        out: directory for ``report.html``, ``summary.json``, ``table.parquet`` and ``run.json``; written whole or not at all.
            What a killed run had measured is kept beside it and taken up by the next run with the same settings.
        overwrite: replace an earlier result in ``out``.
        say: told in a sentence how long it will take.
        progress: told about every step.

    Raises:
        SinklabError: see the errors of loading and corpora. No sink, heads that are not there, an error rate that so few texts
            cannot reach, an intervention that the model's attention cannot express: the message says what to do.
    """
    asked = Asked(
        heads=None if heads is None else tuple(heads), sink=sink, budget=budget, level=level, minimal_effect=minimal_effect,
        threshold=threshold, seed=seed, batch_size=batch_size,
    )  # fmt: skip
    asked.check()
    if (samples is None) != (readout is None):
        raise ConfigurationError(
            "samples and readout go together: inputs of your own, and what is read off the outputs for them"
        )
    if out is not None:
        check_free(out, overwrite)
    started, run_id = time.time(), new_run_id()
    loaded: LoadedModel | None = None
    if isinstance(model, (str, LoadedModel, PreTrainedModel)):
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    elif samples is None:
        raise ConfigurationError(
            f"{type(model).__name__} is no model of transformers, so it is not known what to feed it; give samples and readout"
        )
    else:
        model.eval()  # as a model of transformers is put: dropout would be taken for an effect
    if samples is not None and readout is not None:
        given = Texts(samples, readout, [{"domain": name} for name in samples.domain_names])
    else:
        assert loaded is not None
        given = texts_of(
            loaded,
            [(domain, resolve_corpus(domain)) if isinstance(domain, str) else (domain.name, domain) for domain in domains],
            texts=TEXTS[budget] if texts is None else texts,
            seq_len=usual_length(loaded) if seq_len is None else seq_len,
            seed=seed,
            bos=uses_bos(loaded.encoder, bos),
        )
    module = loaded.model if loaded is not None else model
    assert isinstance(module, nn.Module)
    facts = _facts(module, loaded)
    work = None if out is None else out.parent / f".{out.name}.partial"
    found = examine(module, given, asked, identity=facts, work=work, say=say, progress=progress)
    summary = {**facts, **found.summary}
    table = make_table(
        found.rows, run_id=run_id, model=facts["model"], revision=facts["revision"], operation=facts["operation"], seed=seed,
        bos=int(uses_bos(loaded.encoder, bos)) if samples is None and loaded is not None else None,
    )  # fmt: skip
    run = {
        "run_id": run_id,
        "kind": "causes",
        "model": {**facts, "class": type(module).__name__},
        "config": {**asked.to_dict(), "bos": bos, "texts": len(given.samples), "positions": given.samples.domains.shape[1]},
        "domains": given.record,
        "measured": found.record,
        **environment(loaded or next(module.parameters(), torch.zeros(0))),
        "wall_seconds": round(time.time() - started, 3),
    }
    if out is not None:
        from sinklab.report.causes import write_causes_report

        with whole_folder(out) as folder:
            write_table(table, folder / "table.parquet")
            write_json(summary, folder / "summary.json")
            write_json(run, folder / "run.json")
            write_causes_report(folder)
        found.forget()
    return CausesResult(summary, table, run, out)


def causes_section(
    loaded: LoadedModel,
    text: Corpus,
    summary: dict[str, Any],
    sinks: Sinks,
    *,
    run_id: str,
    seed: int,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """The causes as a section of an audit: the fast budget on texts of its corpus, with its threshold, seed and BOS.

    Args:
        summary: of the same audit.
        sinks: that it found.

    Returns:
        What ``summary.json`` has under ``causes``, ``{"refused": why}`` where they cannot be had; and rows of the long table.
    """
    asked = Asked(threshold=summary["threshold"], seed=seed)
    try:
        given = texts_of(
            loaded, [(text.name, text)], texts=TEXTS["fast"], seq_len=usual_length(loaded), seed=seed, bos=bool(summary["bos"])
        )
        facts = _facts(loaded.model, loaded)
        found = examine(loaded.model, given, asked, identity=facts, sinks=sinks, progress=progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(
        found.rows, run_id=run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation, seed=seed,
        bos=int(summary["bos"]),
    )  # fmt: skip
    return found.summary, table


def _facts(module: nn.Module, loaded: LoadedModel | None) -> dict[str, Any]:
    if loaded is not None:
        return {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation}
    return {"model": type(module).__name__, "revision": None, "operation": None}
