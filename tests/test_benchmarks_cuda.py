"""The page of GPU benchmarks says what the results say: bars missed, errors, and that a run was shrunk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "cuda" / "run.py"


def bar(what, measured, sense, limit, met):
    record = {"part": "columns", "kind": "bar", "number": "15", "what": what, "measured": measured}
    return {**record, "sense": sense, "limit": limit, "unit": "×", "details": {}, "met": met}


RESULTS = {"date": "2026-11-26", "quick": False, "machine": {"device": "NVIDIA H100", "torch": "2.11.0+cu130"}, "seconds": {}}


def written(tmp_path, *runs):
    target = tmp_path / "page.md"
    sources = [tmp_path / f"results{number}.json" for number in range(len(runs))]
    for source, results in zip(sources, runs, strict=True):
        source.write_text(json.dumps(results), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--from-json", *map(str, sources), "--write", str(target)]
    code = subprocess.run(command, check=False).returncode
    return code, target.read_text(encoding="utf-8")


def test_the_verdict_is_that_of_the_numbers(tmp_path):
    """A result that calls itself met and is not is shown as missed; not a number meets nothing."""
    entries = [bar("claimed", 2.34, "<=", 2.0, True), bar("nothing", float("nan"), "<=", 2.0, True)]
    code, page = written(tmp_path, {**RESULTS, "entries": entries})
    assert code == 1
    assert page.count("**missed**") == 2
    assert "2 bars, 2 of them missed; 0 errors." in page


def test_the_page_in_docs_is_that_of_the_results_that_are_kept(tmp_path):
    kept = sorted(SCRIPT.parent.glob("*.json"))
    _, page = written(tmp_path, *(json.loads(results.read_text(encoding="utf-8")) for results in kept))
    assert page == (SCRIPT.parents[2] / "docs" / "benchmarks-cuda.md").read_text(encoding="utf-8")
    for word in ("A bar is ", "*Held* tokens", "*byte floor*", "*deviation*"):
        assert word in " ".join(page.split())
