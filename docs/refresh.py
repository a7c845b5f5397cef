"""Rewrites the parts of the documents that are derived from the code; a test fails when they are stale (``make docs``).

A derived part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; NAME is a kind of plug-in or in ``PARTS``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sinklab.cli.catalogue import DEFINITIONS as DEFINITIONS_FILE
from sinklab.cli.catalogue import PACKAGE, Description, described, papers, plugin_record
from sinklab.cli.commands import COMMANDS, SUMMARIES, find_commands
from sinklab.registry import KINDS
from sinklab.results.metric import Metric, declared, metrics_of
from sinklab.results.table import COLUMNS
from sinklab.training.callback import HEADLINE

ROOT = Path(__file__).parents[1]
PYPI = ROOT / "PYPI.md"
"""What pyproject.toml gives as the long description; pictures would need an address, and the project has none yet."""


def definitions() -> dict[str, list[Description]]:
    """By name what the plug-ins of sinklab say of themselves, and the metrics of its probes: what :data:`DEFINITIONS` holds."""
    own = [registry for plural, registry in KINDS.items() if plural not in ("recipes", "read_outs", "claims")]
    described = [plugin_record(registry, name) for registry in own for name in sorted(registry._files())]
    names = {record["name"] for record in described}
    measured = {metric.name: metric for probe in KINDS["probes"]._files() for metric in metrics_of("probes", probe)}
    described += [metric_record(metric) for name, metric in sorted(measured.items()) if name not in names]
    found: dict[str, list[Description]] = {}
    for record in described:
        file = record["file"] and Path(record["file"]).relative_to(PACKAGE).as_posix()
        found.setdefault(record["name"], []).append(record | {"file": file})
    return found


def metric_record(metric: Metric) -> Description:
    """One metric, and which probe or read-out measures it."""
    owners = [(plural, own) for plural in ("probes", "read_outs") for own in KINDS[plural] if metric in metrics_of(plural, own)]
    measured = " and ".join(f"the {KINDS[plural].kind} {own}" for plural, own in owners)
    about = {"papers": papers(metric.paper), "version": metric.version}
    return described("metric", metric.name, f"Measured by {measured}.", "", [metric], **about)


def plugins(plural: str) -> str:
    """The plug-ins of one kind."""
    registry = KINDS[plural]
    return table((registry.kind, "what it is"), [(f"`{name}`", registry.summary(name)) for name in registry])


def columns() -> str:
    """The columns of the results table."""
    return table(("column", "type", "meaning"), [(f"`{name}`", dtype, meaning) for name, (dtype, meaning) in COLUMNS.items()])


def headline() -> str:
    """The numbers that SinkCallback logs, with the names that trackers show."""
    rows = [
        (
            f"`{name}`",
            f"`train/{name}`",
            f"`{of}` {which}".strip(),
            metric.unit if column == "value" else "position",
            metric.text,
        )
        for name, (of, which, column) in HEADLINE.items()
        if (metric := declared(of))
    ]
    return table(("logged as", "shown as", "metric", "unit", "definition"), rows)


def paths() -> str:
    """The ways to compute an operation."""
    from sinklab.attention.paths.table import PATHS

    return table(("path", "what it is"), [(f"`{name}`", meaning) for name, meaning in PATHS.items()])


def table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


DECODERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2-135M",
    "google/gemma-3-270m": "Gemma 3 270M",
    "Qwen/Qwen2.5-Coder-0.5B": "Qwen2.5-Coder 0.5B",
}


def decoders() -> str:
    """What the claims find on each of the real language models, from ``results/checkpoint.json``."""
    from sinklab_claims.reproduce.show import effect_words
    from sinklab_claims.verdict.records import PartFound, published, read_results

    def cell(part: PartFound | None) -> str:
        if part is None or part.mean is None:
            return "–"
        mark = {"reproduced": "✓", "agrees with the proof": "✓", "inconclusive": "·"}.get(part.verdict, "✗")
        return f"{mark} {effect_words(part.mean, part.interval, None)}"

    rows = []
    for claim in sorted(
        (kept.record for kept in read_results(ROOT / "results") if kept.record.models), key=lambda of: of.claim
    ):
        of = {
            model.name: [part for part in model.parts if not part.secondary] for model in claim.models if model.name in DECODERS
        }
        theirs, name = published().get(claim.claim, {}), f"`{claim.claim}`"
        for at, part in enumerate(next((parts for parts in of.values() if parts), ())):
            says = part.says.removesuffix(" with baseline").rstrip(",")
            unit = "" if part.unit == "ratio" else f" {part.unit}"
            number = theirs.get("effects", {}).get(part.effect)
            source = "" if number is None else f"; {number:g} ({theirs['of']})"
            cells = [cell(of[model][at] if of.get(model) else None) for model in DECODERS]
            rows.append((name if at == 0 else "", says, f"{part.expected}{unit}{source}", *cells))
    return table(("claim", "part", "claimed; published", *DECODERS.values()), rows)


PARTS: dict[str, Callable[[], str]] = {"columns": columns, "headline": headline, "paths": paths, "decoders": decoders}


KEPT = ROOT / "src" / "sinklab_claims" / "record.json"


def results() -> str:
    """What ``results`` holds, as it comes with the package: a line for each, the fields of ``sinklab claims --json``."""
    from sinklab_claims.reproduce.show import ORDER
    from sinklab_claims.verdict.records import read_results, summary_of

    rows = [summary_of(kept.record) for kept in read_results(ROOT / "results")]
    rows.sort(key=lambda row: (-ORDER.index(row["scale"]), row["name"], row["base"] or ""))
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


WRITTEN = {"sweep": "make sweep"}
"""Parts that a long run has written, and its command."""


def refreshed(text: str) -> str:
    """The document with every derived part made again."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name in WRITTEN:
            return match[0]
        part = PARTS[name]() if name in PARTS else plugins(name)
        return f"<!-- begin {name} -->\n\n{part}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([a-z_]+) -->.*?<!-- end \1 -->", replace, text, flags=re.DOTALL)


def for_pypi(readme: str) -> str:
    """The README as PyPI shows it, without what has no public address: pictures, and links to files beside it."""
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n\n", "", readme, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)
    return f"{text.rstrip()}\n\nThe pages that are spoken of here (docs/) and the examples are in the repository.\n"


if __name__ == "__main__":
    PYPI.write_text(for_pypi((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := refreshed(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"refreshed {path.relative_to(ROOT)}")
    summaries = {
        name: dataclasses.replace(command, text="").summary for name, command in find_commands().items() if name in COMMANDS
    }
    derived = {
        path: json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for path, known in ((DEFINITIONS_FILE, definitions()), (SUMMARIES, summaries))
    }
    for path, kept in (derived | {KEPT: results()}).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != kept:
            path.write_text(kept, encoding="utf-8")
            print(f"refreshed {path.relative_to(ROOT)}")
