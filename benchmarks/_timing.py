"""How benchmarks measure: CPU time of interleaved candidates on one thread, peak memory, and one row per bar."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import operator
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.visibility import Causal
from sinklab.registry import operations

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Bar:
    """One promise and what was measured: ``measured sense limit`` must hold."""

    number: str
    what: str
    measured: float
    sense: Literal["<=", ">="]
    limit: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        """Whether the promise holds."""
        return bool({"<=": operator.le, ">=": operator.ge}[self.sense](self.measured, self.limit))


def best_times(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest CPU time of every candidate in seconds, after one warm-up; candidates take turns, so noise meets all alike."""
    torch.set_num_threads(1)
    times = dict.fromkeys(candidates, float("inf"))
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.process_time()
            result = run()
            taken = time.process_time() - start
            del result
            if number:
                times[name] = min(times[name], taken)
    return times


def peak_extra_memory(run: Callable[[], object]) -> float:
    """MiB by which the resident memory of the process rises at its peak; Linux only."""
    run()  # what the first call allocates for good is no cost of the second
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    result = run()
    peak = _status("VmHWM")
    del result
    return max(0.0, (peak - before) / 1024)


def _status(field: str) -> int:
    """A field of the process's status, in KiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def make_call(length: int, dtype: torch.dtype, heads: int = 8, head_dim: int = 64, seed: int = 0) -> AttentionCall:
    """A causal softmax call of normal random tensors, one sample, with the log-sum-exp of the stock kernel."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(1, heads, length, head_dim, generator=generator).to(dtype) for _ in range(3))
    _, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, True)
    positions = torch.arange(length)[None]
    documents = torch.zeros_like(positions)
    return AttentionCall(
        site=Site("benchmark", 0),
        queries=queries,
        keys=keys,
        values=values,
        scaling=head_dim**-0.5,
        visible=Causal(),
        operation=operations.make("softmax"),
        query_positions=positions,
        key_positions=positions,
        query_documents=documents,
        key_documents=documents,
        log_sum_exp=log_sum_exp,
    )


def show(bars: list[Bar]) -> str:
    """The bars as a Markdown table."""
    lines = ["| Bar | What | Measured | Limit | |", "|---|---|---|---|---|"]
    for bar in bars:
        sense = {"<=": "≤", ">=": "≥"}[bar.sense]
        lines.append(
            f"| {bar.number} | {bar.what} | {bar.measured:.3g} {bar.unit} | {sense} {bar.limit:g} {bar.unit} | "
            f"{'met' if bar.met else '**missed**'} |"
        )
    return "\n".join(lines)


def main(measure: Callable[[], list[Bar]]) -> int:
    """Body of a benchmark run as a script: print the table; 1 when a bar is missed."""
    bars = measure()
    print(show(bars))
    return int(not all(bar.met for bar in bars))


def exit_with(measure: Callable[[], list[Bar]]) -> None:
    """``sys.exit`` with the verdict of :func:`main`."""
    sys.exit(main(measure))
