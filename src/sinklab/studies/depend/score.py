"""Scores: a reader goes through the texts of a sheet once and every answer is scored on the way."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.errors import MeasurementError
from sinklab.results.metric import Metric
from sinklab.streaming.base import Reader
from sinklab.tasks.base import Question, Sheet

__all__ = ["METRICS", "Scores", "score_sheet"]

METRICS = {
    metric.name: metric
    for metric in (
        Metric("log_likelihood", "nats per token", "Mean log-probability of the tokens of the answer."),
        Metric(
            "choice",
            "fraction",
            "Share of the tokens of the answer at which the right symbol is likelier than every other of the alphabet.",
            range=(0.0, 1.0),
        ),
        Metric(
            "exact_match",
            "fraction",
            "1 where greedy decoding gives the whole answer, that is, where every token of it is the likeliest given the right "
            "ones before it, so that nothing needs to be generated.",
            range=(0.0, 1.0),
        ),
        Metric(
            "margin",
            "nats per token",
            "Mean of the log-probability of the right symbol less the mean of those of the other symbols of the alphabet.",
        ),
    )
}
"""What is taken of every answer, by name; all but the first need an alphabet."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The answers to one question.

    Attributes:
        question: which one.
        values: name in :data:`METRICS` to float64 ``(rows,)``.
    """

    question: Question
    values: dict[str, Tensor]


def score_sheet(reader: Reader, sheet: Sheet) -> list[Scores]:
    """Read all rows of a sheet, from a new beginning, and score its questions in order.

    Raises:
        MeasurementError: logits that are not numbers.
    """
    reader.reset()
    tokens = sheet.tokens
    read, scores = 0, []
    for question in sheet.questions:
        # Only what stands right before a token of the answer is needed: a policy that recomputes can pass over the rest.
        logits = [reader.read(tokens[:, read : question.start], keep=1)]
        if question.stop - question.start > 1:
            logits.append(reader.read(tokens[:, question.start : question.stop - 1]))
        read = question.stop - 1
        answers = tokens[:, question.start : question.stop]
        scores.append(Scores(question, _values(torch.cat(logits, dim=1), answers, question, reader)))
    return scores


def _values(logits: Tensor, answers: Tensor, question: Question, reader: Reader) -> dict[str, Tensor]:
    """``logits (rows, length, vocab_size)``, ``answers (rows, length)``."""
    answers = answers.to(logits.device)
    logarithms = torch.log_softmax(logits.float(), dim=-1)
    right = logarithms.gather(-1, answers[..., None])[..., 0]
    if not bool(torch.isfinite(right).all()):
        raise MeasurementError(
            f"{type(reader.model).__name__} under {reader.policy.describe()} gives logits that are not numbers at columns "
            f"{question.start - 1} to {question.stop - 2}; try `dtype` float32"
        )
    values = {"log_likelihood": right.double().mean(dim=1)}
    if question.alphabet is not None:
        symbols = question.alphabet.to(logits.device)
        symbols = (
            symbols.expand(*logarithms.shape[:2], -1)
            if symbols.ndim == 1
            else symbols[:, None].expand(-1, logarithms.shape[1], -1)
        )
        among = logarithms.gather(-1, symbols)
        others = among.masked_fill(symbols == answers[..., None], -torch.inf)
        mean_of_others = (among.double().sum(dim=-1) - right) / (symbols.shape[-1] - 1)
        values["choice"] = (right > others.amax(dim=-1)).double().mean(dim=1)
        values["exact_match"] = (logits.argmax(dim=-1) == answers).all(dim=1).double()
        values["margin"] = (right - mean_of_others).mean(dim=1)
    return {name: value.cpu() for name, value in values.items()}
