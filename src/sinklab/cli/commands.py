"""Where the commands are: every function with the mark ``@command``, in sinklab and in the packages that say so, unimported."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sinklab
from sinklab.registry import packages

__all__ = ["Place", "find_commands"]

PACKAGE = Path(sinklab.__file__).parent

MARK = re.compile(r'^@command(?:\("(?P<name>[\w-]+)"\))?\n(?:@.*\n)*def (?P<function>\w+)', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Place:
    """A command that has not been imported: its file, and the function in it."""

    file: Path
    function: str
    package: Path = PACKAGE
    """The folder of the package that it is in."""

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        functions = (
            node for node in ast.parse(self.file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
        )
        docstring = next(ast.get_docstring(node) or "" for node in functions if node.name == self.function)
        return " ".join(docstring.split("\n\n")[0].split())

    def load(self) -> Callable[..., object]:
        """The function."""
        parts = self.file.relative_to(self.package.parent).with_suffix("").parts
        function: Callable[..., Any] = getattr(importlib.import_module(".".join(parts)), self.function)
        return function


@functools.cache
def find_commands(*folders: Path) -> Mapping[str, Place]:
    """Every command below the folders of packages, by its name, sorted; the files are read once.

    Args:
        folders: without any, sinklab and the packages that :func:`sinklab.registry.packages` gives.
    """
    commands = {}
    for folder in folders or (PACKAGE, *packages()):
        for file in folder.rglob("*.py"):
            for match in MARK.finditer(file.read_text(encoding="utf-8")):
                commands[match["name"] or match["function"]] = Place(file, match["function"], folder)
    return dict(sorted(commands.items()))
