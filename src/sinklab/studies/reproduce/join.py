"""Joining kept results: seeds that were run apart, on several machines or at several times, under one verdict.

``python -m sinklab.studies.reproduce.join results others`` takes what ``others`` has into ``results``: claims that are
new there as they are, and the seeds of the others. Nothing is trained and nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pandas as pd

from sinklab.errors import InputError, ResultError
from sinklab.jobs.scale import CHECKPOINT
from sinklab.report.claim_figure import write_claim_figure
from sinklab.results.naming import counted
from sinklab.results.run import new_run_id
from sinklab.results.summaries.claims import ClaimRecord
from sinklab.results.table import append, read_table, write_json, write_table
from sinklab.studies.reproduce.again import judged_again
from sinklab.studies.reproduce.kept import StoredClaim, read_results, same_training, without_dtype

__all__ = ["add", "join"]

SAME = {
    "claim": "claims",
    "scale": "scales",
    "base": "bases",
    "config": "models and trainings that variants start from",
    "read_outs": "read-outs",
}
"""Fields of a record that must be equal, and what differs where one is not."""


def join(claim: StoredClaim, other: StoredClaim) -> tuple[ClaimRecord, pd.DataFrame]:
    """The record and the table of both, judged by the rule and the words of today; neither folder is touched.

    The record keeps under ``joined`` what each of them was: its run, seeds, time, and the code and machine behind it.

    Raises:
        InputError: they are not of the same claim, scale, base, model, variants and read-outs; they share a seed; they are
            about checkpoints, whose seeds are draws of the same texts; or a metric of theirs has two versions.
    """
    # What "results" has comes first: its fields are kept where both have their own.
    first, second = cast(Mapping[str, Any], claim.record), cast(Mapping[str, Any], other.record)
    whose = f"{claim.folder} and {other.folder}"
    if CHECKPOINT in (first["scale"], second["scale"]):
        raise InputError(f"{whose}: results on checkpoints are of one run each; run the claim with all seeds")
    for field, what in SAME.items():
        if without_dtype(first.get(field)) != without_dtype(second.get(field)):
            raise InputError(f"{whose} are of different {what}, and have no verdict together")
    if first["conditions"].keys() != second["conditions"].keys() or not all(
        same_training(of, second["conditions"][label]) for label, of in first["conditions"].items()
    ):
        raise InputError(f"{whose} are of different variants, and have no verdict together")
    shared = sorted(set(first["seeds"]) & set(second["seeds"]))
    if shared:
        raise InputError(f"{whose} both have seed {', '.join(map(str, shared))}; a seed counts once")
    try:
        table = append([_numbers_of(part) for part in (claim, other)])
    except ResultError as error:
        raise InputError(f"{whose}: {error}") from error
    conditions = {
        label: {**of, "cells": {**of["cells"], **second["conditions"][label]["cells"]}}
        for label, of in first["conditions"].items()
    }
    record = {
        **{name: field for name, field in first.items() if name != "lent"},
        "run_id": new_run_id(),
        "seeds": sorted([*first["seeds"], *second["seeds"]]),
        "conditions": conditions,
        "seconds": round(first.get("seconds", 0.0) + second.get("seconds", 0.0), 1),
        "errors": [*first.get("errors", ()), *second.get("errors", ())],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "joined": [before for record in (first, second) for before in record.get("joined", [_before(record)])],
    }
    return judged_again(cast(ClaimRecord, record), table), table


def _numbers_of(claim: StoredClaim) -> pd.DataFrame:
    """The table of a record, without seeds that it does not speak of: lent ones, and those of a joining that was cut short."""
    table = read_table(claim.folder / "table.parquet")
    return table[table["seed"].isin(claim.record["seeds"])]


def _before(record: Mapping[str, Any]) -> dict[str, object]:
    return {name: record[name] for name in ("run_id", "seeds", "created", "environment")}


def add(results: Path, others: Path) -> list[str]:
    """Take what one folder of results has into another; a line for each claim.

    All are joined before the first is written, so that a refusal leaves ``results`` as it is.

    Raises:
        InputError: as :func:`join`, or a record that is damaged.
    """
    have = {_place(claim): claim for claim in read_results(results)}
    new = sorted(read_results(others), key=lambda claim: str(_place(claim)))
    if not new:
        raise InputError(f"{others} has no results of claims; expected SCALE/CLAIM/run.json below it")
    made = [(claim, join(have[_place(claim)], claim) if _place(claim) in have else None) for claim in new]
    lines = []
    for claim, joined in made:
        place, folder = _place(claim), results / _place(claim)
        if joined is None:
            shutil.copytree(claim.folder, folder)
            lines.append(f"{place}: {claim.record['verdict']}, {counted(len(claim.record['seeds']), 'seed')}, new here")
            continue
        record, table = joined
        before = have[place].record
        write_table(table, folder / "table.parquet")
        write_json(record, folder / "run.json")  # last: it says which seeds there are
        if (folder / "figure.png").is_file():
            write_claim_figure(folder)
        change = "" if record["verdict"] == before["verdict"] else f"{before['verdict']} → "
        lines.append(f"{place}: {change}{record['verdict']}, {len(before['seeds'])} → {counted(len(record['seeds']), 'seed')}")
    return lines


def _place(claim: StoredClaim) -> Path:
    return Path(claim.folder.parent.name, claim.folder.name)


def main(arguments: list[str] | None = None) -> None:
    """Join two folders of results, and print a line for each claim."""
    parser = argparse.ArgumentParser(
        prog="python -m sinklab.studies.reproduce.join", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", type=Path, help="folder that takes them, with SCALE/CLAIM/run.json below it")
    parser.add_argument("others", type=Path, help="folder whose seeds and claims are taken; it stays as it is")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(add(options.results, options.others)))
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
