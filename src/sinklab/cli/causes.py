"""The command ``sinklab causes``: what every head does with its sink, from what happens when the sink is taken away."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    pass

__all__ = ["causes"]


WORDS: tuple[Literal["auto", "null", "none"], ...] = ("auto", "null", "none")
"""What --sink may be, besides a position."""


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
    output.print_result(result, as_json)


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
