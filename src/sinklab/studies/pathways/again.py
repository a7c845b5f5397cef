"""Judging a kept comparison of pathways again: its numbers under the rule and the words of today; nothing is trained.

``python -m sinklab.studies.pathways.again results/tiny/pathways`` does it for the comparison in a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sinklab.results.table import read_run, read_table, write_json, write_text
from sinklab.studies.pathways.columns import COLUMNS
from sinklab.studies.pathways.figure import write_figure
from sinklab.studies.pathways.judging import Row, judged
from sinklab.studies.pathways.words import DEFINITION, figure_title, markdown, paragraph
from sinklab.studies.reproduce.again import numbers_of_table

__all__ = ["judge_again"]


def judge_again(folder: Path) -> list[Row]:
    """Write ``run.json``, ``pathways.md`` and the figures of a comparison anew, from its table.

    Raises:
        InputError, ResultError: a file is missing or damaged.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    ends = {
        column.name: {"value": column.metric} | {end: column.metric.bound(end) for end in ("low", "high")} for column in COLUMNS
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
    rows = judged(list(record["operations"]), numbers_of_table(table[table["seed"].notna()], "model"), times)
    scale, seeds = record["scale"], len(record["seeds"])
    words = paragraph(rows, record["cannot_do_the_trigger_task"], scale=scale, seeds=seeds)
    write_text(f"{DEFINITION}\n\n{markdown(rows)}\n{words}\n", folder / "pathways.md")
    for suffix in ("svg", "png"):
        write_figure(rows, figure_title(scale, seeds), folder / f"pareto.{suffix}")
    about = {"definition": DEFINITION, "paragraph": words, "rows": [row.to_dict() for row in rows]}
    write_json({**record, **about}, folder / "run.json")
    return rows


if __name__ == "__main__":
    for row in judge_again(Path(sys.argv[1])):
        print(f"{row.label}: {row.answer}")
