"""What kept results come to, for a reader of five minutes: what holds, what does not, what is open, and on which evidence.

Nothing here is worded by hand: counts, lists and the figure are made from records, so that no new number can make a sentence
untrue. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from sinklab.jobs.claim import CHECKPOINT, RECORDED
from sinklab.jobs.needed import leans_inside, needed_seeds
from sinklab.jobs.verdict import PLAIN, SEEDS
from sinklab.report.claims_page import ClaimsSummary, VerdictLine, VerdictList, effect_words
from sinklab.report.forest import Kind, Mark, Row, draw_forest
from sinklab.report.words import number
from sinklab.results.summaries import ClaimOfModel, ClaimPart, ClaimRecord, Judged
from sinklab.studies.reproduce.kept import Evidence, StoredClaim, deciding_part, evidence_of
from sinklab.studies.reproduce.published import Published, published_effect

__all__ = [
    "Entry",
    "Group",
    "draw_overview",
    "entries_of",
    "in_group",
    "in_order",
    "summary_of_entries",
]

About = Literal["trainings", "models", "one model", "proof"]
"""What an interval is over, and so what a verdict is about; a proof is checked, which is no evidence."""

Group = Literal["holds", "fails", "open", "untested", "one model", "proof"]

SIGNS: dict[Kind, str] = {
    "toy": "●",
    "toy, other base": "●",
    "natural": "■",
    "natural, one model": "□",
    "checkpoint": "◆",
    "checkpoint, one model": "◇",
}
"""Kinds of evidence as the figure draws them."""

ROWS = {"bos": "with BOS", "no-bos": "no BOS"}
"""What the rows of trained models begin with."""

ANSWERS = {"reproduced": "yes", "not reproduced": "no"}
"""What is said of one model, of which a verdict about the claim would say too much."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One verdict with what it rests on.

    Attributes:
        folder: that of the scale, such as ``tiny`` or ``tiny-bos``; with the claim it is where the details are.
        base: what the rows of trained models begin with, ``bos`` or ``no-bos``; ``None`` where nothing is trained.
        own: whether that is as in the source, so that the verdict is that of the claim.
        model: name of the model that it is about, if it is about one.
        part: what makes the verdict; of one that is open what is open, which may be a premise; ``None`` without any.
        others: how many parts there are besides, of a claim all of whose parts hold.
        premise: whether ``part`` is something that the claim presupposes.
        seeds: trainings, draws of texts, or models.
        needed: of what is open, how many of these would decide it; ``None`` where that cannot be foretold.
        leans: of what is open, whether its middle is in the claimed region.
        deciding: the part of the claim itself that makes the verdict, never a premise.
        parts: all that the claim says.
    """

    claim: str
    statement: str
    reference: str
    folder: str
    base: str | None
    own: bool
    evidence: Evidence
    about: About
    model: str
    verdict: str
    reason: str
    part: ClaimPart | None
    others: int
    premise: bool
    seeds: int
    needed: int | None
    leans: bool
    deciding: ClaimPart | None
    parts: tuple[ClaimPart, ...]

    @property
    def group(self) -> Group:
        """The list that it stands in: verdicts about one model, and checks of proofs, have lists of their own."""
        if self.about == "proof":
            return "proof"
        if self.verdict in ("not tested at this scale", "not applicable"):
            return "untested"
        if self.about == "one model":
            return "one model"
        lists: dict[str, Group] = {"reproduced": "holds", "not reproduced": "fails"}
        return lists.get(self.verdict, "open")

    @property
    def published(self) -> Published | None:
        """What the source reports for the effect of :attr:`part`."""
        return None if self.part is None else published_effect(self.claim, self.part["effect"])

    @property
    def anchor(self) -> str:
        """Of its details, on the page of results."""
        return f"{self.folder}-{self.claim}"

    @property
    def on(self) -> str:
        """What was run, in a few words: ``toy, tiny, rows with BOS``."""
        sign = SIGNS[self.kind]
        if self.about == "one model":
            return f"{sign} {self.evidence}: `{self.model}`"
        if self.evidence == "checkpoint":
            return f"{sign} {self.evidence}: {self.seeds} {'model' if self.seeds == 1 else 'models'}"
        rows = "" if self.base is None else f", {ROWS[self.base]}{'' if self.own else ' (the other base)'}"
        return f"{sign} {self.evidence}: `{self.folder.partition('-')[0]}`{rows}"

    @property
    def kind(self) -> Kind:
        """How it is drawn."""
        if self.about == "one model":
            return "natural, one model" if self.evidence == "natural" else "checkpoint, one model"
        if self.evidence == "toy":
            return "toy" if self.own else "toy, other base"
        return self.evidence


def entries_of(results: Iterable[StoredClaim]) -> list[Entry]:
    """Every verdict of kept results; of checkpoints those about each to which the claim applies, and that over models.

    That there are too few models is said by those about each, and has no entry of its own. The order is that of claims, and of
    one claim that of scales, the base of its source first, and then checkpoints.
    """
    entries = []
    for one in results:
        record, folder = one.record, one.folder.parent.name
        if "models" not in record:
            entries.append(_entry(record, record, folder))
            continue
        applied = [model for model in record["models"] if model["verdict"] != "not applicable"]
        if not applied or len(applied) >= SEEDS or record["verdict"] != "inconclusive":
            entries.append(_entry(record, record, folder))
        entries += [_entry(record, model, folder, model) for model in applied]
    return sorted(entries, key=lambda entry: (entry.claim, _place(entry), entry.model))


def _place(entry: Entry) -> tuple[int, bool, bool]:
    scale = entry.folder.partition("-")[0]
    return RECORDED.index(scale), not entry.own, bool(entry.model)


def _entry(record: ClaimRecord, judged: Judged, folder: str, model: ClaimOfModel | None = None) -> Entry:
    """One verdict of a record: its own, or that about one of its models."""
    known = record if model is None else model
    open_premise = next((part for part in known["presupposes"] if _undecided(part)), None)
    verdict, deciding = judged["verdict"], _deciding(judged)
    plain = PLAIN.get(verdict, verdict)
    one = record.get("one_model") if model is None else model["name"]
    about: About = "one model" if one else "models" if record["scale"] == CHECKPOINT else "trainings"
    if verdict in ("agrees with the proof", "contradicts the proof"):
        about = "proof"
    seeds = len(record["seeds"])
    if about == "models":
        seeds = 0 if deciding is None else len(deciding["by_seed"])
    waits = _forecast(judged, open_premise) if verdict == "inconclusive" else None
    return Entry(
        claim=record["claim"],
        statement=record["statement"],
        reference=record["reference"],
        folder=folder,
        base=record.get("base") if record["conditions"] else None,
        own=folder == record["scale"],
        evidence=evidence_of(record),
        about=about,
        model=one or "",
        verdict=verdict,
        reason=known["reason"],
        part=deciding if waits is None else waits.part,
        others=len(judged["parts"]) - 1 if plain == "reproduced" else 0,
        premise=waits is not None and waits.part is open_premise,
        seeds=seeds,
        needed=None if waits is None else waits.needed,
        leans=waits is not None and waits.leans,
        deciding=deciding,
        parts=tuple(judged["parts"]),
    )


def _deciding(judged: Judged) -> ClaimPart | None:
    """The part that makes the verdict; of a claim that is proved in part, one that is evidence about trainings."""
    deciding = deciding_part(judged)
    if deciding is None or deciding.get("method") != "range" or judged["verdict"] != "reproduced":
        return deciding
    return next((part for part in judged["parts"] if part.get("method") != "range"), deciding)


def _undecided(part: ClaimPart) -> bool:
    """Whether a premise has enough seeds, and they leave it open."""
    return part["verdict"] == "inconclusive" and sum(value is not None for value in part["by_seed"].values()) >= SEEDS


@dataclasses.dataclass(frozen=True)
class _Forecast:
    """What is open, how many seeds would decide it, and whether its middle is where it is claimed to be."""

    part: ClaimPart
    needed: int | None
    leans: bool


def _forecast(judged: Judged, open_premise: ClaimPart | None) -> _Forecast | None:
    """Of what is open the part on which a verdict waits.

    That is a premise that is open. Otherwise one part that lies outside is enough against a claim, so it is the one of these
    that is decided first; and for a claim all have to be decided, so it is the last.
    """
    open_parts = [part for part in judged["parts"] if part["verdict"] == "inconclusive"]
    waits = [
        _Forecast(part, needed_seeds(part), leans_inside(part))
        for part in ([open_premise] if open_premise is not None else open_parts)
    ]
    against = [wait for wait in waits if not wait.leans and wait.needed is not None]
    if against:
        return min(against, key=lambda wait: wait.needed or 0)
    return max(waits, key=lambda wait: wait.needed or math.inf, default=None)


def in_group(entries: Iterable[Entry], group: Group) -> list[Entry]:
    """Those of one list, in the order of :func:`in_order`."""
    return in_order(entry for entry in entries if entry.group == group)


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The strongest evidence first: real checkpoints, natural text, toys; then by how far the interval clears the bound.

    What is open goes by how soon it would be decided.
    """
    kinds = get_args(Evidence)

    def place(entry: Entry) -> tuple[int, bool, float, str]:
        within = (entry.needed or math.inf) if entry.group == "open" else -_clearance(entry)
        return -kinds.index(entry.evidence), not entry.own, within, entry.claim

    return sorted(entries, key=place)


def _clearance(entry: Entry) -> float:
    """How far the middle lies from the nearest bound, in half widths of the interval: an order among many, no effect size."""
    part = entry.part
    if part is None or part["mean"] is None or part["interval"] is None:
        return 0.0
    bounds = [bound for bound in (part["more_than"], part["less_than"]) if bound is not None]
    half = (part["interval"][1] - part["interval"][0]) / 2
    return min((abs(part["mean"] - bound) for bound in bounds), default=0.0) / half if half else math.inf


def summary_of_entries(entries: Sequence[Entry]) -> ClaimsSummary:
    """Counts, lists and the figure: what a page about results begins with."""
    return ClaimsSummary(_counts(entries), _lists(entries), draw_overview(entries))


def _counts(entries: Sequence[Entry]) -> tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]:
    """Verdicts about trainings and models by kind of evidence; and, apart, those about one model and of proofs."""
    kinds: dict[Kind, str] = {
        "checkpoint": "models that others trained, all together",
        "natural": "trainings of ours on text that people wrote",
        "toy": "trainings of ours on a made-up language",
        "toy, other base": "the same on the base that the source does not have",
    }
    groups: tuple[Group, ...] = ("holds", "fails", "open", "untested")
    of_many = []
    for kind, words in kinds.items():
        of_kind = [entry for entry in entries if entry.kind == kind and entry.about in ("trainings", "models")]
        if of_kind:
            of_many.append((f"{SIGNS[kind]} {kind.partition(',')[0]}: {words}", *_tally(of_kind, groups)))
    of_one = []
    for kind in ("checkpoint, one model", "natural, one model"):
        there = [entry for entry in entries if entry.about == "one model" and entry.kind == kind]
        for model in sorted({entry.model for entry in there}):
            plain = [PLAIN.get(entry.verdict, entry.verdict) for entry in there if entry.model == model]
            tested = [str(plain.count(verdict)) for verdict in ("reproduced", "not reproduced", "inconclusive")]
            untested = len(plain) - sum(map(int, tested))
            of_one.append((f"{SIGNS[kind]} {kind.partition(',')[0]}: `{model}`", *tested, str(untested)))
    proofs = [entry.verdict for entry in entries if entry.about == "proof"]
    if proofs:
        shown = [str(proofs.count(verdict)) for verdict in ("agrees with the proof", "contradicts the proof")]
        of_one.append(("theory: checks of what is proved", *shown, "–", "–"))
    columns = ("reproduced", "not reproduced", "open", "not tested")
    apart = ("it does", "it does not", "open", "not tested")
    return (
        ("Verdicts about a kind of model: seeds are trainings, or models of others.", ("evidence", *columns), tuple(of_many)),
        (
            "Counted apart, as nothing follows from them for other models: whether one model does what is claimed, over draws "
            "of texts, and whether what is proved is so.",
            ("one model, or a proof", *apart),
            tuple(of_one),
        ),
    )


def _tally(entries: Sequence[Entry], groups: Sequence[Group]) -> list[str]:
    return [str(sum(entry.group == group for entry in entries)) for group in groups]


def _lists(entries: Sequence[Entry]) -> tuple[VerdictList, ...]:
    still_open = in_group(entries, "open")
    elsewhere = sum(not entry.own for entry in still_open)
    besides = f" Open on the base that the source does not have, and not in the list: {elsewhere}." if elsewhere else ""
    return (
        VerdictList(
            "Reproduced",
            "The interval of every part lies in the claimed region; the first is shown, and how many there are besides. Real "
            "checkpoints and natural text come first, and then what lies farthest from its bound.",
            "seeds",
            tuple(_line(entry) for entry in in_group(entries, "holds")),
        ),
        VerdictList(
            "Not reproduced",
            "The interval of the part shown lies wholly outside.",
            "seeds",
            tuple(_line(entry) for entry in in_group(entries, "fails")),
        ),
        VerdictList(
            "Open",
            "The interval of the part shown, or of what the claim presupposes, reaches over the bound. The last column is how "
            "many seeds there are, and at how many the interval would clear the bound if seeds go on to scatter as they do: on "
            "the side that is claimed (for) or on the other (against). It is a forecast from few seeds; – where there is none."
            + besides,
            "seeds, and those that would decide",
            tuple(_line(entry) for entry in still_open if entry.own),
        ),
        VerdictList(
            "One model does, or does not",
            "A seed is a draw of texts, so the interval says how sure it is of this model, and nothing of another.",
            "draws",
            tuple(_line(entry) for entry in in_group(entries, "one model")),
        ),
    )


def _line(entry: Entry) -> VerdictLine:
    part, published = entry.part, entry.published
    says = "–" if part is None else f"premise: {part['says']}" if entry.premise else part["says"]
    if entry.group == "one model":
        plain = PLAIN.get(entry.verdict, entry.verdict)
        says = f"{ANSWERS.get(plain, 'open')}: {says}"
    if entry.others:
        says += f" (and {entry.others} more)"
    if entry.about == "models" and part is not None and part.get("method") == "range":
        says += "; that there are such models takes one"
    count = str(entry.seeds)
    if entry.group == "open":
        count += " → –" if entry.needed is None else f" → {entry.needed}, {'for' if entry.leans else 'against'}"
    return VerdictLine(
        claim=entry.claim,
        anchor=entry.anchor,
        on=entry.on,
        says=says,
        effect=effect_words(part) if part is not None else "–",
        claimed="–" if part is None else part["expected"],
        published="–" if published is None else f"{number(published.value)} ({published.of})",
        count=count,
    )


def draw_overview(entries: Sequence[Entry]) -> str:
    """The figure: of every claim that was tested the parts that decide, with all that was found about each of these.

    Checks of proofs are no evidence, and are not in it.
    """
    tested = [entry for entry in entries if entry.group not in ("untested", "proof")]
    rows: dict[tuple[str, str, str], list[tuple[Entry, ClaimPart]]] = {}
    for entry in tested:
        if entry.deciding is not None and entry.deciding["mean"] is not None:
            rows[entry.claim, *_key(entry.deciding)] = []
    for entry in tested:
        for part in entry.parts:
            of_row = rows.get((entry.claim, *_key(part)))
            if of_row is not None and part["mean"] is not None:
                of_row.append((entry, part))
    drawn = [_row(claim, of_row) for (claim, _, _), of_row in rows.items()]
    drawn.sort(key=lambda row: (_rank(row), row.claim))
    title = (
        "Effects of claims with 95 % intervals, by kind of evidence, beside published values; the tables have them in numbers."
    )
    notes = ["in brackets: the verdict of a part where another, or a premise, decides"]
    if any(entry.about == "one model" for entry in tested):
        notes.append("yes, no: whether one model does what is claimed, which says nothing of others")
    return draw_forest(drawn, title, "; ".join(notes))


def _key(part: ClaimPart) -> tuple[str, str]:
    """What makes two parts one: the effect, and what is claimed of it."""
    return part["effect"], part["expected"]


def _row(claim: str, found: Sequence[tuple[Entry, ClaimPart]]) -> Row:
    _, part = found[0]
    published = published_effect(claim, part["effect"])
    return Row(
        claim=claim,
        says=part["says"],
        unit=part["unit"],
        more_than=-math.inf if part["more_than"] is None else part["more_than"],
        less_than=math.inf if part["less_than"] is None else part["less_than"],
        published=None if published is None else published.value,
        marks=tuple(_mark(entry, of_entry) for entry, of_entry in found),
    )


def _mark(entry: Entry, part: ClaimPart) -> Mark:
    assert part["mean"] is not None, "only estimates are drawn"
    interval = None if part["interval"] is None else (part["interval"][0], part["interval"][1])
    of = entry.model.rpartition("/")[2].partition(":")[0] if entry.model else entry.folder
    if entry.about == "models":
        of = f"{entry.seeds} {'model' if entry.seeds == 1 else 'models'}"
    elif not entry.own and entry.base is not None:
        of = ROWS[entry.base].removeprefix("with ")
    return Mark(entry.kind, of[:12], part["mean"], interval, _word(entry, part))


def _word(entry: Entry, part: ClaimPart) -> str:
    """What the part shows, in a word or two; about one model it is never the verdict of the claim."""
    plain = {"inconclusive": "open"}.get(part["verdict"], part["verdict"])
    if entry.about == "one model":
        plain = ANSWERS.get(part["verdict"], "open")
    return plain if part is entry.deciding and not entry.premise else f"({plain})"


def _rank(row: Row) -> int:
    """Those about trainings and models first that hold, then those that fail; then those about one model; then what is open."""
    order = ("reproduced", "not reproduced", *ANSWERS.values())
    return min(order.index(mark.verdict) if mark.verdict in order else len(order) for mark in row.marks)
