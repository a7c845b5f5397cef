"""Scores: a reader goes through the texts of a sheet once and every answer is scored on the way."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.errors import MeasurementError
from sinklab.streaming.base import Reader
from sinklab.tasks.base import Question, Sheet

__all__ = ["METRICS", "Scores", "score_sheet"]

METRICS: dict[str, str] = {
    "log_likelihood": "nats per token",
    "choice": "fraction",
    "exact_match": "fraction",
    "margin": "nats per token",
}
"""What is taken of every answer, and its unit; all but the first need an alphabet."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The answers to one question.

    Attributes:
        question: which one.
        values: metric to float64 ``(rows,)``. ``log_likelihood`` is the mean over the answer's tokens; ``choice`` the share
            of them at which the right symbol is likelier than every other of the alphabet; ``margin`` the mean of its
            log-probability less their mean; ``exact_match`` is 1 where greedy decoding gives the whole answer: it does if and
            only if every token of it is the likeliest given the right ones before it, so nothing needs to be generated.
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
    done, found = 0, []
    for question in sheet.questions:
        # Only what stands right before a token of the answer is needed: a policy that recomputes can pass over the rest.
        logits = [reader.read(tokens[:, done : question.start], keep=1)]
        if question.stop - question.start > 1:
            logits.append(reader.read(tokens[:, question.start : question.stop - 1]))
        done = question.stop - 1
        answers = tokens[:, question.start : question.stop]
        found.append(Scores(question, _values(torch.cat(logits, dim=1), answers, question, reader)))
    return found


def _values(logits: Tensor, answers: Tensor, question: Question, reader: Reader) -> dict[str, Tensor]:
    """``logits (rows, length, vocab_size)``, ``answers (rows, length)``."""
    answers = answers.to(logits.device)
    logarithms = torch.log_softmax(logits.float(), dim=-1)
    right = logarithms.gather(-1, answers[..., None])[..., 0]
    if not bool(torch.isfinite(right).all()):
        raise MeasurementError(
            f"{type(reader.model).__name__} under {reader.policy.describe()} gives logits that are not numbers at columns "
            f"{question.start - 1} to {question.stop - 2}; try --dtype float32"
        )
    values = {"log_likelihood": right.double().mean(dim=1)}
    if question.alphabet is not None:
        symbols = question.alphabet.to(logits.device)
        among = logarithms[..., symbols]
        others = among.masked_fill(symbols == answers[..., None], -torch.inf)
        mean_of_others = (among.double().sum(dim=-1) - right) / (len(symbols) - 1)
        values["choice"] = (right > others.amax(dim=-1)).double().mean(dim=1)
        values["margin"] = (right - mean_of_others).mean(dim=1)
        values["exact_match"] = (logits.argmax(dim=-1) == answers).all(dim=1).double()
    return {name: value.cpu() for name, value in values.items()}
