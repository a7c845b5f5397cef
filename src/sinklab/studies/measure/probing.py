"""Probing: the loop over batches on which everything that measures runs, and what a run says of model and checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.anatomy import uses_returned
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.modules import has_all_heads, input_device, placement_of
from sinklab.attention.probe import Probe, named_twice
from sinklab.attention.session import Session, attend
from sinklab.corpora.base import HELD, Encoder
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnknownNameError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import IGNORED, FewWords, cross_entropies, is_two_sided, without_logits
from sinklab.registry import probes as probe_registry
from sinklab.results.environment import in_units, require_memory
from sinklab.results.metric import metrics_of
from sinklab.results.run import Progress, silent
from sinklab.studies.arguments import SEQ_LEN

TOKENS_PER_BATCH = 8192
WORK_OF_A_BATCH = 2**39
"""Multiplications and additions of a forward on a processor, a few seconds: bars move, and logits stay small."""
IDENTITY_TOKENS = 64
WEIGHTS_AT_ONCE = 2**28
"""Bytes of returned weights that a batch is cut down to; one sample may have more."""
UNKNOWN_POSITIONS = 1024
"""What a sample is counted as that does not say how many positions it has: a recording, a picture of its own size."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One pass over the samples: the session with its probes, and the mean loss in nats (``None`` if not taken).

    Attributes:
        losses: mean of each sample ``(samples,)``; NaN where none of its positions is scored.
    """

    session: Session
    loss: float | None
    losses: Tensor | None = None


def require_one_place(model: nn.Module, command: str) -> None:
    """Refuse a model of which this process does not hold every weight, for a command that replaces or copies weights."""
    if not has_all_heads(model) or any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over memory, disk or processes, and {command} needs every weight at hand; load "
            "it on one device, with `device`"
        )


def make_probe(probe: str | Mapping[str, object] | Probe, threshold: float) -> Probe:
    """A probe from its name and settings; one that has a threshold and is given none gets ours."""
    if isinstance(probe, Probe):
        return probe
    settings = probe_registry.read(probe)
    if settings["name"] not in probe_registry:
        name = settings["name"]
        measured = [own for own in probe_registry if name in {metric.name for metric in metrics_of("probes", own)}]
        if measured:
            raise UnknownNameError(f"{name!r} is no probe but a metric; take the probe {measured[0]!r}, which measures it")
    if "threshold" in inspect.signature(probe_registry[settings["name"]]).parameters:
        settings = {"threshold": threshold, **settings}
    return probe_registry.make(settings)


def make_probes(probes: Sequence[str | Mapping[str, object] | Probe], threshold: float) -> list[Probe]:
    """A list of probes from their names and settings, as :func:`make_probe`."""
    if isinstance(probes, (str, Mapping, Probe)) or not isinstance(probes, Iterable):
        raise ConfigurationError(f"`probes` is {probes!r}; expected a list of them")
    made = [make_probe(probe, threshold) for probe in probes]
    twice = named_twice(made)
    if twice is not None:
        count = sum(probe.name == twice for probe in made)
        raise ConfigurationError(
            f"`probes` has {twice!r} {count} times; expected it once, since rows of a table have the name of a "
            "probe and not its settings. Measure once for each setting"
        )
    return made


def require_positions(probes: Iterable[Probe], length: int) -> None:
    """Refuse probes about a sink behind the end of what is measured."""
    for probe in probes:
        position = getattr(probe, "sink_position", None)
        if isinstance(position, int) and position >= length:
            raise ConfigurationError(f"probe {probe.name!r}: sink_position {position} lies behind {length:,} positions")


def uses_bos(encoder: Encoder, bos: str) -> bool:
    """Whether samples start with the beginning-of-sequence token under ``bos``."""
    if bos not in ("auto", "always", "none"):
        raise ConfigurationError(f"`bos` {bos!r} must be auto, always or none")
    if bos == "always" and encoder.bos_token_id is None:
        raise ConfigurationError("`bos` always: this model has no beginning-of-sequence token; use `bos` none")
    return encoder.adds_bos if bos == "auto" else bos == "always"


def require_length(loaded: LoadedModel, drawn: Samples, seq_len: int, default: int = SEQ_LEN) -> None:
    """Refuse a length that samples do not have because the model makes of a picture or a recording what it always makes."""
    if seq_len in (default, drawn.positions) or drawn.tokens is not None:
        return
    from sinklab.models.media import has_own_length

    if has_own_length(loaded):
        have = "positions of their own" if drawn.positions is None else f"{drawn.positions:,} positions each"
        whose = f"{type(loaded.model).__name__}, whose {HELD[drawn.kind]} have {have}"
        raise ConfigurationError(f"`seq_len` {seq_len} has no effect on {whose}; leave it out")


@torch.inference_mode()
def run_probes(
    model: PreTrainedModel,
    samples: Samples | Tensor,
    probes: Sequence[Probe],
    *,
    batch_size: int | None = None,
    loss: bool = False,
    progress: Progress = silent,
    stage: str = "measuring",
) -> Seen:
    """Show every sample to the probes, in batches, and take the loss if asked for.

    Args:
        samples: what the model is shown; token ids ``(samples, seq_len)`` stand for samples of text.
        loss: take it: of the samples' targets, or of next tokens where they have none; where other samples are scored
            (:attr:`~sinklab.corpora.samples.Samples.scored`), in a pass of its own, which the probes do not see.
    """
    samples = as_samples(samples)
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")
    size = batch_size or max(1, tokens_at_once(model) // (samples.positions or UNKNOWN_POSITIONS))
    total, scored, done = 0.0, 0, 0
    losses: list[Tensor] = []
    if loss and samples.scored is not None:
        apart = run_probes(
            model, samples.scored, [], batch_size=batch_size, loss=True, progress=progress, stage=f"{stage}, loss"
        )
        probed = run_probes(model, samples, probes, batch_size=batch_size, progress=progress, stage=stage)
        return dataclasses.replace(probed, loss=apart.loss, losses=apart.losses)
    if uses_returned(model):
        size, stage = _room_for_weights(model, samples, batch_size, size, stage)
    progress(stage, 0, len(samples))
    with without_logits(model) if loss else nullcontext() as head, looking_at(model, probes) as session:
        for batch in samples.batches(size):
            output = model(**forward_arguments(model, batch, full_logits=loss))
            if loss:
                logits, targets = scored_pairs(output.logits, batch)
                each, counts = cross_entropies(logits, targets, head), (targets != IGNORED)
                total += each.sum().item()
                scored += int(counts.sum())
                losses.append((each.sum(1).cpu() / counts.sum(1).cpu()).double())
                del logits
            del output  # of a large vocabulary the largest tensor there is, which the next forward must not find still there
            progress(stage, done := done + len(batch), len(samples))
    return Seen(session, total / scored if scored else None, torch.cat(losses) if scored else None)


def tokens_at_once(model: nn.Module) -> int:
    """Tokens of a batch: as many as a few seconds of a processor are enough for, at most :data:`TOKENS_PER_BATCH`."""
    if input_device(model).type != "cpu":
        return TOKENS_PER_BATCH
    weights = sum(parameter.numel() for parameter in model.parameters())
    return max(1, min(TOKENS_PER_BATCH, WORK_OF_A_BATCH // (2 * max(weights, 1))))


@torch.inference_mode()
def sample_losses(model: PreTrainedModel, samples: Samples, few: FewWords | None = None) -> Tensor:
    """The loss of every scored position of every sample in nats, float32 ``(samples, positions)``; NaN where none is taken.

    With ``few``, which was made of as many samples as one forward takes, by these words.
    """
    size = max(1, tokens_at_once(model) // (samples.positions or UNKNOWN_POSITIONS))
    losses = []
    with without_logits(model) as head:
        for batch in samples.batches(size):
            logits, targets = scored_pairs(model(**forward_arguments(model, batch, full_logits=True)).logits, batch)
            losses.append(cross_entropies(logits, targets, few or head).cpu().masked_fill(targets.cpu() == IGNORED, torch.nan))
    return torch.cat(losses)


def looking_at(model: PreTrainedModel, probes: Sequence[Probe] = ()) -> AbstractContextManager[Session]:
    """A session on the model; of the second tier (:mod:`sinklab.attention.returned`) if its attention is its own code."""
    if not uses_returned(model):
        return attend(model, probes)
    from sinklab.attention.returned import attend_returned

    return attend_returned(model, probes)


def not_measured(model: PreTrainedModel) -> dict[str, str]:
    """Registered probes that the tier of a model does not serve, each with what it reads; none on the attention interface."""
    if not uses_returned(model):
        return {}
    from sinklab.attention.returned import unavailable

    return {name: words for name in probe_registry if (words := unavailable(probe_registry[name]))}


def _room_for_weights(
    model: PreTrainedModel, samples: Samples, batch_size: int | None, size: int, stage: str
) -> tuple[int, str]:
    """Samples of a batch whose weights a model can return at once, and the stage with the memory that they take."""
    from sinklab.attention.returned import bytes_of_weights

    positions = samples.positions or UNKNOWN_POSITIONS
    one = bytes_of_weights(model, 1, positions)
    size = min(len(samples), batch_size or max(1, min(size, WEIGHTS_AT_ONCE // one)))
    require_memory(size * one, f"the weights that {type(model).__name__} returns of {size} samples of {positions} positions")
    return size, f"{stage} (second tier: {in_units(size * one)} of weights at a time)"


def as_samples(samples: Samples | Tensor | Mapping[str, Tensor]) -> Samples:
    """The samples; token ids ``(samples, seq_len)``, or what a tokenizer returns, as samples of text."""
    if isinstance(samples, Tensor):
        samples = Samples.of_tokens(samples)
    elif isinstance(samples, Mapping) and isinstance(samples.get("input_ids"), Tensor):
        samples = Samples(dict(samples))
    elif not isinstance(samples, Samples):
        raise ConfigurationError(
            "samples of your own are token ids (samples, seq_len), what a tokenizer returns with return_tensors='pt', or a "
            f"sinklab.corpora.samples.Samples, got {type(samples).__name__}; texts of a file are read with `corpus`"
        )
    for name, tensor in samples.arguments.items():
        if not tensor.numel():
            what = "token" if name == "input_ids" else "number"
            raise InputError(f"samples of shape {tuple(tensor.shape)} hold no {what}; give at least one")
    return samples


def scored_pairs(logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Logits ``(samples, positions, classes)`` and the targets ``(samples, positions)`` that they are compared with.

    Of padded texts the next tokens are those behind a token: ``IGNORED`` elsewhere.
    """
    if samples.targets is None:
        assert samples.tokens is not None, "only a text has next tokens"
        mask, next_tokens = samples.arguments.get("attention_mask"), samples.tokens[:, 1:]
        if mask is not None and mask.shape == samples.tokens.shape:
            padding = ~(mask[:, 1:].bool() & mask[:, :-1].bool())
            next_tokens = next_tokens.masked_fill(padding.to(next_tokens.device), IGNORED)
        return logits[:, :-1], next_tokens
    return (logits[:, None], samples.targets[:, None]) if samples.targets.ndim == 1 else (logits, samples.targets)


@torch.inference_mode()
def check_identity(model: PreTrainedModel, samples: Samples | Tensor) -> dict[str, int]:
    """Prove on the first sample (of a text, its start) that a session changes no bit of the output; what was compared."""
    first = as_samples(samples).take(slice(0, 1))
    if first.kind == "text":
        first = Samples({name: tensor[:, :IDENTITY_TOKENS] for name, tensor in first.arguments.items()})
    arguments = forward_arguments(model, first, full_logits=True)
    plain = [tensor for tensor in _tensors(model(**arguments))]
    with looking_at(model):
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
    return {"outputs_found_bit_identical": len(plain), "tokens_of_identity_check": first.positions or 0}


def labelled(session: Session, loaded: LoadedModel, **constants: object) -> pd.DataFrame:
    """The session's table with the coordinates of the run filled in."""
    return session.table(model=loaded.name, revision=loaded.revision, operation=loaded.operation, **constants)


def model_facts(loaded: LoadedModel, session: Session) -> dict[str, object]:
    """What the model is, for ``run.json``."""
    config = loaded.model.config.get_text_config()
    return {
        "name": loaded.name,
        "class": type(loaded.model).__name__,
        "revision": loaded.revision,
        "operation": loaded.operation,
        "placement": placement_of(loaded.model),
        "attn_implementation": loaded.model.config._attn_implementation,
        "parameters": loaded.num_parameters,
        "num_layers": getattr(config, "num_hidden_layers", None),
        "num_heads": getattr(config, "num_attention_heads", None),
        "attention_modules": [{"module": s.module, "layer": s.layer, "kind": s.kind} for s in session.sites],
        "off_seam_modules": session.off_seam,
        "tier": session.tier,
    }


def checks(session: Session, identity: dict[str, int]) -> dict[str, object]:
    """What the measurement proved of itself, counted; whatever failed has raised."""
    return {**identity, "attention_modules_seen": len(session.calls), **session.checks}


def forward_arguments(model: PreTrainedModel, samples: Samples, *, full_logits: bool) -> dict[str, object]:
    """Arguments of a model's forward for some samples, without a cache, and with logits of the last token alone if these do."""
    known = inspect.signature(model.forward).parameters
    missing = [name for name in samples.arguments if name not in known]
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not read {' and '.join(missing)} ({samples.kind}); measure it from Python, with "
            "attend(model, probes=[...]) round a call on its own inputs"
        )
    arguments = lean_arguments(model, samples.on(input_device(model), model.dtype), logits=full_logits)
    if is_two_sided(model) and "input_ids" in arguments and "decoder_input_ids" not in arguments:
        raise InputError(
            f"{type(model).__name__} reads a source and a target, and the samples have no decoder_input_ids; draw_samples "
            "makes them of pairs, and of any text"
        )
    return arguments


def _tensors(output: object) -> Iterator[Tensor]:
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
