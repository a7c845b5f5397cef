"""Rewrites the parts of the documents that are derived from the code; a test fails when they are stale (``make docs``).

A derived part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Nothing is imported but names, schemas and
docstrings, so it takes a second.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import sinklab
from sinklab.cli.commands import find_commands
from sinklab.cli.describe import describe
from sinklab.jobs.scale import CHECKPOINT, RECORDED, SCALES, folder_names
from sinklab.jobs.verdict import OF_ONE_MODEL
from sinklab.registry import KINDS
from sinklab.report.claims_page import VerdictLine, VerdictList
from sinklab.results.metric import Metric, declared, metrics_of
from sinklab.results.summaries.claims import ClaimPart, ClaimRecord
from sinklab.results.table import COLUMNS
from sinklab.studies.pathways.words import DEFINITION, OF_BASE
from sinklab.studies.reproduce.display import format_effect
from sinklab.studies.reproduce.entries import Entry, entries_of, in_group
from sinklab.studies.reproduce.kept import StoredClaim, evidence_of, hardware_of, read_results, summary_of
from sinklab.studies.reproduce.overview import summary_of_entries
from sinklab.studies.reproduce.stated import stated
from sinklab.testing.references import DEFINITIONS, load_references
from sinklab.training.headline import headline_metrics, tracked

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RECORD = ROOT / "src" / "sinklab" / "claims" / "record.json"
FILES = (
    "docs/api.md",
    "docs/commands.md",
    "docs/corpora.md",
    "docs/claims.md",
    "docs/claims-results.md",
    "docs/read-outs.md",
    "docs/interventions.md",
    "docs/results.md",
    "docs/metrics.md",
    "docs/operations.md",
    "docs/pathways.md",
    "docs/policies.md",
    "docs/pretraining.md",
    "docs/reference-sinks.md",
    "docs/scores-that-depend-on-the-sink.md",
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


def scales() -> str:
    """What is run at each scale."""
    tree = ast.parse((ROOT / "src/sinklab/studies/reproduce/scales.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "DESCRIPTIONS")
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in ast.literal_eval(found.value).items()]  # type: ignore[arg-type]
    return "\n".join(["| scale | what is trained |", "|---|---|", *rows])


def claims() -> str:
    """Every claim with its statement, source and costs."""
    rows = []
    for name in KINDS["claims"]:
        claim = stated(name)
        costs = ", ".join(f"{claim.costs[scale]} ({scale})" for scale in SCALES if scale in claim.costs)
        costs += ", any checkpoint" if claim.checkpoint else ""
        rows.append(f"| `{name}` | {_cell(claim.statement)} | {_cell(claim.reference)} | {costs} |")
    return "\n".join(["| claim | statement | reference | cost |", "|---|---|---|---|", *rows])


def kept() -> list[StoredClaim]:
    """Committed results, by scale, of one scale those on the base of the source first, and by name."""

    def place(one: StoredClaim) -> tuple[int, str, str]:
        return RECORDED.index(one.record["scale"]), _folder(one), one.record["claim"]

    return sorted(read_results(RESULTS), key=place)


def _folder(one: StoredClaim) -> str:
    """``tiny``, or ``tiny-bos`` on another base than that of the source."""
    return one.folder.parent.name


def _entries() -> list[Entry]:
    return entries_of(kept())


def claim_counts() -> str:
    """How many verdicts there are of each kind, by kind of evidence."""
    tables = []
    for note, columns, rows in summary_of_entries(_entries()).counts:
        lines = (f"| {' | '.join(map(_cell, row))} |" for row in rows)
        tables.append("\n".join([note, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]))
    return "\n\n".join(tables)


def claim_verdicts() -> str:
    """What holds and what does not, of kinds of models."""
    return "\n\n".join(_list(one) for one in summary_of_entries(_entries()).lists[:2])


def claim_open() -> str:
    """What is open, what is about one model, and what is not tested or not applicable."""
    entries = _entries()
    sections = [_list(one) for one in summary_of_entries(entries).lists[2:]]
    untested: dict[str, list[str]] = {}
    for entry in in_group(entries, "untested"):
        untested.setdefault(f"{entry.verdict}, {entry.on.partition(':')[0]}", []).append(_link(entry.claim, entry.anchor))
    rows = [f"- {words}: {', '.join(sorted(links))}" for words, links in sorted(untested.items())]
    proofs = [f"{_link(entry.claim, entry.anchor)} {entry.verdict} ({entry.on})" for entry in in_group(entries, "proof")]
    if proofs:
        sections.append(f"### Proofs that are checked\n\n{'; '.join(sorted(proofs))}.")
    if rows:
        sections.append("\n".join(["### Not tested", "", "A premise does not hold there, which the details name.", "", *rows]))
    return "\n\n".join(sections)


def _list(one: VerdictList) -> str:
    head = f"| claim | evidence | part | effect, 95 % interval | claimed | published | {one.counted} |"
    table = [head, "|---" * 7 + "|", *map(_row, one.lines)] if one.lines else ["None."]
    return "\n".join([f"### {one.title}", "", one.note, "", *table])


def _row(line: VerdictLine) -> str:
    cells = (line.on, line.says, line.effect, line.claimed, line.published, line.count)
    return f"| {_link(line.claim, line.anchor)} | {' | '.join(map(_cell, cells))} |"


def _link(claim: str, anchor: str) -> str:
    return f"[`{claim}`](claims-results.md#{anchor})"


def claims_figure() -> str:
    """The figure over all claims, as SVG text."""
    return summary_of_entries(_entries()).figure


def _effect(part: ClaimPart) -> str:
    return _cell(format_effect(part["mean"], part["interval"], part["unit"])) or "no number"


def evidence() -> str:
    """What every claim with a committed result rests on: a synthetic language, natural text, or third-party models."""
    cells: dict[str, dict[str, list[str]]] = {}
    for one in kept():
        record = one.record
        link, base = f"(#{_folder(one)}-{record['claim']})", record.get("base") if record["conditions"] else None
        verdicts = cells.setdefault(record["claim"], {})
        if "models" not in record:
            of_what = evidence_of(record)
            scale = f"{record['scale']}: " if of_what == "natural" and base else ""  # the synthetic language has one
            words = f"{scale}{record['verdict']}{', ' + base if base else ''}"
            verdicts.setdefault(of_what, []).append(f"[{words}]{link}")
        for model in record.get("models", ()):
            if model["verdict"] != "not applicable":
                verdicts.setdefault(CHECKPOINT, []).append(f"`{model['name']}`: [{_of_one(model['verdict'])}]{link}")
    columns = {
        "toy": "synthetic language, theory",
        "natural": "natural text, models of ours",
        CHECKPOINT: "checkpoints of others",
    }
    rows = [
        f"| `{claim}` | {' | '.join('; '.join(verdicts.get(column, ['–'])) for column in columns)} |"
        for claim, verdicts in sorted(cells.items())
    ]
    return "\n".join([f"| claim | {' | '.join(columns.values())} |", "|---|---|---|---|", *rows])


def _of_one(verdict: str) -> str:
    """A verdict about a checkpoint in the words of one that is about one model."""
    return dict[str, str](OF_ONE_MODEL).get(verdict, verdict)


def checkpoint_results() -> str:
    """The committed results on checkpoints: claims against models."""
    found = [one.record for one in kept() if one.record["scale"] == CHECKPOINT]
    if not found:
        return "No results are kept yet."
    models = {model["name"]: model for record in found for model in record.get("models", ())}
    about = []
    for name, model in models.items():
        text = re.sub(r"(sha256-[0-9a-f]{16})[0-9a-f]*", r"`\1`", model["text"]) or "–"
        what = f"{model['kind']}, {model['operation']}"
        about.append(f"| `{name}` | `{model['revision']}` | {what} | {model['parameters']:,} | {_cell(text)} |")
    rows = []
    for record in found:
        by_name = {model["name"]: model for model in record.get("models", ())}
        of_models = []
        for name in models:
            model = by_name.get(name)
            effect = "" if model is None else _cell(format_effect(model["effect"], model["interval"], model["unit"]))
            applies = model is not None and model["verdict"] != "not applicable"
            of_models.append(
                f"**{_of_one(model['verdict'])}** {effect}" if model and applies else "not applicable" if model else "–"
            )
        link = f"[`{record['claim']}`](#{CHECKPOINT}-{record['claim']})"
        rows.append(f"| {link} | {' | '.join(of_models)} | {record['verdict']} |")
    head = f"| claim | {' | '.join(f'`{name}`' for name in models)} | over models |"
    return "\n".join(
        [
            *("| model | weights | what it is | parameters | text |", "|---|---|---|---|---|", *about, ""),
            *(head, "|---" * (len(models) + 2) + "|", *rows),
        ]
    )


def claim_results() -> str:
    """A table of the committed results, and how many there are of each verdict."""
    if not kept():
        return "No results are kept yet."
    sections = []
    for folder in (name for scale in SCALES for name in folder_names(scale)):
        found = [one.record for one in kept() if _folder(one) == folder]
        if not found:
            continue
        verdicts = [record["verdict"] for record in found]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts)))
        hardware = "; ".join(sorted({hardware_of(record) for record in found}))
        rows = []
        for record in found:
            row = summary_of(record)
            effect = _cell(format_effect(row["effect"], row["interval"], row["unit"])) or "–"
            link = f"[`{row['name']}`](#{folder}-{row['name']})"
            rows.append(f"| {link} | {row['source']} | **{row['verdict']}** | {effect} | {len(row['seeds'])} |")
        head = ["| claim | source | verdict | effect of the deciding part | seeds |", "|---|---|---|---|---|"]
        sections.append("\n".join([f"`{folder}` ({hardware}): {counts}.", "", *head, *rows]))
    return "\n\n".join(sections)


def claim_details() -> str:
    """Every committed result in full."""
    return "\n\n".join(_detail(one) for one in kept()) or "They follow with the results."


def _lent(record: ClaimRecord) -> str:
    """Further seeds of what is presupposed, in words."""
    of_label = record.get("lent", {})
    seeds = sorted({int(seed) for seeds in of_label.values() for seed in seeds})
    return f" (what is presupposed of {', '.join(of_label)} also {', '.join(map(str, seeds))})" if seeds else ""


def _detail(one: StoredClaim) -> str:
    record, folder = one.record, one.folder.relative_to(ROOT).as_posix()
    over = "over models: " if "models" in record else ""
    rows = _part_rows((("presupposed: ", record["presupposes"]), (over, record["parts"])))
    silent = []
    for model in record.get("models", ()):
        if model["verdict"] == "not applicable":
            silent.append(f"- `{model['name']}`: {model['reason']}")
        else:
            rows += _part_rows(
                ((f"{model['name']}, presupposed: ", model["presupposes"]), (f"{model['name']}: ", model["parts"]))
            )
            silent += [f"- `{model['name']}`, no verdict of its own: {model['reason']}"] if model["reason"] else []
    lines = [
        f"### {_folder(one)}: {record['claim']}",
        f"{record['statement']} ({record['reference']}) **{record['verdict'].capitalize()}.**",
        f"Published: {record['published']}",
        *(["\n".join(["| part | effect | claimed | found | verdict |", "|---|---|---|---|---|", *rows])] if rows else []),
        *([f"No verdict of its own: {record['reason']}."] if record["reason"] else []),
        *(["Not applicable, or undecided:\n\n" + "\n".join(silent)] if silent else []),
        *([record["evidence"]] if record["evidence"] else []),
        f"{'Draws of texts' if 'models' in record else 'Seeds'} {', '.join(map(str, record['seeds']))}{_lent(record)}; "
        f"{hardware_of(record)}; {record['created'][:10]}.",
    ]
    if (one.folder / "figure.png").is_file():
        lines.append(f"![Numbers of single seeds and effects of {record['claim']}](../{folder}/figure.png)")
    return "\n\n".join(lines)


def _part_rows(groups: Iterable[tuple[str, list[ClaimPart]]]) -> list[str]:
    """Lines of the table of parts, each group with what stands in front of its sentences."""
    return [
        f"| {prefix}{_cell(part['says'])} | {_cell(part['effect'])} | {part['expected']} "
        f"| {_effect(part)} | {part['verdict']} |"
        for prefix, parts in groups
        for part in parts
    ]


def record() -> str:
    """The newest verdicts of the committed results, as they are shipped with the package."""
    return json.dumps([summary_of(one.record) for one in kept()], indent=1, ensure_ascii=False) + "\n"


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


PATHWAYS = ("tiny", "tiny-bos", "small", "small-bos")
"""Folders of the committed comparisons of pathways."""


def pathways_summary() -> str:
    """One row a comparison: whether softmax has a sink at one rate for all, and which operations replace it."""
    lines = ["| models | sink of softmax | replaced by | not replaced by | undecided |", "|---|---|---|---|---|"]
    for folder in PATHWAYS:
        record = _pathways_record(folder)
        reference, *others = record["rows"]
        sink, window = (reference["bounds_at_one_rate"][name] for name in ("sink", "window"))
        models = f"[{folder.removesuffix('-bos')}, {OF_BASE[record['base']]}](#result-at-the-scale-{_anchor(record)})"
        what = f"{sink['mean']:.1f} % of heads; {window['mean']:z.3f} nats in a window"
        if {sink["verdict"], window["verdict"]} != {"not reproduced"}:
            lines.append(f"| {models} | {what}: none to replace | – | – | – |")
            continue
        by = {answer: [f"`{row['label']}`" for row in others if row["replacement"]["answer"] == answer] for answer in ANSWERS}
        lines.append(f"| {models} | {what} | {' | '.join(', '.join(by[answer]) or 'none' for answer in ANSWERS)} |")
    return "\n".join(lines)


ANSWERS = ("yes", "no", "undecided")


def _pathways_record(folder: str) -> dict[str, Any]:
    return json.loads((RESULTS / folder / "pathways" / "run.json").read_text(encoding="utf-8"))


def _anchor(record: Mapping[str, Any]) -> str:
    return f"{record['scale']}-{OF_BASE[record['base']].replace(' ', '-').lower()}"


def pathways_answers(folder: str) -> str:
    """What decides, of one comparison."""
    before, _, _ = _pathways_page(folder).partition(_pathways_record(folder)["paragraph"])
    return "\n".join(line for line in before.splitlines() if line.startswith("|"))


def pathways_words(folder: str) -> str:
    """What the numbers of one comparison say, by the rules of the command."""
    record = _pathways_record(folder)
    return "\n".join(
        [f"> {record['paragraph']}", "", *(f"- **{about}.** {text}" for about, text in record["statements"].items())]
    )


def pathways_numbers(folder: str) -> str:
    """Every number of one comparison."""
    page = _pathways_page(folder)
    last = list(_pathways_record(folder)["statements"].values())[-1]
    return page.partition(last)[2].strip()


def _pathways_page(folder: str) -> str:
    return (RESULTS / folder / "pathways" / "pathways.md").read_text(encoding="utf-8")


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
    "scales": scales,
    "claims": claims,
    "claim_counts": claim_counts,
    "claim_verdicts": claim_verdicts,
    "claim_open": claim_open,
    "claim_results": claim_results,
    "evidence": evidence,
    "checkpoint_results": checkpoint_results,
    "claim_details": claim_details,
    "columns": columns,
    "metrics": metrics,
    "headline": headline,
    "reference_sinks": reference_sinks,
    "pathways_summary": pathways_summary,
    "pathways_definition": lambda: "\n".join(f"> {line}".rstrip() for line in DEFINITION.splitlines()),
} | {
    f"pathways_{what}_{folder.replace('-', '_')}": functools.partial(of_folder, folder)
    for folder in PATHWAYS
    for what, of_folder in (("answers", pathways_answers), ("words", pathways_words), ("numbers", pathways_numbers))
}


FIGURES: dict[str, Callable[[], str]] = {"docs/claims.svg": claims_figure}
"""Drawn from committed results, by file."""


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
    for file, draw in FIGURES.items():
        (ROOT / file).write_text(draw(), encoding="utf-8")
        print(f"refreshed {file}")
    RECORD.write_text(record(), encoding="utf-8")
    print(f"refreshed {RECORD.relative_to(ROOT)}")
