"""The fastest tiles of the kernels for statistics (``_TILINGS`` of ``on_gpu.py``): compiled side by side, timed in turn.

    python benchmarks/cuda/tilings.py [--out tilings.json] [--processes 12]

Prints, for each pass, dtype and head size, the tiles in use and the four fastest at 8,192 and 32,768 tokens, 8 heads, causal.
Two minutes on 16 cores. Nothing is changed: what is to be used is written into ``on_gpu.py`` by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from _bench import Bench  # noqa: E402
from columns import make_call  # noqa: E402

from sinklab.attention.statistics import on_gpu  # noqa: E402
from sinklab.attention.statistics.on_gpu import Tiling  # noqa: E402

Pass = Literal["rows", "columns"]

LENGTHS, HEADS = (8192, 32768), 8
HALF = [
    *(Tiling(*sizes) for sizes in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))),
    *(Tiling(*sizes) for sizes in ((32, 128, 4, 3), (128, 32, 4, 3), (64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4))),
]
SINGLE = [
    Tiling(*sizes)
    for sizes in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2))
    if sizes[0] * sizes[1] <= 8192  # larger ones spill their registers
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that share their tiles."""

    of: Pass
    head_dim: int
    dtype: torch.dtype

    @property
    def tilings(self) -> Sequence[Tiling]:
        """What is tried."""
        return SINGLE if self.dtype == torch.float32 else HALF


CASES = [
    *(Case(of, size, torch.bfloat16) for of in ("rows", "columns") for size in (64, 128)),
    *(Case(of, 64, torch.float32) for of in ("rows", "columns")),
]


def run_of(bench: Bench, case: Case, length: int, tiling: Tiling | None) -> Callable[[int], object]:
    """The pass alone, with tiles, or with those in use."""
    call = make_call(bench, length, HEADS, case.head_dim, case.dtype, 0)
    band, ones = call.visible.band(), torch.ones(1, HEADS, length, device=bench.device)
    assert band is not None

    def run(number: int) -> object:
        native = on_gpu._tiling
        if tiling is not None:
            on_gpu._tiling = lambda call, of: tiling
        try:
            return (
                on_gpu._rows(call, band, False)
                if case.of == "rows"
                else on_gpu._columns(call, band, 9.0 * ones, ones, 1, False)
            )
        finally:
            on_gpu._tiling = native

    return run


def compile_some(bench: Bench, part: int, parts: int) -> None:
    """Every so many-th kernel, into the cache that all processes share."""
    jobs = [(case, tiling) for case in CASES for tiling in case.tilings]
    for case, tiling in jobs[part::parts]:
        with bench.attempt(f"{case}, {tiling}"):
            run_of(bench, case, 1024, tiling)(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for all times")
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    bench = Bench("tilings", "cuda", quick=False, alone=True)
    if given.part is not None:
        compile_some(bench, given.part, given.processes)
        return
    command = [sys.executable, __file__, "--processes", str(given.processes), "--part"]
    for process in [subprocess.Popen([*command, str(part)]) for part in range(given.processes)]:
        process.wait()
    found = []
    for case, length in itertools.product(CASES, LENGTHS):
        label = f"{case.of}, {str(case.dtype).removeprefix('torch.')}, heads of {case.head_dim}, {length:,} tokens"
        in_use = bench.times({"": run_of(bench, case, length, None)}, 0.05)[""]
        times = {}
        for tiling in case.tilings:
            with bench.attempt(f"{label}, {tiling}"):  # some need more shared memory than there is
                times[tiling] = bench.times({"": run_of(bench, case, length, tiling)}, 0.05)[""]
        fastest = sorted(times, key=lambda tiling: times[tiling])[:4]
        shown = ", ".join(f"{dataclasses.astuple(tiling)} {times[tiling]:.3f}" for tiling in fastest)
        print(f"{label}: in use {in_use:.3f} ms; {shown}", flush=True)
        case_of = {"of": case.of, "dtype": str(case.dtype), "head_dim": case.head_dim, "length": length}
        found += [{**case_of, "tiling": dataclasses.astuple(tiling), "ms": time} for tiling, time in times.items()]
    if given.out is not None:
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "times": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
