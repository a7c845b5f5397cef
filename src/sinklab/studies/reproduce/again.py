"""Judging kept results again: their numbers under the rule and the words of today. Nothing is trained and nothing is measured.

``python -m sinklab.studies.reproduce.again results`` does it for every record below a folder, and names those that change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pandas as pd

from sinklab.jobs.claim import Claim
from sinklab.jobs.effect import Numbers
from sinklab.jobs.scale import CHECKPOINT
from sinklab.jobs.verdict import Conclusion, judge, judge_model, judge_models
from sinklab.registry import claims
from sinklab.report.claim_figure import write_claim_figure
from sinklab.results.summaries.claims import ClaimOfModel, ClaimRecord
from sinklab.results.table import read_table, write_json
from sinklab.studies.reproduce.kept import deciding_part, read_results, words_of

__all__ = ["judged_again", "numbers_of_table"]


def judged_again(record: ClaimRecord, table: pd.DataFrame) -> ClaimRecord:
    """The record of a claim with what its statement, its parts and the rule of verdicts are today.

    Args:
        table: its numbers, which are taken as they are; those of seeds that the record does not have are lent to its premises.

    Raises:
        UnknownNameError: there is no such claim any more.
    """
    claim = claims[record["claim"]]()
    words = words_of(claim)
    if record["scale"] == CHECKPOINT:
        judgement, models = _of_checkpoints(claim, record, table)
        remark = "" if claim.checkpoint is None else claim.checkpoint.remark
        return cast(ClaimRecord, {**record, **words, "evidence": remark, "models": models, **_judged(judgement)})
    model = claim.one_model.get(record["scale"])
    of_seeds = numbers_of_table(table, "model", record["seeds"])
    own = {seed: of_seeds.pop(seed) for seed in record["seeds"]}
    judgement = judge(claim.parts, claim.presupposes, own, one_model=model is not None, lent=of_seeds)
    about = {"evidence": claim.evidence.get(record["scale"], ""), "one_model": model}
    return cast(ClaimRecord, {**record, **words, **about, **_judged(judgement)})


def numbers_of_table(table: pd.DataFrame, label: str, seeds: Iterable[int] = ()) -> dict[int, Numbers]:
    """Numbers by seed, label and metric.

    Args:
        seeds: those that are there even without a number.
        label: the column that the label is in: ``model`` of trained ones, ``intervention`` of checkpoints.
    """
    numbers: dict[int, dict[str, dict[str, float]]] = {seed: {} for seed in seeds}
    for seed, name, metric, value in table[["seed", label, "metric", "value"]].itertuples(index=False):
        if not pd.isna(value):
            numbers.setdefault(int(seed), {}).setdefault(str(name), {})[str(metric)] = float(value)
    return dict(numbers)


def _judged(judgement: Conclusion) -> dict[str, object]:
    return {
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "parts": [finding.to_dict() for finding in judgement.findings],
        "presupposes": [finding.to_dict() for finding in judgement.presupposed],
    }


def _of_checkpoints(claim: Claim, record: ClaimRecord, table: pd.DataFrame) -> tuple[Conclusion, list[ClaimOfModel]]:
    how = claim.checkpoint
    assert how is not None, "it was measured on checkpoints"
    presupposes = claim.presupposes if how.presupposes is None else how.presupposes
    found, numbers, models = dict[str, Conclusion](), dict[str, dict[int, Numbers]](), []
    for model in record["models"]:
        rows = table[table["model"] == model["name"]]
        if rows.empty:  # it said why, and still says so
            found[model["name"]] = Conclusion("not applicable", (), (), model["reason"])
            models.append(model)
            continue
        of_seeds = numbers[model["name"]] = numbers_of_table(rows, "intervention", record["seeds"])
        judged = found[model["name"]] = judge_model(how.parts or claim.parts, presupposes, of_seeds)
        parts = [finding.to_dict() for finding in judged.findings]
        deciding = deciding_part({"parts": parts, "verdict": judged.verdict})
        effect = {
            "effect": None if deciding is None else deciding["mean"],
            "interval": None if deciding is None else deciding["interval"],
            "unit": None if deciding is None else deciding["unit"],
        }
        models.append(cast(ClaimOfModel, {**model, **_judged(judged), **effect}))
    weights = {model["name"]: model["revision"] for model in models}
    return judge_models(how.parts or claim.parts, found, numbers, weights), models


def main(folder: Path) -> int:
    """Judge every record below a folder again, and write it, with its figure if it has one; the number of changed verdicts."""
    changed = 0
    for kept in read_results(folder):
        record = judged_again(kept.record, read_table(kept.folder / "table.parquet"))
        if record != kept.record:
            write_json(record, kept.folder / "run.json")
            if (kept.folder / "figure.png").is_file():
                write_claim_figure(kept.folder)
        if record["verdict"] != kept.record["verdict"]:
            changed += 1
            print(f"{record['scale']}/{record['claim']}: {kept.record['verdict']} → {record['verdict']}  {record['reason']}")
    return changed


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1]))} verdicts changed")
