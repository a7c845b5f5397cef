"""Sections: studies that an audit can include, each known from the package that is its folder, which imports nothing of it.

``SECTION = Section("origin", …)`` in ``studies/<study>/__init__.py`` is all that a new section needs: it becomes an option of
``sinklab audit``, a key of its summary, a part of its page and of what the terminal shows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sinklab.errors import ResultError
from sinklab.results.blocks import Block, Say

T = TypeVar("T")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def to_json(found: object) -> dict[str, Any]:
    """A dataclass as plain JSON values, under the names of its fields; numbers that are not finite become ``None``."""
    values: dict[str, Any] = _adapter(cast(Any, type(found))).dump_python(found, mode="python")
    plain: dict[str, Any] = _plain(values)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def from_json(kind: type[T], values: Mapping[str, Any], where: object) -> T:
    """The dataclass that was written; fields that it does not know are left out, so newer results can be read.

    Args:
        where: names the file in the message.

    Raises:
        ResultError: a field is missing or of another type.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(cast(Any, kind)).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultError(f"{where} is not what this version writes: {place}: {first['msg']}") from None
    return found


if TYPE_CHECKING:
    import pandas as pd

    from sinklab.results.progress import Progress


STUDIES = Path(__file__).parents[1] / "studies"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What an audit has when a section is measured.

    Attributes:
        loaded: the model (:class:`~sinklab.models.loading.LoadedModel`).
        corpus: of the main condition (:class:`~sinklab.corpora.base.Corpus`).
        samples: those of the main condition (:class:`~sinklab.corpora.samples.Samples`).
        sinks: what was found on them (:class:`~sinklab.sinks.Sinks`).
        summary: of the audit so far.
        bos: whether samples begin with the beginning-of-sequence token.
        probes: a section that brings probes appends them, so that ``run.json`` defines their numbers.
    """

    loaded: Any
    corpus: Any
    samples: Any
    sinks: Any
    summary: Mapping[str, Any]
    bos: bool
    run_id: str
    seed: int
    progress: Progress
    probes: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A study as a part of an audit.

    Attributes:
        name: key of the summary, and the option: ``--origin``.
        title: heading on the page.
        lead: one or two sentences below it: what was done.
        help: of the option.
        found: the dataclass that the study fills, ``"module:name"``; this and the next two are imported when they are needed.
        show: the function that gives the blocks of what was found.
        measure: the function that takes a :class:`Context` and gives what stands in the summary, and the rows. Where the model
            has no such thing, the first is ``{"refused": why}``.
        text_only: why only models of text have it; empty where pictures and sound have it too.
        default: whether an audit includes it unless told otherwise.
        cost: how long it takes beside the main condition of an audit, for what is said to be left; 0 where that is unknown.
    """

    name: str
    title: str
    lead: str
    help: str
    found: str
    show: str
    measure: str
    text_only: str = ""
    default: bool = False
    cost: float = 0.0

    def measured(self, context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
        """The entry of the summary, and the rows of the table."""
        found: tuple[dict[str, Any], pd.DataFrame] = named(self.measure)(context)
        return found

    def blocks(self, entry: Mapping[str, Any], where: object = "summary.json") -> list[Block]:
        """What the entry of a summary shows; of one that was refused the reason.

        Raises:
            ResultError: it is not what this version writes.
        """
        if "refused" in entry:
            return [Say(str(entry["refused"]), small=True)]
        return list(named(self.show)(from_json(named(self.found), entry, f"{where}: {self.name}")))


def named(place: str) -> Any:
    """What ``"module:name"`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def sections() -> dict[str, Section]:
    """Every section by its name, in alphabetical order of the studies' folders."""
    studies = [path.parent.name for path in sorted(STUDIES.glob("*/__init__.py")) if "SECTION" in path.read_text("utf-8")]
    found = [named(f"sinklab.studies.{study}:SECTION") for study in studies]
    return {section.name: section for section in found}
