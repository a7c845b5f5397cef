"""Probing: the loop over batches on which everything that measures runs, and what a run says of model and checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.operation import Operation
from sinklab.attention.probe import Probe
from sinklab.attention.session import Session, attend
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnsupportedModelError
from sinklab.models.loading import LoadedModel, load_model, wrap_model
from sinklab.models.losses import cross_entropies
from sinklab.registry import probes as probe_registry
from sinklab.results.run import Progress, silent

__all__ = [
    "Seen",
    "check_identity",
    "checks",
    "classes_of",
    "is_causal_lm",
    "labelled",
    "make_probe",
    "model_facts",
    "opened",
    "run_probes",
    "uses_bos",
]

TOKENS_PER_BATCH = 8192
IDENTITY_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Seen:
    """One pass over the samples: the session with its probes, and the mean next-token loss in nats (``None`` if not taken)."""

    session: Session
    loss: float | None


def opened(model: str | LoadedModel | PreTrainedModel, **options: Any) -> LoadedModel:
    """The model, loaded if it was named."""
    if isinstance(model, str):
        return load_model(model, **options)
    return model if isinstance(model, LoadedModel) else wrap_model(model)


def make_probe(probe: str | Mapping[str, object] | Probe, threshold: float) -> Probe:
    """A probe from its name and settings; one that has a threshold and is given none gets ours."""
    if isinstance(probe, Probe):
        return probe
    settings = probe_registry.read(probe)
    if "threshold" in inspect.signature(probe_registry[settings["name"]]).parameters:
        settings = {"threshold": threshold, **settings}
    return probe_registry.make(settings)


def uses_bos(encoder: Encoder, bos: str) -> bool:
    """Whether samples start with the beginning-of-sequence token under ``bos``.

    Raises:
        ConfigurationError: not one of auto, always, none; or always without such a token.
    """
    if bos not in ("auto", "always", "none"):
        raise ConfigurationError(f"`bos` {bos!r} must be auto, always or none")
    if bos == "always" and encoder.bos_token_id is None:
        raise ConfigurationError("`bos` always: this model has no beginning-of-sequence token; use `bos` none")
    return encoder.adds_bos if bos == "auto" else bos == "always"


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
    progress: Progress = silent,
    stage: str = "measuring",
) -> Seen:
    """Show every sample to the probes, in batches, and take the next-token loss if asked for.

    Args:
        tokens: int64 ``(samples, seq_len)``.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")
    if not tokens.numel():
        raise InputError(f"samples of shape {tuple(tokens.shape)} hold no token; give at least one")
    size = batch_size or max(1, TOKENS_PER_BATCH // tokens.shape[1])
    total = 0.0
    with attend(model, probes) as session:
        for start in range(0, len(tokens), size):
            batch = tokens[start : start + size].to(model.device)
            output = model(**_arguments(model, batch, full_logits=loss))
            if loss:
                total += cross_entropies(output.logits[:, :-1], batch[:, 1:]).sum().item()
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
        observed = [tensor for tensor in _tensors(model(**arguments))]
    if not plain:
        raise MeasurementError(
            f"{type(model).__name__} returns no tensors, so nothing proves that measuring leaves it unchanged"
        )
    if not all(torch.equal(left, right) for left, right in zip(plain, observed, strict=True)):
        raise MeasurementError(
            f"{type(model).__name__} gives other outputs while it is being looked at, so nothing is measured; is its "
            "computation deterministic? (dropout, a mixture of experts with random routing)"
        )
    return {"outputs_found_bit_identical": len(plain), "tokens_of_identity_check": batch.shape[1]}


def labelled(session: Session, loaded: LoadedModel, **constants: object) -> pd.DataFrame:
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


def model_facts(loaded: LoadedModel, session: Session) -> dict[str, object]:
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


def classes_of(model: nn.Module) -> list[type]:
    """Classes of sinklab and of its plug-ins that a model is made of: what numbers of it depend on besides its weights."""
    parts = {type(value) for module in model.modules() for value in (module, *vars(module).values())}
    known = {cls for cls in parts if cls.__module__.startswith("sinklab.") or issubclass(cls, Operation)}
    return sorted(known, key=lambda cls: (cls.__module__, cls.__qualname__))


def checks(session: Session, identity: dict[str, int]) -> dict[str, object]:
    """What the measurement proved of itself, counted; whatever failed has raised."""
    return {**identity, "attention_modules_seen": len(session.calls), **session.checks}


def _arguments(model: PreTrainedModel, batch: Tensor, *, full_logits: bool) -> dict[str, object]:
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not read tokens; measure it from Python, with attend(model, probes=[...]) round "
            "a call on its own inputs"
        )
    arguments: dict[str, object] = {"input_ids": batch}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known and not full_logits:
        arguments["logits_to_keep"] = 1
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = batch
    return arguments


def _tensors(output: object) -> Iterator[Tensor]:
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
