"""Audit: CPU seconds of `sinklab audit` with its section on cache policies, from the start of the process to its end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from _timing import Bar, exit_with

MODELS = ["embedded:softmax"]
LIMIT = 20.0
"""Seconds of one thread, user time; two free cores take no longer than that by the clock."""


def seconds(model: str) -> float:
    """User CPU time of an audit on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "sinklab", "audit", model, "--out", str(Path(folder) / "audit")]
        subprocess.run(line, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure() -> list[Bar]:
    # A checkpoint beside the project, where there is one, is measured too.
    real = os.environ.get("SINKLAB_REAL_MODELS")
    models = {model: model for model in MODELS} | ({"tiny1m": str(Path(real) / "tiny1m")} if real else {})
    return [
        Bar(
            "audit",
            f"CPU time of an audit with cache policies ({name})",
            min(seconds(model) for _ in range(2)),
            "<=",
            LIMIT,
            "s",
        )
        for name, model in models.items()
    ]


if __name__ == "__main__":
    exit_with(measure)
