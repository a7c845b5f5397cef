"""Lines of registers in tokens: a stream in which earlier lines are asked for, and which of their digits are found.

StreamEval of Xiao et al. 2023 (arXiv 2309.17453), made anew, since its data were never released. A line is
``line 417: REGISTER_CONTENT is 5802`` with random digits; a question repeats it up to its content, with ``Recall`` in front.
Digits are single tokens, so that distances are exact under any tokenizer.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError
from sinklab.streaming.base import Reader

__all__ = ["line_stream", "right_digits"]

BEFORE_LABEL, BEFORE_CONTENT, END = "line ", ": REGISTER_CONTENT is ", "\n"
QUESTION = "Recall line "
LABEL, CONTENT = 3, 4
LABELS = 1000
EVERY, QUESTIONS = 10, 2
"""Lines from one question to the next, and questions behind a full cache."""


class Question(NamedTuple):
    """Columns ``[start, stop)`` hold the content; its line is seen by who holds ``distance`` tokens before the last query."""

    start: int
    stop: int
    distance: int


def line_stream(
    encoder: Encoder, back: int, *, budget: int, rows: int, seed: int, bos: bool
) -> tuple[Tensor, list[Question], Tensor]:
    """Streams until two questions have come after ``budget`` tokens: ids ``(rows, length)``, questions, ids of the digits.

    Args:
        back: how many lines back the asked one is.

    Raises:
        InputError: no tokenizer, or one that does not give each digit a token of its own.
        ConfigurationError: there are not so many labels.
    """
    digits = torch.tensor([encoder.encode(str(digit))[-1:] for digit in range(10)])
    if digits.numel() != digits.unique().numel():
        raise InputError("this tokenizer does not give each digit a token of its own")
    digits, generator = digits.flatten(), random.Random(f"line_lookup {seed} {back}")
    labels = [generator.sample(range(LABELS), LABELS) for _ in range(rows)]
    parts, position = list[Tensor](), 0

    def put(columns: Tensor | list[int] | str) -> int:
        nonlocal position
        ids = torch.as_tensor(encoder.encode(columns) if isinstance(columns, str) else columns, dtype=torch.long)
        parts.append(ids.expand(rows, -1))
        position += parts[-1].shape[1]
        return position - parts[-1].shape[1]

    if bos:
        assert encoder.bos_token_id is not None
        put([encoder.bos_token_id])
    written, questions = list[tuple[int, Tensor, Tensor]](), list[Question]()
    while sum(question.start >= budget + 2 for question in questions) < QUESTIONS:
        if len(written) == LABELS:
            raise ConfigurationError(f"{LABELS} labels are used up before a line {back} back is asked behind {budget} tokens")
        number = len(written)
        label = digits[torch.tensor([[int(digit) for digit in f"{row[number]:0{LABEL}d}"] for row in labels])]
        content = digits[torch.tensor([[generator.randrange(10) for _ in range(CONTENT)] for _ in range(rows)])]
        put(BEFORE_LABEL)
        begin = put(label)
        for columns in (BEFORE_CONTENT, content, END):
            put(columns)
        written.append((begin, label, content))
        if len(written) % EVERY == 0 and len(written) > back:
            fact, label, content = written[-1 - back]
            for columns in (QUESTION, label, BEFORE_CONTENT):
                put(columns)
            start = put(content)
            questions.append(Question(start, position, position - 2 - fact))
            put(END)
    return torch.cat(parts, dim=1), questions, digits


def right_digits(reader: Reader, tokens: Tensor, questions: list[Question], digits: Tensor) -> list[Tensor]:
    """For each question the share of digits at which the right one is likelier than the nine others, float64 ``(rows,)``."""
    reader.reset()
    read, shares = 0, []
    for start, stop, _ in questions:
        logits = [reader.read(tokens[:, read:start], keep=1), reader.read(tokens[:, start : stop - 1])]
        read = stop - 1
        logarithms = torch.log_softmax(torch.cat(logits, dim=1).float(), dim=-1)
        answers = tokens[:, start:stop].to(logarithms.device)
        right = logarithms.gather(-1, answers[..., None])[..., 0]
        symbols = digits.to(logarithms.device).expand(*logarithms.shape[:2], -1)
        others = logarithms.gather(-1, symbols).masked_fill(symbols == answers[..., None], -torch.inf)
        shares.append((right > others.amax(dim=-1)).double().mean(dim=1).cpu())
    return shares
