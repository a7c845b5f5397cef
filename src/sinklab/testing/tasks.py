"""The contract of tasks: documents that a seed decides, whose answers stand where they say and can be told apart."""

from __future__ import annotations

import dataclasses
from typing import get_args

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import InputError, SinklabError, first_line
from sinklab.registry import tasks
from sinklab.tasks.base import Axis, Document, Score, Task
from sinklab.testing._checks import Checks, is_frozen


def check_task(
    task: Task | type[Task], *, encoder: Encoder | None = None, budget: int = 96, items: int = 4, **settings: object
) -> None:
    """Check that a task keeps the contract of :class:`~sinklab.tasks.base.Task`.

    Args:
        task: the task, or its class with ``settings``.
        encoder: tokenizer to make texts for; that of the embedded models by default.
        budget, items: sizes at which it is tried; the task must ask something that a cache of ``budget`` tokens can answer.

    Raises:
        ContractError: with the name of the check, what was expected and what was found.
    """
    cls = task if isinstance(task, type) else type(task)
    check = Checks(f"task {getattr(cls, 'name', cls.__name__)!r}")
    made = _settings(check, cls(**settings) if isinstance(task, type) else task)
    if encoder is None:
        from sinklab.models.loading import load_model

        encoder = load_model("embedded:softmax", device="cpu").encoder
    drawn, again, other = (list(made.documents(encoder, budget=budget, items=items, seed=seed)) for seed in (0, 0, 1))
    check.require(len(drawn) > 0, "documents", "at least one", "none")
    check.require(drawn == again, "seed", "the same documents from the same seed", "others")
    check.require(drawn != other, "seed", "other documents from another seed", "the same")
    for document in drawn:
        _check_document(check, made, document)
    for place in {document.place for document in drawn}:
        numbers = {document.item for document in drawn if document.place == place}
        check.require(numbers == set(range(items)), "items", f"every item at place {place}", sorted(numbers))
    useful = any(
        len(encoder.encode(document.context)) >= budget + 2
        and (document.fact is None or len(encoder.encode(document.context[document.fact :] + document.answer)) <= budget)
        for document in drawn
    )
    check.require(useful, "budget", f"a question behind {budget} tokens whose fact a window of {budget} holds", "none")
    try:
        list(made.documents(Encoder(vocab_size=64, bos_token_id=0), budget=budget, items=items, seed=0))
    except InputError as error:
        check.require(made.name in str(error), "no tokenizer", "a message that names the task", first_line(error))


def _settings(check: Checks, task: Task) -> Task:
    cls = type(task)
    check.require(is_frozen(cls), "declaration", "a frozen dataclass", cls)
    check.require(task.score in get_args(Score), "declaration", f"a score among {', '.join(get_args(Score))}", task.score)
    known = task.axis is None or task.axis in get_args(Axis)
    check.require(known, "declaration", f"an axis among {', '.join(get_args(Axis))}, or None", task.axis)
    check.require(task.minimal_effect > 0, "declaration", "a minimal effect above 0", task.minimal_effect)
    fitting = task.chance is not None if task.score == "acc" else task.axis == "context"
    check.require(fitting, "declaration", "a chance for choices, and the axis 'context' for log-likelihoods", task.chance)
    identity = task.identity
    complete = isinstance(identity, Identity) and all(dataclasses.astuple(identity))
    check.require(complete, "identity", "source, revision and licence", identity)
    try:
        rebuilt = tasks.make(task.settings)
    except SinklabError as error:
        check.require(False, "settings", "a task that its settings make again", first_line(error))
    check.require(rebuilt == task, "settings", str(task), rebuilt)
    return task


def _check_document(check: Checks, task: Task, document: Document) -> None:
    check.require(bool(document.answer.strip()), "answer", "a text", document.answer)
    choices = (document.answer, *document.wrong)
    check.require(len(set(choices)) == len(choices), "wrong", "answers that differ", choices)
    if task.score == "log_likelihood":
        check.require(not document.wrong, "wrong", "none, since an answer is scored by its own likelihood", document.wrong)
        return
    chance = 1 / len(choices)
    check.require(abs(chance - float(task.chance or 0)) < 1e-9, "chance", f"{chance:g} of {len(choices)}", task.chance)
    if document.fact is not None:
        told = document.context[document.fact :]
        check.require(document.answer in told, "fact", f"the answer {document.answer!r} in what the fact begins", told[:80])
