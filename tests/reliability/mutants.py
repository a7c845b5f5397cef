"""Mutants: small changes of the core, each of which some test must notice; ``make mutants`` makes them and lists what survives.

A mutant is a change of one place: a comparison, a sign, a constant, a condition, a statement that is left out, a guard that no
longer raises, a return without its value. Each runs in a process of its own, forked from one that has torch and all other
packages loaded but no file of sinklab, so that it costs the import of sinklab and the tests up to the first that fails. What is
found is kept in ``build/mutants`` under the text of the file and of its tests, and a run that was interrupted goes on.

``survivors.toml`` beside this file has the mutants that no test can or should notice, each with the reason. A survivor that is
not there fails the run, and so does an entry that is no mutant of the file any more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "sinklab"
SURVIVORS = Path(__file__).with_name("survivors.toml")
RECORD = ROOT / "build" / "mutants"

TESTED: dict[str, tuple[str, ...]] = {
    "attention/session.py": (
        "architectures/test_isolation.py",
        "attention/test_session.py",
        "probes/test_watcher.py",
        "interventions/test_first_interventions.py",
        "probes/test_head_output.py",
    ),
    "attention/call.py": (
        "attention/test_call.py",
        "attention/test_verify_call.py",
        "attention/test_columns.py",
    ),
    "attention/verify.py": ("attention/test_verify_call.py",),
    "attention/visibility.py": ("attention/test_visibility.py",),
    "attention/statistics/blocked.py": ("attention/test_visibility.py", "attention/test_columns.py"),
    "attention/statistics/columns.py": ("attention/test_columns.py",),
    "attention/statistics/fused.py": ("attention/test_columns.py",),
    "sinks/finder.py": ("test_sinks.py", "studies/causes/test_finding_sinks.py"),
    "sinks/finding.py": ("test_sinks.py", "studies/causes/test_finding_sinks.py"),
    "sinks/value.py": ("test_sinks.py", "studies/causes/test_finding_sinks.py"),
    "results/intervals.py": ("results/test_statistics.py",),
    "results/folder.py": ("results/test_run.py",),
    "results/run.py": ("results/test_run.py",),
    "results/store.py": ("results/test_run.py",),
    "policies/base.py": ("policies/test_policy_rules.py", "policies/test_policy_checks.py"),
    "streaming/slot_table.py": (
        "policies/test_policy_checks.py",
        "streaming/test_step.py",
        "streaming/test_telemetry.py",
        "streaming/test_state.py",
        "streaming/test_static.py",
    ),
    "registry.py": ("test_registry.py",),
    "configuration.py": ("test_configuration.py",),
}
"""File of the core to the tests that must kill its mutants, those that are likeliest to do so first."""

SPARE = 30.0
"""Seconds that a mutant may take beyond ten times what the tests take without one; longer ones have a loop without end."""

WIDTH = 80
"""Characters of a side of a change."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


# --- making them -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path below ``src/sinklab``.
        function: qualified name of what the change is in; empty on the level of the module.
        change: what it was, an arrow, and what it is; a number in front tells changes apart that read alike.
        line: in the file as it is now.
        number: among all mutants of the file.
    """

    file: str
    function: str
    change: str
    line: int
    number: int

    @property
    def name(self) -> str:
        """What it is found again by when lines have moved."""
        return f"{self.function}: {self.change}"


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    return list(mutants_of_text((SOURCES / file).read_text(encoding="utf-8"), file))


def mutants_of_text(text: str, file: str = "") -> Iterator[Mutant]:
    """All mutants of a text."""
    counts: dict[tuple[str, str], int] = {}
    for number, (function, node, field, index, replacement) in enumerate(_changes(ast.parse(text), "")):
        original = _get(node, field, index)
        # A constant is shown in what it stands in, and a condition without what depends on it.
        whole = node if isinstance(original, ast.Constant) and isinstance(node, (ast.expr, ast.keyword)) else None
        before = _text(whole or original)
        _set(node, field, index, replacement)
        change = _change(before, _text(whole or replacement))
        _set(node, field, index, original)
        same = counts[function, change] = counts.get((function, change), 0) + 1
        line = getattr(original, "lineno", getattr(node, "lineno", 0))
        yield Mutant(file, function, change if same == 1 else f"{same}. {change}", line, number)


def mutated(text: str, number: int, path: str) -> CodeType:
    """The code of a text with one of its mutants; ``path`` is what a traceback calls it."""
    tree = ast.parse(text)
    _, node, field, index, replacement = next(itertools.islice(_changes(tree, ""), number, None))
    _set(node, field, index, replacement)
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _get(node: ast.AST, field: str, index: int | None) -> ast.AST:
    return getattr(node, field) if index is None else getattr(node, field)[index]


def _set(node: ast.AST, field: str, index: int | None, value: ast.AST) -> None:
    if index is None:
        setattr(node, field, value)
    else:
        getattr(node, field)[index] = value


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {_text(node.test)}"
    return " ".join(ast.unparse(node).split())


def _change(before: str, after: str) -> str:
    """Both, cut down to what is round the first difference where they are long."""
    pairs = enumerate(zip(before, after, strict=False))
    first = next((number for number, (left, right) in pairs if left != right), min(len(before), len(after)))
    return f"{_cut(before, first)} → {_cut(after, first)}"


def _cut(text: str, at: int) -> str:
    start = max(0, at - WIDTH // 2) if len(text) > WIDTH else 0
    return ("… " if start else "") + text[start : start + WIDTH] + (" …" if start + WIDTH < len(text) else "")


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """Qualified name, parent, field, index and replacement of every change below a node."""
    for field, index, child in _children(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inside = f"{function}.{child.name}" if function else child.name
        for replacement in _replacements(child, node):
            yield inside, node, field, index, ast.copy_location(replacement, child)
        if not isinstance(child, (ast.Raise, ast.JoinedStr)):  # what a message says is no arithmetic
            yield from _changes(child, inside)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_name(node, "__all__"):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(value, ast.AST):
            yield field, None, value
        elif isinstance(value, list):
            yield from ((field, index, item) for index, item in enumerate(value) if isinstance(item, ast.AST))


def _is_name(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _replacements(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[number] = COMPARISONS[type(operator)]()
            yield other
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        other = copy.deepcopy(node)
        other.op = ARITHMETIC[type(node.op)]()
        yield other
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield other
    elif isinstance(node, ast.Constant) and not isinstance(parent, (ast.Expr, ast.MatchValue)):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
    if isinstance(node, (ast.If, ast.IfExp)) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
        other = copy.deepcopy(node)
        other.test = _negated(node.test)
        if not (isinstance(node.test, ast.Compare) and len(node.test.ops) == 1):  # else the comparison is a mutant already
            yield other
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.copy_location(ast.Return(ast.Constant(None)), node)
    if isinstance(node, ast.Continue):
        yield ast.Pass()


def _negated(test: ast.expr) -> ast.expr:
    bare = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
    return copy.deepcopy(bare) if bare is not None else ast.copy_location(ast.UnaryOp(ast.Not(), copy.deepcopy(test)), test)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# --- running them ----------------------------------------------------------------------------------------------------------


class _Changed(importlib.machinery.SourceFileLoader):
    """Gives a module another code than its file has."""

    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


@dataclasses.dataclass(frozen=True)
class _Finder:
    """Finds one module, changed; all others are found as ever."""

    name: str
    path: str
    code: CodeType

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Changed(name, self.path)
        loader.code = self.code
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def run(mutant: Mutant | None, tests: Iterable[str], limit: float) -> tuple[str, float]:
    """``"killed"``, ``"survived"`` or ``"timeout"``, and the seconds that it took; no mutant is the file as it is.

    The calling process must not have loaded a file of sinklab: see :func:`preload`.
    """
    assert not any(name == "sinklab" or name.startswith("sinklab.") for name in sys.modules), "sinklab is loaded already"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_tested(mutant, tests)
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - started > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    shutil.rmtree(RECORD / f"tmp-{child}", ignore_errors=True)
    seconds = time.monotonic() - started
    if found[0] == 0:
        return "timeout", seconds
    return ("survived" if found[1] == 0 else "killed"), seconds


def _be_tested(mutant: Mutant | None, tests: Iterable[str]) -> None:
    """Run the tests in this process, which ends with it."""
    code = 1
    try:
        os.setsid()
        with open(os.devnull, "r+b") as nowhere:
            for number in (0, 1, 2):
                os.dup2(nowhere.fileno(), number)
        if mutant is not None:
            name = "sinklab." + mutant.file.removesuffix(".py").replace("/", ".")
            path = SOURCES / mutant.file
            changed = mutated(path.read_text(encoding="utf-8"), mutant.number, str(path))
            sys.meta_path.insert(0, _Finder(name, str(path), changed))  # type: ignore[arg-type]
        code = _pytest(tests, "-x")
    finally:
        os._exit(code)


def _pytest(tests: Iterable[str], *options: str) -> int:
    import pytest

    os.chdir(ROOT)
    temporary = RECORD / f"tmp-{os.getpid()}"
    return int(
        pytest.main(
            ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={temporary}", *options]
            + [str(ROOT / "tests" / test) for test in tests]
        )
    )


def preload(tests: Iterable[str]) -> None:
    """Load what the tests load, but for sinklab and the tests themselves, so that a fork has it."""
    names = RECORD / "modules.json"
    RECORD.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "r+b") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            _pytest(tests, "--collect-only")
            ours = ("sinklab", "tests", "conftest", "test_", "__main__")
            names.write_text(json.dumps([name for name in list(sys.modules) if not name.startswith(ours)]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for name in json.loads(names.read_text()):
        with contextlib.suppress(Exception):  # what cannot be loaded by itself is loaded by each fork
            importlib.import_module(name)


# --- the record ------------------------------------------------------------------------------------------------------------


class Record:
    """What was found of the mutants of one file, as long as neither it nor its tests change."""

    def __init__(self, file: str) -> None:
        digest = hashlib.sha256((SOURCES / file).read_bytes())
        for test in TESTED[file]:
            digest.update((ROOT / "tests" / test).read_bytes())
        self.path = RECORD / f"{file.replace('/', '-')}-{digest.hexdigest()[:16]}.json"
        self.found: dict[str, str] = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def put(self, mutant: Mutant, outcome: str) -> None:
        """Keep what was found of one."""
        self.found[mutant.name] = outcome
        RECORD.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.found, indent=1, ensure_ascii=False))
        temporary.replace(self.path)


def listed(file: str) -> dict[str, str]:
    """Name of each mutant of a file that may survive, and the reason."""
    entries = tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).get(file, [])
    return {f"{entry['function']}: {entry['change']}": entry["reason"] for entry in entries}


def chosen(file: str, sample: int | None, seed: int) -> list[Mutant]:
    """All mutants of a file, or so many drawn by a seed, in the order of the file."""
    everything = mutants_of(file)
    if sample is None or sample >= len(everything):
        return everything
    numbers = random.Random(f"{seed} {file}").sample(range(len(everything)), sample)
    return [everything[number] for number in sorted(numbers)]


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a mutant survives that is not listed, or an entry of the list is no mutant any more."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="files below src/sinklab (default: all of the core)")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants of each file, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.files) - set(TESTED))
    if unknown:
        parser.error(f"no tests are named for {', '.join(unknown)}; known: {', '.join(TESTED)}")
    files = given.files or list(TESTED)
    preload(dict.fromkeys(test for file in files for test in TESTED[file]))
    print(f"{'file':34} {'mutants':>8} {'run':>5} {'killed':>7} {'listed':>7} {'rate':>6}")
    failures, total = [], [0, 0]
    for file in files:
        record, reasons, mutants = Record(file), listed(file), chosen(file, given.sample, given.seed)
        every = mutants_of(file)
        stale = sorted(reasons.keys() - {mutant.name for mutant in every})
        failures += [f"{file}: listed, but no mutant of the file: {name}" for name in stale]
        limit: float | None = None
        for mutant in mutants:
            if mutant.name in record.found:
                continue
            if limit is None:
                outcome, seconds = run(None, TESTED[file], 600.0)
                if outcome != "survived":
                    print(f"{file}: the tests fail without a mutant ({outcome}): {' '.join(TESTED[file])}")
                    return 1
                limit = SPARE + 10 * seconds
            record.put(mutant, run(mutant, TESTED[file], limit)[0])
        alive = [mutant for mutant in mutants if record.found[mutant.name] == "survived"]
        killed = len(mutants) - len(alive)
        rate = f"{100 * killed / len(mutants):.0f} %" if mutants else "–"
        expected = sum(mutant.name in reasons for mutant in alive)
        print(f"{file:34} {len(every):8} {len(mutants):5} {killed:7} {expected:7} {rate:>6}", flush=True)
        failures += [
            f"{file}:{mutant.line}: {mutant.name} survives {' '.join(TESTED[file])}"
            for mutant in alive
            if mutant.name not in reasons
        ]
        total = [total[0] + len(mutants), total[1] + killed]
    print(f"{total[1]} of {total[0]} killed, {100 * total[1] / max(1, total[0]):.1f} %")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    sys.path[:0] = [str(ROOT), str(SOURCES.parent)]
    raise SystemExit(main())
