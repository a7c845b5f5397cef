"""Entries: every verdict of kept results with what it rests on, which list it belongs in, and where in that list it stands.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, get_args

from sinklab.jobs.needed import leans_inside, needed_seeds
from sinklab.jobs.scale import CHECKPOINT, RECORDED, ROWS
from sinklab.jobs.verdict import PLAIN, SEEDS
from sinklab.report.forest import Kind
from sinklab.results.summaries.claims import ClaimOfModel, ClaimPart, ClaimRecord, Judged
from sinklab.studies.reproduce.kept import Evidence, StoredClaim, clearance, deciding_part, evidence_of
from sinklab.studies.reproduce.published import Published, published_effect

__all__ = ["ANSWERS", "SIGNS", "Entry", "Group", "entries_of", "in_group", "in_order"]

About = Literal["trainings", "models", "one model", "proof"]
"""What an interval is over, and so what a verdict is about; a proof is checked, which is no evidence."""

Group = Literal["holds", "fails", "open", "untested", "one model", "proof"]

SIGNS: dict[Kind, str] = {
    "toy": "●",
    "toy, other base": "●",
    "natural": "■",
    "natural, other base": "■",
    "natural, one model": "□",
    "checkpoint": "◆",
    "checkpoint, one model": "◇",
}
"""Kinds of evidence as the figure draws them."""

ANSWERS = {"reproduced": "yes", "not reproduced": "no"}
"""What is said of one model, of which a verdict about the claim would say too much."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One verdict with what it rests on.

    Attributes:
        folder: that of the scale, such as ``tiny`` or ``tiny-bos``; with the claim it is where the details are.
        base: what the rows of trained models begin with, ``bos`` or ``no-bos``; ``None`` where nothing is trained.
        own: whether that is as in the source; where a scale has no such base, the verdict is about the one that it has.
        model: name of the model that it is about, if it is about one.
        part: what makes the verdict; of one that is open what is open, which may be a premise; ``None`` without any.
        others: how many parts there are besides, of a claim all of whose parts hold.
        premise: whether ``part`` is something that the claim presupposes.
        seeds: trainings, draws of texts, or models, behind ``part``.
        needed: of what is open, how many of these would decide it; ``None`` where that cannot be foretold.
        leans: of what is open, whether its middle is in the claimed region, so that the claim would come to hold.
        fails: of a claim that waits for a premise, the part that fails once the premise is shown; empty where none does.
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
    fails: str
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
        return f"{sign} {self.evidence}: `{self.scale}`{rows}"

    @property
    def kind(self) -> Kind:
        """How it is drawn."""
        if self.about == "one model":
            return "natural, one model" if self.evidence == "natural" else "checkpoint, one model"
        if self.evidence == "toy":
            return "toy" if self.own else "toy, other base"
        if self.evidence == "natural":
            return "natural" if self.own else "natural, other base"
        return self.evidence

    @property
    def scale(self) -> str:
        """Of the models that are trained; ``checkpoint`` where none are."""
        return self.folder.partition("-")[0]


def entries_of(results: Iterable[StoredClaim]) -> list[Entry]:
    """Every verdict of kept results; of checkpoints those about each to which the claim applies, and that over models.

    That there are too few models is said by those about each, and has no entry of its own. The order is that of claims, and of
    one claim that of scales, the base of its source first, and then checkpoints.
    """
    entries = []
    for result in results:
        record, folder = result.record, result.folder.parent.name
        if "models" not in record:
            entries.append(_entry(record, record, folder))
            continue
        applied = [model for model in record["models"] if model["verdict"] != "not applicable"]
        if not applied or len(applied) >= SEEDS or record["verdict"] != "inconclusive":
            entries.append(_entry(record, record, folder))
        entries += [_entry(record, model, folder, model) for model in applied]
    return sorted(entries, key=lambda entry: (entry.claim, _place(entry), entry.model))


def _place(entry: Entry) -> tuple[int, bool, bool]:
    return RECORDED.index(entry.scale), not entry.own, bool(entry.model)


def _entry(record: ClaimRecord, judged: Judged, folder: str, model: ClaimOfModel | None = None) -> Entry:
    """One verdict of a record: its own, or that about one of its models."""
    subject = record if model is None else model
    open_premise = next((part for part in subject["presupposes"] if _undecided(part)), None)
    verdict, deciding = judged["verdict"], _deciding(judged)
    one_model = record.get("one_model") if model is None else model["name"]
    about = _about(record, verdict, one_model)
    forecast = _forecast(judged, open_premise) if verdict == "inconclusive" else None
    seeds = len(record["seeds"])
    if about == "models":
        seeds = 0 if deciding is None else len(deciding["by_seed"])
    if about == "trainings" and open_premise is not None and forecast is not None:
        seeds = _known(open_premise)  # which may be more than the parts have: others lend theirs
    return Entry(
        claim=record["claim"],
        statement=record["statement"],
        reference=record["reference"],
        folder=folder,
        base=record.get("base") if record["conditions"] else None,
        own=_is_own(record, folder),
        evidence=evidence_of(record),
        about=about,
        model=one_model or "",
        verdict=verdict,
        reason=subject["reason"],
        part=deciding if forecast is None else forecast.part,
        others=len(judged["parts"]) - 1 if PLAIN.get(verdict, verdict) == "reproduced" else 0,
        premise=forecast is not None and forecast.part is open_premise,
        seeds=seeds,
        needed=None if forecast is None else forecast.needed,
        leans=forecast is not None and forecast.leans,
        fails="" if forecast is None else forecast.fails,
        deciding=deciding,
        parts=tuple(judged["parts"]),
    )


def _about(record: ClaimRecord, verdict: str, one_model: str | None) -> About:
    """What the verdict is about."""
    if verdict in ("agrees with the proof", "contradicts the proof"):
        return "proof"
    if one_model:
        return "one model"
    return "models" if record["scale"] == CHECKPOINT else "trainings"


def _is_own(record: ClaimRecord, folder: str) -> bool:
    """Whether the base is that of the source; of a record that does not say which that is, the folder tells."""
    base = record.get("base")
    return base is None or (base == record["source_base"] if "source_base" in record else folder == record["scale"])


def _deciding(judged: Judged) -> ClaimPart | None:
    """The part that makes the verdict; of a claim that is proved in part, one that is evidence about trainings."""
    deciding = deciding_part(judged)
    if deciding is None or deciding.get("method") != "range" or judged["verdict"] != "reproduced":
        return deciding
    return next((part for part in judged["parts"] if part.get("method") != "range"), deciding)


def _undecided(part: ClaimPart) -> bool:
    """Whether a premise has enough seeds, and they leave it open."""
    return part["verdict"] == "inconclusive" and _known(part) >= SEEDS


def _known(part: ClaimPart) -> int:
    """Seeds with a number."""
    return sum(value is not None for value in part["by_seed"].values())


@dataclasses.dataclass(frozen=True)
class _Forecast:
    """What is open, how many seeds would decide it, and whether its middle is where it is claimed to be."""

    part: ClaimPart
    needed: int | None
    leans: bool
    fails: str = ""


def _forecast(judged: Judged, open_premise: ClaimPart | None) -> _Forecast | None:
    """Of what is open the part on which a verdict waits.

    That is a premise that is open; where a part lies outside already, the claim fails as soon as the premise is shown.
    Otherwise one part that lies outside is enough against a claim, so it is the one of these that is decided first; and for a
    claim all have to be decided, so it is the last.
    """
    if open_premise is not None:
        outside = next((part["says"] for part in judged["parts"] if part["verdict"] == "not reproduced"), "")
        return _Forecast(open_premise, needed_seeds(open_premise), leans_inside(open_premise) and not outside, outside)
    open_parts = [part for part in judged["parts"] if part["verdict"] == "inconclusive"]
    waits = [_Forecast(part, needed_seeds(part), leans_inside(part)) for part in open_parts]
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
        clear = 0.0 if entry.part is None else clearance(entry.part)
        within = (entry.needed or math.inf) if entry.group == "open" else -clear
        return -kinds.index(entry.evidence), not entry.own, within, entry.claim

    return sorted(entries, key=place)
