"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.registry import spelled
from sinklab.results.blocks import Block, Cell, Facts, Grid, Heading, Say, markdown
from sinklab.results.run import Listing
from sinklab.results.sections import sections
from sinklab.studies.arguments import command

if TYPE_CHECKING:
    from sinklab.report.runs import FinishedRun


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


FUNCTIONS = {
    "audit": "sinklab.studies.audit.audit:audit",
    "cache": "sinklab.studies.cache.cache:compare_policies",
    "causes": "sinklab.studies.causes.causes:find_causes",
    "depend": "sinklab.studies.depend.depend:depend",
    "measure": "sinklab.studies.measure.measure:measure",
    "origin": "sinklab.studies.origin.origin:find_origin",
    "quantize": "sinklab.studies.quantize.quantize:quantize",
}
"""Commands about one model whose record has all that makes the run again."""

OWN_INPUTS = ("inputs", "own inputs")
"""What stands in the place of a corpus where a run was given inputs from Python."""

ELSEWHERE = {"causes": {"positions": "seq_len"}}
"""Settings that a record has under another name than the option."""


def command_of(record: Mapping[str, object], summary: Mapping[str, object], model: str) -> str:
    """The line, with models and texts as they were named, or an empty text for commands that this is not known of.

    Args:
        model: as the run has it: a path, or a name on the hub.
    """
    kind = str(record.get("kind"))
    if kind == "pretrain":
        return "sinklab pretrain run.json --out again  # the run.json of this run"
    if kind not in FUNCTIONS:
        return ""
    settings = _settings(kind, record, summary)
    if settings is None:
        return ""
    module, _, name = FUNCTIONS[kind].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    words = ["sinklab", kind, model]
    for option, value in (settings | _beside_settings(kind, record, summary)).items():
        if option in parameters and value is not None and not _is_default(value, parameters[option].default):
            words += _option(option, value)
    return shlex.join(words)


def _settings(kind: str, record: Mapping[str, object], summary: Mapping[str, object]) -> dict[str, Any] | None:
    """The settings of a run by the names of options; ``None`` where one is an object of Python, which no line can name."""
    config = record.get("config")
    settings = dict(config) if isinstance(config, dict) else {}
    for old, new in ELSEWHERE.get(kind, {}).items():
        settings[new] = settings.pop(old, None)
    if kind == "causes":
        settings["domains"] = summary.get("domains")
    texts = _texts(record, str(settings.get("corpus")))
    if texts is not None:
        if None in texts:
            return None
        settings |= {"domains": texts} if kind == "causes" else {"corpus": texts[0]}
    if kind == "measure":
        settings["probes"] = [spelled(probe) for probe in probe_settings(record)]
    if kind == "depend":
        specs = [*settings.get("tasks", [None]), *(settings.get("policies") or [])]
        if not all(isinstance(spec, str) for spec in specs):
            return None
    return settings


def _beside_settings(kind: str, record: Mapping[str, object], summary: Mapping[str, object]) -> dict[str, object]:
    """Options that a run does not have among its settings: dtype, revision of the model, and the sections of an audit."""
    options: dict[str, object] = {}
    if record.get("dtype") not in (None, "float32"):
        options["dtype"] = record["dtype"]
    revision = summary.get("revision")
    if isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision):
        options["revision"] = revision
    if kind == "audit":
        if not isinstance(summary.get("cache"), dict):
            options["cache"] = False
        options |= {section: section in summary for section in ("certificate", "causes", "origin")}
    return options


def probe_settings(record: Mapping[str, object]) -> list[dict[str, object]]:
    """Name and settings of every probe of a run of ``measure``, from its record; empty where that does not say."""
    probes = record.get("probes")
    return [probe for probe in probes if isinstance(probe, dict) and "name" in probe] if isinstance(probes, list) else []


def _is_default(value: object, default: object) -> bool:
    return value == default or (isinstance(default, tuple) and value == list(default)) or (value == [] and default is None)


def _option(name: str, value: object) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, list):
        return [f"--{option}={','.join(map(str, value))}"]
    return [f"--{option}={value}"]


def _texts(record: Mapping[str, object], named: str) -> list[str | None] | None:
    """What the corpora of a run are written as; ``None`` for what no line can name."""
    corpus, domains = record.get("corpus"), record.get("domains")
    if corpus is None and domains is None:
        return [None] if named in OWN_INPUTS else None
    entries = domains if isinstance(domains, list) else [corpus]
    readable = [entry for entry in entries if isinstance(entry, dict) and ("settings" in entry or "source" not in entry)]
    if len(readable) < len(entries):
        return None
    return [_written(entry.get("settings")) for entry in readable]


def _written(settings: object) -> str | None:
    """A corpus as it is typed: a name or path by itself, or with settings."""
    if not isinstance(settings, dict):
        return None
    return str(settings["name"]) if len(settings) == 1 else spelled(settings)


def public_spec(text: str) -> str:
    """A name with settings, ``long_text:corpus=/data/me/book.txt``, without the folders of the machine in them."""
    name, colon, settings = text.partition(":")
    return public_name(name) + colon + _VALUE.sub(lambda match: _public_value(match[0]), settings)


_VALUE = re.compile(r""""(?:[^"\\]|\\.)*"|[^,:=\[\]"]*/[^,:=\[\]"]*""")
"""A value in quotes, or one with a folder."""


def _public_value(value: str) -> str:
    return json.dumps(public_name(json.loads(value))) if value.startswith('"') else public_name(value)


def public_name(name: str) -> str:
    """A name without the folders of the machine that it lay on; ``org/model`` and ``embedded:softmax`` stay as they are."""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    outside = name.startswith(("/", ".", "~")) or "\\" in name or len(parts) > 2
    return parts[-1] if outside and parts[-1] else name
