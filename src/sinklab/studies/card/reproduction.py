"""The command line that makes a run again, from its record: settings that are not those by default."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from sinklab.registry import spelled

__all__ = ["command_of", "probe_settings", "public_name", "public_spec"]

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
        settings["texts"] = _texts_of_each(record, settings.get("texts"))
    texts = _texts(record, str(settings.get("corpus")))
    if texts is not None:
        if None in texts:
            return None
        settings |= {"domains": texts} if kind == "causes" else {"corpus": texts[0]}
    if kind == "measure":  # the config of older runs has the names of the probes alone
        settings["probes"] = [spelled(probe) for probe in probe_settings(record)] or settings.get("probes")
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


def _texts_of_each(record: Mapping[str, object], recorded: object) -> object:
    """Texts of each domain, which the option counts; the settings of older runs have those of all domains together."""
    domains = record.get("domains")
    entries = [entry for entry in domains if isinstance(entry, dict)] if isinstance(domains, list) else []
    return next((entry["texts"] for entry in entries if "texts" in entry), recorded)


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
