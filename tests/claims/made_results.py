"""A made-up result of a claim, as a folder: what pages and commands are tested on."""

from __future__ import annotations

from pathlib import Path

from sinklab.results.sections import from_json, to_json
from sinklab.results.table import make_table, write_json, write_table
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.verdict.records import ClaimFound
from sinklab_claims.verdict.rule import judge

NUMBERS = {
    seed: {"baseline": {"sink_rate": 30.0 + seed}, "sigmoid <b>": {"sink_rate": 0.5 * seed, "loss": 2.0 + seed / 100}}
    for seed in range(3)
}
PARTS = (
    Part("the sink is gone", Difference("sink_rate", "sigmoid <b>", "baseline"), less_than=-5),
    Part("the loss stays", Value("loss", "sigmoid <b>"), more_than=1, less_than=3),
    Part("what nobody measured", Value("sink_rate", "lost"), more_than=5),
)


def write_claim(folder: Path, parts=PARTS, numbers=None, **changed) -> ClaimFound:
    numbers = NUMBERS if numbers is None else numbers
    found = judge(parts, (), numbers)
    record = {
        "kind": "claim", "run_id": "0", "claim": folder.name, "statement": "Without softmax <i>no</i> sink.",
        "source": "gu2024",
        "reference": "Gu et al. 2024 (arXiv 2410.10781), table 4", "published": "18.18 and 0.44.", "scale": folder.parent.name,
        "cost": "minutes", "seeds": list(numbers), "verdict": found.verdict, "reason": found.reason, "evidence": "",
        "parts": [to_json(finding.record()) for finding in found.findings], "presupposes": [], "conditions": {},
        "environment": {"hardware": {"device": "cpu", "name": "made up", "cpu_count": 2}},
        "created": "2026-01-01T00:00:00+00:00",
    } | changed  # fmt: skip
    rows = [
        {"model": label, "metric": metric, "seed": seed, "value": value, "count": 1, "unit": "percent"}
        for seed, by_label in numbers.items()
        for label, values in by_label.items()
        for metric, value in values.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(record, folder / "run.json")
    write_table(make_table(rows, run_id="0", probe="claim", version=1), folder / "table.parquet")
    return from_json(ClaimFound, record, folder)


def numbers_of(table) -> dict:
    """Seed to variant to metric to number, from the table of a claim."""
    numbers: dict = {}
    for seed, label, metric, value in zip(table["seed"], table["model"], table["metric"], table["value"], strict=True):
        numbers.setdefault(int(seed), {}).setdefault(label, {})[metric] = value
    return numbers
