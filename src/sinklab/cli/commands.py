"""The commands: where the function of each stands and what it does, so that help imports none of them.

A package of somebody else adds a command with an entry point in the group ``sinklab.commands``
(``my_command = "my_package.my_command:my_command"``); its function carries the same mark,
:func:`sinklab.studies.arguments.command`, and its module imports no torch at the top.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
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
    "audit": Command(
        "sinklab.studies.audit.audit:audit",
        "Find the sinks of a model: at which positions and tokens, in which layers and heads, under which conditions.",
    ),
    "cache": Command(
        "sinklab.studies.cache.cache:compare_policies",
        "Compare cache policies on long texts: loss, speed and memory of each, and which one to use.",
    ),
    "card": Command(
        "sinklab.studies.card.card:card",
        "Print a section for the model's card: what a run found, with its numbers, and how to repeat it.",
    ),
    "causes": Command(
        "sinklab.studies.causes.causes:find_causes",
        "Label what every head does with its sink: text-dependent, constant, dormant, bias, broadcast, unneeded, switch, …",
    ),
    "compare": Command("sinklab.cli.catalogue:compare", "Put audits side by side."),
    "depend": Command(
        "sinklab.studies.depend.depend:depend",
        "Test which scores depend on the sink: every task under several caches, with paired intervals and a verdict.",
    ),
    "export": Command(
        "sinklab.studies.export.export:export",
        "Write the cache policy that a run has chosen as flags or a script for another engine; nothing is measured.",
    ),
    "fold": Command(
        "sinklab.studies.fold.fold:fold_sinks",
        "Make the sinks of a trained model explicit: constants in the place of the tokens on which its heads rest.",
    ),
    "list": Command("sinklab.cli.catalogue:list_", "List all names that the command line takes, with a sentence on each."),
    "measure": Command(
        "sinklab.studies.measure.measure:measure", "Run chosen probes over a model. With --json: one row of the table per line."
    ),
    "origin": Command(
        "sinklab.studies.origin.origin:find_origin",
        "Find where each sink is born, what writes it, and what disappears without it: attention, spike, loss.",
    ),
    "plot": Command(
        "sinklab.studies.plot.plot:plot",
        "Draw loss, sink rate and loss gap over steps and per layer, and heat maps of heads and positions over time.",
    ),
    "pretrain": Command(
        "sinklab.studies.pretrain.pretrain:pretrain",
        "Train a small model from scratch and watch its sinks appear: one recipe, one folder.",
    ),
    "quantize": Command(
        "sinklab.studies.quantize.quantize:quantize",
        "Measure what quantisation costs in loss, which modules cause it and what cures it.",
    ),
    "report": Command("sinklab.cli.catalogue:report", "Make report.html again from the files of an audit; needs no model."),
    "show": Command("sinklab.cli.catalogue:show", "Say what a plug-in or a metric is: definition, parameters, papers."),
    "stream": Command(
        "sinklab.studies.stream.stream:stream",
        "Generate without end in bounded memory, from a prompt, a file, a pipe or a conversation; tokens appear as they "
        "are made.",
    ),
    "sweep": Command(
        "sinklab.studies.sweep.sweep:sweep", "Run a recipe over a grid of settings and seeds, and summarise over seeds."
    ),
    "trigger": Command(
        "sinklab.studies.trigger.trigger:trigger",
        "Train small models that must do nothing except at one token, and measure where their heads put their weight.",
    ),
}
"""Name to command, of sinklab itself."""


def find_commands() -> Mapping[str, Command]:
    """Every command by its name, sorted: those of sinklab and those of other packages that are installed.

    Raises:
        ContractError: two commands of one name.
    """
    commands = dict(COMMANDS)
    for point in entry_points("commands"):
        if point.name in commands:
            raise ContractError(f"two commands are called {point.name!r}; one of them is {point.value}")
        commands[point.name] = Command(point.value)
    return dict(sorted(commands.items()))
