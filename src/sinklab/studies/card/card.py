"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.results.blocks import Block, Heading, markdown
from sinklab.results.run import Listing
from sinklab.results.sections import named, sections
from sinklab.studies.arguments import command

SHOWN = {
    "audit": "sinklab.studies.audit.found:show",
    "depend": "sinklab.studies.depend.found:show",
    "fold": "sinklab.studies.fold.found:show",
    "quantize": "sinklab.studies.quantize.found:show",
}
"""What gives the blocks of a summary; of the others their section does."""


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

    return Listing(card_of(run), lambda record: [Text(record["text"].rstrip("\n"), no_wrap=True)])


def card_of(folder: Path) -> dict[str, str]:
    """The card of the run in a folder: ``model``, without the folders that it lay in, ``kind``, and ``text`` in Markdown."""
    from sinklab.results.table import read_run

    record = read_run(folder)
    kind = str(record.get("kind"))
    known = sorted({*SHOWN, *sections()} - {"certificate"})  # which is no command
    if kind not in known:
        raise InputError(f"{folder} is a run of {kind}, of which there is no card; there is of {', '.join(known)}")
    summary = read_run(folder, "summary.json")
    show = sections()[kind].blocks if kind in sections() else named(SHOWN[kind])
    shown: Iterable[Block] = show(summary)
    model = str(summary.get("model") or record.get("model", {}).get("name"))
    line = str(record.get("command") or "")
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


def public_name(name: str) -> str:
    """A name without the folders of the machine that it lay on; ``org/model`` and ``embedded:softmax`` stay as they are."""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    outside = name.startswith(("/", ".", "~")) or "\\" in name or len(parts) > 2
    return parts[-1] if outside and parts[-1] else name
