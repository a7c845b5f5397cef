"""The commands: where the function of each stands and what it does, so that help imports none of them.

A package of somebody else adds a command with an entry point in the group ``sinklab.commands``
(``my_command = "my_package.my_command:my_command"``); its function carries the same mark,
:func:`sinklab.studies.arguments.command`, and its module imports no torch at the top.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import ContractError
from sinklab.registry import entry_points


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that has not been imported.

    Args:
        place: ``module:function``.
        text: the first sentence of its docstring; without it the function is imported to read it.
    """

    place: str
    text: str = ""

    @property
    def summary(self) -> str:
        """What it does, in a sentence; of one that is broken why, so that the others are listed all the same."""
        try:
            return self.text or " ".join((self.load().__doc__ or "").split("\n\n")[0].split())
        except ContractError as error:
            return str(error)

    def load(self) -> Callable[..., object]:
        """The function.

        Raises:
            ContractError: it cannot be imported.
        """
        module, _, name = self.place.partition(":")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ContractError(f"the command {self.place} cannot be imported: {type(error).__name__}: {error}") from error
        return function


COMMANDS = {
    "audit": "sinklab.studies.audit.audit:audit",
    "cache": "sinklab.studies.cache.cache:compare_policies",
    "card": "sinklab.studies.card.card:card",
    "causes": "sinklab.studies.causes.causes:find_causes",
    "compare": "sinklab.cli.catalogue:compare",
    "depend": "sinklab.studies.depend.depend:depend",
    "export": "sinklab.studies.export.export:export",
    "fold": "sinklab.studies.fold.fold:fold_sinks",
    "list": "sinklab.cli.catalogue:list_",
    "measure": "sinklab.studies.measure.measure:measure",
    "origin": "sinklab.studies.origin.origin:find_origin",
    "pretrain": "sinklab.studies.pretrain.pretrain:pretrain",
    "quantize": "sinklab.studies.quantize.quantize:quantize",
    "report": "sinklab.cli.catalogue:report",
    "show": "sinklab.cli.catalogue:show",
    "stream": "sinklab.studies.stream.stream:stream",
    "sweep": "sinklab.studies.sweep.sweep:sweep",
    "trigger": "sinklab.studies.trigger.trigger:trigger",
}
"""Name to ``module:function``, of sinklab itself."""

SUMMARIES = Path(__file__).with_name("summaries.json")
"""First sentences of the docstrings of these, so that help imports none of them; ``make docs`` writes it."""


def find_commands() -> Mapping[str, Command]:
    """Every command by its name, sorted: those of sinklab and those of other packages that are installed.

    Raises:
        ContractError: two commands of one name.
    """
    known = json.loads(SUMMARIES.read_text(encoding="utf-8"))
    commands = {name: Command(place, known.get(name, "")) for name, place in COMMANDS.items()}
    for point in entry_points("commands"):
        if point.name in commands:
            raise ContractError(f"two commands are called {point.name!r}; one of them is {point.value}")
        commands[point.name] = Command(point.value)
    return dict(sorted(commands.items()))
