"""Cards: the section of a model's card in Markdown, and the model-index in YAML that the hub reads, of what a run found."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

__all__ = ["Card", "CardNumber", "front_matter", "markdown", "plain"]


@dataclasses.dataclass(frozen=True)
class CardNumber:
    """A number of the whole model.

    Attributes:
        metric: registered name of the metric.
        title: what it is, in words.
        value: finite, in ``unit``.
        unit: as in the column of the table.
    """

    metric: str
    title: str
    value: float
    unit: str


@dataclasses.dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        model: name of the model, without the folders that it lay in.
        kind: the command that made the run.
        task: pipeline of the hub, such as ``text-generation``; ``other`` where the run does not say.
        corpus: name of the texts; empty where it is not known.
        headings, rows: the table; texts are shown as they are.
        finding: what was found; sentences. Empty where the run has none, such as one of ``measure``.
        recommendation: what to do; empty where the run recommends nothing.
        limits: on what it was measured, and what that does not say; sentences.
        command: lines that make the run again; empty where that cannot be said.
        made: identities and versions, name to text.
        numbers: for the metadata.
    """

    model: str
    kind: str
    task: str
    corpus: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    finding: str
    recommendation: str
    limits: Sequence[str]
    command: str
    made: dict[str, str]
    numbers: Sequence[CardNumber]


def markdown(card: Card) -> str:
    """The section: finding, table, recommendation, limits, and how to make it again."""
    blocks = ["## Attention sinks", *([plain(card.finding)] if card.finding else [])]
    if card.rows:
        aligned = ["---", *("---:" for _ in card.headings[1:])]
        lines = [card.headings, aligned, *card.rows]
        blocks.append("\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines))
    if card.recommendation:
        blocks.append(f"**Recommendation.** {plain(card.recommendation)}")
    if card.limits:
        blocks.append(f"**Measured on.** {plain(' '.join(card.limits))}")
    blocks.append("### How to reproduce")
    if card.command:
        fence = "`" * (max((len(run) for run in re.findall("`+", card.command)), default=0) + 3)
        blocks.append(f"{fence}console\n{card.command}\n{fence}")
    blocks.append("; ".join(f"{name} {plain(text)}" for name, text in card.made.items()) + ".")
    return "\n\n".join(blocks) + "\n"


def front_matter(card: Card) -> str:
    """The metadata between two lines of hyphens: a model-index, as ``huggingface_hub.ModelCardData`` reads it.

    Empty where the run has no number of the whole model.
    """
    import yaml

    dataset = {"name": card.corpus or "not recorded", "type": _dataset_type(card.corpus)}
    metrics = [{"type": one.metric, "value": one.value, "name": f"{one.title}, {one.unit}"} for one in card.numbers]
    if not metrics:  # an index without results is refused by the hub
        return ""
    results = [{"task": {"type": card.task}, "dataset": dataset, "metrics": metrics}]
    data = {"model-index": [{"name": card.model, "results": results}]}
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)}---\n"


def _dataset_type(corpus: str) -> str:
    """The name of a corpus as the hub takes it: ASCII letters, digits, ``_``, ``-`` and ``.``, with one part in front at most.

    Of others it refuses the whole README.md ("fails to match the required pattern").
    """
    owner, _, name = corpus.rpartition("/")
    parts = [re.sub(r"[^A-Za-z0-9_-]+", "-", owner).strip("-"), re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")]
    return "/".join(part for part in parts if part) or "other"


def plain(text: str) -> str:
    """Text as Markdown shows it: no name of a token or a model is taken for markup, and none begins a line."""
    text = " ".join(str(text).split())
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*~\[\]]", r"\\\g<0>", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cell(text: str) -> str:
    return text if re.fullmatch(r"-+:?", text) else plain(text).replace("|", "\\|")
