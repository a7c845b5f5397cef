"""audit(): every probe on natural text, the sink rate under other conditions, a summary in words, and a report to open."""

from __future__ import annotations

from typing import Any

from sinklab.arguments import (
    BatchSize,
    Bos,
    CorpusSource,
    Device,
    Dtype,
    ModelSource,
    Out,
    Overwrite,
    Progress,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    TrustRemoteCode,
)
from sinklab.results.run import Result, Run

__all__ = ["audit"]


def audit(
    model: ModelSource,
    *,
    corpus: CorpusSource = "python_source",
    seq_len: SeqLen = 64,
    samples: Samples = 100,
    threshold: Threshold = 0.3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    cache: bool = True,
    certificate: bool = False,
    causes: bool = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Find the sinks of a model: at which positions and tokens, in which layers and heads, under which conditions.

    The defaults are those of Gu et al. 2024 (arXiv 2410.10781): 100 samples of 64 tokens, threshold 0.3. All registered probes
    run on the corpus; the sink rate and the loss are also taken on random tokens, on one repeated token, and with or without
    the beginning-of-sequence token.

    Args:
        model: a name for :func:`sinklab.load_model`, or a model in memory.
        corpus: a registered name, the path of a text file, or a corpus.
        seq_len, samples: tokens per sample and number of samples.
        threshold: of the sink rate.
        bos: ``auto`` (as the tokenizer does by itself), ``always`` or ``none``.
        batch_size: samples per forward; by default as many as make 8,192 tokens.
        cache: read a few long texts under cache policies too: what a window loses without the sinks, and with them.
        certificate: certify on a few samples which heads could not be silent without their sink (docs/theory.md).
        causes: label every head by what interventions on it do to the loss, with the fast budget (docs/causes.md).
        out: directory for ``report.html``, ``summary.json``, ``table.parquet``, ``maps.safetensors`` and ``run.json``; written
            whole or not at all.
        overwrite: replace an earlier result in ``out``.
        progress: told about every batch.

    Raises:
        SinklabError: see the errors of loading, corpora and sessions.
    """
    from sinklab.auditing.audit_display import display
    from sinklab.auditing.audit_measure import measure_audit, write_maps
    from sinklab.auditing.probing import opened
    from sinklab.corpora import resolve_corpus
    from sinklab.report.html import write_report

    settings: dict[str, Any] = {"seq_len": seq_len, "samples": samples, "threshold": threshold, "seed": seed, "bos": bos}
    with Run("audit", out=out, overwrite=overwrite, settings=settings, progress=progress) as run:
        text = resolve_corpus(corpus)
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        min_queries = max(1, seq_len // 2)
        found = measure_audit(
            loaded, text, **settings, batch_size=batch_size, cache=cache, certificate=certificate,
            causes=causes, run_id=run.id, progress=run.progress,
        )  # fmt: skip
        return run.finish(
            summary=found.summary,
            table=found.table,
            display=display,
            files=lambda folder: write_maps(found.maps, loaded, found.tokens, folder / "maps.safetensors"),
            page=write_report,
            loaded=loaded,
            config={"corpus": text.name, "min_queries": min_queries, "bos_tokens_per_sample": found.summary["bos"]},
            **found.record,
        )
