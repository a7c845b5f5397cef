"""Audit a model from Python and read the answer: which positions sink, and which heads do it.

python examples/audit_a_model.py [MODEL] [DIRECTORY]
"""

from __future__ import annotations

import sys
from pathlib import Path

from sinklab import audit


def main(model: str = "embedded:softmax", folder: str = "build/example-audit") -> None:
    result = audit(model, samples=50, out=Path(folder), overwrite=True)
    print(f"{result.summary['model']}: loss {result.summary['loss']:.3f} nats per token")
    for sink in result.summary["sinks"]["sinks"]:
        print(f"{sink['name']}, mostly {sink['text']!r}: {sink['rate']:.1f} % of samples and heads")
    # Numbers that the summary leaves out are in the table; here the rate of every head, as a layer × head grid.
    table = result.table
    chosen = table[(table["metric"] == "gu2024") & (table["key_position"] == 0) & table["layer"].notna()]
    main_condition = chosen[(chosen["corpus"] == result.summary["corpus"]) & (chosen["bos"] == result.summary["bos"])]
    print(main_condition.pivot_table(index="layer", columns="head", values="value"))
    print(f"report: {Path(folder) / 'report.html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
