"""What eight and four bits cost a model because of its sink: the loss under every scheme, and what cures the first one.

python examples/quantisation_table.py [MODEL] [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from sinklab import quantize


def main(model: str = "embedded:softmax", folder: str | None = None) -> None:
    out = None if folder is None else Path(folder)
    result = quantize(model, schemes=["w8a8", "w8a16", "w4a16"], samples=16, calibration=8, out=out, overwrite=out is not None)
    print(f"{result.summary['text']}  Without quantisation: {result.summary['clean_loss']['mean']:.3f} nats a token")
    result.show()


if __name__ == "__main__":
    main(*sys.argv[1:])
