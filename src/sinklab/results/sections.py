"""Sections: studies that an audit can include, each known from the ``show.py`` of its folder, without torch.

``SECTION = Section("origin", …)`` in ``studies/<study>/show.py`` is all that a new section needs: it becomes an option of
``sinklab audit``, a key of its summary, a part of its page and of what the terminal shows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.results.blocks import Block, Say
from sinklab.results.record import from_json

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.results.progress import Progress

__all__ = ["Context", "Section", "sections"]

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
        found: dataclass that the study fills.
        show: blocks of what was found.
        measure: ``"module:function"``, imported when the section is asked for; it takes a :class:`Context`, gives what stands
            in the summary and the rows. Where the model has no such thing, the first is ``{"refused": why}``.
        text_only: why only models of text have it; empty where pictures and sound have it too.
        default: whether an audit includes it unless told otherwise.
        cost: how long it takes beside the main condition of an audit, for what is said to be left; 0 where that is unknown.
    """

    name: str
    title: str
    lead: str
    help: str
    found: type
    show: Callable[[Any], Iterable[Block]]
    measure: str
    text_only: str = ""
    default: bool = False
    cost: float = 0.0

    def measured(self, context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
        """The entry of the summary, and the rows of the table."""
        module, _, function = self.measure.partition(":")
        found: tuple[dict[str, Any], pd.DataFrame] = getattr(importlib.import_module(module), function)(context)
        return found

    def blocks(self, entry: Mapping[str, Any], where: object = "summary.json") -> list[Block]:
        """What the entry of a summary shows; of one that was refused the reason.

        Raises:
            ResultError: it is not what this version writes.
        """
        if "refused" in entry:
            return [Say(str(entry["refused"]), small=True)]
        return list(self.show(from_json(self.found, entry, f"{where}: {self.name}")))


@functools.cache
def sections() -> dict[str, Section]:
    """Every section by its name, in alphabetical order of the studies' folders."""
    modules = (
        importlib.import_module(f"sinklab.studies.{path.parent.name}.show") for path in sorted(STUDIES.glob("*/show.py"))
    )
    found = (getattr(module, "SECTION", None) for module in modules)
    return {section.name: section for section in found if isinstance(section, Section)}
