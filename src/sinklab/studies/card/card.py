"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.registry import spelled
from sinklab.results.blocks import Block, Heading, markdown
from sinklab.results.run import Listing
from sinklab.results.sections import named, sections
from sinklab.studies.arguments import command

FUNCTIONS = {
    "audit": "sinklab.studies.audit.audit:audit",
    "cache": "sinklab.studies.cache.cache:compare_policies",
    "causes": "sinklab.studies.causes.causes:find_causes",
    "depend": "sinklab.studies.depend.depend:depend",
    "fold": "sinklab.studies.fold.fold:fold_sinks",
    "origin": "sinklab.studies.origin.origin:find_origin",
    "quantize": "sinklab.studies.quantize.quantize:quantize",
}
"""Commands about one model that say what they found in words."""

SHOWN = {
    "audit": "sinklab.studies.audit.show:show",
    "depend": "sinklab.studies.depend.show:show",
    "fold": "sinklab.studies.fold.show:blocks",
    "quantize": "sinklab.studies.quantize.show:show",
}
"""What gives the blocks of a summary; of the others their section does."""

OWN_INPUTS = ("inputs", "own inputs")
"""What stands in the place of a corpus where a run was given inputs from Python."""

RENAMED = {"causes": {"positions": "seq_len"}}
"""Settings that a record has under another name than the option."""


@command
def card(run: Path) -> Listing:
    """Print a section for the model's card: what a run found, with its numbers, and how to repeat it.

    Works on runs of audit, cache, causes, depend, fold, origin and quantize. No model is opened and nothing is measured.

    Args:
        run: Output directory of a finished run.

    Raises:
        InputError: no finished run there, or one of another command.

    Examples:
        sinklab card sinklab-audit/org-model >> README.md
        sinklab card build/cache --json
    """
    from rich.text import Text

    return Listing(card_of(run), lambda record: [Text(record["text"].rstrip("\n"))])


def card_of(folder: Path) -> dict[str, str]:
    """The card of the run in a folder: ``model``, without the folders that it lay in, ``kind``, and ``text`` in Markdown.

    Raises:
        InputError: no finished run there, or one of a command that has no card.
    """
    from sinklab.results.table import read_run

    record = read_run(folder)
    kind = str(record.get("kind"))
    if kind not in FUNCTIONS:
        raise InputError(f"{folder} is a run of {kind}, of which there is no card; there is of {', '.join(FUNCTIONS)}")
    summary = read_run(folder, "summary.json")
    show = sections()[kind].blocks if kind in sections() else named(SHOWN[kind])
    shown: Iterable[Block] = show(summary)
    model = str(summary.get("model") or record.get("model", {}).get("name"))
    line = command_of(record, summary, model)
    blocks = [Heading("Attention sinks"), *shown, Heading("How to reproduce", 3)]
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 3)
    again = f"{fence}console\n{line}\n{fence}\n\n" if line else ""
    made = "; ".join(f"{name} {text}" for name, text in _made(record, summary))
    text = "\n".join(_public(markdown(blocks)).splitlines()) + f"\n{again}{made}.\n"
    return {"model": public_name(model), "kind": kind, "text": text}


def _public(text: str) -> str:
    """A text without the folders of the machine in the names of files."""
    return re.sub(r"(?<![\w/.:~<])(?:[A-Za-z]:\\|~?/)(?:[^\s/\\|,;()\[\]\"'“”]+[/\\])+", "", text)


def _made(record: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Identities: versions, weights, texts, run."""
    versions, hardware = record.get("versions") or {}, record.get("hardware") or {}
    commit = f" ({str(record['commit'])[:12]})" if record.get("commit") else ""
    yield "sinklab", f"{versions.get('sinklab', '?')}{commit}"
    for name in ("torch", "transformers"):
        if name in versions:
            yield name, str(versions[name])
    if weights := summary.get("revision"):
        yield "weights", str(weights).removeprefix("sha256-")[:16]
    if isinstance(texts := record.get("token_sha256"), str):
        yield "tokens", texts[:16]
    yield "on", f"{hardware.get('name', 'unknown')}, {record.get('dtype', 'unknown dtype')}"
    if record.get("run_id"):
        yield "run", str(record["run_id"])


def command_of(record: Mapping[str, object], summary: Mapping[str, object], model: str) -> str:
    """The line, with models and texts as they were named; empty where an object of Python was given, which no line can name.

    Args:
        model: as the run has it: a path, or a name on the hub.
    """
    kind = str(record.get("kind"))
    settings = _settings(kind, record, summary)
    if settings is None:
        return ""
    parameters = inspect.signature(named(FUNCTIONS[kind])).parameters
    words = ["sinklab", kind, model]
    for option, value in (settings | _beside_settings(kind, record, summary)).items():
        if option in parameters and value is not None and not _is_default(value, parameters[option].default):
            words.append(_option(option, value))
    return shlex.join(words)


def _settings(kind: str, record: Mapping[str, object], summary: Mapping[str, object]) -> dict[str, Any] | None:
    """The settings of a run by the names of options; ``None`` where one is an object of Python."""
    config = record.get("config")
    settings = dict(config) if isinstance(config, dict) else {}
    for old, new in RENAMED.get(kind, {}).items():
        settings[new] = settings.pop(old, None)
    if kind == "causes":
        settings["domains"] = summary.get("domains")
    texts = _texts(record, str(settings.get("corpus")))
    if texts is not None:
        if None in texts:
            return None
        settings |= {"domains": texts} if kind == "causes" else {"corpus": texts[0]}
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


def _is_default(value: object, default: object) -> bool:
    return value == default or (isinstance(default, tuple) and value == list(default)) or (value == [] and default is None)


def _option(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={','.join(map(str, value)) if isinstance(value, list) else value}"


def _texts(record: Mapping[str, object], corpus_name: str) -> list[str | None] | None:
    """What the corpora of a run are written as; ``None`` for what no line can name."""
    corpus, domains = record.get("corpus"), record.get("domains")
    if corpus is None and domains is None:
        return [None] if corpus_name in OWN_INPUTS else None
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


def public_name(name: str) -> str:
    """A name without the folders of the machine that it lay on; ``org/model`` and ``embedded:softmax`` stay as they are."""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    outside = name.startswith(("/", ".", "~")) or "\\" in name or len(parts) > 2
    return parts[-1] if outside and parts[-1] else name
