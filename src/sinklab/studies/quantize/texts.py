"""Calibration and measured samples: apart from each other, and no two of them with a run of tokens in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import torch

from sinklab.corpora._reading import RUN, token_runs
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.losses import IGNORED
from sinklab.results.blocks import counted

LEAST = 4
"""Samples that are measured at least."""

TRIES = (1, 2, 4)
"""How many times the samples that are wanted are drawn until enough of them are distinct."""


def two_sets(draw: Callable[[int], Samples], calibration: int, samples: int) -> tuple[Samples, Samples]:
    """Samples to take ranges from and samples to measure on."""
    require_counts(calibration, samples)
    needed = calibration + samples
    for times in TRIES:
        try:
            drawn = draw(times * needed)
        except InputError:
            if times == TRIES[0]:
                raise
            break  # there is no more
        rows = distinct(drawn)
        if len(rows) >= needed:
            return drawn.take(torch.tensor(rows[:calibration])), drawn.take(torch.tensor(rows[calibration:needed]))
    raise InputError(
        f"the corpus gives {len(rows)} samples of which no two have {_run(drawn)} in common, and {needed} are wanted for "
        "calibration and measurement; lower `samples` or `calibration`, or give a longer corpus"
    )


def divided(samples: Samples, calibration: int) -> tuple[Samples, Samples]:
    """Samples that were given, divided: the first are for calibration."""
    require_counts(calibration, len(samples) - calibration)
    mask = samples.arguments.get("attention_mask")
    # Tokens are left whole by their place in a row: there the sink of one text is a token of padding of another.
    if samples.kind == "text" and mask is not None and mask.ndim == 2 and not bool(mask[:, 0].all()):
        raise InputError(
            f"{int((mask[:, 0] == 0).sum())} of the {len(samples)} samples of `inputs` are padded on the left, and tokens are "
            "left whole by their place in a row; pad them on the right, or give texts of one length"
        )
    alike = len(samples) - len(distinct(samples))
    if alike:
        raise InputError(
            f"of the {len(samples)} samples of `inputs` {alike} have {_run(samples)} in common with one before them, and what "
            "is measured must not be what ranges are taken from; leave these out"
        )
    return samples.take(slice(0, calibration)), samples.take(slice(calibration, len(samples)))


def require_counts(calibration: int, samples: int) -> None:
    """Refuse too few of either."""
    if calibration < 1 or samples < LEAST:
        raise ConfigurationError(
            f"`calibration` must be at least 1 and `samples` at least {LEAST}, got {calibration} and {samples}"
        )


def _run(samples: Samples) -> str:
    """What two of these samples must not have in common, in words."""
    return "all numbers" if samples.tokens is None else f"{counted(_run_of(samples.tokens.shape[-1]), 'token')} in a row"


def _run_of(tokens: int) -> int:
    """Tokens in a row that two samples of so many may not share. A common first token, such as BOS, makes no two alike."""
    return min(RUN, max(1, tokens - 1))


def distinct(samples: Samples) -> list[int]:
    """Numbers of the samples that have nothing in common with one before them: a run of tokens, or all their numbers."""
    numbers: list[int] = []
    earlier_marks: set[Hashable] = set()
    for number in range(len(samples)):
        marks = _marks(samples.take(slice(number, number + 1)))
        if not marks & earlier_marks:
            numbers.append(number)
            earlier_marks |= marks
    return numbers


def _marks(sample: Samples) -> set[Hashable]:
    """What another sample may not have: its runs of tokens, those behind masks included; of a picture, all of it."""
    tokens, targets = sample.tokens, sample.targets
    if tokens is None:
        digest = hashlib.sha256()
        for _, tensor in sorted(sample.arguments.items()):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return {digest.digest()}
    if sample.kind == "text" and targets is not None and targets.shape == tokens.shape:
        tokens = torch.where(targets == IGNORED, tokens, targets)
    ids = tokens[0].tolist()
    return set(token_runs(ids, _run_of(len(ids))))
