"""How GPU benchmarks measure: CUDA events, candidates in turn, the median of many; what is found is told line by line.

A part is a function in a process of its own. It prepares (imports, compiles, fills caches) while other parts prepare too, then
waits in :meth:`Bench.turn` until it alone may use the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from _timing import MIB, Bar

__all__ = ["Bench", "Candidate"]

_L2 = 2**28
"""Bytes of inputs through which equal calls rotate: several times the cache of an H100 or H200."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What is timed: ``run`` of the number of the round, between two untimed steps."""

    run: Callable[[int], object]
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None


class Bench:
    """The device, and where results go.

    Args:
        device: ``cuda`` or ``cpu``.
        quick: shrink everything, to see whether it runs.
        alone: nobody else prepares, so no turn is waited for.
    """

    def __init__(self, part: str, device: str, *, quick: bool, alone: bool = False) -> None:
        self.part, self.device, self.quick, self._alone = part, torch.device(device), quick, alone
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

    # --- what is told --------------------------------------------------------------------------------------------------------

    def tell(self, **record: object) -> None:
        """One line of JSON for the runner."""
        print(json.dumps({"part": self.part, **record}), flush=True)

    def bar(
        self,
        number: str,
        what: str,
        measured: float,
        sense: Literal["<=", ">="],
        limit: float,
        unit: str = "×",
        **details: object,
    ) -> None:
        """A promise and what was measured."""
        self.tell(kind="bar", **dataclasses.asdict(Bar(number, what, float(measured), sense, limit, unit)), details=details)

    def figure(self, number: str, what: str, measured: float, unit: str = "×", **details: object) -> None:
        """A number without a promise."""
        self.tell(kind="figure", number=number, what=what, measured=float(measured), unit=unit, details=details)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is told, and the next thing is tried."""
        try:
            yield
        except Exception as error:
            self.tell(kind="error", what=what, error=f"{type(error).__name__}: {error}"[:500], traceback=traceback.format_exc())
            del error
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def turn(self) -> None:
        """Wait until no other part uses the device."""
        if self.cuda:
            torch.cuda.synchronize()
        if not self._alone:
            self.tell(kind="ready")
            sys.stdin.readline()

    # --- how it is measured --------------------------------------------------------------------------------------------------

    def sets(self, nbytes: int) -> int:
        """How many sets of inputs of so many bytes do not fit into the cache together."""
        return 1 if self.quick else max(1, min(8, -(-_L2 // nbytes)))

    def times(
        self, candidates: dict[str, Callable[[int], object] | Candidate], seconds: float = 1.0, *, least: int = 3
    ) -> dict[str, float]:
        """Median time of each candidate in milliseconds, in turn, as many rounds as fit into so many seconds, or the least.

        The device is idle when a candidate begins, so that the time of its launches counts where they are what takes long.
        """
        runs = {name: given if isinstance(given, Candidate) else Candidate(given) for name, given in candidates.items()}
        taken = 0.0
        for number in range(min(2, least)):  # the second one without what happens once
            start = time.perf_counter()
            for run in runs.values():
                self._time(run, number)
            taken = time.perf_counter() - start
        rounds = 1 if self.quick else int(min(50, max(least, seconds / max(taken, 1e-6))))
        found: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            for name, run in runs.items():
                found[name].append(self._time(run, number))
        return {name: statistics.median(values) for name, values in found.items()}

    def _time(self, candidate: Candidate, number: int) -> float:
        if candidate.before is not None:
            candidate.before()
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            result = candidate.run(number)
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            result = candidate.run(number)
            taken = (time.perf_counter() - start) * 1e3
        del result
        if candidate.after is not None:
            candidate.after()
        return taken

    def peak(self, run: Callable[[], object]) -> float:
        """MiB that a call allocates at most beyond what there was; not a number where it cannot be known."""
        if not self.cuda:
            run()
            return float("nan")
        first = run()  # what the first call allocates for good is no cost of the second
        del first
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del result
        return (peak - before) / MIB

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
        """Normal random numbers on the device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, dtype=dtype, generator=generator)
