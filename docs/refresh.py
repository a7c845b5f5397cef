"""Rewrites the parts of the documents that are derived from the code; a test fails when they are stale (``make docs``).

A derived part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; NAME is a kind of plug-in or in ``PARTS``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from sinklab.cli.catalogue import DEFINITIONS as DEFINITIONS_FILE
from sinklab.cli.catalogue import PACKAGE, Description, described, papers, plugin_record
from sinklab.cli.commands import COMMANDS, SUMMARIES, find_commands
from sinklab.registry import KINDS
from sinklab.results.blocks import number
from sinklab.results.metric import Metric, declared, metrics_of
from sinklab.results.table import COLUMNS
from sinklab.training.callback import HEADLINE
from sinklab_claims.contract.claim import ROWS
from sinklab_claims.reproduce.claims import stated
from sinklab_claims.reproduce.show import ORDER, effect_words
from sinklab_claims.verdict.records import (
    ClaimFound,
    ModelFound,
    PartFound,
    deciding_part,
    evidence_of,
    published,
    read_results,
    summary_of,
)
from sinklab_claims.verdict.rule import SEEDS

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


@functools.cache
def kept() -> list[ClaimFound]:
    """The results in ``results``, by claim."""
    return sorted((result.record for result in read_results(ROOT / "results")), key=lambda found: found.claim)


def decoders() -> str:
    """What the claims find on each of the real language models, from ``results/checkpoint.json``."""

    def cell(part: PartFound | None) -> str:
        if part is None or part.mean is None:
            return "–"
        mark = {"reproduced": "✓", "agrees with the proof": "✓", "inconclusive": "·"}.get(part.verdict, "✗")
        return f"{mark} {effect_words(part.mean, part.interval, None)}"

    rows = []
    for claim in (found for found in kept() if found.models):
        of = {
            model.name: [part for part in model.parts if not part.secondary] for model in claim.models if model.name in DECODERS
        }
        theirs, name = published().get(claim.claim, {}), f"`{claim.claim}`"
        for at, part in enumerate(next((parts for parts in of.values() if parts), ())):
            unit = "" if part.unit == "ratio" else f" {part.unit}"
            value = theirs.get("effects", {}).get(part.effect)
            source = "" if value is None else f"; {value:g} ({theirs['of']})"
            cells = [cell(of[model][at] if of.get(model) else None) for model in DECODERS]
            rows.append((name if at == 0 else "", said(part), f"{part.expected}{unit}{source}", *cells))
    return table(("claim", "part", "claimed; published", *DECODERS.values()), rows)


SYMBOLS = {"checkpoint": "◆", "natural": "■", "toy": "●"}
PROVED, UNTESTED = "agrees with the proof", ("not tested at this scale", "not applicable")
VERDICTS = ("reproduced", "in part", "not reproduced", "inconclusive")


def is_other(found: ClaimFound) -> bool:
    """Whether it is on the base that the claim's source does not have."""
    return found.base is not None and found.base != stated(found.claim).bases[0]


def answered(found: ClaimFound) -> list[ModelFound]:
    """The models that a claim applies to."""
    return [model for model in found.models if model.verdict not in UNTESTED]


def is_tested(found: ClaimFound) -> bool:
    """Whether there is a verdict: what is presupposed holds, over models for several."""
    return found.verdict not in UNTESTED and (not found.models or len(answered(found)) >= SEEDS)


def verdicts() -> str:
    """How many results have each verdict, by kind of evidence."""
    counts = Counter[tuple[str, str]](
        (SYMBOLS[evidence_of(found)] + " other base" * is_other(found), found.verdict if is_tested(found) else "not tested")
        for found in kept()
        if found.verdict != PROVED
    )
    rows = {"◆": "models that others trained, all together", "■": "our trainings on text that people wrote"}
    rows |= {"■ other base": "the same on the base that the source does not have"}
    rows |= {"●": "our trainings on a synthetic language", "● other base": "the same on the base that the source does not have"}
    columns = (*VERDICTS, "not tested")
    lines = [(f"{name[0]} {says}", *(str(counts[name, verdict]) for verdict in columns)) for name, says in rows.items()]
    return table(("evidence", *columns), lines)


def verdicts_by_model() -> str:
    """The same of each model by itself, over draws of texts."""
    counts = Counter[tuple[str, str]]((model.name, model.verdict) for found in kept() for model in answered(found))
    names = dict.fromkeys((*DECODERS, *sorted(name for name, _ in counts)))
    lines = [(f"◇ `{name}`", *(str(counts[name, verdict]) for verdict in VERDICTS)) for name in names]
    return table(("one model", *VERDICTS), lines)


def trainings(verdict: str) -> str:
    """Our trainings that have a verdict, natural text and the base of the source first: the part that decides."""
    rows = []
    found_so = [found for found in kept() if not found.models and found.verdict == verdict]
    for found in sorted(found_so, key=lambda of: (evidence_of(of) == "toy", is_other(of), of.claim, ORDER.index(of.scale))):
        base = "" if found.base is None else f", {ROWS[found.base].split(',')[0]}"
        place = f"{SYMBOLS[evidence_of(found)]} `{found.scale}`{base}{' (other base)' * is_other(found)}"
        open_premises = [part for part in found.presupposes if part.verdict == verdict == "inconclusive"]
        part = (open_premises or [decisive(found.parts, verdict)])[0]
        words = f"premise: {said(part)}" if open_premises else words_of(found.parts, part, verdict)
        known = sum(value is not None for value in part.by_seed.values())
        seeds = f"{known}" if known == len(found.seeds) else f"{known} of {len(found.seeds)}"
        seeds += f", looks: {found.looks}" if found.looks > 1 else ""
        rows.append((f"`{found.claim}`", place, words, *numbers_of(found.claim, part), seeds))
    return table(("claim", "evidence", "part", "effect, 95 % interval", "claimed", "published", "seeds"), rows)


def other_models() -> str:
    """What claims find on the models that are not among :data:`DECODERS`."""
    rows = []
    for claim, model in ((found.claim, model) for found in kept() for model in answered(found)):
        if model.name not in DECODERS and model.verdict != PROVED:
            part = decisive(model.parts, model.verdict)
            word = {"reproduced": "yes: ", "not reproduced": "no: "}.get(model.verdict, "in part ")
            words = word + words_of(model.parts, part, model.verdict)
            rows.append((f"`{claim}`", f"◇ `{model.name}`", words, *numbers_of(claim, part), str(len(part.by_seed))))
    return table(("claim", "evidence", "part", "effect, 95 % interval", "claimed", "published", "draws"), rows)


def decisive(parts: Sequence[PartFound], verdict: str) -> PartFound:
    """The part of several that is shown."""
    part = deciding_part(parts, verdict)
    assert part is not None
    return part


def said(part: PartFound) -> str:
    """What a part says; that it says so of the model as it is needs no word."""
    return part.says.removesuffix(" with baseline").rstrip(",")


def words_of(parts: Sequence[PartFound], part: PartFound, verdict: str) -> str:
    """A part, and how many more there are; of what holds in part how many do, and what is wrong with this one."""
    counted = [other.verdict for other in parts if not other.secondary]
    says = said(part)
    if verdict == "in part":
        what = {"not reproduced": "not", "absent at this scale": "absent"}.get(part.verdict, "open")
        return f"({counted.count('reproduced')} of {len(counted)}) {what}: {says}"
    return f"{says} (and {len(counted) - 1} more)" if verdict == "reproduced" and len(counted) > 1 else says


def numbers_of(claim: str, part: PartFound) -> tuple[str, str, str]:
    """The effect, the region claimed, and the number published with the model that it is of."""
    theirs = published().get(claim, {})
    value = theirs.get("effects", {}).get(part.effect)
    source = "–" if value is None else f"{number(value)} ({theirs['of']})"
    return effect_words(part.mean, part.interval, part.unit), part.expected, source


def proofs() -> str:
    """What is proved, and where it was checked."""
    where: dict[str, list[str]] = {}
    proved = {found.claim for found in kept() if found.verdict == PROVED}
    for found in kept():
        if found.claim in proved:
            place = f"{len(answered(found))} models" if found.models else f"`{found.scale}`"
            where.setdefault(found.claim, []).append(f"{SYMBOLS[evidence_of(found)]} {place}: {found.verdict}")
    return "\n".join(f"- `{claim}`: {', '.join(places)}" for claim, places in where.items())


def untested() -> str:
    """Claims that a kind of evidence says nothing of."""
    where: dict[str, list[str]] = {}
    for found in kept():
        if not is_tested(found):
            few = f", fewer than {SEEDS} models" if found.models else ""
            where.setdefault(SYMBOLS[evidence_of(found)] + few, []).append(f"`{found.claim}`")
    return "\n".join(f"- {kind}: {', '.join(dict.fromkeys(claims))}" for kind, claims in sorted(where.items()))


PARTS: dict[str, Callable[[], str]] = {
    "columns": columns,
    "headline": headline,
    "paths": paths,
    "decoders": decoders,
    "verdicts": verdicts,
    "verdicts_by_model": verdicts_by_model,
    "reproduced": functools.partial(trainings, "reproduced"),
    "in_part": functools.partial(trainings, "in part"),
    "refuted": functools.partial(trainings, "not reproduced"),
    "undecided": functools.partial(trainings, "inconclusive"),
    "other_models": other_models,
    "proofs": proofs,
    "untested": untested,
}


KEPT = ROOT / "src" / "sinklab_claims" / "record.json"


def results() -> str:
    """What ``results`` holds, as it comes with the package: a line for each, the fields of ``sinklab claims --json``."""
    rows = [summary_of(found) for found in kept()]
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
    for path, content in (derived | {KEPT: results()}).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"refreshed {path.relative_to(ROOT)}")
