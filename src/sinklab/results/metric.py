"""Metric: what one number is, declared once; units, versions and definitions everywhere else come from here."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from sinklab.errors import ContractError
from sinklab.registry import KINDS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

FRACTION, PERCENTAGE = (0.0, 1.0), (0.0, 100.0)
"""Ranges of a share, in parts of one and in percent. A difference or a quotient of shares has the unit and not the range."""

_DECLARED: dict[str, Metric] = {}


@dataclasses.dataclass(frozen=True)
class Metric:
    """The declaration of one number that sinklab prints or stores: at the top of a file or in a class, which enters it.

    Args:
        name: unique in all of sinklab: lower-case words joined by underscores.
        unit: as in the column ``unit`` of the table: percent, fraction, weight, nats, norm, degrees, ….
        text: one sentence: what is averaged over what.
        paper: where the definition comes from, with its arXiv number; empty for our own.
        range: smallest and largest value that the definition allows. Over seeds a number of range ``FRACTION`` or
            ``PERCENTAGE`` has the interval of a share, and any other one that of a mean.
        version: raised when the definition changes; numbers of different versions are never merged.
        outcome: whether it is 1 or 0 of every single case: something that happened or did not. Several are a count, with the
            interval of one.

    Raises:
        ContractError: another number is declared under the name.
    """

    name: str
    unit: str
    text: str
    paper: str = ""
    range: tuple[float, float] = (float("-inf"), float("inf"))
    version: int = 1
    outcome: bool = False

    def __post_init__(self) -> None:
        if _DECLARED.setdefault(self.name, self) != self:
            raise ContractError(
                f"metric {self.name!r} is declared twice, as {_DECLARED[self.name].text!r} and as {self.text!r}: import the "
                "first, or give the second another name"
            )

    def bound(self, end: str) -> Metric:
        """The ``low`` or ``high`` end of the interval of this number, under its name with ``_low`` or ``_high``."""
        return self._with(name=f"{self.name}_{end}", text=f"{end} end of the interval of {self.name}.")

    def of(self, unit: str) -> Metric:
        """The same number in the unit of the loss that a run takes."""
        return self._with(unit=unit)

    def named(self, name: str) -> Metric:
        """One of several numbers that are declared together, as this one."""
        return self._with(name=name)

    def _with(self, **fields: Any) -> Metric:
        """A metric that follows from this one, and is no declaration of its own."""
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other


class Shared(TypedDict, total=False):
    """The columns of :data:`sinklab.results.table.COLUMNS` in which rows that are given at once do not differ."""

    unit: str
    version: int
    run_id: str
    model: str
    revision: str | None
    operation: str
    intervention: str | None
    policy: str | None
    corpus: str
    bos: int | None
    probe: str
    module: str
    part: str | None
    sink: str | None
    step: int | None
    seed: int | None


class Coordinates(Shared, total=False):
    """Where a number was measured, and of how many observations; arrays as in :class:`Row`."""

    count: int | np.ndarray
    layer: int | np.ndarray
    head: int | np.ndarray
    query_position: int | np.ndarray
    key_position: int | np.ndarray | None


class Row(Coordinates, total=False):
    """A row for the long table, by column, or many rows at once, as :func:`~sinklab.results.table.make_table` takes them.

    A value that is an array is a column: one-dimensional, all arrays of a row of one length, an entry for each of the rows.
    ``metric`` is a :class:`Metric`, which says ``unit`` and ``version`` too.
    """

    metric: Metric
    value: float | np.ndarray | None


class SingleRow(Shared, total=False):
    """One row of the long table with its number, and the metric by its name; columns that are null are left out."""

    metric: str
    value: float
    count: int
    layer: int
    head: int
    query_position: int
    key_position: int


LOSS = Metric("loss", "nats", "Mean next-token loss over the tokens that the run scores; count is their number.")
STEPS = Metric("steps", "steps", "Training steps that the run took: until its stop rule, or to its last step.")
VALUE_RATIO = Metric(
    "value_ratio",
    "ratio",
    "L2 norm of the value of the sink, or of the first token, over the mean norm of the other values of the text.",
    paper="Guo et al. 2024 (arXiv 2410.13835)",
)


def definitions(measured_by: Mapping[str, Iterable[Metric]]) -> list[dict[str, object]]:
    """What ``run.json`` says of the metrics in a table.

    Args:
        measured_by: value of the column ``probe`` to the metrics that may stand beside it.
    """
    return [
        {"probe": probe, "metric": m.name, "version": m.version, "text": m.text, "paper": m.paper, "unit": m.unit}
        for probe, metrics in measured_by.items()
        for m in metrics
    ]


def definitions_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """The same for the metrics of a long table, as far as they are declared."""
    measured_by: dict[str, list[Metric]] = {}
    for probe, name in table[["probe", "metric"]].dropna().drop_duplicates().itertuples(index=False):
        if name in _DECLARED:
            measured_by.setdefault(probe, []).append(_DECLARED[name])
    return definitions(measured_by)


def catalogue() -> dict[str, Metric]:
    """Every metric of the modules that are imported, by name."""
    return dict(_DECLARED)


ELSEWHERE = ("sinklab.training.bookkeeping", "sinklab.studies.trigger.lab")
"""Modules beside plug-ins whose numbers are looked up by their names: those of trainings and of the trigger task."""


def declared(name: str) -> Metric | None:
    """The metric of a name; where no module that is there declares it, those that measure are imported to find it."""
    if name not in _DECLARED:
        for registry in (KINDS["probes"], KINDS["read_outs"]):
            for plugin in registry:
                registry[plugin]
        for module in ELSEWHERE:
            importlib.import_module(module)
    return _DECLARED.get(name)


def metrics_of(plural: str, name: str) -> tuple[Metric, ...]:
    """What a plug-in measures: ``metrics`` of its class, or ``METRICS`` of its file; nothing without either.

    Raises:
        UnknownNameError: no such plug-in.
        ContractError: its file cannot be imported.
    """
    plugin: object = KINDS[plural][name]
    return tuple(getattr(plugin, "metrics", ()) or getattr(sys.modules[plugin.__module__], "METRICS", ()))
