"""The site without building it: every page is in the navigation, anchors are there, pictures can be read aloud."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.site.check import faults
from docs.site.sources import ROOT, SiteError, alternatives, anchors, links, navigation

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_page_is_in_the_navigation():
    """The message of what is raised says where to add a line."""
    listed = [page for section in navigation() for entry in section.entries for page in entry.pages]
    assert {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "claims.md"} <= set(listed)


@pytest.fixture
def small(tmp_path) -> Path:
    """A folder of documents with three pages, one of them in a folder."""
    (tmp_path / "docs" / "more").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n## Read\n\n- [One](one.md): first\n- [More](more): the rest\n")
    (tmp_path / "docs" / "one.md").write_text("# One `thing`\n")
    (tmp_path / "docs" / "more" / "two.md").write_text("# Two\n")
    return tmp_path


def test_a_folder_brings_its_pages(small):
    (section,) = navigation(small / "docs" / "index.md", small)
    assert [(entry.title, [page.name for page in entry.pages]) for entry in section.entries] == [
        ("One", ["one.md"]),
        ("More", ["two.md"]),
    ]


def test_a_page_outside_the_navigation_is_named_with_the_line_that_it_needs(small):
    (small / "docs" / "three.md").write_text("# Three `kinds`\n")
    with pytest.raises(SiteError, match=r"not in the navigation: docs/three\.md\. Add .*'- \[Three kinds\]\(three\.md\): what"):
        navigation(small / "docs" / "index.md", small)


def test_a_page_is_listed_once_and_is_there(small):
    index = small / "docs" / "index.md"
    text = index.read_text()
    index.write_text(text + "- [Again](one.md)\n")
    with pytest.raises(SiteError, match=r"docs/one\.md is listed twice"):
        navigation(index, small)
    index.write_text(text + "- [Gone](gone.md)\n")
    with pytest.raises(SiteError, match=r"lists gone\.md, which is not there"):
        navigation(index, small)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_name_places_that_are_there(page):
    for _, _, target in links(page.read_text(encoding="utf-8")):
        name, mark, anchor = target.partition("#")
        if mark and not name.startswith(("http://", "https://")):
            goal = page.parent / name if name else page
            assert anchor in anchors(goal.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_picture_has_an_alternative_text(page):
    assert not alternatives(page.read_text(encoding="utf-8"))


def test_anchors_are_those_of_github():
    text = "# A sink: what?\n\n## `sink_rate`, once\n\n```\n# no heading\n```\n## A sink: what?\n### [linked](a.md) (2026)\n"
    assert anchors(text) == {"a-sink-what", "sink_rate-once", "a-sink-what-1", "linked-2026"}


def test_faults_of_a_built_page_are_found(tmp_path):
    good = '<a href="two.html#here">x</a><img src="a.svg" alt="a map"><p id="here"><a href="https://example.org">out</a>'
    for name in ("one.html", "two.html"):
        (tmp_path / name).write_text(good)
    (tmp_path / "a.svg").write_text("<svg/>")
    assert faults(tmp_path) == []
    (tmp_path / "one.html").write_text(
        '<a href="two.html#gone"></a><a href="three.html"></a><img src="a.svg"><script src="https://example.org/a.js"></script>'
        '<iframe src="two.html"></iframe>'
    )
    assert faults(tmp_path) == [
        "one.html: no alternative text: a.svg",
        "one.html: no alternative text: a frame without a title",
        "one.html: two.html#gone names no place of its page",
        "one.html: three.html leads nowhere",
        "one.html: <script> loads https://example.org/a.js from a network",
    ]
