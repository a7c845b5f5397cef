"""The comparison of policies in the folder of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from sinklab.errors import InputError
from sinklab.results.summaries.cache import Comparison
from sinklab.results.table import read_run

__all__ = ["comparison_of"]


def comparison_of(folder: Path) -> Comparison:
    """``summary.json`` of ``sinklab cache``, or the entry ``cache`` of that of an audit.

    Raises:
        InputError: no finished run is there, or one that compares no policies.
    """
    kind = read_run(folder).get("kind")
    summary = read_run(folder, "summary.json") if kind in ("cache", "audit") else {}
    comparison = summary.get("cache") if kind == "audit" else summary
    if not isinstance(comparison, dict) or "policies" not in comparison:
        what = f"a run of {kind}" if kind != "audit" else "an audit that compared no policies"
        raise InputError(f"{folder} is {what.replace('--no-cache', '`cache` off')}; a run of 'sinklab cache' is needed")
    return cast(Comparison, comparison)  # of a kind that writes one
