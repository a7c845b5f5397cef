"""The contract of tasks: texts that a seed decides, of one layout, whose answers stand and can be found where they say."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import get_args

import torch

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import InputError, SinklabError
from sinklab.registry import tasks
from sinklab.tasks.base import Axis, Metric, Sheet, Task
from sinklab.testing._checks import Checks, first_line, is_frozen

__all__ = ["check_task"]


def check_task(
    task: Task | type[Task], *, encoder: Encoder | None = None, budget: int = 96, rows: int = 4, **settings: object
) -> None:
    """Check that a task keeps the contract of :class:`~sinklab.tasks.base.Task`.

    Args:
        task: the task, or its class with ``settings``.
        encoder: tokenizer to make texts for; that of the embedded models by default.
        budget, rows: sizes at which it is tried; the task must ask something that a cache of ``budget`` tokens can answer.

    Raises:
        ContractError: with the name of the check, what was expected and what was found.
    """
    cls = task if isinstance(task, type) else type(task)
    check = Checks(f"task {getattr(cls, 'name', cls.__name__)!r}")
    made = _settings(check, cls(**settings) if isinstance(task, type) else task)
    encoder = _embedded() if encoder is None else encoder
    sheets = list(made.sheets(encoder, budget=budget, rows=rows, seed=0, bos=True))
    again = list(made.sheets(encoder, budget=budget, rows=rows, seed=0, bos=True))
    other = list(made.sheets(encoder, budget=budget, rows=rows, seed=1, bos=True))
    check.require(len(sheets) > 0, "sheets", "at least one sheet", "none")
    same = len(sheets) == len(again) and all(torch.equal(a.tokens, b.tokens) for a, b in zip(sheets, again, strict=True))
    check.require(same, "seed", "the same texts from the same seed", "others")
    differ = any(
        a.tokens.shape != b.tokens.shape or not torch.equal(a.tokens, b.tokens) for a, b in zip(sheets, other, strict=False)
    )
    check.require(differ, "seed", "other texts from another seed", "the same")
    for sheet in sheets:
        _check_sheet(check, made, sheet, encoder, rows)
    places = [sheet.at for sheet in sheets]
    check.require(all(a < b for a, b in pairwise(places)), "places", "sheets in ascending order of their place", places)
    useful = [
        question
        for sheet in sheets
        for question in sheet.questions
        if question.start >= budget + 2 and question.distance <= budget
    ]
    check.require(len(useful) > 0, "budget", f"a question behind {budget} tokens whose fact a window of {budget} holds", "none")
    without = next(iter(made.sheets(encoder, budget=budget, rows=rows, seed=0, bos=False))).tokens[:, 0]
    check.require(encoder.bos_token_id not in without.tolist(), "bos", "no token in front with bos=False", "the BOS token")
    _check_no_tokenizer(check, made, budget, rows)


def _settings(check: Checks, task: Task) -> Task:
    cls = type(task)
    check.require(is_frozen(cls), "declaration", "a frozen dataclass", cls)
    check.require(task.metric in get_args(Metric), "declaration", f"a metric among {', '.join(get_args(Metric))}", task.metric)
    check.require(task.axis in get_args(Axis), "declaration", f"an axis among {', '.join(get_args(Axis))}", task.axis)
    check.require(task.minimal_effect > 0, "declaration", "a minimal effect above 0", task.minimal_effect)
    known = task.chance is not None if task.metric == "choice" else task.axis == "context"
    check.require(known, "declaration", "a chance for choices, and the axis 'context' for log-likelihoods", task.chance)
    identity = task.identity
    complete = isinstance(identity, Identity) and all(dataclasses.astuple(identity))
    check.require(complete, "identity", "source, revision and licence", identity)
    try:
        rebuilt = tasks.make(task.settings)
    except SinklabError as error:
        check.require(False, "settings", "a task that its settings make again", first_line(error))
    check.require(rebuilt == task, "settings", str(task), rebuilt)
    return task


def _check_sheet(check: Checks, task: Task, sheet: Sheet, encoder: Encoder, rows: int) -> None:
    tokens = sheet.tokens
    check.require(tokens.dtype == torch.int64 and tokens.ndim == 2, "tokens", "int64 (rows, length)", tokens.dtype)
    check.require(len(tokens) == rows, "tokens", f"{rows} rows", len(tokens))
    in_range = int(tokens.min()) >= 0 and int(tokens.max()) < encoder.vocab_size
    check.require(in_range, "tokens", f"ids below {encoder.vocab_size}", int(tokens.max()))
    check.require(set(tokens[:, 0].tolist()) == {encoder.bos_token_id}, "bos", "the BOS token in front", "another")
    check.require(len(sheet.questions) > 0, "questions", "at least one in each sheet", "none")
    done = 1
    for question in sheet.questions:
        span = (question.start, question.stop)
        check.require(done <= question.start < question.stop <= tokens.shape[1], "questions", "columns in order", span)
        done = question.stop
        if question.alphabet is None:
            check.require(task.metric == "log_likelihood", "alphabet", "one for every choice", "none")
            continue
        answers = tokens[:, question.start : question.stop]
        symbols = question.alphabet.expand(rows, -1)
        drawn = bool((answers[:, :, None] == symbols[:, None]).any(dim=-1).all())
        check.require(drawn, "alphabet", "answers among its symbols", answers.unique().tolist())
        for row in symbols:
            chance = 1 / len(row.unique())
            check.require(abs(chance - float(task.chance or 0)) < 1e-9, "chance", f"{chance:g} of {len(row)}", task.chance)
        if question.distance:
            _check_fact(check, tokens, question.start, question.stop, question.distance)


def _check_fact(check: Checks, tokens: torch.Tensor, start: int, stop: int, distance: int) -> None:
    """The answer must stand in what a cache of ``distance`` tokens holds, and nowhere behind the column it says."""
    begin, length = stop - 2 - distance, stop - start
    check.require(begin >= 0 and begin + length <= start, "distance", "a fact that ends before its question", distance)
    windows = tokens[:, begin:start].unfold(1, length, 1)
    repeated = (windows == tokens[:, None, start:stop]).all(dim=-1).any(dim=-1)
    check.require(bool(repeated.all()), "distance", f"the answer within the {distance} tokens before the query", "another text")


def _check_no_tokenizer(check: Checks, task: Task, budget: int, rows: int) -> None:
    try:
        list(task.sheets(Encoder(vocab_size=64, bos_token_id=0), budget=budget, rows=rows, seed=0, bos=True))
    except InputError as error:
        check.require(task.name in str(error), "no tokenizer", "a message that names the task", first_line(error))


def _embedded() -> Encoder:
    from sinklab.models.loading import load_model

    return load_model("embedded:softmax", device="cpu").encoder
