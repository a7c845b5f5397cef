"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.results.blocks import Block, Facts, Grid, Heading, Say, markdown
from sinklab.results.run import Listing
from sinklab.results.sections import sections
from sinklab.studies.arguments import command
from sinklab.studies.card.reproduction import command_of, public_name

if TYPE_CHECKING:
    from sinklab.report.runs import FinishedRun
    from sinklab.studies.card.numbers import CardNumber

__all__ = ["Card", "card", "card_of", "front_matter"]

NO_MODEL = ("claim", "sweep", "pathways", "reproduce", "trigger")
"""Commands whose runs are about several models, or about toys that are trained for one problem."""

TASKS = {"next token": "text-generation", "masked token": "fill-mask", "target token": "translation"}
"""What a loss is of to the hub's name for such models."""

OF_DECODERS = ("cache", "depend", "pretrain")
"""Commands that serve models of the next token alone."""


@dataclasses.dataclass(frozen=True)
class Card:
    """What a card says of a run.

    Attributes:
        model: name of the model, without the folders that it lay in.
        task: pipeline of the hub, such as ``text-generation``; ``other`` where the run does not say.
        corpus: name of the texts; empty where it is not known.
        text: the section, in Markdown.
        numbers: for the metadata.
    """

    model: str
    kind: str
    task: str
    corpus: str
    text: str
    numbers: Sequence[CardNumber]


@command
def card(run: Path, *, yaml: bool = False) -> Listing:
    """Print a section for the model's card: what a run found, with its numbers, and how to repeat it.

    Works on runs of audit, cache, causes, depend and pretrain, and on every other run with a finding or numbers of the whole
    model. No model is opened and nothing is measured.

    Args:
        run: Output directory of a finished run.
        yaml: Begin with the metadata that the hub reads (model-index), which makes it a README.md.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.

    Examples:
        sinklab card sinklab-audit/org-model >> README.md
        sinklab card build/cache --yaml > README.md
    """
    from rich.text import Text

    made = card_of(run)
    front = front_matter(made) if yaml else ""
    text = f"{front}\n{made.text}" if front else made.text
    return Listing(dataclasses.asdict(made) | {"text": text}, lambda record: [Text(str(record["text"]).rstrip("\n"))])


def card_of(folder: Path) -> Card:
    """The card of the run in a folder.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.
    """
    from sinklab.report.runs import run_of
    from sinklab.results.table import read_run
    from sinklab.studies.card.numbers import metrics_of_run

    record, run = read_run(folder), run_of(folder)
    summary = read_run(folder, "summary.json") if (folder / "summary.json").is_file() else {}
    kind, model = run.kind, public_name(run.model)
    if kind in NO_MODEL:
        raise InputError(f"{folder} is a run of {kind}, which says nothing about one model; there is no card of it")
    if run.status not in ("finished", "diverged", "stopped"):
        raise InputError(f"{folder} holds a run of {kind} that is {run.status}; a card is made of one that has ended")
    shown = list(_blocks(kind, summary, run, record))
    if not model or not shown:
        raise InputError(f"{folder} is a run of {kind} that says nothing about a model as a whole, so there is no card of it")
    line = command_of(record, summary, run.model)
    blocks = [Heading("Attention sinks"), *shown, Heading("How to reproduce", 3)]
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 3)
    again = f"{fence}console\n{line}\n{fence}\n\n" if line else ""
    made = "; ".join(f"{name} {text}" for name, text in _made(record, summary, run))
    text = "\n".join(_public(markdown(blocks)).splitlines()) + f"\n{again}{made}.\n"
    corpus = public_name(str(summary.get("corpus") or _corpus(record)))
    numbers = [one for one in metrics_of_run(kind, record, summary, run) if math.isfinite(one.value)]
    return Card(model, kind, _task(kind, summary), corpus, text, numbers)


def _blocks(kind: str, summary: Mapping[str, Any], run: FinishedRun, record: Mapping[str, Any]) -> Iterator[Block]:
    """What the study itself shows; of others the finding and the numbers of the whole model."""
    if kind in sections():
        yield from sections()[kind].blocks(summary)
        return
    if summary and importlib.util.find_spec(f"sinklab.studies.{kind}.show"):
        module = importlib.import_module(f"sinklab.studies.{kind}.show")
        yield from module.show(summary)
        return
    if run.finding:
        yield Say(run.finding)
    about = [(name, run.settings[name]) for name in ("corpus", "samples", "seed", "dtype") if name in run.settings]
    from sinklab.studies.card.numbers import metrics_of_run

    numbers = metrics_of_run(kind, record, summary, run)
    if numbers:
        yield Grid(["measurement", "value", "unit"], [[one.title, one.value, one.unit] for one in numbers])
    if about:
        yield Facts([(name, public_name(text)) for name, text in about])


def _public(text: str) -> str:
    """A text without the folders of the machine in the names of files."""
    return re.sub(r"(?<![\w/.:~<])(?:[A-Za-z]:\\|~?/)(?:[^\s/\\|,;()\[\]\"'“”]+[/\\])+", "", text)


def front_matter(card: Card) -> str:
    """The metadata between two lines of hyphens: a model-index, as ``huggingface_hub.ModelCardData`` reads it.

    Empty where the run has no number of the whole model: an index without results is refused by the hub.
    """
    import yaml

    if not card.numbers:
        return ""
    dataset = {"name": card.corpus or "not recorded", "type": _dataset_type(card.corpus)}
    metrics = [{"type": one.metric, "value": one.value, "name": f"{one.title}, {one.unit}"} for one in card.numbers]
    results = [{"task": {"type": card.task}, "dataset": dataset, "metrics": metrics}]
    data = {"model-index": [{"name": card.model, "results": results}]}
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)}---\n"


def _dataset_type(corpus: str) -> str:
    """The name of a corpus as the hub takes it."""
    owner, _, name = corpus.rpartition("/")
    parts = [re.sub(r"[^A-Za-z0-9_-]+", "-", owner).strip("-"), re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")]
    return "/".join(part for part in parts if part) or "other"


def _task(kind: str, summary: Mapping[str, Any]) -> str:
    if kind in OF_DECODERS:
        return "text-generation"
    predicted = str(summary.get("loss_kind") or summary.get("loss_of"))
    task = TASKS.get(predicted)
    if task is None and predicted.partition(",")[0] == "class":  # behind a comma: whose, where samples have none
        task = {"image": "image-classification", "audio": "audio-classification"}.get(str(summary.get("kind")))
    return task or "other"


def _corpus(record: Mapping[str, Any]) -> str:
    """Name of the corpus in a record: of a measurement, of a training, or of a command that reads several."""
    entries = (record.get("corpus"), record.get("data"))
    named = next((entry["name"] for entry in entries if isinstance(entry, dict) and entry.get("name")), None)
    data = (record.get("config") or {}).get("data")
    listed = [str(domain.get("domain")) for domain in record.get("domains") or ()]
    listed = listed or list(dict.fromkeys(str(task.get("name")) for task in record.get("tasks") or ()))
    return str(named or (data.get("corpus") if isinstance(data, dict) else None) or ", ".join(listed))


def _made(record: Mapping[str, Any], summary: Mapping[str, Any], run: FinishedRun) -> Iterator[tuple[str, str]]:
    """Identities: versions, weights, texts, run."""
    versions, hardware = record.get("versions") or {}, record.get("hardware") or {}
    commit = f" ({str(record['commit'])[:12]})" if record.get("commit") else ""
    yield "sinklab", f"{versions.get('sinklab', '?')}{commit}"
    for name in ("torch", "transformers"):
        if name in versions:
            yield name, str(versions[name])
    if weights := summary.get("revision") or record.get("weights_sha256"):
        yield "weights", str(weights).removeprefix("sha256-")[:16]
    if run.tokens:
        texts = record.get("token_sha256")
        yield "tokens", str(texts.get("held_out", "") if isinstance(texts, dict) else run.tokens)[:16]
    yield "on", f"{hardware.get('name', 'unknown')}, {record.get('dtype', 'unknown dtype')}"
    if record.get("run_id"):
        yield "run", str(record["run_id"])
