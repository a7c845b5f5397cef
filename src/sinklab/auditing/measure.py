"""measure(): some probes, one model, one corpus, one table; also the loop over batches that the audit runs on."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.probe import Probe
from sinklab.attention.session import Session, attend
from sinklab.auditing.output import check_free, environment, new_run_id, whole_folder
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus, Encoder, hash_tokens
from sinklab.errors import ConfigurationError, MeasurementError, UnsupportedModelError
from sinklab.losses import cross_entropies
from sinklab.models.loading import LoadedModel, load_model, wrap_model
from sinklab.registry import probes as probe_registry
from sinklab.results.metric import definitions
from sinklab.results.table import write_json, write_table

__all__ = ["MeasureResult", "Progress", "adds_bos", "is_causal_lm", "measure", "opened", "run_probes", "uses_bos"]

Progress = Callable[[str, int, int], None]
"""Called with the stage, the samples done and the samples in all."""

TOKENS_PER_BATCH = 8192
IDENTITY_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class MeasureResult:
    """What :func:`measure` gives: the long table, the run record, and the directory they were written to, if any."""

    table: pd.DataFrame
    run: dict[str, Any]
    folder: Path | None


@dataclasses.dataclass(frozen=True)
class Seen:
    """One pass over the samples: the session with its probes, and the mean next-token loss in nats (``None`` if not taken)."""

    session: Session
    loss: float | None


def measure(
    model: str | LoadedModel | PreTrainedModel,
    *,
    probes: Sequence[str | Probe],
    corpus: str | Corpus = "python_source",
    seq_len: int = 64,
    samples: int = 100,
    threshold: float = 0.3,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    bos: str = "auto",
    batch_size: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> MeasureResult:
    """Run some probes over samples of a corpus.

    Args:
        model: a name for :func:`sinklab.load_model`, or a model in memory.
        probes: registered names (``sinklab list probes``), or probes made by hand.
        corpus: a registered name, the path of a text file, or a corpus.
        seq_len, samples: tokens per sample and number of samples.
        threshold: of the sink rate, for probes that have one.
        bos: ``auto`` (as the tokenizer does by itself), ``always`` or ``none``.
        batch_size: samples per forward; by default as many as make 8,192 tokens.
        out: directory for ``table.parquet`` and ``run.json``.
        progress: told about every batch.

    Raises:
        SinklabError: see the errors of loading, corpora and sessions.
    """
    if out is not None:
        check_free(out, overwrite)
    if not probes:
        raise ConfigurationError(f"name at least one probe; known: {', '.join(probe_registry)}")
    chosen = [make_probe(probe, threshold) for probe in probes]
    loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    started = time.time()
    text = resolve_corpus(corpus)
    with_bos = uses_bos(loaded.encoder, bos)
    tokens = text.sample(loaded.encoder, seq_len=seq_len, samples=samples, seed=seed, bos=with_bos)
    identity = check_identity(loaded.model, tokens)
    seen = run_probes(loaded.model, tokens, chosen, batch_size=batch_size, progress=progress, stage=text.name)
    run_id = new_run_id()
    table = labelled(seen.session, loaded, run_id=run_id, corpus=text.name, bos=int(with_bos), seed=seed)
    run = {
        "run_id": run_id,
        "kind": "measure",
        "model": model_facts(loaded, seen.session),
        "config": {
            "corpus": text.name,
            "seq_len": seq_len,
            "samples": samples,
            "threshold": threshold,
            "seed": seed,
            "bos": bos,
            "probes": [probe.name for probe in chosen],
        },
        "corpus": {"name": text.name, **dataclasses.asdict(text.identity)},
        "token_sha256": hash_tokens(tokens),
        "definitions": definitions({probe.name: probe.metrics for probe in chosen}),
        "checks": checks(seen.session, identity),
        "calls": dict(seen.session.calls),
        **environment(loaded),
        "wall_seconds": round(time.time() - started, 3),
    }
    if out is not None:
        with whole_folder(out) as folder:
            write_table(table, folder / "table.parquet")
            write_json(run, folder / "run.json")
    return MeasureResult(table, run, out)


def opened(model: str | LoadedModel | PreTrainedModel, **options: Any) -> LoadedModel:
    """The model, loaded if it was named."""
    if isinstance(model, str):
        return load_model(model, **options)
    return model if isinstance(model, LoadedModel) else wrap_model(model)


def make_probe(probe: str | Probe, threshold: float) -> Probe:
    """A probe from its name; those with a threshold get ours."""
    if isinstance(probe, Probe):
        return probe
    settings = probe_registry.read(probe)
    if "threshold" in inspect.signature(probe_registry[settings["name"]]).parameters:
        settings = {"threshold": threshold, **settings}
    return probe_registry.make(settings)  # type: ignore[no-any-return]


def adds_bos(encoder: Encoder) -> bool:
    """Whether the tokenizer puts the beginning-of-sequence token in front by itself."""
    if encoder.tokenizer is None or encoder.bos_token_id is None:
        return False
    ids = encoder.tokenizer("a", verbose=False)["input_ids"]
    return bool(ids) and ids[0] == encoder.bos_token_id


def uses_bos(encoder: Encoder, bos: str) -> bool:
    """Whether samples start with the beginning-of-sequence token under ``--bos``.

    Raises:
        ConfigurationError: not one of auto, always, none; or always without such a token.
    """
    if bos not in ("auto", "always", "none"):
        raise ConfigurationError(f"--bos {bos!r} must be auto, always or none")
    if bos == "always" and encoder.bos_token_id is None:
        raise ConfigurationError("--bos always: this model has no beginning-of-sequence token; use --bos none")
    return adds_bos(encoder) if bos == "auto" else bos == "always"


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether the model predicts the next token, so that a loss can be taken."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


@torch.inference_mode()
def run_probes(
    model: PreTrainedModel,
    tokens: Tensor,
    probes: Sequence[Probe],
    *,
    batch_size: int | None = None,
    loss: bool = False,
    progress: Progress | None = None,
    stage: str = "measuring",
) -> Seen:
    """Show every sample to the probes, in batches, and take the next-token loss if asked for.

    Args:
        tokens: int64 ``(samples, seq_len)``.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"--batch-size must be at least 1, got {batch_size}")
    size = batch_size or max(1, TOKENS_PER_BATCH // tokens.shape[1])
    total = 0.0
    with attend(model, probes) as session:
        for start in range(0, len(tokens), size):
            batch = tokens[start : start + size].to(model.device)
            output = model(**_arguments(model, batch, full_logits=loss))
            if loss:
                total += cross_entropies(output.logits[:, :-1], batch[:, 1:]).sum().item()
            if progress is not None:
                progress(stage, min(start + size, len(tokens)), len(tokens))
    predicted = tokens.shape[0] * (tokens.shape[1] - 1)
    return Seen(session, total / predicted if loss else None)


@torch.inference_mode()
def check_identity(model: PreTrainedModel, tokens: Tensor) -> dict[str, int]:
    """Prove on the start of the first sample that a session does not change one bit of the model's output.

    Returns:
        What was compared, for the run record.

    Raises:
        MeasurementError: an output differs, or there is none to compare.
    """
    batch = tokens[:1, :IDENTITY_TOKENS].to(model.device)
    arguments = _arguments(model, batch, full_logits=True)
    plain = [tensor for tensor in _tensors(model(**arguments))]
    with attend(model):
        seen = [tensor for tensor in _tensors(model(**arguments))]
    if not plain:
        raise MeasurementError(
            f"{type(model).__name__} returns no tensors, so nothing proves that measuring leaves it unchanged"
        )
    if not all(torch.equal(left, right) for left, right in zip(plain, seen, strict=True)):
        raise MeasurementError(
            f"{type(model).__name__} gives other outputs while it is being looked at, so nothing is measured; is its "
            "computation deterministic? (dropout, a mixture of experts with random routing)"
        )
    return {"outputs_found_bit_identical": len(plain), "tokens_of_identity_check": batch.shape[1]}


def labelled(session: Session, loaded: LoadedModel, **constants: Any) -> pd.DataFrame:
    """The session's table with the coordinates of the run filled in."""
    table = session.table()
    for column, value in {
        "model": loaded.name,
        "revision": loaded.revision,
        "operation": loaded.operation,
        **constants,
    }.items():
        table[column] = pd.Series(value, index=table.index, dtype=table[column].dtype)
    return table


def model_facts(loaded: LoadedModel, session: Session) -> dict[str, Any]:
    """What the model is, for ``run.json``."""
    config = loaded.model.config.get_text_config()
    return {
        "name": loaded.name,
        "class": type(loaded.model).__name__,
        "revision": loaded.revision,
        "operation": loaded.operation,
        "attn_implementation": loaded.model.config._attn_implementation,
        "parameters": loaded.num_parameters,
        "num_layers": getattr(config, "num_hidden_layers", None),
        "num_heads": getattr(config, "num_attention_heads", None),
        "attention_modules": [{"module": s.module, "layer": s.layer, "kind": s.kind} for s in session.sites],
        "off_seam_modules": session.off_seam,
    }


def checks(session: Session, identity: dict[str, int]) -> dict[str, Any]:
    """What the measurement proved of itself, counted; whatever failed has raised."""
    return {**identity, "attention_modules_seen": len(session.calls), **session.checks}


def _arguments(model: PreTrainedModel, batch: Tensor, *, full_logits: bool) -> dict[str, Any]:
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not read tokens; measure it from Python, with attend(model, probes=[...]) round "
            "a call on its own inputs"
        )
    arguments: dict[str, Any] = {"input_ids": batch}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known and not full_logits:
        arguments["logits_to_keep"] = 1
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = batch
    return arguments


def _tensors(output: Any) -> Iterator[Tensor]:
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
