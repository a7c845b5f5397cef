"""Judging a kept comparison of pathways again: its numbers under the rule and the words of today; nothing is trained.

``python -m sinklab.studies.pathways.again results/tiny/pathways`` does it for the comparison in a folder. Of several folders it
draws both Pareto plots side by side too, as ``pareto_bases.svg`` in the first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.jobs.scale import is_natural
from sinklab.results.table import read_run, read_table, write_json, write_text
from sinklab.studies.pathways.choosing import Choice
from sinklab.studies.pathways.columns import COLUMNS
from sinklab.studies.pathways.figure import write_figure, write_panels
from sinklab.studies.pathways.judging import PROTOCOL, Row, judged
from sinklab.studies.pathways.kept import seeds_of_record
from sinklab.studies.pathways.tables import page
from sinklab.studies.pathways.words import definition, figure_title, in_words
from sinklab.studies.reproduce.again import numbers_of_table

__all__ = ["judge_again"]


def judge_again(folder: Path) -> list[Row]:
    """Write ``run.json``, ``pathways.md`` and the figures of a comparison anew, from its table.

    Raises:
        InputError, ResultError: a file is missing or damaged, or the comparison was made by an earlier protocol, whose numbers
            do not answer what is asked today.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    if record.get("protocol") != PROTOCOL:
        raise InputError(
            f"the comparison in {folder} is of protocol {record.get('protocol', 1)} and today's is {PROTOCOL}, which needs "
            "other trainings; it stays as it was written (make another with sinklab pathways)"
        )
    ends = {
        column.name: {"value": column.metric} | {end: column.metric.bound(end) for end in ("low", "high")}
        for column in COLUMNS
        if column.source == "cost"
    }
    times: dict[str, dict[str, dict[str, float]]] = {}
    costs = table[table["seed"].isna()]
    for label, rows in costs.groupby("model"):
        values = dict(zip(rows["metric"], rows["value"].astype(float), strict=True))
        times[str(label)] = {
            name: {end: values[metric.name] for end, metric in metrics.items()}
            for name, metrics in ends.items()
            if metrics["value"].name in values
        }
    numbers = numbers_of_table(table[table["seed"].notna()], "model", record["seeds"])
    choices = {label: Choice.of_dict(choice) for label, choice in record["rates"].items()}
    scale, base, seeds, rate = record["scale"], record["base"], len(record["seeds"]), record.get("rate")
    cannot, natural = record["cannot_do_the_trigger_task"], is_natural(scale)
    rows = judged(
        list(record["operations"]),
        numbers,
        times,
        choices,
        seeds=seeds_of_record(record),
        cannot=cannot,
        one_rate=rate is not None,
        natural=natural,
    )
    words = in_words(rows, cannot, scale=scale, base=base, seeds=seeds, rate=rate)
    write_text(page(rows, words, rate, natural=natural), folder / "pathways.md")
    for suffix in ("svg", "png"):
        write_figure(rows, _title(record), folder / f"pareto.{suffix}", natural=natural)
    about = {
        "definition": definition(rate, natural=natural),
        **words.to_dict(),
        "rows": [row.to_dict() for row in rows],
    }
    write_json({**record, **about}, folder / "run.json")
    return rows


def _title(record: Mapping[str, Any]) -> str:
    return figure_title(record["scale"], record["base"], len(record["seeds"]), record.get("rate"))


def main(folders: Sequence[Path]) -> None:
    """Judge the comparisons in some folders again, and draw them side by side if they are several.

    Raises:
        InputError: some are of natural text and others are not, whose distortions are not one number.
    """
    natural = {is_natural(read_run(folder)["scale"]) for folder in folders}
    if len(natural) > 1:
        raise InputError(
            f"{', '.join(map(str, folders))}: the distortion of natural text is another number than that of a made-up "
            "language, and the two share no axis; name them apart"
        )
    panels = []
    for folder in folders:
        rows = judge_again(folder)
        print("\n".join(f"{folder}: {row.label}: {row.answer}" for row in rows))
        panels.append((_title(read_run(folder)), rows))
    if len(panels) > 1:
        write_panels(panels, folders[0] / "pareto_bases.svg", natural=natural == {True})


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
