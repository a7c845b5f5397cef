"""Words for cells of a grid: what a pair of cells differs in, and an index of dependence in a few characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["bos_name", "column_name", "index_text", "score_text"]

BOS_NAMES = {0: "no BOS", 1: "one BOS", 2: "two BOS"}


def bos_name(count: int) -> str:
    """Tokens in front in words."""
    return BOS_NAMES[count]


def column_name(pair: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """What a pair of cells differs in from the reference; of the reference itself, what it is."""
    facts = {"bos": bos_name(pair["bos"]), "policy": str(pair["policy"]), "bits": f"{pair['bits']} bits"}
    changed = [words for key, words in facts.items() if pair[key] != reference[key]]
    return "\n".join(changed or facts.values())


def index_text(index: Mapping[str, Any] | None) -> str:
    """An index with its interval, or why there is none."""
    if index is None:
        return ""
    if "refused" in index:
        return str(index["refused"]).partition(":")[0]
    # An interval that leaves out 0 is not shown as one that ends there.
    apart = 0.0 if index["low"] <= 0.0 <= index["high"] else min(abs(index["low"]), abs(index["high"]))
    places = next((places for places in (2, 3) if not apart or round(apart, places)), 4)
    return f"{index['mean']:+z.{places}f} [{index['low']:+z.{places}f}, {index['high']:+z.{places}f}]"


def score_text(side: Mapping[str, Any] | None) -> str:
    """The score of a cell; a dash where there is none."""
    return "–" if side is None or "refused" in side else f"{side['score']['mean']:.3f}"
