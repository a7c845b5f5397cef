"""Classes: what a corpus calls them, found among those that a model was trained for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import InputError
from sinklab.models.losses import IGNORED, loss_kind

__all__ = ["class_targets"]

LISTED = 5


def class_targets(model: PreTrainedModel, labels: Sequence[str | int | None], corpus: str) -> Tensor | None:
    """Class numbers, int64 ``(samples,)``, :data:`IGNORED` where a sample has no label; ``None`` where no loss can be taken.

    A label is a name of the model's ``id2label``, one of the names between its commas, or the number of a class; upper and
    lower case are the same, and so are ``_`` and a space.

    Args:
        corpus: what to call it in an error.

    Raises:
        InputError: a label that the model has not, or that stands for two classes.
    """
    config = model.config
    if loss_kind(model) != "class" or all(label is None for label in labels):
        return None
    if getattr(config, "problem_type", None) not in (None, "single_label_classification") or config.num_labels < 2:
        return None
    classes = {int(number): str(name) for number, name in config.id2label.items()}
    known: dict[str, set[int]] = {}
    for number, name in classes.items():
        for part in {name, *name.split(",")}:
            known.setdefault(_plain(part), set()).add(number)
    whole = {_plain(name): {number} for number, name in classes.items()}
    return torch.tensor([IGNORED if label is None else _number(label, whole, known, classes, corpus) for label in labels])


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())


def _number(
    label: str | int, whole: dict[str, set[int]], known: dict[str, set[int]], classes: dict[int, str], corpus: str
) -> int:
    name = _plain(str(label))
    numbers = whole.get(name) or known.get(name) or set()
    if not numbers and name.isdecimal() and int(name) in classes:
        numbers = {int(name)}
    if len(numbers) == 1:
        return next(iter(numbers))
    if numbers:
        listed = ", ".join(f"{number} ({classes[number]})" for number in sorted(numbers)[:LISTED])
        raise InputError(f"corpus {corpus!r}: label {label!r} stands for several classes, {listed}; use the number")
    listed = ", ".join(list(classes.values())[:LISTED]) + (", …" if len(classes) > LISTED else "")
    raise InputError(
        f"corpus {corpus!r}: label {label!r} is none of the model's {len(classes)} classes ({listed}); a class is its name or "
        f"its number, 0 to {max(classes)}. Files that lie at the top of a folder have none, and no loss is taken of them"
    )
