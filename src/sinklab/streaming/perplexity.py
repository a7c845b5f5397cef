"""Perplexity of long texts under a cache policy: the loss of every token, read in chunks, and how fast tokens are decoded."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.modules import input_device
from sinklab.errors import InputError
from sinklab.models.losses import cross_entropies
from sinklab.policies.base import PolicySpec
from sinklab.results.intervals import LEAST_PARTS, mean_interval
from sinklab.streaming.reader import open_reader

CHUNK = 64
"""Tokens of a row that are read at once."""

LOGITS_AT_ONCE = 2**26
"""Logits that are held at once: 256 MiB in float32."""


def losses(
    model: PreTrainedModel,
    tokens: Tensor,
    policy: PolicySpec,
    *,
    first: int = 1,
    chunk: int = CHUNK,
    quantized: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Losses of tokens in nats: ``-ln p(token | what the policy lets the token before it see)``.

    The text is read in chunks, in memory that does not depend on its length unless the policy's does, and the result is that of
    feeding one token after the other. Perplexity is the exponential of the mean.

    Args:
        model: in evaluation mode.
        tokens: int64 ``(batch, length)``, whole rows without padding.
        policy, quantized: as :func:`~sinklab.streaming.reader.open_reader` has them.
        first: position of the first token that is scored; those before it are only read.
        chunk: most tokens of a row that are read at once; fewer where batch and vocabulary are large.
        progress: called with the tokens that have been read and those to read, rows times columns.

    Returns:
        float32 ``(batch, length - first)`` on the CPU, of the tokens ``first`` to ``length - 1``.

    Raises:
        InputError: no token is left to score.
    """
    batch, length = tokens.shape
    if not 1 <= first < length:
        raise InputError(
            f"of {length:,} tokens those from {first:,} on cannot be scored: a loss needs a token before the one it predicts"
        )
    vocabulary = int(model.config.get_text_config().vocab_size)
    chunk = max(1, min(chunk, LOGITS_AT_ONCE // (batch * vocabulary)))
    report = progress or (lambda done, total: None)
    report(0, batch * (length - 1))
    reader = open_reader(model, policy, chunk=chunk, quantized=quantized)
    parts = []
    for start in range(0, first - 1, chunk):
        stop = min(start + chunk, first - 1)
        reader.pass_over(tokens[:, start:stop])
        report(batch * stop, batch * (length - 1))
    for start in range(first - 1, length - 1, chunk):
        stop = min(start + chunk, length - 1)
        logits = reader.read(tokens[:, start:stop])
        parts.append(cross_entropies(logits, tokens[:, start + 1 : stop + 1]).cpu())
        report(batch * stop, batch * (length - 1))
    return torch.cat(parts, dim=1)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its 95 % interval, in the unit of the values; ``None`` where one part alone was measured."""

    mean: float
    low: float | None
    high: float | None


def unit_means(values: Tensor) -> Tensor:
    """Means of the parts of the text that an interval may take for independent, ``(units,)``; NaN counts as not measured.

    Tokens of one text are correlated, so a row of values ``(batch, length)`` is one part. Fewer than 8 rows are cut into blocks
    of consecutive tokens, which are far less correlated than tokens, but not independent.
    """
    blocks = math.ceil(LEAST_PARTS / len(values))
    parts = [part for row in values for part in row.tensor_split(blocks)]
    means = torch.stack([part.double().nanmean() for part in parts])
    return means[~means.isnan()]


def estimate(values: Tensor) -> Estimate:
    """Mean and 95 % interval (Student's t over :func:`unit_means`) of values ``(batch, length)``; of differences, paired."""
    means = unit_means(values).tolist()
    if not means:
        raise InputError("there is no value to take a mean of")
    if len(means) == 1:
        return Estimate(means[0], None, None)
    mean, half = mean_interval(means)
    return Estimate(mean, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How one row is decoded: one over the median time of so many single-token steps, and the bytes kept at the end."""

    tokens_per_second: float
    steps: int
    bytes_held: int


def decoding(
    model: PreTrainedModel,
    tokens: Tensor,
    policies: Sequence[PolicySpec],
    *,
    steps: int = 128,
    warm_up: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> list[Decoding]:
    """Time single-token steps at the end of a text ``(1, length)``, under several policies by turns: load slows all alike.

    Before the last ``warm_up + steps`` tokens as many are read as a policy holds, or all if it is not bounded; the first
    ``warm_up`` steps are not timed. What is decoded is the text itself, as the time does not depend on what is chosen.
    ``progress`` is called with the steps done and those to do.
    """
    if len(tokens) != 1 or tokens.shape[1] <= warm_up + steps:
        raise InputError(
            f"decoding is timed on one row of more than {warm_up} + {steps} tokens; got {len(tokens)} of {tokens.shape[1]}"
        )
    report = progress or (lambda done, total: None)
    begin, length = tokens.shape[1] - warm_up - steps, tokens.shape[1]
    report(0, length - begin)
    readers = [open_reader(model, policy, chunk=CHUNK) for policy in policies]
    for reader in readers:
        for start in range(max(0, begin - reader.policy.max_held(begin)), begin, CHUNK):
            reader.pass_over(tokens[:, start : min(start + CHUNK, begin)])
            report(0, length - begin)
    times: list[list[float]] = [[] for _ in readers]
    device = input_device(model)
    for position in range(begin, length):
        for reader, own in zip(readers, times, strict=True):
            started = time.perf_counter()
            reader.read(tokens[:, position : position + 1], keep=1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            own.append(time.perf_counter() - started)
        report(position - begin + 1, length - begin)
    return [
        Decoding(1.0 / statistics.median(own[warm_up:]), steps, reader.bytes_held())
        for reader, own in zip(readers, times, strict=True)
    ]
