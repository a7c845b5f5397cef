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


RESULTS = {
    "date": "2026-11-26",
    "quick": False,
    "machine": {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "triton": "3.6.0"},
    "entries": [
        bar("one that is met", 1.51, "<=", 2.0, True),
        bar("one that is missed", 2.34, "<=", 2.0, False),
        bar("a floor that is missed", 0.4, ">=", 0.6, False),
        {"part": "null", "kind": "figure", "number": "11", "what": "a time", "measured": 0.25, "unit": "ms", "details": {}},
        {"part": "elu", "kind": "error", "what": "elu", "error": "RuntimeError: a | b\nc", "traceback": "  File x, in run\n"},
    ],
    "seconds": {},
}


def written(tmp_path, *runs):
    target = tmp_path / "page.md"
    sources = [tmp_path / f"results{number}.json" for number in range(len(runs))]
    for source, results in zip(sources, runs, strict=True):
        source.write_text(json.dumps(results), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--from-json", *map(str, sources), "--write", str(target)]
    code = subprocess.run(command, check=False).returncode
    return code, target.read_text(encoding="utf-8")


def test_the_page_is_what_was_found(tmp_path):
    code, page = written(tmp_path, RESULTS)
    lines = page.splitlines()
    assert code == 1  # two bars are missed
    assert page.startswith("# Benchmarks on a GPU\n")
    assert "## NVIDIA H100 80GB HBM3, 2026-11-26" in lines
    assert "torch 2.11.0+cu130, triton 3.6.0." in lines
    assert "3 bars, 2 of them missed; 1 error." in lines
    assert "| 15 | one that is met | 1.51 × | ≤ 2 × | met |" in lines
    assert "| 15 | one that is missed | 2.34 × | ≤ 2 × | **missed** |" in lines
    assert "| 15 | a floor that is missed | 0.4 × | ≥ 0.6 × | **missed** |" in lines
    assert "| | elu | RuntimeError: a \\| b c | | **error** |" in lines
    assert "| 11 | a time | 0.25 ms |" in lines
    assert "no figure here means anything" not in page


def test_the_verdict_is_that_of_the_numbers(tmp_path):
    """A result that calls itself met and is not is shown as missed; not a number meets nothing."""
    entries = [bar("claimed", 2.34, "<=", 2.0, True), bar("nothing", float("nan"), "<=", 2.0, True)]
    code, page = written(tmp_path, {**RESULTS, "entries": entries})
    assert code == 1
    assert page.count("**missed**") == 2
    assert "2 bars, 2 of them missed; 0 errors." in page


def test_all_met_and_shrunk(tmp_path):
    code, page = written(tmp_path, {**RESULTS, "quick": True, "entries": RESULTS["entries"][:1]})
    assert code == 0
    assert "1 bars, 0 of them missed; 0 errors." in page
    assert "no figure here means anything" in page


def test_the_page_in_docs_is_that_of_the_results_that_are_kept(tmp_path):
    kept = sorted(SCRIPT.parent.glob("*.json"))
    _, page = written(tmp_path, *(json.loads(results.read_text(encoding="utf-8")) for results in kept))
    assert page == (SCRIPT.parents[2] / "docs" / "benchmarks-cuda.md").read_text(encoding="utf-8")
    for word in ("A bar is ", "*Held* tokens", "*byte floor*", "*deviation*"):
        assert word in " ".join(page.split())
