"""Premises: what a claim presupposes of one variant, judged over every training of it that any kept claim has.

A claim compares variants of one seed, so its parts need all of them from every seed. That its baseline has a sink is about the
baseline alone, which other claims have trained from more seeds. ``python -m sinklab.studies.reproduce.premises results`` lends
these numbers to every claim below a folder, into its own table, and judges it again. Nothing is trained or measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pandas as pd

from sinklab.errors import InputError
from sinklab.registry import claims
from sinklab.report.claim_figure import write_claim_figure
from sinklab.results.summaries.claims import ClaimRecord
from sinklab.results.table import append, read_table, write_json, write_table
from sinklab.studies.reproduce.again import judged_again
from sinklab.studies.reproduce.kept import StoredClaim, read_results, same_training, without_dtype

__all__ = ["lend", "with_lent"]


def with_lent(borrower: StoredClaim, results: Iterable[StoredClaim]) -> tuple[ClaimRecord, pd.DataFrame]:
    """The record and the table of a claim with the numbers that others lend it; neither folder is touched.

    Lent are numbers of what a premise names, if it names one variant, from seeds that the claim does not have: of claims at the
    same scale and base that train the same variant from the same configuration (but for the precision of products, which a
    machine chooses). The record names under ``lent`` for every variant and seed the claim that they are from.

    Args:
        results: those that may lend; ``borrower`` may be one of them.
    """
    record = cast(Mapping[str, Any], borrower.record)
    table = read_table(borrower.folder / "table.parquet")
    table = table[table["seed"].isin(record["seeds"])]  # without what was lent before
    taken: dict[str, dict[str, str]] = {}
    lent_tables: list[pd.DataFrame] = []
    for label, metrics in _required(borrower.record):
        seeds = dict.fromkeys(record["seeds"])
        for lender in sorted(results, key=lambda other: (-len(other.record["seeds"]), other.record["claim"])):
            if seeds.keys() >= set(lender.record["seeds"]):
                continue
            for lent in _numbers(lender, borrower, label, metrics):
                new = lent[~lent["seed"].isin(seeds)]
                lent_tables.append(new)
                for seed in map(int, new["seed"].unique()):
                    seeds[seed] = None
                    owners = taken.setdefault(label, {})
                    named = owners.get(str(seed), lender.record["claim"]).split(", ")
                    owners[str(seed)] = ", ".join(dict.fromkeys((*named, lender.record["claim"])))
    # Of premises that share a metric each brings it.
    lent_rows = [append(lent_tables).drop_duplicates(["model", "metric", "seed"])] if lent_tables else []
    whole = append([table, *lent_rows]).reset_index(drop=True)
    plain = {name: field for name, field in borrower.record.items() if name != "lent"}
    return judged_again(cast(ClaimRecord, plain | ({"lent": taken} if taken else {})), whole), whole


def _required(record: ClaimRecord) -> list[tuple[str, frozenset[str]]]:
    """Of every premise about one trained variant the label of this, and the metrics that the premise is computed from."""
    required = []
    for premise in claims[record["claim"]]().presupposes:
        needs = premise.effect.needs()
        labels = {label for label, _ in needs}
        if len(labels) == 1 and labels <= record["conditions"].keys():
            required.append((labels.pop(), frozenset(metric for _, metric in needs)))
    return list(dict.fromkeys(required))


def _numbers(lender: StoredClaim, borrower: StoredClaim, label: str, metrics: frozenset[str]) -> Iterable[pd.DataFrame]:
    """Rows of the lender about what ``borrower`` calls ``label``, under that label, of seeds that have all metrics."""
    own, theirs = cast(Mapping[str, Any], borrower.record), cast(Mapping[str, Any], lender.record)
    if lender.folder.parent.name != borrower.folder.parent.name or without_dtype(own["config"]) != without_dtype(
        theirs.get("config")
    ):
        return
    table = read_table(lender.folder / "table.parquet")
    for other, condition in theirs["conditions"].items():
        # What starts from the weights of another variant is another training for each of these.
        if condition["after"] is not None or not same_training(condition, own["conditions"][label]):
            continue
        rows = table[(table["model"] == other) & table["metric"].isin(list(metrics)) & table["seed"].isin(theirs["seeds"])]
        whole = rows.dropna(subset="value").groupby("seed")["metric"].nunique() == len(metrics)
        yield rows[rows["seed"].isin(whole.index[whole])].assign(model=label)


def lend(folder: Path) -> list[str]:
    """Lend numbers among the claims below a folder, and write those whose record changes; a line for each.

    Raises:
        InputError: a record that is damaged.
    """
    results = [
        borrower for borrower in read_results(folder) if borrower.record["conditions"] and borrower.record["claim"] in claims
    ]
    lines = []
    for borrower in sorted(results, key=lambda borrower: (borrower.folder.parent.name, borrower.folder.name)):
        record, table = with_lent(borrower, results)
        if record == borrower.record:
            continue
        write_table(table, borrower.folder / "table.parquet")
        write_json(record, borrower.folder / "run.json")
        if (borrower.folder / "figure.png").is_file():
            write_claim_figure(borrower.folder)
        change = (
            "" if record["verdict"] == borrower.record["verdict"] else f", {borrower.record['verdict']} → {record['verdict']}"
        )
        lent = cast(Mapping[str, Any], record).get("lent", {})
        seeds = "; ".join(f"{label} of {len(of)} more seeds" for label, of in lent.items()) or "nothing is lent any more"
        lines.append(f"{borrower.folder.parent.name}/{borrower.folder.name}: {seeds}{change}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Lend among the claims below a folder, and print a line for each that changes."""
    parser = argparse.ArgumentParser(
        prog="python -m sinklab.studies.reproduce.premises", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", type=Path, help="folder with SCALE/CLAIM/run.json below it")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(lend(options.results)) or "nothing to lend")
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
