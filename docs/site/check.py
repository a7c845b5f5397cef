"""Checks the built site: links and their anchors, alternative texts, and that nothing is taken from a network."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["faults"]

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
"""Attributes whose target a browser loads by itself."""


class _Page(HTMLParser):
    """What a page refers to, what it can be referred to by, and its pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.names: set[str] = set()
        self.silent: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for key in ("id", "name"):
            if given.get(key):
                self.names.add(str(given[key]))
        for key in ("href", "src", "data"):
            if given.get(key) is not None and (tag == "a" or (tag, key) in LOADED):
                self.targets.append((tag, str(given[key])))
        if tag == "img" and not (given.get("alt") or "").strip():
            self.silent.append(str(given.get("src")))
        if tag == "iframe" and not (given.get("title") or "").strip():
            self.silent.append("a frame without a title")


def faults(site: Path) -> list[str]:
    """What is wrong with the pages below a folder, one sentence each; empty if nothing is."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        found += [f"{name}: no alternative text: {source}" for source in page.silent]
        for tag, target in page.targets:
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if tag != "a":
                    found.append(f"{name}: <{tag}> loads {target} from a network")
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not goal.exists():
                found.append(f"{name}: {target} leads nowhere")
            elif parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].names:
                found.append(f"{name}: {target} names no place of its page")
    return found
