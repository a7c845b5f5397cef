"""docs/architectures.md is what the zoo says."""

from __future__ import annotations

import transformers

from .page import KINDS, PATH, page
from .zoo import MEASURED, OFF_SEAM, ZOO


def test_the_page_is_fresh() -> None:
    assert PATH.read_text(encoding="utf-8") == page(), "run: python -m tests.architectures.page"


def test_the_page_names_every_family_once() -> None:
    cells = [line.split("|")[1].strip() for line in page().splitlines() if line.startswith("| `")]
    assert sorted(cells) == sorted(f"`{family}`" for family in ZOO)
    assert {entry.kind for entry in (*MEASURED, *OFF_SEAM)} <= set(KINDS)


def test_the_zoo_is_large_and_its_classes_are_public() -> None:
    assert len(MEASURED) >= 40
    assert len(ZOO) == len(MEASURED) + len(OFF_SEAM)
    assert all(hasattr(transformers, entry.model) for entry in ZOO.values())
