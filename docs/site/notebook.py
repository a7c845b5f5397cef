"""A notebook as a page: its Markdown as it is, its code, and what the code shows when it is run here, cell after cell.

Notebooks are kept without outputs, so what the site shows is what the code does today. A cell shows what it prints and its last
expression (as HTML where it has ``_repr_html_``).
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.site.sources import SiteError

__all__ = ["cells_of", "notebook_page"]


def cells_of(path: Path) -> list[tuple[str, str]]:
    """The cells of a notebook: kind and source."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = (cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells)
    return [(cell["cell_type"], source) for cell, source in zip(cells, sources, strict=True)]


def notebook_page(path: Path) -> str:
    """The Markdown of a notebook whose cells are run in an empty folder.

    Raises:
        SiteError: a cell that fails.
    """
    parts: list[str] = []
    names: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, (kind, source) in enumerate(cells_of(path)):
            if kind == "markdown":
                parts.append(source)
            elif kind == "code" and source.strip():
                parts.append(_fenced(source, "python"))
                try:
                    parts += _run(source, names)
                except Exception as error:
                    raise SiteError(f"{path.name}, cell {number}: {type(error).__name__}: {error}") from error
    return "\n\n".join(parts) + "\n"


def _run(source: str, names: dict[str, object]) -> Iterator[str]:
    """Run one cell; what it shows, as Markdown."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    shown: list[object] = []
    names["display"] = shown.append
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), "<cell>", "eval"), names))
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed.getvalue())
    if text.strip():
        yield _fenced(text, "text")
    for thing in shown:
        markup = thing._repr_html_() if hasattr(thing, "_repr_html_") else None
        if markup is not None:
            yield _fenced(f'<div class="notebook-output">\n{markup}\n</div>', "{raw} html")
        elif thing is not None:
            yield _fenced(repr(thing), "text")


def _fenced(text: str, language: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
