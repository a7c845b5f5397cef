"""The page of GPU benchmarks, from what runs have written: promises met and missed, figures, and what failed."""

from __future__ import annotations

from typing import Any

__all__ = ["is_met", "one_line", "page"]


def is_met(bar: dict[str, Any]) -> bool:
    """Whether a promise holds, from its numbers."""
    return bool(bar["measured"] <= bar["limit"] if bar["sense"] == "<=" else bar["measured"] >= bar["limit"])


def page(*runs: dict[str, Any]) -> str:
    """Markdown: how to run; for every run its machine and its tables."""
    lines = [
        "# Benchmarks on a GPU",
        "",
        "Written by `python benchmarks/cuda/run.py --out FOLDER --write docs/benchmarks-cuda.md`, or from kept results by",
        "`python benchmarks/cuda/run.py --from-json benchmarks/cuda/*.json --write docs/benchmarks-cuda.md`. Times are of CUDA",
        "events, the device idle before each, candidates of a ratio in turn in one process, the median of each. Inputs are",
        "random. No other part uses the device meanwhile.",
        "",
        "A bar is a number with a limit that was set before; rows of one kind share its number. *Flash* and *cuDNN* are",
        "kernels of torch's SDPA; the *plain form* is the definition of an operation in tensor operations. *Held* tokens",
        "are those in the cache, *T* those of a row. A *deviation* is the standard deviation of the logits. The *byte",
        "floor* is the time in which memory, as fast as in the copy of 1 GiB, gives the weights and the cache once.",
        "*StreamingLLM's pattern* rotates and joins all keys anew for every token, *ours* writes into slots; above 1 ours",
        "is faster.",
    ]
    for run in runs:
        lines += ["", *_section(run)]
    return "\n".join(lines) + "\n"


def _section(results: dict[str, Any]) -> list[str]:
    """One run: its machine, what there is to know of it, and its tables."""
    entries, machine = results["entries"], results["machine"]
    bars = [entry for entry in entries if entry["kind"] == "bar"]
    figures = [entry for entry in entries if entry["kind"] == "figure"]
    errors = [entry for entry in entries if entry["kind"] == "error"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "cudnn") if name in machine)
    missed = sum(not is_met(bar) for bar in bars)
    lines = [
        f"## {machine.get('device', 'An unknown device')}, {results['date']}",
        "",
        f"{versions}.",
        "",
        f"{len(bars)} bars, {missed} of them missed; {len(errors)} {'error' if len(errors) == 1 else 'errors'}.",
    ]
    for note in results.get("notes", []):
        lines += ["", note]
    if results.get("quick"):
        lines += ["", "**Sizes were shrunk to try the benchmarks out: no figure here means anything.**"]
    lines += ["", "| Bar | What | Measured | Limit | |", "|---|---|---|---|---|"]
    for entry in entries:
        what = _cell(entry["what"])
        if entry["kind"] == "error":
            lines.append(f"| | {what} | {_cell(entry['error'])} | | **error** |")
        elif entry["kind"] == "bar":
            sense = {"<=": "≤", ">=": "≥"}[entry["sense"]]
            verdict = "met" if is_met(entry) else "**missed**"
            limit = f"{sense} {entry['limit']:g} {entry['unit']}"
            lines.append(f"| {entry['number']} | {what} | {_measured(entry)} | {limit} | {verdict} |")
    if figures:
        lines += ["", "Figures without a limit:", "", "| Bar | What | Measured |", "|---|---|---|"]
        lines += [f"| {entry['number']} | {_cell(entry['what'])} | {_measured(entry)} |" for entry in figures]
    return lines


def one_line(entry: dict[str, Any]) -> str:
    """An entry as the terminal shows it."""
    if entry["kind"] == "error":
        last = [line.strip() for line in entry["traceback"].splitlines() if line.strip().startswith("File ")]
        return f"ERROR {entry['what']}: {entry['error']}" + (f" ({last[-1]})" if last else "")
    if entry["kind"] == "figure":
        return f"{entry['what']}: {_measured(entry)}"
    verdict = "met" if is_met(entry) else "MISSED"
    return f"{entry['what']}: {_measured(entry)}, {entry['sense']} {entry['limit']:g}: {verdict}"


def _measured(entry: dict[str, Any]) -> str:
    return f"{entry['measured']:.3g} {entry['unit']}".strip()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]
