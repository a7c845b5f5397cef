"""The command line that makes a run again, from its record: settings that are not those by default."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Mapping

from sinklab.registry import spelled

__all__ = ["command_of", "probe_settings", "public_name", "public_spec"]

FUNCTIONS = {
    "audit": "sinklab.studies.audit.audit:audit",
    "cache": "sinklab.studies.cache.cache:compare_policies",
    "causes": "sinklab.studies.causes.causes:find_causes",
    "denoise": "sinklab.studies.denoise.denoise:denoise",
    "depend": "sinklab.studies.depend.depend:depend",
    "measure": "sinklab.studies.measure.measure:measure",
    "origin": "sinklab.studies.origin.origin:find_origin",
    "quantize": "sinklab.studies.quantize.quantize:quantize",
}
"""Commands about one model whose record has all that makes the run again."""

TEXTS = ("corpus", "domains")
"""Options that name corpora."""

OWN_INPUTS = ("inputs", "own inputs")
"""What stands in the place of a corpus where a run was given inputs from Python."""

ELSEWHERE = {"causes": {"positions": "seq_len"}}
"""Settings that a record has under another name than the option."""


def command_of(record: Mapping[str, object], summary: Mapping[str, object], model: str) -> str:
    """The line, or an empty text for commands that this is not known of.

    Args:
        model: name of the model as :func:`public_name` gives it.
    """
    kind = str(record.get("kind"))
    if kind == "pretrain":
        return "sinklab pretrain run.json --out again  # the run.json of this run"
    if kind not in FUNCTIONS:
        return ""
    module, _, name = FUNCTIONS[kind].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    config = record.get("config")
    given = dict(config) if isinstance(config, dict) else {}
    for old, new in ELSEWHERE.get(kind, {}).items():
        given[new] = given.pop(old, None)
    given |= {"domains": summary.get("domains")} if kind == "causes" else {}
    if (texts := _texts(record, str(given.get("corpus")))) is not None:
        if None in texts:  # inputs and corpora of Python have no line
            return ""
        given |= {"domains": texts} if kind == "causes" else {"corpus": texts[0]}
    if kind == "measure":  # the config of older runs has the names of the probes alone
        given["probes"] = [spelled(settings) for settings in probe_settings(record)] or given.get("probes")
    specs = [*given.get("tasks", [None]), *(given.get("policies") or [])]
    if kind == "depend" and not all(isinstance(spec, str) for spec in specs):  # objects of Python have no line
        return ""
    if record.get("dtype") not in (None, "float32"):
        given["dtype"] = record["dtype"]
    revision = summary.get("revision")
    if isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision):
        given["revision"] = revision
    if kind == "audit" and not isinstance(summary.get("cache"), dict):
        given["cache"] = False
    for section in ("certificate", "causes", "origin") if kind == "audit" else ():
        given[section] = section in summary
    words = ["sinklab", kind, model]
    for option, value in given.items():
        if option in parameters and value is not None and not _is_default(value, parameters[option].default):
            words += _option(option, value)
    return shlex.join(words)


def probe_settings(record: Mapping[str, object]) -> list[dict[str, object]]:
    """Name and settings of every probe of a run of ``measure``, from its record; empty where that does not say."""
    probes = record.get("probes")
    return [one for one in probes if isinstance(one, dict) and "name" in one] if isinstance(probes, list) else []


def _is_default(value: object, default: object) -> bool:
    return value == default or (isinstance(default, tuple) and value == list(default)) or (value == [] and default is None)


def _option(name: str, value: object) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, list):
        return [f"--{option}={','.join(public_spec(str(one)) for one in value)}"]
    text = str(value)
    return [f"--{option}={public_name(text)}" if "/" in text and name not in TEXTS else f"--{option}={text}"]


def _texts(record: Mapping[str, object], named: str) -> list[str | None] | None:
    """What the corpora of a run are written as, without the folders of the machine; ``None`` for what no line can name.

    Args:
        named: the corpus in the settings of the run.

    Returns:
        ``None`` for a record that does not say: of an older run, of which the name is known alone, or of one without corpora.
    """
    corpus, domains = record.get("corpus"), record.get("domains")
    if corpus is None and domains is None:
        return [None] if named in OWN_INPUTS else None
    entries = domains if isinstance(domains, list) else [corpus]
    about = [one for one in entries if isinstance(one, dict) and ("settings" in one or "source" not in one)]
    if len(about) < len(entries):
        return None
    return [_written(one.get("settings")) for one in about]


def _written(settings: object) -> str | None:
    """A corpus as it is typed: a name or path by itself, or with settings."""
    if not isinstance(settings, dict):
        return None
    return public_name(str(settings["name"])) if len(settings) == 1 else public_spec(spelled(settings))


def public_spec(text: str) -> str:
    """A name with settings, ``needle:corpus=/data/me/book.txt``, without the folders of the machine in them."""
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
