"""Rewrites the parts of the documents that are derived from the code; a test fails when they are stale (``make docs``).

A derived part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Nothing is imported but names, schemas and
docstrings, so it takes a second.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import sinklab
from sinklab.cli.catalogue import describe
from sinklab.cli.commands import find_commands
from sinklab.registry import KINDS
from sinklab.results.metric import Metric, declared, metrics_of
from sinklab.results.table import COLUMNS
from sinklab.testing.references import DEFINITIONS, load_references
from sinklab.training.callback import headline_metrics, tracked
from sinklab_claims.contract.claim import RECORDED
from sinklab_claims.verdict.records import StoredClaim, read_results, summary_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RECORD = ROOT / "src" / "sinklab_claims" / "record.json"
FILES = (
    "docs/api.md",
    "docs/commands.md",
    "docs/measure.md#corpora",
    "docs/claims.md#read-outs",
    "docs/interventions.md",
    "docs/reference.md#results",
    "docs/metrics.md",
    "docs/operations.md",
    "docs/policies.md",
    "docs/train.md#pre-training",
    "docs/measure.md#reference-sinks",
    "docs/scores.md",
)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def plugins(plural: str) -> str:
    """A table of the plug-ins of one kind."""
    registry = KINDS[plural]
    rows = [f"| `{name}` | {_cell(registry.summary(name))} |" for name in registry]
    return "\n".join([f"| {registry.kind} | what it is |", "|---|---|", *rows])


def columns() -> str:
    """The column dictionary of the results table."""
    rows = [f"| `{name}` | {dtype} | {_cell(meaning)} |" for name, (dtype, meaning) in COLUMNS.items()]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


def _table(metrics: Iterable[Metric]) -> list[str]:
    """Lines of a table of metrics."""
    rows = (
        f"| `{metric.name}` | {_cell(metric.text)} | {metric.unit} | {metric.paper or 'ours'} | {metric.version} |"
        for metric in metrics
    )
    return ["| metric | definition | unit | paper | version |", "|---|---|---|---|---|", *rows]


def metrics() -> str:
    """Every metric of every probe, with its definition and its paper."""
    sections = []
    for name in KINDS["probes"]:
        sections.append("\n".join([f"## {name}", "", KINDS["probes"].summary(name), "", *_table(metrics_of("probes", name))]))
    return "\n\n".join(sections)


def headline() -> str:
    """The numbers that SinkCallback logs, with the names that trackers show."""
    rows = [
        f"| `{name}` | `{tracked(name)}` | {f'`{metric.name}` {which}'.strip()} | {unit} | {_cell(metric.text)} |"
        for name, metric, which, unit in headline_metrics()
    ]
    return "\n".join(["| logged as | shown as | metric | unit | definition |", "|---|---|---|---|---|", *rows])


def read_out_pages() -> str:
    """Every read-out with its metrics."""
    sections = []
    for name in KINDS["read_outs"]:
        table = _table(metrics_of("read_outs", name))
        sections.append("\n".join([f"## `{name}`", "", KINDS["read_outs"].summary(name), "", *table]))
    return "\n\n".join(sections)


def pages(plural: str) -> str:
    """What every plug-in of a kind says of itself: formula, papers, settings."""
    sections = []
    for name in KINDS[plural]:
        (page,) = (description for description in describe(name) if description.kind == KINDS[plural].kind)
        body, _, settings = page.text.replace("\nAttributes:\n", "\nArgs:\n").partition("\nArgs:\n")
        defaults = {parameter.name: parameter.default for parameter in page.parameters}
        bullets = []
        for setting in re.split(r"\n(?=    \w)", settings.partition("\n\n")[0].rstrip()) if settings else ():
            key, _, meaning = setting.strip().partition(": ")
            default = f" (default {defaults[key]})" if defaults.get(key) is not None else ""
            bullets.append(f"- `{key}`{default}: {' '.join(meaning.split())}")
        parts = [f"## {name}", page.summary, body.strip(), "\n".join(bullets)]
        sections.append("\n\n".join(part for part in parts if part).replace("``", "`"))
    return "\n\n".join(sections)


def paths() -> str:
    """The ways to compute an operation."""
    tree = ast.parse((ROOT / "src/sinklab/attention/paths/table.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PATHS")
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in ast.literal_eval(found.value).items()]  # type: ignore[arg-type]
    return "\n".join(["| path | what it is |", "|---|---|", *rows])


def record() -> str:
    """The newest verdicts of the committed results, as they are shipped with the package."""

    def place(one: StoredClaim) -> tuple[int, str, str]:
        return RECORDED.index(one.record.scale), one.folder.parent.name, one.record.claim

    kept = sorted(read_results(RESULTS), key=place)
    rows = [summary_of(one.record) for one in kept if one.record.claim in KINDS["claims"]]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def commands() -> str:
    """Every command with the first sentence of its help."""
    rows = [f"| `{name}` | {_cell(place.summary)} |" for name, place in find_commands().items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def public_names() -> str:
    """Every public name of the package with the first sentence of its docstring."""
    return _names(sinklab._HOMES)


def types() -> str:
    """What the public names take and return, likewise."""
    tree = ast.parse((ROOT / "docs/site/reference.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPES")
    return _names({home.rpartition(".")[2]: home.rpartition(".")[0] for home in ast.literal_eval(found.value)})


def _names(homes: Mapping[str, str]) -> str:
    """A table of names and the first sentences of their docstrings, which are read from the files."""
    rows = []
    for name, module in homes.items():
        found = _definition(module, name)
        first = " ".join((ast.get_docstring(found) or "").split("\n\n")[0].split())
        first = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", first).replace("``", "`")
        rows.append(f"| `{name}` | {_cell(first)} |")
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """A function or a class as its file writes it; where a module only passes a name on, that of the file that has it."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return _definition(node.module, name)
    raise LookupError(f"{module} has no {name}")


def reference_sinks() -> str:
    """The models, the definitions, and what these come to, all heads together."""
    units = {"percent": "{:.2f} %", "fraction": "{:.3f}", "weight": "{:.3f}", "nats": "{:.3f} nats"}
    form = {name: units[metric.unit] for name in DEFINITIONS if (metric := declared(name))}
    references = load_references()
    models = [
        f"| `{one.model}` | `{one.revision}` | {' × '.join(map(str, one.numbers['gu2024'].shape))} | {len(one.rows)} of "
        f"{sum(map(len, one.rows)):,} tokens together |"
        for one in references
    ]
    numbers = [
        f"| `{name}` | " + " | ".join(form[name].format(one.numbers[name].mean()) for one in references) + " |"
        for name in DEFINITIONS
    ]
    return "\n".join(
        [
            *("| model | weights | layers × heads | rows |", "|---|---|---|---|", *models, ""),
            *(f"- `{name}`: {words}" for name, words in DEFINITIONS.items()),
            *("", f"| | {' | '.join(f'`{one.model}`' for one in references)} |", f"|---|{'---|' * len(references)}", *numbers),
        ]
    )


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "public_names": public_names,
    "types": types,
    "probes": lambda: plugins("probes"),
    "operations": lambda: plugins("operations"),
    "corpora": lambda: plugins("corpora"),
    "positions": lambda: plugins("positions"),
    "recipes": lambda: plugins("recipes"),
    "tasks": lambda: plugins("tasks"),
    "operation_pages": lambda: pages("operations"),
    "policies": lambda: plugins("policies"),
    "policy_pages": lambda: pages("policies"),
    "interventions": lambda: plugins("interventions"),
    "intervention_pages": lambda: pages("interventions"),
    "read_out_pages": read_out_pages,
    "paths": paths,
    "columns": columns,
    "metrics": metrics,
    "headline": headline,
    "reference_sinks": reference_sinks,
}


def refreshed(text: str) -> str:
    """The document with every derived part made again."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{PARTS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([a-z_]+) -->.*?<!-- end \1 -->", replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for file in FILES:
        path = ROOT / file
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"refreshed {file}")
    RECORD.write_text(record(), encoding="utf-8")
    print(f"refreshed {RECORD.relative_to(ROOT)}")
