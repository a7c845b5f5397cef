"""What the documents say of themselves: navigation, titles, links, anchors, pictures.

The lists of docs/index.md are the navigation. A line links a page, or a folder whose pages follow in the order of their names.
Nothing but the standard library is needed here: tests read the navigation without building the site.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "FENCE",
    "ROOT",
    "SUFFIXES",
    "Entry",
    "Section",
    "SiteError",
    "alternatives",
    "anchors",
    "links",
    "navigation",
    "outside_code",
    "title_of",
]

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "index.md"
SUFFIXES = (".md", ".ipynb")
FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n[ \t]*\n).)*?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<target>[^)\s]+)\)", re.MULTILINE)


class SiteError(Exception):
    """Something that the site cannot be built from; the message says where it is and what to do."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the navigation: a title, and the page or the pages of a folder."""

    title: str
    pages: tuple[Path, ...]
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Section:
    """One list of docs/index.md."""

    title: str
    entries: tuple[Entry, ...]


def navigation(index: Path = INDEX, root: Path = ROOT) -> list[Section]:
    """The sections of the navigation, in order.

    Raises:
        SiteError: a page of docs/ is on no list or on two, or a list names what is not there.
    """
    text = index.read_text(encoding="utf-8")
    sections, seen = [], {index: "the front page"}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        entries = []
        for match in ENTRY.finditer(body):
            path = Path(os.path.normpath(index.parent / match["target"]))
            if not path.exists():
                raise SiteError(f"docs/index.md lists {match['target']}, which is not there")
            pages = tuple(sorted(_pages(path))) if path.is_dir() else (path,)
            for page in pages:
                if page in seen:
                    raise SiteError(f"{page.relative_to(root)} is listed twice in docs/index.md: {seen[page]} and {title}")
                seen[page] = title
            entries.append(Entry(match["title"], pages, path if path.is_dir() else None))
        if entries:
            sections.append(Section(title.strip(), tuple(entries)))
    lost = sorted(set(_pages(index.parent)) - set(seen))
    if lost:
        names = ", ".join(page.relative_to(root).as_posix() for page in lost)
        line = f"- [{title_of(lost[0])}]({lost[0].relative_to(index.parent).as_posix()}): what it is"
        raise SiteError(f"not in the navigation: {names}. Add a line to a list of docs/index.md, such as {line!r}")
    return sections


def _pages(folder: Path) -> Iterator[Path]:
    """The pages below a folder, but for decisions, which a search for help shall not find."""
    without = {"site", "decisions", ".ipynb_checkpoints"}
    for path in folder.rglob("*"):
        if path.suffix in SUFFIXES and without.isdisjoint(path.relative_to(folder).parts):
            yield path


def title_of(page: Path) -> str:
    """The first heading of a page, without its marks; the file's name if it has none."""
    text = page.read_text(encoding="utf-8")
    match = re.search(r'^(?:\s*")?# (.+?)(?:\\n)?"?,?$', text, flags=re.MULTILINE)
    return match[1].replace("`", "") if match else page.stem


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything changed that is neither in a fenced block nor in a code span."""

    def prose(part: str) -> str:
        pieces, end = [], 0
        for match in CODE.finditer(part):
            pieces += [part[end : match.start()], match[0]]
            end = match.end()
        # A link may have a code span in its text: code is put aside as one character, and back again.
        spans = pieces[1::2]
        joined = "".join(piece if number % 2 == 0 else f"\0{number // 2}\0" for number, piece in enumerate(pieces)) + part[end:]
        return re.sub(r"\0(\d+)\0", lambda match: spans[int(match[1])], change(joined))

    out, end = [], 0
    for match in FENCE.finditer(text):
        out += [prose(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*out, prose(text[end:])])


def links(text: str) -> Iterator[tuple[bool, str, str]]:
    """Every link and picture outside code: whether it is a picture, its text, its target."""
    found: list[tuple[bool, str, str]] = []

    def note(part: str) -> str:
        found.extend((match["picture"] == "!", match["text"], match["target"]) for match in LINK.finditer(part))
        return part

    outside_code(text, note)
    yield from found


def alternatives(text: str) -> list[str]:
    """Pictures without alternative text."""
    return [target for picture, words, target in links(text) if picture and not words.strip()]


def anchors(text: str) -> set[str]:
    """Anchors of headings, by GitHub's rule: lower case, no punctuation, hyphens for blanks, a number behind a repetition."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), flags=re.MULTILINE):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        slugs.add(f"{slug}-{count}" if count else slug)
    return slugs
