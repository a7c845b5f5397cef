"""Blocks of code on the pages: which of them the tests run, and why some cannot be run.

A Python block that no test can run says so itself, in a comment that starts with ``NOT_RUN``. Lines of a console are run on
small stand-ins by the slow tests, but for those that WHY_NOT names; all are parsed by the quick ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from docs.site.sources import ROOT

__all__ = ["NOT_RUN", "RUN_BY", "Block", "Line", "account", "console_lines", "pages_with_code", "python_blocks", "why_not"]

NOT_RUN = "# not run by the tests: "

RUN_BY = {
    "CONTRIBUTING.md": "tests/test_docs.py",
    "README.md": "tests/test_docs.py",
    "docs/explain.md": "tests/test_site.py",
    "docs/fold.md": "tests/test_site.py",
    "docs/footguns.md": "tests/architectures/test_footguns.py",
    "docs/installation.md": "tests/test_site.py",
    "docs/interventions.md": "tests/test_docs.py",
    "docs/measure.md": "tests/test_site.py",
    "docs/operations.md": "tests/test_site.py",
    "docs/policies.md": "tests/policies/test_policy_checks.py",
    "docs/quantisation.md": "tests/test_site.py",
    "docs/reference.md": "tests/test_site.py",
    "docs/scores.md": "tests/tasks/test_tasks.py",
    "docs/stream.md": "tests/test_site.py",
    "docs/theory.md": "tests/test_site.py",
    "docs/train.md": "tests/test_site.py",
}
"""Page to the test that runs its Python blocks."""

WHY_NOT = {
    r"^torchrun ": "needs several processes, and GPUs to be worth it",
    r"^python examples/": "tests of their own run the examples",
    r"^(pip|uvx|make) ": "installs, builds or tests: CI does that",
    r" --ray ": "needs a Ray cluster",
    r" --(scale (small|60m|1b)|endless|chat)\b": "takes hours, or never ends, or waits for somebody to type",
    r"^sinklab (pretrain|sweep) ": "trains, for minutes or more",
    r"^sinklab audit sinklab-runs/": "reads what such a training leaves",
    r"^sinklab (cache|quantize|depend) ": "reads long texts for minutes; every command is run on small settings elsewhere",
    r"^sinklab (card|export) ": "reads what another run leaves; every command is run on small settings elsewhere",
    r"^sinklab reproduce": "trains or measures what is missing, in processes of its own, for minutes or more",
    r"^sinklab trigger": "trains for minutes or more; a short training is run from Python",
    r"vit|VISION_MODEL|--corpus pictures/": "needs a model of pictures, and pictures",
    r"lm_eval:|evaluation": "downloads the data of the task",
    r"--max-memory 0=": "needs a GPU",
    r"--device-map '": "needs the layers of a large model",
}
"""What a line contains to why it is not run."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A Python block: its page, its number there, and why it is not run, if so."""

    page: str
    number: int
    source: str
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a console, without its comment's blanks, and why it is not run, if so."""

    page: str
    text: str
    reason: str | None


def pages_with_code(root: Path = ROOT) -> list[Path]:
    """README, CONTRIBUTING and every document; PYPI.md is made of README."""
    return sorted([*(page for page in root.glob("*.md") if page.name != "PYPI.md"), *(root / "docs").rglob("*.md")])


def fences(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def python_blocks() -> Iterator[Block]:
    """Every Python block of every page."""
    for path in pages_with_code():
        for number, source in enumerate(fences(path, "python")):
            marked = re.search(rf"^{re.escape(NOT_RUN)}(.+)$", source, flags=re.MULTILINE)
            yield Block(path.relative_to(ROOT).as_posix(), number, source, marked[1] if marked else None)


def console_lines() -> Iterator[Line]:
    """Every line of every console block, without comments and without where its output goes, in order."""
    for path in pages_with_code():
        for block in fences(path, "console"):
            for line in block.splitlines():
                text = re.sub(r"\s+(#|>>? |\| ).*", "", line).removeprefix(".venv/bin/").strip()
                if text:
                    yield Line(path.relative_to(ROOT).as_posix(), text, why_not(text))


def why_not(line: str) -> str | None:
    """Why a line is not run; None if it is."""
    return next((reason for pattern, reason in WHY_NOT.items() if re.search(pattern, line)), None)


def account() -> str:
    """What is run and what is not, counted, as a part of docs/reliability.md#what-of-these-pages-is-tested."""
    blocks, lines = list(python_blocks()), list(console_lines())
    run = [block for block in blocks if block.reason is None]
    done = [line for line in lines if line.reason is None]
    rows = [f"| {block.page} | {block.reason} | Python block {block.number + 1} |" for block in blocks if block.reason]
    rows += [f"| {line.page} | {line.reason} | `{line.text.replace('|', chr(92) + '|')}` |" for line in lines if line.reason]
    counts = (
        f"Of {len(blocks)} Python blocks {len(run)} are run with every `make test`, and {len(blocks) - len(run)} cannot be. "
        f"Of {len(lines)} command lines all are parsed, and {len(done)} are run by `make test-slow`; the other "
        f"{len(lines) - len(done)} are these."
    )
    return "\n".join([counts, "", "| page | why it is not run | what |", "|---|---|---|", *rows])
