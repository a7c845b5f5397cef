"""Assembles the sources of the site: the documents with links between pages, the reference from the code, the navigation."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from docs.site.blocks import account
from docs.site.notebook import notebook_page
from docs.site.reference import commands, library, metrics, papers
from docs.site.sources import LINK, ROOT, SUFFIXES, Section, SiteError, navigation, outside_code, title_of

__all__ = ["assemble"]

RENAMED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
PICTURES = {".png", ".svg", ".jpg", ".gif"}


def page_of(path: Path) -> PurePosixPath:
    """Where a file of the repository stands in the sources of the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in RENAMED:
        return PurePosixPath(RENAMED[name])
    place = PurePosixPath(name.removeprefix("docs/"))
    return place.with_suffix(".md") if place.suffix == ".ipynb" else place


def assemble(target: Path) -> int:
    """Write the sources of the site; returns the number of pages.

    Raises:
        SiteError: a page outside the navigation, or a link to a file that is not there.
    """
    sections = navigation()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    pages = [ROOT / "docs" / "index.md", *(page for section in sections for entry in section.entries for page in entry.pages)]
    places = {page: page_of(page) for page in pages}
    places[ROOT / "README.md"] = PurePosixPath("index.md")
    for section in sections:
        for entry in section.entries:
            if entry.folder is not None:
                places[entry.folder] = page_of(entry.folder) / "index.md"
    for page in pages:
        text = notebook_page(page) if page.suffix == ".ipynb" else page.read_text(encoding="utf-8")
        text = outside_code(text, lambda part, page=page: _relinked(part, page, places, target))
        _write(target / places[page], re.sub(r"^```console$", "```bash", text, flags=re.MULTILINE))
    for section in sections:
        for entry in section.entries:
            if entry.folder is not None:
                lines = [f"- [{title_of(page)}]({places[page].name})" for page in entry.pages]
                names = [places[page].name for page in entry.pages]
                _write(target / places[entry.folder], f"# {entry.title}\n\n" + "\n".join(lines) + "\n" + _toctree("", names))
    reliability = target / "reliability.md"
    _write(reliability, reliability.read_text(encoding="utf-8").replace("<!-- account -->", account()))
    made = {"library": library(), "commands": commands(), "metrics": metrics()}
    for name, text in made.items():
        _write(target / f"{name}.md", text)
    by_paper = papers()
    for name, text in by_paper.items():
        _write(target / "papers" / f"{name}.md", text)
    with (target / "index.md").open("a", encoding="utf-8") as file:
        file.write("".join(_toctree(section.title, _names(section, places)) for section in sections))
        file.write(_toctree("Made from the code", [f"{name}.md" for name in made]))
        file.write(_toctree("Claims by paper", [f"papers/{name}.md" for name in by_paper]))
    return sum(1 for _ in target.rglob("*.md"))


def _names(section: Section, places: Mapping[Path, PurePosixPath]) -> list[str]:
    """What a section of the sidebar lists: titles as in docs/index.md, and what they lead to."""
    return [f"{entry.title} <{places[entry.folder or entry.pages[0]].as_posix()}>" for entry in section.entries]


def _toctree(caption: str, names: list[str]) -> str:
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n```{{toctree}}\n{options}\n" + "\n".join(names) + "\n```\n"


def _relinked(text: str, page: Path, places: dict[Path, PurePosixPath], target: Path) -> str:
    """Links of one page by what they are called in the site; pictures and linked files go with it."""

    def link(match: re.Match[str]) -> str:
        name, mark, anchor = match["target"].partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        path = Path(os.path.normpath(page.parent / name))
        if not path.exists():
            raise SiteError(f"{page.relative_to(ROOT)} links to {name}, which is not there")
        if path not in places:
            places[path] = _taken_along(path, target)
        found = Path(os.path.relpath(places[path], places[page].parent)).as_posix()
        words = match["text"]
        if path.suffix in SUFFIXES and words == words.split()[0] and words.endswith(path.name):  # a file's name: say what it is
            words = title_of(path)
        return f"{match['picture']}[{words}]({found}{mark}{anchor})"

    return LINK.sub(link, text)


def _taken_along(path: Path, target: Path) -> PurePosixPath:
    """A file of the repository that is no page: a picture as it is, a source file as a page that shows it."""
    place = PurePosixPath("files") / path.relative_to(ROOT).as_posix()
    if path.suffix in PICTURES:
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / place)
        return place
    if not path.is_file():
        raise SiteError(f"{path.relative_to(ROOT)} is a folder that no page of the site shows; link a file of it")
    place = place.with_name(place.name + ".md")
    language = {".py": "python", ".md": "markdown", ".toml": "toml"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    head = f"---\norphan: true\nnosearch: true\n---\n\n# {path.name}\n\n`{path.relative_to(ROOT).as_posix()}`\n\n"
    _write(target / place, f"{head}{fence}{language}\n{text}{fence}\n")
    return place


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
