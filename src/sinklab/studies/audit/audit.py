"""audit(): every probe on natural text, the sink rate under other conditions, a summary in words, and a report to open."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    SEQ_LEN,
    BatchSize,
    Bos,
    CorpusOfModel,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    ModelSource,
    OffloadFolder,
    Overwrite,
    Progress,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    TrustRemoteCode,
    WrittenTo,
    command,
)

__all__ = ["audit"]


@command
def audit(
    model: ModelSource,
    *,
    corpus: CorpusOfModel = "auto",
    seq_len: SeqLen = SEQ_LEN,
    samples: Samples = 100,
    threshold: Threshold = 0.3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    cache: bool = True,
    certificate: bool = False,
    causes: bool = False,
    origin: bool = False,
    out: Annotated[Path | None, WrittenTo("sinklab-audit/{model}")] = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Find the sinks of a model: at which positions and tokens, in which layers and heads, under which conditions.

    Writes report.html, summary.json, table.parquet, maps.safetensors and run.json into the output directory. The defaults are
    those of Gu et al. 2024 (arXiv 2410.10781): 100 samples of 64 tokens, threshold 0.3. All registered probes run on the
    corpus. The sink rate and the loss are also measured on random tokens, on one repeated token, and with or without the
    beginning-of-sequence token; for pictures and sound, on noise and on one grey or one tone.

    embedded:softmax takes half a minute of one core, and a third less with --no-cache.

    Args:
        cache: Also read a few long texts under cache policies: what a window loses without the sinks, and with them.
        certificate: Certify on a few samples which heads could not be silent without their sink (docs/theory.md).
        causes: Find out what every head does with the sink, by interventions (docs/explain.md#what-a-sink-is-for-labels-from-causes); takes a minute or more.
        origin: Find out where the sinks are born, and what depends on that (docs/explain.md#where-a-sink-is-born).
        out: Output directory; it appears complete or not at all.

    In Python:
        Without ``out`` nothing is written; the page is in the result.

    Raises:
        SinklabError: see the errors of loading, corpora and sessions.

    Examples:
        sinklab audit embedded:softmax
        sinklab audit ./my-checkpoint --corpus notes.txt --seq-len 256
        sinklab audit org/model --bos none --json > summary.json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.models.drawing import AUTO, default_corpus, reading_part
    from sinklab.studies.audit.display import display
    from sinklab.studies.audit.measurement import measure_audit, write_arrays
    from sinklab.studies.audit.page import frame_report, write_report
    from sinklab.studies.measure.probing import opened

    settings: dict[str, Any] = {"seq_len": seq_len, "samples": samples, "threshold": threshold, "seed": seed, "bos": bos}
    with Run("audit", out=out, overwrite=overwrite, settings=settings, progress=progress) as run:
        named_corpus = None if corpus == AUTO else resolve_corpus(corpus)
        loaded = reading_part(opened(
            model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
            device_map=device_map, max_memory=max_memory, offload_folder=offload_folder,
        ))  # fmt: skip
        text = named_corpus or default_corpus(loaded)
        audit = measure_audit(
            loaded, text, **settings, batch_size=batch_size, cache=cache, certificate=certificate,
            causes=causes, origin=origin, run_id=run.id, progress=run.progress,
        )  # fmt: skip
        return run.finish(
            summary=audit.summary,
            table=audit.table,
            display=display,
            files=functools.partial(write_arrays, audit.arrays),
            page=write_report,
            frame=frame_report,
            loaded=loaded,
            config={
                "corpus": text.label,
                "seq_len": audit.summary["seq_len"],
                "min_queries": max(1, audit.summary["seq_len"] // 2),
                "bos_tokens_per_sample": audit.summary["bos"],
            },
            **audit.record,
        )
