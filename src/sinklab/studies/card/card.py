"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.registry import spelled
from sinklab.results.blocks import Block, Cell, Facts, Grid, Heading, Say, markdown
from sinklab.results.run import Listing
from sinklab.results.sections import sections
from sinklab.studies.arguments import command
from sinklab.studies.card.reproduction import command_of, probe_settings, public_name, public_spec

if TYPE_CHECKING:
    from sinklab.report.runs import FinishedRun

__all__ = ["Card", "card", "card_of"]

NO_MODEL = ("claim", "sweep", "pathways", "reproduce", "trigger")
"""Commands whose runs are about several models, or about toys that are trained for one problem."""

MOST_NUMBERS = 20
"""Of a run of a command that shows nothing by itself; the rest is in its table."""


@dataclasses.dataclass(frozen=True)
class Card:
    """What a card says of a run.

    Attributes:
        model: name of the model, without the folders that it lay in.
        text: the section, in Markdown.
    """

    model: str
    kind: str
    text: str


@command
def card(run: Path) -> Listing:
    """Print a section for the model's card: what a run found, with its numbers, and how to repeat it.

    Works on runs of audit, cache, causes, depend and pretrain, and on every other run with a finding or numbers of the whole
    model. No model is opened and nothing is measured.

    Args:
        run: Output directory of a finished run.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.

    Examples:
        sinklab card sinklab-audit/org-model >> README.md
        sinklab card build/cache --json
    """
    from rich.text import Text

    return Listing(dataclasses.asdict(card_of(run)), lambda record: [Text(str(record["text"]).rstrip("\n"))])


def card_of(folder: Path) -> Card:
    """The card of the run in a folder.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.
    """
    from sinklab.report.runs import run_of
    from sinklab.results.table import read_run

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
    return Card(model, kind, text)


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
    if run.numbers:
        under = _settings_of_metrics(record)
        numbers = list(run.numbers.items())[:MOST_NUMBERS]
        rows: list[list[Cell]] = [
            [name + under.get(name.partition(" · ")[0], ""), value, unit or "1"] for name, (value, unit) in numbers
        ]
        yield Grid(["measurement", "value", "unit"], rows)
    if about:
        yield Facts([(name, public_name(text)) for name, text in about])


def _settings_of_metrics(record: Mapping[str, Any]) -> dict[str, str]:
    """Metric to the settings that its probe had, as ``" (sink_rate:threshold=0.2)"``; none of a probe without settings."""
    probes = {str(probe["name"]): public_spec(spelled(probe)) for probe in probe_settings(record) if len(probe) > 1}
    return {
        str(metric["metric"]): f" ({probes[metric['probe']]})"
        for metric in record.get("definitions") or []
        if metric.get("probe") in probes
    }


def _public(text: str) -> str:
    """A text without the folders of the machine in the names of files."""
    return re.sub(r"(?<![\w/.:~<])(?:[A-Za-z]:\\|~?/)(?:[^\s/\\|,;()\[\]\"'“”]+[/\\])+", "", text)


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
