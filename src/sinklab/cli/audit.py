"""The commands ``sinklab audit`` and ``sinklab measure``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sinklab.arguments import (
    AsJson,
    BatchSize,
    Bos,
    CorpusSource,
    Device,
    Dtype,
    ModelSource,
    Overwrite,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    TrustRemoteCode,
    command,
)
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

__all__ = ["audit", "measure"]


@command
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
    out: Path | None = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find the sinks of a model: one HTML report, one table, one summary.

    Writes run.json, table.parquet, summary.json, maps.safetensors and report.html into the output directory.

    Args:
        cache: Read a few long texts under cache policies too.
        certificate: Certify which heads could not be silent without their sink.
        causes: Find out what every head does with the sink, by taking it away; a minute or more.
        out: Output directory; by default sinklab-audit/<model>.

    Examples:
        sinklab audit embedded:softmax
        sinklab audit ./my-checkpoint --corpus notes.txt --seq-len 256
        sinklab audit org/model --bos none --json > summary.json
    """
    quiet_libraries()
    from sinklab.auditing.audit import audit as run_audit

    folder = Path("sinklab-audit") / _folder_name(str(model)) if out is None else out
    with output.progress() as progress:
        result = run_audit(
            model,
            corpus=corpus,
            seq_len=seq_len,
            samples=samples,
            threshold=threshold,
            device=device,
            dtype=dtype,
            seed=seed,
            bos=bos,
            batch_size=batch_size,
            revision=revision,
            trust_remote_code=trust_remote_code,
            cache=cache,
            certificate=certificate,
            causes=causes,
            out=folder,
            overwrite=overwrite,
            progress=progress,
        )
    output.print_result(result, as_json)


@command
def measure(
    model: ModelSource,
    *,
    probes: Sequence[str],
    corpus: CorpusSource = "python_source",
    seq_len: SeqLen = 64,
    samples: Samples = 100,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Path | None = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Run chosen probes over a model. With --json: one row of the table a line.

    Args:
        probes: Names from 'sinklab list probes', with settings if need be: entropy:sink_position=2.
        out: Directory for table.parquet and run.json; nothing is written without.

    Examples:
        sinklab measure embedded:softmax --probe sink_rate --probe entropy
        sinklab measure ./my-checkpoint --probe null_mass --corpus random_tokens --out build/null
    """
    quiet_libraries()
    from sinklab.auditing.measure import measure as run_measure

    with output.progress() as progress:
        result = run_measure(
            model,
            probes=probes,
            corpus=corpus,
            seq_len=seq_len,
            samples=samples,
            device=device,
            dtype=dtype,
            seed=seed,
            bos=bos,
            batch_size=batch_size,
            revision=revision,
            trust_remote_code=trust_remote_code,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    output.print_result(result, as_json)


def _folder_name(model: str) -> str:
    """A model's name as one folder name: ``embedded-softmax``, ``org-model``, or the last part of a path."""
    name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
