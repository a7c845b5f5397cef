"""Names: what a file exports, how a plug-in's four names agree, and that everything public says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import sinklab
from sinklab.registry import KINDS
from sinklab.results.metric import Metric

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(sinklab.__path__, "sinklab.")
    if not module.ispkg and not module.name.endswith("__main__")
)
PLUGINS = [(plural, name) for plural, registry in KINDS.items() for name in registry.names()]
FILES = [(plural, name) for plural, registry in KINDS.items() for name in sorted(registry._files())]
"""Those that are a file of sinklab each; a package may have several in one."""


def test_the_package_exports_what_it_can_find():
    assert sinklab.__all__ == sorted(["__version__", *sinklab._HOMES])
    assert sorted(sinklab.__all__) == dir(sinklab)
    for name in sinklab._HOMES:
        assert getattr(sinklab, name).__name__ == name


def test_the_type_checker_sees_the_same_names():
    (block,) = [node for node in ast.parse(Path(sinklab.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == sinklab._HOMES


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'audti'; it has .*audit"):
        _ = sinklab.audti


def test_what_messages_and_docstrings_tell_to_call_is_public():
    called = {
        name
        for path in Path(sinklab.__file__).parent.rglob("*.py")
        for name in re.findall(r"\bsinklab\.(\w+)\(", path.read_text())
    }
    assert "wrap_model" in called
    assert called <= set(sinklab.__all__)


def exported(module: str) -> list[str]:
    """What other parts may take of a file: what its list names, or without one all that it defines without an underscore."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return loaded.__all__
    names = set()
    for node in ast.walk(ast.parse(Path(loaded.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return sorted(name for name in names & vars(loaded).keys() if not name.startswith("_") or name == "__version__")


@pytest.mark.parametrize("module", MODULES)
def test_what_is_exported_is_there_and_documented(module):
    loaded, names = importlib.import_module(module), exported(module)
    assert loaded.__doc__, f"{module} does not say what it is"
    assert len(set(names)) == len(names)
    for name in names:
        thing = getattr(loaded, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{module}.{name} has no docstring"
        if inspect.isclass(thing):
            for attribute, member in vars(thing).items():
                function = member.fget if isinstance(member, property) else member
                # A method that overrides one is documented where the contract is.
                overrides = any(hasattr(base, attribute) for base in thing.__mro__[1:])
                if inspect.isfunction(function) and not attribute.startswith("_") and not overrides:
                    assert inspect.getdoc(getattr(thing, attribute)), f"{module}.{name}.{attribute} has no docstring"


def undeclared(source: Path, exported: dict[str, list[str]]) -> list[str]:
    """Names that one part (audit, probes, …) takes from a file of another part although that file does not export them."""
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            own_part = path.relative_to(source).with_suffix("").parts[0]
            if isinstance(node, ast.ImportFrom) and node.module in exported and node.module.split(".")[1] != own_part:
                found += [
                    f"{path.relative_to(source)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in exported[node.module]
                ]
    return found


def test_parts_take_from_each_other_only_what_is_exported():
    assert undeclared(Path(sinklab.__file__).parent, {module: exported(module) for module in MODULES}) == []


@pytest.mark.parametrize(("plural", "name"), FILES)
def test_file_registered_name_and_class_are_one_word(plural, name):
    cls = KINDS[plural][name]
    assert cls.__module__ == f"sinklab.{plural}.{name}"
    assert cls.name == name
    # Recipes are functions and carry the name as it is.
    assert cls.__name__ == (name if plural == "recipes" else "".join(word.capitalize() for word in name.split("_")))
    module = sys.modules[cls.__module__]
    assert [name for name in exported(cls.__module__) if not isinstance(getattr(module, name), Metric)] == [cls.__name__]


@pytest.mark.parametrize(("plural", "name"), PLUGINS)
def test_a_plugin_is_one_sentence_and_more(plural, name):
    summary = KINDS[plural].summary(name)
    assert summary.endswith((".", "?"))
    assert 20 < len(summary) < (300 if plural == "claims" else 160)  # what a paper states may need a colon and a half
    assert len(inspect.getdoc(KINDS[plural][name]) or "") > 60
