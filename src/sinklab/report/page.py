"""The frame of every page: templates, style and script in one file, nothing from the network, and how the numbers were made."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sinklab.errors import InputError
from sinklab.results.blocks import Block, number, percent
from sinklab.results.html import html, with_code
from sinklab.results.table import read_run, write_text

MARK = '<meta name="generator" content="sinklab">'
"""In the head of every page that we make."""


def render(template: str, context: Mapping[str, object], data: Mapping[str, object], blobs: Mapping[str, str]) -> str:
    """Fill a template of ``assets/`` with words, with data for the script and with packed arrays.

    Markup in any string is escaped. The page's policy allows the one script and the one style that are part of it, by their
    hashes, and no connection to anywhere.
    """
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        environment()
        .get_template(template)
        .render(
            **context,
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            data=Markup(json_text(data)),
            blobs={name: Markup(text) for name, text in blobs.items()},
        )
    )


def write_page(text: str, path: Path) -> Path:
    """Write a page into a result, whole or not at all, in the place of an earlier page of ours; returns its path."""
    check_page(path)
    write_text(text, path)
    return path


def write_blocks_page(folder: Path, title: str, lead: str, blocks: Callable[[dict[str, Any]], Iterable[Block]]) -> Path:
    """Write ``folder/report.html`` of a study, from its ``summary.json`` and ``run.json``."""
    run, summary = read_run(folder), read_run(folder, "summary.json")
    context = {
        "kind": run["kind"],
        "title": summary.get("model", run["kind"]),
        "operation": summary.get("operation"),
        "heading": title,
        "lead": lead,
        "body": html(blocks(summary)),
        "facts": facts_of(run),
    }
    return write_page(render("study.html.j2", context, {"page": "study"}, {}), folder / "report.html")


def require_kind(run: Mapping[str, Any], folder: Path, *expected: str) -> str:
    """The command that made a run, by its ``run.json``; one that a page does not know is refused, and its results named."""
    kind = str(run.get("kind"))
    if kind not in expected:
        known = [name for name in ("summary.json", "table.parquet") if (folder / name).is_file()]
        more = f"; what it found is in {folder / known[0]}" if known else ""
        commands = filter(None, (", ".join(expected[:-1]), expected[-1]))
        raise InputError(f"{folder} holds a run of kind {kind!r}, expected {' or '.join(commands)}{more}")
    return kind


def check_page(path: Path) -> None:
    """Refuse to write a page where something else is."""
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise InputError(f"{path} is no page of sinklab, and is not replaced; move it away")


@cache
def environment() -> jinja2.Environment:
    """Templates of ``assets/`` with the filters that they use; undefined names are errors."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, commands=lambda text: Markup(with_code(text)))
    return environment


@cache
def _asset(name: str) -> str:
    return (resources.files("sinklab.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_text(data: Mapping[str, object]) -> str:
    """JSON that cannot end the element it stands in, nor open another one."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    # A lone half of a surrogate pair, from a damaged token, cannot be written as UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


MOST_ENTRIES = 12
"""Entries of a list in a record that a page writes out, such as the attention modules; ``run.json`` has all."""


def facts_of(run: Mapping[str, object]) -> list[tuple[str, list[tuple[str, str]]]]:
    """How the numbers of a run record were made: groups of names and values."""
    plain = {key: value for key, value in run.items() if not isinstance(value, (dict, list))}
    groups: list[tuple[str, Any]] = [("Run", plain)]
    titles = {"config": "Settings", "calls": "Calls per attention module"}
    for key, value in run.items():
        if isinstance(value, dict) and key not in {"definitions", "checks"}:
            groups.append((titles.get(key, key.replace("_", " ").capitalize()), value))
    return [(title, _flat(value)) for title, value in groups if value]


def _flat(value: object, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list):
        entries = [" ".join(map(str, one.values())) if isinstance(one, dict) else str(one) for one in value]
        listed = entries if len(entries) <= MOST_ENTRIES else [entries[0], "…", entries[-1], f"{len(entries):,} in all"]
        return [(prefix or "value", ", ".join(listed))]
    return [(prefix or "value", "–" if value is None else str(value))]
