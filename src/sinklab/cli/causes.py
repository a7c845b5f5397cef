"""The command ``sinklab causes``: what every head does with its sink, from what happens when the sink is taken away."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.arguments import (
    AsJson,
    Bos,
    Device,
    Dtype,
    ModelSource,
    Overwrite,
    Revision,
    Threshold,
    TrustRemoteCode,
    command,
)
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries
from sinklab.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["causes"]


COLOURS = {"semantic": "blue", "dormant": "magenta", "switch": "yellow", "broadcast": "green", "undecided": "dim"}
COLUMNS = {"redirect": "all to the sink", "hide": "sink hidden", "zero_value": "its value zeroed", "zero": "head zeroed"}
"""Interventions that the table shows, with their headings."""

WORDS: tuple[Literal["auto", "null", "none"], ...] = ("auto", "null", "none")
"""What --sink may be, besides a position."""

PER_HEAD = 40
"""Heads that the terminal shows; a larger model's undecided ones are in summary.json alone."""


@command
def causes(
    model: ModelSource,
    *,
    heads: str = "all",
    sink: str = "auto",
    domains: str = "python_source",
    texts: int | None = None,
    seq_len: int | None = None,
    budget: Literal["fast", "full"] = "fast",
    level: float = 0.05,
    minimal_effect: float = 0.01,
    threshold: Threshold = 0.3,
    seed: int = 0,
    bos: Bos = "auto",
    batch_size: int = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Path | None = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say what every head does with its sink: semantic, dormant, switch, broadcast, or undecided.

    Changes one head at a time, takes the loss again, and compares with random changes of the same size. With --out a run that
    is killed goes on where it was.

    semantic: sending all of a head's attention to the sink costs loss on every domain. dormant: it costs nothing, and hiding
    the sink costs more than hiding other keys. switch: one on some domains, the other on others. broadcast: the sink's value is
    used. undecided: anything else, at the error rate asked for. docs/causes.md has the rules and their limits.

    Args:
        heads: Heads to examine, written layer.head from 0.
        sink: Where the sink is: found, a position of the document, the null score, or none (heads are then zeroed).
        domains: Names from 'sinklab list corpora' or text files; each is a domain.
        texts: Texts of each domain; more decide more heads; by default 16, or 64 in full.
        seq_len: Tokens of a text, BOS included; by default 256, or the trained length if less.
        budget: full: more texts, more controls, replacement by means and other texts, all experiments.
        level: Expected share of false labels among those given.
        minimal_effect: Change of the loss, in nats, below which it counts as nothing.
        seed: Seed of texts and controls; the same seed gives the same numbers.
        batch_size: Texts a forward pass.
        out: Directory for report.html, summary.json, table.parquet and run.json.

    Examples:
        sinklab causes embedded:softmax
        sinklab causes embedded:softmax --heads 2.0,3.1 --texts 64 --out build/causes
        sinklab causes ORG/MODEL --domains python_source,notes.txt --budget full --out build/causes
        sinklab causes ORG/MODEL --sink null --json
    """
    chosen = parse_heads(heads)
    place = parse_sink(sink)
    quiet_libraries()
    from sinklab.auditing.causes import find_causes

    with output.progress() as progress:
        result = find_causes(
            model,
            heads=chosen,
            sink=place,
            domains=[part.strip() for part in domains.split(",") if part.strip()],
            texts=texts,
            seq_len=seq_len,
            budget=budget,
            level=level,
            minimal_effect=minimal_effect,
            threshold=threshold,
            seed=seed,
            bos=bos,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            out=out,
            overwrite=overwrite,
            say=lambda text: print(text, file=sys.stderr),
            progress=progress,
        )
    if as_json:
        output.print_json(result.summary)
        return
    _print(result.summary)
    if out is not None:
        print(f"\nreport  {out / 'report.html'}")


def parse_heads(text: str) -> list[tuple[int, int]] | None:
    """Pairs of layer and head from ``0.1,3.0``; ``None`` for ``all``.

    Raises:
        ConfigurationError: anything else.
    """
    if text.strip() == "all":
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"\d+\.\d+", part) for part in parts):
        raise ConfigurationError(
            f"--heads {text!r} must be all, or heads written layer.head with commas between, such as 0.1,3.0"
        )
    return [(int(layer), int(head)) for layer, head in (part.split(".") for part in parts)]


def parse_sink(text: str) -> int | Literal["auto", "null", "none"]:
    """``auto``, ``null``, ``none`` or a position.

    Raises:
        ConfigurationError: anything else.
    """
    for word in WORDS:
        if text == word:
            return word
    if not text.isdecimal():
        raise ConfigurationError(f"--sink {text} must be auto, a position from 0, null or none")
    return int(text)


def _print(summary: Mapping[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False, width=None if Console().is_terminal else output.PIPE_WIDTH)
    every = summary["heads"]
    shown = [head for head in every if head["label"] != "undecided"] if len(every) > PER_HEAD else every
    used = [name for name in COLUMNS if any(name in head["effects"] for head in every)]
    for domain in summary["domains"]:
        table = Table(box=None, pad_edge=False)
        for name in ("head", "label", "sink weight", "value", *(COLUMNS[name] for name in used)):
            table.add_column(name, justify="left" if name in ("head", "label") else "right")
        for head in shown:
            label = head["domains"].get(domain, head["label"])
            numbers = (head["sink_weight"], head["value_ratio"])
            table.add_row(
                f"{head['layer']}.{head['head']}",
                f"[{COLOURS[label]}]{label}[/]",
                *("–" if number is None else f"{number:.2f}" for number in numbers),
                *(_effect(head["effects"].get(name, {}).get(domain)) for name in used),
            )
        console.print(f"[bold]{escape(domain)}[/bold], change of the loss in {summary['unit']} with its interval")
        console.print(table)
        console.print()
    if len(shown) < len(every):
        console.print(f"{len(every) - len(shown)} undecided heads are not shown\n")
    counts = ", ".join(f"{count} {label}" for label, count in summary["counts"].items() if count)
    console.print(f"[bold]{counts}[/bold]")
    console.print(summary["text"], markup=False)


def _effect(effect: Mapping[str, float] | None) -> str:
    if effect is None or effect["mean"] is None:
        return "–"
    interval = f"[{effect['low']:+z.4f}, {effect['high']:+z.4f}]"
    return f"{effect['mean']:+z.4f} {escape(interval)}"
