"""Joining a comparison of pathways to a kept one, of other operations, other seeds, or both.

``python -m sinklab.studies.pathways.joined results/small/pathways sinklab-pathways-more`` adds what the second comparison has
to the first and judges all of it again. It is for operations that are trained on another machine: processors round
differently, so that softmax with the same seed is another model there, and what is compared must be of one machine. Both
comparisons have softmax, and no seed of one is in the other: within a seed everything was trained side by side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinklab.errors import InputError, SinklabError
from sinklab.results.naming import counted
from sinklab.results.run import new_run_id
from sinklab.results.table import append, read_run, write_json, write_table
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.kept import StoredComparison, parser_of, whole

__all__ = ["join"]

SHARED = {
    "scale": "the scale",
    "base": "the base",
    "rate": "the learning rate",
    "config": "the training",
    "trigger_setting": "the setting of the trigger task",
}
"""What two comparisons must have alike to be one, and how a message calls it."""


def join(folder: Path, other: Path) -> list[str]:
    """Add to a kept comparison what another one has, and judge it again over all.

    Times of operations that both have stay those of the first, which are ratios of one machine.

    Args:
        folder: with ``run.json`` and ``table.parquet``; they are written again, with the figures and ``pathways.md``.
        other: the same of the other comparison, which stays as it is.

    Returns:
        Labels of the operations that are new.

    Raises:
        InputError: a comparison by another protocol or one that lacks columns; two that differ in scale, base, rate, training
            or the settings of an operation, that share a seed, or that chose different learning rates for an operation.
        ResultError: a file is missing or damaged.
    """
    stored, more = whole(folder), whole(other)
    _require_joinable(stored, more)
    there = stored.record["operations"]
    new = [label for label in more.record["operations"] if label not in there]
    known_times = more.table["seed"].isna() & more.table["model"].isin(list(there))
    write_table(append([stored.table, more.table[~known_times]]), folder / "table.parquet")
    write_json(_record(stored, more, new), folder / "run.json")
    judge_again(folder)
    return new


def _require_joinable(stored: StoredComparison, more: StoredComparison) -> None:
    where = f"{stored.folder} and {more.folder}"
    for key, called in SHARED.items():
        if stored.record.get(key) != more.record.get(key):
            raise InputError(f"{where} differ in {called}, so that they are no one comparison")
    if shared := sorted(set(stored.design.seeds) & set(more.design.seeds)):
        raise InputError(
            f"{where} share {counted(len(shared), 'seed')} ({', '.join(map(str, shared))}), with which softmax was trained "
            "twice; make the second on other seeds"
        )
    both = set(stored.record["operations"]) & set(more.record["operations"])
    for label in sorted(both):
        if stored.record["operations"][label] != more.record["operations"][label]:
            raise InputError(f"{where} have {label} with different settings")
        if stored.factors.get(label) != more.factors.get(label):
            raise InputError(f"{where} chose different learning rates for {label}, which would be two operations in one row")
    texts = [record["held_out_sha256"] for record in (stored.record, more.record) if record.get("held_out_sha256")]
    if len(set(texts)) > 1:  # comparisons from before 2026-11-28 do not tell
        raise InputError(f"{where} are of different texts, held-out sha256 {texts[0][:12]} and {texts[1][:12]}")


def _record(stored: StoredComparison, more: StoredComparison, new: list[str]) -> dict[str, Any]:
    """The record of both: operations, seeds, learning rates and trainings, and what the second was made with."""
    record, other = stored.record, more.record
    cells = {
        source: {
            label: {**record["cells"].get(source, {}).get(label, {}), **other["cells"].get(source, {}).get(label, {})}
            for label in [*record["operations"], *new]
            if label in record["cells"].get(source, {}) or label in other["cells"].get(source, {})
        }
        for source in record["cells"]
    }
    made = {
        "operations": new,
        "seeds": other["seeds"],
        "run_id": other["run_id"],
        "environment": other["environment"],
        "created": other["created"],
    }
    return {
        **record,
        "run_id": new_run_id(),
        "seeds": [*record["seeds"], *other["seeds"]],
        "operations": {**record["operations"], **{label: other["operations"][label] for label in new}},
        "rates": {**{label: choice for label, choice in other["rates"].items() if label in new}, **record["rates"]},
        "cells": cells,
        "cannot_do_the_trigger_task": {**other["cannot_do_the_trigger_task"], **record["cannot_do_the_trigger_task"]},
        "errors": [*record["errors"], *other["errors"]],
        "added": [*record.get("added", []), *other.get("added", []), made],
    }


def main(arguments: list[str] | None = None) -> None:
    """Join a comparison to another, and say what is new and how many seeds there are."""
    parser = parser_of("joined", __doc__, trains=False)
    parser.add_argument("other", type=Path, help="of the comparison that is added to it, which stays as it is")
    options = parser.parse_args(arguments)
    try:
        new = join(options.folder, options.other)
    except SinklabError as error:
        parser.exit(2, f"error: {error}\n")
    record = read_run(options.folder)
    print(
        f"joined: {', '.join(new) or 'no new operation'}; {len(record['operations'])} operations and "
        f"{counted(len(record['seeds']), 'seed')} in all"
    )


if __name__ == "__main__":
    main()
