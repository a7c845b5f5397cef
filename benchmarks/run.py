"""Run every benchmark, print the table, and fail when a bar is missed.

python benchmarks/run.py [--write docs/benchmarks.md] [NAME …]
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _timing import Bar, show

BENCHMARKS = (
    "column_statistics",
    "exactness",
    "long_context",
    "end_to_end",
    "short_texts",
    "audit_time",
    "flash_null",
    "row_blocks",
    "linear",
    "training_throughput",
    "instrumentation",
    "certificate",
    "causes",
    "trigger_steps",
    "growth",
    "streaming_layer",
    "streaming_step",
    "streaming_peers",
    "streaming_prefill",
    "streaming_floor",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones; all by default: {', '.join(BENCHMARKS)}")
    parser.add_argument("--write", type=Path, help="Markdown file to write the table to")
    arguments = parser.parse_args()
    bars: list[Bar] = []
    for name in arguments.names or BENCHMARKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        bars += alone(name)
    table = show(bars)
    print(table)
    if arguments.write:
        arguments.write.write_text(document(table), encoding="utf-8")
    return int(not all(bar.met for bar in bars))


def alone(name: str) -> list[Bar]:
    """The bars of one benchmark, in a process of its own: memory kept from others would favour the wasteful."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(bars_of, name).result()


def bars_of(name: str) -> list[Bar]:
    """The bars of one benchmark, here."""
    torch.set_num_threads(1)
    bars: list[Bar] = importlib.import_module(name).measure()
    return bars


def document(table: str) -> str:
    """The page around the table."""
    return f"""# Benchmarks

Written by `python benchmarks/run.py --write docs/benchmarks.md`. Each ratio compares CPU times of the same run: one thread,
candidates alternating, the shortest time of each, one process per benchmark. Other load on the machine changes them by about
ten percent. "Forward" is
`torch.nn.functional.scaled_dot_product_attention` with a causal mask; batch 1, 8 heads of size 64 unless it says otherwise.

Machine: {processor()}, one thread; torch {torch.__version__}, {platform.system()}.

{table}
"""


def processor() -> str:
    """A generic name of the processor: maker and the vector instructions that matter here."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"vendor_id\s*: (\S+)", info)
    maker = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(found[1] if found else "", platform.machine())
    flags = [
        name for flag, name in (("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 BF16"), ("amx_bf16", "AMX")) if flag in info
    ]
    return f"{maker} server CPU ({', '.join(flags) or 'no AVX-512'})"


if __name__ == "__main__":
    sys.exit(main())
