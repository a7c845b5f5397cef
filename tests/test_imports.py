"""Which part may import which, and what a file exports: the direction lets a plug-in be one file and a page need no torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinklab
from sinklab.registry import KINDS
from sinklab.results.metric import Metric

SOURCE = Path(sinklab.__file__).parent

LEVELS: list[set[str]] = [
    {"errors"},
    {"configuration"},
    {"registry"},
    {"results"},
    {"report"},
    {"attention"},
    {"sinks"},
    {"corpora", "interventions", "operations", "policies", "positions", "probes"},
    {"models"},
    {"streaming"},
    {"tasks", "training"},
    {"recipes"},
    {"jobs"},
    {"studies"},
    {"testing"},
    {"cli"},
]
"""Lowest first: a part may import itself and parts on lower levels, and nothing else."""

CLAIMS_LEVELS: list[set[str]] = [{"contract"}, {"verdict"}, {"numbers"}, {"papers"}, {"reproduce"}, {"testing"}]
"""Of the package of claims, which may import all of sinklab; a file beside its folders is one of ``papers``."""

WITHOUT_TORCH = ("errors", "registry", "results", "report", "cli")
HEAVY = ("torch", "transformers")
OUTSIDE = {"__init__", "__main__"}
"""The package's own face: it names everything, lazily."""


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, at any depth of the code, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the direction"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "sinklab":  # its names live in modules of their own; a sub-package is its own home
                yield from ((sinklab._HOMES.get(alias.name, f"sinklab.{alias.name}"), node.lineno) for alias in node.names)


def part_of(path: Path, source: Path) -> str:
    return path.relative_to(source).with_suffix("").parts[0]


def violations(source: Path) -> list[str]:
    """Imports that go upwards or sideways, as ``file:line: what``."""
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    found = []
    for path in sorted(source.rglob("*.py")):
        part = part_of(path, source)
        if part in OUTSIDE:
            continue
        where = path.relative_to(source)
        if part not in level:
            found.append(f"{where}: part {part!r} has no level in tests/test_imports.py")
            continue
        for module, line in imports_of(path):
            names = module.split(".")
            if names[0] in HEAVY and part in WITHOUT_TORCH and not _inside_function(path, line):
                found.append(f"{where}:{line}: imports {names[0]}")
            if names[0] != "sinklab" or len(names) < 2 or names[1] not in level or names[1] == part:
                continue
            if level[names[1]] >= level[part]:
                found.append(f"{where}:{line}: imports {module}")
    return found


def _inside_function(path: Path, line: int) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return any(node.lineno < line <= (node.end_lineno or 0) for node in functions)


def claims_violations(source: Path) -> list[str]:
    """Imports within the package of claims that go upwards, as ``file:line: what``."""
    level = {part: number for number, parts in enumerate(CLAIMS_LEVELS) for part in parts}
    found = []
    for path in sorted(source.rglob("*.py")):
        part = claims_part(path.relative_to(source).parts[0])
        if path.name == "__init__.py":
            continue
        for module, line in imports_of(path):
            names = module.split(".")
            if names[0] == source.name and len(names) > 1 and level[claims_part(names[1])] > level[part]:
                found.append(f"{path.relative_to(source)}:{line}: imports {module}")
    return found


def claims_part(name: str) -> str:
    name = name.removesuffix(".py")
    return name if any(name in parts for parts in CLAIMS_LEVELS) else "papers"


def test_imports_go_downwards_only():
    assert violations(SOURCE) == []
    assert claims_violations(SOURCE.with_name("sinklab_claims")) == []


def test_the_tool_does_not_import_its_claims(tmp_path):
    assert list(imports_of_claims(SOURCE)) == []
    (tmp_path / "one.py").write_text("def f():\n    from sinklab_claims.numbers import sinks\n")
    assert list(imports_of_claims(tmp_path)) == ["one.py:2: imports sinklab_claims.numbers"]


def imports_of_claims(source: Path) -> Iterator[str]:
    for path in source.rglob("*.py"):
        for module, line in imports_of(path):
            if module.split(".")[0] == "sinklab_claims":
                yield f"{path.relative_to(source)}:{line}: imports {module}"


def test_the_check_of_claims_can_fail(tmp_path):
    source = tmp_path / "sinklab_claims"
    (source / "numbers").mkdir(parents=True)
    (source / "numbers" / "one.py").write_text("from sinklab_claims.gu2024 import x\n")
    (source / "gu2024.py").write_text("from sinklab_claims.numbers.one import y\nfrom sinklab_claims.xiao2023 import z\n")
    assert claims_violations(source) == ["numbers/one.py:1: imports sinklab_claims.gu2024"]


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("attention/session.py", "from sinklab.probes.sink_rate import SinkRate\n", "imports sinklab.probes.sink_rate"),
        ("probes/one.py", "def f():\n    import sinklab.operations.softmax\n", "probes/one.py:2: imports sinklab.operations"),
        ("report/html.py", "import torch\n", "report/html.py:1: imports torch"),
        ("results/table.py", "from transformers import AutoModel\n", "results/table.py:1: imports transformers"),
        ("report/html.py", "from sinklab.models.loading import load_model\n", "imports sinklab.models.loading"),
        ("cli/app.py", "import torch\n", "cli/app.py:1: imports torch"),
        ("corpora/mine.py", "from sinklab import audit\n", "imports sinklab.studies.audit"),
        ("novelty/new.py", "", "part 'novelty' has no level"),
    ],
)
def test_the_check_can_fail(tmp_path, file, text, complaint):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text)
    (found,) = violations(tmp_path)
    assert complaint in found


CALLED = {"yaml": "pyyaml", "PIL": "pillow"}
"""Modules that have another name than what is installed to have them."""

WITH_TORCH = {"triton"}
"""What torch's builds for GPUs bring, and others do without."""


def undeclared(source: Path, project: dict) -> set[str]:
    """Other people's packages that files import, and that are neither dependencies nor extras of ours."""
    extras = [requirement for extra in project.get("optional-dependencies", {}).values() for requirement in extra]
    declared = {name_of(requirement) for requirement in (*project["dependencies"], *extras)}
    imported = {module.split(".")[0] for path in source.rglob("*.py") for module, _ in imports_of(path)}
    foreign = imported - sys.stdlib_module_names - WITH_TORCH - {"sinklab", "sinklab_claims"}
    return {module for module in foreign if name_of(CALLED.get(module, module)) not in declared}


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_what_is_imported_is_declared():
    with (SOURCE.parents[1] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert undeclared(SOURCE, project) | undeclared(SOURCE.with_name("sinklab_claims"), project) == set()


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    program = f"{statement}\nimport sys\nprint(' '.join(sorted(name for name in sys.modules if '.' not in name)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


WITHOUT = """
import importlib, pkgutil, sinklab, sinklab.errors, sinklab.report, sinklab.results.table
import sinklab.studies.audit.compare, sinklab.studies.audit.page
for module in pkgutil.iter_modules(sinklab.report.__path__, "sinklab.report."): importlib.import_module(module.name)
for kind in sinklab.registry.KINDS.values(): [kind.summary(name) for name in kind.names()]
from tests.command_line import CliRunner
from sinklab.cli.app import app
assert CliRunner().invoke(app, ["list"]).exit_code == CliRunner().invoke(app, ["claims"]).exit_code == 0
assert CliRunner().invoke(app, ["audit", "--help"]).exit_code == 0
"""
"""The package, results, pages, names of plug-ins, lists and help."""


def test_without_torch():
    assert not loaded_by(WITHOUT) & set(HEAVY)


def test_a_definition_is_shown_without_torch():
    loaded = loaded_by("from sinklab.cli.app import app\ntry: app(['show', 'entropy'])\nexcept SystemExit: pass")
    assert not loaded & set(HEAVY)


def test_an_audit_imports_what_it_measures_with():
    audit = "import sinklab; sinklab.audit('embedded:softmax', corpus='random_tokens', samples=2, seq_len=16, cache=False)"
    program = f"{audit}\nimport sys\nprint(sum(name.split('.')[0] == 'sinklab' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 120


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


def not_exported(source: Path, exported: dict[str, list[str]]) -> list[str]:
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
    assert not_exported(Path(sinklab.__file__).parent, {module: exported(module) for module in MODULES}) == []


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
