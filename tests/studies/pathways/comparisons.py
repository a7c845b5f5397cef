"""Kept comparisons of pathways as one machine would have made them."""

from __future__ import annotations

import shutil
from pathlib import Path

from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.kept import seeds_of_record

from sinklab.results.table import read_run, read_table, write_json, write_table

__all__ = ["of_first_machine", "part"]

RESULTS = Path(__file__).parents[3] / "results"


def of_first_machine(name, folder):
    """The comparison of a scale and base, without what was joined to it: operations and seeds of another machine."""
    seeds = seeds_of_record(read_run(RESULTS / name / "pathways"))
    first = next(own for label, own in seeds.items() if label != "softmax")
    return part(RESULTS / name / "pathways", folder, [label for label, own in seeds.items() if set(first) <= set(own)], first)


def part(whole, folder, labels, seeds):
    """Of a kept comparison the operations and seeds that one machine would have made."""
    shutil.copytree(whole, folder)
    record, table = read_run(folder), read_table(folder / "table.parquet")
    kept = {key: {label: of for label, of in record[key].items() if label in labels} for key in ("operations", "rates")}
    cells = {
        source: {
            label: {seed: name for seed, name in of.items() if source == "rates" or int(seed) in seeds}
            for label, of in by_label.items()
            if label in labels
        }
        for source, by_label in record["cells"].items()
    }
    cannot = {label: why for label, why in record["cannot_do_the_trigger_task"].items() if label in labels}
    changed = {**kept, "seeds": list(seeds), "cells": cells, "cannot_do_the_trigger_task": cannot}
    write_json({**record, **changed}, folder / "run.json")
    there = table["model"].isin(labels) & (table["seed"].isna() | table["seed"].isin(seeds))
    write_table(table[there].reset_index(drop=True), folder / "table.parquet")
    judge_again(folder)
    return folder
