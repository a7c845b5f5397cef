"""A notebook as a page: its Markdown as it is, its code, and the outputs that are stored in it; nothing is run."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.site.sources import SiteError

__all__ = ["notebook_page", "outputs_without_words"]

PICTURES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}


def notebook_page(path: Path, folder: Path) -> str:
    """The Markdown of a notebook; pictures among its outputs are written below ``folder``.

    Raises:
        SiteError: a cell that failed, or a picture without alternative text.
    """
    silent = outputs_without_words(path)
    if silent:
        raise SiteError(silent[0])
    parts = []
    for number, cell in enumerate(_cells(path)):
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(_fenced(source, "python"))
            for place, output in enumerate(cell["outputs"]):
                parts += _shown(output, cell, path, folder, f"{path.stem}-{number}-{place}")
    return "\n\n".join(parts) + "\n"


def outputs_without_words(path: Path) -> list[str]:
    """What of a notebook cannot be shown: cells that failed, pictures without alternative text; a sentence each."""
    found = []
    for number, cell in enumerate(_cells(path)):
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                found.append(f"{path.name}, cell {number}: it failed with {output['ename']}; run the notebook again")
            elif (
                set(output.get("data", ())) & set(PICTURES)
                and "text/html" not in output["data"]
                and not _alternative(output, cell)
            ):
                advice = 'put it into the metadata of the cell as "alt"'
                found.append(f"{path.name}, cell {number}: its picture has no alternative text; {advice}")
    return found


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def _alternative(output: dict[str, Any], cell: dict[str, Any]) -> str:
    """What the metadata of an output or of its cell calls ``alt``."""
    kinds = [value for value in output.get("metadata", {}).values() if isinstance(value, dict)]
    words = next((kind["alt"] for kind in [*kinds, output.get("metadata", {}), cell["metadata"]] if kind.get("alt")), "")
    return str(words)


def _shown(output: dict[str, Any], cell: dict[str, Any], path: Path, folder: Path, name: str) -> Iterator[str]:
    """One output: markup, a picture, or text, in this order of preference."""
    if output["output_type"] == "stream":
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", _text(output["text"]))
        if output["name"] == "stdout" and text.strip():
            yield _fenced(text, "text")
        return
    data = output.get("data", {})
    if "text/html" in data:
        markup = re.sub(r"\n\s*\n", "\n", _text(data["text/html"]))
        yield f'```{{raw}} html\n<div class="notebook-output">\n{markup}\n</div>\n```'
        return
    for kind, suffix in PICTURES.items():
        if kind in data:
            content = _text(data[kind])
            place = folder / "notebooks" / f"{name}.{suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode() if suffix == "svg" else base64.b64decode(content))
            yield f"![{_alternative(output, cell)}](/files/notebooks/{place.name})"
            return
    if "text/markdown" in data:
        yield _text(data["text/markdown"])
    elif "text/plain" in data:
        yield _fenced(_text(data["text/plain"]), "text")


def _fenced(text: str, language: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
