"""What kept results come to, for a reader of five minutes: what holds, what does not, what is open, and on which evidence.

Nothing here is worded by hand: counts and lists are made from records, so that no new number can make a sentence untrue. Needs
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sinklab.jobs.verdict import PLAIN
from sinklab.report.claims_page import ClaimsSummary, VerdictLine, VerdictList, effect_words
from sinklab.report.forest import Kind
from sinklab.report.words import number
from sinklab.studies.reproduce.entries import ANSWERS, SIGNS, Entry, Group, in_group
from sinklab.studies.reproduce.overview_figure import draw_overview

__all__ = ["summary_of_entries"]


def summary_of_entries(entries: Sequence[Entry]) -> ClaimsSummary:
    """Counts, lists and the figure: what a page about results begins with."""
    return ClaimsSummary(_counts(entries), _lists(entries), draw_overview(entries))


def _counts(entries: Sequence[Entry]) -> tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]:
    """Verdicts about trainings and models by kind of evidence; and, apart, those about one model and of proofs."""
    return (
        (
            "Verdicts about a kind of model: a seed is a training, or a model that others trained.",
            ("evidence", "reproduced", "not reproduced", "open", "not tested"),
            tuple(_counts_of_many(entries)),
        ),
        (
            "Counted separately, because they do not generalise to other models: claims about one model, over draws of texts, "
            "and checks of proofs.",
            ("one model, or a proof", "it does", "it does not", "open", "not tested"),
            (*_counts_of_one(entries), *_counts_of_proofs(entries)),
        ),
    )


def _counts_of_many(entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """A row for each kind of evidence about trainings and models."""
    kinds: dict[Kind, str] = {
        "checkpoint": "models that others trained, all together",
        "natural": "trainings of ours on text that people wrote",
        "natural, other base": "the same on the base that the source does not have",
        "toy": "trainings of ours on a synthetic language",
        "toy, other base": "the same on the base that the source does not have",
    }
    for kind, words in kinds.items():
        of_kind = [entry for entry in entries if entry.kind == kind and entry.about in ("trainings", "models")]
        if of_kind:
            yield f"{SIGNS[kind]} {kind.partition(',')[0]}: {words}", *_tally(of_kind, ("holds", "fails", "open", "untested"))


def _counts_of_one(entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """A row for each model that claims were taken to by itself."""
    kinds: tuple[Kind, ...] = ("checkpoint, one model", "natural, one model")
    for kind in kinds:
        of_kind = [entry for entry in entries if entry.about == "one model" and entry.kind == kind]
        for model in sorted({entry.model for entry in of_kind}):
            verdicts = [PLAIN.get(entry.verdict, entry.verdict) for entry in of_kind if entry.model == model]
            tested = [verdicts.count(verdict) for verdict in ("reproduced", "not reproduced", "inconclusive")]
            untested = len(verdicts) - sum(tested)
            yield f"{SIGNS[kind]} {kind.partition(',')[0]}: `{model}`", *map(str, (*tested, untested))


def _counts_of_proofs(entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """A row for all checks of proofs, if there are any."""
    verdicts = [entry.verdict for entry in entries if entry.about == "proof"]
    if verdicts:
        agree, contradict = (verdicts.count(verdict) for verdict in ("agrees with the proof", "contradicts the proof"))
        yield "theory: checks of what is proved", str(agree), str(contradict), "–", "–"


def _tally(entries: Sequence[Entry], groups: Sequence[Group]) -> list[str]:
    return [str(sum(entry.group == group for entry in entries)) for group in groups]


def _lists(entries: Sequence[Entry]) -> tuple[VerdictList, ...]:
    still_open = in_group(entries, "open")
    on_own = {(entry.claim, entry.scale) for entry in entries if entry.own}
    alone = [entry for entry in still_open if entry.own or (entry.claim, entry.scale) not in on_own]
    elsewhere = len(still_open) - len(alone)
    besides = " Open on the base that the source does not have, next to a result on its own, and not listed: "
    return (
        VerdictList(
            "Reproduced",
            "The interval of every part lies in the claimed region. The part shown is the one closest to its bound; further "
            "parts are counted in brackets. Checkpoints and natural text come first, then the results farthest from their "
            "bounds.",
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
            "The interval of the part shown, or of a premise, contains its bound. The last column gives the number of seeds, "
            "the estimated number at which the interval clears the bound with probability 0.8, and the side on which the "
            "estimate lies now (for or against the claim). – means more than a thousand, or no estimate."
            + (f"{besides}{elsewhere}." if elsewhere else ""),
            "seeds, and those that would decide",
            tuple(_line(entry) for entry in alone),
        ),
        VerdictList(
            "One model does, or does not",
            "A seed is a draw of texts, so the interval is about this model only.",
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
    if entry.fails:
        says += f" (once shown, the claim fails: {entry.fails})"
    if entry.others:
        says += f" (and {entry.others} more)"
    if part is not None and "model" in part:
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
