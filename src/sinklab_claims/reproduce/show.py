"""What is shown of claims: the list, one in full, and verdicts with their effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sinklab.results.blocks import Block, Cell, Facts, Grid, Heading, Say, counted, number
from sinklab_claims.contract.claim import CHECKPOINT, ROWS
from sinklab_claims.verdict.records import (
    ClaimFound,
    ModelFound,
    PartFound,
    deciding_part,
    in_words,
    published,
    published_effects,
)

EVIDENCE = {
    "toy": "models of ours on a synthetic language or task",
    "natural": "models of ours on text that people wrote",
    "checkpoint": "models that others trained",
}
"""Kinds of evidence in words."""


def effect_words(mean: float | None, interval: Sequence[float] | None, unit: str | None) -> str:
    """``25.1 [20.3, 29.9] points``; a dash where there is no number."""
    ends = "" if mean is None or interval is None else f" [{number(interval[0])}, {number(interval[1])}]"
    return f"{number(mean)}{ends} {unit or ''}".strip() if mean is not None else number(None)


def show_results(found: Sequence[ClaimFound]) -> Iterator[Block]:
    """Of several claims a table of verdicts; of one its parts too."""
    with_models = [claim for claim in found if claim.models]
    rest = [claim for claim in found if not claim.models]
    if with_models:
        yield from _of_models(with_models)
    if rest:
        rows: list[list[Cell]] = [
            [claim.claim, _looked(in_words(claim.verdict, claim.parts), claim.looks), _deciding(claim), len(claim.seeds)]
            for claim in rest
        ]
        yield Grid(("claim", "verdict", "effect", "seeds"), rows, text=3)
    if len(found) == 1:
        yield from _parts_of(found[0])
    reasons = [(claim.claim, claim.reason) for claim in found if claim.reason]
    if reasons:
        yield Facts(reasons)


def _of_models(found: Sequence[ClaimFound]) -> Iterator[Block]:
    """Claims against models: what was found about each, over models, and why a claim does not apply to one."""
    names = list(dict.fromkeys(model.name for claim in found for model in claim.models))
    over = ["over models"] if len(names) > 1 else []
    rows, reasons = [], dict[str, list[str]]()
    for claim in found:
        of_name = {model.name: model for model in claim.models}
        cells = [_verdict_of(of_name[name]) if name in of_name else number(None) for name in names]
        rows.append([claim.claim, *cells, *([in_words(claim.verdict, claim.parts)] if over else [])])
        for model in claim.models:
            if model.verdict == "not applicable" and model.reason:
                reasons.setdefault(f"{model.name}: {model.reason}", []).append(claim.claim)
    yield Grid(("claim", *names, *over), rows, text=len(names) + 2)
    if reasons:
        words = [f"{', '.join(claims)}: {reason}" for reason, claims in reasons.items()]
        yield Facts([("" if at else "not applicable", why) for at, why in enumerate(words)])


def _verdict_of(model: ModelFound) -> str:
    if model.verdict == "not applicable" or model.effect is None:
        return model.verdict
    return f"{in_words(model.verdict, model.parts)}  {effect_words(model.effect, model.interval, model.unit)}"


def _looked(verdict: str, looks: int) -> str:
    """A verdict, and how often it was judged where that is more than once."""
    return f"{verdict}, looks: {looks}" if looks > 1 else verdict


def _deciding(claim: ClaimFound) -> str:
    part = deciding_part(claim.parts, claim.verdict)
    return number(None) if part is None else effect_words(part.mean, part.interval, part.unit)


def _parts_of(claim: ClaimFound) -> Iterator[Block]:
    """Every part of a claim, and of every model that it applies to."""
    groups: list[tuple[str, Sequence[PartFound]]] = [("presupposed", claim.presupposes), ("", claim.parts)]
    for model in claim.models:
        if model.verdict != "not applicable":
            groups += [(f"{model.name}, presupposed", model.presupposes), (model.name, model.parts)]
    rows: list[list[str | int | None]] = []
    for name, part in ((name, part) for name, parts in groups for part in parts):
        published = published_effects().get(claim.claim, {}).get(part.effect)
        words = effect_words(part.mean, part.interval, part.unit) + (f" of {part.model}" if part.model else "")
        says = f"{name}: {part.says}" if name else part.says
        says += " (secondary)" if part.secondary else ""
        rows.append([says, part.effect, words, part.expected, None if published is None else number(published), part.verdict])
    if rows:
        headings = ("part", "effect", "value, 95 %", "claimed", "published", "verdict")
        keep = [index for index in range(6) if index != 4 or any(row[index] is not None for row in rows)]
        yield Grid([headings[index] for index in keep], [[row[index] for index in keep] for row in rows], text=6)


def show_claims(rows: Sequence[Mapping[str, Any]], where: str) -> Iterator[Block]:
    """Every claim on a line: source, scale with its cost, last verdict with the kind of evidence, and statement."""
    table = []
    for row in rows:
        other = row["other_base"]
        verdict = _looked(row["verdict"] or "not run yet", row.get("looks", 1))
        verdict += "" if other is None else f"; {ROWS[other['base']]}: {other['verdict']}"
        cost = f"{row['cost']} at {row['scale']}" if row["cost"] else row["scale"]
        table.append([row["name"], row["source"], cost, verdict, row["evidence"] or "", row["statement"]])
    yield Grid(("claim", "source", "cost", "verdict", "evidence", "statement"), table, text=6)
    yield Say(f"{counted(len(rows), 'claim')}. One in full, with every part: `sinklab claims NAME`", small=True)
    if any(row["other_base"] for row in rows):
        yield Say("A verdict is on the base of the claim's source; behind it stands that on the other one.", small=True)
    kinds = [f"{kind}, {words}" for kind, words in EVIDENCE.items() if any(row["evidence"] == kind for row in rows)]
    yield Say(f"Evidence: {'; '.join(kinds)}." if kinds else "Nothing has been run at this scale.", small=True)
    yield Say(f"Verdicts from {where}.", small=True)


ORDER = (CHECKPOINT, "medium", "small", "tiny")
"""Of evidence: models that others trained, then trainings of ours on natural text, then on a synthetic language."""


def weakness(row: Mapping[str, Any]) -> tuple[int, bool, int]:
    """Orders results of a claim, the strongest evidence first; of one kind a verdict is before none."""
    return -list(EVIDENCE).index(row["evidence"]), row["verdict"] == "inconclusive", ORDER.index(row["scale"])


def show_paper(rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], where: str) -> Iterator[Block]:
    """Claims in full, those that models of others answer first: verdicts, the table of the paper beside ours, and every part
    with what is published of it and what was found.

    Args:
        rows: of the claims.
        results: of all scales, the oldest first.
        where: they are from.
    """
    answered = {result["name"] for result in results if result["scale"] == CHECKPOINT}
    for row in sorted(rows, key=lambda row: row["name"] not in answered):
        yield Heading(row["name"])
        yield Say(row["statement"])
        newest = {(result["scale"], result["base"]): result for result in results if result["name"] == row["name"]}
        found = {_place(newest[at]): newest[at] for at in sorted(newest, key=lambda at: ORDER.index(at[0]))}
        facts = [("published", f"{row['published']} ({row['reference']})")]
        facts += [("", f"numbers by part: {of}")] if (of := published().get(row["name"], {}).get("of")) else []
        facts.append(("cost", ", ".join(f"{cost} at {scale}" for scale, cost in row["costs"].items())))
        yield Facts([*facts, *((place, _found(result)) for place, result in found.items())])
        models = [
            model for result in found.values() for model in result.get("models", ()) if model["verdict"] != "not applicable"
        ]
        table = published().get(row["name"], {}).get("table")
        if table and (counted := [model for model in models if model.get("numbers")]):
            ours = [
                [model["numbers"].get(label, {}).get(metric) for model in counted] for _, label, metric, *_ in table["rows"]
            ]
            lines = [
                [words, *map(_plain, theirs), *own] for (words, _, _, *theirs), own in zip(table["rows"], ours, strict=True)
            ]
            yield Grid(("", *table["models"], *(f"{model['name']}, here" for model in counted)), lines)
        yield from _by_layer(models)
        measured = [(model["name"], model) for model in models]
        measured += [(place, result) for place, result in found.items() if not result.get("models")]
        effects = published_effects().get(row["name"], {})
        lines = [
            [
                "" if at else name,
                part["says"] + " (secondary)" * part["secondary"],
                part["expected"],
                _plain(effects.get(part["effect"])),
                effect_words(part["mean"], part["interval"], part["unit"]),
                part["n"],
                part["verdict"],
            ]
            for name, result in measured
            for at, part in enumerate(result.get("parts", ()))
        ]
        if lines:
            yield Grid(("found in", "part", "claimed", "published", "here, 95 %", "n", "verdict"), lines, text=3)
        else:
            yield Say("Not run yet.")
        silent = {of["name"]: of["reason"] for result in found.values() for of in result.get("models", ()) if of not in models}
        why = [(name, of["reason"]) for name, of in measured if of["verdict"] in ("inconclusive", "not tested at this scale")]
        if unsaid := [*why, *silent.items()]:
            yield Facts(unsaid)
    yield Say(f"n: seeds, or draws of texts. Verdicts from {where}.", small=True)


def _by_layer(models: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Numbers that were taken of every layer by itself."""
    for model in models:
        layers = {label: of for label, of in model.get("numbers", {}).items() if label.startswith("layer ")}
        if layers:
            metrics = list(dict.fromkeys(metric for of in layers.values() for metric in of))
            lines: list[list[Cell]] = [[label, *(of.get(metric) for metric in metrics)] for label, of in layers.items()]
            yield Grid((model["name"], *metrics), lines)


def _plain(value: float | None) -> str | None:
    """As it is published, not rounded."""
    return None if value is None else f"{value:g}"


def _place(result: Mapping[str, Any]) -> str:
    """Where a verdict is from."""
    if result.get("models"):
        return f"at {CHECKPOINT}"
    return f"at {result['scale']}" if result["base"] is None else f"{result['scale']}, {ROWS[result['base']]}"


def _found(row: Mapping[str, Any]) -> str:
    """The verdict, the effect, and on how many seeds of what these rest; the models that others trained by name."""
    effect = effect_words(row["effect"], row["interval"], row["unit"])
    verdict = _looked(row["verdict"], row.get("looks", 1))
    of = [f"{model['name']}: {model['verdict']}" for model in row.get("models", ()) if model["verdict"] != "not applicable"]
    return f"{verdict}  {effect}  ({'; '.join(of) or counted(len(row['seeds']), 'seed')}; evidence: {row['evidence']})"
